"""Several backward passes, and quantities in slices
==================================================

``retain_graph`` keeps what a forward pass stored. Then one forward pass serves several losses, and
a quantity that is too large for the memory is computed for a few samples after the other.
"""

# %%
# A network for scikit-learn's digits.

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend, memory_cleanup
from backpack.extensions import GGNMP, BatchGrad, DiagGGNExact, SqrtGGNExact

torch.manual_seed(0)
N, C = 120, 10
images, labels = load_digits(return_X_y=True)
X = torch.tensor(images[:N], dtype=torch.float64).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(labels[:N])

model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, C))
model = extend(model.double())
weight = model[3].weight

# %%
# Several losses
# --------------
#
# Two losses of the same output, each with its own curvature. ``retain_graph`` is said twice: to
# PyTorch for its graph, to the library for what its modules have stored. The last pass releases
# both.

output = model(X)
cross_entropy = extend(nn.CrossEntropyLoss())(output, y)
squared_error = extend(nn.MSELoss())(output, nn.functional.one_hot(y, C).double())

with backpack(DiagGGNExact(), retain_graph=True):
    cross_entropy.backward(retain_graph=True)
of_cross_entropy = [p.diag_ggn_exact for p in model.parameters()]

with backpack(DiagGGNExact()):
    squared_error.backward()
of_squared_error = [p.diag_ggn_exact for p in model.parameters()]

# %%
# A sum of losses has the sum of their curvatures.

output = model(X)
total = extend(nn.CrossEntropyLoss())(output, y)
total = total + extend(nn.MSELoss())(output, nn.functional.one_hot(y, C).double())
with backpack(DiagGGNExact()):
    total.backward()
for p, *parts in zip(model.parameters(), of_cross_entropy, of_squared_error, strict=True):
    assert torch.allclose(p.diag_ggn_exact, sum(parts))

# %%
# Slices of samples
# -----------------
#
# The square root of the GGN has an entry for each class, sample and parameter, ``[C, N, *p]``.
# With ``subsampling`` a backward pass computes it for a few samples, and the GGN is the sum over
# all slices.

loss = extend(nn.CrossEntropyLoss())(model(X), y)


def square_root(samples):
    """Compute rows of the square root of the weight's GGN. ``[C len(samples), D]``"""
    with backpack(SqrtGGNExact(subsampling=samples), retain_graph=True):
        loss.backward(retain_graph=True)
    return weight.sqrt_ggn_exact.flatten(0, 1).flatten(1)


whole = square_root(list(range(N)))
slices = [square_root(list(range(start, start + 20))) for start in range(0, N, 20)]
ggn = whole.T @ whole
assert torch.allclose(ggn, sum(rows.T @ rows for rows in slices))

# %%
# The same with individual gradients, here for the largest norm.

norms = []
for start in range(0, N, 20):
    with backpack(BatchGrad(subsampling=list(range(start, start + 20))), retain_graph=True):
        loss.backward(retain_graph=True)
    norms.append(weight.grad_batch.flatten(1).norm(dim=1))
with backpack(BatchGrad(), retain_graph=True):
    loss.backward(retain_graph=True)
assert torch.allclose(torch.cat(norms), weight.grad_batch.flatten(1).norm(dim=1))

# %%
# Slices of vectors
# -----------------
#
# A matrix product such as ``GGNMP`` leaves a function that takes V vectors at once. More than fit
# into the memory are multiplied in slices, as often as one likes.

with backpack(GGNMP(), retain_graph=True):
    loss.backward(retain_graph=True)
units = torch.eye(weight.numel(), dtype=torch.float64).reshape(-1, *weight.shape)
columns = [weight.ggnmp(few).flatten(1) for few in units.split(180)]
assert torch.allclose(ggn, torch.cat(columns))

# %%
# After a pass with ``retain_graph`` all is still kept. It goes when the loss goes, or at once:

memory_cleanup(model)

# %%
# How large is the largest tensor with and without slices?


def size(tensor):
    """Write shape and memory."""
    return f"{list(tensor.shape)}", f"{tensor.nbytes / 1e6:.1f} MB"


table = Table(title="The weight of the last layer", box=box.SIMPLE_HEAD)
table.add_column("quantity")
for name in ("in one piece", "in slices"):
    table.add_column(name)
    table.add_column("memory", justify="right")
for name, piece, slice_ in (
    ("square root of the GGN", whole, slices[0]),
    ("individual gradients", weight.grad_batch, weight.grad_batch[:20]),
    ("columns of the GGN", units, columns[0]),
):
    table.add_row(name, *size(piece), *size(slice_))
Console(width=100).print(table)
