"""Derivatives of ``torch.nn.MultiheadAttention``: attention between affine maps."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import MultiheadAttention
from torch.nn import functional as F

from backpack.core import fast
from backpack.core.derivatives import affine
from backpack.core.derivatives.attention import (
    Attention,
    AttentionDerivatives,
    additive,
    attend,
    causal,
    of_samples,
    or_automatic,
)
from backpack.core.derivatives.basederivatives import FIRST_DERIVATIVES, BaseDerivatives
from backpack.core.derivatives.facts import constant, never
from backpack.core.derivatives.memoise import memoise
from backpack.core.derivatives.vectors import listed
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.layout import Layout
from backpack.core.record.registry import register
from backpack.core.types import Changes, OfInputs, OfParams, Pairs

# Which of queries (0), keys (1), values (2) and the output (3) a parameter makes.
MAKES: dict[str, tuple[int, ...]] = {
    **{"in_proj_weight": (0, 1, 2), "in_proj_bias": (0, 1, 2)},
    **{"q_proj_weight": (0,), "k_proj_weight": (1,), "v_proj_weight": (2,)},
    **{"bias_k": (1,), "bias_v": (2,)},
    **{"out_proj.weight": (3,), "out_proj.bias": (3,)},
}


class Options(NamedTuple):
    """Arguments of the layer behind queries, keys and values."""

    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


class Trace(NamedTuple):
    """The forward pass."""

    inputs: tuple[Tensor, ...]  # query [N, L, I], key and value [N, S, I]
    attention: Attention  # that of the heads, * = [N, H]
    heads: Tensor  # its output, the heads side by side, [N, L, E]

    def own(self, i: int) -> slice:
        """Return the positions of the sample's own queries, keys, values or outputs: the first."""
        return slice(0, (*self.inputs, self.heads)[i].shape[1])

    def span(self, name: str, i: int) -> slice:
        """Return the positions that a parameter makes: for ``bias_k`` the one behind the own."""
        own = self.own(i)
        return slice(own.stop, own.stop + 1) if name.startswith("bias") else own


class Changing(NamedTuple):
    """One end of a map and what changes along the tangents."""

    s: Tensor  # what arrives there, [1, N, T, O]
    ds: Tensor  # its change, [V, N, T, O]
    x: Tensor  # what the weight is multiplied with, [N, T, I]
    dx: Tensor | None  # its change, None for zero, [V, N, T, I]


class Affine(NamedTuple):
    """Weights and biases of the maps to queries, keys, values and of the last; or tangents."""

    weights: tuple[Any, ...]
    biases: tuple[Any, ...]
    extra: tuple[Any, ...]

    @classmethod
    def of(cls, values: Mapping[str, Tensor | None]) -> Affine:
        """Take the parameters apart: ``[*p]``, or ``[V, *p]``."""
        weight, bias = values.get("in_proj_weight"), values.get("in_proj_bias")
        separate = tuple(values.get(f"{x}_proj_weight") for x in "qkv")
        weights = separate if weight is None else weight.chunk(3, -2)
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
            y = y + affine.jvp(tangent, read, *x.shape[:2])
    return y


