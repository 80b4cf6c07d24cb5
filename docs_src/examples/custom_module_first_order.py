"""Own module, first order
=======================

A module that the library does not know is differentiated automatically. This script writes a rule
for one extension down instead: how to get the individual gradients of a layer that scales its
input.
"""

# %%
# The module multiplies each feature with a weight of its own.

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.extensions import BatchGrad
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.utils.subsampling import subsample

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
X = torch.tensor(images, dtype=torch.float64) / 16
y = torch.tensor(labels)


class Scale(nn.Module):
    """``[N, F]`` to ``[N, F]``."""

    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x):
        return self.weight * x


model = nn.Sequential(nn.Linear(64, 32), Scale(32), nn.Tanh(), nn.Linear(32, 10)).double()
extend(model)
loss_function = extend(nn.CrossEntropyLoss())


def individual_gradients(extension, X, y):
    """Compute the individual gradients of the scales. ``[N, F]``"""
    loss = loss_function(model(X), y)
    with backpack(extension):
        loss.backward()
    return model[1].weight.grad_batch


# %%
# Without a rule
# --------------
#
# The layer works, and a warning says that it is differentiated automatically.

automatic = individual_gradients(BatchGrad(), X, y)

# %%
# The rule
# --------
#
# For sample n the module computes ``y_f = weight_f x_f``. The chain rule multiplies the gradient
# that arrives at its output with the derivative ``x_f``. A rule has a method for each parameter,
# with the parameter's name. ``g_out`` holds what arrives, ``module.input0`` the input; who
# supports the argument ``subsampling`` picks its samples.


class ScaleBatchGrad(FirstOrderModuleExtension):
    """Individual gradients of ``Scale``."""

    def __init__(self):
        super().__init__(params=["weight"])

    def weight(self, ext, module, g_inp, g_out, bpQuantities):
        return subsample(g_out[0] * module.input0, subsampling=ext.get_subsampling())


# %%
# It is given to an extension, for a class of modules.

with_rule = BatchGrad()
with_rule.set_module_extension(Scale, ScaleBatchGrad())
by_rule = individual_gradients(with_rule, X, y)
assert torch.allclose(by_rule, automatic)
assert torch.allclose(by_rule.sum(0), model[1].weight.grad / 2)  # two backward passes so far

some = BatchGrad(subsampling=[0, 3])
some.set_module_extension(Scale, ScaleBatchGrad())
assert torch.allclose(individual_gradients(some, X, y), by_rule[[0, 3]])

# %%
# Time
# ----
#
# The rule saves the automatic differentiation and its checks. The fastest of five runs counts.


def milliseconds(extension):
    """Time forward and backward pass."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        individual_gradients(extension, X, y)
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


sizes = [64, 256, 1024]
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
full_X, full_y = X, y
for label, extension, color, marker in (
    ("automatic", BatchGrad(), "#D55E00", "s"),
    ("with the rule", with_rule, "#0072B2", "o"),
):
    times = []
    for size in sizes:
        X, y = full_X[:size], full_y[:size]
        times.append(milliseconds(extension))
    axes.plot(sizes, times, color=color, marker=marker, label=label)
axes.set(xlabel="samples", ylabel="time in ms", ylim=0, xticks=sizes)
axes.set_title("All individual gradients of the network", loc="left")
axes.grid(color="0.9")
axes.legend(frameon=False)
plt.show()
