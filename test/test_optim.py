"""The optimisers: every step against its formula, and what ``torch.optim`` promises."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import exp, inf, log, pi, sqrt
from typing import Any

import oracle
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from backpack import backpack, extend, extensions
from backpack import clear as backpack_clear
from backpack.core.engine.backpropagation import slice_bytes
from backpack.custom_module.weighted_loss import WeightedLoss
from backpack.optim import (
    DPSGD,
    KFAC,
    SOAP,
    AdaptiveClipping,
    DiagGGN,
    DPOptimizer,
    PoissonBatches,
    PrivacyAccountant,
    collate_empty_too,
    diag_ggn,
    noise_multiplier_for,
    privacy_spent,
    renyi_divergence,
)
from backpack.optim.privacy import _log_binomials
from backpack.utils.kroneckers import kfacs_to_mat

X = torch.rand(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 1, 0, 1, 1])
PRIVATE: dict[str, Any] = {
    "lr": 0.1,
    "max_grad_norm": 0.2,
    "noise_multiplier": 0.5,
    "expected_batch_size": 5,
}
OPTIMISERS: dict[str, Callable[..., Any]] = {
    "DiagGGN, sampled": partial(DiagGGN, weight_decay=0.1, kl_clip=1e-3),
    "DiagGGN, exact": partial(DiagGGN, extension=extensions.DiagGGNExact(), curvature_every=2),
    "KFAC": partial(KFAC, inverse_every=2),
    "KFLR": partial(KFAC, extension=extensions.KFLR(), factored=False, kl_clip=None),
    "KFRA": partial(KFAC, extension=extensions.KFRA(), curvature_every=3),
    "EKFAC": partial(KFAC, ekfac=True, inverse_every=2),
    "DPSGD": partial(DPSGD, **PRIVATE, momentum=0.9),
}
every_optimiser = pytest.mark.parametrize("make", OPTIMISERS.values(), ids=list(OPTIMISERS))


def network() -> nn.Sequential:
    """Make a small network, always the same."""
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())  # type: ignore[return-value]


def make_closure(model: nn.Module, optimiser: Any, X: Tensor = X, y: Tensor = Y) -> Any:
    """Make the closure of any optimiser of torch."""
    loss_function = extend(nn.CrossEntropyLoss())

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = loss_function(model(X), y)
        loss.backward()
        return loss

    return closure


def one_parameter(shape: Sequence[int], savefield: str, quantity: Any) -> Any:
    """Make a parameter with a gradient and a quantity, as after a backward pass."""
    generator = torch.Generator().manual_seed(1)
    p: Any = nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator))
    p.grad = torch.randn(*shape, dtype=torch.float64, generator=generator)
    setattr(p, savefield, quantity)
    return p


def psd(*sizes: int) -> list[Tensor]:
    """Draw positive semidefinite matrices."""
    generator = torch.Generator().manual_seed(2)
    roots = [torch.randn(d, d, dtype=torch.float64, generator=generator) for d in sizes]
    return [root @ root.T for root in roots]


def average(values: Sequence[Tensor], beta: float) -> Tensor:
    """Average with weights that fall by beta with every step back."""
    weights = [beta ** (len(values) - 1 - t) for t in range(len(values))]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)  # type: ignore[return-value]


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# --- DiagGGN --------------------------------------------------------------------------------------


def test_diag_ggn_divides_by_the_averaged_diagonal() -> None:
    """Three steps with momentum and weight decay; diagonal and gradient by plain autograd."""
    lr, damping, beta1, beta2, decay = 0.3, 0.05, 0.8, 0.6, 0.02
    model = network()
    reference = copy.deepcopy(model)
    optimiser = DiagGGN(
        model.parameters(),
        lr,
        damping,
        (beta1, beta2),
        decay,
        extension=extensions.DiagGGNExact(),
        kl_clip=None,
    )
    grads: list[list[Tensor]] = [[] for _ in parameters(model)]
    diagonals: list[list[Tensor]] = [[] for _ in parameters(model)]
    for _ in range(3):
        optimiser.step(make_closure(model, optimiser))
        loss = nn.functional.cross_entropy(reference(X), Y)
        new = torch.autograd.grad(loss, list(reference.parameters()))
        diagonal = oracle.ggn_diag(reference, nn.CrossEntropyLoss(), X, Y)
        with torch.no_grad():
            for i, p in enumerate(reference.parameters()):
                grads[i].append(new[i] + decay * p)
                diagonals[i].append(diagonal[i])
                m, c = average(grads[i], beta1), average(diagonals[i], beta2)
                p -= lr * m / (c + decay + damping)
        assert_close(parameters(model), parameters(reference), rtol=1e-10, atol=1e-12)


def test_diag_ggn_samples_by_default() -> None:
    """The step uses what ``DiagGGNMC`` has saved."""
    model = network()
    before = parameters(model)
    optimiser = DiagGGN(model.parameters(), lr=0.3, damping=0.1, kl_clip=None)
    optimiser.step(make_closure(model, optimiser))
    for p, old in zip(model.parameters(), before, strict=True):
        assert_close(p.detach(), old - 0.3 * p.grad / (p.diag_ggn_mc + 0.1))  # type: ignore[operator]


# --- KFAC -----------------------------------------------------------------------------------------


def damped(factors: Sequence[Tensor], damping: float, factored: bool) -> Tensor:
    """Write the damped matrix out. ``[D, D]``"""
    if not factored:
        matrix = kfacs_to_mat(factors)
        return matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype)
    if len(factors) == 1:
        return damped(factors, damping, factored=False)
    eyes = [torch.eye(len(factor), dtype=factor.dtype) for factor in factors]
    if len(factors) == 2:  # as in the paper
        (B, A), (eye_B, eye_A) = factors, eyes
        ratio = ((A.trace() / len(A)) / (B.trace() / len(B))).sqrt()
        return torch.kron(B + sqrt(damping) / ratio * eye_B, A + sqrt(damping) * ratio * eye_A)
    means = torch.stack([factor.trace() / len(factor) for factor in factors])
    shares = means / means.log().mean().exp() * damping ** (1 / len(factors))
    return kfacs_to_mat([f + s * eye for f, s, eye in zip(factors, shares, eyes, strict=True)])


@pytest.mark.parametrize("factored", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (5,), (2, 3, 4), (2, 3, 2, 2)])
def test_kfac_solves_with_any_list_of_factors(shape: tuple[int, ...], factored: bool) -> None:
    """Two factors, one, one for each axis: the step solves with the damped matrix."""
    factors = psd(*shape)
    p = one_parameter(shape, "kfac", factors)
    optimiser = KFAC([p], lr=0.5, damping=0.3, factored=factored, kl_clip=None)
    step = torch.linalg.solve(damped(factors, 0.3, factored), p.grad.flatten())
    expected = p.detach() - 0.5 * step.reshape(shape)
    optimiser.step()
    assert_close(p.detach(), expected)


@pytest.mark.parametrize("factored", [True, False])
def test_kfac_solves_with_diagonal_factors(factored: bool) -> None:
    """As with the diagonal matrices that they stand for, and their average."""
    A, B = psd(3, 4)
    steps = []
    for factors in ([A.diagonal().clone(), B], [A.diagonal().diag(), B]):
        p = one_parameter((3, 4), "kfac", factors)
        optimiser = KFAC([p], lr=0.5, damping=0.3, factored=factored, kl_clip=None)
        for _ in range(2):
            optimiser.step()
            p.kfac = [2 * factor for factor in p.kfac]
        steps.append(p.detach())
    assert_close(*steps)


def test_kfac_of_convolutions_with_few_and_many_factors() -> None:
    """A convolution whose weight has four axes, but two factors, and one factor for the bias."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)))
    model.double()
    before = parameters(model)
    optimiser = KFAC(
        model.parameters(), lr=0.5, damping=0.1, extension=extensions.KFLR(), kl_clip=None
    )
    optimiser.step(make_closure(model, optimiser, torch.rand(6, 2, 3, 3).double()))
    assert [len(p.kflr) for p in model.parameters()] == [2, 1, 2, 1]  # type: ignore[arg-type]
    for p, old in zip(model.parameters(), before, strict=True):
        matrix = damped(p.kflr, 0.1, factored=True)  # type: ignore[arg-type]
        step = torch.linalg.solve(matrix, p.grad.flatten())  # type: ignore[union-attr]
        assert_close(p.detach(), old - 0.5 * step.reshape(p.shape))


def test_kflr_of_one_sample_is_the_damped_newton_step() -> None:
    """With one sample, Kronecker factors are exact: compare with the dense GGN of autograd."""
    model = network()
    before = parameters(model)
    blocks = oracle.ggn_blocks(copy.deepcopy(model), nn.CrossEntropyLoss(), X[:1], Y[:1])
    options: dict[str, Any] = {"factored": False, "kl_clip": None}
    optimiser = KFAC(model.parameters(), lr=1, damping=0.01, extension=extensions.KFLR(), **options)
    optimiser.step(make_closure(model, optimiser, X[:1], Y[:1]))
    for p, old, block in zip(model.parameters(), before, blocks, strict=True):
        matrix = block + 0.01 * torch.eye(len(block), dtype=block.dtype)
        step = torch.linalg.solve(matrix, p.grad.flatten())  # type: ignore[union-attr]
        assert_close(p.detach(), old - step.reshape(p.shape))


@pytest.mark.parametrize("kind", ["exact", "empirical"])
def test_ekfac_averages_second_moments_along_eigenvectors(kind: str) -> None:
    """Steps with dense matrices of autograd; the eigenvectors change in each but the last."""
    lr, damping, (beta1, beta2), decay = 0.2, 0.05, (0.8, 0.6), 0.02
    function = {"exact": oracle.kflr, "empirical": oracle.kfac_empirical}[kind]
    blocks_of = {"exact": oracle.ggn_blocks, "empirical": oracle.empirical_blocks}[kind]
    model, loss_function = network(), nn.CrossEntropyLoss()
    reference = copy.deepcopy(model)
    ext = extensions.KFAC(fisher=kind)  # type: ignore[arg-type]
    options: dict[str, Any] = {"ekfac": True, "extension": ext, "kl_clip": None}
    options |= {"inverse_every": 3, "weight_decay": decay, "betas": (beta1, beta2)}
    optimiser = KFAC(model.parameters(), lr, damping, **options)
    factors: list[Any] = [[] for _ in parameters(model)]
    grads: list[Any] = [[] for _ in factors]
    bases: list[Any] = [None for _ in factors]
    moments: list[Any] = [None for _ in factors]
    for t in range(5):
        optimiser.step(make_closure(model, optimiser))
        new = function(reference, loss_function, X, Y)
        blocks = blocks_of(reference, loss_function, X, Y)
        loss = loss_function(reference(X), Y)
        gradient = torch.autograd.grad(loss, list(reference.parameters()))
        for i, p in enumerate(reference.parameters()):
            factors[i].append(new[i])
            grads[i].append(gradient[i] + decay * p.detach())
            means = [average(fs, beta2) for fs in zip(*factors[i], strict=True)]  # type: ignore[arg-type]
            if bases[i] is None:
                bases[i] = [torch.linalg.eigh(f).eigenvectors for f in means]
            Q = kfacs_to_mat(bases[i])
            moment = (Q.T @ blocks[i] @ Q).diagonal()
            weight = (1 - beta2) / (1 - beta2 ** (t + 1))
            moments[i] = moment if t == 0 else moments[i] + weight * (moment - moments[i])
            if t < 3 or t % 3 == 0:
                whole = Q @ moments[i].diag() @ Q.T
                bases[i] = [torch.linalg.eigh(f).eigenvectors for f in means]
                Q = kfacs_to_mat(bases[i])
                moments[i] = (Q.T @ whole @ Q).diagonal()
            matrix = Q @ moments[i].diag() @ Q.T + (damping + decay) * torch.eye(len(Q)).double()
            step = torch.linalg.solve(matrix, average(grads[i], beta1).flatten())
            with torch.no_grad():
                p -= lr * step.reshape(p.shape)
    assert_close(parameters(model), parameters(reference))


def test_ekfac_trains_in_slices() -> None:
    """The first step, which has no eigenvectors yet, takes those of the whole batch, too."""
    found = []
    for limit in (1, 2**24):
        model = network()
        options: dict[str, Any] = {"ekfac": True, "extension": extensions.KFLR()}
        optimiser = KFAC(model.parameters(), **options)
        with slice_bytes(limit):
            for _ in range(3):
                optimiser.step(make_closure(model, optimiser))
        found.append(parameters(model))
    assert_close(*found)


def test_ekfac_refuses() -> None:
    for ext in (extensions.KFRA(), extensions.KFAC(fisher="inputs")):
        with pytest.raises(ValueError, match="second moments"):
            KFAC(network().parameters(), ekfac=True, extension=ext)


def test_kfac_averages_each_factor() -> None:
    """The second step solves with the averages of both, without their start's bias."""
    first, second = psd(3, 4), psd(5, 3, 4)[1:]
    p = one_parameter((3, 4), "kfac", first)
    optimiser = KFAC([p], lr=0.5, damping=0.3, betas=(0.7, 0.6), inverse_every=1, kl_clip=None)
    grads = [p.grad.clone()]
    optimiser.step()
    expected = p.detach().clone()
    p.grad, p.kfac = torch.randn_like(p), second
    grads.append(p.grad.clone())
    optimiser.step()
    means = [average(pair, 0.6) for pair in zip(first, second, strict=True)]
    step = torch.linalg.solve(damped(means, 0.3, True), average(grads, 0.7).flatten())
    assert_close(p.detach(), expected - 0.5 * step.reshape(3, 4))


