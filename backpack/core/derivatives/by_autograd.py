"""Products with the first and second derivative of any module call, by autograd.

Used where a rule has no formula of its own. Samples are independent of each other, so products
with the batched inputs need one pass over the whole batch; what belongs to a tensor without
samples (a parameter) is needed for each sample apart, and is computed sample by sample, with
:mod:`~backpack.core.derivatives.vmapped` where that works. Sums over the samples need no such care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack.context import disable
from backpack.core.derivatives import vmapped
from backpack.core.derivatives.evaluation import Evaluation, Values, drawn, generator_at, is_real
from backpack.core.derivatives.following import treatment_by
from backpack.core.derivatives.vmapped import (
    Keys,
    Several,
    chunk,
    gradients,
    pull_back,
    summed,
    weighted,
)
from backpack.core.record.kinds import MOVES, RESHAPES
from backpack.core.record.module_state import describe
from backpack.core.rows import Rows
from backpack.core.values import has_values
from backpack.custom_module.function_module import FunctionModule
from backpack.hessianfree.twice import differentiable_gradients
from backpack.utils.subsampling import subsample


@contextmanager
def differentiated_twice(module: Module) -> Iterator[None]:
    """Let torch's error name the module, if an operation has no second derivative."""
    try:
        yield
    except RuntimeError as error:
        if "not implemented" not in str(error) and "differentiat" not in str(error):
            raise
        raise NotImplementedError(
            f"{describe(module)} cannot be differentiated twice by autograd ({error}). Use "
            "first-order quantities, or register derivatives for it "
            "(backpack.core.derivatives.register)."
        ) from error


