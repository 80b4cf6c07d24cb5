"""What parameters were in the forward pass, told from what they are now without keeping copies.

A tensor is known by its memory and version. Hooks may change parameters while a backward pass runs:
it keeps copies of small ones and digests of large ones.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import chain, compress, count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.context import without_autocast
from backpack.core.record import shards
from backpack.core.values import at_least_single, has_values

TENSORS = frozenset({Tensor, Parameter})
# Numbers calls, and moments between those so far and those to come.
COUNTER = count()
VERSION = operator.attrgetter("_version")
_ADDRESS = operator.methodcaller("data_ptr")
IS_SOMETHING = partial(operator.is_not, None)
# Tells a tensor from that before a change: its identity, version and address.
State = tuple[int, int, int]


class Kept(NamedTuple):
    """What a parameter was when a backward pass began.

    Attributes:
        state: Tells whether it was changed since, unless behind autograd's back.
        value: A copy; None if there is none.
        digest: What tells its entries from others, if there is no copy to compare with.
    """

    state: State
    value: Tensor | None
    digest: Tensor | None


class KeptParameters:
    """What parameters were when a backward pass began."""

    def __init__(self, copies: bool):
        """Keep nothing yet; copies of those with a gradient, if hooks may well change them."""
        self.copies = copies
        self._tensors: dict[int, Tensor] = {}  # by id
        self._kept: dict[int, Kept] = {}

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Keep what parameters are before something in a backward pass may change them."""
        new = {id(p): p for p in parameters if id(p) not in self._tensors}
        self._tensors.update(new)
        tensors = list(new.values())
        copied: set[Tensor] = set()
        if self.copies:
            copied = {p for p in tensors if p.requires_grad and shards.shard_of(p) is None}
        values = [p.detach().clone().requires_grad_() if p in copied else None for p in tensors]
        digests = _digests([p for p in tensors if p not in copied])
        for p, state, value in zip(tensors, _states(tensors), values, strict=True):
            self._kept[id(p)] = Kept(state, value, next(digests) if value is None else None)

    def changed(
        self, parameters: Iterable[Tensor], compared: Container[Tensor] | None = None
    ) -> dict[Tensor, Kept]:
        """Return which of some parameters are no longer what they were, and what that was.

        Args:
            parameters: The parameters.
            compared: Those whose entries are compared; of others, a change counts if autograd has
                counted it. Default: all.
        """
        found: dict[Tensor, Kept] = {}
        tensors = list(dict.fromkeys(parameters))
        entries = tensors if compared is None else [p for p in tensors if p in compared]
        known = {p: value for p in entries if (value := self._kept[id(p)].value) is not None}
        digested = [p for p in entries if p not in known]
        digests = dict(zip(digested, _digests(digested, Tensor.detach), strict=True))
        compared_with: dict[Tensor, tuple[Tensor, Tensor]] = {}
        for p, state in zip(tensors, _states(tensors), strict=True):
            was = self._kept[id(p)]
            after, before = (p, known[p]) if p in known else (digests.get(p), was.digest)
            if was.state != state:
                found[p] = was
            elif after is not None and before is not None:
                compared_with[p] = after, before
        for p in _differing(compared_with):
            was, (after, before) = self._kept[id(p)], compared_with[p]
            slack = _rounding(shards.stored(p), after) if was.value is None else 0.0
            if not torch.allclose(after, before, rtol=0, atol=slack, equal_nan=True):
                found[p] = was
        return found

    @property
    def parameters(self) -> list[Tensor]:
        """What is kept."""
        return list(self._tensors.values())

    def storages(self) -> set[int]:
        """Return where the entries of the parameters are, but for those that were sharded."""
        return {storage_of(t) for t in self._tensors.values() if shards.shard_of(t) is None}


# Up to this many entries, a copy tells sooner what has changed than a digest.
EXACT = 2**14
# Precisions that are always compared entry by entry, up to that size.
PLAIN = frozenset({torch.float32, torch.float64})


def _differing(pairs: Mapping[Tensor, tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return the keys of pairs that are known to differ, waiting once for each accelerator."""
    found: list[Tensor] = []
    waiting: defaultdict[torch.device, dict[Tensor, Tensor]] = defaultdict(dict)
    for key, (one, other) in pairs.items():
        if one.is_cpu:
            found += [] if torch.equal(one, other) else [key]
        elif has_values(one):
            waiting[one.device][key] = (one != other).any()
    for differs in waiting.values():
        found += compress(differs, torch.stack([*differs.values()]).tolist())
    return found


def _digests(
    tensors: Sequence[Tensor], taken: Callable[[Tensor], Tensor] = Tensor.clone
) -> Iterator[Tensor | None]:
    """Return what tells the entries of each tensor from others; None if nothing does.

    The entries themselves, as ``taken`` gives them, or, of a large tensor, their sum with random
    weights, which is one pass through memory.
    """
    with without_autocast() if torch._C._is_any_autocast_enabled() else nullcontext():
        if shards.KNOWN or not TENSORS.issuperset(map(type, tensors)):
            tensors = list(map(shards.stored, tensors))
        found = []
        for t in tensors:
            is_small = t.dtype in PLAIN and t.layout is torch.strided and t.numel() <= EXACT
            found.append(taken(t.detach()) if is_small else _digest(t.detach(), taken))
        return iter(found)


def _digest(tensor: Tensor, taken: Callable[[Tensor], Tensor]) -> Tensor | None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    if tensor.element_size() == 1:  # some precisions have no arithmetic
        return taken(tensor.view(torch.uint8))
    if tensor.numel() <= EXACT or not tensor.is_floating_point():
        return taken(tensor)
    rows = at_least_single(tensor.reshape(-1, tensor.shape[-1]))
    left, right = (_weights(n, k, rows.dtype, rows.device) for k, n in enumerate(rows.shape))
    return (rows @ right) @ left


def _rounding(tensor: Tensor, digest: Tensor) -> float:
    """Return what the digests of one tensor may differ by, if they are computed twice."""
    if digest.dim() == tensor.dim():
        return 0.0
    norm = torch.linalg.vector_norm(tensor.detach(), dtype=digest.dtype)
    return 10 * torch.finfo(digest.dtype).eps * float(norm) * tensor.numel() ** 0.5


@lru_cache(maxsize=256)
def _weights(count: int, axis: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normally distributed numbers, always the same; others for each axis."""
    generator = torch.Generator().manual_seed(2 * count + axis)
    return torch.randn(count, generator=generator, device=generator.device).to(device, dtype)


def storage_of(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 for sparse ones."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def version_of(tensor: Any) -> int:
    """Return how often a tensor was changed in place, as far as torch counts that."""
    try:
        return tensor._version
    except (AttributeError, RuntimeError):  # no tensor, or one of torch.inference_mode
        return 0


def state_of(read: Iterable[Mapping[str, Tensor | None]]) -> list[State]:
    """Tell parameters and buffers from those before a change."""
    return list(map(state_of_one, tensors_of(read)))


def _states(tensors: Sequence[Tensor]) -> list[State]:
    if shards.KNOWN:
        return list(map(state_of_one, tensors))
    try:
        return list(
            zip(map(id, tensors), map(VERSION, tensors), map(_ADDRESS, tensors), strict=True)
        )
    except RuntimeError:  # those of torch.inference_mode have no version, sparse ones no address
        return list(map(state_of_one, tensors))


def addresses_of(read: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Return where parameters are in memory; nothing if one has none of its own."""
    try:
        known = filter(IS_SOMETHING, chain.from_iterable(map(dict.values, read[::2])))
        return tuple(map(_ADDRESS, known))
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
