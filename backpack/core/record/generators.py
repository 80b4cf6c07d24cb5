"""Random numbers of functions that are evaluated again: not those of the program."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import count
from threading import RLock, active_count
from time import monotonic
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, Final, TypeVar

import torch
from torch import Generator, Tensor
from torch.nn import Parameter

from backpack.core.record.compiler import Mode

T = TypeVar("T")

# If a generator is used during so many evaluations in a row, and for so many seconds, it is taken
# that the function uses it, and not another thread.
TRIES: Final = 3
PATIENCE: Final = 0.05
_swapping: Final = RLock()
_OF_C: Final = (BuiltinFunctionType, MethodDescriptorType)


def evaluated_apart(function: Callable[[], T]) -> tuple[T, bool]:
    """Return the value of a function, and whether it draws random numbers: other ones each time.

    Nothing is drawn from the generators of torch, Python and NumPy, which all threads share: what
    it draws is put back. If it draws nothing, they are left alone: to put back a state would give
    another thread its numbers twice.
    """
    first = before = generator_states()
    try:
        for _ in _tries():
            error = None
            try:
                value = function()
            except Exception as raised:
                error = raised
            after = generator_states()
            if after == before and (before is first or not _sets(function, first)):
                break
            before = after
        else:
            set_generators(first)
            if error is None:
                return value, True
        if error is not None:
            raise error
        return value, False
    finally:
        error = None  # its traceback leads here


def _tries() -> Iterator[int]:
    """Count evaluations: one is enough if there is no other thread."""
    end = monotonic() + PATIENCE
    for done in count():
        if done and (active_count() == 1 or (done >= TRIES and monotonic() > end)):
            return
        yield done


def evaluated_alike(function: Callable[[], T]) -> T:
    """Evaluate a function apart, with the same random numbers of torch each time."""

    def seeded() -> T:
        with OwnGenerators():
            return function()

    value, is_random = evaluated_apart(function)
    return evaluated_apart(seeded)[0] if is_random else value


class OwnGenerators(Mode):
    """Draws the random numbers of this thread from generators that are seeded here.

    Those inside of operators that torch does not know, and of Python and NumPy, are the program's.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int = 0):
        super().__init__()
        self._seed = seed
        self._own: dict[torch.device, Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        own = self._generator(args, kwargs) if _may_draw(func) else None
        return func(*args, **kwargs) if own is None else _drawn_from(own, func, args, kwargs)

    def _generator(self, args: Sequence[Any], kwargs: Any) -> Generator | None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if any(type(x) not in (Tensor, Parameter) for x in tensors):
            return None
        device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
        if device.type not in ("cpu", "cuda", "xpu"):
            return None
        if device.type != "cpu" and device.index is None:
            backend = torch.get_device_module(device)
            device = torch.device(device.type, backend.current_device())
        if device not in self._own:
            self._own[device] = Generator(device).manual_seed(self._seed)
        return self._own[device]


@cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@cache
def draws_nothing(function: Callable[..., Any] | str) -> bool:
    """Whether a function is an operator of torch (a method of that name) declared to never draw."""
    if isinstance(function, str):
        function = getattr(Tensor, function, draws_nothing)
    name = getattr(function, "__name__", "")
    own = [getattr(space, name, None) for space in (torch, Tensor, torch._C._nn)]
    packet = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    if packet is None or function not in own or not isinstance(function, _OF_C):
        return False
    return not any(_may_draw(getattr(packet, overload)) for overload in packet.overloads())


def _drawn_from(own: Generator, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
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
    # a kernel that takes none: for as long as it runs, torch's generator has the state of ours,
    # which other threads may see
    shared = torch.default_generator
    if own.device.type != "cpu":
        shared = torch.get_device_module(own.device).default_generators[own.device.index]
    with _swapping:
        state = shared.get_state()
        try:
            shared.set_state(own.get_state())
            result = func(*args, **kwargs)
            own.set_state(shared.get_state())
        finally:
            shared.set_state(state)
    return result


def _sets(function: Callable[[], Any], states: tuple[Any, ...]) -> bool:
    """Whether a function that leaves generators as it finds them now would set those of before."""
    now = generator_states()
    set_generators(states)
    try:
        function()
        return have_changed(states, generator_states())
    finally:
        set_generators(now)


def generator_states() -> tuple[Any, ...]:
    """Return the states of the generators of Python, NumPy, and torch on each kind of device."""
    of_numpy, numpy = None, sys.modules.get("numpy")
    if numpy is not None:
        of_numpy = pickle.dumps(numpy.random.get_state(legacy=False))
    of_torch = [
        [_in_bytes(generator.get_state()) for generator in own] or None for own in _generators()
    ]
    return (random.getstate(), of_numpy, *of_torch)


def _in_bytes(state: Tensor) -> bytes:
    """Copy a state, on the CPU, without NumPy, which need not be installed."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def have_changed(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether generators that were in use before have other states."""
    return not all(one in (None, other) for one, other in zip(before, after, strict=True))


def _generators() -> list[Sequence[Generator]]:
    """List the generators of torch, of each kind of device: none where none is in use."""
    found: list[Sequence[Generator]] = [[torch.default_generator]]
    for backend in (torch.cuda, torch.xpu):
        found.append(backend.default_generators if backend.is_initialized() else ())
    mps = torch.backends.mps.is_available()
    found.append([torch.mps._get_default_mps_generator()] if mps else ())
    return found


def putting_back(value: Any) -> Callable[[], object] | None:
    """Return what gives a generator the state that it has now; None for anything else."""
    if isinstance(value, Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state(legacy=False))
    if isinstance(value, numpy.random.Generator):
        value = value.bit_generator
    if isinstance(value, numpy.random.BitGenerator):
        return partial(setattr, value, "state", value.state)
    return None


def is_array(value: Any) -> bool:
    """Whether something is an array of NumPy, but none that is mapped into memory."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def set_generators(states: tuple[Any, ...]) -> None:
    """Put back the states of the generators."""
    of_python, of_numpy, *of_torch = states
    random.setstate(of_python)
    if of_numpy is not None:
        numpy: Any = sys.modules["numpy"]
        numpy.random.set_state(pickle.loads(of_numpy))
    for generators, known in zip(_generators(), of_torch, strict=True):
        for generator, state in zip(generators, known or (), strict=False):  # the rest is new
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
