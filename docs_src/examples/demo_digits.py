"""Train a small CNN on handwritten digits and look at its quantities
===================================================================

This script does the three things that the library is made for:

1. It trains a network with two optimisers that use the curvature (the diagonal and Kronecker
   factors of the generalised Gauss-Newton matrix, GGN), next to SGD and Adam that were tuned alike.
2. It computes individual gradients' variance, GGN diagonals and Kronecker factors in one
   backward pass and prints them for each parameter.
3. It measures what each extension costs on top of the gradient.

``make demo`` runs it, with pictures in ``demo/``; without ``--out`` they are shown. ``--tune``
repeats the search for the settings of the optimisers.
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, extend
from backpack.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)
from backpack.optim import KFAC as KFACOptimizer
from backpack.optim import DiagGGN

SEED = 0
BATCH_SIZE = 64
EPOCHS = 6
SEEDS = 3
PROGRESS = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


# %%
# Data and model
# --------------


class Digits(NamedTuple):
    """Images ``[N, 1, 8, 8]`` with entries in [0, 1] and labels ``[N]`` of ten classes."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


def load_data() -> Digits:
    """Load scikit-learn's digits and keep a quarter of them for testing."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, dtype=torch.long)
    train, test = train_test_split(
        range(len(y)), test_size=0.25, stratify=labels, random_state=SEED
    )
    return Digits(x[train], y[train], x[test], y[test])


def make_model(seed: int = SEED) -> nn.Sequential:
    """Build the CNN; the initial weights depend on the seed alone."""
    torch.manual_seed(seed)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            relu1=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            dense=nn.Linear(32 * 4 * 4, 10),
        )
    )


def batches(data: Digits, epoch: int, seed: int = SEED) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the shuffled batches of an epoch, the same ones for every optimiser."""
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    order = torch.randperm(len(data.y_train), generator=generator)
    for idx in order.split(BATCH_SIZE):
        yield data.x_train[idx], data.y_train[idx]


# %%
# Training
# --------
#
# Two options of every optimiser were tuned, with eight pairs of values each: for the mean loss of
# two seeds after the last epoch, on a quarter of the training data that was kept from training.
# Here they train on all of the training data with other seeds, and the test data judge. The step
# size falls linearly to zero.

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Tuned(NamedTuple):
    """An optimiser, how it is drawn, and the values of its two options: the best ones first."""

    name: str
    color: str
    make: Callable[..., torch.optim.Optimizer]
    best: dict[str, Any]
    grid: dict[str, tuple[Any, ...]]


TUNED = [
    Tuned(
        "KFAC",
        "#CC79A7",
        KFACOptimizer,
        {"lr": 0.1, "damping": 0.01},
        {"lr": (0.05, 0.1, 0.2, 0.4), "damping": (0.01, 0.1)},
    ),
    Tuned(
        "Diagonal GGN",
        "#0072B2",
        DiagGGN,
        {"lr": 1.0, "damping": 0.1},
        {"lr": (0.1, 0.3, 1.0, 3.0), "damping": (0.01, 0.1)},
    ),
    Tuned(
        "SGD with momentum",
        "#D55E00",
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9},
        {"lr": (0.03, 0.1, 0.3, 1.0), "momentum": (0.9, 0.97)},
    ),
    Tuned(
        "Adam",
        "#009E73",
        torch.optim.Adam,
        {"lr": 0.03, "betas": (0.9, 0.999)},
        {"lr": (0.003, 0.01, 0.03, 0.1), "betas": ((0.9, 0.999), (0.97, 0.999))},
    ),
]


@torch.no_grad()
def evaluate(model: nn.Module, loss_function: nn.Module, data: Digits) -> tuple[float, float]:
    """Return loss and accuracy on the test set."""
    outputs = model(data.x_test)
    correct = outputs.argmax(dim=1) == data.y_test
    return loss_function(outputs, data.y_test).item(), correct.float().mean().item()


def train(make: Make, data: Digits, seed: int) -> list[tuple[float, float]]:
    """Train a fresh model; return test loss and accuracy after each epoch."""
    model, loss_function = make_model(seed), nn.CrossEntropyLoss()
    optimizer = make(model.parameters())
    if hasattr(optimizer, "extensions"):
        model, loss_function = extend(model), extend(loss_function)
    steps = EPOCHS * -(-len(data.y_train) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=steps)
    results = []
    for epoch in range(EPOCHS):
        for x, y in batches(data, epoch, seed):
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            with backpack(*getattr(optimizer, "extensions", ())):
                loss.backward()
            optimizer.step()
            schedule.step()
        results.append(evaluate(model, loss_function, data))
    return results


def compare(data: Digits) -> dict[str, Tensor]:
    """Train with every optimiser: ``[seeds, epochs, loss and accuracy]``."""
    curves = {}
    for tuned in tqdm(TUNED, desc="Training", disable=None, bar_format=PROGRESS):
        make = partial(tuned.make, **tuned.best)
        curves[tuned.name] = torch.tensor([train(make, data, 10 + s) for s in range(SEEDS)])
    return curves


