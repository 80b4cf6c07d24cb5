"""The end-of-backward pass: fetch what arrived, extract at the parameters, propagate to the inputs.

A :class:`Source` emits columns somewhere in the network (at a loss, or at a nonlinear module for
the Hessian). The :class:`Sweep` carries them back through all reached calls, newest first, in
slices of samples (and, for a single sample, of columns), so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.context import disable
from backpack.core import call_products
from backpack.core.derivatives.basederivatives import Rows, row_numbers
from backpack.core.derivatives.by_autograd import close
from backpack.core.derivatives.lossbase import Columns, first_of, is_negative
from backpack.core.factors import Factor
from backpack.core.plan import Plan
from backpack.core.products import REDUCTIONS, Products, Use
from backpack.core.tape import Call, Origin, describe, flatten_outputs

if TYPE_CHECKING:
    from backpack.extensions.backprop_extension import BackpropExtension

Save = Callable[[Parameter, "BackpropExtension", Any], None]


class slice_bytes:
    """Context manager: about how many bytes a slice of propagated columns may take.

    Args:
        limit: Bytes of the largest tensor that travels through the network. Default at start:
            256 MiB. Smaller slices need less memory and more time.
    """

    limit = 2**28

    def __init__(self, limit: int):
        """Remember the limit."""
        self._limit = limit

    def __enter__(self) -> None:
        """Set the limit."""
        self._outer = slice_bytes.limit
        slice_bytes.limit = self._limit

    def __exit__(self, *exception: object) -> None:
        """Restore the limit."""
        slice_bytes.limit = self._outer


class Source(Protocol):
    """Where columns start."""

    call: Call

    def num_columns(self) -> int:
        """Number of columns V."""

    def columns(self, rows: Rows, part: slice) -> list[Factor | None]:
        """Emit a slice of the columns at the call's inputs: ``[V, rows, *in]``."""


@dataclass
class LossSource:
    """The signed factor of a loss Hessian, scaled by what the loss was multiplied with.

    Attributes:
        call: The loss.
        factor: Computes the columns, ``[V, rows, *d]`` at the prediction or a tuple with an entry
            for each input, and their weights ``[V, rows]`` (None for all 1).
        sampled: Whether the columns are random.
    """

    call: Call
    factor: Callable[[Rows], tuple[Columns, Tensor | None]]
    sampled: bool = False
    _last: tuple[Rows, tuple[Columns, Tensor | None]] | None = field(default=None, init=False)

    def num_columns(self) -> int:
        """Number of columns, without computing more than one row of them."""
        columns, _ = self._emit(slice(0, 1))
        return len(first_of(columns))

    def _emit(self, rows: Rows) -> tuple[Columns, Tensor | None]:
        if self._last is None or self._last[0] != rows:
            self._last = rows, self.factor(rows)
        return self._last[1]

    def columns(self, rows: Rows, part: slice) -> list[Factor | None]:
        """Emit a slice of the columns."""
        columns, weights = self._emit(rows)
        weights = None if weights is None else weights[part]
        mats = [columns] if isinstance(columns, Tensor) else columns
        return [
            None if mat is None else Factor(mat[part], mat.shape[1], weights, self.sampled)
            for mat in mats
        ]


@dataclass
class ResidualSource:
    """The diagonal second derivative r of a nonlinear module: columns ``e_i`` of weight ``r_i``."""

    call: Call

    def num_columns(self) -> int:
        """One column for each entry of a sample's input."""
        return prod(call_products.shape_in(self.call, 0, 1))

    def columns(self, rows: Rows, part: slice) -> list[Factor | None]:
        """Emit a slice of the columns."""
        assert self.call.derivatives is not None
        with self.call.bound() as module:
            grads = call_products.gradients(self.call)
            residual = self.call.derivatives.hessian_diagonal(module, None, grads, rows)
        flat = residual.reshape(len(residual), -1)
        entries = range(flat.shape[1])[part]
        mat = flat.new_zeros(len(entries), *flat.shape)
        mat[range(len(entries)), :, list(entries)] = 1
        return [Factor(mat.reshape(-1, *residual.shape), len(flat), weights=flat[:, part].T)]


def loss_scale(call: Call) -> Tensor:
    """Return the constant that the loss was multiplied with before ``backward()``."""
    (scale,) = call.g_out
    assert scale is not None
    return scale


