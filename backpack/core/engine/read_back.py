"""Functions between modules that nobody has recorded, read back from the autograd graph.

A node of the graph tells which function it belongs to, its options, and where its arguments come
from. Those functions are run again, on what recorded calls have returned: then second-order
quantities pass through them as through those of a converted model. What a node does not tell
cannot be read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from math import floor, prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from backpack.context import disable
from backpack.core.derivatives.evaluation import agree_to
from backpack.core.engine.paths import is_unpacked
from backpack.core.engine.spread import kind, saved_names, shape_of, signed
from backpack.core.record import alive
from backpack.core.record.calls import LIVE, Call
from backpack.core.record.data_notes import note
from backpack.core.record.generators import evaluated_apart
from backpack.core.record.layout import Layout, unbatched
from backpack.core.record.lookup import Function, application, row_of
from backpack.core.record.origins import (
    RESHAPES,
    WRAPPERS,
    BackpackOutput,
    Origin,
    flatten_outputs,
    origin,
)
from backpack.core.record.registry import derivatives_of
from backpack.core.record.visits import Visit
from backpack.core.values import has_values
from backpack.custom_module.function_module import Slot, leaves_in

# A function, and what it is called with.
Reading = partial[Any]
# From a node, its arguments (None for constants), and its value (None if it is not known).
Reader = Callable[[Any, Sequence[Any], Any], Reading]

# A result is that of the forward pass up to this many roundings (of an entry, and of the largest
# one), or else a node was misunderstood.
ROUNDINGS = 4


class UnreadableError(RuntimeError):
    """A node does not tell all that it takes to run its function again."""


# --- From a node to what was called, by the declarations of torch ---------------------------------

# Where functions are, and how their names begin in declarations.
NAMESPACES: Sequence[tuple[Any, str]] = (
    (torch, ""),
    (F, ""),
    (Tensor, ""),
    (torch.linalg, "linalg_"),
    (torch.special, "special_"),
)
OTHER_NAMES: dict[str, Any] = {
    "ConstantPadNd": F.pad,  # with zeros: the check of the result tells whether it is that
    "MaxPool2DWithIndices": F.max_pool2d,
    "ScaledDotProductFlashAttention": F.scaled_dot_product_attention,
    "ScaledDotProductFlashAttentionForCpu": F.scaled_dot_product_attention,
    "ScaledDotProductEfficientAttention": F.scaled_dot_product_attention,
    "Unfold": Tensor.unfold,
}


@cache
def _function_of(name: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return the function that a kind of node belongs to, and the declarations of its forms."""
    for space, prefix in NAMESPACES:
        plain = (key for key in dir(space) if not key.endswith("_"))  # else it works in place
        names = {f"{prefix}{key}".replace("_", "").lower(): key for key in plain}
        function = OTHER_NAMES.get(name) or getattr(space, names.get(name.lower(), ""), None)
        if callable(function):
            own = function.__name__
            forms = torch._C._jit_get_schemas_for_operator(f"aten::{own}")
            forms = forms or torch._C._jit_get_schemas_for_operator(f"aten::{prefix}{own}")
            if forms:
                return function, forms
    raise UnreadableError


def _stored(node: Any, name: str) -> Any:
    """Return what a node has stored; whole numbers with their sign."""
    return signed(getattr(node, f"_saved_{name}", None))


def _fitted(
    function: Callable[..., Any], form: Any, node: Any, arguments: Sequence[Any]
) -> Reading | None:
    """Fit arguments that may have a gradient, and what is stored, into a declared form."""
    waiting, options = list(arguments), {}
    args: list[Any] = []
    tensors = [one for one in form.arguments if str(one.type) in ("Tensor", "Optional[Tensor]")]
    for one in form.arguments:
        value, may_be_none = _stored(node, one.name), str(one.type).startswith("Optional")
        if str(one.type) == "List[Tensor]":
            value, waiting = waiting, []
            if None in value:
                return None
        elif one in tensors:
            # others, such as indices, have no gradient
            is_index = isinstance(value, Tensor) and not value.is_floating_point()
            is_asked = len(tensors) == len(arguments) or not is_index
            given = waiting.pop(0) if is_asked and waiting else None
            is_given = value is None and (given is not None or may_be_none)
            if not (is_given or isinstance(value, Tensor)):  # such as a number
                return None
            value = value if given is None else given
        elif isinstance(value, Tensor) or (value is None and not one.has_default_value()):
            return None
        if value is None and one.has_default_value():
            continue
        if one.kwarg_only or len(args) < form.arguments.index(one):
            options[one.name] = value
        else:
            args.append(value)
    return None if waiting else partial(function, *args, **options)


