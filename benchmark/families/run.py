"""One run: all contestants side by side, their numbers first, then their times in turn."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.families.contestants import CONTESTANTS
from benchmark.families.worker import Job
from benchmark.families.works import OURS, Work
from benchmark.floor import measure_rates
from benchmark.measure import Options, Process, deviation, environment, write
from benchmark.peers import EVERY_PEER


@dataclass
class Cell:
    """A work on a problem, done by a contestant.

    Args:
        status: ``"ok"``, ``"absent"``, ``"limit"``, ``"error"``, or ``"differs"``: its numbers are
            others, so that it is not timed.
        reason: Why there are no figures.
        seconds: Of each round.
        plain: Of each round, forward and backward pass over the same data, in the same process.
        bytes: The peak of memory, beyond what is there before.
        plain_bytes: That of the plain passes.
        deviation: Largest relative deviation from this library's numbers.
    """

    work: str
    problem: str
    contestant: str
    status: str = "ok"
    reason: str = ""
    seconds: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    bytes: int = 0
    plain_bytes: int = 0
    deviation: float | None = None

    def failed(self, answer: dict[str, Any]) -> bool:
        """Note why there is no answer, if there is none."""
        for status in ("absent", "limit", "error"):
            if status in answer:
                self.status, self.reason = status, answer[status]
                self.seconds, self.plain = [], []
                return True
        return False


class Run:
    """Holds a process for each library that is needed."""

    def __init__(self, options: Options):
        self.options = options
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes.values():
            process.stop()
            process.elsewhere.cleanup()

    def ask(self, cell: Cell, first: bool) -> dict[str, Any]:
        """Ask a contestant's process."""
        library = CONTESTANTS[cell.work, cell.contestant].library
        if library not in self.processes:
            module = "benchmark.families.worker"
            self.processes[library] = Process(library, self.options, module)
        return self.processes[library].ask(Job(cell.work, cell.problem, cell.contestant, first))

    def cells(self, work: Work, problem: str, peers: Iterable[str]) -> list[Cell]:
        """Do a work on a problem."""
        contestants = [OURS, *(peer for peer in work.peers if peer in peers)]
        cells = [Cell(work.name, problem, name) for name in contestants]
        truth: dict[str, Any] = {}
        for cell in cells:
            answer = self.ask(cell, first=True)
            if cell.failed(answer):
                continue
            cell.bytes, cell.plain_bytes = answer["bytes"], answer["plain_bytes"]
            truth = truth or answer["value"]
            if truth.keys() != answer["value"].keys():
                cell.status, cell.reason = "differs", "the values have other names"
            elif cell.contestant != OURS:
                cell.deviation = deviation(truth, answer["value"])
                if not cell.deviation <= work.tolerance:
                    cell.status = "differs"
                    cell.reason = f"numbers deviate by {cell.deviation:.1e}"
        if work.time is not None:
            self._rounds(cells)
        return cells

    def _rounds(self, cells: list[Cell]) -> None:
        """Let contestants have their turns; the order rotates."""
        start = time.perf_counter()
        for number in range(self.options.max_rounds):
            active = [cell for cell in cells if cell.status == "ok"]
            late = time.perf_counter() - start > self.options.budget
            if not active or (late and number >= self.options.min_rounds):
                return
            shift = number % len(active)
            for cell in active[shift:] + active[:shift]:
                answer = self.ask(cell, first=False)
                if not cell.failed(answer):
                    cell.seconds.append(answer["seconds"])
                    cell.plain.append(answer["plain"])


def run(
    works: Iterable[tuple[Work, Iterable[str]]],
    peers: Iterable[str],
    options: Options,
    out: Path,
    show: Callable[[list[Cell]], None],
    merge: bool = False,
) -> list[Cell]:
    """Measure works on problems; write JSON after each.

    Args:
        works: Works and names of problems.
        peers: Names of contestants besides this library.
        options: How long and where.
        out: The file.
        show: Called with the cells of a work on a problem.
        merge: Keep what is in the file and not measured again.

    Returns:
        The cells that were measured.
    """
    peers = [*peers]
    old = json.loads(out.read_text()) if merge and out.exists() else None
    facts = environment(options, measure_rates(options.device))
    facts["libraries"] = {library: peer.title for library, peer in EVERY_PEER.items()}
    # a file that several runs have contributed to says so
    earlier = [*old["environment"].pop("earlier", []), old["environment"]] if old else []
    known = {(c["work"], c["problem"], c["contestant"]): c for c in old["cells"]} if old else {}
    found: list[Cell] = []
    with Run(options) as each:
        for work, problems in works:
            for problem in problems:
                cells = each.cells(work, problem, peers)
                found += cells
                show(cells)
                known |= {(c.work, c.problem, c.contestant): c.__dict__ for c in cells}
                environments = facts | {"earlier": earlier}
                write({"environment": environments, "cells": [*known.values()]}, out)
    return found
