"""Recording a forward pass with ``torch.fx``."""

from __future__ import annotations

import ast
import builtins
import dis
import linecache
import math
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from itertools import starmap
from pathlib import Path
from threading import RLock, get_ident
from traceback import FrameSummary
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function as AutogradFunction
from torch.fx import Graph, GraphModule, Proxy, Tracer
from torch.fx.node import Node
from torch.fx.proxy import Attribute, TraceError
from torch.nn import Module, ModuleDict, ModuleList, Sequential
from torch.nn.utils.parametrize import type_before_parametrizations

from backpack.convert.functional_layer import FunctionalLayer
from backpack.convert.held import Held, are_alike, constants_of, take_constants
from backpack.core.derivatives import derivatives_of
from backpack.core.record.generators import generator_states, have_changed, set_generators
from backpack.core.record.kinds import TENSOR, TENSORS, UNKNOWN, VALUE, Kind, TrainingFlag, kind
from backpack.core.record.lookup import kind_of_call, look_up, name_of
from backpack.core.record.module_state import PLAIN, SEQUENCES
from backpack.core.record.tape import has_rules
from backpack.custom_module.branching import Parallel
from backpack.custom_module.converted_module import MODES, MODULE_STATE, Branch
from backpack.custom_module.function_module import leaves_in
from backpack.custom_module.parameter_module import ParameterModule
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.rnn_layers import RNNLayers

# Modules that never are in the graph: the tracer records what their forward pass does.
CONTAINERS = (Sequential, ModuleList, ModuleDict, GraphModule, Parallel, ParameterModule, RNNLayers)
# Functions of torch that check the types of sizes and flags before a tracer may see them.
STRICT = (
    *("tensor", "zeros", "ones", "empty", "dropout", "alpha_dropout", "feature_dropout"),
    *("feature_alpha_dropout", "rrelu", "batch_norm", "instance_norm"),
)
# Functions of torch that are recorded even if their arguments are constants.
RANDOM = ("rand", "randn", "randint", "randperm", "normal")
# Functions that tell a mode, of which a graph has one branch only; and that switch one, or seed.
TOLD = (
    *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled"),
    *("is_autocast_cpu_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype"),
)
_TOLD = [getattr(torch, name) for name in TOLD]
REFUSED = (
    *((torch, name) for name in (*TOLD, "set_autocast_enabled")),
    *((torch._C, name) for name in ("_set_grad_enabled", "_InferenceMode")),
    *((owner, f) for owner in (torch, torch.random) for f in ("manual_seed", "set_rng_state")),
)
# Attributes of tensors that are one object for many tensors.
COMPARED = (
    *("dtype", "grad", "grad_fn", "layout", "requires_grad"),
    *("is_cuda", "is_leaf", "is_sparse"),
)
NO_MODES = (
    "torch.fx does not record torch.no_grad(), torch.autocast(), questions such as "
    "torch.is_grad_enabled(), and seeds inside of a forward pass. Use x.detach() for the first and "
    "x.to(dtype) for autocast."
)
# Steps of Python that compare a training mode, or a class, which no proxy can answer.
ASKS_MODE = re.compile(r"LOAD_ATTR 'training'\nLOAD_CONST (?:True|False)\nIS_OP ")
_TYPE = r"LOAD_GLOBAL 'type'\nLOAD_FAST\w* (?!'self')'\w+'\n(?:PRECALL .*\n)?CALL\w* .*\n"
_NAMED, _READ = r"LOAD_(?:GLOBAL|ATTR|DEREF|CONST) 'Tensor'\n", r"(?:LOAD|BUILD)_.*\n"
ASKS_CLASS = re.compile(
    rf"{_TYPE}(?:{_READ})*?{_NAMED}|{_NAMED}(?:{_TYPE}|{_READ})*(?:IS|COMPARE|CONTAINS)_OP |"
    r"(?:^|\n)MATCH_(?:CLASS|SEQUENCE|MAPPING) "
)
CLASS_ASKED = (
    "asks what something is by match, type(x) is Tensor, x.__class__ or singledispatch, which "
    "nothing can follow: write if isinstance(x, Tensor), or use extend(model, "
    "use_converter='record')."
)
CHANGING = (
    "The forward pass changes something that it depends on, such as a global variable, an "
    "attribute of a class, or an iterator. torch.fx does not record that: the graph would do the "
    "same each time."
)
# torch.fx, and we, replace functions for all threads: one forward pass at a time.
TRACING = RLock()
ADVICE = """\
What to do, one of:
 - write the forward pass without control flow that depends on tensors or on their shapes;
 - move the lines into a function at the top level of a file and decorate it with torch.fx.wrap: it
   is recorded as a whole, and its derivatives are computed automatically;
 - move the lines into a torch.nn.Module and register derivatives for its class
   (backpack.core.derivatives.register): the module is recorded as a whole;
 - write the model with modules only, and do without the converter;
 - record the functions while the model runs: extend(model, use_converter="record")."""


