"""Clipped sums: every case against the oracle, groups, scales, memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from cases import CASES, Case, truth
from largest import Largest
from torch import Tensor, nn
from torch.testing import assert_close

from backpack import backpack, extend, quantities
from backpack.core.engine import elided_gradients, factored, sources
from backpack.extensions import KFAC, BatchGrad, BatchL2Grad, ClippedGrad

PER_SAMPLE = [case for case in CASES if "mixing" not in case.tags]
TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}


def run(problem: Any, *exts: Any, **options: Any) -> list[Any]:
    model, lossfunc = extend(problem.model), extend(problem.loss)
    torch.manual_seed(1)
    with backpack(*exts, **options):
        lossfunc(model(problem.X), problem.y).backward()
    return oracle.trainable(problem.model)


def clipped(
    grads: Sequence[Tensor], bound: float, weights: Tensor | float = 1.0
) -> tuple[list[Tensor], Tensor]:
    """Write it down: the sums of one group of parameters, and the norms."""
    norms = torch.cat([g.reshape(len(g), -1) for g in grads], 1).norm(dim=1)
    factors = torch.where(norms > bound, bound / norms, 1) * weights
    return [torch.tensordot(factors, g, dims=1) for g in grads], norms


def bound_of(grads: Sequence[Tensor]) -> float:
    """Return a bound that clips some of the samples."""
    return float(clipped(grads, 1)[1].sort().values[:2].mean()) or 1.0


@pytest.mark.parametrize("is_factored", [False, True], ids=["as it comes", "factored"])
@pytest.mark.parametrize("case", PER_SAMPLE, ids=str)
def test_every_case(case: Case, is_factored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_factored:
        monkeypatch.setattr(sources, "entries_of", lambda source: 0)
    grads = truth(oracle.batch_grad, case)
    bound = bound_of(grads)
    sums, norms = clipped(grads, bound)
    for p, expected in zip(run(case.build(), ClippedGrad(bound)), sums, strict=True):
        assert_close(p.grad_clipped, expected, **TOLERANCE)
        assert_close(p.clip_norms, norms, **TOLERANCE)


def network() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    X, y = torch.randn(7, 4).double(), torch.randint(3, (7,))
    return model, X, y


def step(model: nn.Module, X: Tensor, y: Tensor, *exts: Any, reduction: str = "mean") -> list[Any]:
    with backpack(*exts):
        extend(nn.CrossEntropyLoss(reduction=reduction))(extend(model)(X), y).backward()
    return list(model.parameters())


def individual(model: nn.Module, X: Tensor, y: Tensor) -> list[Tensor]:
    return [p.grad_batch for p in step(model, X, y, BatchGrad())]


@pytest.mark.parametrize("as_function", [False, True])
def test_groups(as_function: bool) -> None:
    model, X, y = network()
    grads = individual(model, X, y)
    ps = list(model.parameters())
    groups = [[ps[3], ps[0]], [ps[1]]]
    step(model, X, y, ClippedGrad(0.05, per=(lambda found: groups) if as_function else groups))
    for members in ((3, 0), (1,)):
        sums, norms = clipped([grads[i] for i in members], 0.05)
        for i, expected in zip(members, sums, strict=True):
            assert_close(ps[i].grad_clipped, expected)
            assert_close(ps[i].clip_norms, norms)
    assert not hasattr(ps[2], "grad_clipped") and not hasattr(ps[2], "clip_norms")


def test_each_parameter() -> None:
    model, X, y = network()
    grads = individual(model, X, y)
    for p, g in zip(step(model, X, y, ClippedGrad(0.05, per="parameter")), grads, strict=True):
        assert_close(p.grad_clipped, clipped([g], 0.05)[0][0])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("per", ["model", "parameter"])
def test_normalised(per: Any, reduction: Any) -> None:
    """Factors ``R / (|g| + γ)`` of the samples' own losses; of a mean, the sum has 1/N."""
    model, X, y = network()
    grads = individual(model, X, y)  # of the mean
    ext = ClippedGrad(0.3, per, loss_reduction=reduction, stability=0.02)
    ps = step(model, X, y, ext, reduction=reduction)
    scale = 7 if reduction == "mean" else 1
    for i, p in enumerate(ps):
        members = grads if per == "model" else [grads[i]]
        rows = torch.cat([7 * g.flatten(1) for g in members], 1)  # own losses
        factors = 0.3 / (rows.norm(dim=1) + 0.02)
        assert_close(scale * p.grad_clipped, torch.einsum("n,n...->...", factors, 7 * grads[i]))
        assert_close(p.clip_norms, rows.norm(dim=1))


