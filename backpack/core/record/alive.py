"""The recorded calls that live: whose graphs live, and hold tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from backpack.core.record import calls
from backpack.core.record.calls import Call
from backpack.core.record.data_notes import recounted, running
from backpack.core.record.layout import Layout
from backpack.core.record.module_state import works_in_place
from backpack.core.record.origins import origin
from backpack.core.record.weights import version_of

_newest_before = -1  # the newest call when the last context was left
corrections = 0  # how often a layout was corrected: see Layout.on_correction


class Users:
    """Tells which parameters are used several times: by all calls that live, or did before."""

    def __init__(self) -> None:
        self._seen: set[float] = set()  # calls
        self._used: set[int] = set()  # parameters, by id
        self._shared: set[int] = set()
        self._last: int | None = None

    def is_alone(self, call: Call) -> bool:
        """Return whether a call alone uses its parameters, and each of them once."""
        if self._last != calls.newest:
            self._last = calls.newest
            for other in all_live_calls():
                if other.params and other.index not in self._seen:
                    self._seen.add(other.index)
                    for p in map(id, other.params.values()):
                        (self._shared if p in self._used else self._used).add(p)
        return self._shared.isdisjoint(map(id, call.params.values()))


def is_used(tensor: Tensor) -> bool:
    """Whether a recorded call of a known module uses a tensor as a parameter of its own."""
    return any(
        tensor is p for call in all_live_calls() if call.derivatives for p in call.params.values()
    )


def latest() -> Module | None:
    """Return the module of the latest call, if that waits for its first context."""
    call = last_call() if calls.newest != _newest_before else None
    return None if call is None else call.called


def note_end_of_context() -> None:
    """Note that the calls so far do not wait for a context any more."""
    global _newest_before
    _newest_before = calls.newest


def last_call() -> Call | None:
    """Return the call that was recorded last, if it still holds tensors."""
    entry = calls.LIVE.get(calls.newest)
    return None if entry is None else entry()


def all_live_calls() -> list[Call]:
    """Return the recorded calls that still hold tensors, in the order of the calls."""
    return [call for entry in list(calls.LIVE.values()) if (call := entry()) is not None]


def _find_places() -> None:
    global corrections
    corrections += 1
    for call in all_live_calls():
        call.note_correction()
    if recounted():
        model = running()[-1]
        for call in all_live_calls():
            if call.index > model.number and call.model == model.whole:
                call.find_rows()


Layout.on_correction = staticmethod(_find_places)


def live_calls(module: Module) -> list[Call]:
    """Return the recorded calls of a module that still hold tensors, in the order of the calls."""
    return [call for call in all_live_calls() if call.called is module]


def preserve(tensor: Tensor, copy: Tensor) -> None:
    """Let calls keep the entries of a tensor that is about to change in place, from a ``copy``."""
    storage, mark = tensor.untyped_storage().data_ptr(), origin(copy)
    is_own = tensor._base is None
    copies: dict[int, Tensor] = {}

    def kept(x: Any, version: int) -> Any:
        if version_of(x) != version:  # changed before
            return x
        if id(x) not in copies:
            own = copy if _memory(x) == _memory(tensor) else x.clone()
            copies[id(x)] = own if x.requires_grad else own.detach()
        return copies[id(x)]

    for entry in reversed(list(calls.LIVE.values())):
        call = entry()
        if call is None:
            continue
        stored, count = (*call.inputs, *call.outputs), len(call.inputs)
        shares = [
            isinstance(x, Tensor) and x.untyped_storage().data_ptr() == storage for x in stored
        ]
        if any(shares):
            held = list(zip(stored, call.versions, shares, strict=True))
            new = [kept(x, version) if is_shared else x for x, version, is_shared in held]
            call.inputs, call.outputs = tuple(new[:count]), tuple(new[count:])
            call.versions = tuple(
                [v if y is x else version_of(y) for y, (x, v, _) in zip(new, held, strict=True)]
            )
        # what has filled this memory may not have kept its output, which is large, nor its input
        is_source = mark in call.origins_out and not call.is_transparent
        is_known = not call.producers or (is_own and not works_in_place(call.module))
        fills = (is_source and is_known) or any(shares[count:])
        if fills and not (any(shares[:count]) or call.module._modules):
            return  # none before holds it


def _memory(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
