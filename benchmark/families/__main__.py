"""Command line: ``python -m benchmark.families`` compares, measures and reports."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from benchmark.families.report import ratio, section
from benchmark.families.run import Cell, run
from benchmark.families.works import ALL, OURS, WORKS
from benchmark.measure import Options

RESULTS = Path(__file__).resolve().parent.parent / "results"
PEERS = list(dict.fromkeys(peer for work in WORKS.values() for peer in work.peers))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.families", description=__doc__)
    add = parser.add_argument
    add("--works", nargs="+", choices=[*WORKS], default=[*WORKS], metavar="NAME")
    add("--problems", nargs="+", choices=[*ALL], metavar="NAME", help="default: those of the work")
    add("--peers", nargs="*", choices=PEERS, default=PEERS, metavar="NAME")
    add("--rounds", type=int, default=9)
    add("--budget", type=float, default=60.0, help="seconds for the rounds of a work")
    add("--threads", type=int, default=1)
    add("--clock", default="cpu", choices=["wall", "cpu"], help="cpu: time of the process")
    add("--out", type=Path, default=RESULTS / "families.json", help="the JSON file")
    add("--merge", action="store_true", help="keep what is in the file and not measured again")
    return parser.parse_args(arguments)


def show(console: Console, cells: list[Cell]) -> None:
    """Print what was measured."""
    first = cells[0]
    console.print(f"{first.work}, {first.problem}", style="bold")
    for cell in cells:
        figures = cell.reason or "compared"
        if cell.seconds:
            seconds = sorted(cell.seconds)[len(cell.seconds) // 2]
            against = ratio(first.__dict__, cell.__dict__)
            figures = f"{1000 * seconds:9.1f} ms  ours ÷ it {against:5.2f}"
        deviation = "" if cell.deviation is None else f"  deviation {cell.deviation:.0e}"
        peak = cell.bytes / 2**20
        console.print(f"  {cell.contestant:22}{figures}  {peak:7.1f} MiB{deviation}")


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; return 1 if this library failed, or numbers differ."""
    args = parse(arguments)
    console = Console(highlight=False, soft_wrap=True)
    options = Options(
        threads=args.threads,
        clock=args.clock,
        budget=args.budget,
        max_rounds=args.rounds,
        step_limit=240.0,
    )
    chosen = [(WORKS[name], args.problems or WORKS[name].problems) for name in args.works]
    cells = run(
        chosen, args.peers, options, args.out, lambda found: show(console, found), args.merge
    )
    args.out.with_suffix(".md").write_text(section(json.loads(args.out.read_text())))
    failed = [
        c for c in cells if c.status == "differs" or (c.status != "ok") & (c.contestant == OURS)
    ]
    for cell in failed:
        where = f"{cell.work}, {cell.problem}, {cell.contestant}"
        console.print(f"{where}: {cell.reason}", style="red")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
