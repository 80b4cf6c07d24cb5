"""Hooks that change gradients on their way: first order sees that, all that travels does not."""

from __future__ import annotations

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


def look_around_hooks(
    tensor: Tensor, reader: str, changed: dict[str, None]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Note the reader of a tensor if hooks of the program change the gradient, perhaps in place.

    Returns:
        What to remove after the backward pass.
    """
    task = torch._C._current_graph_task_id()  # hooks may run other passes
    arrived: list[tuple[Tensor, int]] = []

    def before(grad: Tensor | None) -> None:
        if torch._C._current_graph_task_id() == task and grad is not None:
            arrived.append((grad, grad._version))

    def after(grad: Tensor | None) -> None:
        if torch._C._current_graph_task_id() != task or grad is None or not arrived:
            return
        was, version = arrived.pop()
        if was._version != version or (grad.data_ptr() != was.data_ptr() and not grad.equal(was)):
            changed[reader] = None

    hooks: Any = tensor._backward_hooks or {}
    others = [*hooks.items()]
    hooks.clear()
    first = tensor.register_hook(before)
    hooks.update(others)  # torch calls them in the order in which they came into the dictionary
    node, slot = tensor.grad_fn, tensor.output_nr
    if node is not None and type(node).__name__ in WRAPPERS:  # hooks of modules are those of a node
        return first, node.register_hook(lambda grads, _: after(grads[slot]))
    return first, tensor.register_hook(after)
