"""What ``backward()`` is called on, and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, overrides
from torch.nn import Parameter

from backpack.context import CTX
from backpack.core import kernels, spared_gradients
from backpack.core.tape import Call


class WatchBackward(overrides.TorchFunctionMode):
    """Notes which tensors ``backward()`` is called on, and spares it what is computed anyway.

    The first lets the engine notice a modified loss, for the second see
    :mod:`backpack.core.spared_gradients`.

    Args:
        completed: Called when autograd will bring nothing more to a call, where that is known.

    Attributes:
        roots: The argument of the ``backward()`` that runs; None where it is not known.
        spared: Parameters whose gradients autograd was not asked for, and that still need one.
    """

    roots: ClassVar[tuple[Tensor, ...] | None] = None
    spared: ClassVar[set[Parameter]] = set()

    _ENTRIES = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)

    def __init__(self, completed: Callable[[Call], None]):
        """Watch nothing yet."""
        super().__init__()
        self.completed = completed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``."""
        kwargs = kwargs or {}
        if func not in self._ENTRIES:
            return func(*args, **kwargs)
        tensors = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        outer, WatchBackward.roots = WatchBackward.roots, roots
        try:
            if func is torch.autograd.grad:
                return func(*args, **kwargs)
            return self._backward(func, roots, args, kwargs)
        finally:
            WatchBackward.roots = outer

    def _backward(self, func: Any, roots: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        candidates = spared_gradients.costly(CTX.configuration.exts)
        if not candidates:
            return func(*args, **kwargs)
        call = signature(func).bind(*args, **kwargs)
        if call.arguments.get("inputs") is not None or call.arguments.get("create_graph"):
            return func(*args, **kwargs)
        spared, asked, substitutes = spared_gradients.spare(roots, candidates)
        if not spared:
            return func(*args, **kwargs)
        call.arguments["inputs"] = asked
        outer, WatchBackward.spared = WatchBackward.spared, spared
        try:
            with kernels.in_use(substitutes, roots, self.completed):
                result = func(*call.args, **call.kwargs)
        finally:
            WatchBackward.spared = outer
        if spared:  # what is accumulated is taken out
            shapes = [list(p.shape) for p in spared]
            raise RuntimeError(
                f"The gradients of parameters of shapes {shapes} are missing: no gradient has "
                "arrived at the modules that use them. A hook of any parameter, such as "
                "p.register_hook(lambda grad: None), makes autograd compute them; please report "
                "this."
            )
        return result


class _Away:
    """Takes a mode off, and puts it on again."""

    __slots__ = ("mode",)

    def __init__(self, mode: WatchBackward):
        self.mode = mode

    def __enter__(self) -> None:
        self.mode.__exit__(None, None, None)

    def __exit__(self, *exception: object) -> None:
        self.mode.__enter__()


def unwatched() -> AbstractContextManager[Any]:
    """Work where no backward pass starts: a mode sees every function of tensors, and takes time."""
    mode = overrides._get_current_function_mode()
    return _Away(mode) if isinstance(mode, WatchBackward) else nullcontext()
