"""Statistics of all processes out of those of each, in few collective operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from backpack.core.engine.statistics import Statistics
from backpack.distributed.agreement import agree


def check_group(group: Any) -> None:
    """Refuse what is no group of processes, and not the name of that of the module.

    Raises:
        ValueError: If that is so.
    """
    if group is None or (isinstance(group, str) and group == "module"):
        return
    if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        raise ValueError(
            "process_group is a group of torch.distributed that this process belongs to, 'module' "
            "for that of the DistributedDataParallel around the model, or None for the quantities "
            f"of the process alone, got {group!r}."
        )


def reduce(group: Any, parts: Sequence[Statistics], error: Exception | None) -> None:
    """Replace the statistics of a process's samples by those of all samples.

    With W processes, the loss of each counts 1/W: ``DistributedDataParallel`` averages gradients.
    All have to call this at the same time. There is one ``all_reduce`` for the numbers of samples,
    and one for each precision of the statistics.

    Args:
        group: The processes.
        parts: The statistics, in an order that is that of all processes. Those with an axis of
            samples stay those of this process, but are scaled.
        error: What has stopped this process, if anything.

    Raises:
        RuntimeError: If the statistics differ between processes, or one was stopped (on all), or a
            process does not come.
    """
    agree(group, *_plan(parts, error))
    for part in parts:
        part.scale(1 / group.size())

    def total(value: Tensor) -> Tensor:
        value = value.contiguous()
        distributed.all_reduce(value, group=group)
        return value

    sums = [part.sums() for part in parts]
    numbers = [part.counts() for part in parts]
    totals = iter(_totals([value for own in sums for value in own], total))
    counts = iter(_counts([count for own in numbers for count in own], sums, total))
    for part in parts:
        part.set_totals(totals, counts, total)


def _plan(parts: Sequence[Statistics], error: Exception | None) -> tuple[str, str]:
    """Describe what this process is about to reduce, in full and in short."""
    if error is not None:
        text = f"{type(error).__name__}: {error}"
        return text, text
    lines = [f"{', '.join(map(repr, part.exts))}: {part.signature()}" for part in parts]
    parameters: dict[str, int] = {}
    for part in parts:
        for ext in part.exts:
            parameters[repr(ext)] = parameters.get(repr(ext), 0) + 1
    short = [f"{name} of {count} parameters" for name, count in parameters.items()]
    return "\n".join(lines), ", ".join(short) or "nothing"


def _totals(values: Sequence[Tensor], total: Any) -> list[Tensor]:
    """Sum vectors over the processes, those of one precision (and device) at once."""
    kinds: dict[tuple[Any, Any], list[int]] = {}
    for i, value in enumerate(values):
        kinds.setdefault((value.dtype, value.device), []).append(i)
    found = list(values)
    for members in kinds.values():
        flat = total(torch.cat([values[i] for i in members]))
        sizes = [values[i].numel() for i in members]
        for i, value in zip(members, flat.split(sizes), strict=True):
            found[i] = value
    return found


def _counts(counts: list[int], sums: Sequence[Sequence[Tensor]], total: Any) -> list[int]:
    """Sum numbers of samples over the processes."""
    if not counts:
        return []
    device = next(value.device for own in sums for value in own)
    return total(torch.tensor(counts, device=device)).tolist()
