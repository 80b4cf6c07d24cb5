"""What is measured: works, on which problems, against whom, and what is aimed at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from benchmark.problems import (
    PROBLEMS,
    TINY,
    Layers,
    Problem,
    Transformer,
    integers,
    mlp,
    reals,
    small_cnn,
)

OURS = "this library"


@dataclass(frozen=True)
class Work:
    """What all contestants compute.

    Args:
        name: Name on the command line.
        title: What it is, for the report.
        problems: Names of problems.
        peers: Names of contestants.
        time: Our time divided by that of the fastest peer is to be at most this; None: the numbers
            are compared, not the times.
        memory: The same for the peak of memory.
        tolerance: Largest relative deviation of values.
        batches: Batches of the data set.
    """

    name: str
    title: str
    problems: tuple[str, ...]
    peers: tuple[str, ...]
    time: float | None = None
    memory: float | None = None
    tolerance: float = 1e-3
    batches: int = 1


LARGE = ("3c3d", "lstm", "transformer")
GRADIENTS = ("vmap", "dattri-llm")
KERNELS = ("nngeometry", "torch.func")
WORKS = {
    work.name: work
    for work in (
        Work(
            "clipped-sum",
            "Sum of clipped individual gradients",
            (*LARGE, "gpt2-small"),
            ("opacus ghost", "opacus materialising", "vmap"),
            0.6,
            1.0,
        ),
        Work("square-norms", "Squared norms from kept factors", LARGE[2:], GRADIENTS, 1.0),
        Work("gram", "Inner products of individual gradients", LARGE[2:], GRADIENTS, 1.0),
        Work("projections", "Along 32 given directions", LARGE[2:], GRADIENTS, 1.0),
        Work(
            "ekfac",
            "EKFAC over a data set, and one product",
            ("mlp-weights", "cnn-weights", "transformer-weights"),
            ("curvlinops", "kronfluence"),
            0.7,
            tolerance=1e-2,
            batches=4,
        ),
        Work(
            "influence",
            "Influence of 1,000 samples on 100, EKFAC given",
            ("mlp-weights", "transformer-weights"),
            ("kronfluence",),
            0.7,
            batches=10,
        ),
        Work("ntk", "Neural tangent kernel", ("mlp-100", "cnn-100"), KERNELS, 1.0),
        Work("eigenvalues", "Eigenvalues of the Gram matrix", ("mlp-100", "cnn-100"), KERNELS, 1.0),
        Work("laplace", "Predictive of a last-layer Laplace", ("mlp-100",), ("laplace-torch",)),
        Work("accountant", "ε of DP-SGD", ("mlp-100",), ("opacus",)),
    )
}


def weights_alone(make: Callable[[], nn.Module]) -> Callable[[Layers], nn.Module]:
    """Take the biases away: libraries differ in whether they belong to the weight's block."""

    def made(_: Layers) -> nn.Module:
        model = make()
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.bias = None
        return model

    return made


def _images(name: str, title: str, make: Callable[[], nn.Module], size: int, batch: int) -> Problem:
    return Problem(
        name, f"{title}, N={batch}", weights_alone(make), reals(batch, 1, size, size), 10, batch
    )


def _problems() -> Iterator[Problem]:
    title = "MLP 784-256-256-10"
    flat = reals(100, 784)
    yield Problem(
        "mlp-weights", title, weights_alone(lambda: mlp(784, 256, 256, 10)), flat, 10, 100
    )
    yield Problem("mlp-100", f"{title}, N=100", lambda _: mlp(784, 256, 256, 10), flat, 10, 100)
    cnn = "CNN, two convolutions, 28×28"

    def make_cnn() -> nn.Module:
        first = [nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2)]
        return nn.Sequential(*first, nn.ReLU(), nn.Flatten(), *mlp(512, 64, 10))

    yield _images("cnn-weights", cnn, make_cnn, 28, 100)
    yield Problem("cnn-100", f"{cnn}, N=100", lambda _: make_cnn(), reals(100, 1, 28, 28), 10, 100)
    yield Problem(
        "transformer-weights",
        "Transformer, 2 layers, width 64, 32 tokens",
        weights_alone(lambda: Transformer(64, 32, 64, 4, 2)),
        integers(64, 100, 32),
        64,
        100,
        positions=(32,),
        converter=True,
    )
    yield Problem(
        "gpt2-small",
        "Transformer of the size of GPT-2 small, not tied, 128 tokens, N=4",
        lambda _: Transformer(50257, 128, 768, 12, 12),
        integers(50257, 4, 128),
        50257,
        4,
        positions=(128,),
        converter=True,
    )
    # for tests
    yield _images("tiny-weights", "small", lambda: small_cnn(nn.ReLU, 10), 16, 4)


ALL = PROBLEMS | TINY | {problem.name: problem for problem in _problems()}


def data_set(problem: Problem, batches: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Draw batches, always the same ones."""
    generator = Generator().manual_seed(seed)
    draw = integers(problem.classes, problem.batch, *problem.positions)
    return [(problem.inputs(generator), draw(generator)) for _ in range(batches)]


def max_norm(problem: Problem) -> float:
    """Return a bound that clips about half of the individual gradients: a median of norms."""
    model, (X, y) = problem.make(), problem.data()
    norms = []
    for x, target in zip(X[:9].split(1), y[:9].split(1), strict=True):
        loss = nn.functional.cross_entropy(model(x), target)
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        norms.append(torch.cat([g.flatten() for g in gradients]).norm())
    return torch.stack(norms).median().item()
