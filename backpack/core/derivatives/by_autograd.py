"""Products with the first and second derivative of any module call, by autograd.

Used where a rule has no formula of its own. Samples are independent of each other, so products
with the batched inputs need one pass over the whole batch; what belongs to a tensor without
samples (a parameter) is needed for each sample apart, and is computed sample by sample, with
:mod:`~backpack.core.derivatives.vmapped` where that works. Sums over the samples need no such care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack.context import disable
from backpack.core.derivatives import vmapped
from backpack.core.derivatives.evaluation import Evaluation, Values, drawn, generator_at, is_real
from backpack.core.derivatives.vmapped import Several, chunk, gradients, pull_back, summed, weighted
from backpack.core.record.module_state import describe
from backpack.core.rows import Rows
from backpack.core.values import has_values
from backpack.hessianfree.graph import nodes_above
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
    """Apply the transpose of a linear map to ``ts`` by autograd; None stands for zero.

    The tensors ``vs`` have the shapes and the precision that the map takes.
    """
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
    evaluation: Evaluation, mats: Several, keys: Sequence[Any], rows: Rows
) -> dict[Any, Tensor | None]:
    """Apply the transposed Jacobian with respect to inputs (by number) and parameters (by name).

    Args:
        evaluation: The call.
        mats: ``[V, *out]`` for each output, or None.
        keys: Inputs and parameters. Those without samples are summed over them.
        rows: Samples that ``mats`` hold.

    Returns:
        ``[V, *in]`` or ``[V, *p]`` for each key, None where nothing depends on it.
    """
    inputs, separable = evaluation.rows(rows)
    whole = mats if separable else evaluation.whole(mats, rows, 1)
    create_graph = torch.is_grad_enabled()
    values = _variables(evaluation, keys, inputs)
    try:
        with torch.enable_grad():
            ys = evaluation.outputs(values, inputs)
            if separable and not evaluation.are_rows(ys, rows):
                return transposed_products(evaluation, mats, keys, rows)
            found = pull_back(ys, list(values.values()), whole, create_graph)
    except RuntimeError as error:
        # a kernel of layer_norm has no gradient of the bias where that of the weight is not asked
        # for: many rows on a GPU (torch 2.11)
        others = [n for n, p in evaluation.c.call.read[0].items() if p is not None]
        if "invalid gradient" not in str(error) or {*others} <= {*keys}:
            raise
        more = transposed_products(evaluation, mats, [*dict.fromkeys([*keys, *others])], rows)
        return {key: more[key] for key in keys}
    products = dict(zip(values, found, strict=True))
    if not separable:
        for key, product in products.items():
            axis = evaluation.axis(key)
            if axis is not None and product is not None:
                products[key] = subsample(product, axis + 1, rows)
    return products


def per_sample_products(
    evaluation: Evaluation, mats: Several, keys: Sequence[Any]
) -> dict[Any, Tensor | None]:
    """Apply the transposed Jacobian for each sample at hand apart: ``[V, N, *p]`` for each key.

    As :func:`transposed_products`, for inputs without samples, and parameters.
    """
    rows, numbers = evaluation.c.rows, evaluation.numbers
    if evaluation.rows_differ(mats):
        total: dict[Any, Tensor | None] = dict.fromkeys(keys)
        for row, own in evaluation.each_sample(mats, 1):
            for key, product in transposed_products(evaluation, own, keys, None).items():
                if product is not None:
                    whole = total[key]
                    if whole is None:
                        shape = len(product), evaluation.num_samples, *product.shape[1:]
                        whole = total[key] = product.new_zeros(shape)
                    whole[:, row] = product
        return total
    if not numbers:  # rows that no sample has chosen
        of_all = transposed_products(evaluation, mats, keys, None)
        return {key: x if x is None else x.unsqueeze(1)[:, :0] for key, x in of_all.items()}
    inputs, separable = evaluation.rows(rows if rows is not None else slice(None))

    def of_sample(i: int) -> dict[Any, Tensor | None]:
        own = evaluation.at_outputs(mats, lambda m, axis: m.narrow(axis + 1, i, 1))
        return transposed_products(evaluation, own, keys, [numbers[i]])

    def combined(vectors: Tensor, samples: Tensor) -> dict[Any, Tensor | None]:
        own = evaluation.at_outputs(
            mats, lambda m, axis: weighted(summed(m, vectors), samples, axis)[None]
        )
        return transposed_products(evaluation, own, keys, rows)

    shape = max(len(m) for m in mats if m is not None), len(numbers)
    if separable:
        at_once = partial(vmapped.products, evaluation, mats, keys, inputs)
        found = vmapped.if_right(evaluation, shape, at_once, combined)
        if found is not None:
            return found
    each = [of_sample(i) for i in range(len(numbers))]
    results: dict[Any, Tensor | None] = {}
    for key in keys:
        parts = [one[key] for one in each]
        known = [part for part in parts if part is not None]
        results[key] = torch.stack(known, 1) if len(known) == len(parts) else None
    if separable and not vmapped.are_right(evaluation, shape, results, combined):
        evaluation.c.saved["separable"] = False  # some samples alone are what others are not
        return per_sample_products(evaluation, mats, keys)
    return results


def moved_products(
    evaluation: Evaluation, mats: Several, keys: Sequence[int]
) -> dict[Any, Tensor | None] | None:
    """As :func:`per_sample_products`, for a function that moves entries.

    Numbers in the place of the entries tell where each one goes. None if they do not come through
    as they are.
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
            places = places.movedim(axis, 0)[list(numbers)].reshape(len(numbers), -1)
            vectors = m.movedim(axis + 1, 1).reshape(len(m), len(numbers), -1)
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
        reached = [(y, u) for y, u in zip(ys, us, strict=True) if y.requires_grad]
        outs, own = [y for y, _ in reached], [u for _, u in reached]
        backs = gradients(outs, [*values.values()], own, create_graph=True, allow_unused=True)
        pairs = [(b, known[k]) for k, b in zip(values, backs, strict=True) if b is not None]
        found = pull_back([b for b, _ in pairs], us, [t for _, t in pairs], create_graph)
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


