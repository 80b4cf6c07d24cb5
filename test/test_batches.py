"""Several losses, several batches, and reshapes of the batch axis between uses of a parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, clear, extend, extensions

TOLERANCE = {"rtol": 1e-8, "atol": 1e-11}


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs).double()


class ReusedOverReshape(nn.Module):
    """A Linear on [N, T, 3], then on [N·T, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sigmoid = linear(3, 3), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        h = self.sigmoid(self.linear(x))
        return self.linear(h.reshape(-1, 3)).reshape(x.shape)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_uses_with_different_numbers_of_rows() -> None:
    model, X, y = extend(ReusedOverReshape()), double(4, 5, 3), double(4, 5, 3)
    exts = [
        extensions.BatchGrad(),
        extensions.SumGradSquared(),
        extensions.BatchL2Grad(),
        extensions.Variance(),
        extensions.DiagGGNExact(),
        extensions.DiagHessian(),
    ]
    with backpack(*exts):
        extend(nn.MSELoss())(model(X), y).backward()
    truth = (model, nn.MSELoss(), X, y)
    expected = {
        "grad_batch": oracle.batch_grad(*truth),
        "sum_grad_squared": oracle.sum_grad_squared(*truth),
        "batch_l2": oracle.batch_l2(*truth),
        "variance": oracle.variance(*truth),
        "diag_ggn_exact": oracle.ggn_diag(*truth),
        "diag_h": oracle.hessian_diag(*truth),
    }
    for i, p in enumerate(model.parameters()):
        for field, values in expected.items():
            torch.testing.assert_close(getattr(p, field), values[i], **TOLERANCE)


def two_losses(n1: int, n2: int, order: int) -> tuple[nn.Linear, Tensor, list]:
    model, lossfunc = extend(linear(3, 2)), extend(nn.MSELoss(reduction="sum"))
    batches = [(double(n1, 3), double(n1, 2)), (double(n2, 3), double(n2, 2))]
    losses = [lossfunc(model(X), y) for X, y in batches[::order]]
    return model, losses[0] + losses[1], batches


@pytest.mark.parametrize("order", [1, -1])
def test_kronecker_factors_see_all_uses(order: int) -> None:
    model, loss, batches = two_losses(4, 4, order)
    with backpack(extensions.KFLR(), extensions.KFRA(), extensions.DiagGGNExact()):
        loss.backward()
    expected = sum(X.T @ X for X, _ in batches) / 4
    for factors in (model.weight.kflr, model.weight.kfra):
        torch.testing.assert_close(factors[1], expected, **TOLERANCE)
    # the GGN is 2 I ⊗ the sum over both batches
    torch.testing.assert_close(
        model.weight.diag_ggn_exact, 2 * 4 * expected.diagonal().expand(2, 3), **TOLERANCE
    )


@pytest.mark.parametrize(
    "ext", [extensions.BatchGrad(), extensions.BatchDiagGGNExact(), extensions.Variance()], ids=repr
)
@pytest.mark.parametrize("sizes", [(4, 8), (1, 8), (4, 6)])
def test_per_sample_quantities_of_different_batches(sizes: tuple[int, int], ext: object) -> None:
    model, loss, _ = two_losses(*sizes, order=1)
    with backpack(ext), pytest.raises(ValueError, match=r"batches of different sizes"):
        loss.backward()
    assert not hasattr(model.weight, ext.savefield)


def test_positions_that_functions_merge_with_samples() -> None:
    """The error says that a conversion follows them, which is so."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = linear(3, 2)

        def forward(self, x: Tensor, others: Tensor) -> Tensor:
            compared = self.tower(others.reshape(-1, 3)).view(len(x), -1, 2)
            return torch.einsum("nd,nkd->nk", self.tower(x), compared)

    model, lossfunc = Pair(), extend(nn.MSELoss())
    for converter in (False, True):
        model = extend(model, use_converter=converter)
        loss = lossfunc(model(double(4, 3), double(4, 2, 3)), double(4, 2))
        if converter:
            with backpack(extensions.BatchGrad()):
                loss.backward()
            for p in model.parameters():
                torch.testing.assert_close(p.grad_batch.sum(0), p.grad, **TOLERANCE)
        else:
            advice = r"different sizes.*use_converter=True"
            with backpack(extensions.BatchGrad()), pytest.raises(ValueError, match=advice):
                loss.backward()
            model.zero_grad()


@pytest.mark.parametrize("ext", [extensions.BatchGrad, extensions.DiagGGNExact])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (4, 6)])
def test_subsampling_of_different_batches(sizes: tuple[int, int], ext: Any) -> None:
    """Two models: an index would be that of another sample in each."""
    (_, one, _), (_, other, _) = (two_losses(n, n, order=1) for n in sizes)
    with backpack(ext(subsampling=[0])), pytest.raises(ValueError, match=r"subsampling.*different"):
        (one + other).backward()


def test_a_parameter_of_functions_on_different_batches() -> None:
    """The error names what has no samples, and calls of either size."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.shift = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.shift

    model, lossfunc = extend(Shifted(), use_converter="record"), extend(nn.MSELoss())
    losses = [lossfunc(model(torch.rand(n, 3)), torch.rand(n, 2)) for n in (4, 6)]
    culprits = r"'shift' \(ParameterModule\).*different sizes \(4 at .*4, 2.*6 at .*6, 2"
    with backpack(extensions.BatchGrad()), pytest.raises(ValueError, match=culprits):
        sum(losses).backward()


@pytest.mark.parametrize("sizes", [(4, 8), (1, 8), (4, 6)])
def test_sums_over_different_batches(sizes: tuple[int, int]) -> None:
    model, loss, batches = two_losses(*sizes, order=1)
    with backpack(extensions.DiagGGNExact(), extensions.DiagHessian(), extensions.GGNMP()):
        loss.backward()
    expected = 2 * sum(X.square().sum(0) for X, _ in batches)
    for field in ("diag_ggn_exact", "diag_h"):
        torch.testing.assert_close(getattr(model.weight, field), expected.expand(2, 3), **TOLERANCE)
    units = torch.eye(6, dtype=torch.float64).reshape(6, 2, 3)
    diagonal = model.weight.ggnmp(units).flatten(1).diagonal().reshape(2, 3)
    torch.testing.assert_close(diagonal, expected.expand(2, 3), **TOLERANCE)


@pytest.mark.parametrize("sizes", [(4, 8), (4, 6)])
def test_sums_over_different_batches_that_mix(sizes: tuple[int, int]) -> None:
    """Batch normalisation in training mode: each batch is a sample of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(3, 4), nn.BatchNorm1d(4).double(), nn.Tanh(), linear(4, 2))
    batches = [(double(n, 3), double(n, 2)) for n in sizes]
    plain = copy.deepcopy(model)
    extended, lossfunc = extend(model), extend(nn.MSELoss())
    exts = extensions.DiagGGNExact(), extensions.DiagHessian(), extensions.GGNMP()
    with backpack(*exts, extensions.DiagGGNMC(mc_samples=1)):
        sum(lossfunc(extended(X), y) for X, y in batches).backward()
    for field, truth in (
        ("diag_ggn_exact", oracle.joint_ggn_diag),
        ("diag_h", oracle.hessian_diag),
    ):
        each = [truth(plain, nn.MSELoss(), X, y) for X, y in batches]
        for p, *parts in zip(extended.parameters(), *each, strict=True):
            torch.testing.assert_close(getattr(p, field), sum(parts), **TOLERANCE)
    for p in extended.parameters():
        units = torch.eye(p.numel(), dtype=torch.float64).view(-1, *p.shape)
        diagonal = p.ggnmp(units).flatten(1).diagonal().view_as(p)
        torch.testing.assert_close(p.diag_ggn_exact, diagonal, **TOLERANCE)
        assert (p.diag_ggn_mc >= 0).all()


@pytest.mark.parametrize("sizes", [(4, 6), (6, 4), (8, 4)])
@pytest.mark.parametrize("middle", [nn.BatchNorm1d(4), nn.Tanh()], ids=repr)
def test_kronecker_factors_of_different_batches(sizes: tuple[int, int], middle: nn.Module) -> None:
    """They do not depend on the order of the losses; passes that accumulate weigh all samples."""
    model = extend(nn.Sequential(linear(3, 4), copy.deepcopy(middle).double(), linear(4, 2)))
    lossfunc, inputs = extend(nn.MSELoss()), [double(n, 3) for n in sizes]
    total, weight = sum(X.T @ X for X in inputs), model[0].weight

    def loss(*batches: Tensor) -> Any:
        return sum(lossfunc(model(X), double(len(X), 2)) for X in batches)

    with backpack(extensions.KFLR()):
        loss(*inputs).backward()
    torch.testing.assert_close(weight.kflr[1], total / min(sizes), **TOLERANCE)
    clear(model)
    for X in inputs:
        with backpack(extensions.KFLR(), accumulate=True):
            loss(X).backward()
    torch.testing.assert_close(weight.kflr[1], total / sum(sizes), **TOLERANCE)
    for ext in (extensions.KFLR, extensions.EKFAC, partial(extensions.KFAC, fisher="inputs")):
        culprits = "used on batches of different sizes"
        with backpack(ext(approximation="reduce")), pytest.raises(ValueError, match=culprits):
            loss(*inputs).backward()


def test_samples_of_different_batches_that_mix() -> None:
    """Two models: which sample of one batch would be that of the other?"""
    models = [nn.Sequential(linear(3, 4), nn.BatchNorm1d(4).double(), linear(4, 2)) for _ in "12"]
    lossfunc, pairs = extend(nn.MSELoss()), zip(models, (4, 6), strict=True)
    losses = [lossfunc(extend(m)(double(n, 3)), double(n, 2)) for m, n in pairs]
    culprits = r"diag_ggn_exact_batch is used on batches of different sizes \(4 at .*, 6 at "
    with backpack(extensions.BatchDiagGGNExact()), pytest.raises(ValueError, match=culprits):
        sum(losses).backward()


@pytest.mark.parametrize("n", [1, 3])
def test_a_loss_of_tokens_and_a_loss_of_sequences(n: int) -> None:
    shared, head = extend(linear(3, 2)), extend(linear(10, 2))
    tokens, sequences = extend(nn.MSELoss()), extend(nn.MSELoss())
    X, y_tokens, y_sequences = double(n, 5, 3), double(n * 5, 2), double(n, 2)
    h = shared(X)
    with backpack(extensions.DiagGGNExact(), extensions.BatchDiagGGNExact()):
        loss = tokens(h.reshape(-1, 2), y_tokens) + sequences(head(h.flatten(1)), y_sequences)
        loss.backward()

    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = shared(x)
            # residuals whose sum of squares is the sum of the two mean squared errors
            return torch.cat(
                [h.flatten(1) / (n * 10) ** 0.5, head(h.flatten(1)) / (n * 2) ** 0.5], 1
            )

        def parameters(self, recurse: bool = True):  # type: ignore[no-untyped-def]
            return iter([*shared.parameters()])

    y = torch.cat([y_tokens.reshape(n, 10) / (n * 10) ** 0.5, y_sequences / (n * 2) ** 0.5], 1)
    truth = oracle.batch_ggn_diag(Both(), nn.MSELoss(reduction="sum"), X, y)
    for p, value in zip(shared.parameters(), truth, strict=True):
        torch.testing.assert_close(p.diag_ggn_exact_batch, value, **TOLERANCE)
        torch.testing.assert_close(p.diag_ggn_exact, value.sum(0), **TOLERANCE)


class MixesThenReshapes(nn.Module):
    """BatchNorm in training mode, then a view that merges batch and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = linear(3, 10), nn.BatchNorm1d(10).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@pytest.mark.parametrize("subsampling", [None, [0], [2, 1]])
def test_networks_that_mix_samples_and_reshape(subsampling: list[int] | None) -> None:
    model, X, y = extend(MixesThenReshapes()), double(4, 3), torch.randint(2, (20,))
    lossfunc = extend(nn.CrossEntropyLoss())
    with backpack(extensions.DiagGGNExact(subsampling), extensions.SqrtGGNExact(subsampling)):
        lossfunc(model(X).reshape(20, 2), y).backward()

    class Wanted(nn.CrossEntropyLoss):
        """The terms of the chosen samples, with the factor of the whole batch."""

        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            chosen = range(4) if subsampling is None else subsampling
            terms = nn.functional.cross_entropy(f.reshape(20, 2), y, reduction="none")
            return terms.reshape(4, 5)[list(chosen)].sum() / 20

    for p, block in zip(
        model.parameters(), oracle.joint_ggn_blocks(model, Wanted(), X, y), strict=True
    ):
        torch.testing.assert_close(p.diag_ggn_exact.flatten(), block.diagonal(), **TOLERANCE)
        root = p.sqrt_ggn_exact.flatten(2).flatten(0, 1)
        torch.testing.assert_close(root.T @ root, block, **TOLERANCE)


class MixesThenAdds(nn.Module):
    """Two rows of each sample, BatchNorm in training mode of all, and a parameter that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = linear(3, 4), nn.BatchNorm1d(4).double()
        self.bias, self.last = nn.Parameter(double(4)), linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.linear(x.reshape(-1, 3))).tanh() + self.bias
        return self.last(h.tanh().reshape(len(x), 8))


def test_networks_that_mix_rows_and_add_parameters() -> None:
    plain, X, y = MixesThenAdds(), double(4, 2, 3), torch.randint(2, (4,))
    model = extend(copy.deepcopy(plain), use_converter="record")
    with backpack(extensions.DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    blocks = oracle.joint_ggn_blocks(plain, nn.CrossEntropyLoss(), X, y)
    for p, block in zip(model.parameters(), blocks, strict=True):
        torch.testing.assert_close(p.diag_ggn_exact.flatten(), block.diagonal(), **TOLERANCE)


def test_subsampling_means_samples_at_every_layer() -> None:
    a, b = extend(linear(3, 4)), extend(linear(4, 2))
    X, y = double(4, 5, 3), torch.randint(2, (20,))

    def gradients(subsampling: list[int] | None) -> tuple[Tensor, Tensor]:
        with backpack(extensions.BatchGrad(subsampling)):
            extend(nn.CrossEntropyLoss())(b(a(X).reshape(20, 4)), y).backward()
        return a.weight.grad_batch, b.weight.grad_batch

    whole, part = gradients(None), gradients([1])
    torch.testing.assert_close(part[0], whole[0][1:2], **TOLERANCE)
    assert len(whole[1]) == 4  # the samples of the model's data, not the rows that b sees
    torch.testing.assert_close(part[1], whole[1][1:2], **TOLERANCE)


@pytest.mark.parametrize(
    "lossfunc",
    [
        extend(nn.MSELoss(reduction="sum")),
        nn.MSELoss(reduction="sum"),
        lambda z, y: (z.exp() - y).square().sum(),
        lambda z, y: nn.functional.softplus(z * y).logsumexp(1).sum(),
    ],
    ids=["extended", "function", "square", "logsumexp"],
)
def test_empty_batch(lossfunc: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = extend(linear(3, 2))
    loss = lossfunc(model(double(0, 3)), double(0, 2))
    with (
        backpack(extensions.BatchGrad()),
        pytest.raises(ValueError, match=r"empty batch\. Skip empty batches"),
    ):
        loss.backward()


def test_siamese_networks_sum_both_uses() -> None:
    model, X1, X2, y = extend(linear(3, 2)), double(4, 3), double(4, 3), double(4, 2)
    lossfunc = extend(nn.MSELoss())
    with backpack(extensions.BatchGrad(), extensions.SumGradSquared()):
        (lossfunc(model(X1), y) + lossfunc(model(X2), y)).backward()
    expected = sum(oracle.batch_grad(model, nn.MSELoss(), X, y)[0] for X in (X1, X2))
    torch.testing.assert_close(model.weight.grad_batch, expected, **TOLERANCE)
    torch.testing.assert_close(model.weight.sum_grad_squared, expected.square().sum(0), **TOLERANCE)