def test_kfac_keeps_inverses_between_updates() -> None:
    """With ``inverse_every=2``, from the third step on every second one uses older factors."""
    factors = [
        psd(*sizes)[-2:] for sizes in ((3, 4), (5, 3, 4), (6, 5, 3, 4), (2, 3, 4), (3, 3, 4))
    ]
    p = one_parameter((3, 4), "kfac", None)
    optimiser = KFAC([p], 0.5, damping=0.3, betas=(0, 0), inverse_every=2, kl_clip=None)
    for new, used in zip(factors, [*factors[:3], factors[2], factors[4]], strict=True):
        p.kfac = [factor.clone() for factor in new]
        step = torch.linalg.solve(damped(used, 0.3, True), p.grad.flatten())
        expected = p.detach() - 0.5 * step.reshape(3, 4)
        optimiser.step()
        assert_close(p.detach(), expected)


def test_kfac_without_any_curvature_divides_by_the_damping() -> None:
    """A factor of zeros, as of inputs that never occur."""
    p = one_parameter((3, 4), "kfac", [psd(3)[0], torch.zeros(4, 4, dtype=torch.float64)])
    expected = p.detach() - 0.5 * p.grad / 0.3
    KFAC([p], lr=0.5, damping=0.3, factored=False, kl_clip=None).step()
    assert_close(p.detach(), expected)
    p = one_parameter((3, 4), "kfac", [torch.zeros(d, d, dtype=torch.float64) for d in (3, 4)])
    KFAC([p], lr=0.5, damping=0.3, factored=True, kl_clip=None).step()
    assert_close(p.detach(), expected)


# --- Both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [DiagGGN, KFAC])
def test_curvature_is_computed_when_it_is_due(make: Any) -> None:
    """In between, ``extensions`` is empty and what was saved before is not looked at again."""
    model = network()
    optimiser = make(model.parameters(), curvature_every=3)
    closure = make_closure(model, optimiser)
    names = [optimiser.extension.savefield]
    for step in range(7):
        assert [e.savefield for e in optimiser.extensions] == (names if step % 3 == 0 else [])
        optimiser.step(closure)
    counts = [(s["step"], s["curvatures"]) for s in optimiser.state.values()]
    assert counts == [(7, 3)] * 4


@pytest.mark.parametrize("make", [DiagGGN, KFAC])
def test_frozen_parameters_are_never_due(make: Any) -> None:
    """They have no steps behind them, but wait for no curvature either."""
    model = network()
    model[0].requires_grad_(False)
    optimiser = make(model.parameters(), curvature_every=3)
    due = []
    for _ in range(7):
        due.append(len(optimiser.extensions))
        optimiser.step(make_closure(model, optimiser))
    assert due == [1, 0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("make", [DiagGGN, KFAC])
def test_kl_clip_bounds_the_length_of_the_whole_step(make: Any) -> None:
    """``δᵀ(C + λI)δ``, over all parameters, is the bound, and the direction does not change."""

    def train(kl_clip: float | None) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        model = network()
        before = parameters(model)
        optimiser = make(model.parameters(), lr=1, damping=0.1, kl_clip=kl_clip)
        optimiser.step(make_closure(model, optimiser))
        return model, [a - b for a, b in zip(parameters(model), before, strict=True)]

    _, free = train(None)
    model, clipped = train(1e-3)
    _, wide = train(1e3)
    assert_close(wide, free)
    scale = clipped[0].norm() / free[0].norm()
    assert scale < 0.5
    assert_close(clipped, [scale * step for step in free])
    length = 0.0
    for p, step in zip(model.parameters(), clipped, strict=True):
        matrix = (
            damped(p.kfac, 0.1, True) if make is KFAC else torch.diag(p.diag_ggn_mc.flatten() + 0.1)
        )
        length += float(step.flatten() @ matrix @ step.flatten())
    assert length == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("curvature", "factor"), [(1.0, 19 / 20), (0.5, 1.0), (0.1, 20 / 19)], ids=str
)
def test_damping_adapts_to_the_gain(curvature: float, factor: float) -> None:
    """For the loss a/2 θ², a step with C + λ gains 2 - a / (C + λ) of what the model promises."""
    p: Any = nn.Parameter(torch.ones(1, dtype=torch.float64))
    options: dict[str, Any] = {"extension": extensions.DiagGGNExact(), "kl_clip": None}
    optimiser = DiagGGN([p], 1, 0.3, (0, 0), **options, adapt_damping_every=2)

    def closure() -> Tensor:
        p.grad = 1.2 * p.detach()
        p.diag_ggn_exact = torch.full((1,), curvature, dtype=torch.float64)
        return 0.6 * p.square().sum()

    optimiser.step(closure)
    assert optimiser.param_groups[0]["damping"] == 0.3
    optimiser.step(closure)
    assert optimiser.param_groups[0]["damping"] == pytest.approx(0.3 * factor**2)


def test_adapting_counts_the_penalty() -> None:
    """The model is exact for the penalty: without any loss, the gain is what it promises."""
    p: Any = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimiser = DiagGGN([p], 1, 1e-9, weight_decay=2.0, kl_clip=None, adapt_damping_every=1)

    def closure() -> Tensor:
        p.grad, p.diag_ggn_mc = torch.zeros_like(p), torch.zeros_like(p)
        return torch.zeros(())

    optimiser.step(closure)
    assert p.abs() < 1e-8
    assert optimiser.param_groups[0]["damping"] == pytest.approx(0.95e-9)


# --- What torch.optim promises --------------------------------------------------------------------


def run(optimiser: Any, model: nn.Module, steps: int, seed: int) -> list[Tensor]:
    """Train; return the parameters."""
    torch.manual_seed(seed)
    for _ in range(steps):
        optimiser.step(make_closure(model, optimiser))
    return parameters(model)


@every_optimiser
def test_state_dict_continues_identically(make: Any) -> None:
    """Saved to a file and loaded into a new optimiser, with weights alone."""
    model = network()
    optimiser = make(model.parameters())
    run(optimiser, model, 3, seed=0)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, file)
    expected = run(optimiser, model, 4, seed=1)

    file.seek(0)
    saved = torch.load(file)
    restored = network()
    restored.load_state_dict(saved["model"])
    other = make(restored.parameters(), lr=123.0)
    other.load_state_dict(saved["optimiser"])
    assert other.param_groups[0]["lr"] == optimiser.param_groups[0]["lr"]
    for ours, theirs in zip(run(other, restored, 4, seed=1), expected, strict=True):
        assert torch.equal(ours, theirs)


def stopped(function: Any, calls: int) -> Any:
    """Let a function be stopped in one of its calls, when it has done its work."""
    results: list[Any] = []

    def stops(*args: Any) -> Any:
        results.append(function(*args))
        if len(results) == calls:
            raise KeyboardInterrupt
        return results[-1]

    return stops


@pytest.mark.parametrize("name", [name for name in OPTIMISERS if name != "DPSGD"])
def test_an_interrupted_step_leaves_all_as_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done again with the same backward pass, and is what it would have been."""
    found = []
    for is_interrupted in (False, True):
        model = network()
        optimiser = OPTIMISERS[name](model.parameters(), lr=0.1)
        torch.manual_seed(0)
        for number in range(3):
            with backpack(*optimiser.extensions):
                make_closure(model, optimiser)()
            if is_interrupted:
                before = copy.deepcopy((optimiser.state_dict(), list(model.parameters())))
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    where = optimiser if hasattr(optimiser, "_solution") else diag_ggn
                    patch.setattr(where, "_solution", stopped(where._solution, 1 + number))
                    optimiser.step()
                after = optimiser.state_dict(), list(model.parameters())
                assert_close(after, before, rtol=0, atol=0)
            optimiser.step()
        found.append([optimiser.state_dict()["state"], list(model.parameters())])
    assert_close(*found, rtol=0, atol=0)


@every_optimiser
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
def test_copies_continue_identically(make: Any, duplicate: Any) -> None:
    """An optimiser is copied together with its model, scheduled or not."""
    model = network()
    optimiser = make(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimiser, 1)
    run(optimiser, model, 3, seed=0)
    other, copied = duplicate((optimiser, model))
    expected = run(optimiser, model, 2, seed=1)
    for ours, theirs in zip(run(other, copied, 2, seed=1), expected, strict=True):
        assert torch.equal(ours, theirs)


@every_optimiser
def test_closure_and_context_are_the_same(make: Any) -> None:
    """The closure of any optimiser does what the context around ``backward()`` does."""
    one, other = network(), network()
    optimiser = make(one.parameters())
    run(optimiser, one, 4, seed=0)
    torch.manual_seed(0)
    optimiser = make(other.parameters())
    for _ in range(4):
        optimiser.zero_grad()
        loss = extend(nn.CrossEntropyLoss())(other(X), Y)
        with backpack(*optimiser.extensions):
            loss.backward()
        assert optimiser.step() is None
    assert_close(parameters(other), parameters(one), rtol=0, atol=0)


@every_optimiser
def test_closure_runs_with_gradients_and_its_loss_is_returned(make: Any) -> None:
    model = network()
    optimiser = make(model.parameters())
    with torch.no_grad():
        loss = optimiser.step(make_closure(model, optimiser))
    assert_close(loss, nn.functional.cross_entropy(network()(X), Y))


@pytest.mark.parametrize(
    "make",
    [
        partial(DiagGGN, extension=extensions.DiagGGNExact(), kl_clip=None),
        partial(KFAC, extension=extensions.KFLR(), kl_clip=None),
    ],
)
def test_groups_have_options_of_their_own(make: Any) -> None:
    """Two groups are two optimisers."""
    options = [
        {"lr": 0.2, "damping": 0.1, "betas": (0.5, 0.6)},
        {"lr": 0.7, "damping": 0.01, "weight_decay": 0.3, "curvature_every": 2},
    ]
    one, other = network(), network()
    whole = make(
        [{"params": one[i].parameters(), **o} for i, o in zip((0, 2), options, strict=True)]
    )
    parts = [make(other[i].parameters(), **o) for i, o in zip((0, 2), options, strict=True)]
    for _ in range(4):
        whole.step(make_closure(one, whole))
        loss = extend(nn.CrossEntropyLoss())(other(X), Y)
        other.zero_grad()
        with backpack(*parts[0].extensions):
            loss.backward()
        for part in parts:
            part.step()
    assert_close(parameters(one), parameters(other), rtol=1e-12, atol=1e-14)


def test_a_group_is_added() -> None:
    """Its parameters start afresh, whatever the others have behind them."""
    model = network()
    optimiser = KFAC(model[0].parameters(), lr=0.1, curvature_every=10)
    run(optimiser, model, 2, seed=0)
    assert not optimiser.extensions
    optimiser.add_param_group({"params": model[2].parameters(), "lr": 0.2})
    before = parameters(model[2])
    assert optimiser.extensions
    run(optimiser, model, 1, seed=0)
    assert not any(torch.equal(a, b) for a, b in zip(parameters(model[2]), before, strict=True))
    assert [state["step"] for state in optimiser.state.values()] == [3, 3, 1, 1]


@every_optimiser
def test_schedulers_change_the_step_size(make: Any) -> None:
    """The first step has its size times the first factor."""
    steps = []
    for factor in (1.0, 0.5):
        model = network()
        before = parameters(model)
        torch.manual_seed(0)
        optimiser = make(model.parameters(), lr=1e-4)
        torch.optim.lr_scheduler.LambdaLR(optimiser, lambda _, factor=factor: factor)
        optimiser.step(make_closure(model, optimiser))
        steps.append([a - b for a, b in zip(parameters(model), before, strict=True)])
    assert_close(steps[1], [step / 2 for step in steps[0]], rtol=1e-6, atol=1e-14)


@every_optimiser
def test_what_is_not_trained_stays(make: Any) -> None:
    """Parameters that are frozen, or no part of the loss."""
    model = network()
    model[0].bias.requires_grad_(False)
    aside = nn.Parameter(torch.ones(2))
    optimiser = make([*model.parameters(), aside])
    before = parameters(model)
    run(optimiser, model, 2, seed=0)
    same = [torch.equal(a, b) for a, b in zip(parameters(model), before, strict=True)]
    assert same == [False, True, False, False]
    assert torch.equal(aside, torch.ones(2))


@pytest.mark.parametrize("make", [DiagGGN, KFAC])
def test_curvature_of_some_samples_is_told_to_be_a_part(make: Any) -> None:
    """As many alike samples have curvature in proportion: nothing is rescaled."""
    kind = extensions.DiagGGNExact if make is DiagGGN else extensions.KFLR
    model, lossfunc = extend(network()), extend(nn.CrossEntropyLoss())
    same, target = X[:1].repeat(6, 1), Y[:1].repeat(6)

    def curvature(ext: Any) -> Tensor:
        with backpack(ext):
            lossfunc(model(same), target).backward()
        value = getattr(model[0].weight, ext.savefield)
        return kfacs_to_mat(value) if isinstance(value, list) else value.clone()

    assert_close(curvature(kind(subsampling=[0, 3])), curvature(kind()) * 2 / 6)
    with pytest.warns(UserWarning, match=r"looks at 2 of the N samples.*about 2/N of it.*damping"):
        make(model.parameters(), extension=kind(subsampling=[0, 3]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(model.parameters(), extension=kind())


@every_optimiser
def test_a_missing_quantity_is_an_error_that_names_the_parameter(make: Any) -> None:
    """A backward pass outside of the context, one that is too old, a model that is not extended."""
    model = network()
    optimiser = make(model.named_parameters())
    name = optimiser.extension.savefield
    nn.functional.cross_entropy(model(X), Y).backward()
    with pytest.raises(RuntimeError, match=rf"parameter '0.weight' has a gradient, but no {name}"):
        optimiser.step()

    optimiser.step(make_closure(model, optimiser))
    while not optimiser.extensions:
        optimiser.step(make_closure(model, optimiser))
    with pytest.raises(RuntimeError, match=rf"'0.weight' has the {name} that was used by the step"):
        optimiser.step()

    plain = nn.Sequential(nn.Linear(3, 2)).double()
    optimiser = make(plain.parameters())
    message = (
        r"parameter 0 of group 0.*Call extend\(\) on the model.*use_converter=True if functions"
    )
    with pytest.raises(RuntimeError, match=message):
        optimiser.step(make_closure(plain, optimiser))


class Branches(nn.Module):
    """Layers of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.has_second = nn.Linear(3, 3), nn.Linear(3, 3), True

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h) if self.has_second else h