def tune(data: Digits) -> None:
    """Print what every pair of values leads to, on training data that was kept from training."""
    fit, held = train_test_split(
        range(len(data.y_train)), test_size=0.25, stratify=data.y_train, random_state=SEED
    )
    x, y = data.x_train, data.y_train
    inner = Digits(x[fit], y[fit], x[held], y[held])
    for tuned in TUNED:
        for values in product(*tuned.grid.values()):
            options = dict(zip(tuned.grid, values, strict=True))
            make = partial(tuned.make, **options)
            losses = [train(make, inner, seed)[-1][0] for seed in range(2)]
            print(f"{tuned.name:<18}{sum(losses) / 2:8.4f}  {options}", flush=True)


# %%
# One table of all quantities
# ---------------------------
#
# One backward pass fills everything that the table shows.


def shape_str(tensor: Tensor) -> str:
    """Write a shape as ``32×16×3×3``."""
    return "×".join(str(size) for size in tensor.shape)


def quantities_table(data: Digits) -> Table:
    """Tabulate gradient, variance and curvature of each parameter at the initial weights."""
    model, loss_function = extend(make_model()), extend(nn.CrossEntropyLoss())
    x, y = next(batches(data, epoch=0))
    loss = loss_function(model(x), y)
    with backpack(Variance(), DiagGGNExact(), DiagGGNMC(mc_samples=1), KFAC(mc_samples=1)):
        loss.backward()

    title = f"Quantities of one backward pass (batch of {len(y)}, initial weights)"
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),  # fits into 80 columns
    )
    for name in ("parameter", "shape"):
        table.add_column(name, no_wrap=True)
    for name in ("gradient\nnorm", "mean\nvariance", "tr GGN\nexact", "tr GGN\nMC"):
        table.add_column(name, justify="right")
    table.add_column("KFAC factors", no_wrap=True)
    for name, p in model.named_parameters():
        table.add_row(*quantities_row(name, p))
    return table


def quantities_row(name: str, p: Any) -> list[str]:
    """Format what one parameter holds (``Any``: the extensions add attributes)."""
    numbers = (p.grad.norm(), p.variance.mean(), p.diag_ggn_exact.sum(), p.diag_ggn_mc.sum())
    return [
        name,
        shape_str(p),
        *(f"{number.item():.1e}" for number in numbers),
        " ⊗ ".join(shape_str(factor) for factor in p.kfac),
    ]


# %%
# What each extension costs
# -------------------------


class Cost(NamedTuple):
    """Time of a forward and backward pass with an extension, divided by that without."""

    name: str
    family: str
    ratio: float


