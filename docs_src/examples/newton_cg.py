"""Newton's method with conjugate gradients
=========================================

A Newton step solves a linear system with the curvature matrix. Conjugate gradients need products
alone, and ``GGNMP``, ``HMP`` and ``PCHMP`` give those with the blocks of the parameters after one
backward pass. The operator ``GGN`` does the same with the whole matrix.
"""

# %%
# Handwritten digits, all in one batch; every method starts from the same weights.

from collections.abc import Callable
from copy import deepcopy

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from backpack import backpack, extend
from backpack.extensions import GGNMP, HMP, PCHMP
from backpack.linalg import GGN
from backpack.utils.convert_parameters import parameter_list_to_vector, vector_to_parameter_list

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
X, y = torch.tensor(images / 16)[:500], torch.tensor(labels)[:500]
start = nn.Sequential(nn.Linear(64, 20), nn.Sigmoid(), nn.Linear(20, 10)).double()
loss_function = extend(nn.CrossEntropyLoss())

# %%
# Conjugate gradients
# -------------------
# For ``(A + damping I) x = b``. The Hessian need not be positive definite: if a direction of
# negative curvature turns up, the iteration stops with what it has (or with b, the negative
# gradient, if that is the first).


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], b: Tensor, damping: float, iterations: int
) -> Tensor:
    x, residual, direction = torch.zeros_like(b), b, b
    for _ in range(iterations):
        curved = product(direction.unsqueeze(0)).squeeze(0) + damping * direction
        curvature = (direction * curved).sum()
        if curvature <= 0:
            return x if x.any() else b
        length = residual.square().sum() / curvature
        x = x + length * direction
        after = residual - length * curved
        if after.norm() < 1e-3 * b.norm():
            break
        direction = after + after.square().sum() / residual.square().sum() * direction
        residual = after
    return x


# %%
# Steps
# -----
# With blocks, each parameter has a linear system of its own. Without any curvature, the solution is
# the negative gradient over the damping: gradient descent.

ITERATIONS, STEPS = 10, 40
Step = Callable[[nn.Module, float], list[Tensor]]


def step_of_blocks(extension: GGNMP | HMP | PCHMP) -> Step:
    def step(model: nn.Module, damping: float) -> list[Tensor]:
        with backpack(extension):
            loss_function(model(X), y).backward()
        return [
            conjugate_gradients(getattr(p, extension.savefield), -p.grad, damping, ITERATIONS)
            for p in model.parameters()
        ]

    return step


def step_of_whole_matrix(model: nn.Module, damping: float) -> list[Tensor]:
    loss_function(model(X), y).backward()
    gradient = parameter_list_to_vector(p.grad for p in model.parameters())
    operator = GGN(model, loss_function, [(X, y)])
    solution = operator.solve(-gradient, damping, max_iterations=ITERATIONS)
    return vector_to_parameter_list(solution, model.parameters())


def step_of_gradient_descent(model: nn.Module, damping: float) -> list[Tensor]:
    loss_function(model(X), y).backward()
    return [-p.grad / damping for p in model.parameters()]


# %%
# All methods adapt their damping by the same rule: a step that lowers the loss is taken, and the
# next one is damped half as much; any other is not, and the next one is damped four times as much.


def train(step: Step) -> list[float]:
    model, damping = extend(deepcopy(start)), 1.0
    losses = [loss_function(model(X), y).item()]
    for _ in range(STEPS):
        model.zero_grad()
        before = deepcopy(model.state_dict())
        changes = step(model, damping)
        with torch.no_grad():
            for p, change in zip(model.parameters(), changes, strict=True):
                p += change
            loss = loss_function(model(X), y).item()
        if loss < losses[-1]:
            damping /= 2
        else:
            model.load_state_dict(before)
            loss, damping = losses[-1], 4 * damping
        losses.append(loss)
    return losses


methods = {
    "no curvature": step_of_gradient_descent,
    "Hessian blocks, HMP": step_of_blocks(HMP()),
    "positive curvature blocks, PCHMP": step_of_blocks(PCHMP("pchmp", modify="abs")),
    "GGN blocks, GGNMP": step_of_blocks(GGNMP()),
    "whole GGN, operator": step_of_whole_matrix,
}
losses = {name: train(step) for name, step in methods.items()}
for name, values in losses.items():
    print(f"{name:34s} loss after {STEPS} steps {values[-1]:.2g}")

# %%
# The picture
# -----------
# Blocks ignore how the layers interact, so their steps need more damping than those of the whole
# matrix.

assert losses["whole GGN, operator"][-1] < losses["GGN blocks, GGNMP"][-1]
assert losses["GGN blocks, GGNMP"][-1] < losses["no curvature"][-1]

fig, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
colours = ["0.5", "#E69F00", "#CC79A7", "#56B4E9", "#0072B2"]
for (name, values), colour in zip(losses.items(), colours, strict=True):
    axis.semilogy(values, color=colour, label=name)
axis.set_xlabel("step")
axis.set_ylabel("loss on the training set")
axis.legend()
plt.show()
