"""Command line: ``python -m benchmark`` measures and reports, ``python -m benchmark report`` only
makes tables and pictures from the figures that are there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmark.measure import OURS, Cell, Options, measure, ratio
from benchmark.peers import PEER
from benchmark.problems import ALL, PROBLEMS, SERIES
from benchmark.quantities import EVERY, FIRST, NONE
from benchmark.report import report

RESULTS = Path(__file__).resolve().parent / "results"
QUICK_PROBLEMS = ("logreg", "mlp", "3c3d", "lstm")
QUICK_QUANTITIES = (NONE, *FIRST, "DiagGGNMC", "KFAC")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmark", description=__doc__)
    add = parser.add_argument
    add("command", nargs="?", default="run", choices=["run", "report"])
    add("--quick", action="store_true", help="a selection that takes less than five minutes")
    add("--problems", nargs="+", choices=[*ALL], metavar="NAME", help=", ".join(ALL))
    add("--quantities", nargs="+", choices=EVERY, metavar="NAME", help=", ".join(EVERY))
    add("--libraries", nargs="+", choices=[*PEER], default=[*PEER], metavar="NAME")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--threads", type=int, default=2)
    add("--clock", default="wall", choices=["wall", "cpu"], help="cpu: time of the process")
    add("--rounds", type=int, help="exactly that many rounds of each cell")
    add("--budget", type=float, help="seconds for the rounds of a cell")
    add("--step-limit", type=float, help="seconds after which a step is given up")
    add("--out", type=Path, help="the JSON file")
    add("--merge", action="store_true", help="keep what is in the file and not measured again")
    return parser.parse_args(arguments)


def options(args: argparse.Namespace) -> Options:
    """Return what the command line says about time and place."""
    chosen = {"device": args.device, "threads": args.threads, "clock": args.clock}
    if args.quick:
        chosen |= {"budget": 1.0, "min_rounds": 1, "max_rounds": 5, "step_limit": 20.0}
    if args.rounds is not None:
        chosen |= {"min_rounds": args.rounds, "max_rounds": args.rounds}
    if args.budget is not None:
        chosen["budget"] = args.budget
    if args.step_limit is not None:
        chosen["step_limit"] = args.step_limit
    return Options(**chosen)


def main(arguments: list[str] | None = None) -> int:
    """Measure, report; return 1 if this library failed somewhere."""
    args = parse(arguments)
    quick = "-quick" if args.quick else ""
    out = args.out or RESULTS / f"{args.device}{quick}.json"
    console = Console(highlight=False, soft_wrap=True)
    failed = []
    if args.command == "run":
        series = [p.name for s in SERIES.values() for p in s.problems.values()]
        problems = args.problems or (QUICK_PROBLEMS if args.quick else [*PROBLEMS, *series])
        quantities = args.quantities or (QUICK_QUANTITIES if args.quick else None)
        header = "".join(f"{library:>18}" for library in args.libraries)
        console.print(f"{'problem':18}{'quantity':34}{header}")
        data = measure(
            [ALL[name] for name in problems],
            quantities,
            args.libraries,
            options(args),
            out,
            args.merge,
            lambda cells: console.print(line(cells)),
        )
        failed = [c for c in data["cells"] if c["library"] == OURS and c["status"] == "error"]
        for cell in failed:
            console.print(f"{cell['problem']}, {cell['quantity']}: {cell['reason']}", style="red")
    console.print(f"Report: {report(out)}")
    return 1 if failed else 0


def line(cells: list[Cell]) -> str:
    """Return a line of the progress table: ratio to the plain pass, and milliseconds."""
    figures = []
    for cell in cells:
        value = ratio(cell)
        if value is None:
            figures.append(f"{cell.status:>18}")
        else:
            milliseconds = 1000 * sorted(cell.seconds)[len(cell.seconds) // 2]
            figures.append(f"{value:8.2f} {milliseconds:6.0f} ms")
    first = cells[0]
    return f"{first.problem:18}{first.quantity[:33]:34}{''.join(figures)}"


if __name__ == "__main__":
    sys.exit(main())
