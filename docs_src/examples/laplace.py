"""A Laplace approximation, and what it does not know
===================================================

A trained network is sure of itself far away from its data, too. A Laplace approximation is a normal
distribution over the weights whose covariance is the inverse of the curvature; the
predictions it gives fade towards one half away from the data. Here with the whole GGN, and with
its Kronecker and diagonal approximations.
"""

# %%
# Two half moons, and a network that is trained to the maximum of the posterior: the summed
# loss, plus the negative logarithm of a normal prior with precision δ.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_moons
from torch import nn

from backpack.laplace import Laplace
from backpack.linalg import GGN, DiagonalGGN, KroneckerGGN, KroneckerOperator
from backpack.utils.convert_parameters import parameter_list_to_vector

torch.manual_seed(0)
points, labels = make_moons(100, noise=0.12, random_state=0)
X, y = torch.tensor(points), torch.tensor(labels).double().unsqueeze(1)

model = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1))
model, loss_function = model.double(), nn.BCEWithLogitsLoss(reduction="sum")
precision = 0.2
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(600):
    optimizer.zero_grad()
    weights = parameter_list_to_vector(model.parameters())
    (loss_function(model(X), y) + precision / 2 * weights.square().sum()).backward()
    optimizer.step()

# %%
# The posterior
# -------------
# The Hessian of the objective is that of the loss, here the GGN, plus δ times the identity. Its
# inverse is the covariance of the weights.

data = [(X, y)]
curvatures = {
    # a matrix is a Kronecker product of a single factor
    "whole GGN": KroneckerOperator([[GGN(model, loss_function, data).to_dense()]]),
    "Kronecker": KroneckerGGN,
    "diagonal": DiagonalGGN,
}
posteriors = {
    name: Laplace(model, loss_function, data, curvature, precision)
    for name, curvature in curvatures.items()
}

# %%
# Its determinant gives the marginal likelihood of the data, a way to choose the precision without
# other data. It is best where the precision is neither too small nor too large.

precisions = (0.002, 0.02, 0.2, 2.0, 20.0)
print("prior precision", *(f"{delta:8.3f}" for delta in precisions), "    best")
for name, laplace in posteriors.items():
    values = [laplace.log_marginal_likelihood(delta).item() for delta in precisions]
    best = laplace.fit_prior_precision()
    print(f"{name:15s}", *(f"{value:8.1f}" for value in values), f"{best:8.2f}")
    assert values[2] > max(values[0], values[-1])
    laplace.prior_precision = precision  # the one that the weights were trained with

# %%
# Predictions
# -----------
# Linearised in the weights, the logit is normally distributed with variance ``j Σ jᵀ``, where j
# is its gradient: ``outputs`` has both, ``sample_outputs`` draws from it, and ``predict`` averages
# the sigmoid over it. The variance of the Kronecker approximation is closer to that of the whole
# GGN than that of the diagonal.

variances = {name: laplace.outputs(X)[1].flatten() for name, laplace in posteriors.items()}
samples = posteriors["Kronecker"].sample_outputs(X, 4000)
assert torch.allclose(samples.var(0).flatten(), variances["Kronecker"], rtol=0.15)
error = {name: (v / variances["whole GGN"]).log().abs().mean() for name, v in variances.items()}
assert error["Kronecker"] < error["diagonal"]

# %%
# The picture
# -----------

axis_x, axis_y = torch.linspace(-4, 5, 90).double(), torch.linspace(-4, 4.5, 90).double()
grid = torch.cartesian_prod(axis_x, axis_y)
predictions = {"weights at the maximum": model(grid).sigmoid().detach().squeeze(1)}
for name, posterior in posteriors.items():
    predictions[f"Laplace, {name}"] = posterior.predict(grid).squeeze(1)
far = grid.norm(dim=1) > 4
sure = {name: (p[far] - 0.5).abs().mean().item() for name, p in predictions.items()}
assert all(sure["weights at the maximum"] > sure[f"Laplace, {name}"] for name in posteriors)

fig, axes = plt.subplots(2, 2, figsize=(7.5, 6.4), sharex=True, sharey=True, layout="constrained")
for axis, (name, p) in zip(axes.flat, predictions.items(), strict=True):
    heights = p.reshape(90, 90).T
    shades = axis.contourf(axis_x, axis_y, heights, levels=torch.linspace(0, 1, 11), cmap="PuOr")
    axis.contour(axis_x, axis_y, heights, levels=[0.5], colors="black")
    for label, marker in ((0, "o"), (1, "^")):
        axis.scatter(*X[y[:, 0] == label].T, s=12, marker=marker, c="white", edgecolors="black")
    axis.set_title(name)
for axis in axes[1]:
    axis.set_xlabel("first feature")
for axis in axes[:, 0]:
    axis.set_ylabel("second feature")
fig.colorbar(shades, ax=axes, label="probability of triangles")
plt.show()
