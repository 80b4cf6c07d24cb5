"""Diagonal second derivatives: where columns start, or added up at the output of a layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core import fast
from backpack.core.derivatives import reductions
from backpack.core.engine import call_products
from backpack.core.engine.extracted import REDUCTIONS
from backpack.core.engine.factors import Factor
from backpack.core.engine.plan import Plan, Producer
from backpack.core.engine.slices import Gathered, Part, chunks, narrow
from backpack.core.record.context import context_of
from backpack.core.record.visits import Visit
from backpack.core.rows import Rows, row_numbers

COLLECTED = fast.path(
    "collected diagonals", "What several sources add up to at a layer's output is squared once."
)


@dataclass
class ResidualSource:
    """The diagonal second derivative r of a nonlinear module: columns ``e_i`` of weight ``r_i``."""

    call: Visit

    def num_columns(self, rows: Rows) -> int:
        """One column for each entry of a sample's input."""
        return prod(call_products.shape_in(self.call, 0, 1))

    def diagonal(self, rows: Rows) -> Tensor:
        """Return r, ``[rows, *in]``."""
        return call_products.second_diagonal(context_of(self.call, rows))

    def columns(self, rows: Rows, part: slice) -> list[Factor | None]:
        """Emit a slice of the columns."""
        residual = self.diagonal(rows)
        flat = residual.reshape(len(residual), -1)
        count, size = flat.shape
        # the unit vectors, last one first, the same for all samples, in the memory of two of them
        one = flat.new_zeros(2 * size - 1)
        one[size - 1] = 1
        units = one.as_strided((size, count, size), (1, 0, 1))[part]
        return [Factor(units.reshape(-1, *residual.shape), count, weights=flat.flip(1)[:, part].T)]


@dataclass(eq=False)
class Diagonals:
    """What several sources add up to at the outputs of calls, squared once for all of them.

    Where each entry of ∂y/∂p is 0, 1 or an entry of the input, sum_i d_i (∂y_i/∂p)² is linear in d
    and takes one product. d is what the second derivative of the module behind y adds; that of
    columns, sum_v w_v s_v², if no entry of p reaches more than one y_i of a sample.
    """

    _plan: Plan
    _subsampling: Sequence[int] | None
    # diagonals [R, *out], and the samples that the rows belong to
    _found: dict[Visit, tuple[Tensor, range]] = field(default_factory=dict)

    def _is_collectable(self, call: Visit) -> bool:
        """Whether ``sum_i d_i (∂y_i/∂p)²`` is one product, for the parameters of a call."""
        if not (call.trained and call.derivatives) or call.is_unbatched:
            return False
        alone = all(len(self._plan.uses[p]) == 1 for p in call.trained.values())
        return call.derivatives.squares_with_input and alone

    def add_residual(self, source: ResidualSource) -> Visit | None:
        """Add the diagonal that a source emits; return the call it is at the output of."""
        plan, origin = self._plan, source.call.origins_in[0]
        producer = None if origin is None else plan.producers.get(origin)
        if producer is None or not self._is_collectable(producer.call):
            return None
        if plan.num_rows(producer.call) != plan.num_rows(source.call):
            return None
        count = len(row_numbers(plan.base or 1, self._subsampling))
        residual = source.diagonal(plan.rows(source.call, self._subsampling))
        shape = plan.shape(producer, self._subsampling)
        self._add(producer.call, residual.reshape(shape), Part(range(count), range(count)))
        return producer.call

    def add_columns(self, call: Visit, factor: Factor, part: Part) -> bool:
        """Add the squares of columns at a call's output; False if they do not suffice."""
        if not self._is_collectable(call) or factor.adds_up or factor.groups != factor.mat.shape[1]:
            return False
        if not call.derivatives.reaches_one_output(call):
            return False
        self._add(call, reductions.sum_of_squares(factor.mat, factor.weights), part)
        return True

    def _add(self, call: Visit, diagonal: Tensor, part: Part) -> None:
        if call not in self._found:
            shape = self._plan.shape(Producer(call, 0), self._subsampling)
            like = call.outputs[0]
            zeros = torch.zeros(shape, dtype=diagonal.dtype, device=like.device)
            self._found[call] = zeros, part.all_samples
        view = narrow(self._found[call][0], 0, part.samples, part.all_samples)
        view += diagonal.to(view.device)

    def add_squares(
        self,
        totals: dict[Parameter, dict[str, Any]],
        wanted: Collection[str],
        left_out: Collection[Parameter],
        limit: int,
    ) -> None:
        """Add what the diagonals make of the parameters, in slices of about ``limit`` bytes."""
        each, plan = "batch_square" in wanted, self._plan
        for call, (values, samples) in self._found.items():
            parts = [Part(samples, samples)]
            if each and not totals.keys().isdisjoint(call.trained.values()):  # memory to add to
                size = max(1, limit // max(1, *(p.nbytes for p in call.trained.values())))
                parts = [Part(some, samples) for some in chunks(samples, size)]
            for name, p in call.trained.items():
                if p in left_out:
                    continue
                before = totals.get(p, {})
                whole = {n: Gathered(REDUCTIONS[n], before.get(n)) for n in wanted}
                for part in parts:
                    diagonal = narrow(values, 0, part.samples, samples)
                    rows = plan.rows(call, part.chosen(plan.base, self._subsampling))
                    method = "squared_param_vjp" if each else "squared_param_vjp_sum"
                    c, columns = context_of(call, rows), [diagonal.unsqueeze(0)]
                    square = call_products.param(c, method, name, columns).squeeze(0)
                    if "square" in wanted:
                        whole["square"].add(square.sum(0) if each else square, part)
                    if each:
                        if call.rows_per_sample > 1:
                            square = square.unflatten(0, (-1, call.rows_per_sample)).sum(1)
                        whole["batch_square"].add(square, part)
                totals[p] = {n: gathered.total() for n, gathered in whole.items()}
