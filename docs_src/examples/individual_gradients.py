"""Individual gradients
====================

The gradient of a batch is a sum over its samples. ``BatchGrad`` gives its terms, which otherwise
need a backward pass for each sample: the same numbers in a fraction of the time.
"""

# %%
# A convolutional network for scikit-learn's digits.

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.extensions import BatchGrad

torch.manual_seed(0)
torch.set_num_threads(1)  # faster for tensors this small
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 10),
)
parameters = list(model.parameters())

# %%
# With plain autograd, a loop over the samples. The mean over the batch divides each one's loss by
# N.


def by_loop(X, y):
    """Differentiate the loss of one sample after the other: a list of ``[N, *p]``."""
    gradients = []
    for x_n, y_n in zip(X, y, strict=True):
        loss_n = nn.functional.cross_entropy(model(x_n[None]), y_n[None]) / len(y)
        gradients.append(torch.autograd.grad(loss_n, parameters))
    return [torch.stack(of_samples) for of_samples in zip(*gradients, strict=True)]


# %%
# With the library, one backward pass.

extended, loss_function = extend(model), extend(nn.CrossEntropyLoss())


def by_extension(X, y):
    """Compute the same in one pass."""
    model.zero_grad()
    loss = loss_function(extended(X), y)
    with backpack(BatchGrad()):
        loss.backward()
    return [p.grad_batch for p in parameters]


# %%
# They agree, and sum to the gradient.

X, y = images[:64], labels[:64]
for p, looped, extension in zip(parameters, by_loop(X, y), by_extension(X, y), strict=True):
    assert looped.shape == extension.shape == (64, *p.shape)
    assert torch.allclose(looped, extension, atol=1e-6)
    assert torch.allclose(extension.sum(0), p.grad, atol=1e-6)

# %%
# The loop's time grows with the number of samples from the start, as each has its own overhead. The
# fastest of three runs counts.


def seconds(function, *args):
    """Time the fastest of three runs."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function(*args)
        times.append(time.perf_counter() - start)
    return min(times)


def only_gradient(X, y):
    """Compute what everybody computes."""
    torch.autograd.grad(nn.functional.cross_entropy(model(X), y), parameters)


sizes = [1, 4, 16, 64, 256]
methods = {
    "loop over the samples": (by_loop, "#D55E00", "s"),
    "BatchGrad": (by_extension, "#0072B2", "o"),
    "gradient of the batch alone": (only_gradient, "0.5", "^"),
}
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for name, (method, color, marker) in methods.items():
    times = [1e3 * seconds(method, images[:size], labels[:size]) for size in sizes]
    axes.loglog(sizes, times, color=color, marker=marker, label=name)
axes.set_xticks(sizes, sizes)
axes.minorticks_off()
axes.yaxis.set_major_formatter("{x:g}")
axes.set(xlabel="samples in the batch", ylabel="time in ms")
axes.set_title("Gradients of a small convolutional network, one thread", loc="left")
axes.grid(color="0.9")
axes.legend(frameon=False)
plt.show()
