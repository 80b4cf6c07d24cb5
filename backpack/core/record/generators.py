"""Functions that are evaluated again draw none of the program's random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, Final, TypeVar

import torch

T = TypeVar("T")

# If a generator was used during so many evaluations in a row, it was the function, and not another
# thread.
TRIES: Final = 5
_seeding: Final = RLock()


def evaluated_apart(function: Callable[[], T]) -> tuple[T, bool]:
    """Evaluate a function whose random numbers are the same each time, and not the program's.

    All threads share the generators of torch, Python and NumPy. What draws nothing leaves them
    alone: a state that is put back would give another thread its numbers twice. Whatever draws is
    evaluated with a seed, and what it has drawn is put back.

    Returns:
        Its value, and whether it draws random numbers.
    """
    first = before = _states()
    for _ in range(TRIES):
        try:
            value = function()
        except Exception:
            if (after := _states()) == before:
                raise
        else:
            if (after := _states()) == before and (before is first or not _sets(function, first)):
                return value, False
        before = after
    try:
        with seeded():
            return function(), True
    finally:
        _put_back(first)


def _sets(function: Callable[[], Any], states: tuple[Any, ...]) -> bool:
    """Whether a function that leaves generators as it finds them now would set those of before."""
    now = _states()
    _put_back(states)
    function()
    changes = _states() != states
    _put_back(now)
    return changes


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed torch's generators, in one thread at a time, and put back their states.

    Unlike ``torch.manual_seed``, not those of devices that are used later.
    """
    with _seeding:
        generators = _generators()
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _generators() -> list[torch.Generator]:
    """List the generators of torch: of the processor and of the devices that are in use."""
    found = [torch.default_generator]
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            found += backend.default_generators
    if torch.backends.mps.is_available():
        found.append(torch.mps._get_default_mps_generator())
    return found


def _states() -> tuple[Any, ...]:
    """Return the states of the generators of Python, torch and NumPy."""
    of_torch = [generator.get_state().numpy().tobytes() for generator in _generators()]
    of_numpy = None
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        of_numpy = (kind, keys.tobytes(), *rest)
    return random.getstate(), of_torch, of_numpy


def _put_back(states: tuple[Any, ...]) -> None:
    of_python, of_torch, of_numpy = states
    random.setstate(of_python)
    for generator, state in zip(_generators(), of_torch, strict=False):  # others are new
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    if of_numpy is not None:
        numpy: Any = sys.modules["numpy"]
        kind, keys, *rest = of_numpy
        numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))
