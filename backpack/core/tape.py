"""What the forward hooks record: one :class:`Call` per module call, alive as long as its graph.

A call is owned by the autograd graph of its output (through a hook of the output's node), and never
owns that output's graph itself: when the graph dies, the record dies, with no list to clean.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from inspect import signature
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Size, Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from backpack.context import CTX, disable
from backpack.core.layout import Layout, Place, unbatched
from backpack.core.registry import (
    derivatives_of,
    derivatives_of_call,
    is_leaf,
    own_parameters,
)
from backpack.custom_module.converted_module import ConvertedModule
from backpack.custom_module.parameter_module import is_constant, mark_constant

if TYPE_CHECKING:
    from backpack.core.derivatives.basederivatives import BaseDerivatives

HOOKED = "BackwardHookFunctionBackward"
# Autograd nodes that keep all entries in their (row-major) order: they only change the shape, or
# the precision.
RESHAPES = {
    HOOKED,
    "AliasBackward0",
    "CloneBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "ToCopyBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
    "ViewAsBackward0",
}

TENSORS = frozenset({Tensor, Parameter})
OnReach = Callable[["Call", int, Tensor], None]
# An entry of a dictionary: where, its name, and the value.
Entry = tuple[dict[str, Any], str, Any]
# Module classes for which some extension has a rule of its own.
CLASSES_WITH_RULES: WeakSet[type[Module]] = WeakSet()
# One entry for each forward pass whose functions are recorded, None for those inside of another.
RECORDERS: list[Any] = []
# Entries of an output from which on it matters whether tensors are kept.
LARGE = 2**16
# How many calls in a row may have to run to compute a tensor again (sums of sums of …).
MAX_STEPS = 3
_index = count()
_NOTHING = object()
_live: dict[int, ref[Call]] = {}  # by index; an entry goes with its call
_uses: dict[int, int] = {}  # number of live calls that use a parameter, by its id


class Origin:
    """Identity of a tensor: the place in the autograd graph where its entries were computed.

    Attributes:
        is_output: Whether a recorded call returned the tensor.
        layout: Where the samples are in it, if that is known.
        maker: The call that computes the tensor again, if it is not kept.
    """

    __slots__ = ("is_output", "layout", "maker")

    def __init__(self) -> None:
        """Nobody is known to have returned it yet."""
        self.is_output = False
        self.layout: Layout | None = None
        self.maker: ref[Call] | None = None


def origin(tensor: Any) -> Origin | None:
    """Return the identity of a tensor up to reshapes; None for data, parameters and constants.

    The mark lives in the metadata of the autograd node, so it is unique while the graph lives, a
    reshaped tensor shares it, and an in-place change gives a new one.
    """
    node: Any = tensor.grad_fn if isinstance(tensor, Tensor) else None
    if node is None:
        return None
    slot = tensor.output_nr
    while True:
        marks, key = node.metadata, ("backpack", slot)
        mark = marks.get(key)
        if mark is not None:  # also that of a call that returned a view of its own parameter
            return mark
        name = type(node).__name__
        if name not in RESHAPES:
            mark = marks[key] = Origin()
            return mark
        # a full-backward hook (of somebody else) wraps all tensors of a module in one node
        source, slot = node.next_functions[slot if name == HOOKED else 0]
        if source is None or type(source).__name__ == "AccumulateGrad":
            return None
        node = source


def parameter_behind(tensor: Any) -> Parameter | None:
    """Return the parameter that a tensor is, or is a reshaped (or cast) form of; None for others.

    What a recorded call has returned is its business.
    """
    if not (isinstance(tensor, Tensor) and tensor.requires_grad) or origin(tensor) is not None:
        return None
    if isinstance(tensor, Parameter):
        return tensor
    node: Any = tensor.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0]
    leaf = None if node is None else node.variable
    return leaf if isinstance(leaf, Parameter) else None


def _mark(node: Any, slot: int) -> Origin:
    marks, key = node.metadata, ("backpack", slot)
    mark = marks.get(key)
    if mark is None:
        mark = marks[key] = Origin()
    return mark


def _origin_of_output(out: Tensor) -> Origin | None:
    """Return the identity of an output; of a view of a parameter, too."""
    mark = origin(out)
    return _mark(out.grad_fn, out.output_nr) if mark is None and out.grad_fn is not None else mark


def upstream(tensor: Tensor, stop: Callable[[Origin], bool]) -> tuple[list[Origin], list[Tensor]]:
    """Search the autograd graph above a tensor.

    Args:
        tensor: Where to start.
        stop: Whether to look no further than a marked tensor.

    Returns:
        The closest marks at which the search has stopped, and the leaves (parameters) on the way.
    """
    found, leaves, seen, stack = [], [], set(), [tensor.grad_fn]
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        marks = [m for m in node.metadata.values() if isinstance(m, Origin) and stop(m)]
        found += marks
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        elif not marks:
            stack += [parent for parent, _ in node.next_functions]
    return found, leaves


class Places(NamedTuple):
    """Where the samples of a call are, as far as is known now: see :class:`Layout`.

    Attributes:
        is_plain: Whether all tensors have their samples first, and the rule sees them so.
        is_direct: Whether that is where the rule expects the samples of columns, too.
        is_unbatched: Whether the output has no samples: it depends on parameters alone.
        without: Numbers of the inputs that have no samples, in a call that has.
    """

    is_plain: bool
    is_direct: bool
    is_unbatched: bool
    without: tuple[int, ...]


# Of calls whose rows are the samples, in all tensors.
USUAL = Places(is_plain=True, is_direct=True, is_unbatched=False, without=())


class Call:
    """One call of a module: its inputs, its output, and where they come from.

    Attributes:
        index: Increases in the order of the calls.
        inputs: Arguments in the order of the signature, nested ones flattened; tensors attached to
            their graph.
        outputs: Output tensors, flattened and detached (see the module's docstring).
        origins_in: Identity of each input; None where nothing can travel further back.
        origins_out: Identity of each output.
        layouts_in: Where the samples are in each input; None for data and for what is no tensor.
        layouts_out: Where the samples are in each output; None for a scalar loss.
        is_transparent: Whether the output has the entries of the input: nothing to differentiate.
        reads_functions: Whether it has read what no recorded call has returned, but has a gradient.
        misplaced: What is wrong with the place of the batch axis, if anything.
        computed: Which inputs a function has computed from what recorded calls returned.
        relied_on: What was known of the inputs when the rule found the layouts of the outputs.
        kept: Names in ``saved`` that a backward pass has to leave there.
        makers: Calls that compute inputs again that are not kept.
        made_with: What the output was computed with, if it is not kept.
        steps: How many calls in a row compute it again.
        copies: Number of samples for which a call without samples (of parameters) stands.
        shared: What was computed of the columns at hand for one parameter that others need, too.
        saved: What the derivatives keep, such as a dropout mask (``module._backpack_saved``).
        read: Parameters and buffers that the module (and its children) had, by name.
        params: Own parameters that require a gradient, by name.
        trained: Those of them that the backward pass at hand accumulates a gradient into.
        g_out: Gradients with respect to the outputs, once the backward pass has reached them.
        g_samples: Those of each sample, ``[N, *out]``, for a call without samples.
        precision: What derivatives are computed in, if the network is of several precisions.
    """

    __slots__ = (
        "__weakref__",
        "_corrections",
        "_places",
        "computed",
        "copies",
        "counts_uses",
        "derivatives",
        "g_out",
        "g_samples",
        "index",
        "inputs",
        "is_container",
        "is_transparent",
        "kept",
        "layouts_in",
        "layouts_out",
        "made_with",
        "makers",
        "misplaced",
        "mixes_samples",
        "module",
        "origins_in",
        "origins_out",
        "outputs",
        "params",
        "precision",
        "read",
        "reads_functions",
        "relied_on",
        "saved",
        "shape_in",
        "shape_out",
        "shared",
        "steps",
        "structure",
        "trained",
        "training",
        "versions",
    )

    def __init__(
        self,
        module: Module,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        outputs: tuple[Tensor, ...],
    ):
        """Record the call. The derivatives may look at the graph to keep what they need."""
        leaves: Sequence[Any] = args
        self.structure = None  # no nested arguments
        if keywords or not TENSORS.issuperset(map(type, args)):
            leaves, self.structure = tree_flatten((args, keywords))
        self.index = next(_index)
        self.module = module
        rule = derivatives_of_call(module, outputs)
        self.derivatives: BaseDerivatives | None = rule
        self.is_container = rule is None and not is_leaf(module)
        own: Mapping[str, Parameter | None]
        own = own_parameters(module) if rule is None else rule.own(module)
        self.params: dict[str, Parameter] = {}
        for name, p in own.items():
            if p is not None and p.requires_grad:
                self.params[name] = p
        self.trained = self.params
        # as they are now: both may have changed when the backward pass comes
        self.read = [tensors.copy() for tensors in self._tensors()]
        if module._buffers or module._modules:
            self._cut_buffers()
        self.training = module.training
        self.mixes_samples = rule is not None and rule.mixes_samples(module)
        # rules of users may read everything
        is_droppable = rule is not None and rule.is_ours and outputs[0].numel() >= LARGE
        origins_out, shape_out, detached = [], [], []
        for out in outputs:
            origins_out.append(_origin_of_output(out))
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
                    if mark is None or not mark.is_output:
                        self.reads_functions = True
            origins_in.append(mark)
            shape_in.append(shape)
            layouts_in.append(layout)
        self.origins_in, self.shape_in = tuple(origins_in), tuple(shape_in)
        sources = set(origins_in)
        sources.discard(None)
        self.is_transparent = sources.issuperset(origins_out)
        # A module that returns its own input would own its own graph: a leak.
        owned = set(map(id, leaves if self.is_transparent else outputs))
        self.inputs = tuple(leaves)
        if not owned.isdisjoint(map(id, leaves)):
            self.inputs = tuple([_detached(x) if id(x) in owned else x for x in leaves])
        self.makers: dict[int, Call] = {}
        self.made_with: list[tuple[int, ...]] | None = None
        self.steps = 1
        self.g_out: list[Tensor | None] = [None] * len(outputs)
        self.saved: dict[str, Any] = {}
        self.kept: frozenset[str] = frozenset()
        if rule is not None and rule.keeps_something:
            self.saved = _saved(rule, module, tuple(leaves), outputs)
            self.kept = frozenset(self.saved)
        self.shared: dict[str, Any] | None = None
        self.misplaced: str | None = None
        self.relied_on: tuple[Any, ...] = ()
        self.computed = [False] * len(leaves)
        self.copies = 1
        self.g_samples: list[Tensor | None] | None = None
        self.precision: torch.dtype | None = None
        self._places: Places | None = None
        self._corrections = 0
        for i, layout in enumerate(layouts_in):
            if layout is None:
                layouts_in[i] = self._layout_in(i, leaves[i], origins_in[i])
        self.layouts_in: tuple[Layout | None, ...] = tuple(layouts_in)
        self.layouts_out: tuple[Layout | None, ...] = (None,) * len(outputs)
        self.layouts_out = self._laid_out()
        for mark, layout in zip(origins_out, self.layouts_out, strict=True):
            if mark is not None:
                mark.is_output = True
                mark.layout = mark.layout or layout
        if is_droppable:
            drops = self._drops_output(outputs)
            self.outputs = tuple([stand_in(y) if drops else y.detach() for y in outputs])
        self.versions = tuple(map(_version, self.inputs + self.outputs))
        _live[self.index] = ref(self)
        for key in map(id, self.params.values()):
            _uses[key] = _uses.get(key, 0) + 1
        self.counts_uses = True

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
            self.made_with = state_of(self.read)
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
        if self.made_with != state_of(self.read):
            raise RuntimeError(
                f"A parameter or buffer of {describe(self.module)} was changed after the forward "
                "pass. Its output was not kept to save memory, and can no longer be "
                "computed. Change parameters after the backward pass and its extension hooks."
            )
        return flatten_outputs(self.forward(self.whole_inputs()))

    def _layout_in(self, i: int, x: Any, mark: Origin | None) -> Layout | None:
        """Find the samples in an input of no recorded call; None if that is for this one to say."""
        if mark is None:
            return unbatched() if is_constant(x) or parameter_behind(x) is not None else None
        above, _ = upstream(x, lambda m: m.layout is not None)
        self.computed[i] = bool(above)
        if any(m.layout is not None and not m.layout.is_plain for m in above):
            self.misplaced = (
                f"{self!r} reads a tensor of shape {list(x.shape)} that a function has computed "
                f"from "
                "one whose batch axis is not the first (or that has none). Make the function a "
                "module, or use extend(model, use_converter=True)."
            )
        return None

    def _laid_out(self) -> tuple[Layout | None, ...]:
        """Find where the samples are in the outputs."""
        if self.is_transparent:  # such as the choice of one tensor of several
            return tuple(o.layout for o in self.origins_out if o is not None)
        if self.derivatives is None:
            known = next((layout for layout in self.layouts_in if layout is not None), None)
            assumed = [Layout.of_axis(s, 0, assumed=True) if s else None for s in self.shape_out]
            return tuple(known if s else None for s in self.shape_out) if known else tuple(assumed)
        usual = self.derivatives.usual_layout(self)
        if usual is not None:
            self._places, self._corrections = USUAL, Layout.corrections
            return (usual,) if self.shape_out[0] else (None,)
        try:
            found = tuple(self.derivatives.layouts(self))
        except ValueError as error:
            self.misplaced = self.misplaced or str(error)
            return (None,) * len(self.shape_out)
        finally:
            self._places = None  # the rule may have changed the layouts of the inputs
        if self.derivatives.depends_on_layouts:
            # what a rule has found out from layouts that are corrected later is void
            self.relied_on = tuple(map(_facts, self.layouts_in))
        return found

    def __repr__(self) -> str:
        """Name the module, its type and the shapes of the call."""
        shapes = [list(s) for s in self.shape_in if s is not None]
        outs = [list(s) for s in self.shape_out]
        return f"{describe(self.module)} (inputs {shapes}, outputs {outs})"

    def __del__(self) -> None:
        """Forget the call, and that it uses its parameters."""
        if getattr(self, "counts_uses", False):
            self._forget()

    def _forget(self) -> None:
        if self.counts_uses:  # no snapshot, which has the index of another call
            self.counts_uses = False
            _live.pop(self.index, None)
            for key in map(id, self.params.values()):
                _uses[key] -= 1
                if not _uses[key]:
                    del _uses[key]

    @property
    def is_released(self) -> bool:
        """Whether the stored tensors are gone."""
        return not self.outputs

    def uses_each_parameter_alone(self) -> bool:
        """Whether no other live call uses a parameter of this one."""
        return not self.params or all(_uses[id(p)] == 1 for p in self.params.values())

    def release(self) -> None:
        """Drop the stored tensors."""
        if self.outputs:  # not released yet
            self._forget()
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
        clone: Call = object.__new__(Call)
        for name in _FACTS:
            setattr(clone, name, getattr(self, name))
        # products read what our derivatives read, or (create_graph) everything
        clone.counts_uses, clone.makers = False, {}
        if create_graph:
            clone.inputs = self.whole_inputs()
        else:
            clone.inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in self.inputs)
        return clone

    def forward(self, leaves: Sequence[Any]) -> Any:
        """Call the module's ``forward`` again, with other values for the (flattened) arguments.

        With the parameters and buffers, and in the mode (training or evaluation), of the call.
        """
        args, keywords = self.arguments(leaves)
        mode = self.module.training
        if mode != self.training:
            self.module.training = self.training
        is_bound = vars(self.module).get("_backpack_call") is self
        replaced = [] if is_bound else self.lend_tensors()
        try:
            with disable():
                return self.module.forward(*args, **keywords)
        finally:
            put(replaced)
            if mode != self.training:
                self.module.training = mode

    def _tensors(self) -> list[dict[str, Any]]:
        """List the parameters and the buffers that the module has now, then those of children."""
        module = self.module
        if not module._modules:
            return [module._parameters, module._buffers]
        return [ts for child in module.modules() for ts in (child._parameters, child._buffers)]

    def _cut_buffers(self) -> None:
        """Forget graphs of buffers: one that this call has computed would own the call."""
        for buffers in self.read[1::2]:
            for name, buffer in buffers.items():
                if buffer is not None and buffer.grad_fn is not None:
                    buffers[name] = buffer.detach()

    def lend_tensors(self, precision: torch.dtype | None = None) -> list[Entry]:
        """Give the module the parameters and buffers of the call, if it has others by now.

        Such as its own, after a ``torch.func.functional_call``.

        Args:
            precision: Cast all of them.

        Returns:
            What has been replaced: see :func:`put`.

        Raises:
            RuntimeError: If it has other children, or an attribute hides one of them.
        """
        now = self._tensors()
        if len(now) != len(self.read):
            raise RuntimeError(self._changed("its children are others"))
        if precision is None and not any(map(_differ, now, self.read)):
            return []
        entries = [
            (tensors, name, t if precision is None else _cast(t, precision))
            for tensors, read in zip(now, self.read, strict=True)
            for name, t in (read if precision is None else tensors | read).items()
            if precision is not None or tensors.get(name, _NOTHING) is not t
        ]
        replaced = [(tensors, name, tensors.get(name, _NOTHING)) for tensors, name, _ in entries]
        self._check_hidden([entry for entry in replaced if entry[2] is _NOTHING])
        put(entries)
        return replaced

    def _check_hidden(self, lost: Sequence[Entry]) -> None:
        """Refuse attributes that hide parameters and buffers which a module no longer has."""
        for holder in self.module.modules() if lost else ():
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
        tensors = (*self.inputs, *self.outputs, *self.params.values())
        return {t.dtype for t in tensors if isinstance(t, Tensor) and t.is_floating_point()}

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

    @property
    def unbatched_inputs(self) -> tuple[int, ...]:
        """Number the inputs that have no samples, in a call that has."""
        return self.places.without

    def _layouts_hold(self) -> bool:
        """Whether what the rule has found out still holds, if a later module corrected it."""
        if self.is_transparent:
            return True
        now = tuple(map(_facts, self.layouts_in))
        if now == self.relied_on:
            return True
        expected = tuple(map(_facts, self.layouts_out))
        self.relied_on, self._places = now, None
        assert self.derivatives is not None
        try:
            return tuple(map(_facts, self.derivatives.layouts(self))) == expected
        except ValueError:
            return False
        finally:
            self._places = None

    def forget(self) -> None:
        """Drop what belongs to one backward pass."""
        self.forget_results()
        self.g_out, self.g_samples = [None] * len(self.g_out), None

    def forget_results(self) -> None:
        """Drop what rules have kept beyond the forward pass."""
        self.saved = {name: value for name, value in self.saved.items() if name in self.kept}

    @property
    def places(self) -> Places:
        """Find where the samples are, or recall it unless a layout was corrected."""
        found = self._places
        if found is None or self._corrections != Layout.corrections:
            rule = self.derivatives
            is_plain = (
                (rule is None or rule.sees_samples_first(self.module))
                and all(map(_is_first, self.layouts_in, self.shape_in))
                and all(map(_is_first, self.layouts_out, self.shape_out))
            )
            is_direct = is_plain and rule is not None and rule.has_samples_first
            is_unbatched = any(map(_has_no_samples, self.layouts_out))
            without: tuple[int, ...] = ()
            if not is_unbatched:
                alone = map(_has_no_samples, self.layouts_in)
                without = tuple(i for i, has_none in enumerate(alone) if has_none)
            found = Places(is_plain, is_direct, is_unbatched, without)
            self._places, self._corrections = found, Layout.corrections
        return found

    @property
    def is_plain(self) -> bool:
        """Whether all tensors have their samples first."""
        return self.places.is_plain

    @property
    def is_direct(self) -> bool:
        """Whether the rule has the samples where the engine has them: first."""
        return self.places.is_direct

    @property
    def is_unbatched(self) -> bool:
        """Whether the output has no samples: it depends on parameters alone."""
        return self.places.is_unbatched

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

    def bound(self, check: bool = True, whole: bool = False) -> AbstractContextManager[Any]:
        """Give the module ``input0, input1, …`` and ``output`` of this call, unless it has them.

        Args:
            check: Refuse tensors that were changed in place.
            whole: For code of users, which may read what our derivatives do not.

        Returns:
            A context manager, whose value is the module.

        Raises:
            RuntimeError: If the call was released or a stored tensor was changed in place.
        """
        is_partial = bool(self.makers) or self.made_with is not None
        if vars(self.module).get("_backpack_call") is self and not (whole and is_partial):
            return nullcontext(self.module)
        self.check_released()
        if check:
            self.check_unchanged()
        return _Bound(self, whole)

    def sharing(self) -> AbstractContextManager[Any]:
        """Let the parameters share what is computed of one stack of columns."""
        return _Sharing(self)

    def seen(self, whole: bool = False) -> tuple[Sequence[Any], Any]:
        """Return inputs and output as the derivatives see them: samples where they expect them."""
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
        return inputs, outputs[0] if len(outputs) == 1 else outputs

    def check_batched(self) -> None:
        """Refuse input without a batch axis.

        Raises:
            ValueError: If the output has too few axes.
        """
        shape, rule = self.shape_out[0], self.derivatives
        if shape and not shape[0]:
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
        if self.is_released:
            raise RuntimeError(
                f"What the forward pass stored for {describe(self.module)} is gone: a backward "
                "pass released it, or memory_cleanup did. To run several backward passes through "
                "one forward pass, use both backpack(..., retain_graph=True) and "
                "backward(retain_graph=True); the latter also for those without extensions."
            )

    def check_unchanged(self) -> None:
        """Refuse to work with tensors that were changed in place.

        Raises:
            RuntimeError: If that is so.
        """
        relevant, rule = self.inputs, self.derivatives
        if rule is not None and (rule.needs_output or rule.reads_output):
            relevant += self.outputs
        if any(map(operator.ne, map(_version, relevant), self.versions)):
            raise RuntimeError(
                f"A tensor that {self!r} has read or returned was changed in place afterwards, so "
                "its derivatives are no longer known. Replace the in-place operation (x += y, "
                "x.relu_(), …) by its out-of-place form."
            )


# All of a call but its weak references.
_FACTS = [name for name in Call.__slots__ if name != "__weakref__"]


class _Bound:
    """Lends the tensors of a call to its module; see :meth:`Call.bound`."""

    __slots__ = ("call", "lent", "replaced", "tensors", "whole")

    def __init__(self, call: Call, whole: bool):
        """Remember the call."""
        self.call = call
        self.whole = whole

    def __enter__(self) -> Any:
        """Set the attributes, parameters and buffers."""
        call, own = self.call, vars(self.call.module)
        inputs, output = call.seen(self.whole)
        self.tensors = call.lend_tensors(call.precision)
        lent = {
            "output": output,
            "_backpack_saved": call.saved,
            "_backpack_call": call,
            "training": call.training,
        }
        for i, x in enumerate(inputs):
            lent[f"input{i}"] = x
        for child in own["_modules"]:  # a child may be called "output"
            lent.pop(child, None)
        self.lent = lent
        self.replaced = {name: own[name] for name in lent.keys() & own.keys()}
        own.update(lent)
        return call.module

    def __exit__(self, *exception: object) -> None:
        """Restore what was there."""
        own = vars(self.call.module)
        put(self.tensors)
        for name in self.lent.keys() - self.replaced.keys():
            own.pop(name, None)
        own.update(self.replaced)


class _Sharing:
    """Keeps what is computed for one parameter of a call; see :meth:`Call.sharing`."""

    __slots__ = ("call",)

    def __init__(self, call: Call):
        """Remember the call."""
        self.call = call

    def __enter__(self) -> None:
        """Start with nothing, if there are others to share with."""
        self.call.shared = {} if len(self.call.trained) > 1 else None

    def __exit__(self, *exception: object) -> None:
        """Forget it."""
        self.call.shared = None


def stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape that takes no memory. Whoever reads it will notice."""
    return tensor.new_full((), torch.nan).expand(tensor.shape)


def _saved(
    rule: BaseDerivatives, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
) -> dict[str, Any]:
    if rule.is_ours:
        return rule.saved(module, inputs, outputs)
    with disable():  # if it differentiates, that is no backward pass of the user
        return rule.saved(module, inputs, outputs)


def _has_no_samples(layout: Layout | None) -> bool:
    return layout is not None and not layout.is_batched


def _is_first(layout: Layout | None, shape: Size | None) -> bool:
    return layout is None or shape is None or layout.is_first(shape)


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _cast(x: Any, precision: torch.dtype) -> Any:
    return x.to(precision) if isinstance(x, Tensor) and x.is_floating_point() else x


def _facts(layout: Layout | None) -> tuple[int, int] | None:
    return None if layout is None else (layout.before, layout.samples)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _version(tensor: Any) -> int:
    try:
        return tensor._version
    except (AttributeError, RuntimeError):  # no tensor, or one of torch.inference_mode
        return 0


def _differ(tensors: dict[str, Any], read: dict[str, Any]) -> bool:
    return any(map(operator.is_not, map(tensors.get, read), read.values()))


def put(entries: Sequence[Entry]) -> None:
    """Set entries, or delete them."""
    for where, name, value in entries:
        if value is _NOTHING:
            where.pop(name, None)
        else:
            where[name] = value


def state_of(read: Iterable[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """Tell parameters and buffers from those before a change."""
    tensors = [t for by_name in read for t in by_name.values() if t is not None]
    return [(id(t), _version(t), _address(t)) for t in tensors]


def describe(module: Module) -> str:
    """Name a module as a reader of its model would: qualified name and type."""
    name = vars(module).get("_backpack_name", "")
    return f"'{name}' ({type(module).__name__})" if name else type(module).__name__


def is_used(tensor: Tensor) -> bool:
    """Whether a recorded call of a known module uses a tensor as a parameter of its own."""
    return id(tensor) in _uses and any(
        tensor is p for call in all_live_calls() if call.derivatives for p in call.params.values()
    )


def all_live_calls() -> list[Call]:
    """Return the recorded calls that still hold tensors, in the order of the calls."""
    return [call for call in [entry() for entry in list(_live.values())] if call is not None]


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
        if _version(x) != version:  # changed before
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
                v if one is other else _version(one)
                for one, other, v in zip(new, stored, call.versions, strict=True)
            )
            call.inputs, call.outputs = new[:count], new[count:]


def _memory(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def bound(module: Module) -> AbstractContextManager[Any]:
    """Give ``module`` the tensors of the call at hand, else those of its latest recorded call.

    Raises:
        RuntimeError: If no forward pass of the module is recorded.
    """
    if "input0" in vars(module) or "_backpack_call" in vars(module):
        return nullcontext(module)
    calls = live_calls(module)
    if not calls:
        raise RuntimeError(
            f"No forward pass of {describe(module)} is recorded: extend() it, call it with "
            "something that requires a gradient, and keep the output. A backward pass frees what "
            "was recorded, unless it retains the graph."
        )
    return calls[-1].bound()


def flatten_outputs(output: Any) -> tuple[Tensor, ...]:
    """Collect the floating-point tensors in a module's output, depth first."""
    if isinstance(output, Tensor):
        return (output,) if output.is_floating_point() else ()
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, tuple | list):
        return tuple(tensor for item in output for tensor in flatten_outputs(item))
    return ()


def positional(
    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module call in the order of its ``forward``, and what is left."""
    if not kwargs:
        return args, {}
    arguments = signature(module.forward).bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.args, arguments.kwargs


def is_recorded(module: Module) -> bool:
    """Whether calls of a module matter: leaves, known ones, containers with own parameters."""
    # modules of their own read the parameters of those that were converted or are recorded
    if isinstance(module, ConvertedModule) or (RECORDERS and "_backpack_open" in vars(module)):
        return False
    return (
        derivatives_of(module) is not None
        or not module._modules
        or is_leaf(module)
        or any(p is not None for p in own_parameters(module).values())
        or type(module) in CLASSES_WITH_RULES
    )


NO_REPLICAS = (
    "torch.nn.DataParallel runs copies of the model, whose parameters are not those of the model: "
    "quantities would be lost. Use torch.nn.parallel.DistributedDataParallel (one process for each "
    "device, extend the model inside), or a single device."
)


def _hook(call: Call, i: int, slot: int, reached: OnReach) -> Callable[[Sequence[Any]], None]:
    return lambda grads: reached(call, i, grads[slot])


def record(
    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, reached: OnReach
) -> Any:
    """Record a call if a backward pass can reach it.

    Args:
        module: The module that was called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        output: What it returned.
        reached: Called as ``reached(call, i, g)`` when a backward pass has the gradient ``g`` with
            respect to output number ``i``.

    Returns:
        The output that users are to see; None for the one given.
    """
    if not (disable.should_store_io() and torch.is_grad_enabled() and is_recorded(module)):
        return None
    if "_is_replica" in vars(module):
        raise RuntimeError(NO_REPLICAS)
    outputs, apart = flatten_outputs(output), None
    nodes: list[Any] = [out.grad_fn for out in outputs]
    if not any(nodes):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if given and all(map(is_constant, given)):
            tree_map(mark_constant, output)
        return None
    if len(outputs) > 1 and derivatives_of_call(module, outputs) is not None:
        # one output may be computed from another, whose gradient would include that
        apart = tree_map(lambda x: x.view_as(x) if isinstance(x, Tensor) else x, output)
        outputs = flatten_outputs(apart)
    call = Call(module, *positional(module, args, kwargs), outputs)
    for i, out in enumerate(outputs):
        node: Any = out.grad_fn
        if node is not None:
            # of the node: it sees what hooks of the tensor have made of the gradient
            node.register_prehook(_hook(call, i, out.output_nr, reached))
    if CTX.configuration.debug:
        print(f"[backpack] recorded {call!r}")
    return apart
