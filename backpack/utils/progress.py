"""Progress bars, where ``tqdm`` is installed."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import TypeVar

T = TypeVar("T")


def with_bar(
    items: Iterable[T], description: str, progress: bool, delay: float = 0.0
) -> Iterable[T]:
    """Show a bar in a terminal while iterating, if that is asked for and ``tqdm`` is installed.

    Of less than two items there is none, and of others after a delay in seconds.
    """
    if not progress or _is_short(items):
        return items
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return items
    return tqdm(items, desc=description, leave=False, delay=delay, disable=None)


def _is_short(items: Iterable[T]) -> bool:
    """Say whether there are less than two; not for what cannot tell, such as a stream's loader."""
    try:
        return isinstance(items, Sized) and len(items) < 2
    except TypeError:
        return False
