"""Own module, every extension
============================

Write the derivatives of a module down once, and every extension has a rule for it: first order,
GGN, Hessian, Kronecker factors and products. The example is an activation with a periodic part of
learned size.
"""

# %%
# The module computes ``y = x + weight sin(x)``, with a weight for each feature.

import time

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.core.derivatives import BaseDerivatives, check_rule, register
from backpack.extensions import HMP, KFAC, BatchGrad, DiagGGNExact, DiagHessian

torch.manual_seed(0)
torch.set_num_threads(1)  # faster for tensors this small


class Wave(nn.Module):
    """``[N, F]`` to ``[N, F]``."""

    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features))

    def forward(self, x):
        return x + self.weight * torch.sin(x)


images, labels = load_digits(return_X_y=True)
X = torch.tensor(images[:256], dtype=torch.float64) / 16
y = torch.tensor(labels[:256])
model = extend(nn.Sequential(nn.Linear(64, 32), Wave(32), nn.Linear(32, 10)).double())
loss_function = extend(nn.CrossEntropyLoss())

# %%
# Without a rule
# --------------
#
# The module is differentiated automatically, with a warning. Keep the results and their times.

EXTENSIONS = (BatchGrad(), DiagGGNExact(), DiagHessian(), HMP(), KFAC())


def quantities(extension):
    """Return a quantity of all parameters, and the seconds that it takes."""
    model.zero_grad()
    torch.manual_seed(1)  # for the labels that KFAC draws
    start = time.perf_counter()
    loss = loss_function(model(X), y)
    with backpack(extension):
        loss.backward()
    values = [getattr(p, extension.savefield) for p in model.parameters()]
    if isinstance(extension, HMP):  # functions: multiply with a vector of ones
        values = [
            f(torch.ones_like(p)[None]) for f, p in zip(values, model.parameters(), strict=True)
        ]
    return values, time.perf_counter() - start


def measure(extension):
    """Return a quantity, and the least time of five runs."""
    runs = [quantities(extension) for _ in range(5)]
    return runs[0][0], min(seconds for _, seconds in runs)


automatic = {extension: measure(extension) for extension in EXTENSIONS}

# %%
# The rule
# --------
#
# The Jacobian with respect to the input is diagonal, with entries ``1 + weight cos(x)``; that
# with respect to the weight has entries ``sin(x)``. Transposed, each is multiplied with V stacked
# cotangents at once. The second derivative with respect to the input is diagonal, too:
# ``-weight sin(x)``, times the gradient that arrives at the output.
#
# ``c`` is the call at hand: ``c.x`` is its input for the samples that products are wanted for.


@register(Wave)
class WaveDerivatives(BaseDerivatives):
    """Derivatives of ``y = x + weight sin(x)``."""

    params = ("weight",)

    def hessian_is_zero(self, module):
        return False

    def hessian_is_diagonal(self, module):
        return True

    def vjp(self, c, v):
        return v * (1 + c.params["weight"] * torch.cos(c.x))  # [V, N, F] -> [V, N, F]

    jvp = vjp  # a diagonal matrix is symmetric

    def weight_vjp(self, c, v):
        return v * torch.sin(c.x)

    def hessian_diag(self, c):
        return -c.params["weight"] * torch.sin(c.x) * c.select(c.grad_out[0])


check_rule(Wave(5), torch.randn(4, 5))

# %%
# With the rule
# -------------
#
# The same numbers, in less time.

by_rule = {extension: measure(extension) for extension in EXTENSIONS}

table = Table(title="The whole network, 256 samples", box=box.SIMPLE_HEAD)
table.add_column("extension")
for name in ("automatic", "with the rule"):
    table.add_column(name, justify="right")
for extension in EXTENSIONS:
    (expected, slow), (values, fast) = automatic[extension], by_rule[extension]
    torch.testing.assert_close(values, expected)
    table.add_row(type(extension).__name__, f"{1e3 * slow:.1f} ms", f"{1e3 * fast:.1f} ms")
Console(width=100).print(table)
