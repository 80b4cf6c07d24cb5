"""Fast paths: other ways to results that the library has without them, only slower. One registry.

A *body* is a method of a rule that says faster what follows from other methods of the rule;
:func:`body` marks it, and names these methods. Without it, the rule has the generic one of its base
class, or none. A shortcut of the engine is a :func:`path` with a name; the code asks whether it
``is_on``. ``with disabled():`` runs the library without all of them, so that tests and benchmarks
can compare.

A subclass of a rule inherits a body only as long as it overrides none of the methods that the body
follows from. A subclass that knows better says ``reduced = Base.reduced``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class Path:
    """A fast path, and what it does, in a sentence."""

    def __init__(self, name: str, what: str):
        self.name = name  # such as "ConvNDDerivatives.reduced", or "reused memory"
        self.what = what
        self.is_on = True  # whether it is taken

    def set(self, is_on: bool) -> None:
        """Switch the path on or off."""
        self.is_on = is_on


class Body(Path):
    """A method of a rule class, which is in the class while the path is taken."""

    def __init__(self, name: str, owner: type, method: str):
        """Leave the method where it is."""
        self.owner = owner
        self.method = method
        self.function = vars(owner)[method]
        what, self.given = self.function.fast
        super().__init__(name, what)

    def set(self, is_on: bool) -> None:
        """Put the method into the class, or take it out."""
        if is_on:
            setattr(self.owner, self.method, self.function)
        else:
            delattr(self.owner, self.method)
        super().set(is_on)


PATHS: dict[str, Path] = {}  # by name


def path(name: str, what: str) -> Path:
    """Register a shortcut of the engine, of a new name; say in a sentence what it does."""
    if name in PATHS:
        raise ValueError(f"There is a fast path '{name}' already.")
    found = PATHS[name] = Path(name, what)
    return found


def body(what: str, *given: str) -> Callable[[Method], Method]:
    """Decorator: mark a faster form of what follows from ``given`` methods; say what it does."""

    def decorate(method: Method) -> Method:
        method.fast = what, frozenset(given)  # type: ignore[attr-defined]
        return method

    return decorate


def is_body(value: Any) -> bool:
    """Return whether an attribute of a class is marked as fast."""
    return hasattr(value, "fast")


def enroll(cls: type, overridden: Set[str]) -> None:
    """Register the bodies of a new class, and replace those that follow from what it overrides."""
    for known in PATHS.values():
        if not isinstance(known, Body) or known.given.isdisjoint(overridden):
            continue
        if known.owner in cls.__mro__[1:] and known.method not in vars(cls):
            setattr(cls, known.method, _generic(cls, known.method))
    for method in [name for name, value in vars(cls).items() if is_body(value)]:
        name = f"{cls.__qualname__}.{method}"
        unknown = [given for given in vars(cls)[method].fast[1] if not hasattr(cls, given)]
        if unknown:
            raise ValueError(
                f"{name} follows from {', '.join(sorted(unknown))}, by its fast.body, but "
                f"{cls.__name__} has no such method. Name those that a subclass may override."
            )
        other = PATHS.get(name)
        if isinstance(other, Body) and other.owner.__module__ != cls.__module__:
            name = f"{cls.__module__}.{name}"
        PATHS[name] = Body(name, cls, method)


def _generic(cls: type, method: str) -> Any:
    """Return the next method of base classes that is not fast; None if there is none."""
    found = (vars(base)[method] for base in cls.__mro__[1:] if method in vars(base))
    return next((value for value in found if not is_body(value)), None)


@contextmanager
def disabled(*names: str) -> Iterator[None]:
    """Run without (some) fast paths, in all threads: for tests, between backward passes."""
    chosen = [PATHS[name] for name in names] if names else [*PATHS.values()]
    taken = [each for each in chosen if each.is_on]
    for each in taken:
        each.set(False)
    try:
        yield
    finally:
        for each in taken:
            each.set(True)
