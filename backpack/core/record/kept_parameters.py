"""What parameters were when a backward pass began: its hooks may change them while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import chain, compress
from typing import TypeVar

import torch
from torch import Tensor

from backpack.core.record import alive, shards
from backpack.core.record.calls import Call, reading_parameters
from backpack.core.record.module_state import parameters_of
from backpack.core.record.weights import (
    ADDRESS,
    TENSORS,
    VERSION,
    Kept,
    State,
    addresses_of,
    state_of_one,
    storage_of,
)
from backpack.core.values import at_least_single, has_values
from backpack.utils.autocast import without_autocast

T = TypeVar("T")


class KeptParameters:
    """What parameters were when a backward pass began."""

    def __init__(self, copies: bool):
        """Keep nothing yet; copies of those with a gradient, if hooks may well change them."""
        self.copies = copies
        self._kept: dict[Tensor, Kept] = {}

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Keep what parameters are before something in a backward pass may change them."""
        tensors = [p for p in dict.fromkeys(parameters) if p not in self._kept]
        copied: set[Tensor] = set()
        if self.copies:
            copied = {p for p in tensors if p.requires_grad and shards.shard_of(p) is None}
        values = [p.detach().clone().requires_grad_() if p in copied else None for p in tensors]
        digests = _digests([p for p in tensors if p not in copied])
        for p, state, value in zip(tensors, _states(tensors), values, strict=True):
            self._kept[p] = Kept(state, value, next(digests) if value is None else None)

    def changed(
        self, parameters: Iterable[Tensor], compared: Container[Tensor] | None = None
    ) -> dict[Tensor, Kept]:
        """Return which of some parameters are no longer what they were, and what that was.

        Entries are compared of those in ``compared`` (None: all), of others autograd's counts.
        """
        found: dict[Tensor, Kept] = {}
        tensors = list(dict.fromkeys(parameters))
        entries = tensors if compared is None else [p for p in tensors if p in compared]
        known = {p: value for p in entries if (value := self._kept[p].value) is not None}
        digested = [p for p in entries if p not in known]
        digests = dict(zip(digested, _digests(digested, Tensor.detach), strict=True))
        compared_with: dict[Tensor, tuple[Tensor, Tensor]] = {}
        for p, state in zip(tensors, _states(tensors), strict=True):
            was = self._kept[p]
            after, before = (p, known[p]) if p in known else (digests.get(p), was.digest)
            if was.state != state:
                found[p] = was
            elif after is not None and before is not None:
                compared_with[p] = after, before
        for p in differing(compared_with):
            was, (after, before) = self._kept[p], compared_with[p]
            slack = _rounding(shards.stored(p), after) if was.value is None else 0.0
            if not torch.allclose(after, before, rtol=0, atol=slack, equal_nan=True):
                found[p] = was
        return found

    @property
    def parameters(self) -> list[Tensor]:
        """What is kept."""
        return list(self._kept)

    def storages(self) -> set[int]:
        """Return where the entries of the parameters are, but for those that were sharded."""
        return {storage_of(t) for t in self._kept if shards.shard_of(t) is None}


# Up to this many entries, a copy tells sooner what has changed than a digest.
EXACT = 2**14
# Precisions that are always compared entry by entry, up to that size.
PLAIN = frozenset({torch.float32, torch.float64})


def differing(pairs: Mapping[T, tuple[Tensor, Tensor]]) -> list[T]:
    """Return the keys of pairs that are known to differ, waiting once for each accelerator."""
    found: list[T] = []
    waiting: defaultdict[torch.device, dict[T, Tensor]] = defaultdict(dict)
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
    """Return what tells the entries of each tensor from others: these, as ``taken`` gives them.

    Of a large one, their sum with random weights, one pass through memory. None if nothing does.
    """
    with without_autocast() if torch._C._is_any_autocast_enabled() else nullcontext():
        if shards.KNOWN or not TENSORS.issuperset(map(type, tensors)):
            tensors = list(map(shards.stored, tensors))
        found = []
        for t in tensors:
            is_plain = type(t) in TENSORS and t.dtype in PLAIN and t.layout is torch.strided
            is_small = is_plain and t.numel() <= EXACT
            found.append(taken(t.detach()) if is_small else _digest(t.detach(), taken))
        return iter(found)


def _digest(tensor: Tensor, taken: Callable[[Tensor], Tensor]) -> Tensor | None:
    if tensor.layout is not torch.strided or tensor.is_quantized or not storage_of(tensor):
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


def _states(tensors: Sequence[Tensor]) -> list[State]:
    if shards.KNOWN:
        return list(map(state_of_one, tensors))
    try:
        return list(
            zip(map(id, tensors), map(VERSION, tensors), map(ADDRESS, tensors), strict=True)
        )
    except RuntimeError:  # those of torch.inference_mode have no version, sparse ones no address
        return list(map(state_of_one, tensors))


class ParametersBefore:
    """What the calls of one backward pass read: parameters before its hooks have changed them."""

    kept: KeptParameters | None = None  # None if no call reads any, or none will any more

    def __init__(self, has_second_order: bool, shows_calls: bool) -> None:
        """Keep what is read when others have run: at the end, or where users see calls."""
        self._reads = has_second_order, shows_calls
        self.read: dict[Call, list[Tensor]] = {}  # parameters of calls that may read them late
        self.moved: set[Call] = set()  # they have one with other memory (p.data = …) by now
        self.keep(None)

    def keep(self, newest: Call | None) -> None:
        """Keep what calls read: that of all, or that of the newest, recorded since the start."""
        live = alive.all_live_calls() if newest is None else [newest]
        found = reading_parameters(live, *self._reads)
        if not found:
            return
        read = parameters_of(found)
        for call in found:
            if call.addresses and call.addresses != addresses_of(call.read):  # ``p.data = …``
                self.moved.add(call)
        self.read |= read
        if self.kept is None:
            everything = live if newest is None else alive.all_live_calls()
            self.kept = KeptParameters(copies=_have_hooks(everything))
        self.kept.add(chain.from_iterable(read.values()))
        if self.kept.copies:
            storages = self.kept.storages()
            for call in found:
                call.keep_views(storages)

    def show(self, calls: Iterable[Call], originals: dict[Tensor, Tensor]) -> None:
        """Let rules see parameters as they were; note which ones the copies stand for."""
        assert self.kept is not None
        reading = list(filter(self.read.__contains__, calls))
        changed = self.kept.changed(chain.from_iterable(map(self.read.__getitem__, reading)))
        for call in reading:
            if changed:
                call.see_parameters_before(changed)
            for p, was in call.kept_values.items():
                assert was.value is not None
                originals[was.value] = p


def _have_hooks(calls: Iterable[Call]) -> bool:
    """Whether hooks of the calls' modules or parameters will run in a backward pass."""
    for call in calls:
        if call.module._backward_hooks or call.module._backward_pre_hooks:
            return True
        for p in call.params.values():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                return True
    return False
