"""A property that is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy(Generic[T]):
    """Decorator: compute an attribute when it is first read, and keep it.

    ``functools.cached_property`` takes a lock before Python 3.12, longer than many attributes.
    """

    def __init__(self, compute: Callable[[Any], T]):
        self.compute = compute
        self.name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, instance: Any, owner: type) -> T:
        """Compute the attribute of an instance, which hides this one from then on."""
        value = vars(instance)[self.name] = self.compute(instance)
        return value
