"""Individual gradients and curvature of a transformer
====================================================

A transformer reads pieces of text and says which document they are from. It is an ordinary module
of PyTorch; the converter takes care of the functions in its ``forward``.
"""

# %%
# Text
# ----
#
# The documents are scikit-learn's descriptions of three of its data sets. A sample is a piece of 40
# characters, as numbers.

from importlib import resources

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack import backpack, extend
from backpack.extensions import BatchGrad, BatchL2Grad, DiagGGNExact
from backpack.utils.examples import autograd_diag_ggn_exact

torch.manual_seed(0)
LENGTH, WIDTH = 40, 32
TITLES = ("iris", "diabetes", "wine_data")

folder = resources.files("sklearn.datasets.descr")
texts = [(folder / f"{title}.rst").read_text(encoding="utf-8").lower() for title in TITLES]
alphabet = sorted(set("".join(texts)))
documents = [torch.tensor([alphabet.index(c) for c in text]) for text in texts]


def draw(number):
    """Draw pieces ``[N, T]`` and the documents that they are from ``[N]``."""
    labels = torch.randint(len(documents), (number,))
    pieces = []
    for label in labels.tolist():
        start = int(torch.randint(len(documents[label]) - LENGTH, ()))
        pieces.append(documents[label][start : start + LENGTH])
    return torch.stack(pieces), labels


# %%
# Model
# -----
#
# Two layers of attention between characters and positions below, and a mean and a dense layer
# above.


class Classifier(nn.Module):
    """Characters ``[N, T]`` to scores ``[N, C]``."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(alphabet), WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.dense = nn.Linear(WIDTH, len(documents))

    def forward(self, x):
        x = self.embedding(x) + self.position
        return self.dense(self.encoder(x).mean(dim=1))


plain = Classifier()
model = Classifier()
model = extend(model, use_converter=True)
loss_function = extend(nn.CrossEntropyLoss())

# %%
# Training needs nothing of this library.

optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(201):
    X, y = draw(32)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(X), y)
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3}: loss {loss.item():.2f}")

# %%
# Quantities
# ----------
#
# Individual gradients, their norms and the diagonal of the generalised Gauss-Newton matrix (GGN),
# of all parameters, in one backward pass.

model, plain = model.double(), plain.double()
plain.load_state_dict(model.state_dict())
X, y = draw(60)
optimizer.zero_grad()
loss = loss_function(model(X), y)
with backpack(BatchGrad(), BatchL2Grad(), DiagGGNExact()):
    loss.backward()
for name, p in model.named_parameters():
    print(f"{name:<43} {list(p.grad_batch.shape)}")

# %%
# Those of one sample by plain autograd are the same, and so are some entries of the diagonal.

loss_0 = nn.functional.cross_entropy(plain(X[:1]), y[:1]) / len(y)
gradient_0 = torch.autograd.grad(loss_0, list(plain.parameters()))
for p, truth in zip(model.parameters(), gradient_0, strict=True):
    assert torch.allclose(p.grad_batch[0], truth)

diagonal = torch.cat([p.diag_ggn_exact.flatten() for p in model.parameters()])
largest = diagonal.topk(10).indices.tolist()
with sdpa_kernel(SDPBackend.MATH):  # autograd cannot differentiate the fused kernels twice
    truth = autograd_diag_ggn_exact(X, y, plain, nn.CrossEntropyLoss(), idx=largest)
assert torch.allclose(diagonal[largest], truth)

# %%
# Which pieces are hard, and where is the curvature?
# --------------------------------------------------

losses = nn.functional.cross_entropy(model(X), y, reduction="none").detach()
norms = len(y) * sum(p.batch_l2 for p in model.parameters()).sqrt()
hardest = int(norms.argmax())
piece = "".join(alphabet[i] for i in X[hardest])
print(f"largest gradient: {piece!r}, from {TITLES[y[hardest]]}, loss {losses[hardest]:.2f}")
assert losses[hardest] > losses.median()

groups = {
    "embedding": "embedding",
    "positions": "position",
    **{
        f"layer {i}, {part}": f"encoder.layers.{i}.{prefix}"
        for i in range(2)
        for part, prefix in (("attention", "self_attn"), ("dense", "linear"), ("norms", "norm"))
    },
    "output": "dense",
}
traces = {
    group: sum(
        p.diag_ggn_exact.sum().item()
        for name, p in model.named_parameters()
        if name.startswith(prefix)
    )
    for group, prefix in groups.items()
}
assert abs(sum(traces.values()) / diagonal.sum().item() - 1) < 1e-9  # no parameter is left out

figure, (left, right) = plt.subplots(ncols=2, figsize=(9.5, 3.8), layout="constrained")
for label, (title, color) in enumerate(zip(TITLES, ("#0072B2", "#E69F00", "#009E73"), strict=True)):
    left.scatter(losses[y == label], norms[y == label], s=18, color=color, label=title)
left.set(xscale="log", yscale="log", xlabel="loss of a piece", ylabel="norm of its gradient")
left.set_axisbelow(True)
left.grid(color="0.9")
left.legend(frameon=False)
right.barh(list(traces), list(traces.values()), color="#0072B2")
right.invert_yaxis()
right.set(xlabel="trace of the GGN")
plt.show()
