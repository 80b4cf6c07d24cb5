"""Hooks of tensors that change gradients: first order sees what they made, nothing else does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

CHANGED = (
    "{}: a hook (tensor.register_hook) has changed the gradient of what {} reads. Curvature is "
    "that of what the forward pass has computed, and does not go through hooks. If a hook stands "
    "for a derivative, such as that of a fixed point, let a module compute it."
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

    def before(grad: Tensor) -> None:
        if torch._C._current_graph_task_id() == task:
            arrived.append((grad, grad._version))

    def after(grad: Tensor) -> None:
        if torch._C._current_graph_task_id() != task:
            return
        was, version = arrived.pop()
        if was._version != version or (grad.data_ptr() != was.data_ptr() and not grad.equal(was)):
            changed[reader] = None

    hooks: Any = tensor._backward_hooks
    others = [*hooks.items()]
    hooks.clear()
    first = tensor.register_hook(before)
    hooks.update(others)  # torch calls them in the order in which they came into the dictionary
    return first, tensor.register_hook(after)
