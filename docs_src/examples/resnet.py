"""A ResNet, with and without the converter
========================================

Second-order quantities travel through modules, and the ``forward`` of a residual network adds a
shortcut with ``+``. Two ways to the same numbers: build the network from modules, or let the
converter rewrite it.
"""

# %%
# The network as people write it
# ------------------------------

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import relu

from backpack import backpack, extend
from backpack.custom_module.branching import Parallel
from backpack.extensions import KFAC, BatchGrad, DiagGGNExact, DiagHessian
from backpack.utils.examples import autograd_diag_ggn_exact


class Block(nn.Module):
    """Two convolutions and a shortcut, which is a convolution if the shape changes."""

    def __init__(self, in_channels, out_channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride)

    def forward(self, x):
        return relu(self.conv2(relu(self.conv1(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """Three blocks, the mean over positions, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(1, 4), Block(4, 8, stride=2), Block(8, 8))
        self.dense = nn.Linear(8, 10)

    def forward(self, x):
        return self.dense(self.blocks(x).mean((2, 3)))


torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
X = torch.tensor(images[:16], dtype=torch.float64).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(labels[:16])
plain = ResNet().double()

# %%
# With the converter
# ------------------
#
# ``use_converter=True`` replaces ``+``, ``relu`` and ``mean`` by modules. Parameters, their names
# and the ``state_dict`` stay.

converted = ResNet().double()
converted.load_state_dict(plain.state_dict())
converted = extend(converted, use_converter=True)
for name, module in converted.named_modules():
    if not list(module.children()):
        print(f"{name:>18}: {type(module).__name__}")
assert converted.state_dict().keys() == plain.state_dict().keys()

# %%
# From modules
# ------------
#
# ``Parallel`` feeds its input to all branches and adds up what they return.


def block(in_channels, out_channels, stride=1):
    """Build the same block from modules."""
    body = nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, stride, padding=1),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1),
    )
    same = stride == 1 and in_channels == out_channels
    shortcut = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1, stride)
    return nn.Sequential(Parallel(body, shortcut), nn.ReLU())


by_hand = nn.Sequential(
    block(1, 4),
    block(4, 8, stride=2),
    block(8, 8),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(8, 10),
).double()
with torch.no_grad():  # the parameters come in the same order
    for ours, theirs in zip(by_hand.parameters(), plain.parameters(), strict=True):
        ours.copy_(theirs)
by_hand = extend(by_hand)

# %%
# Equal quantities
# ----------------

EXTENSIONS = (BatchGrad(), DiagGGNExact(), DiagHessian(), KFAC())


def quantities(model):
    """Compute all quantities of all parameters; the seed fixes the labels that KFAC draws."""
    torch.manual_seed(1)
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(*EXTENSIONS):
        loss.backward()
    return [[getattr(p, e.savefield) for p in model.parameters()] for e in EXTENSIONS]


for extension, of_converted, of_by_hand in zip(
    EXTENSIONS, quantities(converted), quantities(by_hand), strict=True
):
    torch.testing.assert_close(of_converted, of_by_hand)
    print(f"{type(extension).__name__}: the same")

# %%
# Plain autograd, which needs two passes for each output, confirms the GGN's diagonal.

diagonal = torch.cat([p.diag_ggn_exact.flatten() for p in converted.parameters()])
assert torch.allclose(diagonal, autograd_diag_ggn_exact(X, y, plain, nn.CrossEntropyLoss()))

# %%
# With ``relu``, the network is a piecewise linear function of the parameters of any one layer.
# Its Hessian therefore has the diagonal of the GGN. Its entries are largest for biases, and for
# the last layer.

for p in converted.parameters():
    assert torch.allclose(p.diag_h, p.diag_ggn_exact)

figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
names = [name for name, _ in converted.named_parameters()]
for model, label, marker, color in (
    (converted, "with the converter", "o", "#0072B2"),
    (by_hand, "from modules", "x", "#E69F00"),
):
    means = [p.diag_ggn_exact.mean().item() for p in model.parameters()]
    axes.plot(means, range(len(names)), marker, color=color, label=label, markersize=8)
axes.set_yticks(range(len(names)), names)
axes.invert_yaxis()
axes.set(xlabel="mean of the GGN's diagonal", xscale="log")
axes.grid(color="0.9")
axes.legend(frameon=False)
plt.show()