def _declared(node: Any, arguments: Sequence[Any], value: Any) -> Reading:
    """Read a node by the declaration of its function that uses most of what is stored."""
    function, forms = _function_of(kind(node))
    fitting = filter(None, (_fitted(function, form, node, arguments) for form in forms))
    return _known(max(fitting, key=lambda fit: len(fit.args) + len(fit.keywords), default=None))


def _is_again(found: Tensor, value: Tensor) -> bool:
    """Whether a tensor is what there was before."""
    if not value.is_floating_point():
        return torch.equal(found, value)
    return agree_to(ROUNDINGS * torch.finfo(value.dtype).eps, found, value)


def _check_stored(node: Any, again: Any) -> None:
    """Refuse a function that has stored something else than before: it was misunderstood."""
    if kind(again) != kind(node):
        return
    for name in saved_names(node.__class__)[1]:
        value, found = (_stored(one, name.removeprefix("_raw_saved_")) for one in (node, again))
        if isinstance(value, Tensor) and isinstance(found, Tensor) and not _is_again(found, value):
            raise UnreadableError


# --- Nodes that store less, or something else, than their functions were given --------------------

# What has given a result that a node has stored; see _before.
INVERSES: dict[str, Callable[[Tensor], Tensor]] = {
    "Exp": torch.log,
    "LogSoftmax": torch.detach,
    "Reciprocal": torch.reciprocal,
    "Rsqrt": lambda y: y**-2,
    "Sigmoid": torch.logit,
    "Softmax": torch.log,
    "Sqrt": torch.square,
    "Tanh": torch.atanh,
}


def _before(node: Any, parent: Any) -> Tensor:
    """Compute what has given a result; of a softmax, up to what does not change the softmax."""
    y = _stored(node, "result")
    if kind(node) == "Softmax" and kind(parent) in ("MaskedFill", "Where"):
        return torch.zeros_like(y).masked_fill(y == 0, -torch.inf)  # their constant
    return INVERSES[kind(node)](y)


def _known(x: Any) -> Any:
    """Return an argument, or a value, that the function cannot be run without."""
    if x is None:
        raise UnreadableError
    return x


def _sum(node: Any, arguments: Sequence[Any], value: Any) -> Reading:
    """``x ± alpha y``; a constant is the difference between the result and the other term."""
    x, y = (*arguments, None)[:2]  # a number is no argument
    if kind(node) == "Rsub":
        x, y = y, x
    if y is None:
        return partial(torch.add, x, (_known(value) - x).detach())
    alpha = _stored(node, "alpha") * (1 if kind(node) == "Add" else -1)
    if x is None:
        x = (_known(value) - alpha * y).detach()
    return partial(torch.sub, x, y) if alpha == -1 else partial(torch.add, x, y, alpha=alpha)


def _slice(node: Any, arguments: Sequence[Any], value: Any) -> Reading:
    (x,), part = arguments, slice(*(_stored(node, name) for name in ("start", "end", "step")))
    return partial(operator.getitem, x, (slice(None),) * (_stored(node, "dim") % x.dim()) + (part,))


def _index(node: Any, arguments: Sequence[Any], value: Any) -> Reading:
    chosen = tuple(slice(None) if i is None else i for i in _stored(node, "indices"))
    return partial(operator.getitem, arguments[0], chosen)


def _elu(node: Any, arguments: Sequence[Any], value: Any) -> Reading:
    """ELU, or SELU: the check of the result tells whether it is that."""
    if _stored(node, "scale") == _stored(node, "input_scale") == 1:
        return partial(F.elu, arguments[0], _stored(node, "alpha"))
    return partial(F.selu, arguments[0])


def _where(node: Any, arguments: Sequence[Any], value: Any) -> Reading:
    """A choice; a constant is the result where it was chosen, if that is known, and else zero."""
    fills, form = kind(node) == "MaskedFill", shape_of(node, 0)
    constant = torch.zeros((), dtype=form.dtype, device=form.device) if value is None else value
    chosen = [constant if x is None else x for x in ((None, *arguments) if fills else arguments)]
    return partial(torch.where, _stored(node, "mask" if fills else "condition"), *chosen)


def _sorted(node: Any, arguments: Sequence[Any], value: Any) -> Reading:
    return partial(torch.gather, arguments[0], _stored(node, "dim"), _stored(node, "indices"))


