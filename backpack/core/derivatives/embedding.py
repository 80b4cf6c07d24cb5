"""Embeddings, ``y = W[x]``, and bags of them, ``y = sum_l c_l W[x_l]``: sparse linear layers."""

from __future__ import annotations

from collections.abc import Set
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor, einsum
from torch.nn import Embedding, EmbeddingBag, Module

from backpack.core import fast
from backpack.core.derivatives import reductions
from backpack.core.derivatives.affine import input_factor, position_rows
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.facts import always, constant
from backpack.core.derivatives.linear import positions
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.layout import Layout
from backpack.core.record.module_state import describe
from backpack.core.record.placed_call import TABLE
from backpack.core.record.registry import register


class Lookups(NamedTuple):
    """The rows of the weight that a call reads: E of them, those of the padding left out."""

    sample: Tensor  # who reads it (a number among the selected samples), [E]
    token: Tensor  # which row of the weight, [E]
    slot: Tensor  # the row of the output, all axes but the last flattened, it is added to, [E]
    scale: Tensor | None = None  # what it is multiplied with, [E, 1] or [E, D]; None for 1

    def scaled(self, values: Tensor) -> Tensor:
        """Multiply ``[V, E, D]`` with the scale."""
        return values if self.scale is None else values * self.scale

    def arrived(self, v: Tensor) -> Tensor:
        """Return what arrives at each lookup from cotangents: ``[V, N, *, D] -> [V, E, D]``."""
        return self.scaled(v.flatten(1, -2)[:, self.slot])

    def without(self, token: int | None) -> Lookups:
        """Leave out the lookups of a token."""
        if token is None:
            return self
        keep = self.token != token
        return Lookups(*(None if part is None else part[keep] for part in self))  # type: ignore[arg-type]


