"""One run: all libraries side by side, each in a process of its own, in interleaved rounds."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from multiprocessing import Pipe
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from benchmark.floor import Floor, Rates, measure_rates
from benchmark.peers import PEER, ROOT, directory, install
from benchmark.problems import Problem
from benchmark.quantities import QUANTITIES, Quantity
from benchmark.worker import Job

OURS = "backpack"
# leaves room for the other processes and the system
MEMORY_SHARE = 0.6


@dataclass(frozen=True)
class Options:
    """How long and where to measure.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        threads: Threads of each process; only one computes at a time.
        budget: Seconds for the rounds of a cell, of all libraries together.
        min_rounds: Rounds that are measured even if the budget is spent.
        max_rounds: Rounds after which a cell is done.
        step_limit: Seconds after which a step is given up.
        clock: ``"wall"``, or ``"cpu"``, which other processes disturb less: for tuning.
    """

    device: str = "cpu"
    threads: int = 2
    budget: float = 6.0
    min_rounds: int = 3
    max_rounds: int = 11
    step_limit: float = 60.0
    clock: str = "wall"


def total_memory(device: str) -> int:
    """Return the bytes of memory of the device."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 8 << 30


class Process:
    """A worker, seen from the parent. It is started when needed and again when it has died."""

    def __init__(self, library: str, options: Options, module: str = "benchmark.worker"):
        self.name = library
        self.options = options
        self.module = module
        self.limit = int(MEMORY_SHARE * total_memory(options.device))
        self.absent = install(library)
        self.process: subprocess.Popen[bytes] | None = None
        self.elsewhere = tempfile.TemporaryDirectory()
        self.start()

    def start(self) -> None:
        """Start the worker with its library first on the search path."""
        if self.absent is not None:
            return
        here = directory(self.name)
        self.connection, theirs = Pipe()
        threads = str(self.options.threads)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(here), str(ROOT)]),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "PYTHONWARNINGS": "ignore",
        }
        # virtual addresses of the driver would count on a GPU
        limit = 0 if self.options.device == "cuda" else self.limit
        device, clock = self.options.device, self.options.clock
        arguments = [theirs.fileno(), self.name, device, threads, clock, limit, here]
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, *map(str, arguments)],
            env=environment,
            cwd=self.elsewhere.name,
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self.absent = self._receive(300).get("absent")

    def _receive(self, timeout: float) -> dict[str, Any]:
        try:
            if self.connection.poll(timeout):
                return self.connection.recv()
            self.stop()
            return {"limit": f"a step takes longer than {self.options.step_limit:.0f} s"}
        except EOFError:
            code = self.process.wait()
            self.stop()
            return {"error": f"the process ended with code {code}"}

    def ask(self, job: Any) -> dict[str, Any]:
        """Have a job done."""
        if self.absent is not None:
            return {"absent": self.absent}
        if self.process is None:
            self.start()
        self.connection.send(job)
        # a process has to load the problem first; a round repeats only short steps
        limit = self.options.step_limit
        answer = self._receive(1.5 * limit + 60)
        if "seconds" in answer and answer["seconds"] > limit:
            return {"limit": f"a step takes {answer['seconds']:.0f} s"}
        return answer

    def stop(self) -> None:
        """End the worker."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.connection.close()
            self.process = None


@dataclass
class Cell:
    """A quantity of a problem, computed by a library.

    Args:
        status: ``"ok"``, ``"absent"`` (not offered), ``"limit"`` (too much time or memory) or
            ``"error"``.
        reason: Why there are no figures.
        seconds: Of each round, forward pass, backward pass and quantity.
        plain: Of each round, forward and backward pass of the plain model in the same process.
        parts: Of each round, the parts of a set of extensions, one after the other (this library).
        bytes: The memory of a step, beyond what is there before.
        plain_bytes: That of a plain pass.
        error: Largest relative deviation from this library's values.
        operations: Multiplications and additions of the quantity's floor.
        floor_bytes: Bytes of the quantity's floor.
    """

    problem: str
    quantity: str
    library: str
    status: str = "ok"
    reason: str = ""
    seconds: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    bytes: int = 0
    plain_bytes: int = 0
    error: float | None = None
    operations: float = 0.0
    floor_bytes: float = 0.0

    # what identifies the cell
    key = property(attrgetter("problem", "quantity", "library"))


def deviation(ours: dict[str, Any], theirs: dict[str, Any]) -> float | None:
    """Return the largest deviation between the values of a quantity, relative to their size.

    What is zero up to rounding (the gradient of a key's bias, say) is compared with a thousandth of
    the largest entry that any parameter has.
    """
    worst = None
    for name in ours.keys() & theirs.keys():
        if [a["shape"] for a in ours[name]] != [b["shape"] for b in theirs[name]]:
            return math.inf
        largest = max(abs(x) for a in ours[name] for x in a["entries"])
        for a, b in zip(ours[name], theirs[name], strict=True):
            gaps = [abs(x - y) for x, y in zip(a["entries"], b["entries"], strict=True)]
            scale = max(1e-3 * largest, *map(abs, a["entries"]))
            worst = max(worst or 0.0, max(gaps) / scale)
            if a["norm"] > scale:
                worst = max(worst, abs(a["norm"] - b["norm"]) / a["norm"])
    return worst


class Run:
    """Measures cells one after the other."""

    def __init__(self, libraries: Iterable[str], options: Options, rates: Rates):
        self.options = options
        self.rates = rates
        self.processes = {library: Process(library, options) for library in libraries}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes.values():
            process.stop()
            process.elsewhere.cleanup()

    def quantity(self, problem: Problem, floor: Floor, quantity: Quantity) -> list[Cell]:
        """Measure a quantity with all libraries."""
        operations, size = floor.extra(quantity)
        cells = {
            library: Cell(
                problem.name, quantity.name, library, operations=operations, floor_bytes=size
            )
            for library in self.processes
        }
        reason = self._out_of_reach(floor, quantity)
        for cell in cells.values() if reason else ():
            cell.status, cell.reason = "limit", reason
        if reason:
            return [*cells.values()]
        values = {}
        for library, cell in cells.items():
            answer = self.processes[library].ask(Job(problem.name, quantity.name, first=True))
            if self._failed(cell, answer):
                continue
            cell.bytes, cell.plain_bytes = answer["bytes"], answer["plain_bytes"]
            values[library] = answer["value"]
        for library in values.keys() - {OURS}:
            if OURS in values:
                cells[library].error = deviation(values[OURS], values[library])
        self._rounds(cells)
        return [*cells.values()]

    def _out_of_reach(self, floor: Floor, quantity: Quantity) -> str:
        """Return why a quantity cannot be measured on this machine, if it cannot."""
        needed = floor.result_bytes(quantity)
        if needed > 0.8 * MEMORY_SHARE * total_memory(self.options.device):
            return f"what it consists of takes {needed / 2**30:.0f} GiB"
        seconds = floor.seconds(quantity, 0.0, self.rates)
        if seconds > self.options.step_limit:
            return f"its operations alone take {seconds:.0f} s"
        return ""

    @staticmethod
    def _failed(cell: Cell, answer: dict[str, Any]) -> bool:
        for status in ("absent", "limit", "error"):
            if status in answer:
                cell.status, cell.reason = status, answer[status]
                cell.seconds, cell.plain, cell.parts = [], [], {}
                return True
        return False

    def _rounds(self, cells: dict[str, Cell]) -> None:
        """Interleave the libraries; the order rotates."""
        start = time.perf_counter()
        for number in range(self.options.max_rounds):
            active = [library for library, cell in cells.items() if cell.status == "ok"]
            late = time.perf_counter() - start > self.options.budget
            if not active or (late and number >= self.options.min_rounds):
                return
            shift = number % len(active)
            for library in active[shift:] + active[:shift]:
                cell = cells[library]
                job = Job(cell.problem, cell.quantity, first=False)
                answer = self.processes[library].ask(job)
                if not self._failed(cell, answer):
                    cell.seconds.append(answer["seconds"])
                    cell.plain.append(answer["plain"])
                    for name, seconds in answer["parts"].items():
                        cell.parts.setdefault(name, []).append(seconds)


def circumstances(**options: Any) -> dict[str, Any]:
    """Describe what figures of a small benchmark depend on: the machine, options, the code."""
    return {
        "processor": processor(),
        **options,
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def environment(options: Options, rates: Rates) -> dict[str, Any]:
    """Describe what the figures depend on."""
    return {
        "cpu": processor(),
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
        "device": options.device,
        "clock": options.clock,
        "load": os.getloadavg()[0],
        "threads": options.threads,
        "memory_bytes": total_memory(options.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "libraries": {library: peer.title for library, peer in PEER.items()},
        "operations_per_second": rates.operations,
        "bytes_per_second": rates.bytes,
        "rounds": [options.min_rounds, options.max_rounds],
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def measure(
    problems: Iterable[Problem],
    quantities: Iterable[str] | None,
    libraries: Iterable[str],
    options: Options,
    out: Path,
    merge: bool = False,
    show: Callable[[list[Cell]], None] = lambda cells: None,
) -> dict[str, Any]:
    """Measure problems × quantities × libraries; write JSON after each problem.

    Args:
        problems: Problems.
        quantities: Names of quantities, ``None`` for those of each problem.
        libraries: Names of libraries.
        options: How long and where.
        out: The file.
        merge: Keep the cells of the file that are not measured again.
        show: Called with the cells of a quantity.

    Returns:
        What the file contains.
    """
    torch.set_num_threads(options.threads)
    rates = measure_rates(options.device)
    old = json.loads(out.read_text()) if merge and out.exists() else {"problems": {}, "cells": []}
    # a file that several runs have contributed to says so
    earlier = [*old["environment"].pop("earlier"), old["environment"]] if old["cells"] else []
    cells = {(cell["problem"], cell["quantity"], cell["library"]): cell for cell in old["cells"]}
    data = {
        "environment": environment(options, rates) | {"earlier": earlier},
        "problems": old["problems"],
        "cells": [],
    }
    chosen = None if quantities is None else set(quantities)
    with Run(libraries, options, rates) as run:
        for problem in problems:
            floor = Floor(problem)
            data["problems"][problem.name] = {
                "title": problem.title,
                "batch": problem.batch,
                "classes": problem.classes,
                "positions": list(problem.positions),
                "parameters": sum(layer.parameters for layer in floor.layers),
            }
            for name in problem.quantities:
                if chosen is None or name in chosen:
                    measured = run.quantity(problem, floor, QUANTITIES[name])
                    cells |= {cell.key: cell.__dict__ for cell in measured}
                    show(measured)
            data["cells"] = [*cells.values()]
            write(data, out)
    return data


def write(data: dict[str, Any], out: Path) -> None:
    """Replace the file at once."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".part")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(out)


def ratio(cell: dict[str, Any] | Cell) -> float | None:
    """Return the median ratio of a cell to the plain pass."""
    cell = cell.__dict__ if isinstance(cell, Cell) else cell
    if cell["status"] != "ok":
        return None
    pairs = zip(cell["seconds"], cell["plain"], strict=True)
    return statistics.median(s / p for s, p in pairs)