@every_optimiser
def test_a_layer_that_took_no_part_has_no_gradient(make: Any) -> None:
    torch.manual_seed(0)
    model = extend(Branches().double())
    optimiser = make(model.named_parameters())
    optimiser.step(make_closure(model, optimiser))
    while not optimiser.extensions:
        optimiser.step(make_closure(model, optimiser))
    model.has_second = False
    optimiser.zero_grad(set_to_none=False)
    with backpack(*optimiser.extensions):
        extend(nn.CrossEntropyLoss())(model(X), Y).backward()
    message = r"'second.weight' has the .* its gradient is zero.*zero_grad\(set_to_none=True\)"
    with pytest.raises(RuntimeError, match=message):
        optimiser.step()
    old = parameters(model)
    optimiser.step(make_closure(model, optimiser))
    same = [torch.equal(p, q) for p, q in zip(parameters(model), old, strict=True)]
    assert same == [False, False, True, True]


def test_sparse_gradients_are_an_error() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="dense gradients, that of parameter 0 of group 0"):
        DiagGGN([p]).step()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (DiagGGN, {"lr": -1}, "lr has to be at least 0"),
        (DiagGGN, {"damping": 0}, "damping has to be larger than 0"),
        (DiagGGN, {"weight_decay": -1}, "weight_decay has to be"),
        (DiagGGN, {"betas": (1, 0.5)}, "betas have to be"),
        (DiagGGN, {"betas": (0.9,)}, r"betas are two numbers, got \(0.9,\)"),
        (SOAP, {"betas": (0.9, 0.9, 0.9)}, "betas are two numbers"),
        (DiagGGN, {"curvature_every": 0}, "curvature_every has to be"),
        (KFAC, {"curvature_every": 1.5}, "curvature_every is a whole number of steps, got 1.5"),
        (SOAP, {"bases_every": 2.5}, "bases_every is a whole number"),
        (DiagGGN, {"kl_clip": 0}, "kl_clip has to be"),
        (DiagGGN, {"adapt_damping_every": 0}, "adapt_damping_every has to be"),
        (DiagGGN, {"adapt_damping_every": 2.5}, "adapt_damping_every has to be"),
        (DiagGGN, {"extension": extensions.KFAC()}, "an instance of DiagGGNExact or DiagGGNMC"),
        (DiagGGN, {"extension": extensions.DiagGGNExact}, "an instance of DiagGGNExact or"),
        (KFAC, {"inverse_every": 0}, "inverse_every has to be"),
        (KFAC, {"extension": extensions.DiagGGNMC()}, "an instance of KFAC, KFLR, KFRA"),
        (DPSGD, {**PRIVATE, "max_grad_norm": 0}, "max_grad_norm and expected"),
        (DPSGD, {**PRIVATE, "max_grad_norm": inf}, "max_grad_norm has to be finite"),
        (DPSGD, {**PRIVATE, "noise_multiplier": -1}, "noise_multiplier at least 0"),
        (DPSGD, {**PRIVATE, "noise_multiplier": inf}, "noise_multiplier has to be finite"),
        (DPSGD, {**PRIVATE, "expected_batch_size": 0}, "expected_batch_size have to be"),
        (DPSGD, {**PRIVATE, "loss_reduction": "none"}, "'mean' or 'sum'"),
        (DPSGD, {**PRIVATE, "momentum": -1}, "momentum has to be"),
    ],
)
def test_options_out_of_range(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.ones(1))], **options)


def test_options_of_a_group_out_of_range() -> None:
    with pytest.raises(ValueError, match="damping has to be larger than 0, got -1"):
        KFAC([{"params": [nn.Parameter(torch.ones(1))], "damping": -1}])


@pytest.mark.parametrize("options", [{"damping": -1}, {"betas": (1, 0)}, {"lr": -1}])
def test_a_group_out_of_range_is_not_added(options: dict[str, Any]) -> None:
    optimiser = KFAC([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=r"have to be|has to be"):
        optimiser.add_param_group({"params": [nn.Parameter(torch.ones(1))], **options})
    assert len(optimiser.param_groups) == 1


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (KFAC, {"kl_clip": None}),
        (DiagGGN, {"adapt_damping_every": 2}),
        (partial(DPSGD, **PRIVATE), {"max_grad_norm": 0.1}),
    ],
    ids=["KFAC", "DiagGGN", "DPSGD"],
)
def test_options_of_the_whole_optimiser_are_none_of_a_group(make: Any, option: Any) -> None:
    """They had no effect there, without a word."""
    p, last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    message = f"{next(iter(option))} is an option of the whole optimiser"
    with pytest.raises(ValueError, match=message):
        make([{"params": [p], **option}])
    optimiser = make([{"params": [p], "lr": 0.3, "name": "first"}])
    with pytest.raises(ValueError, match=message):
        optimiser.add_param_group({"params": [last], **option})


@pytest.mark.parametrize("make", [KFAC, partial(DPSGD, **PRIVATE)], ids=["KFAC", "DPSGD"])
def test_complex_parameters_are_an_error(make: Any) -> None:
    """Noise of a step without samples was too small for them, by the root of two."""
    p = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    optimiser = make([nn.Parameter(torch.ones(2)), p])
    p.grad = torch.ones_like(p)
    step = getattr(optimiser, "step_without_samples", optimiser.step)
    message = r"needs real parameters, parameter 1 of group 0, of shape \(3, 2\), is complex"
    with pytest.raises(RuntimeError, match=message):
        step()
    p.requires_grad_(False)
    p.grad = None
    step()


def test_lengths_of_steps_in_half_precision() -> None:
    """The sum of 1600 products of 100 overflows in ``float16``: there was no step."""
    p = one_parameter((1600,), "diag_ggn_mc", torch.zeros(1600, dtype=torch.float16))
    p.data, p.grad = torch.ones(1600).half(), torch.ones(1600).half()
    DiagGGN([p], lr=0.1, damping=1e-2, kl_clip=1.6).step()
    # a step of 10 in each entry has the length 1600 in the metric of the damping
    expected = 1 - 10 * (1.6 / 1600) ** 0.5
    assert_close(p.detach(), torch.full_like(p, expected), rtol=1e-3, atol=1e-3)


def test_damping_adapts_to_a_penalty_in_half_precision() -> None:
    """The penalty overflows in ``float16``: no loss had a gain, and the damping grew."""
    p = one_parameter((1600,), "diag_ggn_mc", torch.zeros(1600, dtype=torch.float16))
    p.data, p.grad = torch.full((1600,), 8.0).half(), None
    optimiser = DiagGGN([p], lr=0.1, weight_decay=1.0, kl_clip=None, adapt_damping_every=1)

    def closure() -> float:
        p.grad, p.diag_ggn_mc = torch.zeros_like(p), torch.zeros_like(p)
        return 0.0

    optimiser.step(closure)
    assert optimiser.param_groups[0]["damping"] == 1e-2 * 19 / 20


