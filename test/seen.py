"""What the rule of a module sees of its call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from backpack.core.record.context import Context, at_hand


def seen(module: Module, rows: Any = None, grads: Sequence[Tensor | None] | None = None) -> Context:
    """Return the context of a module's latest recorded call."""
    return at_hand(module, grads, rows)
