"""Whether the samples stay apart, and first, in models that were not converted.

There a first-order extension takes the rows of each layer for the samples. Whether that is so is
said by the calls of a backward pass, and by the autograd graph between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import EmbeddingBag, Module, Parameter

from backpack.core.derivatives.elementwise_losses import ElementwiseLossDerivatives as Elementwise
from backpack.core.derivatives.sample_axes import BatchAxis, from_first
from backpack.core.engine import checks
from backpack.core.engine.findings import OF_DATA, Findings
from backpack.core.engine.foreign_uses import ForeignUses
from backpack.core.engine.intercept import Entry
from backpack.core.engine.loss_terms import LossReduction, LossTerms, averages_chosen
from backpack.core.engine.paths import (
    Path,
    are_apart,
    is_unpacked,
    path_above,
    samples_in,
)
from backpack.core.engine.results import Writer
from backpack.core.engine.spread import shape_of
from backpack.core.record import data_flow
from backpack.core.record.given import Given
from backpack.core.record.module_state import describe
from backpack.core.record.origins import (
    RESHAPES,
    Origin,
    is_foreign_function,
    origin,
    parameter_behind,
)
from backpack.core.record.visits import Visit
from backpack.core.types import Extension

# What the option of a loss does with its terms
REDUCTION_OF_OPTION = {"mean": "mean", "batchmean": "mean", "sum": "sum"}

DIVIDES = "whose mean divides by the weights (or the number) of the targets of all samples"


class SampleFlow:
    """What the calls of one backward pass say about the samples, from the loss upwards."""

    def __init__(self, exts: Sequence[Extension], entry: Entry | None) -> None:
        """Nothing was reached by a call of ``backward()``, if that was noticed."""
        self.entry = entry
        self.found = Findings()  # what mixes samples, or is none
        self.reduction: LossReduction | None = None  # of the extended loss that it was called on
        self.looks_at_loss = any(map(attrgetter("looks_at_loss"), exts))
        # the call with parameters that comes next, and its number of samples
        self.next: dict[Origin | None, tuple[Visit, int]] = {}
        # what models were called with, noted before their calls are visited
        self.given: dict[Given, None] = {}
        self.terms = LossTerms(()) if entry is None or entry.terms is None else entry.terms
        # of parameters that functions read as well
        self.uses = ForeignUses(exts, self.given, self.terms.hidden)
        self.layers: dict[int, list[Module]] = {}  # by their number of samples
        self.axes = {0}  # along which they are

    # ------------------------------------------------------------------ call by call

    def visit(self, call: Visit, has_parameters: bool) -> None:
        """Look at a call, after all those that read its outputs.

        ``has_parameters``: this call has some, or one reached before; no use is told until then.
        """
        rule = call.derivatives
        if call.is_container:
            self.uses.told += call.params.values()
        if call.trained and rule is not None:
            self.uses.trained.append(call.trained)
            # those that functions have computed
            for p in filter(attrgetter("grad_fn"), call.trained.values()):
                self.uses.note(call, path_above(p.grad_fn, p.output_nr).leaves, is_told=False)
        paths = self._paths(call) if call.reads_functions else {}
        if self.uses.waiting and has_parameters:
            self.uses.tell()
        self._follow(call, paths)
        if call.mixed_data is not None:
            self.found.data[call.mixed_data] = None
        if rule is not None:
            mixes = call.couples_samples or (not call.params and rule.couples_samples_unseen(call))
            if mixes is not False:
                self._note(call, mixes, self.found.losses if call.is_loss else self.found.modules)
            if self.looks_at_loss:
                self._note(call, rule.divides_by_targets(call), self.found.data, f", {DIVIDES}")
        if self.looks_at_loss and call.layouts_in and not call.shape_out[0]:
            self._note_chosen(call, paths)
        if self.looks_at_loss and call.is_loss:
            self._note_reduction(call)

    def _note(
        self, call: Visit, verdict: bool | None, kind: dict[str, None], what: str = ""
    ) -> None:
        if verdict:
            kind[describe(call.module) + what] = None
        elif verdict is None:
            self.found.unknown[f"{describe(call.module)}, which cannot be evaluated again"] = None

    def _paths(self, call: Visit) -> dict[int, Path]:
        """Return what is above those inputs that functions have computed; note foreign uses.

        Where a container with a parameter of its own has computed an input, these are the
        functions inside of the container.
        """
        paths: dict[int, Path] = {}
        for i, (x, mark) in enumerate(zip(call.inputs, call.origins_in, strict=True)):
            if mark is None:  # perhaps a parameter itself, as an argument
                p = parameter_behind(x)
                self.uses.note(call, [] if p is None else [p], is_told=False)
                continue
            if mark.is_output and (call.is_transparent or not mark.by_container):
                continue  # if it is that of a container, what reads the output follows it
            if call.is_transparent:  # its input is kept without a graph
                node: Any = torch._C._current_autograd_node()
                slots = [key[1] for key, one in list(node.metadata.items()) if one is mark]
                slot = slots[0] if slots else 0
            else:
                node, slot = x.grad_fn, x.output_nr
            path = path_above(node, slot)
            is_told = any(data_flow.MISSED in node.metadata for node in path.nodes)
            self.uses.note(call, path.leaves, is_told)
            paths[i] = path
        return paths

    def _note_reduction(self, call: Visit) -> None:
        """Note the reduction of a loss, if ``backward()`` was called on it alone."""
        roots = () if self.entry is None else self.entry.roots
        reduction, shape = getattr(call.module, "reduction", None), call.shape_in[0]
        name = REDUCTION_OF_OPTION.get(reduction) if isinstance(reduction, str) else None
        if len(roots) == 1 and origin(roots[0]) in call.origins_out and name and shape:
            self.reduction = LossReduction(name, describe(call.module), shape)

    def _note_chosen(self, call: Visit, paths: Mapping[int, Path]) -> None:
        """Note a mean over chosen rows, which divides by their number."""
        layout, path, is_mean = call.layouts_in[0], paths.get(0), True
        if "mean" not in (getattr(call.module, what, None) for what in ("reduction", "name")):
            layout, is_mean = None, False
            node: Any = torch._C._current_autograd_node()  # the functions of the loss itself
            path = path_above(node, 0, opens_losses=True) if call.is_loss else None
        owners = None if layout is None else layout.owners
        are_uneven = owners is not None and not owners.is_even
        if are_uneven or (path is not None and averages_chosen(path, is_mean)):
            self.found.data[f"{describe(call.module)}, {DIVIDES}"] = None

    def _follow(self, call: Visit, paths: Mapping[int, Path]) -> None:
        """Follow the samples from a call's outputs to its inputs, and to what is above these."""
        if call.is_container:
            return
        if call.is_loss and not call.samples_come_first:
            self._check_owners(call)
        if call.trained and not call.rows_are_samples:
            self._check_split(call)
        if call.is_followed:
            self.found.is_converted = True
            for i in paths:  # functions that were not seen all the same
                self._check(call, i, paths[i])
            return
        after = None
        for mark in call.origins_out:
            after = self.next.get(mark, after)
        if call.trained and not call.is_loss and not call.is_unbatched:
            own = self.note_samples(call)
            if after is not None and after[1] != own:
                used = {*map(id, after[0].trained.values())}
                if used.isdisjoint(map(id, call.trained.values())):  # those of tied ones are one
                    self._note_size(call, own, *after)
            after = call, own
        elif after is not None and not call.is_loss and _combines_entries(call):
            own = _samples_of(call)
            if own % after[1]:  # else axes are merged with that of the samples, as in attention
                self._note_size(call, own, *after)
        for i, mark in enumerate(call.origins_in):
            if mark is None:
                if not call.is_loss:
                    self.check_data(call, i)
                continue
            path = paths.get(i)
            marks = [mark] if path is None else path.sources.values()
            if after is not None and not call.is_loss:
                for source in marks:
                    self.next.setdefault(source, after)
            if path is not None:
                self._check(call, i, path)
            elif call.is_loss:
                self._check_loss(call, i, mark)

    def note_samples(self, call: Visit, known: int = 0) -> int:
        """Note how many samples a layer takes its output to have, if that is not known."""
        own = known or _samples_of(call)
        self.axes.add(_axis(call, 0, out=True))
        self.layers.setdefault(own, []).append(call.called)
        return own

    def check_data(self, call: Visit, i: int) -> None:
        """Notice that the memory of data says that the samples are elsewhere."""
        x = call.inputs[i]
        if not (self.given and isinstance(x, Tensor) and x.dim()) or isinstance(x, Parameter):
            return
        layout = call.layouts_in[i]
        if layout is not None and not layout.is_batched:  # such as what a parametrisation reads
            return
        axis = _axis_read(call, i)
        for given in self.given if axis < x.dim() else ():
            if given.is_moved(x, axis, i == 0):
                self.found.functions[f"{OF_DATA} {describe(call.module)}"] = None

    def _check_loss(self, call: Visit, i: int, mark: Origin) -> None:
        """Notice samples that a reshape has brought together in one row of a loss."""
        shape, axis, layout = call.shape_in[i], _axis(call, i), mark.layout
        if not shape or axis >= len(shape) or isinstance(call.derivatives, Elementwise):
            return
        if layout is None or not layout.is_batched or layout.owners is not None:
            return  # with owners, it is misplaced
        if call.derivatives.batch_axis is not BatchAxis.FIXED and layout.place(shape) is not None:
            return  # its rule looks for them along all axes
        before, samples = layout.before, layout.samples
        if samples == 1:
            are_apart = True  # it may be along any axis of one entry
        elif axis == 0:
            are_apart = shape[0] % (before * samples) == 0
        else:
            are_apart = (math.prod(shape[:axis]), shape[axis]) == (before, samples)
        if not are_apart:
            name = f"{describe(call.module)} (which reads {samples} rows as {list(shape)})"
            self.found.functions[name] = None

    def _check_owners(self, call: Visit) -> None:
        """Notice a loss whose rows all belong to one sample of several."""
        layout = call.layouts_in[0]
        owners = None if layout is None else layout.owners
        if owners is None or owners.samples == 1:
            return
        self.found.chosen.update(owners.numbers)
        if len(set(owners.numbers)) == 1:
            number, shape = owners.numbers[0], list(call.shape_in[0] or ())
            what = f"{shape}, all of it of sample number {number} of {owners.samples}"
            self.found.single[f"{describe(call.module)} reads {what}"] = owners.samples

    def _check_split(self, call: Visit) -> None:
        """Notice an axis of samples that a reshape has split: its parts are taken for samples."""
        layout, place = call.layouts_out[0], call.place_out(0)
        if layout is not None and place is not None and place.samples != layout.samples:
            name = f"{describe(call.module)} has {place.samples} rows of {layout.samples} samples"
            self.found.split[name] = None

    def _note_size(self, call: Visit, own: int, reader: Visit, rows: int) -> None:
        name = f"{describe(call.module)} has {own}, {describe(reader.module)} {rows}"
        self.found.sizes[name] = None

    # ------------------------------------------------------------------ functions

    def _check(self, call: Visit, i: int, path: Path) -> None:
        shape = shape_of(*path.start).shape
        if not shape or all(type(node).__name__ in RESHAPES for node in path.nodes):
            return
        foreign = list(filter(is_foreign_function, path.nodes))
        if foreign:
            self.uses.watch(foreign)
        sources = {key: mark for key, mark in path.sources.items() if samples_in(mark)}
        axis = _axis_read(call, i)
        if not call.is_loss:  # other numbers of rows are noted where there are parameters
            rows = shape[axis]
            if call.is_unbatched or i in call.unbatched_inputs:  # what has none is made of several
                if any(samples_in(mark) > 1 for mark in sources.values()):
                    self._note_functions(call, path)
                return
            sources = {key: mark for key, mark in sources.items() if samples_in(mark) == rows > 1}
        if not sources:
            return
        path = path._replace(sources=sources)
        apart = None if foreign else are_apart(call.module, path, axis, call.is_loss)
        if apart is None and (foreign or not all(map(is_unpacked, path.nodes))):
            self.found.unknown[f"functions before {describe(call.module)}"] = None
        if apart is False:
            self._note_functions(call, path)

    def _note_functions(self, call: Visit, path: Path) -> None:
        """Note that the functions between a call and those above it mix samples."""
        names = dict.fromkeys(n.name() for n in path.nodes if type(n).__name__ not in RESHAPES)
        name = f"functions before {describe(call.module)} ({', '.join(names)})"
        self.found.functions[name] = None

    # ------------------------------------------------------------------ all calls

    def marks(self, start: int, results: Writer) -> dict[str, Any]:
        """Return what results are to be marked with; warn of what they are if not of samples.

        The backward pass has a ``start`` in the order of the calls. Without results that it has
        written, there is nothing to warn of.
        """
        self.compare_sizes()
        terms = self.terms
        hidden = dict(self.found.data)  # where no gradient passes, such as frozen layers
        for given in self.given:
            hidden.update(dict.fromkeys(given.mixing))
        hidden |= dict.fromkeys(data_flow.take_mixing(before=start))
        if self.looks_at_loss:
            hidden |= {f"{name}, {DIVIDES}": None for name in terms.divided}
        marks: dict[str, Any] = {**self.found.tell(results, [*terms.mixing], [*hidden])}
        if terms.leaves and results:
            self.uses.tell_penalties(terms.leaves)
        if self.looks_at_loss and (reduction := self._known_reduction()) is not None:
            marks["_backpack_reduction"] = reduction
        unknown = self.found.unknown | terms.unknown
        if unknown:
            marks["_backpack_undecided"] = checks.listed(unknown)
        return marks

    def compare_sizes(self) -> None:
        """Compare the samples of layers with those of the models that they are part of."""
        sizes = {given: given.sizes(self.axes) for given in self.given}
        for own, layers in self.layers.items():
            if all(own in known for known in sizes.values()):
                continue
            bags = [layer for layer in layers if isinstance(layer, EmbeddingBag)]
            has_ends = any(bag.include_last_offset for bag in bags)  # one offset more than bags
            fitting = {own, own + 1} if has_ends else {own}
            for layer in layers:
                around = [given for given in sizes if layer in set(given.module.modules())]
                if around and all(fitting.isdisjoint(sizes[given]) for given in around):
                    model, counts = around[0].module, sorted(sizes[around[0]])
                    data = f"the data of {describe(model)} {' or '.join(map(str, counts))}"
                    self.found.sizes[f"{describe(layer)} has {own}, {data}"] = None

    def _known_reduction(self) -> LossReduction | None:
        """Return what the loss does with its terms; None if something may have rescaled it."""
        seed = None if self.entry is None else self.entry.seed
        if seed is None or seed.numel() != 1 or seed.item() != 1:
            return None
        return self.reduction or self.terms.reduction


