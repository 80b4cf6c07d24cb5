"""The end-of-backward pass: fetch what arrived, extract at the parameters, propagate to the inputs.

A source emits columns somewhere in the network: a :class:`LossSource` at a loss, for the Hessian
also a :class:`.ResidualSource` at a nonlinear module. The :class:`Backpropagation` carries them
back through all reached calls, newest first, in slices of samples (and, for a single sample, of
columns), so that memory stays bounded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd, prod
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import Size, Tensor
from torch.nn import Parameter

from backpack.context import STATE
from backpack.core import fast, memory
from backpack.core.derivatives.loss_hessian import LossHessian, SomeColumns
from backpack.core.derivatives.lossbase import Columns
from backpack.core.engine import call_products
from backpack.core.engine.diagonals import COLLECTED, Diagonals, ResidualSource
from backpack.core.engine.extracted import Bases
from backpack.core.engine.extraction import Extraction, GramOfLoss
from backpack.core.engine.factors import Factor, columns_apart
from backpack.core.engine.plan import Plan
from backpack.core.engine.products import extract
from backpack.core.engine.slices import Part, narrow, slice_bytes
from backpack.core.engine.user_rules import ColumnRules
from backpack.core.engine.uses import Use, aligned
from backpack.core.record.context import Context, context_of
from backpack.core.record.origins import Origin
from backpack.core.record.visits import Visit
from backpack.core.record.weights import IS_SOMETHING
from backpack.core.rows import Rows, row_numbers, take_rows
from backpack.core.types import Extension, Save
from backpack.utils.progress import with_bar

T = TypeVar("T")
FEWER_COLUMNS = fast.path(
    "fewer columns", "More columns than a sample has entries are replaced by that many."
)
GRAM_OF_LOSS = fast.path(
    "Gram matrix of a loss", "The layer before a loss has the sum of its Hessians, not of columns."
)
# How many times longer a multiplication takes in a triangular decomposition than in a product.
SLOWER = 8
# Bytes of the parameters from which on a backpropagation saves memory, which small networks would
# notice: on a CPU, its slices are half as large, and what many have freed is returned between them.
LARGE_NETWORK = 2**25


@dataclass
class LossSource:
    """The signed factor of a loss Hessian."""

    call: Visit
    # computes the columns, [V, rows, *d] at the prediction or a tuple with an entry for each input,
    # and their weights [V, rows] (None for all 1)
    factor: Callable[[Rows], tuple[Columns, Tensor | None]]
    # whether rows of one sample add up, as gradients do; else each has columns of its own
    adds_up: bool = False
    scale: Tensor | None = None  # what they are multiplied with; None for 1
    # of exact factors: computes what makes some columns, or None, where all of a row are too many
    some: Callable[[Rows], SomeColumns | None] | None = None
    is_cut: bool = False  # whether they are
    _last: tuple[Rows, Sequence[Tensor | None], Tensor | None] | None = field(
        default=None, init=False
    )
    _last_some: tuple[Rows, SomeColumns | None] | None = field(default=None, init=False)

    def num_columns(self, rows: Rows) -> int:
        """Number of columns V; computes those of ``rows``."""
        some = self._some(rows) if self.is_cut else None
        if some is not None:
            return some.num_columns
        mats, _ = self._emit(rows)
        return next(len(mat) for mat in mats if mat is not None)

    def _emit(self, rows: Rows) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """Return the columns at each input, and their weights."""
        if self._last is None or self._last[0] != rows:
            columns, weights = self.factor(rows)
            mats: Sequence[Tensor | None] = (columns,) if isinstance(columns, Tensor) else columns
            if self.scale is not None:
                mats = [None if mat is None else mat * self.scale for mat in mats]
            self._last = rows, mats, weights
        return self._last[1:]

    def _some(self, rows: Rows) -> SomeColumns | None:
        """Return what makes some columns, if it is known."""
        if self.some is None:
            return None
        if self._last_some is None or self._last_some[0] != rows:
            self._last_some = rows, self.some(rows)
        return self._last_some[1]

    def columns(self, rows: Rows, part: slice) -> list[Factor | None]:
        """Emit a slice of the columns at the call's inputs: ``[V, rows, *in]``."""
        some = self._some(rows) if self.is_cut else None
        if some is not None:
            mat = some.make(slice(*part.indices(some.num_columns)))
            mat = mat if self.scale is None else mat * self.scale
            return [Factor(mat, mat.shape[1], adds_up=self.adds_up)]
        mats, weights = self._emit(rows)
        weights = None if weights is None else weights[part]
        return [
            None if mat is None else Factor(mat[part], mat.shape[1], weights, self.adds_up)
            for mat in mats
        ]


