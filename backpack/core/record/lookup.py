"""What is known about the target of a call: looked up in the table of functions.

Functions that change their input have a form here that leaves it alone.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node
from torch.nn import Module
from torch.nn import functional as F

from backpack.core.record.conversions import Apply
from backpack.core.record.data_notes import layout_of, running
from backpack.core.record.functions import TABLE, Row
from backpack.core.record.kinds import MOVES, TENSOR, TENSORS, UNKNOWN, VALUE, Kind, is_static, kind
from backpack.core.record.registry import derivatives_of
from backpack.custom_module.function_module import FunctionModule, Slot, leaves_in, map_leaves

NAMESPACES = {"F": F, "operator": operator, "builtins": builtins, "math": math}
# Methods that overwrite their tensor with random numbers.
DRAWS = {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
    *("random_", "uniform_"),
}
# Methods that overwrite their tensor, whatever the method without the underscore does.
FILLS = {"copy_", "fill_", "zero_", "fill_diagonal_", *DRAWS}
# Methods with an underscore that change no entries.
NOT_IN_PLACE = {"requires_grad_", "share_memory_"}


SYNONYMS = {
    **{"truediv": "div", "divide": "div", "true_divide": "div", "floordiv": "floor_divide"},
    **{"mod": "remainder", "multiply": "mul", "subtract": "sub", "negative": "neg"},
    **{"absolute": "abs", "clip": "clamp", "concat": "cat", "concatenate": "cat"},
    **{"swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim"},
}


@dataclass(frozen=True)
class Function:
    """What is known about the target of a call."""

    target: Callable[..., Any] | str  # or the name of the method, that does not change its input
    row: Row | None  # of the table, None for an unknown function
    in_place: bool = False  # whether the call changes its first argument
    on_clone: bool = False  # whether the target is an in-place method that needs a clone


# The table by function objects, by names of methods, and by names of other libraries.
FUNCTIONS: dict[Any, Function] = {}
METHODS: dict[str, Row] = {}
ELSEWHERE: dict[str, Row] = {}


def _add(name: str, row: Row) -> None:
    """Add one of the names of a row."""
    if name.startswith("."):
        METHODS[name[1:]] = row
    elif name == "math.*":
        FUNCTIONS.update({f: Function(f, row) for f in filter(callable, vars(math).values())})
    elif name.startswith("torchvision."):
        ELSEWHERE[name] = row
    else:
        first, *path, last = name.split(".")
        namespace: Any = NAMESPACES.get(first, torch)
        for part in path:
            namespace = getattr(namespace, part, None)
        function = getattr(namespace, last, None)
        in_place = f"i{last.rstrip('_')}" if namespace is operator else f"{last}_"
        changing = getattr(namespace, in_place, None)
        if function is not None:
            FUNCTIONS[function] = Function(function, row)
        if function is not None and changing is not None:
            FUNCTIONS[changing] = Function(function, row, in_place=True)


for _row in TABLE:
    for _name in _row.functions.split():
        _add(_name, _row)

# Operators that torch.export puts in the place of functions with the same arguments.
OPERATORS = (
    "linear.default matmul.default mm.default addmm.default conv1d.default conv2d.default "
    "conv3d.default conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input "
    "relu.default tanh.default sigmoid.default gelu.default silu.default"
)
for _name in OPERATORS.split():
    _packet, _overload = _name.split(".")
    _function = getattr(F, _packet, None) or getattr(torch, _packet)
    FUNCTIONS[getattr(getattr(torch.ops.aten, _packet), _overload)] = FUNCTIONS[_function]


def set_item(input: Tensor, index: Any, value: Any) -> Tensor:
    """Return a copy of ``input`` after ``input[index] = value``."""
    result = input.clone()
    result[index] = value
    return result


def change_clone(method: str, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return a clone of ``input`` after calling an in-place method of it."""
    return getattr(input.clone(), method)(*args, **kwargs)


