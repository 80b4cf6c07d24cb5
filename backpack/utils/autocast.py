"""Computations in the precision of their tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch


def without_autocast() -> AbstractContextManager[Any]:
    """Compute in the precision of the tensors, also inside of ``torch.autocast``."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack
