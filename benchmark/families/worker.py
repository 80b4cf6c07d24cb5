"""The process of one library."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

from torch.nn import functional as F

from benchmark.families.contestants import CONTESTANTS, Step
from benchmark.families.works import ALL, WORKS, Work, data_set
from benchmark.libraries import NotOffered
from benchmark.problems import Problem
from benchmark.worker import ROUND_SECONDS, Memory, fingerprint, first_line, main

# Steps that take longer run once in a round.
MAX_REPEATS = 20


@dataclass(frozen=True)
class Job:
    """What the parent asks for: the first step, or a round."""

    work: str
    problem: str
    contestant: str
    first: bool


def plain_pass(problem: Problem, work: Work) -> Step:
    """Return the forward and backward passes of the plain model, over the same data."""
    model, data = problem.make(), data_set(problem, work.batches)

    def step() -> dict[str, Any]:
        for X, y in data:
            F.cross_entropy(model(X), y).backward()
        model.zero_grad()
        return {}

    return step


class FamilyWorker:
    """Serves the requests for one library."""

    def __init__(self, library: str, device: str, clock: str):
        self.clock = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
        self.memory = Memory(device)
        self.cell: tuple[str, str] | None = None
        self.steps: dict[str, Step] = {}

    def load(self, job: Job) -> None:
        """Prepare a contestant; forget the last problem."""
        if self.cell != (job.work, job.problem):
            self.cell, self.steps = (job.work, job.problem), {}
            gc.collect()
        problem, work = ALL[job.problem], WORKS[job.work]
        if "plain" not in self.steps:
            self.steps["plain"] = plain_pass(problem, work)
            self.steps["plain"]()
        if job.contestant not in self.steps:
            make = CONTESTANTS[job.work, job.contestant].make
            self.steps[job.contestant] = make(problem, work)

    def seconds(self, name: str) -> float:
        """Time a step; what it returns is freed after the clock has stopped."""
        start = self.clock()
        values = self.steps[name]()
        stop = self.clock()
        del values
        return stop - start

    def first(self, job: Job) -> dict[str, Any]:
        """Run a contestant's steps that are not timed: warm-up, memory and values."""
        step = self.steps[job.contestant]
        start = time.perf_counter()
        values, peak = self.memory(step)
        prints = {name: fingerprint(value) for name, value in values.items()}
        del values
        seconds = time.perf_counter() - start
        peak = min(peak, self.memory(step)[1])  # without what is set up once
        plain = self.memory(self.steps["plain"])[1]
        return {"seconds": seconds, "bytes": peak, "plain_bytes": plain, "value": prints}

    def round(self, job: Job) -> dict[str, Any]:
        """Time a plain pass and a step in turn."""
        times: dict[str, list[float]] = {"plain": [], job.contestant: []}
        stop = time.perf_counter() + ROUND_SECONDS
        for _ in range(MAX_REPEATS):
            for name, each in times.items():
                each.append(self.seconds(name))
            if time.perf_counter() > stop:
                break
        # the lower quartile: what others do on the machine only ever adds time
        plain, seconds = (sorted(each)[len(each) // 4] for each in times.values())
        return {"plain": plain, "seconds": seconds}

    def answer(self, job: Job) -> dict[str, Any]:
        """Do a job; an error becomes its first line."""
        try:
            self.load(job)
            return self.first(job) if job.first else self.round(job)
        except NotOffered as error:
            return {"absent": str(error)}
        except Exception as error:
            return {"error": first_line(error)}


if __name__ == "__main__":
    main(FamilyWorker)
