"""Which class knows the derivatives of which module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict, ParameterList

if TYPE_CHECKING:
    from backpack.core.derivatives.basederivatives import BaseDerivatives

Rule = TypeVar("Rule", bound="type[BaseDerivatives]")

# Containers of parameters, which nobody calls.
LISTS = (ParameterList, ParameterDict)

REGISTRY: dict[type[Module], BaseDerivatives] = {}
_CACHE: dict[type[Module], BaseDerivatives | None] = {}
# Classes of other libraries, by their qualified names.
ELSEWHERE: dict[str, BaseDerivatives] = {}
# For leaves that nobody has registered.
FALLBACKS: dict[str, BaseDerivatives] = {}

# Methods that a subclass may override without changing what the module computes.
HARMLESS = {"__init__", "extra_repr", "__repr__", "reset_parameters", "__setstate__"}


def register(*module_classes: type[Module] | str) -> Callable[[Rule], Rule]:
    """Class decorator: the decorated derivatives serve these module classes (and their subclasses).

    Args:
        *module_classes: Classes of ``torch.nn.Module``. One of a library that need not be there is
            given by its qualified name.

    Returns:
        The decorator. A later registration of the same class replaces the earlier one.
    """

    def decorate(rule: Rule) -> Rule:
        for module_class in module_classes:
            if isinstance(module_class, str):
                ELSEWHERE[module_class] = rule()
            else:
                REGISTRY[module_class] = rule()
        _CACHE.clear()
        return rule

    return decorate


def register_fallback(kind: Literal["module", "loss"]) -> Callable[[Rule], Rule]:
    """Class decorator: the decorated derivatives serve every leaf that has none of its own.

    Args:
        kind: Whether that is for modules, or for losses (which return nothing but scalars).

    Returns:
        The decorator.
    """

    def decorate(rule: Rule) -> Rule:
        FALLBACKS[kind] = rule()
        return rule

    return decorate


def class_derivatives(module_class: type[Module]) -> BaseDerivatives | None:
    """Look up the derivatives of a module class along its base classes.

    A subclass that overrides a method of the registered class may compute something else: it does
    not inherit the derivatives.
    """
    try:
        return _CACHE[module_class]
    except KeyError:
        return _CACHE.setdefault(module_class, _look_up(module_class))


def _look_up(module_class: type[Module]) -> BaseDerivatives | None:
    overridden: set[str] = set()
    for base in module_class.__mro__:
        rule = REGISTRY.get(base) or ELSEWHERE.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            inherited = {name for cls in _below_module(base) for name in vars(cls)}
            changed = overridden & (inherited | {"forward", "__call__"}) - HARMLESS
            return None if changed else rule
        overridden |= {name for name, value in vars(base).items() if callable(value)}
    return None


def derivatives_of(module: Module) -> BaseDerivatives | None:
    """Return the derivatives registered for ``module``, or None."""
    return None if "forward" in vars(module) else class_derivatives(type(module))


def derivatives_of_call(module: Module, outputs: Sequence[Tensor]) -> BaseDerivatives | None:
    """Return the derivatives registered for ``module``, for any other leaf the automatic ones.

    Args:
        module: Module that was called.
        outputs: What it returned, flattened.

    Returns:
        None for a container without a registration: its children are what matters.
    """
    registered = derivatives_of(module)
    if registered is not None or not is_leaf(module):
        return registered
    is_loss = all(out.dim() == 0 for out in outputs)
    return FALLBACKS.get("loss" if is_loss else "module")


def is_leaf(module: Module) -> bool:
    """Return whether a module has no children that are called: lists of parameters are not."""
    return all(isinstance(child, LISTS) for child in module._modules.values() if child is not None)


def own_parameters(module: Module) -> dict[str, Parameter | None]:
    """Return the parameters of a module itself, by name, with those in lists of parameters."""
    if not module._modules:
        return module._parameters
    own = dict(module._parameters)
    for name, child in module._modules.items():
        if isinstance(child, LISTS):
            own |= {f"{name}.{key}": p for key, p in child._parameters.items()}
    return own


def _below_module(cls: type[Module]) -> list[type]:
    return [base for base in cls.__mro__ if issubclass(base, Module) and base is not Module]