# ``HBP`` is not listed: its members are KFAC, KFLR and KFRA.
FAMILIES: dict[str, tuple[type, ...]] = {
    "first order": (BatchGrad, BatchL2Grad, SumGradSquared, Variance),
    "diagonal curvature": (
        DiagGGNExact,
        DiagGGNMC,
        BatchDiagGGNExact,
        BatchDiagGGNMC,
        DiagHessian,
        BatchDiagHessian,
    ),
    "square root of the GGN": (SqrtGGNExact, SqrtGGNMC),
    "Kronecker factors": (KFAC, KFLR, KFRA),
    "matrix product (one vector)": (GGNMP, HMP, PCHMP),
}
FAMILY_COLORS = dict(
    zip(FAMILIES, ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"), strict=True)
)
MATRIX_PRODUCTS = ("ggnmp", "hmp", "pchmp")


def step_seconds(
    model: nn.Module, loss_function: nn.Module, x: Tensor, y: Tensor, extensions: tuple[Any, ...]
) -> float:
    """Time one forward and backward pass, and matrix products if there are any."""
    model.zero_grad()
    start = time.perf_counter()
    loss = loss_function(model(x), y)
    with backpack(*extensions):
        loss.backward()
    for extension in extensions:
        if extension.savefield in MATRIX_PRODUCTS:
            for p in model.parameters():
                getattr(p, extension.savefield)(torch.ones(1, *p.shape))
    return time.perf_counter() - start


def measure_costs(data: Digits, rounds: int = 20, budget: float = 30.0) -> list[Cost]:
    """Measure every extension on its own, relative to a model that is not extended.

    Every round times everything once, so that a drift of the machine's speed hits all of them
    alike. The fastest rounds are compared: whatever else runs on the machine only adds time. There
    are at least 5 rounds, and no new one begins after ``budget`` seconds.
    """
    x, y = next(batches(data, epoch=0))
    todo = [(family, cls) for family, members in FAMILIES.items() for cls in members]
    setups: list[tuple[nn.Module, nn.Module, tuple[Any, ...]]]
    setups = [(make_model(), nn.CrossEntropyLoss(), ())]
    # a model for each, so that no extension pays for what another one stored
    for _, cls in todo:
        setups.append((extend(make_model()), extend(nn.CrossEntropyLoss()), (cls(),)))

    times: list[list[float]] = [[] for _ in setups]
    begin = time.perf_counter()
    for done in tqdm(
        range(-1, rounds), disable=None, desc="Timing extensions", bar_format=PROGRESS
    ):
        if done >= 5 and time.perf_counter() - begin > budget:
            break
        for (model, loss_function, extensions), seconds in zip(setups, times, strict=True):
            elapsed = step_seconds(model, loss_function, x, y, extensions)
            if done >= 0:  # the round before the first one warms up
                seconds.append(elapsed)

    reference, *fastest = map(min, times)
    costs = [
        Cost(cls.__name__, family, seconds / reference)
        for (family, cls), seconds in zip(todo, fastest, strict=True)
    ]
    return sorted(costs, key=lambda cost: cost.ratio)


def ratio_str(ratio: float) -> str:
    """Write a ratio with two digits or more: ``1.5×``, ``12×``."""
    return f"{ratio:.1f}×" if ratio < 9.95 else f"{ratio:.0f}×"


def costs_table(costs: list[Cost]) -> Table:
    """Tabulate the costs in as many columns as fit into 80 characters."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.title = "Time of forward and backward pass, relative to the gradient alone"
    table.title_justify = "left"
    table.min_width = len(table.title)  # do not wrap the title
    columns = 3
    rows = -(-len(costs) // columns)
    for row in range(rows):
        cells = []
        for cost in costs[row::rows]:
            cells += [cost.name, ratio_str(cost.ratio)]
        table.add_row(*cells)
    for column in table.columns[1::2]:
        column.justify = "right"
    return table


# %%
# Pictures
# --------


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


def plot_curves(curves: dict[str, Tensor]) -> Figure:
    """Draw test loss and accuracy of all optimisers: means over seeds, and their range."""
    figure, panels = plt.subplots(ncols=2, figsize=(9, 3.8), layout="constrained")
    epochs = range(1, EPOCHS + 1)
    for tuned in TUNED:
        loss, accuracy = curves[tuned.name].unbind(-1)
        for panel, values in zip(panels, (loss, 100 * accuracy), strict=True):
            panel.plot(epochs, values.mean(0), color=tuned.color, label=tuned.name)
            low, high = values.amin(0), values.amax(0)
            panel.fill_between(epochs, low, high, color=tuned.color, alpha=0.15, linewidth=0)
    panels[0].set(title="Test loss", xlabel="epoch", yscale="log")
    panels[1].set(title="Test accuracy in %", xlabel="epoch", ylim=(85, 100))
    panels[1].legend(loc="lower right")
    figure.suptitle(f"{SEEDS} seeds; each optimiser is the best of 8 settings", fontsize=9)
    return figure


def plot_costs(costs: list[Cost]) -> Figure:
    """Draw one bar per extension, the cheapest on top, from the gradient's own cost on."""
    figure, axes = plt.subplots(figsize=(9, 5.8), layout="constrained")
    for row, cost in enumerate(costs):
        axes.barh(row, cost.ratio - 1, left=1, height=0.7, color=FAMILY_COLORS[cost.family])
        axes.annotate(
            ratio_str(cost.ratio),
            (max(cost.ratio, 1), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(costs)), [cost.name for cost in costs])
    axes.invert_yaxis()
    axes.set_title("Time of forward and backward pass, relative to the gradient alone")
    scale_log(axes, max(cost.ratio for cost in costs))
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in FAMILY_COLORS.values()]
    figure.legend(handles, list(FAMILY_COLORS), loc="outside lower center", ncols=3)
    return figure


def scale_log(axes: Axes, largest: float) -> None:
    """Use a logarithmic axis that starts at 1 and has plain numbers at its ticks."""
    axes.set_xscale("log")
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if tick <= 1.3 * largest]
    axes.set_xticks(ticks, [f"{tick}×" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(left=0.97, right=1.4 * largest)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


# %%
# All of it
# ---------


def main(out: Path | None = None) -> None:
    """Train, print the table and the costs, show the pictures or write them to ``out``."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        matplotlib.use("Agg")
    console = Console(highlight=False)
    torch.set_num_threads(1)  # faster for tensors this small, and the times repeat
    set_style()
    data = load_data()

    curves = compare(data)
    table = quantities_table(data)
    costs = measure_costs(data)

    for part in (table, costs_table(costs)):
        console.print()
        console.print(part)
    console.print()
    for name, values in curves.items():
        loss, accuracy = values[:, -1].mean(0).tolist()
        console.print(f"{name}: test loss {loss:.3f}, test accuracy {accuracy:.1%}")
    figures = {"curves.png": plot_curves(curves), "overhead.png": plot_costs(costs)}
    if out is None:
        plt.show()
        return
    for name, figure in figures.items():
        figure.savefig(out / name)
        plt.close(figure)
    console.print(f"Pictures: {out / 'curves.png'}, {out / 'overhead.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument("--out", type=Path, help="folder for the pictures")
    parser.add_argument("--tune", action="store_true", help="search settings of the optimisers")
    options = parser.parse_args()
    if options.tune:
        torch.set_num_threads(1)
        tune(load_data())
    else:
        main(options.out)
