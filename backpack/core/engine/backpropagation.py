"""The end-of-backward pass: fetch what arrived, extract at the parameters, propagate to the inputs.

A :class:`Source` emits columns somewhere in the network (at a loss, or at a nonlinear module for
the Hessian). The :class:`Backpropagation` carries them back through all reached calls, newest
first, in slices of samples (and, for a single sample, of columns), so that memory stays bounded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, prod
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Size, Tensor
from torch.nn import Module, Parameter

from backpack.context import CTX, STATE, update
from backpack.core import fast, memory
from backpack.core.derivatives import reductions
from backpack.core.derivatives.loss_hessian import LossHessian
from backpack.core.derivatives.lossbase import Columns
from backpack.core.engine import call_products
from backpack.core.engine.extracted import (
    ARRIVED,
    GRAMS,
    IN_BASES,
    KRONECKER,
    OF_COLUMNS,
    REDUCTIONS,
    UNSLICED,
    Bases,
    Reduction,
    add,
    max_factor_size,
)
from backpack.core.engine.factors import Factor
from backpack.core.engine.plan import Plan, Producer
from backpack.core.engine.products import Products, Use, extract
from backpack.core.engine.user_rules import (
    call_gradients,
    check_passed_on,
    check_used_once,
    sample_counts,
    what_is_passed_on,
)
from backpack.core.record.context import Context, context_of
from backpack.core.record.layout import Owners
from backpack.core.record.module_state import describe
from backpack.core.record.origins import Origin
from backpack.core.record.visits import Visit
from backpack.core.record.weights import IS_SOMETHING
from backpack.core.rows import Rows, row_numbers, take_rows
from backpack.core.types import Extension, Save
from backpack.core.values import has_values
from backpack.utils.progress import with_bar

T = TypeVar("T")
COLLECTED = fast.path(
    "collected diagonals", "What several sources add up to at a layer's output is squared once."
)
FEWER_COLUMNS = fast.path(
    "fewer columns", "More columns than a sample has entries are replaced by that many."
)
CACHED_COLUMNS = fast.path("slices of columns", "Columns travel while they are in the cache.")

# On a CPU, a slice is several times faster if it stays in the caches, and if the allocator keeps
# its memory (fresh memory costs page faults). Elsewhere, many small operations are slow.
BYTES_PER_CORE = 2**22
BYTES_OF_HEAP = 2**24
BYTES_ELSEWHERE = 2**28
# Bytes of the parameters from which on a backpropagation saves memory: on a CPU, its slices are
# half as large, and what many slices have freed is returned between them. Small networks would
# notice.
LARGE_NETWORK = 2**25
# Multiplications of a column from which on it pays to save one.
MANY_COLUMNS = 2**22


class slice_bytes:
    """Context manager: about how many bytes a slice of propagated columns may take.

    Args:
        limit: Bytes of the largest tensor that travels through the network. Default at start: on
            a CPU 4 MiB for each thread, at most 16 MiB, and half of it but not less than 4 MiB for
            large networks; elsewhere 256 MiB.
    """

    def __init__(self, limit: int | None):
        """Remember the limit; None for the default."""
        self._limit = limit

    @classmethod
    def on(cls, device: torch.device, is_large: bool) -> int:
        """Return the limit on a device, for a network that is large or not."""
        own = STATE.get().configuration.slice_bytes
        if own is not None:
            return own
        if device.type != "cpu" or not CACHED_COLUMNS.is_on:
            return BYTES_ELSEWHERE
        limit = min(BYTES_PER_CORE * torch.get_num_threads(), BYTES_OF_HEAP)
        return max(BYTES_PER_CORE, limit // 2) if is_large else limit

    def __enter__(self) -> None:
        """Set the limit, in this thread."""
        self._outer = CTX.configuration.slice_bytes
        update(configuration=replace(CTX.configuration, slice_bytes=self._limit))

    def __exit__(self, *exception: object) -> None:
        """Restore the limit."""
        update(configuration=replace(CTX.configuration, slice_bytes=self._outer))


@dataclass
class LossSource:
    """The signed factor of a loss Hessian, scaled by what the loss was multiplied with.

    Attributes:
        call: The loss.
        factor: Computes the columns, ``[V, rows, *d]`` at the prediction or a tuple with an entry
            for each input, and their weights ``[V, rows]`` (None for all 1).
        sampled: Whether the columns are random.
    """

    call: Visit
    factor: Callable[[Rows], tuple[Columns, Tensor | None]]
    sampled: bool = False
    _last: tuple[Rows, Sequence[Tensor | None], Tensor | None] | None = field(
        default=None, init=False
    )

    def num_columns(self, rows: Rows) -> int:
        """Number of columns V; computes those of ``rows``."""
        mats, _ = self._emit(rows)
        return next(len(mat) for mat in mats if mat is not None)

    def _emit(self, rows: Rows) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """Return the columns at each input, and their weights."""
        if self._last is None or self._last[0] != rows:
            columns, weights = self.factor(rows)
            mats = (columns,) if isinstance(columns, Tensor) else columns
            self._last = rows, mats, weights
        return self._last[1:]

    def columns(self, rows: Rows, part: slice) -> list[Factor | None]:
        """Emit a slice of the columns at the call's inputs: ``[V, rows, *in]``."""
        mats, weights = self._emit(rows)
        weights = None if weights is None else weights[part]
        return [
            None if mat is None else Factor(mat[part], mat.shape[1], weights, self.sampled)
            for mat in mats
        ]