# Where columns start.
Source = LossSource | ResidualSource


@dataclass
class State:
    """What travels: the columns that have arrived, and uses that wait for others."""

    part: Part = field(default_factory=Part)
    samples: Rows = None  # whose rows travel
    cotangents: dict[Origin, Factor] = field(default_factory=dict)  # columns that have arrived
    pending: dict[Parameter, list[Use]] = field(default_factory=dict)  # of what is used repeatedly

    def restricted(self, part: Part, samples: Rows, rows: Callable[[Visit, Rows], Rows]) -> State:
        """Return a slice; ``rows`` says which rows of a call some samples have."""

        def cut(tensor: Any) -> Any:
            if tensor is None:
                return None
            tensor = narrow(tensor, 0, part.columns, self.part.columns)
            return narrow(tensor, 1, part.samples, self.part.samples)

        def cut_factor(factor: Factor) -> Factor:
            groups = factor.groups * len(part.samples) // len(self.part.samples)
            return replace(factor, mat=cut(factor.mat), groups=groups, weights=cut(factor.weights))

        def cut_use(use: Use) -> Use:
            own, mats = rows(use.call, samples), list(map(cut, use.mats))
            return Use(use.call, use.name, cut_factor(use.factor), own, mats)

        cotangents = {origin: cut_factor(factor) for origin, factor in self.cotangents.items()}
        pending = {p: list(map(cut_use, uses)) for p, uses in self.pending.items()}
        return State(part, samples, cotangents, pending)

    def deliver(self, plan: Plan, call: Visit, factors: Sequence[Factor | None]) -> None:
        """Add columns at a call's inputs to what their producers have so far."""
        cotangents = self.cotangents
        for origin, factor in zip(call.origins_in, factors, strict=False):
            producer = None if origin is None else plan.producers.get(origin)
            if origin is None or producer is None or factor is None:
                continue
            maker, slot = producer
            is_whole = self.samples is None and maker.rows_are_samples
            shape = maker.shape_out[slot] if is_whole else plan.shape(producer, self.samples)
            if maker.is_unbatched and factor.mat.shape[1] > shape[0]:
                factor = factor.gathered(shape[0])
            output = maker.outputs[slot]
            try:
                if factor.mat.shape[1:] != shape:
                    factor = factor.reshaped(shape)
                if factor.mat.device != output.device:
                    factor = factor.on(output.device)
            except ValueError as error:
                raise ValueError(f"Between {producer.call!r} and {call!r}: {error}") from error
            cotangents[origin] = cotangents[origin] + factor if origin in cotangents else factor

    def fetch(self, call: Visit) -> tuple[Factor, list[Tensor | None]] | None:
        """Take what arrived at a call's outputs: columns at one of them, and at each."""
        if len(call.origins_out) == 1 and call.rows_are_samples:
            (origin,) = call.origins_out
            factor = None if origin is None else self.cotangents.pop(origin, None)
            return None if factor is None else (factor, [factor.mat])
        found = [None if o is None else self.cotangents.pop(o, None) for o in call.origins_out]
        known = [f for f in found if f is not None]
        if not known:
            return None
        groups = gcd(*[f.groups for f in known])
        for i, f in enumerate(found) if call.couples_rows else ():
            place = None if f is None else call.place_out(i)
            if f is not None and place is not None:
                rows = place.rows_per_sample(call.shape_out[i])
                groups = gcd(groups, f.mat.shape[1] // rows)
        aligned = [None if f is None else f.coarsened(groups) for f in found]
        first = next(f for f in aligned if f is not None)
        return first, [None if f is None else f.mat for f in aligned]


_STEP_BETWEEN_ROWS = methodcaller("stride", 1)
_RULES = attrgetter("rules")


def rows_are_outputs(call: Visit) -> bool:
    """Whether the Kronecker rows of a layer are what arrives at its output, of one position."""
    rule = call.derivatives
    is_linear = rule is not None and rule.kronecker_rows_are_shared and len(call.origins_out) == 1
    return is_linear and call.rows_are_samples and len(call.shape_out[0]) == 2


class Backpropagation:
    """Carries the columns of sources back, and extracts what a group of extensions wants.

    But for parameters that are ``left_out``. The ``bases`` of sums of squares are by default those
    of its own Kronecker factors.
    """

    def __init__(
        self,
        plan: Plan,
        exts: Sequence[Extension],
        subsampling: Sequence[int] | None,
        save: Save,
        left_out: Collection[Parameter] = (),
        bases: Mapping[Parameter, Bases] | None = None,
    ):
        self.plan, self.exts, self.subsampling, self.save = plan, exts, subsampling, save
        self.left_out = left_out
        self.extraction = wanted = Extraction(plan, exts, subsampling, bases)
        # user-written rules see the whole batch at once
        self.rules = None
        if any(map(_RULES, exts)):
            ruled = [c for c in plan.calls if any(ext.rule_for(c.module) for ext in exts)]
            self.rules = ColumnRules(plan, exts, save) if ruled else None
            if ruled and plan.mixing:
                raise NotImplementedError(
                    f"{wanted.savefields}: a rule of your own for {ruled[0]!r} sees the columns of "
                    "each sample, but a module of the network mixes the samples. Use eval(), or "
                    "register derivatives (backpack.core.derivatives.register)."
                )
        if plan.mixing and not plan.base and wanted.is_of_samples:
            plan.check_one_batch_for_all(wanted.savefields)
        self.is_plain = not (self.rules or plan.mixing or torch.is_grad_enabled())
        # whether other columns may stand for the same matrices: nobody sees them
        self.may_reduce = FEWER_COLUMNS.is_on and self.is_plain and not wanted.shows_columns
        self.is_large = plan.bytes >= LARGE_NETWORK
        device = plan.calls[0].outputs[0].device
        self.limit = sys.maxsize if wanted.is_unsliced else slice_bytes.on(device, self.is_large)
        self.diagonals: Diagonals | None = None  # where several sources add up
        # of the source at hand: the call at whose output its diagonal was collected, if it was
        self.collected_at: Visit | None = None
        # whether memory is scarce: not even what it emits is one slice of a large network
        self.returns_memory = False
        # whether all that it emits stays one slice, however large tensors become on the way
        self.is_one_slice = False
        self.is_all = False  # whether that is all that will be extracted

    def run(self, sources: Sequence[Source]) -> None:
        """Backpropagate from every source, put the slices together, and save."""
        if self.rules is not None:
            self._joint(sources)
            return
        extraction = self.extraction
        if len(sources) > 1 and self.is_plain and extraction.wanted <= {"square", "batch_square"}:
            self.diagonals = Diagonals(self.plan, self.subsampling) if COLLECTED.is_on else None
        self.is_all = len(sources) == 1 and not self.plan.mixing
        self._run(sources)
        totals = extraction.totals
        if self.diagonals is not None:
            self.diagonals.add_squares(totals, extraction.wanted, self.left_out, self.limit)
        if totals:  # not all of it came in one piece
            if extraction.start_second():
                self.is_all = False
                self._run(sources)
            extraction.save(self.save)

    def _joint(self, sources: Sequence[Source]) -> None:
        """Carry the columns of all sources back together: rules of users see the whole matrix."""
        plan, whole = self.plan, Part()
        self.is_one_slice = self.is_all = True
        state = State(whole, self.subsampling)
        starts = [self._start(source, whole, self.subsampling) for source in sources]
        apart = columns_apart([[f if f is None else f.mat for f in factors] for factors in starts])
        for source, factors, mats in zip(sources, starts, apart, strict=True):
            pairs = zip(factors, mats, strict=True)
            own = [None if f is None or mat is None else f.holding(mat) for f, mat in pairs]
            state.deliver(plan, source.call, own)
        last = max(source.call.index for source in sources)
        self._carry(state, [c for c in reversed(plan.calls) if c.index < last])

    def _run(self, sources: Sequence[Source]) -> None:
        for source in self._with_bar("sources", sources):
            self._backpropagation(source)
            if self.extraction.of_source:
                self.extraction.end_source()

    def _extract(self, uses_of: Mapping[Parameter, list[Use]], state: State) -> None:
        """Let the extensions have what is complete, at once; gather slices."""
        extraction = self.extraction
        # terms of the loss that have columns of their own
        terms = len(state.part.samples) if self.plan.mixing else None
        if self.is_all and (self.is_one_slice or state.part.is_whole):
            wanted, bases, options = extraction.wanted, extraction.bases, extraction.options
            extract(uses_of, self.exts, wanted, self.save, terms, bases, *options)
        else:
            extraction.gather(uses_of, state.part, terms)

    # ------------------------------------------------------------------ slices

    def _entries(self, call: Visit, shapes: Sequence[Any]) -> int:
        """Return the entries of a call's largest tensor, of all samples."""
        largest = max([1, *map(Size.numel, filter(IS_SOMETHING, shapes))])
        return largest * (call.copies if call.is_unbatched else 1)

    def _first_parts(self, source: Source) -> list[Part]:
        """Slice what a source emits (where samples mix: what travels)."""
        plan, call, limit = self.plan, source.call, self.limit
        size = call.outputs[0].element_size()
        whole = self._entries(call, call.shape_in)
        # There are rarely more columns than entries. If that many fit, emit all; else emit one row,
        # just to count them.
        few = size * whole * (whole // max(1, plan.base)) <= limit
        if not (few or plan.mixing) and isinstance(source, LossSource):
            entries = call.inputs[0].shape[1:].numel()
            source.is_cut = size * entries * (entries - 1) > limit  # thin factors have one less
        rows = self.subsampling and plan.rows(call, self.subsampling)
        num_v = source.num_columns(rows if few else slice(0, 1))
        if plan.mixing:
            calls = [c for c in plan.calls if c is call or c not in plan.losses]
            per_column = size * max(self._entries(c, c.shape_in + c.shape_out) for c in calls)
        else:
            per_column = -(-size * whole // max(1, plan.base))
        samples = max(1, limit // (per_column * num_v))
        columns = max(1, limit // per_column) if samples == 1 else num_v
        count = plan.base or 1
        if plan.base and self.subsampling is not None:
            count = len(row_numbers(plan.base, self.subsampling))
        part = Part(range(count), range(count), range(num_v), range(num_v))
        return [part] if samples >= count and columns >= num_v else part.split(samples, columns)

    def _split(self, state: State, call: Visit) -> list[State]:
        """Slice what has arrived so that a call's columns at its input are small."""
        outs = [state.cotangents[o] for o in call.origins_out if o in state.cotangents]
        if self.plan.mixing or call not in self.plan.going_on or not outs:
            return [state]
        ins = [
            shape
            for shape, o in zip(call.shape_in, call.origins_in, strict=True)
            if o in self.plan.producers
        ]
        num_v = max([factor.mat.shape[0] for factor in outs])
        size = outs[0].mat.element_size()
        per_column = max(1, -(-size * self._entries(call, ins) // max(1, self.plan.base)))
        samples = max(1, self.limit // (per_column * num_v))
        columns = len(state.part.columns)
        if samples == 1:
            columns = max(1, columns * self.limit // (per_column * num_v))
        elif samples >= len(state.part.samples):
            return [state]
        parts = state.part.split(samples, columns)
        if parts == [state.part]:
            return [state]
        plan, chosen = self.plan, self.subsampling
        return [state.restricted(part, part.chosen(plan.base, chosen), plan.rows) for part in parts]

    def _start(self, source: Source, part: Part, samples: Rows) -> list[Factor | None]:
        rows = None if samples is None else self.plan.rows(source.call, samples)
        columns = part.columns
        factors = source.columns(
            rows, slice(columns.start, columns.stop) if columns else slice(None)
        )
        if not self.plan.mixing:
            return factors
        terms = len(part.samples)
        return [
            None if factor is None else self._spread(source.call, i, factor, rows, terms)
            for i, factor in enumerate(factors)
        ]

    def _spread(self, call: Visit, i: int, factor: Factor, rows: Rows, terms: int) -> Factor:
        """Give every term of the loss columns of its own, which are zero in the other rows."""
        shape = call_products.shape_in(call, i, self.plan.num_rows(call))
        columns = factor.coarsened(terms).mat.unflatten(1, (terms, -1))
        spread = columns.new_zeros(columns.shape[0], terms, *shape)
        numbers = torch.tensor(row_numbers(shape[0], rows)).reshape(terms, -1)
        spread[:, torch.arange(terms)[:, None], numbers] = columns
        return Factor(spread.flatten(0, 1), 1)

    # ------------------------------------------------------------------ one backpropagation

    def _backpropagation(self, source: Source) -> None:
        """Carry columns back; hand over the uses of each parameter they reach, in slices."""
        plan = self.plan
        calls = [c for c in reversed(plan.calls) if c.index < source.call.index]
        self.collected_at = None
        if self.diagonals is not None and isinstance(source, ResidualSource):
            self.collected_at = self.diagonals.add_residual(source)
            if self.collected_at is not None and self.collected_at not in plan.going_on:
                return
        parts = self._first_parts(source)
        self.returns_memory = len(parts) > 1 and self.is_large
        column = plan.column_bytes() if len(parts) == 1 and not plan.mixing else None
        self.is_one_slice = column is not None and len(parts[0].columns) * column <= self.limit
        if GRAM_OF_LOSS.is_on and not (self.is_one_slice or plan.mixing):
            self.extraction.gram_at = self._gram_of_loss(source)
        for part in self._with_bar("slices", parts):
            chosen = self.subsampling
            samples = chosen if self.is_one_slice else part.chosen(plan.base, chosen)
            state = State(part, None if plan.mixing else samples)
            state.deliver(plan, source.call, self._start(source, part, samples))
            self._carry(state, calls)

    def _gram_of_loss(self, source: Source) -> GramOfLoss | None:
        """Return the Gram matrix of all columns of a source, if a layer has it as it is."""
        if not isinstance(source, LossSource) or source.some is None:
            return None
        plan, loss, (origin, *_) = self.plan, source.call, source.call.origins_in
        producer = None if origin is None else plan.producers.get(origin)
        readers = [c for c in plan.calls if origin in c.origins_in]
        if producer is None or readers != [loss] or not rows_are_outputs(producer.call):
            return None
        if loss.shape_in[0] != producer.call.shape_out[0]:  # other rows: samples may have several
            return None
        hessian = LossHessian(loss, self.subsampling and plan.rows(loss, self.subsampling))
        return GramOfLoss(producer.call, hessian, source.scale) if hessian.knows_sum else None

    def _with_bar(self, what: str, items: Sequence[T]) -> Iterable[T]:
        """Let a bar tell how far what takes long has come."""
        if not STATE.get().configuration.progress:
            return items
        return with_bar(items, f"{self.extraction.savefields}: {what}", progress=True, delay=1)

    def _carry(self, state: State, calls: Sequence[Visit]) -> None:
        """Carry columns back through calls. Slices become thinner where tensors become larger."""
        for i, call in enumerate(calls):
            if self.may_reduce and len(state.cotangents) == 1 and not state.pending:
                self._reduce(state, call)  # before: those of a slice cannot be reduced
            slices = [] if self.is_one_slice else self._split(state, call)
            if len(slices) > 1:
                while slices:  # a slice is freed before the next one travels
                    if self.returns_memory:
                        memory.release()
                    self._carry(slices.pop(0), calls[i:])
                return
            self._through(state, call)
        if state.pending:
            for p, uses in state.pending.items():
                state.pending[p] = aligned(self.plan, uses)
            self._extract(state.pending, state)

    def _through(self, state: State, call: Visit) -> None:
        """Hand over the uses of a call's parameters, and carry columns to its inputs."""
        found = state.fetch(call)
        if found is None:
            return
        factor, mats = found
        del found  # columns are freed once they have travelled on
        plan, samples = self.plan, state.samples
        rows = None if samples is None else plan.rows(call, samples)
        if self.rules is not None:
            go_on = partial(self._deliver, state, call, factor)
            if self.rules.through(call, mats, samples, go_on):
                return
        if call.derivatives is None:
            return  # a module without any rule was reported before
        goes_on = call in plan.going_on
        if not (goes_on or call.trained):
            return
        hands_over = bool(call.trained) and call is not self.collected_at
        c = context_of(call, rows, shares=hands_over)
        at_output = self.diagonals
        if hands_over and not (at_output and at_output.add_columns(call, factor, state.part)):
            self._hand_over(state, c, factor, mats)
        if not goes_on:
            return
        c.memo = None  # that of parameters
        self._deliver(state, call, factor, self._transposed(c, mats))

    def _deliver(
        self, state: State, call: Visit, factor: Factor, mats: Iterable[Tensor | None]
    ) -> None:
        """Carry columns at the inputs of a call on, of the groups and weights of a factor."""
        factors: list[Factor | None] = []
        for mat in mats:
            if mat is None:
                factors.append(None)
            else:  # the rule of a user may return other columns
                merged = factor.merged if len(mat) == len(factor.mat) else 1
                own = Factor(mat, factor.groups, factor.weights, factor.adds_up, merged)
                factors.append(own)
        state.deliver(self.plan, call, factors)

    def _hand_over(
        self, state: State, c: Context, factor: Factor, mats: Sequence[Tensor | None]
    ) -> None:
        """Hand over the uses of a call's parameters; keep those with other uses to come."""
        alone = {}
        # to a sum of squares it does not matter whose rows they are
        merges = not c.call.rows_are_samples and self.extraction.wanted != {"square"}
        groups = factor.mat.shape[1] // c.call.rows_per_sample if merges else factor.groups
        if groups < factor.groups:  # no layer has brought the rows of a sample together so far
            mats = [m if m is None else factor.holding(m).coarsened(groups).mat for m in mats]
            factor = factor.coarsened(groups)
        for name, p in c.call.trained.items():
            use = Use(c.call, name, factor, c.rows, mats)
            if p in self.left_out:
                continue
            if len(self.plan.uses[p]) == 1:
                use.c = c
                alone[p] = [use]
            else:  # what the rule sees is made again when the others have come
                state.pending.setdefault(p, []).append(use)
        if alone:
            self._extract(alone, state)

    def _reduce(self, state: State, call: Visit) -> None:
        """Replace all that has arrived, if it has at a call, by fewer columns for its matrices.

        V columns of D entries become D. It pays if the others take more from there on than the
        triangles: ``V D²`` multiplications, which are slow ones.
        """
        ((origin, factor),) = state.cotangents.items()
        num_v, rows, *shape = factor.mat.shape
        size = prod(shape)
        if (
            num_v > size > 0
            and origin in call.origins_out
            and factor.weights is None
            and not factor.adds_up
            and factor.groups == rows
            and state.part.columns == state.part.all_columns
            and (num_v - size) * self._work_above(call) > SLOWER * num_v * size**2
        ):
            state.part = replace(state.part, columns=range(size), all_columns=range(size))
            state.cotangents[origin] = factor.reduced()

    def _work_above(self, call: Visit) -> int:
        """Estimate the multiplications that a column of a sample takes from a call on."""
        work = 0
        for each in self.plan.going_on:
            if each.index <= call.index:
                fan_in = sum([prod(p.shape[1:]) for p in each.params.values()])
                work += max(1, fan_in) * each.outputs[0].numel() // max(1, self.plan.base)
        return work

    def _transposed(self, c: Context, mats: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Apply the transposed Jacobian; once, if neither it nor the columns vary with samples."""
        call, known = c.call, list[Any](filter(IS_SOMETHING, mats))
        alike = known[0].shape[1] > 1 and not any(map(_STEP_BETWEEN_ROWS, known))
        rule: Any = call.derivatives
        alike = alike and call.samples_come_first and not call.couples_samples
        if alike and rule.has_one_jacobian(c):
            first = take_rows(row_numbers(self.plan.num_rows(call), c.rows), slice(0, 1))
            one = [None if m is None else m[:, :1] for m in mats]
            backs = call_products.transposed(c.at(first), one)
            count = known[0].shape[1]
            return [b if b is None else b.expand(-1, count, *b.shape[2:]) for b in backs]
        return call_products.transposed(c, mats)