@register(MultiheadAttention)
class MultiheadAttentionDerivatives(AttentionDerivatives):
    """Attention between affine maps, ``q = query W_qᵀ + b_q``, …, ``y = (heads) W_oᵀ + b_o``.

    A product runs the forward pass once more to know queries, keys, values and attention weights;
    all parameters and extensions share that, and what arrives at them from cotangents. Every
    parameter is then a weight (bias) that is used at several positions, see :mod:`.affine`.

    Kronecker factors are those of ``Linear`` with an extra axis for the positions:
    ``out_proj.weight`` is multiplied with the heads, ``q_proj_weight`` with the query, and so on.
    In self-attention, ``in_proj_weight`` is one Linear of the input, with factors ``[3E, 3E]`` and
    ``[E, E]``. If query, key and value are not the same tensor, its three parts have different
    inputs, no Kronecker product describes them, and it has what a parameter without Kronecker
    factors has: its exact block.

    Tied and reparametrised weights are left to autograd.
    """

    dropout = "dropout"
    calls_children = False  # a function is given the parameters of out_proj
    min_dims = constant(3)  # batch, sequence, features
    is_linear_in_params = never  # queries and keys are multiplied with each other

    def batch_axis_in(self, module: Any, i: int) -> int:
        """Return the batch axis: queries, keys and values have it first or second."""
        return 0 if module.batch_first or i > 2 else 1

    def batch_axis_out(self, module: Any, i: int) -> int:
        """Return the batch axis: the attention weights have it first."""
        return 0 if module.batch_first or i > 0 else 1

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

    def axis_of(self, module: Any, i: int, x: Tensor) -> int | None:
        """Return the batch axis of an input; a mask for all samples has none."""
        is_for_all = i == 5 and x.dim() == 2
        return None if is_for_all else self.batch_axis_in(module, i)

    def has_formula(self, c: Context) -> bool:
        """Whether there is a formula: each parameter that the call has read is a known one."""
        read = [p for own in c.call.read[::2] for p in own.values() if p is not None]
        known = [name for name in MAKES if c.params.get(name) is not None]
        is_known = len({id(p) for p in read}) == len(read) == len(known)  # and none is tied
        return is_known and not self.learns_mask(c.saved) and not self.is_random(c)

    # ------------------------------------------------------------------ forward, once

    def _inside(self, c: Context, tensor: Tensor, axis: int = 0) -> Tensor:
        """Bring the samples of a query, key, value or output to ``axis``, and undo that."""
        return tensor if c.module.batch_first else tensor.transpose(axis, axis + 1)

    def _to_heads(self, c: Context, x: Tensor) -> Tensor:
        """Split features into heads: ``[*, T, E] -> [*, H, T, D]``."""
        return x.unflatten(-1, (c.module.num_heads, -1)).transpose(-3, -2)

    def _extended(self, c: Context, x: Tensor, bias: Tensor | None) -> Tensor:
        """Append the keys (values) that every sample has: ``[*, S, E] -> [*, S + 0..2, E]``."""
        zeros, has_bias = torch.zeros_like(x[..., :1, :]), c.params.get("bias_k") is not None
        extra = [zeros if bias is None else zeros + bias] if has_bias else []
        extra += [zeros] if c.module.add_zero_attn else []
        return torch.cat([x, *extra], -2) if extra else x

    def _mask(self, options: Options, q: Tensor, num_k: int) -> Tensor | None:
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

    def _trace(self, c: Context) -> Trace:
        """Return the forward pass of the call at hand, of all samples."""

        def compute() -> Trace:
            inputs = tuple(self._inside(c, x) for x in c.inputs[:3])
            maps = Affine.of(c.params)
            q, k, v = map(F.linear, inputs, maps.weights, maps.biases)
            k, v = (self._extended(c, *y) for y in zip((k, v), maps.extra, strict=True))
            q, k, v = (self._to_heads(c, y) for y in (q, k, v))
            options = Options(*c.inputs[3:])
            mask = self._mask(options, q, k.shape[-2])
            scale = 1 / sqrt(q.shape[-1])
            attention = attend(q, k, v, mask, scale, zero_rows=not options.need_weights)
            attention = self.drop(c, attention)
            return Trace(inputs, attention, _side_by_side(attention.output))

        tensors = [x for x in (*c.inputs, *c.params.values()) if isinstance(x, Tensor)]
        return memoise(c.saved, "trace", tensors, (), compute)

    # ------------------------------------------------------------------ input and outputs

    def _tangents(
        self,
        c: Context,
        trace: Trace,
        inputs: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """Return the tangents of queries, keys and values in heads, ``[V, N, H, T, D]``.

        ``dq = dx W_qᵀ + x dW_qᵀ + db_q``, and so on, of tangents ``[V, N, T, I]`` of the inputs.
        """
        maps, moved, tangents = Affine.of(c.params), Affine.of(params), []
        num_v = next(len(t) for t in (*params.values(), *inputs) if t is not None)
        for i, (x, dx) in enumerate(zip(trace.inputs, inputs, strict=True)):
            weight = maps.weights[i]
            y = x.new_zeros(num_v, *x.shape[:2], len(weight)) if dx is None else dx @ weight.T
            tangents.append(_moved(y, x, moved.weights[i], moved.biases[i]))
        q, *others = tangents
        others = [self._extended(c, *y) for y in zip(others, moved.extra, strict=True)]
        return [self._to_heads(c, y) for y in (q, *others)]

    def _cotangents(self, c: Context, v: Any, axis: int) -> tuple[Tensor, Tensor | None]:
        """Return what arrives at the output, ``[*, N, L, E]``, and at all heads' weights or None.

        Of one tensor for each output, or None, with so many axes in front.
        """
        y, weights = v if len(v) == 2 else (*v, None)
        if weights is not None and Options(*c.inputs[3:]).average_attn_weights:
            weights = weights.unsqueeze(-3) / c.module.num_heads
        if y is not None:
            return self._inside(c, y, axis), weights
        assert weights is not None
        shape = *weights.shape[: axis + 1], weights.shape[-2], c.module.embed_dim
        return weights.new_zeros(shape), weights

    def _pulled(
        self, c: Context, trace: Trace, y: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return what arrives at queries, keys and values: ``[V, N, T, E]`` each."""
        y = self._to_heads(c, y @ c.params["out_proj.weight"])
        return tuple(map(_side_by_side, trace.attention.pull(y, weights)))

    def _at_projections(self, c: Context, v: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what arrives at the output, and at queries, keys and values."""
        whole = self._trace(c)
        vs = listed(v)
        y, weights = self._cotangents(c, vs, 1)

        def compute() -> tuple[Tensor, ...]:
            return self._pulled(c, of_samples(whole, 0, c.rows), y, weights)

        selected = None if c.rows is None else tuple(c.numbers(len(whole.heads)))
        # the trace tells whether an input or a parameter has changed
        read = [*vs, whole.heads, c.params["out_proj.weight"]]
        return y, memoise(c.saved, "cotangents", read, (selected,), compute)

    @or_automatic
    def vjp(self, c: Context, v: Any) -> Any:
        _, cotangents = self._at_projections(c, v)
        maps, trace = Affine.of(c.params), self._trace(c)
        found: list[Tensor | None] = [None] * len(c.inputs)
        for i in c.saved["needed"]:
            found[i] = self._inside(c, cotangents[i][..., trace.own(i), :] @ maps.weights[i], 1)
        return tuple(found)

    @or_automatic
    def jvp(self, c: Context, t: Any) -> Any:
        return self._pushed(c, [None if x is None else self._inside(c, x, 1) for x in t[:3]], {})

    @or_automatic
    def param_jvp(self, c: Context, name: str, t: Tensor) -> Any:
        return self._pushed(c, [None] * 3, {name: t})

    def _pushed(
        self, c: Context, inputs: Sequence[Tensor | None], params: Mapping[str, Tensor]
    ) -> Any:
        """Return the tangents of the outputs."""
        trace = of_samples(self._trace(c), 0, c.rows)
        weights, heads = trace.attention.push(*self._tangents(c, trace, inputs, params))
        moved = Affine.of(params)
        y = _side_by_side(heads) @ c.params["out_proj.weight"].T
        y = self._inside(c, _moved(y, trace.heads, moved.weights[3], moved.biases[3]), 1)
        options = Options(*c.inputs[3:])
        if not options.need_weights:
            return y
        return y, weights.mean(2) if options.average_attn_weights else weights

    @fast.body("The second derivative is a formula.", *FIRST_DERIVATIVES)
    @or_automatic
    def mixed_hvp(
        self, c: Context, inputs: OfInputs, params: OfParams, sum_batch: bool = False
    ) -> Changes:
        """Apply the second derivative, see the base class.

        What arrives, s at queries, keys and values, changes by ds along the tangents. At the input
        ``s W`` changes by ``ds W + s dW``; at the weight ``sᵀ x`` changes by ``dsᵀ x + sᵀ dx``.
        """
        grads = [
            None if g is None else c.select(g, self.batch_axis_out(c.module, i))
            for i, g in enumerate(c.grad_out)
        ]
        y, at_weights = self._cotangents(c, grads, 0)
        trace = of_samples(self._trace(c), 0, c.rows)
        moved_inputs = [None if t is None else self._inside(c, t, 1) for t in inputs[:3]]
        maps, moved = Affine.of(c.params), Affine.of(params)
        tangents = self._tangents(c, trace, moved_inputs, params)

        first = None if at_weights is None else at_weights.unsqueeze(0)
        cotangents = self._pulled(c, trace, y.unsqueeze(0), first)
        at_heads = self._to_heads(c, y @ c.params["out_proj.weight"])
        found = trace.attention.second(at_heads, at_weights, *tangents)
        changes = [_side_by_side(change) for change in found]
        if moved.weights[3] is not None:  # what arrives at the heads changes as well
            at_heads = self._to_heads(c, y @ moved.weights[3].unsqueeze(1))
            more = trace.attention.pull(at_heads, None)
            changes = [one + _side_by_side(m) for one, m in zip(changes, more, strict=True)]

        backs: list[Tensor | None] = [None] * len(inputs)
        for i, (s, ds) in enumerate(zip(cotangents, changes, strict=True)):
            weight, d_weight, span = maps.weights[i], moved.weights[i], trace.own(i)
            back = ds[..., span, :] @ weight
            if d_weight is not None:
                back = back + s[..., span, :] @ d_weight.unsqueeze(1)
            backs[i] = self._inside(c, back, 1)

        quadruples = zip(cotangents, changes, trace.inputs, moved_inputs, strict=True)
        ends = [Changing(*quadruple) for quadruple in quadruples]
        if "out_proj.weight" in params or "out_proj.bias" in params:
            # what arrives at the output is fixed: only the heads that out_proj reads change
            d_heads = _side_by_side(trace.attention.push(*tangents)[1])
            zeros = y.new_zeros(len(d_heads), *y.shape)
            ends.append(Changing(y.unsqueeze(0), zeros, trace.heads, d_heads))
        own = {name: self._second_of_param(c, name, trace, ends, sum_batch) for name in params}
        return backs, own

    def _second_of_param(
        self, c: Context, name: str, trace: Trace, ends: Sequence[Changing], sum_batch: bool
    ) -> Tensor:
        """Return the change of the product with a parameter: ``[V, N, *p]``, or ``[V, *p]``."""
        parts, is_weight = [], name.endswith("weight")
        pull = affine.vjp_sum if sum_batch else affine.vjp
        for i in MAKES[name]:
            s, ds, x, dx = ends[i]
            span = trace.span(name, i)
            part = pull(ds[..., span, :], x if is_weight else None)
            if is_weight and dx is not None:
                s = s[..., span, :]
                more = s.flatten(1, 2).mT @ dx.flatten(1, 2) if sum_batch else s.mT @ dx
                part = part + more
            parts.append(part)
        return self.assemble(c, name, parts)

    def affine_inputs(self, c: Context, name: str) -> list[Tensor | None]:
        """Return what each part of a parameter is multiplied with, ``[N, T, I]``; None: a bias."""
        trace = self._trace(c)
        each = [(*trace.inputs, trace.heads)[i] for i in self._parts(c, name)]
        return [c.select(x) if name.endswith("weight") else None for x in each]

    @staticmethod
    def _parts(c: Context, name: str) -> tuple[int, ...]:
        """Return what a parameter makes of an input of its own: in self-attention there is one."""
        query, *others = c.call.inputs[:3]
        origin, *origins = c.call.origins_in[:3]
        # leaves have no marks: those that require a gradient are others, if they share memory
        known = origin is not None or not any(x.requires_grad for x in (query, *others))
        are_one = all(  # also if hooks have passed them on
            x is query or (mark is origin and known and x.is_set_to(query))
            for x, mark in zip(others, origins, strict=True)
        )
        return MAKES[name][:1] if are_one else MAKES[name]

    def affine(self, c: Context, name: str, v: Any) -> Pairs | None:
        """Return s ``[V, N, T, O]`` and x ``[N, T, I]`` of each part, see :mod:`.affine`."""
        if not self.has_formula(c):
            return None
        y, cotangents = self._at_projections(c, v)
        trace = self._trace(c)
        parts = [(*cotangents, y)[i][..., trace.span(name, i), :] for i in MAKES[name]]
        inputs = self.read_by_affine(c, name)
        if len(inputs) < len(parts):
            parts = [torch.cat(parts, -1)]
        return list(zip(parts, inputs, strict=True))

    def assemble(self, c: Context, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Make ``[*, *p]`` of the parts of a parameter."""
        axis = -2 if name.endswith("weight") else -1
        whole = torch.cat(list(parts), axis)
        return whole.reshape(*whole.shape[:axis], *c.params[name].shape)

    param_vjp = or_automatic(BaseDerivatives.param_vjp)
    param_vjp_sum = or_automatic(BaseDerivatives.param_vjp_sum)

    def _is_one_product(self, c: Context, name: str) -> bool:
        """Whether all of a parameter is multiplied with the same input."""
        is_ours = self.acts_affinely and not hasattr(self, f"{name}_vjp")
        return is_ours and self.has_formula(c) and len(self._parts(c, name)) == 1
