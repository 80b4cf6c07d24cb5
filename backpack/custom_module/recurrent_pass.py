"""Recurrent modules with several layers become modules with one layer each."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph
from torch.fx.node import Node, map_arg
from torch.nn import LSTM, Module

from backpack.custom_module.rnn_layers import LAYERS, RNNLayers
from backpack.utils.hooks import is_of_library


def split_recurrent_layers(graph: Graph, root: Module) -> None:
    """Replace recurrent modules with several layers, in the graph and in the root, by one for each.

    Those with hooks, with parameters that the forward pass uses directly, and those that get
    perhaps None as a state stay as they are.
    """
    read = {str(n.target).rpartition(".")[0] for n in graph.nodes if n.op == "get_attr"}
    calls: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    for target, nodes in calls.items():
        rnn: Any = root.get_submodule(target)
        if type(rnn) not in LAYERS or rnn.num_layers == 1:
            continue
        if target in read or _has_hooks(rnn) or any(map(_has_perhaps_no_state, nodes)):
            continue
        layers = RNNLayers.of(rnn)
        parent, _, name = target.rpartition(".")
        root.get_submodule(parent)._modules[name] = layers
        for node in nodes:
            _split(graph, node, rnn, layers)


def _has_hooks(module: Module) -> bool:
    """Whether others have put hooks on a module; that of ``extend`` is put on what replaces it."""
    kinds = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = [hook for of_a_kind in kinds for hook in of_a_kind.values()]
    return bool(module._forward_pre_hooks) or not all(map(is_of_library, hooks))


def _arguments(node: Node) -> tuple[Any, Any]:
    """Return the input and the initial state of a call."""
    bound = {**dict(zip(("input", "hx"), node.args, strict=False)), **node.kwargs}
    return bound["input"], bound.get("hx")


def _has_perhaps_no_state(node: Node) -> bool:
    _, hx = _arguments(node)
    return isinstance(hx, Node) and hx.op == "placeholder" and hx.args == (None,)


def _split(graph: Graph, node: Node, rnn: Any, layers: RNNLayers) -> None:
    """Replace one call of a recurrent module."""
    x, hx = _arguments(node)
    directions = 2 if rnn.bidirectional else 1
    is_lstm = isinstance(rnn, LSTM)

    def insert(op: str, target: Any, *args: Any) -> Node:
        with graph.inserting_before(node):
            result = graph.create_node(op, target, args)
        result.meta.update(node.meta)
        return result

    def item(of: Any, index: Any) -> Any:
        if isinstance(of, tuple):
            return of[index]
        return insert("call_function", operator.getitem, of, index)

    def parts(states: Any) -> list[Any]:
        return [item(states, 0), item(states, 1)] if is_lstm else [states]

    initial = [] if hx is None else parts(hx)
    final: list[list[Any]] = []  # by layer, then h and c
    for k in range(rnn.num_layers):
        own = (slice(k * directions, (k + 1) * directions),)
        states = tuple(item(state, own) for state in initial)
        first, *others = layers.path(k)
        arguments = (x, states if is_lstm else states[0]) if states else (x,)
        output = x = insert("call_module", f"{node.target}.{first}", *arguments)
        final.append(parts(item(output, 1)))
        for name in others:
            x = insert("call_module", f"{node.target}.{name}", x)
    by_state = [list(layer) for layer in zip(*final, strict=True)]  # h and c, then by layer
    stacked = tuple(insert("call_function", torch.cat, states, 0) for states in by_state)
    _substitute(graph, node, (item(output, 0), stacked if is_lstm else stacked[0]))
    for cat, of_layers in zip(stacked, by_state, strict=True):
        for user in list(cat.users):
            _pick_layer(user, cat, of_layers, directions)


def _substitute(graph: Graph, node: Node, value: Any) -> None:
    """Replace a node by a node, or by a (nested) tuple of nodes."""

    def replaced(argument: Node) -> Any:
        return value if argument is node else argument

    for user in list(node.users):
        index = user.args[1] if user.target is operator.getitem else None
        if isinstance(index, int) and isinstance(value, tuple):
            _substitute(graph, user, value[index])
        else:
            user.args, user.kwargs = map_arg(user.args, replaced), map_arg(user.kwargs, replaced)
    graph.erase_node(node)


def _pick_layer(user: Node, cat: Node, of_layers: list[Node], directions: int) -> None:
    """Let ``h_n[i]`` come from its layer, not from the states of all layers."""
    if user.target is not operator.getitem or user.args[0] is not cat:
        return
    index = user.args[1]
    first, *rest = index if isinstance(index, tuple) else (index,)
    count = len(of_layers) * directions
    if isinstance(first, int) and -count <= first < count:
        k, direction = divmod(first % count, directions)
        user.args = (of_layers[k], (direction, *rest))
