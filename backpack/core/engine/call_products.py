"""The derivatives of a call, applied to columns in canonical form: ``[V, R, *rest]``.

Rules see their tensors with the samples where they expect them; the engine has them first. This is
the border between the two. A tensor without samples (of parameters) has columns ``[V, N, *shape]``,
one for each sample, like everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from backpack.core.derivatives.basederivatives import BatchAxis
from backpack.core.derivatives.by_autograd import spread, take
from backpack.core.record.layout import Place
from backpack.core.record.tape import Call
from backpack.core.rows import Rows, row_numbers

Columns = Sequence[Tensor | None]


def shape_out(call: Call, i: int, count: int) -> list[int]:
    """Return the canonical shape of an output for a number of rows."""
    if call.is_usual:
        return [count, *call.shape_out[i][1:]]
    return _canonical_shape(call.shape_out[i], call.place_out(i), count)


def shape_in(call: Call, i: int, count: int) -> list[int]:
    """Return the canonical shape of an input for a number of rows."""
    shape = call.shape_in[i]
    assert shape is not None
    return _canonical_shape(shape, call.place_in(i), count)


def _canonical_shape(shape: Sequence[int], place: Any, count: int) -> list[int]:
    return [count, *(shape if place is None else place.canonical(shape))]


def gradients(call: Call) -> list[Tensor | None]:
    """Return ``g_out`` in canonical form."""
    if call.g_samples is not None:
        return call.g_samples
    if call.is_direct and not call.folded:
        return call.g_out
    grads = [
        g if g is None or place is None else place.to_canonical(g)
        for g, place in ((g, call.place_out(i)) for i, g in enumerate(call.g_out))
    ]
    return list(map(call.fold, grads)) if call.folded else grads


def transposed(call: Call, mats: Columns, rows: Rows) -> list[Tensor | None]:
    """Apply the transposed Jacobian: columns at the outputs to columns at the inputs."""
    if call.repeats is not None and mats[0] is not None:
        back = _repeated(call, mats[0], to_input=True)
        return _padded(call, [*[None] * call.repeats, back])
    if call.is_direct and call.is_at_hand:  # nothing to move: as a rule
        rule: Any = call.derivatives
        back = rule.jac_t_mat_prod(call.module, None, call.g_out, _argument(mats), rows)
        return _padded(call, list(back) if isinstance(back, tuple) else [back])
    side = _side(call, rows)
    with call.bound() as module:
        if side.is_folded:
            folded = [None if m is None else m.flatten(0, 1) for m in mats]
            back = side.rule.jac_t_mat_prod(module, None, None, _argument(folded))
            backs = list(back) if isinstance(back, tuple) else [back]
            like = next(m for m in mats if m is not None)
            return _padded(
                call, [None if b is None else b.unflatten(0, like.shape[:2]) for b in backs]
            )
        given = side.at_outputs(mats)
        back = side.rule.jac_t_mat_prod(module, None, side.gradients(), given, side.rows)
    return side.from_inputs(list(back) if isinstance(back, tuple) else [back])


def forward(call: Call, mats: Columns, rows: Rows) -> list[Tensor]:
    """Apply the Jacobian: columns at the inputs to columns at the outputs."""
    repeated = None if call.repeats is None else mats[call.repeats]
    if repeated is not None:
        return [_repeated(call, repeated, to_input=False)]
    side = _side(call, rows)
    with call.bound() as module:
        if side.is_folded:
            given = [None if m is None else m.flatten(0, 1) for m in mats]
        else:
            given = side.at_inputs(mats)
        argument: Any = given if len(given) > 1 else given[0]
        out = side.rule.jac_mat_prod(module, None, side.gradients(), argument, side.rows)
    outs = list(out) if isinstance(out, tuple) else [out]
    if side.is_folded:
        like = next(m for m in mats if m is not None)
        return [o.unflatten(0, like.shape[:2]) for o in outs]
    return side.from_outputs(outs)


def shown(call: Call, i: int, mat: Tensor, rows: Rows) -> Tensor:
    """Return columns at output ``i`` as ``module.output`` shows its samples to a user's rule."""
    side = _side(call, rows)
    return mat if side.is_folded else side.to_output(i, mat).contiguous()  # type: ignore[union-attr]


