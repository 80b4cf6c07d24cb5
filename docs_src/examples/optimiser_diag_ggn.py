"""The diagonal of the GGN as a preconditioner
===========================================

:class:`backpack.optim.DiagGGN` divides the gradient by a moving average of the curvature's
diagonal. Here it trains a small convolutional network beside SGD and Adam, all with the same
steps, weights and batches.
"""

# %%
# Digits, and a network with two convolutions.

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.optim import DiagGGN

torch.set_num_threads(1)  # faster for tensors this small
STEPS, BATCH_SIZE, SEEDS = 150, 128, 3
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)
loss_function = extend(nn.CrossEntropyLoss())


def make_model(seed):
    """Build the network; the initial weights depend on the seed alone."""
    torch.manual_seed(seed)
    return extend(
        nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 10),
        )
    )


# %%
# One step
# --------
#
# An optimiser of ``backpack.optim`` says which extensions it needs. Its first step is
# :math:`\theta \leftarrow \theta - \alpha g / (c + \lambda)` with the gradient g and the diagonal
# c of the batch: the averages have no bias from their start.

model = make_model(seed=0)
before = [p.detach().clone() for p in model.parameters()]
optimiser = DiagGGN(model.parameters(), lr=0.1, damping=1e-2, kl_clip=None)
loss = loss_function(model(images[:BATCH_SIZE]), labels[:BATCH_SIZE])
with backpack(*optimiser.extensions):
    loss.backward()
optimiser.step()
for p, old in zip(model.parameters(), before, strict=True):
    assert torch.allclose(p, old - 0.1 * p.grad / (p.diag_ggn_mc + 1e-2), atol=1e-6)

# %%
# Training
# --------
#
# The step size of all falls linearly to zero. That of SGD and Adam is the best of those that were
# tried, for the mean loss after the last step: 15 pairs of step size and momentum for SGD, four
# step sizes for Adam. ``DiagGGN`` has its defaults, which were chosen on digits, too. It also
# bounds the length of a step in the metric of the curvature (``kl_clip``), without which the first
# steps are too long.

OPTIMISERS = {
    "SGD with momentum": ("#E69F00", lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.95)),
    "Adam": ("#009E73", lambda params: torch.optim.Adam(params, lr=0.03)),
    "DiagGGN": ("#0072B2", DiagGGN),
}


def train(make_optimiser, seed):
    """Return the loss on all images and the seconds spent, after every tenth step."""
    model = make_model(seed)
    optimiser = make_optimiser(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0, total_iters=STEPS)
    generator = torch.Generator().manual_seed(seed)
    losses, times, seconds = [], [], 0.0
    for step in range(STEPS + 1):
        if step % 10 == 0:
            with torch.no_grad():
                losses.append(nn.functional.cross_entropy(model(images), labels).item())
            times.append(seconds)
        start = time.perf_counter()
        batch = torch.randint(len(labels), (BATCH_SIZE,), generator=generator)
        optimiser.zero_grad()
        loss = loss_function(model(images[batch]), labels[batch])
        with backpack(*getattr(optimiser, "extensions", ())):
            loss.backward()
        optimiser.step()
        schedule.step()
        seconds += time.perf_counter() - start
    return losses, times


curves = {}  # [seeds, losses or times, evaluations]
for name, (_, make_optimiser) in OPTIMISERS.items():
    curves[name] = torch.tensor([train(make_optimiser, seed) for seed in range(SEEDS)])

# %%
# Per step, ``DiagGGN`` is ahead. A step costs more: the squares of all individual gradients of the
# sampled loss.

final = {name: values[:, 0, -1].mean() for name, values in curves.items()}
assert final["DiagGGN"] < 0.8 * min(final["SGD with momentum"], final["Adam"])

figure, panels = plt.subplots(ncols=2, figsize=(9, 3.8), sharey=True, layout="constrained")
for name, (color, _) in OPTIMISERS.items():
    losses, times = curves[name].unbind(1)
    steps = torch.arange(0, STEPS + 1, 10)
    for panel, x in zip(panels, (steps, times.amin(0)), strict=True):
        panel.plot(x, losses.mean(0), color=color, label=name)
        panel.fill_between(x, losses.amin(0), losses.amax(0), color=color, alpha=0.15, linewidth=0)
for panel, label in zip(panels, ("step", "seconds"), strict=True):
    panel.set(xlabel=label, yscale="log")
    panel.grid(color="0.9")
    panel.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("loss on all images")
panels[1].legend(frameon=False)
figure.suptitle(f"Mean and range of {SEEDS} seeds, seconds of the fastest")
plt.show()
