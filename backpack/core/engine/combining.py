"""Where results of a backward pass go: to the parameters, or first to the other parts of the batch.

A quantity means what ``p.grad`` means. Where that is averaged over W processes, the loss of each
stands for 1/W of a loss of all their samples; where it accumulates over backward passes, their
losses add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn import Parameter

from backpack.context import Configuration
from backpack.core.engine import results
from backpack.core.engine.extracted import IN_BASES, OVER_PARTS, UNSLICED, names_of
from backpack.core.engine.products import Products
from backpack.core.engine.results import Writer
from backpack.core.engine.statistics import Loaded, Name, OfProducts, Statistics, of_value
from backpack.core.lazy import lazy
from backpack.core.record import shards
from backpack.core.record.alive import Users, all_live_calls
from backpack.core.record.averaging import Averaging, Processes, is_wrapped
from backpack.core.record.calls import Call
from backpack.core.record.module_state import describe
from backpack.core.record.shards import home, shard_of
from backpack.core.record.tape import calls_above
from backpack.core.record.visits import Visit
from backpack.core.record.weights import TENSORS
from backpack.core.types import Extension

NO_JOIN = (
    "Quantities cannot be averaged over processes inside of model.join(...), where some processes "
    "have no batch any more. Give all of them the same number of batches (of any sizes), or use "
    "backpack(..., process_group=None) for the quantities of the process alone."
)
NO_NESTED = (
    "It is not known whether gradients of a backward pass inside of another one are averaged over "
    "the processes. If that is torch.utils.checkpoint, use it with use_reentrant=False; or use "
    "backpack(..., process_group=None) for the quantities of the process alone."
)
NO_GRAPH = (
    "Quantities that are averaged over processes have no graph: backward(create_graph=True) needs "
    "backpack(..., process_group=None)."
)
NOT_A_SUM = (
    "a matrix that is averaged over the batch at every module, as for KFRA, does not follow from "
    "those of parts of the batch. Use KFAC or KFLR, or backpack(..., process_group=None) and no "
    "accumulate=True."
)
NOT_OF_PARTS = (
    "factored individual gradients, and what is made of those of all parameters, are not put "
    "together from parts of the batch. Use BatchGrad() or SumGradSquared(), or "
    "backpack(..., process_group=None) and no accumulate=True."
)
OF_OWN_SAMPLES = (
    "extract() makes something without an axis of samples of values for each sample, of which a "
    "process has those of its own samples alone: the result would be another one on each process. "
    "Name a sum over samples in 'needs' (such as 'square'), keep the axis, or use "
    "backpack(..., process_group=None)."
)
NOT_IN_BASES = (
    "eigenvalues in the eigenbasis of the whole batch do not follow from those of its parts. Use "
    "KFAC or KFLR, or backpack.linalg.EKFAC of several batches, or backpack(..., "
    "process_group=None) and no accumulate=True."
)
OTHER_EXTENSIONS = (
    "accumulate=True: the extensions {} are those of one context now, but were not before, or have "
    "other options. Call backpack.clear(model) to start again."
)

OTHER_GROUP = (
    "process_group: the parameters are sharded over other processes (fully_shard) than those of "
    "this group. Use 'module' for those, or None for the quantities of the process alone."
)
LOCAL_BEHIND_ALL = (
    "accumulate=True: a backward pass without averaged gradients "
    "(set_requires_gradient_sync(False)) came after one that has averaged them: what this process "
    "has of the first are shards. Average gradients in the last backward pass alone."
)

# Averages statistics over processes, or tells these of an error.
Reduce = Callable[[Processes, Sequence[Statistics], "Exception | None"], None]
# Tells processes of an error, or finds out whether a text is the same on all.
Tell = Callable[[Processes, Exception], None]
Agree = Callable[[Processes, str, bool], bool]


class Accumulated(NamedTuple):
    """What backward passes have added up so far."""

    joined: Statistics | None  # what all processes have
    local: Statistics | None  # added on this process alone since, as under ``no_sync()``
    times: int = 0  # how many passes have added to what all processes have
    chain: Any = None  # the same object in all passes that are added up


class Combining:
    """Takes the results of a backward pass (as :class:`~backpack.core.types.Save`)."""

    # from ``backpack.distributed``, which is above the engine
    reduce: ClassVar[Reduce]
    tell: ClassVar[Tell]
    agree: ClassVar[Agree]

    def __init__(self, configuration: Configuration, results: Writer, nodes: Sequence[Any]):
        """Note what the pass was asked for; nothing is deferred yet."""
        self.accumulates = configuration.accumulate
        self.is_waiting = self.accumulates  # whether some results cannot be written at once
        self.chosen = configuration.process_group
        # whether gradients may be averaged without a call that says by what
        self._may_average = self.chosen != "module" or is_wrapped()
        self.nodes = nodes  # where the pass begins in the graph
        self.exts = configuration.exts
        self._travels = bool(configuration.second_order)  # besides the gradient
        self.write, self._leave_out = results.write, results.leave_out
        self.originals = results.originals
        self.groups: dict[Parameter, Processes] = {}  # of those whose gradients are averaged
        self.is_sharded = False  # whether others wait for this process on the way
        self._gathering: dict[Processes, None] = {}  # those that gather weights after the pass
        self._names: dict[Parameter, Name] = {}  # of those whose gradients are averaged
        self._have_same_graphs: dict[Processes, bool] = {}
        self._told_of_error: set[Processes] = set()
        self._deferred: list[Statistics] = []
        self._latest_unit: Any = None  # parameters that are sharded together, of the last result

    # ------------------------------------------------------------------ what is combined

    def leave_out(self, p: Parameter, exts: Iterable[Extension]) -> None:
        """Let a parameter have none rather than that of the pass before, unless they add up."""
        if not self.accumulates:
            self._leave_out(home(p), exts)

    def average_nothing(self) -> None:
        """Note that gradients are returned, not accumulated: a wrapper does not see them."""
        if self.chosen == "module":
            self.chosen = None

    def note(self, call: Visit, is_nested: bool) -> None:
        """Note whether gradients of a reached call are averaged; refuse what is unknown."""
        whole: Iterable[Parameter] = call.params.values()
        if shards.KNOWN:
            for name, p in call.params.items():
                self._note_shard(p, call, name)
            whole = [p for p in whole if shard_of(p) is None]
            if not whole:
                return
        averaged = self._averaged(call)
        is_plain = TENSORS.issuperset(map(type, whole)) or not (averaged or self._travels)
        if not is_plain and any(map(shards.is_distributed, whole)):
            what = shards.TENSOR_PARALLEL.format(names_of(self.exts), describe(call.module))
            raise NotImplementedError(what)
        if averaged:
            for name, p in call.params.items():
                if p in averaged:
                    group, averaging = averaged[p]
                    if averaging is not None and averaging.may_stop:
                        raise NotImplementedError(NO_JOIN)
                    self.groups[p] = Processes((group,))
                    number = None if averaging is None else averaging.places.get(id(p))
                    self._note_name(p, call, name, None if number is None else f"{number:09}")
            self.is_waiting = True
        elif is_nested and self.chosen == "module" and call.averaging is None and are_several():
            raise NotImplementedError(NO_NESTED)

    def _note_name(self, p: Parameter, call: Call, name: str, key: str | None) -> None:
        """Note what a parameter is called on all processes, whose calls may have another order.

        That is its ``name`` at a call; a ``key`` tells it better from others.
        """
        own = vars(call.module).get("_backpack_name", "")
        name = f"{own}.{name}" if own else name
        noted = Name(name if key is None else key, name)
        self._names[p] = min(noted, self._names.get(p, noted))

    def _note_shard(self, p: Parameter, call: Call, name: str) -> None:
        """Note where results of a parameter belong that was sharded."""
        shard = shard_of(p)
        if shard is None:
            return
        shard.check()
        self.is_sharded = True
        own = self.originals[p] = shard.parameter
        self._note_name(own, call, name, shard.name)
        if own in self.groups or self.chosen is None:
            return
        processes = shard.averaging()
        if processes is None:
            return
        if self.chosen != "module" and not _is_one(self.chosen, processes):
            raise NotImplementedError(OTHER_GROUP)
        if torch.is_grad_enabled():
            raise NotImplementedError(NO_GRAPH)
        self.groups[own] = processes
        self.is_waiting = True

    def note_gathering(self, call: Call) -> None:
        """Note that weights which a call has read may be read when the backward pass is over."""
        for shard in call.shards:
            self.is_sharded = self.is_waiting = True
            self._gathering[shard.processes] = None

    def _averaged(self, call: Call) -> dict[Parameter, tuple[Any, Averaging | None]]:
        """Return the processes that average gradients of a call's parameters, and the wrapper."""
        found: dict[Parameter, tuple[Any, Averaging | None]] = {}
        if self.chosen is None or not (call.averaging or self._may_average):
            return found
        for p in call.params.values():
            if shard_of(p) is not None:
                continue
            averaging = call.averaging or self._averaging_around(p)
            if averaging is not None and not averaging.is_on:
                continue
            group = self.chosen
            if group == "module":
                if averaging is None or id(p) not in averaging.places:
                    continue
                group = averaging.group
            if group.size() > 1:
                found[p] = group, averaging
        return found

    def _averaging_around(self, p: Parameter) -> Averaging | None:
        """Return what averages the gradient of a parameter that is used outside of the wrapper."""
        if not is_wrapped():
            return None
        # the latest first: what it says of the next backward pass counts
        return next((one for one in self._averagings if id(p) in one.places), None)

    @lazy
    def _averagings(self) -> list[Averaging]:
        return [one.averaging for one in reversed(all_live_calls()) if one.averaging]

    def _in_graph(self) -> Sequence[Call]:
        """Return the calls that the pass may reach: all live ones, if that is not known."""
        return calls_above(self.nodes) or all_live_calls()

    def _communicates(self) -> bool:
        """Whether processes have to talk: a sum over samples is wanted, or weights are gathered."""
        of_samples = {name for name, rule in OVER_PARTS.items() if rule.sample_axis is not None}
        return bool(self._gathering) or any(
            not ext.reads or not of_samples.issuperset(ext.reads) for ext in self.exts
        )

    def others(self) -> list[Any]:
        """Return the groups that wait for this process; if no call was reached, those that may."""
        if not self._communicates():
            return []
        if self.groups or self._gathering:
            return list(dict.fromkeys((*self.groups.values(), *self._gathering)))
        calls = self._in_graph()
        found = dict.fromkeys(group for one in calls for group, _ in self._averaged(one).values())
        whole = [Processes((group,)) for group in found]
        return [processes for processes in whole + self._of_shards(calls) if processes.exist]

    def _of_shards(self, calls: Sequence[Call]) -> list[Processes]:
        """Return the processes that have shards of the parameters of calls."""
        known = dict.fromkeys(shard for call in calls for shard in call.shards)
        if self._travels:
            return list(dict.fromkeys(shard.processes for shard in known))
        found = dict.fromkeys(shard.averaging() for shard in known if self.chosen is not None)
        return [processes for processes in found if processes is not None]

    def stop(self, error: Exception) -> bool:
        """Note an error, and tell those who wait for this process before the pass is over.

        Return whether the pass has to go on as long as others do.
        """
        if not (self.is_sharded or any(call.shards for call in self._in_graph())):
            return bool(self.others())
        for processes in self.others():
            if processes.are_sharding and processes not in self._told_of_error:
                self._told_of_error.add(processes)
                type(self).tell(processes, error)
        return True  # torch gathers and reduces on the way

    def can_reduce_early(self, call: Visit, users: Users, is_early: bool) -> bool:
        """Whether what belongs to sharded parameters of a call may be reduced on the way.

        That has to happen on all processes at the same time. A graph that a program keeps on one
        of them lets that one put off what others would do at once (``is_early``): then all do it
        at the end.
        """
        owners = dict.fromkeys(self.groups.get(home(p)) for p in call.trained.values())
        found = [each for each in owners if each is not None and each.are_sharding]
        if not found or not self._communicates():
            return True
        same = self._have_same_graphs
        for processes in found:
            if processes not in same:
                live = [one for one in all_live_calls() if one.shards]
                alone = [f"{describe(one.module)}: {users.is_alone(one)}" for one in live]
                text = f"early: {is_early} {alone}"
                same[processes] = self.agree_with(processes, text, may_differ=True)
        return all(map(same.__getitem__, found))

    def is_alike(self, text: str) -> bool:
        """Whether all processes that gather weights have the same text."""
        answers = [self.agree_with(each, text, may_differ=True) for each in self._gathering]
        return all(answers)  # everybody has asked all of them

    def agree_with(self, processes: Processes, text: str, may_differ: bool = False) -> bool:
        """Whether processes have the same text; an error if one has stopped any of them."""
        try:
            return type(self).agree(processes, text, may_differ)
        except RuntimeError:
            self._told_of_error.add(processes)
            raise

    # ------------------------------------------------------------------ as Save

    def __call__(self, p: Parameter, ext: Extension, value: Any) -> None:
        """Take a result that is not extracted of products."""
        p = self.originals.get(p, p)
        if self._combines(p, (ext,)):
            self._defer(of_value(p, ext, value))
        else:
            self.write(p, ext, [value])

    def defers(self, products: Products, exts: Sequence[Extension]) -> bool:
        """Defer results of products that need other processes or passes; return whether they do."""
        p = products.parameter = self.originals.get(products.parameter, products.parameter)
        if not self._combines(p, exts):
            return False
        self._defer(OfProducts(products, exts))
        return True

    def _defer(self, part: Statistics) -> None:
        """Keep statistics until those of all parts are there; reduce sharded ones on the way."""
        processes = self.groups.get(part.parameter)
        if processes is not None and processes.are_sharding:
            part.is_sharded = True
            if self._communicates() and self._latest_unit not in (None, part.unit):
                parts = [one for one in self._deferred if one.is_sharded]
                self._deferred = [one for one in self._deferred if not one.is_sharded]
                self._write_all(*self._reduced(parts))
            self._latest_unit = part.unit
        self._deferred.append(part)

    def _combines(self, p: Parameter, exts: Sequence[Extension]) -> bool:
        """Whether results need other processes or passes; refuse those that do not add up."""
        if not (self.accumulates or p in self.groups):
            return False
        for ext in exts:
            if ext.collects or not UNSLICED.isdisjoint(ext.needs):
                raise NotImplementedError(f"{ext!r}: {NOT_OF_PARTS}")
            if not IN_BASES.keys().isdisjoint(ext.needs):
                raise NotImplementedError(f"{ext!r}: {NOT_IN_BASES}")
            if ext.propagation is not None and not ext.propagation.adds_up:
                raise NotImplementedError(f"{ext!r}: {NOT_A_SUM}")
        return True

    # ------------------------------------------------------------------ all parts

    def finish(self, error: Exception | None = None) -> None:
        """Combine the parts, and write the results; else tell others of an error, and raise it."""
        parts, self._deferred = self._deferred, []
        self._write_all(*self._reduced(parts, error, is_last=True))

    def _reduced(
        self, parts: list[Statistics], error: Exception | None = None, is_last: bool = False
    ) -> tuple[list[Statistics], list[Accumulated]]:
        """Reduce statistics over processes; return them, and what earlier passes have.

        The last time (and if an error has stopped the pass on this process), all processes are told
        that wait for this one, whether there are statistics or not.
        """
        before: list[Accumulated] = []
        if error is None:
            try:
                before = list(map(self._accumulated_before, parts))
                parts = [_plus(old.local, part) for old, part in zip(before, parts, strict=True)]
                for old, part in zip(before, parts, strict=True) if self.accumulates else ():
                    passes = f"{old.times} averaged passes or files"
                    part.behind = f"accumulate=True (behind {passes}) "
            except Exception as caught:
                error = caught
        communicates = self._communicates()
        waiting = self.others() if communicates else list(dict.fromkeys(self.groups.values()))
        waiting.sort(key=lambda processes: [group.group_name for group in processes.groups])
        for processes in waiting:
            own = [part for part in parts if self.groups.get(part.parameter) == processes]
            for part in own:
                part.name = self._names[part.parameter]
            own.sort(key=lambda part: part.name)  # others may come to them in another order
            if not communicates:
                for part in own:
                    part.scale(1 / processes.divisor)
                continue
            if processes in self._told_of_error or not (own or is_last):
                continue
            try:
                type(self).reduce(processes, own, error)
            except RuntimeError as caught:  # other groups are told, too
                self._told_of_error.add(processes)
                error = error or caught
        if error is not None:
            raise error
        return parts, before

    def _write_all(self, parts: Sequence[Statistics], before: Sequence[Accumulated]) -> None:
        """Write the results of statistics, and keep those that accumulate."""
        after = []
        write = self._finished if self.accumulates else self.write
        for old, part in zip(before, parts, strict=True):
            is_joined = part.parameter in self.groups
            if not is_joined and old.joined is not None and _has_shards(old.joined, part):
                raise NotImplementedError(LOCAL_BEHIND_ALL)
            whole = _plus(old.joined, part)
            after.append(
                Accumulated(whole, None, old.times + 1, old.chain)
                if is_joined
                else old._replace(local=part)
            )
            samples = [whole.own_samples(ext) for ext in part.exts] if is_joined else []
            (whole.copy() if self.accumulates else whole).extract(write)
            for ext, count in zip(part.exts, samples, strict=False):
                value = getattr(part.parameter, ext.savefield, None)
                if count is not None and not _has_samples(part.parameter, ext, value, count):
                    raise NotImplementedError(f"{ext!r}: {OF_OWN_SAMPLES}")
        for state, part in zip(after, parts, strict=True):
            processes = self.groups.get(part.parameter)
            for ext in part.exts:
                if self.accumulates:
                    results.noted(part.parameter, ext.savefield).accumulated = state
                if processes is not None:
                    averaged = results.Averaged(processes.groups, "N" in (ext.shape or ()))
                    results.noted(part.parameter, ext.savefield).averaged = averaged

    def continues(self, p: Parameter) -> bool:
        """Whether results of a parameter are added to those of earlier passes, as its gradient."""
        own = home(p)
        return self.accumulates and any(
            results.noted(own, ext.savefield).accumulated for ext in self.exts
        )

    def _finished(self, p: Parameter, ext: Extension, values: list[Any]) -> None:
        """Write a result, with the marks of the earlier one that it contains."""
        before, marks = getattr(p, ext.savefield, None), {}
        if isinstance(before, Tensor) and results.noted(p, ext.savefield).accumulated is not None:
            marks = {name: m for name, m in vars(before).items() if name.startswith("_backpack_")}
        self.write(p, ext, values)
        if marks:
            vars(getattr(p, ext.savefield)).update(marks)

    def _accumulated_before(self, part: Statistics) -> Accumulated:
        """Return what earlier passes have accumulated for the same extensions; refuse others."""
        nothing = Accumulated(None, None, chain=object())
        if not self.accumulates:
            return nothing
        found = [results.noted(part.parameter, ext.savefield).accumulated for ext in part.exts]
        first, *others = found
        same = all(other is first for other in others)
        if same and first is None:
            return nothing
        if same and isinstance(first, Loaded):
            if first.state["options"] == options_of(part.exts):
                return Accumulated(first.restored(part), None, 1, object())
        elif same:
            known = list(map(_options, (first.joined or first.local).exts))
            own = list(map(_options, part.exts))  # in any order
            if len(known) == len(own) and all(options in known for options in own):
                return first
        names = ", ".join(ext.savefield for ext in part.exts)
        raise ValueError(OTHER_EXTENSIONS.format(names))