@pytest.mark.parametrize("make", [DiagGGN, KFAC, partial(DPSGD, **PRIVATE)])
def test_bfloat16(make: Any) -> None:
    """Steps in low precision are those in double precision, about."""
    models = []
    for dtype in (torch.bfloat16, torch.float64):
        p = nn.Parameter(torch.ones(3, 4, dtype=dtype))
        vars(p).update(
            diag_ggn_mc=torch.full_like(p, 0.5),
            kfac=[torch.eye(d, dtype=dtype) + 1 for d in (3, 4)],
            grad_batch=torch.linspace(-1, 2, 24, dtype=dtype).reshape(2, 3, 4),
        )
        p.grad = p.grad_batch.sum(0)
        optimiser = make([p])
        optimiser.noise_multiplier = 0
        clip(optimiser, [p])
        optimiser.step()
        assert p.dtype == dtype
        models.append(p.detach().double())
    assert_close(*models, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("factored", [True, False])
def test_small_damping_in_low_precision(factored: bool) -> None:
    """What a step multiplies with 1 / λ is not the rounding of averages and eigenvectors."""
    factors, steps = [], []
    for size in (6, 5):
        basis, _ = torch.linalg.qr(torch.randn(size, size).double())
        factors.append(basis * torch.logspace(0, -2, size).double() @ basis.T)
    for dtype in (torch.float64, torch.bfloat16):
        p = nn.Parameter(torch.zeros(6, 5, dtype=dtype))
        optimiser = KFAC([p], 1.0, 1e-4, factored=factored, kl_clip=None)
        for scale in (1, 0.99, 1.01):
            rounded = [(scale * f).bfloat16().to(dtype) for f in factors]
            vars(p)["kfac"] = [(f + f.T) / 2 for f in rounded]
            p.grad = (factors[0][:, :1] @ factors[1][:1]).bfloat16().to(dtype)
            optimiser.step()
        steps.append(p.detach().double())
    assert (steps[1] - steps[0]).norm() < 5e-3 * steps[0].norm()


@pytest.mark.parametrize("make", [DiagGGN, KFAC, partial(KFAC, ekfac=True)])
def test_state_in_low_precision_is_loaded_as_it_was(make: Any) -> None:
    """Torch rounds it to the precision of the parameters."""
    found = []
    for loads in (False, True):
        model = network().bfloat16()
        optimiser = make(model.parameters())
        for seed in range(4):
            if loads and seed == 2:
                before, optimiser = optimiser, make(model.parameters())
                optimiser.load_state_dict(copy.deepcopy(before.state_dict()))
            torch.manual_seed(seed)
            optimiser.zero_grad()
            output = model(torch.rand(6, 3).bfloat16())
            with backpack(*optimiser.extensions):
                extend(nn.MSELoss())(output, torch.rand_like(output)).backward()
            optimiser.step()
        averages = [state["gradient"] for state in optimiser.state.values()]
        assert {average.dtype for average in averages} == {torch.float32}
        found.append([*model.parameters(), *averages])
    assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("make", [DiagGGN, KFAC, partial(KFAC, ekfac=True), SOAP])
def test_steps_inside_of_autocast(make: Any) -> None:
    """They are those outside: in the precision of the parameters."""
    found = []
    for inside in (False, True):
        model = network().float()
        optimiser = make(model.parameters())
        for seed in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                torch.manual_seed(seed)
                optimiser.zero_grad()
                output = model(torch.rand(6, 3))
                with backpack(*optimiser.extensions):
                    extend(nn.MSELoss())(output, torch.rand_like(output)).backward()
                if inside:
                    optimiser.step()
            if not inside:
                optimiser.step()
        found.append(list(model.parameters()))
    assert_close(*found, rtol=0, atol=0)


def test_private_soap_goes_on_in_half_precision() -> None:
    """The optimiser behind loads its state itself: SOAP's is in single precision."""
    p = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    private = {"max_grad_norm": 10.0, "noise_multiplier": 0.0, "expected_batch_size": 1}
    optimiser = DPOptimizer(SOAP([p]), **private)

    def steps(optimiser: DPOptimizer, p: nn.Parameter) -> None:
        for _ in range(3):
            p.grad = p.detach() * torch.linspace(-1, 2, 12).view_as(p).to(p)
            vars(p)["grad_batch"] = p.grad.unsqueeze(0)
            clip(optimiser, [p])
            optimiser.step()

    steps(optimiser, p)
    q = nn.Parameter(p.detach().clone())
    other = DPOptimizer(SOAP([q]), **private)
    other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    steps(optimiser, p)
    steps(other, q)
    assert torch.equal(p, q)


def test_adapting_the_damping_needs_a_closure() -> None:
    p = one_parameter((2,), "diag_ggn_mc", torch.ones(2))
    with pytest.raises(ValueError, match=r"give step\(\) a closure"):
        DiagGGN([p], adapt_damping_every=5).step()


@pytest.mark.parametrize("as_number", [False, True])
def test_adapting_the_damping_trains(as_number: bool) -> None:
    """The closure runs twice in every second step, and may return a tensor or a number."""
    model = network()
    optimiser = KFAC(model.parameters(), lr=0.5, adapt_damping_every=2)
    closure, calls = make_closure(model, optimiser), []

    def counted() -> Any:
        calls.append(closure())
        return calls[-1].item() if as_number else calls[-1]

    for _ in range(8):
        optimiser.step(counted)
    assert len(calls) == 12
    assert optimiser.param_groups[0]["damping"] != 1e-2
    assert calls[-1] < 0.9 * calls[0]


def test_adapting_the_damping_inside_of_autocast() -> None:
    """Autocast keeps the parameters in its precision: the loss after a step is of new ones."""
    dampings = []
    for inside in (False, True):
        model = network().float()
        optimiser = DiagGGN(model.parameters(), lr=0.1, adapt_damping_every=1)
        plain = make_closure(model, optimiser, X.float())

        def closure(inside: bool = inside, plain: Any = plain) -> Any:
            with nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
                return plain()

        for seed in range(4):
            torch.manual_seed(seed)
            with torch.autocast("cpu", torch.bfloat16) if inside else nullcontext():
                optimiser.step(closure)
        dampings.append(optimiser.param_groups[0]["damping"])
    assert dampings[1] == pytest.approx(dampings[0], rel=1e-9)
    assert dampings[0] < 1e-2


# --- DPSGD ----------------------------------------------------------------------------------------


def clip(optimiser: Any, ps: Sequence[Any]) -> None:
    """Let the extension of an optimiser make what it needs of individual gradients."""
    if isinstance(optimiser, DPOptimizer):
        for p, name, value in optimiser.extension.finish({p: p.grad_batch for p in ps}):
            setattr(p, name, value)


def private_gradients(model: nn.Module, generator: torch.Generator) -> list[Tensor]:
    """Write the gradient of algorithm 1 down, with the options of ``PRIVATE``."""
    ps, bound = list(model.parameters()), PRIVATE["max_grad_norm"]
    total = [torch.zeros_like(p) for p in ps]
    for x, y in zip(X, Y, strict=True):
        grads = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), ps)
        norm = sqrt(sum(float(g.square().sum()) for g in grads))
        for sum_of_grads, g in zip(total, grads, strict=True):
            sum_of_grads += g / max(1, norm / bound)
    noise = [torch.empty_like(p).normal_(generator=generator) for p in ps]
    sigma = PRIVATE["noise_multiplier"] * bound
    return [(t + sigma * n) / 5 for t, n in zip(total, noise, strict=True)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_dp_sgd_is_sgd_with_private_gradients(reduction: Any) -> None:
    """Both reductions give algorithm 1; the rest is torch's SGD."""
    model = network()
    reference = copy.deepcopy(model)
    options = {"momentum": 0.8, "weight_decay": 0.1}
    ours = DPSGD(
        model.parameters(),
        **PRIVATE,
        **options,
        loss_reduction=reduction,
        generator=torch.Generator().manual_seed(3),
    )
    sgd = torch.optim.SGD(reference.parameters(), lr=PRIVATE["lr"], **options)
    generator = torch.Generator().manual_seed(3)
    loss_function = extend(nn.CrossEntropyLoss(reduction=reduction))
    for _ in range(3):
        ours.zero_grad()
        with backpack(*ours.extensions):
            loss_function(model(X), Y).backward()
        norms = model[0].weight.clip_norms  # type: ignore[union-attr]
        assert norms.min() < PRIVATE["max_grad_norm"] * 5
        assert norms.max() > PRIVATE["max_grad_norm"]  # some are clipped
        ours.step()
        for p, g in zip(
            reference.parameters(), private_gradients(reference, generator), strict=True
        ):
            p.grad = g
        sgd.step()
        assert_close(parameters(model), parameters(reference))


def test_dp_sgd_without_privacy_is_sgd() -> None:
    """No noise, no bound, and the size of the batch."""
    one, other = network(), network()
    private = DPSGD(
        one.parameters(),
        lr=0.1,
        max_grad_norm=1e6,
        noise_multiplier=0,
        expected_batch_size=6,
    )
    run(private, one, 3, seed=0)
    run(torch.optim.SGD(other.parameters(), lr=0.1), other, 3, seed=0)
    assert_close(parameters(one), parameters(other))


def test_the_bound_is_that_of_all_parameters_together() -> None:
    """Whatever the scale of the loss, one sample moves all parameters by lr R / B at most."""
    model = network()
    optimiser = DPSGD(
        [{"params": model[0].parameters()}, {"params": model[2].parameters()}],
        lr=1,
        max_grad_norm=0.2,
        noise_multiplier=0,
        expected_batch_size=5,
    )
    before = parameters(model)
    with backpack(*optimiser.extensions):
        (1e3 * extend(nn.CrossEntropyLoss())(model(X[:1]), Y[:1])).backward()
    optimiser.step()
    squares = [(a - b).square().sum() for a, b in zip(parameters(model), before, strict=True)]
    assert float(sum(squares)) == pytest.approx((0.2 / 5) ** 2)


def test_a_sample_without_gradient_is_not_clipped() -> None:
    p: Any = nn.Parameter(torch.ones(2, dtype=torch.float64))
    p.grad = torch.tensor([0.5, 0.0], dtype=torch.float64)
    p.grad_batch = torch.tensor([[0.5, 0.0], [0.0, 0.0]], dtype=torch.float64)
    optimiser = DPSGD([p], lr=1, max_grad_norm=0.1, noise_multiplier=0, expected_batch_size=1)
    clip(optimiser, [p])
    optimiser.step()
    assert_close(p.detach(), torch.tensor([0.9, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("dtypes", [[torch.float16], [torch.float32, torch.bfloat16]])
def test_the_bound_in_low_precision(dtypes: list[torch.dtype]) -> None:
    """Squares of small entries are zero in float16, but the norm is not; precisions may differ."""
    ps: list[Any] = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in dtypes]
    for p in ps:
        p.grad, p.grad_batch = torch.zeros_like(p), torch.full((1, 4), 1e-4, dtype=p.dtype)
    options: dict[str, Any] = {"noise_multiplier": 0, "expected_batch_size": 1}
    optimiser = DPSGD(ps, lr=1, max_grad_norm=1e-5, **options)
    clip(optimiser, ps)
    optimiser.step()
    total = torch.cat([p.detach().double() for p in ps]).norm()
    assert total.item() == pytest.approx(1e-5, rel=0.02)


def test_different_numbers_of_samples_are_an_error() -> None:
    ps = [one_parameter((2,), "grad_batch", torch.ones(n, 2)) for n in (3, 4)]
    with pytest.raises(ValueError, match=r"no joint norms: \[3, 2\], \[4, 2\]"):
        clip(DPSGD(ps, **PRIVATE), ps)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.AdamW(ps, lr=0.1),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
        lambda ps: torch.optim.Adagrad([{"params": ps, "lr": 0.2}]),
    ],
)
def test_any_optimiser_behind(make: Any) -> None:
    """It sees private gradients, and shares groups and state."""
    options = {name: value for name, value in PRIVATE.items() if name != "lr"}
    model = network()
    reference = copy.deepcopy(model)
    private = DPOptimizer(
        make(list(model.parameters())), **options, generator=torch.Generator().manual_seed(3)
    )
    plain, generator = make(list(reference.parameters())), torch.Generator().manual_seed(3)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (private, plain)]
    for _ in range(3):
        private.step(make_closure(model, private))
        for p, g in zip(
            reference.parameters(), private_gradients(reference, generator), strict=True
        ):
            p.grad = g
        plain.step()
        for schedule in schedules:
            schedule.step()
        assert_close(parameters(model), parameters(reference))
    assert private.param_groups is private.optimizer.param_groups
    assert private.state is private.optimizer.state
    with pytest.raises(RuntimeError, match=r"grad_clipped that was used by the step before"):
        private.step()


def test_parts_of_a_batch_add_up() -> None:
    """A batch in parts is the whole batch, whatever their sizes."""
    models, steps = (network(), network()), []
    for model, parts in zip(models, ([6], [1, 3, 2]), strict=True):
        optimiser = DPSGD(model.parameters(), **PRIVATE, generator=torch.Generator().manual_seed(3))
        for i, (x, y) in enumerate(zip(X.split(parts), Y.split(parts), strict=True)):
            optimiser.zero_grad()
            with backpack(*optimiser.extensions):
                extend(nn.CrossEntropyLoss())(model(x), y).backward()
            if i < len(parts) - 1:
                optimiser.accumulate()
        optimiser.step()
        steps.append(parameters(model))
    assert_close(*steps)


def test_a_part_is_not_counted_twice() -> None:
    model = network()
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    with backpack(*optimiser.extensions):
        extend(nn.CrossEntropyLoss())(model(X), Y).backward()
    optimiser.accumulate()
    with pytest.raises(RuntimeError, match="used by the step before"):
        optimiser.accumulate()
    optimiser.step()


def groups_of(per: Any, model: Any) -> list[list[Any]]:
    """The parameters that are clipped together."""
    ps = list(model.parameters())
    return {"model": [ps], "parameter": [[p] for p in ps], "layers": [ps[:2], ps[2:]]}[per]


@pytest.mark.parametrize("stability", [None, 0.05])
@pytest.mark.parametrize("per", ["model", "parameter", "layers"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_parts_that_are_clipped_together(reduction: Any, per: Any, stability: Any) -> None:
    """Each of K groups has the bound R / √K; a sample adds R at most, which has the noise."""
    model = network()
    reference = copy.deepcopy(model)
    groups = groups_of(per, model)
    own: Any = groups if per == "layers" else per
    optimiser = DPSGD(
        model.parameters(),
        **PRIVATE,
        loss_reduction=reduction,
        generator=torch.Generator().manual_seed(3),
        per=own,
        stability=stability,
    )
    assert optimiser.max_grad_norm == PRIVATE["max_grad_norm"]
    lossfunc = extend(nn.CrossEntropyLoss(reduction=reduction))
    for x, y in zip(X.split(2), Y.split(2), strict=True):
        optimiser.zero_grad()
        with backpack(*optimiser.extensions):
            lossfunc(model(x), y).backward()
        optimiser.accumulate()
    optimiser.step()
    R = PRIVATE["max_grad_norm"]
    ps, of_reference = list(reference.parameters()), groups_of(per, reference)
    bound = R / len(of_reference) ** 0.5
    total = {p: torch.zeros_like(p) for p in ps}
    clipped = 0
    for x, y in zip(X, Y, strict=True):
        grads = torch.autograd.grad(nn.functional.cross_entropy(reference(x), y), ps)
        by_parameter = dict(zip(ps, grads, strict=True))
        squares = 0.0
        for group in of_reference:
            norm = torch.cat([by_parameter[p].flatten() for p in group]).norm()
            factor = min(1, bound / norm) if stability is None else bound / (norm + stability)
            clipped += int(factor < 1)
            squares += float((factor * norm).square())
            for p in group:
                total[p] += factor * by_parameter[p]
        assert squares**0.5 <= R * (1 + 1e-6)
    assert clipped
    generator = torch.Generator().manual_seed(3)
    noise = [torch.empty_like(p).normal_(generator=generator) for p in ps]
    sigma = PRIVATE["noise_multiplier"] * R
    for p, new, n in zip(ps, model.parameters(), noise, strict=True):
        assert_close(new, p - PRIVATE["lr"] * (total[p] + sigma * n) / 5)
    assert copy.deepcopy(optimiser).max_grad_norm == R


@pytest.mark.parametrize("as_groups", [False, True])
def test_frozen_and_later_parameters(as_groups: bool) -> None:
    """What is frozen takes no part of the bound; what is added later is a group of its own."""
    model = network()
    ps = list(model.parameters())
    ps[0].requires_grad_(False)
    given: dict[str, Any] = {**PRIVATE, "noise_multiplier": 0.0, "max_grad_norm": 1e-3}
    optimiser = DPSGD(ps[:3], **given, per=[[p] for p in ps[:3]] if as_groups else "parameter")
    lossfunc = extend(nn.CrossEntropyLoss())
    for number in (2, 3):
        optimiser.zero_grad()
        with backpack(*optimiser.extensions):  # of one sample that is clipped in all of them
            lossfunc(model(X[:1]), Y[:1]).backward()
        optimiser.step()
        expected = 1e-3 / number**0.5 / 5
        for p in ps[1 : number + 1]:
            assert p.grad is not None
            assert float(p.grad.norm()) == pytest.approx(expected, rel=1e-5)
        if number == 2:
            optimiser.add_param_group({"params": [ps[3]]})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_grad_norm": [0.1, 0.2]}, r"one number, got \[0.1, 0.2\].*per='parameter'"),
        ({"per": "layer"}, "'model', 'parameter' or groups, got 'layer'"),
        ({"per": [[nn.Parameter(torch.ones(2))]]}, "1 groups of 1 parameters.*has 4"),
        ({"per": "parameter", "adaptive": AdaptiveClipping()}, "goes with per='model'"),
        ({"stability": 0.1, "adaptive": AdaptiveClipping()}, "without stability"),
        ({"stability": -1.0}, "stability has to be larger than 0"),
    ],
)
def test_wrong_choices_of_clipping(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPSGD(network().parameters(), **{**PRIVATE, **options})


def test_something_else_than_adaptive_clipping() -> None:
    with pytest.raises(TypeError, match=r"such as AdaptiveClipping\(\), or None, got True"):
        DPSGD(network().parameters(), **{**PRIVATE, "adaptive": True})


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("kind", [KFAC, DiagGGN, DPSGD])
def test_a_gradient_scaler_is_refused(kind: Any, unscales: bool) -> None:
    """The curvature, and norms of samples, stay scaled: steps were others, without a word."""
    model, lossfunc = network(), extend(nn.CrossEntropyLoss())
    optimiser = kind(model.parameters(), **(PRIVATE if kind is DPSGD else {}))
    before = parameters(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with backpack(*optimiser.extensions):
        scaler.scale(lossfunc(model(X), Y)).backward()
    if unscales:
        scaler.unscale_(optimiser)
    with pytest.raises(RuntimeError, match=f"{kind.__name__} does not work with a gradient scaler"):
        scaler.step(optimiser)
    assert_close(parameters(model), before)
    optimiser.zero_grad()
    none = torch.amp.GradScaler("cpu", enabled=False)
    with backpack(*optimiser.extensions):
        none.scale(lossfunc(model(X), Y)).backward()
    none.step(optimiser)
    assert any((p != old).any() for p, old in zip(parameters(model), before, strict=True))


def test_a_part_is_not_forgotten() -> None:
    """Of several backward passes, the step used the last one alone, without a word."""
    steps = []
    for forgets in (True, False):
        model, lossfunc = network(), extend(nn.CrossEntropyLoss())
        generator = torch.Generator().manual_seed(3)
        optimiser = DPSGD(model.parameters(), **PRIVATE, generator=generator)
        if forgets:
            for x, y in zip(X.split(3), Y.split(3), strict=True):
                with backpack(*optimiser.extensions):
                    lossfunc(model(x), y).backward()
            for use in (optimiser.accumulate, optimiser.step):
                with pytest.raises(RuntimeError, match=r"2 backward passes .*accumulate\(\) after"):
                    use()
                with backpack(*optimiser.extensions):
                    (lossfunc(model(X), Y) + lossfunc(model(X), Y)).backward()
                with backpack(*optimiser.extensions):
                    lossfunc(model(X), Y).backward()
            optimiser.zero_grad()  # drops them
        with backpack(*optimiser.extensions):
            lossfunc(model(X), Y).backward()
        optimiser.step()
        with backpack(*optimiser.extensions):
            lossfunc(model(X), Y).backward()
        optimiser.step_without_samples()  # this pass is of no later step
        optimiser.zero_grad()
        steps.append(parameters(model))
    assert_close(*steps)


@pytest.mark.parametrize("why", ["mixes", "twice"])
def test_parts_before_a_refused_one_are_dropped(why: str) -> None:
    """A sample of them that is in the next batch, too, added 2 R."""
    model, lossfunc = network(), extend(nn.CrossEntropyLoss())
    options = {**PRIVATE, "lr": 5, "max_grad_norm": 1e-3, "noise_multiplier": 0.0}
    optimiser = DPSGD(model.parameters(), **options)
    before = parameters(model)

    def part(x: Tensor, y: Tensor, mixes: bool = False) -> None:
        optimiser.zero_grad()
        with backpack(*optimiser.extensions):
            lossfunc(model(x - x.mean(0) if mixes else x), y).backward()
        optimiser.accumulate()

    part(X[:1], Y[:1])
    if why == "mixes":
        with pytest.raises(ValueError, match="may depend on other samples"):
            part(X, Y, mixes=True)
    else:
        optimiser.zero_grad()
        for _ in range(2):
            with backpack(*optimiser.extensions):
                lossfunc(model(X), Y).backward()
        with pytest.raises(RuntimeError, match="2 backward passes since the last step"):
            optimiser.accumulate()
    part(X[:1], Y[:1])
    optimiser.step()
    pairs = zip(parameters(model), before, strict=True)
    moved = [(p - old).flatten() for p, old in pairs]
    assert float(torch.cat(moved).norm()) == pytest.approx(1e-3, rel=1e-6)


def test_a_batch_that_was_dropped_is_not_used() -> None:
    """A backward pass outside of the context has no clipped gradients, not those before it."""
    model, lossfunc = network(), extend(nn.CrossEntropyLoss())
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    with backpack(*optimiser.extensions):
        lossfunc(model(X), Y).backward()
    optimiser.zero_grad()
    lossfunc(model(X), Y).backward()
    with pytest.raises(RuntimeError, match=r"grad_clipped .*backward.. inside `with backpack"):
        optimiser.step()


def test_classes_as_bytes_are_not_ignored() -> None:
    """As ``uint8``, the ``ignore_index`` -100 is the class 156."""
    model = extend(nn.Linear(4, 157))
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    labels = torch.tensor([156, 3, 156, 0, 1, 2], dtype=torch.uint8)
    with backpack(*optimiser.extensions):
        nn.functional.cross_entropy(model(torch.rand(6, 4)), labels).backward()
    optimiser.step()


def test_a_step_without_samples_leaves_what_is_frozen() -> None:
    """A gradient that it still has from before moved it."""
    model = network()
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    optimiser.step(make_closure(model, optimiser))
    model[0].bias.requires_grad_(False)
    assert model[0].bias.grad is not None
    before = parameters(model)
    optimiser.step_without_samples()
    stays = [bool((p == old).all()) for p, old in zip(model.parameters(), before, strict=True)]
    assert stays == [False, True, False, False]


def test_a_step_without_samples_does_not_tell_that_it_is_one() -> None:
    """A layer that takes no part moved in these steps alone."""
    model, unused = network(), nn.Linear(3, 2).double()
    optimiser = DPSGD([*model.parameters(), *unused.parameters()], **PRIVATE)
    optimiser.step(make_closure(model, optimiser))
    before = parameters(model), parameters(unused)
    optimiser.step_without_samples()
    assert_close(parameters(unused), before[1], rtol=0, atol=0)
    for p, old in zip(parameters(model), before[0], strict=True):
        assert (p != old).all()
    model[0].weight.requires_grad_(False)
    optimiser.step_without_samples()  # others may take part now: all get noise
    for p, old in zip(parameters(unused), before[1], strict=True):
        assert (p != old).all()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), inf])
def test_a_bound_that_is_none_is_not_set(value: float) -> None:
    """With ``stability``, steps were zero, or went up; of an infinite one, they were NaN."""
    optimiser = DPSGD(network().parameters(), **PRIVATE, stability=0.1)
    with pytest.raises(ValueError, match=r"max_grad_norm has to be (larger than 0|finite), got"):
        optimiser.max_grad_norm = value
    assert optimiser.max_grad_norm == PRIVATE["max_grad_norm"]


def test_a_step_without_samples_is_noise() -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    before = parameters(model)
    generator = torch.Generator().manual_seed(0)
    DPSGD(model.parameters(), **PRIVATE, generator=generator).step_without_samples()
    generator.manual_seed(0)
    for p, old in zip(model.parameters(), before, strict=True):
        noise = torch.empty_like(p).normal_(generator=generator) if p.requires_grad else 0
        assert_close(p.detach(), old - 0.1 * 0.5 * 0.2 / 5 * noise)


def test_only_parameters_of_the_optimiser_are_clipped() -> None:
    model = network()
    optimiser = DPSGD(model[0].parameters(), **PRIVATE)
    optimiser.step(make_closure(model, optimiser))
    assert not hasattr(model[2].weight, "grad_clipped")
    individual = network()
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(individual(X), Y).backward()
    members = [p.grad_batch.flatten(1) for p in individual[0].parameters()]  # type: ignore
    norms = 6 * torch.cat(members, 1).norm(dim=1)
    assert_close(model[0].weight.clip_norms, norms)  # type: ignore[union-attr]


def test_the_bound_finds_the_quantile() -> None:
    """Without noise, half of the norms end up below it."""
    model = network()
    optimiser = DPSGD(
        model.parameters(),
        lr=0,
        max_grad_norm=100.0,
        noise_multiplier=0,
        expected_batch_size=6,
        adaptive=AdaptiveClipping(0.5, rate=0.2, count_noise=1e-6),
    )
    for _ in range(150):
        optimiser.step(make_closure(model, optimiser))
    norms = model[0].weight.clip_norms.sort().values  # type: ignore[union-attr]
    assert 0.9 * norms[2] <= optimiser.max_grad_norm <= 1.1 * norms[3]
    other = DPSGD(network().parameters(), **PRIVATE)
    other.load_state_dict(optimiser.state_dict())
    assert other.max_grad_norm == optimiser.max_grad_norm


def test_counting_takes_privacy_from_the_gradients() -> None:
    noise = AdaptiveClipping(count_noise=2.0).noise_of_gradients(1.5)
    assert 1 / noise**2 + 1 / 4.0**2 == pytest.approx(1 / 1.5**2)
    with pytest.raises(ValueError, match="larger than half of that"):
        DPSGD([nn.Parameter(torch.ones(1))], **PRIVATE, adaptive=AdaptiveClipping(count_noise=0.2))
    with pytest.raises(ValueError, match="quantile has to be from 0 to 1"):
        AdaptiveClipping(quantile=2)


def test_poisson_batches() -> None:
    """Each sample is in a batch with the same probability, independently of the others."""
    batches = PoissonBatches(20, 5, steps=4000, generator=torch.Generator().manual_seed(0))
    taken = torch.zeros(4000, 20)
    for row, batch in zip(taken, batches, strict=True):
        row[batch] = 1
    assert (taken.mean(0) - 0.25).abs().max() < 0.03
    assert (torch.cov(taken.T) - 0.1875 * torch.eye(20)).abs().max() < 0.02
    assert len(batches) == 4000 and len(PoissonBatches(20, 5)) == 4
    with pytest.raises(ValueError, match="at most num_samples, got 21 and 20"):
        PoissonBatches(20, 21)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["tuples", "dictionaries", "subset", "own"])
def test_empty_batches_of_a_loader(kind: str, workers: int) -> None:
    """A training loop over a ``DataLoader``, which cannot collate them by itself."""
    samples: Any = TensorDataset(X, Y)
    if kind == "dictionaries":
        samples = [{"inputs": x, "label": int(y)} for x, y in zip(X, Y, strict=True)]
    if kind == "subset":
        samples = Subset(TensorDataset(X, Y), [*range(6)])
    collate = collate_empty_too(samples, *([default_collate] if kind == "own" else []))
    draws = PoissonBatches(6, 1, steps=12, generator=torch.Generator().manual_seed(0))
    expected = list(PoissonBatches(6, 1, steps=12, generator=torch.Generator().manual_seed(0)))
    assert [] in expected and any(expected)
    loader = DataLoader(samples, batch_sampler=draws, collate_fn=collate, num_workers=workers)
    model, lossfunc = network(), extend(nn.CrossEntropyLoss())
    optimiser = DPSGD(model.parameters(), **PRIVATE)
    for batch, numbers in zip(loader, expected, strict=True):
        x, y = batch.values() if kind == "dictionaries" else batch
        assert_close(x, X[numbers])
        assert_close(y, Y[numbers])
        if not len(y):
            optimiser.step_without_samples()
            continue
        optimiser.zero_grad()
        with backpack(*optimiser.extensions):
            lossfunc(model(x), y).backward()
        optimiser.step()


def test_poisson_batches_of_a_small_rate() -> None:
    """The rate is not rounded up to a multiple of 2^-24: samples would spend more privacy."""
    generator = torch.Generator().manual_seed(0)
    drawn = sum(map(len, PoissonBatches(10**6, 0.01, steps=400, generator=generator)))
    assert drawn <= 11  # 4 are expected, more than 11 have the probability 0.001


# --- Forgotten zero_grad() ------------------------------------------------------------------------


def micro_batches(model: nn.Module, optimiser: Any, accumulate: bool, count: int = 2) -> None:
    for rows in torch.arange(6).chunk(count):
        with backpack(*optimiser.extensions, accumulate=accumulate):
            (extend(nn.CrossEntropyLoss())(model(X[rows]), Y[rows]) / count).backward()


def diagnose(model: nn.Module, optimiser: Any) -> None:
    """Look at the curvature between the step and ``zero_grad()``."""
    micro_batches(model, optimiser, False)
    optimiser.zero_grad(set_to_none=False)


CLEARED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "None": lambda model, optimiser: optimiser.zero_grad(),
    "zero": lambda model, optimiser: optimiser.zero_grad(set_to_none=False),
    "data": lambda model, optimiser: [p.grad.data.zero_() for p in model.parameters()],  # type: ignore[union-attr]
    "diagnosed before": diagnose,
}
WITH_CURVATURE = {name: OPTIMISERS[name] for name in ("DiagGGN, sampled", "KFAC", "KFLR", "EKFAC")}


