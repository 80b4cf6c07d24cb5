"""Log quantities while training
==============================

:class:`backpack.monitor.Monitor` writes what backward passes leave at the parameters to a CSV
file or to TensorBoard: norms, means, percentiles and histograms of any attribute, and what you
make of them.
"""

# %%
# A network for scikit-learn's digits, and an optimiser.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.extensions import BatchL2Grad, DiagGGNMC, Variance
from backpack.monitor import CSVWriter, Monitor, gradient_snr, plot_histograms

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)

model = extend(
    nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))
)
loss_function = extend(nn.CrossEntropyLoss())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

# %%
# What to log
# -----------
#
# An attribute and a reduction, such as ``"variance.mean"``, is computed for each parameter and
# for all entries of all parameters. So is a function of a list of parameters: the signal-to-noise
# ratio comes with the library, the effective rank of the curvature is written here.


def effective_rank(params):
    """Count the large entries of the diagonal: (sum of entries)² / sum of squared entries."""
    diagonal = torch.cat([p.diag_ggn_mc.flatten() for p in params])
    return diagonal.sum() ** 2 / diagonal.square().sum()


metrics = ["grad.norm", "variance.mean", "batch_l2.q95", gradient_snr, effective_rank]
extensions = (Variance(), BatchL2Grad(), DiagGGNMC())

# %%
# The training loop
# -----------------
#
# One line in the loop: ``monitor.step()`` after ``backward()``. With ``every=10``, extensions are
# needed in one of ten steps only; ``monitor.due`` says in which.
#
# Another line sends all this to TensorBoard: a ``torch.utils.tensorboard.SummaryWriter`` in place
# of the ``CSVWriter``.

path = Path(tempfile.mkdtemp()) / "log.csv"
with Monitor(model, metrics, CSVWriter(path), every=10) as monitor:
    for _ in range(200):
        batch = torch.randint(len(labels), (64,))
        optimizer.zero_grad()
        loss = loss_function(model(images[batch]), labels[batch])
        with backpack(*extensions if monitor.due else ()):
            loss.backward()
        monitor.step(loss=loss)
        optimizer.step()

# %%
# The file
# --------
#
# A line is a step, a tag and a value. ``pandas.read_csv(path).pivot(index="step", columns="tag",
# values="value")`` would make a table of it; here is one of the whole model.

lines = path.read_text().splitlines()
print("\n".join(lines[:5]))

values = {}
for line in lines[1:]:
    step, tag, value = line.split(",")
    values[int(step), tag] = float(value)
steps = sorted({step for step, _ in values})
assert steps == list(range(0, 200, 10))
assert values[190, "loss"] < values[0, "loss"] / 3

tags = ["loss", "grad.norm", "variance.mean", "batch_l2.q95", "gradient_snr", "effective_rank"]
table = Table(box=box.SIMPLE_HEAD)
for name in ("step", *tags):
    table.add_column(name, justify="right")
for step in steps[::4]:
    table.add_row(str(step), *(f"{values[step, tag]:.2g}" for tag in tags))
Console(width=100).print(table)

# %%
# Histograms
# ----------
#
# An attribute without a reduction, such as ``"variance"`` among the metrics, is written as a
# histogram in each step. For a look at the present one, there is ``plot_histograms``.

loss = loss_function(model(images), labels)
with backpack(Variance()):
    loss.backward()
figure = plot_histograms(model, "variance", log=True)
plt.show()
