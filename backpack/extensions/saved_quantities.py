"""Where an extension keeps what its rules passed on to tensors further up."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class SavedQuantities:
    """Quantities that have arrived at tensors, by a key that identifies the tensor."""

    def __init__(self) -> None:
        self._saved: dict[Hashable, Any] = {}

    def __contains__(self, key: Hashable) -> bool:
        """Return whether something has arrived."""
        return key in self._saved

    def save_quantity(
        self, key: Hashable, quantity: Any, accumulate: Callable[[Any, Any], Any]
    ) -> None:
        """Save a quantity of a tensor, or ``accumulate(old, new)`` if something is there."""
        there = key in self._saved
        self._saved[key] = accumulate(self._saved[key], quantity) if there else quantity

    def retrieve_quantity(self, key: Hashable, delete_old: bool = True) -> Any:
        """Return what has arrived at a tensor, None if nothing has; by default, forget it."""
        return self._saved.pop(key, None) if delete_old else self._saved.get(key)

    def clear(self) -> None:
        """Forget everything."""
        self._saved.clear()
