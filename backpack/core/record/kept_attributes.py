"""What a ``forward`` does to attributes, in evaluations that are no part of the program: undone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core.features import hooks_of_saved_tensors
from backpack.core.record.compiler import in_transform
from backpack.core.record.generators import is_array, putting_back
from backpack.core.record.kept_parameters import differing
from backpack.core.record.module_state import PLAIN, added
from backpack.core.record.weights import TENSORS, storage_of, version_of

T = TypeVar("T")
COLLECTIONS = (list, deque, dict, set, bytearray)


class Copy(NamedTuple):
    """A tensor or an array, a copy of it, and where the entries of the copy are."""

    of: Any
    value: Any
    storage: int

    @classmethod
    def make(cls, x: Any) -> Copy:
        """Copy a tensor, with its place in the graph, or an array."""
        value = x.clone() if isinstance(x, Tensor) else copy(x)
        return cls(x, value, storage_of(value) if isinstance(x, Tensor) else 0)


# Copies of tensors and arrays by id; None if they are not copied.
Copies = dict[int, Copy]
# What undoes changes of collections and generators, by their id.
Undo = dict[int, Callable[[], object]]


@contextmanager
def attributes_kept(module: Module, saved: dict[str, Any] | None = None) -> Iterator[None]:
    """Call the module without hooks of users, and undo what its ``forward`` does to attributes.

    Nor do hooks of saved tensors see it, such as those of a checkpoint, which counts them.

    Tensors and arrays are replaced by copies, which the graph of the evaluation may keep. What is
    ``saved`` for a call tells other evaluations of it whether any is changed in place.
    """
    states = [(m, vars(m), dict(vars(m))) for m in module.modules()]
    copies: Copies | None = {} if saved is None or saved.get("changes tensors", True) else None
    undo: Undo = {}
    forward, called, thread = module.forward, module._call_impl, get_ident()

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        return (forward if get_ident() == thread else called)(*args, **kwargs)

    # past all hooks, those of all modules included, and past what was compiled with them
    vars(module).update(_call_impl=evaluated, _compiled_call_impl=None)
    try:
        for m, own, _ in states:
            own.update({name: _lent(value, undo, copies) for name, value in added(m).items()})
        with _hidden():
            yield
    finally:
        for _, own, before in states:  # never empty: passes of other threads look at all calls
            own.update(before)
            for name in own.keys() - before.keys():
                del own[name]
        for put_back in undo.values():
            put_back()
        if saved is not None and "changes tensors" not in saved and not in_transform():
            saved["changes tensors"] = bool(changed_copies(copies or {}))


def _hidden() -> AbstractContextManager[Any]:
    """Hide what autograd saves from hooks; transforms of torch.func know of none."""
    if hooks_of_saved_tensors(True) is None or in_transform():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)


def _lent(value: Any, undo: Undo, copies: Copies | None) -> Any:
    """Return what takes the place of a value; note how to undo what happens to it."""
    if type(value) in PLAIN or id(value) in undo:
        return value
    is_tensor = type(value) is Tensor and not value.requires_grad
    if is_tensor or is_array(value):
        if copies is None:
            return value
        if id(value) not in copies:
            copies[id(value)] = Copy.make(value)
        return copies[id(value)].value
    if isinstance(value, tuple):
        entries = [_lent(x, undo, copies) for x in value]
        is_same = all(one is other for one, other in zip(entries, value, strict=True))
        return value if is_same else getattr(value, "_make", type(value))(entries)
    if isinstance(value, COLLECTIONS):
        undo[id(value)] = partial(refill, value, copy(value))
        if isinstance(value, dict):
            value.update({key: _lent(x, undo, copies) for key, x in value.items()})
        elif not PLAIN.issuperset(map(type, value)):
            entries = [_lent(x, undo, copies) for x in value]
            refill(value, entries)
    elif put_back := putting_back(value):
        undo[id(value)] = put_back
    return value


def refill(collection: Any, entries: Any) -> None:
    """Replace all that is in a collection."""
    collection.clear()
    is_sequence = isinstance(collection, list | deque | bytearray)
    (collection.extend if is_sequence else collection.update)(entries)


def changed_copies(copies: Mapping[T, Copy]) -> set[T]:
    """Return which copies were changed, in their ``data`` as well, which torch does not count."""
    found, compared = set(), {}
    for key, (was, now, storage) in copies.items():
        if is_array(now):
            differs = was.shape != now.shape or was.tobytes() != now.tobytes()
        else:
            differs = version_of(now) > 0 or storage_of(now) != storage
        if differs:
            found.add(key)
        elif type(now) in TENSORS and now.layout is torch.strided:
            compared[key] = now, was
    return found.union(differing(compared))