def _axis(call: Visit, i: int, out: bool = False) -> int:
    """Return the axis of an input, or an output, along which its rule has the samples."""
    rule = call.derivatives
    if call.rows_are_samples or rule is None or rule.batch_axis is not BatchAxis.FIXED:
        return 0
    axis = (rule.batch_axis_out if out else rule.batch_axis_in)(call.module, i)
    return from_first(axis, len((call.shape_out if out else call.shape_in)[i] or ()))


def _axis_read(call: Visit, i: int) -> int:
    """Return the axis along which the samples of an input are read: where they are, if it may be.

    Behind a recurrent layer or attention that has the sequence first, that is not the first one.
    """
    rule, layout, shape = call.derivatives, call.layouts_in[i], call.shape_in[i]
    if rule is None or rule.batch_axis is BatchAxis.FIXED or call.rows_are_samples:
        return _axis(call, i)
    if layout is None and call.origins_in[i] is not None and rule.batch_axis is BatchAxis.LEADING:
        layout = call.layouts_out[0]  # which a layer behind may have said, past what is between
    place = None if layout is None or shape is None else layout.place(shape)
    if place is None or place.is_scattered or place.samples != (shape or ())[place.axis]:
        return 0
    return place.axis


def _combines_entries(call: Visit) -> bool:
    """Whether a module such as a softmax combines entries of what it takes for a row."""
    rule = call.derivatives
    return rule is not None and not (call.is_unbatched or rule.hessian_is_diagonal(call.module))


def _samples_of(call: Visit) -> int:
    """Return how many samples a layer takes its output to have."""
    layout, shape = call.layouts_out[0], call.shape_out[0]
    if call.rows_are_samples:
        return shape[0]
    if layout is not None and layout.is_batched:
        return layout.samples
    return shape[_axis(call, 0, out=True)] if shape else 1
