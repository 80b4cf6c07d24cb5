"""Attention whose derivatives can be differentiated again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock

import torch

_PREFIX = "_set_sdp_use_"
_KERNELS = [name.removeprefix(_PREFIX) for name in dir(torch._C) if name.startswith(_PREFIX)]
_FORMULA = {name: name == "math" for name in _KERNELS}
_lock = RLock()  # the garbage collector may end a use at any time
_before: Mapping[str, bool] = _FORMULA  # what the program has chosen
_users = 0


@contextmanager
def math_attention() -> Iterator[None]:
    """Compute attention by its formula: the fused kernels have no second derivative.

    The choice is that of all threads. Of those that need it at the same time the first one makes
    it, and the last one gives it back: with a choice each, the formula would stay chosen where the
    first one to come is also the first one to go. ``sdpa_kernel`` has to end in the thread that it
    has begun in (from torch 2.15 on).
    """
    global _before, _users
    with _lock:
        if not _users:
            _before = _choose(_FORMULA)
        _users += 1
    around = _choose(_FORMULA)  # the function around this use may have chosen something else
    try:
        yield
    finally:
        _choose(around)
        with _lock:
            _users -= 1
            if not _users:
                _choose(_before)


def _choose(kernels: Mapping[str, bool]) -> Mapping[str, bool]:
    """Choose which kernels may be used, and return the choice before."""
    before = {name: getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in kernels}
    if before != kernels:
        for name, is_on in kernels.items():
            getattr(torch._C, _PREFIX + name)(is_on)
    return before
