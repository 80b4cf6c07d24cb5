"""Time of each extension, forward and backward pass, relative to the gradient alone.

Run it with ``python benchmark/overhead.py``; it takes about a minute on two cores.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.extensions.backprop_extension import BackpropExtension

EXTENSIONS = (
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.SumGradSquared,
    extensions.Variance,
    extensions.DiagGGNMC,
    extensions.KFAC,
    extensions.DiagGGNExact,
    extensions.KFLR,
)


def mlp() -> tuple[nn.Module, Tensor]:
    """784-256-256-10, batch of 128."""
    layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers), torch.rand(128, 784)


def cnn_3c3d() -> tuple[nn.Module, Tensor]:
    """Three convolutions and three dense layers on 32×32 images, batch of 128."""
    pool = [nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)]
    convolutions = [nn.Conv2d(3, 64, 5), *pool, nn.Conv2d(64, 96, 3), *pool]
    convolutions += [nn.ZeroPad2d(1), nn.Conv2d(96, 128, 3), *pool, nn.Flatten()]
    dense = [nn.Linear(1152, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*convolutions, *dense), torch.rand(128, 3, 32, 32)


def seconds(step: Callable[[], None], repetitions: int) -> float:
    """Median time of a step after one for warm-up."""
    step()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def make_step(
    model: nn.Module, lossfunc: nn.Module, X: Tensor, y: Tensor, *exts: BackpropExtension
) -> Callable[[], None]:
    """Return a function that runs one forward and backward pass and forgets its results."""

    def step() -> None:
        loss = lossfunc(model(X), y)
        with backpack(*exts):
            loss.backward()
        for p in model.parameters():
            p.grad = None
            for ext in exts:
                delattr(p, ext.savefield)

    return step


def main() -> None:
    """Print a line for each problem and extension."""
    torch.manual_seed(0)
    for problem, repetitions in ((mlp, 20), (cnn_3c3d, 3)):
        model, X = problem()
        y, lossfunc = torch.randint(10, (len(X),)), nn.CrossEntropyLoss()
        plain = seconds(make_step(copy.deepcopy(model), lossfunc, X, y), repetitions)
        print(f"{problem.__name__}: gradient {1000 * plain:.1f} ms")
        extend(model), extend(lossfunc)
        print(
            f"  no extension   {seconds(make_step(model, lossfunc, X, y), repetitions) / plain:.2f}"
        )
        for cls in EXTENSIONS:
            ratio = seconds(make_step(model, lossfunc, X, y, cls()), repetitions) / plain
            print(f"  {cls.__name__:14} {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