class ConversionError(ValueError):
    """The forward pass of a module cannot be converted."""


# --- Where we are in the user's code --------------------------------------------------------------


def _is_users(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").split(".")[0]
    return package not in ("torch", "backpack", "contextlib", "copy", "functools")


def _asks_for_user(frame: FrameType) -> bool:
    """Whether a frame that asks for a class, or an attribute, is the user's, or asks for it."""
    behind = frame.f_back if frame.f_code is torch.is_tensor.__code__ else frame
    return behind is not None and _is_users(behind)


def users_frame() -> FrameType | None:
    """Return the innermost frame that is neither ours nor one of torch."""
    frames = traceback.walk_stack(sys._getframe(1))
    return next((frame for frame, _ in frames if _is_users(frame)), None)


def place_of_call() -> str:
    """Return where the program has called a function that runs now, such as ``"net.py:12"``."""
    frame = users_frame()
    return "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _users_place() -> Branch | None:
    frame = users_frame()
    return None if frame is None else Branch(frame.f_code.co_filename, frame.f_lineno or 0)


def _users_line(trace: TracebackType | None) -> str:
    """Quote the innermost line of the user in a traceback."""
    users = [(frame.f_code, i) for frame, i in traceback.walk_tb(trace) if _is_users(frame)]
    lines = [FrameSummary(code.co_filename, i, code.co_name) for code, i in users[-1:]]
    return "".join(traceback.format_list(lines))


def place_of(node: Node, short: bool = True) -> str:
    """Return file and line of a node if they are known, such as ``"net.py:12"`` in short."""
    place = node.meta.get("backpack_place")
    if place is None:
        return ""
    return f"{Path(place.file).name if short else place.file}:{place.line}"


def _is_plain_assert(line: str) -> bool:
    """Whether a line is an assertion that fails if, and only if, its one condition is false."""
    try:
        (statement,) = ast.parse(line.strip()).body
    except (SyntaxError, ValueError):
        return False
    test = statement.test if isinstance(statement, ast.Assert) else None
    is_one = isinstance(test, ast.Call | ast.Name | ast.Attribute | ast.Subscript)
    return is_one or (isinstance(test, ast.Compare) and len(test.ops) == 1)


def _is_branching(frame: FrameType) -> bool:
    """Whether a frame asks for a truth itself, and no function or ``in`` that it has called."""
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    # comparisons ask before a branch since Python 3.13
    return name.startswith(("POP_JUMP", "TO_BOOL")) or (
        name == "COMPARE_OP" and sys.version_info >= (3, 13)
    )


# --- Tracing --------------------------------------------------------------------------------------


# While a forward pass is traced, the name stands for another function.
_GETATTR = getattr
# Attributes of what stands for a value; all others are those of the value.
_OF_PROXIES = {"tracer", "node", "_node", "root", "attr", "tensor"}


def _class_of(proxy: Any) -> type:
    """Return the class of a proxy; refuse a program, for which it is that of something else.

    ``singledispatch`` asks for it as well, and functions in C that look for tensors, which may.
    """
    frame = sys._getframe(1)
    is_asked = _is_users(frame) or frame.f_globals.get("__name__") == "functools"
    step = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if is_asked and step in ("LOAD_ATTR", "MATCH_CLASS"):
        raise TraceError(CLASS_ASKED)
    return type(proxy)


class _ClassAsked:
    __class__: Any = property(_class_of)


class _Proxy(_ClassAsked, Proxy):
    """Stands for a value; changes in place, such as ``x += y``, are recorded, too."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __getattr__(self, name: str) -> Attribute:
        if name in COMPARED and _is_compared():
            raise TraceError(
                f"compares what a tensor has ({', '.join(COMPARED)}) by identity (is), which "
                "nothing can follow: write ==."
            )
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what torch.fx keeps here; of a tensor, the graph would not do it."""
        if name not in _OF_PROXIES:
            raise TraceError(f"torch.fx does not record that an attribute ({name}) is set.")
        super().__setattr__(name, value)

    def __hash__(self) -> int:
        """Tell tensors apart; numbers and the like are not known yet."""
        _need_tensor(self, "a key")
        return id(self)

    def __str__(self) -> str:
        """Describe a tensor; in a formatted text, which may be a message, whatever it is."""
        _need_tensor(self, "a text")
        return repr(self)

    def __format__(self, how: str) -> str:
        return repr(self)


def _recording(function: Callable[..., Any]) -> Callable[[Proxy, Any], Proxy]:
    """Let an operator that changes its first operand be recorded as such."""
    return lambda self, x: self.tracer.create_proxy("call_function", function, (self, x), {})


def _refusing(name: str) -> Callable[[Proxy], Any]:
    """Let a function of Python that needs a value fail as all else does."""

    def method(self: Proxy, *args: Any) -> Any:
        raise TraceError(f"{name}() of a value that is not known while tracing.")

    return method


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"):
    setattr(_Proxy, f"__{_name}__", _recording(getattr(operator, _name)))
for _name in ("iand", "ior", "ixor", "ilshift", "irshift"):
    setattr(_Proxy, f"__{_name}__", _recording(getattr(operator, _name)))
for _name in ("float", "int", "complex", "index", "len", "round", "copy", "deepcopy", "dir"):
    setattr(_Proxy, f"__{_name}__", _refusing(_name))


class _Attribute(Attribute, _Proxy):
    """An attribute, such as the shape; or a method, which is called next."""

    @property
    def node(self) -> Node:  # type: ignore[override]  # as in torch.fx
        """The node, made when it is first read, of the function that is ``getattr`` elsewhere."""
        if self._node is None:
            arguments = (self.root, self.attr)
            self._node = self.tracer.create_proxy("call_function", _GETATTR, arguments, {}).node
        return self._node


class _StateProxy(_Proxy):
    """A parameter, a buffer or a constant: its shape is known while tracing."""

    def __init__(self, node: Node, tracer: Tracer, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        if name in vars(self.tensor) and isinstance(self.tensor, nn.Parameter):
            raise TraceError(f"reads {name!r} of a parameter, which its values do not have.")
        is_known = name in ("shape", "ndim", "size", "dim", "numel")
        return getattr(self.tensor, name) if is_known else super().__getattr__(name)


def kind_of_output(module: Module, node: Node) -> Kind:
    """Return what is known about the output of a module."""
    first = kind(node.args[0]) if node.args else UNKNOWN
    if isinstance(module, nn.Identity):
        return first
    if isinstance(module, nn.RNNBase):
        return (TENSOR, (TENSOR, TENSOR) if isinstance(module, nn.LSTM) else TENSOR)
    if isinstance(module, ReduceTuple):
        return first[module.index] if isinstance(first, tuple) else UNKNOWN
    is_pair = isinstance(module, (nn.MultiheadAttention, nn.LSTMCell))
    if is_pair or getattr(module, "return_indices", False):
        return (TENSOR, TENSOR)
    is_known = type(module).__module__.startswith("torch.nn.modules")
    return TENSOR if is_known and not isinstance(module, nn.AdaptiveLogSoftmaxWithLoss) else UNKNOWN


def _need_tensor(proxy: Proxy, use: str) -> None:
    """Refuse to treat what is no tensor as something that depends on its value."""
    if kind(proxy.node) == VALUE:
        raise TraceError(
            f"A number, shape or the like is {use}, but it is not known while tracing."
        )


def _assumed_class(proxy: Proxy) -> type:
    """Return the class of what a proxy stands for, where it is not known: a tensor."""
    what = kind(proxy.node)
    if what == TENSORS or isinstance(what, tuple):
        return tuple
    return type(proxy.tensor) if isinstance(proxy, _StateProxy) else Tensor


def _known_class(proxy: Proxy, use: str) -> type:
    """Return the class of what a proxy stands for: tensors, if it is no value and not unknown."""
    _need_tensor(proxy, use)
    node = proxy.node
    if kind(node) == UNKNOWN and node.op.startswith("call_"):
        function = None if node.op == "call_module" else look_up(node)
        if function is None or function.row is None:
            what = "a module" if function is None else name_of(function)
            raise TraceError(f"The class of what {what} returns is not known while tracing.")
    return _assumed_class(proxy)


def _is_instance(proxy: Proxy, classes: Any) -> bool:
    """Say whether a proxy stands for an instance of classes: of tensors, if it is no value."""
    if kind(proxy.node) == VALUE and classes is Tensor:
        return False
    return issubclass(_known_class(proxy, "asked for its class"), classes)


def _has_attribute(proxy: Proxy, name: str) -> bool:
    """Say whether what a proxy stands for has an attribute; others may be called with objects."""
    if isinstance(proxy, _StateProxy):
        return hasattr(proxy.tensor, name)
    of_class = _known_class(proxy, "asked for an attribute").__mro__
    has_one = any(name in vars(one) for one in of_class)  # none of a class itself
    if not has_one and proxy.node.op == "placeholder":
        raise TraceError(f"Whether an input has {name!r} is not known while tracing.")
    return has_one


def _get_attribute(proxy: Proxy, name: str, *default: Any) -> Any:
    """Return an attribute of what a proxy stands for, or the default if it has none."""
    if name == "__class__":
        raise TraceError(CLASS_ASKED)
    is_there = not default or _has_attribute(proxy, name)
    return getattr(proxy, name) if is_there else default[0]


def _is_callable(proxy: Proxy) -> bool:
    """Say whether what a proxy stands for can be called: methods of tensors."""
    if isinstance(proxy, _Attribute):
        of_class = _known_class(proxy.root, "asked for an attribute")
        return callable(getattr(of_class, proxy.attr, None))
    return _is_instance(proxy, Callable)


def _codes(kind: type[Module]) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """List the code of ``forward``, and of methods and functions by the names it uses.

    With what the names of each file stand for.
    """
    waiting: list[Any] = [kind.forward]
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
        inner = [code] if isinstance(code, CodeType) and not _is_of_torch(function) else []
        while inner:
            code = inner.pop()
            if code not in seen:
                seen.add(code)
                yield code, names
                inner += (one for one in code.co_consts if isinstance(one, CodeType))
                waiting += (getattr(kind, n, names.get(n)) for n in code.co_names)


def _is_of_torch(function: Any) -> bool:
    return str(function.__module__).split(".")[0] in ("torch", "backpack")


def _hidden_question(code: CodeType, names: dict[str, Any]) -> str:
    """Describe what a function asks in a way in which neither proxies nor flags can answer.

    Functions that its file has imported by name are not those that stand in while tracing.
    """
    for name in code.co_names:
        if any(names.get(name) is function for function in _TOLD):
            return f"asks {name}(). {NO_MODES}"
    steps = "".join(f"{step.opname} {step.argval!r}\n" for step in dis.get_instructions(code))
    if ASKS_MODE.search(steps):
        return (
            "compares its training mode by identity (self.training is True), which nothing can "
            "follow: write if self.training."
        )
    if ASKS_CLASS.search(steps):
        return CLASS_ASKED
    return ""


def _is_compared() -> bool:
    """Whether the steps of the user that come next compare by identity what is read now."""
    frame: Any = sys._getframe(1)
    while frame.f_globals is globals():
        frame = frame.f_back
    others = 0  # values that are read after it
    for step in dis.get_instructions(frame.f_code) if _is_users(frame) else ():
        if step.offset <= frame.f_lasti or step.opname == "EXTENDED_ARG":
            continue
        if step.opname == "IS_OP" or step.opname.endswith("NONE"):  # a jump
            return others < 2
        if not step.opname.startswith("LOAD"):
            return False
        others += step.opname.count("LOAD_") if step.opname != "LOAD_ATTR" else 0
    return False


class BackpackTracer(Tracer):
    """Records a forward pass; supported modules and those of ``torch.nn`` are recorded as a whole.

    Parameters and buffers are recorded where they are used, training flags as
    :class:`~backpack.core.record.kinds.TrainingFlag`.

    Attributes:
        branches: Where the forward pass asked whether it is in training mode.
        modes: Names of the parts whose training mode the graph depends on: the mode in which they
            took a branch; None if functions are given that of the model.
        options: Attributes that forward passes may read, of which the graph has the values: numbers
            and the like, by the names of their modules.
        constants: Tensors of the graph that belong to no module.
    """

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__((math,))
        self.branches: list[Branch] = []
        self.modes: dict[str, bool | None] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.constants: dict[str, Tensor] = {}
        self._culprit: tuple[str, Module] | None = None
        self._modes: tuple[bool, ...] = ()

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        """Return whether calls of a module are recorded as such; else what its forward does."""
        if isinstance(m, CONTAINERS):
            return has_rules(m)
        # parametrisations put a class of torch.nn.utils in front, and are functions of parameters
        path = type_before_parametrizations(m).__module__
        is_of_torch = path.startswith("torch.nn") and not path.startswith("torch.nn.utils")
        return (
            is_of_torch
            or path.startswith("backpack.custom_module")
            or isinstance(m, (FunctionalLayer, torch.jit.ScriptModule))
            or derivatives_of(m) is not None
            or has_rules(m)
        )

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> Graph:
        """Record the forward pass of a module, which gets the constants of the graph as attributes.

        Raises:
            ConversionError: If the forward pass cannot be recorded.
        """
        if isinstance(root, Module) and "forward" in vars(root):
            raise ConversionError(
                f"This {type(root).__name__} has a forward function of its own, other than that of "
                "its class. torch.fx does not see it: put it into a class. If it is from "
                "torch.compile, convert the module before it is compiled."
            )
        as_they_are: tuple[str, ...] = ()  # with all that is in them
        modules = root.named_modules(remove_duplicate=False) if isinstance(root, Module) else ()
        known: dict[type[Module], set[str]] = {}  # names that are used, by classes
        for name, m in modules:
            if name and self.is_leaf_module(m, name):
                as_they_are += (f"{name}.",)
            if f"{name}.".startswith(as_they_are):
                continue
            if any(map(_is_of_export, m._forward_pre_hooks.values())):
                raise ConversionError(
                    f"{name or type(m).__name__} was made by torch.export: it calls operators of "
                    "torch.ops, behind checks of its inputs that no graph has. Record functions, "
                    "extend(model, use_converter='record'), or convert what was exported."
                )
            if type(m) not in known:
                codes = list(_codes(type(m)))
                for question in filter(None, starmap(_hidden_question, codes)):
                    raise ConversionError(f"The forward of {type(m).__name__} {question}")
                known[type(m)] = {name for code, _ in codes for name in code.co_names}
            read = {n: getattr_static(m, n, m) for n in known[type(m)]}
            self.options[name] = {n: x for n, x in read.items() if _is_option(n, x)}
        with TRACING:
            return self._trace(root, concrete_args)

    def _trace(self, root: Any, concrete_args: dict[str, Any] | None) -> Graph:
        self._modes, before = _modes(), generator_states()
        refused: list[TraceError] = []
        try:
            first = self._once(root, concrete_args, refused)
            constants = take_constants(self.root)
            set_generators(before)
            self.branches.clear()
            graph = self._once(root, concrete_args, refused)
            if _steps(graph) != _steps(first) or not are_alike(constants, constants_of(self.root)):
                raise TraceError(CHANGING)
        except Exception as error:
            raise ConversionError(self._explain(root, error)) from error
        finally:
            refused.clear()  # their tracebacks lead here
            is_random = have_changed(before, generator_states())
            if is_random:
                set_generators(before)
        for node in graph.nodes:
            flags = leaves_in((node.args, node.kwargs), TrainingFlag)
            self.modes |= dict.fromkeys(flag.owner for flag in flags)
        self.modes.pop("", None)
        for name, mode in self.modes.items():
            if mode is None and root.get_submodule(name).training != root.training:
                raise ConversionError(
                    f"{name} of {type(root).__name__} depends on its training mode, which is "
                    f"another one than that of the model. {MODES}"
                )
        if is_random:
            places = {place_of(n) for n in graph.nodes if "_tensor_constant" in str(n.target)}
            raise ConversionError(
                f"The forward pass of {type(root).__name__} draws random numbers in a way that "
                "torch.fx does not record: they would be the same in each forward pass. Constants "
                f"are used at: {', '.join(sorted(places)) or 'unknown'}. Use torch.randn_like(x), "
                "torch.rand_like(x), torch.bernoulli(x) or a dropout, and not those of Python."
            )
        return graph

    def _once(
        self, root: Any, concrete_args: dict[str, Any] | None, refused: list[TraceError]
    ) -> Graph:
        with self._flags(root), self._patches(refused):
            graph = super().trace(root, concrete_args)
        if refused:  # and caught by the program, which has gone another way
            raise refused[0]
        return graph

    def call_module(
        self,
        m: Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record the call of a module, or what it does; remember which one fails."""
        if isinstance(m, ParameterModule):
            return m.parameter
        try:
            result: Any = super().call_module(m, forward, args, kwargs)
        except Exception:
            if self._culprit is None and m in (self.submodule_paths or {}):
                self._culprit = (self.path_of_module(m), m)
            raise
        if isinstance(m, nn.MultiheadAttention) and not isinstance(result, tuple):
            needs_weights = args[4] if len(args) > 4 else kwargs.get("need_weights", True)
            if needs_weights is False:  # the forward may ask whether there are some
                return result[0], None
        return result

    def create_arg(self, a: Any) -> Any:
        """Return what stands for an argument; refuse containers that the graph would not have."""
        if isinstance(a, TrainingFlag):
            return a
        plain = next((c for c in (dict, list, tuple) if isinstance(a, c)), type(a))
        if type(a) not in (plain, torch.Size) and not hasattr(type(a), "_fields"):
            name = type(a).__name__
            raise TraceError(f"torch.fx would replace this {name} by a plain {plain.__name__}.")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        """Record a node and where it comes from; refuse one for which modes were switched."""
        if _modes() != self._modes:
            raise TraceError(NO_MODES)
        node = super().create_node(*args, **kwargs)
        if getattr(node.target, "__module__", None) == "torch.autograd":
            raise TraceError("Derivatives depend on the graph of autograd, which is not recorded.")
        node.meta["backpack_place"] = _users_place()
        if node.op in ("call_function", "call_method"):
            node.meta["backpack_kind"] = kind_of_call(node)
        elif node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            node.meta["backpack_kind"] = kind_of_output(module, node)
        return node

    def proxy(self, node: Node) -> Proxy:
        """Return what stands for a node while tracing."""
        if node.op == "get_attr":
            *path, name = str(node.target).split(".")
            owner: Any = self.root
            for child in path:
                owner = owner._modules[child]
            for state in (owner._parameters, owner._buffers, vars(owner)):
                if isinstance(state.get(name), Tensor):
                    return _StateProxy(node, self, state[name])
        return _Proxy(node, self)

    def to_bool(self, obj: Proxy) -> bool:
        """Record an ``assert`` of the user; any other control flow is an error."""
        frame = users_frame()
        if frame is None:
            return super().to_bool(obj)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
        if not (_is_plain_assert(line) and _is_branching(frame)):
            return super().to_bool(obj)
        self.create_proxy("call_function", torch._assert, (obj, line.strip()), {})
        return True

    @contextmanager
    def _flags(self, root: Any) -> Iterator[None]:
        """Let modules have flags as ``training``; undo and refuse what changes in modules."""

        def asked(name: str, mode: bool) -> None:
            self.modes.setdefault(name, mode)
            place = _users_place()
            if place is not None:
                self.branches.append(place)

        paths = {m: path for path, m in root.named_modules()} if isinstance(root, Module) else {}
        held, flags = Held(paths), {}
        for module, path in paths.items():
            mode = module.training
            flags[module] = TrainingFlag(mode, path, partial(asked, path, mode))
            vars(module)["training"] = flags[module]
        changed: list[str] = []
        try:
            yield
        finally:
            for module, flag in flags.items():
                if vars(module).get("training") is flag:
                    vars(module)["training"] = flag.mode
            changed += held.put_back()
        if changed:
            raise TraceError(
                f"The forward pass changes the attribute {', '.join(changed)}, which torch.fx does "
                "not record: it would have the same value in each forward pass. Buffers can be "
                "changed in place (self.count.add_(1))."
            )

    @contextmanager
    def _patches(self, refused: list[TraceError]) -> Iterator[None]:
        """Record calls that torch does not show to a tracer, and refuse what no graph does.

        Tensors of a size that is not known yet, training flags of functions of torch, random
        tensors, autograd functions of the user. And let ``isinstance(x, Tensor)`` and
        ``torch.is_tensor(x)`` be true, ``hasattr(x, name)`` if tensors have such an attribute (else
        ``getattr`` returns its default), and ``callable(x)`` for methods. List errors in
        ``refused``, since the program may catch them.
        """
        thread = get_ident()  # others have the functions as they were
        asked: dict[str, Callable[..., Any]] = {
            "isinstance": _is_instance,
            "callable": _is_callable,
            "hasattr": _has_attribute,
            "getattr": _get_attribute,
        }
        apply = vars(AutogradFunction)["apply"]

        def recorded(original: Callable[..., Any], is_random: bool = False) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                is_ours = is_random and get_ident() == thread
                if is_ours or leaves_in((args, kwargs), Proxy):
                    return self.create_proxy("call_function", original, args, kwargs)
                return original(*args, **kwargs)

            return wrapper

        def recorded_apply(cls: type[AutogradFunction], *args: Any, **kwargs: Any) -> Any:
            return recorded(apply.__get__(None, cls))(*args, **kwargs)

        def answered(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(value: Any, *what: Any) -> Any:
                if type(value) is TrainingFlag and _is_users(sys._getframe(1)):
                    value = value.mode
                known = type(value) in (_Proxy, _Attribute, _StateProxy) and _asks_for_user(
                    sys._getframe(1)
                )
                return (asked[name] if known else original)(value, *what)

            return wrapper

        def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if get_ident() != thread or (name in TOLD and not _is_users(sys._getframe(1))):
                    return original(*args, **kwargs)
                before = _modes()
                result = original(*args, **kwargs)
                if _modes() == before:  # else the next node tells
                    raise TraceError(NO_MODES)
                return result

            return wrapper

        def noted(error: TraceError, *args: Any) -> None:
            if get_ident() == thread:
                refused.append(error)

        patches: list[tuple[Any, str, Any]] = [
            *((torch, name, recorded(getattr(torch, name))) for name in STRICT),
            *((torch, name, recorded(getattr(torch, name), True)) for name in RANDOM),
            *((owner, name, refusing(name, getattr(owner, name))) for owner, name in REFUSED),
            *((builtins, name, answered(name, getattr(builtins, name))) for name in asked),
            (AutogradFunction, "apply", classmethod(recorded_apply)),
            (TraceError, "__init__", noted),
        ]
        originals = [(owner, name, getattr_static(owner, name)) for owner, name, _ in patches]
        try:
            for patch in patches:
                setattr(*patch)
            yield
        finally:
            for original in originals:
                setattr(*original)

    def _explain(self, root: Any, error: Exception) -> str:
        where = type(root).__name__
        if self._culprit is not None:
            path, module = self._culprit
            where += f" (in its child {path!r}, {type(module).__name__})"
        # not extract_tb: code that torch.fx has patched may have no columns
        *_, last = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__))
        message = str(error) or f"{last.line} ({last.filename}:{last.lineno})"
        return (
            f"The forward pass of {where} cannot be converted:\n{_users_line(error.__traceback__)}"
            f"  {type(error).__name__}: {message}\n{ADVICE}"
        )


def _modes() -> tuple[bool, ...]:
    autocast = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]
    return torch.is_grad_enabled(), *autocast


def _is_of_export(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.export.")


def _is_option(name: str, value: Any) -> bool:
    """Whether an attribute is a number, a flag or the like, or a sequence of them."""
    is_plain = type(value) in PLAIN or (
        type(value) in SEQUENCES and PLAIN.issuperset(map(type, value))
    )
    return is_plain and name not in MODULE_STATE and not hasattr(Module, name)


def _steps(graph: Graph) -> list[tuple[Any, ...]]:
    return [(n.op, n.name, n.target, repr((n.args, n.kwargs))) for n in graph.nodes]
