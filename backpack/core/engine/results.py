"""Results are attributes of parameters: how a backward pass writes them, and what belongs to them.

They belong to the caller: none has the memory of a gradient, an activation or another result.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.types import Extension


class Beside(NamedTuple):
    """The ``p.grad`` that a result belongs to: that of the time when the result was saved."""

    value: ref[Tensor]  # the result
    grad: ref[Tensor] | None
    version: int  # counts changes of the gradient in place


class Used(NamedTuple):
    """The gradient that the last step of an optimiser has used."""

    grad: ref[Tensor]
    version: int  # counts its changes in place
    is_added_to: bool = False  # whether a backward pass found it unchanged, and added to it
    chain: Any = None  # of the passes that have added up the result that was used with it


class Averaged(NamedTuple):
    """The processes that a result is of, if its gradient is averaged over several."""

    groups: tuple[Any, ...]  # that have all of them as their product: usually one
    is_of_samples: bool  # whether the result has an axis of the samples of this process alone


class Factors(list[Tensor]):
    """Kronecker factors, with what whoever multiplies with them has to know."""

    def __init__(self, factors: Iterable[Tensor], products: Any, joint: bool):
        """Read it from the products that they are made of; ``joint``: bias and weight have one."""
        super().__init__(factors)
        self.swaps_axes: bool = products.swaps_axes  # whether they are those of p.transpose(0, 1)
        # the weight of a bias, or the bias of a weight, that has them as well
        partner = products.partner if joint else None
        self.partner = None if partner is None else ref(partner)


@dataclass
class Result:
    """What is noted of a result."""

    owner: str = ""  # the savefield of the extension that has saved it
    beside: Beside | None = None  # the gradient that it belongs to, if that was noted
    accumulated: Any = None  # what it is made of, to which the next backward pass may add
    moved: int | None = None  # id of the value in whose place another is: see put_in_place
    averaged: Averaged | None = None  # the processes that it is of, if several
    swaps_axes: bool | None = None  # whether Kronecker factors are those of p.transpose(0, 1)
    partner: ref[Parameter] | None = None  # that has them together with this parameter


class Attributes(dict[str, Any]):
    """The attributes of a parameter (its ``__dict__``), with a note of which are results.

    PyTorch pickles all attributes of a parameter. Results are left out.
    """

    __slots__ = ("results", "used")

    def __init__(self, attributes: dict[str, Any]):
        super().__init__(attributes)
        self.results: dict[str, Result] = {}  # in the order in which they were saved first
        self.used: Used | None = None

    def others(self) -> dict[str, Any]:
        """Return the attributes that are no results."""
        return {name: value for name, value in self.items() if name not in self.results}

    def cleared(self) -> dict[str, Any]:
        """Return those with what is noted of the gradient, which stays."""
        if self.used is None:
            return self.others()
        left = Attributes(self.others())
        left.used = self.used
        return left

    def __reduce__(self) -> Any:
        """Pickle the attributes without results, as if there were none."""
        return OrderedDict, (self.others(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attributes:
        """Copy everything but what refers to other objects."""
        result = Attributes(copy.deepcopy(dict(self), memo))
        for name, noted in self.results.items():
            result.results[name] = replace(noted, accumulated=None, moved=None, partner=None)
        return result


class Writer:
    """Writes the results of one backward pass at parameters, and takes them back if it fails."""

    def __init__(self, debug: bool):
        self.debug = debug  # whether to print what is written
        self.originals: dict[Tensor, Any] = {}  # parameters by the copies that rules see
        self.untrained: set[Parameter] = set()  # without results: see backward(inputs=...)
        self.is_mute = False  # whether nothing is to be written
        # what parameters have, for extensions that make results of that of all
        self.collected: dict[Extension, dict[Parameter, Any]] = {}
        # ids of the values, which would outlive what an extension hook drops
        self._written: list[tuple[Parameter, str, int]] = []
        # what results that were replaced had accumulated
        self._accumulated: dict[tuple[Parameter, str], Any] = {}

    def write(
        self, p: Parameter, ext: Extension, values: list[Any], savefield: str | None = None
    ) -> None:
        """Make a value an attribute of a parameter, as a tensor (or a list) that nobody else has.

        It is taken out of a list: it has no other name then, which would cost a copy. Without a
        ``savefield`` it is that of the extension, which may collect values of all parameters first.
        """
        value = values.pop(0)
        if self.originals:
            p = self.originals.get(p, p)
        if self.is_mute or (self.untrained and p in self.untrained):
            return
        if ext.collects and savefield is None:
            self.collected.setdefault(ext, {})[p] = value
            return
        name, dtype = savefield or ext.savefield, ext.result_dtype or p.dtype
        factors = value if type(value) is Factors else None
        if isinstance(value, Tensor):
            value = value.to(dtype)  # the name that it came with is gone, see owned
            if not value.requires_grad:
                value = value.detach()
            value = owned(value)
        elif isinstance(value, list):
            left, value = list(value), []
            if factors is not None:
                factors.clear()  # for their memory to have no other name
            while left:
                one = left.pop(0).to(dtype)
                one = one if one.requires_grad else one.detach()
                value.append(owned(one))
                del one
        if self.debug:
            print(f"[backpack] {name}: {list(getattr(value, 'shape', []))}")
        self._written.append((p, name, id(value)))
        own: Any = vars(p)
        if type(own) is not Attributes:
            own = p.__dict__ = Attributes(own)
        before = own.results.get(name)
        if before is not None and before.accumulated is not None:
            self._accumulated.setdefault((p, name), before.accumulated)
        own.results[name] = new = Result(ext.savefield)
        if factors is not None:
            new.swaps_axes, new.partner = factors.swaps_axes, factors.partner
        setattr(p, name, value)

    def leave_out(self, p: Parameter, exts: Iterable[Extension]) -> None:
        """Delete what extensions have left at a parameter, of which this pass has no result."""
        p = self.originals.get(p, p)
        if not (self.is_mute or p in self.untrained):
            for ext in exts:
                forget(p, ext.savefield)

    def finish_extensions(self) -> None:
        """Write what extensions make of what all parameters have, and free that."""
        while self.collected:
            ext, values = self.collected.popitem()
            for p, savefield, *value in ext.finish(values):
                self.write(p, ext, value, savefield)

    def __bool__(self) -> bool:
        return bool(self._written)

    def __iter__(self) -> Iterator[tuple[Parameter, str, Any]]:
        for p, name, identity in self._written:
            value = getattr(p, name, None)
            is_same = identity == id(value) or identity == noted(p, name).moved
            if is_same and value is not None:
                yield p, name, value

    def undo(self) -> None:
        """Take back what was written; what had accumulated before goes on to do so."""
        for p, name, _ in self:
            delattr(p, name)
        for p, name, _ in self._written:
            noted(p, name).accumulated = self._accumulated.get((p, name))


def put_in_place(p: Tensor, name: str, value: Any) -> None:
    """Put another value in the place of a result, such as the same on another device."""
    own: Any = vars(p)
    before = own.get(name)
    if value is before:
        return
    result = noted(p, name)
    result.moved, beside = result.moved or id(before), result.beside
    if beside is not None and beside.value() is before and isinstance(value, Tensor):
        result.beside = beside._replace(value=ref(value))
    if isinstance(before, Tensor) and isinstance(value, Tensor):
        vars(value).update(vars(before))
    setattr(p, name, value)


def _results(p: Tensor) -> dict[str, Result]:
    own = vars(p)
    return own.results if isinstance(own, Attributes) else {}


def noted(p: Tensor, name: str) -> Result:
    """Return what is noted of a result; of anything else an empty note, which nobody keeps."""
    return _results(p).get(name) or Result()


def is_result(p: Tensor, name: str) -> bool:
    """Whether an attribute is what a backward pass has written, or what was put in its place."""
    return name in _results(p) and name in vars(p)


def forget(p: Tensor, savefield: str) -> None:
    """Delete the results of an extension, also those that it has saved under other names."""
    for name, result in _results(p).items():
        if result.owner == savefield:
            vars(p).pop(name, None)


def all_accumulated(p: Tensor) -> list[Any]:
    """Return what all results of a parameter are made of that accumulate."""
    return [r.accumulated for r in _results(p).values() if r.accumulated is not None]


def start_accumulated(p: Tensor, name: str, state: Any) -> None:
    """Let the result of the next backward pass be added to something; there is none until then."""
    own: Any = vars(p)
    if not isinstance(own, Attributes):
        own = p.__dict__ = Attributes(own)
    own.pop(name, None)
    own.results.setdefault(name, Result()).accumulated = state


def note_gradient(p: Parameter, name: str) -> None:
    """Note that a result belongs to the gradient that a parameter has now."""
    value, grad = getattr(p, name, None), p.grad
    if isinstance(value, Tensor):
        beside = (None, 0) if grad is None else (ref(grad), grad._version)
        noted(p, name).beside = Beside(ref(value), *beside)


def has_other_gradient(p: Parameter, name: str) -> bool:
    """Whether a parameter has another gradient than when a result was saved, if that was noted."""
    beside = noted(p, name).beside
    if beside is None or beside.value() is not vars(p).get(name):
        return False
    grad = p.grad
    if beside.grad is None or grad is None:
        return beside.grad is not grad
    return beside.grad() is not grad or beside.version != grad._version


def note_step(p: Tensor, name: str) -> None:
    """Note that an optimiser has used the gradient and a result that a parameter has now."""
    own, grad = vars(p), p.grad
    if isinstance(own, Attributes):
        chain = _chain(p, name)
        own.used = None if grad is None else Used(ref(grad), grad._version, chain=chain)


def _chain(p: Tensor, name: str) -> Any:
    return getattr(noted(p, name).accumulated, "chain", None)


def note_pass(parameters: Iterable[Tensor], is_first: bool = True) -> None:
    """Note whether a backward pass, which has not come to gradients yet, adds to used ones.

    One whose results go on may be a later one since they were used: not the ``is_first``.
    """
    for p in parameters:
        own, grad = vars(p), p.grad
        used = own.used if isinstance(own, Attributes) else None
        if used is not None:
            # a gradient may be zero, with no change that is counted (p.grad.data.zero_())
            same = grad is not None and used.grad() is grad and used.version == grad._version
            added = same and type(grad) is Tensor and (not is_first or bool(grad.any()))
            added = added or (used.is_added_to and not is_first)
            own.used = used._replace(is_added_to=added)  # type: ignore[attr-defined]


def contain_used(p: Tensor, name: str) -> tuple[bool, bool]:
    """Whether gradient and result contain those of the step before, and of a pass since."""
    own = vars(p)
    used = own.used if isinstance(own, Attributes) else None
    if used is None:
        return False, False
    goes_on = used.chain is not None and used.chain is _chain(p, name)
    return used.is_added_to and used.grad() is p.grad, goes_on


def saved(p: Tensor) -> dict[str, Any]:
    """Return the results that a parameter has now."""
    own = vars(p)
    return {name: own[name] for name in _results(p) if name in own}


_count: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]


def _users(tensor: Tensor) -> int:
    """Count the tensors that look at a tensor's memory, and the object that tells."""
    storage = tensor.untyped_storage()
    return _count(storage._cdata)


_ALONE = _users(torch.empty(1))  # the tensor lives while it is counted


def owned(tensor: Tensor) -> Tensor:
    """Return a tensor if nobody else has its memory, and it may be changed in place, else a copy.

    Another name of a detached tensor goes unnoticed. A graph may have stored one that has it.
    """
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    if is_plain and not tensor.requires_grad:
        storage = tensor.untyped_storage()
        if _count(storage._cdata) == _ALONE:
            is_expanded = torch._debug_has_internal_overlap(tensor) == 1
            return tensor.contiguous() if is_expanded else tensor
    return tensor.clone(memory_format=torch.contiguous_format) if is_plain else tensor.clone()
