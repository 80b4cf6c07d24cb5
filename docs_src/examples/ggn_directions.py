"""How many directions does a Newton step need?
===============================================

The generalised Gauss-Newton matrix (GGN) of a batch has few eigenvalues that stand out.
``GGNSpectrum`` has all of them from inner products of its columns, knows the slope and curvature of
each sample along the eigenvectors, and takes Newton's step in the space of the leading ones. Does a
step along these few directions go as far as one along all?
"""

# %%
# The data are handwritten digits: a batch to step on, and what is left to test the step. The model
# has been trained for a moment.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from backpack.linalg import GGNSpectrum

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
X, y = torch.tensor(images / 16), torch.tensor(labels)
order = torch.randperm(len(X))
X, y = X[order], y[order]
batch, others = (X[:128], y[:128]), (X[1000:], y[1000:])

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
loss_function = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for chosen in torch.arange(128, 1000).repeat(3).split(64):
    optimizer.zero_grad()
    loss_function(model(X[chosen]), y[chosen]).backward()
    optimizer.step()

# %%
# Slopes and curvatures
# ---------------------
# Columns, gradients and eigenvalues take one backward pass. The slopes of the samples add up to
# that of the loss along an eigenvector, their curvatures to the eigenvalue.

spectrum = GGNSpectrum(model, loss_function, batch)
values, vectors = spectrum.eigh(20)
slopes, curvatures = spectrum.slopes(20), spectrum.curvatures(20)

model.zero_grad()
loss_function(model(batch[0]), batch[1]).backward()
gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
assert torch.allclose(slopes.sum(0), gradient @ vectors)
assert torch.allclose(curvatures.sum(0), values)
print(f"{spectrum.shape[0]} parameters, {len(spectrum.eigenvalues)} eigenvalues other than zero")
share = float(values[-9:].sum() / spectrum.trace())
print(f"The nine largest have {share:.0%} of the trace.")

# %%
# The step
# --------
# Newton's step divides the slope along an eigenvector by its curvature and a damping. It is taken
# with more and more eigenvectors, and the loss is evaluated on the batch and on other data.

start = parameters_to_vector(model.parameters()).detach()


@torch.no_grad()
def losses_after(step):
    """Return the losses of the batch and of other data; the model stays as it is."""
    vector_to_parameters(start + step, model.parameters())
    found = [loss_function(model(inputs), targets).item() for inputs, targets in (batch, others)]
    vector_to_parameters(start, model.parameters())
    return found


counts = [1, 2, 3, 5, 9, 15, 30, 60, 120, 250, 500, len(spectrum.eigenvalues)]
damping = 0.03
newton = torch.tensor([losses_after(spectrum.newton_step(k, damping)) for k in counts])

# %%
# The gradient step of the best length is what has to be beaten.

rates = torch.logspace(-2, 1, 40).tolist()
descent = torch.tensor([losses_after(-rate * gradient) for rate in rates])
before, best = losses_after(torch.zeros_like(start)), descent.min(0).values
print(f"before: {before[0]:.3f} on the batch, {before[1]:.3f} on other data")
for name, (of_batch, of_others) in {"gradient": best, "Newton": newton.min(0).values}.items():
    print(f"{name}: {of_batch:.3f}, {of_others:.3f}")

# %%
# Nine directions, which have most of the trace, do little more than the best gradient step. About a
# hundred do as much as all: those whose curvature is not far below the damping.

of_batch = dict(zip(counts, newton[:, 0].tolist(), strict=True))
assert share > 0.7 and of_batch[9] > 0.9 * best[0]
assert of_batch[120] < 1.15 * of_batch[counts[-1]] < 0.6 * best[0]

fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.9), layout="constrained")
ranks = torch.arange(1, len(spectrum.eigenvalues) + 1)
left.loglog(ranks, spectrum.eigenvalues.flip(0), color="#0072B2", label="eigenvalue")
left.axhline(damping, color="0.6", linestyle=":", label="damping")
left.axvline(9.5, color="#D55E00", linestyle="--", label="nine eigenvectors")
left.set_ylim(1e-8, 10)
left.set_xlabel("rank")
left.set_ylabel("eigenvalue of the GGN")
left.legend()
for i, (name, color) in enumerate({"batch": "#0072B2", "other data": "#009E73"}.items()):
    right.semilogx(counts, newton[:, i], "o-", color=color, label=f"Newton, {name}")
    right.axhline(best[i], color=color, linestyle="--", label=f"best gradient step, {name}")
right.set_ylim(0.1, 0.75)
right.set_xlabel("number of eigenvectors")
right.set_ylabel("loss after one step")
right.legend(fontsize="small")
plt.show()
