"""Functions that are evaluated again draw none of the program's random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from threading import Lock
from typing import Any, Final, TypeVar

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

# Times until it is no other thread that draws from Python's and NumPy's generators meanwhile.
TRIES: Final = 5
_SWAPPING: Final = Lock()


class OwnGenerators(TorchDispatchMode):
    """Draw the random numbers of this thread's functions from generators that are seeded here.

    All threads share torch's own generators: numbers that are drawn and given back would come twice
    in another thread.

    Attributes:
        have_drawn: Whether there were random numbers.
    """

    def __init__(self, seed: int = 0):
        """Start anew with a seed."""
        super().__init__()
        self.have_drawn = False
        self._seed = seed
        self._own: dict[torch.device, Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        if not _may_draw(func):
            return func(*args, **kwargs)
        device = _device(args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        own = self._generator(device)
        before = own.get_state()
        result = _drawn_from(own, func, args, kwargs)
        self.have_drawn |= not torch.equal(before, own.get_state())
        return result

    def _generator(self, device: torch.device) -> Generator:
        if device not in self._own:
            self._own[device] = Generator(device).manual_seed(self._seed)
        return self._own[device]


@cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device of a function's result."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _drawn_from(own: Generator, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function that may draw, with a generator in place of the one that it would use."""
    name = func._overloadname
    with_generator = "generator" if name == "default" else f"{name}_generator"
    func = getattr(func.overloadpacket, with_generator, func)
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        place = names.index("generator")
        if place < len(args):
            return func(*args[:place], own, *args[place + 1 :], **kwargs)
        return func(*args, **{**kwargs, "generator": own})
    # a kernel that takes none: for its time alone, torch's generator continues the own one
    shared = torch.default_generator
    if own.device.type != "cpu":
        shared = torch.get_device_module(own.device).default_generators[own.device.index]
    with _SWAPPING:
        state = shared.get_state()
        try:
            shared.set_state(own.get_state())
            result = func(*args, **kwargs)
            own.set_state(shared.get_state())
        finally:
            shared.set_state(state)
    return result


def evaluated_apart(function: Callable[[], T]) -> tuple[T, bool]:
    """Evaluate a function whose random numbers are the same each time, and not the program's.

    Those of torch come from :class:`OwnGenerators`. Those of Python and NumPy, which have one
    generator for all threads, are put back: if no try was without, as another thread may have drawn
    them.

    Returns:
        Its value, and whether it draws random numbers.
    """
    before = first = _shared_states()
    for _ in range(TRIES):
        own, error = OwnGenerators(), None
        try:
            with own:
                value = function()
        except Exception as raised:
            error = raised
        after = _shared_states()
        if after == before:
            break
        before = after
    else:
        own.have_drawn = True
        _put_back(first)
    if error is not None:
        raise error
    return value, own.have_drawn


def _shared_states() -> list[Any]:
    """Return the states of the generators of Python and, if it is there, NumPy."""
    states: list[Any] = [random.getstate()]
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states.append((kind, keys.tobytes(), *rest))
    return states


def _put_back(states: Sequence[Any]) -> None:
    """Set the states of the generators of Python and NumPy."""
    random.setstate(states[0])
    for kind, keys, *rest in states[1:]:
        numpy = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))
