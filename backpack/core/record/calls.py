"""One :class:`Call` per module call: what it read and computed, as long as its graph lives.

A call is owned by the autograd graph of its output (through a hook of the output's node), and never
owns that output's graph itself: when the graph dies, the record dies, with no list to clean.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

from backpack.context import STATE, disable
from backpack.core import fast
from backpack.core.record import shards
from backpack.core.record.averaging import Averaging
from backpack.core.record.data_notes import CALLS, layout_of
from backpack.core.record.layout import Layout
from backpack.core.record.module_state import describe, placeholder
from backpack.core.record.origins import WRAPPERS, flatten_outputs, origin, origin_at
from backpack.core.record.placed_call import PlacedCall
from backpack.core.record.registry import derivatives_of_call, is_leaf, own_parameters
from backpack.core.record.weights import (
    COUNTER,
    TENSORS,
    VERSION,
    State,
    addresses_of,
    storage_of,
    version_of,
)
from backpack.core.types import Rule

DROPPED_OUTPUTS = fast.path(
    "outputs computed again", "Large outputs that no formula reads are not kept."
)
# Entries of an output from which on it matters whether tensors are kept.
LARGE = 2**16
# How many calls in a row may have to run to compute a tensor again (sums of sums of …).
MAX_DEPTH = 3
LIVE: dict[float, ref[Call]] = {}  # by index; an entry goes with its call
RELEASED: Mapping[str, Any] = {  # what a call holds when its tensors are gone
    **dict.fromkeys(("inputs", "outputs", "read"), ()),
    **dict.fromkeys(("saved", "producers"), MappingProxyType({})),
}
newest = -1  # index of the last call that was recorded


class Call(PlacedCall):
    """One call of a module: its inputs, its output, and where they come from."""

    index: float  # increases in the order of the calls
    versions: tuple[int, ...]  # how often inputs and outputs had been changed in place
    saved: dict[str, Any]  # what the derivatives keep, such as a dropout mask
    was_first: bool  # no hook has seen the output before, and could have changed it
    model: int | None  # number of the call of the converted model that runs
    is_followed: bool  # the functions around it are known: of a traced or recorded model that runs
    averaging: Averaging | None  # what is done to the gradients over processes
    reads_functions: bool  # it has read what no recorded call has returned, but has a gradient
    # those that compute inputs again which are not kept, by the number of the input
    producers: Mapping[int, Call] = MappingProxyType({})
    computed_with: list[State] | None = None  # of an output that is not kept
    recompute_depth = 1  # how many calls in a row have to run to compute the output again
    repeats: int | None = None  # input that the output repeats, where users have a rule for it

    def __init__(
        self,
        module: Module,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        outputs: tuple[Tensor, ...],
        rule: Rule | None,
        was_first: bool,
    ):
        self.index = next(COUNTER)
        self.derivatives: Any = rule  # or None
        self.is_loss = rule is not None and rule.is_loss
        self.is_container = rule is None and not is_leaf(module)
        self.was_first = was_first
        self.model = CALLS.running[-1].whole if CALLS.running else None
        self.is_followed = "_backpack_converted" in vars(module) and _is_followed(module)
        wrapper = DistributedDataParallel._active_ddp_module  # the one that runs
        self.averaging = None if wrapper is None else Averaging.by(wrapper)
        leaves: Sequence[Any] = args
        self.structure = None
        if keywords or not TENSORS.issuperset(map(type, args)):
            leaves, self.structure = tree_flatten((args, keywords))

        self._note_module(module, own_parameters(module) if rule is None else rule.own(module))
        if rule is not None and module._modules:
            self.modes = tuple([one.training for one in module.modules()])
        if shards.FSDP in sys.modules:
            self._note_shards((*leaves, *outputs))
        is_addressed = not self.shards and (module._parameters or module._modules)
        self.addresses = addresses_of(self.read) if is_addressed else ()

        # what is large may not have to be kept; others would have to gather shards as well
        is_droppable = rule is not None and outputs[0].numel() >= LARGE and DROPPED_OUTPUTS.is_on
        is_droppable = is_droppable and not self.shards
        layouts_in = self._note_graph(leaves, outputs, is_droppable)
        self.saved = {}
        if rule is not None and rule.keeps_something:
            save = rule.saved if rule.keeps_facts_alone else partial(saved_by, rule)
            self.saved = save(module, tuple(leaves), outputs)
        self._note_samples(leaves, layouts_in)
        if is_droppable:
            self._drop_unread_tensors(outputs)
        try:
            self.versions = tuple(map(VERSION, self.inputs + self.outputs))
        except (AttributeError, RuntimeError):  # not all are tensors, see version_of
            self.versions = tuple(map(version_of, self.inputs + self.outputs))
        LIVE[self.index] = ref(self, partial(LIVE.pop, self.index))
        global newest
        newest = self.index

    def _note_graph(
        self, leaves: Sequence[Any], outputs: tuple[Tensor, ...], is_droppable: bool
    ) -> list[Layout | None]:
        """Find where inputs and outputs are in the graph; return the layouts known there."""
        origins_out, shape_out, detached = [], [], []
        for y in outputs:
            mark = origin(y)
            if mark is None and y.grad_fn is not None:  # a view of a parameter
                mark = origin_at(y.grad_fn, y.output_nr)
            origins_out.append(mark)
            shape_out.append(y.shape)
            if not is_droppable:
                detached.append(y.detach())
        self.outputs = tuple(detached)
        origins_in, shape_in, layouts_in = [], [], []
        self.reads_functions = False
        for x in leaves:
            mark = shape = layout = None
            if isinstance(x, Tensor):
                shape = x.shape
                if x.requires_grad:
                    mark = origin(x)
                    layout = None if mark is None else mark.layout
                    if mark is None or not mark.is_output or mark.by_container:
                        self.reads_functions = True
            origins_in.append(mark)
            shape_in.append(shape)
            layouts_in.append(layout)
        self.origins_in, self.shape_in = tuple(origins_in), tuple(shape_in)
        self.origins_out, self.shape_out = tuple(origins_out), tuple(shape_out)
        has_origins = None not in origins_out
        self.is_transparent = has_origins and all(map(origins_in.__contains__, origins_out))
        self.inputs = tuple(leaves)
        if self.is_transparent or len(outputs) > 1 or not has_origins:
            # A module that returns its own input would own its own graph: a leak.
            owned = set(map(id, leaves if self.is_transparent else outputs))
            if not owned.isdisjoint(map(id, leaves)):
                self.inputs = tuple(
                    [x.detach() if isinstance(x, Tensor) and id(x) in owned else x for x in leaves]
                )
        return layouts_in

    @classmethod
    def of_data(
        cls,
        module: Module,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        outputs: tuple[Tensor, ...],
    ) -> Call:
        """Describe a call that no gradient flows through, to find out where its samples are."""
        call: Call = object.__new__(cls)
        call._note_module(module, {})
        leaves, call.structure = tree_flatten((args, keywords))
        call.index, call.is_transparent = -1, False
        call.derivatives = derivatives_of_call(module, tuple(y for y in outputs if y.dim()))
        call.is_loss = call.derivatives is not None and call.derivatives.is_loss
        call.inputs, call.outputs = tuple(leaves), outputs
        call.saved = {"needed": []}
        call.shape_in = tuple(x.shape if isinstance(x, Tensor) else None for x in leaves)
        call.shape_out = tuple(y.shape for y in outputs)
        call.origins_in, call.origins_out = (None,) * len(leaves), (None,) * len(outputs)
        call.computed = [False] * len(leaves)
        call.layouts_in = tuple(map(layout_of, leaves))
        call.layouts_out = (None,) * len(outputs)
        call.find_places()
        return call

    def _drop_unread_tensors(self, outputs: tuple[Tensor, ...]) -> None:
        """Keep no large tensor that no derivative reads, if it can be computed again."""
        self.outputs = tuple([y.detach() for y in outputs])
        rule, mark = self.derivatives, self.origins_out[0]
        is_plain = type(outputs[0]) is Tensor and not torch._C._is_any_autocast_enabled()
        if rule is None or self.is_transparent or not is_plain:
            return
        if len(outputs) == 1 and mark is not None and rule.repeats_output(self):
            self.outputs = (placeholder(outputs[0]),)
            self.computed_with = self.state
            mark.producer = ref(self)
        if rule.reads_inputs(self):
            return
        for i, source in enumerate(self.origins_in):
            producer = None if source is None or source.producer is None else source.producer()
            if producer is None or producer.is_released or producer.recompute_depth >= MAX_DEPTH:
                continue
            (stored,), x = producer.outputs, self.inputs[i]
            is_hooked = x._backward_hooks or type(x.grad_fn).__name__ in WRAPPERS
            if stored.shape == x.shape and stored.dtype == x.dtype and not is_hooked:
                self.producers = {**self.producers, i: producer}
                self.inputs = (*self.inputs[:i], stored, *self.inputs[i + 1 :])
                self.recompute_depth = max(self.recompute_depth, producer.recompute_depth + 1)

    def is_differentiated(self, i: int) -> bool:
        """Whether an input needs a gradient."""
        return self.origins_in[i] is not None or getattr(self.inputs[i], "requires_grad", False)

    def whole_inputs(self) -> tuple[Any, ...]:
        """Return the inputs; those that were not kept are computed again."""
        if not self.producers:
            return self.inputs
        again = {i: producer.whole_outputs()[0] for i, producer in self.producers.items()}
        return tuple(again.get(i, x) for i, x in enumerate(self.inputs))

    def whole_outputs(self) -> tuple[Tensor, ...]:
        """Return the outputs; those that were not kept are computed again, with a graph."""
        if self.computed_with is None:
            return self.outputs
        self.check_released()
        self.check_unchanged()
        if self.computed_with != self.state:
            raise RuntimeError(
                f"A parameter or buffer of {describe(self.module)} was changed after the forward "
                "pass. Its output was not kept to save memory, and can no longer be "
                "computed. Change parameters after the backward pass and its extension hooks."
            )
        return flatten_outputs(self.forward(self.whole_inputs()))

    @property
    def is_released(self) -> bool:
        """Whether the stored tensors are gone."""
        return not self.outputs

    def release(self) -> None:
        """Drop the stored tensors."""
        vars(self).update(RELEASED)
        LIVE.pop(self.index, None)

    def follow_autograd(self) -> None:
        """Drop large tensors in a backward pass that drops what autograd has stored for it."""
        rule = self.derivatives
        is_large = not self.is_released and self.shape_out[0].numel() >= LARGE
        frees = is_large and rule is not None and rule.autograd_stores(self)
        if frees and not torch._C._autograd._get_current_graph_task_keep_graph():
            self.release()

    def forward(self, leaves: Sequence[Any]) -> Any:
        """Call ``forward`` again, as the module was, with other values for its arguments."""
        args, keywords = self.arguments(leaves)
        with self.as_it_was(), disable():
            return self.evaluated.forward(*args, **keywords)

    def reads_parameters(self, travels: bool, is_shown: bool) -> bool:
        """Whether derivatives depend on entries of parameters: see :func:`reading_parameters`."""
        rule = self.derivatives
        if is_shown and self.computed_with is not None:
            return True
        if travels and {*self.origins_in} - {None}:
            return True
        is_linear = rule is None or not self.params or rule.is_linear_in_params(self.module)
        return not is_linear or self.is_unbatched or bool(self.unbatched_inputs)

    def keep_views(self, storages: Set[int]) -> None:
        """Copy inputs and outputs without samples that are in the memory of parameters."""
        if not (self.is_unbatched or self.unbatched_inputs):
            return
        stored = [*self.inputs, *self.outputs]
        places = range(len(stored)) if self.is_unbatched else self.unbatched_inputs
        for i in places:
            if isinstance(stored[i], Tensor) and storage_of(stored[i]) in storages:
                with torch.enable_grad():  # with the same place in the graph
                    stored[i] = stored[i].clone()
        count = len(self.inputs)
        self.inputs, self.outputs = tuple(stored[:count]), tuple(stored[count:])
        self.versions = tuple(map(version_of, stored))

    def note(self, name: str, value: Any) -> None:
        """Keep something for the rule."""
        self.saved[name] = value

    @property
    def has_changed_outputs(self) -> bool:
        """Whether outputs were changed in place after the call."""
        return tuple(map(version_of, self.outputs)) != self.versions[len(self.inputs) :]

    def check_unchanged(self) -> None:
        """Refuse to work with tensors that were changed in place: a RuntimeError."""
        relevant, rule = self.inputs, self.derivatives
        if rule is not None and (rule.needs_output or rule.reads_output):
            relevant += self.outputs
        if tuple(map(version_of, relevant)) != self.versions[: len(relevant)]:
            raise RuntimeError(
                f"A tensor that {self!r} has read or returned was changed in place afterwards, so "
                "its derivatives are no longer known. Replace the in-place operation (x += y, "
                "x.relu_(), …) by its out-of-place form."
            )


def saved_by(
    rule: Rule, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
) -> dict[str, Any]:
    """Return what a rule keeps from the forward pass."""
    with disable():  # if it differentiates, that is no backward pass of the user
        return rule.saved(module, inputs, outputs)


def _is_followed(module: Module) -> bool:
    """Whether a module is part of a traced model, or of a recorded one that runs."""
    by = vars(module)["_backpack_converted"]
    return by == "trace" or (by == "record" and bool(STATE.get().recorders))


def is_converted(module: Module) -> bool:
    """Whether a module is part of a model whose functions are known."""
    return "_backpack_converted" in vars(module)


def reading_parameters(calls: Iterable[Call], travels: bool, is_shown: bool) -> list[Call]:
    """Return the calls whose derivatives depend on entries of parameters.

    ``travels``: something does, besides gradients; ``is_shown``: code of users sees the calls.
    """
    known = [call for call in calls if call.derivatives is not None and call.outputs]
    return [call for call in known if call.reads_parameters(travels, is_shown)]


def positional(
    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module call in the order of its ``forward``, and what is left."""
    if not kwargs:
        return args, {}
    arguments = signature(module.forward).bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.args, arguments.kwargs
