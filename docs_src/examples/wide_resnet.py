"""Noise and curvature of a Wide ResNet
====================================

Residual networks add the input of a block to its output, so that their graph branches and merges.
This script

1. builds a Wide ResNet 16-4 twice, by hand with ``Parallel``, which feeds several branches and adds
   them up, and as an ordinary module that ``extend(model, use_converter=True)`` rewrites,
2. shows that both give the same individual gradients, variances, sampled curvature and Kronecker
   factors, and that their exact curvature is that of plain autograd,
3. compares signal and noise of each layer's gradient before and after a short training.

Batch normalization uses its running statistics here (``eval()``): with those of the batch there is
no gradient of a single sample.

A sample is a piece of one of the two photographs that come with scikit-learn, and the label says of
which one. The picture is shown, or written to the folder that ``--out`` names.

The network is that of Zagoruyko and Komodakis, Wide Residual Networks, BMVC 2016, section 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from backpack import backpack, extend
from backpack.custom_module.branching import Parallel
from backpack.extensions import KFAC, BatchGrad, DiagGGNExact, DiagGGNMC, Variance
from backpack.utils.examples import autograd_diag_ggn_exact

SEED = 0
WIDTHS = (16, 64, 128, 256)  # of the first convolution and of the three groups of blocks
NUM_CLASSES = 2
BATCH_SIZE = 32
PROGRESS = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


# %%
# Data
# ----


def load_photographs() -> list[Tensor]:
    """Load the two photographs. ``[3, 427, 640]`` with values in [-1, 1]"""
    images = load_sample_images().images
    return [torch.tensor(image).permute(2, 0, 1) / 127.5 - 1 for image in images]


def draw(
    photographs: Sequence[Tensor], batch_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Cut pieces ``[N, 3, 32, 32]`` from the photographs in turn; labels ``[N]`` tell which."""
    labels = torch.arange(batch_size) % len(photographs)
    pieces = []
    for label in labels.tolist():
        photograph = photographs[label]
        row, column = (
            int(torch.randint(size - 31, (1,), generator=generator))
            for size in photograph.shape[1:]
        )
        pieces.append(photograph[:, row : row + 32, column : column + 32])
    return torch.stack(pieces), labels


# %%
# The network, by hand
# --------------------
#
# A block normalizes and activates before it convolves. Its input is added to its output; where the
# shapes of these differ, a convolution makes them equal, and takes the activated input.
#
# ``momentum=None`` lets the running statistics be averages over all batches seen.


def conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Make a convolution without bias that keeps the size of images, if the stride is one."""
    return nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)


def norm(channels: int) -> nn.BatchNorm2d:
    """Make a batch normalization."""
    return nn.BatchNorm2d(channels, momentum=None)


def block_by_hand(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Build a residual block from modules only."""
    before = [norm(in_channels), nn.ReLU()]
    residual = [
        conv(in_channels, out_channels, 3, stride),
        norm(out_channels),
        nn.ReLU(),
        conv(out_channels, out_channels, 3),
    ]
    if in_channels == out_channels:
        return Parallel(nn.Sequential(*before, *residual), nn.Identity())
    shortcut = conv(in_channels, out_channels, 1, stride)
    return nn.Sequential(*before, Parallel(nn.Sequential(*residual), shortcut))


def blocks(widths: Sequence[int]) -> list[tuple[int, int, int]]:
    """List channels of input and output, and the stride, of all blocks: two in each group."""
    shapes = []
    for group, (in_channels, out_channels) in enumerate(pairwise(widths)):
        shapes.append((in_channels, out_channels, 1 if group == 0 else 2))
        shapes.append((out_channels, out_channels, 1))
    return shapes


def make_by_hand(widths: Sequence[int] = WIDTHS) -> nn.Sequential:
    """Build the network from modules only: images ``[N, 3, 32, 32]`` to scores ``[N, C]``."""
    return nn.Sequential(
        conv(3, widths[0], 3),
        *(block_by_hand(*block) for block in blocks(widths)),
        norm(widths[-1]),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], NUM_CLASSES),
    )


# %%
# The network, as people write it
# -------------------------------


class Block(nn.Module):
    """The same block as an ordinary module."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        """Create the layers."""
        super().__init__()
        self.norm1 = norm(in_channels)
        self.conv1 = conv(in_channels, out_channels, 3, stride)
        self.norm2 = norm(out_channels)
        self.conv2 = conv(out_channels, out_channels, 3)
        self.shortcut = None
        if in_channels != out_channels:
            self.shortcut = conv(in_channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add the residual to the input."""
        activated = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        residual = self.conv2(F.relu(self.norm2(self.conv1(activated))))
        return shortcut + residual


