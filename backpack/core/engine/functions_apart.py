"""Whether functions between modules leave the samples apart: their autograd nodes are called.

They do if a cotangent at the rows of some samples gives a gradient at those rows alone. The nodes
are called one by one: the engine would run hooks, and reach recorded calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core.engine.paths import (
    Path,
    describe_structure,
    is_unpacked,
    stored_values,
    touched,
    vjp,
)
from backpack.core.engine.spread import shape_of, spread
from backpack.core.record.origins import Origin

# How many rows of a loss are looked at.
ROWS = 6


class Verdict(NamedTuple):
    """Whether functions keep samples apart, and for which stored values that was found out.

    Attributes:
        apart: Whether they leave the samples apart; None if that could not be found out.
        values: Numbers that they have stored, for which that holds; None for any.
    """

    apart: bool | None
    values: list[float | Tensor] | None = None


# What was found out of the functions before a module, by their structure.
_known: WeakKeyDictionary[Module, dict[Hashable, Verdict]] = WeakKeyDictionary()


def are_apart(
    module: Module,
    path: Path,
    sources: dict[tuple[Any, int], Origin],
    axis: int,
    is_loss: bool,
) -> bool | None:
    """Whether the rows that a module reads depend on those of one sample each, and on which.

    Args:
        module: Reads what the functions have computed.
        path: The functions.
        sources: What they have read that has samples.
        axis: Along which the module reads samples.
        is_loss: Whether it is a loss: its rows may be any samples, one each.

    Returns:
        None if that cannot be found out.
    """
    known = _known.setdefault(module, {})
    key = (is_loss, axis, describe_structure(path, sources))
    verdict = known.get(key)
    if verdict is None:
        apart = _evaluate(path, sources, axis, is_loss, spread)
        verdict = known[key] = Verdict(apart, None if apart else [math.nan])
    if verdict.values is None:
        return verdict.apart
    values = stored_values(path.nodes)  # it depends on what is stored, such as a permutation
    if values is None or not _are_equal(values, verdict.values):
        verdict = Verdict(_evaluate(path, sources, axis, is_loss), values)
        if values is not None:
            known[key] = verdict
    return verdict.apart


def _evaluate(
    path: Path,
    sources: dict[tuple[Any, int], Origin],
    axis: int,
    is_loss: bool,
    run: Callable[..., Any] | None = None,
) -> bool | None:
    """Call the functions; None if they cannot be called, or nothing comes of that."""
    if not all(map(is_unpacked, path.nodes)):
        return None
    x, found = shape_of(*path.start), None
    selections = _single_rows if is_loss else _halves
    for rows in selections(x.shape[axis], x.device):
        try:
            grads = vjp(path, {path.start: _cotangent(x, axis, rows)}, run)
            reached = [touched(grads.get(key), mark) for key, mark in sources.items()]
        except RuntimeError:  # an operation that needs the engine, or whose spread is unknown
            return None
        for samples in reached:
            if samples is None:
                continue
            found = True
            if int(samples.sum()) > 1 if is_loss else bool((samples & ~rows).any()):
                return False
    return found


def _cotangent(x: Any, axis: int, rows: Tensor) -> Tensor:
    """Return a tensor whose entries differ along each axis, zero in all but some rows of one."""
    entries = rows.to(x.dtype).reshape(-1, *(1,) * (len(x.shape) - axis - 1))
    for i, size in enumerate(x.shape):
        wave = torch.arange(size, device=x.device).mul(0.7391 + i).sin().add(1.5).to(x.dtype)
        entries = entries * wave.reshape(-1, *(1,) * (len(x.shape) - i - 1))
    return entries


def _halves(count: int, device: torch.device) -> list[Tensor]:
    """Return selections of rows such that of each two one is in, the other not."""
    numbers = torch.arange(count, device=device)
    bits = [(numbers >> bit) & 1 == 1 for bit in range((count - 1).bit_length())]
    return [*bits, *[~bit for bit in bits]]


def _single_rows(count: int, device: torch.device) -> list[Tensor]:
    """Return selections of one row each, of rows that are spread evenly."""
    chosen = sorted({round(k * (count - 1) / (ROWS - 1)) for k in range(ROWS)})
    numbers = torch.arange(count, device=device)
    return [numbers == row for row in chosen]


def _are_equal(one: Sequence[float | Tensor], other: Sequence[float | Tensor]) -> bool:
    return len(one) == len(other) and all(
        (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device) and torch.equal(x, y)
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else type(x) is type(y) and x == y
        for x, y in zip(one, other, strict=True)
    )