def test_derivatives_of_normalised_gradients() -> None:
    """Also where one is zero, at which the norm has none."""
    layer = extend(nn.Linear(2, 1, bias=False).double())
    X = torch.tensor([[0.0, 0.0], [1.0, 2.0]]).double()
    with backpack(ClippedGrad(0.5, stability=0.1)):
        layer(X).square().sum().backward(create_graph=True)
    w = layer.weight
    (found,) = torch.autograd.grad(w.grad_clipped.sum(), w)  # type: ignore[attr-defined]
    copied = w.detach().clone().requires_grad_()
    g = 2 * (copied @ X[1]) * X[1]
    (expected,) = torch.autograd.grad((0.5 / (g.norm() + 0.1) * g).sum(), copied)
    assert_close(found, expected)


def test_weights_and_the_mean() -> None:
    """A mean with the samples' own losses compared, is a sum divided by N."""
    model, X, y = network()
    grads, weights = individual(model, X, y), torch.randn(7).double()
    expected = clipped(grads, 0.05, weights)[0]
    ps = step(model, X, y, ClippedGrad(0.05, weights=weights))
    assert_close([p.grad_clipped for p in ps], expected)
    of_mean = [
        (p.grad_clipped, p.clip_norms)
        for p in step(model, X, y, ClippedGrad(0.4, loss_reduction="mean"))
    ]
    of_sum = step(model, X, y, ClippedGrad(0.4), reduction="sum")
    for (total, norms), p in zip(of_mean, of_sum, strict=True):
        assert_close(7 * total, p.grad_clipped)
        assert_close(norms, p.clip_norms)


def test_properties() -> None:
    """Order does not matter; a large bound changes nothing; no sample adds more than the bound."""
    model, X, y = network()
    ps = step(model, X, y, ClippedGrad(0.05))
    before = [p.grad_clipped for p in ps]
    shuffle = torch.randperm(7)
    norms = ps[0].clip_norms
    ps = step(model, X[shuffle], y[shuffle], ClippedGrad(0.05))
    assert_close([p.grad_clipped for p in ps], before)
    assert_close(ps[0].clip_norms, norms[shuffle])
    model.zero_grad()
    ps = step(model, X, y, ClippedGrad(1e9))
    assert_close([p.grad_clipped for p in ps], [p.grad for p in ps])
    ps = step(model, 1e3 * X[:1], y[:1], ClippedGrad(1e-3))
    assert_close(sum(p.grad_clipped.square().sum() for p in ps), torch.tensor(1e-6).double())


def test_samples_without_gradient_are_not_clipped() -> None:
    model = extend(nn.Linear(2, 1, bias=False))
    with backpack(ClippedGrad(0.5)):
        model(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).sum().backward()
    p: Any = model.weight
    assert p.clip_norms.tolist() == [0, 5]
    assert_close(p.grad_clipped, torch.tensor([[0.3, 0.4]]))


