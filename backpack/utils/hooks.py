"""Whose hook of torch it is."""

from __future__ import annotations

from typing import Any


def is_of_library(hook: Any) -> bool:
    """Whether a hook is one of ours: those that are written in C may know no module."""
    return (getattr(hook, "__module__", None) or "").startswith("backpack.")
