"""Subsampling
===========

Curvature of some samples is cheaper than that of all, and noisier. ``subsampling`` takes their
indices; the gradient is still that of the whole batch. How large is the noise?
"""

# %%
# A network for scikit-learn's digits, trained a little, and a batch of 512 samples.

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.extensions import DiagGGNExact, DiagGGNMC

torch.manual_seed(0)
torch.set_num_threads(1)  # faster for tensors this small
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)

model = extend(
    nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))
)
loss_function = extend(nn.CrossEntropyLoss())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for batch in torch.randperm(len(labels)).split(64):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
    optimizer.step()

N = 512
X, y = images[:N], labels[:N]

# %%
# Nothing is rescaled: with the mean over N samples as the loss, each contributes with 1/N,
# whether or not the others are computed. An estimate of the whole from S samples therefore takes
# a factor N/S.


def diagonal(extension_class, samples):
    """Estimate the diagonal of the GGN from some samples; return the time, too."""
    extension = extension_class(subsampling=samples)
    loss = loss_function(model(X), y)
    start = time.perf_counter()
    with backpack(extension):
        loss.backward()
    seconds = time.perf_counter() - start
    parts = [getattr(p, extension.savefield).flatten() for p in model.parameters()]
    return N / len(samples) * torch.cat(parts), seconds


everything = list(range(N))
truth, _ = diagonal(DiagGGNExact, everything)

# %%
# Halves add up to the whole.

halves = [diagonal(DiagGGNExact, everything[:256])[0], diagonal(DiagGGNExact, everything[256:])[0]]
assert torch.allclose(sum(halves) / 2, truth, rtol=1e-4, atol=1e-7)

# %%
# Variance of the estimates
# -------------------------
#
# Without replacement, the variance of a mean of S of N values is :math:`\sigma^2 / S \cdot (N -
# S)/(N - 1)`. Estimates with the exact GGN follow that; those with sampled labels have the
# variance of the labels on top.

sizes = [8, 16, 32, 64, 128, 256, 512]
REPEATS = 20
errors, times = {}, {}
for extension_class in (DiagGGNExact, DiagGGNMC):
    for size in sizes:
        runs = [
            diagonal(extension_class, torch.randperm(N)[:size].tolist()) for _ in range(REPEATS)
        ]
        squares = [(estimate - truth).square().sum() / truth.square().sum() for estimate, _ in runs]
        errors[extension_class, size] = torch.stack(squares).mean().item()
        times[extension_class, size] = 1e3 * min(seconds for _, seconds in runs)

theory = [errors[DiagGGNExact, 8] * 8 / S * (N - S) / (N - 8) for S in sizes]
for S, expected in zip(sizes[1:-1], theory[1:-1], strict=True):
    assert 0.5 < errors[DiagGGNExact, S] / expected < 2
assert errors[DiagGGNExact, N] < 1e-10

# %%

figure, (left, right) = plt.subplots(ncols=2, figsize=(9.5, 3.8), layout="constrained")
for extension_class, color, marker in ((DiagGGNExact, "#0072B2", "o"), (DiagGGNMC, "#D55E00", "s")):
    name = extension_class.__name__
    shown = sizes[:-1] if extension_class is DiagGGNExact else sizes  # all samples: no error
    left.loglog(shown, [errors[extension_class, S] for S in shown], marker, color=color, label=name)
    right.plot(
        sizes, [times[extension_class, S] for S in sizes], marker=marker, color=color, label=name
    )
left.loglog(sizes[:-1], theory[:-1], color="0.5", label=r"$\sim (N - S)/S$")
left.set(ylabel="mean squared error / squared norm")
right.set(ylabel="time of the backward pass in ms", xscale="log", ylim=0)
for axes in (left, right):
    axes.set_xlabel(f"samples S of {N}")
    axes.set_xticks(sizes, sizes)
    axes.minorticks_off()
    axes.grid(color="0.9")
    axes.legend(frameon=False)
plt.show()
