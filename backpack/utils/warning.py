"""Warnings that point to the line of a program, however deep inside the library they arise."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from types import FrameType

import torch

# Files whose lines are not the user's: of this package, of torch, what both call through, and code
# that torch.fx writes.
_INSIDE = (
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""),
    os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), ""),
    contextlib.__file__,
    "<eval_with_key>",
)


def warn(message: str) -> None:
    """Issue a ``UserWarning`` at the innermost line that is neither in backpack nor in torch.

    A thread of autograd (of a GPU) has no such line: there it is the caller's.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, UserWarning, stacklevel=2 if frame is None else level)