def read_back(call: Call, i: int, mat: Tensor, rows: Rows) -> Tensor | None:
    """Return what a user's rule has made of columns at input ``i`` in canonical form."""
    side = _side(call, rows)
    return mat if side.is_folded else side.from_input(i, mat)


def param_forward(call: Call, name: str, mat: Tensor, rows: Rows) -> list[Tensor]:
    """Apply the Jacobian with respect to a parameter: ``[V, *p]`` to columns at the outputs."""
    side = _side(call, rows)
    mat = mat.to(call.precision or mat.dtype)
    with call.bound() as module:
        out = side.rule.param_jac_mat_prod(name, module, None, side.gradients(), mat, side.rows)
    outs = list(out) if isinstance(out, tuple) else [out]
    if side.is_folded:
        count = len(row_numbers(call.copies, rows))
        return [o.unsqueeze(1).expand(-1, count, *o.shape[1:]) for o in outs]
    return side.from_outputs(outs)


def param(
    call: Call, method: str, name: str, mats: Columns, rows: Rows, *args: Any, **options: Any
) -> Any:
    """Call a method of the rule that takes columns at the outputs and is about a parameter."""
    if call.is_direct and call.is_at_hand:  # nothing to move: as a rule
        given = mats[0] if len(mats) == 1 else list(mats)
        apply = getattr(call.derivatives, method)
        return apply(name, call.module, None, call.g_out, given, *args, subsampling=rows, **options)
    side = _side(call, rows)
    if side.is_folded:
        return _param_of_copies(call, method, name, mats, **options)
    with call.bound() as module:
        given = side.at_outputs(mats)
        function = getattr(side.rule, method)
        options["subsampling"] = side.rows
        return function(name, module, None, side.gradients(), given, *args, **options)


def _param_of_copies(call: Call, method: str, name: str, mats: Columns, **options: Any) -> Tensor:
    """Do that for a call without samples: every sample has columns of its own."""
    folded = [None if m is None else m.flatten(0, 1) for m in mats]
    like = next(m for m in mats if m is not None)
    rule: Any = call.derivatives
    with call.bound() as module:
        product = rule.param_mjp(name, module, None, None, _argument(folded), sum_batch=True)
    each = product.unflatten(0, like.shape[:2])
    if method == "param_mjp":
        return each.sum(1) if options.get("sum_batch", True) else each
    if method != "kronecker_rows":
        raise NotImplementedError(
            f"{method} for the parameter '{name}' of {call!r}, whose input has no samples: write "
            "the operation with modules such as torch.nn.Linear."
        )
    return each.reshape(*like.shape[:2], 1, -1)


def second(
    call: Call,
    inputs: Columns,
    params: Mapping[str, Tensor],
    rows: Rows,
    sum_batch: bool = False,
) -> tuple[list[Tensor | None], dict[str, Tensor]]:
    """Apply the second derivative of ``⟨g_out, y⟩``.

    Args:
        call: The call.
        inputs: Columns at the inputs, None for zero.
        params: ``[V, *p]`` for parameters that vary as well.
        rows: Rows that the columns hold.
        sum_batch: Sum what is at the parameters over the samples.

    Returns:
        Columns at the inputs, and ``[V, R, *p]`` for each of ``params``, or ``[V, *p]`` if summed.
    """
    side = _side(call, rows)
    params = {name: mat.to(call.precision or mat.dtype) for name, mat in params.items()}
    if isinstance(side, _Border) and side.is_folded:
        return side.second_of_copies(inputs, params, sum_batch)
    with call.bound() as module:
        grads = side.gradients()
        given = side.at_inputs(inputs)
        if params:
            backs, products = side.rule.mixed_residual(
                module, grads, given, params, side.rows, sum_batch
            )
        else:
            argument: Any = given if len(given) > 1 else given[0]
            back = side.rule.residual_mat_prod(module, None, grads, argument, side.rows)
            backs, products = [back] if isinstance(back, Tensor) else list(back), {}
    return side.from_inputs(backs), products


def second_diagonal(call: Call, rows: Rows) -> Tensor:
    """Return the second derivative of ``⟨g_out, y⟩`` where it is diagonal: ``[R, *in]``."""
    rule: Any = call.derivatives
    grads = gradients(call)
    with call.bound() as module:
        if call.is_direct or call.is_of_copies or rule.batch_axis is BatchAxis.FOLLOWED:
            diagonal = rule.hessian_diagonal(module, None, grads, rows)
            return rule.checked_diagonal(module, grads, diagonal, rows)
        axis = rule.batch_axis_out(module, 0)
        grads = [g if g is None else g.movedim(0, axis) for g in grads]
        diagonal = rule.hessian_diagonal(module, None, grads, rows)
        diagonal = rule.checked_diagonal(module, grads, diagonal, rows)
        return diagonal.movedim(rule.batch_axis_in(module, 0), 0)