def _layer_norm(node: Any, arguments: Sequence[Any], value: Any) -> Reading:
    """Layer normalisation; what was added to the variances is the difference to what is stored."""
    names, shape = ("input", "weight", "bias"), _stored(node, "normalized_shape")
    given = zip(names, arguments, strict=True)
    x, weight, bias = (_stored(node, name) if x is None else x for name, x in given)
    rows = x.detach().double().flatten(-len(shape))
    added = _stored(node, "result2").double().flatten() ** -2 - rows.var(-1, False).flatten()
    return partial(F.layer_norm, x, shape, weight, bias, float(added.mean()))


def _dropout(node: Any, arguments: Sequence[Any], value: Any) -> Reading:
    """Dropout of an accelerator: a product with what was drawn."""
    (x,), kept, p = arguments, _stored(node, "result1"), _stored(node, "p")
    return partial(torch.mul, x, kept.to(x.dtype) / (1 - p) if p < 1 else kept.to(x.dtype))


def _interpolate(mode: str, node: Any, arguments: Sequence[Any], value: Any) -> Reading:
    """Interpolation to a size, or by factors, which need not be the ratios of the sizes."""
    names = ("scales", "scales_d", "scales_h", "scales_w")
    factors = tuple(f for name in names if (f := _stored(node, name)) is not None)
    size = None if factors else tuple(shape_of(node, 0).shape[2:])
    corners = _stored(node, "align_corners")
    return partial(F.interpolate, arguments[0], size, factors or None, mode, corners)


# Nodes are named by mode and number of axes.
NEAREST, NEAREST_EXACT = (partial(_interpolate, mode) for mode in ("nearest", "nearest-exact"))
READERS: dict[str, Reader] = {
    "AdaptiveAvgPool2D": lambda node, xs, value: partial(
        F.adaptive_avg_pool2d, xs[0], tuple(shape_of(node, 0).shape[-2:])
    ),
    "Add": _sum,
    "Elu": _elu,
    "Expand": lambda node, xs, value: partial(Tensor.expand, xs[0], tuple(shape_of(node, 0).shape)),
    "Index": _index,
    "MaskedFill": _where,
    "NativeDropout": _dropout,
    "NativeLayerNorm": _layer_norm,
    "Rsub": _sum,
    "Slice": _slice,
    "Sort": _sorted,
    "Sub": _sum,
    "Topk": _sorted,
    **{f"UpsampleNearest{n}D": NEAREST for n in (1, 2, 3)},
    **{f"UpsampleNearestExact{n}D": NEAREST_EXACT for n in (1, 2, 3)},
    "UpsampleLinear1D": partial(_interpolate, "linear"),
    "UpsampleBilinear2D": partial(_interpolate, "bilinear"),
    "UpsampleBicubic2D": partial(_interpolate, "bicubic"),
    "UpsampleTrilinear3D": partial(_interpolate, "trilinear"),
    "Where": _where,
}


# --- A backward pass ------------------------------------------------------------------------------


