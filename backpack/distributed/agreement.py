"""Processes tell each other what they are about to do before they do it together.

A collective operation that not all processes of a group take part in, or with other shapes, hangs
or ends in garbage. The store of the group has no such problem: each process writes there, and waits
for the verdict as long as the group's timeout allows.
"""

from __future__ import annotations

from datetime import timedelta
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import distributed_c10d


class NotAgreedError(RuntimeError):
    """The processes do not agree, or one does not come: all who have come know of it."""


AGREED = "yes"
LATE = "late"  # nobody waits any more
STOPPED = "stopped by "
# Number of the next agreement, by group.
_next: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def agree(group: Any, plan: str, summary: str, may_differ: bool = False) -> bool:
    """Wait until all processes of a group have the same plan.

    Args:
        group: The processes.
        plan: What this one is about to do, in full.
        summary: The same in a few words, for a message.
        may_differ: That plans differ is no error, unless an error has stopped a process.

    Returns:
        Whether all have the same.

    Raises:
        NotAgreedError: If plans differ (on all processes), or a process does not come.
    """
    store = distributed_c10d._get_process_group_store(group)
    number = _next.get(group, 0)
    _next[group] = number + 1
    prefix, size, rank = f"backpack/{number}", group.size(), group.rank()
    own = f"{prefix}/{sha256(plan.encode()).hexdigest()}"
    store.add(own, 1)
    try:
        if store.add(f"{prefix}/came", 1) == size:  # the last one sees what all have
            _discard(store, number - 1)
            agreed = store.add(own, 0) == size
            store.compare_set(f"{prefix}/verdict", "", AGREED if agreed else "no")
        verdict = _verdict(store, prefix, _timeout(group))
        if verdict == LATE:
            raise RuntimeError("A process has come too late.")
        if verdict == AGREED:
            if rank == 0:
                store.delete_key(own)
            return True
        store.set(f"{prefix}/{rank}", summary)
        others = [f"{prefix}/{i}" for i in range(size)]
        store.wait(others, _timeout(group))
        plans = [store.get(key).decode() for key in others]
    except RuntimeError as error:
        raise NotAgreedError(
            f"Process {rank} of {size} has waited for the others (or these for it, until the time "
            "was over), to reduce the quantities of a backward pass, or to do together: "
            f"{summary}. All have to come there: enter "
            "backpack(...) with the same extensions on each, call what is done together on each, "
            f"or use process_group=None for what belongs to the process alone. ({error})"
        ) from error
    if may_differ and not any(text.startswith(STOPPED) for text in plans):
        return False
    listed = "; ".join(f"process {i}: {text}" for i, text in enumerate(plans))
    raise NotAgreedError(
        f"The processes do not have the same quantities to reduce, or an error has stopped one. "
        f"{listed}."
    )


def _verdict(store: Any, prefix: str, patience: timedelta) -> str:
    """Wait for what the last process finds; who is not patient enough tells those who come later.

    These would think that all agree, and send what nobody takes.
    """
    key = f"{prefix}/verdict"
    try:
        store.wait([key], patience)
    except RuntimeError:
        if store.compare_set(key, "", LATE).decode() == LATE:
            raise
    return store.get(key).decode()


def tell(group: Any, error: Exception) -> None:
    """Tell the processes of a group of an error when they are to agree next; wait for none."""
    store = distributed_c10d._get_process_group_store(group)
    number = _next.get(group, 0)
    _next[group] = number + 1
    prefix = f"backpack/{number}"
    store.set(f"{prefix}/{group.rank()}", stopped(error))
    if store.add(f"{prefix}/came", 1) == group.size():
        _discard(store, number - 1)
        store.compare_set(f"{prefix}/verdict", "", "no")


def stopped(error: Exception) -> str:
    """Describe an error that has stopped a process."""
    return f"{STOPPED}{type(error).__name__}: {error}"


def _discard(store: Any, number: int) -> None:
    """Remove what no process reads any more."""
    for name in ("came", "verdict"):
        if number >= 0:
            store.delete_key(f"backpack/{number}/{name}")


def _timeout(group: Any) -> timedelta:
    """Return how long the group waits for its processes."""
    devices = group._device_types or [torch.device("cpu")]
    return min(group._get_backend(device).options._timeout for device in devices)


def digest(tensor: Tensor) -> str:
    """Tell a tensor from others by its bits, whatever the order in which they are added up."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    entries = tensor.detach().contiguous().view(kinds[tensor.element_size()]).flatten()
    total, start = torch.zeros((), dtype=torch.long, device=tensor.device), 1
    for part in entries.split(2**18):  # which stay in cache
        bits, places = part.long(), torch.arange(start, start + len(part), device=part.device)
        # mixes each entry with its place, so that no two entries can change places unnoticed
        for factor in (-7046029254386353131, -4658895280553007687, -7723592293110705685):
            bits = (bits + places).mul_(factor)
            bits = bits.bitwise_xor_(bits >> 29)
        total, start = total + bits.sum(), start + len(part)
    return f"{int(total):x}"
