"""What a loss was multiplied with before ``backward()``, and its square root."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core.record.module_state import describe
from backpack.core.record.visits import Visit
from backpack.core.values import has_values


def loss_scale(call: Visit) -> Tensor:
    """Return the constant that the loss was multiplied with before ``backward()``: ``[]``.

    The rule of a loss with several outputs multiplies each with its own.
    """
    if len(call.g_out) > 1:
        return torch.ones_like(call.outputs[0])
    (scale,) = call.g_out
    assert scale is not None
    return scale.reshape(())


def root_of_scale(call: Visit, savefields: str) -> Tensor | None:
    """Return :func:`root_of_factor` for the constant factor of a loss."""
    return root_of_factor(loss_scale(call), call.module, savefields)


def root_of_factor(scale: Tensor, loss: Module, savefields: str) -> Tensor | None:
    """Return the square root of what a loss was multiplied with; None for 1.

    Raises:
        ValueError: If it is negative: there is no real square root of the curvature.
    """
    value = float(scale) if has_values(scale) else None
    if value is not None and value < 0:
        raise ValueError(
            f"{savefields}: the loss {describe(loss)} was multiplied with a negative "
            f"number ({value:g}). Its curvature has no square root."
        )
    return None if value == 1 and not scale.requires_grad else scale.sqrt()
