"""Tensors of a batch, whatever it is: a tensor, a tuple or a dictionary of them, or nested ones."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply a function to all tensors of a batch, and keep the rest as it is.

    They are in tuples, lists and dictionaries, or a ``UserDict`` such as the ``BatchEncoding`` of
    transformers.
    """

    def mapped(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        if isinstance(x, UserDict):  # which is a leaf for torch
            x = copy(x)
            x.data = map_tensors(function, x.data)
        return x

    return tree_map(mapped, batch)


def tensors_of(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch."""
    found: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_tensors(keep, batch)
    return found


def samples_of(batch: Any, count: int, some: slice) -> Any:
    """Return some samples of a batch: those rows of all tensors that have ``count`` of them."""
    return map_tensors(lambda x: x[some] if x.dim() and len(x) == count else x, batch)
