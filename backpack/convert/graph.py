"""The converter: a pass with ``torch.fx`` that turns every function in a model into a module.

:class:`BackpackTracer` records the forward pass, :func:`convert_module_to_backpack` rewrites the
graph. What becomes of which function is in :mod:`backpack.core.record.functions`.
"""

from __future__ import annotations

import copy
import inspect
import operator
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import Node, map_arg
from torch.nn import Module, ModuleDict, ModuleList, Sequential
from torch.nn.modules.dropout import _DropoutNd

from backpack.context import disable
from backpack.convert.functional_layer import FunctionalLayer
from backpack.convert.tracing import (
    ADVICE,
    TRACING,
    BackpackTracer,
    ConversionError,
    kind_of_output,
    place_of,
)
from backpack.core.record import lookup
from backpack.core.record.conversions import Apply
from backpack.core.record.kinds import TENSOR, TENSORS, UNKNOWN, VALUE, Kind, TrainingFlag, kind
from backpack.core.record.lookup import Function
from backpack.custom_module.branching import SumModule
from backpack.custom_module.converted_module import MODULE_STATE, Conversion, ConvertedModule
from backpack.custom_module.function_module import (
    TRAINING,
    FunctionModule,
    Slot,
    describe_function,
    leaves_in,
    map_leaves,
)
from backpack.custom_module.parameter_module import ParameterModule
from backpack.custom_module.permute import Permute
from backpack.custom_module.products import MulModule
from backpack.custom_module.recurrent_pass import split_recurrent_layers
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.rnn_layers import RNNLayers
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.custom_module.stochastic_depth import StochasticDepth
from backpack.utils.warning import warn

__all__ = ["BackpackTracer", "ConversionError", "convert_module_to_backpack"]

