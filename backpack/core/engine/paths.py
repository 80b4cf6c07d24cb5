"""The autograd graph between a tensor and what recorded calls have returned: a path of functions.

Its nodes are called one by one. The engine would run hooks, and reach recorded calls.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from backpack.core.engine.spread import each_of, saved_floats, saved_names, saved_tensors, shape_of
from backpack.core.record.calls import LARGE
from backpack.core.record.origins import Origin, is_output
from backpack.hessianfree.graph import nodes_above

# A node, and which of its outputs.
Edge = tuple[Any, int]


class Path(NamedTuple):
    """The graph between a tensor and what recorded calls have returned."""

    start: Edge  # what has computed the tensor
    nodes: list[Any]  # those between, that one included
    sources: dict[Edge, Origin]  # what calls have returned, with their marks
    leaves: list[Tensor]  # without a history, such as parameters


class HiddenGradients:
    """Parameters whose gradients change while functions of Python compute their own."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self.found: dict[Parameter, None] = {}
        self.handles: list[RemovableHandle] = []  # to be removed after the backward pass

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
