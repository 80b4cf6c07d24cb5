"""The Hessian of one loss with respect to its prediction, at the rows that the engine has.

A loss may read chosen rows (``h[mask]``), in any order and number for each sample. It pairs them
with those of the target, and counts them: its rule sees them as they are. The engine has those of
each sample side by side, and zeros where a sample has fewer. :func:`at_rows` goes between the two.
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


class Chosen(NamedTuple):
    """Rows of a loss whose prediction has chosen rows.

    Attributes:
        own: The rows as the rule counts them.
        places: Where they are among the rows of the engine, those that are asked for.
        total: How many of these there are.
    """

    own: list[int]
    places: Tensor
    total: int

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


def at_rows(rule: Any, c: Context, factor: Callable[[Context], Any]) -> Any:
    """Compute columns (and weights) at the rows that the engine asks for."""
    chosen = chosen_rows(rule, c)
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


class LossHessian:
    """The Hessian of a loss at some rows of its prediction, in the forms that propagations need.

    Args:
        call: The loss.
        rows: Rows of the batch. Default: all.

    Raises:
        ValueError: If the loss is not reduced to a scalar.
    """

    def __init__(self, call: Visit, rows: Rows = None):
        """Check the call."""
        self.rule: Any = call.derivatives
        self.c = context_of(call, rows)
        self.rule.check_call(self.c)

    @property
    def is_of_one_prediction(self) -> bool:
        """Whether the first input alone is a prediction."""
        return self.rule.predictions(self.c) == (0,)

    def need_convex(self) -> None:
        """Refuse a loss that is not convex in the prediction."""
        chosen = chosen_rows(self.rule, self.c)
        if chosen is None or chosen.own:  # else none of the samples has a row
            self.rule.need_convex(self.c.counting(chosen.own) if chosen else self.c)

    @property
    def owners(self) -> Owners | None:
        """Which samples the rows belong to, if other numbers were chosen of each."""
        place = None if chosen_rows(self.rule, self.c) is None else self.c.call.place_in(0)
        return None if place is None or not place.owners or place.owners.is_even else place.owners

    def counted(self) -> Tensor | None:
        """Return at which rows a target counts, ``[N, *d]``; None if it does at all positions.

        Rows that the loss does not choose have no target.
        """

        def factor(c: Context) -> Tensor:
            found = self.rule.counted(c)
            return c.x.new_ones(1, len(c.x)) if found is None else found.unsqueeze(0)

        if chosen_rows(self.rule, self.c) is None and self.rule.counted(self.c) is None:
            return None
        found = at_rows(self.rule, self.c, factor).squeeze(0) > 0
        return None if found.all() and self.owners is None else found

    def root(self, thin: bool = False) -> Any:
        """Return an exact factor, ``[V, N, *d]``; with as few columns as are known if thin."""

        def factor(c: Context) -> Any:
            self.rule.need_convex(c)
            return self.rule.thin_hessian_root(c) if thin else self.rule.hessian_root(c)

        return at_rows(self.rule, self.c, factor)

    def signed_root(self) -> tuple[Any, Tensor | None]:
        """Return an exact signed factor: columns ``[V, N, *d]``, weights ``[V, N]`` or None."""
        found = at_rows(self.rule, self.c, lambda c: self.rule.signed_hessian_root(c))
        return (found, None) if isinstance(found, Tensor) else found

    def drawn_root(self, mc_samples: int) -> Any:
        """Return a Monte-Carlo factor, ``[M, N, *d]``."""
        return at_rows(self.rule, self.c, lambda c: self.rule.drawn_hessian_root(c, mc_samples))

    def gradient_root(self) -> Tensor:
        """Return the gradient times the root of what the mean divides by, ``[1, N, *d]``."""
        return at_rows(self.rule, self.c, lambda c: self.rule.gradient_root(c))

    def product(self, t: Any, of_ggn: bool = False) -> Any:
        """Apply the Hessian, or the matrix of the GGN: ``[V, N, *d] -> [V, N, *d]``."""
        apply = self.rule.hessian_product
        if of_ggn:
            self.need_convex()
            apply = self.rule.ggn_product
        chosen = chosen_rows(self.rule, self.c) if isinstance(t, Tensor) else None
        if chosen is None:
            return apply(self.c, t)
        if not chosen.own:
            return torch.zeros_like(t)
        return chosen.spread(apply(self.c.counting(chosen.own), chosen.taken(t)))

    def sum(self) -> Tensor:
        """Sum the Hessians of the samples: ``[D, D]``."""
        chosen = chosen_rows(self.rule, self.c)
        return self.rule.hessian_sum(self.c.counting(chosen.own) if chosen else self.c)
