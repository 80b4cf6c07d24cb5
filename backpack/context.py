"""What is active: the innermost ``with backpack(...)`` of a thread, and its options."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, filterfalse
from operator import methodcaller
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from backpack.core.features import set_variable, variable_of_caller
from backpack.core.types import Extension

__all__ = ["CTX", "disable"]

ExtensionHook = Callable[[Module], Any]
PROPAGATES = methodcaller("expects_backpropagation_quantities")


@dataclass
class Passes:
    """How many backward passes ran with a configuration, and in contexts inside that hid it."""

    own: int = 0
    hidden: int = 0
    told: bool = False  # whether it was said of a module why it has no quantities
    missed: bool = False  # whether a ``backward()`` has reached parameters, but no recorded call


@dataclass(eq=False)
class Scope:
    """One time that a context is entered."""

    outer: Configuration  # the one before
    interceptor: AbstractContextManager[Any] | None = None  # sees calls of ``backward()``
    latest: Module | None = None  # whose recorded call was the latest one
    seen_elsewhere: int = -1  # the latest backward pass outside of contexts: see ``OUTSIDE``
    start: int = 0  # when it was entered, in the order of recorded calls
    compiler: Any = None  # what compiled the functions that the thread called before
    device: torch.device | None = None  # where the program makes its tensors, if not on the CPU
    # Tasks of ``asyncio`` that have started inside have a copy of the state, and contexts may be
    # left in any order.
    was_left: bool = False


@dataclass(frozen=True)
class Configuration:
    """The options of one ``backpack(...)`` context, and when it was entered."""

    exts: tuple[Extension, ...] = ()
    debug: bool = False
    extension_hook: ExtensionHook | None = None
    retain_graph: bool = False
    sum_individual_gradients: bool = False
    gradients: bool = True  # whether p.grad is wanted
    process_group: Any = "module"  # of torch.distributed; None: each process on its own
    accumulate: bool = False
    slice_bytes: int | None = None  # see slice_bytes in backpack/core/engine/slices.py
    progress: bool = False
    scope: Scope | None = field(default=None, compare=False, repr=False)
    passes: Passes = field(default_factory=Passes, compare=False, repr=False)

    # extensions that read the gradient alone, and those for which something else travels back
    first_order: tuple[Extension, ...] = field(init=False, compare=False, repr=False)
    second_order: tuple[Extension, ...] = field(init=False, compare=False, repr=False)
    is_active: bool = field(init=False, compare=False, repr=False)  # whether there is work to do

    def __post_init__(self) -> None:
        """Sort the extensions."""
        vars(self)["first_order"] = tuple(filterfalse(PROPAGATES, self.exts))
        vars(self)["second_order"] = tuple(filter(PROPAGATES, self.exts))
        vars(self)["is_active"] = bool(self.exts) or self.extension_hook is not None

    @property
    def savefields(self) -> set[str]:
        """Attributes of parameters that the extensions save."""
        return {ext.savefield for ext in self.exts}


class State(NamedTuple):
    """What belongs to one thread (and to a task of ``asyncio``), as gradient mode does."""

    configuration: Configuration = Configuration()  # of the innermost context: see ``active``
    disabled: int = 0  # how many ``disable()`` are active
    entry: Any = None  # the ``backward()`` that runs, if noticed: see core/engine/intercept.py
    # for each recorded model that is running, what records its functions (the same one inside of
    # another model, None without gradients): see convert/recorder.py
    recorders: tuple[Any, ...] = ()


@dataclass
class Outside:
    """What is known of backward passes that no context was open for."""

    task: int = -1  # autograd's number of the latest one that has come to recorded calls


DEFAULT = State()
OUTSIDE = Outside()
STATE: ContextVar[State] = ContextVar("backpack", default=DEFAULT)


def active(configuration: Configuration) -> Configuration:
    """Return that of the innermost context which was not left since."""
    while (scope := configuration.scope) is not None and scope.was_left:
        configuration = scope.outer
    return configuration


def update(**values: Any) -> None:
    """Change entries of the state."""
    set_variable(STATE, STATE.get()._replace(**values))


def configure(configuration: Configuration) -> None:
    """Change the configuration, as each step does."""
    _, *others = STATE.get()
    set_variable(STATE, State(configuration, *others))


# Returns the state in which ``backward()`` was called, in any of its hooks: autograd runs the nodes
# of an accelerator in threads of its own.
state_of_caller: Callable[[], State] = partial(variable_of_caller, STATE, DEFAULT)


class _Active:
    """The configuration of the thread that asks."""

    def __get__(self, instance: object, owner: type) -> Configuration:
        return active(STATE.get().configuration)


class CTX:
    """Holds the hooks that ``extend`` installed, and the active configuration of each thread.

    A backward pass has the configuration of the thread that calls ``backward()``, wherever it runs.
    """

    configuration = _Active()
    _handles: ClassVar[list[RemovableHandle]] = []
    _extended: ClassVar[WeakKeyDictionary[Module, list[RemovableHandle]]] = WeakKeyDictionary()

    @classmethod
    def set_active_exts(cls, active_exts: tuple[Extension, ...]) -> None:
        """Make ``active_exts`` the extensions that the next ``backward()`` runs."""
        update(configuration=replace(cls.configuration, exts=tuple(active_exts)))

    @classmethod
    def get_active_exts(cls) -> tuple[Extension, ...]:
        """Return the active extensions."""
        return cls.configuration.exts

    @classmethod
    def set_debug(cls, debug: bool) -> None:
        """Print (or not) what is recorded and computed."""
        update(configuration=replace(cls.configuration, debug=debug))

    @classmethod
    def get_debug(cls) -> bool:
        """Return whether debug output is on."""
        return cls.configuration.debug

    @classmethod
    def set_extension_hook(cls, extension_hook: ExtensionHook | None) -> None:
        """Set the function called with each module after its extensions have run."""
        update(configuration=replace(cls.configuration, extension_hook=extension_hook))

    @classmethod
    def get_extension_hook(cls) -> ExtensionHook | None:
        """Return the function called with each module after its extensions have run."""
        return cls.configuration.extension_hook

    @classmethod
    def set_retain_graph(cls, retain_graph: bool) -> None:
        """Keep (or release) what the forward pass stored after a backward pass."""
        update(configuration=replace(cls.configuration, retain_graph=retain_graph))

    @classmethod
    def get_retain_graph(cls) -> bool:
        """Return whether what the forward pass stored is kept after a backward pass."""
        return cls.configuration.retain_graph

    @classmethod
    def is_extension_active(cls, *extension_classes: type[Extension]) -> bool:
        """Return whether an extension of one of these classes is active."""
        return any(isinstance(ext, extension_classes) for ext in cls.configuration.exts)

    @classmethod
    def add_hook_handle(cls, handle: RemovableHandle, module: Module | None = None) -> None:
        """Remember a hook for :meth:`remove_hooks`, with its module as long as that lives."""
        if module is None:
            cls._handles.append(handle)
            return
        known = cls._extended.get(module, [])
        there = [one for one in known if one.id in (one.hooks_dict_ref() or ())]
        cls._extended[module] = [*there, handle]

    @classmethod
    def adopt(cls, module: Module, hook: Any) -> None:
        """Take note of a copy of an extended module, which has come with a hook."""
        own = vars(module)
        own["_backpack_identity"] = id(module)
        hooks, marks = module._forward_hooks, module._forward_hooks_with_kwargs
        for key, other in hooks.items():
            if other is hook and module not in cls._extended:
                handle = RemovableHandle(hooks, extra_dict=marks)
                handle.id = key
                cls.add_hook_handle(handle, module)

    @classmethod
    def extended(cls) -> list[Module]:
        """Return the extended modules that live."""
        return list(cls._extended)

    @classmethod
    def remove_hooks(cls) -> None:
        """Take all hooks off; a later ``extend`` installs them again."""
        for handle in chain(cls._handles, *cls._extended.values()):
            handle.remove()
        for module in cls._extended:
            module._backpack_extend = False  # type: ignore[assignment]
            vars(module).pop("_call_impl", None)  # of a model whose functions are recorded
            vars(module).pop("__prepare_scriptable__", None)
        cls._handles.clear()
        cls._extended.clear()


def default_device() -> torch.device | None:
    """Return where new tensors are made, if ``torch.set_default_device`` or the like says so."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def device_of_program() -> AbstractContextManager[Any]:
    """Make new tensors where the program does: torch forgets that inside of ``backward()``."""
    scope = STATE.get().configuration.scope
    return nullcontext() if scope is None or scope.device is None else scope.device


class disable:
    """Context manager: forward passes inside store nothing. As ``torch.no_grad()``, in a thread."""

    def __enter__(self) -> None:
        """Stop storing."""
        configuration, disabled, *others = STATE.get()
        set_variable(STATE, State(configuration, disabled + 1, *others))

    def __exit__(self, *exception: object) -> None:
        """Store again, unless an outer ``disable`` is active."""
        configuration, disabled, *others = STATE.get()
        set_variable(STATE, State(configuration, disabled - 1, *others))

    @staticmethod
    def should_store_io() -> bool:
        """Return whether forward passes store their inputs and outputs."""
        return not STATE.get().disabled