def treatment(function: Callable[..., Any] | str) -> str | None:
    """Return what a function (or the method of that name) does with entries, if that is known."""
    if not isinstance(function, str) and getattr(function, "__name__", "") == "__get__":
        attribute = getattr(function, "__self__", None)
        is_transposed = getattr(attribute, "__name__", "") in ("T", "mT", "H", "mH")
        return MOVES if is_transposed else None
    row = row_of(function)
    return None if row is None else row.treatment


# shape, strides and first entry of a view, and strides of what it is a view of
Geometry = tuple[tuple[int, ...], tuple[int, ...], int | torch.SymInt, tuple[int, ...]]


def geometry_of(view: Tensor) -> Geometry:
    """Return which part of its base a view is."""
    base: Any = view._base
    start = view.storage_offset() - base.storage_offset()
    return tuple(view.shape), view.stride(), start, base.stride()


def part_of(base: Tensor, geometry: Geometry) -> Tensor:
    """Return a view of a tensor, or of a copy with the strides that the view was made for."""
    shape, strides, start, of_base = geometry
    if base.stride() != of_base:
        base = base.new_empty_strided(base.shape, of_base).copy_(base)
    return base.as_strided(shape, strides, base.storage_offset() + start)


def change_view(
    function: Callable[..., Tensor] | str,
    base: Tensor,
    geometry: Geometry,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Return a clone of ``base`` after a view of it has become ``function(view, …)``."""
    result = base.new_empty_strided(base.shape, geometry[-1]).copy_(base)
    view = part_of(result, geometry)
    if isinstance(function, str):  # a method that changes it
        getattr(view, function)(*args, **kwargs)
    else:
        view.copy_(function(view.clone(), *args, **kwargs))  # its derivative may read what it read
    return result


def _overwritten(method: str) -> Callable[..., Apply | None]:
    """Numbers are drawn, which do not depend on the tensor that they overwrite."""

    def convert(input: Any, *args: Any, **kwargs: Any) -> Apply | None:
        if not is_static(args, kwargs):
            return None
        detached = Apply(FunctionModule(torch.detach, [Slot(0)]), (input,))
        drawing = FunctionModule(change_clone, [method, Slot(0), *args], kwargs)
        copying = FunctionModule(change_clone, ["copy_", Slot(0), Slot(1)])
        return Apply(copying, (input, Apply(drawing, (detached,))))

    return convert


FUNCTIONS[operator.setitem] = Function(set_item, Row("operator.setitem"), in_place=True)
FILL = {name: Row(f".{name}") for name in FILLS - DRAWS} | {
    name: Row(f".{name}", _overwritten(name)) for name in DRAWS
}
COPY = Function("copy_", FILL["copy_"], in_place=True, on_clone=True)


def look_up(node: Node) -> Function:
    """Return the function that a node calls, without a side effect on its arguments."""
    target: Any = node.target
    if isinstance(target, str):
        return method_of(target)
    if target in FUNCTIONS:
        found = FUNCTIONS[target]
    else:
        qualified = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"
        found = Function(target, ELSEWHERE.get(qualified))
        if isinstance(target, type) and (hasattr(target, "_fields") or is_dataclass(target)):
            found = Function(target, Row("", result=UNKNOWN))
    if node.kwargs.get("inplace"):
        return Function(found.target, found.row, in_place=True)
    return found


def method_of(name: str) -> Function:
    """Return what is known of a method of tensors, without a side effect on its arguments."""
    if name.startswith("__"):  # such as __iadd__; the function takes no options, as add does
        same: Any = torch.rsub if name == "__rsub__" else getattr(operator, name, None)
        return FUNCTIONS.get(same) or Function(name, METHODS.get(name.strip("_")))
    plain = name.rstrip("_")
    if name in METHODS or plain == name or name in NOT_IN_PLACE:
        return Function(name, METHODS.get(name))
    if hasattr(Tensor, plain) and name not in FILLS:
        return Function(plain, METHODS.get(plain), in_place=True)
    return Function(name, FILL.get(name), in_place=True, on_clone=True)


def kind_of_call(node: Node) -> Kind:
    """Return what is known about the result of a function that a node calls."""
    function = look_up(node)
    if on_values(node):
        return VALUE
    if function.row is None:
        return _kind_by_schema(function.target)
    if not callable(function.row.result):
        return function.row.result
    try:
        return function.row.result(*node.args, **node.kwargs)
    except TypeError:  # unusual arguments
        return UNKNOWN


def _kind_by_schema(target: Callable[..., Any] | str) -> Kind:
    """Return what a function of torch that the table does not have returns, by its declaration."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if not isinstance(target, str | BuiltinFunctionType):
        return UNKNOWN
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    results = {tuple(str(r.type) for r in schema.returns) for schema in schemas} - {()}
    if not results or any("Tensor" not in kinds[0] for kinds in results):
        return UNKNOWN
    several = {len(kinds) > 1 or kinds != ("Tensor",) for kinds in results}
    return UNKNOWN if len(several) > 1 else TENSORS if several.pop() else TENSOR


def on_values(node: Node) -> bool:
    """Return whether a call is arithmetic with numbers, shapes and the like."""
    module = getattr(node.target, "__module__", None)
    is_plain = node.op == "call_method" or module in ("_operator", "math", "builtins")
    return is_plain and all(kind(a) == VALUE for a in (*node.args, *node.kwargs.values()))


def name_of(function: Function) -> str:
    """Return the short name of a function, one for all its synonyms."""
    target = function.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "function")
    return SYNONYMS.get(name, name).strip("_")


