"""Whether the samples stay apart, and first, in functions between modules that are not recorded.

In a model that was not converted, a first-order extension takes the rows of each layer for the
samples. The autograd graph between a call that a backward pass has reached and those above it says
whether that is so: a cotangent at the rows of some samples gives a gradient at those rows alone.
The nodes are called for that one by one. The engine would run hooks, and reach recorded calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.context import CTX
from backpack.core.derivatives.elementwise_losses import ElementwiseLossDerivatives as Elementwise
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.engine import checks
from backpack.core.engine.extracted import names_of
from backpack.core.engine.intercept import Entry
from backpack.core.engine.loss_terms import LossReduction, averages_chosen
from backpack.core.engine.paths import (
    HiddenGradients,
    Path,
    describe_structure,
    is_unpacked,
    path_above,
    samples_in,
    stored_values,
    touched,
    vjp,
)
from backpack.core.engine.results import Writer
from backpack.core.engine.spread import shape_of, spread
from backpack.core.record import data_flow
from backpack.core.record.alive import all_live_calls, is_used
from backpack.core.record.given import Given
from backpack.core.record.module_state import describe
from backpack.core.record.origins import (
    RESHAPES,
    Origin,
    is_foreign_function,
    origin,
    parameter_behind,
)
from backpack.core.record.registry import derivatives_of
from backpack.core.record.visits import Visit
from backpack.core.types import Extension
from backpack.utils.warning import warn

# What the option of a loss does with its terms
REDUCTION_OF_OPTION = {"mean": "mean", "batchmean": "mean", "sum": "sum"}

DIVIDES = "whose mean divides by the weights (or the number) of the targets of all samples"

MODULES_THAT_MIX = "Use eval() or modules that treat samples alone, such as GroupNorm."

LOSS_THAT_MIXES = "Let each term of the loss depend on one sample."

FUNCTIONS_THAT_MIX = (
    "If functions just move the samples from the first axis, use "
    "extend(model, use_converter=True), which follows them."
)

HIDDEN = (
    "parameters of shapes {} have no result, or that of a part of their uses: a backward pass "
    "inside of a function has computed gradients of theirs, where no module that was called has "
    "them. If that is torch.utils.checkpoint, use it with use_reentrant=False."
)

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


OTHER_ROWS = (
    "A layer takes the rows of its input for the samples of the batch, but their numbers differ: "
    "{} (a table of positions has one, merged axes have more). Use extend(model, "
    "use_converter=True), which follows the samples."
)


class SampleFlow:
    """What the calls of one backward pass say about the samples, from the loss upwards.

    Attributes:
        exts: The first-order extensions, whose results are those of samples.
        entry: The call of ``backward()``, if it was noticed.
        modules: Modules that mix samples.
        losses: Losses that do.
        functions: Functions that mix samples, or move them from the first axis.
        data: What mixes samples where no gradient passes.
        single: Losses that read rows of one sample alone, and the number of all samples.
        chosen: Numbers of samples that losses of chosen rows read.
        unknown: Functions and modules that cannot be looked at.
        sizes: Layers whose samples are not as many as those of the model, or of layers behind.
        split: Layers that read several samples as one row.
        hidden: Parameters whose gradients have changed while a function of Python computed its own.
    """

    # What was found out of the functions before a module, by their structure.
    _known: ClassVar[WeakKeyDictionary[Module, dict[Hashable, Verdict]]] = WeakKeyDictionary()

    def __init__(self, exts: Sequence[Extension], entry: Entry | None) -> None:
        """Nothing was reached."""
        self.exts = exts
        self.entry = entry
        terms = None if entry is None else entry.terms
        self.hidden = HiddenGradients() if terms is None else terms.hidden
        self.reduction: LossReduction | None = None  # of the extended loss that it was called on
        self.looks_at_loss = any(map(attrgetter("looks_at_loss"), exts))
        self.modules: dict[str, None] = {}
        self.losses: dict[str, None] = {}
        self.functions: dict[str, None] = {}
        self.data: dict[str, None] = {}
        self.unknown: dict[str, None] = {}
        self.sizes: dict[str, None] = {}
        self.split: dict[str, None] = {}
        self.single: dict[str, int] = {}
        self.chosen: set[int] = set()
        self.parameters: list[Mapping[str, Parameter]] = []  # that visited calls train
        self.told: list[Parameter] = []  # those of containers, which tell of them
        # those not told yet, and whether they are some in any case, not those of layers alone
        self.foreign_uses: list[tuple[Visit, Tensor, bool]] = []
        # the call with parameters that comes next, and its number of samples
        self.next: dict[Origin | None, tuple[Visit, int]] = {}
        self.given: dict[Given, None] = {}
        self.layers: dict[int, list[Module]] = {}  # by their number of samples
        self.axes = {0}  # along which they are

    def enter(self, given: Given) -> None:
        """Take note of what a model was called with, before its calls are visited."""
        self.given[given] = None

    # ------------------------------------------------------------------ call by call

    def visit(self, call: Visit, has_parameters: bool) -> None:
        """Look at a call, after all those that read its outputs.

        Without parameters of this call or one before, nothing is computed.
        """
        rule = call.derivatives
        if call.is_container:
            self.told += call.params.values()
        if call.trained and rule is not None:
            self.parameters.append(call.trained)
            # those that functions have computed
            for p in filter(attrgetter("grad_fn"), call.trained.values()):
                self._note_leaves(call, path_above(p.grad_fn, p.output_nr).leaves, is_told=False)
        paths = self._paths(call) if call.reads_functions else {}
        if self.foreign_uses and has_parameters:
            self._tell_foreign_uses()
        self._follow(call, paths)
        if call.mixed_data is not None:
            self.data[call.mixed_data] = None
        is_loss = isinstance(rule, BaseLossDerivatives)
        if rule is not None:
            mixes = call.couples_samples or (not call.params and rule.couples_samples_unseen(call))
            if mixes is not False:
                self._note(call, mixes, self.losses if is_loss else self.modules)
            if self.looks_at_loss:
                self._note(call, rule.divides_by_targets(call), self.data, f", {DIVIDES}")
        if self.looks_at_loss and call.layouts_in and not call.shape_out[0]:
            self._note_chosen(call, paths, is_loss)
        if self.looks_at_loss and is_loss:
            self._note_reduction(call)

    def _note(
        self, call: Visit, verdict: bool | None, kind: dict[str, None], what: str = ""
    ) -> None:
        if verdict:
            kind[describe(call.module) + what] = None
        elif verdict is None:
            self.unknown[f"{describe(call.module)}, which cannot be evaluated again"] = None

    def _paths(self, call: Visit) -> dict[int, Path]:
        """Return what is above those inputs that functions have computed; note foreign uses.

        Where a container with a parameter of its own has computed an input, these are the
        functions inside of the container.
        """
        paths: dict[int, Path] = {}
        for i, (x, mark) in enumerate(zip(call.inputs, call.origins_in, strict=True)):
            if mark is None:  # perhaps a parameter itself, as an argument
                p = parameter_behind(x)
                self._note_leaves(call, [] if p is None else [p], is_told=False)
                continue
            if mark.is_output and (call.is_transparent or not mark.by_container):
                continue  # if it is that of a container, what reads the output follows it
            if call.is_transparent:  # its input is kept without a graph
                node: Any = torch._C._current_autograd_node()
                slots = [key[1] for key, one in node.metadata.items() if one is mark]
                slot = slots[0] if slots else 0
            else:
                node, slot = x.grad_fn, x.output_nr
            path = path_above(node, slot)
            is_told = any(data_flow.MISSED in node.metadata for node in path.nodes)
            self._note_leaves(call, path.leaves, is_told)
            paths[i] = path
        return paths

    def _note_leaves(self, call: Visit, leaves: Sequence[Tensor], is_told: bool) -> None:
        """Note parameters of extended modules that a function above a call uses as well.

        Those of a call that is not recorded are told by themselves.
        """
        for leaf in leaves:
            reached = any(leaf is p for params in self.parameters for p in params.values())
            is_certain = reached or is_used(leaf)
            if is_certain or not is_told:
                self.foreign_uses.append((call, leaf, is_certain))

    def is_of_layer(self, parameter: Tensor) -> bool:
        """Whether a module of a model has a parameter, be it called or not.

        A container that was called tells of its own parameters; one that was converted does not,
        which have quantities all the same.
        """
        told = (
            p
            for call in all_live_calls()
            if call.is_container and "_backpack_converted" not in vars(call.called)
            for p in call.params.values()
        )
        models = (given.module.modules() for given in self.given)
        return not any(parameter is p for p in chain(self.told, told)) and any(
            parameter is p
            for module in chain(CTX.extended(), *models)
            for p in module._parameters.values()
        )

    def _note_reduction(self, call: Visit) -> None:
        """Note the reduction of a loss, if ``backward()`` was called on it alone."""
        roots = () if self.entry is None else self.entry.roots
        reduction, shape = getattr(call.module, "reduction", None), call.shape_in[0]
        name = REDUCTION_OF_OPTION.get(reduction) if isinstance(reduction, str) else None
        if len(roots) == 1 and origin(roots[0]) in call.origins_out and name and shape:
            self.reduction = LossReduction(name, describe(call.module), shape)

    def _note_chosen(self, call: Visit, paths: Mapping[int, Path], is_loss: bool) -> None:
        """Note a mean over chosen rows, which divides by their number."""
        layout, path, is_mean = call.layouts_in[0], paths.get(0), True
        if "mean" not in (getattr(call.module, what, None) for what in ("reduction", "name")):
            layout, is_mean = None, False
            node: Any = torch._C._current_autograd_node()  # the functions of the loss itself
            path = path_above(node, 0, opens_losses=True) if is_loss else None
        owners = None if layout is None else layout.owners
        counts = set() if path is None else {*map(samples_in, path.sources.values())} - {0, 1}
        if (owners is not None and not owners.is_even) or (
            path is not None and averages_chosen(path, counts, is_mean)
        ):
            self.data[f"{describe(call.module)}, {DIVIDES}"] = None

    def _tell_foreign_uses(self) -> None:
        """Refuse parameters of extended models that functions use as well."""
        for call, leaf, is_certain in self.foreign_uses:
            for ext in self.exts if is_certain or self.is_of_layer(leaf) else ():
                ext.fail(
                    f"a parameter of shape {list(leaf.shape)} that belongs to an extended module "
                    "is also used by a function (or a module that was not extended) whose result "
                    f"{call!r} reads. That use is not counted. {checks.CONVERT} Extend layers that "
                    "are new."
                )
        self.foreign_uses.clear()

    def _follow(self, call: Visit, paths: Mapping[int, Path]) -> None:
        """Follow the samples from a call's outputs to its inputs, and to what is above these."""
        if call.is_container:
            return
        is_loss = isinstance(call.derivatives, BaseLossDerivatives)
        if is_loss and not call.samples_come_first:
            self._check_owners(call)
        if call.trained and not call.rows_are_samples:
            self._check_split(call)
        if call.is_followed:
            for i in paths:  # functions that were not seen all the same
                self._check(call, i, paths[i], is_loss)
            return
        after = None
        for mark in call.origins_out:
            if mark in self.next:
                after = self.next[mark]
        if call.trained and not is_loss and not call.is_unbatched:
            own = self.note_samples(call)
            if after is not None and after[1] != own and not _are_tied(call, after[0]):
                self._note_size(call, own, *after)
            after = call, own
        elif after is not None and not is_loss and _combines_entries(call):
            own = _samples_of(call)
            if own % after[1]:  # else axes are merged with that of the samples, as in attention
                self._note_size(call, own, *after)
        for i, mark in enumerate(call.origins_in):
            if mark is None:
                if not is_loss:
                    self.check_data(call, i)
                continue
            path = paths.get(i)
            marks = [mark] if path is None else path.sources.values()
            if after is not None and not is_loss:
                for source in marks:
                    self.next.setdefault(source, after)
            if path is not None:
                self._check(call, i, path, is_loss)
            elif is_loss:
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
        axis = _axis(call, i)
        if axis < x.dim() and any(given.is_moved(x, axis, i == 0) for given in self.given):
            self.functions[f"functions of the data before {describe(call.module)}"] = None

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
        if axis == 0:
            are_apart = shape[0] % (before * samples) == 0
        else:
            are_apart = (math.prod(shape[:axis]), shape[axis]) == (before, samples)
        if not are_apart:
            name = f"{describe(call.module)} (which reads {samples} rows as {list(shape)})"
            self.functions[name] = None

    def _check_owners(self, call: Visit) -> None:
        """Notice a loss whose rows all belong to one sample of several."""
        layout = call.layouts_in[0]
        owners = None if layout is None else layout.owners
        if owners is None or owners.samples == 1:
            return
        self.chosen.update(owners.numbers)
        if len(set(owners.numbers)) == 1:
            number, shape = owners.numbers[0], list(call.shape_in[0] or ())
            what = f"{shape}, all of it of sample number {number} of {owners.samples}"
            self.single[f"{describe(call.module)} reads {what}"] = owners.samples

    def _check_split(self, call: Visit) -> None:
        """Notice an axis of samples that a reshape has split: its parts are taken for samples."""
        layout, place = call.layouts_out[0], call.place_out(0)
        if layout is not None and place is not None and place.samples != layout.samples:
            name = f"{describe(call.module)} has {place.samples} rows of {layout.samples} samples"
            self.split[name] = None

    def _note_size(self, call: Visit, own: int, reader: Visit, rows: int) -> None:
        self.sizes[f"{describe(call.module)} has {own}, {describe(reader.module)} {rows}"] = None

    # ------------------------------------------------------------------ functions

    def _check(self, call: Visit, i: int, path: Path, is_loss: bool) -> None:
        shape = shape_of(*path.start).shape
        if not shape or all(type(node).__name__ in RESHAPES for node in path.nodes):
            return
        foreign = list(filter(is_foreign_function, path.nodes))
        if foreign:
            models = (given.module.modules() for given in self.given)
            self.hidden.watch(foreign, [*chain(CTX.extended(), *models)])
        sources = {key: mark for key, mark in path.sources.items() if samples_in(mark)}
        if not is_loss:  # other numbers of rows are noted where there are parameters
            rows = shape[_axis(call, i)]
            if call.is_unbatched or i in call.unbatched_inputs:  # what has none is made of several
                if any(samples_in(mark) > 1 for mark in sources.values()):
                    self._note_functions(call, path)
                return
            sources = {key: mark for key, mark in sources.items() if samples_in(mark) == rows > 1}
        if not sources:
            return
        if foreign:
            self.unknown[f"functions before {describe(call.module)}"] = None
            return
        known = self._known.setdefault(call.module, {})
        key = (is_loss, describe_structure(path, sources))
        verdict = known.get(key)
        if verdict is None:
            apart = self._are_apart(call, i, path, sources, is_loss, spread)
            verdict = known[key] = Verdict(apart, None if apart else [math.nan])
        if verdict.values is not None:  # it depends on what is stored, such as a permutation
            values = stored_values(path.nodes)
            if values is None or not _are_equal(values, verdict.values):
                apart = self._are_apart(call, i, path, sources, is_loss)
                verdict = Verdict(apart, values)
                if values is not None:
                    known[key] = verdict
        if verdict.apart is None and not all(map(is_unpacked, path.nodes)):
            self.unknown[f"functions before {describe(call.module)}"] = None
        if verdict.apart is False:
            self._note_functions(call, path)

    def tell_hidden_gradients(self, inside: Collection[Parameter]) -> None:
        """Tell of parameters that have gradients of a pass inside, but no module with a result.

        Such passes have used the modules of those that are ``inside``.
        """
        shapes = [str(list(p.shape)) for p in self.hidden.found if p not in inside]
        for ext in self.exts if shapes else ():
            ext.fail(HIDDEN.format(checks.listed(shapes)))

    def _note_functions(self, call: Visit, path: Path) -> None:
        """Note that the functions between a call and those above it mix samples."""
        names = dict.fromkeys(n.name() for n in path.nodes if type(n).__name__ not in RESHAPES)
        self.functions[f"functions before {describe(call.module)} ({', '.join(names)})"] = None

    def _are_apart(
        self,
        call: Visit,
        i: int,
        path: Path,
        sources: dict[tuple[Any, int], Origin],
        is_loss: bool,
        run: Callable[..., Any] | None = None,
    ) -> bool | None:
        """Whether rows depend on a sample each, and which: None if that cannot be found out."""
        if not all(map(is_unpacked, path.nodes)):
            return None
        x, axis, found = shape_of(*path.start), _axis(call, i), None
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

    # ------------------------------------------------------------------ all calls

    def marks(self, start: int, results: Writer) -> dict[str, Any]:
        """Return what results are to be marked with; warn of what they are if not of samples.

        The backward pass has a ``start`` in the order of the calls. Without results that it has
        written, there is nothing to warn of.
        """
        self.compare_sizes()
        marks: dict[str, Any] = {}
        terms = None if self.entry is None else self.entry.terms
        sizes, hidden = self.sizes, self._mixing_without_gradient(start)
        if terms is not None and self.looks_at_loss:
            hidden |= {f"{name}, {DIVIDES}": None for name in terms.divided}
        in_loss = [*self.losses, *(() if terms is None else terms.mixing)]
        # in the order of the calls
        mixing = [*reversed(self.modules), *reversed(self.functions), *in_loss]
        if results and len(self.chosen) < max(self.single.values(), default=0):
            warn(
                f"{checks.listed(self.single)}: other samples have no part in that. If these are "
                "rows of different samples, the batch axis is not the first in a layer before: "
                "recurrent layers and attention need batch_first=True for data that has it there, "
                "and a token is chosen by h[:, 0], not h[0].",
            )
        if sizes and results:
            names = checks.listed([*reversed(sizes)])
            warn(
                "The individual gradients of some layers are not those of samples. "
                + OTHER_ROWS.format(names)
            )
            marks["_backpack_mixing"] = f"layers whose rows are no samples ({names})"
        elif self.split and results:
            names = checks.listed([*reversed(self.split)])
            warn(
                "The individual gradients of some layers are those of several samples each, "
                f"because a reshape has split the batch axis: {names}. Let these layers read "
                "[N·T, *], or call the model with data of shape [N, T, *], if samples are of "
                "several rows.",
            )
            marks["_backpack_mixing"] = f"layers that read several samples as one ({names})"
        if mixing and results:
            names = checks.listed(mixing)
            advice = [MODULES_THAT_MIX] if self.modules else []
            advice += [FUNCTIONS_THAT_MIX] if self.functions else []
            advice += [LOSS_THAT_MIXES] if in_loss else []
            warn(
                f"The network mixes the samples of a batch, in {names}: the individual gradients "
                "are those of the loss as a whole with respect to one sample's row of a module's "
                f"output. {' '.join(advice)}",
            )
            marks["_backpack_mixing"] = names
        elif hidden and not sizes:  # the individual gradients themselves are right
            marks["_backpack_mixing"] = checks.listed(hidden)
        if terms is not None and terms.leaves and results:
            self._tell_terms_of_parameters(terms.leaves)
        if self.looks_at_loss and (reduction := self._known_reduction()) is not None:
            marks["_backpack_reduction"] = reduction
        unknown = self.unknown | ({} if terms is None else terms.unknown)
        if unknown:
            marks["_backpack_undecided"] = checks.listed(unknown)
        return marks

    def compare_sizes(self) -> None:
        """Compare the samples of layers with those of the models that they are part of."""
        sizes = {given: given.sizes(self.axes) for given in self.given}
        for own, layers in self.layers.items():
            if all(own in known for known in sizes.values()):
                continue
            for layer in layers:
                around = [given for given in sizes if layer in set(given.module.modules())]
                if around and not any(own in sizes[given] for given in around):
                    model, counts = around[0].module, sorted(sizes[around[0]])
                    data = f"the data of {describe(model)} {' or '.join(map(str, counts))}"
                    self.sizes[f"{describe(layer)} has {own}, {data}"] = None

    def _mixing_without_gradient(self, start: int) -> dict[str, None]:
        """Return what has mixed samples where no gradient passes, such as frozen layers."""
        names = dict(self.data)
        for given in self.given:
            names.update(dict.fromkeys(given.mixing))
        return names | dict.fromkeys(data_flow.take_mixing(before=start))

    def _known_reduction(self) -> LossReduction | None:
        """Return what the loss does with its terms; None if something may have rescaled it."""
        if self.entry is None or self.entry.seed is None:
            return None
        terms, seed = self.entry.terms, self.entry.seed
        if seed.numel() != 1 or seed.item() != 1:
            return None
        return self.reduction or (None if terms is None else terms.reduction)

    def _tell_terms_of_parameters(self, leaves: Mapping[Tensor, str]) -> None:
        """Warn of penalties: parameters of the models that functions beside the modules read."""
        own = {p for params in self.parameters for p in params.values()}
        if not own.issuperset(leaves):  # some may belong to containers, such as weights of tasks
            containers = [m for m in CTX.extended() if derivatives_of(m) is None]
            own.update(p for m in containers for p in m._parameters.values() if p is not None)
        shapes = [f"{list(p.shape)} ({name})" for p, name in leaves.items() if p in own]
        if shapes:
            warn(
                f"{names_of(self.exts)}: functions beside the extended modules read parameters of "
                f"these, of shapes {checks.listed(shapes)}, as a penalty does. Their part of "
                "p.grad is in no quantity. Leave a penalty to the optimiser (weight_decay), or add "
                "its part by hand; a function of samples belongs into a module, or use "
                "extend(model, use_converter=True).",
            )


def _are_tied(one: Visit, other: Visit) -> bool:
    """Whether two calls use the same parameters: their gradients are brought together."""
    return any(p is q for p in one.trained.values() for q in other.trained.values())


def _axis(call: Visit, i: int, out: bool = False) -> int:
    """Return the axis of an input, or an output, along which its rule has the samples."""
    rule = call.derivatives
    if call.rows_are_samples or rule is None or rule.batch_axis is not BatchAxis.FIXED:
        return 0
    return (rule.batch_axis_out if out else rule.batch_axis_in)(call.module, i)


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
