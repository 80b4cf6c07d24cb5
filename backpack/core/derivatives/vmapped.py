"""Products for many samples or vectors at once, by ``vmap``, and whether they are right.

Some of torch's batching rules are wrong (of prelu, nested; of group_norm in torch 2.11). So a
combination of all results, with random weights, is compared with the product of that combination,
which takes one pass without ``vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from backpack.context import disable
from backpack.core import fast
from backpack.core.derivatives.evaluation import Evaluation, Values, close, drawn, generator_at

VMAP = fast.path("samples by vmap", "Autograd differentiates for many samples at once.")
# Entries of inputs and outputs of the samples that vmap treats at once, times vectors.
CHUNK_ENTRIES = 2**24
Several = Sequence[Tensor | None]  # tensors, None for zero
# Inputs (by number) and parameters (by name), or tangents by these: for second derivatives.
Keys = Sequence[Any] | Mapping[Any, Tensor]
# Combines with weights of the vectors and of the samples: ``[1, *]`` by key.
Combined = Callable[[Tensor, Tensor], Mapping[Any, Tensor | None]]


def gradients(*args: Any, **options: Any) -> Any:
    """Differentiate without setting off the hooks of recorded calls."""
    with disable():
        return torch.autograd.grad(*args, **options)


def _drawn_weights(count: int) -> Tensor:
    return drawn((count,), torch.Generator().manual_seed(0))


def pull_back(
    ys: Several, xs: Sequence[Tensor], mats: Several, create_graph: bool
) -> list[Tensor | None]:
    """Apply the transposed Jacobian of ``ys`` with respect to ``xs`` to V vectors at once."""
    pairs = [(y, m) for y, m in zip(ys, mats, strict=True) if y is not None and m is not None]
    pairs = [(y, m) for y, m in pairs if y.requires_grad]
    if not pairs:
        return [None] * len(xs)
    outs, vectors = [y for y, _ in pairs], [m for _, m in pairs]
    options: Any = {"create_graph": create_graph, "allow_unused": True, "retain_graph": True}
    num_v = len(vectors[0])
    if not num_v:
        return [x.new_zeros(0, *x.shape) for x in xs]
    if num_v > 1:
        try:
            found = list(gradients(outs, xs, vectors, is_grads_batched=True, **options))
        except RuntimeError:  # an operation without a batching rule
            pass
        else:
            weights = _drawn_weights(num_v)
            exact = gradients(outs, xs, [summed(m, weights) for m in vectors], **options)
            both = [None if b is None else summed(b, weights) for b in found]
            if _agree(both, exact, [*xs, *vectors]):
                return found
    each = [gradients(outs, xs, [m[v] for m in vectors], **options) for v in range(num_v)]
    return [None if g[0] is None else torch.stack(g) for g in zip(*each, strict=True)]


def summed(values: Tensor, *weights: Tensor) -> Tensor:
    """Add up what is along the first axes, with weights."""
    for each in weights:
        values = torch.tensordot(each.to(values), values, 1)
    return values


def weighted(values: Tensor, weights: Tensor, axis: int) -> Tensor:
    """Multiply what is along an axis by weights."""
    return values * weights.to(values).reshape(-1, *[1] * (values.dim() - axis - 1))


def chunk(evaluation: Evaluation, num_v: int) -> int:
    """Return how many samples to treat at once, so that intermediate results stay small."""
    tensors = [x for x in (*evaluation.inputs, *evaluation.c.outputs) if isinstance(x, Tensor)]
    entries = num_v * sum(x.numel() for x in tensors) // evaluation.num_samples
    return max(1, CHUNK_ENTRIES // max(1, entries))


def if_right(
    evaluation: Evaluation,
    shape: tuple[int, int],
    compute: Callable[[], dict[Any, Any]],
    combined: Combined,
) -> dict[Any, Any] | None:
    """Return results of ``vmap``, ``[V, N, *]`` by key; None if there are none that are right."""
    if not VMAP.is_on or shape[1] < 2:
        return None
    try:
        found = compute()
    except Exception:  # no batching rule, a compiler that knows no vmap
        return None
    # sums over axes of one entry are no error of torch
    if any(each is not None and each.shape[:2] != shape for each in found.values()):
        return None
    return found if are_right(evaluation, shape, found, combined) else None


def are_right(
    evaluation: Evaluation, shape: tuple[int, int], found: Mapping[Any, Any], combined: Combined
) -> bool:
    """Whether a combination of results is the product of that combination."""
    vectors, samples = map(_drawn_weights, shape)
    exact = combined(vectors, samples)
    both: list[Tensor | None] = []
    for key, each in found.items():
        axis = evaluation.axis(key)
        if each is None:
            both.append(None)
        elif axis is None:
            both.append(summed(each, vectors, samples)[None])
        else:  # these have products of their own
            both.append(weighted(summed(each, vectors), samples, 0).movedim(0, axis)[None])
    of = [*evaluation.inputs, *map(evaluation.value, found)]
    return _agree(both, [exact[key] for key in found], of)


def _agree(found: Several, exact: Several, of: Sequence[Any]) -> bool:
    """Compare values, and their derivatives, which may be wrong all the same (of layer_norm)."""
    are_close = _are_close(found, exact)
    return are_close and (not torch.is_grad_enabled() or _have_close_slopes(found, exact, of))


def _are_close(some: Several, others: Several) -> bool:
    return all(
        one is other if one is None or other is None else close(one, other)
        for one, other in zip(some, others, strict=True)
    )


def _have_close_slopes(some: Several, others: Several, of: Sequence[Any]) -> bool:
    """Compare derivatives along random vectors, if torch has those of the others."""
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
        return gradients(sum(terms), leaves, retain_graph=True, materialize_grads=True)

    with torch.enable_grad():
        try:
            exact = slopes([y for _, y in known])
        except RuntimeError:
            return True
        try:
            return _are_close(slopes([x for x, _ in known]), exact)
        except RuntimeError:
            return False


def products(
    evaluation: Evaluation, mats: Several, keys: Keys, inputs: Sequence[Any]
) -> dict[Any, Tensor]:
    """As ``by_autograd.transposed_products``, but for each sample apart: ``[V, N, *]`` by key."""
    sampled = {i: axis for i, axis in enumerate(evaluation.axes_in) if axis is not None}
    used = [j for j, m in enumerate(mats) if m is not None]
    axes_out: Any = evaluation.axes_out
    tangents = dict(keys) if isinstance(keys, Mapping) else {}

    def of_sample(others: Values, xs: Values, at_outputs: list[Tensor], along: Values) -> Any:
        def outputs(values: Values) -> list[Tensor]:
            leaves = list(inputs)
            for i, axis in sampled.items():
                leaves[i] = values.get(i, xs[i]).unsqueeze(axis)
            ys = evaluation.outputs({k: v for k, v in values.items() if k not in xs}, leaves)
            return [ys[j].squeeze(axes_out[j]) for j in used]

        def total(values: Values) -> Tensor:
            pairs = zip(outputs(values), at_outputs, strict=True)
            return torch.stack([(y * g).sum() for y, g in pairs]).sum()

        values = {key: xs[key] if key in xs else others[key] for key in keys}
        linear = torch.func.vjp(torch.func.grad(total) if along else outputs, values)[1]
        return torch.vmap(lambda v: linear(v)[0])(along or at_outputs)

    others = {key: evaluation.value(key) for key in keys if key not in sampled}
    at_outputs: Any = [mats[j] for j in used]
    axes = [axes_out[j] + (0 if tangents else 1) for j in used]
    of_tangents = {key: sampled[key] + 1 if key in sampled else None for key in tangents}
    mapped = torch.vmap(
        of_sample,
        in_dims=(None, sampled, axes, of_tangents),
        out_dims=1,
        chunk_size=chunk(evaluation, len(next(iter(tangents.values()), at_outputs[0]))),
    )
    return mapped(others, {i: inputs[i] for i in sampled}, at_outputs, tangents)
