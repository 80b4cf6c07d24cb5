"""The hook that records the calls of a module."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from warnings import warn

import torch
from torch.nn import Module

from backpack.context import CTX
from backpack.core import tape
from backpack.core.backward_pass import BackwardPass
from backpack.core.tape import describe


def extend_one(module: Module, name: str, debug: bool = False) -> None:
    """Let the calls of one module be recorded, without those of its children.

    Args:
        module: The module.
        name: What messages call it.
        debug: Print what is done.
    """
    vars(module)["_backpack_name"] = name
    if isinstance(module, torch.jit.ScriptModule):
        warn(
            f"{describe(module)} was made by torch.jit and cannot be extended: its "
            "parameters have no quantities. Extend the module that it was made from.",
            stacklevel=3,
        )
        return
    if debug:
        print(f"[backpack] extending {name or 'the module'} ({type(module).__name__})")
    if getattr(module, "inplace", False) is True:
        # an in-place change would destroy the input that the derivatives need
        module.inplace = False  # type: ignore[assignment]
        if debug:
            print(f"[backpack] switched off inplace of {name or type(module).__name__}")
    for key, hook in list(module._forward_hooks.items()):
        if hook is _record:  # a program has reset the flag
            del module._forward_hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
    handle = module.register_forward_hook(_record, prepend=True, with_kwargs=True)
    CTX.add_hook_handle(handle, module)
    module._backpack_extend = True  # type: ignore[assignment]


@cache
def _record_uncompiled() -> Callable[..., object]:
    return torch.compiler.disable(tape.record)


def _record(module: Module, args: tuple, kwargs: dict, output: object) -> object:
    if torch.compiler.is_compiling():  # torch.compile would compile what is recorded, too
        return _record_uncompiled()(module, args, kwargs, output, BackwardPass.reached)
    return tape.record(module, args, kwargs, output, BackwardPass.reached)
