"""Restriction of a tensor to some of its samples."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor


def subsample(
    tensor: Tensor, dim: int = 0, subsampling: Sequence[int] | Tensor | slice | None = None
) -> Tensor:
    """Restrict a tensor to a subset of the entries along one axis.

    Args:
        tensor: Tensor with samples along axis ``dim``. ``[*, N, *]``
        dim: The axis to restrict.
        subsampling: Indices of the samples to keep, in the order wanted. Negative indices count
            from the end, as everywhere in Python. ``None`` keeps all of them.

    Returns:
        The tensor itself for ``None``, a view for a slice, a copy for a list of indices.
        ``[*, len(subsampling), *]``

    Raises:
        ValueError: If the indices are empty, not integers, or do not fit the axis.
    """
    if subsampling is None:
        return tensor

    size = tensor.shape[dim]
    if isinstance(subsampling, slice):
        index = [slice(None)] * tensor.dim()
        index[dim] = subsampling
        return tensor[tuple(index)]

    indices = _check_indices(subsampling, dim, size)
    return tensor.index_select(dim, torch.tensor(indices, device=tensor.device))


def _check_indices(subsampling: Sequence[int] | Tensor, dim: int, size: int) -> list[int]:
    """Return indices between ``0`` and ``size - 1``, or explain why they do not fit the axis."""
    about = f"subsampling={subsampling!r} for axis {dim} of length {size}"
    try:
        values = subsampling.tolist() if isinstance(subsampling, Tensor) else list(subsampling)
        indices = [operator.index(value) for value in values]
    except TypeError as error:
        raise ValueError(f"Expected integer indices, got {about}.") from error
    # A mask is not a list of indices, although Python takes True for 1.
    if any(isinstance(v, bool) or getattr(v, "dtype", None) is torch.bool for v in values):
        raise ValueError(f"Expected integer indices, got {about}.")
    if not indices:
        raise ValueError(f"Expected at least one index, got {about}.")
    if any(not -size <= index < size for index in indices):
        raise ValueError(
            f"Index out of range: got {about}. Samples of the batch are 0 to {size - 1}."
        )
    return [index % size for index in indices]
