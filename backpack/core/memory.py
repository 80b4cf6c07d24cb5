"""Memory for large results on a CPU.

The first access to fresh memory takes longer than computing the entries. Two things help: to write
over the result of the backward pass before, where nobody else has it; else, to ask for huge pages.
A backpropagation in many slices has the opposite problem: what the allocator keeps adds up.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from math import prod
from typing import Any
from weakref import getweakrefcount

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core import fast
from backpack.core.types import Extension

REUSED_MEMORY = fast.path(
    "reused memory", "A large result is written over that of the backward pass before."
)
HUGE_PAGES = fast.path("huge pages", "Memory of large results is asked for in huge pages.")

# Bytes. Below this size, the allocator mostly has memory at hand that was used before.
LARGE = 2**20
# Bytes. A smaller tensor may hold none of the huge pages, of 2 MiB.
HOLDS_HUGE_PAGES = 2**22

_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
# What :func:`reuse` has taken, by id, until :func:`clear`: of the parameter or the propagation
# that a pass is at, which begins and ends in one thread.
_reusable: ContextVar[dict[int, Tensor] | None] = ContextVar("backpack_reusable", default=None)


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Allocate a tensor of the precision and device of ``like``, to be written as a whole."""
    spare = _reusable.get() or {}
    for key, tensor in spare.items():
        same = tensor.dtype == like.dtype and tensor.device == like.device
        if same and tensor.numel() == prod(shape):
            del spare[key]
            return tensor.resize_(shape)  # no view, which would keep both alive
    tensor = like.new_empty(shape)
    is_huge = tensor.is_cpu and tensor.nbytes >= HOLDS_HUGE_PAGES
    if is_huge and _madvise is not None and HUGE_PAGES.is_on:
        page = mmap.PAGESIZE
        start = -(-tensor.data_ptr() // page) * page
        end = (tensor.data_ptr() + tensor.nbytes) // page * page
        # an advice: where it is not taken (no such pages), nothing changes
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)
    return tensor


def product(one: Tensor, other: Tensor) -> Tensor:
    """Multiply entries (with broadcasting), for a large result."""
    if torch.is_grad_enabled() or one.dtype != other.dtype:
        return one * other
    axes = itertools.zip_longest(reversed(one.shape), reversed(other.shape), fillvalue=1)
    shape = [b if a == 1 else a for a, b in axes]
    return torch.mul(one, other, out=empty(shape[::-1], one))


def reuse(parameters: Iterable[Parameter], exts: Iterable[Extension]) -> bool:
    """Take large results that will be replaced, and nobody else has, for :func:`empty`, if any.

    Return whether some were taken: see :func:`clear`.
    """
    if torch.is_grad_enabled() or not REUSED_MEMORY.is_on:
        return False
    is_holding = False
    for p, ext in itertools.product(parameters, exts):
        name, attributes = ext.savefield, vars(p)
        value = attributes.get(name)
        for part in value if type(value) is list else (value,):
            if type(part) is Tensor and part.is_cpu and part.nbytes >= LARGE:
                break
        else:
            continue
        del value, part  # names of what nobody else is to have
        own = {name: attributes.pop(name)}  # no thread can take it any more
        parts = own if type(own[name]) is Tensor else _parts(own, name)
        for key in list(parts):
            if type(parts[key]) is not Tensor or not _is_alone(parts, key):
                continue
            result = parts.pop(key)
            vars(result).clear()  # what belongs to the result that it was
            spare = _reusable.get()
            if spare is None:
                _reusable.set(spare := {})
            spare[id(result)] = result
            is_holding = True
        attributes.update(own)  # what others have
    return is_holding


def _parts(own: dict[Any, Any], name: str) -> dict[Any, Any]:
    """Take a list apart, unless somebody else has it."""
    is_alone = _holders(own, name) == _ONE_HOLDER
    return dict(enumerate(own.pop(name))) if is_alone else {}


def _holders(attributes: Mapping[str, Any], name: str) -> int:
    value = attributes[name]
    return sys.getrefcount(value)


_ONE_HOLDER = _holders({"name": []}, "name")


def clear() -> None:
    """Free what was taken in this thread and not used."""
    _reusable.set(None)


def release() -> None:
    """Return freed memory between blocks in use to the system, where the allocator can."""
    if _malloc_trim is not None:
        _malloc_trim(ctypes.c_size_t(0))


def _references(attributes: MutableMapping[str, Any], name: str) -> tuple[int, ...]:
    """Count who has a tensor and its memory, in Python and in C++ (such as an autograd graph)."""
    tensor = attributes[name]
    storage = tensor.untyped_storage()
    in_cpp: Any = torch._C
    return (
        sys.getrefcount(tensor),
        sys.getrefcount(storage),
        tensor._use_count(),
        in_cpp._storage_Use_Count(storage._cdata),
    )


_NOBODY_ELSE = _references({"name": torch.empty(1)}, "name")


def _is_alone(attributes: MutableMapping[str, Any], name: str) -> bool:
    """Whether nobody else has a tensor: no name, view, graph or array, and no other process."""
    tensor = attributes[name]
    fresh = tensor.grad_fn is None and not tensor.requires_grad and tensor.is_contiguous()
    hidden = tensor.untyped_storage().is_shared() or getweakrefcount(tensor)
    del tensor
    return fresh and not hidden and _references(attributes, name) == _NOBODY_ELSE
