"""Differentiate through the variance of the gradient
===================================================

Quantities are differentiable if the backward pass is: ``loss.backward(create_graph=True)``. This
script penalises the variance of the gradient, which draws training to places where the samples
agree.
"""

# %%
# Two classes of scikit-learn's digits that are easily confused.

import warnings

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.extensions import BatchGrad, Variance

images, labels = load_digits(return_X_y=True)
chosen = (labels == 3) | (labels == 8)
X = torch.tensor(images[chosen], dtype=torch.float64) / 16
y = torch.tensor(labels[chosen] == 8).long()
loss_function = extend(nn.CrossEntropyLoss())

# The reference cycles that torch warns of are broken below, by new gradients without a graph.
warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")


def make_model():
    """Build a small network; every call returns the same initial weights."""
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 2)).double())


# %%
# The gradient of the variance
# ----------------------------
#
# ``create_graph=True`` makes ``p.variance`` a function of the parameters, for autograd to
# differentiate.


def loss_and_variance(model):
    """Compute the loss, and the sum of its gradient's variances over all parameters."""
    loss = loss_function(model(X), y)
    with backpack(Variance()):
        loss.backward(create_graph=True)
    return loss, sum(p.variance.sum() for p in model.parameters())


model = make_model()
parameters = list(model.parameters())
_, variance = loss_and_variance(model)
gradient = torch.autograd.grad(variance, parameters)

# %%
# Finite differences along the gradient agree with its squared norm.


def variance_at(step):
    """Move the parameters along the gradient and evaluate."""
    moved = make_model()
    with torch.no_grad():
        for p, direction in zip(moved.parameters(), gradient, strict=True):
            p.add_(direction, alpha=step)
    return loss_and_variance(moved)[1].item()


h = 1e-2
slope = (variance_at(h) - variance_at(-h)) / (2 * h)
squared_norm = sum(g.square().sum() for g in gradient).item()
print(f"slope {slope:.6e}, squared norm of the gradient {squared_norm:.6e}")
assert abs(slope / squared_norm - 1) < 1e-4

# %%
# Differentiating by hand what ``BatchGrad`` gives is the same.

with backpack(BatchGrad()):
    loss_function(model(X), y).backward(create_graph=True)
by_hand = sum(p.grad_batch.var(dim=0, correction=0).sum() for p in parameters)
for ours, other in zip(gradient, torch.autograd.grad(by_hand, parameters), strict=True):
    assert torch.allclose(ours, other)

# %%
# Training with a penalty
# -----------------------
#
# The loss is the mean over N samples, so that its variance carries a factor 1/N², which is taken
# out.


def train(penalty, steps=300):
    """Minimise loss + penalty * variance with gradient descent, and record both terms."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, variance = loss_and_variance(model)
        variance = len(y) ** 2 * variance
        history.append((loss.item(), variance.item()))
        # ``backward`` has put the gradient of the loss to ``p.grad``, with a graph attached
        for p, extra in zip(
            model.parameters(), torch.autograd.grad(variance, model.parameters()), strict=True
        ):
            p.grad = p.grad.detach() + penalty * extra
        optimizer.step()
    return torch.tensor(history)


figure, axes = plt.subplots(ncols=2, figsize=(9, 3.6), layout="constrained")
styles = {0.0: ("0.5", "-"), 0.1: ("#0072B2", "--"), 0.3: ("#D55E00", ":")}
final = {}
for penalty, (color, line) in styles.items():
    history = train(penalty)
    final[penalty] = history[-1, 1]
    for panel, values in zip(axes, history.T, strict=True):
        panel.plot(values, color=color, linestyle=line, linewidth=2, label=f"penalty {penalty:g}")
assert max(final[0.1], final[0.3]) < final[0.0] / 2
for panel, title in zip(axes, ("Loss", "Variance of the gradient, sum"), strict=True):
    panel.set_title(title, loc="left")
    panel.set(xlabel="step", yscale="log")
    panel.grid(color="0.9")
axes[0].legend(frameon=False)
plt.show()
