"""Attention: ``y = D v`` with ``D = m A``, ``A = softmax(S)``, ``S = scale q kᵀ + mask``.

Letters: V columns, * samples and heads, l (L) queries, s (S) keys and values, e (E) features.
``J`` is the Jacobian of the softmax, ``J t = A (t - sum_s A t)`` row by row; it is symmetric. The
factors m are those of dropout, 0 or 1 / (1 - p): 1 without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from math import inf, sqrt
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Size, Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from backpack.core import fast
from backpack.core.derivatives.automatic import AutomaticDerivatives
from backpack.core.derivatives.basederivatives import FIRST_DERIVATIVES
from backpack.core.derivatives.facts import always
from backpack.core.derivatives.function_derivatives import FunctionDerivatives
from backpack.core.derivatives.memoise import memoise
from backpack.core.derivatives.vectors import listed
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.layout import Layout, by_certainty
from backpack.core.record.module_state import describe
from backpack.core.record.registry import register
from backpack.core.rows import Rows
from backpack.core.types import Changes, OfInputs, OfParams
from backpack.custom_module.attention import ScaledDotProductAttention
from backpack.utils.subsampling import subsample

Method = Callable[..., Any]
Whole = TypeVar("Whole")


def of_samples(whole: Whole, axis: int, rows: Rows) -> Whole:
    """Select samples along an axis of all tensors of an evaluation."""
    if rows is None:
        return whole
    return tree_map_only(Tensor, lambda x: subsample(x, axis, rows), whole)


class Attention(NamedTuple):
    """One evaluation, all of its tensors with the same leading axes."""

    q: Tensor  # queries, [*, L, E]
    k: Tensor  # keys, [*, S, E]
    v: Tensor  # values, [*, S, Ev]
    weights: Tensor  # the attention weights A, [*, L, S]
    scale: float  # factor of the scores
    factors: Tensor | None = None  # what dropout multiplies the weights with, [*, L, S]

    def dropped(self, weights: Tensor) -> Tensor:
        """Apply the dropout of the call to weights, their tangents, or what arrives behind it."""
        return weights if self.factors is None else self.factors * weights

    @property
    def output(self) -> Tensor:
        """Average the values: y, ``[*, L, Ev]``."""
        return self.dropped(self.weights) @ self.v

    def _softmax_product(self, t: Tensor) -> Tensor:
        """Apply the Jacobian of the softmax: ``J t``."""
        t = self.weights * t
        return t.addcmul_(self.weights, -t.sum(-1, keepdim=True))  # in place: t is new, and large

    def push(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the Jacobian to tangents ``[V, *, .]``: those of D, and of the output.

        ``dS = scale (dq kᵀ + q dkᵀ)``, ``dA = J dS``, ``dD = m dA``, ``dy = dD v + D dv``.
        """
        d_dropped = self.dropped(self._d_weights(dq, dk))
        return d_dropped, d_dropped @ self.v + _applied(self.dropped(self.weights), dv)

    def _d_weights(self, dq: Tensor, dk: Tensor) -> Tensor:
        d_scores = (self.scale * dq) @ self.k.mT + (self.scale * self.q) @ dk.mT
        return self._softmax_product(d_scores)

    def _at_scores(self, y: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what arrives at A and at S from cotangents of y and of D."""
        at_weights = y @ self.v.mT
        if weights is not None:
            at_weights = at_weights + weights
        at_weights = self.dropped(at_weights)
        return at_weights, self._softmax_product(at_weights)

    def pull(self, y: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the transposed Jacobian to cotangents ``[V, *, .]`` of y and (or None) of D.

        ``s = J m (y vᵀ + weights)`` at the scores; ``scale s k``, ``scale sᵀ q`` and ``Dᵀ y`` at
        q, k and v.
        """
        s = self._at_scores(y, weights)[1]
        at_q, at_k = s @ (self.scale * self.k), s.mT @ (self.scale * self.q)
        return at_q, at_k, _applied(self.dropped(self.weights).mT, y)

    def second(
        self, y: Tensor, weights: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate :meth:`pull` along tangents of q, k and v, for fixed cotangents.

        With ``a`` at the weights, ``s = J a`` at the scores:
        ``da = m y dvᵀ``, ``ds = J da + dA (a - sum_s A a) - A sum_s (dA a)``. Tangents are stacked,
        ``[V, *, .]``, cotangents are not.
        """
        a, s = self._at_scores(y, weights)
        d_weights = self._d_weights(dq, dk)
        mean = (self.weights * a).sum(-1, keepdim=True)
        change = d_weights * a
        ds = self._softmax_product(self.dropped(y @ dv.mT)) - self.weights * change.sum(
            -1, keepdim=True
        )
        ds = ds + change - d_weights * mean
        return (
            self.scale * (ds @ self.k + s @ dk),
            self.scale * (ds.mT @ self.q + s.mT @ dq),
            self.dropped(d_weights).mT @ y,
        )


def _applied(weights: Tensor, mat: Tensor) -> Tensor:
    """Return ``weights @ mat`` for ``[V, *, .]``, without a copy of the weights for each v."""
    return torch.einsum("...ls,v...se->v...le", weights, mat)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, zero_rows: bool
) -> Attention:
    """Evaluate attention, with a mask that is added to the scores (and expands to ``[*, L, S]``).

    With ``zero_rows``, a query that may not attend to anything has the weights 0, else nan.
    """
    scores = (q * scale) @ k.mT
    if mask is not None:
        scores = scores + mask
    if mask is None or not zero_rows:
        return Attention(q, k, v, scores.softmax(-1), scale)
    nothing = (scores == -inf).all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    return Attention(q, k, v, weights, scale)


def additive(excluded: Tensor, like: Tensor) -> Tensor:
    """Return what is added to the scores: minus infinity where a position is excluded."""
    return torch.zeros_like(excluded, dtype=like.dtype).masked_fill(excluded, -inf)


def causal(like: Tensor, num_q: int, num_k: int) -> Tensor:
    """Return a mask that excludes later positions, ``[L, S]``."""
    ones = torch.ones(num_q, num_k, dtype=torch.bool, device=like.device)
    return additive(~ones.tril(), like)


def or_automatic(method: Method) -> Method:
    """Method decorator: where the rule has no formula for a call, autograd answers."""

    @wraps(method)
    def chosen(self: Any, c: Context, *args: Any, **keywords: Any) -> Any:
        if self.has_formula(c):
            return method(self, c, *args, **keywords)
        return getattr(super(AttentionDerivatives, self), method.__name__)(c, *args, **keywords)

    return chosen


def _applied_weights(inputs: Sequence[Any], y: Tensor) -> Tensor | None:
    """Return the attention weights that autograd has kept, ``[.., L, S]``; None of fused kernels.

    The last batched product of matrices is that of weights and values.
    """
    needed = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    known = {torch.autograd.graph.get_gradient_edge(x).node for x in needed}
    nodes: list[Any] = [y.grad_fn]
    for node in nodes:
        if type(node).__name__ == "BmmBackward0":
            return node._saved_self
        parents = [parent for parent, _ in node.next_functions if parent not in known]
        nodes += [parent for parent in parents if parent is not None]
        known.update(parents)
    return None


def _or_zeros(mat: Tensor | None, num_v: int, like: Tensor) -> Tensor:
    return like.new_zeros(()).expand(num_v, *like.shape) if mat is None else mat


class AttentionDerivatives(AutomaticDerivatives):
    """What has formulas for some calls: others are left to autograd."""

    dropout: ClassVar[str]
    has_formula: Callable[[Context], bool]  # whether there is one for the call at hand
    is_curved = always  # the softmax of the scores is nonlinear

    def drops(self, c: Context) -> bool:
        """Whether attention weights are dropped in the call at hand."""
        return c.call.training and getattr(c.module, self.dropout) > 0

    def is_random(self, c: Context) -> bool:
        """Whether attention weights are dropped in the call at hand, and not known which."""
        return self.drops(c) and "kept" not in c.saved

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Keep which inputs need a gradient, and which weights dropout has kept, if it has run."""
        saved = super().saved(module, inputs, outputs)
        if module.training and getattr(module, self.dropout) > 0:
            dropped = _applied_weights(inputs, outputs[0])
            if dropped is not None:
                saved["kept"] = dropped != 0
        return saved

    def drop(self, c: Context, attention: Attention) -> Attention:
        """Drop what the call has dropped."""
        kept = c.saved.get("kept")
        if kept is None:
            return attention
        share = 1 - getattr(c.module, self.dropout)  # 0: nothing is kept
        factors = kept.view(attention.weights.shape).to(attention.v.dtype) / (share or 1)
        return attention._replace(factors=factors)

    @staticmethod
    def learns_mask(saved: Mapping[str, Any]) -> bool:
        """Whether a mask required a gradient in the forward pass: what comes behind the values."""
        return any(i > 2 for i in saved["needed"])

    def unsupported_reason(self, c: Context) -> str | None:
        if self.has_formula(c):
            return None
        if self.drops(c):
            return (
                f"{describe(c.module)} has {self.dropout}={getattr(c.module, self.dropout)}: in "
                "training mode its attention weights are random. What was dropped is known where "
                "queries, keys and values have the same leading axes, among them the samples, the "
                "values need a gradient, and no fused kernel has run (see "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)). Else use eval(), or "
                f"{self.dropout}=0."
            )
        return super().unsupported_reason(c)


