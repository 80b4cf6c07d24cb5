"""What a module had when it was called: parameters, buffers and mode, which may change afterwards.

Derivatives are those of the forward pass. A program may have given the module other parameters by
then, changed them, or called it by ``torch.func.functional_call``.
"""

from __future__ import annotations

import copyreg
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from threading import RLock
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Size, Tensor
from torch.nn import Module, Parameter

from backpack.context import device_of_program
from backpack.core.record import shards
from backpack.core.record.registry import kind_of
from backpack.core.record.shards import Shard
from backpack.core.record.weights import (
    IS_SOMETHING,
    TENSORS,
    Kept,
    State,
    state_of_one,
    tensors_of,
)
from backpack.custom_module.function_module import FunctionModule

# An entry of a dictionary: where, its name, and the value.
Entry = tuple[dict[str, Any], str, Any]
NOTHING = object()
T = TypeVar("T", bound="ModuleState")
# Types of options. What may hold a tensor could let the graph of a call own the call.
PLAIN = frozenset({bool, int, float, str, type(None)})
SEQUENCES = frozenset({tuple, list, Size})
# What every module has, and every extended one.
_OF_MODULES = frozenset({*vars(Module()), "__prepare_scriptable__"})
# Names of options of the classes of torch, whose instances have the same attributes. Those of a
# module that stands for a function stay what they are.
_OPTIONS: dict[type[Module], tuple[str, ...]] = {FunctionModule: ()}
# Locks of modules that were evaluated.
_turns: WeakKeyDictionary[Module, Any] = WeakKeyDictionary()


