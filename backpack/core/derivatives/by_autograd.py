"""Products with the first and second derivative of any module call, by autograd.

Used where a rule has no formula of its own. Samples are independent of each other, so products
with the batched inputs need one pass over the whole batch; what belongs to a tensor without
samples (a parameter) is needed for each sample apart, and is computed sample by sample, with
``vmap`` where that works. Sums over the samples need no such care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack.context import disable
from backpack.core import fast
from backpack.core.derivatives.evaluation import (
    Evaluation,
    Values,
    close,
    drawn,
    generator_at,
    is_real,
)
from backpack.core.record.module_state import describe
from backpack.core.rows import Rows
from backpack.core.values import has_values
from backpack.hessianfree.graph import nodes_above
from backpack.utils.subsampling import subsample

VMAP = fast.path("samples by vmap", "Autograd differentiates for many samples at once.")
# Entries of inputs and outputs of the samples that vmap treats at once, times vectors.
CHUNK_ENTRIES = 2**24


def _grad(*args: Any, **options: Any) -> Any:
    """Differentiate without setting off the hooks of recorded calls."""
    with disable():
        return torch.autograd.grad(*args, **options)


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


def pull_back(
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    mats: Sequence[Tensor | None],
    create_graph: bool,
) -> list[Tensor | None]:
    """Apply the transposed Jacobian of ``ys`` with respect to ``xs`` to V vectors at once."""
    pairs = [(y, m) for y, m in zip(ys, mats, strict=True) if m is not None and y.requires_grad]
    if not pairs:
        return [None] * len(xs)
    outs, vectors = [y for y, _ in pairs], [m for _, m in pairs]
    options: Any = {"create_graph": create_graph, "allow_unused": True, "retain_graph": True}
    num_v = len(vectors[0])
    if not num_v:
        return [x.new_zeros(0, *x.shape) for x in xs]
    if num_v > 1:
        try:
            found = list(_grad(outs, xs, vectors, is_grads_batched=True, **options))
        except RuntimeError:  # an operation without a batching rule
            found = None
        # some of the rules are wrong (of group_norm in torch 2.11, if differentiable)
        if found is not None:
            weights = _drawn_weights(num_v)
            exact = _grad(outs, xs, [_combined(m, weights) for m in vectors], **options)
            both = [None if b is None else _combined(b, weights) for b in found]
            if _agree(both, exact, [*xs, *vectors]):
                return found
    each = [_grad(outs, xs, [m[v] for m in vectors], **options) for v in range(num_v)]
    return [None if g[0] is None else torch.stack(g) for g in zip(*each, strict=True)]


def transposed(
    linear: Callable[[Any], Sequence[Tensor | None]], vs: Sequence[Tensor], ts: Sequence[Any]
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
        return list(_grad([b for b, _ in pairs], vs, [t for _, t in pairs], **options))


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
    evaluation: Evaluation,
    mats: Sequence[Tensor | None],
    keys: Sequence[Any],
    rows: Rows,
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
    if not separable:
        mats = evaluation.whole(mats, rows, 1)
    create_graph = torch.is_grad_enabled()
    values = _variables(evaluation, keys, inputs)
    try:
        with torch.enable_grad():
            ys = evaluation.outputs(values, inputs)
            found = pull_back(ys, list(values.values()), mats, create_graph)
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
    evaluation: Evaluation,
    mats: Sequence[Tensor | None],
    keys: Sequence[Any],
    rows: Rows,
    numbers: Sequence[int],
) -> dict[Any, Tensor | None]:
    """Apply the transposed Jacobian for each sample apart: ``[V, N, *p]`` for each key.

    As :func:`transposed_products`, for inputs without samples, and parameters. The ``numbers`` are
    those of the rows.
    """
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
    inputs, separable = evaluation.rows(rows if rows is not None else slice(None))

    def of_sample(i: int) -> dict[Any, Tensor | None]:
        own = evaluation.at_outputs(mats, lambda m, axis: m.narrow(axis + 1, i, 1))
        return transposed_products(evaluation, own, keys, [numbers[i]])

    def combined(vectors: Tensor, samples: Tensor) -> dict[Any, Tensor | None]:
        own = evaluation.at_outputs(
            mats, lambda m, axis: _weighted(_combined(m, vectors), samples, axis)[None]
        )
        return transposed_products(evaluation, own, keys, rows)

    if VMAP.is_on and separable and len(numbers) > 1:
        try:
            found = _vmapped_products(evaluation, mats, keys, inputs)
        except Exception:  # no batching rule, a compiler that knows no vmap: one sample at a time
            found = None
        num_v = max(len(m) for m in mats if m is not None)
        if found is not None and _are_right(evaluation, found, (num_v, len(numbers)), combined):
            return found
    each = [of_sample(i) for i in range(len(numbers))]
    results: dict[Any, Tensor | None] = {}
    for key in keys:
        parts = [one[key] for one in each]
        known = [part for part in parts if part is not None]
        results[key] = torch.stack(known, 1) if len(known) == len(parts) else None
    return results


def moved_products(
    evaluation: Evaluation,
    mats: Sequence[Tensor | None],
    keys: Sequence[int],
    numbers: Sequence[int],
) -> dict[Any, Tensor | None] | None:
    """As :func:`per_sample_products`, for a function that moves entries.

    Numbers in the place of the entries tell where each one goes. None if they do not come through
    as they are.
    """
    double = torch.float64
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
            places = places.movedim(axis, 0)[list(numbers)].flatten(1)
            vectors = m.movedim(axis + 1, 1).flatten(2)
            result.scatter_add_(2, places.expand(len(vectors), -1, -1), vectors)
    parts = result[..., 1:].split([values[i].numel() for i in keys], -1)
    return {
        i: part.reshape(*part.shape[:2], *values[i].shape)
        for i, part in zip(keys, parts, strict=True)
    }


def _drawn_weights(count: int) -> Tensor:
    return drawn((count,), torch.Generator().manual_seed(0))


def _are_right(
    evaluation: Evaluation,
    found: Mapping[Any, Tensor | None],
    shape: tuple[int, int],
    combined: Callable[[Tensor, Tensor], Mapping[Any, Tensor | None]],
) -> bool:
    """Compare results of ``vmap``, ``[V, N, *]``, with the product of a combination of all.

    It is ``combined``, ``[1, *]``, with weights of the vectors and of the samples.
    """
    # sums over axes of one entry are no error of torch
    if any(each is not None and each.shape[:2] != shape for each in found.values()):
        return False
    vectors, samples = map(_drawn_weights, shape)
    exact = combined(vectors, samples)
    both: list[Tensor | None] = []
    for key, each in found.items():
        axis = evaluation.axis(key)
        if each is None:
            both.append(None)
        elif axis is None:
            both.append(_combined(each, vectors, samples)[None])
        else:  # these have products of their own
            both.append(_weighted(_combined(each, vectors), samples, 0).movedim(0, axis)[None])
    of = [*evaluation.inputs, *map(evaluation.value, found)]
    return _agree(both, [exact[key] for key in found], of)


def _combined(values: Tensor, *weights: Tensor) -> Tensor:
    """Add up what is along the first axes, with weights."""
    for each in weights:
        values = torch.tensordot(each.to(values), values, 1)
    return values


def _weighted(values: Tensor, weights: Tensor, axis: int) -> Tensor:
    """Multiply what is along an axis by weights."""
    return values * weights.to(values).reshape(-1, *[1] * (values.dim() - axis - 1))


def _agree(
    found: Sequence[Tensor | None], exact: Sequence[Tensor | None], of: Sequence[Any]
) -> bool:
    """Compare a combination of all results of ``vmap`` with the product of that combination.

    Some of torch's rules are wrong (of prelu, nested). If the results have a graph, so do their
    derivatives, which may be wrong (of layer_norm, twice) though the values are right.
    """
    if not _are_close(found, exact):
        return False
    return not torch.is_grad_enabled() or _have_close_slopes(found, exact, of)


def _are_close(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    return all(
        one is other if one is None or other is None else close(one, other)
        for one, other in zip(some, others, strict=True)
    )


def _have_close_slopes(
    some: Sequence[Tensor | None], others: Sequence[Tensor | None], of: Sequence[Any]
) -> bool:
    """Compare derivatives of what has a graph, along random vectors, with respect to tensors.

    If torch has none of the others, there is nothing to be wrong.
    """
    leaves = [x for x in of if isinstance(x, Tensor) and x.requires_grad]
    pairs = zip(some, others, strict=True)
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    if not leaves or not any(x.requires_grad or y.requires_grad for x, y in known):
        return True
    generator = generator_at(leaves)
    along = [drawn(x.shape, generator).to(x) for x, _ in known]

    def slopes(values: Sequence[Tensor]) -> Sequence[Tensor]:
        terms = [(v * a).sum() for v, a in zip(values, along, strict=True) if v.requires_grad]
        if not terms:
            return [torch.zeros_like(x) for x in leaves]
        return _grad(sum(terms), leaves, retain_graph=True, materialize_grads=True)

    with torch.enable_grad():
        try:
            exact = slopes([y for _, y in known])
        except RuntimeError:
            return True
        try:
            return _are_close(slopes([x for x, _ in known]), exact)
        except RuntimeError:
            return False


def _vmapped_products(
    evaluation: Evaluation,
    mats: Sequence[Tensor | None],
    keys: Sequence[Any],
    inputs: Sequence[Any],
) -> dict[Any, Tensor | None]:
    sampled = [i for i, axis in enumerate(evaluation.axes_in) if axis is not None]
    used = [j for j, m in enumerate(mats) if m is not None]
    axes_in: Any = evaluation.axes_in
    axes_out: Any = evaluation.axes_out

    def of_sample(values: Values, xs: list[Tensor], vectors: list[Tensor]) -> Any:
        leaves = list(inputs)
        for i, x in zip(sampled, xs, strict=True):
            leaves[i] = x.unsqueeze(axes_in[i])

        def outputs(values: Values) -> list[Tensor]:
            ys = evaluation.outputs(values, leaves)
            return [ys[j].squeeze(axes_out[j]) for j in used]

        pull: Any = torch.func.vjp(outputs, values)[1]
        return torch.vmap(lambda *v: pull(list(v))[0])(*vectors)

    values = {key: evaluation.value(key) for key in keys}
    xs = [inputs[i] for i in sampled]
    vectors: Any = [mats[j] for j in used]
    dims = (None, [axes_in[i] for i in sampled], [axes_out[j] + 1 for j in used])
    size = _chunk(evaluation, len(vectors[0]))
    return torch.vmap(of_sample, in_dims=dims, out_dims=1, chunk_size=size)(values, xs, vectors)


def _chunk(evaluation: Evaluation, num_v: int) -> int:
    """Return how many samples to treat at once, so that intermediate results stay small."""
    tensors = [x for x in (*evaluation.inputs, *evaluation.c.outputs) if isinstance(x, Tensor)]
    entries = num_v * sum(x.numel() for x in tensors) // evaluation.num_samples
    return max(1, CHUNK_ENTRIES // max(1, entries))


def products(
    evaluation: Evaluation,
    tangents: Mapping[Any, Tensor | None],
    rows: Rows,
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
        us = [torch.ones_like(y, requires_grad=True) for y in ys]
        reached = [(y, u) for y, u in zip(ys, us, strict=True) if y.requires_grad]
        outs, own = [y for y, _ in reached], [u for _, u in reached]
        backs = _grad(outs, [*values.values()], own, create_graph=True, allow_unused=True)
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
    evaluation: Evaluation,
    values: Values,
    tangents: Mapping[Any, Tensor],
    inputs: Sequence[Any],
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
    g_out: Sequence[Tensor | None],
    tangents: Mapping[Any, Tensor],
    numbers: Sequence[int],
    sum_batch: bool = False,
) -> dict[Any, Tensor]:
    """Apply the second derivative of ``⟨g_out, y⟩``, for each sample apart or for their sum.

    Args:
        evaluation: The call.
        g_out: ``[*out]`` of the selected samples for each output, or None.
        tangents: ``[V, *in]`` or ``[V, *p]`` for each input and parameter that varies.
        numbers: Those of the selected samples.
        sum_batch: Whether to sum over the samples: in as few parts as memory allows.

    Returns:
        ``[V, *in]`` for inputs with samples, ``[V, N, *]`` (summed: ``[V, *]``) for everything
        else.
    """
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
        g = evaluation.at_outputs(g_out, lambda m, axis: _weighted(m, samples, axis))
        own = {key: _combined(t, vectors)[None] for key, t in tangents.items()}
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
        size = _chunk(evaluation, num_v)
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
    if VMAP.is_on and separable and count > 1:
        try:
            found = _vmapped_second(evaluation, g_out, tangents, inputs)
        except (RuntimeError, NotImplementedError):  # no batching rule, or none twice
            found = None
        if found is not None and _are_right(evaluation, found, (num_v, count), combined):
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
    g_out: Sequence[Tensor | None],
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
        # what is once differentiable (a function in Python) says so if the gradient has a graph
        pairs = [
            (y, g if g.requires_grad else g.detach().requires_grad_())
            for y, g in zip(ys, g_out, strict=True)
            if g is not None
        ]
        outs, grads, xs = [y for y, _ in pairs], [g for _, g in pairs], [*values.values()]
        slopes = _grad(outs, xs, grads, create_graph=True, allow_unused=True)
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


def _refuse_once_differentiable(gradients: Sequence[Tensor | None], module: Module) -> None:
    """Refuse gradients that are marked ``once_differentiable``: autograd would take it for zero."""
    above = nodes_above(g.grad_fn for g in gradients if g is not None)
    if any(type(node).__name__ == "Error" for node in above):
        raise RuntimeError(
            f"A function of {describe(module)} is marked as once_differentiable, so its second "
            "derivative is not known. Write its backward with functions of torch, and without that "
            "mark."
        )


def _vmapped_second(
    evaluation: Evaluation,
    g_out: Sequence[Tensor | None],
    tangents: Mapping[Any, Tensor],
    inputs: Sequence[Any],
) -> dict[Any, Tensor]:
    """Apply the second derivative for each sample apart: ``[V, N, *]`` for each key."""
    sampled = [i for i, axis in enumerate(evaluation.axes_in) if axis is not None]
    used = [j for j, g in enumerate(g_out) if g is not None]
    axes_in: Any = evaluation.axes_in
    axes_out: Any = evaluation.axes_out
    batched = [key for key in tangents if evaluation.axis(key) is not None]

    def of_sample(xs: list[Tensor], gs: list[Tensor], ts: Values, others: Values) -> Values:
        own = dict(zip(sampled, xs, strict=True))

        def weighted(values: Values) -> Tensor:
            leaves = list(inputs)
            for i in sampled:
                leaves[i] = values.get(i, own[i]).unsqueeze(axes_in[i])
            ys = evaluation.outputs({k: v for k, v in values.items() if k not in batched}, leaves)
            terms = [(ys[j].squeeze(axes_out[j]) * g).sum() for j, g in zip(used, gs, strict=True)]
            return torch.stack(terms).sum()

        def along(t: Values) -> Callable[[Values], Tensor]:
            def slope(values: Values) -> Tensor:
                gradient = torch.func.grad(weighted)(values)
                return torch.stack([(gradient[k] * t[k]).sum() for k in t]).sum()

            return slope

        point = {**{i: own[i] for i in batched}, **others}
        return torch.vmap(lambda t: torch.func.grad(along(t))(point))(ts)

    others = {k: evaluation.value(k) for k in tangents if k not in batched}
    of_tangents = {k: axes_in[k] + 1 if k in batched else None for k in tangents}
    dims = [axes_in[i] for i in sampled], [axes_out[j] for j in used], of_tangents, None
    gs: Any = [g_out[j] for j in used]
    size = _chunk(evaluation, len(next(iter(tangents.values()))))
    mapped = torch.vmap(of_sample, in_dims=dims, out_dims=1, chunk_size=size)
    return mapped([inputs[i] for i in sampled], gs, dict(tangents), others)