def transposed(
    linear: Callable[[Any], Several], vs: Sequence[Tensor], ts: Sequence[Any]
) -> list[Tensor]:
    """Apply the transpose of a linear map of ``vs`` to ``ts`` by autograd; None stands for zero."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), disable():
        vs = [v.requires_grad_() for v in vs]
        pairs = [
            (b, t)
            for b, t in zip(linear(vs), ts, strict=False)
            if b is not None and t is not None and b.requires_grad
        ]
        if not pairs:
            return [torch.zeros_like(v) for v in vs]
        options: Any = {"create_graph": create_graph, "materialize_grads": True}
        return list(gradients([b for b, _ in pairs], vs, [t for _, t in pairs], **options))


def _variables(evaluation: Evaluation, keys: Sequence[Any], inputs: Sequence[Any]) -> Values:
    """Return values to differentiate with respect to; attached if the result must have a graph."""
    attached = torch.is_grad_enabled()
    values = {}
    for key in keys:
        value = inputs[key] if isinstance(key, int) else evaluation.value(key)
        if attached and value.requires_grad:
            # a new node: neither g_out (under create_graph) nor other inputs depend on it
            values[key] = value.view_as(value)
        else:
            values[key] = value.detach().requires_grad_()
    return values


def transposed_products(
    evaluation: Evaluation, mats: Several, keys: Keys, rows: Rows
) -> dict[Any, Any]:
    """Apply the transposed Jacobian with respect to inputs (by number) and parameters (by name).

    With tangents, the second derivative of ``⟨g, y⟩``: the transposed Jacobian of its slopes.

    Args:
        evaluation: The call.
        mats: ``[V, *out]`` for each output, or None; with tangents g, ``[*out]``.
        keys: Inputs and parameters, or tangents ``[V, *in]`` and ``[V, *p]`` by these. Products
            with those that have no samples are summed over the samples.
        rows: Samples that ``mats`` and tangents hold.

    Returns:
        ``[V, *in]`` or ``[V, *p]`` for each key; None (zero with tangents) where no output depends
        on it.
    """
    if isinstance(rows, Sequence) and evaluation.is_whole(rows):
        rows = None
    inputs, separable = evaluation.rows(rows)
    tangents = keys if isinstance(keys, Mapping) else {}
    whole = mats
    if not separable:
        whole = evaluation.whole(mats, rows, 0 if tangents else 1)
        tangents = evaluation.whole_tangents(tangents, rows)
    create_graph, module = torch.is_grad_enabled(), evaluation.c.module
    named = differentiated_twice(module) if tangents else nullcontext()
    values = _variables(evaluation, [*keys], inputs)
    xs = [*values.values()]
    try:
        with torch.enable_grad(), named:
            ys: Any = evaluation.outputs(values, inputs)
            if separable and not evaluation.are_rows(ys, rows):
                return transposed_products(evaluation, mats, keys, rows)
            if tangents:
                ys, whole = _slopes(ys, xs, whole), [*tangents.values()]
            found = pull_back(ys, xs, whole, create_graph)
    except RuntimeError as error:
        # a kernel of layer_norm has no gradient of the bias where that of the weight is not asked
        # for: many rows on a GPU (torch 2.11)
        others = [n for n, p in evaluation.c.call.read[0].items() if p is not None]
        if tangents or "invalid gradient" not in str(error) or {*others} <= {*keys}:
            raise
        more = transposed_products(evaluation, mats, [*dict.fromkeys([*keys, *others])], rows)
        return {key: more[key] for key in keys}
    results: dict[Any, Any] = {}
    for key, product in zip(keys, found, strict=True):
        axis = None if separable else evaluation.axis(key)
        results[key] = torch.zeros_like(tangents[key]) if product is None and tangents else product
        if axis is not None and results[key] is not None:
            results[key] = subsample(results[key], axis + 1, rows)
    return results


def _slopes(ys: Sequence[Tensor], xs: Sequence[Tensor], g_out: Several) -> Several:
    """Differentiate ``⟨g, y⟩``, None for zero."""
    pairs = [
        (y, g if g.requires_grad else g.detach().requires_grad_())
        for y, g in zip(ys, g_out, strict=True)
        if g is not None and y.requires_grad
    ]
    outs, grads = [y for y, _ in pairs], [g for _, g in pairs]
    with differentiable_gradients(outs, xs):
        slopes: Several = gradients(outs, xs, grads, create_graph=True, allow_unused=True)
    return slopes


def per_sample_products(evaluation: Evaluation, mats: Several, keys: Keys) -> dict[Any, Any]:
    """Apply the transposed Jacobian, or the second derivative, for each sample at hand apart.

    As :func:`transposed_products`, but ``[V, N, *]`` for inputs without samples, and parameters.
    """
    numbers, tangents = evaluation.numbers, keys if isinstance(keys, Mapping) else {}
    if not tangents and moves_entries(evaluation.c.module) and not torch.is_grad_enabled():
        moved = _moved_products(evaluation, mats, [*keys])
        if moved is not None:
            return moved
    count, batched = len(numbers), {k: a for k in keys if (a := evaluation.axis(k)) is not None}
    others = any(tangents[k].shape[a + 1] != count for k, a in batched.items() if tangents)
    if evaluation.rows_differ(mats) or others:
        return _products_of_rows(evaluation, mats, keys)
    if not numbers:  # rows that no sample has chosen
        of_all = transposed_products(evaluation, mats, keys, None)
        return {
            key: x if x is None or key in batched else x.unsqueeze(1)[:, :0]
            for key, x in of_all.items()
        }
    inputs, separable = evaluation.rows(slice(None) if evaluation.is_whole(numbers) else numbers)

    def combined(vectors: Tensor, samples: Tensor) -> dict[Any, Any]:
        own = mats if tangents else [m if m is None else summed(m, vectors)[None] for m in mats]
        skip = 0 if tangents else 1
        own = evaluation.at_outputs(own, lambda m, axis: weighted(m, samples, axis + skip))
        along = {key: summed(t, vectors)[None] for key, t in tangents.items()}
        return transposed_products(evaluation, own, along or keys, numbers)

    shape = max(len(m) for m in (tangents.values() or mats) if m is not None), count
    at_once = partial(vmapped.products, evaluation, mats, keys, inputs)
    found = vmapped.if_right(evaluation, shape, at_once, combined) if separable else None
    if found is None:
        each = [
            transposed_products(evaluation, *narrowed(evaluation, mats, keys, i, 1), [number])
            for i, number in enumerate(numbers)
        ]
        found = {}
        for key in keys:
            axis, parts = batched.get(key), [one[key] for one in each if one[key] is not None]
            rows = [x.unsqueeze(1) if axis is None else x.movedim(axis + 1, 1) for x in parts]
            found[key] = torch.cat(rows, 1) if len(rows) == count else None
        is_tried = separable and count > 1
        if is_tried and not vmapped.are_right(evaluation, shape, found, combined):
            evaluation.c.saved["separable"] = False  # some samples alone are what others are not
            return per_sample_products(evaluation, mats, keys)
    return found | {key: found[key].movedim(1, axis + 1) for key, axis in batched.items()}


def _products_of_rows(evaluation: Evaluation, mats: Several, keys: Keys) -> dict[Any, Any]:
    """Return the :func:`per_sample_products` where samples have other rows at each output."""
    is_second = isinstance(keys, Mapping)
    if is_second and not (evaluation.follows and evaluation.is_whole(evaluation.numbers)):
        module, shapes = evaluation.c.module, [list(x.shape) for x in evaluation.c.outputs]
        raise NotImplementedError(
            f"The second derivative of {describe(module)} for single samples: its outputs "
            f"{shapes} have another number of rows for each sample than its inputs. Give it "
            "inputs with a batch axis, or let a reshape behind it merge the axes."
        )
    total: dict[Any, Any] = dict.fromkeys(keys)
    for row, own in evaluation.each_sample(mats, 0 if is_second else 1):
        for key, product in transposed_products(evaluation, own, keys, None).items():
            whole = total[key]
            if product is not None and evaluation.axis(key) is None:
                if whole is None:
                    shape = len(product), evaluation.num_samples, *product.shape[1:]
                    whole = total[key] = product.new_zeros(shape)
                whole[:, row] = product
            elif product is not None:
                total[key] = product if whole is None else whole + product
    return total


def narrowed(
    evaluation: Evaluation, mats: Several, keys: Keys, start: int, size: int
) -> tuple[Several, Any]:
    """Return what belongs to some samples of the arguments of :func:`per_sample_products`."""
    if size == len(evaluation.numbers):  # outputs may have more rows than inputs
        return mats, keys
    if not isinstance(keys, Mapping):
        return evaluation.at_outputs(mats, lambda m, axis: m.narrow(axis + 1, start, size)), keys
    own = dict(keys)
    for key, t in keys.items():
        axis = evaluation.axis(key)
        own[key] = t if axis is None else t.narrow(axis + 1, start, size)
    return evaluation.at_outputs(mats, lambda m, axis: m.narrow(axis, start, size)), own


def moves_entries(module: Module) -> bool:
    """Return whether a module stands for a function whose results are entries of its argument."""
    return isinstance(module, FunctionModule) and treatment_by(module) in (MOVES, RESHAPES)


def _moved_products(
    evaluation: Evaluation, mats: Several, keys: Sequence[int]
) -> dict[Any, Tensor | None] | None:
    """As :func:`per_sample_products`: numbers in the place of entries tell where each one goes.

    None if they do not come through as they are.
    """
    double, numbers = torch.float64, evaluation.numbers
    zeros = [torch.zeros_like(x, dtype=double) if is_real(x) else x for x in evaluation.inputs]
    values: Values = {}
    start = 1
    for i in keys:
        end = start + zeros[i].numel()
        values[i] = torch.arange(start, end, device=zeros[i].device).to(zeros[i])
        values[i], start = values[i].reshape(zeros[i].shape), end
    try:
        with torch.no_grad():
            moved = evaluation.outputs(values, zeros)
            doubled = evaluation.outputs({i: 2 * x for i, x in values.items()}, zeros)
    except RuntimeError:  # it is not for this precision
        return None
    used = [m for m in mats if m is not None]
    if any(y.dtype is not double for y in moved):
        return None
    result = used[0].new_zeros(len(used[0]), len(numbers), start)
    for m, axis, y, other in zip(mats, evaluation.axes_out, moved, doubled, strict=True):
        if m is not None and axis is not None:
            places = torch.where(other == 2 * y, y, 0).long()  # others are constants
            places = places.movedim(axis, 0)[list(numbers)].unsqueeze(-1).flatten(1)
            vectors = m.movedim(axis + 1, 1).unsqueeze(-1).flatten(2)  # perhaps of no sample
            result.scatter_add_(2, places.expand(len(vectors), -1, -1), vectors)
    parts = result[..., 1:].split([values[i].numel() for i in keys], -1)
    return {
        i: part.reshape(*part.shape[:2], *values[i].shape)
        for i, part in zip(keys, parts, strict=True)
    }


def products(
    evaluation: Evaluation, tangents: Mapping[Any, Tensor | None], rows: Rows
) -> list[Tensor]:
    """Apply the Jacobian: the sum over inputs and parameters of ``J t``, ``[V, *out]`` each.

    By two transposed products: ``Jᵀ u`` is linear in u, and its derivative is ``J``. In
    ``logcumsumexp`` torch computes it with the logarithm of u, so that there is none at zero: then
    by autograd in forward mode.

    Tangents are ``[V, *in]`` or ``[V, *p]`` for each key, at some rows, which the results have.
    """
    known = {key: t for key, t in tangents.items() if t is not None}
    inputs, separable = evaluation.rows(rows)
    if not separable:
        known = evaluation.whole_tangents(known, rows)
    create_graph = torch.is_grad_enabled()
    values = _variables(evaluation, list(known), inputs)
    with torch.enable_grad(), differentiated_twice(evaluation.c.module):
        ys = evaluation.outputs(values, inputs)
        if separable and not evaluation.are_rows(ys, rows):
            return products(evaluation, tangents, rows)
        us = [torch.ones_like(y, requires_grad=True) for y in ys]
        backs = _slopes(ys, [*values.values()], us)
        found = pull_back(backs, us, [known[key] for key in values], create_graph)
    if any(t is not None and has_values(t) and bool(t.isnan().any()) for t in found):
        found = _forward_products(evaluation, values, known, inputs) or found
    num_v = len(next(iter(known.values())))
    results = [
        y.new_zeros(num_v, *y.shape) if t is None else t for y, t in zip(ys, found, strict=True)
    ]
    if not separable:
        results = [
            t if axis is None else subsample(t, axis + 1, rows)
            for t, axis in zip(results, evaluation.axes_out, strict=True)
        ]
    return results


def _forward_products(
    evaluation: Evaluation, values: Values, tangents: Mapping[Any, Tensor], inputs: Sequence[Any]
) -> list[Tensor | None] | None:
    """Apply the Jacobian in forward mode; None if torch cannot do that."""
    values = values if torch.is_grad_enabled() else {k: x.detach() for k, x in values.items()}

    def along(t: Values) -> list[Tensor]:
        return torch.func.jvp(lambda v: evaluation.outputs(v, inputs), (values,), (t,))[1]

    try:
        return list(torch.vmap(along)(dict(tangents)))
    except (RuntimeError, NotImplementedError):
        return None


def summed_products(
    evaluation: Evaluation, g_out: Several, tangents: Mapping[Any, Tensor]
) -> dict[Any, Tensor]:
    """Apply the second derivative of ``⟨g_out, y⟩`` for the sum over the samples at hand.

    As :func:`transposed_products` with tangents, but in as few parts as memory allows.
    """
    numbers = evaluation.numbers
    size = chunk(evaluation, len(next(iter(tangents.values()))))
    if size >= len(numbers) or not evaluation.rows([numbers[0]])[1]:
        return transposed_products(evaluation, g_out, tangents, numbers)
    each = []
    for start in range(0, len(numbers), size):
        some = numbers[start : start + size]
        own = narrowed(evaluation, g_out, tangents, start, len(some))
        each.append(transposed_products(evaluation, *own, some))
    found = {}
    for key in tangents:
        axis, parts = evaluation.axis(key), [one[key] for one in each]
        found[key] = sum(parts[1:], parts[0]) if axis is None else torch.cat(parts, axis + 1)
    return found


def has_second_derivative(evaluation: Evaluation, of_params: bool) -> bool:
    """Return whether a second derivative by the inputs, or each parameter, is not zero in a call.

    Then its products with random vectors are not zero, for a sum of outputs with random weights.
    Rounding counts as a second derivative, and so does what has no values.
    """
    generator = generator_at(evaluation.inputs)

    def draw(x: Tensor, *v: int) -> Tensor:
        return drawn((*v, *x.shape), generator).to(x)

    call, outputs = evaluation.c.call, evaluation.c.outputs
    keys: list[Any] = [i for i, x in enumerate(evaluation.inputs) if is_real(x)]
    groups = [[name] for name in call.trained] if of_params else [keys]
    if not any(g is not None for g in call.g_out):
        return False
    if not has_values(outputs[0]):
        return any(groups)
    pairs = zip(call.g_out, outputs, strict=True)
    g_out = [None if g is None else draw(y) for g, y in pairs]
    for group in groups:
        tangents = {key: draw(evaluation.value(key), 1) for key in group}
        if tangents:
            found = transposed_products(evaluation, g_out, tangents, None)
            if any(bool((p != 0).any()) for p in found.values()):
                return True
    return False
