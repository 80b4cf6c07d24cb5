"""Write down a module call that a forward hook reports, and listen for gradients of its outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

from backpack.context import STATE, active
from backpack.core.record import shards
from backpack.core.record.calls import Call, positional
from backpack.core.record.compiler import in_transform, is_traced
from backpack.core.record.data_flow import (
    DENSE,
    FORM,
    OnMiss,
    dense_advice,
    follow_data,
    follow_not_dense,
    note_miss,
    tensors_in,
)
from backpack.core.record.data_notes import MIXED_DATA, mixed_by, note
from backpack.core.record.layout import unbatched
from backpack.core.record.lookup import geometry_of, part_of
from backpack.core.record.origins import (
    RESHAPES,
    Origin,
    flatten_outputs,
    origin,
    origin_at,
    own_node,
)
from backpack.core.record.registry import derivatives_of, fallback, is_leaf, kind_of, own_parameters
from backpack.core.record.weights import IS_SOMETHING, TENSORS
from backpack.custom_module.converted_module import ConvertedModule
from backpack.custom_module.function_module import FunctionModule
from backpack.hessianfree.graph import nodes_above

OnReach = Callable[["Call", int, Tensor | None], None]
# Module classes for which some extension has a rule of its own: see has_rules.
_ruled: set[ref[type[Module]]] = set()
GRAD_FN = operator.attrgetter("grad_fn")


def note_rule(module_class: type[Module]) -> None:
    """Note that an extension has a rule of its own for a class of modules."""
    _ruled.add(ref(module_class, _ruled.discard))


def has_rules(module: Module) -> bool:
    """Whether some extension has a rule of its own for modules of this class."""
    kind = kind_of(module) if shards.MANAGED in vars(module) else type(module)
    return ref(kind) in _ruled


def _is_recorded(module: Module) -> bool:
    """Whether calls of a module without a rule matter: leaves, containers with own parameters."""
    # modules of their own read the parameters of those that were converted
    if isinstance(module, ConvertedModule):
        return False
    return (
        not module._modules
        or is_leaf(module)
        or any(map(IS_SOMETHING, own_parameters(module).values()))
        or (bool(_ruled) and has_rules(module))
    )


def _is_opened(module: Module, recorders: Sequence[Any]) -> bool:
    """Whether functions of a module are recorded now, in this thread, in place of its call.

    Also those of a loss that the model is called with, but not of modules with parameters that are
    not of the model: these have quantities of the module alone.
    """
    recorder = recorders[-1]
    if "_backpack_open" in vars(module) or recorder is None or recorder.silent:
        return "_backpack_open" in vars(module)
    is_trained = any(p.requires_grad for p in module.parameters())
    return not is_trained or any(one is module for one in recorder.opened)


NO_REPLICAS = (
    "torch.nn.DataParallel runs copies of the model, whose parameters are not those of the model: "
    "quantities would be lost. Use torch.nn.parallel.DistributedDataParallel (one process for each "
    "device, extend the model inside), or a single device."
)


# With the number of an output: the key in a node's metadata of those who listen to its gradient.
LISTENERS = "backpack listeners"


def listen(tensor: Tensor, listener: Callable[[Any], None]) -> None:
    """Tell a listener the gradient of a tensor, as hooks leave it, before those that wait."""
    node: Any = tensor.grad_fn
    slot = tensor.output_nr
    key = (LISTENERS, slot)
    listeners = node.metadata.get(key)
    if listeners is None:
        listeners = node.metadata[key] = [listener]

        def tell(grads: Sequence[Any]) -> None:
            hooks: Any = known()
            for number in reversed(list(hooks)):  # at once: other threads may change them
                if number == own:  # those that come before have been called
                    break
                hook = hooks.get(number)
                function = getattr(hook, "func", hook)  # of a partial one
                if hook is not None and not (
                    getattr(function, "__module__", None) or ""
                ).startswith("backpack."):
                    _tell_afterwards(listeners, slot)
                    return
            for each in reversed(listeners):
                each(grads[slot])

        handle = node.register_prehook(tell)
        own, known = handle.id, handle.hooks_dict_ref
    else:
        listeners.append(listener)


def _tell_afterwards(listeners: Sequence[Callable[[Any], None]], slot: int) -> None:
    """Call listeners when the node that runs is done: its hooks may change the gradient yet."""

    def tell(_: Any, grads: Sequence[Any]) -> None:
        handle.remove()
        for each in reversed(listeners):
            each(grads[slot])

    handle = torch._C._current_autograd_node().register_hook(tell)


def calls_above(nodes: Iterable[Any]) -> list[Call]:
    """Return the recorded calls that gradients of these nodes of the graph may reach."""
    found: dict[Call, None] = {}
    for node in nodes_above(nodes):
        for key, listeners in list(node.metadata.items()):
            if isinstance(key, tuple) and key[0] == LISTENERS:
                bound = [x for each in listeners for x in each.args]
                found |= dict.fromkeys(x for x in bound if isinstance(x, Call))
    return list(found)


def _computes_view(call: Call, i: int, base: Tensor) -> bool:
    """Whether the call has computed what an output is another shape of.

    Such as the product of a linear layer, for inputs with more than two axes. The gradient of an
    output that is changed in place goes past the node of the view.
    """
    return not call.is_transparent and origin(base) is call.origins_out[i]


def _reached_as(
    form: Callable[[Tensor], Tensor], reached: OnReach, call: Call, i: int, grad: Tensor | None
) -> None:
    """Tell a call of a gradient that arrives in the form of what its output is a view of."""
    reached(call, i, None if grad is None else form(grad))


def _repeated(output: Tensor, arguments: Any) -> Origin | None:
    """Return the identity of an output that has the entries of an argument, else None."""
    mark = origin(output)
    known = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    return mark if mark is not None and any(origin(x) is mark for x in known) else None


IN_TRANSFORM = (
    "ran inside of a transform of torch.func, whose calls are not recorded. For quantities, call "
    "the model outside of it."
)
COMPLEX = (
    "returns complex numbers, which are not followed. Let it return torch.view_as_real of them, or "
    "let one module do all that is complex, between real tensors."
)
COMPUTED = (
    "computes its {} from other parameters (a parametrisation, weight normalisation, pruning) "
    "since it was extended. Call extend(model) once more."
)


def _note_integers(output: Any) -> None:
    """Take outputs such as indices for the same for all samples: no gradient tells these apart."""
    for x in tree_leaves(output):
        if isinstance(x, Tensor) and not x.is_floating_point():
            note(x, unbatched())


def record(
    module: Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    reached: OnReach,
    missed: OnMiss,
    altered: str | None = None,
    was_first: bool = True,
    is_function: bool = False,
    changes: bool = False,
) -> Any:
    """Record a call if a backward pass can reach it.

    Args:
        module: The module that was called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        output: What it returned.
        reached: Called as ``reached(call, i, g)`` when a backward pass has the gradient ``g`` with
            respect to output number ``i``.
        missed: Called with the reason when a backward pass comes through a call with parameters
            that cannot be recorded.
        altered: What hooks have done to the output, if anything: the call is none of the module.
        was_first: Whether no hook has seen the output.
        is_function: The module stands for a function, and the caller has seen that it is recorded.
        changes: It has changed inputs in place; ``args`` and ``kwargs`` are what they were before.

    Returns:
        The output that users are to see; None for the one given.
    """
    state = STATE.get()
    if not is_function and (state.disabled or not torch.is_grad_enabled()):
        return None
    known = derivatives_of(module)
    if not is_function:
        if known is None and not _is_recorded(module):
            return None
        if state.recorders and _is_opened(module, state.recorders):
            return None
    if is_traced():
        return None
    if "_is_replica" in vars(module):
        raise RuntimeError(NO_REPLICAS)
    is_one = isinstance(output, Tensor) and output.is_floating_point()
    outputs = (output,) if is_one else flatten_outputs(output)
    arguments = (*args, *kwargs.values()) if kwargs else args
    if not is_function and in_transform() is not None:
        note_miss(module, arguments, outputs, IN_TRANSFORM, missed)
        return None
    tensors = arguments if TENSORS.issuperset(map(type, arguments)) else tensors_in(arguments)
    if not DENSE.issuperset(map(FORM, tensors + outputs)):
        not_dense = next(x for x in tensors + outputs if FORM(x) not in DENSE)
        note_miss(module, arguments, outputs, dense_advice(not_dense), missed)
        if isinstance(module, FunctionModule):
            for y in outputs:
                follow_not_dense(module.name, not_dense, y)
        return None
    if not isinstance(output, Tensor) or not outputs:
        rest = [x for x in tensors_in(output) if x.is_complex() and x.requires_grad]
        if rest and any(p.requires_grad for p in module.parameters()):
            note_miss(module, arguments, (*outputs, *rest), COMPLEX, missed)
            return None
    if not any(map(GRAD_FN, outputs)):
        follow_data(module, args, kwargs, output)
        return None
    if altered is not None:
        note_miss(module, arguments, outputs, altered, missed)
        return None
    rule = known if known is not None else fallback(module, outputs)
    # Outputs get nodes of their own where one may be computed from another, whose gradient would
    # include that; where one is a view of what the module has computed in another order, such as
    # attention with ``batch_first``: a change in place would go past its node; and where an
    # extension has a rule for a module that returns its input: what the rule passes on is not the
    # gradient of the input, which others may read as well.
    replaced = repeated = None
    if len(outputs) == 1 and _ruled and has_rules(module):
        repeated = _repeated(outputs[0], (args, kwargs))
    is_apart = rule is not None and len(outputs) > 1
    if known is not None and not (is_apart or is_function or changes):
        base = outputs[0]._base
        if base is not None and type(outputs[0].grad_fn).__name__ not in RESHAPES:
            is_apart = not any(x is base or x._base is base for x in tensors)
    if repeated is not None or is_apart:
        replaced = tree_map(own_node, output)
        outputs = flatten_outputs(replaced)
    if repeated is not None:
        origin_at(outputs[0].grad_fn, outputs[0].output_nr)
    if kwargs:
        args, kwargs = positional(module, args, kwargs)
    call = Call(module, args, kwargs, outputs, rule, was_first)
    if MIXED_DATA:
        call.mixed_data = mixed_by(tensors) or call.mixed_data
    if rule is not None:
        has_own = module._parameters or "parametrizations" in module._modules
        names = rule.params or (has_own and rule.param_names(module))
        if names and not call.read[0].keys() >= set(names):
            own = rule.own(module)
            if computed := [name for name in names if name not in own]:
                why = COMPUTED.format(", ".join(computed))
                note_miss(module, arguments, outputs, why, missed)
                return replaced
    if repeated is not None:
        call.repeats = call.origins_in.index(repeated)
    if not isinstance(output, Tensor):
        _note_integers(output)
    for i, out in enumerate(outputs):
        if out.grad_fn is not None:
            base = out._base
            form: Callable[[Tensor], Tensor] | None = None  # of what arrives at the base
            if base is not None and _computes_view(call, i, base):
                form = operator.methodcaller("reshape", out.shape)
            elif base is not None and changes:  # others may read what it is a view of
                form = partial(part_of, geometry=geometry_of(out))
            if form is None or base is None:
                listen(out, partial(reached, call, i))
            else:
                listen(base, partial(_reached_as, form, reached, call, i))
    if state.configuration.debug and active(state.configuration).debug:
        print(f"[backpack] recorded {call!r}")
    return replaced
