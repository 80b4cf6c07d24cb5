"""Attention: ``y = A v`` with ``A = softmax(S)``, ``S = scale q kᵀ + mask``.

Letters: V columns, * samples and heads, l (L) queries, s (S) keys and values, e (E) features.
``J`` is the Jacobian of the softmax, ``J t = A (t - sum_s A t)`` row by row; it is symmetric.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce, wraps
from math import inf, sqrt
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Size, Tensor
from torch.nn import Module, MultiheadAttention
from torch.nn import functional as F

from backpack.core.derivatives import shared_weight
from backpack.core.derivatives.automatic import AutomaticDerivatives, FunctionDerivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.by_autograd import Evaluation
from backpack.core.derivatives.recall import recall
from backpack.core.derivatives.shared_weight import SharedWeightDerivatives
from backpack.core.record.layout import Layout, by_certainty
from backpack.core.record.registry import register
from backpack.core.record.tape import Call, bound, describe
from backpack.core.rows import Rows, row_numbers
from backpack.core.types import Grads
from backpack.custom_module.attention import ScaledDotProductAttention
from backpack.utils.subsampling import subsample

Method = Callable[..., Any]


class Attention(NamedTuple):
    """One evaluation, all of its tensors with the same leading axes.

    Attributes:
        q: Queries. ``[*, L, E]``
        k: Keys. ``[*, S, E]``
        v: Values. ``[*, S, Ev]``
        weights: The attention weights A. ``[*, L, S]``
        scale: Factor of the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    scale: float

    def of_samples(self, axis: int, rows: Rows) -> Attention:
        """Select samples along one of the leading axes."""
        q, k, v, weights = (subsample(x, axis, rows) for x in self[:4])
        return Attention(q, k, v, weights, self.scale)

    def output(self) -> Tensor:
        """Return y, ``[*, L, Ev]``."""
        return self.weights @ self.v

    def _softmax_product(self, t: Tensor) -> Tensor:
        """Apply the Jacobian of the softmax: ``J t``."""
        t = self.weights * t
        return t.addcmul_(self.weights, -t.sum(-1, keepdim=True))  # in place: t is new, and large

    def push(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the Jacobian to tangents ``[V, *, .]``: those of the weights, and of the output.

        ``dS = scale (dq kᵀ + q dkᵀ)``, ``dA = J dS``, ``dy = dA v + A dv``.
        """
        d_scores = (self.scale * dq) @ self.k.mT + (self.scale * self.q) @ dk.mT
        d_weights = self._softmax_product(d_scores)
        return d_weights, d_weights @ self.v + _applied(self.weights, dv)

    def _at_scores(self, y: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what arrives at A and at S from cotangents of y and of A."""
        at_weights = y @ self.v.mT
        if weights is not None:
            at_weights = at_weights + weights
        return at_weights, self._softmax_product(at_weights)

    def pull(self, y: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the transposed Jacobian to cotangents ``[V, *, .]`` of y and (or None) of A.

        ``s = J (y vᵀ + weights)`` at the scores; ``scale s k``, ``scale sᵀ q`` and ``Aᵀ y`` at
        q, k and v.
        """
        s = self._at_scores(y, weights)[1]
        at_q, at_k = s @ (self.scale * self.k), s.mT @ (self.scale * self.q)
        return at_q, at_k, _applied(self.weights.mT, y)

    def second(
        self, y: Tensor, weights: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate :meth:`pull` along tangents of q, k and v, for fixed cotangents.

        With ``a`` at the weights, ``s = J a`` at the scores:
        ``da = y dvᵀ``, ``ds = J da + dA (a - sum_s A a) - A sum_s (dA a)``.

        Args:
            y: Cotangent of the output. ``[*, L, Ev]``
            weights: That of the weights, or None. ``[*, L, S]``
            dq: Tangent of the queries. ``[V, *, L, E]``
            dk: Tangent of the keys. ``[V, *, S, E]``
            dv: Tangent of the values. ``[V, *, S, Ev]``
        """
        a, s = self._at_scores(y, weights)
        d_weights, _ = self.push(dq, dk, dv)
        mean = (self.weights * a).sum(-1, keepdim=True)
        change = d_weights * a
        ds = self._softmax_product(y @ dv.mT) - self.weights * change.sum(-1, keepdim=True)
        ds = ds + change - d_weights * mean
        return (
            self.scale * (ds @ self.k + s @ dk),
            self.scale * (ds.mT @ self.q + s.mT @ dq),
            d_weights.mT @ y,
        )


def _applied(weights: Tensor, mat: Tensor) -> Tensor:
    """Return ``weights @ mat`` for ``[V, *, .]``, without a copy of the weights for each v."""
    return torch.einsum("...ls,v...se->v...le", weights, mat)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, zero_rows: bool
) -> Attention:
    """Evaluate attention.

    Args:
        q: Queries. ``[*, L, E]``
        k: Keys. ``[*, S, E]``
        v: Values. ``[*, S, Ev]``
        mask: Added to the scores. Expands to ``[*, L, S]``
        scale: Factor of the scores.
        zero_rows: Whether a query that may not attend to anything has the weights 0, not nan.
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


def or_automatic(automatic: type[BaseDerivatives]) -> Callable[[Method], Method]:
    """Method decorator: where the rule has no formula for a call, another class answers."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def chosen(self: Any, *args: Any, **keywords: Any) -> Any:
            module = next(a for a in args if isinstance(a, Module))
            with bound(module):
                rule = method if self.has_formula(module) else getattr(automatic, method.__name__)
                return rule(self, *args, **keywords)

        return chosen

    return decorate


def _arguments(module: Any) -> list[Any]:
    """Return the arguments of the call at hand, flattened."""
    own = vars(module)
    inputs: list[Any] = []
    while f"input{len(inputs)}" in own:
        inputs.append(own[f"input{len(inputs)}"])
    return inputs


def _or_zeros(mat: Tensor | None, num_v: int, like: Tensor) -> Tensor:
    return like.new_zeros(()).expand(num_v, *like.shape) if mat is None else mat


class AttentionDerivatives(AutomaticDerivatives):
    """What has formulas for some calls: others are left to autograd."""

    dropout: ClassVar[str]

    def is_random(self, module: Module) -> bool:
        """Whether attention weights are dropped in the call at hand."""
        return module.training and getattr(module, self.dropout) > 0

    @staticmethod
    def learns_mask(saved: Mapping[str, Any]) -> bool:
        """Whether a mask required a gradient in the forward pass: what comes behind the values."""
        return any(i > 2 for i in saved["needed"])

    def has_formula(self, module: Any) -> bool:
        """Whether there is a formula for the call at hand."""
        raise NotImplementedError

    def refusal(self, module: Any) -> str | None:
        """Say why the derivatives of the call at hand cannot be computed; None if they can."""
        if self.is_random(module):
            return (
                f"{describe(module)} has {self.dropout}={getattr(module, self.dropout)}: in "
                "training mode its attention weights are random, and what was dropped is not "
                f"known. Use eval(), or {self.dropout}=0."
            )
        return None if self.has_formula(module) else super().refusal(module)

    def hessian_is_zero(self, module: Module) -> bool:
        """Return False."""
        return False


# -------------------------------------------------------------------------------------------------
# As a function
# -------------------------------------------------------------------------------------------------


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
        alike = len({x.facts for x in known}) == 1
        if len(known) < 3 or not alike or self.learns_mask(call.saved):
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

    def has_formula(self, module: Any) -> bool:
        """Whether there is a formula for the call at hand."""
        q, k, v, *_ = _arguments(module)
        axes_in, axes_out = module._backpack_saved["axes"]
        shapes = [x.shape for x in (q, k, v, module.output)]
        fits = self._fits(module, shapes, {*axes_in[:3], *axes_out})
        learned = self.learns_mask(module._backpack_saved)
        return fits and not learned and not self.is_random(module)

    # ------------------------------------------------------------------ evaluation

    def _axis(self, module: Any) -> int:
        return module._backpack_saved["axes"][1][0]

    def _group(self, module: Any) -> int:
        """Return how many query heads share a head of keys and values."""
        return module.input0.shape[-3] // module.input1.shape[-3] if module.enable_gqa else 1

    def _attention(self, module: Any, rows: Rows) -> Attention:
        """Return the evaluation at hand, for some of the samples."""
        inputs = _arguments(module)
        tensors = [x for x in inputs if isinstance(x, Tensor)]

        def compute() -> Attention:
            q, k, v, mask = [*inputs, None][:4]
            group = self._group(module)
            k, v = _repeated(k, group), _repeated(v, group)
            scale = 1 / sqrt(q.shape[-1]) if module.scale is None else module.scale
            if mask is not None and mask.dtype == torch.bool:
                mask = additive(~mask, q)
            if module.is_causal:
                mask = causal(q, q.shape[-2], k.shape[-2])
            return attend(q, k, v, mask, scale, zero_rows=True)

        whole = recall(module._backpack_saved, "attention", tensors, (), compute)
        return whole.of_samples(self._axis(module), rows)

    def _tangents(self, module: Any, mats: Sequence[Tensor | None], rows: Rows) -> list[Tensor]:
        """Return the tangents of queries, keys and values, zeros for None."""
        num_v = next(len(m) for m in mats if m is not None)
        axis, group = self._axis(module), self._group(module)
        inputs = (module.input0, module.input1, module.input2)
        dq, dk, dv = (
            _or_zeros(m, num_v, subsample(x, axis, rows))
            for m, x in zip(mats, inputs, strict=False)
        )
        return [dq, _repeated(dk, group), _repeated(dv, group)]

    def _at_inputs(self, module: Any, found: Sequence[Tensor]) -> list[Tensor | None]:
        """Return what arrives at each input of the call."""
        q, k, v = found
        group = self._group(module)
        others = [None] * (len(_arguments(module)) - 3)
        return [q, _summed(k, group), _summed(v, group), *others]

    # ------------------------------------------------------------------ products

    @or_automatic(FunctionDerivatives)
    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Any:
        tangents = self._tangents(module, mat, subsampling)
        return self._attention(module, subsampling).push(*tangents)[1]

    @or_automatic(FunctionDerivatives)
    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Any:
        (mat,) = [mat] if isinstance(mat, Tensor) else mat
        found = self._attention(module, subsampling).pull(mat, None)
        return tuple(self._at_inputs(module, found))

    @or_automatic(FunctionDerivatives)
    def mixed_residual(
        self,
        module: Any,
        g_out: Grads,
        inputs: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
        subsampling: Rows = None,
        sum_batch: bool = False,
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Apply the second derivative, see the base class: ``[V, *in]`` for each input."""
        self._need_g_out(module, g_out)
        assert g_out is not None and g_out[0] is not None
        y = subsample(g_out[0], self._axis(module), subsampling)
        tangents = self._tangents(module, inputs, subsampling)
        found = self._attention(module, subsampling).second(y, None, *tangents)
        return self._at_inputs(module, found), {}


def _repeated(x: Tensor, group: int) -> Tensor:
    """Let groups of query heads have the same head: ``[*, H, S, E] -> [*, H·group, S, E]``."""
    return x if group == 1 else x.repeat_interleave(group, -3)


def _summed(x: Tensor, group: int) -> Tensor:
    """Transpose of :func:`_repeated`."""
    return x if group == 1 else x.unflatten(-3, (-1, group)).sum(-3)


# -------------------------------------------------------------------------------------------------
# As a layer
# -------------------------------------------------------------------------------------------------

# Which of queries (0), keys (1), values (2) and the output (3) a parameter makes.
MAKES: dict[str, tuple[int, ...]] = {
    **{"in_proj_weight": (0, 1, 2), "in_proj_bias": (0, 1, 2)},
    **{"q_proj_weight": (0,), "k_proj_weight": (1,), "v_proj_weight": (2,)},
    **{"bias_k": (1,), "bias_v": (2,)},
    **{"out_proj.weight": (3,), "out_proj.bias": (3,)},
}


def _axis_of_parts(param_str: str) -> int:
    """Return the axis along which the parts of a parameter are side by side."""
    return -2 if param_str.endswith("weight") else -1


class Options(NamedTuple):
    """Arguments of the layer behind queries, keys and values."""

    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


class Trace(NamedTuple):
    """The forward pass.

    Attributes:
        inputs: Query ``[N, L, I]``, key and value ``[N, S, I]``.
        attention: That of the heads, ``* = [N, H]``.
        heads: Its output, the heads side by side. ``[N, L, E]``
    """

    inputs: tuple[Tensor, ...]
    attention: Attention
    heads: Tensor

    def own(self, i: int) -> slice:
        """Return the positions of the sample's own queries, keys, values or outputs: the first."""
        return slice(0, (*self.inputs, self.heads)[i].shape[1])

    def span(self, param_str: str, i: int) -> slice:
        """Return the positions that a parameter makes: for ``bias_k`` the one behind the own."""
        own = self.own(i)
        return slice(own.stop, own.stop + 1) if param_str.startswith("bias") else own

    def of_samples(self, rows: Rows) -> Trace:
        """Select samples."""
        if rows is None:
            return self
        inputs = tuple(subsample(x, 0, rows) for x in self.inputs)
        return Trace(inputs, self.attention.of_samples(0, rows), subsample(self.heads, 0, rows))


class Changing(NamedTuple):
    """One end of a map and what changes along the tangents.

    Attributes:
        s: What arrives there. ``[1, N, T, O]``
        ds: Its change. ``[V, N, T, O]``
        x: What the weight is multiplied with. ``[N, T, I]``
        dx: Its change, None for zero. ``[V, N, T, I]``
    """

    s: Tensor
    ds: Tensor
    x: Tensor
    dx: Tensor | None


class Affine(NamedTuple):
    """Weights and biases of the maps to queries, keys, values and of the last; or tangents."""

    weights: tuple[Any, ...]
    biases: tuple[Any, ...]
    extra: tuple[Any, ...]

    @classmethod
    def of(cls, values: Mapping[str, Tensor | None]) -> Affine:
        """Take the parameters apart: ``[*p]``, or ``[V, *p]``."""
        weight, bias = values.get("in_proj_weight"), values.get("in_proj_bias")
        apart = tuple(values.get(f"{x}_proj_weight") for x in "qkv")
        weights = apart if weight is None else weight.chunk(3, -2)
        biases = (None,) * 3 if bias is None else bias.chunk(3, -1)
        return cls(
            (*weights, values.get("out_proj.weight")),
            (*biases, values.get("out_proj.bias")),
            (values.get("bias_k"), values.get("bias_v")),
        )


def _side_by_side(x: Tensor) -> Tensor:
    """Put heads side by side: ``[*, H, T, D] -> [*, T, E]``."""
    return x.transpose(-3, -2).flatten(-2)


def _moved(y: Tensor, x: Tensor, d_weight: Tensor | None, d_bias: Tensor | None) -> Tensor:
    """Return ``y + x dWᵀ + db`` for ``x [N, T, I]``: ``[V, N, T, O]``."""
    for tangent, read in ((d_weight, x), (d_bias, None)):
        if tangent is not None:
            y = y + shared_weight.jac_mat_prod(tangent, read, *x.shape[:2])
    return y


@register(MultiheadAttention)
class MultiheadAttentionDerivatives(AttentionDerivatives, SharedWeightDerivatives):
    """Attention between affine maps, ``q = query W_qᵀ + b_q``, …, ``y = (heads) W_oᵀ + b_o``.

    A product runs the forward pass once more to know queries, keys, values and attention weights;
    all parameters and extensions share that, and what arrives at them from a ``mat``. Every
    parameter is then a weight (bias) that is used at several positions, see
    :mod:`.shared_weight`.

    Kronecker factors are those of ``Linear`` with an extra axis for the positions:
    ``out_proj.weight`` is multiplied with the heads, ``q_proj_weight`` with the query, and so on.
    In self-attention, ``in_proj_weight`` is one Linear of the input, with factors ``[3E, 3E]`` and
    ``[E, E]``. If query, key and value are not the same tensor, its three parts have different
    inputs, no Kronecker product describes them, and it has what a parameter without Kronecker
    factors has: its exact block.

    Tied and reparametrised weights are left to autograd.
    """

    dropout = "dropout"

    # ------------------------------------------------------------------ facts about the module

    def is_linear_in_params(self, module: Module) -> bool:
        """Return False: queries and keys are multiplied with each other."""
        return False

    def batch_axis_in(self, module: Any, i: int) -> int:
        """Return the batch axis: queries, keys and values have it first or second."""
        return 0 if module.batch_first or i > 2 else 1

    def batch_axis_out(self, module: Any, i: int) -> int:
        """Return the batch axis: the attention weights have it first."""
        return 0 if module.batch_first or i > 0 else 1

    def min_dims(self, module: Module) -> int:
        """Return 3: batch, sequence, features."""
        return 3

    def layouts(self, call: Call) -> list[Layout | None]:
        """Find where the samples are, see the base class.

        Raises:
            ValueError: If a mask requires a gradient.
        """
        if self.learns_mask(call.saved):
            raise ValueError(
                f"{call!r}: a mask requires a gradient, which extensions cannot follow here. "
                "Detach it, or write the layer with torch.nn.Linear and "
                "torch.nn.functional.scaled_dot_product_attention, and use "
                "extend(model, use_converter=True)."
            )
        return super().layouts(call)

    def evaluation(self, module: Any) -> Evaluation:
        """Return how to evaluate the call again; a mask for all samples has no batch axis."""
        evaluation = super().evaluation(module)
        if len(evaluation.inputs) > 5 and isinstance(evaluation.inputs[5], Tensor):
            evaluation.axes_in[5] = None if evaluation.inputs[5].dim() == 2 else 0
        return evaluation

    def has_formula(self, module: Any) -> bool:
        """Whether there is a formula for the call at hand."""
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        own = self.own(module)
        return (
            {*names} <= {*MAKES}
            and len(own) == len(names)
            and not self.learns_mask(module._backpack_saved)
            and not self.is_random(module)
        )

    # ------------------------------------------------------------------ forward, once

    def _inside(self, module: Any, tensor: Tensor, axis: int = 0) -> Tensor:
        """Bring the samples of a query, key, value or output to ``axis``, and undo that."""
        return tensor if module.batch_first else tensor.transpose(axis, axis + 1)

    def _to_heads(self, module: Any, x: Tensor) -> Tensor:
        """Split features into heads: ``[*, T, E] -> [*, H, T, D]``."""
        return x.unflatten(-1, (module.num_heads, -1)).transpose(-3, -2)

    def _extended(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Append the keys (values) that every sample has: ``[*, S, E] -> [*, S + 0..2, E]``."""
        zeros = torch.zeros_like(x[..., :1, :])
        extra = [zeros if bias is None else zeros + bias] if module.bias_k is not None else []
        extra += [zeros] if module.add_zero_attn else []
        return torch.cat([x, *extra], -2) if extra else x

    def _mask(self, module: Any, options: Options, q: Tensor, num_k: int) -> Tensor | None:
        """Return what is added to the scores: expands to ``[N, H, L, S]``."""
        padding, mask = options.key_padding_mask, options.attn_mask
        if options.is_causal and padding is None and not options.need_weights:
            return causal(q, q.shape[-2], num_k)  # the mask only says so
        masks = [] if padding is None else [padding[:, None, None]]
        if mask is not None:
            masks.append(mask.reshape(*q.shape[:2], *mask.shape[1:]) if mask.dim() == 3 else mask)
        added = [additive(m, q) if m.dtype == torch.bool else m for m in masks]
        padded = [F.pad(m, (0, num_k - m.shape[-1])) for m in added]
        return reduce(operator.add, padded) if padded else None

    def _trace(self, module: Any) -> Trace:
        """Return the forward pass of the call at hand."""
        arguments, own = _arguments(module), self.own(module)

        def compute() -> Trace:
            inputs = tuple(self._inside(module, x) for x in arguments[:3])
            maps = Affine.of(own)
            q, k, v = map(F.linear, inputs, maps.weights, maps.biases)
            k, v = (self._extended(module, *y) for y in zip((k, v), maps.extra, strict=True))
            q, k, v = (self._to_heads(module, y) for y in (q, k, v))
            options = Options(*arguments[3:])
            mask = self._mask(module, options, q, k.shape[-2])
            scale = 1 / sqrt(q.shape[-1])
            attention = attend(q, k, v, mask, scale, zero_rows=not options.need_weights)
            return Trace(inputs, attention, _side_by_side(attention.output()))

        tensors = [x for x in (*arguments, *own.values()) if isinstance(x, Tensor)]
        return recall(module._backpack_saved, "trace", tensors, (), compute)

    # ------------------------------------------------------------------ input and outputs

    def _tangents(
        self,
        module: Any,
        trace: Trace,
        inputs: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """Return the tangents of queries, keys and values in heads, ``[V, N, H, T, D]``.

        ``dq = dx W_qᵀ + x dW_qᵀ + db_q``, and so on.

        Args:
            module: Module whose call is at hand.
            trace: Its forward pass.
            inputs: ``[V, N, T, I]`` for query, key and value, None for zero.
            params: ``[V, *p]`` for the parameters that vary.
        """
        maps, moved, tangents = Affine.of(self.own(module)), Affine.of(params), []
        num_v = next(len(t) for t in (*params.values(), *inputs) if t is not None)
        for i, (x, dx) in enumerate(zip(trace.inputs, inputs, strict=True)):
            weight = maps.weights[i]
            y = x.new_zeros(num_v, *x.shape[:2], len(weight)) if dx is None else dx @ weight.T
            y = _moved(y, x, moved.weights[i], moved.biases[i])
            tangents.append(y)
        q, *others = tangents
        others = [self._extended(module, *y) for y in zip(others, moved.extra, strict=True)]
        return [self._to_heads(module, y) for y in (q, *others)]

    def _cotangents(self, module: Any, mat: Any, axis: int) -> tuple[Tensor, Tensor | None]:
        """Return what arrives at the output, ``[*, N, L, E]``, and at all heads' weights or None.

        Args:
            module: Module whose call is at hand.
            mat: One tensor for each output, or None, with ``axis`` axes in front.
            axis: Number of these axes.
        """
        y, weights, *_ = [mat, None] if isinstance(mat, Tensor) else [*mat, None]
        if weights is not None:
            options = Options(*_arguments(module)[3:])
            weights = (
                weights.unsqueeze(-3) / module.num_heads
                if options.average_attn_weights
                else weights
            )
        if y is not None:
            return self._inside(module, y, axis), weights
        assert weights is not None
        shape = *weights.shape[: axis + 1], weights.shape[-2], module.embed_dim
        return weights.new_zeros(shape), weights

    def _pulled(
        self, module: Any, trace: Trace, y: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return what arrives at queries, keys and values: ``[V, N, T, E]`` each."""
        y = self._to_heads(module, y @ module.out_proj.weight)
        return tuple(map(_side_by_side, trace.attention.pull(y, weights)))

    def _arrived(self, module: Any, mat: Any, rows: Rows) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what arrives at the output, and at queries, keys and values."""
        whole = self._trace(module)
        mats = [mat] if isinstance(mat, Tensor) else list(mat)
        y, weights = self._cotangents(module, mats, 1)

        def compute() -> tuple[Tensor, ...]:
            return self._pulled(module, whole.of_samples(rows), y, weights)

        selected = None if rows is None else tuple(row_numbers(len(whole.heads), rows))
        # the trace tells whether an input or a parameter has changed
        given = [*mats, whole.heads, module.out_proj.weight]
        return y, recall(module._backpack_saved, "arrived", given, (selected,), compute)

    @or_automatic(AutomaticDerivatives)
    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Any:
        _, arrived = self._arrived(module, mat, subsampling)
        maps, inputs = Affine.of(self.own(module)), _arguments(module)
        trace = self._trace(module)
        found: list[Tensor | None] = [None] * len(inputs)
        for i in module._backpack_saved["needed"]:
            found[i] = self._inside(module, arrived[i][..., trace.own(i), :] @ maps.weights[i], 1)
        return tuple(found)

    @or_automatic(AutomaticDerivatives)
    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Any:
        inputs = [None if m is None else self._inside(module, m, 1) for m in mat[:3]]
        return self._pushed(module, inputs, {}, subsampling)

    @or_automatic(AutomaticDerivatives)
    def _param_jac_mat_prod(
        self,
        param_str: str,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows,
    ) -> Any:
        return self._pushed(module, [None] * 3, {param_str: mat}, subsampling)

    def _pushed(
        self,
        module: Any,
        inputs: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
        rows: Rows,
    ) -> Any:
        """Return the tangents of the outputs."""
        trace = self._trace(module).of_samples(rows)
        tangents = self._tangents(module, trace, inputs, params)
        weights, heads = trace.attention.push(*tangents)
        moved = Affine.of(params)
        y = _side_by_side(heads) @ module.out_proj.weight.T
        y = _moved(y, trace.heads, moved.weights[3], moved.biases[3])
        y = self._inside(module, y, 1)
        options = Options(*_arguments(module)[3:])
        if not options.need_weights:
            return y
        return y, weights.mean(2) if options.average_attn_weights else weights

    # ------------------------------------------------------------------ second derivative

    @or_automatic(AutomaticDerivatives)
    def mixed_residual(
        self,
        module: Any,
        g_out: Grads,
        inputs: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
        subsampling: Rows = None,
        sum_batch: bool = False,
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Apply the second derivative, see the base class.

        What arrives, s at queries, keys and values, changes by ds along the tangents. At the input
        ``s W`` changes by ``ds W + s dW``; at the weight ``sᵀ x`` changes by ``dsᵀ x + sᵀ dx``.
        """
        self._need_g_out(module, g_out)
        assert g_out is not None
        grads = [
            None if g is None else subsample(g, self.batch_axis_out(module, i), subsampling)
            for i, g in enumerate(g_out)
        ]
        y, at_weights = self._cotangents(module, grads, 0)
        trace = self._trace(module).of_samples(subsampling)
        moved_inputs = [None if t is None else self._inside(module, t, 1) for t in inputs[:3]]
        maps, moved = Affine.of(self.own(module)), Affine.of(params)
        tangents = self._tangents(module, trace, moved_inputs, params)

        first = None if at_weights is None else at_weights.unsqueeze(0)
        arrived = self._pulled(module, trace, y.unsqueeze(0), first)
        at_heads = self._to_heads(module, y @ module.out_proj.weight)
        found = trace.attention.second(at_heads, at_weights, *tangents)
        changes = [_side_by_side(change) for change in found]
        if moved.weights[3] is not None:  # what arrives at the heads changes as well
            at_heads = self._to_heads(module, y @ moved.weights[3].unsqueeze(1))
            more = trace.attention.pull(at_heads, None)
            changes = [c + _side_by_side(m) for c, m in zip(changes, more, strict=True)]

        backs: list[Tensor | None] = [None] * len(inputs)
        for i, (s, ds) in enumerate(zip(arrived, changes, strict=True)):
            weight, d_weight, span = maps.weights[i], moved.weights[i], trace.own(i)
            back = ds[..., span, :] @ weight
            if d_weight is not None:
                back = back + s[..., span, :] @ d_weight.unsqueeze(1)
            backs[i] = self._inside(module, back, 1)

        quadruples = zip(arrived, changes, trace.inputs, moved_inputs, strict=True)
        ends = [Changing(*quadruple) for quadruple in quadruples]
        if "out_proj.weight" in params or "out_proj.bias" in params:
            # what arrives at the output is fixed: only the heads that out_proj reads change
            d_heads = _side_by_side(trace.attention.push(*tangents)[1])
            zeros = y.new_zeros(len(d_heads), *y.shape)
            ends.append(Changing(y.unsqueeze(0), zeros, trace.heads, d_heads))
        return backs, {
            name: self._second_of_param(name, trace, ends, sum_batch).reshape(
                -1, *([] if sum_batch else [len(y)]), *mat.shape[1:]
            )
            for name, mat in params.items()
        }

    def _second_of_param(
        self, name: str, trace: Trace, ends: Sequence[Changing], sum_batch: bool
    ) -> Tensor:
        """Return the change of the product with a parameter: ``[V, N, O, I]`` or ``[V, N, O]``.

        Without N if summed over the samples.
        """
        parts = []
        for i in MAKES[name]:
            s, ds, x, dx = ends[i]
            span = trace.span(name, i)
            if name.endswith("weight"):
                part, s = shared_weight.mjp(ds[..., span, :], x, sum_batch), s[..., span, :]
                if dx is not None and sum_batch:
                    part = part + s.flatten(1, 2).mT @ dx.flatten(1, 2)
                elif dx is not None:
                    part = part + s.mT @ dx
                parts.append(part)
            else:
                parts.append(ds[..., span, :].sum((1, 2) if sum_batch else 2))
        return torch.cat(parts, _axis_of_parts(name))

    # ------------------------------------------------------------------ parameters

    def reads(self, param_str: str, module: Any, rows: Rows) -> list[Tensor | None]:
        """Return what each part of a parameter is multiplied with, ``[N, T, I]``; None: a bias."""
        trace = self._trace(module)
        inputs = [(*trace.inputs, trace.heads)[i] for i in MAKES[param_str]]
        inputs = inputs[: self._num_parts(param_str, module)]
        if not param_str.endswith("weight"):
            return [None] * len(inputs)
        return [subsample(x, 0, rows) for x in inputs]

    def _num_parts(self, param_str: str, module: Any) -> int:
        """Return the number of parts with an input of their own: in self-attention there is one."""
        return 1 if self._is_self_attention(module) else len(MAKES[param_str])

    @staticmethod
    def _is_self_attention(module: Any) -> bool:
        """Whether query, key and value are the same tensor."""
        query, *others = module._backpack_call.inputs[:3]
        return all(
            x is query or (not x.requires_grad and not query.requires_grad and x.is_set_to(query))
            for x in others
        )

    def pairs(
        self, param_str: str, module: Any, mat: Any, rows: Rows
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return s ``[V, N, T, O]`` and x ``[N, T, I]`` of each part, see ``shared_weight``."""
        mats, _ = self._check_output(module, mat, rows)
        y, arrived = self._arrived(module, mats, rows)
        trace = self._trace(module)
        parts = [(*arrived, y)[i][..., trace.span(param_str, i), :] for i in MAKES[param_str]]
        reads = self.reads(param_str, module, rows)
        if len(reads) < len(parts):
            parts = [torch.cat(parts, -1)]
        return list(zip(parts, reads, strict=True))

    def put_together(self, param_str: str, module: Module, parts: Sequence[Tensor]) -> Tensor:
        """Make ``[*, *p]`` of the parts of a parameter."""
        whole = torch.cat(list(parts), _axis_of_parts(param_str))
        lead = whole.shape[: -2 if param_str.endswith("weight") else -1]
        return whole.reshape(*lead, *self.parameter(module, param_str).shape)

    _param_jac_t_mat_prod = or_automatic(AutomaticDerivatives)(
        SharedWeightDerivatives._param_jac_t_mat_prod
    )
    _param_mjp_reduced = or_automatic(AutomaticDerivatives)(
        SharedWeightDerivatives._param_mjp_reduced
    )

    def has_kronecker_factors(self, param_str: str, module: Module) -> bool:
        """Whether all of a parameter is multiplied with the same input."""
        with bound(module):
            return self.has_formula(module) and self._num_parts(param_str, module) == 1

    def kronecker_rows(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Any,
        subsampling: Rows = None,
        approximation: str | None = None,
    ) -> Tensor:
        """Sum or keep the positions, ``[V, N', 1, O]``; the whole products if inputs differ."""
        if not self.has_kronecker_factors(param_str, module):
            return super().kronecker_rows(param_str, module, g_inp, g_out, mat, subsampling)
        with bound(module):
            ((s, _),) = self.pairs(param_str, module, mat, subsampling)
        return shared_weight.position_rows(s, approximation).unsqueeze(2)

    def kronecker_input_factors(
        self,
        param_str: str,
        module: Module,
        subsampling: Rows = None,
        approximation: str | None = None,
    ) -> list[Tensor]:
        """Return A of what a weight is multiplied with, ``[I, I]``; none if inputs differ."""
        if not self.has_kronecker_factors(param_str, module):
            return []
        with bound(module):
            (x,) = self.reads(param_str, module, subsampling)
        return [] if x is None else [shared_weight.input_factor(x, approximation)]
