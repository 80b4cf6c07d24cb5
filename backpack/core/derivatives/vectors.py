"""Many vectors at once: one tensor for all, or one for each of several inputs or outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from backpack.core.types import Mats

# Size of intermediate tensors. On a CPU, large ones are slow: their memory is fresh, and no cache
# holds them. Elsewhere, many small operations are.
ENTRIES_ON_CPU = 2**19
ENTRIES_ELSEWHERE = 2**25


def first_of(mats: Mats) -> Tensor:
    """Return the first tensor of what is one, or several with None (for zero) among them."""
    return mats if isinstance(mats, Tensor) else next(mat for mat in mats if mat is not None)


def listed(mats: Any) -> list[Any]:
    """List what is one tensor, or several with None among them."""
    return [mats] if isinstance(mats, Tensor) else list(mats)


def map_vectors(function: Callable[[Tensor], Tensor], mat: Tensor) -> Tensor:
    """Map each of V vectors, ``[V, *in] -> [V, *out]``, in slices whose tensors are small."""
    entries = ENTRIES_ON_CPU if mat.device.type == "cpu" else ENTRIES_ELSEWHERE
    size = max(1, entries // max(1, mat[:1].numel()))
    if size >= len(mat):
        return function(mat)
    first = function(mat[:size])
    result = first.new_empty(len(mat), *first.shape[1:])
    result[:size] = first
    for i in range(size, len(mat), size):
        result[i : i + size] = function(mat[i : i + size])
    return result
