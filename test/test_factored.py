"""Individual gradients in factored form: every case, every method, every route."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from cases import CASES, Case, truth
from torch import Tensor, nn
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.core.derivatives import BaseDerivatives, BatchAxis, LinearDerivatives
from backpack.core.engine import factored, sources
from backpack.core.engine.factored import FactoredGrad
from backpack.core.engine.sources import Pair, Pairs
from backpack.core.record.context import Context
from backpack.core.record.registry import REGISTRY
from backpack.extensions import BatchGrad, BatchL2Grad

PER_SAMPLE = [case for case in CASES if "mixing" not in case.tags]
FEWER = [c for i, c in enumerate(PER_SAMPLE) if "network" in c.tags or i % 3 == 0]
TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}


@pytest.fixture(params=[False, True], ids=["as it comes", "factored"])
def keeps_factors(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[bool]:
    """Keep factors where they are larger than the gradients, too: the cases are small."""
    if request.param:
        monkeypatch.setattr(sources, "entries_of", lambda source: 0)
    yield request.param


def gradients(problem: Any, *exts: Any) -> list[Any]:
    model, lossfunc = extend(problem.model), extend(problem.loss)
    torch.manual_seed(1)
    with backpack(*(exts or [BatchGrad(factored=True)])):
        lossfunc(model(problem.X), problem.y).backward()
    return [p.grad_batch for p in oracle.trainable(problem.model)]  # type: ignore[attr-defined]


def agree(g: FactoredGrad, dense: Tensor) -> None:
    """Compare every method with what it says about the gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dense.dtype)

    n, flat = len(dense), dense.flatten(1) if dense.dim() > 1 else dense.unsqueeze(1)
    assert (g.shape, g.dtype, g.device, len(g)) == (dense.shape, dense.dtype, dense.device, n)
    assert_close(g.dense(), dense, **TOLERANCE)
    assert_close(g.square_norms(), flat.square().sum(1), **TOLERANCE)
    for weights in (random(n), random(1, n), random(7, n)):
        expected = torch.tensordot(weights, dense, dims=1)
        assert_close(g.weighted_sum(weights), expected, **TOLERANCE)
    assert_close(g.gram(), flat @ flat.T, **TOLERANCE)
    assert_close(g.dot(g), flat.square().sum(1), **TOLERANCE)
    other = random(*dense.shape)
    assert_close(g.dot(other), (flat * other.reshape(n, -1)).sum(1), **TOLERANCE)
    assert_close(g.gram(FactoredGrad.of(other)), flat @ other.reshape(n, -1).T, **TOLERANCE)
    directions = random(4, *dense.shape[1:])
    assert_close(g.project(directions), flat @ directions.reshape(4, -1).T, **TOLERANCE)
    assert_close(g.dot(directions[0]), flat @ directions[0].flatten(), **TOLERANCE)


@pytest.mark.parametrize("case", PER_SAMPLE, ids=str)
def test_every_method(case: Case, keeps_factors: bool) -> None:
    for g, dense in zip(gradients(case.build()), truth(oracle.batch_grad, case), strict=True):
        agree(g, dense)
        if case in FEWER:
            index = [len(dense) - 1, 0]
            agree(g[index], dense[index])
            rows = dense.reshape(len(dense), -1)
            assert_close(g[:1].gram(g), rows[:1] @ rows.T, **TOLERANCE)


@pytest.mark.parametrize("case", [c for c in FEWER if "rows" not in c.tags], ids=str)
def test_subsampling(case: Case, keeps_factors: bool) -> None:
    found = gradients(case.build(), BatchGrad([2, 0], factored=True))
    for g, dense in zip(found, truth(oracle.batch_grad, case), strict=True):
        agree(g, dense[[2, 0]])
        agree(g[[1]], dense[[0]])


def test_slices(monkeypatch: pytest.MonkeyPatch, keeps_factors: bool) -> None:
    """Every route in slices of one sample, one weight, one row."""
    monkeypatch.setattr(factored.reductions, "SLICE_ENTRIES", 1)
    monkeypatch.setattr(factored, "BLOCK_ENTRIES", 1)
    for case in FEWER[::5]:
        for g, dense in zip(gradients(case.build()), truth(oracle.batch_grad, case), strict=True):
            agree(g, dense)