def test_derivatives_where_a_gradient_is_zero() -> None:
    """A sum of clipped gradients is differentiable in the samples that it leaves alone, too."""
    model, loss = extend(nn.Linear(2, 1).double()), extend(nn.MSELoss(reduction="sum"))
    X = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double()
    y = torch.stack([model(X[0]).detach(), torch.zeros(1)])  # no residual, and a large one
    with backpack(ClippedGrad(0.5)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph=True")
        loss(model(X), y).backward(create_graph=True)
    (found,) = torch.autograd.grad(model.weight.grad_clipped.sum(), model.weight)
    # the first is 2 (wᵀ x - y) x, the second has length R, whatever w
    assert_close(found, (2 * X[0].sum() * X[0])[None])


def test_subsampling_and_others() -> None:
    """Beside other extensions, of first and of second order, and with p.grad from all of them."""
    model, X, y = network()
    grads = individual(model, X, y)
    sums, norms = clipped([g[[4, 0]] for g in grads], 0.05)
    exts = [BatchGrad(), ClippedGrad(0.05, subsampling=[4, 0]), BatchL2Grad(), KFAC()]
    for p, expected, g in zip(step(model, X, y, *exts), sums, grads, strict=True):
        assert_close(p.grad_clipped, expected)
        assert_close(p.clip_norms, norms)
        assert_close(p.grad_batch, g)
        assert_close(p.batch_l2, g.flatten(1).square().sum(1))
        assert len(p.kfac)


def test_results_are_apart() -> None:
    model, X, y = network()
    ps = step(model, X, y, ClippedGrad(0.05), BatchGrad(factored=True))
    values = [t for p in ps for t in (p.grad, p.grad_clipped, p.clip_norms)]
    assert len({t.untyped_storage().data_ptr() for t in values}) == len(values)


def test_nothing_is_left_after_an_error() -> None:
    model, X, y = network()
    with pytest.raises(ValueError, match=r"weights are \[3\], but there are 7 samples"):
        step(model, X, y, ClippedGrad(weights=torch.ones(3)))
    assert not quantities(model)
    step(model, X, y, ClippedGrad(), BatchGrad())
    with pytest.raises(ValueError, match=r"weights are \[3\], but there are 7 samples"):
        step(model, X, y, ClippedGrad(weights=torch.ones(3)))
    left = {name.rpartition(".")[2] for name in quantities(model)}
    assert left == {"grad_batch"}  # which the pass that failed was not asked for
    assert step(model, X, y, ClippedGrad())[0].clip_norms.shape == (7,)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_norm": 0}, "max_norm has to be larger than 0, got 0"),
        ({"max_norm": [1.0, 2.0]}, r"one number, got \[1.0, 2.0\]: groups"),
        ({"stability": 0.0}, "stability has to be larger than 0, or None, got 0"),
        ({"per": "layer"}, "'model', 'parameter' or groups of parameters, got 'layer'"),
        ({"loss_reduction": "none"}, "'mean' or 'sum', got 'none'"),
        ({"loss_reduction": "mean", "subsampling": [0]}, "divide max_norm by it"),
        ({"per": [[p := nn.Parameter(torch.ones(2, 3))], [p]]}, r"shape \[2, 3\] is in two groups"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClippedGrad(**options)


def test_different_numbers_of_samples() -> None:
    one, two = extend(nn.Linear(2, 2)), extend(nn.Linear(2, 2))
    with (
        pytest.raises(
            ValueError,
            match=r"different numbers of samples have no joint norms: \[\d, 2.*\], \[\d, 2.*\]. "
            ".*use_converter=True.*per=",
        ),
        backpack(ClippedGrad()),
    ):
        (one(torch.rand(3, 2)).sum() + two(torch.rand(5, 2)).sum()).backward()


@pytest.mark.parametrize("is_factored", [False, True])
def test_the_gradient_may_be_summed(is_factored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where autograd is elided the gradient, it is that of a plain pass."""
    monkeypatch.setattr(elided_gradients, "WORTHWHILE", 0)
    if is_factored:
        monkeypatch.setattr(sources, "entries_of", lambda source: 0)
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 3, 2), nn.Linear(5, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)]
    model, X, y = nn.Sequential(*layers).double(), torch.rand(4, 2, 6).double(), torch.arange(4) % 3
    expected = oracle.grad(model, nn.CrossEntropyLoss(), X, y)
    sums, _ = clipped(oracle.batch_grad(model, nn.CrossEntropyLoss(), X, y), 0.05)
    loss = extend(nn.CrossEntropyLoss())(extend(model)(X), y)
    with backpack(ClippedGrad(0.05), sum_individual_gradients=True):
        loss.backward()
    assert_close([p.grad for p in model.parameters()], expected)
    assert_close([p.grad_clipped for p in model.parameters()], sums)  # type: ignore[attr-defined]


LARGE = {
    "linear": (lambda: nn.Linear(64, 64), (32, 64)),
    "positions": (lambda: nn.Linear(64, 64), (32, 4, 64)),
    "convolution": (lambda: nn.Conv2d(64, 64, 3, padding=1), (32, 64, 2, 2)),
    "grouped": (lambda: nn.Conv1d(128, 128, 3, groups=2), (32, 128, 4)),
    "recurrent": (lambda: nn.LSTM(64, 64, batch_first=True), (32, 2, 64)),
    "attention": (lambda: extend_attention(), (32, 4, 64)),
}


def extend_attention() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("name", LARGE)
def test_no_individual_gradients_are_formed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a backward pass makes is as large as [N, *p], or as half of that."""
    monkeypatch.setattr(factored.reductions, "SLICE_ENTRIES", 2**12)
    make, shape = LARGE[name]
    torch.manual_seed(0)
    model = extend(make())
    out = model(torch.rand(shape))
    loss = (out[0] if isinstance(out, tuple) else out).square().sum()
    with Largest() as largest, backpack(ClippedGrad()):
        loss.backward()
    p = max(model.parameters(), key=torch.numel)
    assert largest.entries < 16 * p.numel(), (largest.entries, p.numel())
    assert all(hasattr(p, "grad_clipped") for p in model.parameters())


def test_embeddings_are_not_formed() -> None:
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Embedding(5000, 8), nn.Flatten(), nn.Linear(24, 2)))
    loss = model(torch.randint(5000, (32, 3))).square().sum()
    with Largest() as largest, backpack(ClippedGrad()):
        loss.backward()
    assert largest.entries <= 5000 * 8
