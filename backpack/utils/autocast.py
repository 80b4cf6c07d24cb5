"""Computations in the precision of their tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

# Kinds of devices on which torch.autocast may be on.
DEVICES = ("cpu", "cuda")


def without_autocast() -> AbstractContextManager[Any]:
    """Compute in the precision of the tensors, also inside of ``torch.autocast``."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    stack = ExitStack()
    for device in filter(torch.is_autocast_enabled, DEVICES):
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def autocast_dtypes() -> set[torch.dtype]:
    """Return the precisions that ``torch.autocast`` computes in here."""
    return set(map(torch.get_autocast_dtype, filter(torch.is_autocast_enabled, DEVICES)))