@pytest.mark.parametrize("accumulate", [None, False, True], ids=["", "clear", "accumulate"])
@pytest.mark.parametrize("name", WITH_CURVATURE)
def test_forgotten_zero_grad_is_told_once(name: str, accumulate: bool | None) -> None:
    """Also where ``backpack.clear(model)`` was called, which forgot that gradients were used."""
    model = network()
    optimiser = WITH_CURVATURE[name](model.parameters(), lr=0.01)
    accumulate_too = bool(accumulate) and name != "EKFAC"  # its eigenvalues do not add up
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            if accumulate is not None:
                backpack_clear(model)
            micro_batches(model, optimiser, accumulate_too, count=1 + accumulate_too)
            optimiser.step()
    (told,) = caught
    assert re.search(r"parameter 0 .*zero_grad\(\) was not called", str(told.message))
    assert told.filename == __file__


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("clear", CLEARED.values(), ids=list(CLEARED))
@pytest.mark.parametrize("name", WITH_CURVATURE)
def test_gradients_that_are_added_up_on_purpose_are_not_told(
    name: str, clear: Callable[[nn.Module, Any], Any], accumulate: bool
) -> None:
    model = network()
    optimiser = WITH_CURVATURE[name](model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            if i:
                clear(model, optimiser)
            backpack_clear(model)
            # corrected eigenvalues do not add up
            micro_batches(model, optimiser, accumulate and name != "EKFAC")
            optimiser.step()


def test_gradient_and_curvature_that_both_go_on_are_not_told() -> None:
    model = network()
    optimiser = KFAC(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            micro_batches(model, optimiser, True)
            optimiser.step()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["DiagGGN, sampled", "KFAC", "KFLR"])
def test_forgotten_clear_is_told_once(name: str, set_to_none: bool) -> None:
    """The curvature was that of all batches so far, and the gradient that of the last one."""
    model = network()
    optimiser = WITH_CURVATURE[name](model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            optimiser.zero_grad(set_to_none)
            micro_batches(model, optimiser, True)
            optimiser.step()
    (told,) = caught
    assert re.search(r"of parameter 0 .*backpack.clear\(model\) was not called", str(told.message))
    assert told.filename == __file__


def test_a_step_without_a_backward_pass_is_refused_alone() -> None:
    """It was told of curvature that was added to that of the step before: nothing was."""
    model = network()
    optimiser = KFAC(model.parameters(), lr=0.01)
    micro_batches(model, optimiser, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimiser.step()
        with pytest.raises(RuntimeError, match="used by the step before"):
            optimiser.step()


def test_curvature_that_begins_anew_is_not_told() -> None:
    """A pass that does not accumulate ends what was added up."""
    model = network()
    optimiser = KFAC(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(4):
            optimiser.zero_grad()
            micro_batches(model, optimiser, accumulate=False, count=1)
            optimiser.zero_grad()
            micro_batches(model, optimiser, accumulate=i != 2)
            optimiser.step()


# --- Privacy --------------------------------------------------------------------------------------


def divergence_by_integration(order: int, sigma: float, rate: float) -> float:
    """Integrate the divergence of the mixture from the normal distribution on a fine grid."""
    x = torch.linspace(-30 * sigma, 30 * sigma + order, 400_001, dtype=torch.float64)
    normal = -x.square() / (2 * sigma**2) - log(sigma * sqrt(2 * pi))
    shifted = -(x - 1).square() / (2 * sigma**2) - log(sigma * sqrt(2 * pi))
    mixture = torch.logaddexp(normal + log(1 - rate), shifted + log(rate))
    integrand = (order * mixture + (1 - order) * normal).exp()
    return log(torch.trapezoid(integrand, x).item()) / (order - 1)


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("sigma", [0.8, 4.0])
@pytest.mark.parametrize("order", [2, 3, 10])
def test_divergence_is_that_of_the_mixture(order: int, sigma: float, rate: float) -> None:
    expected = divergence_by_integration(order, sigma, rate)
    assert renyi_divergence(order, sigma, rate) == pytest.approx(expected, rel=1e-6)


def test_divergence_with_another_default_device() -> None:
    """Binomials of that device were kept, so that it was an error there, and later elsewhere."""
    order = 37
    _log_binomials.cache_clear()
    with torch.device("meta"):
        found = renyi_divergence(order, 1.5, 0.1)
    assert found == renyi_divergence(order, 1.5, 0.1) > 0


def test_limits_of_the_divergence() -> None:
    """All samples: that of two normal distributions. None: zero. Without noise: infinite."""
    for order in (2, 7, 300):
        assert renyi_divergence(order, 1.5) == order / (2 * 1.5**2)
        assert renyi_divergence(order, 1.5, 1 - 1e-12) == pytest.approx(order / (2 * 1.5**2))
        assert renyi_divergence(order, 1.5, 0) == 0
        assert renyi_divergence(order, 0, 0.1) == inf
    assert privacy_spent(0, 0.0, 0.5, 1e-5) == 0
    assert privacy_spent(10, 0.0, 0.5, 1e-5) == inf
    assert privacy_spent(10, 1e300, 0.5, 1e-5) == privacy_spent(10, inf, 0.5, 1e-5)
    with pytest.raises(ValueError, match="orders has to have"):
        privacy_spent(10, 1.0, 0.5, 1e-5, orders=[])


@pytest.mark.parametrize("sigma", [1.0, 3.0, 10.0])
def test_epsilon_of_the_gaussian_mechanism(sigma: float) -> None:
    """Never less than the exact ε of one release with all samples, and at most a fifth more.

    The exact δ is that of Balle, Wang, Improving the Gaussian mechanism (ICML 2018), theorem 8.
    """

    def delta_of(epsilon: float) -> float:
        a, b = (torch.tensor(s / (2 * sigma) - epsilon * sigma).double() for s in (1, -1))
        return float(torch.special.ndtr(a) - exp(epsilon) * torch.special.ndtr(b))

    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > 1e-5 else (low, middle)
    assert high <= privacy_spent(1, sigma, 1.0, 1e-5) < 1.2 * high


def test_epsilon_of_the_paper() -> None:
    """Abadi et al. (2016), section 5.1: 100 epochs, a sampling rate of 0.01, σ = 4, δ = 1e-5.

    Their conversion to (ε, δ) is older; the newer one lowers ε.
    """
    classic = min(
        10_000 * renyi_divergence(order, 4, 0.01) + log(1e5) / (order - 1) for order in range(2, 64)
    )
    assert classic == pytest.approx(1.26, abs=0.005)
    assert 1.0 < privacy_spent(10_000, 4, 0.01, 1e-5) < classic


def epsilon_by_integration(steps: int, sigma: float, rate: float, delta: float) -> float:
    """Return the least ε, by convolution of the losses log dP/dQ of the steps on a fine grid.

    P is the mixture that a batch with the sample is drawn from, Q the normal distribution without
    it, both ways round. Source: Koskela, Jälkö, Honkela, Computing tight differential privacy
    guarantees using FFT (AISTATS 2020).
    """
    x = torch.linspace(-12 * sigma, 12 * sigma + 1, 400_001, dtype=torch.float64)
    normal = -x.square() / (2 * sigma**2)
    mixture = torch.logaddexp(
        normal + log(1 - rate), -(x - 1).square() / (2 * sigma**2) + log(rate)
    )
    size, width = 2**17, 60.0
    grid = (torch.arange(size, dtype=torch.float64) - size // 2) * (2 * width / size)
    epsilons = []
    for p, q in ((mixture, normal), (normal, mixture)):
        mass = p.exp() / p.exp().sum()
        cells = ((p - q + width) * size / (2 * width)).round().long().clamp(0, size - 1)
        density = torch.zeros(size, dtype=torch.float64).index_add(0, cells, mass)
        total = torch.fft.irfft(torch.fft.rfft(density.roll(size // 2)) ** steps, size)
        total = total.roll(size // 2)
        low, high = 0.0, width
        for _ in range(40):
            middle = (low + high) / 2
            above = grid > middle
            spent = (total[above] * -torch.expm1(middle - grid[above])).sum()
            low, high = (middle, high) if spent > delta else (low, middle)
        epsilons.append(high)
    return max(epsilons)


@pytest.mark.parametrize(
    ("steps", "sigma", "rate"), [(1, 1.0, 0.1), (100, 1.0, 0.05), (1000, 2.0, 0.05), (20, 3.0, 0.5)]
)
def test_epsilon_bounds_that_of_steps_with_sampled_batches(
    steps: int, sigma: float, rate: float
) -> None:
    exact = epsilon_by_integration(steps, sigma, rate, 1e-5)
    assert exact <= privacy_spent(steps, sigma, rate, 1e-5) < 1.3 * exact


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 300.0])
@pytest.mark.parametrize(("steps", "rate"), [(1, 1.0), (1000, 0.01), (50, 0.5)])
def test_noise_for_an_epsilon(epsilon: float, steps: int, rate: float) -> None:
    """It never spends more than that, and hardly less noise does."""
    sigma = noise_multiplier_for(epsilon, steps, rate, 1e-5)
    assert privacy_spent(steps, sigma, rate, 1e-5) <= epsilon
    assert privacy_spent(steps, sigma / 1.0001, rate, 1e-5) > epsilon


def test_limits_of_the_noise_for_an_epsilon() -> None:
    assert noise_multiplier_for(1.0, 0, 0.1, 1e-5) == 0  # no steps
    assert noise_multiplier_for(inf, 10, 0.1, 1e-5) == 0
    with pytest.raises(ValueError, match=r"cannot be reached .* up to 512 show 0.00837 at best"):
        noise_multiplier_for(0.008, 10, 0.1, 1e-5)
    orders = range(2, 2048, 32)  # the remedy of the message
    sigma = noise_multiplier_for(0.008, 10, 0.1, 1e-5, orders=iter(orders))
    assert privacy_spent(10, sigma, 0.1, 1e-5, orders) <= 0.008


def test_accountant_adds_up_phases() -> None:
    """The best order of the sums of divergences; equal steps are those of ``privacy_spent``."""
    accountant, delta = PrivacyAccountant(), 1e-5
    assert accountant.spent(delta) == accountant.steps == 0
    for _ in range(40):
        accountant.record(1.1, 0.05)
    assert accountant.spent(delta) == pytest.approx(privacy_spent(40, 1.1, 0.05, delta), rel=1e-12)
    accountant.record(2.5, 0.2, steps=30)
    accountant.record(1.1, 0.05, steps=10)
    assert accountant.steps == 80
    orders = torch.tensor([*range(2, 64), *range(64, 513, 16)], dtype=torch.float64)
    sums = torch.tensor(
        [
            50 * renyi_divergence(int(a), 1.1, 0.05) + 30 * renyi_divergence(int(a), 2.5, 0.2)
            for a in orders
        ]
    )
    expected = sums + (1 - 1 / orders).log() - (delta * orders).log() / (orders - 1)
    assert accountant.spent(delta) == pytest.approx(expected.min().item(), rel=1e-6)
    assert accountant.spent(delta) < sum(
        privacy_spent(steps, *phase, delta) for steps, *phase in ((50, 1.1, 0.05), (30, 2.5, 0.2))
    )
    # Gaussian mechanisms on all samples compose to one of 1/σ² = sum 1/σ_i²
    whole = PrivacyAccountant()
    whole.record(3.0, 1.0, steps=4)
    whole.record(6.0, 1.0, steps=9)
    one = (4 / 9 + 9 / 36) ** -0.5
    assert whole.spent(delta) == pytest.approx(privacy_spent(1, one, 1.0, delta), rel=1e-12)
    whole.record(0.0, 0.1)
    assert whole.spent(delta) == inf


def test_accountant_watches_steps_and_goes_on(tmp_path: Any) -> None:
    model, lossfunc, accountant = network(), extend(nn.CrossEntropyLoss()), PrivacyAccountant()
    optimiser = DPSGD(model.parameters(), **{**PRIVATE, "noise_multiplier": 1.5})
    handle = accountant.watch(optimiser, 0.1)
    for noise in (1.5, 3.0):
        optimiser.noise_multiplier = noise
        with backpack(*optimiser.extensions):
            lossfunc(model(X), Y).backward()
        optimiser.step()
        optimiser.step_without_samples()
    handle.remove()
    optimiser.step_without_samples()
    expected = PrivacyAccountant()
    for noise in (1.5, 3.0):
        expected.record(noise, 0.1, 2)
    assert accountant.state_dict() == expected.state_dict()
    torch.save(accountant.state_dict(), tmp_path / "accountant.pt")
    new = PrivacyAccountant()
    new.record(9.0, 0.5)
    new.load_state_dict(torch.load(tmp_path / "accountant.pt"))
    assert new.steps == 4 and new.spent(1e-5) == expected.spent(1e-5)
    with pytest.raises(ValueError, match="noise_multiplier has to be"):
        new.load_state_dict({"phases": [[1.0, 0.1, 1], [-1.0, 0.1, 1]]})
    assert new.state_dict() == expected.state_dict()
    private = {name: value for name, value in PRIVATE.items() if name != "lr"}
    around = DPOptimizer(torch.optim.Adam(model.parameters()), **private)
    with pytest.raises(TypeError, match=r"Steps of Adam are not private.*DPOptimizer around"):
        accountant.watch(around.optimizer, 0.5)
    accountant.watch(around, 0.5)
    around.step_without_samples()
    assert accountant.state_dict()["phases"][-1] == [around.noise_multiplier, 0.5, 1]


def test_privacy_depends_on_everything() -> None:
    """More steps, larger batches and less noise spend more."""
    epsilon = privacy_spent(100, 1.0, 0.01, 1e-5)
    assert privacy_spent(200, 1.0, 0.01, 1e-5) > epsilon
    assert privacy_spent(100, 1.0, 0.02, 1e-5) > epsilon
    assert privacy_spent(100, 1.1, 0.01, 1e-5) < epsilon
    assert privacy_spent(100, 1.0, 0.01, 1e-4) < epsilon


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: renyi_divergence(1, 1.0), "order has to be"),
        (lambda: renyi_divergence(2.5, 1.0), "order has to be"),  # type: ignore[arg-type]
        (lambda: renyi_divergence(2, -1.0), "noise_multiplier has to be"),
        (lambda: renyi_divergence(2, 1.0, 1.1), "sampling_rate from 0 to 1"),
        (lambda: privacy_spent(-1, 1.0, 0.1, 1e-5), "steps has to be"),
        (lambda: privacy_spent(1, 1.0, 0.1, 1.0), "delta between 0 and 1"),
        (lambda: privacy_spent(float("nan"), 1.0, 0.1, 1e-5), "steps has to be"),  # type: ignore[arg-type]
        (lambda: privacy_spent([1, 2], 1.0, 0.1, 1e-5), r"one number.*\[1, 2\].*PrivacyAcc"),
        (lambda: PrivacyAccountant().record(-1.0, 0.1), "noise_multiplier has to be at least 0"),
        (lambda: PrivacyAccountant().record(1.0, 1.1), "sampling_rate from 0 to 1"),
        (lambda: PrivacyAccountant().record(1.0, 0.1, -1), "steps has to be at least 0, got -1"),
        (lambda: PrivacyAccountant().spent(1.0), "delta between 0 and 1"),
        (lambda: noise_multiplier_for(0.0, 1, 0.1, 1e-5), "epsilon has to be"),
        (lambda: noise_multiplier_for(1.0, 1, 1.1, 1e-5), "sampling_rate from 0 to 1"),
        (lambda: noise_multiplier_for(1.0, 1, 0.1, 0.0), "delta between 0 and 1"),
    ],
)
def test_bad_arguments_of_the_accountant(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- Against tuned SGD ----------------------------------------------------------------------------


def digits_loss(make: Callable[[Any], Any], seed: int, steps: int = 150) -> float:
    """Train a small network on digits and return its loss on all of them.

    Initial weights and batches depend on the seed alone. The step size falls linearly to zero.
    """
    images, labels = load_digits(return_X_y=True)
    X, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)]
    model = extend(nn.Sequential(*layers, nn.Tanh(), nn.Linear(32, 10)))
    optimiser = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0, total_iters=steps)
    for batch in torch.randint(len(y), (steps, 128), generator=torch.Generator().manual_seed(seed)):
        loss = optimiser.step(make_closure(model, optimiser, X[batch], y[batch]))
        if not loss < 10:
            return inf
        schedule.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(X), y).item()


def mean_digits_loss(make: Callable[[Any], Any]) -> float:
    return sum(digits_loss(make, seed) for seed in range(3)) / 3


@pytest.mark.slow
def test_curvature_beats_tuned_sgd_per_step() -> None:
    """As they come, they have a lower loss after as many steps than SGD at its best."""
    sgd = min(
        mean_digits_loss(partial(torch.optim.SGD, lr=lr, momentum=momentum))
        for momentum in (0, 0.8, 0.9, 0.95)
        for lr in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1, 1.5, 2)
    )
    assert sgd < 0.05  # it learns
    assert mean_digits_loss(DiagGGN) < 0.8 * sgd
    assert mean_digits_loss(KFAC) < 0.3 * sgd
    assert mean_digits_loss(partial(KFAC, extension=extensions.KFLR())) < 0.3 * sgd


