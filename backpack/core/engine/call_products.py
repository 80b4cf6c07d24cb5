"""The derivatives of a call, applied to columns in canonical form: ``[V, R, *rest]``.

This is the border between rules, which see samples where they expect them, and the engine, which
has them first. A tensor without samples (of parameters) has columns ``[V, N, *shape]``, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backpack.core.derivatives.evaluation import spread
from backpack.core.derivatives.sample_axes import from_first
from backpack.core.derivatives.vectors import first_of, listed
from backpack.core.record.context import Context
from backpack.core.record.layout import CPU, Place
from backpack.core.record.shards import need
from backpack.core.record.visits import Visit
from backpack.core.rows import Rows, row_numbers
from backpack.core.types import Changes, OfParams
from backpack.utils.subsampling import subsample

Columns = Sequence[Tensor | None]


def shape_out(call: Visit, i: int, count: int) -> list[int]:
    """Return the canonical shape of an output for a number of rows."""
    if call.rows_are_samples:
        return [count, *call.shape_out[i][1:]]
    shape, place = call.shape_out[i], call.place_out(i)
    return [count, *(shape if place is None else place.canonical(shape))]


def shape_in(call: Visit, i: int, count: int) -> list[int]:
    """Return the canonical shape of an input for a number of rows."""
    shape, place = call.shape_in[i], call.place_in(i)
    assert shape is not None
    return [count, *(shape if place is None else place.canonical(shape))]


def transposed(c: Context, v: Columns) -> list[Tensor | None]:
    """Apply the transposed Jacobian: cotangents at the outputs to those at the inputs."""
    call = c.call
    if call.views:  # of parameters that were sharded
        need(call.views)
    rule: Any = call.derivatives
    if call.repeats is not None and v[0] is not None:
        return _padded(call, [*[None] * call.repeats, _repeated(call, v[0], to_input=True)])
    if call.moves_no_columns:  # as a rule
        back = rule.vjp(c, v[0] if len(v) == 1 else list(v))
        backs = [back] if isinstance(back, Tensor) else list(back)
        return backs if len(backs) == len(call.inputs) else _padded(call, backs)
    view = _RuleView(c)
    return view.from_inputs(rule.vjp(view.c, _argument(view.at_outputs(v))))


def forward(c: Context, t: Columns) -> list[Tensor]:
    """Apply the Jacobian: tangents at the inputs to those at the outputs."""
    call = c.call
    repeated = None if call.repeats is None else t[call.repeats]
    if repeated is not None:
        return [_repeated(call, repeated, to_input=False)]
    view = _RuleView(c)
    tangents = view.at_inputs(t)
    return view.from_outputs(view.rule.jvp(view.c, tangents[0] if c.takes_one else tangents))


def shown(c: Context, i: int, mat: Tensor) -> Tensor:
    """Return columns at output ``i`` as ``module.output`` shows its samples to a user's rule."""
    view = _RuleView(c)
    return mat if view.is_folded else view._to(mat, *view._output(i)).contiguous()  # type: ignore[union-attr]


def read_back(c: Context, i: int, mat: Tensor) -> Tensor | None:
    """Return what a user's rule has made of columns at input ``i`` in canonical form."""
    view = _RuleView(c)
    return mat if view.is_folded else view.from_input(i, mat)


def param_forward(c: Context, name: str, t: Tensor) -> list[Tensor]:
    """Apply the Jacobian with respect to a parameter: ``[V, *p]`` to tangents at the outputs."""
    view = _RuleView(c)
    outs = view.rule.param_jvp(view.c, name, t.to(c.call.precision or t.dtype))
    if view.is_folded:
        count = len(row_numbers(c.call.copies, c.rows))
        return [o.unsqueeze(1).expand(-1, count, *o.shape[1:]) for o in listed(outs)]
    return view.from_outputs(outs)