@dataclass
class ResidualSource:
    """The diagonal second derivative r of a nonlinear module: columns ``e_i`` of weight ``r_i``."""

    call: Visit

    def num_columns(self, rows: Rows) -> int:
        """One column for each entry of a sample's input."""
        return prod(call_products.shape_in(self.call, 0, 1))

    def diagonal(self, rows: Rows) -> Tensor:
        """Return r, ``[rows, *in]``."""
        return call_products.second_diagonal(context_of(self.call, rows))

    def columns(self, rows: Rows, part: slice) -> list[Factor | None]:
        """Emit a slice of the columns."""
        residual = self.diagonal(rows)
        flat = residual.reshape(len(residual), -1)
        count, size = flat.shape
        # the unit vectors, last one first, the same for all samples, in the memory of two of them
        one = flat.new_zeros(2 * size - 1)
        one[size - 1] = 1
        units = one.as_strided((size, count, size), (1, 0, 1))[part]
        return [Factor(units.reshape(-1, *residual.shape), count, weights=flat.flip(1)[:, part].T)]


# Where columns start.
Source = LossSource | ResidualSource


@dataclass(frozen=True)
class Part:
    """A slice: which samples and columns, of how many. Empty ranges: everything at once."""

    samples: range = range(0)
    all_samples: range = range(0)
    columns: range = range(0)
    all_columns: range = range(0)

    @property
    def is_whole(self) -> bool:
        """Whether this is no slice but everything."""
        return self.samples == self.all_samples and self.columns == self.all_columns

    def split(self, samples: int, columns: int) -> list[Part]:
        """Split in slices of about so many samples and columns."""
        if samples >= len(self.samples) and columns >= len(self.columns):
            return [self]
        return [
            replace(self, samples=ns, columns=vs)
            for ns in _chunks(self.samples, samples)
            for vs in _chunks(self.columns, columns)
        ]