def test_kfac_of_a_transposed_convolution() -> None:
    """Its factors are those of ``weight.transpose(0, 1)``, which sizes alone do not tell."""
    torch.manual_seed(0)
    layer = nn.ConvTranspose1d(3, 3, 2).double()
    model = extend(nn.Sequential(layer, nn.Flatten()))
    lossfunc = extend(nn.MSELoss())
    optimizer = KFAC(
        layer.parameters(), lr=1.0, damping=0.1, betas=(0.0, 0.0), factored=False, kl_clip=None
    )
    x = torch.rand(5, 3, 4, dtype=torch.float64)
    before = layer.weight.detach().clone()
    loss = lossfunc(model(x), torch.rand(5, 15, dtype=torch.float64))
    with backpack(*optimizer.extensions):
        loss.backward()
    block = kfacs_to_mat(layer.weight.kfac)
    g = layer.weight.grad.transpose(0, 1)
    step = torch.linalg.solve(block + 0.1 * torch.eye(18, dtype=torch.float64), g.flatten())
    expected = before - step.reshape(3, 3, 2).transpose(0, 1)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), expected)


def test_ekfac_of_a_transposed_convolution() -> None:
    """Squares along the eigenvectors have the axes of ``weight.transpose(0, 1)``, too."""
    torch.manual_seed(0)
    layer = nn.ConvTranspose1d(3, 3, 2).double()
    model, lossfunc = extend(nn.Sequential(layer, nn.Flatten())), extend(nn.MSELoss())
    options: dict[str, Any] = {"lr": 1.0, "damping": 0.1, "betas": (0.0, 0.0), "kl_clip": None}
    optimizer = KFAC(layer.parameters(), **options, ekfac=True, extension=extensions.KFLR())
    x, y = torch.rand(5, 3, 4, dtype=torch.float64), torch.rand(5, 15, dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        before = layer.weight.detach().clone()
        with backpack(*optimizer.extensions, extensions.EKFAC(fisher="exact")):
            lossfunc(model(x), y).backward()
        matrix = layer.weight.ekfac.dense() + 0.1 * torch.eye(18, dtype=torch.float64)
        step = torch.linalg.solve(matrix, layer.weight.grad.flatten())
        optimizer.step()
        assert_close(layer.weight.detach(), before - step.reshape(3, 3, 2))


class Painted(nn.Module):
    """A picture that is made of a parameter, with colours that are made of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = nn.Parameter(torch.rand(1, 3, 4))
        self.up, self.colour = nn.ConvTranspose1d(3, 3, 3, bias=False), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.colour(x).unsqueeze(2) * self.up(self.seed)).flatten(1)


@pytest.mark.parametrize("ekfac", [False, True])
def test_kfac_of_a_transposed_convolution_without_samples(ekfac: bool) -> None:
    """The factor is the whole block, in the order of the axes."""
    torch.manual_seed(0)
    model, lossfunc = extend(Painted().double(), use_converter=True), extend(nn.MSELoss())
    p: Any = model.up.weight  # type: ignore[union-attr]
    options: dict[str, Any] = {"lr": 1.0, "damping": 0.1, "betas": (0.0, 0.0), "kl_clip": None}
    optimizer = KFAC([p], **options, ekfac=ekfac, extension=extensions.KFLR())
    before = p.detach().clone()
    X, y = torch.rand(5, 2, dtype=torch.float64), torch.rand(5, 18, dtype=torch.float64)
    with backpack(*optimizer.extensions, extensions.GGNMP()):
        lossfunc(model(X), y).backward()
    eye = torch.eye(27, dtype=torch.float64)
    block = p.ggnmp(eye.reshape(27, *p.shape)).reshape(27, 27)
    step = torch.linalg.solve(block + 0.1 * eye, p.grad.flatten())
    optimizer.step()
    assert_close(p.detach(), before - step.reshape(p.shape))


@pytest.mark.filterwarnings("ignore")
def test_kfac_of_a_weight_that_a_convolution_and_a_transposed_one_share() -> None:
    """The factor is the whole block, in the order of the axes."""
    torch.manual_seed(0)
    up, down = nn.ConvTranspose1d(3, 4, 3, bias=False), nn.Conv1d(4, 3, 3, bias=False)
    down.weight = up.weight
    model = extend(nn.Sequential(up, nn.Tanh(), down, nn.Flatten()).double())
    lossfunc = extend(nn.MSELoss())
    optimizer = KFAC(
        model.parameters(),
        lr=1.0,
        damping=0.1,
        betas=(0.0, 0.0),
        extension=extensions.KFLR(),
        kl_clip=None,
    )
    x = torch.rand(6, 3, 5, dtype=torch.float64)
    before = up.weight.detach().clone()
    loss = lossfunc(model(x), torch.rand(6, 15, dtype=torch.float64))
    with backpack(*optimizer.extensions):
        loss.backward()
    (block,) = up.weight.kflr
    gradient = up.weight.grad.flatten()
    step = torch.linalg.solve(block + 0.1 * torch.eye(36, dtype=torch.float64), gradient)
    optimizer.step()
    assert_close(up.weight.detach(), before - step.reshape(3, 4, 3))


@pytest.mark.parametrize("joint", [False, True])
def test_copies_of_extended_models_take_the_same_steps(joint: bool) -> None:
    """Also with factors of swapped axes, and with biases that are joined."""
    torch.manual_seed(0)
    convolution = nn.Conv1d(2, 3, 2) if joint else nn.ConvTranspose1d(2, 3, 2)
    layers = convolution, nn.Flatten(), nn.LazyLinear(2)
    model = nn.Sequential(*layers).double()
    data, y = torch.rand(5, 2, 4, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    model(data)
    extend(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    copies = copy.deepcopy(model), torch.load(stored, weights_only=False)
    for each in (model, *copies):
        optimiser = KFAC(each.parameters(), extension=extensions.KFLR(joint_bias=joint))
        with backpack(*optimiser.extensions):
            extend(nn.MSELoss())(each(data), y).backward()
        optimiser.step()
    for each in copies:
        assert_close(list(each.parameters()), list(model.parameters()))


class LossInside(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = nn.Linear(5, 4), options

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(x), y, **self.options)


class MaskInside(LossInside):
    """The loss of some samples, which a mask chooses before or behind it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if "reduction" in self.options:
            return nn.functional.cross_entropy(self.layer(x), y, reduction="none")[y != 1].mean()
        return super().forward(x[y != 1], y[y != 1])


class SmallestInside(LossInside):
    """Losses that are chosen by their ranks: among all samples, or among the classes of each."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(self.layer(x), y, reduction="none")
        if self.options:
            return losses[losses.argsort()[:3]].sum() / 8
        ranks = self.layer(x).argsort(1)
        return (losses * ranks[:, 0]).sum() / 8


class Reduce(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, losses: Tensor) -> Tensor:
        return self.function(losses)


class Reduced(nn.Module):
    """A loss with a module that reduces those of the samples."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.reducer = Reduce(function)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.reducer(nn.functional.cross_entropy(x, y, reduction="none"))


def of_mask(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(x[y != 1], y[y != 1], **options)


VALUES, LABELS, ONES = torch.linspace(-1, 1, 8), torch.arange(8) % 4, torch.ones(4)
SQUARES: Callable[..., Tensor] = lambda x, y: (x - y).square().mean()  # noqa: E731
FUNCTIONAL = nn.functional
CLASSES, ORDER = extend(nn.CrossEntropyLoss()), [1, 0, 2, 3, 4, 7, 6, 5]
# a loss, targets, whether each individual gradient depends on one sample
LOSSES: dict[str, tuple[Any, Any, bool]] = {
    "mean square": (nn.MSELoss(), VALUES[:, None], True),
    "mean square of a constant": (nn.MSELoss(), torch.zeros(1, 1), True),
    "targets that broadcast": (nn.MSELoss(), VALUES, False),
    "targets that broadcast, absolute": (nn.L1Loss(), VALUES, False),
    "targets that broadcast, counts": (nn.PoissonNLLLoss(), VALUES.abs(), False),
    "function": (FUNCTIONAL.mse_loss, VALUES[:, None], True),
    "function, targets that broadcast": (FUNCTIONAL.mse_loss, VALUES, False),
    "own": (SQUARES, VALUES[:, None], True),
    "own, of one axis": (lambda x, y: SQUARES(x.squeeze(1), y), VALUES, True),
    "own, targets that broadcast": (SQUARES, VALUES, False),
    "classes": (nn.CrossEntropyLoss(), LABELS, True),
    "own, of pairs of classes": (lambda x, _: (x[:, None] - x[..., None]).exp().mean(), None, True),
    "weights": (nn.CrossEntropyLoss(weight=ONES), LABELS, False),
    "weights, probabilities": (nn.CrossEntropyLoss(weight=ONES), torch.eye(4)[LABELS], True),
    "weights, summed": (nn.CrossEntropyLoss(weight=ONES, reduction="sum"), LABELS, True),
    "ignored": (nn.CrossEntropyLoss(ignore_index=2), LABELS, False),
    "none is ignored": (nn.CrossEntropyLoss(ignore_index=9), LABELS, True),
    "function of classes": (FUNCTIONAL.cross_entropy, LABELS, True),
    "function, ignored": (partial(FUNCTIONAL.cross_entropy, ignore_index=2), LABELS, False),
    "function, weights": (partial(FUNCTIONAL.cross_entropy, weight=ONES), LABELS, False),
    "inside": (LossInside(), LABELS, True),
    "inside, weights": (LossInside(weight=ONES), LABELS, False),
    "inside, weights, summed": (LossInside(weight=ONES, reduction="sum"), LABELS, True),
    "inside, ignored": (LossInside(ignore_index=2), LABELS, False),
    "inside, of a mask": (MaskInside(), LABELS, False),
    "inside, mean of a mask": (MaskInside(reduction="none"), LABELS, False),
    "inside, smallest": (SmallestInside(of="all"), LABELS, False),
    "inside, ranks of classes": (SmallestInside(), LABELS, True),
    "function, of a mask": (of_mask, LABELS, False),
    "function, of a mask, summed": (partial(of_mask, reduction="sum"), LABELS, True),
    "classes, of rows": (lambda x, y: CLASSES(x[[0, 1, 4]], y[[0, 1, 4]]), LABELS, False),
    "classes, in another order": (
        lambda x, y: CLASSES(x.flip(0)[ORDER], y.flip(0)[ORDER]),
        LABELS,
        True,
    ),
    "reduced": (Reduced(lambda losses: losses[ORDER].mean()), LABELS, True),
    "reduced, not zero": (Reduced(lambda losses: losses[losses != 0].mean()), LABELS, False),
    "reduced, squared": (Reduced(lambda losses: losses.mean() ** 2), LABELS, False),
    "reduced, largest": (Reduced(torch.amax), LABELS, False),
    "largest": (lambda x, y: CLASSES(x, y) + (x - y[:, None]).square().amax(), LABELS, False),
    "own, of a mask": (lambda x, y: (x - y).square()[VALUES > 0].mean(), VALUES[:, None], False),
}


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.filterwarnings("ignore:The network mixes:UserWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_whose_terms_depend_on_targets_of_others_are_refused(name: str) -> None:
    loss, y, is_private = LOSSES[name]
    torch.manual_seed(0)
    X, inside = torch.randn(8, 5), isinstance(loss, LossInside)
    model = loss if inside else nn.Linear(5, 4 if y is None or y.dtype == torch.long else 1)
    if "probabilities" in name:
        model = nn.Linear(5, 4)
    model = extend(copy.deepcopy(model), use_converter="record")
    if not inside and isinstance(loss, nn.Module):
        loss = extend(copy.deepcopy(loss))
    reduction: Any = "sum" if "summed" in name else "mean"
    optimizer = DPSGD(
        model.parameters(),
        lr=0.1,
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        expected_batch_size=8,
        loss_reduction=reduction,
    )
    with backpack(*optimizer.extensions):
        (model(X, y) if inside else loss(model(X), y)).backward()
    if is_private:
        optimizer.step()
    else:
        with pytest.raises(ValueError, match="private"):
            optimizer.step()


def private_step(
    loss_of: Callable[[Tensor, Tensor], Tensor], reduction: Any, N: int = 6, seed: float = 1.0
) -> None:
    model = network()
    optimiser = DPSGD(model.parameters(), **PRIVATE, loss_reduction=reduction)
    with backpack(*optimiser.extensions):
        loss = loss_of(model(X[:N]), Y[:N])
        loss.backward(torch.tensor(seed, dtype=loss.dtype))
    optimiser.step()


def cross_entropies(reduction: str) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return a loss module, the same without ``extend``, and the function."""
    return {
        r"CrossEntropyLoss(\(\))?,": extend(nn.CrossEntropyLoss(reduction=reduction)),
        r"not extended \(NllLossBackward0\),": nn.CrossEntropyLoss(reduction=reduction),
        r"\(NllLossBackward0\),": partial(FUNCTIONAL.cross_entropy, reduction=reduction),
        r"\(MseLossBackward0\),": lambda z, y: FUNCTIONAL.mse_loss(
            z[:, 0], y.to(z), reduction=reduction
        ),
    }


@pytest.mark.parametrize(("has", "stated"), [("mean", "sum"), ("sum", "mean")])
def test_dp_sgd_refuses_another_reduction_than_that_of_the_loss(has: str, stated: str) -> None:
    for name, loss_of in cross_entropies(has).items():
        with pytest.raises(ValueError, match=f"reduction='{has}'.* of .*{name} but .* '{stated}'"):
            private_step(loss_of, stated)
        private_step(loss_of, has)
        private_step(loss_of, stated, N=1)  # the same


def test_dp_sgd_does_not_judge_the_scale_of_what_was_rescaled() -> None:
    for loss_of in cross_entropies("sum").values():
        private_step(lambda z, y, loss_of=loss_of: loss_of(z, y) / len(y), "mean")  # type: ignore[misc]
        private_step(loss_of, "mean", seed=1 / 6)
    for loss_of in cross_entropies("mean").values():
        private_step(lambda z, y, loss_of=loss_of: loss_of(z, y) * len(y), "sum")  # type: ignore[misc]


class Squares(nn.Module):
    """A loss of one's own, of predictions with the samples along any axis."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return getattr((z - y).square(), self.reduction)()


@pytest.mark.parametrize(
    ("loss_class", "is_extended"), [(Squares, True), (nn.MSELoss, True), (nn.MSELoss, False)]
)
def test_dp_sgd_knows_the_scale_of_sequences(loss_class: Any, is_extended: bool) -> None:
    """Their first axis is that of time, with another length than the batch."""
    for has, stated in (("mean", "sum"), ("sum", "mean"), ("sum", "sum")):
        torch.manual_seed(0)
        model, lossfunc = extend(nn.RNN(3, 2)), loss_class(reduction=has)
        lossfunc = extend(lossfunc) if is_extended else lossfunc
        optimiser = DPSGD(model.parameters(), **PRIVATE, loss_reduction=stated)
        with backpack(*optimiser.extensions):
            z, _ = model(torch.randn(5, 4, 3))
            lossfunc(z, torch.randn_like(z)).backward()
        told: Any = pytest.raises(ValueError, match=f"reduction='{has}'.* but .*'{stated}'")
        with nullcontext() if has == stated else told:
            optimiser.step()


def test_individual_gradients_of_targets_that_broadcast_are_told() -> None:
    model, loss = extend(nn.Linear(5, 1)), extend(nn.L1Loss())
    with pytest.warns(UserWarning, match="Using a target size"):
        value = loss(model(torch.randn(8, 5)), torch.randn(8))
    told = pytest.warns(UserWarning, match="mixes the samples of a batch, in L1Loss")
    with told, backpack(extensions.BatchGrad()):
        value.backward()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [nn.L1Loss(), nn.PoissonNLLLoss()])
@pytest.mark.parametrize(("shape", "is_told"), [((4, 3), False), ((1, 4), True)])
def test_predictions_that_meet_several_targets_of_their_sample(
    loss: nn.Module, shape: tuple[int, int], is_told: bool, recwarn: pytest.WarningsRecorder
) -> None:
    X, y = torch.randn(4, 5), torch.rand(shape)
    model = extend(nn.Linear(5, 1))
    with backpack(extensions.BatchGrad()):
        extend(loss)(model(X), y).backward()
    assert any("mixes the samples" in str(told.message) for told in recwarn) == is_told
    if not is_told:
        for n in range(4):
            alone = loss(model(X[n : n + 1]), y[n : n + 1]) / 4
            (expected,) = torch.autograd.grad(alone, model.weight)
            assert_close(model.weight.grad_batch[n], expected)


class Centred(nn.Module):
    """A loss in which samples meet, at the predictions or at the targets."""

    reduction = "mean"

    def forward(self, z: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return (z - z.mean(0)).square().sum(1).mean()
        return ((z - y).square().sum(1) * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("loss", "arguments", "is_told"),
    [
        (Centred(), (torch.ones(4, 1),), True),
        (Centred(), (torch.ones(4, 1), torch.tensor([True, False, True, True])), False),
        (
            WeightedLoss(nn.HingeEmbeddingLoss(reduction="none")),
            (torch.ones(4), torch.ones(4)),
            True,
        ),
    ],
)
def test_dp_sgd_refuses_losses_that_mix_samples(
    loss: nn.Module, arguments: Any, is_told: bool
) -> None:
    model = extend(nn.Linear(3, 1))
    optimiser = DPSGD(
        model.parameters(), 0.1, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4
    )
    name = type(loss).__name__
    told = pytest.warns(UserWarning, match=f"mixes the samples of a batch, in {name}")
    with told if is_told else nullcontext() as caught, backpack(optimiser.extension):
        extend(loss)(model(torch.rand(4, 3)), *arguments).backward()
    for warning in caught or []:
        assert "Let each term of the loss depend on one sample" in str(warning.message)
        assert "[N, 1] and [N] broadcast" in str(warning.message)
        assert "GroupNorm" not in str(warning.message)
    with pytest.raises(ValueError, match=f"{name}.*would not be private"):
        optimiser.step()


@pytest.mark.parametrize(
    "factor",
    [
        lambda z, y: 1 / torch.bincount(y, minlength=3)[y],
        lambda z, y: 1 / len(y.unique()),
        lambda z, y: 1 + int(y.max()),
        lambda z, y: 1 + z[0, 0].item(),
        lambda z, y: 1 + z[3, 0].detach(),
        lambda z, y: z.detach().square().sum(1).softmax(0),
    ],
    ids=["counts", "number of classes", "largest", "first", "last", "softmax"],
)
def test_dp_sgd_refuses_losses_with_values_of_other_samples(factor: Any) -> None:
    """No gradient passes to those."""

    class Weighed(nn.Module):
        reduction = "mean"

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            each = nn.functional.cross_entropy(z, y, reduction="none")
            return (factor(z, y) * each).mean()

    model = extend(nn.Linear(3, 3))
    optimiser = DPSGD(
        model.parameters(), 0.1, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=8
    )
    with backpack(optimiser.extension):
        extend(Weighed())(
            model(torch.rand(8, 3)), torch.tensor([0, 2, 0, 1, 2, 2, 1, 2])
        ).backward()
    with pytest.raises(ValueError, match=r"depend on other samples.*Weighed"):
        optimiser.step()


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x - x.mean(0),
        lambda x: x / x.abs().max(),
        lambda x: x * x[:1].sum(),
        lambda x: x * x.roll(1, 0),
        lambda x: torch.cat([x[:1] * x[1:2], x[1:]]),
        lambda x: torch.cat([x[:1] * x[-1:], x[1:]]),
        lambda x: torch.cat([x[:-1], x[-1:] * x[-2:-1]]),
    ],
    ids=["mean", "largest", "first", "neighbours", "0 and 1", "ends", "the last two"],
)
def test_dp_sgd_sees_that_few_samples_are_mixed(mix: Any, samples: int) -> None:
    """Two samples were never told apart, nor was what the first one alone has to do with others."""
    model, lossfunc = network(), extend(nn.CrossEntropyLoss())
    for own in (mix, lambda x: x):
        optimiser = DPSGD(model.parameters(), **PRIVATE)
        refused = pytest.raises(ValueError, match="may depend on other samples")
        with refused if own is mix else nullcontext():
            with backpack(*optimiser.extensions):
                lossfunc(model(own(X[:samples])), Y[:samples]).backward()
            optimiser.step()


@pytest.mark.parametrize("fails", [True, False], ids=["once", "random"])
def test_dp_sgd_refuses_losses_that_cannot_be_evaluated_again(fails: bool) -> None:
    """None of them is said to mix samples, and none not to do so."""

    class Loss(nn.Module):
        def forward(self, z: Tensor, generator: Any) -> Tensor:
            if fails:
                next(generator)
                return z.square().mean()
            return (z - torch.rand(z.shape, generator=generator)).square().mean()

    model, name = extend(nn.Linear(3, 1)), DPSGD.__name__
    optimiser = DPSGD(
        model.parameters(), 0.1, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4
    )
    generator = iter([1]) if fails else torch.Generator()
    with warnings.catch_warnings(), backpack(optimiser.extension):
        warnings.simplefilter("error")
        extend(Loss())(model(torch.rand(4, 3)), generator).backward()
    with pytest.raises(ValueError, match=f"{name}.*cannot be told, because of Loss"):
        optimiser.step()


def test_state_of_other_options_is_refused() -> None:
    def trained(**options: Any) -> KFAC:
        model, X = extend(nn.Linear(3, 2)), torch.rand(4, 3)
        optimiser = KFAC(model.parameters(), **options)
        if known:
            optimiser.load_state_dict(known[0])
        with backpack(*optimiser.extensions):
            extend(nn.MSELoss())(model(X), torch.rand(4, 2)).backward()
        optimiser.step()
        return optimiser

    known: list[Any] = []
    known.append(trained().state_dict())
    with pytest.raises(ValueError, match=r"averages of 2 matrices, and gets 3.*other options"):
        trained(ekfac=True)


def test_data_that_are_not_finite_are_named() -> None:
    model, X = extend(nn.Linear(3, 2)), torch.full((4, 3), torch.nan)
    optimiser = KFAC(model.parameters())
    with backpack(*optimiser.extensions):
        extend(nn.MSELoss())(model(X), torch.rand(4, 2)).backward()
    with pytest.raises(torch.linalg.LinAlgError, match="not finite: the data"):
        optimiser.step()


def test_state_without_eigenvectors_is_refused() -> None:
    """That of one of several processes, which solved for other parameters, in a program of one."""
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    optimiser = KFAC(model.parameters(), inverse_every=2)

    def backward() -> None:
        optimiser.zero_grad()
        with backpack(*optimiser.extensions):
            lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2)).backward()

    for _ in range(3):
        backward()
        optimiser.step()
    state = optimiser.state_dict()
    for values in state["state"].values():
        del values["eigenvalues"], values["eigenvectors"]
    optimiser.load_state_dict(state)
    backward()
    with pytest.raises(RuntimeError, match=r"no eigenvectors of parameter . of group 0"):
        optimiser.step()


