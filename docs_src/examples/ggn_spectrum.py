"""Spectrum of the GGN from a Gram matrix
======================================

The generalised Gauss-Newton matrix (GGN) of a batch has at most as many eigenvalues that are not
zero as the batch has outputs: N samples times C classes. ``SqrtGGNExact`` gives all of them from a
small matrix; the operator ``GGN`` finds the largest over all of the data, without a square root.
"""

# %%
# The data are handwritten digits, the model is trained for a moment: curvature is more telling
# away from the random start.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.extensions import SqrtGGNExact
from backpack.linalg import GGN

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
X, y = torch.tensor(images / 16), torch.tensor(labels)

model = extend(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))).double()
loss_function = extend(nn.CrossEntropyLoss())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for batch in torch.randperm(len(X)).split(64):
    optimizer.zero_grad()
    loss_function(model(X[batch]), y[batch]).backward()
    optimizer.step()

# %%
# The square root
# ---------------
# ``p.sqrt_ggn_exact`` has the shape ``[C, N, *p]``. Flattened, its rows are the columns of a matrix
# S with as many rows as there are parameters, and the GGN is ``S Sᵀ``.

X_batch, y_batch = X[:128], y[:128]
with backpack(SqrtGGNExact()):
    loss_function(model(X_batch), y_batch).backward()

S = torch.cat([p.sqrt_ggn_exact.flatten(0, 1).flatten(1) for p in model.parameters()], 1).T
num_params, num_columns = S.shape
print(f"{num_params} parameters, {num_columns} columns: 128 samples, 10 classes")

# %%
# ``S Sᵀ`` and the smaller Gram matrix ``Sᵀ S`` have the same eigenvalues, up to zeros. An
# eigenvector u of the Gram matrix belongs to the eigenvector ``S u`` of the GGN.

eigenvalues, u = torch.linalg.eigh(S.T @ S)
top = eigenvalues[-20:]
eigenvectors = S @ u[:, -20:] / top.sqrt()
assert torch.allclose(S @ (S.T @ eigenvectors), eigenvectors * top)

# %%
# The operator
# ------------
# ``GGN`` multiplies with the same matrix, and ``eigsh`` finds its largest eigenvalues by the
# Lanczos method. It also takes all of the data, whose square root would be 14 times as large.

of_batch, _ = GGN(model, loss_function, [(X_batch, y_batch)]).eigsh(k=20)
assert torch.allclose(of_batch, top)

batches = list(zip(X.split(256), y.split(256), strict=True))
of_all_data, _ = GGN(model, loss_function, batches).eigsh(k=20)

# %%
# A few eigenvalues stand out, one less than there are classes; the others decay over many orders of
# magnitude. (Nine, because the softmax does not change if all logits do. For the same reason, 128
# eigenvalues of the Gram matrix are zero, one for each sample.)

assert torch.allclose(eigenvalues[:128], torch.zeros(128).double(), atol=1e-10)

fig, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
ranks = range(1, 21)
axis.loglog(
    range(1, num_columns + 1), eigenvalues.flip(0), color="#0072B2", label="batch, Gram matrix"
)
axis.loglog(ranks, of_batch.flip(0), "o", mfc="none", color="#D55E00", label="batch, operator")
axis.loglog(ranks, of_all_data.flip(0), "x", color="#009E73", label="all data, operator")
axis.axvline(9.5, color="0.6", linestyle=":", label="nine eigenvalues")
axis.set_ylim(1e-6, 10)
axis.set_xlabel("rank")
axis.set_ylabel("eigenvalue of the GGN")
axis.legend()
plt.show()
