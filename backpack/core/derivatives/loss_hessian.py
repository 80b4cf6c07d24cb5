"""The Hessian of one loss with respect to its prediction, at the rows that the engine has.

A loss may read chosen rows (``h[mask]``), in any order and number for each sample. It pairs them
with those of the target, and counts them: its rule sees them as they are. The engine has those of
each sample side by side, and zeros where a sample has fewer. :class:`LossHessian` goes between the
two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack.core.record.calls import Call
from backpack.core.record.context import Context, context_of
from backpack.core.record.layout import Owners, Place
from backpack.core.record.visits import Visit
from backpack.core.rows import Rows, row_numbers


class SomeColumns(NamedTuple):
    """What makes some columns of a factor, where all of them would be too many."""

    num_columns: int
    make: Callable[[slice], Tensor]  # those from a start to a stop, [V, N, *d]


class Chosen(NamedTuple):
    """Rows of a loss whose prediction has chosen rows."""

    own: list[int]  # as the rule counts them
    places: Tensor  # where they are among the rows of the engine that are asked for
    total: int  # how many of these there are

    def spread(self, mat: Tensor) -> Tensor:
        """Bring ``[V, own rows, *]`` to ``[V, total, *]``, zero elsewhere."""
        whole = mat.new_zeros(len(mat), self.total, *mat.shape[2:])
        return whole.index_copy(1, self.places.to(mat.device), mat[:, : len(self.places)])

    def taken(self, mat: Tensor) -> Tensor:
        """Take ``[V, own rows, *]`` of ``[V, total, *]``."""
        return mat.index_select(1, self.places.to(mat.device))


def place_of_chosen(call: Call) -> Place | None:
    """Return where the rows of a prediction are, if rows were chosen for it or its target."""
    if not any(layout is not None and layout.owners is not None for layout in call.layouts_in):
        return None
    place = call.place_in(0) or Place()  # else the prediction is data
    return place if place.owners is not None or not place.is_scattered else None


def chosen_rows(rule: Any, c: Context) -> Chosen | None:
    """Return which rows of a loss some of the engine's are; None if they are the same."""
    if c.call.samples_come_first or c.counts_chosen_rows or not rule.sees_chosen_rows(c.module):
        return None
    place = c.call.place_in(0)
    if place is None or place.owners is None:
        return None
    by_place = {row: own for own, row in enumerate(place.owners.places.tolist())}
    pairs = [
        (i, by_place.get(n % place.owners.rows))
        for i, n in enumerate(row_numbers(place.owners.rows, c.rows))
    ]
    known = [(i, own) for i, own in pairs if own is not None]
    places = torch.tensor([i for i, _ in known], dtype=torch.long)
    return Chosen([own for _, own in known], places, len(pairs))


class LossHessian:
    """The Hessian of a loss at some rows of its prediction, in the forms that propagations need."""

    def __init__(self, call: Visit, rows: Rows = None):
        """Check the call: a loss that is no scalar is a ``ValueError``."""
        self._set(call.derivatives, context_of(call, rows))

    def _set(self, rule: Any, c: Context) -> None:
        rule.check_call(c)
        self.rule, self.c = rule, c
        self.chosen = chosen_rows(rule, c)
        self.seen = self.c.counting(self.chosen.own) if self.chosen else self.c

    def _at_rows(self, factor: Callable[[Context], Any]) -> Any:
        """Compute columns (and weights) at the rows that the engine asks for."""
        c, chosen = self.c, self.chosen
        if chosen is None:
            return factor(c)
        if not len(c.input):  # no sample has a row
            return c.input.new_zeros(1, chosen.total, *c.input.shape[1:])
        # as many columns, even if none of the samples has a row
        found = factor(c.counting(chosen.own or [0]))
        if isinstance(found, Tensor):
            return chosen.spread(found)
        columns, weights = found
        return chosen.spread(columns), None if weights is None else chosen.spread(weights)

    @property
    def is_of_one_prediction(self) -> bool:
        """Whether the first input alone is a prediction."""
        return self.rule.predictions(self.c) == (0,)

    def need_convex(self) -> None:
        """Refuse a loss that is not convex in the prediction."""
        if self.chosen is None or self.chosen.own:  # else none of the samples has a row
            self.rule.need_convex(self.seen)

    @property
    def owners(self) -> Owners | None:
        """Which samples the rows belong to, if other numbers were chosen of each."""
        place = None if self.chosen is None else self.c.call.place_in(0)
        return None if place is None or not place.owners or place.owners.is_even else place.owners

    def counted(self) -> Tensor | None:
        """Return at which rows a target counts, ``[N, *d]``; None if it does at all positions."""

        def factor(c: Context) -> Tensor:
            found = self.rule.counted(c)
            return c.x.new_ones(1, len(c.x)) if found is None else found.unsqueeze(0)

        if self.chosen is None and self.rule.counted(self.c) is None:
            return None
        found = self._at_rows(factor).squeeze(0) > 0
        return None if found.all() and self.owners is None else found

    def root(self, thin: bool = False) -> Any:
        """Return an exact factor, ``[V, N, *d]``; with as few columns as are known if thin."""

        def factor(c: Context) -> Any:
            self.rule.need_convex(c)
            return self.rule.thin_hessian_root(c) if thin else self.rule.hessian_root(c)

        return self._at_rows(factor)

    def some_columns(self, signed: bool = False) -> SomeColumns | None:
        """Return what makes some columns of an exact factor, if the loss knows it."""
        if self.chosen is not None:
            return None
        if signed:
            return self.rule.some_of_signed_root(self.c)
        self.rule.need_convex(self.c)
        return self.rule.some_of_root(self.c)

    def signed_root(self) -> tuple[Any, Tensor | None]:
        """Return an exact signed factor: columns ``[V, N, *d]``, weights ``[V, N]`` or None."""
        found = self._at_rows(self.rule.signed_hessian_root)
        return (found, None) if isinstance(found, Tensor) else found

    def drawn_root(self, mc_samples: int) -> Any:
        """Return a Monte-Carlo factor, ``[M, N, *d]``."""
        return self._at_rows(lambda c: self.rule.drawn_hessian_root(c, mc_samples))

    def gradient_root(self) -> Tensor:
        """Return the gradient times the root of what the mean divides by, ``[1, N, *d]``."""
        return self._at_rows(self.rule.gradient_root)

    def product(self, t: Any, of_ggn: bool = False) -> Any:
        """Apply the Hessian, or the matrix of the GGN: ``[V, N, *d] -> [V, N, *d]``."""
        chosen = self.chosen if isinstance(t, Tensor) else None
        if of_ggn:
            self.need_convex()
        apply = self.rule.ggn_product if of_ggn else self.rule.hessian_product
        if chosen is None:
            return apply(self.c, t)
        if not chosen.own:
            return torch.zeros_like(t)
        return chosen.spread(apply(self.seen, chosen.taken(t)))

    @property
    def knows_sum(self) -> bool:
        """Whether :meth:`sum` takes no factor, and is of the rows that the engine has."""
        return self.chosen is None and self.rule.knows_hessian_sum(self.c)

    def sum(self) -> Tensor:
        """Sum the Hessians of the samples: ``[D, D]``."""
        return self.rule.hessian_sum(self.seen)
