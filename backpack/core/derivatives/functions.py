"""Modules that stand for functions: sums, products, selections, and what the converter meets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import Parameter

from backpack.core import fast
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.by_autograd import moves_entries, transposed
from backpack.core.derivatives.facts import always, never
from backpack.core.derivatives.function_derivatives import FunctionDerivatives
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.generators import draws_nothing
from backpack.core.record.layout import Layout, Place, by_certainty, unbatched
from backpack.core.record.registry import register
from backpack.custom_module.branching import SumModule
from backpack.custom_module.function_module import FunctionModule, Slot, leaves_in
from backpack.custom_module.parameter_module import ParameterModule
from backpack.custom_module.permute import Permute
from backpack.custom_module.products import MulModule
from backpack.custom_module.slicing import Slicing


@register(Permute)
class PermuteDerivatives(FunctionDerivatives):
    """``y = x.permute(dims)``: tangents are permuted likewise, cotangents back."""

    hessian_is_zero = is_deterministic = always

    @fast.body("Axes are permuted, without autograd.", "evaluate")
    def jvp(self, c: Context, t: Tensor) -> Tensor:
        """Permute the axes."""
        return t.permute(0, *[axis + 1 for axis in self._order(c)])

    @fast.body("Axes are permuted, without autograd.", "evaluate")
    def vjp(self, c: Context, v: Tensor) -> Tensor:
        """Permute the axes back."""
        order = self._order(c)
        return v.permute(0, *[order.index(axis) + 1 for axis in range(len(order))])

    @staticmethod
    def _order(c: Context) -> Sequence[int]:
        return c.module.permutation(c.output.dim())


@register(Slicing)
class SlicingDerivatives(FunctionDerivatives):
    """``y = x[slices]``: cotangents are put where the entries were, into zeros."""

    hessian_is_zero = is_deterministic = always

    @fast.body("Columns are sliced together.", "evaluate")
    def vjp(self, c: Context, v: Tensor) -> Tensor:
        """Put the cotangents into zeros, of the whole batch."""
        if c.rows is not None:
            return super().vjp(c, v)
        index = (slice(None), *c.module.slice_info)
        zeros = v.new_zeros(()).expand(len(v), *c.input.shape)
        (back,) = transposed(lambda x: [x[0][index]], [zeros], [v])
        return back


# The cotangent of input number i from the inputs and that of the output, where it is not summed yet
# along the axes that the function has expanded.
Formula = Callable[[Sequence[Any], Tensor, int], Tensor]


class BroadcastingDerivatives(FunctionDerivatives):
    """Functions of tensors that are expanded to the same number of samples."""

    def formula(self, c: Context) -> Formula | None:
        """Return the formula for cotangents; None if there is none."""
        raise NotImplementedError

    @fast.body("Cotangents are formulas, without autograd.", "evaluate")
    def vjp(self, c: Context, v: Any) -> Any:
        """Apply the formula, and sum along the axes that the function has expanded."""
        formula, place, needed = self.formula(c), c.call.place_out(0), c.saved["needed"]
        tensors = [i for i, x in enumerate(c.inputs) if isinstance(x, Tensor)]
        are_aligned = place is not None and all(_is_aligned(c.call, i, place) for i in tensors)
        if formula is None or place is None or not are_aligned:
            return super().vjp(c, v)
        xs = [self._selected(c, place.axis, x) for x in c.inputs]
        cotangents: list[Tensor | None] = [None] * len(xs)
        for i in needed:
            cotangents[i] = _summed(c, i, place.axis, formula(xs, v, i))
        return cotangents[0] if len(cotangents) == 1 else tuple(cotangents)

    @staticmethod
    def _selected(c: Context, axis: int, x: Any) -> Any:
        """Return the selected rows of an input, if it has some."""
        if c.rows is None or not isinstance(x, Tensor):
            return x
        own = axis - c.output.dim() + x.dim()
        return x if own < 0 or x.shape[own] == 1 else c.select(x, own)


def _is_aligned(call: Call, i: int, place: Place) -> bool:
    """Whether an input has the samples where the output has them, or none."""
    shape, own = call.shape_in[i], call.place_in(i)
    if place.is_scattered or own is None:
        return not place.is_scattered
    axis = place.axis - len(call.shape_out[0]) + len(shape or ())
    return not own.is_scattered and own.axis == axis and own.samples == place.samples


def _summed(c: Context, i: int, axis: int, v: Tensor) -> Tensor:
    """Return ``[V, *in]``, or ``[V, N, *in]`` if the input has no samples."""
    shape, skip, total = c.call.shape_in[i] or Size(()), 1, c.call.shape_out[0]
    if c.call.place_in(i) is None:
        own = axis - len(total) + len(shape)
        v, skip = v.movedim(axis + 1, 1), 2
        if own < 0 or shape[own] == 1:
            v = v.unsqueeze(axis + 2)
        else:  # a row for each sample, which reads none of the others
            rows = torch.as_tensor(c.numbers(shape[own]), device=v.device)
            whole = v.new_zeros(*v.shape[:2], shape[own], *v.shape[2:])
            places = rows.reshape(1, -1, 1, *[1] * (v.dim() - 2)).expand_as(v.unsqueeze(2))
            v = whole.scatter(2, places, v.unsqueeze(2)).movedim(2, axis + 2)
    start = v.dim() - len(shape)  # v has the selected rows alone
    expanded = [start + k for k, size in enumerate(shape) if size == 1 and v.shape[start + k] != 1]
    if expanded:
        v = v.sum(expanded, keepdim=True)
    return v.sum([*range(skip, start)]) if start > skip else v


@register(SumModule)
class SumModuleDerivatives(BroadcastingDerivatives):
    """``y = x_0 + x_1 + …``: the Jacobian with respect to each input is the identity.

    Inputs of other shapes than the output's are expanded by the sum.
    """

    hessian_is_zero = is_deterministic = always
    jacobian_is_constant = always  # the same cotangents are passed on for every sample
    autograd_stores = never  # gradients of a sum do not depend on anything

    def layouts(self, call: Call) -> list[Layout | None]:
        """Find where the samples are: where they are in the inputs."""
        (shape,) = call.shape_out
        first, shapes = call.layouts_in[0], call.shape_in
        if first is not None and shapes.count(shape) == len(shapes) == call.layouts_in.count(first):
            known = [first]
        else:
            known = by_certainty(layout for layout in call.layouts_in if layout is not None)
            are_alike = all(s in (None, shape) for s in shapes)
            if not are_alike or len({one.facts for one in known}) != 1:
                return super().layouts(call)
        call.note("affine", True)
        for layout in known[1:]:
            known[0].unify(layout)
        return [known[0]]

    def repeats_output(self, call: Call) -> bool:
        """Return whether nothing has to be found out by trying, which compares with the output."""
        return not self.reads_inputs(call)

    def reads_inputs(self, call: Call) -> bool:
        """Return whether shapes or the places of the samples differ."""
        shapes = [shape for shape in call.shape_in if shape is not None]
        layouts = [one for one in call.layouts_in if one is not None and one.is_batched]
        are_alike = set(shapes) == set(call.shape_out) and len(layouts) == len(shapes)
        return not are_alike or len({one.facts for one in layouts}) > 1

    def _is_plain_sum(self, c: Context) -> bool:
        """Whether all inputs have the shape of the output, and samples if that has some."""
        if {x.shape for x in c.inputs if isinstance(x, Tensor)} != {c.output.shape}:
            return False
        axes, has_none = self.axes_in(c), c.call.place_out(0) is None
        return all((axes[i] is None) == has_none for i in c.saved["needed"])

    def jvp(self, c: Context, t: Any) -> Any:
        """Add the tangents."""
        if not self._is_plain_sum(c):
            return super().jvp(c, t)
        return t if isinstance(t, Tensor) else sum(m for m in t if m is not None)

    def formula(self, c: Context) -> Formula | None:
        """Repeat the cotangent."""
        return lambda xs, v, i: v

    def vjp(self, c: Context, v: Any) -> Any:
        """Repeat the cotangent for each input, summed along the axes that the sum has expanded."""
        if self._is_plain_sum(c):
            return tuple(v if isinstance(x, Tensor) else None for x in c.inputs)
        return super().vjp(c, v)


@register(MulModule)
class MulModuleDerivatives(BroadcastingDerivatives):
    """``y = x_0 x_1 …``: the Jacobian of each factor is the product of the others."""

    is_deterministic = always

    def formula(self, c: Context) -> Formula | None:
        """Multiply with all other factors."""
        return lambda xs, v, i: reduce(torch.mul, (*xs[:i], *xs[i + 1 :]), v)


MATRIX_PRODUCTS = frozenset(
    {torch.matmul, Tensor.matmul, "matmul", operator.matmul, torch.bmm, Tensor.bmm, "bmm"}
)


def _of_matrix_product(xs: Sequence[Any], v: Tensor, i: int) -> Tensor:
    """``y = a b``: ``v bᵀ`` for a, and ``aᵀ v`` for b."""
    a, b = xs
    return a.mT @ v if i else v @ b.mT


@register(FunctionModule)
class AnyFunctionDerivatives(BroadcastingDerivatives):
    """What the converter has made of a function: derivatives are found automatically."""

    def is_deterministic(self, module: Any) -> bool:
        """Return whether it is a function of torch that draws nothing, of its inputs alone."""
        is_one = type(module) is FunctionModule and not leaves_in(
            (module.args, module.kwargs), Tensor
        )
        return is_one and (moves_entries(module) or draws_nothing(module.function))

    def formula(self, c: Context) -> Formula | None:
        """Return that of products of matrices, each of them of one sample."""
        module, place = c.module, c.call.place_out(0)
        is_product = module.function in MATRIX_PRODUCTS and module.args == (Slot(0), Slot(1))
        if not is_product or module.kwargs or min(x.dim() for x in c.inputs) < 2:
            return None
        is_of_each = place is not None and place.axis < c.output.dim() - 2
        return _of_matrix_product if is_of_each else None

    def divides_by_targets(self, call: Call) -> bool:
        """Return whether it is the mean of a loss over weights that are arguments."""
        module: Any = call.module
        # losses that stay functions if weights are given
        if getattr(module, "name", None) not in ("cross_entropy", "nll_loss"):
            return False
        options = [*module.args, *module.kwargs.values()]
        return call.shape_out == ((),) and "sum" not in [x for x in options if isinstance(x, str)]


@register(ParameterModule)
class ParameterModuleDerivatives(BaseDerivatives):
    """A parameter that a function reads: it has no samples, and each sample's Jacobian is ``I``."""

    params = ("parameter",)
    hessian_is_zero = is_linear_in_params = jacobian_is_constant = always
    folds_rows = always  # the value is the same wherever the rows are

    def own(self, module: Any) -> Mapping[str, Parameter | None]:
        """Return the parameter, as which a leaf that requires a gradient counts; not a buffer."""
        p = module.parameter
        is_one = isinstance(p, Parameter) or (p.requires_grad and p.is_leaf)
        return {"parameter": p if is_one else None}

    def parameter(self, c: Context, name: str) -> Tensor:
        """Return the parameter, which belongs to another module."""
        return c.module.parameter

    def layouts(self, call: Call) -> list[Layout | None]:
        """Return a layout without samples: a parameter is the same for all of them."""
        return [unbatched()]

    def parameter_jvp(self, c: Context, t: Tensor) -> Tensor:
        """Repeat the tangent for each sample."""
        return t.unsqueeze(1).expand(-1, *c.y.shape)

    def parameter_vjp(self, c: Context, v: Tensor) -> Tensor:
        """Return ``v``: the output is the parameter."""
        return v
