"""Modules with other parameters and buffers than their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module


def functional_call(
    module: Module,
    state: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call a module with other parameters and buffers, which it does not keep.

    As ``torch.func.functional_call``, which replaces those of a child with two names twice, and
    leaves the new ones there. A name in the state stands for all that are tied to it, but for those
    that are given as well.
    """
    own: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own |= module.named_buffers(remove_duplicate=False)
    values = {own[name]: value for name, value in state.items() if name in own}
    once = {name: value for name, value in state.items() if name not in own}  # other attributes
    for path, child in module.named_modules():
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            whole = f"{path}.{name}" if path else name
            if tensor in values:
                once[whole] = state.get(whole, values[tensor])
    return torch.func.functional_call(module, once, args, dict(kwargs or {}), tie_weights=False)
