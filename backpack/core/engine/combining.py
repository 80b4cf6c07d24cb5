"""Where results of a backward pass go: to the parameters, or first to the other parts of the batch.

A quantity means what ``p.grad`` means. Where that is averaged over W processes, the loss of each
stands for 1/W of a loss of all their samples; where it accumulates over backward passes, their
losses add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import WeakMethod

from torch import Tensor, distributed
from torch.nn import Parameter

from backpack.context import Configuration
from backpack.core.engine import results
from backpack.core.engine.products import OF_GRADIENT, OVER_PARTS, Products
from backpack.core.engine.statistics import OfProducts, Statistics, of_value
from backpack.core.record.tape import Call, all_live_calls
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
OTHER_EXTENSIONS = (
    "accumulate=True: the extensions {} are those of one context now, but were not before, or have "
    "other options. Call backpack.clear(model) to start again."
)

SaveResult = Callable[[Parameter, Extension, Any], None]
# Averages statistics over the processes of a group, or tells these of an error.
Reduce = Callable[[Any, Sequence[Statistics], "Exception | None"], None]


class Accumulated(NamedTuple):
    """What backward passes have added up so far.

    Attributes:
        joined: What all processes have.
        local: What has been added on this process alone since, as under ``no_sync()``.
    """

    joined: Statistics | None
    local: Statistics | None


class Combining:
    """Takes the results of a backward pass (as :class:`~backpack.core.types.Save`).

    Args:
        configuration: Of the pass.
        write: Saves a result at a parameter: a method of the pass.
        originals: Parameters by the copies that rules see.

    Attributes:
        groups: Parameters whose gradients are averaged, with the processes.
        is_waiting: Whether there are results that cannot be written at once.
    """

    # from ``backpack.distributed``, which is above the engine
    reduce: ClassVar[Reduce]

    def __init__(
        self, configuration: Configuration, write: SaveResult, originals: dict[Any, Parameter]
    ):
        """Hold nothing yet."""
        self.accumulates = self.is_waiting = configuration.accumulate
        self.chosen = configuration.process_group
        self.exts = configuration.exts
        self._write = WeakMethod(write)  # the pass has this one: no cycle, which would keep calls
        self.originals = originals
        self.groups: dict[Parameter, Any] = {}
        self._held: list[Statistics] = []

    # ------------------------------------------------------------------ what is combined

    def note(self, call: Call, is_nested: bool) -> None:
        """Note whether the gradients of a reached call's parameters are averaged.

        Raises:
            NotImplementedError: If that is not known, or not possible.
        """
        group = self._group_of(call)
        if group is not None:
            if call.averaging is not None and call.averaging.may_stop:
                raise NotImplementedError(NO_JOIN)
            self.groups |= dict.fromkeys(call.params.values(), group)
            self.is_waiting = True
        elif is_nested and self.chosen == "module" and call.averaging is None and _are_several():
            raise NotImplementedError(NO_NESTED)

    def _group_of(self, call: Call) -> Any:
        """Return the processes over which gradients are averaged; None if there are no others."""
        of_module = call.averaging
        if self.chosen is None or (of_module is not None and not of_module.is_on):
            return None
        if self.chosen != "module":
            group = self.chosen
        elif of_module is None:
            return None
        else:
            group = of_module.group
        return group if group.size() > 1 else None

    def _communicates(self) -> bool:
        """Whether something is summed over samples, on all processes that have the extensions."""
        return any(
            not ext.reads
            or any(
                name not in OVER_PARTS or OVER_PARTS[name].sample_axis is None for name in ext.reads
            )
            for ext in self.exts
        )

    def others(self) -> list[Any]:
        """Return the groups that wait for this process; if no call was reached, those that may."""
        if not self._communicates():
            return []
        found = self.groups.values() or map(self._group_of, all_live_calls())
        return list(dict.fromkeys(group for group in found if group is not None))

    # ------------------------------------------------------------------ as Save

    def __call__(self, p: Parameter, ext: Extension, value: Any) -> None:
        """Take a result that is not extracted of products."""
        p = self.originals.get(p, p)
        if self._combines(p, (ext,)):
            self._held.append(of_value(p, ext, value))
        else:
            self.write(p, ext, value)

    @property
    def write(self) -> SaveResult:
        """Saves a result at a parameter. It is the method itself: nobody on the way has a name."""
        write = self._write()
        assert write is not None
        return write

    def holds(self, products: Products, exts: Sequence[Extension]) -> bool:
        """Take products, unless results of them can be made at once."""
        p = products.parameter = self.originals.get(products.parameter, products.parameter)
        if not self._combines(p, exts):
            return False
        self._held.append(OfProducts(products, exts))
        return True

    def _combines(self, p: Parameter, exts: Sequence[Extension]) -> bool:
        combines = self.accumulates or p in self.groups
        if combines:
            for ext in exts:
                if ext.collects or not OF_GRADIENT.isdisjoint(ext.needs):
                    raise NotImplementedError(f"{ext!r}: {NOT_OF_PARTS}")
                if ext.propagation is not None and not ext.propagation.adds_up:
                    raise NotImplementedError(f"{ext!r}: {NOT_A_SUM}")
        return combines

    # ------------------------------------------------------------------ all parts

    def finish(self, error: Exception | None = None) -> None:
        """Combine the parts, and write the results.

        Args:
            error: What has stopped the pass on this process. Others are told, and it is raised.
        """
        held, self._held = self._held, []
        before: list[Accumulated] = []
        if error is None:
            try:
                before = [self._before(part) for part in held]
                held = [_plus(old.local, part) for old, part in zip(before, held, strict=True)]
            except Exception as caught:
                error = caught
        communicates = self._communicates()
        for group in self.others() if communicates else dict.fromkeys(self.groups.values()):
            own = [part for part in held if self.groups.get(part.parameter) is group]
            if not communicates:
                for part in own:
                    part.scale(1 / group.size())
                continue
            try:
                type(self).reduce(group, own, error)
            except RuntimeError as caught:  # other groups are told, too
                error = error or caught
        if error is not None:
            raise error
        after = []
        writing = _Writing(self._finished if self.accumulates else self.write)
        for old, part in zip(before, held, strict=True):
            is_joined = part.parameter in self.groups
            joined = _plus(old.joined, part) if is_joined else old.joined
            after.append(Accumulated(joined, None if is_joined else part))
            whole = part if joined is None else joined if is_joined else joined.plus(part)
            (whole.copy() if self.accumulates else whole).extract(writing)
        for state, part in zip(after, held, strict=True):
            group = self.groups.get(part.parameter)
            for ext in part.exts:
                if self.accumulates:
                    results.accumulate(part.parameter, ext.savefield, state)
                if group is not None:
                    results.note_processes(part.parameter, ext.savefield, group.size())

    def continues(self, p: Parameter) -> bool:
        """Whether results of a parameter are added to those of earlier passes, as its gradient."""
        return self.accumulates and any(results.accumulated(p, ext.savefield) for ext in self.exts)

    def _finished(self, p: Parameter, ext: Extension, value: Any) -> None:
        """Write a result, with the marks of the earlier one that it contains."""
        before, marks = getattr(p, ext.savefield, None), {}
        if isinstance(before, Tensor) and results.accumulated(p, ext.savefield) is not None:
            marks = {name: m for name, m in vars(before).items() if name.startswith("_backpack_")}
        self.write(p, ext, value)
        if marks:
            vars(getattr(p, ext.savefield)).update(marks)

    def _before(self, part: Statistics) -> Accumulated:
        """Return what earlier passes have accumulated for the same extensions.

        Raises:
            ValueError: If extensions that belong together now did not then.
        """
        nothing = Accumulated(None, None)
        if not self.accumulates:
            return nothing
        found = [results.accumulated(part.parameter, ext.savefield) for ext in part.exts]
        first, *others = found
        same = all(other is first for other in others)
        if same and first is None:
            return nothing
        known = first and (first.joined or first.local)
        if not same or not _are_alike(known.exts, part.exts):
            names = ", ".join(ext.savefield for ext in part.exts)
            raise ValueError(OTHER_EXTENSIONS.format(names))
        return first


class _Writing:
    """Saves results that are complete."""

    is_waiting = False

    def __init__(self, write: SaveResult):
        self.write = write

    def __call__(self, p: Parameter, ext: Extension, value: Any) -> None:
        self.write(p, ext, value)

    def holds(self, products: Products, exts: Sequence[Extension]) -> bool:
        return False


def _plus(one: Statistics | None, other: Statistics) -> Statistics:
    return other if one is None else one.plus(other)


def _are_alike(some: Sequence[Extension], others: Sequence[Extension]) -> bool:
    """Whether these are the same extensions, in any order."""
    known = list(map(_options, some))
    return len(some) == len(others) and all(_options(ext) in known for ext in others)


def _options(ext: Extension) -> Any:
    return type(ext), ext.savefield, ext.needs, ext.propagation


def _are_several() -> bool:
    """Whether there are other processes."""
    known = distributed.is_available() and distributed.is_initialized()
    return known and distributed.get_world_size() > 1
