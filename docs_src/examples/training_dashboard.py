"""A dashboard of a training run
=============================

The loss says *that* something went wrong. What went wrong shows in quantities that the same
backward pass has computed. Here is a training run with three faults that were planted, and one
picture on which each is seen where it happens.
"""

# %%
# A network, and what is wrong with its training
# -----------------------------------------------
#
# 1. The weights of the second layer start a hundred times too small.
# 2. In the steps from 160 to 168, two images of each batch have pixels up to 16, not 1.
# 3. At step 300, the step size is multiplied by 6.

import csv
import tempfile
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.extensions import GGNMP, BatchL2Grad
from backpack.monitor import CSVWriter, Monitor

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)

BATCH, STEPS, BROKEN, TOO_FAST = 64, 400, range(160, 168), 300
FACTOR = 6
layers = [nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)]
model, loss_function = extend(nn.Sequential(*layers)), extend(nn.CrossEntropyLoss())
model[2].weight.data /= 100
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

# %%
# What to log
# -----------
#
# A metric is a function of a list of parameters: the monitor calls it for each of them and for all.
# Of one backward pass with the mean loss, ``batch_l2`` has the squared norms of the individual
# gradients over ``N``. Noise and signal are logged one by one: a batch tells each of them roughly,
# so that they are averaged over steps before one is divided by the other.


def lengths(params):
    """Norms of the samples' gradients: [N]."""
    return BATCH * sum(p.batch_l2 for p in params).sqrt()


def longest(params):
    return lengths(params).max()


def median(params):
    return lengths(params).median()


def noise(params):
    """Trace of the covariance of individual gradients, without bias."""
    of_mean = sum(p.grad.square().sum() for p in params)
    return (lengths(params).square().mean() - of_mean) * BATCH / (BATCH - 1)


def signal(params):
    """Squared norm of the gradient of all data, without bias: may be negative."""
    return sum(p.grad.square().sum() for p in params) - noise(params) / BATCH


def step_size():
    return optimizer.param_groups[0]["lr"]


def curvature_of_a_step(params):
    """Step size times the curvature along the gradient, by the blocks of the GGN."""
    products = sum((p.ggnmp(p.grad[None])[0] * p.grad).sum() for p in params)
    return step_size() * products / sum(p.grad.square().sum() for p in params)


def relative_step(params):
    """Length of the step over that of the weights."""
    gradients, weights = (
        sum(t.square().sum() for t in ts) for ts in ([p.grad for p in params], params)
    )
    return step_size() * (gradients / weights).sqrt()


metrics = ["grad.norm", longest, median, noise, signal, curvature_of_a_step, relative_step]
extensions = (BatchL2Grad(), GGNMP())

# %%
# The training loop
# -----------------

path = Path(tempfile.mkdtemp()) / "log.csv"
with Monitor(model, metrics, CSVWriter(path), every=2) as monitor:
    for step in range(STEPS):
        batch = torch.randint(len(labels), (BATCH,))
        X, y = images[batch], labels[batch]
        if step in BROKEN:
            X[:2] *= 16
        if step == TOO_FAST:
            optimizer.param_groups[0]["lr"] *= FACTOR
        optimizer.zero_grad()
        loss = loss_function(model(X), y)
        with backpack(*extensions if monitor.due else ()):
            loss.backward()
        monitor.step(loss=loss)
        optimizer.step()

curves = defaultdict(list)
with path.open() as file:
    for row in csv.DictReader(file):
        curves[row["tag"]].append((int(row["step"]), float(row["value"])))

# %%
# The dashboard
# -------------
#
# 1. The gradient of the first layer is far below that of the last: nothing passes the second one,
#    until its weights have grown. The loss looks like a slow start.
# 2. The longest individual gradient leaves the median. The loss hardly moves.
# 3. Step size times curvature crosses 2, beyond which a step leads uphill. The loss rises, too, but
#    does not say why.
#
# The critical batch size is the noise scale tr(Σ) / ‖g‖²: at that size, noise and signal of the
# batch's gradient are equal. While it is below the batch size, a larger batch would be a waste. It
# grows while the network learns, above the size of the batch, and is small again after step 300,
# where all gradients lead back.

LAYERS = {"0.weight": "first layer", "2.weight": "second layer", "4.weight": "last layer"}
COLOURS = ("#D55E00", "#56B4E9", "#0072B2")
figure, axes = plt.subplots(3, 2, figsize=(9, 8.2), sharex=True, layout="constrained")


def draw(axis, tag, **style):
    axis.plot(*zip(*curves[tag], strict=True), **style)


def averages(tag, count=20):
    """Averages over the last values, by step."""
    steps, values = zip(*curves[tag], strict=True)
    sums = torch.tensor(values, dtype=torch.float64).unfold(0, count, 1).sum(1)
    return torch.tensor(steps[count - 1 :]), sums / count


steps, noise_of_steps = averages("noise")
critical_batch = noise_of_steps / averages("signal")[1]

(loss_axis, batch_axis), (gradient_axis, length_axis), (curvature_axis, layer_axis) = axes
draw(loss_axis, "loss", color="black")
loss_axis.set(title="Loss", yscale="log")
batch_axis.plot(steps, critical_batch, color="#009E73")
batch_axis.axhline(BATCH, color="0.5", linestyle="dotted", label="batch size")
batch_axis.set(title="Critical batch size, of 20 passes", yscale="log")
draw(length_axis, "longest", color="#D55E00", label="longest")
draw(length_axis, "median", color="#0072B2", label="median")
length_axis.set(title="Individual gradients: norm", yscale="log")
draw(curvature_axis, "curvature_of_a_step", color="#CC79A7")
curvature_axis.axhline(2, color="0.5", linestyle="dotted", label="limit of a stable step")
curvature_axis.set(title="Step size × curvature along the gradient", yscale="log", xlabel="step")
for (name, title), colour in zip(LAYERS.items(), COLOURS, strict=True):
    draw(gradient_axis, f"grad.norm/{name}", color=colour, label=title)
    draw(layer_axis, f"relative_step/{name}", color=colour, label=title)
gradient_axis.set(title="Gradient of each layer: norm", yscale="log")
layer_axis.set(title="Step / weight of each layer: norm", yscale="log", xlabel="step")
for axis in axes.flat:
    for number, start, stop in ((1, 0, 40), (2, BROKEN.start, BROKEN.stop), (3, TOO_FAST, STEPS)):
        axis.axvspan(start, stop, color="#E69F00", alpha=0.15, linewidth=0)
        axis.text(start + 3, 0.98, number, va="top", transform=axis.get_xaxis_transform())
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize="small")
plt.show()

# %%
# What the picture says, step by step.


def values(tag, start, stop):
    return torch.tensor([value for step, value in curves[tag] if start <= step < stop])


def outlier(start, stop):
    return (values("longest", start, stop) / values("median", start, stop)).max()


first, last = (values(f"grad.norm/{name}", 0, 6) for name in ("0.weight", "4.weight"))
assert (first < last / 4).all()
assert outlier(BROKEN.start, BROKEN.stop) > 3 * outlier(40, BROKEN.start)
assert values("curvature_of_a_step", 0, TOO_FAST).max() < 2
assert values("curvature_of_a_step", TOO_FAST, TOO_FAST + 20).max() > 2
before = critical_batch[(steps >= 200) & (steps < TOO_FAST)]
assert before.median() > BATCH > critical_batch[steps >= TOO_FAST + 40].max()
