"""Memoised results of rules, kept with what the forward pass has stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from backpack.core import fast

MEMOISED = fast.path("memoised results", "A rule keeps what it needs more than once of a call.")
Value = TypeVar("Value")


class Memo(NamedTuple):
    """A result and what it was computed from. Holding the memory keeps its address unique."""

    facts: tuple[Any, ...]
    held: list[Tensor]
    value: Any


def _identity(t: Tensor) -> tuple[Any, ...]:
    has_graph = t.requires_grad and torch.is_grad_enabled()
    version = 0 if t.is_inference() else t._version
    return t.data_ptr(), t.dtype, t.shape, t.stride(), has_graph, version


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors look at the same memory; None is the same as None."""
    if one is None or other is None:
        return one is other
    # the stride of an axis of size 1 means nothing
    return one.shape == other.shape and _identity(one.squeeze()) == _identity(other.squeeze())


def memoise(
    saved: dict[str, Any],
    name: str,
    tensors: Sequence[Tensor | None],
    facts: tuple[Any, ...],
    compute: Callable[[], Value],
) -> Value:
    """Return the latest result of that name if nothing has changed since, else compute it.

    Tensors are recognised by the memory that they look at, as views of it are made anew each time.
    """
    if not MEMOISED.is_on:
        return compute()
    known = [t for t in tensors if t is not None]
    facts += (torch.is_grad_enabled(), *(t is None for t in tensors))
    facts += tuple(map(_identity, known))
    found = saved.get(name)
    if found is None or found.facts != facts:
        saved.pop(name, None)  # its memory is free before the new result takes some
        found = saved[name] = Memo(facts, [t.detach() for t in known], compute())
    return found.value
