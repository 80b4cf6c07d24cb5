"""Which class knows the derivatives of which module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from torch.nn import Module

if TYPE_CHECKING:
    from backpack.core.derivatives.basederivatives import BaseDerivatives

Rule = TypeVar("Rule", bound="type[BaseDerivatives]")

REGISTRY: dict[type[Module], BaseDerivatives] = {}
_CACHE: dict[type[Module], BaseDerivatives | None] = {}

# Methods that a subclass may override without changing what the module computes.
HARMLESS = {"__init__", "extra_repr", "__repr__", "reset_parameters", "__setstate__"}


def register(*module_classes: type[Module]) -> Callable[[Rule], Rule]:
    """Class decorator: the decorated derivatives serve these module classes (and their subclasses).

    Args:
        *module_classes: Classes of ``torch.nn.Module``.

    Returns:
        The decorator. A later registration of the same class replaces the earlier one.
    """

    def decorate(rule: Rule) -> Rule:
        for module_class in module_classes:
            REGISTRY[module_class] = rule()
        _CACHE.clear()
        return rule

    return decorate


def class_derivatives(module_class: type[Module]) -> BaseDerivatives | None:
    """Look up the derivatives of a module class along its base classes.

    A subclass that overrides a method of the registered class may compute something else: it does
    not inherit the derivatives.
    """
    if module_class not in _CACHE:
        _CACHE[module_class] = _look_up(module_class)
    return _CACHE[module_class]


def _look_up(module_class: type[Module]) -> BaseDerivatives | None:
    overridden: set[str] = set()
    for base in module_class.__mro__:
        if base in REGISTRY:
            inherited = {name for cls in _below_module(base) for name in vars(cls)}
            changed = overridden & (inherited | {"forward", "__call__"}) - HARMLESS
            return None if changed else REGISTRY[base]
        overridden |= {name for name, value in vars(base).items() if callable(value)}
    return None


def derivatives_of(module: Module) -> BaseDerivatives | None:
    """Return the derivatives registered for ``module``, or None."""
    return None if "forward" in vars(module) else class_derivatives(type(module))


def _below_module(cls: type[Module]) -> list[type]:
    return [base for base in cls.__mro__ if issubclass(base, Module) and base is not Module]
