"""Spectral density of the Hessian
================================

Most eigenvalues of the Hessian of a trained network are close to zero, and a few stand out, about
as many as there are classes. Nobody has to compute them for that: Lanczos iterations from a few
random vectors show how they are distributed. Here they are checked against all eigenvalues of a
model that is small enough.
"""

# %%
# A small network for handwritten digits, trained for some epochs.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack.linalg import GGN, Hessian, KroneckerGGN, logdet, spectral_density, trace

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
X, y = torch.tensor(images[:600] / 16), torch.tensor(labels[:600])

model = nn.Sequential(nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 10)).double()
loss_function = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for _ in range(5):
    for batch in torch.randperm(len(X)).split(64):
        optimizer.zero_grad()
        loss_function(model(X[batch]), y[batch]).backward()
        optimizer.step()

# %%
# Estimates
# ---------
# Five random vectors, and 40 products with all of them at once. ``density`` smooths what they find,
# and says how far off it may be.

hessian = Hessian(model, loss_function, [(X, y)], vectors_at_once=64)
estimate = spectral_density(hessian, 5, 40, torch.Generator().manual_seed(0))
width = 0.02
grid = torch.linspace(estimate.nodes.min() - 0.1, estimate.nodes.max() + 0.1, 400)
density = estimate.density(grid, width)

# %%
# All eigenvalues, for comparison.

values = torch.linalg.eigvalsh(hessian.to_dense())
normal = torch.distributions.Normal(values, width)
exact = normal.log_prob(grid.double().unsqueeze(1)).exp().mean(1)
assert (density.value - exact).abs().max() < 0.1 * exact.max()
assert torch.allclose(estimate.nodes.max(), values.max(), rtol=1e-3)

edges = torch.tensor([-10.0, -0.02, 0.02, 0.2, 10.0]).double()
found = estimate.counts(edges)
print("eigenvalues in              estimate    exact")
for i, name in enumerate(("below -0.02", "-0.02 to 0.02", "0.02 to 0.2", "above 0.2")):
    inside = ((values >= edges[i]) & (values < edges[i + 1])).sum().item()
    print(f"{name:20s} {found.value[i]:10.1f} ± {found.error[i]:4.1f} {inside:6d}")
    assert abs(found.value[i] - inside) < 6 * found.error[i] + 1

# %%
# The trace and a determinant
# ---------------------------
# The same random vectors give the trace of any function of a matrix, such as the logarithm of the
# determinant of the GGN with damping. For the trace alone, XTrace takes the fewest products.

ggn = GGN(model, loss_function, [(X, y)], vectors_at_once=64)
dense, damping = ggn.to_dense(), 0.01
estimates = {
    "trace of the Hessian": (trace(hessian, 100), values.sum()),
    "log det of the damped GGN": (
        logdet(ggn, damping, 20, 60),
        torch.logdet(dense + damping * torch.eye(len(dense)).double()),
    ),
}
for name, (found, truth) in estimates.items():
    print(f"{name}: {found.value:.2f} ± {found.error:.2f} ({truth:.2f})")
    assert abs(found.value - truth) < 6 * found.error

# %%
# Kronecker factors answer without any product.

kronecker = KroneckerGGN(model, loss_function, [(X, y)])
assert trace(kronecker).products == 0

# %%
# The picture
# -----------
# Note the logarithmic axis: nearly all eigenvalues are in the peak.

fig, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
low, high = density.value - 2 * density.error, density.value + 2 * density.error
axis.fill_between(
    grid, low.clamp(min=1e-6), high, color="#56B4E9", alpha=0.4, label="two standard errors"
)
axis.plot(grid, density.value, color="#0072B2", label="Lanczos, 5 vectors")
axis.plot(grid, exact, color="black", linestyle="--", linewidth=1, label="all eigenvalues")
axis.plot(values, torch.full_like(values, 2e-4), "|", color="black", markersize=8)
axis.set_yscale("log")
axis.set_ylim(1e-4, 2 * exact.max())
axis.set_xlabel("eigenvalue of the Hessian")
axis.set_ylabel("density")
axis.legend()
plt.show()
