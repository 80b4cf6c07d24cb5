"""Training with differential privacy
==================================

:class:`backpack.optim.DPSGD` bounds what a single sample can do to the weights: it clips
individual gradients and adds noise. The more noise, the more privacy, and the worse the
classifier.
"""

# %%
# Digits: 1300 images to train, the others to test. A small network needs less noise in total.

import math

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.optim import DPSGD, privacy_spent

torch.set_num_threads(1)  # faster for tensors this small
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
(x_train, x_test), (y_train, y_test) = (t[order].split([1300, 497]) for t in (images, labels))
loss_function = extend(nn.CrossEntropyLoss())


def make_model(seed=0):
    """Build the network; the initial weights depend on the seed alone."""
    torch.manual_seed(seed)
    return extend(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)))


# %%
# One step
# --------
#
# Without noise, the step is the sum of clipped individual gradients divided by the *expected* size
# of a batch. A loop over the samples gives the same.

BOUND = 1.0
model = make_model()
parameters = list(model.parameters())
before = [p.detach().clone() for p in parameters]
optimiser = DPSGD(parameters, 1.0, max_grad_norm=BOUND, noise_multiplier=0, expected_batch_size=20)
with backpack(*optimiser.extensions):
    loss_function(model(x_train[:20]), y_train[:20]).backward()
optimiser.step()

model = make_model()
total = [torch.zeros_like(p) for p in model.parameters()]
for x, y in zip(x_train[:20], y_train[:20], strict=True):
    gradient = torch.autograd.grad(loss_function(model(x[None]), y[None]), model.parameters())
    norm = torch.cat([g.flatten() for g in gradient]).norm()
    for t, g in zip(total, gradient, strict=True):
        t += g / max(1, norm / BOUND)
for p, old, t in zip(parameters, before, total, strict=True):
    assert torch.allclose(p, old - t / 20, atol=1e-6)

# %%
# Training
# --------
#
# For the guarantee, a batch takes each sample with the same probability, independently of the
# others. The noise multiplier is the standard deviation of the noise in units of the largest norm
# of an individual gradient.

RATE, STEPS, DELTA = 0.1, 150, 1e-4
NOISE = (0.0, 0.7, 1.0, 2.0, 4.0, 12.0)
SEEDS = 3


def train(noise_multiplier, seed):
    """Return the accuracy on the test images, in per cent."""
    model = make_model(seed)
    generator = torch.Generator().manual_seed(seed)
    optimiser = DPSGD(
        model.parameters(),
        lr=0.5,
        momentum=0.8,
        max_grad_norm=BOUND,
        noise_multiplier=noise_multiplier,
        expected_batch_size=RATE * len(y_train),
        generator=generator,
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0, total_iters=STEPS)
    for _ in range(STEPS):
        batch = torch.rand(len(y_train), generator=generator) < RATE
        optimiser.zero_grad()
        with backpack(*optimiser.extensions):
            loss_function(model(x_train[batch]), y_train[batch]).backward()
        optimiser.step()
        schedule.step()
    return 100 * (model(x_test).argmax(1) == y_test).float().mean().item()


accuracy = torch.tensor([[train(noise, seed) for seed in range(SEEDS)] for noise in NOISE])
epsilon = [privacy_spent(STEPS, noise, RATE, DELTA) for noise in NOISE]
means = dict(zip(NOISE, accuracy.mean(1).tolist(), strict=True))

# %%
# What privacy costs
# ------------------
#
# Clipping alone costs nothing here, and it gives no guarantee. The guarantee is a number
# :math:`\varepsilon`: except with probability :math:`\delta`, nothing that anyone concludes from
# the weights is more than :math:`e^\varepsilon` times likelier with a sample than without it.

assert math.isinf(epsilon[0]) and epsilon[1:] == sorted(epsilon[1:], reverse=True)
assert means[0.0] > 90 and means[1.0] > 80 and means[12.0] < means[1.0] - 10

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
axes.axhline(means[0.0], color="0.5", linestyle="dotted", label="clipped, without noise")
noisy = accuracy[1:]
spread = torch.stack([noisy.mean(1) - noisy.amin(1), noisy.amax(1) - noisy.mean(1)])
axes.errorbar(
    epsilon[1:],
    noisy.mean(1),
    spread,
    color="#0072B2",
    marker="o",
    capsize=3,
    label=f"with noise: mean and range of {SEEDS} seeds",
)
for noise, eps, percent in zip(NOISE[1:], epsilon[1:], noisy.mean(1), strict=True):
    axes.annotate(f"σ = {noise:g}", (eps, percent), xytext=(6, -13), textcoords="offset points")
axes.set(xscale="log", xlabel=f"ε (δ = {DELTA:g}): less privacy to the right")
axes.set_ylabel("accuracy on test images in %")
axes.margins(x=0.12)
axes.grid(color="0.9")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, loc="lower right")
plt.show()