class ModuleState:
    """Parameters, buffers and mode of a module at the time of a call."""

    called: Module
    module: Module  # the same, or a copy with the options of the call, to be read, if it has others
    params: dict[str, Parameter]  # its own that require a gradient
    read: list[dict[str, Any]]  # its parameters, its buffers, then those of its children in turn
    training: bool
    modes: tuple[bool, ...] = ()  # of it and all children, if a rule evaluates these with it
    # names and values of what its class calls constants, such as a stride, and of attributes that
    # are numbers, strings, None, or sequences of such
    options: tuple[tuple[str, ...], tuple[Any, ...]]
    addresses: tuple[int, ...] = ()  # where its parameters were in memory
    kept_values: Mapping[Tensor, Kept] = MappingProxyType({})  # of those that a pass has changed
    views: tuple[Shard, ...] = ()  # of parameters that inputs and outputs are views of
    shards: tuple[Shard, ...] = ()  # those, and of parameters that the call has read
    has_unknown_shards = False  # parameters are sharded, and nobody knows where the shards are

    def _note_module(self, module: Module, own: Mapping[str, Parameter | None]) -> None:
        """Note what a module has now, and its own parameters that derivatives are about."""
        self.module = self.called = module
        self.training = module.training
        kind = type(module)
        names = _OPTIONS[kind] if kind in _OPTIONS else _names_of_options(module)
        values = tuple(map(vars(module).get, names, repeat(NOTHING)))
        if list in map(type, values):  # they may change in place
            values = tuple(map(copy_of_list, values))
        self.options = names, values
        self.params = {}
        for name, p in own.items():
            if p is not None and p.requires_grad:
                self.params[name] = p
        if module._modules:
            self.read = [tensors.copy() for tensors in tensors_of_modules(module)]
        else:
            self.read = [module._parameters.copy(), module._buffers.copy()]
        for buffers in self.read[1::2]:
            for name, buffer in buffers.items():
                if buffer is not None and buffer.grad_fn is not None:
                    buffers[name] = buffer.detach()  # a graph of this call would own the call

    def _note_shards(self, tensors: Sequence[Any]) -> None:
        """Note which sharded parameters the call has read, and which some tensors are views of."""
        self.has_unknown_shards = not shards.note(self.module)
        if shards.KNOWN:
            self.views = shards.shards_in(tensors)
            read = shards.shards_in(self.own())
            self.shards = (*self.views, *(shard for shard in read if shard not in self.views))

    @property
    def has_other_options(self) -> bool:
        """Whether options of the module are others than those of the call."""
        own = vars(self.module)
        return any(
            own.get(name, NOTHING) is not was
            and not (type(was) is list and repr(own.get(name)) == repr(was))
            for name, was in zip(*self.options, strict=True)
        )

    def with_options(self) -> Module:
        """Return what has the options of the call, and the attributes that the module has now."""
        own = vars(self.called)
        each = zip(*self.options, strict=True)
        options = {name: was for name, was in each if name in own or was is not NOTHING}
        if not options:
            return self.called
        had = {name: copy_of_list(x) for name, x in added(self.called).items()}
        return copied(self.called, had | options)

    @property
    def evaluated(self) -> Module:
        """What is evaluated again: the copy, which other threads do not see, if there is one.

        The module itself if its attributes may lead from the copy to it.
        """
        if self.module is self.called:
            return self.called
        held = (*added(self.called).values(), *_slots_of(self.called).values())
        nested = [x if type(x) in SEQUENCES else (x,) for x in held]
        is_apart = (PLAIN | TENSORS).issuperset(map(type, chain.from_iterable(nested)))
        return self.module if is_apart else self.called

    @property
    def state(self) -> list[State]:
        """Tell parameters and buffers, as the derivatives see them, from those before a change."""
        kept = self.kept_values
        return [kept[t].state if t in kept else state_of_one(t) for t in tensors_of(self.read)]

    def refuse_moved(self) -> None:
        """Refuse parameters that were changed so between the forward pass and the backward pass."""
        raise RuntimeError(
            f"A parameter of {describe(self.module)} was given other memory (p.data = …) after the "
            "forward pass. Quantities are those of the weights of the forward pass, which autograd "
            "alone still has. Change weights after the backward pass."
        )

    def own(self) -> list[Tensor]:
        """List the parameters that the call has read, of itself and of what it stands for."""
        found: list[Tensor] = [*self.params.values()]
        for read in self.read[::2]:
            found += filter(IS_SOMETHING, read.values())
        return found

    def see_parameters_before(self, changed: Mapping[Tensor, Kept]) -> None:
        """Let derivatives see parameters as they were; an error if a changed one has no copy."""
        own = {t: changed[t] for t in self.own() if t in changed}
        for t, was in own.items():
            if was.value is None or torch.is_grad_enabled():
                raise RuntimeError(
                    f"A parameter of {describe(self.module)}, of shape {list(t.shape)}, was "
                    "changed during the backward pass. Quantities are those of the weights of the "
                    "forward pass, which are kept where hooks of parameters or modules may change "
                    "them, but not if they are frozen, or with create_graph=True. Change it after "
                    "the backward pass."
                )
        # an earlier backward pass through the same graph may have kept some already
        self.kept_values = own | dict(self.kept_values)

    def tensors(self, reads_entries: bool = True) -> Mapping[str, Any]:
        """Return parameters and buffers by (qualified) name, as the derivatives see them.

        What is sharded is gathered if entries are read; else there are tensors of the same shapes.
        """
        if self.shards and reads_entries:
            shards.need(self.shards)
        if self.module._modules:
            prefixes = [name + "." if name else "" for name, _ in self.module.named_modules()]
            if 2 * len(prefixes) != len(self.read):
                raise RuntimeError(self._changed("its children are others"))
            found = {
                prefixes[i // 2] + name: t
                for i, read in enumerate(self.read)
                for name, t in read.items()
            }
        else:
            params, buffers = self.read
            found = params | buffers if buffers else params
        if self.kept_values:
            found = {name: self._as_kept(t) for name, t in found.items()}
        if self.shards and not reads_entries:
            found = {name: t if shards.is_there(t) else placeholder(t) for name, t in found.items()}
        return found

    @contextmanager
    def as_it_was(self, precision: torch.dtype | None = None) -> Iterator[None]:
        """Let what is evaluated have all that it had then, perhaps with tensors in a precision."""
        with turn(self.called):
            is_shared = self.module is self.called
            if is_shared and self.has_other_options:  # another thread has just had them
                self.module = self.with_options()
            module = self.evaluated
            each = [(module, self.training)]
            if self.modes:
                each = list(zip(module.modules(), self.modes, strict=False))
            entries: list[Entry] = [
                (vars(m), "training", was) for m, was in each if m.training != was
            ]
            slots: dict[str, Any] = {}
            if self.module is not module:
                own, was, slots = vars(module), vars(self.module), _slots_of(module)
                had = added(self.module)
                for name in ("_parameters", "_buffers"):
                    if own[name].keys() != was[name].keys():
                        had[name] = was[name]
                # attributes of now may be options, or hide what is put back, such as ``forward``
                names = {"forward", *self.options[0], *self.read[0], *self.read[1]} - was.keys()
                entries += [(own, name, copy_of_list(value)) for name, value in had.items()]
                entries += [(own, name, NOTHING) for name in names]
                _set_slots(module, _slots_of(self.module))
            replaced = [(where, name, where.get(name, NOTHING)) for where, name, _ in entries]
            put(entries)
            try:
                replaced += self.swap_tensors(module, precision)
                with device_of_program():
                    yield
            finally:
                put(replaced)
                _set_slots(module, slots)

    def swap_tensors(
        self, module: Module, precision: torch.dtype | None = None, for_users: bool = False
    ) -> list[Entry]:
        """Give a module (or a copy) the tensors of the call, where it has others by now.

        Such as after a ``torch.func.functional_call``; all of them if they are cast to a precision.
        ``for_users``: parameters that have changed as they are now, sharded ones as users see them.
        Return what to :func:`put` back. Other children, or a hidden parameter, are an error.
        """
        own, reads = tensors_of_modules(module), self.read
        if len(own) != len(reads):
            raise RuntimeError(self._changed("its children are others"))
        if self.shards and for_users:
            reads = [{name: shards.home(t) for name, t in read.items()} for read in reads]
        elif self.shards:
            shards.need(self.shards)
        if self.kept_values and not for_users:
            reads = [{name: self._as_kept(t) for name, t in read.items()} for read in reads]
        if precision is None and not any(map(_differ, own, reads)):
            return []
        entries = [
            (tensors, name, t if precision is None else cast(t, precision))
            for tensors, read in zip(own, reads, strict=True)
            for name, t in (read if precision is None else tensors | read).items()
            if precision is not None or tensors.get(name, NOTHING) is not t
        ]
        replaced = [(tensors, name, tensors.get(name, NOTHING)) for tensors, name, _ in entries]
        self._check_hidden(module, [entry for entry in replaced if entry[2] is NOTHING])
        put(entries)
        return replaced

    def _as_kept(self, tensor: Tensor | None) -> Tensor | None:
        """Return the copy of a parameter that has changed; any other tensor as it is."""
        kept = None if tensor is None else self.kept_values.get(tensor)
        return tensor if kept is None else kept.value

    def _check_hidden(self, module: Module, missing: Sequence[Entry]) -> None:
        """Refuse attributes that hide parameters and buffers which a module no longer has."""
        for holder in module.modules() if missing else ():
            for tensors, name, _ in missing:
                is_own = tensors is holder._parameters or tensors is holder._buffers
                if is_own and (name in vars(holder) or hasattr(type(holder), name)):
                    raise RuntimeError(self._changed(f"an attribute hides its '{name}'"))

    def _changed(self, what: str) -> str:
        return (
            f"{describe(self.module)} has changed since the forward pass: {what}. Change modules "
            "after the backward pass and its extension hooks."
        )


def turn(module: Module) -> Any:
    """Return a lock: threads take turns in evaluating a module, which changes it for a moment."""
    return _turns.setdefault(module, RLock())


def _names_of_options(module: Module) -> tuple[str, ...]:
    """List what a module's class calls constants, and its attributes that are plain values."""
    has, kind = vars(module), type(module)
    plain = [
        name
        for name, value in has.items()
        if type(value) in PLAIN or (type(value) in SEQUENCES and PLAIN.issuperset(map(type, value)))
    ]
    names = tuple(dict.fromkeys((*getattr(kind, "__constants__", ()), *plain)))
    if kind.__module__.startswith("torch.nn.modules."):  # but for attributes that users add
        own = kind.__mro__[: kind.__mro__.index(Module)]
        codes = [
            getattr(f, "__code__", None) for f in chain(*(vars(base).values() for base in own))
        ]
        named = {name for code in codes if code is not None for name in code.co_names}
        fixed = (name for name in names if type(has.get(name)) is not list)
        names = _OPTIONS[kind] = tuple(filter(named.__contains__, fixed))
    return names


def parameters_of(states: Iterable[T]) -> dict[T, list[Tensor]]:
    """Return the parameters that calls have read."""
    return {one: one.own() for one in states}


def copied(module: Module, options: Mapping[str, Any] | None = None) -> Module:
    """Copy a module, but not its tensors and children, with other attributes."""
    copy = object.__new__(type(module))
    tensors = {"_parameters": module._parameters.copy(), "_buffers": module._buffers.copy()}
    own = vars(copy)
    own.update(vars(module), **tensors)
    put([(own, *option) for option in (options or {}).items()])
    # its calls are not to make it one of the extended modules, which it is in the place of
    own["_backpack_identity"] = id(copy)
    _set_slots(copy, _slots_of(module))
    return copy


def _slots_of(module: Module) -> dict[str, Any]:
    names_of: Any = vars(copyreg)["_slotnames"]  # which its stubs do not have
    names = names_of(type(module))
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


def _set_slots(module: Module, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        object.__setattr__(module, name, value)


def added(module: Module) -> dict[str, Any]:
    """Return the attributes of a module that not every module has."""
    own = vars(module).items()
    return {k: x for k, x in own if k not in _OF_MODULES and not k.startswith("_backpack")}


def tensors_of_modules(module: Module) -> list[dict[str, Any]]:
    """List the parameters and the buffers that a module has now, then those of children."""
    if not module._modules:
        return [module._parameters, module._buffers]
    return [ts for child in module.modules() for ts in (child._parameters, child._buffers)]


def _differ(tensors: dict[str, Any], read: dict[str, Any]) -> bool:
    return bool(read) and any(map(operator.is_not, map(tensors.get, read), read.values()))


def copy_of_list(value: Any) -> Any:
    """Return a copy of a list, which may change in place; anything else as it is."""
    return value.copy() if type(value) is list else value


def put(entries: Sequence[Entry]) -> None:
    """Set entries, or delete them."""
    for where, name, value in entries:
        if value is NOTHING:
            where.pop(name, None)
        else:
            where[name] = value


def placeholder(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape that takes no memory. Whoever reads it will notice."""
    return tensor.new_full((), torch.nan).expand(tensor.shape)


def cast(x: Any, precision: torch.dtype) -> Any:
    """Return a floating-point tensor in another precision; anything else as it is."""
    return x.to(precision) if isinstance(x, Tensor) and x.is_floating_point() else x


def describe(module: Module) -> str:
    """Name a module as a reader of its model would: qualified name and type."""
    name = vars(module).get("_backpack_name", "")
    managed = shards.MANAGED in vars(module)
    kind = kind_of(module).__name__ if managed else type(module).__name__
    return f"'{name}' ({kind})" if name else kind


def works_in_place(module: Module) -> bool:
    """Whether a module overwrites what it reads, such as ``nn.ReLU(inplace=True)``."""
    return bool(vars(module).get("inplace"))
