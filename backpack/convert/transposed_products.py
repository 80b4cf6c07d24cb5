"""Products with the transposed of a parameter, ``x @ W.T``, in graphs that were traced."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph
from torch.fx.node import Node
from torch.nn import Module, Parameter
from torch.nn.functional import linear

from backpack.core.record.functional_layers import product
from backpack.core.record.lookup import look_up

ATTRIBUTES = ("T", "mT")


def use_linear(graph: Graph, root: Module) -> None:
    """Let ``x @ W.T`` be ``F.linear(x, W)``, which computes the same, and is known as a layer."""
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or len(node.args) != 2 or node.kwargs:
            continue
        row, (x, transposed) = look_up(node).row, node.args
        if row is None or row.layer is not product or not isinstance(transposed, Node):
            continue
        source = _source(transposed)
        if source is None or not _is_matrix(root, str(source.target)):
            continue
        with graph.inserting_before(node):
            result = graph.call_function(linear, (x, source))
        result.meta.update(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        if not transposed.users:
            graph.erase_node(transposed)


def _source(node: Node) -> Node | None:
    """Return the attribute that a node is the transposed of, if it is that of one."""
    if node.op not in ("call_function", "call_method"):
        return None
    source, *options = (*node.args, *node.kwargs.values())
    if not isinstance(source, Node) or source.op != "get_attr":
        return None
    name = node.target if isinstance(node.target, str) else node.target.__name__
    axes: Any = options[0] if options and isinstance(options[0], tuple) else options
    is_transposed = (
        (node.target is getattr and options[0] in ATTRIBUTES)
        or (name == "t" and not options)
        or (name in ("transpose", "swapaxes") and _are(axes, {(0, 1), (1, 0)}))
        or (name == "permute" and _are(axes, {(1, 0)}))
    )
    return source if is_transposed else None


def _are(axes: Any, known: set[tuple[int, ...]]) -> bool:
    """Whether axes of a matrix, which may be counted from the last one, are some of those known."""
    return all(type(i) is int for i in axes) and tuple(i % 2 for i in axes) in known


def _is_matrix(root: Module, name: str) -> bool:
    """Whether an attribute is a parameter with two axes."""
    path, _, own = name.rpartition(".")
    value = getattr(root.get_submodule(path), own, None)
    return isinstance(value, Parameter) and value.dim() == 2
