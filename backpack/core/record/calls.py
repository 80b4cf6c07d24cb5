"""One :class:`Call` per module call: what it read and computed, as long as its graph lives.

A call is owned by the autograd graph of its output (through a hook of the output's node), and never
owns that output's graph itself: when the graph dies, the record dies, with no list to clean.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence, Set
from functools import partial, reduce
from inspect import signature
from typing import Any
from weakref import ref

import torch
from torch import Size, Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from backpack.context import STATE, disable
from backpack.core import fast
from backpack.core.record import shards
from backpack.core.record.averaging import Averaging
from backpack.core.record.data_notes import UNFILLED, layout_of, noted
from backpack.core.record.layout import Layout, Place, unbatched
from backpack.core.record.module_state import (
    ModuleState,
    cast,
    describe,
    placeholder,
    works_in_place,
)
from backpack.core.record.origins import (
    Origin,
    flatten_outputs,
    is_foreign_function,
    origin,
    origin_at,
    parameter_behind,
    upstream,
)
from backpack.core.record.registry import (
    derivatives_of_call,
    fallback,
    is_leaf,
    own_parameters,
)
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
_LAYOUT = operator.attrgetter("layout")
_live: dict[int, ref[Call]] = {}  # by index; an entry goes with its call
_newest = -1  # index of the last call that was recorded
_newest_before = -1  # what _newest was when the last context was left


class Call(ModuleState):
    """One call of a module: its inputs, its output, and where they come from.

    Where its samples are is found out again when a layout was corrected (see :class:`Layout`).

    Attributes:
        index: Increases in the order of the calls.
        derivatives: The rule of the module; None for a container.
        inputs: Arguments in the order of the signature, nested ones flattened; tensors attached to
            their graph.
        outputs: Output tensors, flattened and detached (see the module's docstring).
        shape_in: Shapes of the inputs; None for what is no tensor.
        shape_out: Shapes of the outputs.
        structure: How the arguments were nested; None if they were not.
        versions: How often inputs and outputs had been changed in place.
        saved: What the derivatives keep, such as a dropout mask.
        kept: Names in ``saved`` that a backward pass has to leave there.
        is_live: Whether it is among the live calls: not released, and no copy.
        was_first: Whether no hook has seen the output before, and could have changed it.
        is_followed: Whether the functions around the call are known: those of a converted model, or
            of a recorded one that runs.
        averaging: What is done to the gradients over processes, if anything.

        origins_in: Identity of each input; None where nothing can travel further back.
        origins_out: Identity of each output.
        is_transparent: Whether the output has the entries of the input: nothing to differentiate.
        repeats: Index of the input whose entries the output has, though it is not transparent:
            an extension has a rule for it.
        reads_functions: Whether it has read what no recorded call has returned, but has a gradient.
        computed: Which inputs a function has computed from what recorded calls returned.

        producers: Calls that compute inputs again that are not kept, by the number of the input.
        computed_with: What the output was computed with, if it is not kept.
        recompute_depth: How many calls in a row have to run to compute the output again.

        layouts_in: Where the samples are in each input; None for data and for what is no tensor.
        layouts_out: Where the samples are in each output; None for a loss, and if it is not known.
        relied_on: What was known of the inputs when the rule found the layouts of the outputs.
        misplaced: What is wrong with the place of the batch axis, if anything.
        mixed_data: What has mixed the samples of an input that no gradient flows through.
        couples_samples: Whether the rule says that the output of a sample depends on others.
        rows_are_samples: Whether it is known that the rows of all tensors are the samples.
        samples_come_first: Whether all tensors have their samples first, and the rule sees them so.
        moves_no_columns: Whether the rule expects the samples of columns there, too.
        is_unbatched: Whether the output has no samples: it depends on parameters alone.
        unbatched_inputs: Indices of the inputs that have no samples, in a call that has.
        copies: How many samples share this call, if it depends on parameters alone; else 1.

        g_out: Gradients with respect to the outputs, once the backward pass has reached them.
        g_samples: Those of each sample, ``[N, *out]``, for a call without samples.
        trained: Those of ``params`` that the backward pass at hand accumulates a gradient into.
    """

    __slots__ = (
        *("averaging", "computed", "computed_with", "copies", "couples_samples", "derivatives"),
        *("g_out", "g_samples", "index", "inputs", "is_container", "is_followed", "is_live"),
        *("is_transparent", "is_unbatched", "kept", "layouts_in", "layouts_out", "misplaced"),
        *("mixed_data", "moves_no_columns", "origins_in", "origins_out", "outputs", "producers"),
        *("reads_functions", "recompute_depth", "relied_on", "repeats", "rows_are_samples"),
        *("samples_come_first", "saved", "shape_in", "shape_out", "structure", "trained"),
        *("unbatched_inputs", "versions", "was_first"),
    )

    def __init__(
        self,
        module: Module,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        outputs: tuple[Tensor, ...],
        rule: Rule | None,
        was_first: bool,
    ):
        """Record the call. The derivatives may look at the graph to keep what they need."""
        self.index = next(COUNTER)
        self.derivatives: Any = rule  # or None
        self.is_container = rule is None and not is_leaf(module)
        self.couples_samples = rule is not None and rule.couples_samples(module)
        self.was_first = was_first
        self.is_followed = "_backpack_converted" in vars(module) and _is_followed(module)
        wrapper = DistributedDataParallel._active_ddp_module  # the one that runs
        self.averaging = None if wrapper is None else Averaging.by(wrapper)
        leaves: Sequence[Any] = args
        self.structure = None
        if keywords or not TENSORS.issuperset(map(type, args)):
            leaves, self.structure = tree_flatten((args, keywords))

        self._note_module(module, own_parameters(module) if rule is None else rule.own(module))
        self.trained = self.params
        if shards.FSDP in sys.modules:
            self._note_shards((*leaves, *outputs))
        is_addressed = not self.shards and (module._parameters or module._modules)
        self.addresses = addresses_of(self.read) if is_addressed else ()

        # where inputs and outputs are in the graph; what is large may not have to be kept
        is_droppable = rule is not None and outputs[0].numel() >= LARGE and DROPPED_OUTPUTS.is_on
        is_droppable = is_droppable and not self.shards  # others would have to gather them as well
        origins_out, shape_out, detached = [], [], []
        for out in outputs:
            mark = origin(out)
            if mark is None and out.grad_fn is not None:  # a view of a parameter
                mark = origin_at(out.grad_fn, out.output_nr)
            origins_out.append(mark)
            shape_out.append(out.shape)
            if not is_droppable:
                detached.append(out.detach())
        self.outputs = tuple(detached)
        self.origins_out, self.shape_out = tuple(origins_out), tuple(shape_out)
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

        self.saved: dict[str, Any] = {}
        self.kept: frozenset[str] = frozenset()
        if rule is not None and rule.keeps_something:
            save = rule.saved if rule.keeps_facts_alone else partial(_saved, rule)
            self.saved = save(module, tuple(leaves), outputs)
            self.kept = frozenset(self.saved)
        self.g_out: list[Tensor | None] = [None] * len(outputs)
        self.g_samples: list[Tensor | None] | None = None
        self.producers: dict[int, Call] = {}
        self.computed_with: list[State] | None = None
        self.recompute_depth = 1
        self.repeats: int | None = None
        self.copies = 1

        self.mixed_data: str | None = None
        self.misplaced: str | None = None
        self.relied_on: tuple[Any, ...] = ()
        self.computed = [False] * len(leaves)
        for i, layout in enumerate(layouts_in):
            if layout is None and isinstance(leaves[i], Tensor):
                layouts_in[i] = self._layout_in(i, leaves[i], origins_in[i])
        self.layouts_in: tuple[Layout | None, ...] = tuple(layouts_in)
        self._find_layouts_out()

        if is_droppable:
            self._drop_unread_tensors(outputs)
        try:
            self.versions = tuple(map(VERSION, self.inputs + self.outputs))
        except (AttributeError, RuntimeError):  # not all are tensors, see version_of
            self.versions = tuple(map(version_of, self.inputs + self.outputs))
        _live[self.index] = ref(self)
        self.is_live = True
        global _newest
        _newest = self.index

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
        call.is_live, call.index, call.is_transparent = False, -1, False
        call.derivatives = derivatives_of_call(module, tuple(y for y in outputs if y.dim()))
        call.inputs, call.outputs = tuple(leaves), outputs
        call.saved, call.kept = {"needed": []}, frozenset()
        call.g_samples, call.producers, call.computed_with = None, {}, None
        call.shape_in = tuple(x.shape if isinstance(x, Tensor) else None for x in leaves)
        call.shape_out = tuple(y.shape for y in outputs)
        call.origins_in, call.origins_out = (None,) * len(leaves), (None,) * len(outputs)
        call.computed, call.misplaced = [False] * len(leaves), None
        call.layouts_in = tuple(map(layout_of, leaves))
        call.layouts_out = (None,) * len(outputs)
        call.find_places()
        return call

    def without_views(self) -> list[tuple[Any, ...]]:
        """Return inputs and outputs without what is a view of a parameter that is not there."""
        stored: list[tuple[Any, ...]] = [self.inputs, self.outputs]
        if all(shard.is_there for shard in self.views):
            return stored
        return [
            tuple([placeholder(x) if shards.shards_in([x]) else x for x in some]) for some in stored
        ]

    def layouts_of_data(self) -> Sequence[Layout | None]:
        """Find where the samples are in the outputs of a call that no gradient flows through.

        Raises:
            ValueError: If they cannot be followed.
        """
        if self.derivatives is None:
            raise ValueError("it is no leaf of the network")
        usual = self.derivatives.usual_layout(self)
        return (usual,) if usual is not None else self.derivatives.layouts(self)

    def _drop_unread_tensors(self, outputs: tuple[Tensor, ...]) -> None:
        """Keep no large tensor that the derivatives do not read, if it can be computed again.

        Autograd frees it as well, where an activation reads the output of a layer.
        """
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
            if stored.shape == x.shape and stored.dtype == x.dtype:
                self.producers[i] = producer
                self.inputs = (*self.inputs[:i], stored, *self.inputs[i + 1 :])
                self.recompute_depth = max(self.recompute_depth, producer.recompute_depth + 1)

    def set_apart(self) -> Origin:
        """Give the output of a transparent call an identity of its own, for rules of users."""
        (behind,) = self.origins_out
        mark = Origin()
        self.repeats, self.is_transparent = self.origins_in.index(behind), False
        self.origins_out = (mark,)
        self._find_layouts_out()
        return mark

    def read_instead(self, behind: Origin, mark: Origin) -> None:
        """Note that an input is the output of a call that was set apart."""
        self.origins_in = tuple(mark if o is behind else o for o in self.origins_in)
        if self.is_transparent:
            self.origins_out = tuple(mark if o is behind else o for o in self.origins_out)

    @property
    def goes_on(self) -> bool:
        """Whether any input needs a gradient."""
        return any(map(self.is_differentiated, range(len(self.inputs))))

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
        """Return the outputs; those that were not kept are computed again, with a graph.

        Raises:
            RuntimeError: If a parameter, buffer or input was changed, or the call was released.
        """
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

    def _layout_in(self, i: int, x: Tensor, mark: Origin | None) -> Layout | None:
        """Find the samples in an input of no recorded call; None if that is for this one to say."""
        if mark is None:
            known = noted(x)
            if known is not None:
                if known.lost and x.is_floating_point():  # indices may be what they are
                    self.misplaced = f"{self!r} reads {known.lost}"
                return known
            if not x.requires_grad or parameter_behind(x) is None:
                return None
            return unbatched()
        is_foreign = is_foreign_function(x.grad_fn)
        known = noted(x) if is_foreign else None
        if known is not None and (known.is_batched or known.lost not in (None, UNFILLED)):
            # a recorded model has followed what its forward does; kernels are not seen
            if known.lost:
                self.misplaced = f"{self!r} reads {known.lost}"
            mark.layout = known
            return known
        above, _ = upstream(x, lambda m: m.layout is not None or m.lost is not None)
        lost = next((m.lost for m in above if m.lost is not None), None)
        if lost is not None:
            self.misplaced = lost
            return None
        self.computed[i] = bool(above)
        counts = {m.layout.samples for m in above if m.layout is not None and m.layout.is_batched}
        is_recorded = bool(STATE.get().recorders)
        if is_foreign and is_recorded and counts and x.dim() and counts != {len(x)}:
            function = x.grad_fn.name()  # type: ignore[union-attr]
            self.misplaced = (
                f"{self!r} reads a tensor of shape {list(x.shape)} that a torch.autograd.Function "
                f"({function}) has computed from one of {min(counts)} samples in a way that cannot "
                "be followed. Write its forward with functions of torch, or make it a module and "
                "register derivatives for that (backpack.core.derivatives.register)."
            )
        if any(m.layout is not None and not m.layout.samples_come_first for m in above):
            self.misplaced = (
                f"{self!r} reads a tensor of shape {list(x.shape)} that a function has computed "
                "from one whose batch axis is not the first (or that has none). Make the function "
                "a module, or use extend(model, use_converter=True)."
            )
        return None

    def _find_layouts_out(self) -> None:
        """Find where the samples are in the outputs, and note that at the places in the graph."""
        rule, shapes = self.derivatives, self.shape_out
        self.rows_are_samples = False
        self.unbatched_inputs: tuple[int, ...] = ()
        self.layouts_out: tuple[Layout | None, ...] = (None,) * len(shapes)
        if self.is_transparent:  # such as the choice of one tensor of several
            self.layouts_out = tuple(map(_LAYOUT, self.origins_out))
        elif self.misplaced is not None:
            pass  # nor can anybody say it of what is computed of the outputs
        elif not any(shapes) and self._combines_losses():
            self.relied_on = tuple(map(_facts, self.layouts_in))
        elif rule is None:
            known = next((layout for layout in self.layouts_in if layout is not None), None)
            made = [getattr(mark, "layout", None) or known for mark in self.origins_out]
            self.layouts_out = tuple(
                [
                    (layout or Layout.of_axis(s, 0, assumed=True)) if s else None
                    for layout, s in zip(made, shapes, strict=True)
                ]
            )
        elif (usual := rule.usual_layout(self)) is not None:
            self.rows_are_samples = self.samples_come_first = self.moves_no_columns = True
            self.is_unbatched = False
            self.layouts_out = (usual,) if shapes[0] else (None,)
        else:
            self._ask_for_layouts_out(rule)
        if not self.rows_are_samples:
            self.find_places()
        for mark, layout in zip(self.origins_out, self.layouts_out, strict=True):
            if mark is not None and not self.is_transparent:
                if not mark.is_output:
                    mark.is_output, mark.by_container = True, self.is_container
                mark.layout = mark.layout or layout
                mark.lost = mark.lost or self.misplaced

    def _ask_for_layouts_out(self, rule: Rule) -> None:
        """Let the rule find where the samples are in the outputs, from what is known so far."""
        self.find_places()
        try:
            self.layouts_out = tuple(rule.layouts(self))
        except ValueError as error:
            self.misplaced = self.misplaced or str(error)
            return
        if rule.depends_on_layouts:
            # what a rule has found out from layouts that are corrected later is void
            self.relied_on = tuple(map(_facts, self.layouts_in))

    def become_function(self) -> None:
        """Take the automatic derivatives of any leaf, in the place of those of a loss.

        Raises:
            ValueError: If the samples cannot be followed through the module.
        """
        rule = fallback(self.module, self.outputs)
        assert rule is not None
        self.derivatives = rule
        self.saved = _saved(rule, self.module, self.inputs, self.outputs)
        self.kept = frozenset(self.saved)
        self._ask_for_layouts_out(rule)
        self.find_places()
        if self.misplaced is not None:
            raise ValueError(self.misplaced)

    def _combines_losses(self) -> bool:
        """Whether the inputs are losses, and numbers that no gradient flows through."""
        followed = False
        for x, shape, mark in zip(self.inputs, self.shape_in, self.origins_in, strict=True):
            if shape or (isinstance(x, Tensor) and x.requires_grad and mark is None):
                return False
            if mark is not None:
                followed = mark.is_output and mark.layout is None
                if not followed:
                    return False
        return followed

    def __repr__(self) -> str:
        """Name the module, its type and the shapes of the call."""
        shapes = [list(s) for s in self.shape_in if s is not None]
        outs = [list(s) for s in self.shape_out]
        return f"{describe(self.module)} (inputs {shapes}, outputs {outs})"

    def __del__(self) -> None:
        """Forget the call."""
        if getattr(self, "is_live", False):
            _live.pop(self.index, None)

    @property
    def is_released(self) -> bool:
        """Whether the stored tensors are gone."""
        return not self.outputs

    def release(self) -> None:
        """Drop the stored tensors."""
        if self.outputs:  # not released yet
            if self.is_live:
                _live.pop(self.index, None)
                self.is_live = False
            self.inputs, self.outputs, self.saved, self.g_out = (), (), {}, []
            self.read = []
            self.producers = {}
            self.g_samples = None

    def follow_autograd(self) -> None:
        """Drop large tensors in a backward pass that drops what autograd has stored for it."""
        rule = self.derivatives
        is_large = not self.is_released and self.shape_out[0].numel() >= LARGE
        frees = is_large and rule is not None and rule.autograd_stores(self)
        if frees and not torch._C._autograd._get_current_graph_task_keep_graph():
            self.release()

    def snapshot(self, create_graph: bool) -> Call:
        """Return a copy that outlives the release, for products evaluated after the backward pass.

        They read what our derivatives read or, with ``create_graph``, everything, with its graph.
        """
        clone = self._copy()
        clone.producers = {}
        if create_graph:
            clone.inputs = self.whole_inputs()
        else:
            clone.inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in self.inputs)
        return clone

    def for_another_pass(self) -> Call:
        """Return a copy for a backward pass that runs while another one works on this call."""
        clone = self._copy()
        clone.copies, clone.trained = 1, clone.params
        clone.clear()
        return clone

    def _copy(self) -> Call:
        clone: Call = object.__new__(Call)
        for name in _FACTS:
            setattr(clone, name, getattr(self, name))
        clone.is_live = False
        return clone

    def forward(self, leaves: Sequence[Any]) -> Any:
        """Call the module's ``forward`` again, with other values for the (flattened) arguments.

        With the parameters and buffers, and in the mode (training or evaluation), of the call.
        """
        args, keywords = self.arguments(leaves)
        with self.as_it_was(), disable():
            return self.module.forward(*args, **keywords)

    def reads_parameters(self, travels: bool, is_shown: bool) -> bool:
        """Return whether derivatives depend on entries of a parameter that the call has read.

        See :func:`reading_parameters`.
        """
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

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call with other values for the leaves: some to overwrite."""
        if works_in_place(self.module):
            leaves = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        if self.structure is None:
            return tuple(leaves), {}
        args, keywords = tree_unflatten(list(leaves), self.structure)
        return args, keywords

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Precisions of what the call has read and returned."""
        tensors = (*self.inputs, *self.outputs, *self.params.values())
        return {t.dtype for t in tensors if isinstance(t, Tensor) and t.is_floating_point()}

    @property
    def rounding(self) -> float:
        """Machine epsilon of the roughest precision."""
        return max(torch.finfo(dtype).eps for dtype in self.dtypes)

    def compute_in(self, precision: torch.dtype) -> None:
        """Let the derivatives see all tensors in this precision."""
        self.precision = precision
        self.g_out = [cast(g, precision) for g in self.g_out]

    # ------------------------------------------------------------------ where the samples are

    def _layouts_hold(self) -> bool:
        """Whether what the rule has found out still holds, if a later module corrected it."""
        if self.is_transparent:
            return True
        facts = tuple(map(_facts, self.layouts_in))
        if facts == self.relied_on:
            return True
        expected = tuple(map(_facts, self.layouts_out))
        self.relied_on = facts
        try:
            return tuple(map(_facts, self.derivatives.layouts(self))) == expected
        except ValueError:
            return False
        finally:
            self.find_places()  # the rule may have changed the layouts of the inputs

    def clear(self) -> None:
        """Drop what belongs to one backward pass."""
        self.clear_results()
        self.g_out, self.g_samples = [None] * len(self.g_out), None
        self.precision = None

    def clear_results(self) -> None:
        """Drop what rules have kept beyond the forward pass."""
        saved = [*self.saved.items()]  # at once: another thread may add to it
        self.saved = {name: value for name, value in saved if name in self.kept}

    def find_places(self) -> None:
        """Find out where the samples are, from the layouts as they are now."""
        rule, layouts_in, layouts_out = self.derivatives, self.layouts_in, self.layouts_out
        self.rows_are_samples = self.is_transparent and self._only_reshapes_rows()
        if self.rows_are_samples:
            self.samples_come_first = self.moves_no_columns = True
            self.is_unbatched, self.unbatched_inputs = False, ()
            return
        self.samples_come_first = (
            (rule is None or rule.sees_samples_first(self.module))
            and all(map(_is_first, layouts_in, self.shape_in))
            and all(map(_is_first, layouts_out, self.shape_out))
        )
        self.moves_no_columns = (
            self.samples_come_first and rule is not None and rule.has_samples_first
        )
        self.is_unbatched = 0 in _numbers_of_samples(layouts_out)
        self.unbatched_inputs = ()
        if not self.is_unbatched and 0 in (counts := _numbers_of_samples(layouts_in)):
            self.unbatched_inputs = tuple([i for i, count in enumerate(counts) if count == 0])

    def _only_reshapes_rows(self) -> bool:
        """Whether the entries of the only input stay where they are in its rows, the samples."""
        if len(self.shape_in) > 1 or len(self.shape_out) > 1:
            return False
        (layout,), (shape_in,), (shape,) = self.layouts_in, self.shape_in, self.shape_out
        if layout is None or layout is not self.layouts_out[0] or not (shape_in and shape):
            return False
        if shape[0] != shape_in[0] or not layout.has_rows(shape_in):
            return False
        rule = self.derivatives
        return rule is not None and rule.has_samples_first and rule.sees_samples_first(self.module)

    @property
    def is_of_copies(self) -> bool:
        """Whether there are no samples, and the rule works on one tensor in the place of all."""
        rule = self.derivatives
        return self.is_unbatched and rule is not None and not rule.folds_rows(self.module)

    def set_layouts_in(self, layouts: Iterable[Layout | None]) -> None:
        """Note where the samples are in the inputs."""
        self.layouts_in = tuple(layouts)
        self.find_places()

    def place_in(self, i: int) -> Place | None:
        """Find the batch axis of an input; None if it has none."""
        return self._place(self.layouts_in[i], self.shape_in[i])

    def place_out(self, i: int) -> Place | None:
        """Find the batch axis of an output; None if it has none."""
        return self._place(self.layouts_out[i], self.shape_out[i])

    def scattered_rows(self) -> tuple[Place, int] | None:
        """Find the samples along an axis that inputs share; None if they are in order.

        Where they are, with that axis as the first one, and the number of its entries.
        """
        for i, shape in enumerate(self.shape_in):
            place = self.place_in(i)
            if place is not None and shape is not None:
                first = place._replace(axis=0)
                return (first, shape[place.axis]) if first.is_scattered else None
        return None

    def _place(self, layout: Layout | None, shape: Size | None) -> Place | None:
        if shape is None or layout is None or not layout.is_batched:
            return None
        place = layout.place(shape)
        if place is None:
            raise ValueError(
                f"{self!r}: a tensor of shape {list(shape)} has no axis for the {layout.samples} "
                "samples of the batch. Keep the batch axis as it is."
            )
        return place

    @property
    def num_rows(self) -> int:
        """Number of rows of the output, 0 if it has none."""
        shape = self.shape_out[0]
        if self.rows_are_samples:
            return shape[0]
        place = self.place_out(0) if shape else None
        return 0 if place is None else place.rows(shape)

    @property
    def rows_per_sample(self) -> int:
        """Number of rows that each sample has: more than 1 where a reshape has merged axes."""
        if self.rows_are_samples or not self.shape_out[0]:
            return 1
        place = self.place_out(0)
        return 1 if place is None else place.rows_per_sample(self.shape_out[0])

    @property
    def couples_rows(self) -> bool:
        """Whether rows of a sample may meet in the call, or are others at its inputs."""
        if self.rows_are_samples:
            return False
        layouts, rule = self.layouts_in + self.layouts_out, self.derivatives
        is_scattered = any(one is not None and one.owners is not None for one in layouts)
        return is_scattered or (rule is not None and not rule.keeps_rows(self))

    @property
    def is_foldable(self) -> bool:
        """Whether a sample has several rows, which the rule may see along an axis of their own."""
        if self.rows_are_samples or self.derivatives is None:
            return False
        return self.rows_per_sample > 1 and self.derivatives.folds_rows(self.module)

    def fold(self, x: Any) -> Any:
        """Give the rows of each sample an axis of their own, ``[R, *] -> [N, R/N, *]``."""
        if isinstance(x, Tensor) and x.dim() and len(x) == self.num_rows:
            return x.unflatten(0, (-1, self.rows_per_sample))
        return x

    def seen(self, whole: bool, folded: bool) -> tuple[Sequence[Any], Sequence[Tensor]]:
        """Return inputs and outputs as the derivatives see them: samples where they expect them.

        ``whole``: with those that were not kept; ``folded``: with an axis for each sample's rows.
        """
        differentiable = torch.is_grad_enabled()
        inputs: Sequence[Any] = self.whole_inputs() if whole or differentiable else self.inputs
        outputs: Sequence[Tensor] = self.outputs
        if whole:
            outputs = [y.detach() for y in self.whole_outputs()]
        if differentiable and getattr(self.derivatives, "needs_output", False):
            # the stored output has no graph; differentiate through a fresh one
            outputs = flatten_outputs(self.forward(inputs))
        if self.precision is not None:
            inputs = [cast(x, self.precision) for x in inputs]
            outputs = [cast(y, self.precision) for y in outputs]
        if not self.samples_come_first and self.derivatives is not None:
            inputs, outputs = self.derivatives.seen(self, inputs, outputs)
        if folded:
            inputs, outputs = list(map(self.fold, inputs)), list(map(self.fold, outputs))
        return inputs, outputs

    def gradients(self, folded: bool = False) -> Sequence[Tensor | None]:
        """Return gradients with respect to the outputs in canonical form; see :meth:`seen`."""
        if self.g_samples is not None:
            return self.g_samples
        if self.moves_no_columns and not folded:
            return self.g_out
        grads = [
            g if g is None or place is None else place.to_canonical(g)
            for g, place in ((g, self.place_out(i)) for i, g in enumerate(self.g_out))
        ]
        return list(map(self.fold, grads)) if folded else grads

    def check(self, trained_only: bool) -> None:
        """Refuse a call without quantities; ``trained_only``: frozen parameters do not matter.

        Raises:
            RuntimeError: If its tensors are gone.
            ValueError: If its input has no batch axis.
            NotImplementedError: If a parameter is sparse, quantised or complex.
        """
        if not self.outputs:
            self.check_released()
        self._check_batched()
        if self.module._parameters:
            self._check_parameters(trained_only)

    def _check_batched(self) -> None:
        """Refuse input without a batch axis, or whose samples are not known."""
        shape, rule = self.shape_out[0], self.derivatives
        if shape and not shape[0] and not self.num_rows:
            raise ValueError(f"{self!r} was called with an empty batch.")
        if self.misplaced is not None:
            raise ValueError(self.misplaced)
        if rule is None:
            return
        if rule.depends_on_layouts and not self._layouts_hold():
            raise ValueError(self._says_corrected())
        if len(shape) < rule.min_dims(self.module) and (self.is_of_copies or not self.is_unbatched):
            raise ValueError(f"{self!r} was called without a batch axis. Add one, x.unsqueeze(0).")

    def _says_corrected(self) -> str:
        return (
            f"{self!r}: the samples of the batch were assumed to be along the first axis of the "
            "network's data, but a later module needs them elsewhere. Give the network data with "
            "the batch axis first, and recurrent layers and attention batch_first=True; if the "
            "samples are along another axis, let a recurrent module come before functions."
        )

    def note_correction(self) -> None:
        """Find out where the samples are, now that a later module has corrected it."""
        self.find_places()
        rule = self.derivatives
        if self.misplaced is None and rule is not None and not rule.fits_layouts(self):
            self.misplaced = self._says_corrected()

    def _check_parameters(self, trained_only: bool) -> None:
        """Refuse parameters that are not dense tensors of real floating-point numbers."""
        for name, p in self.read[0].items():
            if p is None or (trained_only and name not in self.params):
                continue
            if p.is_quantized or p.layout is not torch.strided:
                kind = "quantised" if p.is_quantized else f"sparse ({p.layout})"
                raise NotImplementedError(
                    f"The parameter '{name}' of {describe(self.module)} is {kind}. Extensions need "
                    "dense floating-point parameters: convert it (to_dense(), dequantize())."
                )
            if p.is_complex():
                raise NotImplementedError(
                    f"The parameter '{name}' of {describe(self.module)} is complex. Extensions "
                    "need real ones: let the parameter be torch.view_as_real(…) of it, and use "
                    "torch.view_as_complex in forward."
                )

    def check_released(self) -> None:
        """Refuse to work with tensors that are gone.

        Raises:
            RuntimeError: If that is so.
        """
        if not self.outputs:
            raise RuntimeError(
                f"What the forward pass stored for {describe(self.module)} is gone: a backward "
                "pass released it, or memory_cleanup did. To run several backward passes through "
                "one forward pass, use backward(retain_graph=True) for all but the last, also for "
                "those without extensions (if they have create_graph=True, backpack(..., "
                "retain_graph=True) as well), and memory_cleanup behind them."
            )

    @property
    def has_changed_outputs(self) -> bool:
        """Whether outputs were changed in place after the call."""
        return tuple(map(version_of, self.outputs)) != self.versions[len(self.inputs) :]

    def check_unchanged(self) -> None:
        """Refuse to work with tensors that were changed in place.

        Raises:
            RuntimeError: If that is so.
        """
        relevant, rule = self.inputs, self.derivatives
        if rule is not None and (rule.needs_output or rule.reads_output):
            relevant += self.outputs
        if tuple(map(version_of, relevant)) != self.versions[: len(relevant)]:
            raise RuntimeError(
                f"A tensor that {self!r} has read or returned was changed in place afterwards, so "
                "its derivatives are no longer known. Replace the in-place operation (x += y, "
                "x.relu_(), …) by its out-of-place form."
            )


# All of a call but its weak references.
_FACTS = [name for name in ModuleState.__slots__ + Call.__slots__ if name != "__weakref__"]


def _saved(
    rule: Rule, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
) -> dict[str, Any]:
    with disable():  # if it differentiates, that is no backward pass of the user
        return rule.saved(module, inputs, outputs)


def _numbers_of_samples(layouts: Sequence[Layout | None]) -> list[int | None]:
    return [
        None if one is None else (one if one._merged_into is None else one._root)._facts[1]
        for one in layouts
    ]


def _is_first(layout: Layout | None, shape: Size | None) -> bool:
    return layout is None or shape is None or layout.is_first(shape)


def _facts(layout: Layout | None) -> tuple[Any, ...] | None:
    return None if layout is None else layout.facts


def _is_followed(module: Module) -> bool:
    """Whether a module is part of a traced model, or of a recorded one that runs."""
    by = vars(module)["_backpack_converted"]
    return by == "trace" or (by == "record" and bool(STATE.get().recorders))


def mark_converted(module: Module, by: str) -> None:
    """Note that a module is part of a model whose functions are known, and why."""
    vars(module)["_backpack_converted"] = by


def is_converted(module: Module) -> bool:
    """Whether a module is part of a model whose functions are known."""
    return "_backpack_converted" in vars(module)


# --- The calls that live --------------------------------------------------------------------------


def reading_parameters(calls: Iterable[Call], travels: bool, is_shown: bool) -> list[Call]:
    """Return the calls whose derivatives depend on entries of parameters.

    Args:
        calls: Calls that may be among them.
        travels: Whether something travels through calls, besides gradients.
        is_shown: Whether code of users sees inputs and outputs.
    """
    known = [call for call in calls if call.derivatives is not None and call.outputs]
    return [call for call in known if call.reads_parameters(travels, is_shown)]


def compute_in_one_precision(calls: Sequence[Call]) -> None:
    """Compute in the highest precision of what calls have read and returned, as under autocast."""
    dtypes: set[torch.dtype] = set()
    for call in calls:
        dtypes |= call.dtypes
    if len(dtypes) > 1:
        for call in calls:
            call.compute_in(reduce(torch.promote_types, dtypes))


def release(calls: Iterable[Call], keeps_tensors: bool) -> None:
    """Drop what a backward pass has stored at calls, and what the forward pass has, unless kept."""
    for call in calls:
        if keeps_tensors:
            call.clear()
        else:
            call.release()


class Users:
    """Tells which parameters are used several times: by all calls that live, or did before."""

    def __init__(self) -> None:
        """Look at no call yet."""
        self._seen: set[int] = set()  # calls
        self._used: set[int] = set()  # parameters, by id
        self._shared: set[int] = set()
        self._last: int | None = None

    def is_alone(self, call: Call) -> bool:
        """Return whether a call alone uses its parameters, and each of them once."""
        if self._last != _newest:
            self._last = _newest
            for other in all_live_calls():
                if other.params and other.index not in self._seen:
                    self._seen.add(other.index)
                    for p in map(id, other.params.values()):
                        (self._shared if p in self._used else self._used).add(p)
        return self._shared.isdisjoint(map(id, call.params.values()))


def is_used(tensor: Tensor) -> bool:
    """Whether a recorded call of a known module uses a tensor as a parameter of its own."""
    return any(
        tensor is p for call in all_live_calls() if call.derivatives for p in call.params.values()
    )


def latest() -> Module | None:
    """Return the module of the latest call, if that waits for its first context."""
    call = last_call() if _newest != _newest_before else None
    return None if call is None else call.module


def note_end_of_context() -> None:
    """Note that the calls so far do not wait for a context any more."""
    global _newest_before
    _newest_before = _newest


def last_call() -> Call | None:
    """Return the call that was recorded last, if it still holds tensors."""
    entry = _live.get(_newest)
    return None if entry is None else entry()


def all_live_calls() -> list[Call]:
    """Return the recorded calls that still hold tensors, in the order of the calls."""
    return [call for entry in list(_live.values()) if (call := entry()) is not None]


def _find_places() -> None:
    for call in all_live_calls():
        call.note_correction()


Layout.on_correction = staticmethod(_find_places)


def live_calls(module: Module) -> list[Call]:
    """Return the recorded calls of a module that still hold tensors, in the order of the calls."""
    return [call for call in all_live_calls() if call.module is module]


def preserve(tensor: Tensor, copy: Tensor) -> None:
    """Let recorded calls keep the entries of a tensor that is about to change in place.

    The copy has the same entries elsewhere, and the same place in the graph.
    """
    storage = tensor.untyped_storage().data_ptr()
    copies: dict[int, Tensor] = {}

    def kept(x: Any, version: int) -> Any:
        if version_of(x) != version:  # changed before
            return x
        if id(x) not in copies:
            own = copy if _memory(x) == _memory(tensor) else x.clone()
            copies[id(x)] = own if x.requires_grad else own.detach()
        return copies[id(x)]

    for entry in reversed(list(_live.values())):
        call = entry()
        if call is None:
            continue
        stored, count = (*call.inputs, *call.outputs), len(call.inputs)
        shares = [
            isinstance(x, Tensor) and x.untyped_storage().data_ptr() == storage for x in stored
        ]
        if not any(shares):
            continue
        held = list(zip(stored, call.versions, shares, strict=True))
        new = [kept(x, version) if is_shared else x for x, version, is_shared in held]
        call.inputs, call.outputs = tuple(new[:count]), tuple(new[count:])
        call.versions = tuple(
            [v if y is x else version_of(y) for y, (x, v, _) in zip(new, held, strict=True)]
        )
        if not (any(shares[:count]) or call.module._modules):
            return  # the call has filled this memory, itself: none before holds it


def _memory(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def positional(
    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module call in the order of its ``forward``, and what is left."""
    if not kwargs:
        return args, {}
    arguments = signature(module.forward).bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.args, arguments.kwargs
