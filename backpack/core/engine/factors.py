"""Columns that travel back through the network, and what a reshape does to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Size, Tensor
from torch.nn.functional import pad

from backpack.core.values import at_least_single


def merge_groups(value: Tensor, groups: int, merged: int) -> Tensor:
    """Merge samples of a value ``[V, N, *]`` to N/r groups, with columns each: ``[V·r, N/r, *]``.

    One column of the source has become ``merged`` ones before: see :class:`Factor`.
    """
    by_group = value.unflatten(0, (-1, merged)).unflatten(2, (groups, -1))
    return by_group.movedim(3, 1).flatten(0, 2)


def columns_of_sources(found: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Join values ``[V, N, *]`` of sources (see :func:`merge_groups`); merge to the fewest N."""
    if len(found) == 1:
        return found[0][0]
    fewest = gcd(*[value.shape[1] for value, _ in found])
    return torch.cat([merge_groups(value, fewest, merged) for value, merged in found])


def columns_apart(found: Sequence[Sequence[Tensor | None]]) -> list[list[Tensor | None]]:
    """Give each source columns of its own, ``[V, *]``, in which the others have zeros.

    They may then be added wherever they meet: the squares of a sum would have cross terms.
    """
    counts = [next(len(mat) for mat in mats if mat is not None) for mats in found]
    before, total, apart = 0, sum(counts), []
    for mats, count in zip(found, counts, strict=True):
        around = before, total - before - count
        apart.append([m if m is None else pad(m, (*[0, 0] * (m.dim() - 1), *around)) for m in mats])
        before += count
    return apart


@dataclass(frozen=True)
class Factor:
    """A stack of columns, with ``sum_v w_v s_v s_vᵀ`` the matrix they stand for."""

    mat: Tensor  # [V, R, *shape]
    # the R rows belong to this many independent samples (R, unless a reshape between two modules
    # merged rows, or a module mixes the whole batch: then 1)
    groups: int
    weights: Tensor | None = None  # of each column, [V, groups]; None for all 1
    # where groups merge, the vectors of a column simply add: those of a gradient do, and random
    # vectors of mean zero may, whose cross terms vanish in expectation
    adds_up: bool = False
    merged: int = 1  # how many columns one of the source has become, where groups merged

    def holding(self, mat: Tensor) -> Factor:
        """Return other columns of the same groups and weights."""
        return Factor(mat, self.groups, self.weights, self.adds_up, self.merged)

    def coarsened(self, groups: int) -> Factor:
        """Merge groups of rows; r that merge get columns of their own: ``[V·r, R, *shape]``.

        A column stands for one vector in each group. These must not mix, so it becomes one for each
        merged group, in the order of the source's rows, whether they merge at once or in steps.
        """
        if groups == self.groups:
            return self
        if self.adds_up:
            return replace(self, groups=groups)
        mat, weights, m, r = self.mat, self.weights, self.merged, self.groups // groups
        apart = torch.eye(r, dtype=mat.dtype, device=mat.device).reshape(r, 1, 1, r, 1)
        blocks = mat.reshape(len(mat) // m, 1, m, groups, r, -1) * apart
        mat = blocks.reshape(len(mat) * r, *mat.shape[1:])
        if weights is not None:
            weights = merge_groups(weights, groups, m)
        return replace(self, mat=mat, groups=groups, weights=weights, merged=m * r)

    def reshaped(self, shape: Sequence[int]) -> Factor:
        """Reshape to ``[V, *shape]``, with another number of rows that split or merge evenly."""
        if self.mat.shape[1:] == Size(shape):
            return self
        rows, fits = shape[0], self.mat.shape[1:].numel() == Size(shape).numel()
        if fits and rows % self.groups == 0:
            factor = self
        elif fits and self.groups % rows == 0:
            factor = self.coarsened(rows)
        else:
            raise ValueError(
                f"Cannot follow a reshape of {list(self.mat.shape[1:])} to {list(shape)} between "
                "two modules: the first (batch) axis of one is not a multiple of the other's, or "
                "they have other entries. Keep the batch axis, or use use_converter=True."
            )
        return factor.holding(factor.mat.reshape(len(factor.mat), *shape))

    def on(self, device: torch.device) -> Factor:
        """Move to another device."""
        weights = None if self.weights is None else self.weights.to(device)
        return replace(self, mat=self.mat.to(device), weights=weights)

    def gathered(self, groups: int) -> Factor:
        """Merge groups of rows and sum the rows of each, for a tensor that all of them share."""
        factor = self.coarsened(min(groups, self.groups))
        return factor.holding(factor.mat.unflatten(1, (groups, -1)).sum(2))

    def reduced(self) -> Factor:
        """Return the R of ``Sᵀ = Q R``: a column for each entry of a sample, the same ``S Sᵀ``."""
        num_v, rows, *shape = self.mat.shape
        stacked = self.mat.reshape(num_v, rows, -1).transpose(0, 1)
        triangles = torch.linalg.qr(at_least_single(stacked), mode="r").R  # [R, D, D]
        mat = triangles.to(stacked.dtype).transpose(0, 1).reshape(-1, rows, *shape)
        return replace(self, mat=mat, merged=1)

    def __add__(self, other: Factor) -> Factor:
        groups = gcd(self.groups, other.groups)
        mine, others = self.coarsened(groups), other.coarsened(groups)
        return mine.holding(mine.mat + others.mat)
