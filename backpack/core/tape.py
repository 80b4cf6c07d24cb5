"""What the forward hooks record: one :class:`Call` per module call, alive as long as its graph.

A call is owned by the autograd graph of its output (through a hook on the output tensor), and never
owns that output's graph itself: when the graph dies, the record dies, with no list to clean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from inspect import signature
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

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

# Autograd nodes that keep all entries in their (row-major) order: they only change the shape, or
# the precision.
RESHAPES = {
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

HOOKED = "BackwardHookFunctionBackward"

OnReach = Callable[["Call", int, Tensor], None]
# Module classes for which some extension has a rule of its own.
CLASSES_WITH_RULES: WeakSet[type[Module]] = WeakSet()
# One entry for each forward pass whose functions are recorded, None for those inside of another.
RECORDERS: list[Any] = []
_index = count()
_live: WeakSet[Call] = WeakSet()
_uses: Counter[int] = Counter()


class Origin:
    """Identity of a tensor: the place in the autograd graph where its entries were computed.

    Attributes:
        is_output: Whether a recorded call returned the tensor.
        layout: Where the samples are in it, if that is known.
    """

    __slots__ = ("__weakref__", "is_output", "layout")

    def __init__(self) -> None:
        """Nobody is known to have returned it yet."""
        self.is_output = False
        self.layout: Layout | None = None


def origin(tensor: Any) -> Origin | None:
    """Return the identity of a tensor up to reshapes; None for data, parameters and constants.

    The mark lives in the metadata of the autograd node, so it is unique while the graph lives, a
    reshaped tensor shares it, and an in-place change gives a new one.
    """
    node = tensor.grad_fn if isinstance(tensor, Tensor) else None
    if node is None:
        return None
    slot = tensor.output_nr
    while (name := node.name()) in RESHAPES or name == HOOKED:
        marks: Any = node.metadata
        mark = marks.get(("backpack", slot))
        if mark is not None:  # a call that returned a view of its own parameter
            return mark
        # a full-backward hook (of somebody else) wraps all tensors of a module in one node
        source, slot = node.next_functions[slot if name == HOOKED else 0]
        if source is None or source.name().endswith("AccumulateGrad"):
            return None
        node = source
    return _mark(node, slot)


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
    return node.metadata.setdefault(("backpack", slot), Origin())


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
        misplaced: What is wrong with the place of the batch axis, if anything.
        computed: Which inputs a function has computed from what recorded calls returned.
        relied_on: What was known of the inputs when the rule found the layouts of the outputs.
        kept: Names in ``saved`` that a backward pass has to leave there.
        copies: Number of samples for which a call without samples (of parameters) stands.
        saved: What the derivatives keep, such as a dropout mask (``module._backpack_saved``).
        params: Own parameters that require a gradient, by name.
        trained: Those of them that the backward pass at hand accumulates a gradient into.
        g_out: Gradients with respect to the outputs, once the backward pass has reached them.
        g_samples: Those of each sample, ``[N, *out]``, for a call without samples.
        precision: What derivatives are computed in, if the network is of several precisions.
    """

    __slots__ = (
        "__weakref__",
        "computed",
        "copies",
        "counts_uses",
        "derivatives",
        "g_out",
        "g_samples",
        "index",
        "inputs",
        "is_container",
        "kept",
        "layouts_in",
        "layouts_out",
        "misplaced",
        "mixes_samples",
        "module",
        "origins_in",
        "origins_out",
        "outputs",
        "params",
        "precision",
        "relied_on",
        "saved",
        "shape_in",
        "shape_out",
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
        if keywords or not all(isinstance(x, Tensor) for x in args):
            leaves, self.structure = tree_flatten((args, keywords))
        self.index = next(_index)
        self.module = module
        self.derivatives: BaseDerivatives | None = derivatives_of_call(module, outputs)
        self.is_container = self.derivatives is None and not is_leaf(module)
        own: Mapping[str, Parameter | None] = own_parameters(module)
        if self.derivatives is not None:
            own = self.derivatives.own(module)
        self.params: dict[str, Parameter] = {
            name: p for name, p in own.items() if p is not None and p.requires_grad
        }
        self.trained = self.params
        # as they are now: the mode may have changed when the backward pass comes
        self.training = module.training
        self.mixes_samples = self.derivatives is not None and self.derivatives.mixes_samples(module)
        self.outputs = tuple(out.detach() for out in outputs)
        self.origins_in = tuple(origin(x) for x in leaves)
        self.origins_out = tuple(_origin_of_output(out) for out in outputs)
        # A module that returns its own input would own its own graph: a leak.
        owned = {id(out) for out in outputs}
        self.inputs = tuple(
            x.detach() if isinstance(x, Tensor) and (id(x) in owned or self.is_transparent) else x
            for x in leaves
        )
        self.shape_in = tuple(x.shape if isinstance(x, Tensor) else None for x in leaves)
        self.shape_out = tuple(out.shape for out in outputs)
        self.versions = tuple(_version(t) for t in self.inputs + self.outputs)
        self.g_out: list[Tensor | None] = [None] * len(outputs)
        self.saved: dict[str, Any] = {}
        if self.derivatives is not None:
            with disable():  # if they differentiate, that is no backward pass of the user
                self.saved = self.derivatives.saved(module, tuple(leaves), outputs)
        self.misplaced: str | None = None
        self.relied_on: tuple[Any, ...] = ()
        self.kept = frozenset(self.saved)
        self.computed = [False] * len(leaves)
        self.layouts_in = tuple(map(self._layout_in, range(len(leaves)), leaves, self.origins_in))
        self.copies = 1
        self.g_samples: list[Tensor | None] | None = None
        self.precision: torch.dtype | None = None
        self.layouts_out: tuple[Layout | None, ...] = self._laid_out()
        for mark, layout in zip(self.origins_out, self.layouts_out, strict=True):
            if mark is not None:
                mark.is_output = True
                mark.layout = mark.layout or layout
        self.counts_uses = True
        _live.add(self)
        _uses.update(map(id, self.params.values()))

    def _layout_in(self, i: int, x: Any, mark: Origin | None) -> Layout | None:
        """Find where the samples are in an input; None if that is for this module to say."""
        if mark is None:
            return unbatched() if is_constant(x) or parameter_behind(x) is not None else None
        if mark.layout is not None:
            return mark.layout
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
        known = next((layout for layout in self.layouts_in if layout is not None), None)
        if self.is_transparent:  # such as the choice of one tensor of several
            return tuple(o.layout for o in self.origins_out if o is not None)
        if self.derivatives is None:
            assumed = [Layout.of_axis(s, 0, assumed=True) if s else None for s in self.shape_out]
            return tuple(known if s else None for s in self.shape_out) if known else tuple(assumed)
        try:
            found = tuple(self.derivatives.layouts(self))
        except ValueError as error:
            self.misplaced = self.misplaced or str(error)
            return (None,) * len(self.outputs)
        # what a rule has found out from layouts that are corrected later is void
        self.relied_on = tuple(map(_facts, self.layouts_in))
        return found

    def __repr__(self) -> str:
        """Name the module, its type and the shapes of the call."""
        shapes = [list(s) for s in self.shape_in if s is not None]
        outs = [list(s) for s in self.shape_out]
        return f"{describe(self.module)} (inputs {shapes}, outputs {outs})"

    def __del__(self) -> None:
        """Forget the uses of the parameters."""
        self._forget_uses()

    def _forget_uses(self) -> None:
        if getattr(self, "counts_uses", False):
            self.counts_uses = False
            for p in self.params.values():
                _uses[id(p)] -= 1
                if not _uses[id(p)]:
                    del _uses[id(p)]

    @property
    def is_transparent(self) -> bool:
        """Whether the output has the entries of the input: nothing to differentiate."""
        return all(o is not None and o in self.origins_in for o in self.origins_out)

    @property
    def is_released(self) -> bool:
        """Whether the stored tensors are gone."""
        return not self.outputs

    def uses_each_parameter_alone(self) -> bool:
        """Whether no other live call uses a parameter of this one."""
        return all(_uses[id(p)] == 1 for p in self.params.values())

    def release(self) -> None:
        """Drop the stored tensors."""
        if not self.is_released:
            _live.discard(self)
            self._forget_uses()
            self.inputs, self.outputs, self.saved, self.g_out = (), (), {}, []
            self.g_samples = None

    def snapshot(self, create_graph: bool) -> Call:
        """Return a copy that outlives the release, for products evaluated after the backward pass.

        Args:
            create_graph: Keep the inputs attached to the autograd graph.
        """
        clone = copy(self)
        clone.counts_uses = False
        if not create_graph:
            clone.inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in self.inputs)
        return clone

    def forward(self, leaves: Sequence[Any]) -> Any:
        """Call the module's ``forward`` again, with other values for the (flattened) arguments."""
        args, keywords = self.arguments(leaves)
        with disable():
            return self.module.forward(*args, **keywords)

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

    def compute_in(self, precision: torch.dtype) -> None:
        """Let the derivatives see all tensors in this precision."""
        self.precision = precision
        self.g_out = [_cast(g, precision) for g in self.g_out]

    @contextmanager
    def _cast_state(self) -> Iterator[None]:
        """Cast parameters and buffers of the module while its derivatives are computed."""
        if self.precision is None:
            yield
            return
        kinds = ("_parameters", "_buffers")
        states = [(vars(m), kind, vars(m)[kind]) for m in self.module.modules() for kind in kinds]
        for own, kind, state in states:
            own[kind] = {name: _cast(t, self.precision) for name, t in state.items()}
        try:
            yield
        finally:
            for own, kind, state in states:
                own[kind] = state

    def unbatched_inputs(self) -> list[int]:
        """Number the inputs that have no samples, in a call that has."""
        if self.is_unbatched:
            return []
        return [i for i, layout in enumerate(self.layouts_in) if layout and not layout.is_batched]

    # ------------------------------------------------------------------ where the samples are

    def _layouts_hold(self) -> bool:
        """Whether what the rule has found out still holds, if a later module corrected it."""
        now = tuple(map(_facts, self.layouts_in))
        follows = getattr(self.derivatives, "depends_on_layouts", False)
        if not follows or self.is_transparent or now == self.relied_on:
            return True
        expected = tuple(map(_facts, self.layouts_out))
        self.relied_on = now
        assert self.derivatives is not None
        try:
            return tuple(map(_facts, self.derivatives.layouts(self))) == expected
        except ValueError:
            return False

    def forget(self) -> None:
        """Drop what rules have kept beyond the forward pass."""
        self.saved = {name: value for name, value in self.saved.items() if name in self.kept}
        self.g_out, self.g_samples = [None] * len(self.g_out), None

    @property
    def is_plain(self) -> bool:
        """Whether all tensors have their samples first."""
        if self.derivatives is not None and not self.derivatives.sees_samples_first(self.module):
            return False
        layouts = (*self.layouts_in, *self.layouts_out)
        shapes = (*self.shape_in, *self.shape_out)
        return all(
            layout is None or shape is None or layout.is_first(shape)
            for layout, shape in zip(layouts, shapes, strict=True)
        )

    @property
    def is_unbatched(self) -> bool:
        """Whether the output has no samples: it depends on parameters alone."""
        return any(layout is not None and not layout.is_batched for layout in self.layouts_out)

    def place_in(self, i: int) -> Place | None:
        """Find the batch axis of an input; None if it has none."""
        shape, layout = self.shape_in[i], self.layouts_in[i]
        if shape is None or layout is None or not layout.is_batched:
            return None
        return self._placed(layout, shape)

    def place_out(self, i: int) -> Place | None:
        """Find the batch axis of an output; None if it has none."""
        layout = self.layouts_out[i]
        if layout is None or not layout.is_batched:
            return None
        return self._placed(layout, self.shape_out[i])

    def _placed(self, layout: Layout, shape: Size) -> Place:
        place = layout.place(shape)
        if place is None:
            raise ValueError(
                f"{self!r}: a tensor of shape {list(shape)} has no axis for the {layout.samples} "
                "samples of the batch. Keep the batch axis as it is."
            )
        return place

    @contextmanager
    def bound(self, check: bool = True) -> Iterator[Any]:
        """Give the module ``input0, input1, …`` and ``output`` of this call.

        Args:
            check: Refuse tensors that were changed in place.

        Raises:
            RuntimeError: If the call was released or a stored tensor was changed in place.
        """
        self.check_released()
        if check:
            self.check_unchanged()
        inputs, output = self._seen()
        attributes = {f"input{i}": x for i, x in enumerate(inputs)}
        attributes |= {"output": output, "_backpack_saved": self.saved, "_backpack_call": self}
        attributes["training"] = self.training
        for child in self.module._modules:  # a child may be called "output"
            attributes.pop(child, None)
        previous = {k: v for k, v in vars(self.module).items() if k in attributes}
        vars(self.module).update(attributes)
        try:
            with self._cast_state():
                yield self.module
        finally:
            for name in attributes:
                vars(self.module).pop(name, None)
            vars(self.module).update(previous)

    def _seen(self) -> tuple[Sequence[Any], Any]:
        """Return inputs and output as the derivatives see them: samples where they expect them."""
        inputs: Sequence[Any] = self.inputs
        outputs: Sequence[Tensor] = self.outputs
        if torch.is_grad_enabled() and getattr(self.derivatives, "needs_output", False):
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
        if 0 in self.shape_out[0][:1]:
            raise ValueError(f"{self!r} was called with an empty batch.")
        if self.misplaced is not None:
            raise ValueError(self.misplaced)
        if not self._layouts_hold():
            raise ValueError(
                f"{self!r}: the samples of the batch were assumed to be along the first axis of "
                "the network's data, but a later module needs them elsewhere. Give the network "
                "data with the batch axis first, or let a recurrent module come before functions."
            )
        needed = 0
        if self.derivatives is not None and not self.is_unbatched:
            needed = self.derivatives.min_dims(self.module)
        if len(self.shape_out[0]) < needed:
            raise ValueError(f"{self!r} was called without a batch axis. Add one, x.unsqueeze(0).")

    def check_parameters(self, trained_only: bool) -> None:
        """Refuse parameters that are not dense floating-point tensors.

        Args:
            trained_only: Frozen parameters do not matter.

        Raises:
            NotImplementedError: If one is sparse or quantised.
        """
        for name, p in self.module._parameters.items():
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
                "backward(retain_graph=True)."
            )

    def check_unchanged(self) -> None:
        """Refuse to work with tensors that were changed in place.

        Raises:
            RuntimeError: If that is so.
        """
        relevant = len(self.inputs)
        if getattr(self.derivatives, "needs_output", False):
            relevant += len(self.outputs)
        now = tuple(_version(t) for t in self.inputs + self.outputs)
        if now[:relevant] != self.versions[:relevant]:
            raise RuntimeError(
                f"A tensor that {self!r} has read or returned was changed in place afterwards, so "
                "its derivatives are no longer known. Replace the in-place operation (x += y, "
                "x.relu_(), …) by its out-of-place form."
            )


