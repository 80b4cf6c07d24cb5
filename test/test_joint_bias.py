"""Kronecker factors of weights that are joined with their bias."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, einsum, nn
from torch.testing import assert_close

from backpack import backpack, clear, extend, optim
from backpack.core.derivatives import LinearDerivatives
from backpack.core.record.registry import REGISTRY
from backpack.extensions import KFAC, KFLR
from backpack.laplace import Laplace
from backpack.linalg import GGN, KroneckerGGN
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


def test_mistakes() -> None:
    model, X, y = problem("linear")
    loss, data = nn.CrossEntropyLoss(), [(X, y)]
    with pytest.raises(ValueError, match=r"KFRA.*joint_bias"):
        KroneckerGGN(model, loss, data, method="KFRA", joint_bias=True)
    with pytest.raises(ValueError, match=r"joins weights with biases. Use joint_bias=False"):
        optim.KFAC(model.parameters(), extension=KFAC(joint_bias=True))


def test_rules_with_other_mathematics_do_not_inherit() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Rule(LinearDerivatives):
        def vjp(self, c: Any, v: Tensor) -> Tensor:
            return 2 * super().vjp(c, v)

        def param_vjp(self, c: Any, name: str, v: Tensor) -> Tensor:
            return 2 * super().param_vjp(c, name, v)

    assert LinearDerivatives().joins_bias and not Rule().joins_bias
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
