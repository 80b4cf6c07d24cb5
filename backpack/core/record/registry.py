"""Which class knows the derivatives of which module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar
from weakref import ref

from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict, ParameterList

from backpack.core.types import Rule

RuleClass = TypeVar("RuleClass", bound="type[Rule]")

# Containers of parameters, which nobody calls.
LISTS = (ParameterList, ParameterDict)

REGISTRY: dict[type[Module], Rule] = {}
# For each class that was looked up, as long as it lives (each traced model has one of its own): the
# derivatives, and the ``forward`` that they are of. A plain dictionary, for every call asks it.
_CACHE: dict[ref[type[Module]], tuple[Rule | None, Any]] = {}
# What the classes computed when they were registered.
_FORWARDS: dict[type[Module], Callable[..., Any]] = {}
# Classes of other libraries, by their qualified names; by patterns, where a rule knows its classes.
ELSEWHERE: dict[str, Rule] = {}
# For leaves that nobody has registered: a "loss" returns scalars, a "module" anything else.
FALLBACKS: dict[str, Rule] = {}

# Methods that a subclass may override without changing what the module computes.
HARMLESS = {
    *("__init__", "extra_repr", "__repr__", "reset_parameters"),
    *("__getstate__", "__setstate__"),
}


def register(*module_classes: type[Module] | str) -> Callable[[RuleClass], RuleClass]:
    """Class decorator: the decorated derivatives serve these module classes (and their subclasses).

    Args:
        *module_classes: Classes of ``torch.nn.Module``. One of a library that need not be there is
            given by its qualified name. That may have a ``*`` if the derivatives have a method
            ``suits``, which tells whether a class of such a name is one of theirs.

    Returns:
        The decorator. A later registration of the same class replaces the earlier one.

    Raises:
        TypeError: If something else is given, such as the derivatives; or if these have a method
            by a name that it had before, or a name in the place of the tuple of names.
    """
    for module_class in module_classes:
        is_class = isinstance(module_class, type) and issubclass(module_class, Module)
        if not (is_class or isinstance(module_class, str)):
            raise TypeError(
                f"register takes classes of modules, got {module_class!r}. It is a decorator: "
                "write @register(MyModule) above the class of its derivatives."
            )

    def decorate(rule: RuleClass) -> RuleClass:
        if hasattr(rule, "mixes_samples"):  # its name of before: to ignore it would be no error
            old = f"{rule.__name__}.mixes_samples"
            raise TypeError(f"{old} is called couples_samples now: rename the method.")
        if isinstance(one := getattr(rule, "params", ()), str):
            raise TypeError(f"{rule.__name__}.params is a str. Write a tuple, params = ('{one}',).")
        for module_class in module_classes:
            if isinstance(module_class, str):
                ELSEWHERE[module_class] = rule()
            else:
                REGISTRY[module_class] = rule()
                _FORWARDS[module_class] = module_class.forward
        _CACHE.clear()
        return rule

    return decorate


def class_derivatives(module_class: type[Module]) -> Rule | None:
    """Look up the derivatives of a module class along its base classes.

    A subclass that overrides a method of the registered class may compute something else: it does
    not inherit the derivatives.
    """
    return _cached(module_class)[0]


def _cached(module_class: type[Module]) -> tuple[Rule | None, Any]:
    try:
        return _CACHE[ref(module_class)]
    except KeyError:
        key = ref(module_class, lambda key: _CACHE.pop(key, None))
        return _CACHE.setdefault(key, _look_up(module_class))


def _look_up(module_class: type[Module]) -> tuple[Rule | None, Any]:
    overridden: set[str] = set()
    base: Any
    for base in module_class.__mro__:
        rule = REGISTRY.get(base) or _rule_elsewhere(base)
        if rule is not None:
            below = [c for c in base.__mro__ if issubclass(c, Module) and c is not Module]
            inherited = {name for cls in below for name in vars(cls)}
            changed = overridden & (inherited | {"forward", "__call__"}) - HARMLESS
            return None if changed else rule, _FORWARDS.get(base, base.forward)
        if not _is_of_fsdp(base):
            overridden |= {name for name, value in vars(base).items() if callable(value)}
    return None, None


def _rule_elsewhere(module_class: type[Module]) -> Rule | None:
    """Return the derivatives of a class of another library, which need not be there."""
    name = f"{module_class.__module__}.{module_class.__qualname__}"
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    patterns: Any = (key for key in ELSEWHERE if "*" in key and fnmatchcase(name, key))
    found: Iterator[Any] = map(ELSEWHERE.__getitem__, patterns)
    return next((rule for rule in found if rule.suits(module_class)), None)


def kind_of(module: Module) -> type[Module]:
    """Return the class of a module, as it was before ``fully_shard`` has put one in front."""
    kind = type(module)
    if _is_of_fsdp(kind):
        kind = next(cls for cls in kind.__mro__ if not _is_of_fsdp(cls))
    return kind


def _is_of_fsdp(cls: type) -> bool:
    """Whether ``fully_shard`` has put a class in front of that of a module: it changes no value."""
    return cls.__module__.startswith("torch.distributed.fsdp")


def derivatives_of(module: Module) -> Rule | None:
    """Return the derivatives registered for ``module``, unless its ``forward`` was replaced."""
    kind, own = type(module), vars(module)
    rule, forward = _CACHE.get(ref(kind)) or _cached(kind)
    if rule is None or "forward" in own or "_conv_forward" in own or kind.forward is not forward:
        return None
    return rule


def derivatives_of_call(module: Module, outputs: Sequence[Tensor]) -> Rule | None:
    """Return the derivatives of a module, automatic ones of unknown leaves; None for containers."""
    registered = derivatives_of(module)
    return registered if registered is not None else fallback(module, outputs)


def fallback(module: Module, outputs: Sequence[Tensor]) -> Rule | None:
    """Return the automatic derivatives of a leaf that nobody has registered, None for others."""
    if not is_leaf(module):
        return None
    is_loss = all(out.dim() == 0 for out in outputs)
    return FALLBACKS.get("loss" if is_loss else "module")


def is_leaf(module: Module) -> bool:
    """Return whether a module has no children that are called: lists of parameters are not."""
    for child in module._modules.values():
        if child is not None and not isinstance(child, LISTS):
            return False
    return True


def own_parameters(module: Module) -> dict[str, Parameter | None]:
    """Return the parameters of a module itself, by name, with those in lists of parameters."""
    if not module._modules:
        return module._parameters
    own = dict(module._parameters)
    for name, child in module._modules.items():
        if isinstance(child, LISTS):
            own |= {f"{name}.{key}": p for key, p in child._parameters.items()}
    return own