def _repeated(call: Call, mat: Tensor, to_input: bool) -> Tensor:
    """Reshape columns at a call that repeats an input: entries are in one order in canonical form.

    Args:
        call: The call.
        mat: ``[V, R, *rest]`` at the input, or at the output.
        to_input: Whether the result is at the input.

    Returns:
        ``[V, R', *rest']`` at the other one.
    """
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


def _padded(call: Call, backs: list[Tensor | None]) -> list[Tensor | None]:
    """Add what the rule leaves out: options at the end of the arguments."""
    return backs + [None] * (len(call.inputs) - len(backs))


class _Side:
    """What the rule of one call sees, if it expects the samples where the engine has them: first.

    Attributes:
        call: The call.
        rule: Its derivatives.
        rows: Rows that the columns hold.
        is_folded: Whether the columns of a tensor without samples are more vectors of the rule.
    """

    is_folded = False

    def __init__(self, call: Call, rows: Rows):
        self.call = call
        self.rule: Any = call.derivatives
        self.rows = rows

    def gradients(self) -> list[Tensor | None]:
        return self.call.g_out

    def at_inputs(self, mats: Columns) -> list[Tensor | None]:
        return list(mats)

    def from_inputs(self, backs: list[Tensor | None]) -> list[Tensor | None]:
        return _padded(self.call, backs)

    def at_outputs(self, mats: Columns) -> Any:
        return _argument(mats)

    def from_outputs(self, outs: list[Tensor]) -> list[Tensor]:
        return outs

    def to_output(self, i: int, mat: Tensor | None) -> Tensor | None:
        return mat

    def from_input(self, i: int, mat: Tensor | None) -> Tensor | None:
        return mat


def _side(call: Call, rows: Rows) -> _Side:
    return _Side(call, rows) if call.is_direct else _Border(call, rows)


