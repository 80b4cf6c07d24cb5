"""Attention whose derivatives can be differentiated again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

from torch.nn.attention import SDPBackend, sdpa_kernel

_lock = Lock()
_choice = ExitStack()  # gives back what the program has chosen
_users = 0


@contextmanager
def math_attention() -> Iterator[None]:
    """Compute attention by its formula: the fused kernels have no second derivative.

    The choice is that of all threads. Of several at once the first one makes it, and the last one
    gives it back: another order would keep it for good.
    """
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
