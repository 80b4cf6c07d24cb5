"""What a ``forward`` does to attributes, in evaluations that are no part of the program: undone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module

from backpack.core.record.generators import is_array, putting_back
from backpack.core.record.module_state import PLAIN, added

COLLECTIONS = (list, deque, dict, set, bytearray)
# Tensors and arrays with their copies, by id; None if they are not copied.
Copies = dict[int, tuple[Any, Any]]
# What undoes changes of collections and generators, by their id.
Undo = dict[int, Callable[[], object]]


@contextmanager
def attributes_kept(module: Module, saved: dict[str, Any] | None = None) -> Iterator[None]:
    """Call the module without hooks of users, and undo what its ``forward`` does to attributes.

    Tensors and arrays are replaced by copies, which the graph of the evaluation may keep. What is
    ``saved`` for a call tells other evaluations of it whether any is changed in place.
    """
    saved = {} if saved is None else saved
    states = [(m, vars(m), dict(vars(m))) for m in module.modules()]
    copies: Copies | None = {} if saved.get("changes tensors", True) else None
    undo: Undo = {}
    # past all hooks, those of all modules included, and past what was compiled with them
    vars(module).update(_call_impl=module.forward, _compiled_call_impl=None)
    try:
        for m, own, _ in states:
            own.update({name: _lent(value, undo, copies) for name, value in added(m).items()})
        yield
    finally:
        for _, own, before in states:  # never empty: passes of other threads look at all calls
            own.update(before)
            for name in own.keys() - before.keys():
                del own[name]
        for put_back in undo.values():
            put_back()
        if copies is not None:
            saved.setdefault("changes tensors", any(map(_differ, copies.values())))


def _lent(value: Any, undo: Undo, copies: Copies | None) -> Any:
    """Return what takes the place of a value; note how to undo what happens to it."""
    if type(value) in PLAIN or id(value) in undo:
        return value
    is_tensor = type(value) is Tensor and not value.requires_grad
    if is_tensor or is_array(value):
        if copies is None:
            return value
        return copies.setdefault(id(value), (value, value.clone() if is_tensor else copy(value)))[1]
    if isinstance(value, tuple):
        entries = [_lent(x, undo, copies) for x in value]
        is_same = all(one is other for one, other in zip(entries, value, strict=True))
        return value if is_same else getattr(value, "_make", type(value))(entries)
    if isinstance(value, COLLECTIONS):
        undo[id(value)] = partial(_refill, value, copy(value))
        if isinstance(value, dict):
            value.update({key: _lent(x, undo, copies) for key, x in value.items()})
        elif not PLAIN.issuperset(map(type, value)):
            entries = [_lent(x, undo, copies) for x in value]
            _refill(value, entries)
    elif put_back := putting_back(value):
        undo[id(value)] = put_back
    return value


def _refill(collection: Any, entries: Any) -> None:
    collection.clear()
    is_sequence = isinstance(collection, list | deque | bytearray)
    (collection.extend if is_sequence else collection.update)(entries)


def _differ(copies: tuple[Any, Any]) -> bool:
    was, now = copies
    if isinstance(now, Tensor):
        return now._version > 0
    return was.shape != now.shape or was.tobytes() != now.tobytes()
