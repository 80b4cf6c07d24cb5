"""Pictures of a results file."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from benchmark.figures import OURS, UPSTREAM, Data
from benchmark.problems import PROBLEMS, SERIES
from benchmark.quantities import FIRST, SCALED

BARS = (*FIRST, "DiagGGNMC", "KFAC", "DiagGGNExact", "KFLR", "DiagHessian", "BatchDiagHessian")
COLORS = {
    "backpack": "#d1495b",
    "upstream": "#30638e",
    "vmap": "#edae49",
    "loop": "#9a9a9a",
    "opacus": "#00798c",
    "curvlinops": "#7b5ea7",
}
LINES = dict(
    zip(SCALED, ("#edae49", "#d1495b", "#00798c", "#30638e", "#7b5ea7", "#5f5f5f"), strict=True)
)
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e4e4",
    "figure.dpi": 130,
}


def log_ticks(axis: Axes, which: str = "y") -> None:
    """Logarithmic axis with plain numbers."""
    ticks = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    getattr(axis, f"set_{which}scale")("log")
    one = getattr(axis, f"{which}axis")
    one.set_major_locator(FixedLocator(ticks))
    one.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    one.set_minor_locator(NullLocator())
    one.set_minor_formatter(NullFormatter())


def overhead_bars(axis: Axes, data: Data, problem: str) -> None:
    """Bars of all libraries side by side, with quartiles, and the floor as a line."""
    names = [q for q in BARS if any(data.overhead(problem, q, n) for n in data.titles)]
    for x, quantity in enumerate(names):
        found = {n: f for n in data.titles if (f := data.overhead(problem, quantity, n))}
        width = 0.8 / max(len(found), 3)
        left = x - width * (len(found) - 1) / 2
        for i, (library, figure) in enumerate(found.items()):
            spread = [[figure.median - figure.low], [figure.high - figure.median]]
            axis.bar(
                left + i * width,
                figure.median,
                0.92 * width,
                color=COLORS[library],
                yerr=spread,
                error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
            )
        floor = data.floor(problem, quantity)
        if floor is not None:
            half = width * len(found) / 2
            axis.hlines(floor, x - half, x + half, color="black", linewidth=1.4)
    log_ticks(axis)
    axis.set_ylim(bottom=0.8)
    axis.set_xticks(range(len(names)), names, rotation=25, ha="right", rotation_mode="anchor")
    axis.set_title(data.problems[problem]["title"], loc="left", fontsize=9, fontweight="bold")
    axis.set_ylabel("× plain pass")


def scaling_lines(axis: Axes, data: Data, key: str) -> None:
    """One line for each quantity; dashed for the released version."""
    series = SERIES[key]
    for quantity, color in LINES.items():
        for library, style in ((OURS, "-"), (UPSTREAM, "--")):
            points = [
                (x, figure.median)
                for x, problem in series.problems.items()
                if (figure := data.overhead(problem.name, quantity, library))
            ]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=color, marker="o", markersize=3)
    axis.set_xscale("log", base=2)
    axis.set_xticks([*series.problems], [str(x) for x in series.problems])
    axis.xaxis.set_minor_locator(NullLocator())
    log_ticks(axis)
    axis.set_xlabel(series.label)
    axis.set_ylabel("× plain pass")
    axis.set_title(series.title, loc="left", fontsize=9, fontweight="bold")


def plot(data: Data, folder: Path, stem: str) -> list[str]:
    """Draw all pictures; return their file names."""
    with plt.rc_context(STYLE):
        return [*_overheads(data, folder, stem), *_scaling(data, folder, stem)]


def plot_problem(data: Data, problem: str, path: Path) -> None:
    """Draw the bars of one problem; what is around the picture says which one it is."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9, 3.8), layout="constrained")
        overhead_bars(axes, data, problem)
        axes.set_title("", loc="left")
        titles = {
            n: t
            for n, t in data.titles.items()
            if any(p == problem and lib == n for p, _, lib in data.cells)
        }
        handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in titles]
        handles.append(Line2D([], [], color="black", linewidth=1.4))
        figure.legend(
            handles,
            [*titles.values(), "floor"],
            ncols=min(len(handles), 4),
            loc="outside upper center",
            frameon=False,
        )
        _save(figure, path.parent, path.name)


def _overheads(data: Data, folder: Path, stem: str) -> list[str]:
    problems = [
        name
        for name in data.problems
        if name in PROBLEMS and any(data.overhead(name, q) for q in BARS)
    ]
    if not problems:
        return []
    rows = (len(problems) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(13, 3.1 * rows), squeeze=False)
    for axis, problem in zip(axes.flat, problems, strict=False):
        overhead_bars(axis, data, problem)
    for axis in axes.flat[len(problems) :]:
        axis.axis("off")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in data.titles]
    handles.append(Line2D([], [], color="black", linewidth=1.4))
    labels = [*data.titles.values(), "floor"]
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / (3.1 * rows)))
    figure.legend(handles, labels, ncols=len(labels), loc="upper center", frameon=False)
    return [_save(figure, folder, f"{stem}-overhead.png")]


def _scaling(data: Data, folder: Path, stem: str) -> list[str]:
    measured = [
        key
        for key, s in SERIES.items()
        if any(p.name in data.problems for p in s.problems.values())
    ]
    if not measured:
        return []
    rows = (len(measured) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(11, 3.6 * rows), squeeze=False)
    for axis, key in zip(axes.flat, measured, strict=False):
        scaling_lines(axis, data, key)
    for axis in axes.flat[len(measured) :]:
        axis.axis("off")
    handles = [Line2D([], [], color=color, marker="o", markersize=3) for color in LINES.values()]
    handles += [Line2D([], [], color="black", linestyle=style) for style in ("-", "--")]
    labels = [*LINES, data.titles.get(OURS, OURS), data.titles.get(UPSTREAM, UPSTREAM)]
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.4 / (3.6 * rows)))
    figure.legend(handles, labels, ncols=len(labels), loc="upper center", frameon=False)
    return [_save(figure, folder, f"{stem}-scaling.png")]


def _save(figure: plt.Figure, folder: Path, name: str) -> str:
    figure.savefig(folder / name)
    plt.close(figure)
    return name
