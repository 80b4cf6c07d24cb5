"""Kronecker factors of weights that are joined with their bias."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, einsum, nn
from torch.testing import assert_close

from backpack import backpack, clear, extend, linalg, optim
from backpack.core import fast
from backpack.core.derivatives import BaseDerivatives, LinearDerivatives
from backpack.core.engine.backpropagation import slice_bytes
from backpack.core.record.registry import REGISTRY
from backpack.extensions import EKFAC, KFAC, KFLR
from backpack.laplace import Laplace
from backpack.linalg import GGN, EmpiricalFisher, KroneckerGGN
from backpack.utils.kroneckers import kfacs_to_mat

APPROXIMATIONS = [None, "expand", "reduce"]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Compute in double precision."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


NETWORKS: dict[str, Any] = {
    "linear": lambda: ([nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)], (4,)),
    "positions": lambda: ([nn.Linear(4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(10, 3)], (5, 4)),
    "conv": lambda: (
        [nn.Conv2d(2, 4, (3, 2), groups=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(16, 3)],
        (2, 4, 3),
    ),
    "strided": lambda: (
        [nn.Conv1d(2, 3, 2, stride=2, padding=1), nn.Flatten(), nn.Linear(9, 3, bias=False)],
        (2, 5),
    ),
}


def problem(name: str, samples: int = 3) -> tuple[nn.Sequential, Tensor, Tensor]:
    layers, shape = NETWORKS[name]()
    return nn.Sequential(*layers), torch.randn(samples, *shape), torch.randint(3, (samples,))


def run(model: nn.Module, X: Tensor, y: Tensor, *exts: Any) -> None:
    torch.manual_seed(1)
    with backpack(*exts):
        extend(nn.CrossEntropyLoss())(extend(model)(X), y).backward()


def inputs_of(model: nn.Sequential, X: Tensor) -> dict[nn.Module, Tensor]:
    found = {}
    for module in model:
        found[module] = X
        X = module(X)
    return found


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_factors_by_definition(name: str, approximation: Any) -> None:
    """B is that of the weight alone, A that of [x; 1], with patches by plain indexing."""
    model, X, y = problem(name)
    run(model, X, y, KFLR(approximation=approximation))
    alone = {p: p.kflr for p in model.parameters()}  # type: ignore[attr-defined]
    run(model, X, y, KFLR(approximation=approximation, joint_bias=True))
    layers = [m for m in model if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))]
    for module in layers:
        weight: Any = module.weight
        if module.bias is None:
            assert_close(weight.kflr, alone[weight])
            continue
        u = oracle.unfold_input(module, inputs_of(model, X)[module]).detach()  # [N, G, a, T]
        u = torch.cat([u, torch.ones_like(u[:, :, :1])], 2)
        num_n, groups, _, num_t = u.shape
        if approximation == "reduce":
            A = einsum("ngat,ngbu->ab", u, u) / (num_n * groups * num_t**2)
        else:
            A = einsum("ngat,ngbt->ab", u, u) / (num_n * groups)
            A = A / num_t if approximation == "expand" else A
        B, joint = weight.kflr
        assert_close(B, alone[weight][0])
        assert_close(joint, A)
        assert module.bias.kflr == []


def test_input_first() -> None:
    """A linear layer that stores ``[I, O]``: the bias is one more row."""
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model, (X, y) = nn.Sequential(Conv1D(3, 4)), (torch.randn(1, 4), torch.tensor([2]))
    nn.init.normal_(model[0].bias)
    found = KroneckerGGN(model, nn.CrossEntropyLoss(), [(X, y)], joint_bias=True)
    assert [len(factor) for factor in found.factors[0]] == [5, 3]
    assert_close(found.to_dense(), GGN(model, nn.CrossEntropyLoss(), [(X, y)]).to_dense())


def test_one_sample_is_exact() -> None:
    """Weight and bias of one sample at one position: the joint block of the GGN."""
    model, X, y = problem("linear", samples=1)
    loss = nn.CrossEntropyLoss()
    found = KroneckerGGN(model, loss, [(X, y)], joint_bias=True)
    G = GGN(model, loss, [(X, y)]).to_dense()
    layer = torch.tensor([0] * 15 + [1] * 12)
    assert_close(found.to_dense(), G * (layer[:, None] == layer))
    assert [len(factor) for factor in found.factors[0]] == [3, 5]
    v = torch.randn(27)
    assert_close(found.damped(0.1) @ (found.inverse(0.1) @ v), v)


@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical", "inputs"])
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_operator(name: str, approximation: Any, fisher: Any) -> None:
    """Of several batches as of one, with rows in the order of the parameters."""
    model, X, y = problem(name, samples=6)
    loss = nn.CrossEntropyLoss()
    options: Any = {"approximation": approximation, "fisher": fisher, "joint_bias": True}
    torch.manual_seed(1)
    whole = KroneckerGGN(model, loss, [(X, y)], **options)
    run(model, X, y, KFAC(approximation=approximation, fisher=fisher, joint_bias=True))
    dense = torch.zeros(whole.shape)
    params: list[Any] = list(model.parameters())
    starts = dict(
        zip(params, [0, *torch.tensor([p.numel() for p in params]).cumsum(0)], strict=False)
    )
    for module in model:
        if not hasattr(module, "weight"):
            continue
        w: Any = module.weight
        rows = torch.arange(w.numel()).reshape(len(w), -1) + int(starts[w])
        if module.bias is not None:
            own = torch.arange(len(w)) + int(starts[module.bias])
            rows = torch.cat([rows, own.unsqueeze(1)], 1)
        dense[rows.flatten()[:, None], rows.flatten()] = kfacs_to_mat(w.kfac)
    assert_close(whole.to_dense(), dense)
    if fisher != "sampled":
        parts = list(zip(X.split([2, 1, 3]), y.split([2, 1, 3]), strict=True))
        assert_close(KroneckerGGN(model, loss, parts, **options).to_dense(), dense)


def test_ignored_positions_have_no_one() -> None:
    """The factor of [x; 1] is the average over positions whose target counts."""
    model = nn.Sequential(nn.Linear(4, 3))
    X, y = torch.randn(2, 5, 4), torch.randint(3, (2, 5))
    y[0, 1] = y[1, 3] = -100

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).transpose(1, 2)

    words = extend(Words(), use_converter=True)
    with backpack(KFLR(approximation="expand", joint_bias=True)):
        extend(nn.CrossEntropyLoss())(words(X), y).backward()
    rows = X[y != -100]
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    weight: Any = model[0].weight
    assert_close(weight.kflr[1], rows.T @ rows / len(rows))


def test_frozen_parameters_are_not_joined() -> None:
    model, X, y = problem("linear")
    a, b, c, d = model.parameters()
    b.requires_grad_(False)
    c.requires_grad_(False)
    run(model, X, y, KFLR(joint_bias=True))
    joint: list[Any] = [a.kflr, d.kflr]  # type: ignore[attr-defined]
    run(model, X, y, KFLR())
    assert_close(joint, [a.kflr, d.kflr])  # type: ignore[attr-defined]
    some = [a, d]
    operators = [
        KroneckerGGN(model, nn.CrossEntropyLoss(), [(X, y)], some, joint_bias=joint_bias)
        for joint_bias in (True, False)
    ]
    assert_close(operators[0].to_dense(), operators[1].to_dense())


def test_laplace() -> None:
    model, X, y = problem("linear")

    def joint(*arguments: Any, **options: Any) -> KroneckerGGN:
        return KroneckerGGN(*arguments, joint_bias=True, **options)

    laplace = Laplace(model, nn.CrossEntropyLoss(), [(X, y)], joint, {"0": 1.0, "2": 2.0})
    delta = torch.tensor([1.0] * 15 + [2.0] * 12)
    H = 3 * joint(model, nn.CrossEntropyLoss(), [(X, y)]).to_dense()
    assert_close(laplace.posterior.to_dense(), torch.linalg.inv(H + delta.diag()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(1))[0][:, -1]


@pytest.mark.parametrize("model", [Tied, Last])
def test_refused_layers(model: Any) -> None:
    named = "'weight' of 'layer' .*number of uses: 2" if model is Tied else "weight_.*LSTM.*bias_"
    with pytest.raises(NotImplementedError, match=rf"joint_bias=True: .*{named}"):
        KroneckerGGN(
            model(),
            nn.CrossEntropyLoss(),
            [(torch.randn(2, 3), torch.tensor([0, 1]))],
            joint_bias=True,
        )


class Shared(nn.Module):
    """Layers with a weight or a bias in common, of which ``active`` take part."""

    def __init__(self, shared: str, active: str = "abc") -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.norm = nn.LayerNorm(3)
        self.active = active
        if "weight" in shared:
            self.c.weight = self.b.weight
        if "bias" in shared:
            self.c.bias = self.a.bias
        if "norm" in shared:
            self.norm.bias = self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        for name in self.active:
            x = torch.tanh(getattr(self, name)(x))
        return self.norm(x) if self.active == "abc" else x


@pytest.mark.parametrize("ext", [KFAC, EKFAC])
@pytest.mark.parametrize("shared", ["weight", "bias", "norm"])
def test_weights_and_biases_of_several_layers_are_refused(shared: str, ext: Any) -> None:
    """The error names what is joined, and all that it belongs to."""
    name, layers = ("weight", "bc") if shared == "weight" else ("bias", "ac")
    model = extend(Shared(shared), use_converter=True)
    other = "bias" if name == "weight" else "weight"
    match = rf"'{name}' of '[{layers}]' .Linear.* no Kronecker factors with {other} .*uses: 2: "
    with pytest.raises(NotImplementedError, match=match) as caught:
        run(model, torch.randn(4, 3), torch.randint(3, (4,)), ext(joint_bias=True))
    second = "norm" if shared == "norm" else "c"
    assert f"'{name}' of '{second}'" in str(caught.value)
    assert not any(hasattr(p, ext().savefield) for p in model.parameters())


@pytest.mark.parametrize("ekfac", [False, True])
def test_layers_that_take_no_part_are_not_joined(ekfac: bool) -> None:
    """A layer that has the weight of one and the bias of another is in the model, but not used."""
    found: list[list[Tensor]] = []
    X, y = torch.randn(8, 3), torch.randint(3, (8,))
    for shared in ("", "weight bias"):
        torch.manual_seed(2)
        model = Shared(shared, "ab")
        converted = extend(model, use_converter=True)
        loss = extend(nn.CrossEntropyLoss())
        optimiser = optim.KFAC(
            model.parameters(), extension=KFLR(joint_bias=True), ekfac=ekfac, inverse_every=1
        )
        for _ in range(3):
            optimiser.zero_grad()
            with backpack(*optimiser.extensions):
                loss(converted(X), y).backward()
            optimiser.step()
        layers = (model.a, model.b)
        found.append([p.detach() for layer in layers for p in layer.parameters()])
    assert_close(found[0], found[1], rtol=0, atol=0)


def test_optimiser_refuses_several_possibilities() -> None:
    """Two weights and two biases, and a layer for each of the four pairs."""
    model = Shared("weight bias", "ab")
    other = extend(nn.Linear(3, 3))
    other.weight, other.bias = model.a.weight, model.b.bias
    converted, X, y = extend(model, use_converter=True), torch.randn(8, 3), torch.randint(3, (8,))
    optimiser = optim.KFAC(model.named_parameters(), extension=KFLR(joint_bias=True))
    run(converted, X, y, KFLR(joint_bias=True))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(NotImplementedError, match=r"'[ab].bias' .*several modules \(.*, .*\)"):
        optimiser.step()
    assert_close(before, [p.data for p in model.parameters()])


@pytest.mark.parametrize("shared", ["weight", "bias"])
def test_layers_that_take_turns_are_refused(shared: str) -> None:
    """In passes that accumulate, and in the averages of an optimiser."""
    X, y = torch.randn(8, 3), torch.randint(3, (8,))
    model = Shared(shared)
    converted, loss = extend(model, use_converter="record"), extend(nn.CrossEntropyLoss())

    def passes(*turns: str, accumulate: bool = False) -> None:
        for model.active in turns:
            with backpack(KFLR(joint_bias=True), accumulate=accumulate):
                loss(converted(X), y).backward()

    turns = ("b", "c") if shared == "weight" else ("a", "c")
    with pytest.raises(NotImplementedError, match=r"joint_bias=True: a parameter .* is shared by"):
        passes(*turns, accumulate=True)
    clear(model)
    model.zero_grad()
    passes(turns[0], turns[0], accumulate=True)  # this is one and the same pair
    optimiser = optim.KFAC(model.named_parameters(), extension=KFLR(joint_bias=True))
    optimiser.step()
    model.zero_grad()
    passes(turns[1])
    if shared == "bias":  # each weight has the factors that belong to it
        optimiser.step()
    else:
        with pytest.raises(NotImplementedError, match=r"'b.weight' is joined .* 'c.bias' now"):
            optimiser.step()


def test_transposed_convolutions_are_refused() -> None:
    model = nn.Sequential(nn.ConvTranspose1d(2, 1, 2), nn.Flatten())
    with pytest.raises(NotImplementedError, match=r"'weight' of '0' .ConvTranspose1d"):
        run(model, torch.randn(2, 2, 2), torch.tensor([0, 1]), KFAC(joint_bias=True))


def test_layers_without_factors_of_inputs_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    X, y = torch.randn(5, 4), torch.randint(3, (5,))
    run(model, X, y, KFLR(joint_bias=True))
    norm: Any = model[1]
    found = [norm.weight.kflr, norm.bias.kflr]
    run(model, X, y, KFLR())
    assert_close(found, [norm.weight.kflr, norm.bias.kflr])


def rows_of_blocks(model: nn.Module) -> list[Tensor]:
    """The entries that each block has, in its order: of weights, with the bias as a column."""
    params: list[Any] = list(model.parameters())
    sizes = [p.numel() for p in params]
    entries = {
        id(p): own.reshape(p.shape)
        for p, own in zip(params, torch.arange(sum(sizes)).split(sizes), strict=True)
    }
    found = []
    for module in model:  # type: ignore[attr-defined]
        if not hasattr(module, "weight"):
            continue
        own = entries[id(module.weight)].flatten(1)
        if module.bias is not None:
            axis = int(isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)))
            own = torch.cat([own, entries[id(module.bias)].unsqueeze(axis)], axis)
        found.append(own.flatten())
    return found


BLOCKS = {"exact": GGN, "empirical": EmpiricalFisher}


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("limit", [1, 2**24])
@pytest.mark.parametrize("fisher", BLOCKS)
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_ekfac(name: str, approximation: Any, fisher: Any, limit: int, is_fast: bool) -> None:
    """Eigenvectors of the joint factors, with the diagonal of the joint block in their basis."""
    model, X, y = problem(name)
    G = BLOCKS[fisher](model, nn.CrossEntropyLoss(), [(X, y)]).to_dense()
    options: Any = {"approximation": approximation, "fisher": fisher, "joint_bias": True}
    with nullcontext() if is_fast else fast.disabled(), slice_bytes(limit):
        run(model, X, y, EKFAC(**options), KFAC(**options))
    weights: list[Any] = [p for p in model.parameters() if p.dim() > 1]
    for weight, rows in zip(weights, rows_of_blocks(model), strict=True):
        found, factors = weight.ekfac, weight.kfac
        for Q, factor in zip(found.bases, factors, strict=True):
            assert_close(Q.T @ Q, torch.eye(len(Q)))
            assert_close(Q @ (Q.T @ factor @ Q).diagonal().diag() @ Q.T, factor)
        Q = kfacs_to_mat(found.bases)
        block = G[rows[:, None], rows]
        assert_close(found.eigenvalues.flatten(), (Q.T @ block @ Q).diagonal())
        assert_close(found.dense(), Q @ found.eigenvalues.flatten().diag() @ Q.T)
    for module in model:
        if getattr(module, "bias", None) is not None:
            assert module.bias.ekfac == []


@pytest.mark.parametrize("fisher", BLOCKS)
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_ekfac_of_a_data_set(name: str, approximation: Any, fisher: Any) -> None:
    """Of several batches as of one, with rows in the order of the parameters."""
    model, X, y = problem(name, samples=6)
    loss = nn.CrossEntropyLoss()
    options: Any = {"approximation": approximation, "fisher": fisher, "joint_bias": True}
    parts = list(zip(X.split([2, 1, 3]), y.split([2, 1, 3]), strict=True))
    operator = linalg.EKFAC(model, loss, parts, **options)
    run(model, X, y, EKFAC(**options))
    params: list[Any] = list(model.parameters())
    found, blocks = torch.zeros(operator.shape), [p.ekfac for p in params if p.ekfac]
    for rows, block in zip(rows_of_blocks(model), blocks, strict=True):
        found[rows[:, None], rows] = block.dense()
    # eigenvectors of equal eigenvalues are not unique: compare what does not depend on them
    dense = BLOCKS[fisher](model, loss, parts).to_dense()
    assert_close(operator.trace(), dense.trace())
    assert_close(found.trace(), dense.trace())
    for rows, block in zip(rows_of_blocks(model), operator.blocks, strict=True):
        Q = kfacs_to_mat(block.bases)
        assert_close(block.eigenvalues.flatten(), (Q.T @ dense[rows[:, None], rows] @ Q).diagonal())
        assert_close(operator.to_dense()[rows[:, None], rows], block.dense())
    inverse = torch.linalg.inv(operator.damped(0.1).to_dense())
    assert_close(operator.inverse(0.1).to_dense(), inverse)


def test_ekfac_input_first() -> None:
    """With one sample, the joint block is exact, in the order of ``[I + 1, O]``."""
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model, data = nn.Sequential(Conv1D(3, 4)), [(torch.randn(1, 4), torch.tensor([2]))]
    loss = nn.CrossEntropyLoss()
    found = linalg.EKFAC(model, loss, data, joint_bias=True)
    assert found.blocks[0].shape == (5, 3)
    assert_close(found.to_dense(), GGN(model, loss, data).to_dense())


@pytest.mark.parametrize("ekfac", [False, True])
@pytest.mark.parametrize("name", [*NETWORKS, "input first"])
def test_optimiser_solves_for_weight_and_bias(name: str, ekfac: bool) -> None:
    """Two steps, of which the second has the averages of both, against dense matrices."""
    if name == "input first":
        Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
        model, X, y = nn.Sequential(Conv1D(3, 4)), torch.randn(5, 4), torch.randint(3, (5,))
    else:
        model, X, y = problem(name, samples=40)  # enough for eigenvectors to be unique
    loss, beta = nn.CrossEntropyLoss(), 0.7
    options: Any = {"lr": 0.1, "damping": 0.2, "weight_decay": 0.05, "betas": (0.0, beta)}
    optimiser = optim.KFAC(
        model.parameters(),
        **options,
        factored=False,
        kl_clip=None,
        inverse_every=1,
        extension=KFLR(joint_bias=True),
        ekfac=ekfac,
    )
    averages: list[Any] = []
    rows = rows_of_blocks(model)
    weight = (1 - beta) / (1 - beta**2)
    for step in range(2):
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        G = GGN(model, loss, [(X, y)]).to_dense()
        factors = KroneckerGGN(model, loss, [(X, y)], joint_bias=True).factors
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss(model(X), y), [*model.parameters()])]
        )
        gradient = gradient + 0.05 * before
        expected = before.clone()
        for i, own in enumerate(rows):
            if not step:
                averages.append([factors[i], None])
            else:
                old = averages[i][0]
                averages[i][0] = [a.lerp(b, weight) for a, b in zip(old, factors[i], strict=True)]
            block = kfacs_to_mat(averages[i][0])
            if ekfac:  # squares are taken along the eigenvectors that are known, and turned then
                Q = kfacs_to_mat([torch.linalg.eigh(f)[1] for f in averages[i][0]])
                old_Q, squares = averages[i][1] or (Q, None)
                now = (old_Q.T @ G[own[:, None], own] @ old_Q).diagonal()
                squares = now if squares is None else squares.lerp(now, weight)
                squares = (Q.T @ old_Q).square() @ squares
                averages[i][1] = Q, squares
                block = Q @ squares.diag() @ Q.T
            damped = block + 0.25 * torch.eye(len(own))
            expected[own] -= 0.1 * torch.linalg.solve(damped, gradient[own])
        optimiser.zero_grad()
        with backpack(*optimiser.extensions):
            extend(loss)(extend(model)(X), y).backward()
        optimiser.step()
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert_close(found, expected)


def test_optimiser_needs_both_in_one_group() -> None:
    model, X, y = problem("linear")
    a, b, c, d = model.parameters()
    for groups in ([{"params": [a, c]}, {"params": [b, d]}], [{"params": [b, c, d]}]):
        optimiser = optim.KFAC(groups, extension=KFLR(joint_bias=True))
        run(model, X, y, KFLR(joint_bias=True))
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(ValueError, match=r"joined with a weight.*in one group"):
            optimiser.step()
        assert_close(before, [p.data for p in model.parameters()])


def test_mistakes() -> None:
    model, X, y = problem("linear")
    loss, data = nn.CrossEntropyLoss(), [(X, y)]
    with pytest.raises(ValueError, match=r"KFRA.*joint_bias"):
        KroneckerGGN(model, loss, data, method="KFRA", joint_bias=True)


def test_rules_with_other_mathematics_do_not_inherit() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Rule(LinearDerivatives):
        def vjp(self, c: Any, v: Tensor) -> Tensor:
            return 2 * super().vjp(c, v)

        def param_vjp(self, c: Any, name: str, v: Tensor) -> Tensor:
            return 2 * super().param_vjp(c, name, v)

    class Own(BaseDerivatives):
        def kron_joint_input(self, *arguments: Any) -> Tensor:
            return torch.ones(1, 1)

    assert LinearDerivatives().joins_bias and not Rule().joins_bias
    assert Own().joins_bias  # a factor of its own is one to be used
    assert Scaled not in REGISTRY


@pytest.mark.parametrize("fisher", ["exact", "inputs"])
@pytest.mark.parametrize("approximation", [None, "expand", "reduce"])
def test_joined_factors_accumulate(approximation: Any, fisher: Any) -> None:
    """Two passes have the factors of one with all samples; other options are an error."""
    model = extend(nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(6, 2)))
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))
    X, y = torch.randn(6, 2, 4), torch.randint(2, (6,))
    ext = partial(KFAC, fisher=fisher, approximation=approximation)
    with backpack(ext(joint_bias=True)):
        loss(model(X), y).backward()
    whole = [p.kfac for p in model.parameters()]  # type: ignore[attr-defined]
    clear(model)
    for some in (slice(2), slice(2, None)):
        with backpack(ext(joint_bias=True), accumulate=True):
            loss(model(X[some]), y[some]).backward()
    parts = [p.kfac for p in model.parameters()]  # type: ignore[attr-defined]
    assert_close(parts, whole)
    with pytest.raises(ValueError, match="other options"), backpack(ext(), accumulate=True):
        loss(model(X), y).backward()
