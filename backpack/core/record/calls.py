"""One :class:`Call` per module call: what it read and computed, as long as its graph lives.

A call is owned by the autograd graph of its output (through a hook of the output's node), and never
owns that output's graph itself: when the graph dies, the record dies, with no list to clean.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial, reduce
from inspect import signature
from typing import Any
from weakref import ref

import torch
from torch import Size, Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from backpack.context import STATE, disable
from backpack.core import fast
from backpack.core.record import shards
from backpack.core.record.averaging import Averaging
from backpack.core.record.layout import (
    UNFILLED,
    Layout,
    Place,
    noted,
    unbatched,
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
    is_leaf,
    kind_of,
    own_parameters,
)
from backpack.core.record.shards import Shard
from backpack.core.record.weights import (
    COUNTER,
    IS_SOMETHING,
    TENSORS,
    VERSION,
    Kept,
    State,
    addresses_of,
    state_of_one,
    storage_of,
    tensors_of,
    version_of,
)
from backpack.core.types import Rule

DROPPED_OUTPUTS = fast.path(
    "outputs computed again", "Large outputs that no formula reads are not kept."
)
# An entry of a dictionary: where, its name, and the value.
Entry = tuple[dict[str, Any], str, Any]
# Entries of an output from which on it matters whether tensors are kept.
LARGE = 2**16
# How many calls in a row may have to run to compute a tensor again (sums of sums of …).
MAX_STEPS = 3
_NOTHING = object()
_live: dict[int, ref[Call]] = {}  # by index; an entry goes with its call
_newest = -1  # index of the last call that was recorded
_newest_then = -1  # what that was when a context was left


class Call:
    """One call of a module: its inputs, its output, and where they come from.

    Where its samples are is found out again when a layout was corrected (see :class:`Layout`).

    Attributes:
        index: Increases in the order of the calls.
        inputs: Arguments in the order of the signature, nested ones flattened; tensors attached to
            their graph.
        outputs: Output tensors, flattened and detached (see the module's docstring).
        origins_in: Identity of each input; None where nothing can travel further back.
        origins_out: Identity of each output.
        layouts_in: Where the samples are in each input; None for data and for what is no tensor.
        layouts_out: Where the samples are in each output; None for a scalar loss.
        is_followed: Whether the functions around the call are known: those of a converted model, or
            of a recorded one that runs.
        is_transparent: Whether the output has the entries of the input: nothing to differentiate.
        reads_functions: Whether it has read what no recorded call has returned, but has a gradient.
        repeats: Number of the input whose entries the output has, though it is not transparent:
            an extension has a rule for it.
        misplaced: What is wrong with the place of the batch axis, if anything.
        computed: Which inputs a function has computed from what recorded calls returned.
        relied_on: What was known of the inputs when the rule found the layouts of the outputs.
        kept: Names in ``saved`` that a backward pass has to leave there.
        makers: Calls that compute inputs again that are not kept.
        made_with: What the output was computed with, if it is not kept.
        steps: How many calls in a row compute it again.
        before: What changed parameters were before the backward pass at hand.
        copies: Number of samples for which a call without samples (of parameters) stands.
        mixed_data: What has mixed the samples of an input that no gradient flows through.
        saved: What the derivatives keep, such as a dropout mask.
        read: Parameters and buffers that the module (and its children) had, by name.
        addresses: Where their parameters were in memory.
        params: Own parameters that require a gradient, by name.
        trained: Those of them that the backward pass at hand accumulates a gradient into.
        g_out: Gradients with respect to the outputs, once the backward pass has reached them.
        g_samples: Those of each sample, ``[N, *out]``, for a call without samples.
        was_first: Whether no hook has seen the output before, and could have changed it.
        precision: What derivatives are computed in, if the network is of several precisions.
        is_live: Whether it is among the live calls: not released, and no copy.
        is_usual: Whether it is known that the rows of all tensors are the samples.
        is_plain: Whether all tensors have their samples first, and the rule sees them so.
        is_direct: Whether that is where the rule expects the samples of columns, too.
        is_unbatched: Whether the output has no samples: it depends on parameters alone.
        averaging: What is done to the gradients over processes, if anything.
        views: Shards of the parameters that inputs and outputs are views of.
        shards: Those, and of the parameters that the call has read.
        is_astray: Whether parameters are sharded, and nobody knows where the shards are.
        unbatched_inputs: Numbers of the inputs that have no samples, in a call that has.
    """

    __slots__ = (
        "__weakref__",
        "addresses",
        "averaging",
        "before",
        "computed",
        "copies",
        "couples_samples",
        "derivatives",
        "g_out",
        "g_samples",
        "index",
        "inputs",
        "is_astray",
        "is_container",
        "is_direct",
        "is_followed",
        "is_live",
        "is_plain",
        "is_transparent",
        "is_unbatched",
        "is_usual",
        "kept",
        "layouts_in",
        "layouts_out",
        "made_with",
        "makers",
        "misplaced",
        "mixed_data",
        "module",
        "origins_in",
        "origins_out",
        "outputs",
        "params",
        "precision",
        "read",
        "reads_functions",
        "relied_on",
        "repeats",
        "saved",
        "shape_in",
        "shape_out",
        "shards",
        "steps",
        "structure",
        "trained",
        "training",
        "unbatched_inputs",
        "versions",
        "views",
        "was_first",
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
        leaves: Sequence[Any] = args
        self.structure = None  # no nested arguments
        self.is_followed = False
        if "_backpack_converted" in vars(module):
            by = vars(module)["_backpack_converted"]
            self.is_followed = by == "trace" or (by == "record" and bool(STATE.get().recorders))
        if keywords or not TENSORS.issuperset(map(type, args)):
            leaves, self.structure = tree_flatten((args, keywords))
        self.index = next(COUNTER)
        wrapper = DistributedDataParallel._active_ddp_module  # the one that runs
        self.averaging = None if wrapper is None else Averaging.by(wrapper)
        self.module = module
        self.derivatives: Any = rule  # or None
        self.is_container = rule is None and not is_leaf(module)
        own: Mapping[str, Parameter | None]
        own = own_parameters(module) if rule is None else rule.own(module)
        self.params: dict[str, Parameter] = {}
        for name, p in own.items():
            if p is not None and p.requires_grad:
                self.params[name] = p
        self.trained = self.params
        # as they are now: both may have changed when the backward pass comes
        if module._modules:
            self.read = [tensors.copy() for tensors in _tensors(module)]
            self._cut_buffers()
        else:
            self.read = [module._parameters.copy(), module._buffers.copy()]
            if module._buffers:
                self._cut_buffers()
        self.is_astray = False
        self.views: tuple[Shard, ...] = ()
        self.shards: tuple[Shard, ...] = ()
        if shards.FSDP in sys.modules:
            self.is_astray = not shards.note(module)
            if shards.KNOWN:
                self.views, self.shards = self._find_shards(leaves, outputs)
        has_own = not self.shards and (module._parameters or module._modules)
        self.addresses = addresses_of(self.read) if has_own else ()
        self.training = module.training
        self.was_first = was_first
        self.mixed_data: str | None = None
        self.couples_samples = rule is not None and rule.couples_samples(module)
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
        known = None not in origins_out
        self.is_transparent = known and all(map(origins_in.__contains__, origins_out))
        self.inputs = tuple(leaves)
        if self.is_transparent or len(outputs) > 1 or not known:
            # A module that returns its own input would own its own graph: a leak.
            owned = set(map(id, leaves if self.is_transparent else outputs))
            if not owned.isdisjoint(map(id, leaves)):
                self.inputs = tuple([_detached(x) if id(x) in owned else x for x in leaves])
        self.makers: dict[int, Call] = {}
        self.made_with: list[State] | None = None
        self.steps = 1
        self.g_out: list[Tensor | None] = [None] * len(outputs)
        self.saved: dict[str, Any] = {}
        self.kept: frozenset[str] = frozenset()
        if rule is not None and rule.keeps_something:
            save = rule.saved if rule.keeps_facts_alone else partial(_saved, rule)
            self.saved = save(module, tuple(leaves), outputs)
            self.kept = frozenset(self.saved)
        self.repeats: int | None = None
        self.misplaced: str | None = None
        self.relied_on: tuple[Any, ...] = ()
        self.computed = [False] * len(leaves)
        self.copies = 1
        self.before: Mapping[Tensor, Kept] = {}
        self.g_samples: list[Tensor | None] | None = None
        self.precision: torch.dtype | None = None
        for i, layout in enumerate(layouts_in):
            if layout is None and isinstance(leaves[i], Tensor):
                layouts_in[i] = self._layout_in(i, leaves[i], origins_in[i])
        self.layouts_in: tuple[Layout | None, ...] = tuple(layouts_in)
        self.layouts_out: tuple[Layout | None, ...] = (None,) * len(outputs)
        self.is_usual = False
        self.unbatched_inputs: tuple[int, ...] = ()
        self.layouts_out = self._laid_out()
        if not self.is_usual:
            self.find_places()
        for mark, layout in zip(origins_out, self.layouts_out, strict=True):
            if mark is not None and not self.is_transparent:
                if not mark.is_output:
                    mark.is_output, mark.by_container = True, self.is_container
                mark.layout = mark.layout or layout
                mark.lost = mark.lost or self.misplaced
        if is_droppable:
            drops = self._drops_output(outputs)
            self.outputs = tuple([placeholder(y) if drops else y.detach() for y in outputs])
        try:
            self.versions = tuple(map(VERSION, self.inputs + self.outputs))
        except (AttributeError, RuntimeError):  # not all are tensors, see _version
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
        leaves, call.structure = tree_flatten((args, keywords))
        call.is_live, call.index, call.module = False, -1, module
        call.derivatives = derivatives_of_call(module, tuple(y for y in outputs if y.dim()))
        call.inputs, call.outputs = tuple(leaves), outputs
        call.params, call.read = {}, [tensors.copy() for tensors in _tensors(module)]
        call.training, call.precision, call.is_transparent = module.training, None, False
        call.saved, call.kept = {"needed": []}, frozenset()
        call.before, call.g_samples, call.makers, call.made_with = {}, None, {}, None
        call.views, call.shards, call.is_astray = (), (), False
        call.shape_in = tuple(x.shape if isinstance(x, Tensor) else None for x in leaves)
        call.shape_out = tuple(y.shape for y in outputs)
        call.origins_in, call.origins_out = (None,) * len(leaves), (None,) * len(outputs)
        call.computed, call.misplaced = [False] * len(leaves), None
        call.layouts_in = tuple(map(layout_of, leaves))
        call.layouts_out = (None,) * len(outputs)
        call.find_places()
        return call

    def _find_shards(
        self, leaves: Sequence[Any], outputs: Sequence[Tensor]
    ) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
        """Find sharded parameters that tensors of the call are views of, and all it has read."""
        views = shards.shards_in((*leaves, *outputs))
        read = shards.shards_in(self.own())
        return views, (*views, *(shard for shard in read if shard not in views))

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

    def _drops_output(self, outputs: tuple[Tensor, ...]) -> bool:
        """Keep no large tensor that the derivatives do not read, if it can be computed again.

        Autograd frees it as well, where an activation reads the output of a layer.

        Returns:
            Whether the output need not be kept.
        """
        rule, mark = self.derivatives, self.origins_out[0]
        is_plain = type(outputs[0]) is Tensor and not torch._C._is_any_autocast_enabled()
        if rule is None or self.is_transparent or not is_plain:
            return False
        is_repeated = False
        if len(outputs) == 1 and mark is not None and rule.repeats_output(self):
            is_repeated = True
            self.made_with = self.state
            mark.maker = ref(self)
        if rule.reads_inputs(self):
            return is_repeated
        for i, source in enumerate(self.origins_in):
            maker = None if source is None or source.maker is None else source.maker()
            if maker is None or maker.is_released or maker.steps >= MAX_STEPS:
                continue
            (made,), x = maker.outputs, self.inputs[i]
            if made.shape == x.shape and made.dtype == x.dtype:
                self.makers[i] = maker
                self.inputs = (*self.inputs[:i], made, *self.inputs[i + 1 :])
                self.steps = max(self.steps, maker.steps + 1)
        return is_repeated

    def set_apart(self) -> Origin:
        """Give the output of a transparent call an identity of its own, for rules of users."""
        (behind,) = self.origins_out
        mark = Origin()
        self.repeats, self.is_transparent = self.origins_in.index(behind), False
        self.origins_out = (mark,)
        self.layouts_out = self._laid_out()
        self.find_places()
        mark.is_output, mark.layout = True, self.layouts_out[0]
        return mark

    def read_instead(self, behind: Origin, mark: Origin) -> None:
        """Note that an input is the output of a call that was set apart."""
        self.origins_in = tuple(mark if o is behind else o for o in self.origins_in)
        if self.is_transparent:
            self.origins_out = tuple(mark if o is behind else o for o in self.origins_out)

    @property
    def goes_on(self) -> bool:
        """Whether an input needs a gradient."""
        tensors = zip(self.inputs, self.origins_in, strict=True)
        return any(mark is not None or getattr(x, "requires_grad", False) for x, mark in tensors)

    def whole_inputs(self) -> tuple[Any, ...]:
        """Return the inputs; those that were not kept are computed again."""
        if not self.makers:
            return self.inputs
        again = {i: maker.whole_outputs()[0] for i, maker in self.makers.items()}
        return tuple(again.get(i, x) for i, x in enumerate(self.inputs))

    def whole_outputs(self) -> tuple[Tensor, ...]:
        """Return the outputs; those that were not kept are computed again, with a graph.

        Raises:
            RuntimeError: If a parameter, buffer or input was changed, or the call was released.
        """
        if self.made_with is None:
            return self.outputs
        self.check_released()
        self.check_unchanged()
        if self.made_with != self.state:
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
        if any(m.layout is not None and not m.layout.is_plain for m in above):
            self.misplaced = (
                f"{self!r} reads a tensor of shape {list(x.shape)} that a function has computed "
                "from one whose batch axis is not the first (or that has none). Make the function "
                "a module, or use extend(model, use_converter=True)."
            )
        return None

    def _laid_out(self) -> tuple[Layout | None, ...]:
        """Find where the samples are in the outputs."""
        if self.is_transparent:  # such as the choice of one tensor of several
            return tuple([o.layout for o in self.origins_out if o is not None])
        if self.misplaced is not None:  # nor can anybody say it of what is computed of the outputs
            return (None,) * len(self.shape_out)
        if not any(self.shape_out) and self._combines_losses():
            self.relied_on = tuple(map(_facts, self.layouts_in))
            return (None,) * len(self.shape_out)
        if self.derivatives is None:
            known = next((layout for layout in self.layouts_in if layout is not None), None)
            assumed = [Layout.of_axis(s, 0, assumed=True) if s else None for s in self.shape_out]
            return tuple([known if s else None for s in self.shape_out] if known else assumed)
        usual = self.derivatives.usual_layout(self)
        if usual is not None:
            self.is_usual = self.is_plain = self.is_direct = True
            self.is_unbatched, self.unbatched_inputs = False, ()
            return (usual,) if self.shape_out[0] else (None,)
        self.find_places()  # as far as they are known
        try:
            found = tuple(self.derivatives.layouts(self))
        except ValueError as error:
            self.misplaced = self.misplaced or str(error)
            return (None,) * len(self.shape_out)
        if self.derivatives.depends_on_layouts:
            # what a rule has found out from layouts that are corrected later is void
            self.relied_on = tuple(map(_facts, self.layouts_in))
        return found

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
    def has_parameters(self) -> bool:
        """Whether the module has parameters, frozen ones included."""
        return any(p is not None for tensors in self.read[::2] for p in tensors.values())

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
            self.makers = {}
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

        Args:
            create_graph: Keep the inputs attached to the autograd graph.
        """
        clone = self._copy()
        clone.makers = {}  # products read what our derivatives read, or (create_graph) everything
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

    @contextmanager
    def as_it_was(self, precision: torch.dtype | None = None) -> Iterator[None]:
        """Let the module have the parameters, the buffers and the mode of the call.

        Args:
            precision: What to compute in. Default: that of the call.
        """
        mode = self.module.training
        if mode != self.training:
            self.module.training = self.training
        replaced = self.swap_tensors(self.module, precision)
        try:
            yield
        finally:
            put(replaced)
            if mode != self.training:
                self.module.training = mode

    def _cut_buffers(self) -> None:
        """Forget graphs of buffers: one that this call has computed would own the call."""
        for buffers in self.read[1::2]:
            for name, buffer in buffers.items():
                if buffer is not None and buffer.grad_fn is not None:
                    buffers[name] = buffer.detach()

    @property
    def state(self) -> list[State]:
        """Tell parameters and buffers, as the derivatives see them, from those before a change."""
        before = self.before
        return [before[t].state if t in before else state_of_one(t) for t in tensors_of(self.read)]

    def reads_parameters(self, travels: bool, is_shown: bool) -> bool:
        """Return whether derivatives depend on entries of a parameter that the call has read.

        Args:
            travels: Whether something travels through calls, besides gradients.
            is_shown: Whether code of users sees inputs and outputs.
        """
        rule = self.derivatives
        if is_shown and self.made_with is not None:
            return True
        if travels and {*self.origins_in} - {None}:
            return True
        is_linear = rule is None or not self.params or rule.is_linear_in_params(self.module)
        return not is_linear or self.is_unbatched or bool(self.unbatched_inputs)

    @property
    def has_moved(self) -> bool:
        """Whether a parameter has other memory now than in the forward pass (``p.data = …``)."""
        return self.addresses != addresses_of(self.read)

    def refuse_moved(self) -> None:
        """Refuse parameters that were changed so between the forward pass and the backward pass.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"A parameter of {describe(self.module)} was given other memory (p.data = …) after the "
            "forward pass. Quantities are those of the weights of the forward pass, which autograd "
            "alone still has. Change weights after the backward pass."
        )

    def own(self) -> list[Tensor]:
        """List the parameters that the call has read, of itself and of what it stands for."""
        found: list[Tensor] = [*self.params.values()]
        for read in self.read[::2]:
            found += filter(IS_SOMETHING, read.values())
        return found

    def keep_views(self, storages: Set[int]) -> None:
        """Copy inputs and outputs that have no samples, if they are parameters or views of some.

        Args:
            storages: Where the entries of parameters are.
        """
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

    def see_parameters_before(self, changed: Mapping[Tensor, Kept]) -> None:
        """Let the derivatives see parameters as they were.

        Args:
            changed: What those were that have changed since.

        Raises:
            RuntimeError: If one has changed that was not copied.
        """
        own = {t: changed[t] for t in self.own() if t in changed}
        for t, was in own.items():
            if was.value is None or torch.is_grad_enabled():
                raise RuntimeError(
                    f"A parameter of {describe(self.module)}, of shape {list(t.shape)}, was "
                    "changed during the backward pass. Quantities are those of the weights of the "
                    "forward pass, which are kept where hooks of parameters or modules may change "
                    "them, but not if they are frozen, or with create_graph=True. Change it after "
                    "the backward pass."
                )
        self.before = own | dict(self.before)  # of a graph that is kept: by an earlier pass

    def swap_tensors(
        self, module: Module, precision: torch.dtype | None = None, now: bool = False
    ) -> list[Entry]:
        """Give a module the parameters and buffers of the call, if it has others by now.

        Such as its own, after a ``torch.func.functional_call``, or changed ones.

        Args:
            module: That of the call, or a copy.
            precision: Cast all of them.
            now: Those that have changed as they are now, and sharded ones as users see them: for
                code of users.

        Returns:
            What has been replaced: see :func:`put`.

        Raises:
            RuntimeError: If it has other children, or an attribute hides one of them.
        """
        own, reads = _tensors(module), self.read
        if len(own) != len(reads):
            raise RuntimeError(self._changed("its children are others"))
        if self.shards and now:
            reads = [{name: shards.home(t) for name, t in read.items()} for read in reads]
        elif self.shards:
            shards.need(self.shards)
        if self.before and not now:
            reads = [{name: self._before(t) for name, t in read.items()} for read in reads]
        if precision is None and not any(map(_differ, own, reads)):
            return []
        entries = [
            (tensors, name, t if precision is None else _cast(t, precision))
            for tensors, read in zip(own, reads, strict=True)
            for name, t in (read if precision is None else tensors | read).items()
            if precision is not None or tensors.get(name, _NOTHING) is not t
        ]
        replaced = [(tensors, name, tensors.get(name, _NOTHING)) for tensors, name, _ in entries]
        self._check_hidden(module, [entry for entry in replaced if entry[2] is _NOTHING])
        put(entries)
        return replaced

    def _before(self, tensor: Tensor | None) -> Tensor | None:
        was = None if tensor is None else self.before.get(tensor)
        return tensor if was is None else was.value

    def _check_hidden(self, module: Module, lost: Sequence[Entry]) -> None:
        """Refuse attributes that hide parameters and buffers which a module no longer has."""
        for holder in module.modules() if lost else ():
            for tensors, name, _ in lost:
                is_own = tensors is holder._parameters or tensors is holder._buffers
                if is_own and (name in vars(holder) or hasattr(type(holder), name)):
                    raise RuntimeError(self._changed(f"an attribute hides its '{name}'"))

    def _changed(self, what: str) -> str:
        return (
            f"{describe(self.module)} has changed since the forward pass: {what}. Change modules "
            "after the backward pass and its extension hooks."
        )

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call with other values for the leaves."""
        if self.structure is None:
            return tuple(leaves), {}
        args, keywords = tree_unflatten(list(leaves), self.structure)
        return args, keywords

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Precisions of what the call has read and returned."""
        found = set()
        for t in (*self.inputs, *self.outputs, *self.params.values()):
            if isinstance(t, Tensor) and t.is_floating_point():
                found.add(t.dtype)
        return found

    @property
    def rounding(self) -> float:
        """Machine epsilon of the roughest precision."""
        return max(torch.finfo(dtype).eps for dtype in self.dtypes)

    def compute_in_one_precision(self) -> None:
        """Compute in the highest precision of the tensors, such as under autocast."""
        dtypes = self.dtypes
        if len(dtypes) > 1:
            self.compute_in(reduce(torch.promote_types, dtypes))

    def compute_in(self, precision: torch.dtype) -> None:
        """Let the derivatives see all tensors in this precision."""
        self.precision = precision
        self.g_out = [_cast(g, precision) for g in self.g_out]

    # ------------------------------------------------------------------ where the samples are

    def _layouts_hold(self) -> bool:
        """Whether what the rule has found out still holds, if a later module corrected it."""
        if self.is_transparent:
            return True
        now = tuple(map(_facts, self.layouts_in))
        if now == self.relied_on:
            return True
        expected = tuple(map(_facts, self.layouts_out))
        self.relied_on = now
        assert self.derivatives is not None
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
        self.is_usual = self.is_transparent and self._only_reshapes_rows()
        if self.is_usual:
            self.is_plain = self.is_direct = True
            self.is_unbatched, self.unbatched_inputs = False, ()
            return
        self.is_plain = (
            (rule is None or rule.sees_samples_first(self.module))
            and all(map(_is_first, layouts_in, self.shape_in))
            and all(map(_is_first, layouts_out, self.shape_out))
        )
        self.is_direct = self.is_plain and rule is not None and rule.has_samples_first
        self.is_unbatched = 0 in _numbers_of_samples(layouts_out)
        self.unbatched_inputs = ()
        if not self.is_unbatched and 0 in (counts := _numbers_of_samples(layouts_in)):
            self.unbatched_inputs = tuple([i for i, count in enumerate(counts) if count == 0])

    def _only_reshapes_rows(self) -> bool:
        """Whether the entries of the only input stay where they are in its rows, the samples."""
        if len(self.shape_in) > 1 or len(self.shape_out) > 1:
            return False
        (layout,), (given,), (shape,) = self.layouts_in, self.shape_in, self.shape_out
        if layout is None or layout is not self.layouts_out[0] or not (given and shape):
            return False
        if shape[0] != given[0] or not layout.has_rows(given):
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
        if self.is_usual:
            return shape[0]
        place = self.place_out(0) if shape else None
        return 0 if place is None else place.rows(shape)

    @property
    def rows_per_sample(self) -> int:
        """Number of rows that each sample has: more than 1 where a reshape has merged axes."""
        if self.is_usual or not self.shape_out[0]:
            return 1
        place = self.place_out(0)
        return 1 if place is None else place.rows_per_sample(self.shape_out[0])

    @property
    def couples_rows(self) -> bool:
        """Whether rows of a sample may meet in the call, or are others at its inputs."""
        if self.is_usual:
            return False
        layouts, rule = self.layouts_in + self.layouts_out, self.derivatives
        is_scattered = any(one is not None and one.owners is not None for one in layouts)
        return is_scattered or (rule is not None and not rule.keeps_rows(self))

    @property
    def is_foldable(self) -> bool:
        """Whether a sample has several rows, which the rule may see along an axis of their own."""
        if self.is_usual or self.derivatives is None:
            return False
        return self.rows_per_sample > 1 and self.derivatives.folds_rows(self.module)

    def fold(self, x: Any) -> Any:
        """Give the rows of each sample an axis of their own, ``[R, *] -> [N, R/N, *]``."""
        if isinstance(x, Tensor) and x.dim() and len(x) == self.num_rows:
            return x.unflatten(0, (-1, self.rows_per_sample))
        return x

    def seen(self, whole: bool, folded: bool) -> tuple[Sequence[Any], Sequence[Tensor]]:
        """Return inputs and outputs as the derivatives see them: samples where they expect them.

        Args:
            whole: With those that were not kept.
            folded: With an axis for the rows of each sample.
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
            inputs = [_cast(x, self.precision) for x in inputs]
            outputs = [_cast(y, self.precision) for y in outputs]
        if not self.is_plain and self.derivatives is not None:
            inputs, outputs = self.derivatives.seen(self, inputs, outputs)
        if folded:
            inputs, outputs = list(map(self.fold, inputs)), list(map(self.fold, outputs))
        return inputs, outputs

    def tensors(self, reads_entries: bool = True) -> Mapping[str, Any]:
        """Return the parameters and buffers that the call has read, as the derivatives see them.

        Those of children have qualified names.

        Args:
            reads_entries: Gather what is sharded; else there are tensors of the same shapes.
        """
        if self.shards and reads_entries:
            shards.need(self.shards)
        if self.module._modules:
            names = [name + "." if name else "" for name, _ in self.module.named_modules()]
            if 2 * len(names) != len(self.read):
                raise RuntimeError(self._changed("its children are others"))
            found = {
                names[i // 2] + name: t
                for i, read in enumerate(self.read)
                for name, t in read.items()
            }
        else:
            params, buffers = self.read
            found = params | buffers if buffers else params
        if self.before:
            found = {name: self._before(t) for name, t in found.items()}
        if self.shards and not reads_entries:
            found = {name: t if shards.is_there(t) else placeholder(t) for name, t in found.items()}
        if self.precision is not None:
            found = {name: _cast(t, self.precision) for name, t in found.items()}
        return found

    def gradients(self, folded: bool = False) -> Sequence[Tensor | None]:
        """Return the gradients with respect to the outputs in canonical form.

        Args:
            folded: With an axis for the rows of each sample.
        """
        if self.g_samples is not None:
            return self.g_samples
        if self.is_direct and not folded:
            return self.g_out
        grads = [
            g if g is None or place is None else place.to_canonical(g)
            for g, place in ((g, self.place_out(i)) for i, g in enumerate(self.g_out))
        ]
        return list(map(self.fold, grads)) if folded else grads

    def gradients_seen(self, folded: bool) -> Sequence[Tensor | None]:
        """Return the gradients as the derivatives see them."""
        rule: Any = self.derivatives
        if rule is None or (self.is_direct and not folded):
            return self.g_out
        return rule.seen_gradients(self, folded)

    def check_batched(self) -> None:
        """Refuse input without a batch axis.

        Raises:
            ValueError: If the output has too few axes.
        """
        shape, rule = self.shape_out[0], self.derivatives
        if shape and not shape[0] and not self.num_rows:
            raise ValueError(f"{self!r} was called with an empty batch.")
        if self.misplaced is not None:
            raise ValueError(self.misplaced)
        if rule is None:
            return
        if rule.depends_on_layouts and not self._layouts_hold():
            raise ValueError(
                f"{self!r}: the samples of the batch were assumed to be along the first axis of "
                "the network's data, but a later module needs them elsewhere. Give the network "
                "data with the batch axis first, or let a recurrent module come before functions."
            )
        if len(shape) < rule.min_dims(self.module) and not self.is_unbatched:
            raise ValueError(f"{self!r} was called without a batch axis. Add one, x.unsqueeze(0).")

    def check_parameters(self, trained_only: bool) -> None:
        """Refuse parameters that are not dense floating-point tensors.

        Args:
            trained_only: Frozen parameters do not matter.

        Raises:
            NotImplementedError: If one is sparse or quantised.
        """
        for name, p in self.read[0].items():
            if p is None or (trained_only and name not in self.params):
                continue
            if p.is_quantized or p.layout is not torch.strided:
                kind = "quantised" if p.is_quantized else f"sparse ({p.layout})"
                raise NotImplementedError(
                    f"The parameter '{name}' of {describe(self.module)} is {kind}. Extensions need "
                    "dense floating-point parameters: convert it (to_dense(), dequantize())."
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

    def check_unchanged(self) -> None:
        """Refuse to work with tensors that were changed in place.

        Raises:
            RuntimeError: If that is so.
        """
        relevant, rule = self.inputs, self.derivatives
        if rule is not None and (rule.needs_output or rule.reads_output):
            relevant += self.outputs
        try:
            versions = tuple(map(VERSION, relevant))
        except (AttributeError, RuntimeError):
            versions = tuple(map(version_of, relevant))
        if versions != self.versions[: len(versions)]:
            raise RuntimeError(
                f"A tensor that {self!r} has read or returned was changed in place afterwards, so "
                "its derivatives are no longer known. Replace the in-place operation (x += y, "
                "x.relu_(), …) by its out-of-place form."
            )


# All of a call but its weak references.
_FACTS = [name for name in Call.__slots__ if name != "__weakref__"]


def _tensors(module: Module) -> list[dict[str, Any]]:
    """List the parameters and the buffers that a module has now, then those of children."""
    if not module._modules:
        return [module._parameters, module._buffers]
    return [ts for child in module.modules() for ts in (child._parameters, child._buffers)]


def placeholder(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape that takes no memory. Whoever reads it will notice."""
    return tensor.new_full((), torch.nan).expand(tensor.shape)


def _saved(
    rule: Rule, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
) -> dict[str, Any]:
    with disable():  # if it differentiates, that is no backward pass of the user
        return rule.saved(module, inputs, outputs)


def _numbers_of_samples(layouts: Sequence[Layout | None]) -> list[int | None]:
    return [
        None if one is None else (one if one._same is None else one._root)._facts[1]
        for one in layouts
    ]


def _is_first(layout: Layout | None, shape: Size | None) -> bool:
    return layout is None or shape is None or layout.is_first(shape)


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _cast(x: Any, precision: torch.dtype) -> Any:
    return x.to(precision) if isinstance(x, Tensor) and x.is_floating_point() else x


def _facts(layout: Layout | None) -> tuple[Any, ...] | None:
    if layout is None or layout._same is not None:
        return None if layout is None else layout.facts
    before, samples, *_ = layout._facts
    return before, samples, layout.owners


def _differ(tensors: dict[str, Any], read: dict[str, Any]) -> bool:
    return bool(read) and any(map(operator.is_not, map(tensors.get, read), read.values()))


def put(entries: Sequence[Entry]) -> None:
    """Set entries, or delete them."""
    for where, name, value in entries:
        if value is _NOTHING:
            where.pop(name, None)
        else:
            where[name] = value


def mark_converted(module: Module, by: str) -> None:
    """Note that a module is part of a model whose functions are known, and why."""
    vars(module)["_backpack_converted"] = by


def is_converted(module: Module) -> bool:
    """Whether a module is part of a model whose functions are known."""
    return "_backpack_converted" in vars(module)


def describe(module: Module) -> str:
    """Name a module as a reader of its model would: qualified name and type."""
    name = vars(module).get("_backpack_name", "")
    managed = shards.MANAGED in vars(module)
    kind = kind_of(module).__name__ if managed else type(module).__name__
    return f"'{name}' ({kind})" if name else kind


class Users:
    """Tells which parameters several calls use: all that live when it is asked, or did before."""

    def __init__(self) -> None:
        """Look at no call yet."""
        self._seen: set[int] = set()  # calls
        self._used: set[int] = set()  # parameters, by id
        self._shared: set[int] = set()
        self._last: int | None = None

    def is_alone(self, call: Call) -> bool:
        """Return whether no other call uses a parameter of one."""
        if self._last != _newest:
            self._last = _newest
            for other in all_live_calls():
                if other.params and other.index not in self._seen:
                    self._seen.add(other.index)
                    own = set(map(id, other.params.values()))
                    self._shared |= self._used & own
                    self._used |= own
        return self._shared.isdisjoint(map(id, call.params.values()))


def is_used(tensor: Tensor) -> bool:
    """Whether a recorded call of a known module uses a tensor as a parameter of its own."""
    return any(
        tensor is p for call in all_live_calls() if call.derivatives for p in call.params.values()
    )


def latest() -> Module | None:
    """Return the module of the latest call, if that waits for its first context."""
    entry = _live.get(_newest) if _newest != _newest_then else None
    call = None if entry is None else entry()
    return None if call is None else call.module


def note_end_of_context() -> None:
    """Note that the calls so far do not wait for a context any more."""
    global _newest_then
    _newest_then = _newest


def last_call() -> Call | None:
    """Return the call that was recorded last, if it still holds tensors."""
    entry = _live.get(_newest)
    return None if entry is None else entry()


def all_live_calls() -> list[Call]:
    """Return the recorded calls that still hold tensors, in the order of the calls."""
    return [call for entry in list(_live.values()) if (call := entry()) is not None]


def _find_places() -> None:
    for call in all_live_calls():
        call.find_places()


Layout.on_correction = staticmethod(_find_places)


def live_calls(module: Module) -> list[Call]:
    """Return the recorded calls of a module that still hold tensors, in the order of the calls."""
    return [call for call in all_live_calls() if call.module is module]


def preserve(tensor: Tensor, copy: Tensor) -> None:
    """Let recorded calls keep the entries of a tensor that is about to change in place.

    Args:
        tensor: What will change.
        copy: The same entries elsewhere, with the same place in the graph.
    """
    storage = tensor.untyped_storage().data_ptr()
    copies: dict[int, Tensor] = {}

    def kept(x: Any, version: int) -> Any:
        if not isinstance(x, Tensor) or x.untyped_storage().data_ptr() != storage:
            return x
        if version_of(x) != version:  # changed before
            return x
        if id(x) not in copies:
            same = _memory(x) == _memory(tensor)
            own = copy if same else x.clone()
            copies[id(x)] = own if x.requires_grad else own.detach()
        return copies[id(x)]

    for call in all_live_calls():
        stored, count = (*call.inputs, *call.outputs), len(call.inputs)
        new = tuple(map(kept, stored, call.versions))
        if any(one is not other for one, other in zip(new, stored, strict=True)):
            call.versions = tuple(
                v if one is other else version_of(one)
                for one, other, v in zip(new, stored, call.versions, strict=True)
            )
            call.inputs, call.outputs = new[:count], new[count:]


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


def is_own(hook: Any) -> bool:
    """Whether a hook is one of this library."""
    return (getattr(hook, "__module__", None) or "").startswith("backpack.")


def layout_of(x: Any) -> Layout | None:
    """Return where the samples of a tensor are, if that is known."""
    if not isinstance(x, Tensor):
        return None
    mark = None if x.grad_fn is None else origin(x)
    if mark is not None and mark.layout is not None:
        return mark.layout
    found = noted(x)
    if found is not None or type(x) is Tensor:
        return found
    return unbatched() if isinstance(x, Parameter) else None
