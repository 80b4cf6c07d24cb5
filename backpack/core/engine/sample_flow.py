"""Whether the samples stay apart, and first, in functions between modules that are not recorded.

In a model that was not converted, a first-order extension takes the rows of each layer for the
samples. The autograd graph between a call that a backward pass has reached and those above it says
whether that is so: a cotangent at the rows of some samples gives a gradient at those rows alone.
The nodes are called for that one by one. The engine would run hooks, and reach recorded calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.core.derivatives.basederivatives import BatchAxis
from backpack.core.derivatives.elementwise_losses import (
    ElementwiseLossDerivatives as Elementwise,
)
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.engine.spread import (
    saved_floats,
    saved_names,
    saved_tensors,
    shape_of,
    spread,
)
from backpack.core.record.calls import LARGE, Call, describe
from backpack.core.record.given import Given
from backpack.core.record.origins import RESHAPES, Origin, is_foreign_function, is_output

# How many rows of a loss are looked at.
ROWS = 6


class Path(NamedTuple):
    """The graph between a tensor and what recorded calls have returned.

    Attributes:
        start: The node that has computed the tensor, and which of its outputs that is.
        nodes: The nodes between, that one included.
        sources: The nodes, and which of their outputs, that calls have returned, with their marks.
        leaves: Tensors without a history, such as parameters.
    """

    start: tuple[Any, int]
    nodes: list[Any]
    sources: dict[tuple[Any, int], Origin]
    leaves: list[Tensor]


def path_above(
    node: Any, slot: int, own: Origin | None = None, through_containers: bool = False
) -> Path:
    """Search the graph above a tensor, up to the outputs of recorded calls.

    Args:
        node: The node that has computed the input of a call.
        slot: Which of its outputs that is.
        own: The mark of the tensor, if the call has returned it as it was.
        through_containers: Whether to go on where a container with parameters has returned
            something, up to the outputs of the layers inside.
    """
    path, seen, stack = Path((node, slot), [], {}, []), set(), [node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            path.leaves.append(node.variable)
            continue
        is_source = False
        for key, mark in node.metadata.items():
            if not isinstance(mark, Origin) or mark is own:
                continue
            if mark.is_output and not (through_containers and mark.by_container):
                path.sources[node, key[1]] = mark
                is_source = True
        if not is_source:
            path.nodes.append(node)
            stack += [parent for parent, _ in node.next_functions]
    return path


class Verdict(NamedTuple):
    """Whether functions keep samples apart, and for which stored values that was found out.

    Attributes:
        apart: Whether they leave the samples apart; None if that could not be found out.
        values: Numbers that they have stored, for which that holds; None for any.
    """

    apart: bool | None
    values: list[float | Tensor] | None = None


class SampleFlow:
    """What the calls of one backward pass say about the samples, from the loss upwards.

    Attributes:
        mixing: Functions that mix samples, or move them from the first axis.
        single: Losses that read rows of one sample alone.
        unknown: Functions that cannot be looked at.
        sizes: Layers whose samples are not as many as those of the model, or of layers behind.
    """

    # What was found out of the functions before a module, by their structure.
    _known: ClassVar[WeakKeyDictionary[Module, dict[Hashable, Verdict]]] = WeakKeyDictionary()

    def __init__(self) -> None:
        """Nothing was reached."""
        self.mixing: dict[str, None] = {}
        self.unknown: dict[str, None] = {}
        self.sizes: dict[str, None] = {}
        self.single: dict[str, None] = {}
        # the call with parameters that comes next, and its number of samples
        self.next: dict[Origin | None, tuple[Call, int]] = {}
        self.given: dict[Given, None] = {}
        self.layers: dict[int, list[Module]] = {}  # by their number of samples
        self.axes = {0}  # along which they are

    def enter(self, given: Given) -> None:
        """Take note of what a model was called with, before its calls are visited."""
        self.given[given] = None

    def visit(self, call: Call, paths: dict[int, Path]) -> None:
        """Look at a call, after all those that read its outputs.

        Args:
            call: The call.
            paths: What is above those inputs that functions have computed.
        """
        if call.is_container:
            return
        is_loss = isinstance(call.derivatives, BaseLossDerivatives)
        if is_loss and not call.is_plain:
            self._check_owners(call)
        if call.is_followed:
            return
        after = None
        for mark in call.origins_out:
            if mark in self.next:
                after = self.next[mark]
        if call.trained and not is_loss and not call.is_unbatched:
            own = _samples_of(call)
            self.axes.add(_axis(call, 0, out=True))
            self.layers.setdefault(own, []).append(call.module)
            if after is not None and after[1] != own and not _are_tied(call, after[0]):
                self._note_size(call, own, *after)
            after = call, own
        elif after is not None and not is_loss and _combines_entries(call):
            own = _samples_of(call)
            if own % after[1]:  # else axes are merged with that of the samples, as in attention
                self._note_size(call, own, *after)
        for i, mark in enumerate(call.origins_in):
            if mark is None:
                if not is_loss:
                    self._check_data(call, i)
                continue
            path = paths.get(i)
            marks = [mark] if path is None else path.sources.values()
            if after is not None and not is_loss:
                for source in marks:
                    self.next.setdefault(source, after)
            if path is not None:
                self._check(call, i, path, is_loss)
            elif is_loss and _is_known(mark):
                self._check_loss(call, i, mark)

    def compare(self) -> None:
        """Compare the samples of layers with those of the models that they are part of."""
        sizes = {given: given.sizes(self.axes) for given in self.given}
        for own, layers in self.layers.items():
            if all(own in known for known in sizes.values()):
                continue
            for layer in layers:
                around = [given for given in sizes if layer in set(given.module.modules())]
                if around and not any(own in sizes[given] for given in around):
                    model, counts = around[0].module, sorted(sizes[around[0]])
                    data = f"the data of {describe(model)} {' or '.join(map(str, counts))}"
                    self.sizes[f"{describe(layer)} has {own}, {data}"] = None

    def _check_data(self, call: Call, i: int) -> None:
        """Notice that the memory of data says that the samples are elsewhere."""
        x = call.inputs[i]
        if not (self.given and isinstance(x, Tensor) and x.dim()) or isinstance(x, Parameter):
            return
        layout = call.layouts_in[i]
        if layout is not None and not layout.is_batched:  # such as what a parametrisation reads
            return
        axis = _axis(call, i)
        if axis < x.dim() and any(given.is_moved(x, axis, i == 0) for given in self.given):
            self.mixing[f"functions of the data before {describe(call.module)}"] = None

    def _check_loss(self, call: Call, i: int, mark: Origin) -> None:
        """Notice samples that a reshape has brought together in one row of a loss."""
        shape, axis = call.shape_in[i], _axis(call, i)
        if not shape or axis >= len(shape) or isinstance(call.derivatives, Elementwise):
            return
        if mark.layout is not None and mark.layout.owners is not None:  # else it is misplaced
            return
        before, samples = _before(mark), _samples(mark)
        if axis == 0:
            are_apart = shape[0] % (before * samples) == 0
        else:
            are_apart = (math.prod(shape[:axis]), shape[axis]) == (before, samples)
        if not are_apart:
            name = f"{describe(call.module)} (which reads {samples} rows as {list(shape)})"
            self.mixing[name] = None

    def _check_owners(self, call: Call) -> None:
        """Notice a loss whose rows all belong to one sample of several."""
        layout = call.layouts_in[0]
        owners = None if layout is None else layout.owners
        if owners is not None and owners.samples > 1 and len(set(owners.numbers)) == 1:
            number = f"number {owners.numbers[0]} of {owners.samples}"
            shape = list(call.shape_in[0] or ())
            self.single[f"{describe(call.module)} reads {shape}, all of it of sample {number}"] = (
                None
            )

    def _note_size(self, call: Call, own: int, reader: Call, rows: int) -> None:
        self.sizes[f"{describe(call.module)} has {own}, {describe(reader.module)} {rows}"] = None

    # ------------------------------------------------------------------ functions

    def _check(self, call: Call, i: int, path: Path, is_loss: bool) -> None:
        shape = shape_of(*path.start).shape
        if not shape or all(type(node).__name__ in RESHAPES for node in path.nodes):
            return
        sources = {key: mark for key, mark in path.sources.items() if _is_known(mark)}
        if not is_loss:  # other numbers of rows are noted where there are parameters
            rows = shape[_axis(call, i)]
            sources = {key: mark for key, mark in sources.items() if _samples(mark) == rows > 1}
        if not sources:
            return
        if any(map(is_foreign_function, path.nodes)):
            self.unknown[f"functions before {describe(call.module)}"] = None
            return
        known = self._known.setdefault(call.module, {})
        key = (is_loss, describe_structure(path, sources))
        verdict = known.get(key)
        if verdict is None:
            apart = self._are_apart(call, i, path, sources, is_loss, spread)
            verdict = known[key] = Verdict(apart, None if apart else [math.nan])
        if verdict.values is not None:  # it depends on what is stored, such as a permutation
            values = stored_values(path.nodes)
            if values is None or not _are_equal(values, verdict.values):
                apart = self._are_apart(call, i, path, sources, is_loss)
                verdict = Verdict(apart, values)
                if values is not None:
                    known[key] = verdict
        if verdict.apart is None and not all(map(is_unpacked, path.nodes)):
            self.unknown[f"functions before {describe(call.module)}"] = None
        if verdict.apart is False:
            names = dict.fromkeys(n.name() for n in path.nodes if type(n).__name__ not in RESHAPES)
            self.mixing[f"functions before {describe(call.module)} ({', '.join(names)})"] = None

    def _are_apart(
        self,
        call: Call,
        i: int,
        path: Path,
        sources: dict[tuple[Any, int], Origin],
        is_loss: bool,
        run: Callable[..., Any] | None = None,
    ) -> bool | None:
        """Whether rows depend on a sample each, and which: None if that cannot be found out."""
        if not all(map(is_unpacked, path.nodes)):
            return None
        x, axis, found = shape_of(*path.start), _axis(call, i), None
        selections = _single_rows if is_loss else _halves
        for rows in selections(x.shape[axis], x.device):
            try:
                grads = vjp(path, {path.start: _cotangent(x, axis, rows)}, run)
                reached = [touched(grads.get(key), mark) for key, mark in sources.items()]
            except RuntimeError:  # an operation that needs the engine, or whose spread is unknown
                return None
            for samples in reached:
                if samples is None:
                    continue
                found = True
                if int(samples.sum()) > 1 if is_loss else bool((samples & ~rows).any()):
                    return False
        return found


def _are_tied(one: Call, other: Call) -> bool:
    """Whether two calls use the same parameters: their gradients are brought together."""
    return any(p is q for p in one.trained.values() for q in other.trained.values())


def _axis(call: Call, i: int, out: bool = False) -> int:
    """Return the axis of an input, or an output, along which its rule has the samples."""
    rule = call.derivatives
    if call.is_usual or rule is None or rule.batch_axis is not BatchAxis.FIXED:
        return 0
    return (rule.batch_axis_out if out else rule.batch_axis_in)(call.module, i)


def _combines_entries(call: Call) -> bool:
    """Whether a module such as a softmax combines entries of what it takes for a row."""
    rule = call.derivatives
    return rule is not None and not (call.is_unbatched or rule.hessian_is_diagonal(call.module))


def _samples_of(call: Call) -> int:
    """Return how many samples a layer takes its output to have."""
    layout, shape = call.layouts_out[0], call.shape_out[0]
    if call.is_usual:
        return shape[0]
    if layout is not None and layout.is_batched:
        return layout.samples
    return shape[_axis(call, 0, out=True)] if shape else 1


def _is_known(mark: Origin) -> bool:
    return mark.layout is not None and mark.layout.is_batched


def _samples(mark: Origin) -> int:
    assert mark.layout is not None
    return mark.layout.samples


def _cotangent(x: Any, axis: int, rows: Tensor) -> Tensor:
    """Return a tensor whose entries differ along each axis, zero in all but some rows of one."""
    entries = rows.to(x.dtype).reshape(-1, *(1,) * (len(x.shape) - axis - 1))
    for i, size in enumerate(x.shape):
        wave = torch.arange(size, device=x.device).mul(0.7391 + i).sin().add(1.5).to(x.dtype)
        entries = entries * wave.reshape(-1, *(1,) * (len(x.shape) - i - 1))
    return entries


def _halves(count: int, device: torch.device) -> list[Tensor]:
    """Return selections of rows such that of each two one is in, the other not."""
    numbers = torch.arange(count, device=device)
    bits = [(numbers >> bit) & 1 == 1 for bit in range((count - 1).bit_length())]
    return [*bits, *[~bit for bit in bits]]


def _single_rows(count: int, device: torch.device) -> list[Tensor]:
    """Return selections of one row each, of rows that are spread evenly."""
    chosen = sorted({round(k * (count - 1) / (ROWS - 1)) for k in range(ROWS)})
    numbers = torch.arange(count, device=device)
    return [numbers == row for row in chosen]


def touched(grad: Tensor | None, mark: Origin) -> Tensor | None:
    """Return which samples a gradient has entries of, ``[N]``; None if it has none."""
    if grad is None:
        return None
    assert mark.layout is not None
    sizes = grad.abs().nan_to_num(nan=0, posinf=0)
    sizes = sizes.reshape(mark.layout.before, mark.layout.samples, -1).amax((0, 2))
    largest = sizes.max()
    return sizes > 100 * torch.finfo(sizes.dtype).eps * largest if largest > 0 else None


def vjp(
    path: Path,
    cotangents: Mapping[tuple[Any, int], Tensor],
    run: Callable[..., Any] | None = None,
) -> dict[tuple[Any, int], Tensor]:
    """Multiply cotangents below a path with the transposed Jacobian of its functions.

    Args:
        path: The functions.
        cotangents: For outputs of their nodes.
        run: Takes the place of nodes: :func:`spread`. Numbers other than zero are then one.
    """
    inside = set(path.nodes)
    waiting = dict.fromkeys(path.nodes, 0)
    for node in path.nodes:
        for parent, _ in node.next_functions:
            if parent in inside:
                waiting[parent] += 1
    arrived: dict[Any, list[Tensor | None]] = {}
    found: dict[tuple[Any, int], Tensor] = {}

    def arrive(node: Any, slot: int, grad: Tensor) -> None:
        known = shape_of(node, slot)
        grad = grad.sum_to_size(known.shape)
        grad = (grad if run is None else grad != 0).to(known.dtype)
        if node in inside:
            there = arrived.setdefault(node, [None] * len(node._input_metadata))
            other = there[slot]
            there[slot] = grad if other is None else other + grad
        elif (node, slot) in path.sources:
            found[node, slot] = found[node, slot] + grad if (node, slot) in found else grad

    with torch.no_grad():
        for (node, slot), cotangent in cotangents.items():
            arrive(node, slot, cotangent)
        ready = [node for node in path.nodes if not waiting[node]]
        while ready:
            node = ready.pop()
            grads = arrived.pop(node, None)
            out: Any = (None,) * len(node.next_functions)
            if grads is not None and is_output(node):
                out = grads[0]
            elif grads is not None:
                out = node(*grads) if run is None else run(node, *grads)
            for (parent, slot), grad in zip(
                node.next_functions, (out,) if isinstance(out, Tensor) else out, strict=True
            ):
                if parent is None:
                    continue
                if grad is not None:
                    arrive(parent, slot, grad)
                if parent in inside:
                    waiting[parent] -= 1
                    if not waiting[parent]:
                        ready.append(parent)
    return found


def is_unpacked(node: Any) -> bool:
    """Whether a node has its tensors itself: no hook computes or fetches them (checkpoints do)."""
    if is_output(node):  # one of ours stores nothing
        return True
    try:
        saved = [getattr(node, name) for name in saved_names(node)[1]]
        each = [one for s in saved for one in (s if isinstance(s, Sequence) else [s])]
        return all(one.unpack_hook is None for one in each)
    except (AttributeError, RuntimeError):
        return False


def stored_values(nodes: Sequence[Any]) -> list[float | Tensor] | None:
    """Return what nodes have stored of their own; None if it is large, or was computed."""
    if not all(map(is_unpacked, nodes)):
        return None
    values: list[float | Tensor] = []
    for node in nodes:
        values += saved_floats(node)
        for x in saved_tensors(node):
            if x.requires_grad or x.numel() > LARGE or x.layout is not torch.strided:
                return None
            values.append(x.detach().clone())
    return values


def _are_equal(one: Sequence[float | Tensor], other: Sequence[float | Tensor]) -> bool:
    return len(one) == len(other) and all(
        (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device) and torch.equal(x, y)
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else type(x) is type(y) and x == y
        for x, y in zip(one, other, strict=True)
    )


def describe_structure(path: Path, sources: dict[tuple[Any, int], Origin]) -> Hashable:
    """Describe functions and shapes; equal sizes have equal numbers, whatever they are."""
    numbers: dict[int, int] = {}
    index = {key: i for i, key in enumerate([*path.nodes, *path.sources])}

    def named(sizes: Any) -> Hashable:
        if isinstance(sizes, int):
            return numbers.setdefault(sizes, len(numbers))
        return tuple(map(named, sizes)) if isinstance(sizes, Sequence) else None

    entries = []
    for node in path.nodes:
        options = []
        for name in saved_names(node)[0]:
            value = getattr(node, name)
            if not isinstance(value, float):  # factors and probabilities
                is_size = "size" in name or "numel" in name
                options.append(named(value) if is_size else repr(value))
        shapes = tuple([named(tuple(known.shape)) for known in node._input_metadata])
        links = tuple([index.get(link[0], index.get(link, -1)) for link in node.next_functions])
        slots = tuple([slot for _, slot in node.next_functions])
        entries.append((type(node).__name__, tuple(options), shapes, links, slots))
    at = tuple([(named(_samples(mark)), _before(mark)) for mark in sources.values()])
    return tuple(entries), at


def _before(mark: Origin) -> int:
    assert mark.layout is not None
    return mark.layout.before
