"""The autograd graph between a tensor and what recorded calls have returned: a path of functions.

Its nodes are called one by one. The engine would run hooks, and reach recorded calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from backpack.core.engine.spread import saved_floats, saved_names, saved_tensors, shape_of
from backpack.core.record.calls import LARGE
from backpack.core.record.origins import WRAPPERS, Origin, is_output
from backpack.hessianfree.graph import nodes_above


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


class HiddenGradients:
    """Parameters whose gradients change while functions of Python compute their own.

    Attributes:
        found: The parameters.
        handles: Hooks that find them, to be removed after the backward pass.
    """

    def __init__(self) -> None:
        """Watch nothing yet."""
        self.found: dict[Parameter, None] = {}
        self.handles: list[RemovableHandle] = []

    def watch(self, nodes: Iterable[Any], modules: Sequence[Module]) -> None:
        """Find those of modules that change while a node runs."""
        before: dict[Parameter, tuple[int | None, int]] = {}

        def note(*_: Any) -> None:
            own = chain.from_iterable(module.parameters(recurse=False) for module in modules)
            before.update((p, _state_of_gradient(p)) for p in own)

        def compare(*_: Any) -> None:
            self.found |= dict.fromkeys(p for p, x in before.items() if x != _state_of_gradient(p))

        for node in nodes:
            self.handles += [node.register_prehook(note), node.register_hook(compare)]


def _state_of_gradient(p: Parameter) -> tuple[int | None, int]:
    return (None, 0) if p.grad is None else (id(p.grad), p.grad._version)


def path_above(node: Any, slot: int, opens_losses: bool = False) -> Path:
    """Search the graph above output ``slot`` of a node, up to the outputs of recorded calls.

    Where a container with parameters has returned something, up to the layers inside; where a
    function (or a loss, if losses are opened) has made one number of all samples, up to what it was
    made of.
    """
    path = Path((node, slot), [], {}, [])

    def is_source(node: Any) -> bool:
        before = len(path.sources)
        for key, mark in list(node.metadata.items()):
            if not isinstance(mark, Origin) or not mark.is_output or mark.by_container:
                continue
            is_number = mark.layout is None and not shape_of(node, key[1]).shape
            if not is_number or (mark.of_loss and not opens_losses):
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


def touched(grad: Tensor | None, mark: Origin) -> Tensor | None:
    """Return which samples a gradient has entries of, ``[N]``; None if it has none."""
    if grad is None or not grad.numel():
        return None
    layout: Any = mark.layout
    sizes = grad.abs().nan_to_num(nan=0, posinf=0)
    sizes = sizes.reshape(layout.before, layout.samples, -1).amax((0, 2))
    largest = sizes.max()
    return sizes > 100 * torch.finfo(sizes.dtype).eps * largest if largest > 0 else None


def vjp(
    path: Path, cotangents: Mapping[tuple[Any, int], Tensor], run: Callable[..., Any] | None = None
) -> dict[tuple[Any, int], Tensor]:
    """Multiply cotangents below a path with the transposed Jacobian of its functions.

    If something takes the place of nodes (``run`` is :func:`spread`), numbers other than zero are
    one.
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
            elif grads is not None and type(node).__name__ in WRAPPERS:  # around hooks of modules
                out = tuple(grads)
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
    layouts = [mark.layout for mark in sources.values() if mark.layout is not None]
    at = tuple([(named(layout.samples), layout.before) for layout in layouts])
    return tuple(entries), at
