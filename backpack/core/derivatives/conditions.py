"""Whether what was found out about a module's call holds for another one: its state and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core.record.calls import Call
from backpack.custom_module.function_module import FunctionModule

# Attributes that are the same if they compare so, and those of each module.
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_OF_EACH = frozenset(vars(Module())) - {"training"}

# What was found out of modules: by what it depends on, their states and what it is.
_KNOWN: WeakKeyDictionary[Module, dict[Any, tuple[list[Any] | None, bool | None]]] = (
    WeakKeyDictionary()
)


class _Same:
    """A weak reference to something that has to be the same object, in the same version."""

    __slots__ = ("target", "version")

    def __init__(self, target: Any):
        self.target = ref(target)
        self.version = target._version if isinstance(target, Tensor) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self.version != other.version:
            return False
        target = self.target()
        return target is not None and other.target() is target

    __hash__ = None  # type: ignore[assignment]


class _CannotTell(Exception):
    """An object may change unseen, such as an array or a closure."""


def _frozen(x: Any, depth: int = 6) -> Any:
    """Return what is equal for an object as long as nothing in it has changed; else raise."""
    kind = type(x)
    if isinstance(x, (*_PLAIN, type, Enum)):
        return kind, x
    if isinstance(x, Tensor):
        try:
            return kind, _Same(x)
        except RuntimeError as error:  # without version
            raise _CannotTell from error
    if not depth:
        raise _CannotTell
    if isinstance(x, FunctionType | BuiltinFunctionType):
        if getattr(x, "__closure__", None) or getattr(x, "__self__", None) is not None:
            raise _CannotTell
        return kind, x
    if isinstance(x, Mapping):
        return kind, [(_frozen(k, depth - 1), _frozen(v, depth - 1)) for k, v in x.items()]
    if isinstance(x, list | tuple):
        return kind, [_frozen(one, depth - 1) for one in x]
    if kind.__module__ == "builtins" or isinstance(x, Module) or not hasattr(x, "__dict__"):
        raise _CannotTell
    if any(vars(cls).get("__slots__") for cls in kind.__mro__):
        raise _CannotTell
    return kind, _frozen(vars(x), depth - 1)


def state_of(module: Module) -> list[Any] | None:
    """Return what may have changed of a module, but for parameters; None if that cannot be told.

    Its attributes, buffers and those of its class, not what ``forward`` reads elsewhere.
    """
    if isinstance(module, FunctionModule):
        return []
    found: list[Any] = []
    try:
        for part in module.modules():
            own = vars(part)
            others = {n: x for n, x in own.items() if n not in _OF_EACH and n[:10] != "_backpack_"}
            found.append(_frozen({**others, **own["_buffers"]}))
            for cls in type(part).__mro__[: type(part).__mro__.index(Module)]:
                values = [x for n, x in vars(cls).items() if n[:2] != "__" and not callable(x)]
                found.append(_frozen([x for x in values if not hasattr(type(x), "__get__")]))
    except _CannotTell:
        return None
    return found


def once(call: Call, key: Any, find: Callable[[], bool | None]) -> bool | None:
    """Find something out once for a module, as long as it is in the same state, and a key."""
    found, state = _KNOWN.setdefault(call.module, {}), state_of(call.module)
    if state is None or key not in found or found[key][0] != state:
        found[key] = state, find()
    return found[key][1]


@dataclass(frozen=True)
class Conditions:
    """What an answer depends on that was found with inputs as they are."""

    values: Mapping[int, Tensor]  # copies of those inputs, by number
    state: list[Any]  # that of the module

    def hold(self, call: Call) -> bool:
        """Whether a call of the same module reads the same values, of the same shapes."""
        for i, value in self.values.items():
            x = call.inputs[i]
            if x.device != value.device or not torch.equal(x.detach(), value):
                return False
        return state_of(call.module) == self.state
