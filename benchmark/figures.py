"""What the recorded cells say: ratios, spread, and how the goals stand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmark.problems import PROBLEMS
from benchmark.quantities import FIRST, HESSIAN, NONE, QUANTITIES, SETS

OURS, UPSTREAM = "backpack", "upstream"
Cell = dict[str, Any]

# a plain pass of these takes a few milliseconds: calls from Python count
SHORT = ("logreg", "mlp", "sigmoid-mlp", "sigmoid-cnn")


@dataclass(frozen=True)
class Figure:
    """Median and quartiles of a ratio."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Figure:
        """Summarize the rounds."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        digits = 2 if self.median < 100 else 0
        return f"{self.median:.{digits}f} ±{(self.high - self.low) / 2:.{digits}f}"


class Data:
    """The contents of a results file."""

    def __init__(self, data: dict[str, Any]):
        self.environment = data["environment"]
        self.problems: dict[str, Any] = data["problems"]
        self.cells: dict[tuple[str, str, str], Cell] = {
            (cell["problem"], cell["quantity"], cell["library"]): cell for cell in data["cells"]
        }
        names = {library for _, _, library in self.cells}
        self.titles = {n: t for n, t in self.environment["libraries"].items() if n in names}

    def quantities(self, problem: str) -> list[str]:
        """Return what was measured for a problem."""
        return [q for q in QUANTITIES if any((problem, q, n) in self.cells for n in self.titles)]

    def get(self, problem: str, quantity: str, library: str = OURS) -> Cell | None:
        """Return a cell with figures."""
        cell = self.cells.get((problem, quantity, library))
        return cell if cell is not None and cell["status"] == "ok" and cell["seconds"] else None

    def overhead(self, problem: str, quantity: str, library: str = OURS) -> Figure | None:
        """Return the ratio to the plain pass of the same rounds."""
        cell = self.get(problem, quantity, library)
        return cell and Figure.of(
            [s / p for s, p in zip(cell["seconds"], cell["plain"], strict=True)]
        )

    def against(self, problem: str, quantity: str, library: str) -> Figure | None:
        """Return the ratio of this library's time to a peer's, of the same rounds."""
        ours, theirs = self.get(problem, quantity), self.get(problem, quantity, library)
        if ours is None or theirs is None:
            return None
        pairs = zip(ours["seconds"], theirs["seconds"], strict=False)
        return Figure.of([a / b for a, b in pairs])

    def fastest_peer(self, problem: str, quantity: str) -> tuple[str, Figure] | None:
        """Return the peer that this library compares worst with, and the ratio."""
        ratios = {n: self.against(problem, quantity, n) for n in self.titles if n != OURS}
        found = [(n, ratio) for n, ratio in ratios.items() if ratio is not None]
        return max(found, key=lambda pair: pair[1].median, default=None)

    def together(self, problem: str, quantity: str, parts: Iterable[str]) -> Figure | None:
        """Return the ratio of a set of extensions to the dearest of some, of the same rounds."""
        cell = self.get(problem, quantity)
        if cell is None or not cell.get("parts"):
            return None
        each = zip(*(cell["parts"][name] for name in parts), strict=True)
        return Figure.of([a / max(b) for a, b in zip(cell["seconds"], each, strict=True)])

    def floor(self, problem: str, quantity: str) -> float | None:
        """Return the floor, relative to the plain pass."""
        for library in self.titles:
            cell = self.get(problem, quantity, library)
            if cell is not None:
                plain = statistics.median(cell["plain"])
                operations = cell["operations"] / self.environment["operations_per_second"]
                size = cell["floor_bytes"] / self.environment["bytes_per_second"]
                return (plain + operations + size) / plain
        return None


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean, NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


@dataclass(frozen=True)
class Check:
    """One figure of a goal: what it is of, and what it should not exceed."""

    what: str
    value: float
    bound: float

    @property
    def met(self) -> bool:
        """Whether the bound holds."""
        return self.value <= self.bound


@dataclass(frozen=True)
class Goal:
    """A line of the list of goals.

    Args:
        title: What is to be reached.
        checks: Its figures.
        missing: What could not be measured.
    """

    title: str
    checks: list[Check]
    missing: list[str]

    @property
    def verdict(self) -> str:
        """Whether all figures hold, and whether there are any."""
        if not self.checks:
            return "not measured"
        if not all(check.met for check in self.checks):
            return "not met"
        return "met where measured" if self.missing else "met"


Found = Iterator[tuple[str, float | None, float]]


def _goal(title: str, found: Found) -> Goal:
    everything = [*found]
    checks = [Check(what, value, bound) for what, value, bound in everything if value is not None]
    return Goal(title, checks, [what for what, value, _ in everything if value is None])


def _median(figure: Figure | None) -> float | None:
    return figure and figure.median


def goals(data: Data) -> list[Goal]:
    """Evaluate the goals of the project."""
    problems = [name for name in data.problems if name in PROBLEMS]

    def mean(names: Iterable[str], bound: float) -> Found:
        names = [*names]
        for label, part in [("all", names), *((name, [name]) for name in names)]:
            ratios = [data.against(p, q, UPSTREAM) for p in problems for q in part]
            values = [ratio.median for ratio in ratios if ratio is not None]
            if values or label == "all":
                # parts are for information
                yield (
                    f"{label} ({len(values)} cells)",
                    geometric_mean(values) if values else None,
                    bound if label == "all" else math.inf,
                )

    def fastest() -> Found:
        for problem in problems:
            for quantity in data.quantities(problem):
                peer = data.fastest_peer(problem, quantity)
                if peer is not None:
                    name, ratio = peer
                    what = f"{problem}, {quantity} (against {data.titles[name]})"
                    yield what, ratio.median, 1.0

    def together(names: str, parts: Iterable[str], bound: float) -> Found:
        for problem in problems:
            figure = data.together(problem, names, parts)
            if figure is not None:
                yield problem, figure.median, bound

    def nothing() -> Found:
        for problem in problems:
            yield problem, _median(data.overhead(problem, NONE)), 1.2 if problem in SHORT else 1.03

    def absolute(names: Iterable[str], where: Iterable[str], bound: float) -> Found:
        for problem in where:
            for name in names:
                yield f"{problem}, {name}", _median(data.overhead(problem, name)), bound

    def hessian(field: str) -> Found:
        for problem in ("sigmoid-mlp", "sigmoid-cnn"):
            for name in HESSIAN:
                ours, theirs = data.get(problem, name), data.get(problem, name, UPSTREAM)
                value = None
                if ours is not None and theirs is not None:
                    time = _median(data.against(problem, name, UPSTREAM))
                    value = time if field == "time" else ours["bytes"] / theirs["bytes"]
                yield f"{problem}, {name}", value, 0.2

    def large() -> Found:
        cell = data.get("resnet18-1000", "DiagGGNExact")
        yield "resnet18-1000", cell and cell["bytes"] / cell["plain_bytes"], 3.0

    def without_individual() -> Found:
        for problem in problems:
            individual = 4 * data.problems[problem]["batch"] * data.problems[problem]["parameters"]
            for name in ("SumGradSquared", "Variance"):
                cell = data.get(problem, name)
                if cell is not None:
                    more = cell["bytes"] - cell["plain_bytes"]
                    yield f"{problem}, {name}", max(0.0, more / individual), 0.5

    second = [n for n, q in QUANTITIES.items() if q.order == 2 and n not in HESSIAN]
    exact = ("DiagGGNExact", "KFLR", "SqrtGGNExact")
    cnns = ("3c3d", "allcnnc-32", "allcnnc-256")
    lines: list[tuple[str, Callable[[], Found]]] = [
        (
            "first order: time relative to the released version, geometric mean ≤ 0.35",
            lambda: mean(FIRST, 0.35),
        ),
        (
            "second order: time relative to the released version, geometric mean ≤ 0.55",
            lambda: mean(second, 0.55),
        ),
        ("never above the fastest peer", fastest),
        (
            "`BatchGrad, BatchL2Grad, SumGradSquared, Variance` together ≤ 1.1 × `BatchGrad`",
            lambda: together(SETS[0], ("BatchGrad",), 1.1),
        ),
        (
            "`DiagGGNExact, KFLR, SqrtGGNExact` together ≤ 1.2 × the dearest of them",
            lambda: together(SETS[1], exact, 1.2),
        ),
        ("extended model without extension ≤ 1.03 × plain (≤ 1.2 for short steps)", nothing),
        (
            "`Variance`, `SumGradSquared`, `BatchL2Grad`, `DiagGGNMC` ≤ 1.5 on 3C3D and All-CNN-C",
            lambda: absolute((*FIRST[1:], "DiagGGNMC"), cnns, 1.5),
        ),
        ("`KFAC` ≤ 1.6 on 3C3D and All-CNN-C", lambda: absolute(("KFAC",), cnns, 1.6)),
        ("character LSTM: first order ≤ 3", lambda: absolute(FIRST, ("lstm",), 3.0)),
        ("character LSTM: `DiagGGNMC` ≤ 4", lambda: absolute(("DiagGGNMC",), ("lstm",), 4.0)),
        (
            "`DiagGGNExact` with 10 classes ≤ 5 on 3C3D",
            lambda: absolute(("DiagGGNExact",), ("3c3d",), 5.0),
        ),
        (
            "diagonal of the Hessian, sigmoid networks: time ≤ 0.2 × the released version",
            lambda: hessian("time"),
        ),
        (
            "diagonal of the Hessian, sigmoid networks: memory ≤ 0.2 × the released version",
            lambda: hessian("memory"),
        ),
        ("`DiagGGNExact`, ResNet-18, 1000 classes: memory ≤ 3 × the plain pass", large),
        (
            "`SumGradSquared`, `Variance` without a tensor `[N, *p]`: additional memory relative "
            "to it",
            without_individual,
        ),
    ]
    return [_goal(title, found()) for title, found in lines]
