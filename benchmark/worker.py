"""The process of one library: loads a problem on command, runs steps and measures them.

It is started by :mod:`benchmark.measure` with the library's directory first on the module search
path, and answers requests that arrive through a pipe.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmark.libraries import LIBRARIES, Library, NotOffered
from benchmark.problems import ALL
from benchmark.quantities import QUANTITIES

# a round takes about this long in each process, shorter steps are repeated
ROUND_SECONDS = 0.15
MAX_REPEATS = 40
ENTRIES = 512


@dataclass(frozen=True)
class Job:
    """What the parent asks for: the first step of a cell, or a round of it."""

    problem: str
    quantity: str
    first: bool


class Memory:
    """The high-water mark of the memory a step takes, beyond what is there before."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        self.trim: Callable[[int], int] | None = None
        if sys.platform == "linux":
            self.trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    @staticmethod
    def _status(field: str) -> int:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith(field))
        return int(line.split()[1]) * 1024

    def __call__(self, step: Callable[[], Any]) -> tuple[Any, int]:
        """Run a step; return its result and the additional bytes."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            result = step()
            torch.cuda.synchronize()
            return result, torch.cuda.max_memory_allocated() - before
        if self.trim is not None:
            self.trim(0)
        try:
            with open("/proc/self/clear_refs", "w") as clear:
                clear.write("5")
            before = self._status("VmRSS")
            result = step()
            return result, max(0, self._status("VmHWM") - before)
        except OSError:  # not Linux: the mark cannot be reset, small steps show as 0
            unit = 1 if sys.platform == "darwin" else 1024
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            result = step()
            return result, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit


def fingerprint(value: Any) -> list[dict[str, Any]]:
    """Return shape, norm and some entries of each tensor of a result."""
    if not isinstance(value, Tensor):
        return [print_ for part in value for print_ in fingerprint(part)]
    value = value.detach()
    count = min(ENTRIES, value.numel())
    flat = torch.linspace(0, value.numel() - 1, count, dtype=torch.float64).long()
    index = torch.unravel_index(flat.to(value.device), value.shape)
    return [
        {
            "shape": tuple(value.shape),
            "norm": torch.linalg.vector_norm(value).item(),
            "entries": value[index].tolist(),
        }
    ]


class Worker:
    """Serves the requests."""

    def __init__(self, library: str, device: str, clock: str):
        self.name = library
        self.device = device
        self.clock = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
        self.memory = Memory(device)
        self.problem: str | None = None
        self.quantity: str | None = None

    def load(self, problem: str) -> None:
        """Replace the problem."""
        if problem == self.problem:
            return
        self.loaded: Library | None = None
        self.problem = self.quantity = None
        gc.collect()
        self.loaded = LIBRARIES[self.name](ALL[problem], self.device)
        for _ in range(2):
            self._run(self.loaded.plain)
        _, self.plain_bytes = self._run(lambda: self.memory(self.loaded.plain))
        self.problem = problem

    def _run(self, step: Callable[[], Any]) -> Any:
        """Run a step and forget what it left on the parameters."""
        try:
            return step()
        finally:
            self.loaded.release()

    def seconds(self, step: Callable[[], Any]) -> float:
        """Run a step; what it returns is freed after the clock has stopped."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        start = self.clock()
        result = step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        stop = self.clock()
        del result
        self.loaded.between_steps()
        return stop - start

    def first(self, quantity: str) -> dict[str, Any]:
        """Run a step for the first time: warm-up, memory and value."""
        self.quantity = None
        names = QUANTITIES[quantity].parts if self.name == "backpack" else ()
        self.parts = {name: self.loaded.prepare(QUANTITIES[name]) for name in names}
        # the last one, because its results are those that release() forgets
        self.step = self.loaded.prepare(QUANTITIES[quantity])

        def run() -> tuple[float, int, Any]:
            start = time.perf_counter()
            results, peak = self.memory(self.step)
            seconds = time.perf_counter() - start
            prints = {}
            if not QUANTITIES[quantity].random:
                prints = {name: fingerprint(values) for name, values in results.items()}
            return seconds, peak, prints

        seconds, peak, value = self._run(run)
        if seconds < 1:
            # without what is set up once
            seconds, second, _ = self._run(run)
            peak = min(peak, second)
        self.quantity = quantity
        plain = self.seconds(self.loaded.plain)
        return {
            "seconds": seconds,
            "plain": plain,
            "bytes": peak,
            "plain_bytes": self.plain_bytes,
            "value": value,
        }

    def round(self, quantity: str) -> dict[str, Any]:
        """Time a plain pass and a step in turn; of a set of extensions, its parts as well."""
        if quantity != self.quantity:
            self.first(quantity)
        # by the clock, not by the time of the first step: a process that waited has cold caches
        steps = {"plain": self.loaded.plain, "seconds": self.step, **self.parts}
        times: dict[str, list[float]] = {name: [] for name in steps}
        stop = time.perf_counter() + ROUND_SECONDS * len(steps) / 2
        for _ in range(MAX_REPEATS):
            for name, step in steps.items():
                times[name].append(self.seconds(step))
            if time.perf_counter() > stop:
                break
        # the lower quartile: what others do on the machine only ever adds time
        found = {name: sorted(each)[len(each) // 4] for name, each in times.items()}
        parts = {name: found[name] for name in self.parts}
        return {"plain": found["plain"], "seconds": found["seconds"], "parts": parts}

    def answer(self, job: Job) -> dict[str, Any]:
        """Do a job; an error becomes its first line. One of memory is a limit of the machine."""
        try:
            self.load(job.problem)
            return self.first(job.quantity) if job.first else self.round(job.quantity)
        except NotOffered as error:
            return {"absent": str(error)}
        except NotImplementedError as error:
            return {"absent": first_line(error)}
        except Exception as error:
            return {"limit" if is_of_memory(error) else "error": first_line(error)}


def is_of_memory(error: Exception) -> bool:
    """Whether there was not enough memory: on a CPU, torch says so in words alone."""
    kinds = MemoryError, torch.OutOfMemoryError
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    """Return name and first line of an error, without paths."""
    lines = str(error).strip().splitlines() or [""]
    text = re.sub(r"(/[^\s:'\"/]*){2,}/", "", lines[0])
    return f"{type(error).__name__}: {text}"[:240]


def check_origin(library: str, directory: str | None) -> None:
    """Make sure that the library is the one that is meant."""
    if library not in ("backpack", "upstream"):
        return
    import backpack

    found = os.path.dirname(os.path.dirname(os.path.abspath(backpack.__file__)))
    if not os.path.samefile(found, directory or os.getcwd()):
        raise ImportError(f"{library} is not the library that was found first")


class Serves(Protocol):
    """What answers the parent's jobs."""

    def answer(self, job: Any) -> dict[str, Any]:
        """Do a job; an error becomes its first line."""


def main(make: Callable[[str, str, str], Serves] = Worker) -> None:
    """Answer jobs until the parent has gone.

    Args:
        make: Called with library, device and clock.
    """
    fd, library, device, threads, clock, limit, directory = sys.argv[1:]
    torch.set_num_threads(int(threads))
    if int(limit):
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
    connection = Connection(int(fd))
    try:
        check_origin(library, directory)
        worker = make(library, device, clock)
    except Exception as error:
        connection.send({"absent": first_line(error)})
        return
    connection.send({"ready": True})
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(worker.answer(job))


if __name__ == "__main__":
    main()
