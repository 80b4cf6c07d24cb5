"""What is active: the extensions of the innermost ``with backpack(...)`` and its options."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from backpack.extensions.backprop_extension import BackpropExtension

ExtensionHook = Callable[[Module], Any]


@dataclass(frozen=True)
class Configuration:
    """The options of one ``backpack(...)`` context."""

    exts: tuple[BackpropExtension, ...] = ()
    debug: bool = False
    extension_hook: ExtensionHook | None = None
    retain_graph: bool = False


class CTX:
    """Holds the active configuration and the hooks that ``extend`` installed.

    The state is global, not per thread: on accelerators autograd runs hooks in threads of its own.
    """

    configuration = Configuration()
    _handles: ClassVar[list[RemovableHandle]] = []
    _extended: ClassVar[WeakKeyDictionary[Module, RemovableHandle]] = WeakKeyDictionary()

    @classmethod
    def set_active_exts(cls, active_exts: tuple[BackpropExtension, ...]) -> None:
        """Make ``active_exts`` the extensions that the next ``backward()`` runs."""
        cls.configuration = replace(cls.configuration, exts=tuple(active_exts))

    @classmethod
    def get_active_exts(cls) -> tuple[BackpropExtension, ...]:
        """Return the active extensions."""
        return cls.configuration.exts

    @classmethod
    def set_debug(cls, debug: bool) -> None:
        """Print (or not) what is recorded and computed."""
        cls.configuration = replace(cls.configuration, debug=debug)

    @classmethod
    def get_debug(cls) -> bool:
        """Return whether debug output is on."""
        return cls.configuration.debug

    @classmethod
    def set_extension_hook(cls, extension_hook: ExtensionHook | None) -> None:
        """Set the function called with each module after its extensions have run."""
        cls.configuration = replace(cls.configuration, extension_hook=extension_hook)

    @classmethod
    def get_extension_hook(cls) -> ExtensionHook | None:
        """Return the function called with each module after its extensions have run."""
        return cls.configuration.extension_hook

    @classmethod
    def set_retain_graph(cls, retain_graph: bool) -> None:
        """Keep (or release) what the forward pass stored after a backward pass."""
        cls.configuration = replace(cls.configuration, retain_graph=retain_graph)

    @classmethod
    def get_retain_graph(cls) -> bool:
        """Return whether what the forward pass stored is kept after a backward pass."""
        return cls.configuration.retain_graph

    @classmethod
    def is_extension_active(cls, *extension_classes: type[BackpropExtension]) -> bool:
        """Return whether an extension of one of these classes is active."""
        return any(isinstance(ext, extension_classes) for ext in cls.configuration.exts)

    @classmethod
    def add_hook_handle(cls, handle: RemovableHandle, module: Module | None = None) -> None:
        """Remember a hook (and the module that ``extend`` put it on) for :meth:`remove_hooks`."""
        if module is None:
            cls._handles.append(handle)
        else:
            cls._extended[module] = handle

    @classmethod
    def remove_hooks(cls) -> None:
        """Take all hooks off; a later ``extend`` installs them again."""
        for handle in cls._handles:
            handle.remove()
        for module, handle in cls._extended.items():
            handle.remove()
            module._backpack_extend = False  # type: ignore[assignment]
        cls._handles.clear()
        cls._extended.clear()


def without_autocast() -> AbstractContextManager[Any]:
    """Compute in the precision of the tensors, also inside of ``torch.autocast``."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    stack = ExitStack()
    for device in enabled:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


class disable:
    """Context manager: forward passes inside store nothing."""

    _depth = 0

    def __enter__(self) -> None:
        """Stop storing."""
        disable._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Store again, unless an outer ``disable`` is active."""
        disable._depth -= 1

    @staticmethod
    def should_store_io() -> bool:
        """Return whether forward passes store their inputs and outputs."""
        return disable._depth == 0
