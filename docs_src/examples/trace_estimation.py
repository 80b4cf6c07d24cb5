"""Trace of the Hessian: exact and by Hutchinson's estimator
==========================================================

The trace of the Hessian is the sum of ``DiagHessian``. Hutchinson's estimator needs products with
random vectors alone: of the whole matrix with the operator ``Hessian``, or of the blocks on its
diagonal with ``HMP``. The second has the same trace, and a smaller error for the same vectors.
"""

# %%
# A small network for handwritten digits, trained for one epoch.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.extensions import HMP
from backpack.linalg import DiagonalHessian, Hessian

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
X, y = torch.tensor(images / 16), torch.tensor(labels)

model = extend(nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))).double()
loss_function = extend(nn.CrossEntropyLoss())
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
for batch in torch.randperm(len(X)).split(64):
    optimizer.zero_grad()
    loss_function(model(X[batch]), y[batch]).backward()
    optimizer.step()

# %%
# The exact trace
# ---------------
# The diagonal over the whole data set, in batches. ``DiagonalHessian`` runs the extension
# ``DiagHessian`` for each of them and puts the results together.

data = list(zip(X.split(300), y.split(300), strict=True))
exact = DiagonalHessian(model, loss_function, data).trace()

# %%
# Estimates
# ---------
# For a vector v of random signs, ``vᵀ H v`` has the trace as its expectation: the diagonal
# contributes exactly that, and everything else, ``v_i v_j H_ij``, has mean zero. A product with V
# vectors at once reads the data once.

num_vectors = 400
hessian = Hessian(model, loss_function, data)
signs = torch.randint(2, (hessian.shape[0], num_vectors)).double() * 2 - 1
whole = (signs * (hessian @ signs)).sum(0)

# %%
# ``HMP`` gives for each parameter the product with its block, as a function ``[V, *p] -> [V, *p]``.
# The blocks between two parameters have no part in the trace: without them, there is less noise.

with backpack(HMP()):
    loss_function(model(X), y).backward()

blocks = torch.zeros(num_vectors).double()
pieces = signs.T.split([p.numel() for p in model.parameters()], 1)
for p, piece in zip(model.parameters(), pieces, strict=True):
    v = piece.reshape(-1, *p.shape)
    blocks += (v * p.hmp(v)).flatten(1).sum(1)

# %%
# The variance of one estimate is twice the sum of the squared entries off the diagonal. That is
# known here, because the model is small, and tells how wide the band is in which 95 of 100
# averages over the vectors lie.

dense = hessian.to_dense()
assert torch.allclose(dense.trace(), exact)
sizes = [p.numel() for p in model.parameters()]
in_blocks = torch.block_diag(*(torch.ones(size, size) for size in sizes)).double()
off_diagonal = 1 - torch.eye(len(dense)).double()
deviation = {
    "whole Hessian": (2 * (dense * off_diagonal).square().sum()).sqrt(),
    "blocks": (2 * (dense * off_diagonal * in_blocks).square().sum()).sqrt(),
}
assert deviation["blocks"] < deviation["whole Hessian"]

fig, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
counts = torch.arange(1, num_vectors + 1)
for axis, (name, sigma), estimates in zip(axes, deviation.items(), (whole, blocks), strict=True):
    averages = estimates.cumsum(0) / counts
    band = 1.96 * sigma / counts.sqrt()
    assert (averages[-1] - exact).abs() < 2 * band[-1]
    axis.fill_between(
        counts, exact - band, exact + band, color="#56B4E9", alpha=0.3, label="95 % band"
    )
    axis.plot(counts, averages, color="#0072B2", label="average of estimates")
    axis.axhline(exact, color="black", linestyle="--", label="exact")
    axis.set_xscale("log")
    axis.set_title(name)
    axis.set_xlabel("number of vectors")
axes[0].set_ylabel("trace of the Hessian")
axes[0].legend()
plt.show()
