"""Warnings that point to the line of a program, however deep inside the library they arise."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType

import torch
from torch.autograd.graph import _engine_run_backward

# Files whose lines are not the user's: of this package, of torch, what both call through, and code
# that torch.fx writes.
_INSIDE = (
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""),
    os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), ""),
    contextlib.__file__,
    "<eval_with_key>",
)


def _is_of_the_program(code: CodeType) -> bool:
    return not code.co_filename.startswith(_INSIDE)


def _starts_a_pass(code: CodeType) -> bool:
    return code is _engine_run_backward.__code__


def warn(message: str) -> None:
    """Issue a ``UserWarning`` at the innermost line that is neither in backpack nor in torch.

    A thread of autograd (of a GPU) has no such line: there it is that of the thread that waits in
    ``backward()``.
    """
    # no variable holds the frame it is in: that cycle would keep what callers hold
    frame = _above(sys._getframe(), _is_of_the_program)
    if frame is None:
        passes = map(partial(_above, is_searched=_starts_a_pass), sys._current_frames().values())
        waiting = [*filter(None, passes)]
        frame = _above(waiting[0], _is_of_the_program) if len(waiting) == 1 else None
    if frame is None:
        warnings.warn(message, UserWarning, stacklevel=2)
        return
    space = frame.f_globals
    registry = space.setdefault("__warningregistry__", {})
    name, file, line = space.get("__name__", "<string>"), frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, UserWarning, file, line, name, registry)


def _above(frame: FrameType | None, is_searched: Callable[[CodeType], bool]) -> FrameType | None:
    while frame is not None and not is_searched(frame.f_code):
        frame = frame.f_back
    return frame
