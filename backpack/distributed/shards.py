"""What has the shape of a sharded parameter: summed over processes, and placed like it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack.distributed.sums import all_reduced, reduce_scattered


class Piece(NamedTuple):
    """A part of a sum over processes.

    Attributes:
        like: Sharded parameter, a ``DTensor`` ``[*p]``.
        value: ``[*p]``, of this process.
    """

    like: Any
    value: Tensor


def scattered(pieces: Sequence[Piece], groups: Sequence[Any]) -> list[Tensor]:
    """Sum over processes, and return what belongs to the shards of this one.

    One ``reduce_scatter`` for all, and where several processes have the same shards an
    ``all_reduce``.

    Args:
        pieces: What to sum, of one precision and device.
        groups: Processes that have the shards; then those that have the same ones, if there are.

    Returns:
        ``DTensor`` s, placed like the parameters.
    """
    shards, *replicas = groups
    count = shards.size()
    chunks = [_chunks(piece, count) for piece in pieces]
    sizes = [own[0].numel() for own in chunks]  # the first is the longest
    first = pieces[0].value
    rows = first.new_zeros(count, sum(sizes))
    for r, row in enumerate(rows):
        for own, place in zip(chunks, row.split(sizes), strict=True):
            place[: own[r].numel()] = own[r].reshape(-1)
    total = reduce_scattered(rows, shards)
    for group in replicas:
        total = all_reduced(total, group)
    return [
        placed(own[shards.rank()].numel(), flat, piece.like)
        for own, flat, piece in zip(chunks, total.split(sizes), pieces, strict=True)
    ]


def whole(tensor: Tensor) -> Tensor:
    """Return all entries of a tensor that may be sharded: on all processes, which have to ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "full_tensor")


def own_part(value: Tensor, like: Tensor) -> Tensor:
    """Return the part ``[*p]`` that this process has, as a ``DTensor``, if ``like`` is sharded.

    The value is the same on all processes.
    """
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    target: Any = like
    mesh = target.device_mesh
    replicated = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, target.placements)


def _chunks(piece: Piece, count: int) -> list[Tensor]:
    """Split a value as the parameter is."""
    axis = piece.like.placements[-1].dim
    chunks = list(piece.value.chunk(count, axis))
    return chunks + [piece.value.narrow(axis, 0, 0)] * (count - len(chunks))


def placed(size: int, flat: Tensor, like: Any) -> Tensor:
    """Return the first entries, those of a shard, as a ``DTensor`` placed like a parameter."""
    from torch.distributed.tensor import DTensor

    own = like.to_local()
    local = flat[:size].view(own.shape).to(own.device)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=torch.empty(like.shape, device="meta").stride(),
    )
