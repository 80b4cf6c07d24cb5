"""What tells tensors from those before a change, by memory and version, without keeping copies."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.record import shards

TENSORS = frozenset({Tensor, Parameter})
# Numbers calls, and moments between those so far and those to come.
COUNTER = count()
VERSION = operator.attrgetter("_version")
ADDRESS = operator.methodcaller("data_ptr")
IS_SOMETHING = partial(operator.is_not, None)
# Tells a tensor from that before a change: its identity, version and address.
State = tuple[int, int, int]


class Kept(NamedTuple):
    """What a parameter was when a backward pass began."""

    state: State  # tells whether it was changed since, unless behind autograd's back
    value: Tensor | None  # A copy; None if there is none
    digest: Tensor | None  # what tells its entries from others, if there is no copy


def storage_of(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 if it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # sparse, or one that has its entries in other tensors
        return 0


def version_of(tensor: Any) -> int:
    """Return how often a tensor was changed in place, as far as torch counts that."""
    try:
        return tensor._version
    except (AttributeError, RuntimeError):  # no tensor, or one of torch.inference_mode
        return 0


def addresses_of(read: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Return where parameters are in memory; nothing if one has none of its own."""
    try:
        known = filter(IS_SOMETHING, chain.from_iterable(map(dict.values, read[::2])))
        return tuple(map(ADDRESS, known))
    except RuntimeError:  # sparse, fake, or of a transform of torch.func
        return ()


def state_of_one(tensor: Tensor) -> State:
    """Tell one tensor from that before a change."""
    held = shards.stored(tensor)
    address = held.data_ptr() if held.layout is torch.strided else 0
    return id(tensor), version_of(held), address


def tensors_of(read: Iterable[Mapping[str, Tensor | None]]) -> list[Tensor]:
    """List all parameters and buffers of some modules."""
    return [t for by_name in read for t in by_name.values() if t is not None]
