"""Neural tangent kernel, before and after training
================================================

A network moves its predictions for one image by the inner product of this image's Jacobian with
that of the image it learns from: the neural tangent kernel. Directions with a large eigenvalue are
learned first. Here is how the kernel turns towards the labels while the network trains, and what
it predicts on its own.
"""

# %%
# A small convolutional network, some handwritten digits to learn, others to predict.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack.linalg import NTK

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
X, y = torch.tensor(images / 16).view(-1, 1, 8, 8), torch.tensor(labels)
order = torch.randperm(len(X))
X, y = X[order], y[order]
train, test = slice(0, 300), slice(300, 700)
targets = nn.functional.one_hot(y, 10) - 0.1  # centred

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(128, 10),
).double()

# %%
# The kernel of 300 images, summed over the ten outputs, is checked against Jacobians of autograd.

at_start = NTK(model, X[train]).traced()


def jacobian(x: torch.Tensor) -> torch.Tensor:
    """Return the derivatives of ten outputs with respect to all parameters."""
    params, outputs = list(model.parameters()), model(x)[0]
    rows = [torch.autograd.grad(f, params, retain_graph=True) for f in outputs]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


one, other = jacobian(X[3:4]), jacobian(X[5:6])
assert torch.allclose((one * other).sum(), at_start[3, 5])

# %%
# Kernel regression
# -----------------
# A wide network that is trained with the square loss predicts what regression with its kernel
# does. For this one that is an approximation, for which it need not be trained at all.


def regression() -> float:
    """Predict the other images with the kernel that the model has now; return the accuracy."""
    kernel, across = NTK(model, X[train]).traced(), NTK(model, X[test], X[train]).traced()
    ridge = 1e-3 * kernel.diagonal().mean() * torch.eye(len(kernel), dtype=kernel.dtype)
    predicted = across @ torch.linalg.solve(kernel + ridge, targets[train].to(kernel))
    return (predicted.argmax(1) == y[test]).double().mean().item()


accuracy = {"kernel at the start": regression()}
loss_function = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(60):
    for batch in torch.arange(300).split(50):
        optimizer.zero_grad()
        loss_function(model(X[train][batch]), y[train][batch]).backward()
        optimizer.step()
trained = NTK(model, X[train]).traced()
accuracy["kernel after training"] = regression()
with torch.no_grad():
    accuracy["trained network"] = (model(X[test]).argmax(1) == y[test]).double().mean().item()
for name, value in accuracy.items():
    print(f"{name:22s} {value:6.1%} of 400 other images")
assert accuracy["kernel after training"] > accuracy["kernel at the start"] > 0.8

# %%
# The picture
# -----------
# Left: the eigenvalues, divided by their sum. At the start one direction, in which all outputs move
# together, has nearly everything. Right: which part of the labels is in the directions of the
# largest ones. Training turns more of it towards those that are learned first.


def captured(kernel: torch.Tensor) -> torch.Tensor:
    """Return the part of the labels in the span of the first k eigenvectors, for all k."""
    vectors = torch.linalg.eigh(kernel).eigenvectors.flip(1)
    parts = (vectors.T @ targets[train].to(kernel)).square().sum(1)
    return parts.cumsum(0) / parts.sum()


fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
k = torch.arange(1, len(at_start) + 1)
for name, kernel, colour in (
    ("at the start", at_start, "#999999"),
    ("after training", trained, "#0072B2"),
):
    values = torch.linalg.eigvalsh(kernel).flip(0).clamp(min=0)
    left.loglog(k, values / values.sum(), color=colour, label=name)
    right.semilogx(k, captured(kernel), color=colour, label=name)
left.set_xlabel("k")
left.set_ylabel("k-th eigenvalue ÷ sum")
left.set_ylim(1e-5, 1)
right.set_xlabel("k")
right.set_ylabel("part of the labels in the first k")
right.set_ylim(0, 1)
right.axvline(10, color="black", linestyle=":", linewidth=1)
right.legend(loc="lower right")
plt.show()
assert captured(trained)[9] > captured(at_start)[9]
