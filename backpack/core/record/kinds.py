"""What is known of the arguments and the result of a function before it has run.

A *kind* says what a value will be, a *treatment* where the entries of a result come from. The table
of functions (:mod:`backpack.core.record.functions`) states both of the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor
from torch.fx.node import Node
from torch.fx.proxy import Proxy

from backpack.custom_module.function_module import Slot, leaves_in, map_leaves

# What is known about a value before it is there: one of these, or a tuple of kinds.
Kind = Any
TENSOR: Final = "tensor"
TENSORS: Final = "tensors"  # a sequence of them, of unknown length
VALUE: Final = "value"  # number, shape, dtype, ...
UNKNOWN: Final = "unknown"

# What a function does with the entries of its tensors.
ENTRIES: Final = "entries"  # each entry of the result depends on those at its place, broadcast
CASTS: Final = "casts"  # the result has the first argument's entries, perhaps as another type
MOVES: Final = "moves"  # each entry of the result is one of the first argument's, or a constant
MEMORY: Final = "memory"  # each entry of the result is the one at a place in memory
CONSTANT: Final = "constant"  # no entry of the result depends on those of the first argument
RESHAPES: Final = "reshapes"  # the result has the first argument's entries, in their order


class TrainingFlag:
    """What modules have as ``training`` while they are traced.

    It is recognised as an argument of functions, and reports when somebody asks for its value. It
    is no number: the indices, keys and bounds that Python reads of one would not be reported.
    """

    def __init__(self, mode: bool, owner: str, asked: Callable[[], None]):
        """Stand for a mode of the module of that name; who asks for it calls ``asked``."""
        self.mode, self.owner, self.asked = mode, owner, asked

    def __repr__(self) -> str:
        return repr(self.mode)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let proxies record a function; compute with the mode if there is none."""
        if any(issubclass(each, Proxy) for each in types):
            return NotImplemented
        args, kwargs = map_leaves(_told, (args, kwargs or {}))
        return func(*args, **kwargs)


def _told(x: Any) -> Any:
    """Return the mode of a flag, which is asked for; anything else as it is."""
    return bool(x) if type(x) is TrainingFlag else x


def _asking(name: str) -> Callable[..., Any]:
    """Return a method that computes with the mode, and reports that, too."""
    plain = getattr(bool, name)

    def method(self: TrainingFlag, *others: Any) -> Any:
        if not any(isinstance(other, Proxy) for other in others):  # which record it
            self.asked()
        return plain(self.mode, *map(_told, others))

    return method


_BINARY = "add sub mul truediv floordiv mod divmod pow lshift rshift and or xor"
_OTHERS = "bool int float index round format str neg pos abs invert eq ne lt le gt ge hash"
for _name in (*_BINARY.split(), *(f"r{name}" for name in _BINARY.split()), *_OTHERS.split()):
    setattr(TrainingFlag, f"__{_name}__", _asking(f"__{_name}__"))


def kind(argument: Any) -> Kind:
    """Return what is known about an argument of a call."""
    if isinstance(argument, Node):
        return argument.meta.get("backpack_kind", UNKNOWN)
    if isinstance(argument, Slot):
        return TENSOR
    if isinstance(argument, (tuple, list)):
        kinds = tuple(kind(item) for item in argument)
        return VALUE if all(k == VALUE for k in kinds) else kinds
    return VALUE


def is_number(argument: Any) -> bool:
    """Return whether an argument is a real number that is known already."""
    return isinstance(argument, (int, float)) and not isinstance(argument, bool)


def is_static(*arguments: Any) -> bool:
    """Return whether arguments are known already: neither nodes, nor slots, nor tensors."""
    return not leaves_in(arguments, Node, Slot, Tensor)


ATTRIBUTES_TENSOR = {"T", "H", "mT", "mH", "real", "imag", "data", "grad", "values", "indices"}
ATTRIBUTES_VALUE = {
    *("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_sparse"),
    *("itemsize", "nbytes", "is_leaf", "names", "is_quantized", "is_meta", "is_cpu", "is_mps"),
}


def attribute_kind(input: Any, name: str) -> Kind:
    """Return what an attribute is."""
    return TENSOR if name in ATTRIBUTES_TENSOR else VALUE if name in ATTRIBUTES_VALUE else UNKNOWN


def item_kind(input: Any, index: Any) -> Kind:
    """Return what ``input[index]`` is."""
    what = kind(input)
    if what == TENSORS:
        return TENSOR if isinstance(index, int) else TENSORS
    if isinstance(what, tuple):
        try:
            return what[index]
        except (IndexError, TypeError):
            return UNKNOWN
    return TENSOR if what == UNKNOWN and isinstance(index, tuple) else what


def reduction_kind(input: Any, *args: Any, **kwargs: Any) -> Kind:
    """``max(x)`` and ``max(x, y)`` are tensors, ``max(x, dim)`` comes with the indices."""
    has_axis = "dim" in kwargs or (args and kind(args[0]) == VALUE)
    return TENSORS if has_axis else TENSOR


def where_kind(*args: Any, **kwargs: Any) -> Kind:
    """``where(condition)`` are indices along each axis."""
    return TENSORS if len(args) + len(kwargs) == 1 else TENSOR


def nonzero_kind(input: Any = None, *, as_tuple: Any = False) -> Kind:
    """``nonzero(x)`` is a tensor, ``nonzero(x, as_tuple=True)`` are indices along each axis."""
    return TENSORS if as_tuple else TENSOR
