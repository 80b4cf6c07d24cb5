"""Slices of samples and columns: how large they are, and how their values are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from backpack.context import CTX, STATE, update
from backpack.core import fast, memory
from backpack.core.engine.extracted import Reduction, add
from backpack.core.rows import Rows, row_numbers, take_rows
from backpack.core.values import at_least_single

CACHED_COLUMNS = fast.path("slices of columns", "Columns travel while they are in the cache.")

# On a CPU, a slice is several times faster if it stays in the caches, and if the allocator keeps
# its memory (fresh memory costs page faults). Elsewhere, many small operations are slow.
BYTES_PER_CORE = 2**22
BYTES_OF_HEAP = 2**24
BYTES_ELSEWHERE = 2**28


class slice_bytes:
    """Context manager: about how many bytes a slice of propagated columns may take.

    The ``limit`` is that of the largest tensor that travels. Default at start: on a CPU 4 MiB for
    each thread, at most 16 MiB, and half of it but not less than 4 MiB for large networks;
    elsewhere 256 MiB.
    """

    def __init__(self, limit: int | None):
        """Remember the limit; None for the default."""
        self._limit = limit

    @classmethod
    def on(cls, device: torch.device, is_large: bool) -> int:
        """Return the limit on a device, for a network that is large or not."""
        own = STATE.get().configuration.slice_bytes
        if own is not None:
            return own
        if device.type != "cpu" or not CACHED_COLUMNS.is_on:
            return BYTES_ELSEWHERE
        limit = min(BYTES_PER_CORE * torch.get_num_threads(), BYTES_OF_HEAP)
        return max(BYTES_PER_CORE, limit // 2) if is_large else limit

    def __enter__(self) -> None:
        self._outer = CTX.configuration.slice_bytes
        update(configuration=replace(CTX.configuration, slice_bytes=self._limit))

    def __exit__(self, *exception: object) -> None:
        update(configuration=replace(CTX.configuration, slice_bytes=self._outer))


@dataclass(frozen=True)
class Part:
    """A slice: which samples and columns, of how many. Empty ranges: everything at once."""

    samples: range = range(0)
    all_samples: range = range(0)
    columns: range = range(0)
    all_columns: range = range(0)

    @property
    def is_whole(self) -> bool:
        """Whether this is no slice but everything."""
        return self.samples == self.all_samples and self.columns == self.all_columns

    def chosen(self, base: int, subsampling: Sequence[int] | None) -> Rows:
        """Return the samples of the slice, of a batch of ``base`` that ``subsampling`` selects."""
        if self.samples == self.all_samples:
            return subsampling
        rows = row_numbers(base, subsampling)
        return take_rows(rows, slice(self.samples.start, self.samples.stop))

    def split(self, samples: int, columns: int) -> list[Part]:
        """Split in slices of about so many samples and columns."""
        if samples >= len(self.samples) and columns >= len(self.columns):
            return [self]
        return [
            replace(self, samples=ns, columns=vs)
            for ns in chunks(self.samples, samples)
            for vs in chunks(self.columns, columns)
        ]


def chunks(numbers: range, size: int) -> list[range]:
    """Split in chunks of nearly equal length."""
    count = -(-len(numbers) // size)
    bounds = [i * len(numbers) // count for i in range(count + 1)]
    return [numbers[a:b] for a, b in pairwise(bounds)]


def narrow(tensor: Tensor, axis: int, numbers: range, of: range) -> Tensor:
    """Restrict an axis, whose length is a multiple of that of ``of``, to some of ``of``."""
    if numbers == of:
        return tensor
    ratio = tensor.shape[axis] // len(of)
    return tensor.narrow(axis, (numbers.start - of.start) * ratio, len(numbers) * ratio)


@dataclass
class Gathered:
    """A quantity of all samples and columns, put together from slices: each is written once."""

    reduction: Reduction
    before: Any = None  # what other sources of columns have
    continues: bool = False  # whether slices are added to that
    dtype: torch.dtype | None = None  # of slices
    value: Any = None

    def add(self, value: Any, part: Part) -> None:
        """Add the quantity of a slice."""
        places = [
            (self.reduction.sample_axis, part.samples, part.all_samples),
            (self.reduction.column_axis, part.columns, part.all_columns),
        ]
        axes = [(axis, some, all_) for axis, some, all_ in places if axis is not None]
        if isinstance(value, list) and not part.is_whole:
            self.dtype = value[0].dtype
            value = list(map(at_least_single, value))
        if part.is_whole or isinstance(value, list):
            self.value = value if self.value is None else add(self.value, value)
            return
        is_first = self.value is None
        if is_first:
            self._allocate(value, axes)
        view = self.value
        for axis, some, all_ in axes:
            view = narrow(view, axis, some, all_)
        if self.reduction.sample_axis is not None:  # nothing was written to these samples yet
            is_first = self.reduction.column_axis is not None or not part.columns.start
        if is_first and not self.continues:
            view.copy_(value)
        else:
            view += value

    def _allocate(self, value: Tensor, axes: Sequence[tuple[int, range, range]]) -> None:
        """Find memory for all slices: that of the other sources, where values are summed."""
        shape = list(value.shape)
        for axis, some, all_ in axes:
            shape[axis] = shape[axis] // len(some) * len(all_)
        self.dtype = precise = value.dtype
        if self.reduction.column_axis is None:  # a sum in half precision would get stuck
            precise = torch.promote_types(value.dtype, torch.float32)
        self.continues = value.dtype is precise and self._can_add_in_place(shape)
        if self.continues:
            self.value, self.before = self.before, None
        else:
            self.value = memory.empty(shape, value.new_empty(0, dtype=precise))

    def _can_add_in_place(self, shape: Sequence[int]) -> bool:
        summed, before = self.reduction.column_axis is None, self.before
        same = isinstance(before, Tensor) and list(before.shape) == list(shape)
        return summed and same and not before.requires_grad

    def total(self) -> Any:
        """Return the quantity of all sources so far."""
        value, dtype = self.value, self.dtype
        if dtype is not None:
            value = [v.to(dtype) for v in value] if isinstance(value, list) else value.to(dtype)
        if self.before is None:
            return value
        if isinstance(value, Tensor) and self._can_add_in_place(value.shape):
            return self.before.add_(value)
        return self.reduction.joined(self.before, value)
