"""What the converter returns."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Set
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.fx import Graph, GraphModule
from torch.fx.node import Node
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from backpack.custom_module.function_module import Slot, map_leaves
from backpack.custom_module.parameter_module import ParameterModule
from backpack.custom_module.rnn_layers import RNNLayers
from backpack.utils.hooks import is_of_library
from backpack.utils.warning import warn

# What every module has: parameters, buffers, children, hooks.
MODULE_STATE = frozenset(vars(Module()))


ADVICE = (  # about changes that the graph does not follow
    "Change the model before it is converted, or record its functions: "
    'extend(model, use_converter="record").'
)
MODES = (
    "A graph has one mode for all of its functions: record them, "
    'extend(model, use_converter="record").'
)
NOT_OF_ITS_CLASS = (
    "extend(model, use_converter=True) has rewritten the model, which has kept its parameters, "
    "layers and attributes, but not the methods and properties of its class. "
    'extend(model, use_converter="record") leaves a model as it is.'
)


class Conversion(NamedTuple):
    """One row of the report."""

    name: str  # of the module that is called
    source: str  # what it was before
    result: str  # what it is now
    line: str  # where it is called, if known


class Branch(NamedTuple):
    """A place where the forward pass asks whether it is in training mode."""

    file: str
    line: int


class Part(NamedTuple):
    """A module that the graph looks into, as it was when the model was converted."""

    name: str
    parent: Module | None  # None for the model
    module: Module
    children: list[str]  # those that it calls by itself
    hooks: list[int] | None  # those of others, by number; None if the graph calls the module, too
    reads_mode: bool = False  # whether its functions depend on its training mode
    branch: bool | None = None  # the mode in which they took one; None if given that of the model


class ConvertedModule(GraphModule):
    """A graph of module calls, with all parameters, buffers and children of the original.

    Copies and pickles have everything, also what the graph does not call.

    Attributes:
        conversions: What was converted to what.
        branches: Where the forward pass of the original depended on the training mode.
    """

    conversions: tuple[Conversion, ...]
    branches: tuple[Branch, ...]
    _parts: list[Part]
    _called: dict[str, tuple[Module | None, Module]]  # layers, and what they are children of
    _options: list[tuple[Module | None, str, Any]]  # of parts: attributes that the graph has read

    def __init__(
        self,
        root: Module,
        graph: Graph,
        class_name: str,
        conversions: tuple[Conversion, ...] = (),
        branches: tuple[Branch, ...] = (),
        modes: Mapping[str, bool | None] = MappingProxyType({}),
        options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ):
        super().__init__(root, graph, class_name)
        for name, value in vars(root).items():
            if name in MODULE_STATE or not hasattr(self, name):
                vars(self)[name] = value
        vars(self).update(conversions=conversions, branches=branches)
        vars(self)["_traced_in_training"] = root.training
        for module in self.modules():
            if isinstance(module, ParameterModule):
                module.move_to(root, self)
            elif isinstance(module, RNNLayers):
                module.own_layers()
        called = {str(node.target) for node in self.graph.nodes if node.op == "call_module"}
        layers = {name: (self._parent(name), self.get_submodule(name)) for name in called}
        vars(self).update(_parts=[*self._find_parts(called, modes)], _called=layers)
        vars(self)["_options"] = [
            (self.get_submodule(part) if part else None, name, copy.copy(value))
            for part, values in options.items()
            for name, value in values.items()
            if part or getattr(self, name, value) is value  # not one of a graph of the same name
        ]

    def _find_parts(self, called: Set[str], modes: Mapping[str, bool | None]) -> Iterator[Part]:
        """Find what the graph does not call, but whose children or parameters it uses."""
        above = {name for t in called for name in accumulate(t.split(".")[:-1], "{}.{}".format)}
        owners = {module.owner for module in self.modules() if isinstance(module, ParameterModule)}
        for name, module in self.named_modules(remove_duplicate=False):
            if name in above or name in modes or (name and module in owners):
                hooks = None if name in called else _hooks(module)
                parent, children = self._parent(name), _children(module)
                mode = name in modes, modes.get(name)
                yield Part(name, parent, module, children, hooks, *mode)

    def _parent(self, name: str) -> Module | None:
        above = name.rpartition(".")[0]
        return self.get_submodule(above) if above else None  # no reference to itself

    def check_parts(self) -> None:
        """Refuse changes of parts that the graph does not follow; warn of new hooks and layers."""
        for owner, name, value in self._options:
            now = getattr(self if owner is None else owner, name, value)
            is_same = now is value or (type(now) is type(value) and now == value)
            if not is_same and repr(now) != repr(value):  # as those of nan are, which differ
                kind = type(self if owner is None else owner).__name__
                raise RuntimeError(
                    f"{name!r} of {kind} was {value!r} when the model was converted, and is "
                    f"{now!r} now, which its graph does not follow. {ADVICE}"
                )
        for i, part in enumerate(self._parts):
            name, module = part.name, part.module
            owner = self if part.parent is None else part.parent
            is_there = owner._modules.get(name.rpartition(".")[-1]) is module
            if not is_there or part.children != _children(module):
                raise RuntimeError(
                    f"{name} of {type(self).__name__} was replaced, or has other children, since "
                    f"the model was converted, and its graph does not follow that. {ADVICE}"
                )
            known = self.training if part.branch is None else part.branch
            # of branches of a model that was switched as a whole, train() has told
            has_told = part.branch is not None and self.training != self._traced_in_training
            if part.reads_mode and module.training != known and not has_told:
                raise RuntimeError(
                    f"{name} of {type(self).__name__} has training={module.training}, on which its "
                    f"functions depend, and they are those of training={known}. {MODES}"
                )
            if part.hooks is not None and part.hooks != _hooks(module):
                self._parts[i] = part._replace(hooks=_hooks(module))
                warn(
                    f"The hooks of {name} of {type(self).__name__} have changed since the model "
                    f"was converted (as by fully_shard), and its graph does not call them. {ADVICE}"
                )
        for name, (parent, module) in self._called.items():
            owner = self if parent is None else parent
            layer = owner._modules.get(name.rpartition(".")[-1])
            if layer is not module and layer is not None:
                self._called[name] = parent, layer
                own = [each for each in layer.modules() if not vars(each).get("_backpack_extend")]
                if any(p.requires_grad for each in own for p in each.parameters(recurse=False)):
                    warn(
                        f"{name} of {type(self).__name__} was replaced by a {type(layer).__name__} "
                        "that is not extended (or has layers that are not): their parameters have "
                        "no quantities. Extend the new layer."
                    )

    def train(self, mode: bool = True) -> ConvertedModule:
        """Set the training mode, with a warning if the graph belongs to the other one."""
        if self.branches and mode != self._traced_in_training:
            places = ", ".join(f"{file}:{line}" for file, line in dict.fromkeys(self.branches))
            warn(
                f"The forward pass of {type(self).__name__} branches on its training mode "
                f"({places}). It was converted with training={self._traced_in_training} and keeps "
                "that branch. To follow the mode, record the original model instead: extend(model, "
                'use_converter="record").',
            )
        return super().train(mode)  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        """Find a layer (at no further call: forward passes do that), a parameter or a buffer."""
        layers = vars(self).get("_modules", {})
        if name in layers:
            return layers[name]
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            told = f"{error}. {NOT_OF_ITS_CLASS}"
            raise AttributeError(told, name=name, obj=self) from None

    def __getitem__(self, index: Any) -> Any:
        """Say that this is no container any more.

        Raises:
            TypeError: Always.
        """
        told = f"{type(self).__name__!r} object is not subscriptable. {NOT_OF_ITS_CLASS}"
        raise TypeError(told)

    def report(self) -> str:
        """Return what was converted to what, as a table."""
        header = Conversion("module", "was", "is", "called at")
        shown = ([s if len(s) <= 70 else f"{s[:69]}…" for s in row] for row in self.conversions)
        rows = [header, *(Conversion(*row) for row in shown)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(line.rstrip() for line in lines)

    def __getstate__(self) -> dict[str, Any]:
        """Replace the graph by a list of its nodes, where slots stand for them in arguments."""
        slots = {node: Slot(i) for i, node in enumerate(self.graph.nodes)}

        def slot(leaf: Any) -> Any:
            return slots[leaf] if isinstance(leaf, Node) else leaf

        nodes = [
            (node.op, node.target, *map_leaves(slot, (node.args, dict(node.kwargs))), node.name)
            for node in self.graph.nodes
        ]
        state = {name: value for name, value in vars(self).items() if name != "_graph"}
        return {**state, "_nodes": nodes, "_class_name": type(self).__name__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        graph = Graph()
        nodes: list[Node] = []

        def found(leaf: Any) -> Any:
            return nodes[leaf.index] if isinstance(leaf, Slot) else leaf

        for op, target, args, kwargs, name in state.pop("_nodes"):
            args, kwargs = map_leaves(found, args), map_leaves(found, kwargs)
            nodes.append(graph.create_node(op, target, args, kwargs, name))
        type(self).__name__ = state.pop("_class_name")
        Module.__setstate__(self, state)
        self.graph = graph

    # GraphModule has its own ways for all of these, and they lose what the graph does not call.

    def __reduce__(self) -> Any:
        """Pickle in two steps: an empty module, then its state, which may refer to the module."""
        return _empty, (), self.__getstate__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as :meth:`__reduce__` says."""
        return self.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedModule:
        """Copy everything."""
        memo[id(self)] = result = _empty()
        result.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return result

    def __copy__(self) -> ConvertedModule:
        """Copy the module, not what it holds."""
        result = _empty()
        result.__setstate__(self.__getstate__())
        return result


def _children(module: Module) -> list[str]:
    """Name the children that a module calls by itself."""
    is_list = isinstance(module, (Sequential, ModuleList, ModuleDict))
    return list(module._modules) if is_list else []


def _hooks(module: Module) -> list[int]:
    """Number the hooks that are not ours."""
    hooks: Any = (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
    return [key for key, hook in hooks if not is_of_library(hook)]


def _empty() -> ConvertedModule:
    return ConvertedModule.__new__(ConvertedModule)
