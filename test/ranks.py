"""Processes for tests: each imports PyTorch once and runs many programs of one rank."""

from __future__ import annotations

import atexit
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

import pytest

Job = Callable[[], None]
# How long processes may take to import what a program needs, in seconds: the machine may be busy.
START = 240


class _Rank:
    """A process that waits for programs."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,))
        self.process.start()
        other.close()

    def answer(self) -> str | None:
        """What has gone wrong; an end of the process without an error is what a program wants."""
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            return None if code == 0 else f"The process has ended with exit code {code}."

    def end(self) -> None:
        self.pipe.close()  # which it waits for, unless it hangs
        self.process.kill()
        self.process.join()


# By number: DTensor keeps what it has found out for a mesh, and with it the rank of a process.
_ranks: dict[int, _Rank] = {}


def _serve(pipe: Connection) -> None:
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        pipe.send(None)  # it has imported what the program needs
        pipe.recv()  # so have the others
        wrong = None
        try:
            job()
        except BaseException:  # also the end of the interpreter that a program asks for
            wrong = traceback.format_exc()
        pipe.send(wrong)


@atexit.register
def _end_all() -> None:
    while _ranks:
        _ranks.popitem()[1].end()


def run_on_ranks(jobs: Sequence[Job], within: float) -> None:
    """Run a program on each of several processes.

    A process has the same rank in all of them. It is new where the last program has ended it, or
    was wrong.

    Args:
        jobs: The program of each process.
        within: How long they may take once all have imported what it needs, in seconds.

    Raises:
        pytest.fail.Exception: With the traceback of the first program that fails, or if the time is
            over.
    """
    _ranks.update({number: _Rank() for number in range(len(jobs)) if number not in _ranks})
    for number, job in enumerate(jobs):
        _ranks[number].pipe.send(job)
    _await(len(jobs), START)
    for number in range(len(jobs)):
        _ranks[number].pipe.send("all are here")
    _await(len(jobs), within)
    for number in range(len(jobs)):
        if not _ranks[number].process.is_alive():
            del _ranks[number]


def _await(count: int, within: float) -> None:
    """Wait for what each process says, first that it is ready, then how its program has ended."""
    waiting = {_ranks[number].pipe: number for number in range(count)}
    deadline = time.monotonic() + within
    while waiting:
        ready = wait(list(waiting), max(0, deadline - time.monotonic()))
        if not ready:
            _end_all()
            pytest.fail("the processes hang")
        for pipe in ready:
            number = waiting.pop(pipe)
            if wrong := _ranks[number].answer():
                _end_all()
                pytest.fail(f"process {number}: {wrong}")