class _Border(_Side):
    """Moves the samples of one call between the canonical place and the one the rule expects."""

    def __init__(self, call: Call, rows: Rows):
        assert call.derivatives is not None
        super().__init__(call, rows)
        self.selected = rows
        self.follows = self.rule.batch_axis is BatchAxis.FOLLOWED
        self.is_folded = call.is_of_copies
        # a batch axis that is merged with another one in front of it cannot be selected from, nor
        # one whose samples have other numbers of rows
        self.whole = self.follows and rows is not None and self._is_merged()
        self.rows = None if self.whole or self.is_folded else rows

    def _is_merged(self) -> bool:
        call = self.call
        places = [call.place_in(i) for i in range(len(call.shape_in))]
        places += [call.place_out(i) for i in range(len(call.shape_out))]
        return any(place is not None and place.is_scattered for place in places)

    def _selection(self, place: Place, shape: Sequence[int]) -> Rows:
        """Return the selected rows of a tensor, whose samples may have others than the output's."""
        own, total = place.rows_per_sample(shape), self.call.rows_per_sample
        if own == total or self.call.is_unbatched:
            return self.selected
        first = row_numbers(self.call.num_rows, self.selected)[::total]
        return [n // total * own + i for n in first for i in range(own)]

    def gradients(self) -> list[Tensor | None]:
        call = self.call
        if self.follows or self.is_folded:
            return call.g_out
        axis = self.rule.batch_axis_out
        return [self._behind(g, 0, axis(call.module, i)) for i, g in enumerate(gradients(call))]

    @staticmethod
    def _behind(mat: Tensor | None, first: int, axis: int) -> Tensor | None:
        """Move the samples from the axis ``first`` behind ``axis`` others."""
        return mat if mat is None or not axis else mat.movedim(first, first + axis)

    # ------------------------------------------------------------------ columns

    def at_inputs(self, mats: Columns) -> list[Tensor | None]:
        return [self.to_input(i, m) for i, m in enumerate(mats)]

    def from_inputs(self, backs: list[Tensor | None]) -> list[Tensor | None]:
        return _padded(self.call, [self.from_input(i, b) for i, b in enumerate(backs)])

    def at_outputs(self, mats: Columns) -> Any:
        return _argument([self.to_output(i, m) for i, m in enumerate(mats)])

    def from_outputs(self, outs: list[Tensor]) -> list[Tensor]:
        return [self.from_output(i, o) for i, o in enumerate(outs)]

    def to_output(self, i: int, mat: Tensor | None) -> Tensor | None:
        axis = None if self.follows else self.rule.batch_axis_out(self.call.module, i)
        return self._to(mat, self.call.shape_out[i], self.call.place_out(i), axis)

    def from_output(self, i: int, mat: Tensor) -> Tensor:
        axis = None if self.follows else self.rule.batch_axis_out(self.call.module, i)
        result = self._from(mat, self.call.shape_out[i], self.call.place_out(i), axis)
        assert result is not None
        return result

    def to_input(self, i: int, mat: Tensor | None) -> Tensor | None:
        shape, place = self.call.shape_in[i], self.call.place_in(i)
        axis = None if self.follows else self.rule.batch_axis_in(self.call.module, i)
        if mat is not None and axis is not None and self._stands_alone(i):
            # what sample n reads of a tensor without samples: its own row
            count, numbers = mat.shape[1], self._numbers(mat.shape[2 + axis])
            mat = mat.movedim(2 + axis, 2)[:, torch.arange(count), numbers]
        return self._to(mat, shape, place, axis)

    def from_input(self, i: int, mat: Tensor | None) -> Tensor | None:
        shape, place = self.call.shape_in[i], self.call.place_in(i)
        axis = None if self.follows else self.rule.batch_axis_in(self.call.module, i)
        if mat is None or shape is None:
            return None
        if self.follows and not self.is_folded and place is None:
            # columns of a tensor without samples: a row for each of the output's, in its order
            return self._from(mat, shape, self._merged_rows(), axis)
        result = self._from(mat, shape, place, axis)
        if result is not None and axis is not None and self._stands_alone(i):
            count = result.shape[1]
            whole = result.new_zeros(len(result), count, *shape)
            rows = whole.movedim(2 + axis, 2)
            rows[:, torch.arange(count), self._numbers(shape[axis])] = result
            result = whole
        return result

    def _merged_rows(self) -> Place | None:
        places = map(self.call.place_out, range(len(self.call.shape_out)))
        found = next((place for place in places if place is not None), None)
        return None if found is None else found._replace(axis=0, is_apart=False)

    def _stands_alone(self, i: int) -> bool:
        return not self.follows and i in self.call.unbatched_inputs

    def _numbers(self, size: int) -> Tensor:
        return torch.as_tensor(list(row_numbers(size, self.rows)))

    def _to(self, mat: Tensor | None, shape: Any, place: Any, axis: int | None) -> Tensor | None:
        if mat is None:
            return None
        if axis is not None:
            return self._behind(mat, 1, axis)
        if place is None:
            return mat
        if self.whole:
            rows = self._selection(place, shape)
            mat = spread(mat, 1, rows, place.rows(shape), self.call.module)
        return place.from_canonical(mat, place.rows_per_sample(shape))

    def _from(self, mat: Tensor | None, shape: Any, place: Any, axis: int | None) -> Tensor | None:
        if mat is None:
            return None
        if axis is not None:
            return mat.movedim(1 + axis, 1) if axis else mat
        if place is None:
            return mat
        mat = place.to_canonical(mat, skip=1)
        return take(mat, 1, self._selection(place, shape)) if self.whole else mat

    def second_of_copies(
        self, inputs: Columns, params: Mapping[str, Tensor], sum_batch: bool
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Apply the second derivative of a call without samples, for each sample's gradient."""
        call, found = self.call, []
        samples = gradients(call)
        with call.bound() as module:
            for i, n in enumerate(row_numbers(call.copies, self.selected)):
                grads = [None if g is None else g[n] for g in samples]
                given = [None if m is None else m[:, i] for m in inputs]
                found.append(self.rule.second_unbatched(module, grads, given, params))
        backs: list[Tensor | None] = []
        for parts in zip(*(each for each, _ in found), strict=True):
            known = [p for p in parts if p is not None]
            backs.append(torch.stack(known, 1) if known else None)
        products = {name: torch.stack([own[name] for _, own in found], 1) for name in params}
        return backs, {name: p.sum(1) if sum_batch else p for name, p in products.items()}