class Tied(nn.Module):
    """A matrix that words are looked up in, and compared with, twice at several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out, self.square = nn.Embedding(7, 4), nn.Linear(4, 7), nn.Linear(4, 4)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.square(torch.tanh(self.square(self.embedding(tokens))))
        return self.out(h).mean(1)


def test_tied_parameters() -> None:
    torch.manual_seed(0)
    model, tokens, y = Tied().double(), torch.randint(7, (5, 3)), torch.randint(7, (5,))
    expected = oracle.batch_grad(copy.deepcopy(model), nn.CrossEntropyLoss(), tokens, y)
    model, lossfunc = extend(model, use_converter=True), extend(nn.CrossEntropyLoss())
    with backpack(BatchGrad(factored=True)):
        lossfunc(model(tokens), y).backward()
    for p, dense in zip(model.parameters(), expected, strict=True):
        agree(p.grad_batch, dense)  # type: ignore[attr-defined]


def large(**options: Any) -> tuple[nn.Sequential, Tensor]:
    """Run a layer whose gradients are larger than their factors; return it and its input."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5)))
    X = torch.rand(3, 8)
    with backpack(BatchGrad(factored=True), **options):
        model(X).square().sum().backward()
    return model, X  # type: ignore[return-value]


def test_what_is_kept() -> None:
    model, _ = large()
    weight, bias = (p.grad_batch for p in model[0].parameters())  # type: ignore[attr-defined]
    assert weight.is_factored and weight.kept_entries == 3 * (8 + 6)
    assert not bias.is_factored and bias.kept_entries == 3 * 6
    assert (
        repr(weight) == "FactoredGrad([3, 6, 8], torch.float32, pairs of 'weight' of '0' (Linear))"
    )
    assert "dense of 'bias'" in repr(bias)
    assert not weight.dense().requires_grad


@pytest.mark.parametrize("shares", [True, False])
def test_kernels_keep_what_is_smaller(shares: bool) -> None:
    """A convolution at few positions keeps its input, at many its gradients."""
    size = 4 if shares else 20
    model = extend(nn.Conv2d(4, 6, 3, padding=1))
    X = torch.rand(2, 4, size, size)
    with backpack(BatchGrad(factored=True)):
        model(X).square().sum().backward()
    g: Any = model.weight.grad_batch
    assert g.is_factored == shares
    assert g.kept_entries == (2 * 10 * 16 if shares else 2 * 4 * 6 * 9)


def test_results_are_the_callers() -> None:
    """No method returns memory of a factor, or of a result before."""
    model, _ = large()
    for p in model.parameters():
        g: Any = p.grad_batch  # type: ignore[attr-defined]
        for method in (g.dense, g.square_norms, g.gram, partial(g.weighted_sum, torch.ones(3))):
            first = method()
            before = first.clone()
            first.zero_()
            assert_close(method(), before)


def test_factors_that_were_changed_are_an_error() -> None:
    model, X = large()
    first, last = model[0].weight.grad_batch, model[1].weight.grad_batch  # type: ignore[attr-defined]
    part = first[:2]
    copied = first[[0, 1]]
    X.zero_()
    for method in (first.dense, first.square_norms, first.gram, part.dense, lambda: first[0]):
        with pytest.raises(
            RuntimeError, match=r"'weight' of '0' \(Linear\), \[\d, 6, 8\].*in place"
        ):
            method()
    last.dense()
    copied.dense()
    with pytest.raises(RuntimeError, match="changed in place"):
        copied.gram(first)


def test_a_step_changes_nothing() -> None:
    """Factors are no parameters."""
    torch.manual_seed(0)
    model = extend(
        nn.Sequential(
            nn.Embedding(50, 4), nn.Unflatten(2, (2, 2)), nn.Conv2d(3, 40, 2), nn.Flatten()
        )
    )
    with backpack(BatchGrad(factored=True)):
        model(torch.randint(50, (2, 3))).square().sum().backward()
    before = [p.grad_batch.dense() for p in model.parameters()]  # type: ignore[attr-defined]
    assert [p.grad_batch.is_factored for p in model.parameters()] == [True, True, False]  # type: ignore[attr-defined]
    torch.optim.SGD(model.parameters(), lr=1).step()
    for p, dense in zip(model.parameters(), before, strict=True):
        assert_close(p.grad_batch.dense(), dense)  # type: ignore[attr-defined]


