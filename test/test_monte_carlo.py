"""Statistics of the Monte-Carlo quantities; every bound is computed from the samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from cases import (
    Case,
    Problem,
    labels,
    labels_with,
    network,
    probabilities,
    real,
    rows,
    soft_binary,
)
from cases import Rows as LossOfRows
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.core.derivatives import crossentropyloss


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 2, 2), nn.Sigmoid(), nn.Conv1d(2, 3, 2))


def cross_entropy(**options: object) -> Callable[[], nn.Module]:
    weight = torch.tensor([0.5, 2.0, 1.0])
    return lambda: nn.CrossEntropyLoss(weight=weight, **options)


CASES = [
    network("ce", mlp, (4,)),
    network("ce-sum", mlp, (4,), lambda: nn.CrossEntropyLoss(reduction="sum")),
    network("ce-axes", cnn, (2, 5), cross_entropy(ignore_index=1), labels_with(1)),
    network("ce-smoothing", mlp, (4,), cross_entropy(label_smoothing=0.3)),
    network("ce-probabilities", mlp, (4,), cross_entropy(label_smoothing=0.1), probabilities),
    network(
        "ce-rows",
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)),
        (2, 3),
        lambda: LossOfRows(nn.CrossEntropyLoss()),
        rows(labels),
    ),
    network(
        "bce",
        mlp,
        (4,),
        lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 2.0, 1.0])),
        soft_binary,
    ),
    network("bce-axes", cnn, (2, 5), lambda: nn.BCEWithLogitsLoss(reduction="sum"), soft_binary),
    network("mse", mlp, (4,), nn.MSELoss, real),
    network("mse-axes", cnn, (2, 5), lambda: nn.MSELoss(reduction="sum"), real),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)

REPETITIONS = 150


def run(problem: Problem, *exts: object) -> list[nn.Parameter]:
    """Run a backward pass; return the parameters."""
    model, lossfunc = extend(problem.model), extend(problem.loss)
    with backpack(*exts):
        lossfunc(model(problem.X), problem.y).backward()
    return list(model.parameters())


def outer(root: Tensor) -> Tensor:
    """Contract ``[M, N, *p]`` over the first two axes with itself."""
    flat = root.flatten(2).flatten(0, 1)
    return flat.T @ flat


def estimates(case: Case, mc_samples: int, number: int = REPETITIONS) -> Tensor:
    """Return independent estimates of everything as rows ``[number, entries]``."""
    exts = [
        extensions.DiagGGNMC(mc_samples),
        extensions.BatchDiagGGNMC(mc_samples),
        extensions.SqrtGGNMC(mc_samples),
        extensions.KFAC(mc_samples),
    ]
    problem, found = case.build(), []
    for repetition in range(number):
        torch.manual_seed(1000 * mc_samples + repetition)
        params = run(problem, *exts)
        found.append(
            torch.cat(
                [
                    value.flatten()
                    for p in params
                    for value in (
                        p.diag_ggn_mc,
                        p.diag_ggn_mc_batch,
                        outer(p.sqrt_ggn_mc),
                        *p.kfac,
                    )
                ]
            )
        )
    return torch.stack(found)


def exact(case: Case) -> Tensor:
    """Return the expectation of :func:`estimates`."""
    exts = [
        extensions.DiagGGNExact(),
        extensions.BatchDiagGGNExact(),
        extensions.SqrtGGNExact(),
        extensions.KFLR(),
    ]
    return torch.cat(
        [
            value.flatten()
            for p in run(case.build(), *exts)
            for value in (
                p.diag_ggn_exact,
                p.diag_ggn_exact_batch,
                outer(p.sqrt_ggn_exact),
                *p.kflr,
            )
        ]
    )


@each_case
@pytest.mark.parametrize("mc_samples", [1, 20])
def test_unbiased(case: Case, mc_samples: int) -> None:
    """The mean is within five standard errors of the exact quantity, in each entry."""
    samples, truth = estimates(case, mc_samples), exact(case)
    standard_error = samples.std(0) / math.sqrt(len(samples))
    error = (samples.mean(0) - truth).abs()
    assert (error <= 5 * standard_error + 1e-12 * truth.abs().max()).all()
    assert standard_error.norm() < 0.5 * truth.norm()  # the bound is not an empty one


@each_case
def test_rate(case: Case) -> None:
    """Sixteen times the samples, a quarter of the error."""
    truth = exact(case)
    errors = [
        (estimates(case, mc_samples, number=60) - truth).square().sum(1).mean().sqrt()
        for mc_samples in (4, 64)
    ]
    assert 2.5 < errors[0] / errors[1] < 6.5


@each_case
def test_seed_makes_it_repeatable(case: Case) -> None:
    first, second = (estimates(case, 3, number=4) for _ in range(2))
    assert torch.equal(first, second)
    assert len(first.unique(dim=0)) == len(first)


@each_case
def test_calls_are_independent(case: Case) -> None:
    """Without a new seed, the next backward pass draws anew: pairs are not correlated."""
    ext, problem = extensions.DiagGGNMC(mc_samples=2), case.build()
    pairs = []
    for seed in range(REPETITIONS):
        torch.manual_seed(seed)
        pair = []
        for _ in range(2):
            state = torch.get_rng_state()
            params = run(problem, ext)
            assert not torch.equal(torch.get_rng_state(), state)
            pair.append(torch.cat([p.diag_ggn_mc.flatten() for p in params]))
        pairs.append(torch.stack(pair))
    both = torch.stack(pairs)  # [repetitions, 2, entries]
    centred = both - both.mean(0)
    products = (centred[:, 0] * centred[:, 1]).sum(1)
    assert products.mean().abs() <= 5 * products.std() / math.sqrt(len(products))
    assert products.mean().abs() < 0.5 * centred.square().sum(2).mean()


@pytest.mark.parametrize("count", [1, 3])
def test_drawn_classes(count: int) -> None:
    """As often as their probabilities say, never one of probability zero, at every position."""
    p = torch.tensor([[0.0, 0.3, 0.05, 0.65, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float32)
    many = p.repeat(30_000, 1).unsqueeze(-1).repeat(1, 1, 2)  # [N, C, positions]
    drawn = crossentropyloss._drawn(many, count)
    assert drawn.shape == (count, 60_000, 1, 2)
    for m, position, of in product(range(count), range(2), range(2)):
        frequency = drawn[m, of::2, 0, position].bincount(minlength=5) / 30_000
        error = (p[of] * (1 - p[of]) / 30_000).sqrt()
        assert ((frequency - p[of]).abs() <= 5 * error).all()
    assert (crossentropyloss._drawn(torch.ones(4, 1), count) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_drawn_classes_of_low_precision(dtype: torch.dtype) -> None:
    """A thousand equal classes, whose sums half precision could not tell apart."""
    p = torch.full((200_000, 1000), 1e-3, dtype=dtype)
    frequency = crossentropyloss._drawn(p, 1).flatten().bincount(minlength=1000) / 200_000
    assert (frequency - 1e-3).abs().max() <= 6 * math.sqrt(1e-3 / 200_000)