class ReadBack:
    """The calls of functions that one backward pass has read from the graph."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        """Nothing was read; ``handles`` are those of hooks, to be removed after the pass."""
        self.visits: list[Visit] = []
        self.marks: dict[Visit, dict[int, Origin]] = {}  # of what others read, by input
        self._handles = handles
        self._creates_graph = False  # then results are functions of the parameters
        self._returned: dict[Origin, tuple[Call, int]] = {}  # by recorded calls
        self._sources: dict[Origin, Tensor] = {}
        self._results: dict[Any, tuple[Tensor, ...] | None] = {}  # of nodes; None: unreadable
        self._values: dict[Any, Tensor] = {}  # of nodes, as far as others have stored them
        self._visits: dict[Origin, Visit] = {}
        self._depths: dict[Visit, int] = {}  # how many functions come before

    def read(self, visit: Visit, i: int) -> None:
        """Read the functions that have computed an input, while the graph has what it takes."""
        mark = self.mark_of(visit.inputs[i])
        if mark in self._visits:
            self.marks.setdefault(visit, {})[i] = mark

    def mark_of(self, x: Tensor) -> Origin | None:
        """Run the functions that have computed a tensor; return the mark of the result, or None."""
        if not has_values(x):  # what is found could not be compared
            return None
        is_first, creates_graph = not self._returned, torch.is_grad_enabled()
        with (
            suppress(UnreadableError, RuntimeError, TypeError, ValueError, IndexError),
            torch.enable_grad(),
            disable(),
        ):
            if is_first:
                self._creates_graph = creates_graph
                self._look_at_calls()
            return origin(self._computed(x.grad_fn, x.output_nr, x.detach()))
        return None

    def _look_at_calls(self) -> None:
        """Note what recorded calls have returned, and what they have read."""
        live = alive.all_live_calls()
        for call in live:
            if call.derivatives is not None and not call.is_transparent:
                marks = enumerate(call.origins_out)
                self._returned |= {o: (call, slot) for slot, o in marks if o is not None}
        for x in (x for call in live for x in call.inputs):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                with suppress(UnreadableError):  # such as for a parameter
                    self._note_value(self._end(x.grad_fn, x.output_nr), x)

    def take_part(self) -> list[Visit]:
        """Let calls read the results of functions; return these calls of functions."""
        for visit, marks in self.marks.items():
            if visit.derivatives is not None:  # else the calls inside of it read them
                visit.read_functions(marks)
        return self.visits

    # ------------------------------------------------------------------ the way up the graph

    def _computed(self, node: Any, slot: int, value: Tensor) -> Tensor:
        """Compute an output of a node again, whose value is known, and all it depends on."""
        end = self._end(node, slot)
        if not isinstance(end, tuple):
            raise UnreadableError
        self._note_value(end, value)
        waiting = [end[0]]
        while waiting:  # arguments first
            last = waiting[-1]
            if not is_unpacked(last):
                raise UnreadableError
            parents = [self._end(*parent) for parent in last.next_functions]
            missing = [p[0] for p in parents if isinstance(p, tuple) and p[0] not in self._results]
            if missing and last not in self._results:
                for parent, name in zip(parents, ("self", "other"), strict=False):
                    self._note_value(parent, _stored(last, name))
                if kind(last) in INVERSES and missing[0] not in self._values:
                    self._note_value(parents[0], _before(last, missing[0]))
                waiting += missing
            elif waiting.pop() not in self._results:
                self._results[last] = None
                self._results[last] = self._run(last, parents)
        result = _known(self._formed(node, slot, end))
        if not _is_again(result, value):
            raise UnreadableError
        return result

    def _end(self, node: Any, slot: int) -> Any:
        """Go up what only reshapes.

        Returns:
            A node and the number of its output, the identity of what a call has returned, data that
            gradients are asked for, or None for a constant.
        """
        while node is not None:
            mark = node.metadata.get(("backpack", slot))
            if mark in self._returned:
                return mark
            if hasattr(node, "variable"):
                if isinstance(node.variable, Parameter):
                    raise UnreadableError
                leaf = node.variable
                return leaf.view_as(leaf) if self._creates_graph else leaf.detach()
            name = type(node).__name__
            if name not in RESHAPES:
                return node, slot
            node, slot = node.next_functions[slot if name in WRAPPERS else 0]
        return None

    def _note_value(self, end: Any, value: Any) -> None:
        """Note the first output of a node, if the value is that in another shape."""
        if isinstance(end, tuple) and end[1] == 0 and isinstance(value, Tensor):
            form = shape_of(*end)
            if value.numel() == prod(form.shape) and value.dtype == form.dtype:
                self._values[end[0]] = value.detach().reshape(form.shape)

    def _formed(self, node: Any, slot: int, end: Any) -> Tensor | None:
        """Give what is at the end of a way the shape and the precision that it has at a node."""
        if end is None:
            return None
        x: Any = end
        if isinstance(end, tuple):
            x = _known(self._results[end[0]])[end[1]]
        elif isinstance(end, Origin):
            x = self._source(end)
        form = shape_of(node, slot)
        return x.reshape(form.shape).to(form.device, form.dtype)

    def _source(self, mark: Origin) -> Tensor:
        """Return what a recorded call has returned, of the same identity, in its own graph."""
        if mark not in self._sources:
            call, slot = self._returned[mark]
            if call.is_released or call.has_changed_outputs:
                raise UnreadableError
            y = call.whole_outputs()[slot].detach().requires_grad_()
            if self._creates_graph:
                again, is_random = evaluated_apart(partial(call.forward, call.whole_inputs()))
                if is_random:
                    raise UnreadableError
                y = flatten_outputs(again)[slot]
            own = BackpackOutput.apply(y)
            own.grad_fn.metadata["backpack", 0] = mark
            self._sources[mark] = own
        return self._sources[mark]

    # ------------------------------------------------------------------ functions as calls

    def _run(self, node: Any, parents: Sequence[Any]) -> tuple[Tensor, ...]:
        """Run the function of a node again, and note that as a call."""
        ways = zip(node.next_functions, parents, strict=True)
        arguments = [self._formed(parent, slot, end) for (parent, slot), end in ways]
        reader = READERS.get(kind(node), _declared)
        module, inputs = _application(reader(node, arguments, self._values.get(node)))
        vars(module)["_backpack_name"] = f"{kind(node)}, read from the graph"
        outputs = flatten_outputs(module.forward(*inputs))  # hooks of all modules are for others
        if not all(y.dim() for y in outputs):  # of all samples
            raise UnreadableError
        _check_stored(node, outputs[0].grad_fn)
        _note_constants(module, inputs, outputs)
        call = Call(module, inputs, {}, outputs, derivatives_of(module), True)
        LIVE.pop(call.index)
        # behind what it reads, and before all that comes later
        before = [self._visits[o] for o in call.origins_in if o in self._visits]
        indices = [self._returned[o][0].index for o in call.origins_in if o in self._returned]
        indices += [floor(visit.index) for visit in before]
        if not indices:
            raise UnreadableError
        visit = Visit.of(call, False)
        depth = max((self._depths[one] for one in before), default=0) + 1
        visit.index = max(indices) + depth / 2**20
        self._depths[visit] = depth
        self.visits.append(visit)
        self._visits |= {mark: visit for mark in call.origins_out if mark is not None}
        self._handles.append(node.register_prehook(partial(_note_gradients, visit)))
        return outputs


def place_calls_again() -> None:
    """Find the samples in calls that have read functions of tensors with samples elsewhere.

    Such as the last step of a recurrent layer with ``batch_first=False``. And in those behind them.
    """
    found: set[str | None] = set()  # what was wrong
    for call in sorted(alive.all_live_calls(), key=attrgetter("index")):
        what = call.misplaced
        if (call.awaits_functions or what in found) and call.place_again(_layout_behind):
            found.add(what)


def _layout_behind(x: Tensor) -> Layout | None:
    """Return where the samples are in what functions have computed, if that can be read."""
    handles: list[RemovableHandle] = []
    with torch.no_grad():  # nothing is differentiated
        mark = ReadBack(handles).mark_of(x)
    for handle in handles:
        handle.remove()
    return None if mark is None else mark.layout


def _note_constants(module: Module, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    """Note where the samples are in constants: in their rows, if more samples have more of them.

    Else a constant is the same for all samples.
    """
    marks = {x: origin(x) for x in inputs if isinstance(x, Tensor)}
    for x in (x for x, mark in marks.items() if mark is None):
        note(x, unbatched())
    known = {x: mark.layout for x, mark in marks.items() if mark is not None}
    counts = {layout.samples for layout in known.values() if layout is not None}
    rows = {x for x in marks if x not in known and x.dim() and {len(x)} == counts != {1}}
    are_first = [layout is not None and layout.is_first(x.shape) for x, layout in known.items()]
    if not (rows and all(are_first)):
        return

    (samples,) = counts

    def twice(x: Tensor) -> Tensor:
        """Take the samples twice, each in the place of another one."""
        return torch.cat([x, x]).roll(len(x) // samples, 0)

    def differing(x: Tensor) -> Tensor:
        """Let samples differ that happen to be alike."""
        return torch.linspace(1, 2, x.numel()).view(x.shape).to(x) * x

    with torch.no_grad(), suppress(RuntimeError, IndexError):  # another number of rows does not fit
        drawn = [differing(x) if isinstance(x, Tensor) and x in known else x for x in inputs]
        more = [
            twice(x) if isinstance(given, Tensor) and (given in known or given in rows) else x
            for given, x in zip(inputs, drawn, strict=True)
        ]
        pairs = zip(
            flatten_outputs(module.forward(*drawn)),
            flatten_outputs(module.forward(*more)),
            strict=True,
        )
        if all(agree_to(torch.finfo(y.dtype).eps ** 0.5, z, twice(y)) for y, z in pairs):
            for x in rows:
                note(x, Layout.of_axis(x.shape, 0))


def _application(read: Reading) -> tuple[Module, tuple[Any, ...]]:
    """Return the module that stands for a function, and what to call it with."""
    known = Function(read.func, row_of(read.func))
    given = [*{id(x): x for x in leaves_in((read.args, read.keywords), Tensor)}.values()]
    what = application(known, read.args, read.keywords, given)
    tensors = [x if x.grad_fn is not None else x.detach() for x in given]  # notes of it are ours
    return what.module, tuple(tensors[x.index] if isinstance(x, Slot) else x for x in what.inputs)


def _note_gradients(visit: Visit, grads: Sequence[Tensor | None]) -> None:
    visit.g_out[:] = grads[: len(visit.g_out)]
