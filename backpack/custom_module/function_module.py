"""Any function as a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

from torch.autograd import Function
from torch.nn import Module

__all__ = ["FunctionModule"]


@dataclass(frozen=True)
class Slot:
    """Stands for an input of the module in the arguments of its function."""

    index: int

    def __repr__(self) -> str:
        return f"input{self.index}"


@dataclass(frozen=True)
class Training:
    """Stands for the module's training flag in the arguments of its function."""

    def __repr__(self) -> str:
        return "self.training"


TRAINING = Training()


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to whatever is in nested tuples, lists, dictionaries and slices: copied."""
    if isinstance(value, tuple):
        items = [map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_leaves(function, item) for item in value]
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_leaves(function, x) for x in (value.start, value.stop, value.step)))
    return function(value)


def leaves_in(value: Any, *kinds: Any) -> list[Any]:
    """List what is of some types in nested tuples, lists, dictionaries and slices."""
    found: list[Any] = []
    map_leaves(lambda leaf: found.append(leaf) if isinstance(leaf, kinds) else None, value)
    return found


class FunctionModule(Module):
    """Calls a function, or a method of its first argument.

    Attributes:
        name: Short name of the function, the same for its variants: ``"matmul"`` for
            ``torch.matmul``, ``torch.Tensor.matmul`` and ``@``.
    """

    def __init__(
        self,
        function: Callable[..., Any] | str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        known: bool = True,
    ):
        """Store the function and its arguments.

        Args:
            function: A function that can be imported by its name, or the name of a method.
            args: Positional arguments. :class:`Slot` stands for an input of the module,
                :class:`Training` for its training flag.
            kwargs: Keyword arguments, likewise.
            name: Short name of the function. Default: its own name.
            known: Whether the function is in the converter's table.
        """
        super().__init__()
        self.function = function
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})
        self.name = name or (function if isinstance(function, str) else function.__name__)
        self.known = known

    def arguments(self, *inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the function is called with: inputs are what the slots stand for."""

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return inputs[leaf.index]
            return self.training if isinstance(leaf, Training) else leaf

        return map_leaves(fill, self.args), map_leaves(fill, self.kwargs)

    def forward(self, *inputs: Any) -> Any:
        """Call the function; inputs are what the slots stand for: tensors, numbers, shapes, ..."""
        args, kwargs = self.arguments(*inputs)
        if isinstance(self.function, str):
            return getattr(args[0], self.function)(*args[1:], **kwargs)
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return the call."""
        arguments = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"{describe_function(self.function)}({', '.join(arguments)})"

    def __getstate__(self) -> dict[str, Any]:
        """Replace the function by where to import it from: some of torch's cannot be pickled."""
        state = self.__dict__.copy()
        state["function"] = _Reference.to(self.function) or self.function
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = state["function"]
        function = own.resolve() if isinstance(own, _Reference) else own
        super().__setstate__({**state, "function": function})


@dataclass(frozen=True)
class _Reference:
    """Where to import a function from."""

    module: str
    name: str

    def resolve(self) -> Any:
        """Import the function."""
        return attrgetter(self.name)(import_module(self.module))

    @staticmethod
    def to(function: Any) -> _Reference | None:
        """Return the reference, None for a method's name and for what cannot be imported."""
        module = getattr(function, "__module__", None)
        for attribute in ("__qualname__", "__name__"):
            name = getattr(function, attribute, None)
            if module is None or name is None:
                continue
            reference = _Reference(module, name)
            try:
                if reference.resolve() is function:
                    return reference
            except (AttributeError, ImportError):
                continue
        return None


def describe_function(function: Callable[..., Any] | str) -> str:
    """Return the name by which users know a function, such as ``torch.relu``."""
    if isinstance(function, str):
        return f"Tensor.{function}"
    module = getattr(function, "__module__", None) or ""
    module = module.replace("torch._C._nn", "torch.nn.functional").lstrip("_")
    module = module.replace("torch.functional", "torch")
    name = getattr(function, "__name__", None) or repr(function)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, Function):  # of autograd
        module, name = owner.__module__, f"{owner.__qualname__}.{name}"
    return name if module in ("", "builtins") else f"{module}.{name}"