def second_products(
    evaluation: Evaluation,
    g_out: Several,
    tangents: Mapping[Any, Tensor],
    sum_batch: bool = False,
) -> dict[Any, Tensor]:
    """Apply the second derivative of ``⟨g_out, y⟩``, for each sample apart or for their sum.

    Args:
        evaluation: The call.
        g_out: ``[*out]`` of the selected samples for each output, or None.
        tangents: ``[V, *in]`` or ``[V, *p]`` for each input and parameter that varies.
        sum_batch: Whether to sum over the samples: in as few parts as memory allows.

    Returns:
        ``[V, *in]`` for inputs with samples, ``[V, N, *]`` (summed: ``[V, *]``) for everything
        else.
    """
    numbers = evaluation.numbers
    count, num_v = len(numbers), len(next(iter(tangents.values())))
    axes = {key: evaluation.axis(key) for key in tangents}

    def of_samples(start: int, size: int) -> Values:
        if size == count:  # outputs may have more rows than inputs
            return second_of_samples(evaluation, g_out, tangents, numbers)
        own = dict(tangents)
        own |= {k: own[k].narrow(a + 1, start, size) for k, a in axes.items() if a is not None}
        g = evaluation.at_outputs(g_out, lambda m, axis: m.narrow(axis, start, size))
        return second_of_samples(evaluation, g, own, numbers[start : start + size])

    def combined(vectors: Tensor, samples: Tensor) -> Values:
        g = evaluation.at_outputs(g_out, lambda m, axis: weighted(m, samples, axis))
        own = {key: summed(t, vectors)[None] for key, t in tangents.items()}
        return second_of_samples(evaluation, g, own, numbers)

    def put_together(each: Sequence[Values]) -> Values:
        found = {}
        for key, axis in axes.items():
            parts = [one[key] for one in each]
            if axis is not None:
                found[key] = torch.cat(parts, axis + 1)
            else:
                found[key] = sum(parts[1:], parts[0]) if sum_batch else torch.stack(parts, 1)
        return found

    if sum_batch:
        size = chunk(evaluation, num_v)
        if size < count and not evaluation.rows([numbers[0]])[1]:
            size = count
        return put_together([of_samples(i, min(size, count - i)) for i in range(0, count, size)])
    others = any(tangents[k].shape[a + 1] != count for k, a in axes.items() if a is not None)
    if evaluation.rows_differ(g_out) or others:
        if not (evaluation.follows and evaluation.is_whole(numbers)):
            module, shapes = evaluation.c.module, [list(x.shape) for x in evaluation.c.outputs]
            raise NotImplementedError(
                f"The second derivative of {describe(module)} for single samples: its outputs "
                f"{shapes} have another number of rows for each sample than its inputs. Give it "
                "inputs with a batch axis, or let a reshape behind it merge the axes."
            )
        total: Values = {}
        for row, g in evaluation.each_sample(g_out, 0):
            for key, each in second_of_samples(evaluation, g, tangents, None).items():
                if axes[key] is None:
                    whole = each.new_zeros(num_v, count, *each.shape[1:])
                    whole[:, row], each = each, whole
                total[key] = total[key] + each if key in total else each
        return total
    inputs, separable = evaluation.rows(slice(None) if evaluation.is_whole(numbers) else numbers)
    if separable:
        at_once = partial(vmapped.second_products, evaluation, g_out, tangents, inputs)
        found = vmapped.if_right(evaluation, (num_v, count), at_once, combined)
        if found is not None:
            moved = {k: found[k].movedim(1, a + 1) for k, a in axes.items() if a is not None}
            return found | moved
    return put_together([of_samples(i, 1) for i in range(count)])