def _plus(one: Statistics | None, other: Statistics) -> Statistics:
    """Add the statistics of the pass at hand to those of earlier ones, for its extensions."""
    if one is None:
        return other
    both = one.plus(other)
    both.exts, both.is_sharded = other.exts, other.is_sharded
    return both


def _options(ext: Extension) -> Any:
    return type(ext), ext.savefield, ext.needs, ext.reads, ext.propagation, ext.max_factor_size


def options_of(exts: Sequence[Extension]) -> list[str]:
    """Describe all options of extensions that what they accumulate depends on, in any order."""
    return sorted(f"{type(ext).__qualname__} {_options(ext)[1:]!r}" for ext in exts)


def gathered() -> shards.gathered:
    """Let weights that are sharded be there when they are read, outside of a backward pass."""
    return shards.gathered(lambda processes, text: Combining.agree(processes, text, False))


def _has_shards(joined: Statistics, part: Statistics) -> bool:
    """Whether earlier passes (or a file) have shards of what a pass has whole."""
    has, has_part = (any(map(shards.is_distributed, s.values.values())) for s in (joined, part))
    return joined.is_sharded or (has and not has_part)


def _has_samples(p: Parameter, ext: Extension, value: Any, count: int) -> bool:
    """Whether a result has an axis of samples, as far as that is known."""
    if not isinstance(value, Tensor):
        return True
    if ext.shape == ("*p",) and value.shape == p.shape:
        return False
    return count in value.shape


def _is_one(group: Any, processes: Processes) -> bool:
    """Whether a group has the same members."""
    ranks = distributed.get_process_group_ranks
    return len(processes.groups) == 1 and ranks(group) == ranks(processes.groups[0])


def are_several() -> bool:
    """Whether there are other processes."""
    known = distributed.is_available() and distributed.is_initialized()
    return known and distributed.get_world_size() > 1
