"""Save memory with an extension hook
===================================

Individual gradients take N times the memory of the parameters. Who needs less than that, such as
their inner products, can compress them in an extension hook, layer by layer during the backward
pass, and drop the rest.
"""

# %%
# A network with four large layers, and 64 digits as samples.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.extensions import BatchGrad

torch.manual_seed(0)
N, WIDTH, SIZE = 64, 512, 1024
images, labels = load_digits(return_X_y=True)
X = torch.tensor(images[:N], dtype=torch.float32) / 16
y = torch.tensor(labels[:N])

model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU())
for _ in range(4):
    model.extend([nn.Linear(WIDTH, WIDTH), nn.ReLU()])
model.append(nn.Linear(WIDTH, 10))
for p in model.parameters():
    if p.ndim == 2:
        nn.init.kaiming_normal_(p)
model, loss_function = extend(model), extend(nn.CrossEntropyLoss())

# %%
# Compress on the fly
# -------------------
#
# A sketch adds up the entries of a vector in few buckets, with random signs. Inner products of
# sketches are those of the vectors, in expectation (Charikar, Chen and Farach-Colton, Finding
# frequent items in data streams, 2002).

signs = {p: 2.0 * torch.randint(2, p.shape) - 1 for p in model.parameters()}


def sketch(p, gradients):
    """Compress individual gradients ``[N, *p]`` to ``[N, SIZE]``."""
    buckets = torch.zeros(len(gradients), SIZE)
    parts = gradients.flatten(1).split(SIZE, dim=1)
    for sign, part in zip(signs[p].flatten().split(SIZE), parts, strict=True):
        buckets[:, : len(sign)] += sign * part
    return buckets


# %%
# The hook is called with each module as soon as the quantities of its parameters are there. What it
# deletes does not wait for the end of the backward pass.


def compress(module):
    """Replace the individual gradients of a module's parameters by their sketches."""
    for p in module.parameters():
        p.sketch = sketch(p, p.grad_batch)
        del p.grad_batch


# %%
# How much is kept at the parameters? Another hook around the first one adds it up.


def run(hook):
    """Go forward and backward; return the megabytes kept before and after each call of the hook."""
    kept = [0.0]

    def count():
        fields = [
            vars(p).get(name) for p in model.parameters() for name in ("grad_batch", "sketch")
        ]
        kept.append(sum(value.nbytes for value in fields if value is not None) / 1e6)

    def watch(module):
        count()
        hook(module)
        count()

    loss = loss_function(model(X), y)
    with backpack(BatchGrad(), extension_hook=watch):
        loss.backward()
    return kept


compressed = run(compress)
sketches = {p: vars(p).pop("sketch") for p in model.parameters()}
plain = run(lambda module: None)
print(f"at most {max(plain):.0f} MB without the hook, {max(compressed):.0f} MB with it")
print(f"at the end {plain[-1]:.0f} MB without the hook, {compressed[-1]:.0f} MB with it")
assert max(compressed) < max(plain) / 3
assert compressed[-1] < plain[-1] / 50

# %%
# The sketches are those of the individual gradients, and cosines of angles between samples are
# about those of the gradients.

for p in model.parameters():
    torch.testing.assert_close(sketches[p], sketch(p, p.grad_batch))


def cosines(vectors):
    """Compute the cosine of the angle between any two samples."""
    unit = nn.functional.normalize(torch.cat(vectors, dim=1), dim=1)
    rows, columns = torch.triu_indices(N, N, offset=1)
    return (unit @ unit.T)[rows, columns]


true = cosines([p.grad_batch.flatten(1) for p in model.parameters()])
sketched = cosines(list(sketches.values()))
error = (true - sketched).abs().max().item()
print(f"largest error of a cosine: {error:.2f}")
assert error < 0.15

# %%

figure, (left, right) = plt.subplots(ncols=2, figsize=(9, 3.8), layout="constrained")
left.plot(plain, color="#D55E00", linewidth=2, label="individual gradients")
left.plot(compressed, color="#0072B2", linewidth=2, label="compressed by the hook")
left.set(xlabel="backward pass", ylabel="kept at the parameters in MB", xticks=[], ylim=0)
left.legend(frameon=False)
right.scatter(true, sketched, s=4, color="#0072B2")
right.axline((0, 0), slope=1, color="0.5", linestyle="dotted")
right.set(xlabel="cosine of two gradients", ylabel="cosine of their sketches", aspect="equal")
for axes in (left, right):
    axes.set_axisbelow(True)
    axes.grid(color="0.9")
plt.show()
