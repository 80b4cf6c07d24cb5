"""Where the samples of the batch are in a tensor.

Flattened, a tensor is ``[before, samples, after]`` for some number of entries before and after: a
description that no reshape changes. Most tensors have their batch axis first, ``before = 1``.
Those of a sequence-first recurrent layer do not, and a positional embedding has no samples at all.

Where samples are chosen or sent on different ways (experts), the entries of one axis belong to
samples in any order and number: their :class:`Owners`.

Everywhere else in the engine, a tensor is in its *canonical* form: ``[R, *rest]``, all rows R of a
sample next to each other, then the other axes in their order. Where samples have different numbers
of rows, those with fewer have rows of zeros behind theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import ClassVar, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from backpack.core.lazy import lazy

# Where numbers of samples are: not on the default device, which programs choose.
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Owners:
    """The sample that each entry of an axis belongs to."""

    numbers: tuple[int, ...]  # of the sample, for each entry
    samples: int  # number of all samples

    @lazy
    def rows(self) -> int:
        """Number of rows in canonical form: that of all samples alike, and at least one."""
        return self.samples * max(1, *map(self.numbers.count, range(self.samples)))

    @property
    def is_even(self) -> bool:
        """Whether all samples have as many rows: none is added in canonical form."""
        return self.rows == len(self.numbers)

    @lazy
    def places(self) -> Tensor:
        """The row of each entry in canonical form."""
        per_sample = self.rows // self.samples
        found, counts = [], [0] * self.samples
        for n in self.numbers:
            found.append(n * per_sample + counts[n])
            counts[n] += 1
        return torch.tensor(found, dtype=torch.long, device=CPU)


class Place(NamedTuple):
    """The batch axis of a tensor of known shape: ``[outer, samples, inner]``, flattened."""

    axis: int = 0
    outer: int = 1  # unless a reshape merged a leading axis with that of the batch
    samples: int = 0
    owners: Owners | None = None  # of the entries, if they are in another order
    # Whether outer and inner entries stay axes of their own in canonical form. They are no rows
    # where another axis comes first: a reshaped tensor would have other ones.
    is_split: bool = False

    def rows(self, shape: Sequence[int]) -> int:
        """Number of rows that a tensor of this shape has in canonical form."""
        if self.is_split:
            return self.samples
        return shape[self.axis] if self.owners is None else self.owners.rows

    def rows_per_sample(self, shape: Sequence[int]) -> int:
        """Number of rows of each sample in canonical form."""
        return self.rows(shape) // self.samples

    @property
    def is_scattered(self) -> bool:
        """Whether the rows of a sample are not next to each other."""
        return self.outer > 1 or self.owners is not None or self.is_split

    def canonical(self, shape: Sequence[int]) -> list[int]:
        """Return the shape behind the rows in canonical form."""
        rest = list(shape)
        parts = [self.outer, shape[self.axis] // self.outer // self.samples]
        rest[self.axis : self.axis + 1] = parts if self.is_split else []
        return rest

    def to_canonical(self, tensor: Tensor, skip: int = 0) -> Tensor:
        """Bring the rows to the front (after ``skip`` axes), those of a sample side by side."""
        axis = self.axis + skip
        if self.owners is not None:
            tensor = tensor.movedim(axis, skip)
            whole = tensor.new_zeros(
                *tensor.shape[:skip], self.owners.rows, *tensor.shape[1 + skip :]
            )
            return whole.index_copy(skip, self.owners.places.to(tensor.device), tensor)
        if self.is_split:
            return tensor.unflatten(axis, (self.outer, self.samples, -1)).movedim(axis + 1, skip)
        if self.outer > 1:
            parts = tensor.unflatten(axis, (self.outer, self.samples, -1))
            tensor = parts.movedim(axis, axis + 1).flatten(axis, axis + 2)
        return tensor.movedim(axis, skip) if self.axis else tensor

    def from_canonical(self, mat: Tensor, rows_per_sample: int = 1) -> Tensor:
        """Bring the rows of ``[V, R, *rest]``, of some samples, back to where they belong."""
        if self.owners is not None:
            mat = mat.index_select(1, self.owners.places.to(mat.device))
        elif self.is_split:
            return mat.movedim(1, self.axis + 2).flatten(self.axis + 1, self.axis + 3)
        elif self.outer > 1:
            parts = mat.unflatten(1, (-1, self.outer, rows_per_sample // self.outer))
            mat = parts.movedim(1, 2).flatten(1, 3)
        return mat.movedim(1, self.axis + 1) if self.axis else mat


class Layout:
    """Where the samples are. Shared by all tensors that have them in the same place.

    What the first module of a network assumes (the first axis), a later one that knows better, such
    as a recurrent layer with ``batch_first=False``, may correct for all of them.
    """

    __slots__ = (
        *("__weakref__", "_group", "_sources", "assumed", "before", "dims"),
        *("is_assigned", "is_constant", "is_of_all", "lost", "owners", "samples"),
    )
    # called when any layout was corrected: what was found out before has to be found out again
    on_correction: ClassVar[Callable[[], None]]

    def __init__(
        self,
        before: int,
        samples: int,
        assumed: bool = False,
        dims: int = 0,
        sources: Sequence[Layout] = (),
        owners: Owners | None = None,
        is_constant: bool = False,
    ):
        """Store where the samples are."""
        self.before, self.samples = before, samples  # numbers of entries, and of samples (0: none)
        self.assumed = assumed  # whether this may be corrected
        self.dims = dims  # number of axes of the data that the assumption was made for
        self.owners = owners  # of the entries of one axis, where they are in no order
        # Whether the entries are the same for all samples, such as those of x.new_ones(T, T):
        # nothing is lost if the axis turns out to be another one. Without samples, such as
        # torch.ones(T, T): there may turn out to be an axis for them.
        self.is_constant = is_constant
        self.is_assigned = False  # whether a program has said so
        self.is_of_all = False  # whether the entries are made of numbers of all samples together
        self.lost: str | None = None  # why the samples of data could not be followed
        self._sources = tuple(sources)  # what this was derived from
        self._group: list[ref[Layout]] = []  # those corrected together, as long as they live

    def __repr__(self) -> str:
        return f"Layout(before={self.before}, samples={self.samples}, assumed={self.assumed})"

    @classmethod
    def of_axis(cls, shape: Sequence[int], axis: int, assumed: bool = False) -> Layout:
        """Describe a tensor with its samples along one axis."""
        return cls(prod(shape[:axis]), shape[axis], assumed, len(shape))

    @property
    def root(self) -> Layout:
        """The one that stands for all those that are corrected together."""
        return self._alike()[0]

    def _alike(self) -> list[Layout]:
        return [one for known in self._group if (one := known()) is not None] or [self]

    @property
    def facts(self) -> tuple[int, int, Owners | None]:
        """All that says where the samples are."""
        return self.before, self.samples, self.owners

    @property
    def is_batched(self) -> bool:
        """Whether there are samples at all."""
        return self.samples > 0

    @property
    def samples_come_first(self) -> bool:
        """Whether the samples come first."""
        return self.before == 1 and self.samples > 0 and self.owners is None

    def is_first(self, shape: Sequence[int]) -> bool:
        """Whether the samples are along the first axis of a tensor of this shape."""
        return self.samples_come_first and (not shape or shape[0] % self.samples == 0)

    def has_rows(self, shape: Sequence[int]) -> bool:
        """Whether each entry of the first axis of a tensor of this shape is a sample."""
        is_plain = self.before == 1 and self.owners is None
        return is_plain and len(shape) > 0 and 0 < self.samples == shape[0]

    def _become(self, before: int, samples: int) -> None:
        for layout in self._alike():
            layout.before, layout.samples, layout.assumed = before, samples, False

    def confirm(self) -> None:
        """Take what was assumed for certain."""
        if self.assumed and not self.is_constant:
            self._become(self.before, self.samples)

    @property
    def may_be_corrected(self) -> bool:
        """Whether this was assumed, and not derived from that of something else."""
        return self.assumed and not self._sources

    def correct(self, shape: Sequence[int], axis: int) -> None:
        """Replace what was assumed, unless it was derived from that of something else."""
        if self._sources:
            raise ValueError(
                f"the samples of a tensor of shape {list(shape)} are needed along axis {axis}, but "
                "where they are was found from the assumption that the data of the network has its "
                "samples along the first axis. Give the network data with the batch axis first; if "
                "the rule is yours, and all leading axes are alike to the module, say "
                "`batch_axis = BatchAxis.LEADING` in it"
            )
        self._become(prod(shape[:axis]), shape[axis])
        Layout.on_correction()

    @property
    def ancestors(self) -> set[Layout]:
        """All that this was found from, itself included: the roots of those alike."""
        found: set[Layout] = set()
        waiting = [self.root]
        for layout in waiting:  # which grows
            if layout not in found:
                found.add(layout)
                waiting += [source.root for source in layout._sources]
        return found

    def follow(self, other: Layout) -> None:
        """Say of a constant what another one says, and be corrected together."""
        self.before, self.samples, self.owners = other.facts
        self.assumed, self.is_constant = other.assumed, other.is_constant
        self._sources, self._group = other._sources, []
        self.unify(other)

    def take_back(self, shape: Sequence[int], axes: Iterable[int]) -> None:
        """Let a constant have its samples along one of some axes of this shape, or else none."""
        fitting = [axis for axis in axes if shape[axis] == self.samples]
        if fitting and self.may_be_corrected:
            self.correct(shape, fitting[0])
        else:
            self.mark_unbatched()

    def mark_unbatched(self) -> None:
        """Note that there are no samples, here and in what this was derived from."""
        for layout in self.ancestors:
            for each in layout._alike():
                each.is_constant, each.owners = False, None
            layout._become(1, 0)
        Layout.on_correction()

    def unify(self, other: Layout) -> None:
        """Let two layouts that agree be one, so that they are corrected together."""
        if self.root is other.root or self.facts != other.facts:
            return
        if self.is_constant != other.is_constant or not (self.assumed or other.assumed):
            return
        certain, assumed = (self, other) if other.assumed and not self.assumed else (other, self)
        alike = certain._alike() + assumed._alike()
        group, sources = list(map(ref, alike)), certain._sources
        if self.is_constant:  # which may be taken back, also where it is certain
            sources += assumed._sources
        for layout in alike:
            layout._group, layout._sources = group, sources
            layout.assumed, layout.dims = certain.assumed, certain.dims

    def place(self, shape: Sequence[int]) -> Place | None:
        """Find the batch axis in a tensor of this shape; None if no axis fits, or has samples."""
        before, samples, owners = self.facts
        if not samples:
            return None
        if owners is not None:
            return _place_of_owners(before, owners, tuple(shape))
        if shape and shape[0] == samples and 1 in (before, samples):
            return Place(0, 1, samples)
        return _place(before, samples, tuple(shape))

    def numbers(self, shape: Sequence[int]) -> Tensor | None:
        """Number the samples that the entries of a tensor of this shape belong to.

        Integers that broadcast to it, -1 for a tensor without samples; None if they are not known.
        """
        before, samples, owners = self.facts
        if not samples:
            return torch.full((), -1, device=CPU)
        place = self.place(shape)
        if place is None or place.owners is None:
            in_order = torch.arange(samples, device=CPU)
            of_axis = in_order if owners is None else torch.tensor(owners.numbers, device=CPU)
            return _spread(of_axis, before, shape)
        of_axis = torch.tensor(place.owners.numbers, dtype=torch.long, device=CPU)
        return of_axis.reshape(-1, *(1,) * (len(shape) - place.axis - 1))

    @classmethod
    def of_numbers(
        cls, numbers: Tensor, samples: int, preferred: Sequence[int] = ()
    ) -> Layout | None:
        """Describe a tensor whose entries belong to samples of these numbers (-1: to none).

        None if they are in no order that a layout describes. It has one of the ``preferred``
        numbers of entries before the samples, if it may.
        """
        shape = numbers.shape
        if not numbers.numel():  # such as the rows that no sample has chosen
            axis = shape.index(0)
            for i in range(axis):
                if shape[i] == samples and prod(shape[:i]) in preferred:
                    return cls(prod(shape[:i]), samples)
            return cls(prod(shape[:axis]), samples, owners=Owners((), samples))
        if not bool((numbers >= 0).any()):
            return unbatched()
        found = _before(numbers, samples, preferred)
        if found is not None:
            return cls(found, samples)
        owners = _owners(numbers, samples)
        if owners is None:
            return None
        axis, of_entries = owners
        return cls(prod(shape[:axis]), samples, owners=of_entries)


def _spread(of_axis: Tensor, before: int, shape: Sequence[int]) -> Tensor | None:
    """Give numbers along ``[before, numbers, after]`` a shape; None if it does not fit."""
    inner, rest = divmod(prod(shape), before * len(of_axis))
    if rest:
        return None
    return of_axis[:, None].expand(before, len(of_axis), inner).reshape(tuple(shape))


def _owners(numbers: Tensor, samples: int) -> tuple[int, Owners] | None:
    """Find an axis each entry of which belongs to one sample, and those samples."""
    for axis in range(numbers.dim()):
        by_entry = numbers.movedim(axis, 0).reshape(numbers.shape[axis], -1)
        of_entry = by_entry.max(1).values
        alike = (by_entry == of_entry[:, None]) | (by_entry < 0)
        if bool((of_entry >= 0).all()) and bool(alike.all()):
            return axis, Owners(tuple(of_entry.tolist()), samples)
    return None


@lru_cache
def _place_of_owners(before: int, owners: Owners, shape: tuple[int, ...]) -> Place | None:
    if not owners.numbers:
        return Place(shape.index(0), 1, owners.samples, owners) if 0 in shape else None
    if before > 1:  # behind another axis, the canonical form of a reshaped tensor is another
        known = (i for i, size in enumerate(shape) if size == len(owners.numbers))
        axis = next((i for i in known if prod(shape[:i]) == before), None)
        return None if axis is None else Place(axis, 1, owners.samples, owners)
    numbers = _spread(torch.tensor(owners.numbers, device=CPU), before, shape)
    found = None if numbers is None else _owners(numbers, owners.samples)
    if found is None or prod(shape[: found[0]]) > 1:
        return None
    return Place(found[0], 1, owners.samples, found[1])


def _before(numbers: Tensor, samples: int, preferred: Sequence[int]) -> int | None:
    """Find the number of entries before the samples, if they are in their order."""
    shape = numbers.shape
    candidates = {
        prod(shape[:axis]) * outer
        for axis, length in enumerate(shape)
        if length and length % samples == 0
        for outer in range(1, length // samples + 1)
        if (length // samples) % outer == 0
    }
    own = torch.arange(samples, device=numbers.device)[:, None]
    for before in sorted(candidates, key=lambda b: (b not in preferred, b)):
        if numbers.numel() % (before * samples) == 0:
            by_sample = numbers.reshape(before, samples, -1)
            if bool(((by_sample == own) | (by_sample < 0)).all()):
                return before
    return None


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
            return Place(axis, outer, samples, is_split=before > 1)
    if start == 1 and shape:  # a batch that was split: the number of samples is smaller
        return Place(0, 1, shape[0])
    return None


def by_certainty(layouts: Iterable[Layout]) -> list[Layout]:
    """Sort layouts: those of constants say least."""
    return sorted(layouts, key=lambda layout: layout.is_constant)


def unbatched(lost: str | None = None) -> Layout:
    """Describe a tensor without samples: of parameters alone, or of what is ``lost`` and why."""
    layout = Layout(1, 0)
    layout.lost = lost
    return layout


def of_all() -> Layout:
    """Describe a tensor that is made of numbers of all samples together."""
    layout = unbatched()
    layout.is_of_all = True
    return layout
