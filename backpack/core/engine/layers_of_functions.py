"""Functions that are calls of layers, which is found out when a backward pass is over.

``x @ weight.T`` reads a view of a parameter; ``torch.addmm``, ``torch.einsum`` and ``table[index]``
read the parameter itself. Others may read it as well, and hooks may change what arrives: so the
functions run, and are recorded, as they are. If layers explain all that has arrived at the
parameter, the functions are calls of these, with their formulas and Kronecker factors.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.evaluation import close
from backpack.core.engine import call_products
from backpack.core.record import shards
from backpack.core.record.context import context_of
from backpack.core.record.functional_layers import Weight
from backpack.core.record.lookup import row_of
from backpack.core.record.origins import Origin
from backpack.core.record.visits import Visit, compute_in_one_precision
from backpack.core.record.weights import version_of
from backpack.custom_module.function_module import FunctionModule
from backpack.custom_module.parameter_module import ParameterModule

# What says where a module belongs.
MARKS = {"_backpack_name", "_backpack_converted"}
# Nodes of functions of a matrix: those that leave its entries where they are, those that do if the
# shape is the same, and those that may exchange its axes. Numbers below zero are stored as 2⁶⁴ - n.
COPIES = {"AliasBackward0", "CloneBackward0"}
SHAPES = {"ViewBackward0", "ReshapeAliasBackward0"}
EXCHANGES: dict[str, Callable[[Any], bool]] = {
    "TBackward0": lambda node: True,
    "TransposeBackward0": lambda node: (node._saved_dim0 - node._saved_dim1) % 2 == 1,
    "PermuteBackward0": lambda node: node._saved_dims[0] % 2 == 1,
}


class Uses(NamedTuple):
    """What becomes of a parameter that functions read."""

    views: list[Visit]  # the call that reads it, and those that make something else of it alone
    ends: list[Visit]  # those in which it meets data


def find_layers(calls: Sequence[Visit]) -> None:
    """Let functions be the layers that they are calls of, where all that read a parameter are."""
    readers = [call for call in calls if type(call.module) is ParameterModule and call.trained]
    if not readers or shards.KNOWN:
        return
    consumers: dict[Origin | None, list[Visit]] = defaultdict(list)
    for call in calls:
        for mark in () if call.is_transparent else {*call.origins_in}:
            consumers[mark].append(call)
    uses = {reader: _uses_of(reader, consumers) for reader in readers}
    behind: dict[Origin | None, Visit] = {
        mark: reader
        for reader, (views, _) in uses.items()
        for view in views
        for mark in view.origins_out
    }
    layers: dict[Visit, Visit] = {}
    for end in dict.fromkeys(chain.from_iterable(ends for _, ends in uses.values())):
        layer = _layer(end, behind)
        if layer is not None:
            layers[end] = layer

    # a function that stays one may have read another parameter, which layers do not explain then
    while left := [reader for reader, of_it in uses.items() if not _explain(reader, of_it, layers)]:
        for end in chain.from_iterable(uses.pop(reader).ends for reader in left):
            layers.pop(end, None)
    for call, layer in layers.items():
        vars(call).update(vars(layer))
    for view in chain.from_iterable(views for views, _ in uses.values()):
        view.trained, view.is_transparent = {}, True  # what it has computed is read as it is


def _uses_of(reader: Visit, consumers: Mapping[Origin | None, Sequence[Visit]]) -> Uses:
    """Follow a parameter until it meets data."""
    uses = Uses([reader], [])
    for view in uses.views:  # which are added to meanwhile
        for call in chain.from_iterable(consumers.get(mark, ()) for mark in view.origins_out):
            kind = uses.views if call.is_unbatched else uses.ends
            if call not in kind:
                kind.append(call)
    return uses


def _layer(call: Visit, behind: Mapping[Origin | None, Visit]) -> Visit | None:
    """Return the call of the layer that a function is; ``behind``: what has read a parameter."""
    module: Any = call.module
    row = row_of(module.function) if type(module) is FunctionModule else None
    if row is None or row.reading is None or call.structure is not None:
        return None
    readers = [behind[mark] for mark in call.origins_in if mark in behind]
    given: list[Any] = [
        _weight(x, behind[mark].trained["parameter"]) if mark in behind else _frozen(call, i)
        for i, (x, mark) in enumerate(zip(call.inputs, call.origins_in, strict=True))
    ]
    data = [i for i, x in enumerate(given) if not isinstance(x, Weight)]
    if len(data) != 1 or version_of(call.inputs[data[0]]) != call.versions[data[0]]:
        return None
    try:
        args, kwargs = module.arguments(*given)
        found = row.reading(*args, **kwargs)
    except (TypeError, ValueError):  # arguments in another form
        return None
    if found is None:
        return None
    layer, x = found
    vars(layer).update({name: vars(module)[name] for name in MARKS & vars(module).keys()})
    visit = call.as_layer(layer, data[0], x)
    if visit is not None:
        visit.kept_values = dict(ChainMap(*[dict(reader.kept_values) for reader in readers]))
    return visit


def _weight(x: Tensor, p: Parameter) -> Weight | None:
    """Describe what was made of a parameter; None if that is not the same, nor its transpose."""
    node: Any = x.grad_fn
    shape, is_transposed = [*x.shape], False
    while not hasattr(node, "variable"):
        kind = type(node).__name__
        if kind in EXCHANGES and len(shape) == 2:
            if EXCHANGES[kind](node):
                shape, is_transposed = shape[::-1], not is_transposed
        elif kind not in COPIES and not (kind in SHAPES and [*node._saved_self_sym_sizes] == shape):
            return None
        node = node.next_functions[0][0]
    return Weight(p, is_transposed) if node.variable is p and type(p) is Parameter else None


def _frozen(call: Visit, i: int) -> Any:
    """Return an input; if that is a parameter without a gradient (and no data), describe it."""
    x, layout = call.inputs[i], call.layouts_in[i]
    if type(x) is not Parameter or x.requires_grad or layout is None or layout.is_batched:
        return x
    return Weight(x, False)


@torch.no_grad()
def _explain(reader: Visit, uses: Uses, layers: Mapping[Visit, Visit]) -> bool:
    """Whether layers explain the gradient that has arrived at what has read a parameter."""
    (total,), p, ends = reader.g_out, reader.trained["parameter"], uses.ends
    if total is None or not ends or not layers.keys() >= {*ends}:
        return False
    found, terms = torch.zeros_like(total), []
    for layer in map(layers.__getitem__, ends):
        compute_in_one_precision([layer])
        c, (grad,) = context_of(layer), layer.gradients()
        if grad is None:
            continue
        for name in (name for name, own in layer.params.items() if own is p):
            part = call_products.param(c, "param_vjp_sum", name, [grad.unsqueeze(0)])
            found += part.squeeze(0)
        terms.append((layer.rounding, grad, c.x))
    rounding = max((rounding for rounding, *_ in terms), default=0.0)
    # half of the digits do not show what a hook changes if there are three in all
    if rounding > torch.finfo(torch.float32).eps and _is_hooked(uses):
        return False
    if close(found, total, rounding):
        return True
    size = 0.0  # of terms that may have cancelled, but for their rounding
    for rounding, grad, x in terms:
        largest = max(1.0, float(x.abs().max())) if x.is_floating_point() else 1.0
        size += rounding * float(grad.abs().sum()) * largest
    return float((found - total).abs().max()) <= 10 * size


def _is_hooked(uses: Uses) -> bool:
    """Whether there are hooks of a view of the parameter."""
    marks = {mark for view in uses.views for mark in view.origins_out}
    return any(
        x._backward_hooks
        for call in (*uses.views, *uses.ends)
        for x, mark in zip(call.inputs, call.origins_in, strict=True)
        if mark in marks and isinstance(x, Tensor) and not x.is_leaf
    )
