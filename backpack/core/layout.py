"""Where the samples of the batch are in a tensor.

Flattened, a tensor is ``[before, samples, after]`` for some number of entries before and after: a
description that no reshape changes. Most tensors have their batch axis first, ``before = 1``.
Those of a sequence-first recurrent layer do not, and a positional embedding has no samples at all.

Everywhere else in the engine, a tensor is in its *canonical* form: ``[R, *rest]``, all rows R of a
sample next to each other, then the other axes in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor


class Place(NamedTuple):
    """The batch axis of a tensor of known shape.

    Attributes:
        axis: Number of the axis.
        outer: The axis is ``[outer, samples, inner]``, flattened; 1 unless a reshape merged a
            leading axis with that of the batch.
        samples: Number of samples.
    """

    axis: int = 0
    outer: int = 1
    samples: int = 0

    def to_canonical(self, tensor: Tensor, skip: int = 0) -> Tensor:
        """Bring the rows to the front (after ``skip`` axes), those of a sample side by side."""
        axis = self.axis + skip
        if self.outer > 1:
            apart = tensor.unflatten(axis, (self.outer, self.samples, -1))
            tensor = apart.movedim(axis, axis + 1).flatten(axis, axis + 2)
        return tensor.movedim(axis, skip) if self.axis else tensor

    def from_canonical(self, mat: Tensor, rows_per_sample: int = 1) -> Tensor:
        """Bring the rows of ``[V, R, *rest]`` back to where they belong: ``[V, *shape]``.

        Args:
            mat: Columns of all samples or of some of them.
            rows_per_sample: What the axis holds of each sample.
        """
        if self.outer > 1:
            apart = mat.unflatten(1, (-1, self.outer, rows_per_sample // self.outer))
            mat = apart.movedim(1, 2).flatten(1, 3)
        return mat.movedim(1, self.axis + 1) if self.axis else mat


class Layout:
    """Where the samples are. Shared by all tensors that have them in the same place.

    What the first module of a network assumes (the first axis), a later one that knows better,
    such as a recurrent layer with ``batch_first=False``, may correct for all of them.

    Attributes:
        before: Number of entries before the samples; see the module's docstring.
        samples: Number of samples, 0 if the tensor has none.
        assumed: Whether this may be corrected.
    """

    __slots__ = ("assumed", "before", "samples")

    def __init__(self, before: int, samples: int, assumed: bool = False):
        """Store where the samples are."""
        self.before = before
        self.samples = samples
        self.assumed = assumed

    def __repr__(self) -> str:
        """Show the numbers."""
        return f"Layout(before={self.before}, samples={self.samples}, assumed={self.assumed})"

    @classmethod
    def of_axis(cls, shape: Sequence[int], axis: int, assumed: bool = False) -> Layout:
        """Describe a tensor with its samples along one axis."""
        return cls(prod(shape[:axis]), shape[axis], assumed)

    @property
    def is_batched(self) -> bool:
        """Whether there are samples at all."""
        return self.samples > 0

    @property
    def is_plain(self) -> bool:
        """Whether the samples come first."""
        return self.before == 1 and self.samples > 0

    def become(self, other: Layout) -> None:
        """Correct what was assumed."""
        self.before, self.samples, self.assumed = other.before, other.samples, other.assumed

    def place(self, shape: Sequence[int]) -> Place | None:
        """Find the batch axis in a tensor of this shape; None if no axis fits."""
        for axis, size in enumerate(shape):
            outer, rest = divmod(self.before, prod(shape[:axis]) or 1)
            if rest or outer == 0:
                break
            if size % (outer * self.samples) == 0 and size > 0:
                return Place(axis, outer, self.samples)
        if self.before == 1 and shape:  # a batch that was split: the number of samples is smaller
            return Place(0, 1, shape[0])
        return None


def unbatched() -> Layout:
    """Describe a tensor without samples: a parameter, or what is computed from parameters alone."""
    return Layout(1, 0)