# Names of nodes. Other modules are named after the function that they stand for.
NODE_NAMES: dict[type[Module], str] = {
    SumModule: "sum",
    MulModule: "mul",
    ScaleModule: "scale",
    Permute: "permute",
    ReduceTuple: "reduce_tuple",
    Slicing: "slicing",
}
# How torch.fx says that an argument has another value than its default, and what to do then.
OTHER_VALUE = "but got another value"
# What repeats a list, ``[x] * n``, if its length is known when the model runs.
REPEATS = (operator.mul, operator.imul)
SPECIALIZED = (
    "The forward pass was converted with the default value: for others, record its functions, "
    'extend(model, use_converter="record").'
)
# Functions without a row that says so whose result may share its memory with their input.
SHARING = {
    *("atleast_1d", "atleast_2d", "atleast_3d", "einsum", "real", "resolve_conj", "resolve_neg"),
    *("sum_to_size", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
}
# Modules whose result may share its memory with their input.
VIEWS = (
    *(nn.Identity, nn.Flatten, nn.Unflatten, _DropoutNd),
    *(StochasticDepth, Permute, Slicing, ReduceTuple),
)


def convert_module_to_backpack(module: Module, debug: bool) -> Module:
    """Rewrite a module such that its forward pass consists of calls of modules only.

    Args:
        module: Any module. It is not changed.
        debug: Print what was converted to what.

    Returns:
        A ``GraphModule`` with the same forward pass, state dict, parameters, buffers and leaf
        modules. What needs no conversion, such as ``torch.nn.Linear``, is returned itself.

    Raises:
        ConversionError: If the forward pass cannot be converted.
    """
    if isinstance(module, ConvertedModule) or BackpackTracer().is_leaf_module(module, ""):
        if debug:
            print(f"[backpack] {type(module).__name__} needs no conversion")
        return module
    with TRACING:
        result = _Converter(module, _record(module)).convert()
    if debug:
        print(f"[backpack] converted {type(module).__name__}:\n{result.report()}")
    return result


def _record(module: Module) -> BackpackTracer:
    """Record a forward pass.

    Arguments with a default of None, a bool or a string often decide what happens: they are
    constants in the graph, unless it is the same for all of their values.
    """
    parameters = inspect.signature(type(module).forward).parameters.values()
    options = {p.name: p.default for p in parameters if isinstance(p.default, str | bool | None)}
    if not options:
        return _record_with(module, None)
    try:
        general = _record_with(module, None)
    except ConversionError:
        return _record_with(module, options)
    try:
        special = _record_with(module, options)
    except ConversionError:
        return general
    same = _fingerprint(general, options, False) == _fingerprint(special, options, True)
    return general if same else special


def _record_with(module: Module, options: dict[str, Any] | None) -> BackpackTracer:
    tracer, before = BackpackTracer(), set(vars(module))
    try:
        with disable():
            graph = tracer.trace(module, options)
    finally:
        tracer.constants = {name: vars(module).pop(name) for name in set(vars(module)) - before}
    if any(x.grad_fn is not None for x in tracer.constants.values()):
        raise ConversionError(
            f"The forward pass of {type(module).__name__} computes something of parameters that "
            "are not its own, which would be the same in each forward pass. Make them parameters "
            "of the model, or record the functions: extend(model, use_converter='record')."
        )
    for node in graph.nodes:
        original = str(node.target).removesuffix("_1")
        if node.op == "placeholder" and original in (options or {}):
            node.target = original  # torch.fx has numbered it
        check, message = (*node.args, None, None)[:2]
        if isinstance(message, str) and message.endswith(OTHER_VALUE):  # of torch.fx
            node.args = check, f"{message}. {SPECIALIZED}"
    return tracer


def _fingerprint(
    tracer: BackpackTracer, options: dict[str, Any], has_checks: bool
) -> list[tuple[str, Any, str]]:
    """Describe what is computed with the default arguments, leaving out the checks of them."""
    names: dict[Node, Any] = {}
    checks: set[Node] = set()
    result: list[tuple[str, Any, str]] = []
    for node in tracer.graph.nodes:
        if node.op == "placeholder" and node.target in options:
            names[node] = options[node.target]
            checks.add(node)
        elif has_checks and not checks.isdisjoint(node.all_input_nodes):
            checks.add(node)
        else:
            arguments = map_arg((node.args, node.kwargs), names.__getitem__)
            names[node] = f"node {len(result)}"
            result.append((node.op, node.target, repr(arguments)))
    return result


# Which memory a tensor may share: the node that made it, then (node, index) for each selection of
# a part by an integer.
Memory = tuple[Any, ...]


def _overlap(first: Memory, second: Memory) -> bool:
    """Return whether two tensors may share memory."""
    if first[0] is not second[0]:
        return False
    for (source, i), (other_source, j) in zip(first[1:], second[1:], strict=False):
        if source is not other_source:
            return True
        if i != j:
            return (i < 0) != (j < 0)  # x[2] may be x[-1]
    return True


class _Converter:
    """Rewrites one graph, node by node."""

    def __init__(self, module: Module, tracer: BackpackTracer) -> None:
        self.module, self.tracer, self.graph = module, tracer, tracer.graph
        self.is_leaf = tracer.is_leaf_module
        self.root = self._copy_containers(module, {})
        self.done: set[Node] = set()
        self.conversions: list[Conversion] = []
        self.warned: set[str] = set()
        self.counters: Counter[tuple[int, str]] = Counter()
        self.state: dict[str, Node] = {}  # parameters, buffers and constants by name
        self.made: set[Node] = set()  # those that are constants or other tensors
        self.calls: Counter[Any] = Counter()  # of each module
        self.calls_so_far: Counter[Any] = Counter()

    def convert(self) -> ConvertedModule:
        """Rewrite all nodes, and put them into a module."""
        split_recurrent_layers(self.graph, self.root)
        self._drop_unused()
        self.calls.update(node.target for node in self.graph.nodes if node.op == "call_module")
        for node in self.graph.nodes:
            if node not in self.done:
                getattr(self, f"_convert_{node.op}")(node)
        self._drop_readers()
        self.graph.lint()
        name, tracer = type(self.module).__name__, self.tracer
        known = tuple(self.conversions), tuple(tracer.branches), tracer.modes, tracer.options
        return ConvertedModule(self.root, self.graph, name, *known)

    def _copy_containers(self, module: Module, memo: dict[Module, Module]) -> Module:
        """Copy the containers of a tree; leaves and tensors are shared."""
        if self.is_leaf(module, "") and module is not self.module:
            return module
        if module in memo:
            return memo[module]
        # the class of a GraphModule belongs to one instance
        is_graph = isinstance(module, GraphModule)
        memo[module] = result = Module() if is_graph else object.__new__(type(module))
        for name, value in vars(module).items():
            if name in MODULE_STATE:
                vars(result)[name] = copy.copy(value)
            elif isinstance(value, Tensor) or not (is_graph or name.startswith("_backpack")):
                vars(result)[name] = value
        for name, child in module._modules.items():
            if isinstance(child, ParameterModule):
                del result._modules[name]
            elif child is not None:
                result._modules[name] = self._copy_containers(child, memo)
        return result

    def _drop_readers(self) -> None:
        """Drop what has read parameters of layers, which read them themselves."""
        unused = {str(node.target): node for node in self.state.values() if not node.users}
        self.conversions = [one for one in self.conversions if one.name not in unused]
        for name, node in unused.items():
            self.graph.erase_node(node)
            delattr(self.root, name)

    def _drop_unused(self) -> None:
        """Drop functions whose result nobody uses, unless they do something else, too."""
        for node in reversed(list(self.graph.nodes)):
            if node.users or node.op in ("placeholder", "call_module", "output"):
                continue
            if node.op != "get_attr":
                function = lookup.look_up(node)
                writes = function.in_place or "out" in node.kwargs
                if function.row is None or function.row.keep or writes:
                    continue
            self.graph.erase_node(node)

    def _error(self, node: Node, problem: str) -> ConversionError:
        where = f"The forward pass of {type(self.module).__name__} cannot be converted"
        return ConversionError(f"{where}: {node.name} (at {place_of(node, short=False)}) {problem}")

    # Building nodes

    def _fresh(self, name: str, owner: Module) -> str:
        """Return a name with a number that no attribute of the owner has."""
        prefix = re.sub(r"\W", "", name).strip("_") or "function"
        while True:
            number = self.counters[id(owner), prefix]
            self.counters[id(owner), prefix] += 1
            candidate = f"{prefix}{number}"
            if not (hasattr(owner, candidate) or hasattr(GraphModule, candidate)):
                return candidate

    def _finish(self, node: Node, source: str, result: Kind, memory: Memory | None = None) -> None:
        """Write down what is known about a node that is done."""
        node.meta["backpack_kind"] = result
        node.meta["backpack_memory"] = memory or (node,)
        self.done.add(node)
        if node.op == "call_module":
            first, *more = repr(self.root.get_submodule(str(node.target))).split("\n")
            what = f"{first}...)" if more else first
            self.conversions.append(Conversion(str(node.target), source, what, place_of(node)))

    def _apply(self, node: Node, what: Apply, name: str, source: str) -> Node:
        """Insert the call of a new module (and of those for its inputs) in front of a node."""
        inputs = tuple(
            self._apply(node, x, name, source) if isinstance(x, Apply) else x for x in what.inputs
        )
        flags = leaves_in((node.args, dict(node.kwargs)), TrainingFlag)
        what.module.train(flags[0].mode if flags else self.module.training)
        target = self._fresh(NODE_NAMES.get(type(what.module), name), self.root)
        self.root.add_module(target, what.module)
        with self.graph.inserting_before(node):
            result = self.graph.call_module(target, inputs)
        result.meta.update(node.meta)
        self._finish(result, source, TENSOR)
        return result

    def _replace(self, node: Node, result: Node) -> None:
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    # One method for each kind of node

    def _convert_placeholder(self, node: Node) -> None:
        if lookup.nodes_in(node.args):
            raise self._error(node, "has a tensor as its default value, which is not converted.")
        is_tensor = node.type in (Tensor, "Tensor", "torch.Tensor")
        node.type = None
        self._finish(node, "", TENSOR if is_tensor else UNKNOWN)

    def _convert_output(self, node: Node) -> None:
        node.args, node.type = _without_flags(node.args), None
        self._finish(node, "", UNKNOWN)

    def _convert_get_attr(self, node: Node) -> None:
        target = str(node.target)
        if target not in self.state:
            path, _, name = target.rpartition(".")
            owner = self.root.get_submodule(path)
            if target in self.tracer.constants:
                constant = self.tracer.constants[target]
                module, source = ParameterModule.of_constant(constant), "constant"
            elif isinstance(getattr(owner, name), Tensor):
                module = ParameterModule(owner, name)
                kinds: dict[str, Any] = {"parameter": owner._parameters, "buffer": owner._buffers}
                source = next((what for what, own in kinds.items() if name in own), "tensor")
            else:
                raise self._error(node, f"gives {target!r} to a function.\n{ADVICE}")
            label = name if not name.isdigit() else target.replace(".", "_")
            self.state[target] = self._apply(node, Apply(module, ()), label, f"{source} {target}")
            if source in ("constant", "tensor"):
                self.made.add(self.state[target])
        self._replace(node, self.state[target])

    def _convert_call_module(self, node: Node) -> None:
        target = str(node.target)
        module = self.root.get_submodule(target)
        self.calls_so_far[target] += 1
        source = "module"
        if self.calls[target] > 1:
            source = f"{target}, call {self.calls_so_far[target]} of {self.calls[target]}"
            node.target = self._name_of_call(target, module)
        node.args, node.kwargs = _without_flags(node.args), _without_flags(dict(node.kwargs))
        inputs = [n for n in lookup.nodes_in(node.args, node.kwargs) if kind(n) != VALUE]
        changed = inputs[0] if getattr(module, "inplace", False) and inputs else None
        if changed is not None and self._is_part(changed):  # a change would go past what made it
            clone = Apply(FunctionModule("clone", [Slot(0)]), (changed,))
            node.replace_input_with(changed, self._apply(node, clone, "clone", "in place"))
        is_view = isinstance(module, VIEWS) and inputs
        memory = inputs[0].meta["backpack_memory"] if is_view else None
        self._finish(node, source, kind_of_output(module, node), memory)
        if changed is not None:
            self._change_in_place(changed, node, node)

    def _is_part(self, node: Node) -> bool:
        """Return whether a node is a view of another one, and no other shape of it."""
        while node.op == "call_module" and node.meta["backpack_memory"][0] is not node:
            module = self.root.get_submodule(str(node.target))
            if isinstance(module, Permute | Slicing | FunctionModule):
                return True
            node = node.all_input_nodes[0]
        return False

    def _name_of_call(self, target: str, module: Module) -> str:
        """Return another name of a module that is called several times, if it has no state."""
        path, _, name = target.rpartition(".")
        parent = self.root.get_submodule(path)
        if module.state_dict() or isinstance(parent, RNNLayers):
            return target
        if isinstance(parent, (Sequential, ModuleList, ModuleDict)):
            # another child would change what the container iterates over
            parent, path, name = self.root, "", type(module).__name__.lower()
        alias = self._fresh(name, parent)
        parent.add_module(alias, module)
        return f"{path}.{alias}" if path else alias

    def _convert_call_function(self, node: Node) -> None:
        lists = [a for a in node.args if isinstance(a, (list, tuple)) and kind(a) != VALUE]
        if node.target in REPEATS and lists:
            # of Python: as a module, it would give each of the tensors a node of its own, and
            # gradients would add up in another order
            self._finish(node, "", TENSORS)
            return
        function = lookup.look_up(node)
        if lookup.nodes_in(node.kwargs.get("out")):
            raise self._error(node, "has an argument 'out'. Use what the function returns.")
        changed: Any = (*node.args, node.kwargs.get("input"))[0] if function.in_place else None
        if not isinstance(changed, Node) or kind(changed) not in (TENSOR, UNKNOWN):
            changed = None  # numbers and tuples do not change: a new one gets their name
        source = None if changed is None else changed.meta["backpack_memory"][0]
        if source in self.made:
            raise self._error(
                node,
                "changes a tensor that is neither a parameter nor a buffer: what reads it is not "
                "recorded, and it would keep the change.",
            )
        if changed is not None and source in self.state.values():
            # the buffer or parameter has to change
            result = self._as_function(node, Function(node.target, function.row))  # type: ignore[arg-type]
            result.meta["backpack_memory"] = changed.meta["backpack_memory"]
        else:
            result = self._out_of_place(node, function)
            if changed is not None and not _is_item_assignment(node, changed):
                self._change_in_place(changed, result, node)
        self._replace(node, result)

    _convert_call_method = _convert_call_function

    def _out_of_place(self, node: Node, function: Function) -> Node:
        target: Any = node.target
        args, kwargs = node.args, {k: v for k, v in node.kwargs.items() if k != "inplace"}
        row, name, what_kind = function.row, lookup.name_of(function), lookup.kind_of_call(node)
        if row is not None and row.layer is not None:
            given = inspect.signature(row.layer).bind(*args, **kwargs).arguments
            is_layer = given.get("weight") in self.state.values()
            if is_layer and given.get("training") is True:  # and no standardised weight
                raise self._error(node, "mixes the samples. Record it: use_converter='record'.")
        what = None if lookup.on_values(node) else lookup.converted(row, args, kwargs)
        if what is None or what.takes_flag:  # which a function follows
            result = self._as_function(node, function)
        else:
            result = self._apply(node, what, name, describe_function(target))
        result.meta["backpack_kind"] = what_kind
        is_view = (row is not None and row.is_view) or name in SHARING
        read = lookup.nodes_in(args, kwargs)
        is_view &= name != "einsum" or len(read) == 1  # a product has its own memory
        if is_view and what_kind != VALUE and read:
            memory = read[0].meta["backpack_memory"]
            if function.target is operator.getitem:
                result.meta["backpack_item"] = args
                if type(args[1]) is int:
                    memory = (*memory, args)
            result.meta["backpack_memory"] = memory
        return result

    def _as_function(self, node: Node, function: Function) -> Node:
        """Insert the call of a function as a module."""
        called: Any = node.target
        target, args = function.target, node.args
        kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        name, source = lookup.name_of(function), describe_function(called)
        if function.on_clone:
            args, target = (str(target), *args), lookup.change_clone
        inputs = lookup.nodes_in(kwargs.get("input"), args, kwargs.get("target"), kwargs)

        def template(leaf: Any) -> Any:
            if isinstance(leaf, Node):
                return Slot(inputs.index(leaf))
            return TRAINING if isinstance(leaf, TrainingFlag) else leaf

        if function.row is None and source not in self.warned:
            self.warned.add(source)
            place = place_of(node, short=False)
            called = f"{source} (node {node.name}{f', at {place}' if place else ''})"
            warn(f"No rule for function {called}: derivatives are computed automatically.")
        arguments = map_leaves(template, args), map_leaves(template, kwargs)
        module = FunctionModule(target, *arguments, name, known=function.row is not None)
        label = str(args[1]) if target is getattr else name
        what = Apply(module, tuple(inputs))
        if function.row is not None and function.row.layer is not None:
            names = function.row.inputs
            first = [kwargs.get(name, *args[i : i + 1]) for i, name in enumerate(names)]
            # the weights of a loss may be anything, also what was computed
            if len(names) > 1 and first == inputs[: len(names)]:
                what = Apply(FunctionalLayer(module, []), what.inputs)
            elif readers := self._readers(inputs[1:]):
                what = Apply(FunctionalLayer(module, readers), what.inputs[:1])
        return self._apply(node, what, label, source)

    def _readers(self, nodes: Sequence[Node]) -> list[ParameterModule]:
        """Return new modules that read the same parameters; none if a node does something else."""
        readers = []
        for node in nodes:
            target = next((name for name, own in self.state.items() if own is node), "")
            path, _, name = target.rpartition(".")
            owner = self.root.get_submodule(path)
            if name not in owner._parameters:
                return []
            readers.append(ParameterModule(owner, name))
        return readers

    def _change_in_place(self, changed: Node, result: Node, node: Node) -> None:
        """Let whoever uses a tensor after ``node`` has changed it use the result of the change.

        Raises:
            ConversionError: If the tensor shares its memory with another one that is used later.
        """
        memory = changed.meta["backpack_memory"]
        result.meta["backpack_memory"] = memory
        for user in self.graph.nodes:
            if user in self.done or user is node:
                continue
            for other in user.all_input_nodes:
                if other not in self.done or other in (changed, result):
                    continue
                if _overlap(memory, other.meta["backpack_memory"]):
                    raise self._error(
                        node,
                        f"changes a tensor in place that shares its memory with {other.name} "
                        f"(at {place_of(other, short=False)}), which is used later. Write it "
                        "out of place.",
                    )
            user.replace_input_with(changed, result)


def _is_item_assignment(node: Node, changed: Node) -> bool:
    """Whether a change in place is the first half of ``x[index] += y``."""
    following = node.next
    return following.target is operator.setitem and following.args == (
        *changed.meta.get("backpack_item", ()),
        node,
    )


def _without_flags(arguments: Any) -> Any:
    """Replace training flags by the mode, which they keep from now on."""
    return map_leaves(lambda x: bool(x) if isinstance(x, TrainingFlag) else x, arguments)
