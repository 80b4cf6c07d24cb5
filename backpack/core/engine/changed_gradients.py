"""Hooks of tensors that change gradients: first order sees what they made, nothing else does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backpack.core.record.origins import Origin

# A gradient before hooks of the program have seen it, and how often it had been changed in place.
Arrived = dict[Origin, tuple[Tensor, int]]

CHANGED = (
    "a hook (tensor.register_hook) has changed the gradient at the output of {!r}. What travels "
    "back for this quantity does not go through hooks. Let a module compute what the hook is for, "
    "or remove it."
)


def look_before_hooks(tensor: Tensor, mark: Origin, arrived: Arrived) -> None:
    """Let the gradient of a tensor be noted before the hooks that a program has registered."""

    def note(grad: Tensor) -> None:
        handle.remove()
        arrived[mark] = grad, grad._version

    hooks: Any = tensor._backward_hooks
    others = [*hooks.items()]
    hooks.clear()
    handle = tensor.register_hook(note)
    hooks.update(others)  # torch calls them in the order in which they came into the dictionary


def is_changed(grad: Tensor, mark: Origin | None, arrived: Arrived) -> bool:
    """Whether hooks have changed a gradient, perhaps in place."""
    if mark is None or mark not in arrived:
        return False
    before, version = arrived.pop(mark)
    if before._version != version:
        return True
    return grad.data_ptr() != before.data_ptr() and not grad.equal(before.reshape(grad.shape))
