"""Losses without formulas of their own: the Hessian of each sample's predictions by autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial, reduce
from itertools import chain, combinations, count, islice
from math import comb, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Module

from backpack.core.derivatives.automatic import evaluated_again, with_gradients
from backpack.core.derivatives.by_autograd import transposed_products
from backpack.core.derivatives.conditions import once
from backpack.core.derivatives.evaluation import (
    Evaluation,
    alone,
    close,
    is_same,
    with_other_samples,
)
from backpack.core.derivatives.facts import constant, never
from backpack.core.derivatives.lossbase import BaseLossDerivatives, not_convex
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.derivatives.vectors import first_of, listed
from backpack.core.record.alive import all_live_calls
from backpack.core.record.calls import Call
from backpack.core.record.context import Context, context_of
from backpack.core.record.generators import evaluated_alike, evaluated_apart
from backpack.core.record.layout import Layout, Place
from backpack.core.record.module_state import describe
from backpack.core.record.registry import FALLBACKS, register
from backpack.core.record.visits import Visit
from backpack.core.values import at_least_single


@register(
    nn.CosineEmbeddingLoss,
    nn.MarginRankingLoss,
    nn.TripletMarginLoss,
    nn.TripletMarginWithDistanceLoss,
)
class AutomaticLossDerivatives(BaseLossDerivatives):
    """Any loss: the Hessian ``H_n`` of each sample from products by double backward.

    All inputs that the network computes are predictions, and ``H_n`` is that with respect to all of
    them, ``[D, D]`` for D entries together. Factors need a loss that is a sum over the samples;
    Hessian products do not.
    """

    _may_change_attributes = True
    batch_axis = BatchAxis.LEADING
    trailing_axes = constant(0)

    hessian_is_psd = never  # nothing is known
    sees_chosen_rows = never  # the loss is evaluated as it was called, columns are moved there
    has_likelihood = never  # no distribution is known that targets could be drawn from

    def predictions(self, c: Context) -> tuple[int, ...]:
        """Number the inputs that the network computes (or else that require a gradient)."""
        computed = (i for i, mark in enumerate(c.call.origins_in) if mark is not None)
        leaves = (i for i, x in enumerate(c.call.inputs) if getattr(x, "requires_grad", False))
        return tuple(computed) or tuple(leaves) or (0,)

    # ------------------------------------------------------------------ evaluating it again

    def evaluate(self, c: Context, params: Mapping[str, Tensor], *inputs: Any) -> Any:
        """Return the loss for other inputs and parameters; what the user sees does not change."""
        with torch.enable_grad():
            return super().evaluate(c, params, *with_gradients(inputs, self.predictions(c)))

    def evaluation(self, c: Context) -> Evaluation:
        """Return how to evaluate the call at hand again: with its own arguments, never moved."""
        return Evaluation(self, c, self.as_called(c), [], [])

    def check_call(self, c: Context) -> None:
        """Refuse a call that is not a function of its inputs.

        Raises:
            ValueError: If the loss is not reduced to a scalar, or the prediction has no samples.
            NotImplementedError: If it is random, depends on its own state or on hidden parameters.
        """
        super().check_call(c)
        if c.saved.get("evaluated") is not c.module:  # that of a product may be a copy
            c.saved["unsupported_reason"] = self._why_no_function(c)
            c.saved["evaluated"] = c.module
        if c.saved["unsupported_reason"] is not None:
            raise NotImplementedError(c.saved["unsupported_reason"])

    def _why_no_function(self, c: Context) -> str | None:
        """Say why the Hessian at the inputs is not all there is; None if it is."""
        evaluation = self.evaluation(c)

        def twice() -> list[Tensor]:
            return [reduce(torch.add, evaluation.outputs({}, evaluation.inputs)) for _ in range(2)]

        hidden, _ = evaluated_again(evaluation)  # first: it may be another module from here on
        with torch.no_grad():
            # the stored value may be of low precision (autocast): two new ones agree to more
            (again, once_more), _ = evaluated_apart(twice)
        if hidden:
            return (
                f"{describe(c.module)} depends on parameters of shapes "
                f"{[list(p.shape) for p in hidden]} that are not among its inputs, so its "
                "derivatives with respect to them are not known. Add a regulariser outside of the "
                "loss (loss + 0.1 * penalty), and freeze what is not trained "
                "(requires_grad_(False))."
            )
        if close(again, once_more) and close(again, reduce(torch.add, c.outputs), c.call.rounding):
            return None
        return (
            f"{describe(c.module)} returns something else when it is evaluated again (is it "
            "random, or does it change its own state?), so its second derivatives cannot be "
            "computed. Draw random numbers outside of the loss and make them inputs, update its "
            "state outside, or register derivatives (backpack.core.derivatives.register)."
        )

    # ------------------------------------------------------------------ samples that meet

    def couples_samples_unseen(self, call: Visit) -> bool | None:
        """Return whether it mixes samples; found out once for each state of a loss and shape."""
        options = tuple(x for x in call.inputs if isinstance(x, (int, float, str)))
        key = ("mixes", call.shape_in, call.training, options)
        return once(call, key, partial(self._meet, call, at_predictions=True))

    def divides_by_targets(self, call: Visit) -> bool | None:
        """Return whether a sample's gradient depends on the targets of others, in this call."""
        return self._meet(call, at_predictions=False)

    def _meet(self, call: Visit, at_predictions: bool) -> bool | None:
        """Return whether a sample's gradient depends on other samples; None if it is not known.

        On their predictions, or on all other tensors that have a row for each sample.
        """
        try:
            with alone():
                return self._depend(context_of(call, check=False), at_predictions)
        except Exception:  # out of its domain
            return None

    def _depend(self, c: Context, at_predictions: bool) -> bool | None:
        numbers, evaluation = self.predictions(c), self.evaluation(c)
        inputs = evaluation.inputs
        places = {i: c.call.place_in(i) for i in numbers}
        layouts = chain.from_iterable(call.layouts_out for call in all_live_calls())
        counts = {layout.samples for layout in layouts if layout is not None}
        for i in numbers:  # functions that were not followed may have computed a row for each
            x = inputs[i]
            if c.call.layouts_in[i] is None and isinstance(x, Tensor) and {*x.shape[:1]} & counts:
                places[i] = Place(samples=len(x))
        given = {i: p for i, p in places.items() if p is not None and p.samples > 1}
        if not given:
            return False
        first = next(iter(given))
        rows = len(inputs[first])
        varied = {
            i: given.get(i, given[first])
            for i, x in enumerate(inputs)
            if (i in given if at_predictions else i not in numbers and _has_rows(x, rows))
        }
        if not varied:
            return False

        def gradients(alike: Set[int] | None = None) -> list[Tensor]:
            leaves = [*inputs]
            if alike is not None:
                for i, place in varied.items():
                    leaves[i] = _changed(inputs[i], place, alike)
            for i in given:
                leaves[i] = leaves[i].detach().requires_grad_()
            with torch.enable_grad():  # copies: it may write on them
                copies = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
                total = reduce(torch.add, evaluation.outputs({}, copies)).sum()
            xs = [leaves[i] for i in given]
            found = torch.autograd.grad(total, xs, materialize_grads=True)
            return [p.to_canonical(g) for p, g in zip(given.values(), found, strict=True)]

        before = evaluated_alike(gradients)
        for alike in _selections(given[first].samples):
            after = evaluated_alike(partial(gradients, alike))
            for b, a, place in zip(before, after, given.values(), strict=True):
                kept = _kept(len(b), place.samples, alike)
                if not is_same(b[kept], a[kept]):
                    again = evaluated_alike(gradients)  # it may draw from a generator of its own
                    return True if all(map(is_same, before, again)) else None
        return False

    # ------------------------------------------------------------------ Hessian by autograd

    def _products(self, c: Context, mats: Sequence[Tensor]) -> list[Tensor]:
        """Apply the Hessian to ``[V, N, *d]`` at each prediction, the samples of all together."""
        call, places = c.call, {i: c.call.place_in(i) for i in self.predictions(c)}
        tangents = {
            i: m if p is None else p.from_canonical(m, p.rows_per_sample(call.shape_in[i] or ()))
            for m, (i, p) in zip(mats, places.items(), strict=True)
        }
        evaluation, weights = self.evaluation(c), self._weights(c)
        found, _ = evaluated_apart(lambda: transposed_products(evaluation, weights, tangents, None))
        return [
            found[i] if place is None else place.to_canonical(found[i], skip=1)
            for i, place in places.items()
        ]

    @staticmethod
    def _weights(c: Context) -> Sequence[Tensor | None]:
        """Return what each output is multiplied with; 1 if there is one: see ``loss_scale``."""
        return [torch.ones_like(c.output)] if len(c.outputs) == 1 else c.call.g_out

    def _shapes(self, c: Context) -> list[torch.Size]:
        """Return the shape ``[N, *d]`` of each prediction: all have the same number of samples."""
        call = c.call
        shapes = []
        for i in self.predictions(c):
            place = call.place_in(i)
            meta = torch.empty(call.shape_in[i] or (), device="meta")
            shapes.append((meta if place is None else place.to_canonical(meta)).shape)
        if len({shape[:1] for shape in shapes}) > 1 or not all(shapes):
            raise ValueError(
                f"{describe(c.module)}: the predictions of shapes {[list(s) for s in shapes]} do "
                "not have the same number of samples along the first axis."
            )
        return shapes

    def _blocks(self, c: Context) -> tuple[Tensor, float]:
        """Return ``H_n`` ``[N, D, D]``, and the largest term between different samples."""
        key = f"loss blocks, differentiable: {torch.is_grad_enabled()}"
        if len(c.outputs) > 1:
            key += f", weights: {[None if w is None else float(w) for w in self._weights(c)]}"
        if key not in c.saved:
            shapes = self._shapes(c)
            count = shapes[0][0]
            like = c.call.inputs[self.predictions(c)[0]]
            units = torch.eye(sum(prod(s[1:]) for s in shapes), dtype=like.dtype)
            columns = units.to(like.device).unsqueeze(1).expand(-1, count, -1)
            dense = self._apply(c, columns).movedim(0, -1)  # [N, D, D]
            # of any two samples, one vector is zero at one of them alone: what H makes of it there,
            # but for rounding, comes from terms between samples
            bits = torch.arange(count).bitwise_right_shift(
                torch.arange(count.bit_length())[:, None]
            )
            given = (bits % 2).bool().unsqueeze(2).to(dense.device)
            generator = torch.Generator().manual_seed(0)
            vector = torch.rand(dense.shape[:2], generator=generator, device=generator.device)
            found = self._apply(c, given * (vector.to(dense) + 0.5)).masked_fill(given, 0)
            c.saved[key] = (dense + dense.mT) / 2, float(found.detach().abs().max())
        return c.saved[key]

    def _apply(self, c: Context, columns: Tensor) -> Tensor:
        """Apply the Hessian to ``[V, N, D]``, the entries of all predictions together."""
        products = self._products(c, self._split(c, columns))
        return torch.cat([p.flatten(2) if p.dim() > 2 else p.unsqueeze(2) for p in products], -1)

    def _split(self, c: Context, columns: Tensor) -> list[Tensor]:
        """Split ``[V, N, D]`` in the columns of each prediction."""
        shapes = self._shapes(c)
        parts = columns.split([prod(shape[1:]) for shape in shapes], -1)
        return [
            part.reshape(*part.shape[:2], *shape[1:])
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def couples_terms(self, c: Context) -> bool:
        """Return whether the Hessian has terms between different samples."""
        self.check_call(c)
        blocks, between = self._blocks(c)
        return between > _rounding(blocks) * float(blocks.detach().abs().max())

    def _separate(self, c: Context) -> Tensor:
        """Return ``H_n`` of the selected samples; refuse a loss that is no sum over the samples."""
        if self.couples_terms(c):
            raise NotImplementedError(
                f"{describe(c.module)} is no sum over the samples of the batch: its Hessian has "
                "terms between different samples. Use DiagHessian or HMP without subsampling, or a "
                "loss that treats each sample alone."
            )
        return c.select(self._blocks(c)[0])

    # ------------------------------------------------------------------ factors and products

    def need_convex(self, c: Context) -> None:
        """Refuse Hessians with negative eigenvalues."""
        blocks = self._separate(c).detach()
        values = torch.linalg.eigvalsh(at_least_single(blocks))
        # a loss that returns single precision has computed in it, whatever precision it reads
        returned = [_rounding(out.float()) for out in c.call.outputs if out.dtype != torch.float64]
        rounding = max([_rounding(blocks), *returned])
        if len(values) and values.min() < -rounding * values.abs().max():
            raise not_convex(c.module, f"its Hessian has the eigenvalue {float(values.min()):g}")

    def hessian_root(self, c: Context) -> Any:
        """Return the symmetric square root of ``H_n``."""
        roots: Tensor = _SquareRoot.apply(self._separate(c))
        return self._at_inputs(c, self._split(c, roots.movedim(-1, 0)))

    def signed_hessian_root(self, c: Context) -> tuple[Any, Tensor | None]:
        """Return columns and signs, without eigenvectors, whose derivatives are singular."""
        # H = 1/4 sum_k (a e_k + h_k/a)(…)ᵀ - (a e_k - h_k/a)(…)ᵀ for the columns h_k of H.
        # Rounding is smallest for |a e_k| = |h_k/a|.
        blocks = self._separate(c)
        norms = blocks.detach().norm(dim=1)
        size = norms.maximum(_rounding(norms) * norms.amax(1, keepdim=True)).sqrt()  # a: [N, D]
        units, others = torch.diag_embed(size), blocks / size.where(size > 0, 1).unsqueeze(1)
        columns = torch.cat([units + others, units - others], -1) / 2  # [N, D, V]
        weights = blocks.new_ones(columns.shape[-1], len(blocks))
        weights[blocks.shape[-1] :] = -1
        return self._at_inputs(c, self._split(c, columns.movedim(-1, 0))), weights

    def hessian_product(self, c: Context, t: Any) -> Any:
        """Apply the Hessian, with its terms between samples if all rows are there."""
        if c.rows is not None:
            return self.ggn_product(c, t)
        return self._at_inputs(c, self._products(c, self._at_predictions(c, t)))

    def ggn_product(self, c: Context, t: Any) -> Any:
        """Apply ``H_n`` of each sample."""
        blocks = self._separate(c)
        given = self._at_predictions(c, t)
        columns = torch.cat([m.reshape(*m.shape[:2], -1) for m in given], -1)
        return self._at_inputs(c, self._split(c, torch.einsum("nab,vnb->vna", blocks, columns)))

    def _at_predictions(self, c: Context, t: Any) -> list[Tensor]:
        """Return the columns at each prediction, zeros for None."""
        like, mats = first_of(t), listed(t)
        known = [mats[i] for i in self.predictions(c)]
        return [
            like.new_zeros(*like.shape[:2], *shape[1:]) if mat is None else mat
            for mat, shape in zip(known, self._shapes(c), strict=True)
        ]

    def _at_inputs(self, c: Context, parts: Sequence[Tensor]) -> Any:
        """Return what belongs to the predictions: one tensor, or an entry for each input."""
        by_input = dict(zip(self.predictions(c), parts, strict=True))
        if [*by_input] == [0]:
            return parts[0]
        return tuple(by_input.get(i) for i in range(len(c.call.inputs)))


FALLBACKS["loss"] = AutomaticLossDerivatives()


@register(nn.CTCLoss)
class CTCLossDerivatives(AutomaticLossDerivatives):
    """Where ``torch.nn.CTCLoss`` has its samples: along the second axis.

    Second-order quantities are an error, because autograd differentiates this loss only once.
    """

    batch_axis = BatchAxis.FIXED

    def layouts(self, call: Call) -> list[Layout | None]:
        """Refuse log-probabilities without a batch axis."""
        if len(call.shape_in[0] or ()) < 3:
            raise ValueError(f"{call!r} was called without a batch axis. Add one, x.unsqueeze(1).")
        return super().layouts(call)

    def batch_axis_in(self, module: Module, i: int) -> int:
        """Return 1 for the log-probabilities ``[T, N, C]``."""
        return 1 if i == 0 else 0

    def check_call(self, c: Context) -> None:
        super().check_call(c)
        raise NotImplementedError(
            f"{describe(c.module)} cannot be differentiated twice by autograd. Use first-order "
            "quantities."
        )


class _SquareRoot(torch.autograd.Function):
    """The symmetric square root of positive semidefinite matrices, ``H = S S``: ``[N, D, D]``.

    Its derivative solves ``dS S + S dS = dH`` (Higham 2008, Functions of Matrices, section 6.1),
    also where eigenvalues are equal. Between eigenvectors of eigenvalue zero, dH and dS are zero.
    """

    @staticmethod
    def forward(ctx: Any, matrices: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(at_least_single(matrices))
        roots = values.clamp(min=0).sqrt()
        ctx.save_for_backward(roots, vectors)
        return ((vectors * roots.unsqueeze(1)) @ vectors.mT).to(matrices.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Solve the (self-adjoint) equation for the gradient."""
        roots, vectors = ctx.saved_tensors
        sums = roots.unsqueeze(1) + roots.unsqueeze(2)
        inside = vectors.mT @ grad.to(roots.dtype) @ vectors
        known = sums > _rounding(sums) ** 0.5 * sums.amax((1, 2), keepdim=True)
        solved = torch.where(known, inside / sums.where(known, 1), 0)
        return (vectors @ solved @ vectors.mT).to(grad.dtype)


def _has_rows(x: Any, rows: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == rows


def _selections(samples: int) -> list[Set[int]]:
    """Choose samples to keep: of any two, each is once without the other; the first once alone.

    Their codes have equally many ones. Where values are detached, only one depends on the other.
    """
    length = next(k for k in count() if comb(k, k // 2) >= samples)
    codes = [*islice(combinations(range(length), length // 2), samples)]
    return [*[{n for n in range(samples) if k not in codes[n]} for k in range(length)], {0}]


def _kept(rows: int, samples: int, numbers: Set[int]) -> list[int]:
    """Number the rows of some samples."""
    return [row for row in range(rows) if row // (rows // samples) in numbers]


def _changed(x: Tensor, place: Place, numbers: Set[int]) -> Tensor:
    """Change the rows of all samples but some; indices to those of one, if that is all."""
    own = place.to_canonical(x.detach())
    kept = _kept(len(own), place.samples, numbers)
    if len(numbers) == 1 and not own.is_floating_point():
        other = own[kept].repeat(place.samples, *(1,) * (own.dim() - 1))
    else:
        other = with_other_samples(own, 0, kept)
    return place.from_canonical(other.unsqueeze(0), place.rows_per_sample(x.shape)).squeeze(0)


def _rounding(tensor: Tensor) -> float:
    """Return the relative error below which an entry may be zero."""
    return torch.finfo(tensor.dtype).eps ** 0.5
