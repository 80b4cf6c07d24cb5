"""What each fast path of this library earns: ``python -m benchmark.fast_paths``.

A step without the path is timed next to one with it, in one process and in turn, for the quantities
that take the path (or ask whether they may). What earns neither :data:`TIME` nor :data:`MEMORY` on
any problem is not worth its code.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from backpack.core import fast
from benchmark.libraries import Backpack
from benchmark.measure import MEMORY_SHARE, total_memory
from benchmark.noticed import noticed
from benchmark.problems import ALL, LAYERS, SHORT, Problem
from benchmark.problems import PROBLEMS as TABLES
from benchmark.quantities import EXACT, FIRST, HESSIAN, QUANTITIES, Quantity
from benchmark.report import table
from benchmark.worker import Memory

RESULTS = Path(__file__).resolve().parent / "results"
PROBLEMS = ("logreg", "mlp", "sigmoid-cnn", "3c3d", "lstm", "transformer", *SHORT, *LAYERS)
KNOWN = QUANTITIES | {"EKFAC": Quantity(("EKFAC",), 2, random=True)}
QUANTITY_NAMES = (*FIRST, "DiagGGNMC", "KFAC", "EKFAC", *EXACT, *HESSIAN, "GGNMP", "HMP")
# What takes minutes for the problems of other tables.
LONG = frozenset({"HMP"})
# What a path has to earn somewhere: of the time, in three of four rounds; or of the memory, and so
# many bytes, whenever it is measured, so many times.
TIME = 1.05
MEMORY, BYTES, MEMORY_ROUNDS = 1.2, 2**20, 3
# Whether a path is worth it: if one figure says so, if one may, if none does.
VERDICTS = {"yes": True, "?": None, "no": False}
# What takes over the work of a path in a loop of steps, and is switched off to see what it earns.
TAKEN_OVER = {
    "huge pages": "reused memory",
    "NLLLossDerivatives.hessian_sum": "CrossEntropyLossDerivatives.hessian_sum",
}
# Paths that are taken where the gradient is the sum of individual gradients.
SUMMED = ", gradients summed"

Step = Callable[[], Any]


@dataclass
class Figure:
    """A path, where it is taken.

    Args:
        seconds: Of each round, a step with it.
        without: Of each round, a step without it.
        bytes: Memory of steps with it, beyond what is there before.
        bytes_without: Memory of steps without it.
        reason: Why there are no figures.
        environment: What figures depend on.
    """

    path: str
    problem: str
    quantity: str
    seconds: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    bytes_without: list[int] = field(default_factory=list)
    reason: str = ""
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def time(self) -> float | None:
        """Time without it ÷ time with it: the median over the rounds."""
        return statistics.median(self._ratios) if self.seconds else None

    @property
    def saves_time(self) -> bool:
        """Whether it earns enough, in three of four rounds; or nothing can be done without it."""
        ratios = sorted(self._ratios)
        return bool(self.reason) or (bool(ratios) and ratios[len(ratios) // 4] >= TIME)

    @property
    def saves_memory(self) -> bool | None:
        """Whether the most that is taken with it is clearly less than the least without it.

        None if it looks so, but was not measured often enough to tell.
        """
        most, least = max(self.bytes, default=0), min(self.bytes_without, default=0)
        if least < MEMORY * most or least < most + BYTES:
            return False
        return True if min(len(self.bytes), len(self.bytes_without)) >= MEMORY_ROUNDS else None

    @property
    def _ratios(self) -> list[float]:
        return [b / a for b, a in zip(self.without, self.seconds, strict=True)]

    @property
    def memory(self) -> float | None:
        """Memory without it ÷ memory with it."""
        if not (any(self.bytes) and any(self.bytes_without)):
            return None
        return statistics.median(self.bytes_without) / max(1, statistics.median(self.bytes))


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Stop what takes too long."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Steps:
    """The steps of one problem."""

    def __init__(self, problem: Problem, rounds: int, step_limit: float, clock: Any):
        self.problem = problem
        self.rounds = rounds
        self.step_limit = step_limit
        self.clock = clock
        self.memory = Memory("cpu")
        self.loaded = Backpack(problem, "cpu")

    @staticmethod
    def without(path: str | None) -> AbstractContextManager[None]:
        """Do without a path, if there is one."""
        return nullcontext() if path is None else fast.disabled(path)

    def seconds(self, step: Step, path: str | None = None) -> float:
        """Time a step, without a path."""
        with self.without(path), limit(self.step_limit):
            start = self.clock()
            step()
            stop = self.clock()
        self.loaded.between_steps()
        return stop - start

    def bytes(self, step: Step, path: str | None = None) -> int:
        """Return the memory of a step, without a path."""
        with self.without(path), limit(self.step_limit):
            _, peak = self.memory(step)
        self.loaded.between_steps()
        return peak

    def figures(self, quantity: str, paths: Iterable[str] | None) -> Iterator[Figure]:
        """Measure the paths that a quantity takes."""
        self.loaded.options = {"sum_individual_gradients": True} if SUMMED in quantity else {}
        step = self.loaded.prepare(KNOWN[quantity.removesuffix(SUMMED)])
        names = set()
        for other in (None, *TAKEN_OVER.values()):
            with self.without(other):
                self.seconds(step)
                with noticed() as taken:
                    self.seconds(step)
            names |= taken
        for name in sorted(names if paths is None else names.intersection(paths)):
            found = Figure(name, self.problem.name, quantity)
            try:
                with self.without(TAKEN_OVER.get(name)):
                    self.seconds(step, name)  # to warm up
                    for _ in range(MEMORY_ROUNDS):
                        found.bytes.append(self.bytes(step))
                        found.bytes_without.append(self.bytes(step, name))
                    for _ in range(self.rounds):
                        found.seconds.append(self.seconds(step))
                        found.without.append(self.seconds(step, name))
            except TimeoutError:
                found.reason = f"takes longer than {self.step_limit:.0f} s"
            except (MemoryError, RuntimeError) as error:
                found.reason = str(error).splitlines()[0][:80]
            if found.reason:
                found.seconds, found.without, found.bytes_without = [], [], []
                self.loaded.release()
            yield found
        self.loaded.release()


def measure(args: argparse.Namespace, show: Callable[[Figure], None]) -> list[Figure]:
    """Measure problems and quantities; write what there is after each problem.

    Of an earlier run there stays what is not measured again, with the environment of then.
    """
    quantities = {each for q in args.quantities for each in (q, q + SUMMED)}
    found = [
        one
        for one in ([] if args.out is None else read(args.out))
        if one.problem not in args.problems
        or one.quantity not in quantities
        or one.path not in (args.paths or fast.PATHS)
    ]
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    environment = circumstances(args)
    for name in args.problems:
        steps = Steps(ALL[name], args.rounds, args.step_limit, clock)
        known = {*ALL[name].quantities, "EKFAC"} - (LONG if name in TABLES else set())
        chosen = [q for q in args.quantities if q in known]
        for quantity in [*chosen, *(q + SUMMED for q in chosen if q in FIRST)]:
            try:
                for figure in steps.figures(quantity, args.paths):
                    figure.environment = environment
                    found.append(figure)
                    show(figure)
            except (NotImplementedError, TimeoutError, ValueError, MemoryError, RuntimeError):
                steps.loaded.release()  # not defined there, or more than this machine has
        if args.out is not None:
            write(found, args.out)
    return found


def read(out: Path) -> list[Figure]:
    """Return the figures of earlier runs, of the paths that there are."""
    contents = json.loads(out.read_text()) if out.exists() else {"runs": []}
    return [
        Figure(**one, environment=run["environment"])
        for run in contents["runs"]
        for one in run["figures"]
        if one["path"] in fast.PATHS
    ]


def runs(figures: Iterable[Figure]) -> list[tuple[dict[str, Any], list[Figure]]]:
    """Group figures by the environment that they are of."""
    found: list[tuple[dict[str, Any], list[Figure]]] = []
    for one in figures:
        own = next((group for facts, group in found if facts == one.environment), None)
        if own is None:
            found.append((one.environment, own := []))
        own.append(one)
    return found


def text(figure: Figure | None, value: float | None) -> str:
    """Return a cell of a table: the figure and where it is from."""
    if figure is None:
        return ""
    if value is None:
        return figure.reason or "–"
    return f"{value:.2f} {figure.quantity}"


def best(figures: Iterable[Figure], kind: str) -> Figure | None:
    """Return the figure of which most is earned; one that cannot be done without the path."""
    known = list(figures)
    stopped = [one for one in known if one.reason]
    measured = [one for one in known if getattr(one, kind) is not None]
    if stopped:
        return stopped[0]
    return max(measured, key=lambda one: getattr(one, kind), default=None)


def rows(
    figures: list[Figure], kind: str, paths: Iterable[str] = fast.PATHS
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table: what each path earns most on each problem."""
    problems = list(dict.fromkeys(one.problem for one in figures))
    lines = []
    for path in paths:
        own = [one for one in figures if one.path == path]
        cells = [best([one for one in own if one.problem == name], kind) for name in problems]
        values = [text(c, None if c is None else getattr(c, kind)) for c in cells]
        saves = {getattr(one, f"saves_{kind}") for one in own}
        verdict = next((word for word, each in VERDICTS.items() if each in saves), "")
        lines.append([path, *values, verdict])
    return ["path", *problems, "worth it"], lines


