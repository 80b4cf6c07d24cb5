"""What extensions want of the columns that reach parameters, put together from slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.loss_hessian import LossHessian
from backpack.core.engine.extracted import (
    ARRIVED,
    COLUMNS,
    GRAMS,
    IN_BASES,
    KRONECKER,
    OF_COLUMNS,
    OF_SAMPLES,
    REDUCTIONS,
    UNSLICED,
    Bases,
    max_factor_size,
)
from backpack.core.engine.factors import columns_of_sources
from backpack.core.engine.plan import Plan
from backpack.core.engine.products import Products
from backpack.core.engine.slices import Gathered, Part
from backpack.core.engine.uses import Use, uses_without_columns
from backpack.core.lazy import lazy
from backpack.core.record.layout import Owners
from backpack.core.record.visits import Visit
from backpack.core.rows import row_numbers
from backpack.core.types import Extension, Save

_NEEDS, _SAVEFIELD = map(attrgetter, ("needs", "savefield"))


@dataclass
class GramOfLoss:
    """The Gram matrix of all columns of a loss at the layer whose output it reads."""

    call: Visit  # of the layer
    hessian: LossHessian
    scale: Tensor | None  # what columns are multiplied with

    def matrix(self) -> Tensor:
        """Sum the Hessians: ``[O, O]``."""
        found = self.hessian.sum()
        found = found if self.scale is None else found * self.scale.square()
        return found.to(self.call.outputs[0].device)


class Extraction:
    """What a group of extensions wants at parameters, and what slices and sources have brought."""

    def __init__(
        self,
        plan: Plan,
        exts: Sequence[Extension],
        subsampling: Sequence[int] | None,
        bases: Mapping[Parameter, Bases] | None,
    ):
        self._plan, self._exts, self._subsampling = plan, exts, subsampling
        self.savefields = ", ".join(map(_SAVEFIELD, exts))
        wanted = frozenset().union(*map(_NEEDS, exts))
        in_bases = wanted & IN_BASES.keys()
        if in_bases:  # comes with the factors that the bases are of
            wanted |= {IN_BASES[name][0] for name in in_bases}
        rows = _counted(plan, subsampling, self.savefields) if GRAMS["expand"] in wanted else None
        self.wanted = wanted if rows is None else wanted | {ARRIVED}
        # what products are told: the largest Kronecker factor, and where the loss counts a target
        self.options = inf if KRONECKER.isdisjoint(wanted) else max_factor_size(exts), rows
        self.is_unsliced = not UNSLICED.isdisjoint(wanted)  # whether some of it is in one piece
        # whether somebody wants the columns themselves, not just the matrix that they stand for
        self.shows_columns = self.is_unsliced or not OF_COLUMNS.isdisjoint(wanted)
        self.bases = dict(bases or {})  # of sums of squares, by parameter
        # what needs bases of the whole batch is summed in a second turn, if the first has slices:
        # then the bases are known
        self._in_bases = frozenset() if self.bases.keys() >= plan.uses.keys() else in_bases
        self._summed = self.wanted - self._in_bases
        if self.is_unsliced:  # what does not come in one piece is made of the products themselves
            self._summed = self._summed - UNSLICED | {COLUMNS}
        self._rows_per_sample: dict[Visit, int] = {}  # how many belong to one independent sample
        self.gram_at: GramOfLoss | None = None  # of the source at hand, if known without columns
        self.is_second = False  # whether sums of squares in bases alone are left to be summed
        # what slices of the source at hand have brought, and those before; but for products with
        # each column: these of each source, and how many columns one of it has become
        self.of_source: dict[Parameter, dict[str, Gathered]] = {}
        self.totals: dict[Parameter, dict[str, Any]] = {}
        self.columns: dict[Parameter, list[tuple[Tensor, int]]] = {}
        self._merged: dict[Parameter, int] = {}

    @lazy
    def is_of_samples(self) -> bool:
        """Whether something depends on which entries belong to one sample."""
        return not OF_SAMPLES.isdisjoint(self.wanted.union(*[ext.reads for ext in self._exts]))

    def gather(self, uses_of: Mapping[Parameter, list[Use]], part: Part, terms: int | None) -> None:
        """Add the products of a slice to those of its source."""
        for p, uses in uses_of.items():
            for use in uses:
                ratio = use.factor.mat.shape[1] // use.factor.groups
                known = self._rows_per_sample.get(use.call, 1)
                self._rows_per_sample[use.call] = max(ratio, known)
            if self.is_second and p not in self.bases:
                continue
            # what one loss does not reach, another one may: factors of both are of one kind
            deciding = self._whole_uses(p) if len(uses) < len(self._plan.uses[p]) else []
            bases, options = self.bases.get(p, {}), self.options
            products = Products(p, uses, self.wanted, terms, bases, *options, deciding)
            self._merged[p] = products.merged  # the same for all slices
            if p not in self.of_source:
                if p in self.totals and self.is_of_samples:
                    self._plan.check_one_batch(p)
                before = self.totals.get(p, {})
                self.of_source[p] = {
                    name: Gathered(REDUCTIONS[name], before.get(name)) for name in self._summed
                }
            at_loss = self._gram_of(p, uses)
            for name, gathered in self.of_source[p].items():
                if at_loss is None or name not in GRAMS.values():
                    gathered.add(products[name], part)
                elif part.samples.start == part.columns.start == 0:  # that of all is added once
                    gathered.add(at_loss.matrix(), Part())

    def _gram_of(self, p: Parameter, uses: Sequence[Use]) -> GramOfLoss | None:
        """Return the Gram matrix that is known, if it is that of a parameter."""
        at, (largest, _) = self.gram_at, self.options
        if at is None or uses[0].call is not at.call or len(self._plan.uses[p]) > 1:
            return None
        return at if at.call.shape_out[0][1] <= largest else None

    def end_source(self) -> None:
        """Join what has come from a source with what has come from those before."""
        for p, whole in self.of_source.items():
            found = {name: gathered.total() for name, gathered in whole.items()}
            if COLUMNS in found:
                self.columns.setdefault(p, []).append((found.pop(COLUMNS), self._merged[p]))
            self.totals[p] = self.totals.get(p, {}) | found
        self.of_source = {}

    def start_second(self) -> bool:
        """Find the bases of sums that are left, for which all columns have to come again."""
        if not self._in_bases:
            return False
        for p in self.totals:
            products = self._whole(p)
            self.bases[p] = {name: products.eigenbases(name) for name in self._in_bases}
        self._summed, self.is_second = self._in_bases, True
        return True

    def save(self, save: Save) -> None:
        """Save what the extensions make of the totals, which are dropped before."""
        for p in list(self.totals):
            products = self._whole(p)
            self.columns.pop(p, None)
            del self.totals[p]  # nobody else has them, see results.owned
            products.extract(self._exts, save)

    def _whole(self, p: Parameter) -> Products:
        """Return the products that were put together, without columns."""
        terms = 1 if self._plan.mixing else None
        wanted, bases = self.wanted - UNSLICED, self.bases.get(p, {})
        products = Products(p, self._whole_uses(p), wanted, terms, bases, *self.options)
        products.set_values(self.totals[p])
        if p in self.columns:
            products.set_values({COLUMNS: columns_of_sources(self.columns[p])})
        return products

    def _whole_uses(self, p: Parameter) -> list[Use]:
        """List the uses of a parameter with as many samples as what was gathered."""
        uses = uses_without_columns(self._plan, p, self._subsampling)
        for use in uses:
            groups = use.factor.groups // self._rows_per_sample.get(use.call, 1)
            use.factor = replace(use.factor, groups=1 if self._plan.mixing else groups)
        return uses


def _counted(
    plan: Plan, subsampling: Sequence[int] | None, savefields: str
) -> tuple[Tensor, Owners | None] | None:
    """Return at which rows of the loss a target counts, and whose they are; None: everywhere.

    If losses are of one prediction, any of them may count a target; else all ignore the same ones.
    """
    losses, predictions = plan.losses, plan.predictions
    rows = [plan.rows(call, subsampling) for call in losses]
    hessians = list(map(LossHessian, losses, rows))
    masks = list(map(LossHessian.counted, hessians))
    known = [mask for mask in masks if mask is not None]
    if not known:
        return None
    count = len(row_numbers(plan.base or 1, subsampling))
    first, *others = [mask.reshape(count, -1).to(known[0].device) for mask in known]
    of_one = len({tuple(call.origins_in[i] for i in predictions[call]) for call in losses}) == 1
    alike = all(mask.shape == first.shape for mask in others)
    if alike and of_one:
        merged = torch.stack([first, *others]).any(0), hessians[0].owners
        return merged if len(known) == len(masks) else None
    if len(known) < len(masks) or not (alike and all(torch.equal(m, first) for m in others)):
        names = ", ".join(map(repr, losses))
        raise ValueError(
            f"{savefields}: approximation='expand' leaves out positions whose targets the "
            f"loss ignores, but the losses ignore different ones: {names}. Use one backward "
            "pass for each loss, or approximation=None."
        )
    return first, hessians[0].owners
