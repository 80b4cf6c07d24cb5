"""Hooks that change gradients on their way: first order sees that, all that travels does not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from backpack.core.derivatives.evaluation import agree_to
from backpack.core.engine import call_products
from backpack.core.engine.backpropagation import State
from backpack.core.engine.factors import Factor
from backpack.core.engine.plan import Plan
from backpack.core.record.context import context_of
from backpack.core.record.origins import WRAPPERS, Origin
from backpack.core.record.visits import Visit, dtypes_of

CHANGED = (
    "{}: a hook (tensor.register_hook, or a backward hook of a module) has changed the gradient of "
    "what {}. Curvature is that of what the forward pass has computed, and does not go "
    "through hooks. If a hook stands for a derivative, such as that of a fixed point, let a module "
    "compute it."
)


def look_around_hooks(tensor: Tensor, reader: str, changed: dict[str, None]) -> list[Any]:
    """Note the reader of a tensor if hooks of the program change the gradient, perhaps in place.

    Those of the tensor, and those of modules: they are at nodes, one for each container around.
    Return handles, to be removed after the backward pass.
    """
    found: list[Any] = []
    if tensor._backward_hooks:
        found += _around(tensor.register_hook, tensor.register_hook, None, reader, changed)
    node: Any = tensor.grad_fn
    slot = tensor.output_nr
    while node is not None and type(node).__name__ in WRAPPERS:
        found += _around(node.register_prehook, node.register_hook, slot, reader, changed)
        node, slot = node.next_functions[slot]
    return found


def _around(
    before: Callable[..., RemovableHandle],
    after: Callable[..., RemovableHandle],
    slot: int | None,
    reader: str,
    changed: dict[str, None],
) -> tuple[RemovableHandle, RemovableHandle]:
    """Look at a gradient before all hooks and after them; ``slot``: its number among those."""
    task = torch._C._current_graph_task_id()  # hooks may run other passes
    arrived: list[tuple[Tensor, int]] = []

    def first(grads: Any) -> None:
        grad = grads if slot is None else grads[slot]
        if torch._C._current_graph_task_id() == task and grad is not None:
            arrived.append((grad, grad._version))

    def last(grads: Any, *_: Any) -> None:
        grad = grads if slot is None else grads[slot]
        if torch._C._current_graph_task_id() != task or grad is None or not arrived:
            return
        was, version = arrived.pop()
        if was._version != version or (grad.data_ptr() != was.data_ptr() and not grad.equal(was)):
            changed[reader] = None

    handle = before(first)
    hooks: Any = handle.hooks_dict_ref()
    others = {key: hook for key, hook in hooks.items() if key != handle.id}
    for key in others:
        del hooks[key]
    hooks.update(others)  # torch calls them in the order in which they came into the dictionary
    return handle, after(last)


@torch.no_grad()
def find_changed(
    plan: Plan, functions: Collection[Visit], precisions: Set[torch.dtype]
) -> list[Visit]:
    """Return calls whose gradients are not those that the calls behind them have sent.

    Autograd may have computed them in other ``precisions`` than those of the calls.

    Hooks have changed them, at tensors that nobody has at hand: what functions read from the graph
    have read and returned, what other calls have read in another shape, or overwritten.
    """
    suspects: dict[Origin, Visit] = {}
    combining = plan.after_loss - {*plan.losses}  # these read values of losses, which have no rows
    for call in plan.calls:
        if call in combining:
            continue
        is_hidden = call in functions or vars(call.module).get("inplace")
        for mark, shape in zip(call.origins_in, call.shape_in, strict=True):
            if mark is not None and mark in plan.producers:
                producer, slot = plan.producers[mark]
                if is_hidden or producer in functions or shape != producer.shape_out[slot]:
                    suspects[mark] = producer
    readers = [call for call in plan.calls if not suspects.keys().isdisjoint(call.origins_in)]
    state = State()
    for call in readers:
        grads = call.gradients()
        rule, places = call.derivatives, map(call.place_in, range(len(call.inputs)))
        is_known = rule is not None and not call.is_unbatched and any(g is not None for g in grads)
        # a loss of chosen rows is about these as they are
        of_several = is_known and call.is_loss and rule.predictions(context_of(call)) != (0,)
        is_scattered = is_known and call.is_loss and any(p and p.is_scattered for p in places)
        if not is_known or of_several or is_scattered:
            suspects = {o: maker for o, maker in suspects.items() if o not in call.origins_in}
            continue
        columns = [g if g is None else g.unsqueeze(0) for g in grads]
        backs = call_products.transposed(context_of(call), columns)
        sent = [None if b is None else Factor(b, b.shape[1], adds_up=True) for b in backs]
        state.deliver(plan, call, sent)
    found = []
    for mark, maker in suspects.items():
        slot = maker.origins_out.index(mark)
        arrived = maker.g_out[slot] if maker.is_unbatched else maker.gradients()[slot]
        if arrived is not None and mark in state.cotangents:
            given = state.cotangents[mark].mat[0]
            limits = [torch.finfo(dtype) for dtype in precisions | dtypes_of([maker, *readers])]
            smallest = max(limit.smallest_normal for limit in limits)
            tolerance = max(limit.eps for limit in limits) ** 0.5
            if maker.is_unbatched:  # autograd has summed over the samples, whose parts may cancel
                sizes = given.abs().sum(0)
                given, arrived = torch.stack([given.sum(0), sizes]), torch.stack([arrived, sizes])
            if not agree_to(tolerance, *_in_range(given, arrived, smallest)):
                found.append(maker)
    return found


def _in_range(sent: Tensor, arrived: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """Return zero where gradients overflow or both underflow: rules round differently there."""
    known = (sent.abs() + arrived.abs()).isfinite()
    known &= (sent.abs() >= smallest) | (arrived.abs() >= smallest)
    return sent.where(known, 0), arrived.where(known, 0)
