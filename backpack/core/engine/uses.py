"""Uses of a parameter in reached calls: what has arrived there, in which rows and positions.

Of several positions of a sample, the approximation ``"expand"`` takes each for a sample, and leaves
out those whose targets the loss ignores; ``"reduce"`` averages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd, lcm

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.affine import input_factor, with_one
from backpack.core.engine import call_products
from backpack.core.engine.extracted import add
from backpack.core.engine.factors import Factor
from backpack.core.engine.plan import Plan
from backpack.core.lazy import lazy
from backpack.core.record.context import Context, context_of
from backpack.core.record.layout import Owners
from backpack.core.record.module_state import describe
from backpack.core.record.visits import Visit
from backpack.core.rows import Rows, row_numbers


@dataclass
class Use:
    """One use of a parameter in a reached call, and the columns at the call's outputs."""

    call: Visit
    name: str  # of the parameter, there
    factor: Factor  # columns at the first output that has any
    rows: Rows  # of the call that the columns hold
    mats: Sequence[Tensor | None]  # columns at each output, None for zero

    def of(self, name: str) -> Use:
        """Return the use of another parameter of the call, with the same columns."""
        use = Use(self.call, name, self.factor, self.rows, self.mats)
        use.c = self.c
        return use

    @lazy
    def c(self) -> Context:
        """What the rule sees of the call."""
        return context_of(self.call, self.rows)

    @lazy
    def there(self) -> Tensor | None:
        """Which rows there are, ``[N, R/N]``; None for all, as where samples have equally many."""
        place = self.call.place_out(0)
        owners = None if place is None else place.owners
        if owners is None or owners.is_even or not owners.numbers:
            return None
        found = torch.zeros(owners.rows, dtype=torch.bool)
        found[owners.places] = True
        found = self.c.select(found).reshape(-1, owners.rows // owners.samples)
        return found.to(self.factor.mat.device) if found.any() else None

    def there_in(self, num_n: int) -> Tensor | None:
        """Return :attr:`there`, but of a network whose rows are N samples."""
        return None if self.there is None or len(self.there) != num_n else self.there

    @lazy
    def of_rows_there(self) -> Context:
        """What the rule sees of the rows that there are: none that was added to some samples."""
        if self.there is None:
            return self.c
        numbers = self.c.numbers(len(self.c.output))
        return self.c.at([numbers[i] for i in self.there.flatten().nonzero()[:, 0].tolist()])

    @property
    def has_kronecker_factors(self) -> bool:
        """Whether the derivatives know Kronecker factors, not just the block."""
        if self.call.is_of_copies:
            return False
        return self.call.derivatives.has_kronecker_factors(self.c, self.name)

    @property
    def kind_of_factors(self) -> tuple[bool, ...]:
        """What uses of a parameter have in common if their Kronecker factors add up.

        Whether there are any, and their order, which does not matter to a bias: it has one.
        """
        rule, has_order = self.call.derivatives, self.call.trained[self.name].dim() > 1
        order = (rule.kronecker_input_first, rule.kronecker_swaps_axes) if has_order else ()
        return self.has_kronecker_factors, *order

    @property
    def of_all(self) -> dict[Parameter, list[Use]]:
        """The uses of all trained parameters of the call, with the same columns."""
        uses: dict[Parameter, list[Use]] = {}
        for name, p in self.call.trained.items():
            uses.setdefault(p, []).append(self.of(name))  # a module may have it under two names
        return uses


def uses_without_columns(plan: Plan, p: Parameter, subsampling: Sequence[int] | None) -> list[Use]:
    """Return the uses of a parameter with columns that have a shape but take no memory."""
    uses = []
    for call, name in plan.uses[p]:
        rows = plan.rows(call, subsampling)
        count = len(row_numbers(plan.num_rows(call), rows))
        shape_only = call.outputs[0].new_empty(1).expand(1, count)
        uses.append(Use(call, name, Factor(shape_only, count), rows, [shape_only]))
    return uses


def aligned(plan: Plan, uses: list[Use]) -> list[Use]:
    """Merge the rows of uses on one batch, if a sample has others in each, to those of samples."""
    counts = {use.factor.groups for use in uses}
    batches = {plan.samples_of[use.call] for use in uses}
    if len(batches) > 1 or not any(count % min(counts) for count in counts):
        return uses
    groups, found = gcd(*counts), []
    for use in uses:
        factor = use.factor
        mats = [m if m is None else factor.holding(m).coarsened(groups).mat for m in use.mats]
        found.append(Use(use.call, use.name, factor.coarsened(groups), use.rows, mats))
    return found


def num_positions(use: Use) -> int:
    """Return at how many positions of all samples a parameter is used."""
    num_rows = use.factor.mat.shape[1]
    num_rows = num_rows if use.there is None else int(use.there.sum())
    if not use.has_kronecker_factors:
        return num_rows
    inputs = use.call.derivatives.affine_inputs(use.of_rows_there, use.name)
    if inputs:  # of one part, since there are Kronecker factors
        return num_rows if inputs[0] is None else inputs[0].shape[:-1].numel()
    return _kron_rows_of_zero(use, num_rows, "expand").shape[1]


def _kron_rows_of_zero(use: Use, num_rows: int, approximation: str | None) -> Tensor:
    """Return what Kronecker rows of a zero column look like."""
    call = use.call
    shapes = [call_products.shape_out(call, i, num_rows) for i in range(len(call.outputs))]
    zeros = [use.factor.mat.new_zeros(()).expand(1, *shape) for shape in shapes]
    return call_products.param(use.c, "kron_rows", use.name, zeros, approximation)


def num_groups(use: Use) -> int:
    """Return how many groups share the Kronecker factor of a parameter."""
    return _kron_rows_of_zero(use, use.factor.mat.shape[1], None).shape[2]


def split_groups(x: Tensor, count: int) -> Tensor:
    """Repeat what groups have, ``[*, G, I]``, for their parts, of which there are ``count``.

    The groups of a convolution are next to each other, and equally large.
    """
    groups = x.shape[-2]
    return x if groups == count else x.repeat_interleave(count // groups, -2)


def factor_of_means(uses: Sequence[Use], num_n: int, joint: bool, max_size: float) -> list[Tensor]:
    """Return the Kronecker factor of averages over positions (and a joint 1); none for a bias."""
    found = [_sums_of_inputs(use, num_n, joint) for use in uses]
    known = [of_use for of_use in found if of_use is not None]
    if not known:
        return []
    groups = lcm(*[sums.shape[1] for sums, _ in known])
    known = [(split_groups(sums, groups), numbers) for sums, numbers in known]
    sums, numbers = (reduce(add, parts) for parts in zip(*known, strict=True))
    return [input_factor((sums / numbers.clamp(min=1)).flatten(0, 1), None, max_size)]


def _sums_of_inputs(use: Use, num_n: int, joint: bool) -> tuple[Tensor, Tensor] | None:
    """Sum over its positions what a parameter is multiplied with in each of N samples.

    ``[N, G, I]`` for G groups that share the factor ``[I, I]``, and the number of positions of each
    sample, ``[N, 1, 1]``; None for a bias.
    """
    there = use.there_in(num_n)
    c, count = (use.c, num_n) if there is None else (use.of_rows_there, int(there.sum()))
    means = use.call.derivatives.kron_means(c, use.name, count)
    if means is None:
        return None
    per_sample = num_positions(use) / count
    sums = (with_one(means) if joint else means) * per_sample
    numbers = sums.new_full((count, 1, 1), per_sample)
    if there is None:
        return sums, numbers
    samples, zeros = there.nonzero()[:, 0], sums.new_zeros(num_n, 1, 1)
    of_all = zeros.expand(num_n, *sums.shape[1:]).index_add(0, samples, sums)
    return of_all, zeros.index_add(0, samples, numbers)


def rows_that_count(
    uses: Sequence[Use], counted: tuple[Tensor, Owners | None] | None, arrived: Callable[[], Tensor]
) -> list[Tensor]:
    """Return what a parameter is multiplied with, ``[R, I]`` of each use; none for a bias.

    Rows are left out whose target the loss ignores, unless something from others has ``arrived``.
    """
    rows = []
    for use in uses:
        c = use.of_rows_there if counted is None else use.c
        (x,) = use.call.derivatives.affine_inputs(c, use.name)
        if x is not None:
            rows.append(x.flatten(0, -2))
    if not rows or counted is None:
        return rows
    found = arrived()
    counts = [len(x) // len(found) for x in rows]
    if sum(counts) != found.shape[1]:  # losses that reach some of the uses each
        raise NotImplementedError(
            f"approximation='expand': '{uses[0].name}' of {describe(uses[0].call.module)} is used "
            f"{len(uses)} times, for several losses that ignore targets. Use one loss for all of "
            "them, or approximation=None."
        )
    triples = zip(uses, rows, found.split(counts, 1), strict=True)
    return [x[_counts(use, mask > 0, *counted)] for use, x, mask in triples]


def _counts(use: Use, arrived: Tensor, at: Tensor, owners: Owners | None) -> Tensor:
    """Tell which positions of a use count, ``[N, T] -> [N·T]``; refuse to guess."""
    at = at.reshape(len(arrived), -1).to(arrived.device)
    place = use.call.place_out(0)
    number = at.sum(1)
    if at.shape == arrived.shape and (owners is None or (place and place.owners == owners)):
        # Something else may arrive at what others look at; else, they are in another order.
        more, less = (arrived & ~at).sum(1), (at & ~arrived).sum(1)
        is_known, found = (more == 0) | (less == 0) | (more > less), arrived | at
    elif owners is not None:  # how many is known, not which
        is_known, found = (number == 0) | (number == arrived.sum(1)), arrived
    else:
        is_known, found = (number == 0) | at.all(1), arrived | at.any(1, keepdim=True)
    if not (is_known | arrived.all(1)).all():
        raise ValueError(
            f"approximation='expand': '{use.name}' of {describe(use.call.module)} is used at "
            f"{arrived.shape[1]} positions of a sample, and the loss has {at.shape[1]} targets of "
            "it. It ignores some of them, and nothing arrives at some of the positions: whether "
            "they are those that it ignores is not known. Use approximation=None or 'reduce'."
        )
    found = found.flatten()
    if use.there is None:
        return found
    return found & use.there.flatten().repeat_interleave(len(found) // use.there.numel())


def arrived(uses: Sequence[Use], num_samples: int) -> Tensor:
    """Tell where something arrives, position by position of each sample and use: ``[N, T]``."""
    each = []
    for use in uses:
        # [V, N·T, 1, O]
        rows = call_products.param(use.c, "kron_rows", use.name, use.mats, "expand")
        found = (rows != 0).flatten(2).any(2).sum(0).to(rows.dtype)
        each.append(found.unflatten(0, (num_samples, -1)))
    return torch.cat(each, 1)
