"""A Laplace approximation, and what it does not know
===================================================

A trained network is sure of itself far away from its data, too. A Laplace approximation is a normal
distribution over the weights whose covariance is the inverse of the curvature; the
predictions it gives fade towards one half away from the data. Here with the whole GGN, and with
its Kronecker and diagonal approximations, and for some of the weights.
"""

# %%
# Two half moons, and a network that is trained to the maximum of the posterior: the summed
# loss, plus the negative logarithm of a normal prior with precision δ.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_blobs, make_moons
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

# %%
# Some of the weights
# -------------------
# Not all weights have to be uncertain. ``weights`` chooses which are: the parameters of a module by
# its name (here those of the last layer), or single ones, such as those with the largest variances
# in the diagonal approximation. The others stay what the training has made of them. The matrix of
# few weights is small, so the curvature can be the whole GGN.

chosen = {
    "last layer": {"4": True},
    "200 weights": posteriors["diagonal"].largest_variances(200),
}
print(f"{'uncertain':14s} certainty far away (0.5 is all of it)")
print(f"{'none':14s} {sure['weights at the maximum']:.2f}")
for name, mask in chosen.items():
    part = Laplace(model, loss_function, data, GGN, precision, weights=mask)
    certainty = (part.predict(grid[far]) - 0.5).abs().mean().item()
    print(f"{name:14s} {certainty:.2f}")
    assert sure["Laplace, whole GGN"] < certainty < sure["weights at the maximum"]
print(f"{'all':14s} {sure['Laplace, whole GGN']:.2f}")

# %%
# Several classes, and data to choose with
# ----------------------------------------
# This network is trained for too long on few points of classes that overlap: it is wrong now and
# then, and sure of it. With ``validation``, the prior precision is the one whose predictions for
# these data, which were not trained on, have the smallest loss.

spread = {"centers": [[-2, 0], [2, 0], [0, 3]], "cluster_std": 1.0}
parts = [make_blobs(n, random_state=i, **spread) for i, n in enumerate((60, 300, 300))]
training, validation, test = [(torch.tensor(x), torch.tensor(y)) for x, y in parts]
model = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 3)).double()
loss_function = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(300):
    optimizer.zero_grad()
    loss_function(model(training[0]), training[1]).backward()
    optimizer.step()

laplace = Laplace(model, loss_function, [training], KroneckerGGN)
best = laplace.fit_prior_precision(1e-2, 1e3, validation=[validation])
losses = {"weights of the training": loss_function(model(test[0]), test[1]).item()}
for method in ("bridge", "probit"):
    log_p = laplace.predict(test[0], method).log()
    losses[method] = nn.functional.nll_loss(log_p, test[1]).item()
print(f"prior precision {best:.2f}, loss of other data:")
for name, loss in losses.items():
    print(f"  {name:24s}{loss:.2f}")
assert losses["probit"] < losses["bridge"] < losses["weights of the training"]

# %%
# The second method, the Laplace bridge, is coarser, and tells more: a Dirichlet distribution over
# the probabilities themselves, with a standard deviation for each.

places = {"among the first class": (-2.0, 0.0), "between all classes": (0.0, 1.0)}
distribution = torch.distributions.Dirichlet(
    laplace.dirichlet(torch.tensor([*places.values()]).double())
)
for name, mean, deviation in zip(places, distribution.mean, distribution.stddev, strict=True):
    print(f"{name:22s}", *(f"{m:5.2f} ± {d:4.2f}" for m, d in zip(mean, deviation, strict=True)))
assert distribution.stddev[0].max() < distribution.stddev[1].max()