HEAD = """\
# What fast paths earn

Made by `python -m benchmark.fast_paths`, with

{environments}

Figures are those without the path divided by those with it, for the quantity of a problem for which
this is most; a reason stands where a step without the path is not possible, nothing where no
quantity takes the path, or where it was not measured. A path is worth it for the sake of time if
some step takes {time:.0%} more of it without the path, in three of four rounds; for the sake of
memory if some step takes {memory:.0%} and 1 MiB more of it without the path, whenever it is
measured, three times with it and three without. If it was measured only once and seems to be, there
is a "?". A figure alone, which is a median, may be more by chance.
"""


def circumstances(args: argparse.Namespace) -> dict[str, Any]:
    """Return what figures depend on."""
    return {
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "clock": args.clock,
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def write(figures: list[Figure], out: Path) -> None:
    """Write the figures, and a report next to them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    contents, lines = [], []
    for environment, own in runs(figures):
        values = [asdict(one) for one in own]
        for each in values:
            del each["environment"]
        contents.append({"environment": environment, "figures": values})
        problems = ", ".join(dict.fromkeys(one.problem for one in own))
        facts = ", ".join(f"{name} {value}" for name, value in environment.items())
        lines.append(f"- {facts}: {len(own)} figures of {problems}")
    out.write_text(json.dumps({"runs": contents}, indent=1) + "\n")
    shares = {"time": TIME - 1, "memory": MEMORY - 1}
    parts = [HEAD.format(environments="\n".join(lines), **shares)]
    for kind in ("time", "memory"):
        parts += [f"## {kind.capitalize()}\n", table(*rows(figures, kind))]
    sentences = [f"- {path.name}: {path.what}" for path in fast.PATHS.values()]
    parts += ["## The paths\n", "\n".join(sentences) + "\n"]
    out.with_suffix(".md").write_text("\n".join(parts))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.fast_paths", description=__doc__)
    add = parser.add_argument
    add("--problems", nargs="+", choices=[*ALL], default=PROBLEMS, metavar="NAME")
    add("--quantities", nargs="+", choices=[*KNOWN], default=QUANTITY_NAMES, metavar="NAME")
    add("--paths", nargs="+", choices=[*fast.PATHS], metavar="NAME", help="default: all")
    add("--rounds", type=int, default=7)
    add("--threads", type=int, default=2)
    add("--clock", default="wall", choices=["wall", "cpu"], help="cpu: time of the process")
    add("--step-limit", type=float, default=60.0, help="seconds after which a step is given up")
    add(
        "--out",
        type=Path,
        help="the JSON file; default: that of the results, none for some --paths",
    )
    args = parser.parse_args(arguments)
    if args.out is None and args.paths is None:
        args.out = RESULTS / "fast_paths.json"
    return args


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    console = Console(highlight=False, soft_wrap=True)

    def show(one: Figure) -> None:
        values = {kind: getattr(one, kind) for kind in ("time", "memory")}
        ratios = [f"{kind} {value:.2f}" for kind, value in values.items() if value is not None]
        what = one.reason or ", ".join(ratios)
        console.print(f"{one.problem:18}{one.quantity:36}{one.path:48}{what}")

    figures = measure(args, show)
    for kind in ("time", "memory"):
        header, lines = rows(figures, kind, args.paths or fast.PATHS)
        shown = Table(title=f"{kind} without ÷ with, most")
        for i, name in enumerate(header):
            shown.add_column(name, no_wrap=not i)
        for line in lines:
            shown.add_row(*line)
        console.print(shown)
    return 0


if __name__ == "__main__":
    most = int(MEMORY_SHARE * total_memory("cpu"))
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    sys.exit(main())
