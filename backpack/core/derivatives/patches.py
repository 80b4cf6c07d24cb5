"""The patches that the kernel of a convolution sees, and the sum of their outer products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import combinations_with_replacement, product
from math import prod
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from backpack.core import fast

CORRELATIONS = fast.path(
    "patch correlations", "Outer products of patches are sums that pairs of taps share."
)
# About how many entries the patches of a slice of samples have, and its input.
PATCH_ENTRIES = 2**24
INPUT_ENTRIES = 2**21
# Multiplications for a pair of taps from which on it pays to reuse sums.
WORTHWHILE = 2**22


class Geometry(NamedTuple):
    """How a convolution moves over its input; sequences have an entry for each spatial axis."""

    size: Sequence[int]  # number of taps
    stride: Sequence[int]  # entries from one position to the next
    dilation: Sequence[int]  # entries from one tap to the next
    before: Sequence[int]  # entries added in front of an axis
    after: Sequence[int]  # and behind it
    groups: int
    mode: str  # what is added

    @property
    def native(self) -> Sequence[int]:
        """The padding that the kernel of torch can do, zeros if it cannot."""
        is_native = self.mode == "constant" and self.before == self.after
        return self.before if is_native else (0,) * len(self.size)


def patches(x: Tensor, moves: Geometry, positions: Sequence[int]) -> Tensor:
    """View the patches of a padded input: ``[N, C, *in] -> [N, C, *kernel, *positions]``."""
    of_sample, of_channel, *spatial = x.stride()
    taps, steps = map(mul, spatial, moves.dilation), map(mul, spatial, moves.stride)
    return x.as_strided(
        (*x.shape[:2], *moves.size, *positions), (of_sample, of_channel, *taps, *steps)
    )


def patch_gram(x: Tensor, moves: Geometry, positions: Sequence[int]) -> Tensor:
    """Sum the outer products of all patches, of k taps, of an input before it is padded with zeros.

    ``[N, C, *in] -> [C·k, C·k]``.
    """
    channels, taps = x.shape[1], prod(moves.size)
    count = len(x) * prod(positions)
    few = taps == 1 or count < channels * taps or channels**2 * count < WORTHWHILE
    # an accelerator waits for many small products longer than for a large one
    if few or not x.is_cpu or not CORRELATIONS.is_on:
        return _gram_of_unfolded(x, moves, positions)
    parts = x.split(max(1, INPUT_ENTRIES // x[0].numel()))
    upper = reduce(torch.add, (Correlations(part, moves, positions).blocks() for part in parts))
    found = dict(zip(combinations_with_replacement(range(taps), 2), upper.unbind(), strict=True))
    every = [found[i, j] if i <= j else found[j, i].T for i in range(taps) for j in range(taps)]
    gram = torch.stack(every).reshape(taps, taps, channels, channels)
    return gram.permute(2, 0, 3, 1).reshape(channels * taps, channels * taps)


def _gram_of_unfolded(x: Tensor, moves: Geometry, positions: Sequence[int]) -> Tensor:
    """Return the same from the patches themselves."""
    size, stride, dilation, before, *_ = moves
    axes = zip(size, stride, dilation, before, positions, x.shape[2:], strict=True)
    behind = [max(0, s * (t - 1) + d * (k - 1) + 1 - low - n) for k, s, d, low, t, n in axes]
    margins = zip(reversed(before), reversed(behind), strict=True)
    x = pad(x, [width for pair in margins for width in pair])
    unfolded = patches(x, moves, positions)
    parts = unfolded.split(max(1, PATCH_ENTRIES // unfolded[0].numel()))
    features = x.shape[1] * prod(size)
    rows = (part.movedim(0, 1 + len(size)).reshape(features, -1) for part in parts)
    return reduce(torch.add, (flat @ flat.T for flat in rows))


class Tap(NamedTuple):
    """What a tap of the kernel sees: entries ``start, start + 1, …`` of one phase, on each axis."""

    phase: tuple[int, ...]
    start: tuple[int, ...]


class Correlations:
    """Sums over the positions t of ``x[a + t] x[b + t]ᵀ`` for pairs of taps that start at a and b.

    With stride s, entry u of an axis is entry ``u // s`` of phase ``u % s``. The sum over all
    entries depends on the difference ``b - a`` alone. That over the positions is the same without
    the entries in front of the first position and behind the last one, axis by axis: for k taps
    about ``(2 k - 1) / 2`` products on each axis instead of ``k² / 2``, and thin ones at the
    borders.
    """

    def __init__(self, x: Tensor, moves: Geometry, positions: Sequence[int]):
        """Sort the entries: ``[*phases, C, *entries, N]``.

        Zeros behind the entries of all axes but the first make a shift along the axes one of the
        flattened entries.
        """
        size, stride, dilation, before, *_ = moves
        dims = len(size)
        self.positions, axes = positions, range(dims)
        rests = [-entries % step for entries, step in zip(x.shape[2:], stride, strict=True)]
        x = pad(x, [width for rest in reversed(rests) for width in (0, rest)])
        for axis in axes:
            x = x.unflatten(2 + 2 * axis, (-1, stride[axis]))
        x = x.permute(*(3 + 2 * axis for axis in axes), 1, *(2 + 2 * axis for axis in axes), 0)
        self.entries = x.shape[dims + 1 : -1]
        on_axes = [
            [divmod(d * i - low, s) for i in range(k)]
            for k, s, d, low in zip(size, stride, dilation, before, strict=True)
        ]
        self.taps = [
            Tap(tuple(phase for _, phase in tap), tuple(start for start, _ in tap))
            for tap in product(*on_axes)
        ]
        gaps = [0, *(starts[-1][0] - starts[0][0] for starts in on_axes[1:])]
        self.x = pad(x, [0, 0, *(w for gap in reversed(gaps) for w in (0, gap))]).contiguous()
        self.flat = self.x.flatten(dims + 1)
        shape = self.x.shape[dims + 1 :]
        self.steps = [prod(shape[axis + 1 :]) for axis in axes]
        self.sums: dict[tuple[Tap, Tap, int], Tensor] = {}

    def blocks(self) -> Tensor:
        """Return the sums for all pairs of taps in their order: ``[k (k + 1) / 2, C, C]``."""
        pairs = combinations_with_replacement(self.taps, 2)
        return torch.stack([self._over_positions(a, b, 0) for a, b in pairs])

    def _over_positions(self, a: Tap, b: Tap, first: int) -> Tensor:
        """Sum over the positions on the axes from ``first`` on, and over all entries of others."""
        # what the sum depends on: where the first tap starts on those axes, and the differences
        shift = tuple(other - one for one, other in zip(a.start, b.start, strict=True))
        key = (a._replace(start=a.start[first:]), b._replace(start=shift), first)
        if key not in self.sums:
            if first == len(shift):
                self.sums[key] = self._over_all(a.phase, b.phase, shift)
            else:
                total = self._over_positions(a, b, first + 1)
                every = self._overlap(first, shift)
                window = self._window(first, a, shift)
                for entry in (*range(every.start, window.start), *range(window.stop, every.stop)):
                    one, other = self._border(a, b, shift, first, entry)
                    total = torch.addmm(total, one, other.T, alpha=-1)
                self.sums[key] = total
        return self.sums[key]

    def _overlap(self, axis: int, shift: Sequence[int]) -> range:
        """Return the entries that have a partner."""
        size, by = self.entries[axis], shift[axis]
        return range(max(0, -by), max(0, -by, min(size, size - by)))

    def _window(self, axis: int, a: Tap, shift: Sequence[int]) -> range:
        """Return those of them that a position begins with."""
        every, start = self._overlap(axis, shift), a.start[axis]
        first = min(max(every.start, start), every.stop)
        return range(first, max(first, min(every.stop, start + self.positions[axis])))

    def _over_all(self, p: tuple[int, ...], q: tuple[int, ...], shift: Sequence[int]) -> Tensor:
        by = sum(one * step for one, step in zip(shift, self.steps, strict=True))
        size = max(0, self.flat.shape[-1] - abs(by))
        one, other = self.flat[p][:, max(0, -by) :], self.flat[q][:, max(0, by) :]
        return one[:, :size] @ other[:, :size].T

    def _border(
        self, a: Tap, b: Tap, shift: Sequence[int], axis: int, entry: int
    ) -> tuple[Tensor, Tensor]:
        """Return entries along one axis, and their partners: the positions on the axes behind."""
        one = self.x[a.phase].select(1 + axis, entry)
        other = self.x[b.phase].select(1 + axis, entry + shift[axis])
        for i in range(len(shift)):
            if i != axis:
                some = self._overlap(i, shift) if i < axis else self._window(i, a, shift)
                dim = 1 + i - (i > axis)
                start, other_start = (some.start, some.start + shift[i]) if some else (0, 0)
                one = one.narrow(dim, start, len(some))
                other = other.narrow(dim, other_start, len(some))
        return one.flatten(1), other.flatten(1)