def application(
    function: Function, args: Any, kwargs: Any, tensors: Sequence[Tensor], at_once: bool = True
) -> Apply:
    """Return the module that stands for a call, whose tensors become slots.

    With ``at_once`` it has to be one module: what it returns is computed already.
    """
    slots = {id(x): Slot(i) for i, x in enumerate(tensors)}
    args, kwargs = map_leaves(lambda x: slots.get(id(x), x), (args, kwargs))
    what = converted(function.row, args, kwargs)
    if what is None or (at_once and what.is_nested):
        target: Any = function.target
        if function.on_clone:
            args, target = (target, *args), change_clone
        module = FunctionModule(target, args, kwargs, name_of(function))
        what = Apply(module, tuple(slots.values()))
    return what


def converted(row: Row | None, args: Any, kwargs: Any) -> Apply | None:
    """Return what a row makes of a call; None if no module fits its arguments."""
    if row is None or row.convert is None:
        return None
    try:
        return row.convert(*args, **kwargs)
    except (TypeError, ValueError, AssertionError):  # arguments that the module refuses
        return None


def row_of(target: Callable[..., Any] | str) -> Row | None:
    """Return the row of a function, or of a method (of that name)."""
    if isinstance(target, str):
        return METHODS.get(target)
    if target in FUNCTIONS:
        return FUNCTIONS[target].row
    name = getattr(target, "__name__", "")
    return METHODS.get(name) if getattr(Tensor, name, None) is target else None


def layer_of(row: Row | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Module | None:
    """Return the layer that has the parameters (or weights) among the arguments of a function.

    None if there is none, or if the first argument is not one with samples: weights that are
    standardised, or a parameter. What a model is called with is no parameter.
    """
    layer = None if row is None or row.layer is None else row.layer(*args, **kwargs)
    layout = None if layer is None else layout_of(args[0] if args else kwargs.get("input"))
    if layer is None or layout is None or not layout.is_batched:
        return None
    if derivatives_of(layer) is None:  # a program has replaced what its class computes
        return None
    is_given = any(id(p) in inputs.rows for p in layer.parameters() for inputs in running())
    return None if is_given else layer


def nodes_in(*arguments: Any) -> list[Node]:
    """Return the nodes in nested arguments, each once."""
    return list(dict.fromkeys(leaves_in(arguments, Node)))