class WideResNet(nn.Module):
    """The same network as an ordinary module."""

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        """Create the layers."""
        super().__init__()
        self.conv = conv(3, widths[0], 3)
        self.blocks = nn.Sequential(*(Block(*block) for block in blocks(widths)))
        self.norm = norm(widths[-1])
        self.dense = nn.Linear(widths[-1], NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 3, 32, 32]`` to scores ``[N, C]``."""
        x = F.relu(self.norm(self.blocks(self.conv(x))))
        return self.dense(F.adaptive_avg_pool2d(x, 1).flatten(1))


def make_extended(plain: nn.Module, widths: Sequence[int]) -> dict[str, Any]:
    """Build both networks with the weights, statistics and dtype of one that is not extended.

    All three have their layers in the same order. (``Any``: one of them also has a graph, and the
    extensions add attributes to parameters.)
    """
    models = {
        "by hand": extend(make_by_hand(widths)),
        "converted": extend(WideResNet(widths), use_converter=True),
    }
    values = plain.state_dict().values()
    for model in models.values():
        model.to(next(plain.parameters()).dtype).eval()
        model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))
    return models


@torch.no_grad()
def estimate_statistics(model: nn.Module, x: Tensor) -> None:
    """Replace the running statistics by those of a batch, and switch to using them."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    model.train()
    model(x)
    model.eval()


# %%
# In the converted graph a module takes the place of each function. One that is used at several
# places, like the input of a block, has several arrows leaving it.


def graph_table(model: Any) -> Table:
    """Tabulate the graph of a converted module: its nodes, and where their inputs come from."""
    table = new_table("The converted network")
    for name in ("node", "module", "inputs"):
        table.add_column(name, no_wrap=True)
    for node in model.graph.nodes:
        is_call = node.op == "call_module"
        module = type(model.get_submodule(node.target)).__name__ if is_call else node.op
        table.add_row(node.target, module, ", ".join(n.target for n in node.all_input_nodes))
    return table


def new_table(title: str) -> Table:
    """Return an empty table."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)


# %%
# The same quantities
# -------------------
#
# One backward pass computes all four. The seed fixes the labels that the Monte-Carlo extensions
# draw.

EXTENSIONS = {
    "grad_batch": BatchGrad(),
    "variance": Variance(),
    "diag_ggn_mc": DiagGGNMC(mc_samples=1),
    "kfac": KFAC(mc_samples=1),
}


def quantities(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, list[list[Tensor]]]:
    """Compute all quantities of a model: for each of them and each parameter, a list of tensors."""
    torch.manual_seed(SEED)
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    with backpack(*EXTENSIONS.values()):
        loss.backward()

    results: dict[str, list[list[Tensor]]] = {}
    for name in EXTENSIONS:
        results[name] = []
        for p in model.parameters():
            result = getattr(p, name)
            results[name].append(result if isinstance(result, list) else [result])
            delattr(p, name)  # individual gradients are large
    return results


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error, relative to the largest entry."""
    scale = expected.abs().max().item()
    return (actual - expected).abs().max().item() / scale if scale else actual.abs().max().item()


def compare_quantities(
    by_hand: Mapping[str, list[list[Tensor]]], converted: Mapping[str, list[list[Tensor]]]
) -> dict[str, float]:
    """Return the largest relative error of each quantity over all parameters."""
    errors = {}
    for name, expected in by_hand.items():
        pairs = [
            pair
            for actual_p, expected_p in zip(converted[name], expected, strict=True)
            for pair in zip(actual_p, expected_p, strict=True)
        ]
        errors[name] = max(relative_error(*pair) for pair in pairs)
    return errors