def test_differentiable() -> None:
    """With create_graph=True, all that is computed of factors has a graph."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double())
    X = torch.rand(3, 4, dtype=torch.float64)
    grads = []
    for options in ({}, {"factored": True}):
        model.zero_grad()
        with backpack(BatchGrad(**options)):
            model(X).square().sum().backward(create_graph=True)
        p: Any = model[0].weight
        g = p.grad_batch.square_norms() if options else p.grad_batch.flatten(1).square().sum(1)
        grads.append(torch.autograd.grad(g.square().sum(), p)[0])
    assert_close(*grads)


def test_indices() -> None:
    model, _ = large()
    g = model[0].weight.grad_batch  # type: ignore[attr-defined]
    dense = g.dense()
    mask = torch.tensor([True, False, True])
    for index in (
        slice(1, None),
        [2, 2],
        mask,
        mask.tolist(),
        torch.tensor([1]),
        np.array([2, 0]),
        np.array([2]),
        [],
        slice(None, None, -1),
    ):
        expected = dense.flip(0) if isinstance(index, slice) and index.step == -1 else dense[index]
        assert_close(g[index].dense(), expected)
        assert len(g[index]) == len(expected)
    assert_close(g[1], dense[1])
    assert_close(g[-1], dense[-1])
    for number in (torch.tensor(1), np.int64(1)):
        assert_close(g[number], dense[1])
    with pytest.raises(IndexError):
        g[[5]]
    with pytest.raises(IndexError, match="axis of samples alone"):
        g[0, 1]
    with pytest.raises(IndexError, match=r"index of shape \[\d+, 1\]"):
        g[torch.ones(len(g), dtype=torch.bool).nonzero()]


def test_no_samples() -> None:
    """All methods return what they would for a tensor without rows."""
    model, _ = large()
    for p in model.parameters():
        g: Any = p.grad_batch  # type: ignore[attr-defined]
        none, whole = g[torch.zeros(len(g), dtype=torch.bool)], g.dense()
        assert none.dense().shape == (0, *p.shape)
        assert none.square_norms().shape == none.dot(none).shape == (0,)
        assert none.gram().shape == (0, 0) and none.gram(g).shape == (0, len(g))
        assert_close(none.weighted_sum(whole.new_zeros(2, 0)), whole.new_zeros(2, *p.shape))
        assert none.project(whole).shape == (0, len(g))
        assert g.project(whole[:0]).shape == (len(g), 0)
        assert g.weighted_sum(whole.new_zeros(0, len(g))).shape == (0, *p.shape)


class TwiceTheWeight(LinearDerivatives):
    """A rule that derives from one of the library, with other mathematics."""

    def param_vjp(self, c: Context, name: str, v: Any) -> Tensor:
        return 2 * super().param_vjp(c, name, v)


def test_rules_that_derive_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(nn.Linear):
        """Another class of modules."""

    monkeypatch.setitem(REGISTRY, Twice, TwiceTheWeight())
    model = extend(Twice(40, 30).double())
    for keeps_factors in (False, True):
        with backpack(BatchGrad(factored=keeps_factors)):
            model(torch.rand(3, 40, dtype=torch.float64)).sum().backward()
        found: Any = model.weight.grad_batch
        assert_close((found.dense() if keeps_factors else found).sum(0), 2 * model.weight.grad)
        model.zero_grad()


class AtPositions(BaseDerivatives):
    """A short rule, which leaves the axes of positions as they are."""

    params = ("weight", "bias")
    batch_axis = BatchAxis.LEADING

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        return v @ c.params["weight"]

    def affine(self, c: Context, name: str, v: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        return [(v, c.x if name == "weight" else None)]


def test_rules_with_several_axes_of_positions(
    keeps_factors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Layer(nn.Linear):
        """Another class of modules."""

    monkeypatch.setitem(REGISTRY, Layer, AtPositions())
    model = extend(nn.Sequential(Layer(40, 30), nn.Tanh()).double())
    X, found = torch.rand(5, 2, 3, 40, dtype=torch.float64), []
    for is_factored in (False, True):
        with backpack(BatchGrad(factored=is_factored)):
            model(X).sum().backward()
        found.append([vars(p)["grad_batch"] for p in model.parameters()])
    for dense, g in zip(*found, strict=True):
        agree(g, dense)


def test_shapes_that_do_not_fit() -> None:
    g = large()[0][0].weight.grad_batch  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"'0'.*\[3, 6, 8\].*\[3\] or \[4, 3\], got \[4\]"):
        g.weighted_sum(torch.rand(4))
    with pytest.raises(ValueError, match=r"\[2, 6, 8\], got \[2, 8, 6\]"):
        g.project(torch.rand(2, 8, 6))
    with pytest.raises(ValueError, match=r"\[6, 8\] or \[3, 6, 8\], got \[6\]"):
        g.dot(torch.rand(6))
    with pytest.raises(ValueError, match=r"are \[3, 6, 8\], those of .* are \[2, 6, 8\]"):
        g.dot(g[:2])
    with pytest.raises(ValueError, match="same parameter"):
        g.gram(FactoredGrad.of(torch.rand(3, 6)))


def test_copies_and_devices() -> None:
    model, _ = large()
    g = model[0].weight.grad_batch  # type: ignore[attr-defined]
    assert g.to("cpu").to("cpu").gram().shape == (3, 3)
    assert g.to("meta").dense().device.type == "meta"
    assert copy.deepcopy(g) is g


@pytest.mark.parametrize("eps", [1e-1, 1e-2, 1e-3])
def test_norms_of_uses_that_nearly_cancel(eps: float) -> None:
    """Two branches that are compared: no digits are lost by inner products."""

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[:, 0]) - self.layer(x[:, 1])

    torch.manual_seed(1)
    a = torch.randn(6, 64)
    X, y = torch.stack([a, a + eps * torch.randn(6, 64)], 1), torch.randn(6, 32)
    norms = []
    for dtype in (torch.float64, torch.float32):
        model = extend(Siamese().to(dtype), use_converter=True)
        loss = extend(nn.MSELoss())(model(X.to(dtype)), y.to(dtype))
        with backpack(BatchL2Grad()):
            loss.backward()
        norms.append(model.layer.weight.batch_l2.double())  # type: ignore[union-attr]
    assert_close(norms[1], norms[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("distance", [1e-1, 1e-3])
def test_inner_products_of_positions_that_nearly_cancel(
    distance: float, dtype: torch.dtype
) -> None:
    """They are as precise as those of the gradients themselves."""
    torch.manual_seed(1)
    s, x = torch.randn(6, 32, dtype=dtype), torch.randn(6, 64, dtype=dtype)
    s, x = (
        torch.stack([s, -s], 1),
        torch.stack([x, x + (distance * torch.randn(6, 64)).to(dtype)], 1),
    )
    rule = Pairs([Pair(s, x)], sources._whole, ("a kind",))
    g = FactoredGrad([rule], [6, 32, 64], dtype)
    exact = torch.einsum("nto,nti->noi", s.double(), x.double()).flatten(1)
    norms = exact.norm(dim=1)
    order = [1, 2, 3, 4, 5, 0]
    dense, scale = g.dense().flatten(1), norms.unsqueeze(1) * norms

    def error(products: Tensor) -> Tensor:
        return ((products.double() - exact @ exact.T) / scale).abs().max()

    of_dense = error(dense @ dense.T) + torch.finfo(dtype).eps
    assert error(g.gram()) <= 2 * of_dense
    assert error(g.gram(g[[0, 1, 2, 3, 4, 5]])) <= 2 * of_dense
    dots = ((exact * exact[order]).sum(1), norms * norms[order])
    assert ((g.dot(g[order]).double() - dots[0]) / dots[1]).abs().max() <= 2 * of_dense


def test_saved_gradients_are_read() -> None:
    """A copy that was saved notices changes from then on."""
    case = FEWER[0]
    for g, dense in zip(gradients(case.build()), truth(oracle.batch_grad, case), strict=True):
        saved = pickle.loads(pickle.dumps(g))
        assert_close(saved.square_norms(), dense.flatten(1).square().sum(1), **TOLERANCE)