def nonnegative_scale(call: Call, savefields: str) -> Tensor:
    """Return the square root of the constant factor of the loss.

    Raises:
        ValueError: If it is negative: there is no real square root of the curvature.
    """
    scale = loss_scale(call)
    if is_negative(scale):
        raise ValueError(
            f"{savefields}: the loss {describe(call.module)} was multiplied with a negative "
            f"number ({float(scale):g}). Its curvature has no square root."
        )
    return scale.sqrt()


class Sweep:
    """Carries the columns of sources back, and extracts what a group of extensions wants.

    Args:
        plan: The reached calls.
        exts: Extensions that share the propagation.
        subsampling: Samples they look at.
        save: Called with each parameter, extension and value.
    """

    def __init__(
        self,
        plan: Plan,
        exts: Sequence[BackpropExtension],
        subsampling: Sequence[int] | None,
        save: Save,
    ):
        """Read what the extensions want."""
        self.plan = plan
        self.exts = exts
        self.subsampling = subsampling
        self.save = save
        self.wanted = frozenset(name for ext in exts for name in ext.needs)
        self.savefields = ", ".join(ext.savefield for ext in exts)
        # user-written rules see the whole batch at once
        self.sliced = not any(ext.rules for ext in exts)
        # how many rows of a call belong to one independent sample, and what user rules returned
        self.rows_per_sample: dict[Call, int] = {}
        self.rule_values: dict[tuple[Parameter, BackpropExtension], Any] = {}

    def run(self, sources: Sequence[Source]) -> None:
        """Sweep from every source, put the slices together, and save."""
        totals: dict[Parameter, dict[str, Tensor]] = {}
        for source in sources:
            of_source: dict[Parameter, dict[str, Tensor]] = {}
            for samples, parts, terms in self._slices(source):
                of_samples: dict[Parameter, dict[str, Tensor]] = {}
                for part in parts:
                    for products in self._sweep(source, samples, part, terms):
                        values = {name: products[name] for name in self.wanted}
                        p = products.parameter
                        if p in of_samples:
                            values = _combined(of_samples[p], values, "columns")
                        of_samples[p] = values
                for p, values in of_samples.items():
                    of_source[p] = _combined(of_source.get(p), values, "samples")
            for p, values in of_source.items():
                if p in totals and _are_per_sample(values):
                    self.plan.check_one_batch(p)
                totals[p] = _combined(totals.get(p), values, "sources")
        for p, values in totals.items():
            products = Products(
                p, self._whole_uses(p), self.wanted, 1 if self.plan.mixing else None
            )
            for name, value in values.items():
                products.set_value(name, value)
            for ext in self.exts:
                self.save(p, ext, ext.extract(products))
        for (p, ext), value in self.rule_values.items():
            self.save(p, ext, value)

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

    def _slices(self, source: Source) -> Iterator[tuple[Rows, list[slice], int | None]]:
        """Plan slices: which samples, which columns, how many terms of the loss (if mixed)."""
        if not self.sliced:
            yield self.subsampling, [slice(None)], None
            return
        num_v, plan = source.num_columns(), self.plan
        per_column = (
            max(
                max((s.numel() for s in call.shape_in + call.shape_out if s is not None), default=1)
                * (call.copies if call.is_unbatched else 1)
                for call in plan.calls
            )
            * plan.calls[0].outputs[0].element_size()
        )
        rows = max(1, plan.base)
        if not plan.mixing:
            per_column = -(-per_column // rows)
        columns = max(1, slice_bytes.limit // per_column)
        at_once = max(1, columns // num_v)
        width = num_v if at_once > 1 or columns >= num_v else columns
        parts = [slice(i, i + width) for i in range(0, num_v, width)]
        parts = [slice(None)] if len(parts) == 1 else parts
        for samples in plan.sample_slices(self.subsampling, at_once):
            terms = len(row_numbers(plan.base, samples)) if plan.mixing else None
            yield samples, parts, terms

    def _start(
        self, source: Source, samples: Rows, part: slice, terms: int | None
    ) -> list[Factor | None]:
        rows = self.plan.rows(source.call, samples)
        factors = source.columns(rows, part)
        if terms is None:
            return factors
        return [
            None if factor is None else self._spread(source.call, i, factor, rows, terms)
            for i, factor in enumerate(factors)
        ]

    def _spread(self, call: Call, i: int, factor: Factor, rows: Rows, terms: int) -> Factor:
        """Give every term of the loss columns of its own, which are zero in the other rows."""
        shape = call_products.shape_in(call, i, self.plan.num_rows(call))
        columns = factor.coarsened(terms).mat.unflatten(1, (terms, -1))
        spread = columns.new_zeros(columns.shape[0], terms, *shape)
        numbers = torch.tensor(row_numbers(shape[0], rows)).reshape(terms, -1)
        spread[:, torch.arange(terms)[:, None], numbers] = columns
        return Factor(spread.flatten(0, 1), 1)

    # ------------------------------------------------------------------ one sweep

    def _sweep(
        self, source: Source, samples: Rows, part: slice, terms: int | None
    ) -> Iterator[Products]:
        """Carry columns back; yield the products of each parameter that they reach."""
        travelling = None if self.plan.mixing else samples
        arrived: dict[Origin, Factor] = {}
        pending: dict[Parameter, list[Use]] = {}
        starts = self._start(source, samples, part, terms)
        deliver(self.plan, source.call, starts, arrived, travelling)
        for call in reversed(self.plan.calls):
            if call.index >= source.call.index:
                continue
            factors = fetch(call, arrived)
            if factors is None:
                continue
            factor, mats = factors
            ratio = factor.mat.shape[1] // factor.groups
            self.rows_per_sample[call] = max(ratio, self.rows_per_sample.get(call, 1))
            rows = self.plan.rows(call, travelling)
            if self._run_user_rules(call, factor, arrived, travelling) or call.derivatives is None:
                continue  # a module without any rule was reported before
            for name, p in call.trained.items():
                use = Use(call, name, factor, rows, mats)
                if len(self.plan.uses[p]) == 1:
                    yield Products(p, [use], self.wanted, terms)
                else:
                    pending.setdefault(p, []).append(use)
            self._propagate(call, factor, mats, arrived, travelling)
        for p, uses in pending.items():
            yield Products(p, uses, self.wanted, terms)

    def _propagate(
        self,
        call: Call,
        factor: Factor,
        mats: Sequence[Tensor | None],
        arrived: dict[Origin, Factor],
        samples: Rows,
    ) -> None:
        if not any(origin in self.plan.producers for origin in call.origins_in):
            return
        backs = call_products.transposed(call, mats, self.plan.rows(call, samples))
        factors = [None if m is None else replace(factor, mat=m) for m in backs]
        deliver(self.plan, call, factors, arrived, samples)

    def _run_user_rules(
        self, call: Call, factor: Factor, arrived: dict[Origin, Factor], samples: Rows
    ) -> bool:
        """Run the rule that a user registered for this module; False if there is none."""
        for ext in self.exts:
            rule = ext.rule_for(call.module)
            if rule is not None:
                with call.bound() as module:
                    grads = call_gradients(call)
                    back = rule.run(ext, module, *grads, factor.mat, self._add_rule_value)
                mats = back if isinstance(back, tuple) else (back,)
                factors = [None if m is None else replace(factor, mat=m) for m in mats]
                deliver(self.plan, call, factors, arrived, samples)
                return True
        return False

    def _add_rule_value(self, p: Parameter, ext: BackpropExtension, value: Any) -> None:
        """Sum what a user's rule returns over the losses and over the uses of a parameter."""
        if len(self.plan.uses.get(p, ())) > 1:
            raise NotImplementedError(
                f"{ext.savefield}: a rule of your own cannot serve a parameter that is used "
                "several times. Register derivatives instead "
                "(backpack.core.derivatives.register)."
            )
        if (p, ext) in self.rule_values:
            value = ext.accumulate_backpropagated_quantities(self.rule_values[p, ext], value)
        self.rule_values[p, ext] = value


def deliver(
    plan: Plan,
    call: Call,
    factors: Sequence[Factor | None],
    arrived: dict[Origin, Factor],
    samples: Rows,
) -> None:
    """Add columns at a call's inputs to what their producers have so far."""
    for origin, factor in zip(call.origins_in, factors, strict=False):
        producer = None if origin is None else plan.producers.get(origin)
        if origin is None or producer is None or factor is None:
            continue
        shape = plan.shape(producer, samples)
        if producer.call.is_unbatched and factor.mat.shape[1] > shape[0]:
            factor = factor.gathered(shape[0])
        output = producer.call.outputs[producer.slot]
        factor = factor.reshaped(shape).on(output.device)
        arrived[origin] = arrived[origin] + factor if origin in arrived else factor


def separate_samples(plan: Plan) -> None:
    """Find each sample's gradient where a tensor has no samples: autograd has summed over them.

    Only calls that combine such a tensor with one that has samples, and calls above them, take
    part.
    """
    if not any(call.is_unbatched for call in plan.calls):
        return
    plan.check_one_batch_for_all()
    arrived: dict[Origin, Factor] = {}
    apart = {o for call in plan.calls if call.is_unbatched for o in call.origins_out}
    for call in reversed(plan.calls):
        if call in plan.losses or call.derivatives is None:
            continue
        if call.is_unbatched:
            found = fetch(call, arrived)
            call.g_samples = [None] * len(call.outputs) if found is None else _only(found[1])
            for total, each in zip(call.g_out, call.g_samples, strict=True):
                if total is not None and (
                    each is None or not close(each.sum(0), total, call.rounding)
                ):
                    raise ValueError(
                        f"{call!r} has no samples, and reaches the loss on a way on which those of "
                        "the loss cannot be told apart (not through a module that combines it with "
                        "data). Combine it with data in a module, such as SumModule."
                    )
        grads = call_products.gradients(call)
        if apart.isdisjoint(call.origins_in) or all(g is None for g in grads):
            continue
        mats = [None if g is None else g.unsqueeze(0) for g in grads]
        backs = call_products.transposed(call, mats, None)
        factors = [
            Factor(back, back.shape[1], adds_up=True)
            if back is not None and origin in apart
            else None
            for origin, back in zip(call.origins_in, backs, strict=True)
        ]
        deliver(plan, call, factors, arrived, None)


def _only(mats: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if mat is None else mat.squeeze(0) for mat in mats]


def fetch(call: Call, arrived: dict[Origin, Factor]) -> tuple[Factor, list[Tensor | None]] | None:
    """Take what arrived at a call's outputs: columns at one of them, and at each."""
    found = [None if o is None else arrived.pop(o, None) for o in call.origins_out]
    known = [f for f in found if f is not None]
    if not known:
        return None
    groups = min(f.groups for f in known)
    aligned = [None if f is None else f.coarsened(groups) for f in found]
    first = next(f for f in aligned if f is not None)
    return first, [None if f is None else f.mat for f in aligned]


def call_gradients(call: Call) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return ``g_inp`` and ``g_out`` for user-written rules."""
    return InputGradients(call), tuple(call.g_out)  # type: ignore[return-value]


class InputGradients(Sequence[Any]):
    """Gradients with respect to the inputs of a call, computed when somebody looks at them."""

    def __init__(self, call: Call):
        """Remember the call."""
        self._call = call

    def __len__(self) -> int:
        """Number of inputs."""
        return len(self._call.inputs)

    def __getitem__(self, i: Any) -> Any:
        """Return the gradient with respect to input ``i``, None if it needs none."""
        return self._gradients[i]

    @cached_property
    def _gradients(self) -> tuple[Any, ...]:
        call = self._call
        needed = [i for i, o in enumerate(call.origins_in) if o is not None]
        if not needed:
            return (None,) * len(self)
        grad = call.g_out[0]
        known = call.derivatives is not None and call.is_plain and len(call.outputs) == 1
        if known and call.shape_out[0] and grad is not None:
            grads = call_products.transposed(call, [grad.unsqueeze(0)], None)
            return tuple(
                g.squeeze(0) if g is not None and i in needed else None for i, g in enumerate(grads)
            )
        with torch.enable_grad(), disable():
            xs = [x.detach() if isinstance(x, Tensor) else x for x in call.inputs]
            for i in needed:
                xs[i].requires_grad_()
            outputs = flatten_outputs(call.forward(xs))
            pairs = [(y, g) for y, g in zip(outputs, call.g_out, strict=True) if g is not None]
            ys, gs = zip(*pairs, strict=True)
            found = torch.autograd.grad(ys, [xs[i] for i in needed], gs, allow_unused=True)
        by_index = dict(zip(needed, found, strict=True))
        return tuple(by_index.get(i) for i in range(len(xs)))


def _are_per_sample(values: dict[str, Tensor]) -> bool:
    return any(REDUCTIONS[name].sample_axis is not None for name in values)


def _combined(
    one: dict[str, Tensor] | None, other: dict[str, Tensor], over: str
) -> dict[str, Tensor]:
    """Put two slices (of "columns" or "samples") or the parts of two "sources" together."""
    if one is None:
        return other
    combined = {}
    for name, value in other.items():
        reduction = REDUCTIONS[name]
        if over == "sources":
            combined[name] = reduction.columns(*reduction.merged(one[name], value))
        else:
            combined[name] = getattr(reduction, over)(one[name], value)
    return combined