def compare_exact(model: Any, plain: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the relative error of the GGN's diagonal, next to plain autograd.

    Plain autograd goes backward twice for each number that the network returns. These are few here,
    so that all entries are compared.
    """
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    with backpack(DiagGGNExact()):
        loss.backward()
    diagonal = torch.cat([p.diag_ggn_exact.flatten() for p in model.parameters()])
    truth = autograd_diag_ggn_exact(x, y, plain, nn.CrossEntropyLoss())
    return relative_error(diagonal, truth)


def shape_str(tensor: Tensor) -> str:
    """Write a shape as ``64×16×3×3``."""
    return "×".join(str(size) for size in tensor.shape)


def quantities_table(
    results: Mapping[str, list[list[Tensor]]], errors: Mapping[str, float], index: int, name: str
) -> Table:
    """Tabulate shapes for one parameter, and the difference between by hand and converted."""
    table = new_table("Quantities of both networks")
    table.add_column("extension", no_wrap=True)
    table.add_column(f"shape for {name}", no_wrap=True)
    table.add_column("largest relative difference", justify="right")
    for savefield, extension in EXTENSIONS.items():
        shapes = " ⊗ ".join(shape_str(tensor) for tensor in results[savefield][index])
        error = errors[savefield]
        table.add_row(type(extension).__name__, shapes, f"{error:.0e}" if error else "0")
    return table


# %%
# Signal and noise
# ----------------
#
# How large is the gradient of the batch, compared with how its samples disagree? For ``g_n``, the
# gradient of the loss of sample n, it is the squared norm of the mean over the sum of the
# variances. Gradients that have nothing in common would give about 1 / (N - 1).
#
# The loss is the mean of those of the samples, so that the individual gradients of the library are
# ``g_n / N``, and their variance is that of ``g_n`` over N².


class Signal(NamedTuple):
    """Signal-to-noise ratio of the gradient of one layer's weight."""

    layer: str
    ratio: float


def signal_to_noise(model: nn.Module, x: Tensor, y: Tensor) -> list[Signal]:
    """Measure the signal-to-noise ratio of all convolutions and the dense layer."""
    model.zero_grad()
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    with backpack(Variance()):
        loss.backward()
    signals = []
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            p: Any = layer.weight  # the extension adds an attribute
            noise = len(y) ** 2 * p.variance.sum()
            signals.append(Signal(name, (p.grad.square().sum() / noise).item()))
    return signals


def train(
    model: nn.Module, photographs: Sequence[Tensor], steps: int, batch_size: int, dtype: torch.dtype
) -> list[float]:
    """Train with SGD, without any extension, and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(SEED)
    model.train()
    losses = []
    progress = tqdm(range(steps), disable=None, desc="Training", bar_format=PROGRESS)
    for _ in progress:
        x, y = draw(photographs, batch_size, generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(dtype)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        progress.set_postfix_str(f"loss {losses[-1]:.2f}")
    model.eval()
    return losses


# %%
# Picture
# -------


def set_style() -> None:
    """Make plain figures: no frame, light grid, readable labels."""
    plt.rcParams.update(
        {
            "figure.dpi": 150,
            "savefig.dpi": 150,
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": "0.4",
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "0.9",
            "legend.frameon": False,
            "lines.linewidth": 2,
        }
    )


def plot_signals(before: Sequence[Signal], after: Sequence[Signal], batch_size: int) -> Figure:
    """Draw the ratio of each layer, the first one on top, before and after training."""
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    layers = [signal.layer for signal in before]
    for signals, color, label in (
        (before, "#E69F00", "initial weights"),
        (after, "#0072B2", "after training"),
    ):
        ratios = [signal.ratio for signal in signals]
        axes.plot(ratios, layers, "o", color=color, label=label, markersize=7)
    axes.axvline(
        1 / (batch_size - 1),
        color="0.5",
        linestyle="dotted",
        linewidth=1.5,
        label="noise alone",
    )
    axes.invert_yaxis()
    axes.set(xscale="log", title=f"Signal-to-noise ratio of the gradient of {batch_size} samples")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=3)
    return figure


# %%
# All of it
# ---------


class Result(NamedTuple):
    """What ``main`` found."""

    model: Any
    errors: dict[str, float]
    exact_errors: dict[str, float]
    losses: list[float]
    before: list[Signal]
    after: list[Signal]


def main(
    out: Path | None = None,
    widths: Sequence[int] = WIDTHS,
    steps: int = 15,
    batch_size: int = BATCH_SIZE,
    dtype: torch.dtype = torch.float32,
) -> Result:
    """Convert, compare, train, and show the picture or write it to ``out``.

    The exact curvature is always compared in double precision, everything else is in ``dtype``.
    """
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        matplotlib.use("Agg")
    console = Console(highlight=False)
    set_style()
    photographs = load_photographs()
    x, y = draw(photographs, batch_size, torch.Generator().manual_seed(SEED))
    x = x.to(dtype)

    torch.manual_seed(SEED)
    plain = WideResNet(widths).to(dtype)
    estimate_statistics(plain, x)
    num_parameters = sum(p.numel() for p in plain.parameters())

    models = make_extended(plain, widths)
    model = models["converted"]
    console.print(graph_table(model))
    console.print(f"\n{num_parameters:,} parameters\n")

    few_x, few_y = x[:8], y[:8]
    results = {name: quantities(m, few_x, few_y) for name, m in models.items()}
    errors = compare_quantities(results["by hand"], results["converted"])
    names = [name for name, _ in model.named_parameters()]
    index = names.index("blocks.0.conv1.weight")
    console.print(quantities_table(results["converted"], errors, index, names[index]))
    del results

    plain.double()
    exact_errors = {
        name: compare_exact(m, plain, x[:2].double(), y[:2])
        for name, m in make_extended(plain, widths).items()
    }
    console.print("\nDiagonal of the GGN, largest relative error next to plain autograd:")
    for name, error in exact_errors.items():
        console.print(f"  {name}: {error:.0e}")
    console.print()

    before = signal_to_noise(model, x, y)
    losses = train(model, photographs, steps, batch_size // 2, dtype)
    estimate_statistics(model, x)
    after = signal_to_noise(model, x, y)
    console.print(f"Loss {losses[0]:.2f} at the first, {losses[-1]:.2f} at the last step")
    figure = plot_signals(before, after, batch_size)
    if out is None:
        plt.show()
    else:
        figure.savefig(out / "wide_resnet.png")
        plt.close(figure)
        console.print(f"Picture: {out / 'wide_resnet.png'}")
    return Result(model, errors, exact_errors, losses, before, after)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Look at the gradients of a Wide ResNet.")
    parser.add_argument("--out", type=Path, help="folder for the picture")
    main(parser.parse_args().out)