def has_second_derivative(evaluation: Evaluation, of_params: bool) -> bool:
    """Return whether a second derivative by the inputs, or each parameter, is not zero in a call.

    Then its products with random vectors are not zero, with probability one: a sum over the outputs
    that have a gradient, with random weights, is differentiated twice. Rounding counts as a second
    derivative, and so does what has no values.
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
            found = second_of_samples(evaluation, g_out, tangents, None)
            if any(bool((p != 0).any()) for p in found.values()):
                return True
    return False


def second_of_samples(
    evaluation: Evaluation,
    g_out: Several,
    tangents: Mapping[Any, Tensor],
    numbers: Sequence[int] | None,
) -> dict[Any, Tensor]:
    """Apply the second derivative for the sum over some samples, or over whatever there is."""
    if numbers is not None and evaluation.is_whole(numbers):
        numbers = None
    inputs, separable = evaluation.rows(numbers)
    create_graph = torch.is_grad_enabled()
    values = _variables(evaluation, list(tangents), inputs)
    whole = tangents
    if not separable:
        g_out = evaluation.whole(g_out, numbers, 0)
        whole = evaluation.whole_tangents(tangents, numbers)
    with torch.enable_grad(), differentiated_twice(evaluation.c.module):
        ys = evaluation.outputs(values, inputs)
        if separable and not evaluation.are_rows(ys, numbers):
            return second_of_samples(evaluation, g_out, tangents, numbers)
        # what is once differentiable (a function in Python) says so if the gradient has a graph
        pairs = [
            (y, g if g.requires_grad else g.detach().requires_grad_())
            for y, g in zip(ys, g_out, strict=True)
            if g is not None
        ]
        outs, grads, xs = [y for y, _ in pairs], [g for _, g in pairs], [*values.values()]
        slopes = gradients(outs, xs, grads, create_graph=True, allow_unused=True)
        if not create_graph:
            _refuse_once_differentiable(slopes, evaluation.c.module)
        used = [(s, whole[key]) for key, s in zip(values, slopes, strict=True) if s is not None]
        found = pull_back([s for s, _ in used], xs, [t for _, t in used], create_graph)
    results = {}
    for key, product in zip(values, found, strict=True):
        product = torch.zeros_like(whole[key]) if product is None else product
        axis = None if separable else evaluation.axis(key)
        results[key] = product if axis is None else subsample(product, axis + 1, numbers)
    return results


def _refuse_once_differentiable(gradients: Several, module: Module) -> None:
    """Refuse gradients that are marked ``once_differentiable``: autograd would take it for zero."""
    above = nodes_above(g.grad_fn for g in gradients if g is not None)
    if any(type(node).__name__ == "Error" for node in above):
        raise RuntimeError(
            f"A function of {describe(module)} is marked as once_differentiable, so its second "
            "derivative is not known. Write its backward with functions of torch, and without that "
            "mark."
        )
