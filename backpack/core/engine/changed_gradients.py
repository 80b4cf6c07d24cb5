"""Hooks that change gradients on their way: first order sees that, all that travels does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from backpack.core.record.origins import WRAPPERS

CHANGED = (
    "{}: a hook (tensor.register_hook, or a backward hook of a module) has changed the gradient of "
    "what {} reads. Curvature is that of what the forward pass has computed, and does not go "
    "through hooks. If a hook stands for a derivative, such as that of a fixed point, let a module "
    "compute it."
)


def look_around_hooks(tensor: Tensor, reader: str, changed: dict[str, None]) -> list[Any]:
    """Note the reader of a tensor if hooks of the program change the gradient, perhaps in place.

    Those of the tensor, and those of modules: they are at nodes, one for each container around.

    Returns:
        Handles, to be removed after the backward pass.
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