def param(c: Context, method: str, name: str, v: Columns, *arguments: Any) -> Any:
    """Call a method of the rule that takes cotangents at the outputs and is about a parameter."""
    if c.call.views:
        need(c.call.views)
    if c.call.moves_no_columns:  # as a rule
        at_outputs = v[0] if len(v) == 1 else list(v)
        return getattr(c.call.derivatives, method)(c, name, at_outputs, *arguments)
    view = _RuleView(c)
    if view.is_folded:
        return _param_of_copies(view, method, name, v)
    product = getattr(view.rule, method)(view.c, name, _argument(view.at_outputs(v)), *arguments)
    return view.in_order(product) if method in ("param_vjp", "kron_rows") else product


def _param_of_copies(view: _RuleView, method: str, name: str, v: Columns) -> Tensor:
    """Call such a method for a call without samples, with cotangents of each sample apart."""
    product = view.rule.param_vjp_sum(view.c, name, _argument(view.at_outputs(v)))
    each = product.unflatten(0, view.stacked)
    if method == "param_vjp":
        return each
    if method == "param_vjp_sum":
        return each.sum(1)
    if method != "kron_rows":
        raise NotImplementedError(
            f"{method} for the parameter '{name}' of {view.call!r}, whose input has no samples: "
            "write the operation with modules such as torch.nn.Linear."
        )
    return each.reshape(*view.stacked, 1, -1)


def second(c: Context, inputs: Columns, params: OfParams, sum_batch: bool = False) -> Changes:
    """Apply the second derivative of ``⟨g, y⟩``, with g the gradients at a call's outputs.

    Tangents are those at the inputs, None for zero, and ``[V, *p]`` of parameters that vary as
    well. They become cotangents at the inputs, and ``[V, R, *p]``, or ``[V, *p]`` if summed.
    """
    view = _RuleView(c)
    params = {name: mat.to(c.call.precision or mat.dtype) for name, mat in params.items()}
    if view.is_folded:
        return view.second_of_copies(inputs, params, sum_batch)
    tangents = view.at_inputs(inputs)
    if params:
        backs, products = view.rule.mixed_hvp(view.c, tangents, params, sum_batch)
        if not sum_batch:
            products = {name: view.in_order(product) for name, product in products.items()}
    else:
        backs, products = view.rule.hvp(view.c, _argument(tangents)), {}
    return view.from_inputs(backs), products


def second_diagonal(c: Context) -> Tensor:
    """Return the second derivative of ``⟨g, y⟩`` where it is diagonal: ``[R, *in]``."""
    if c.call.views:
        need(c.call.views)
    call, rule = c.call, c.call.derivatives
    diagonal = rule.hessian_diag(c)
    if call.moves_no_columns or call.is_of_copies or rule.follows_samples:
        return diagonal
    return diagonal.movedim(rule.batch_axis_in(c.module, 0), 0)


def _repeated(call: Visit, mat: Tensor, to_input: bool) -> Tensor:
    """Reshape columns at a call that repeats an input, whose entries are in one order."""
    i = call.repeats
    assert i is not None
    count, rows_in, rows_out = mat.shape[1], call.place_in(i), call.place_out(0)
    if rows_in is not None and rows_out is not None:
        there = rows_in.rows(call.shape_in[i] or ()), rows_out.rows(call.shape_out[0])
        new, old = there if to_input else reversed(there)
        count = count * new // old
    shape = shape_in(call, i, count) if to_input else shape_out(call, 0, count)
    return mat.reshape(len(mat), *shape)


def _argument(mats: Columns) -> Any:
    return mats[0] if len(mats) == 1 else list(mats)


def _padded(call: Visit, backs: list[Tensor | None]) -> list[Tensor | None]:
    """Add None for options at the end of the arguments, which rules leave out."""
    missing = call.origins_in[len(backs) :]
    if any(missing) and call.repeats is None:
        raise ValueError(
            f"The rule {type(call.derivatives).__name__} has returned cotangents for "
            f"{len(backs)} of the {len(call.inputs)} inputs of {call!r}. vjp (and hvp) should "
            "return a tuple with an entry for each input, None where it is zero."
        )
    return backs + [None] * len(missing)


