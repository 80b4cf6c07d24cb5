"""Statistics of all processes out of those of each, in few collective operations."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, distributed

from backpack.core.engine.statistics import Map, Statistics
from backpack.core.record.averaging import Processes
from backpack.core.types import Extension
from backpack.distributed import agreement
from backpack.distributed.shards import Piece, scattered
from backpack.distributed.sums import all_reduced, exact_total, precision

OF_ALL = (
    "Products with blocks are those of all processes, which have to compute the same ones with the "
    "same vectors, to the last bit (draw random ones with a generator of one seed, or broadcast "
    "them), or use backpack(..., process_group=None)."
)


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


def reduce(processes: Processes, parts: Sequence[Statistics], error: Exception | None) -> None:
    """Replace the statistics of a process's samples by those of all samples.

    With W processes, the loss of each counts 1/W: ``DistributedDataParallel`` averages gradients.
    All have to call this at the same time. There is one ``all_reduce`` for the numbers of samples,
    and one for each precision of the statistics; what belongs to shards of parameters has one
    ``reduce_scatter`` for each.

    Args:
        processes: The processes.
        parts: The statistics, in an order that is that of all processes. Those with an axis of
            samples stay those of this process, but are scaled.
        error: What has stopped this process, if anything.

    Raises:
        RuntimeError: If the statistics differ between processes, or one was stopped (on all), or a
            process does not come.
    """
    plan, summary = _plan(parts, error)
    _agree(processes, plan + precision(), summary + precision())
    for part in parts:
        part.scale(1 / processes.divisor)

    def total(value: Tensor) -> Tensor:
        return exact_total(value, processes.groups)

    def total_of_sums(value: Tensor) -> Tensor:
        for group in processes.groups:
            value = all_reduced(value, group)
        return value

    sums = [[_as_in(part, value) for value in part.sums()] for part in parts]
    numbers = [part.counts() for part in parts]
    devices = [value.device for part in parts for value in (*part.sums(), *part.like_parameter())]
    _scatter(processes, parts)
    found = iter(totals([value for own in sums for value in own], total_of_sums))
    counts = iter(_counts([count for own in numbers for count in own], devices, total))
    for part in parts:
        part.set_totals(found, counts, partial(_product, processes, _what(part)))


def tell(processes: Processes, error: Exception) -> None:
    """Tell processes of an error when they come to reduce, or agree on something; wait for none."""
    for group in processes.groups:
        agreement.tell(group, error)


def _what(part: Statistics) -> str:
    return f"{', '.join(map(_named, part.exts))} of {part.name.shown}"


def _named(ext: Extension) -> str:
    """Show an extension as all processes do: objects among its options have other addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(ext))


def _product(processes: Processes, what: str, own: Map, mat: Tensor) -> Tensor:
    """Sum over processes what each has found for the same vectors.

    Raises:
        RuntimeError: If vectors differ, an error has stopped a process, or one does not come.
    """
    try:
        found = own(mat)
        text = f"{what} times {list(mat.shape)} {mat.dtype} {agreement.digest(mat)}"
    except agreement.NotAgreedError:  # they know
        raise
    except Exception as error:
        tell(processes, error)
        raise
    try:
        _agree(processes, text, text)
    except agreement.NotAgreedError as error:
        raise agreement.NotAgreedError(f"{OF_ALL} {error}") from error
    return exact_total(found, processes.groups)


def agree(processes: Processes, text: str, may_differ: bool) -> bool:
    """Wait for processes, and return whether all have the same text; if not, it may be an error.

    Raises:
        RuntimeError: If an error has stopped one (on all), or a process does not come.
    """
    return _agree(processes, text, shorten(text, 80, placeholder=" …"), may_differ)


def _agree(processes: Processes, plan: str, summary: str, may_differ: bool = False) -> bool:
    """Let the processes agree group by group: what one group finds out is told to the next."""
    same, error = True, None
    for group in processes.groups:
        own = (plan, summary) if same else ("", "others differ")
        try:
            if error is not None:
                own = (agreement.STOPPED, f"{agreement.STOPPED}an error of others: {error}")
            same = agreement.agree(group, *own, may_differ) and same
        except RuntimeError as caught:
            error = error or caught
    if error is not None:
        raise error
    return same


def _as_in(part: Statistics, value: Tensor) -> Tensor:
    """Add up what belongs to sharded parameters in their precision, if modules have a lower one."""
    if not part.is_sharded:
        return value
    return value.to(torch.promote_types(value.dtype, part.parameter.dtype))


def _scatter(processes: Processes, parts: Sequence[Statistics]) -> None:
    """Sum what has the shape of sharded parameters, and give each process its shard."""
    pieces = [
        Piece(part.parameter, _as_in(part, value))
        for part in parts
        for value in part.like_parameter()
    ]
    found: dict[int, Tensor] = {}
    for members in _by_kind([piece.value for piece in pieces]).values():
        some = [pieces[i] for i in members]
        found |= zip(members, scattered(some, processes.groups), strict=True)
    shards = iter([found[i] for i in range(len(pieces))])
    for part in parts:
        part.set_like_parameter(shards)


def _plan(parts: Sequence[Statistics], error: Exception | None) -> tuple[str, str]:
    """Describe what this process is about to reduce, in full and in short."""
    if error is not None:
        text = agreement.stopped(error)
        return text, text
    lines = [
        f"{part.name.key} {part.behind}{', '.join(map(_named, part.exts))}: {part.signature()}"
        for part in parts
    ]
    parameters: dict[str, list[str]] = {}
    for part in parts:
        for ext in part.exts:
            parameters.setdefault(f"{part.behind}{_named(ext)}", []).append(part.name.shown)
    short = [
        f"{ext} of {len(names)} parameters ({shorten(' '.join(names), 120, placeholder=' …')})"
        for ext, names in parameters.items()
    ]
    return "\n".join(lines), ", ".join(short) or "nothing"


def totals(values: Sequence[Tensor], total: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Sum vectors ``[n]`` over processes, those of one precision (and device) at once."""
    found = list(values)
    for members in _by_kind(values).values():
        flat = total(torch.cat([values[i] for i in members]))
        sizes = [values[i].numel() for i in members]
        for i, value in zip(members, flat.split(sizes), strict=True):
            found[i] = value
    return found


def _by_kind(values: Sequence[Tensor]) -> dict[tuple[Any, Any], list[int]]:
    """Group the numbers of values by precision and device."""
    kinds: dict[tuple[Any, Any], list[int]] = {}
    for i, value in enumerate(values):
        kinds.setdefault((value.dtype, value.device), []).append(i)
    return kinds


def _counts(counts: list[int], devices: Sequence[torch.device], total: Any) -> list[int]:
    """Sum numbers of samples over the processes."""
    return total(torch.tensor(counts, device=devices[0])).tolist() if counts else []
