"""What modules with ``inplace=True`` read: a copy is kept of what they are about to overwrite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map

from backpack.context import STATE
from backpack.core.features import hooks_of_saved_tensors
from backpack.core.record.alive import preserve
from backpack.core.record.compiler import in_transform, is_traced
from backpack.core.record.data_flow import DENSE, FORM, tensors_in
from backpack.core.record.data_notes import layout_of, note
from backpack.core.record.weights import TENSORS, version_of

NO_COPY = (
    "changes its input in place, which it did not when it was extended, or a hook that was "
    "registered later has replaced the input. It is recorded from the next forward pass on."
)


def former_of(x: Tensor) -> Tensor:
    """Copy a tensor that is about to change."""
    copy = x.clone()
    if not copy.requires_grad:
        note(copy, layout_of(x))
    return copy


def keep_former(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep copies of arguments that a module may change, for this call and those that hold them."""
    is_recording = torch.is_grad_enabled() and not STATE.get().disabled and not is_traced()
    if not is_recording or in_transform() is not None:
        return
    with torch._C.DisableTorchFunction():
        for x in _may_change(args, kwargs):
            copy = former_of(x)
            preserve(x, copy)
            vars(x)[_holder(module)] = copy, version_of(x)


def take_former(
    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, Tensor] | None:
    """Return copies of what has changed, by the id of the argument; None if there are none."""
    holder, tensors = _holder(module), _may_change(args, kwargs)
    kept = [vars(x).pop(holder, None) for x in tensors]
    if None in kept:
        return None
    pairs = zip(tensors, kept, strict=True)
    return {id(x): _shared(x, copy) for x, (copy, was) in pairs if version_of(x) != was}


def _shared(x: Tensor, copy: Tensor) -> Tensor:
    """Return autograd's copy of what a tensor was in the place of ours, if hooks hide none."""
    with torch._C.DisableTorchFunction():
        node = None if hooks_of_saved_tensors(True) is not None else x.grad_fn
        saved: Any = getattr(node, "_saved_self", None)
        if saved is None or _source(saved) is None or _source(saved) != _source(copy):
            return copy
        preserve(copy, saved)
        return saved


def _source(x: Tensor) -> Any:
    """Return where in the graph the tensor is that a tensor is a clone of; None if it is none."""
    node = x.grad_fn
    return node.next_functions if node is not None and "Clone" in node.name() else None


def with_former(copies: dict[int, Tensor], arguments: Any) -> Any:
    """Return arguments as they were before the call."""
    if TENSORS.issuperset(map(type, arguments)):
        return tuple([copies.get(id(x), x) for x in arguments])
    return tree_map(lambda x: copies.get(id(x), x), arguments)


def _holder(module: Module) -> str:
    """Name the attribute of a tensor with what it was before a call: calls may be nested."""
    return f"_backpack_before_{id(module)}"


def _may_change(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors = tensors_in((*args, *kwargs.values()) if kwargs else args)
    if len(tensors) > 1:
        tensors = tuple(dict.fromkeys(tensors))
    return [x for x in tensors if FORM(x) in DENSE and x.is_floating_point()]
