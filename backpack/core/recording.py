"""Functions in any ``forward``, recorded while it runs: no tracing, no rewriting.

A :class:`torch.overrides.TorchFunctionMode` sees every function of tensors outside of leaf modules.
It calls a module in its place, the one that the converter's table names, and that call is recorded
like any other.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from backpack.context import CTX, disable
from backpack.core.backward_pass import BackwardPass
from backpack.core.hooks import extend_one
from backpack.core.registry import derivatives_of, is_leaf
from backpack.core.tape import CLASSES_WITH_RULES, RECORDERS, origin, preserve, record
from backpack.custom_module.conversions import (
    ATTRIBUTES_TENSOR,
    FILLS,
    INDEX,
    NOT_IN_PLACE,
    VALUE,
    Apply,
    Function,
    Row,
    change_clone,
    name_of,
    set_item,
)
from backpack.custom_module.function_module import FunctionModule, Slot, map_leaves
from backpack.custom_module.parameter_module import (
    ParameterModule,
    is_constant,
    mark_constant,
)

Prepare = Callable[[Module, str], None]

# Options that are equal if they look alike.
PLAIN = (
    *(int, float, complex, str, type(None), type(...), Slot),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# Attributes of tensors that lead out of the graph.
DETACHED = {"data", "grad"}
# Of the modules for functions, the last ones used are kept: options may change in every run.
MAX_APPLICATIONS = 512
# What is not worth a mention as the place of a call.
LIBRARIES = (str(Path(str(torch.__file__)).parent), str(Path(__file__).parents[1]))


class Functions:
    """The modules that stand for the functions of one model, made when they are first needed.

    Copies and pickles of the model start with none.
    """

    def __init__(self, cls: type[Module]) -> None:
        """Start with none.

        Args:
            cls: The class of the model, which has to be guarded where a pickle is loaded, too.
        """
        _guard(cls)
        self.cls = cls
        self.applications: OrderedDict[Any, Apply] = OrderedDict()
        self.readers: dict[int, ParameterModule] = {}

    def keep(self, key: Any, what: Apply) -> None:
        """Note what was used last, and drop what has not been used for longest."""
        self.applications[key] = what
        self.applications.move_to_end(key)
        if len(self.applications) > MAX_APPLICATIONS:
            self.applications.popitem(last=False)

    def reader(self, p: Parameter, owner: Module, name: str, prefix: str) -> ParameterModule:
        """Return the module that reads ``owner.name``, which is ``p`` now: one for each place."""
        for key, reader in self.readers.items():
            if reader.owner is owner and reader.name == name:
                del self.readers[key]  # of a parameter that was there before
                break
        else:
            reader = ParameterModule(owner, name)
            extend_one(reader, f"{prefix}.{name}" if prefix else name)
        self.readers[id(p)] = reader
        return reader

    def __reduce__(self) -> Any:
        """Copy and pickle as an empty table."""
        return Functions, (self.cls,)


class Recorder(TorchFunctionMode):
    """Records the functions of one run of a model's ``forward``.

    Attributes:
        silent: How many leaf modules are running: their functions belong to them.
        opened: The leaf modules that are running whose functions are recorded instead.
    """

    def __init__(self, root: Module):
        """Take note of what does not depend on the data.

        Args:
            root: The model.
        """
        super().__init__()
        self.root = root
        self.functions: Functions = vars(root)["_backpack_functions"]
        self.silent = 0
        self.opened: list[Module] = []
        self.views: dict[int, Tensor] = {}
        self.parameters = {id(p) for p in root.parameters()}
        for tensor in (*root.buffers(), *root.parameters()):
            mark_constant(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, as a module if a gradient flows through it."""
        kwargs = kwargs or {}
        if self.silent or not disable.should_store_io() or _in_transform():
            return func(*args, **kwargs)
        if func is Tensor.backward or getattr(func, "__module__", None) == "torch.autograd":
            with disable():  # this is no backward pass for extensions
                return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            result = func(*args, **kwargs)
            constant = not any(map(self.has_samples, tensors))
            return tree_map(partial(_note, constant), result)
        function = resolve(func)
        if function is None or (function.row is not None and function.row.result == VALUE):
            return func(*args, **kwargs)
        args, kwargs = self.read_parameters(args, kwargs)
        if function.in_place or _changes_input(func, args, kwargs):
            return self._in_place(func, function, args, kwargs)
        kwargs.pop("inplace", None)  # it is False, and modules need not know it
        if function.row is not None and function.row.is_view and not _is_random(function.row):
            result = func(*args, **kwargs)
            mark = origin(result)
            if result is args[0] or (mark is not None and mark.is_output):
                return result  # the same entries
        return self._run(*self._application(function, args, kwargs))

    def _in_place(self, func: Any, function: Function, args: Any, kwargs: Any) -> Any:
        """Change the first argument, and record the change as a function of its former value."""
        before = args[0].clone()
        preserve(args[0], before)
        result = func(*args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
        what, tensors = self._application(function, (before, *args[1:]), kwargs, at_once=True)
        inputs = self._inputs(what, tensors)
        record(what.module, tuple(inputs), {}, args[0], BackwardPass.reached)
        return result

    def has_samples(self, x: Any) -> bool:
        """Return whether something may have samples."""
        if not isinstance(x, Tensor) or is_constant(x) or id(x) in self.parameters:
            return False
        mark = origin(x)
        return mark is None or mark.layout is None or mark.layout.is_batched

    # ------------------------------------------------------------------ parameters

    def read_parameters(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace the parameters among arguments by what modules return that read them."""
        self.silent += 1
        try:
            return tree_map(self._read, (tuple(args), dict(kwargs)))
        finally:
            self.silent -= 1

    def _read(self, x: Any) -> Any:
        """Read a parameter through a module, once in each run."""
        if not (isinstance(x, Parameter) and x.requires_grad):
            return x
        if id(x) not in self.views:
            reader = self.functions.readers.get(id(x))
            if reader is None or reader.parameter is not x:
                reader = self._new_reader(x)
            if reader is None:  # of another model
                return x
            self.views[id(x)] = reader()
        return self.views[id(x)]

    def _new_reader(self, x: Parameter) -> ParameterModule | None:
        for prefix, owner in self.root.named_modules():
            for name, p in owner._parameters.items():
                if p is x:
                    return self.functions.reader(x, owner, name, prefix)
        return None

    # ------------------------------------------------------------------ functions as modules

    def _application(
        self, function: Function, args: Any, kwargs: Any, at_once: bool = False
    ) -> tuple[Apply, list[Any]]:
        """Return the module for a call (the same if all options are), and its tensors.

        Args:
            function: What is called.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            at_once: Whether it has to be one module: what it returns is computed already.
        """
        tensors: list[Tensor] = []
        plain = True

        def slot(leaf: Any) -> Any:
            nonlocal plain
            if not isinstance(leaf, Tensor):
                plain = plain and isinstance(leaf, PLAIN)
                return leaf
            for i, tensor in enumerate(tensors):
                if tensor is leaf:
                    return Slot(i)
            tensors.append(leaf)
            return Slot(len(tensors) - 1)

        args, kwargs = map_leaves(slot, args), map_leaves(slot, kwargs)
        key = (function.target, at_once, repr((args, kwargs)))
        what = self.functions.applications.get(key) if plain else None
        if what is None:
            what = self._new_application(function, args, kwargs, len(tensors), at_once)
        if plain:
            self.functions.keep(key, what)
        return what, tensors

    def _new_application(
        self, function: Function, args: Any, kwargs: Any, count: int, at_once: bool
    ) -> Apply:
        what = None
        if function.row is not None and function.row.convert is not None:
            try:
                what = function.row.convert(*args, **kwargs)
            except TypeError:  # arguments that the module does not have
                what = None
        name = name_of(function)
        if what is None or (at_once and any(isinstance(x, Apply) for x in what.inputs)):
            target: Any = function.target
            if function.on_clone:
                args, target = (target, *args), change_clone
            what = Apply(FunctionModule(target, args, kwargs, name), tuple(map(Slot, range(count))))
        self._extend_all(what, f"{name} at {_place()}")
        return what

    def _extend_all(self, what: Apply, name: str) -> None:
        extend_one(what.module, name)
        for x in what.inputs:
            if isinstance(x, Apply):
                self._extend_all(x, name)

    def _run(self, what: Apply, tensors: Sequence[Tensor]) -> Any:
        return what.module(*self._inputs(what, tensors))

    def _inputs(self, what: Apply, tensors: Sequence[Tensor]) -> list[Any]:
        def value(x: Any) -> Any:
            if isinstance(x, Apply):
                return self._run(x, tensors)
            return tensors[x.index] if isinstance(x, Slot) else x

        return [value(x) for x in what.inputs]


# --- What is called -------------------------------------------------------------------------------


@cache
def resolve(func: Any) -> Function | None:
    """Find out what a function is, for the table of conversions.

    Args:
        func: What ``__torch_function__`` is given.

    Returns:
        The function without a side effect on its arguments, and its row; None for what no gradient
        flows through.
    """
    if func in INDEX.functions:
        return INDEX.functions[func]
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = func.__self__.__name__
        known = attribute in ATTRIBUTES_TENSOR - DETACHED
        return Function(func, Row(attribute, is_view=True)) if known else None
    if name == "__setitem__":
        return Function(set_item, None, in_place=True)
    if name.startswith("__"):
        plain = name.strip("_")
        same: Any = torch.rsub if plain == "rsub" else getattr(operator, plain, None)
        return INDEX.functions.get(same) or Function(func, INDEX.methods.get(plain))
    plain = name.rstrip("_")
    if plain == name or name in NOT_IN_PLACE:
        return Function(func, INDEX.methods.get(plain))
    method = None if name in FILLS else getattr(Tensor, plain, None)
    if method is None:
        return Function(name, None, in_place=True, on_clone=True)
    return Function(method, INDEX.methods.get(plain), in_place=True)


def _in_transform() -> bool:
    """Whether tensors belong to a transform of ``torch.func``, which hooks cannot follow."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _note(constant: bool, x: Any) -> Any:
    """Note whether a result that no gradient flows through depends on the data."""
    if isinstance(x, Tensor) and is_constant(x) != constant:
        x._backpack_constant = constant  # type: ignore[attr-defined]
    return x


def _is_random(row: Row) -> bool:
    """Whether a function must not run twice, lest the user's random numbers change."""
    return "dropout" in row.functions or "stochastic_depth" in row.functions


@cache
def _position_of_inplace(func: Any) -> int | None:
    try:
        return list(inspect.signature(func).parameters).index("inplace")
    except (ValueError, TypeError):
        return None


def _changes_input(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function such as ``F.relu`` was asked to work in place."""
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    position = _position_of_inplace(func)
    return position is not None and len(args) > position and bool(args[position])


def _place() -> str:
    """Return where a function was called."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


# --- Hooks ----------------------------------------------------------------------------------------

# Modules of torch that consist of modules and functions.
OPEN = (
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    *(cls for name, cls in vars(nn).items() if name == "LinearCrossEntropyLoss"),  # torch 2.15
)


def is_open(module: Module) -> bool:
    """Return whether the functions of a module have to be recorded for its derivatives to be known.

    Args:
        module: Any module.

    Returns:
        True for transformers of torch, and for modules that compute one of their parameters
        (parametrisations, weight normalisation, pruning).
    """
    rule = derivatives_of(module)
    if rule is None:
        return isinstance(module, OPEN)
    own = rule.own(module)
    return any(name not in own for name in rule.params)


def is_recorded(root: Module) -> bool:
    """Return whether the functions of a model are recorded already."""
    return _start in root._forward_pre_hooks.values()


def record_functions(root: Module) -> None:
    """Let every forward pass of a model record its functions.

    Args:
        root: The model. Its ``forward`` is left alone; hooks are added to it and its leaves.
    """
    for module in root.modules():
        if module is root or is_open(module) or not _is_leaf(module):
            vars(module)["_backpack_open"] = True
        elif _enter_leaf not in module._forward_pre_hooks.values():
            hook = module.register_forward_pre_hook(_enter_leaf, with_kwargs=True)
            CTX.add_hook_handle(hook)
            CTX.add_hook_handle(module.register_forward_hook(_leave_leaf, always_call=True))
    if not is_recorded(root):
        vars(root)["_backpack_functions"] = Functions(type(root))
        CTX.add_hook_handle(root.register_forward_pre_hook(_start, prepend=True))
        CTX.add_hook_handle(root.register_forward_hook(_stop, always_call=True))


def _is_leaf(module: Module) -> bool:
    return (
        is_leaf(module) or derivatives_of(module) is not None or type(module) in CLASSES_WITH_RULES
    )


def _recorder() -> Recorder | None:
    return next((one for one in reversed(RECORDERS) if one is not None), None)


def _start(module: Module, args: Any) -> None:
    outer = _recorder()
    inner = None if outer is not None or not torch.is_grad_enabled() else Recorder(module)
    RECORDERS.append(inner)
    if inner is not None:
        inner.__enter__()


def _stop(*_: Any) -> None:
    recorder = RECORDERS.pop()
    if recorder is not None:
        recorder.__exit__(None, None, None)


def _guard(cls: type[Module]) -> None:
    """End the recording after an interrupt, too: torch calls no hooks for it.

    The class is what copies and pickles of a model have in common.
    """
    call: Any = cls._call_impl
    if hasattr(call, "_backpack_guard"):
        return

    @wraps(call)
    def _call_impl(self: Module, *args: Any, **kwargs: Any) -> Any:
        if not is_recorded(self):
            return call(self, *args, **kwargs)
        depth = len(RECORDERS)
        try:
            return call(self, *args, **kwargs)
        finally:
            while len(RECORDERS) > depth:
                _stop()

    _call_impl._backpack_guard = True  # type: ignore[attr-defined]
    cls._call_impl = _call_impl  # type: ignore[method-assign]
    handle: Any = SimpleNamespace(remove=partial(setattr, cls, "_call_impl", call))
    CTX.add_hook_handle(handle)


def _enter_leaf(module: Module, args: Any, kwargs: Any) -> Any:
    recorder = _recorder()
    if recorder is None:
        return None
    if not recorder.silent and torch.is_grad_enabled() and disable.should_store_io():
        args, kwargs = recorder.read_parameters(args, kwargs)
        if _has_no_rule(module) and not any(map(recorder.has_samples, tree_leaves((args, kwargs)))):
            # as a whole, it would have to have samples
            vars(module)["_backpack_open"] = True
            recorder.opened.append(module)
            return args, kwargs
    recorder.silent += 1
    return args, kwargs


def _leave_leaf(module: Module, args: Any, output: Any) -> None:
    recorder = _recorder()
    if recorder is None:
        return
    if recorder.opened and recorder.opened[-1] is module:
        recorder.opened.pop()
        del vars(module)["_backpack_open"]
    else:
        recorder.silent -= 1


def _has_no_rule(module: Module) -> bool:
    return (
        derivatives_of(module) is None
        and type(module) not in CLASSES_WITH_RULES
        and not isinstance(module, torch.jit.ScriptModule)
    )
