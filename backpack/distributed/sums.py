"""Sums over processes, of which each has all or a part, sent as they are or in low precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

# They have other names from PyTorch 2.14 on.
REDUCE_SCATTER: Any = getattr(
    distributed, "reduce_scatter_single", getattr(distributed, "reduce_scatter_tensor", None)
)
ALL_GATHER: Any = getattr(
    distributed, "all_gather_single", getattr(distributed, "all_gather_into_tensor", None)
)
# The precision that is sent, by the innermost context: backward passes may run in other threads.
_sent: list[torch.dtype] = []


@contextmanager
def reduced_in(dtype: torch.dtype) -> Iterator[None]:
    """Let backward passes send what they sum over processes in a low precision.

    Values are rounded, sent to the process that adds them up in ``float32``, and the sums are
    rounded and sent to all: half the bytes of ``float32`` for ``torch.bfloat16``. Results are the
    same on all processes, in the precision that they have without. Numbers of samples are exact;
    gradients, and products with blocks, are not concerned.

    ``variance`` is a difference: where the mean is much larger than the deviation from it, its
    rounding is larger than the value.

    Args:
        dtype: ``torch.bfloat16``, which has the range of ``float32``.

    Raises:
        ValueError: If it is another precision.
    """
    if dtype is not torch.bfloat16:
        raise ValueError(f"Quantities are reduced in torch.bfloat16 or as they are, got {dtype}.")
    _sent.append(dtype)
    try:
        yield
    finally:
        _sent.pop()


def precision() -> str:
    """Name the precision that is sent, for processes to agree on; nothing if it is that of all."""
    return f" in {_sent[-1]}" if _sent else ""


def exact_total(value: Tensor, groups: Sequence[Any]) -> Tensor:
    """Sum a tensor over processes, in its precision: the sum may be written over it."""
    value = value.contiguous()
    for group in groups:
        distributed.all_reduce(value, group=group)
    return value


def all_reduced(value: Tensor, group: Any) -> Tensor:
    """Sum a vector ``[n]`` over the processes of a group."""
    if not _sent:
        return exact_total(value, (group,))
    size = group.size()
    rows = value.new_zeros(size, -(-len(value) // size))
    rows.view(-1)[: len(value)] = value
    own = _summed(rows, group)
    found = own.new_empty(rows.numel())
    ALL_GATHER(found, own, group=group)
    return found[: len(value)].to(value.dtype)


def reduce_scattered(rows: Tensor, group: Any) -> Tensor:
    """Sum ``[W, n]`` over the W processes of a group, each of which gets its row ``[n]``."""
    if _sent:
        return _summed(rows, group).to(rows.dtype)
    total = rows.new_empty(rows.shape[1])
    REDUCE_SCATTER(total, rows.flatten(), group=group)
    return total


def _summed(rows: Tensor, group: Any) -> Tensor:
    """Return the sum of this process's rows ``[W, n]``, in the precision that is sent."""
    rounded = rows.to(_sent[-1])
    received = torch.empty_like(rounded)
    distributed.all_to_all_single(received, rounded, group=group)
    return received.float().sum(0).to(_sent[-1])
