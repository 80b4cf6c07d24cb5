"""Hooks that run before ours, and may have changed what a module returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from backpack.context import disable
from backpack.core.record.generators import evaluated_apart
from backpack.core.record.module_state import works_in_place
from backpack.core.record.origins import flatten_outputs
from backpack.core.record.registry import derivatives_of

ADVICE = "Register that hook on the module itself, before extend or without prepend=True."
CHANGED = f"returned what a forward hook that runs before backpack's has changed. {ADVICE}"
RANDOM = f"is random, and a forward hook runs before backpack's, which may change it. {ADVICE}"


def alteration(
    module: Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> str | None:
    """Run a module again; return what to tell of it if hooks have changed what it returned.

    One without a rule is evaluated again, and compared, where its derivatives are needed.
    """
    seen = flatten_outputs(output)
    if not torch.is_grad_enabled() or derivatives_of(module) is None:
        return None
    computed, is_random = evaluated_apart(lambda: _computed_again(module, args, kwargs))
    if is_random:
        return RANDOM
    is_same = len(seen) == len(computed) and all(map(_agree, seen, computed))
    return None if is_same else CHANGED


def _computed_again(
    module: Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    buffers = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    try:
        for own, values in buffers:  # which the module may write to
            own.update({name: b if b is None else b.clone() for name, b in values.items()})
        with disable(), torch.no_grad(), torch._C.DisableTorchFunction():
            if works_in_place(module):
                args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
            return flatten_outputs(module.forward(*args, **kwargs))
    finally:
        for own, values in buffers:
            own.update(values)


def _agree(one: Tensor, other: Tensor) -> bool:
    # the same kernels on the same numbers, but threads may add them up in another order
    rounding = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() else 0.0
    return one.shape == other.shape and torch.allclose(one, other, rounding, rounding, True)
