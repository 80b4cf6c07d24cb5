"""Attention whose derivatives can be differentiated again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from threading import RLock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_lock = RLock()  # the garbage collector may end a use at any time
_choice = ExitStack()  # gives back what the program has chosen
_users = 0


@contextmanager
def math_attention() -> Iterator[None]:
    """Compute attention by its formula: the fused kernels have no second derivative.

    The choice is that of all threads, as ``sdpa_kernel`` is. Of those that need it at the same time
    the first one makes it, and the last one gives it back: with a choice each, the formula would
    stay chosen where the first one to come is also the first one to go.
    """
    global _users
    with _lock:
        if not _users:
            _choice.enter_context(sdpa_kernel(SDPBackend.MATH))
        _users += 1
    try:
        # the function around this use may have chosen something else
        with nullcontext() if _is_chosen() else sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _choice.close()


def _is_chosen() -> bool:
    cuda = torch.backends.cuda
    fused = cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled
    return cuda.math_sdp_enabled() and not any(is_enabled() for is_enabled in fused)