@register(ScaledDotProductAttention)
class ScaledDotProductAttentionDerivatives(AttentionDerivatives, FunctionDerivatives):
    """Derivatives of ``torch.nn.functional.scaled_dot_product_attention``.

    By formulas where queries, keys and values have the same leading axes, the samples along one of
    them, and the mask needs no gradient; else automatically.
    """

    dropout = "dropout_p"

    def layouts(self, call: Call) -> list[Layout | None]:
        """Find where the samples are: where they are in queries, keys and values."""
        layout = self._common_layout(call)
        return super().layouts(call) if layout is None else [layout]

    def _common_layout(self, call: Call) -> Layout | None:
        """Return the layout of queries, keys and values; None if they have no common one."""
        known = by_certainty(x for x in call.layouts_in[:3] if x is not None and x.is_batched)
        are_alike = len({x.facts for x in known}) == 1
        if len(known) < 3 or not are_alike or self.learns_mask(call.saved):
            return None
        shapes = [shape or Size() for shape in (*call.shape_in[:3], *call.shape_out)]
        places = [known[0].place(shape) for shape in shapes]
        axes = {p.axis if p and p.samples == known[0].samples else None for p in places}
        if not self._fits(call.module, shapes, axes):
            return None
        for layout in known[1:]:
            known[0].unify(layout)
        return known[0]

    def _fits(self, module: Any, shapes: Sequence[Size], axes: Collection[int | None]) -> bool:
        """Whether all leading axes agree (but for groups of heads) and one has the samples."""
        own = 3 if module.enable_gqa else 2
        leading = {shape[:-own] for shape in shapes}
        leading_axes = range(len(shapes[0]) - own)
        return len(leading) == 1 and len(axes) == 1 and all(a in leading_axes for a in axes)

    def has_formula(self, c: Context) -> bool:
        """Whether there is a formula for the call at hand."""
        shapes = [x.shape for x in (*c.inputs[:3], c.output)]
        axes = {*self.axes_in(c)[:3], *self.axes_out(c)}
        fits = self._fits(c.module, shapes, axes)
        return fits and not self.learns_mask(c.saved) and not self.is_random(c)

    # ------------------------------------------------------------------ evaluation

    def _axis(self, c: Context) -> int:
        """Return the batch axis: it is the same everywhere."""
        (axis,) = self.axes_out(c)
        assert axis is not None
        return axis

    def _groups(self, c: Context) -> list[int]:
        """Return how many query heads share a head of keys, and of values."""
        q, *others = c.inputs[:3]
        return [q.shape[-3] // x.shape[-3] if c.module.enable_gqa else 1 for x in others]

    def _attention(self, c: Context) -> Attention:
        """Return the evaluation at hand, for the selected samples."""

        def compute() -> Attention:
            q, k, v, mask = [*c.inputs, None][:4]
            module = c.module
            k, v = map(_repeated, (k, v), self._groups(c))
            scale = 1 / sqrt(q.shape[-1]) if module.scale is None else module.scale
            if mask is not None and mask.dtype == torch.bool:
                mask = additive(~mask, q)
            if module.is_causal:
                mask = causal(q, q.shape[-2], k.shape[-2])
            return self.drop(c, attend(q, k, v, mask, scale, zero_rows=True))

        tensors = [x for x in c.inputs if isinstance(x, Tensor)]
        whole = memoise(c.saved, "attention", tensors, (), compute)
        return of_samples(whole, self._axis(c), c.rows)

    def _tangents(self, c: Context, t: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the tangents of queries, keys and values, zeros for None."""
        num_v = next(len(one) for one in t if one is not None)
        axis = self._axis(c)
        dq, *others = (
            _or_zeros(one, num_v, c.select(x, axis))
            for one, x in zip(t[:3], c.inputs[:3], strict=True)
        )
        return [dq, *map(_repeated, others, self._groups(c))]

    def _at_inputs(self, c: Context, found: Sequence[Tensor]) -> list[Tensor | None]:
        """Return what arrives at each input of the call."""
        q, *others = found
        return [q, *map(_summed, others, self._groups(c)), *[None] * (len(c.inputs) - 3)]

    @or_automatic
    def jvp(self, c: Context, t: Any) -> Any:
        return self._attention(c).push(*self._tangents(c, t))[1]

    @or_automatic
    def vjp(self, c: Context, v: Any) -> Any:
        (y,) = listed(v)
        return tuple(self._at_inputs(c, self._attention(c).pull(y, None)))

    @fast.body("The second derivative is a formula.", *FIRST_DERIVATIVES)
    @or_automatic
    def mixed_hvp(
        self, c: Context, inputs: OfInputs, params: OfParams, sum_batch: bool = False
    ) -> Changes:
        """Apply the second derivative, see the base class: ``[V, *in]`` for each input."""
        (g,) = c.grad_out
        assert g is not None
        y, tangents = c.select(g, self._axis(c)), self._tangents(c, inputs)
        return self._at_inputs(c, self._attention(c).second(y, None, *tangents)), {}


def _repeated(x: Tensor, group: int) -> Tensor:
    """Let groups of query heads have the same head: ``[*, H, S, E] -> [*, H·group, S, E]``."""
    return x if group == 1 else x.repeat_interleave(group, -3)


def _summed(x: Tensor, group: int) -> Tensor:
    """Transpose of :func:`_repeated`."""
    return x if group == 1 else x.unflatten(-3, (-1, group)).sum(-3)
