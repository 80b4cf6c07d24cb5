"""The autograd graph between a tensor and what recorded calls have returned: a path of functions.

Whether they leave the samples apart, or bring some together, is found out by calling its nodes: a
cotangent at the rows of some samples gives a gradient at those rows alone, if they do. The nodes
are called one by one: the engine would run hooks, and reach recorded calls.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from backpack.core.engine.spread import (
    UnknownSpreadError,
    each_of,
    saved_floats,
    saved_names,
    saved_tensors,
    shape_of,
    spread,
)
from backpack.core.record.calls import LARGE
from backpack.core.record.layout import CPU
from backpack.core.record.origins import WRAPPERS, Origin, is_output
from backpack.hessianfree.graph import nodes_above

# A node, and which of its outputs.
Edge = tuple[Any, int]


class Path(NamedTuple):
    """The graph between a tensor and what recorded calls have returned."""

    start: Edge  # what has computed the tensor
    nodes: list[Any]  # those between, that one included
    sources: dict[Edge, Origin]  # what calls have returned, with their marks
    leaves: list[Tensor]  # without a history, such as parameters


@dataclass
class HiddenGradients:
    """Parameters whose gradients change while functions of Python compute their own."""

    found: dict[Parameter, None] = field(default_factory=dict)
    handles: list[RemovableHandle] = field(default_factory=list)  # for the end of the backward pass

    def watch(self, nodes: Iterable[Any], modules: Sequence[Module]) -> None:
        """Find those of modules that change while a node runs."""
        before: dict[Parameter, Any] = {}

        def state(p: Parameter) -> Any:
            return None if p.grad is None else (id(p.grad), p.grad._version)

        def note(*_: Any) -> None:
            own = chain.from_iterable(module.parameters(recurse=False) for module in modules)
            before.update((p, state(p)) for p in own)

        def compare(*_: Any) -> None:
            self.found |= dict.fromkeys(p for p, x in before.items() if x != state(p))

        for node in nodes:
            self.handles += [node.register_prehook(note), node.register_hook(compare)]


def path_above(node: Any, slot: int, opens_losses: bool = False) -> Path:
    """Search the graph above output ``slot`` of a node, up to the outputs of recorded calls.

    Where a container with parameters has returned something, up to the layers inside; where a
    function (or a loss, if losses are opened) has made numbers of all samples, up to what these
    were made of.
    """
    path = Path((node, slot), [], {}, [])

    def is_source(node: Any) -> bool:
        before = len(path.sources)
        for key, mark in list(node.metadata.items()):
            if not isinstance(mark, Origin) or not mark.is_output or mark.by_container:
                continue
            is_known = mark.layout is not None or mark.lost is not None
            is_value = mark.of_loss and not (opens_losses and not shape_of(node, key[1]).shape)
            if is_known or is_value:
                path.sources[node, key[1]] = mark
        return len(path.sources) > before

    for each in nodes_above([node], until=is_source):
        if hasattr(each, "variable"):
            path.leaves.append(each.variable)
        else:
            path.nodes.append(each)
    return path


def samples_in(mark: Origin) -> int:
    """Number of samples that are known in a tensor; 0 if it is not known where they are."""
    return 0 if mark.layout is None else mark.layout.samples


def is_whole(node: Any, slot: int) -> bool:
    """Whether an output has one entry: the value of a loss, which depends on all samples."""
    return math.prod(shape_of(node, slot).shape) == 1


def is_unpacked(node: Any) -> bool:
    """Whether a node has its tensors itself: no hook computes or fetches them (checkpoints do)."""
    if is_output(node):  # one of ours stores nothing
        return True
    try:
        saved = [getattr(node, name) for name in saved_names(node.__class__)[1]]
        return all(one.unpack_hook is None for one in each_of(saved))
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


def describe_structure(path: Path) -> Hashable:
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
        for name in saved_names(node.__class__)[0]:
            value = getattr(node, name)
            if not isinstance(value, float):  # factors and probabilities
                is_size = "size" in name or "numel" in name
                options.append(named(value) if is_size else repr(value))
        shapes = tuple([named(tuple(known.shape)) for known in node._input_metadata])
        links = tuple([index.get(link[0], index.get(link, -1)) for link in node.next_functions])
        slots = tuple([slot for _, slot in node.next_functions])
        entries.append((type(node).__name__, tuple(options), shapes, links, slots))
    at = tuple(
        [
            (named(mark.layout.samples), mark.layout.before) if mark.layout else is_whole(*edge)
            for edge, mark in path.sources.items()
        ]
    )
    return path.start[1], tuple(entries), at


# ------------------------------------------------------------------ samples that meet

# How many entries (or rows) of a tensor are looked at.
PLACES = 7
# Takes the place of nodes.
Run = Callable[..., Any]
# Whether functions keep samples apart (None: nobody knows), and for which stored values that was
# found out (None: it holds for any).
Verdict = tuple[bool | None, list[float | Tensor] | None]
# What was found out of the functions before a module, by their structure.
_known: WeakKeyDictionary[Module, dict[Hashable, Verdict]] = WeakKeyDictionary()


def are_apart(module: Module, path: Path, axis: int, is_loss: bool) -> bool | None:
    """Whether the rows that a module reads depend on those of one sample each, and on which.

    It reads samples along an axis of what the path has computed; the rows of a loss may be any
    samples, one each. None if that cannot be found out.
    """
    known = _known.setdefault(module, {})
    key = (is_loss, axis, describe_structure(path))
    if key not in known:
        apart = _evaluate(path, axis, is_loss, spread)
        known[key] = apart, None if apart else [math.nan]
    apart, found_for = known[key]
    if found_for is None:
        return apart
    values = stored_values(path.nodes)  # it depends on what is stored, such as a permutation
    if values is None or not _are_equal(values, found_for):
        apart = _evaluate(path, axis, is_loss)
        if values is not None:
            known[key] = apart, values
    return apart


def _evaluate(path: Path, axis: int, is_loss: bool, run: Run | None = None) -> bool | None:
    """Call the functions; None if they cannot be called, or nothing comes of that."""
    if not all(map(is_unpacked, path.nodes)):
        return None
    if is_loss:
        most = most_samples(path, [path.start], [axis], run)
        return None if most is None else most == 1
    shape, found = shape_of(*path.start).shape, False
    behind = len(shape) - axis - 1
    numbers = torch.arange(shape[axis], device=CPU)
    bits = [(numbers >> bit) & 1 == 1 for bit in range((shape[axis] - 1).bit_length())]
    for rows in [*bits, *[~bit for bit in bits]]:  # one of them has one of any two rows alone
        chosen = (rows * _wave(len(rows), CPU, behind)).view(-1, *(1,) * behind)
        reached = _reached(path, [path.start], chosen, run)
        if reached is None:
            return None
        if any(bool((samples & ~rows.to(samples.device)).any()) for samples in reached):
            return False
        found |= bool(reached)
    return found or None


def most_samples(
    path: Path, edges: Sequence[Edge], axes: Collection[int], run: Run | None = None
) -> int | None:
    """Return on how many samples an entry depends at most, of some entries; None if not known.

    Entries that are at one place along ``axes`` belong together, those of all ``edges``.
    """
    shapes = {tuple(shape_of(*edge).shape) for edge in edges}
    if len(shapes) > 1:
        return None
    (shape,) = shapes
    kept = [size if i in axes else 1 for i, size in enumerate(shape)]
    numel, most = math.prod(kept), 0
    # in no regular order, as those of a diagonal would be; none of an empty batch, refused later
    spread_out = {int(numel * (k * 0.6180339887 % 1)) for k in range(1, PLACES - 1)}
    for place in range(numel) if numel <= PLACES else sorted({0, numel - 1} | spread_out):
        one = torch.zeros(kept, device=shape_of(*edges[0]).device)
        one.view(-1)[place] = 1
        reached = _reached(path, edges, one, run)
        if reached is None:
            return None
        samples: dict[int, Tensor] = {}  # those of equal numbers count as one
        for own in reached:
            samples[len(own)] = own | samples.get(len(own), own)
        most = max([most, *[int(own.sum()) for own in samples.values()]])
    return most or None


def _reached(
    path: Path, edges: Sequence[Edge], chosen: Tensor, run: Run | None
) -> list[Tensor] | None:
    """Return which samples the chosen entries depend on, ``[N]`` for each source that they reach.

    None if functions need the engine, or it is not known what they bring together, or where.
    """
    try:
        found = vjp(path, {edge: _cotangent(*edge, chosen) for edge in edges}, run)
        each = [_touched(grad, key, path.sources[key]) for key, grad in found.items()]
    except RuntimeError:
        return None
    return [samples for samples in each if samples is not None]


def _cotangent(node: Any, slot: int, chosen: Tensor) -> Tensor:
    """Return what is chosen, with entries that differ along the axes where one stands for all."""
    x = shape_of(node, slot)
    entries = chosen.to(x.device, x.dtype)
    for i, size in enumerate(reversed(x.shape)):
        if size > 1 and (i >= chosen.dim() or chosen.shape[-1 - i] == 1):
            entries = entries * _wave(size, x.device, i).to(x.dtype).view(-1, *(1,) * i)
    return entries.expand(x.shape)


def _wave(size: int, device: torch.device, i: int) -> Tensor:
    return torch.arange(size, device=device).mul(0.7391 + i).sin().add(1.5)


def _touched(grad: Tensor, key: Edge, mark: Origin) -> Tensor | None:
    """Return which samples a gradient has entries of, ``[N]``; None if it has none."""
    if mark.layout is None:
        if not is_whole(*key):
            raise UnknownSpreadError
        return grad.any().expand(2) if grad.any() else None  # a number depends on all samples
    if not grad.numel():
        return None
    sizes = grad.abs().nan_to_num(nan=0, posinf=0)
    sizes = sizes.reshape(mark.layout.before, mark.layout.samples, -1).amax((0, 2))
    largest = sizes.max()
    return sizes > 100 * torch.finfo(sizes.dtype).eps * largest if largest > 0 else None


def vjp(
    path: Path, cotangents: Mapping[Edge, Tensor], run: Run | None = None
) -> dict[Edge, Tensor]:
    """Multiply cotangents below a path with the transposed Jacobian of its functions.

    If something takes the place of nodes (``run`` is :func:`spread`), numbers other than zero are
    one.
    """
    inside = set(path.nodes)
    waiting = Counter(p for node in path.nodes for p, _ in node.next_functions if p in inside)
    arrived: dict[Any, list[Tensor | None]] = {}
    found: dict[Edge, Tensor] = {}

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
            elif grads is not None and type(node).__name__ in WRAPPERS:  # around hooks of modules
                out = tuple(grads)
            elif grads is not None:
                out = node(*grads) if run is None else run(node, *grads)
            for (parent, slot), grad in zip(
                node.next_functions, (out,) if isinstance(out, Tensor) else out, strict=True
            ):
                if grad is not None and parent is not None:
                    arrive(parent, slot, grad)
                if parent in waiting:
                    waiting[parent] -= 1
                    if not waiting[parent]:
                        ready.append(parent)
    return found


def _are_equal(one: Sequence[float | Tensor], other: Sequence[float | Tensor]) -> bool:
    return len(one) == len(other) and all(
        (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device) and torch.equal(x, y)
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else type(x) is type(y) and x == y
        for x, y in zip(one, other, strict=True)
    )