def _chunks(numbers: range, size: int) -> list[range]:
    """Split in chunks of nearly equal length."""
    count = -(-len(numbers) // size)
    bounds = [i * len(numbers) // count for i in range(count + 1)]
    return [numbers[a:b] for a, b in pairwise(bounds)]


def _narrow(tensor: Tensor, axis: int, numbers: range, of: range) -> Tensor:
    """Restrict an axis, whose length is a multiple of that of ``of``, to some of ``of``."""
    if numbers == of:
        return tensor
    ratio = tensor.shape[axis] // len(of)
    return tensor.narrow(axis, (numbers.start - of.start) * ratio, len(numbers) * ratio)


@dataclass
class State:
    """What travels: the columns that have arrived, and uses that wait for others.

    Attributes:
        part: Which samples and columns.
        samples: The samples whose rows travel.
        cotangents: Columns that have arrived, by tensor.
        pending: Uses of parameters that are used several times.
        terms: How many terms of the loss have columns of their own; None if samples do not mix.
    """

    part: Part
    samples: Rows
    cotangents: dict[Origin, Factor] = field(default_factory=dict)
    pending: dict[Parameter, list[Use]] = field(default_factory=dict)
    terms: int | None = None

    def restricted(self, part: Part, samples: Rows, rows: Callable[[Visit, Rows], Rows]) -> State:
        """Return a slice; ``rows`` says which rows of a call some samples have."""

        def cut(tensor: Any) -> Any:
            if tensor is None:
                return None
            tensor = _narrow(tensor, 0, part.columns, self.part.columns)
            return _narrow(tensor, 1, part.samples, self.part.samples)

        def cut_factor(factor: Factor) -> Factor:
            groups = factor.groups * len(part.samples) // len(self.part.samples)
            return replace(factor, mat=cut(factor.mat), groups=groups, weights=cut(factor.weights))

        def cut_use(use: Use) -> Use:
            mats = [cut(mat) for mat in use.mats]
            return Use(use.call, use.name, cut_factor(use.factor), rows(use.call, samples), mats)

        cotangents = {origin: cut_factor(factor) for origin, factor in self.cotangents.items()}
        pending = {p: [cut_use(use) for use in uses] for p, uses in self.pending.items()}
        return State(part, samples, cotangents, pending)


class Gathered:
    """A quantity of all samples and columns, put together from slices: each is written once."""

    def __init__(self, reduction: Reduction, before: Any = None):
        """Start with what other sources of columns have; None if there are none."""
        self.reduction = reduction
        self.before = before
        self.continues = False
        self.dtype: torch.dtype | None = None  # of slices
        self.value: Any = None

    def add(self, value: Any, part: Part) -> None:
        """Add the quantity of a slice."""
        places = [
            (self.reduction.sample_axis, part.samples, part.all_samples),
            (self.reduction.column_axis, part.columns, part.all_columns),
        ]
        axes = [(axis, some, all_) for axis, some, all_ in places if axis is not None]
        if part.is_whole or isinstance(value, list):
            self.value = value if self.value is None else add(self.value, value)
            return
        is_first = self.value is None
        if is_first:
            self._allocate(value, axes)
        view = self.value
        for axis, some, all_ in axes:
            view = _narrow(view, axis, some, all_)
        if self.reduction.sample_axis is not None:  # nothing was written to these samples yet
            is_first = self.reduction.column_axis is not None or not part.columns.start
        if is_first and not self.continues:
            view.copy_(value)
        else:
            view += value

    def _allocate(self, value: Tensor, axes: Sequence[tuple[int, range, range]]) -> None:
        """Find memory for all slices: that of the other sources, where values are summed."""
        shape = list(value.shape)
        for axis, some, all_ in axes:
            shape[axis] = shape[axis] // len(some) * len(all_)
        self.dtype = precise = value.dtype
        if self.reduction.column_axis is None:  # a sum in half precision would get stuck
            precise = torch.promote_types(value.dtype, torch.float32)
        self.continues = value.dtype is precise and self._can_add_in_place(shape)
        if self.continues:
            self.value, self.before = self.before, None
        else:
            self.value = memory.empty(shape, value.new_empty(0, dtype=precise))

    def _can_add_in_place(self, shape: Sequence[int]) -> bool:
        summed, before = self.reduction.column_axis is None, self.before
        same = isinstance(before, Tensor) and list(before.shape) == list(shape)
        return summed and same and not before.requires_grad

    def total(self) -> Any:
        """Return the quantity of all sources so far."""
        value = self.value
        if isinstance(value, Tensor) and self.dtype is not None:
            value = value.to(self.dtype)
        if self.before is None:
            return value
        if isinstance(value, Tensor) and self._can_add_in_place(value.shape):
            return self.before.add_(value)
        return self.reduction.joined(self.before, value)


class Diagonal(NamedTuple):
    """What sources have added up to at the output of a call.

    Attributes:
        values: ``[R, *out]``.
        samples: The samples that the rows belong to.
    """

    values: Tensor
    samples: range


Receive = Callable[[Mapping[Parameter, list[Use]], "State"], None]
_STEP_BETWEEN_ROWS = methodcaller("stride", 1)
_RULES, _NEEDS, _SAVEFIELD = map(attrgetter, ("rules", "needs", "savefield"))


def loss_scale(call: Visit) -> Tensor:
    """Return the constant that the loss was multiplied with before ``backward()``: ``[]``.

    The rule of a loss with several outputs multiplies each with its own.
    """
    if len(call.g_out) > 1:
        return torch.ones_like(call.outputs[0])
    (scale,) = call.g_out
    assert scale is not None
    return scale.reshape(())


def root_of_scale(call: Visit, savefields: str) -> Tensor | None:
    """Return :func:`root_of_factor` for the constant factor of a loss."""
    return root_of_factor(loss_scale(call), call.module, savefields)


def root_of_factor(scale: Tensor, loss: Module, savefields: str) -> Tensor | None:
    """Return the square root of what a loss was multiplied with; None for 1.

    Raises:
        ValueError: If it is negative: there is no real square root of the curvature.
    """
    value = float(scale) if has_values(scale) else None
    if value is not None and value < 0:
        raise ValueError(
            f"{savefields}: the loss {describe(loss)} was multiplied with a negative "
            f"number ({value:g}). Its curvature has no square root."
        )
    return None if value == 1 and not scale.requires_grad else scale.sqrt()


class Backpropagation:
    """Carries the columns of sources back, and extracts what a group of extensions wants.

    Args:
        plan: The reached calls.
        exts: Extensions that share the propagation.
        subsampling: Samples they look at.
        save: Called with each parameter, extension and value.
        left_out: Parameters of which nothing is to be extracted.
        bases: The bases of sums of squares. Default: of this pass's own Kronecker factors.
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
        """Read what the extensions want."""
        self.plan = plan
        self.exts = exts
        self.subsampling = subsampling
        self.save = save
        self.left_out = left_out
        self.savefields = ", ".join(map(_SAVEFIELD, exts))
        self.wanted = frozenset().union(*map(_NEEDS, exts))
        in_bases = self.wanted & IN_BASES.keys()
        if in_bases:  # comes with the factors that the bases are of
            self.wanted |= {IN_BASES[name][0] for name in in_bases}
        counted = self._counted() if GRAMS["expand"] in self.wanted else None
        if counted is not None:
            self.wanted |= {ARRIVED}
        self.bases = dict(bases or {})
        max_size = inf if KRONECKER.isdisjoint(self.wanted) else max_factor_size(exts)
        self.of_factors = max_size, counted
        # what needs bases of the whole batch is summed in a second turn, if the first has slices:
        # then the bases are known
        known = self.bases.keys() >= plan.uses.keys()
        self.wanted_later = frozenset() if known else in_bases
        self.wanted_now = self.wanted - self.wanted_later
        is_unsliced = not UNSLICED.isdisjoint(self.wanted)
        if is_unsliced:  # what does not come in one piece is made of the products themselves
            self.wanted_now = self.wanted_now - UNSLICED | {"individual"}
        # whether somebody wants the columns themselves, not just the matrix they stand for
        self.shows_columns = is_unsliced or not OF_COLUMNS.isdisjoint(self.wanted)
        self.progress = STATE.get().configuration.progress
        # user-written rules see the whole batch at once
        self.sliced = not any(map(_RULES, exts))
        self.mixing = plan.mixing and self.sliced
        # whether other columns may stand for the same matrices: nobody sees them
        self.may_reduce = self.sliced and not (self.mixing or self.shows_columns)
        if not FEWER_COLUMNS.is_on or torch.is_grad_enabled():
            self.may_reduce = False
        self.is_large = plan.bytes >= LARGE_NETWORK
        self.is_long = plan.base * plan.size >= MANY_COLUMNS
        self.collects = False  # whether several sources add up in diagonals at calls' outputs
        self.diagonals: dict[Visit, Diagonal] = {}
        # of the source at hand: the call at whose output its diagonal was collected, if it was
        self.collected_at: Visit | None = None
        # whether memory is scarce: not even what it emits is one slice of a large network
        self.returns_memory = False
        # whether all that it emits stays one slice, however large tensors become on the way
        self.is_one_slice = False
        device = plan.calls[0].outputs[0].device
        self.limit = sys.maxsize if is_unsliced else slice_bytes.on(device, self.is_large)
        # how many rows of a call belong to one independent sample, and what user rules returned
        self.rows_per_sample: dict[Visit, int] = {}
        self.rule_values: dict[tuple[Parameter, Extension], Any] = {}

    def _counted(self) -> tuple[Tensor, Owners | None] | None:
        """Return at which rows of the loss a target counts, and whose they are; None: everywhere.

        Of several losses of one prediction, a target counts if it does for any of them. Those of
        several predictions have to ignore the same ones.
        """
        losses, predictions = self.plan.losses, self.plan.predictions
        rows = [self.plan.rows(call, self.subsampling) for call in losses]
        hessians = list(map(LossHessian, losses, rows))
        masks = list(map(LossHessian.counted, hessians))
        known = [mask for mask in masks if mask is not None]
        if not known:
            return None
        count = len(row_numbers(self.plan.base, self.subsampling)) if self.plan.base else 1
        first, *others = [mask.reshape(count, -1).to(known[0].device) for mask in known]
        of_one = len({tuple(call.origins_in[i] for i in predictions[call]) for call in losses}) == 1
        alike = all(mask.shape == first.shape for mask in others)
        if alike and of_one:
            merged = torch.stack([first, *others]).any(0), hessians[0].owners
            return merged if len(known) == len(masks) else None
        if len(known) < len(masks) or not (alike and all(torch.equal(m, first) for m in others)):
            names = ", ".join(map(repr, losses))
            raise ValueError(
                f"{self.savefields}: approximation='expand' leaves out positions whose targets the "
                f"loss ignores, but the losses ignore different ones: {names}. Use one backward "
                "pass for each loss, or approximation=None."
            )
        return first, hessians[0].owners

    def run(self, sources: Sequence[Source]) -> None:
        """Backpropagate from every source, put the slices together, and save."""
        totals = self._totals(sources)
        in_bases = self._in_bases(sources, totals) if totals and self.wanted_later else {}
        for p in list(totals):
            products = self._whole(p)
            products.set_values(totals.pop(p))  # nobody else has them, see results.owned
            products.set_values(in_bases.pop(p, {}))
            products.extract(self.exts, self.save)
        for p, ext in list(self.rule_values):
            self.save(p, ext, self.rule_values.pop((p, ext)))

    def _whole(self, p: Parameter) -> Products:
        """Return products that have no columns, but will be given values."""
        terms = 1 if self.plan.mixing else None
        wanted = self.wanted - UNSLICED
        bases = self.bases.get(p)
        return Products(p, self._whole_uses(p), wanted, terms, bases, *self.of_factors)

    def _in_bases(
        self, sources: Sequence[Source], totals: Mapping[Parameter, Mapping[str, Any]]
    ) -> dict[Parameter, dict[str, Any]]:
        """Backpropagate again, for sums of squares in the bases of what came in several pieces."""
        for p, values in totals.items():
            products = self._whole(p)
            products.set_values(values)
            self.bases[p] = {name: products.eigenbases(name) for name in self.wanted_later}
        self.wanted_now = self.wanted_later
        return self._totals(sources)

    def _totals(self, sources: Sequence[Source]) -> dict[Parameter, dict[str, Any]]:
        """Backpropagate from every source, and put slices together; save what came in one piece."""
        totals: dict[Parameter, dict[str, Any]] = {}
        only_squares = self.wanted <= {"square", "batch_square"}
        plain = self.sliced and not self.mixing and not torch.is_grad_enabled()
        self.collects = COLLECTED.is_on and len(sources) > 1 and only_squares and plain
        is_second = bool(self.wanted_later) and self.wanted_now is self.wanted_later
        is_alone = len(sources) == 1 and not (self.plan.mixing or is_second)
        for source in self._with_bar("sources", sources) if self.progress else sources:
            of_source: dict[Parameter, dict[str, Gathered]] = {}

            def gather(
                uses_of: Mapping[Parameter, list[Use]], state: State, into: Any = of_source
            ) -> None:
                part, terms = state.part, state.terms
                wanted, bases, of_factors = self.wanted, self.bases, self.of_factors
                if part.is_whole and is_alone:
                    extract(uses_of, self.exts, wanted, self.save, terms, bases, *of_factors)
                    return
                for p, uses in uses_of.items():
                    if not is_second or p in bases:
                        products = Products(p, uses, wanted, terms, bases.get(p), *of_factors)
                        self._put_together(products, part, into, totals)
                        del products  # what they hold is freed one by one

            self._backpropagation(source, gather)
            for p, whole in of_source.items():
                totals[p] = {name: gathered.total() for name, gathered in whole.items()}
        for call in self.diagonals:
            self._add_squares(call, totals)
        return totals

    def _put_together(
        self,
        products: Products,
        part: Part,
        into: dict[Parameter, dict[str, Gathered]],
        totals: Mapping[Parameter, Mapping[str, Any]],
    ) -> None:
        """Add the products of a slice to those of a source, or of the sources before."""
        p = products.parameter
        if p not in into:
            if p in totals and any(REDUCTIONS[n].sample_axis is not None for n in self.wanted_now):
                self.plan.check_one_batch(p)
            before = totals.get(p, {})
            into[p] = {
                name: Gathered(REDUCTIONS[name], before.get(name)) for name in self.wanted_now
            }
        for name, gathered in into[p].items():
            gathered.add(products[name], part)

    def _whole_uses(self, p: Parameter) -> list[Use]:
        """List the uses of a parameter with columns that have a shape but take no memory."""
        uses = []
        for call, name in self.plan.uses[p]:
            rows = self.plan.rows(call, None if self.plan.mixing else self.subsampling)
            count = len(row_numbers(self.plan.num_rows(call), rows))
            shape_only = call.outputs[0].new_empty(1).expand(1, count)
            groups = count // self.rows_per_sample.get(call, 1)
            rows = self.plan.rows(call, self.subsampling)
            uses.append(Use(call, name, Factor(shape_only, groups), rows))
        return uses

    # ------------------------------------------------------------------ slices

    def _rows(self, call: Visit, samples: Rows) -> Rows:
        """Translate a selection of samples to one of a call's rows."""
        return None if samples is None else self.plan.rows(call, samples)

    def _entries(self, call: Visit, shapes: Sequence[Any]) -> int:
        """Return the entries of a call's largest tensor, of all samples."""
        largest = max([1, *map(Size.numel, filter(IS_SOMETHING, shapes))])
        return largest * (call.copies if call.is_unbatched else 1)

    def _first_parts(self, source: Source) -> list[Part]:
        """Slice what a source emits (where samples mix: what travels)."""
        plan = self.plan
        if not self.sliced:
            return [Part()]
        call, limit = source.call, self.limit
        size = call.outputs[0].element_size()
        whole = self._entries(call, call.shape_in)
        # There are rarely more columns than entries. If that many fit, emit all; else emit one row,
        # just to count them.
        few = size * whole * (whole // max(1, plan.base)) <= limit
        num_v = source.num_columns(self._rows(call, self.subsampling) if few else slice(0, 1))
        if self.mixing:
            calls = [c for c in plan.calls if c is call or c not in plan.losses]
            per_column = size * max(self._entries(c, c.shape_in + c.shape_out) for c in calls)
        else:
            per_column = -(-size * whole // max(1, plan.base))
        samples = max(1, limit // (per_column * num_v))
        columns = max(1, limit // per_column) if samples == 1 else num_v
        count = len(row_numbers(plan.base, self.subsampling)) if plan.base else 1
        return Part(range(count), range(count), range(num_v), range(num_v)).split(samples, columns)

    def _samples(self, part: Part) -> Rows:
        """Return the samples of a slice."""
        if part.samples == part.all_samples:
            return self.subsampling
        rows = row_numbers(self.plan.base, self.subsampling)
        return take_rows(rows, slice(part.samples.start, part.samples.stop))

    def _slices(self, state: State, call: Visit) -> list[State]:
        """Slice what has arrived; reduce the columns before, since those of a slice cannot be."""
        slices = self._split(state, call)
        if len(slices) == 1 or len(state.cotangents) > 1 or state.pending:
            return slices
        ((origin, factor),) = state.cotangents.items()
        fewer = self._reduced(state, factor)
        if fewer is factor:
            return slices
        state.cotangents[origin] = fewer
        return self._split(state, call)

    def _split(self, state: State, call: Visit) -> list[State]:
        """Slice what has arrived so that a call's columns at its input are small."""
        if not self.sliced or self.mixing or call not in self.plan.going_on:
            return [state]
        outs = [state.cotangents[o] for o in call.origins_out if o in state.cotangents]
        if not outs:
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
        return [state.restricted(part, self._samples(part), self.plan.rows) for part in parts]

    def _start(self, source: Source, part: Part, samples: Rows) -> list[Factor | None]:
        rows = self._rows(source.call, samples)
        columns = part.columns
        factors = source.columns(
            rows, slice(columns.start, columns.stop) if columns else slice(None)
        )
        if not self.mixing:
            return factors
        terms = len(row_numbers(self.plan.base, samples))
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

    def _backpropagation(self, source: Source, receive: Receive) -> None:
        """Carry columns back; hand over the uses of each parameter they reach, in slices."""
        calls = [c for c in reversed(self.plan.calls) if c.index < source.call.index]
        self.collected_at = None
        if isinstance(source, ResidualSource):
            self.collected_at = self._collect_residual(source)
            if self.collected_at is not None and self.collected_at not in self.plan.going_on:
                return
        parts = self._first_parts(source)
        self.returns_memory = len(parts) > 1 and self.is_large
        column = self.plan.column_bytes() if len(parts) == 1 and not self.mixing else None
        self.is_one_slice = column is not None and len(parts[0].columns) * column <= self.limit
        for part in self._with_bar("slices", parts) if self.progress else parts:
            samples = self._samples(part)
            state = State(part, None if self.plan.mixing else samples)
            if self.mixing:
                state.terms = len(part.samples)
            starts = self._start(source, part, samples)
            deliver(self.plan, source.call, starts, state.cotangents, state.samples)
            self._carry(state, calls, receive)

    def _with_bar(self, what: str, items: Sequence[T]) -> Iterable[T]:
        """Let a bar tell how far what takes long has come."""
        return with_bar(items, f"{self.savefields}: {what}", progress=True, delay=1)

    # ------------------------------------------------------------------ diagonals

    # Where each entry of ∂y/∂p is 0, 1 or an entry of the input, sum_i d_i (∂y_i/∂p)² is linear in
    # d and takes one product. d is what the second derivative of the module behind y adds; that of
    # columns, sum_v w_v s_v², if no entry of p reaches more than one y_i of a sample.

    def _is_collectable(self, call: Visit) -> bool:
        """Whether ``sum_i d_i (∂y_i/∂p)²`` is one product, for the parameters of a call."""
        if not (call.trained and call.derivatives) or call.is_unbatched:
            return False
        alone = all(len(self.plan.uses[p]) == 1 for p in call.trained.values())
        return call.derivatives.squares_with_input and alone

    def _collect_residual(self, source: ResidualSource) -> Visit | None:
        """Collect the diagonal that a source emits, and return the call it is at the output of."""
        origin = source.call.origins_in[0]
        producer = None if origin is None else self.plan.producers.get(origin)
        if not self.collects or producer is None or not self._is_collectable(producer.call):
            return None
        if self.plan.num_rows(producer.call) != self.plan.num_rows(source.call):
            return None
        count = len(row_numbers(self.plan.base, self.subsampling))
        residual = source.diagonal(self.plan.rows(source.call, self.subsampling))
        shape = self.plan.shape(producer, self.subsampling)
        self._collect(producer.call, residual.reshape(shape), Part(range(count), range(count)))
        return producer.call

    def _collect_columns(self, call: Visit, factor: Factor, part: Part) -> bool:
        """Collect the squares of columns at a call's output; False if they do not suffice."""
        if not self._is_collectable(call) or factor.adds_up or factor.groups != factor.mat.shape[1]:
            return False
        if not call.derivatives.reaches_one_output(call):
            return False
        self._collect(call, reductions.sum_of_squares(factor.mat, factor.weights), part)
        return True

    def _collect(self, call: Visit, diagonal: Tensor, part: Part) -> None:
        if call not in self.diagonals:
            shape = self.plan.shape(Producer(call, 0), self.subsampling)
            like = call.outputs[0]
            zeros = torch.zeros(shape, dtype=diagonal.dtype, device=like.device)
            self.diagonals[call] = Diagonal(zeros, part.all_samples)
        view = _narrow(self.diagonals[call].values, 0, part.samples, part.all_samples)
        view += diagonal.to(view.device)

    def _add_squares(self, call: Visit, totals: dict[Parameter, dict[str, Any]]) -> None:
        """Add what the diagonal at a call's output makes of its parameters."""
        each = "batch_square" in self.wanted
        values, samples = self.diagonals[call]
        parts = [Part(samples, samples)]
        if each and any(p in totals for p in call.trained.values()):  # there is memory to add to
            per_sample = max(1, *(p.nbytes for p in call.trained.values()))
            size = max(1, self.limit // per_sample)
            parts = [Part(some, samples) for some in _chunks(samples, size)]
        for name, p in call.trained.items():
            if p in self.left_out:
                continue
            before = totals.get(p, {})
            whole = {n: Gathered(REDUCTIONS[n], before.get(n)) for n in self.wanted}
            for part in parts:
                diagonal = _narrow(values, 0, part.samples, samples)
                rows = self.plan.rows(call, self._samples(part))
                use = Use(call, name, Factor(diagonal.unsqueeze(0), len(diagonal)), rows)
                method = "squared_param_vjp" if each else "squared_param_vjp_sum"
                square = use.apply(method).squeeze(0)
                if "square" in self.wanted:
                    whole["square"].add(square.sum(0) if each else square, part)
                if each:
                    if call.rows_per_sample > 1:
                        square = square.unflatten(0, (-1, call.rows_per_sample)).sum(1)
                    whole["batch_square"].add(square, part)
            totals[p] = {n: gathered.total() for n, gathered in whole.items()}

    def _carry(self, state: State, calls: Sequence[Visit], receive: Receive) -> None:
        """Carry columns back through calls. Slices become thinner where tensors become larger."""
        for i, call in enumerate(calls):
            slices = [] if self.is_one_slice else self._slices(state, call)
            if len(slices) > 1:
                while slices:  # a slice is freed before the next one travels
                    if self.returns_memory:
                        memory.release()
                    self._carry(slices.pop(0), calls[i:], receive)
                return
            self._through(state, call, receive)
        if state.pending:
            receive(state.pending, state)

    def _through(self, state: State, call: Visit, receive: Receive) -> None:
        """Hand over the uses of a call's parameters, and carry columns to its inputs."""
        found = fetch(call, state.cotangents)
        if found is None:
            return
        factor, mats = found
        del found  # columns are freed once they have travelled on
        cotangents = state.cotangents
        rows = self._rows(call, state.samples)
        ratio = factor.mat.shape[1] // factor.groups
        self.rows_per_sample[call] = max(ratio, self.rows_per_sample.get(call, 1))
        if not self.sliced and self._run_user_rule(call, factor, mats, state):
            return
        if call.derivatives is None:
            return  # a module without any rule was reported before
        goes_on = call in self.plan.going_on
        if not (goes_on or call.trained):
            return
        hands_over = bool(call.trained) and call is not self.collected_at
        c = context_of(call, rows, shares=hands_over)
        if hands_over and not (self.collects and self._collect_columns(call, factor, state.part)):
            self._hand_over(state, c, factor, mats, receive)
        if not goes_on:
            return
        c.memo = None  # that of parameters
        if self.may_reduce and len(mats) == 1 and not cotangents and not state.pending:
            factor = self._reduced(state, factor)
            mats = [factor.mat]
        factors: list[Factor | None] = []
        for mat in self._transposed(c, mats):
            factors.append(None if mat is None else factor.holding(mat))
        deliver(self.plan, call, factors, cotangents, state.samples)

    def _hand_over(
        self,
        state: State,
        c: Context,
        factor: Factor,
        mats: Sequence[Tensor | None],
        receive: Receive,
    ) -> None:
        """Hand over the uses of a call's parameters; keep those with other uses to come."""
        alone = {}
        # to a sum of squares it does not matter whose rows they are
        merges = not c.call.rows_are_samples and self.wanted != {"square"}
        groups = factor.mat.shape[1] // c.call.rows_per_sample if merges else factor.groups
        if groups < factor.groups:  # no layer has brought the rows of a sample together so far
            mats = [m if m is None else replace(factor, mat=m).coarsened(groups).mat for m in mats]
            factor = factor.coarsened(groups)
            self.rows_per_sample[c.call] = factor.mat.shape[1] // groups
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
            receive(alone, state)

    def _reduced(self, state: State, factor: Factor) -> Factor:
        """Replace all that has arrived by fewer columns for the same matrices, if that pays.

        With V columns of D entries, the triangles take as many operations as V columns in a linear
        layer of D outputs: that pays if a third of the columns is saved from there on.
        """
        num_v, rows, *shape = factor.mat.shape
        is_reducible = (
            self.may_reduce
            and 2 * num_v > 3 * prod(shape) > 0
            and factor.weights is None
            and not factor.adds_up
            and factor.groups == rows
            and state.part.columns == state.part.all_columns
        )
        if not is_reducible:
            return factor
        everything = range(prod(shape))
        state.part = replace(state.part, columns=everything, all_columns=everything)
        return factor.reduced()

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

    def _run_user_rule(
        self, call: Visit, factor: Factor, mats: Sequence[Tensor | None], state: State
    ) -> bool:
        """Let a user's rule for this module save, and carry on what it returns; False if none."""
        for ext in self.exts:
            rule = ext.rule_for(call.module)
            if rule is not None:
                break
        else:
            return False
        c = context_of(call, self.plan.rows(call, state.samples), whole=True)
        shown = [None if m is None else call_products.shown(c, i, m) for i, m in enumerate(mats)]
        arrived = shown[0] if all(mat is None for mat in shown[1:]) else tuple(shown)
        counts = sample_counts(call, ext.get_subsampling(), self.plan.base)
        gradients, save = call_gradients(call), self._add_rule_value
        with c.shown() as module:
            back = rule.run(ext, module, *gradients, arrived, save, call.goes_on, counts)
        if call not in self.plan.going_on:
            return True
        parts = back if isinstance(back, tuple) else (back,)
        check_passed_on(ext, rule, call, parts, c.rows)
        try:
            factors: list[Factor | None] = []
            for i, part in enumerate(parts):
                mat = None if part is None else call_products.read_back(c, i, part)
                factors.append(None if mat is None else factor.holding(mat))
            deliver(self.plan, call, factors, state.cotangents, state.samples)
        except (ValueError, RuntimeError, IndexError) as error:
            raise ValueError(f"{what_is_passed_on(ext, rule, call, parts)} ({error})") from error
        return True

    def _add_rule_value(self, p: Parameter, ext: Extension, value: Any) -> None:
        """Sum what a user's rule returns over the losses and over the uses of a parameter."""
        check_used_once(self.plan, p, ext)
        if (p, ext) in self.rule_values:
            value = ext.accumulate_backpropagated_quantities(self.rule_values[p, ext], value)
        self.rule_values[p, ext] = value


def deliver(
    plan: Plan,
    call: Visit,
    factors: Sequence[Factor | None],
    cotangents: dict[Origin, Factor],
    samples: Rows,
) -> None:
    """Add columns at a call's inputs to what their producers have so far."""
    for origin, factor in zip(call.origins_in, factors, strict=False):
        producer = None if origin is None else plan.producers.get(origin)
        if origin is None or producer is None or factor is None:
            continue
        maker, slot = producer
        is_whole = samples is None and maker.rows_are_samples
        shape = maker.shape_out[slot] if is_whole else plan.shape(producer, samples)
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


def fetch(
    call: Visit, cotangents: dict[Origin, Factor]
) -> tuple[Factor, list[Tensor | None]] | None:
    """Take what arrived at a call's outputs: columns at one of them, and at each."""
    if len(call.origins_out) == 1 and call.rows_are_samples:
        (origin,) = call.origins_out
        factor = None if origin is None else cotangents.pop(origin, None)
        return None if factor is None else (factor, [factor.mat])
    found = [None if o is None else cotangents.pop(o, None) for o in call.origins_out]
    known = [f for f in found if f is not None]
    if not known:
        return None
    groups = min(f.groups for f in known)
    if call.couples_rows:
        for i, f in enumerate(found):
            place = None if f is None else call.place_out(i)
            if f is not None and place is not None:
                rows = place.rows_per_sample(call.shape_out[i])
                groups = min(groups, f.mat.shape[1] // rows)
    aligned = [None if f is None else f.coarsened(groups) for f in found]
    first = next(f for f in aligned if f is not None)
    return first, [None if f is None else f.mat for f in aligned]