class _RuleView:
    """Columns as the rule of a call sees them, with the samples where it expects them."""

    stacked: Sequence[int]  # V and R of the vectors of a rule, if it is folded

    def __init__(self, c: Context):
        self.c = c  # for the rows that the rule is given
        self.call = c.call
        if self.call.views:
            need(self.call.views)
        self.rule: Any = c.call.derivatives
        self.selected = c.rows
        self.follows = self.rule.follows_samples
        # whether the tensors have no samples, and the columns of each are more vectors of the rule
        self.is_folded = self.call.is_of_copies
        # the rule gets all rows where they cannot be selected
        self.sees_all_rows = self.follows and c.rows is not None and self._rows_differ()
        if self.sees_all_rows or self.is_folded:
            self.c = c.at(None)

    def _rows_differ(self) -> bool:
        """Whether rows of one tensor do not tell those of another: scattered, or not as many."""
        call = self.call
        tensors = [(call.place_in(i), shape) for i, shape in enumerate(call.shape_in)]
        tensors += [(call.place_out(i), shape) for i, shape in enumerate(call.shape_out)]
        placed = [(place, shape) for place, shape in tensors if place is not None and shape]
        counts = {place.rows_per_sample(shape) for place, shape in placed}
        return len(counts) > 1 or any(place.is_scattered for place, _ in placed)

    def _selection(self, place: Place, shape: Sequence[int]) -> Rows:
        """Return the selected rows of a tensor, whose samples may have others than the output's."""
        own, total = place.rows_per_sample(shape), self.call.rows_per_sample
        if own == total or self.call.is_unbatched:
            return self.selected
        first = row_numbers(self.call.num_rows, self.selected)[::total]
        return [n // total * own + i for n in first for i in range(own)]

    # ------------------------------------------------------------------ columns

    def _stack(self, mats: Columns) -> list[Tensor | None]:
        self.stacked = first_of(mats).shape[:2]
        return [None if m is None else m.flatten(0, 1) for m in mats]

    def at_inputs(self, mats: Columns) -> list[Tensor | None]:
        if self.is_folded:
            return self._stack(mats)
        found = []
        for i, mat in enumerate(mats):
            shape, place, axis = self._input(i)
            if mat is not None and axis is not None and self._reads_own_row(i):
                # what sample n reads of a tensor without samples: its own row
                count, numbers = mat.shape[1], self._numbers(mat.shape[2 + axis])
                mat = mat.movedim(2 + axis, 2)[:, torch.arange(count), numbers]
            found.append(self._to(mat, shape, place, axis))
        return found

    def from_inputs(self, backs: Any) -> list[Tensor | None]:
        backs = listed(backs)
        if self.is_folded:
            found = [None if b is None else b.unflatten(0, self.stacked) for b in backs]
        else:
            found = list(map(self.from_input, range(len(backs)), backs))
        return _padded(self.call, found)

    def at_outputs(self, mats: Columns) -> list[Tensor | None]:
        if self.is_folded:
            return self._stack(mats)
        return [self._to(m, *self._output(i)) for i, m in enumerate(mats)]

    def from_outputs(self, outs: Any) -> list[Tensor]:
        if self.is_folded:
            return [o.unflatten(0, self.stacked) for o in listed(outs)]
        return [self._from(o, *self._output(i)) for i, o in enumerate(listed(outs))]

    def _input(self, i: int) -> tuple[Any, Place | None, int | None]:
        """Return the shape of an input, its batch axis, and which axis that is for the rule."""
        call = self.call
        if call.moves_no_columns:
            return call.shape_in[i], None, 0
        shape, axis = call.shape_in[i], None
        if not self.follows and shape is not None:
            axis = from_first(self.rule.batch_axis_in(call.module, i), len(shape))
        return shape, call.place_in(i), axis

    def _output(self, i: int) -> tuple[Any, Place | None, int | None]:
        """Return the same of an output."""
        call = self.call
        if call.moves_no_columns:
            return call.shape_out[i], None, 0
        shape, axis = call.shape_out[i], None
        if not self.follows:
            axis = from_first(self.rule.batch_axis_out(call.module, i), len(shape))
        return shape, call.place_out(i), axis

    def from_input(self, i: int, mat: Tensor | None) -> Tensor | None:
        shape, place, axis = self._input(i)
        if mat is None or shape is None:
            return None
        if self.follows and axis is None and place is None:
            # columns of a tensor without samples: a row for each of the output's, in its order
            return self._from(mat, *self._rows_of_output(), axis)
        result = self._from(mat, shape, place, axis)
        if result is not None and axis is not None and self._reads_own_row(i):
            count = result.shape[1]
            whole = result.new_zeros(len(result), count, *shape)
            rows = whole.movedim(2 + axis, 2)
            rows[:, torch.arange(count), self._numbers(shape[axis])] = result
            result = whole
        return result

    def in_order(self, mat: Tensor) -> Tensor:
        """Bring what a rule has found for each row of its output to the order of the samples."""
        return self._from(mat, *self._rows_of_output(), None) if self.follows else mat

    def _rows_of_output(self) -> tuple[Sequence[int], Place | None]:
        """Return the shape and the place of the rows of the first output that has samples."""
        for i, shape in enumerate(self.call.shape_out):
            place = self.call.place_out(i)
            if place is not None:
                return shape[place.axis :], place._replace(axis=0, is_split=False)
        return (), None

    def _reads_own_row(self, i: int) -> bool:
        """Whether each sample reads a row of its own of an input without samples."""
        return not self.follows and i in self.call.unbatched_inputs

    def _numbers(self, size: int) -> Tensor:
        scattered = self.call.scattered_rows()
        own = torch.arange(size)
        if scattered is not None:
            place, length = scattered
            own = place.to_canonical(torch.arange(length, device=CPU))
        return own[list(self.c.numbers(len(own)))]

    def _to(self, mat: Tensor | None, shape: Any, place: Any, axis: int | None) -> Tensor | None:
        if mat is None or axis == 0 or (axis is None and place is None):
            return mat
        if axis is not None:
            return mat.movedim(1, 1 + axis)
        if self.sees_all_rows:
            rows = self._selection(place, shape)
            mat = spread(mat, 1, rows, place.rows(shape), self.call.module)
        return place.from_canonical(mat, place.rows_per_sample(shape))

    def _from(self, mat: Any, shape: Any, place: Any, axis: int | None) -> Any:
        if mat is None or axis == 0 or (axis is None and place is None):
            return mat
        if axis is not None:
            return mat.movedim(1 + axis, 1)
        mat = place.to_canonical(mat, skip=1)
        return subsample(mat, 1, self._selection(place, shape)) if self.sees_all_rows else mat

    def second_of_copies(self, inputs: Columns, params: OfParams, sum_batch: bool) -> Changes:
        """Apply the second derivative of a call without samples, for each sample's gradient."""
        call, found = self.call, []
        samples = call.gradients()
        for i, n in enumerate(row_numbers(call.copies, self.selected)):
            at = self.c.reading(*self.c.inputs)
            at.grad_out = [None if g is None else g[n] for g in samples]
            tangents = [None if m is None else m[:, i] for m in inputs]
            found.append(self.rule.hvp_unbatched(at, tangents, params))
        backs: list[Tensor | None] = []
        for parts in zip(*(each for each, _ in found), strict=True):
            known = [p for p in parts if p is not None]
            backs.append(torch.stack(known, 1) if known else None)
        products = {name: torch.stack([own[name] for _, own in found], 1) for name in params}
        return backs, {name: p.sum(1) if sum_batch else p for name, p in products.items()}
