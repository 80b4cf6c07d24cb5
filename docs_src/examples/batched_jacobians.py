"""Batched Jacobians
=================

``BatchGrad`` does not ask for a loss. Called on one output after the other, it gives the Jacobian
of the outputs of each sample, with respect to the parameters or, through a layer that shifts it,
with respect to the input.
"""

# %%
# A network with three outputs, and eight samples.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_iris
from torch import nn

from backpack import backpack, extend
from backpack.extensions import BatchGrad

torch.manual_seed(0)
inputs, labels = load_iris(return_X_y=True)
inputs = torch.tensor(inputs, dtype=torch.float64)
inputs = (inputs - inputs.mean(0)) / inputs.std(0)
X = inputs[::19]
N, C = len(X), 3

model = extend(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, C)).double())

# %%
# Jacobian with respect to the parameters
# ---------------------------------------
#
# The sum over the samples of output c has the individual gradients that are row c of each sample's
# Jacobian. ``retain_graph`` in both places keeps what the next pass needs.

outputs = model(X)
rows = []
for c in range(C):
    with backpack(BatchGrad(), retain_graph=True):
        outputs[:, c].sum().backward(retain_graph=True)
    rows.append([p.grad_batch for p in model.parameters()])
jacobians = [torch.stack(of_outputs, dim=1) for of_outputs in zip(*rows, strict=True)]

for (name, p), jacobian in zip(model.named_parameters(), jacobians, strict=True):
    print(f"{name}: {list(jacobian.shape)}")
    assert jacobian.shape == (N, C, *p.shape)

# %%
# ``torch.func`` agrees.

parameters = {name: p.detach() for name, p in model.named_parameters()}


def output_of_sample(parameters, x):
    """Compute the outputs ``[C]`` of one sample as a function of the parameters."""
    return torch.func.functional_call(model, parameters, (x[None],))[0]


expected = torch.vmap(torch.func.jacrev(output_of_sample), in_dims=(None, 0))(parameters, X)
for truth, jacobian in zip(expected.values(), jacobians, strict=True):
    assert torch.allclose(truth, jacobian)

# %%
# Jacobian with respect to the input
# ----------------------------------
#
# A shift of the input that is zero changes nothing, but it is a parameter, and the derivative
# with respect to it is that with respect to the input. A linear layer with the identity as its
# weight adds such a shift.

shift = nn.Linear(4, 4).double()
nn.init.eye_(shift.weight).requires_grad_(False)
nn.init.zeros_(shift.bias)
shifted = extend(nn.Sequential(shift, *model))


def input_jacobian(X):
    """Differentiate the outputs of each sample: ``[N, C, 4]``."""
    outputs = shifted(X)
    rows = []
    for c in range(C):
        with backpack(BatchGrad(), retain_graph=True):
            outputs[:, c].sum().backward(retain_graph=True)
        rows.append(shift.bias.grad_batch)
    return torch.stack(rows, dim=1)


expected = torch.vmap(torch.func.jacrev(lambda x: output_of_sample(parameters, x)))(X)
assert torch.allclose(expected, input_jacobian(X))

# %%
# After a short training, the Jacobian tells which features a class depends on: here the absolute
# value, averaged over all flowers.

optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
targets = torch.tensor(labels)
for _ in range(200):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()

sensitivity = input_jacobian(inputs).abs().mean(0)
dataset = load_iris()
figure, axes = plt.subplots(figsize=(5.6, 3.8), layout="constrained")
axes.imshow(sensitivity, cmap="Blues", vmin=0, vmax=1.2 * sensitivity.max())
axes.set_xticks(range(4), [name.removesuffix(" (cm)") for name in dataset.feature_names])
axes.set_yticks(range(C), dataset.target_names)
for c in range(C):
    for feature in range(4):
        value = sensitivity[c, feature].item()
        color = "white" if value > 0.6 * sensitivity.max() else "black"
        axes.text(feature, c, f"{value:.1f}", ha="center", va="center", color=color)
axes.set_title("Mean |∂ score / ∂ feature|", loc="left")
axes.set_xlabel("features in standard deviations")
plt.show()
