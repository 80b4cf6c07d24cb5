"""Pruning by curvature
=====================

Which weights of a network can be set to zero? Small ones, or those whose removal changes the loss
least: to second order, that is ``1/2 h θ²`` with the diagonal h of the curvature (Optimal Brain
Damage, LeCun, Denker, Solla, NeurIPS 1989). ``DiagonalGGN`` has h for the whole training set.
"""

# %%
# A network for handwritten digits, trained until the loss is small: the formula leaves out the
# gradient, which is zero at a minimum.

from copy import deepcopy

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from backpack.linalg import DiagonalGGN
from backpack.utils.convert_parameters import parameter_list_to_vector, vector_to_parameter_list

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
split = train_test_split(images / 16, labels, test_size=0.3, random_state=0, stratify=labels)
X_train, X_test, y_train, y_test = map(torch.tensor, split)
batches = list(zip(X_train.split(128), y_train.split(128), strict=True))

model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).double()
loss_function = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(100):
    for X, y in batches:
        optimizer.zero_grad()
        loss_function(model(X), y).backward()
        optimizer.step()

# %%
# Saliencies
# ----------
# A rule gives each weight a number; weights with the smallest are removed first.

weights = parameter_list_to_vector(model.parameters()).detach()


def with_weights(vector: Tensor) -> nn.Module:
    pruned = deepcopy(model)
    pieces = vector_to_parameter_list(vector, pruned.parameters())
    with torch.no_grad():
        for p, piece in zip(pruned.parameters(), pieces, strict=True):
            p.copy_(piece)
    return pruned


def evaluate(vector: Tensor, X: Tensor, y: Tensor) -> tuple[float, float]:
    """Return loss and accuracy."""
    with torch.no_grad():
        output = with_weights(vector)(X)
    return loss_function(output, y).item(), (output.argmax(1) == y).double().mean().item()


def saliency(vector: Tensor) -> Tensor:
    diagonal = DiagonalGGN(with_weights(vector), loss_function, batches).diagonal()
    return diagonal * vector.square() / 2


# %%
# Weights that have no curvature have hardly any use, whatever their size: those of pixels at
# the border, which are always black, and those of pixels that are black whenever the unit is on.

useless = saliency(weights) == 0
print(f"{useless.sum()} of {len(weights)} weights have no curvature", end=", ")
print(f"the largest of them is {weights[useless].abs().max():.2f}")
change = evaluate(weights * ~useless, X_train, y_train)[0] - evaluate(weights, X_train, y_train)[0]
assert abs(change) < 1e-4

# %%
# Pruning
# -------
# Remove more and more weights, without training again. The curvature changes on the way; the last
# rule computes it again each time.

by_magnitude, by_curvature, by_chance = weights.abs(), saliency(weights), torch.rand_like(weights)
rules = {
    "random": lambda vector: by_chance,
    "magnitude": lambda vector: by_magnitude,
    "curvature, computed once": lambda vector: by_curvature,
    "curvature, computed each time": saliency,
}
fractions = torch.linspace(0, 0.95, 20)
curves: dict[str, list[float]] = {}
for name, rule in rules.items():
    kept = torch.ones_like(weights, dtype=torch.bool)
    curves[name] = []
    for fraction in fractions:
        values = rule(weights * kept).where(kept, -1)  # what is gone stays away
        kept[values.argsort()[: int(fraction * len(weights))]] = False
        curves[name].append(evaluate(weights * kept, X_test, y_test)[1])

average = {name: sum(accuracies) / len(accuracies) for name, accuracies in curves.items()}
assert average["curvature, computed each time"] > average["magnitude"] > average["random"]

fig, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
styles = [("0.5", ":"), ("#D55E00", "--"), ("#56B4E9", "-."), ("#0072B2", "-")]
for (name, accuracies), (colour, line) in zip(curves.items(), styles, strict=True):
    axis.plot(100 * fractions, accuracies, line, color=colour, label=name)
axis.set_xlabel("weights removed (%)")
axis.set_ylabel("accuracy on the test set")
axis.legend()
plt.show()