def sum_at(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum the entries with equal index: ``[V, E, D]`` with index ``[E]`` -> ``[V, size, D]``."""
    num_v, _, dim = values.shape
    offsets = size * torch.arange(num_v, device=index.device)
    where = (offsets[:, None] + index).flatten()
    total = values.new_zeros(num_v * size, dim).index_add_(0, where, values.flatten(0, 1))
    return total.reshape(num_v, size, dim)


@register(Embedding)
class EmbeddingDerivatives(BaseDerivatives):
    """Derivatives of ``torch.nn.Embedding``.

    A linear layer on one-hot rows (rows of zeros for the padding), that are never formed. All
    reductions work on the pairs of a sample and a token that occur in it. Only ``[N, *p]`` results
    and the Kronecker factor ``[W, W]`` of a small vocabulary are dense, as their users expect.

    Letters: n sample, t position, W vocabulary, D features, E lookups, v vector.
    """

    params = ("weight",)
    batch_axis = BatchAxis.LEADING
    trailing_axes = constant(0)
    min_dims = constant(2)  # batch and features
    hessian_is_zero = is_linear_in_params = always
    jacobian_is_constant = always  # integers have none
    kronecker_rows_are_constant = True
    # the weight is [W, D]: the vocabulary, which the input's factor belongs to, comes first
    kronecker_input_first = True

    def param_vjp_reads_inputs_alone(self, module: Module, name: str) -> bool:
        """Return True, but for the maximum of a bag, which depends on the weight."""
        return getattr(module, "mode", None) != "max"

    def vjp(self, c: Context, v: Any) -> tuple[Tensor | None, ...]:
        """Return nothing: integers have no cotangents."""
        return (None,)

    def _lookups(self, c: Context) -> Lookups:
        """List what the selected samples read.

        Raises:
            NotImplementedError: If an option changes the weight or its gradient.
        """
        module = c.module
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise NotImplementedError(
                f"{describe(module)}: max_norm changes the weight during the forward pass, and "
                "scale_grad_by_freq the gradient, so that it is no longer the sum over the "
                "samples. Extensions support neither: leave them out, and bound the norms between "
                "steps, weight.copy_(weight.renorm(2, 0, max_norm)) in torch.no_grad()."
            )
        return self._all_lookups(c).without(module.padding_idx)

    def _all_lookups(self, c: Context) -> Lookups:
        x = c.x.long()
        slot = torch.arange(x.numel(), device=x.device)
        sample = torch.arange(len(x), device=x.device).repeat_interleave(x[0].numel())
        return Lookups(sample, x.flatten(), slot)

    def _out_shape(self, c: Context) -> Size:
        """Return the shape of the output, ``[N, *, D]``, for the selected samples."""
        return self.shape_of_rows(c.output.shape, 0, c.rows)

    def weight_jvp(self, c: Context, t: Tensor) -> Tensor:
        """Look up rows of ``t``."""
        looked_up, shape = self._lookups(c), self._out_shape(c)
        rows = looked_up.scaled(t[:, looked_up.token])
        return sum_at(rows, looked_up.slot, shape[:-1].numel()).reshape(-1, *shape)

    def weight_vjp(self, c: Context, v: Tensor) -> Tensor:
        """Sum the rows of ``v`` for each sample and token."""
        looked_up, size = self._lookups(c), len(c.params["weight"])
        where = looked_up.sample * size + looked_up.token
        return sum_at(looked_up.arrived(v), where, v.shape[1] * size).unflatten(1, (-1, size))

    @fast.body("What samples look up is summed for each token.", "param_vjp")
    def weight_vjp_sum(self, c: Context, v: Tensor) -> Tensor:
        """Sum the rows of ``v`` for each token."""
        looked_up = self._lookups(c)
        return sum_at(looked_up.arrived(v), looked_up.token, len(c.params["weight"]))

    @fast.body("Only the pairs of a sample and a token that occur have entries.", "param_vjp")
    def reduced(
        self, c: Context, name: str, v: Any, wanted: Set[str], weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Reduce the products of the pairs that occur, see the base class."""
        looked_up, size, count = self._lookups(c), len(c.params["weight"]), v.shape[1]
        keys, pair = (looked_up.sample * size + looked_up.token).unique(return_inverse=True)
        products = sum_at(looked_up.arrived(v), pair, len(keys))  # [V, P, D] for P pairs
        sample, token = keys // size, keys % size
        values = {}
        if "individual" in wanted:
            values["individual"] = self.param_vjp(c, name, v)
        if "gradient" in wanted:
            values["gradient"] = sum_at(products.sum(0, keepdim=True), token, size).squeeze(0)
        if "square_norm" in wanted:
            norms = products.square().sum((0, 2)).reshape(1, -1, 1)
            values["square_norm"] = sum_at(norms, sample, count).flatten()
        if "batch_square" in wanted or "square" in wanted:
            weight = None if weights is None else weights[:, sample]
            squares = reductions.sum_of_squares(products, weight).unsqueeze(0)
            if "batch_square" in wanted:
                total = sum_at(squares, sample * size + token, count * size)
                values["batch_square"] = total.reshape(-1, size, v.shape[-1])
            if "square" in wanted:
                values["square"] = sum_at(squares, token, size).squeeze(0)
        return values

    @fast.body("A product is read at the tokens that occur.", "param_vjp", "_all_lookups")
    def dot_product(self, c: Context, name: str, v: Tensor, s: Tensor, x: Tensor) -> Tensor | None:
        """Return ``⟨Jᵀ v, sum_u s_u x_uᵀ⟩ = sum_tu s_u[token t] (v_t·x_u)`` by sample: ``[N]``.

        As for a weight that an output layer shares with the embedding, with s ``[N, U, W]`` and x
        ``[N, U, D]``. None where samples do not have equally many tokens.
        """
        if len(v) != 1 or c.x.shape != v.shape[1:-1]:
            return None
        tokens = c.x.long().reshape(len(c.x), -1)  # [N, T]
        arrived = v[0].reshape(*tokens.shape, -1)
        if c.module.padding_idx is not None:
            arrived = arrived * (tokens != c.module.padding_idx).unsqueeze(2)
        read = s.gather(2, tokens.unsqueeze(1).expand(-1, s.shape[1], -1))  # [N, U, T]
        return (read * torch.bmm(x, arrived.mT)).sum((1, 2))

    def kron_rows(self, c: Context, name: str, v: Any, approximation: str | None = None) -> Tensor:
        """Return ``v`` itself, as for a linear layer: ``[V, N, *, D] -> [V, N', 1, D]``."""
        return position_rows(positions(v), approximation).unsqueeze(2)

    def kron_inputs(
        self, c: Context, name: str, approximation: str | None = None, max_size: float = inf
    ) -> list[Tensor]:
        """Return A of the one-hot rows, ``[W, W]``: counts on the diagonal; "reduce": of means.

        Of one larger than ``max_size`` the diagonal ``[W]`` alone.
        """
        num_n, *axes, _ = self._out_shape(c)
        if approximation == "reduce":
            return [input_factor(self._counts(c, num_n), None, max_size) / prod(axes) ** 2]
        # how often a sample ("expand": a position) reads each token
        counts = self._lookups(c).token.bincount(minlength=len(c.params["weight"]))
        count = num_n * (prod(axes) if approximation == "expand" else 1)
        diagonal = counts.to(c.params["weight"].dtype) / count
        return [diagonal.diag() if len(diagonal) <= max_size else diagonal]

    def _counts(self, c: Context, num_n: int, rows_per_sample: int = 1) -> Tensor:
        """Sum the scaled one-hot rows of each sample: ``[N, 1, W]``."""
        looked_up, size = self._lookups(c), len(c.params["weight"])
        ones = c.params["weight"].new_ones(1, len(looked_up.token), 1)
        where = looked_up.sample // rows_per_sample * size + looked_up.token
        return sum_at(looked_up.scaled(ones), where, num_n * size).reshape(num_n, 1, size)

    def kron_means(self, c: Context, name: str, num_n: int) -> Tensor:
        """Average the scaled one-hot rows of each sample: ``[N, 1, W]``."""
        num_rows, *axes, _ = self._out_shape(c)
        rows_per_sample = num_rows // num_n
        return self._counts(c, num_n, rows_per_sample) / (rows_per_sample * prod(axes))


@register(EmbeddingBag)
class EmbeddingBagDerivatives(EmbeddingDerivatives):
    """Derivatives of ``torch.nn.EmbeddingBag``: a linear layer on sums (means) of one-hot rows.

    The maximum has a Jacobian as well, but no Kronecker factors: for it they are the exact block.
    """

    batch_axis = BatchAxis.FIXED
    hessian_is_zero = always

    def layouts(self, call: Call) -> list[Layout | None]:
        """Take the bags for the samples: a flat list of tokens was taken for as many samples."""
        known, bags = call.layouts_in[0], call.shape_out[0][0]
        is_flat = call.shape_in[0] is not None and len(call.shape_in[0]) == 1
        if not is_flat or known is None or not known.assumed or known.samples == bags:
            return super().layouts(call)
        known.mark_unbatched()
        known.lost = TABLE  # for all who read it otherwise
        of_bags = (one for one in call.layouts_in[1:] if one is not None and one.samples == bags)
        return [next(of_bags, Layout(1, bags))]

    def _sample_weights(self, c: Context) -> Tensor | None:
        """Return the argument ``per_sample_weights``: the one that is no integer."""
        return next((x for x in c.inputs if torch.is_tensor(x) and x.is_floating_point()), None)

    def _bags(self, c: Context) -> tuple[Tensor, Tensor]:
        """Return where each bag begins in the flattened input, and its length."""
        x, *others = c.inputs
        if x.dim() == 2:
            starts = x.shape[1] * torch.arange(len(x), device=x.device)
            return starts, torch.full_like(starts, x.shape[1])
        offsets = next(o for o in others if torch.is_tensor(o) and not o.is_floating_point()).long()
        if not c.module.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_tensor([x.numel()])])
        return offsets[:-1], offsets.diff()

    def _all_lookups(self, c: Context) -> Lookups:
        starts, lengths = map(c.select, self._bags(c))
        sample = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        before = lengths.cumsum(0) - lengths  # lookups of the bags before
        entry = torch.arange(len(sample), device=lengths.device) + (starts - before)[sample]
        weights = self._sample_weights(c)
        scale = None if weights is None else weights.flatten()[entry].unsqueeze(1)
        return Lookups(sample, c.input.flatten().long()[entry], sample, scale)

    def _lookups(self, c: Context) -> Lookups:
        """List what the selected bags read."""
        looked_up, dtype = super()._lookups(c), c.params["weight"].dtype
        sample, token, *_ = looked_up
        if c.module.mode == "mean":
            counts = sample.bincount(minlength=1).to(dtype)
            return looked_up._replace(scale=1 / counts[sample].unsqueeze(1))
        if c.module.mode == "max":
            # once for each token of a bag: the features for which it is the maximum
            sample, token = torch.stack([sample, token]).unique(dim=1)
            largest = c.select(self._largest(c))
            scale = (largest[sample] == token[:, None]).to(dtype)
            return Lookups(sample, token, sample, scale)
        return looked_up

    def _largest(self, c: Context) -> Tensor:
        """Return the token that each feature of a bag was taken from, ``[N, D]``."""
        starts, lengths = self._bags(c)
        padding = c.module.padding_idx
        *_, tokens = torch.ops.aten._embedding_bag(
            c.params["weight"].detach(),
            c.input.flatten().long(),
            torch.cat([starts, starts[-1:] + lengths[-1:]]),
            mode=2,
            include_last_offset=True,
            padding_idx=-1 if padding is None else padding,
        )
        return tokens

    # ------------------------------------------------------------------ per_sample_weights [N, L]

    def _rows_read(self, c: Context) -> Tensor:
        """Return the rows that a 2-D input reads, zeros for the padding: ``[N, L, D]``."""
        if c.input.dim() != 2:
            raise NotImplementedError(
                f"{describe(c.module)}: per_sample_weights that a module has computed need a 2-D "
                "input, [samples, tokens], instead of offsets."
            )
        x, padding = c.x.long(), c.module.padding_idx
        rows = c.params["weight"][x]
        return rows if padding is None else rows * (x != padding).unsqueeze(-1)

    def vjp(self, c: Context, v: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply with the rows that are read."""
        weights = self._sample_weights(c)
        return tuple(
            einsum("vnd,nld->vnl", v, self._rows_read(c))
            if weights is not None and x is weights
            else None
            for x in c.inputs
        )

    def jvp(self, c: Context, t: Any) -> Tensor:
        """Sum the rows that are read, multiplied with ``t``."""
        (tangent,) = (one for one in t if one is not None)
        return einsum("vnl,nld->vnd", tangent, self._rows_read(c))

    def kron_rows(self, c: Context, name: str, v: Any, approximation: str | None = None) -> Tensor:
        """Return ``v`` itself, as for a linear layer; its products for the maximum."""
        if c.module.mode == "max":
            return self.param_vjp(c, name, v).flatten(2).unsqueeze(2)
        return super().kron_rows(c, name, v, approximation)

    def kron_inputs(
        self, c: Context, name: str, approximation: str | None = None, max_size: float = inf
    ) -> list[Tensor]:
        """Return A of the bags: there is one position, so that the approximations agree."""
        if c.module.mode == "max":
            return []
        return [input_factor(self._counts(c, self._out_shape(c)[0]), None, max_size)]
