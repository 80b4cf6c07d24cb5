"""Where the samples of the batch are in a tensor.

Flattened, a tensor is ``[before, samples, after]`` for some number of entries before and after: a
description that no reshape changes. Most tensors have their batch axis first, ``before = 1``.
Those of a sequence-first recurrent layer do not, and a positional embedding has no samples at all.

Everywhere else in the engine, a tensor is in its *canonical* form: ``[R, *rest]``, all rows R of a
sample next to each other, then the other axes in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import ClassVar, NamedTuple

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

    What the first module of a network assumes (the first axis), a later one that knows better, such
    as a recurrent layer with ``batch_first=False``, may correct for all of them.

    Attributes:
        before: Number of entries before the samples; see the module's docstring.
        samples: Number of samples, 0 if the tensor has none.
        assumed: Whether this may be corrected.
        dims: Number of axes of the data that the assumption was made for.
        corrections: How often the place of the samples in any layout was corrected: what was found
            out before then has to be found out again.
    """

    __slots__ = ("_facts", "_same", "_sources")
    corrections: ClassVar[int] = 0

    def __init__(
        self,
        before: int,
        samples: int,
        assumed: bool = False,
        dims: int = 0,
        sources: Sequence[Layout] = (),
    ):
        """Store where the samples are, and the layouts that this one was derived from."""
        self._facts = (before, samples, assumed, dims)
        self._same: Layout | None = None
        self._sources = tuple(sources)

    def __repr__(self) -> str:
        """Show the numbers."""
        return f"Layout(before={self.before}, samples={self.samples}, assumed={self.assumed})"

    @classmethod
    def of_axis(cls, shape: Sequence[int], axis: int, assumed: bool = False) -> Layout:
        """Describe a tensor with its samples along one axis."""
        return cls(prod(shape[:axis]), shape[axis], assumed, len(shape))

    @property
    def _root(self) -> Layout:
        layout = self
        while layout._same is not None:
            layout = layout._same
        return layout

    @property
    def before(self) -> int:
        """Number of entries before the samples."""
        return self._root._facts[0]

    @property
    def samples(self) -> int:
        """Number of samples, 0 if there are none."""
        return self._root._facts[1]

    @property
    def assumed(self) -> bool:
        """Whether this may be corrected."""
        return self._root._facts[2]

    @property
    def dims(self) -> int:
        """Number of axes of the data that the assumption was made for."""
        return self._root._facts[3]

    @property
    def is_batched(self) -> bool:
        """Whether there are samples at all."""
        return self._root._facts[1] > 0

    @property
    def is_plain(self) -> bool:
        """Whether the samples come first."""
        before, samples, *_ = self._root._facts
        return before == 1 and samples > 0

    def is_first(self, shape: Sequence[int]) -> bool:
        """Whether the samples are along the first axis of a tensor of this shape."""
        before, samples, *_ = self._root._facts
        first = shape[0] if shape else 0
        return before == 1 and samples > 0 and (samples == first or first % samples == 0)

    def has_rows(self, shape: Sequence[int]) -> bool:
        """Whether each entry of the first axis of a tensor of this shape is a sample."""
        before, samples, *_ = self._root._facts
        return before == 1 and samples > 0 and len(shape) > 0 and samples == shape[0]

    def confirm(self) -> None:
        """Take what was assumed for certain."""
        root = self._root
        before, samples, assumed, dims = root._facts
        if assumed:
            root._facts = (before, samples, False, dims)

    def correct(self, shape: Sequence[int], axis: int) -> None:
        """Replace what was assumed.

        Raises:
            ValueError: If it was derived from something else, which would have to be corrected too.
        """
        root = self._root
        if root._sources:
            raise ValueError(
                f"the samples of a tensor of shape {list(shape)} are needed along axis {axis}, but "
                "where they are was found from the assumption that the data of the network has its "
                "samples along the first axis. Give the network data with the batch axis first"
            )
        root._facts = (prod(shape[:axis]), shape[axis], False, root._facts[3])
        Layout.corrections += 1

    def demote(self) -> None:
        """Say that there are no samples, here and in what this was derived from."""
        root = self._root
        root._facts = (1, 0, False, root._facts[3])
        Layout.corrections += 1
        for source in root._sources:
            source.demote()

    def unify(self, other: Layout) -> None:
        """Let two layouts that agree be one, so that they are corrected together."""
        one, two = self._root, other._root
        if one is two or one._facts[:2] != two._facts[:2]:
            return
        if two.assumed and not one.assumed:
            one, two = two, one
        if one.assumed:
            one._same = two

    def place(self, shape: Sequence[int]) -> Place | None:
        """Find the batch axis in a tensor of this shape; None if no axis fits."""
        before, samples, *_ = self._root._facts
        if before == 1 and shape and shape[0] == samples:
            return Place(0, 1, samples)
        return _place(before, samples, tuple(shape))


@lru_cache
def _place(start: int, samples: int, shape: tuple[int, ...]) -> Place | None:
    for axis, size in enumerate(shape):
        if prod(shape[:axis]) == start and size == samples:
            return Place(axis, 1, samples)
    for axis, size in enumerate(shape):
        before = prod(shape[:axis])
        outer, rest = divmod(start, before or 1)
        if rest or outer == 0:
            break
        if size > 0 and size % (outer * samples) == 0:
            merged = size > outer * samples
            # samples merged with what follows them, behind another axis: no rows of samples
            return None if merged and before > 1 else Place(axis, outer, samples)
    if start == 1 and shape:  # a batch that was split: the number of samples is smaller
        return Place(0, 1, shape[0])
    return None


def unbatched() -> Layout:
    """Describe a tensor without samples: a parameter, or what is computed from parameters alone."""
    return Layout(1, 0)
