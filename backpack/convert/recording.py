"""When the functions of a model are recorded: between hooks of it, not inside of its leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from backpack.context import CTX, STATE, update
from backpack.convert.recorder import IS_LEAF, REQUIRES_GRAD, Functions, Recorder, tensors_among
from backpack.core.engine.elided_gradients import REARRANGEMENTS
from backpack.core.engine.hooks import call_after_recording, copy_last
from backpack.core.engine.spread import kind
from backpack.core.record import generators
from backpack.core.record.compiler import is_traced, may_leave_graph, set_compiler
from backpack.core.record.data_flow import clear_inputs, is_dense, note_inputs
from backpack.core.record.data_notes import layout_of, note, running
from backpack.core.record.kept_attributes import attributes_kept
from backpack.core.record.kept_parameters import differing
from backpack.core.record.layout import unbatched
from backpack.core.record.module_state import works_in_place
from backpack.core.record.origins import is_foreign_function, origin
from backpack.core.record.registry import derivatives_of, is_leaf
from backpack.core.record.tape import GRAD_FN, has_rules
from backpack.core.record.weights import IS_SOMETHING, TENSORS, version_of
from backpack.hessianfree.graph import nodes_above

# Calls a function, and returns what it returns, and a fact about its random numbers.
Run = Callable[[Callable[[], Any]], tuple[Any, bool]]
# Modules of torch that consist of modules and functions.
OPEN = (
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    *(cls for name, cls in vars(nn).items() if name == "LinearCrossEntropyLoss"),  # torch 2.13
)
# Nodes of functions that are layers if they read parameters, and which argument may be one first.
LAYERS = {
    **dict.fromkeys(("Linear", "Convolution", "NativeLayerNorm", "NativeGroupNorm"), 1),
    **{"Addmm": 2, "Mm": 1, "Bmm": 0, "Embedding": 0, "Index": 0},
}


def is_open(module: Module) -> bool:
    """Return whether the functions of a module have to be recorded for its derivatives to be known.

    That is so for transformers of torch, and for modules that compute one of their parameters
    (parametrisations, weight normalisation, pruning).
    """
    rule = derivatives_of(module)
    if rule is None:
        return isinstance(module, OPEN)
    own = rule.own(module)
    return any(name not in own for name in rule.param_names(module))


def is_recorded(root: Module) -> bool:
    """Return whether the functions of a model are recorded already."""
    return _start in root._forward_pre_hooks.values()


def _is_followed(module: Module) -> bool:
    """Return whether it is known when a module runs, unless its calls are not recorded."""
    own = vars(module)
    is_known = "_backpack_open" in own or _enter_leaf in module._forward_pre_hooks.values()
    return is_known or not own.get("_backpack_extend")


def record_functions(root: Module) -> None:
    """Let forward passes of a model record their functions: it and its leaves get hooks."""
    if isinstance(root, torch.jit.ScriptModule):
        return
    for module in root.modules():
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks; extend() has warned
            continue
        is_called = type(module).forward is not Module.forward  # else it holds parameters
        has_rule = not _has_no_rule(module)
        is_whole = is_called and not is_open(module) and (is_leaf(module) or has_rule)
        if not is_whole or (module is root and derivatives_of(module) is None):
            vars(module)["_backpack_open"] = True
            _forget_leaf(module)
            continue
        for mark in ("_backpack_open", "_backpack_whole"):  # it may have computed a parameter
            vars(module).pop(mark, None)
        if _enter_leaf not in module._forward_pre_hooks.values():
            hook = module.register_forward_pre_hook(_enter_leaf, with_kwargs=True)
            CTX.add_hook_handle(hook, module)
            call_after_recording(module, _leave_leaf)
            if works_in_place(module):
                copy_last(module)
    if not is_recorded(root):
        vars(root)["_backpack_functions"] = Functions()
        vars(root)["_call_impl"] = Guard(root)
        hook = root.register_forward_pre_hook(_start, prepend=True, with_kwargs=True)
        CTX.add_hook_handle(hook, root)
        CTX.add_hook_handle(root.register_forward_hook(_stop, always_call=True), root)


def _forget_leaf(module: Module) -> None:
    """Take off the hooks of a leaf: it may compute a parameter by now."""
    for own, hooks, marks in (
        (_enter_leaf, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (_leave_leaf, module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if hook is own]:
            del hooks[key]
            marks.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def _recorder() -> Recorder | None:
    """Return what records the functions that this thread calls."""
    recorders = STATE.get().recorders
    return recorders[-1] if recorders else None


def _start(module: Module, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        if may_leave_graph():
            torch._dynamo.skip_frame()
        return
    compiler = set_compiler(None)
    outer = _recorder()
    records = outer is None and torch.is_grad_enabled() and not is_traced()
    for part in module.modules() if records else ():
        if not _is_followed(part):  # it has become a part of the model
            record_functions(module)
        for buffer in part._buffers.values():
            if buffer is not None:
                note(buffer, unbatched())
    inner = Recorder(module) if records else outer
    update(recorders=(*STATE.get().recorders, inner))
    if inner is None or inner is outer:
        set_compiler(compiler)
    else:
        inner.compiler = compiler
        inner.others.__enter__()
        note_inputs(module, args, kwargs)
        _note_frozen(module)
        inner.__enter__()


def _note_frozen(module: Module) -> None:
    """Note that frozen parameters are constants, as buffers are, if other data has the samples."""
    for inputs in running()[-1:]:
        for part in module.modules() if inputs.samples else ():
            for p in part._parameters.values():
                if p is not None and not p.requires_grad and id(p) not in inputs.rows:
                    inputs.note(p, unbatched())


def _stop(*arguments: Any) -> None:
    """End the recording: as a hook of the model (module, inputs, output), or after an interrupt."""
    if torch.compiler.is_dynamo_compiling():
        if may_leave_graph():
            torch._dynamo.skip_frame()
        return
    *outer, recorder = STATE.get().recorders
    if recorder is not None and recorder not in outer:
        recorder.leave()
        recorder.others.__exit__(None, None, None)
        clear_inputs(recorder.root, arguments[2] if arguments else None)
        set_compiler(recorder.compiler)
    update(recorders=tuple(outer))


class Guard:
    """Calls a recorded model, and ends the recording after an interrupt: torch calls no hooks then.

    An attribute of the model, where torch looks for what calls it. A shallow copy has it, too.
    """

    def __init__(self, root: Any) -> None:
        """Store the model, whose attribute it is: weakly."""
        self.root = ref(root)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if torch.compiler.is_dynamo_compiling():
            if may_leave_graph():
                torch._dynamo.skip_frame()
            root: Any = self.root()
            return type(root)._call_impl(root, *args, **kwargs)
        caller = sys._getframe(1).f_locals.get("self")
        is_its_own = isinstance(caller, Module) and vars(caller).get("_call_impl") is self
        root = caller if is_its_own else self.root()
        if root is not self.root():  # a shallow copy
            vars(root)["_call_impl"] = Guard(root)
        depth = len(STATE.get().recorders)
        try:
            return type(root)._call_impl(root, *args, **kwargs)
        finally:
            while len(STATE.get().recorders) > depth:
                _stop()

    def __reduce__(self) -> Any:
        """Copy and pickle as that of the copied model."""
        return Guard.__new__, (Guard,), {"root": self.root()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        root = state["root"]  # None: a shallow copy outlived it, and is found when it is called
        self.root = ref(self if root is None else root)


def _enter_leaf(module: Module, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        if may_leave_graph():
            torch._dynamo.skip_frame()
        return None
    recorder = _recorder()
    if recorder is None:
        return None
    is_outermost, read = not recorder.silent, None
    recorder.entered.append(module)
    recorder.pause()
    if is_outermost and torch.is_grad_enabled() and not STATE.get().disabled:
        tensors = tensors_among((*args, *kwargs.values()) if kwargs else args)
        if recorder.has_changes:
            recorder.note_views(tensors)
        if any(map(REQUIRES_GRAD, filter(IS_LEAF, tensors))):
            args, kwargs = read = recorder.read_parameters(args, kwargs)
        # the samples of packed sequences have no axis: what is computed of them is followed
        is_packed = isinstance(args[0] if args else kwargs.get("input"), PackedSequence)
        rule = derivatives_of(module)
        changes_view = works_in_place(module) and any(x._is_view() for x in tensors)
        changes_view &= rule is None or not rule.keeps_something  # what was drawn is not again
        opens = is_packed or changes_view or "_backpack_open" in vars(module)
        # parametrised since it was extended, perhaps with what functions have computed
        new = module._modules.get("parametrizations")
        opens |= new is not None and "_backpack_extend" not in vars(new)
        # parameters that functions have computed, as functional_call may give them
        computed = [*filter(GRAD_FN, filter(IS_SOMETHING, module._parameters.values()))]
        if computed and not opens:
            opens = any(mark is not None and mark.is_output for mark in map(origin, computed))
        if not opens and _has_no_rule(module):
            # where no gradient passes, autograd does not tell what samples it mixes
            opens = not any(map(REQUIRES_GRAD, chain(tensors, module.parameters())))
            recorder.versions = _versions(module, args, kwargs)
            recorder.generators = generators.generator_states()
            opens = opens or not _suits_as_a_whole(tree_leaves((args, kwargs)))
        if opens:
            recorder.opened.append(module)
            recorder.resume()
    return read


def _leave_leaf(module: Module, args: Any, kwargs: Any, output: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        if may_leave_graph():
            torch._dynamo.skip_frame()
        return None
    recorder = _recorder()
    if recorder is None or module not in recorder.entered:
        return None  # a hook before ours has raised
    recorder.entered.remove(module)
    if recorder.opened and recorder.opened[-1] is module:
        recorder.opened.pop()
        return None
    recorder.resume()
    recorder.has_changes |= works_in_place(module)
    is_outermost = not recorder.silent and torch.is_grad_enabled() and not STATE.get().disabled
    if is_outermost and _has_no_rule(module):
        opens = "_backpack_open" in vars(module)  # another thread has opened it meanwhile
        leaves = tree_leaves(output)
        opens = opens or not _has_rows_of_samples(leaves) or any(map(_is_of_parameters, leaves))
        suits = not (opens or "_backpack_whole" in vars(module)) and _has_open_functions(
            module, tensors_among((*args, *kwargs.values())), leaves
        )
        run: Run | None = generators.evaluated_apart if opens or suits else None
        if generators.have_changed(recorder.generators, generators.generator_states()):
            run, suits = partial(_drawn_again, recorder.generators), False
        if run is not None and recorder.versions == _versions(module, args, kwargs):
            before, recorder.has_derivatives = recorder.has_derivatives, False
            seen = _opened(module, args, kwargs, output, run)
            is_whole, recorder.has_derivatives = suits and recorder.has_derivatives, before
            if not is_whole:
                return seen
            vars(module).pop("_backpack_open", None)
            vars(module)["_backpack_whole"] = True
    return None


def _versions(module: Module, args: Any, kwargs: Any) -> list[int]:
    """Count the changes in place of all that a module reads: what changes some runs only once."""
    read = (*tensors_among((*args, *kwargs.values())), *module.parameters())
    return list(map(version_of, read))


def _opened(module: Module, args: Any, kwargs: Any, output: Any, run: Run) -> Any:
    """Return the output of a module again, with its functions recorded: from now on, they are.

    None if it is not the same, as that of a module that a hook has changed. ``run`` returns what a
    function does, and whether it is other numbers than those of before that this has drawn.
    """
    own = copy(module)  # other threads may run the module
    with suppress(Exception), attributes_kept(own):  # some cannot run twice
        buffers = {name: buffer.clone() for name, buffer in own.named_buffers()}
        plain = [p for p in own.parameters() if type(p) in TENSORS and p.layout is torch.strided]
        before = {p: (p.data, p.data.clone()) for p in plain}
        try:
            again, are_others = run(lambda: functional_call(own, buffers, args, kwargs))
        finally:  # of changes of `data`, which no version tells
            changed = differing({p: (p.data, entries) for p, (_, entries) in before.items()})
            for p in changed:
                data, entries = before[p]
                p.data = data.copy_(entries)
        leaves, others = tree_leaves(output), tree_leaves(again)
        is_same = not (are_others or changed) and len(leaves) == len(others)
        if is_same and all(map(_is_equal, leaves, others)):
            vars(module)["_backpack_open"] = True
            return again
    return None


def _drawn_again(before: tuple[Any, ...], function: Callable[[], Any]) -> tuple[Any, bool]:
    """Call a function with the generators as they were; False if it has drawn as many numbers.

    If it draws none, it was another thread that has.
    """
    after = generators.generator_states()
    generators.set_generators(before)
    try:
        value, now = function(), generators.generator_states()
    finally:
        generators.set_generators(after)
    return value, now != after


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _suits_as_a_whole(inputs: Sequence[Any]) -> bool:
    """Whether a module can be one function: of something with samples, a row for each.

    One that is called with other modules calls these, whose parameters are not its own.
    """
    if any(isinstance(x, Module) for x in inputs):
        return False
    if not all(is_dense(x) for x in inputs if isinstance(x, Tensor)):
        return True  # what is said of it names the module
    layouts = [layout_of(x) for x in inputs if isinstance(x, Tensor)]
    return any(one is None or one.is_batched for one in layouts) and _has_rows_of_samples(inputs)


def _has_rows_of_samples(values: Sequence[Any]) -> bool:
    """Whether tensors with samples have one row for each of them, as far as that is known."""
    tensors = [x for x in values if isinstance(x, Tensor) and is_dense(x)]
    return all(
        layout is None
        or not layout.is_batched
        or (place := layout.place(x.shape)) is None
        or (x.shape[place.axis] == place.rows(x.shape) == place.samples and not place.is_split)
        for x, layout in zip(tensors, map(layout_of, tensors), strict=True)
    )


def _is_of_parameters(x: Any) -> bool:
    """Whether a gradient flows through something without samples."""
    layout = layout_of(x) if isinstance(x, Tensor) and x.requires_grad else None
    return layout is not None and not layout.is_batched


def _has_open_functions(module: Module, inputs: Sequence[Tensor], outputs: Sequence[Any]) -> bool:
    """Whether the functions of a module are better recorded than its call as a whole.

    So it is if some are layers, which read its parameters as ``F.linear`` does, or if it returns a
    number beside what has samples, such as a log-determinant: the call does not tell whether that
    is made of samples.
    """
    own = set(map(id, module.parameters()))
    differentiable = [y for y in outputs if isinstance(y, Tensor) and y.grad_fn]
    computed = [y.grad_fn for y in differentiable if y.dim()]
    nodes = [*nodes_above(computed, until={x.grad_fn for x in inputs}.__contains__)]
    if any(map(is_foreign_function, nodes)):  # which would not be recorded
        return False
    if 0 < len(computed) < len(differentiable):
        return True
    for node in nodes:
        first = LAYERS.get(kind(node))
        read = () if first is None else node.next_functions[first:]
        if not own.isdisjoint(id(_leaf_behind(parent)) for parent, _ in read):
            return True
    return False


def _leaf_behind(node: Any) -> Any:
    """Return the leaf that a node is of, or of another form of, such as its transpose."""
    while type(node).__name__ in REARRANGEMENTS:
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


def _has_no_rule(module: Module) -> bool:
    return (
        derivatives_of(module) is None
        and not has_rules(module)
        and not isinstance(module, torch.jit.ScriptModule)
    )
