"""EKFAC against KFAC
==================

A Kronecker product has eigenvectors with Kronecker structure, and eigenvalues that are products.
The first is what makes it cheap, the second is what makes it wrong: EKFAC keeps the
eigenvectors, and replaces the eigenvalues by the second moments of the gradients along them. Here
both approximate the GGN of a small convolutional network, which can still be formed.
"""

# %%
# A network that is trained on digits for a while.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from backpack import backpack, extend
from backpack.extensions import EKFAC, KFAC
from backpack.linalg import EKFAC as EKFACOperator
from backpack.linalg import GGN, KroneckerGGN
from backpack.utils.kroneckers import kfacs_to_mat

torch.manual_seed(0)
torch.set_num_threads(1)  # faster for tensors this small
torch.set_default_dtype(torch.float64)
images, labels = load_digits(return_X_y=True)
X, y = torch.tensor(images).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
train, test = slice(0, 200), slice(1200, 1797)

model = nn.Sequential(
    nn.Conv2d(1, 6, 3, stride=2, padding=1),
    nn.Tanh(),
    nn.Conv2d(6, 6, 3, stride=2, padding=1),
    nn.Tanh(),
    nn.Flatten(),
    nn.Linear(24, 10),
)
model, loss_function = extend(model), extend(nn.CrossEntropyLoss())
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(40):
    optimizer.zero_grad()
    loss_function(model(X[train]), y[train]).backward()
    optimizer.step()

# %%
# One batch
# ---------
# In one backward pass, ``EKFAC`` has for each parameter the eigenvectors of the factors of
# ``KFAC``, and the corrected eigenvalues. With ``fisher="exact"`` these are ``diag(Qᵀ G Q)``.

loss = loss_function(model(X[:64]), y[:64])
with backpack(EKFAC(fisher="exact"), KFAC(fisher="exact")):
    loss.backward()
weight = model[2].weight
print(weight.ekfac)
print("eigenvalues", list(weight.ekfac.eigenvalues.shape))
B, A = weight.kfac
U, V = weight.ekfac.bases
corrected = weight.ekfac.eigenvalues
products = torch.outer((U.T @ B @ U).diagonal(), (V.T @ A @ V).diagonal())
print(f"their sum is {corrected.sum():.3f}, that of KFAC's is {products.sum():.3f}")

# %%
# All data
# --------
# ``backpack.linalg`` has the matrices of a data set. Positions of a convolution can be treated in
# several ways, see :class:`~backpack.extensions.HBP`; EKFAC corrects all of them.

data = DataLoader(TensorDataset(X[train], y[train]), batch_size=100)
dense = GGN(model, loss_function, data, vectors_at_once=64).to_dense()
names = [name for name, _ in model.named_parameters()]
sizes = [p.numel() for p in model.parameters()]
blocks = {}
start = 0
for name, size in zip(names, sizes, strict=True):
    blocks[name] = dense[start : start + size, start : start + size]
    start += size


def errors(found: list[Tensor]) -> list[float]:
    """Return the error of each block in the Frobenius norm, relative to that of the block."""
    pairs = zip(found, blocks.values(), strict=True)
    return [((mine - block).norm() / block.norm()).item() for mine, block in pairs]


operators = {}
print(f"\n{'relative error':22s}" + "".join(f"{name:>12s}" for name in names))
for approximation in (None, "expand", "reduce"):
    kronecker = KroneckerGGN(model, loss_function, data, approximation=approximation)
    corrected = EKFACOperator(model, loss_function, data, approximation=approximation)
    operators[approximation] = kronecker, corrected
    of_kronecker = errors([kfacs_to_mat(factors) for factors in kronecker.factors])
    of_corrected = errors([block.dense() for block in corrected.blocks])
    for name, values in (("KFAC", of_kronecker), ("EKFAC", of_corrected)):
        label = f"{name}, {approximation or 'default'}"
        print(f"{label:22s}" + "".join(f"{value:12.3f}" for value in values))
    assert all(a <= b + 1e-9 for a, b in zip(of_corrected, of_kronecker, strict=True))
    torch.testing.assert_close(corrected.trace(), dense.trace())

# %%
# Damped steps
# ------------
# What matters to an optimiser is the solution of the damped linear system. Here is that for the
# gradient of the test loss, compared with the one of the block-diagonal GGN by the cosine of the
# angle between them.

whole = torch.block_diag(*blocks.values())
test_loss = loss_function(model(X[test]), y[test])
gradient = torch.cat([g.flatten() for g in torch.autograd.grad(test_loss, model.parameters())])
dampings = torch.logspace(-6, 0, 7)
cosines: dict[str, list[float]] = {}
for damping in dampings.tolist():
    truth = torch.linalg.solve(whole + damping * torch.eye(len(whole)), gradient)
    for approximation in ("expand", "reduce"):
        for name, operator in zip(("KFAC", "EKFAC"), operators[approximation], strict=True):
            step = operator.inverse(damping) @ gradient
            cosine = torch.cosine_similarity(step, truth, dim=0).item()
            cosines.setdefault(f"{name}, {approximation}", []).append(cosine)
for approximation in ("expand", "reduce"):
    means = {k: sum(cosines[f"{k}, {approximation}"]) / len(dampings) for k in ("KFAC", "EKFAC")}
    print(f"mean cosine, {approximation}: KFAC {means['KFAC']:.3f}, EKFAC {means['EKFAC']:.3f}")
assert all(a > b for a, b in zip(cosines["EKFAC, reduce"], cosines["KFAC, reduce"], strict=True))

# %%
# The picture
# -----------
# On the left, the eigenvalues of the second convolution's weight: if the GGN were a Kronecker
# product, they would lie on the line. On the right, the angle to the exact step.

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
number = names.index("2.weight")
for approximation, color in (("expand", "C2"), ("reduce", "C4")):
    kronecker, corrected = operators[approximation]
    block, factors = corrected.blocks[number], kronecker.factors[number]
    along = [(Q.T @ F @ Q).diagonal() for Q, F in zip(block.bases, factors, strict=True)]
    products = torch.outer(*along).flatten()
    moments = block.eigenvalues.flatten()
    left.loglog(products, moments, ".", markersize=4, color=color, label=approximation)
limits = [1e-6, 1]
left.plot(limits, limits, color="black", linewidth=1)
left.set(xlim=limits, ylim=limits, xlabel="product of eigenvalues (KFAC)")
left.set(ylabel="second moment (EKFAC)", title="eigenvalues of one weight")
left.legend()
for (name, values), style in zip(cosines.items(), ("C1--", "C0--", "C1-", "C0-"), strict=True):
    right.semilogx(dampings, values, style, label=name)
right.set(xlabel="damping", ylabel="cosine with the exact step", title="damped steps")
right.legend()
plt.show()