def test_hooks_of_private_optimisers_change_what_is_loaded() -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.Adam(model.parameters(), lr=0.3)
    optimiser = DPOptimizer(inner, max_grad_norm=1, noise_multiplier=0, expected_batch_size=6)

    def faster(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 7.0} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    optimiser.register_load_state_dict_pre_hook(faster)
    optimiser.load_state_dict(optimiser.state_dict())
    assert optimiser.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 7


@pytest.mark.parametrize("make", [KFAC, DiagGGN, SOAP])
def test_hooks_after_loading_have_the_last_word(make: Any) -> None:
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    optimiser = make(model.parameters())
    with backpack(*getattr(optimiser, "extensions", ())):
        lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2)).backward()
    optimiser.step()

    def older(loaded: torch.optim.Optimizer) -> None:
        for state in loaded.state.values():
            state["step"] = 7

    optimiser.register_load_state_dict_post_hook(older)
    optimiser.load_state_dict(optimiser.state_dict())
    assert [state["step"] for state in optimiser.state.values()] == [7, 7]


@pytest.mark.parametrize(
    ("make", "name"),
    [(KFAC, "curvature_every"), (DiagGGN, "curvature_every"), (SOAP, "bases_every")],
)
def test_infinite_intervals_are_those_of_what_is_done_once(make: Any, name: str) -> None:
    X, y = torch.rand(5, 3), torch.rand(5, 2)
    found = []
    for interval in (inf, 1000):
        torch.manual_seed(0)
        model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
        optimiser = make(model.parameters(), **{name: interval})
        for _ in range(4):
            optimiser.zero_grad()
            with backpack(*getattr(optimiser, "extensions", ())):
                lossfunc(model(X), y).backward()
            optimiser.step()
        found.append(model.weight.detach().clone())
    assert torch.equal(*found)
