"""Results belong to the caller: none has the memory of a gradient, an activation or another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_count: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]


def _users(tensor: Tensor) -> int:
    """Count the tensors that look at a tensor's memory, and the object that tells."""
    storage = tensor.untyped_storage()
    return _count(storage._cdata)


_ALONE = _users(torch.empty(1))  # the tensor lives while it is counted


def owned(tensor: Tensor) -> Tensor:
    """Return a tensor if nobody else has its memory, and it may be changed in place, else a copy.

    It is to be the only name of a tensor that was detached: another name of the same tensor goes
    unnoticed. One with a graph is copied, because the graph may have stored it.
    """
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    if is_plain and not tensor.requires_grad:
        storage = tensor.untyped_storage()
        if _count(storage._cdata) == _ALONE:
            is_expanded = torch._debug_has_internal_overlap(tensor) == 1
            return tensor.contiguous() if is_expanded else tensor
    return tensor.clone(memory_format=torch.contiguous_format) if is_plain else tensor.clone()
