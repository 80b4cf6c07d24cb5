"""What modules hold while a forward pass is traced: what it changes there is found, and undone."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property, partial
from inspect import getattr_static
from logging import Filterer
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph
from torch.nn import Module

from backpack.core.record.generators import is_array
from backpack.core.record.kept_attributes import COLLECTIONS, refill
from backpack.core.record.module_state import PLAIN
from backpack.core.record.weights import storage_of, version_of

# Bytes of tensors that are copied: of others, changes are found if torch counts them.
SPACE = 1 << 28
# What is not looked into.
UNSEEN = (Tensor, Graph, type, FunctionType, ModuleType, Filterer)
# How many values are looked at that attributes lead to.
MAX_HELD = 10_000


class _Values(NamedTuple):
    """A tensor, the memory that it had, and what was in it; None if that is not copied."""

    tensor: Tensor
    data: Tensor
    version: int
    was: Tensor | None

    def has_changed(self) -> bool:
        """Whether other values are in it, or it has other memory."""
        if version_of(self.tensor) != self.version:
            return True
        if storage_of(self.tensor) != storage_of(self.data):
            return True
        return self.was is not None and not _is_same(self.data, self.was)

    def put_back(self) -> None:
        """Give it the memory and the values that it had."""
        if self.was is not None:
            self.data.copy_(self.was)
        self.tensor.data = self.data


class Held:
    """The attributes of modules, and what these lead to: collections, objects, tensors, arrays.

    Of values, no more than some thousands. What iterators and functions hold is not seen, nor what
    is no matter of what is computed: loggers, and numbers that a ``cached_property`` keeps.
    """

    def __init__(self, modules: Iterable[Module]) -> None:
        self.attributes = [(module, dict(vars(module))) for module in modules]
        self.collections: list[tuple[str, Any, Any, list[Any]]] = []
        self.values: list[tuple[str, _Values]] = []
        self.space = SPACE
        self.objects: list[tuple[Any, set[str]]] = [(m, set(own)) for m, own in self.attributes]
        self._seen: dict[int, Any] = {id(module): module for module, _ in self.attributes}
        for module, attributes in self.attributes:
            for name, value in attributes.items():
                self._note(_called(name, module), value)

    def _note(self, owner: str, value: Any) -> None:
        waiting = [value]
        while waiting and len(self._seen) < MAX_HELD:
            value = waiting.pop()
            if type(value) in PLAIN or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, tuple):
                waiting += value
            elif type(value) is Tensor:
                self._note_values(owner, value)
            elif is_array(value):
                if not value.flags.writeable:  # torch would warn
                    continue
                with suppress(TypeError, ValueError):  # one that no tensor can be made of
                    self._note_values(owner, torch.from_numpy(value))
            elif isinstance(value, COLLECTIONS):
                kind: Any = next(kind for kind in COLLECTIONS if isinstance(value, kind))
                self.collections.append((owner, value, kind(value), _entries(value)))
                waiting += _entries(value)
            elif not isinstance(value, UNSEEN):
                own = getattr(value, "__dict__", None)
                if type(own) is dict:
                    self.objects.append((value, set(own)))
                    waiting.append(own)

    def _note_values(self, owner: str, tensor: Tensor) -> None:
        was = None
        with suppress(RuntimeError):  # of a few kinds, torch copies none
            if storage_of(tensor) and tensor.nbytes <= self.space:
                was = tensor.detach().clone()
                self.space -= tensor.nbytes
        self.values.append((owner, _Values(tensor, tensor.data, version_of(tensor), was)))

    def put_back(self) -> list[str]:
        """Put all back but the constants of a graph; return which attributes have changed."""
        changed = []
        for one, names in self.objects:
            for name in filter(partial(_keeps_number, one), vars(one).keys() - names):
                del vars(one)[name]
        for module, before in self.attributes:
            own = vars(module)
            constants = constants_of(module)
            for name in {**before, **own}:
                is_new = name in constants and name not in before
                if not is_new and own.get(name, self) is not before.get(name, self):
                    changed.append(_called(name, module))
            own.clear()
            own.update({**before, **constants})
        for owner, collection, was, entries in self.collections:
            now = _entries(collection)
            if len(now) != len(entries) or not all(map(operator.is_, now, entries)):
                changed.append(owner)
                refill(collection, was)
        for owner, values in self.values:
            if values.has_changed():
                changed.append(owner)
                values.put_back()
        return list(dict.fromkeys(changed))


def _called(name: str, module: Module) -> str:
    return f"{name!r} of {type(module).__name__}"


def _entries(collection: Any) -> list[Any]:
    return [*collection, *(collection.values() if isinstance(collection, dict) else ())]


def _keeps_number(one: Any, name: str) -> bool:
    """Whether an attribute of an object was computed when it was first read, and is plain."""
    known = getattr_static(type(one), name, None)
    return isinstance(known, cached_property) and type(vars(one)[name]) in PLAIN


def _is_same(one: Tensor, other: Tensor) -> bool:
    try:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    except RuntimeError:  # sparse, without memory, or of a kind that torch does not compare
        return True


def constants_of(root: Module) -> dict[str, Tensor]:
    """Return the constants of a graph, which torch.fx has put into its model."""
    return {name: value for name, value in vars(root).items() if _is_constant(name)}


def take_constants(root: Module) -> dict[str, Tensor]:
    """Return the constants of a graph that is not used, which its model no longer has."""
    constants = constants_of(root)
    for name in constants:
        delattr(root, name)
    return constants


def are_alike(constants: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """Return whether two graphs have equal constants."""
    return constants.keys() == others.keys() and all(
        _is_same(constants[name], others[name]) for name in constants
    )


def _is_constant(name: str) -> bool:
    return name.startswith("_tensor_constant")
