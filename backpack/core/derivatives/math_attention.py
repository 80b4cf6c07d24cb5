"""Attention whose derivatives can be differentiated again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock, local

from torch.nn.attention import SDPBackend, sdpa_kernel

_lock = RLock()  # the garbage collector may end a use at any time
_choice = ExitStack()  # gives back what the program has chosen
_users = 0
_here = local()  # depth: of uses in this thread


@contextmanager
def math_attention() -> Iterator[None]:
    """Compute attention by its formula: the fused kernels have no second derivative.

    The choice is that of all threads. Of those that need it at the same time the first one makes
    it, and the last one gives it back: with a choice each, the formula would stay chosen where the
    first one to come is also the first one to go.
    """
    depth = getattr(_here, "depth", 0)
    _here.depth = depth + 1
    try:
        # inside of another use the function may have chosen something else
        with sdpa_kernel(SDPBackend.MATH) if depth else _shared_choice():
            yield
    finally:
        _here.depth = depth


@contextmanager
def _shared_choice() -> Iterator[None]:
    global _users
    with _lock:
        if not _users:
            _choice.enter_context(sdpa_kernel(SDPBackend.MATH))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _choice.close()