def _cast(x: Any, precision: torch.dtype) -> Any:
    return x.to(precision) if isinstance(x, Tensor) and x.is_floating_point() else x


def _facts(layout: Layout | None) -> tuple[int, int] | None:
    return None if layout is None else (layout.before, layout.samples)


def _version(tensor: Any) -> int:
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else 0


def describe(module: Module) -> str:
    """Name a module as a reader of its model would: qualified name and type."""
    name = vars(module).get("_backpack_name", "")
    return f"'{name}' ({type(module).__name__})" if name else type(module).__name__


def is_used(tensor: Tensor) -> bool:
    """Whether a recorded call of a known module uses a tensor as a parameter of its own."""
    return id(tensor) in _uses and any(
        tensor is p for call in list(_live) if call.derivatives for p in call.params.values()
    )


def live_calls(module: Module) -> list[Call]:
    """Return the recorded calls of a module that still hold tensors, in the order of the calls."""
    calls = [call for call in list(_live) if call.module is module]
    return sorted(calls, key=lambda call: call.index)


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

    for call in list(_live):
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


@contextmanager
def bound(module: Module) -> Iterator[Any]:
    """Give ``module`` the tensors of the call at hand, else those of its latest recorded call.

    Raises:
        RuntimeError: If no forward pass of the module is recorded.
    """
    if "input0" in vars(module) or "_backpack_call" in vars(module):
        yield module
        return
    calls = live_calls(module)
    if not calls:
        raise RuntimeError(
            f"No forward pass of {describe(module)} is recorded: extend() it, call it with "
            "something that requires a gradient, and keep the output."
        )
    with calls[-1].bound():
        yield module


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
        is_leaf(module)
        or any(p is not None for p in own_parameters(module).values())
        or derivatives_of(module) is not None
        or type(module) in CLASSES_WITH_RULES
    )


NO_REPLICAS = (
    "torch.nn.DataParallel runs copies of the model, whose parameters are not those of the model: "
    "quantities would be lost. Use torch.nn.parallel.DistributedDataParallel (one process for each "
    "device, extend the model inside), or a single device."
)


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
    if not (torch.is_grad_enabled() and disable.should_store_io() and is_recorded(module)):
        return None
    if "_is_replica" in vars(module):
        raise RuntimeError(NO_REPLICAS)
    outputs, apart = flatten_outputs(output), None
    if not any(out.grad_fn is not None for out in outputs):
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
        if out.grad_fn is not None:
            out.register_hook(lambda grad, i=i: reached(call, i, grad))
    if CTX.get_debug():
        print(f"[backpack] recorded {call!r}")
    return apart
