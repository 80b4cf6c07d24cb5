"""The hook that records the calls of a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.nn import Module
from torch.nn.modules.module import _global_forward_hooks
from torch.utils._pytree import tree_map_only

from backpack.context import CTX, STATE, disable
from backpack.core.engine.backward_pass import BackwardPass
from backpack.core.engine.intercept import not_intercepted, put_back, set_aside
from backpack.core.record import data_flow, tape
from backpack.core.record.compiler import forget_compiled, may_leave_graph, set_compiler
from backpack.core.record.generators import evaluated_apart
from backpack.core.record.given import MARK, note_given
from backpack.core.record.in_place import NO_COPY, keep_former, take_former, with_former
from backpack.core.record.kept_attributes import attributes_kept
from backpack.core.record.module_state import describe, turn, works_in_place
from backpack.core.record.origins import flatten_outputs
from backpack.core.record.registry import derivatives_of
from backpack.custom_module.converted_module import ConvertedModule
from backpack.utils.functional import functional_call
from backpack.utils.warning import warn

ADVICE = "Register that hook on the module itself, before extend or without prepend=True."
CHANGED = f"returned what a forward hook that runs before backpack's has changed. {ADVICE}"
RANDOM = f"is random, and a forward hook runs before backpack's, which may change it. {ADVICE}"
# What records of calls tell
REACHED, MISSED, ENTERED = BackwardPass.reached, BackwardPass.missed, BackwardPass.entered


def extend_one(module: Module, name: str, debug: bool = False) -> None:
    """Let calls of one module, which messages call ``name``, be recorded; without its children."""
    own = vars(module)
    own["_backpack_name"], own["_backpack_identity"] = name, id(module)
    if isinstance(module, torch.jit.ScriptModule):
        warn(
            f"{describe(module)} was made by torch.jit and cannot be extended: its "
            "parameters have no quantities. Extend the module that it was made from.",
        )
        return
    if debug:
        print(f"[backpack] extending {name or 'the module'} ({type(module).__name__})")
    if works_in_place(module):
        copy_last(module)
    for key, hook in list(module._forward_hooks.items()):
        if hook is _record:  # a program has reset the flag
            del module._forward_hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
    handle = module.register_forward_hook(_record, prepend=True, with_kwargs=True)
    CTX.add_hook_handle(handle, module)
    if code := getattr(type(module).forward, "__code__", None):
        forget_compiled(code)
    module._backpack_extend = True  # type: ignore[assignment]
    vars(module)["__prepare_scriptable__"] = _refuse_script


def call_after_recording(module: Module, hook: Any) -> None:
    """Add a hook of the library that runs right after the one that records, in any case."""
    handle = module.register_forward_hook(hook, prepend=True, with_kwargs=True, always_call=True)
    CTX.add_hook_handle(handle, module)
    hooks: Any = module._forward_hooks
    for key in [key for key, own in hooks.items() if own is _record]:
        hooks.move_to_end(key, last=False)


def copy_last(module: Module) -> bool:
    """Let what a module overwrites be copied after all other hooks; return whether it was."""
    hooks: Any = module._forward_pre_hooks
    key = next((key for key, hook in hooks.items() if hook is _keep_former), None)
    if key is None:
        handle = module.register_forward_pre_hook(_keep_former, with_kwargs=True)
        CTX.add_hook_handle(handle, module)
        return False
    was_last = next(reversed(hooks)) == key
    hooks.move_to_end(key)  # at once: other threads may call the module
    return was_last


def _keep_former(module: Module, args: tuple, kwargs: dict) -> None:
    if torch.compiler.is_dynamo_compiling():
        if may_leave_graph():
            torch._dynamo.skip_frame()
        return
    compiler = set_compiler(None)
    try:
        if works_in_place(module) and module._backpack_extend:
            keep_former(module, args, kwargs)
    finally:
        set_compiler(compiler)


def _record(module: Module, args: tuple, kwargs: dict, output: object) -> object:
    if torch.compiler.is_dynamo_compiling():
        if may_leave_graph():
            torch._dynamo.skip_frame()
        return None
    compiler = set_compiler(None)  # by a function of C: others would be compiled
    mode = set_aside() if _len_torch_function_stack() else None  # every look at a tensor calls it
    try:
        if vars(module).get("_backpack_identity") != id(module):
            CTX.adopt(module, _record)
        altered, is_first = None, next(iter(module._forward_hooks.values())) is _record
        changes = False
        if vars(module).get("inplace"):
            copies = take_former(module, args, kwargs)
            if copies:
                changes, args = True, with_former(copies, args)
                kwargs = with_former(copies, kwargs) if kwargs else kwargs
            altered = NO_COPY if copies is None else None
            is_first &= copy_last(module)  # hooks behind it may have changed the arguments
        if _global_forward_hooks or not is_first:
            altered, is_first = altered or _alteration(module, args, kwargs, output), False
        seen = tape.record(
            module, args, kwargs, output, REACHED, MISSED, altered, is_first, changes=changes
        )
        if MARK in vars(module):
            note_given(module, args, kwargs, output if seen is None else seen, ENTERED)
        return seen
    finally:
        if mode is not None:
            put_back(mode)
        set_compiler(compiler)


def _alteration(
    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
) -> str | None:
    """Run a module again; return what to tell of it if hooks before ours have changed its output.

    One without a rule is evaluated again, and compared, where its derivatives are needed.
    """
    if not torch.is_grad_enabled() or derivatives_of(module) is None:
        return None

    def computed_again() -> tuple[Tensor, ...]:
        keeps = attributes_kept(module)
        with turn(module), disable(), torch.no_grad(), torch._C.DisableTorchFunction(), keeps:
            buffers = {name: b.clone() for name, b in module.named_buffers()}  # it may write there
            given = args, kwargs
            if works_in_place(module):
                given = tree_map_only(Tensor, torch.clone, given)
            return flatten_outputs(functional_call(module, buffers, *given))

    seen = flatten_outputs(output)
    computed, is_random = evaluated_apart(computed_again)
    if is_random:
        return RANDOM
    is_same = len(seen) == len(computed) and all(map(_agree, seen, computed))
    return None if is_same else CHANGED


def _agree(one: Tensor, other: Tensor) -> bool:
    # the same kernels on the same numbers, but threads may add them up in another order
    rounding = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() else 0.0
    return one.shape == other.shape and torch.allclose(one, other, rounding, rounding, True)


def _refuse_script() -> None:
    """Tell what to do: the compiler of torch.jit calls this before it reads our hooks."""
    raise NotImplementedError(
        "torch.jit.script cannot compile the hooks of an extended module. Script the model before "
        "extend(), or after CTX.remove_hooks()."
    )


def _note_inputs(module: ConvertedModule, args: tuple, kwargs: dict) -> None:
    if torch.compiler.is_dynamo_compiling():
        if may_leave_graph():
            torch._dynamo.skip_frame()
        return
    compiler = set_compiler(None)
    try:
        with not_intercepted():
            module.check_parts()
            data_flow.note_inputs(module, args, kwargs, any(STATE.get().recorders))
    finally:
        set_compiler(compiler)


def _clear_inputs(module: Module, args: tuple, output: object) -> None:
    if not torch.compiler.is_dynamo_compiling():
        data_flow.clear_inputs(module, output)


def follow_inputs(root: ConvertedModule) -> None:
    """Let samples be followed from what a converted model, a graph of modules, is called with."""
    if _note_inputs not in root._forward_pre_hooks.values():
        hook = root.register_forward_pre_hook(_note_inputs, prepend=True, with_kwargs=True)
        CTX.add_hook_handle(hook, root)
        CTX.add_hook_handle(root.register_forward_hook(_clear_inputs, always_call=True), root)
