"""Signal and noise of the gradient during training
=================================================

While the loss falls fast the samples of a batch agree on where to go; later their gradients
hardly have anything in common. ``BatchL2Grad`` is enough to watch that, and costs little. On a
screen the plot updates while the network trains.
"""

# %%
# Digits, a small network and plain gradient descent with momentum.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack import backpack, extend
from backpack.extensions import BatchGrad, BatchL2Grad

torch.manual_seed(0)
BATCH_SIZE, STEPS = 64, 300
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)

model = extend(
    nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
)
loss_function = extend(nn.CrossEntropyLoss())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
layers = {"convolution": model[0], "first dense layer": model[4], "last layer": model[6]}

# %%
# The ratio
# ---------
#
# With individual gradients :math:`g_n` and their mean :math:`\bar g` it is
# :math:`\lVert \bar g \rVert^2 / (\frac 1 N \sum_n \lVert g_n - \bar g \rVert^2)`. Multiplied out,
# that needs the norm of the gradient :math:`\sum_n g_n` and the norms of the individual ones alone,
# and any constant factor cancels.
# :func:`backpack.monitor.gradient_snr` is the same.


def signal_to_noise(layer):
    """Compare the squared norm of the mean with the mean squared distance from it."""
    signal = sum(p.grad.square().sum() for p in layer.parameters())
    squares = sum(p.batch_l2.sum() for p in layer.parameters())
    return (signal / (BATCH_SIZE * squares - signal)).item()


def step(X, y, *extensions):
    """Compute the gradient and quantities, and return the loss."""
    optimizer.zero_grad()
    loss = loss_function(model(X), y)
    with backpack(*extensions):
        loss.backward()
    return loss.item()


# %%
# For one batch, all individual gradients confirm the formula.

step(images[:BATCH_SIZE], labels[:BATCH_SIZE], BatchL2Grad(), BatchGrad())
for layer in layers.values():
    g = torch.cat([p.grad_batch.flatten(1) for p in layer.parameters()], dim=1)
    direct = g.mean(0).square().sum() / (g - g.mean(0)).square().sum(1).mean()
    assert abs(signal_to_noise(layer) / direct.item() - 1) < 1e-3
    del g
for p in model.parameters():
    del p.grad_batch

# %%
# Training, and the live plot
# ---------------------------
#
# Curves are medians over the last 20 steps. If there is a screen, ``plt.pause`` draws and goes
# on; in this documentation, only the final picture is drawn.

COLORS = dict(zip(layers, ("#0072B2", "#E69F00", "#009E73"), strict=True))
SMOOTHING = 20
on_screen = plt.get_backend().lower() != "agg"

figure, (top, bottom) = plt.subplots(
    nrows=2, figsize=(7, 5.5), sharex=True, layout="constrained", height_ratios=(1, 2)
)
(loss_line,) = top.plot([], [], color="0.3")
lines = {name: bottom.plot([], [], color=COLORS[name], label=name)[0] for name in layers}
bottom.axhline(1 / (BATCH_SIZE - 1), color="0.5", linestyle="dotted", label="noise alone")
top.set(ylabel="loss", yscale="log")
bottom.set(xlabel="step", ylabel="signal-to-noise ratio", yscale="log")
for panel in (top, bottom):
    panel.grid(color="0.9")
bottom.legend(frameon=False, ncols=2)

losses, ratios = [], {name: [] for name in layers}


def smooth(values):
    """Return the median of the last values, at every step."""
    values = torch.tensor(values)
    return [values[max(0, i - SMOOTHING + 1) : i + 1].median() for i in range(len(values))]


def redraw():
    """Update the curves."""
    loss_line.set_data(range(len(losses)), smooth(losses))
    for name, line in lines.items():
        line.set_data(range(len(losses)), smooth(ratios[name]))
    for panel in (top, bottom):
        panel.relim()
        panel.autoscale_view()


for i in range(STEPS):
    batch = torch.randint(len(labels), (BATCH_SIZE,))
    losses.append(step(images[batch], labels[batch], BatchL2Grad()))
    for name, layer in layers.items():
        ratios[name].append(signal_to_noise(layer))
    optimizer.step()
    if on_screen and i % 10 == 0:
        redraw()
        plt.pause(0.001)
redraw()
plt.show()

# %%
# The ratio is largest when the loss leaves its plateau, and ends near that of gradients with
# nothing in common: then a larger batch or a smaller step is due.

for values in map(smooth, ratios.values()):
    assert max(values) > 2 * values[-1]
    assert values[-1] < 2 / (BATCH_SIZE - 1)
