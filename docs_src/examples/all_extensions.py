"""All extensions in one place
===========================

Every quantity of the library for a small convolutional network, from one backward pass each: where
it is stored, its shape, and a picture of it for one convolution.
"""

# %%
# The first 16 digits of scikit-learn, and a network that consists of modules only. ``extend``
# prepares model and loss.

import math

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend, extensions
from backpack.extensions.secondorder.hbp import (
    BackpropStrategy,
    Curvature,
    ExpectationApproximation,
    LossHessianStrategy,
)
from backpack.utils.kroneckers import kfacs_to_mat

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
X = torch.tensor(images[:16], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(labels[:16])

model = extend(
    nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.Sigmoid(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 10),
    )
)
loss_function = extend(nn.CrossEntropyLoss())

# %%
# Extensions are listed in ``backpack.extensions``. ``HBP`` is the family of Kronecker factors and
# wants to know which member; all others need no argument.

KFLR_BY_STRATEGY = (
    Curvature.GGN,
    LossHessianStrategy.EXACT,
    BackpropStrategy.SQRT,
    ExpectationApproximation.BOTEV_MARTENS,
)
instances = [
    extensions.HBP(*KFLR_BY_STRATEGY) if name == "HBP" else getattr(extensions, name)()
    for name in extensions.__all__
]

# %%
# A backward pass inside ``with backpack(...)`` stores the quantity at each parameter. The
# attribute is the extension's ``savefield``. (They could all be computed in one pass; extensions
# share what they have in common.)

weight = model[0].weight


def describe(value):
    """Write a tensor's shape; factors are listed, and products are functions."""
    if callable(value):
        return f"function {describe(weight[None])} -> {describe(value(weight[None]))}"
    if isinstance(value, list):
        return " ⊗ ".join(describe(factor) for factor in value)
    return str(list(value.shape))


table = Table(title="Quantities of the convolution's weight [3, 1, 3, 3]", box=box.SIMPLE_HEAD)
for column in ("extension", "attribute", "shape"):
    table.add_column(column, no_wrap=True)

for extension in instances:
    model.zero_grad()
    loss = loss_function(model(X), y)
    with backpack(extension):
        loss.backward()
    value = getattr(weight, extension.savefield)
    table.add_row(type(extension).__name__, extension.savefield, describe(value))

Console(width=100).print(table)

# %%
# They fit together. Some are sums of others, and the square root of the generalised Gauss-Newton
# matrix (GGN) has its diagonal.

assert torch.allclose(weight.grad_batch.sum(0), weight.grad, atol=1e-6)
assert torch.allclose(weight.grad_batch.flatten(1).square().sum(1), weight.batch_l2)
assert torch.allclose(weight.grad_batch.square().sum(0), weight.sum_grad_squared)
assert torch.allclose(weight.sqrt_ggn_exact.square().sum((0, 1)), weight.diag_ggn_exact)
assert torch.allclose(weight.diag_h_batch.sum(0), weight.diag_h, atol=1e-6)

# %%
# The blocks of the weight that the quantities stand for, from ``V = 27`` products with unit
# vectors, from the square root and from Kronecker factors. Those of a convolution sum over its 36
# positions one by one, hence the larger scale.

units = torch.eye(weight.numel()).reshape(-1, *weight.shape)
root = weight.sqrt_ggn_exact.flatten(0, 1).flatten(1)
blocks = {
    "Hessian (HMP)": weight.hmp(units).flatten(1),
    "positive curvature (PCHMP)": weight.pchmp(units).flatten(1),
    "GGN (GGNMP)": weight.ggnmp(units).flatten(1),
    "GGN (SqrtGGNExact)": root.T @ root,
    "sampled GGN (SqrtGGNMC)": torch.einsum(
        "mni,mnj->ij", weight.sqrt_ggn_mc.flatten(2), weight.sqrt_ggn_mc.flatten(2)
    ),
    "diagonal (DiagGGNExact)": weight.diag_ggn_exact.flatten().diag(),
    "KFLR": kfacs_to_mat(weight.kflr),
    "KFAC": kfacs_to_mat(weight.kfac),
    "KFRA": kfacs_to_mat(weight.kfra),
}
assert torch.allclose(blocks["GGN (GGNMP)"], blocks["GGN (SqrtGGNExact)"], atol=1e-6)

largest = max(block.abs().max().item() for block in blocks.values())
columns = 3
figure, grid = plt.subplots(
    math.ceil(len(blocks) / columns), columns, figsize=(8, 8.6), layout="constrained"
)
for axes, (name, block) in zip(grid.flat, blocks.items(), strict=True):
    picture = axes.imshow(
        block.abs().clamp_min(1e-4 * largest), cmap="Blues", norm=LogNorm(1e-4 * largest, largest)
    )
    axes.set_title(name, fontsize="medium")
    axes.set(xticks=[], yticks=[])
figure.colorbar(picture, ax=grid, label="absolute value", location="bottom", shrink=0.5, aspect=40)
plt.show()
