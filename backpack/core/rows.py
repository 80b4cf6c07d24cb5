"""Numbers of samples: which rows of a batch a computation is about."""

from __future__ import annotations

from collections.abc import Sequence

# Numbers in the order that is wanted; None for all.
Rows = Sequence[int] | slice | None


def row_numbers(size: int, subsampling: Rows) -> Sequence[int]:
    """Return the rows of a batch of ``size`` that ``subsampling`` selects."""
    if subsampling is None:
        return range(size)
    if isinstance(subsampling, slice):
        return range(*subsampling.indices(size))
    if min(subsampling, default=0) < 0:  # from the end
        return [n + size if n < 0 else n for n in subsampling]
    return subsampling


def one_by_one(size: int, subsampling: Rows, count: int | None = None) -> list[slice]:
    """Return the (first ``count``) selected rows of a batch, each as a slice (no copy)."""
    numbers = row_numbers(size, subsampling)[:count]
    return [slice(n % size, n % size + 1) for n in numbers]


def take_rows(rows: Sequence[int], span: slice) -> Sequence[int] | slice:
    """Return a span of a selection of rows, as a slice (no copy) where possible."""
    part = rows[span]
    return slice(part.start, part.stop, part.step) if isinstance(part, range) else part
