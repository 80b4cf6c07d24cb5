"""Products with a weight and a bias that a module applies at several positions of a sample.

``y_nt = W x_nt + b`` at positions t: those of a linear layer with extra axes, the patches of a
convolution, the time steps of a recurrent layer. ``s`` is what arrives at y.

Letters: V columns, n (N) sample, t (T) position, o (O) output, i (I) input feature. Everywhere,
``x`` is ``[N, T, I]`` for the weight ``[O, I]``, and None for the bias ``[O]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, einsum
from torch.nn import Module

from backpack.core.derivatives import basederivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives, Grads, Rows
from backpack.utils.subsampling import subsample


def jac_mat_prod(mat: Tensor, x: Tensor | None, num_n: int, num_t: int) -> Tensor:
    """Apply the Jacobian, ``y = mat x``: ``[V, O, I]`` or ``[V, O]`` to ``[V, N, T, O]``."""
    if x is None:
        return mat[:, None, None].expand(-1, num_n, num_t, -1)
    return einsum("nti,voi->vnto", x, mat)


def mjp(s: Tensor, x: Tensor | None, sum_batch: bool) -> Tensor:
    """Apply the transposed Jacobian, ``sum_t s_t x_tᵀ`` or ``sum_t s_t``.

    Args:
        s: ``[V, N, T, O]``.
        x: ``[N, T, I]``, or None.
        sum_batch: Sum over the samples.

    Returns:
        ``[V, *p]`` if summed over the samples, else ``[V, N, *p]``.
    """
    if x is None:
        return s.sum((1, 2) if sum_batch else 2)
    if sum_batch:
        if not s.is_contiguous():  # merge n and t as they are in memory: nothing is copied
            s, x = s.transpose(1, 2), x.transpose(0, 1)
        return s.flatten(1, 2).mT @ x.flatten(0, 1)
    if x.shape[1] == 1:
        return s.squeeze(2).unsqueeze(-1) * x  # outer products: [V, N, O, 1] * [N, 1, I]
    return s.mT @ x


def batch_square(s: Tensor, x: Tensor | None, weights: Tensor | None) -> Tensor:
    """Sum the squares of individual products over V, with ``weights`` ``[V, N]``: ``[N, *p]``."""
    if x is None:
        return _sum_of_squares(s.sum(2), weights)
    if x.shape[1] == 1:  # an outer product s xᵀ: its square is s² x²ᵀ
        return _sum_of_squares(s.squeeze(2), weights).unsqueeze(-1) * x.square()
    return torch.cat(list(_squares(s, x, weights)))


def square_sum(s: Tensor, x: Tensor | None, weights: Tensor | None) -> Tensor:
    """Sum the squares of individual products over V and N, with ``weights``: ``[*p]``."""
    if x is None:
        return _sum_of_squares(s.sum(2), weights).sum(0)
    if x.shape[1] == 1:
        return _sum_of_squares(s.squeeze(2), weights).T @ x.squeeze(1).square()
    first, *others = (squares.sum(0) for squares in _squares(s, x, weights))
    return sum(others, start=first)


def square_norm(s: Tensor, x: Tensor | None) -> Tensor:
    """Squared norm of each sample's product, summed over V: ``[N]``.

    For a weight, ``|sum_t s_t x_tᵀ|² = sum_{t,u} (s_t·s_u) (x_t·x_u)`` where that takes fewer
    multiplications than the products themselves.
    """
    if x is None:
        return s.sum(2).square().sum((0, 2))
    num_v, _, num_t, num_o = s.shape
    num_i = x.shape[2]
    if num_t * (num_v * num_o + num_i) > num_v * num_o * num_i:
        return torch.cat([squares.sum((1, 2)) for squares in _squares(s, x, None)])
    first, *others = (torch.bmm(of_v, of_v.mT) for of_v in s)
    gram_s = sum(others, start=first)
    return (gram_s * torch.bmm(x, x.mT)).sum((1, 2))


def _sum_of_squares(values: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the squares of ``[V, N, *]`` over V: ``[N, *]``."""
    squares = values.square()
    return squares.sum(0) if weights is None else einsum("vn...,vn->n...", squares, weights)


def _squares(s: Tensor, x: Tensor, weights: Tensor | None) -> Iterator[Tensor]:
    """Yield :func:`batch_square` of some samples, ``[n, O, I]``, with bounded memory."""
    per_sample = s.shape[0] * s.shape[3] * x.shape[2]
    size = max(1, basederivatives.SLICE_ENTRIES // max(1, per_sample))
    for start in range(0, len(x), size):
        span = slice(start, start + size)
        part = None if weights is None else weights[:, span]
        yield _sum_of_squares(mjp(s[:, span], x[span], sum_batch=False), part)


def position_rows(s: Tensor, approximation: str | None) -> Tensor:
    """Sum over the positions, or ("expand") treat them as samples: ``[V, N, T, O] -> [V, N', O]``.

    Source: Eschenhagen et al., Kronecker-factored approximate curvature for modern neural network
    architectures (NeurIPS 2023).
    """
    return s.flatten(1, 2) if approximation == "expand" else s.sum(2)


def input_factor(x: Tensor, approximation: str | None) -> Tensor:
    """Return the Kronecker factor of inputs at several positions: ``[N, T, I] -> [I, I]``.

    ``(1/N) sum_nt x xᵀ``; ("expand") ``1/(N T) sum_nt x xᵀ``; ("reduce") ``1/(N T²) sum_n x̄ x̄ᵀ``
    with x̄ the sum over the positions. Source: as :func:`position_rows`.
    """
    num_n, num_t = x.shape[:2]
    if approximation == "reduce":
        x = x.mean(1, keepdim=True)
    factor = einsum("nti,ntj->ij", x, x) / num_n
    return factor / num_t if approximation == "expand" else factor


class SharedWeightDerivatives(BaseDerivatives):
    """Products with the parameters of modules that apply them at several positions of a sample.

    A subclass says what a parameter is multiplied with (:meth:`reads`) and what arrives at its
    product (:meth:`pairs`). A parameter may have parts with inputs of their own.
    """

    def reads(self, param_str: str, module: Any, rows: Rows) -> list[Tensor | None]:
        """Return x of each part: ``[N, T, I]``, None for a bias."""
        raise NotImplementedError

    def pairs(
        self, param_str: str, module: Any, mat: Any, rows: Rows
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return s and x of each part: ``[V, N, T, O]``, ``[N, T, I]``."""
        raise NotImplementedError

    def put_together(self, param_str: str, module: Any, parts: Sequence[Tensor]) -> Tensor:
        """Make ``[*, *p]`` of ``[*, O, I]`` (``[*, O]``) for each part."""
        (whole,) = parts
        return whole

    def _param_jac_mat_prod(
        self,
        param_str: str,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows,
    ) -> Any:
        out = subsample(module.output, subsampling=subsampling)
        (x,) = self.reads(param_str, module, subsampling)
        return jac_mat_prod(mat, x, len(out), out.shape[1:-1].numel()).reshape(-1, *out.shape)

    def _param_jac_t_mat_prod(
        self,
        param_str: str,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Any,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        pairs = self.pairs(param_str, module, mat, subsampling)
        return self.put_together(param_str, module, [mjp(s, x, sum_batch) for s, x in pairs])

    def param_mjp_batch_square(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Any,
        subsampling: Rows = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Sum the squares of ``J_pᵀ mat`` over V, with weights: ``[V, *out] -> [N, *p]``."""
        pairs = self.pairs(param_str, module, mat, subsampling)
        parts = [batch_square(s, x, weights) for s, x in pairs]
        return self.put_together(param_str, module, parts)

    def param_mjp_square_sum(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Any,
        subsampling: Rows = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Sum the squares of ``J_pᵀ mat`` over V and N, with weights: ``[V, *out] -> [*p]``."""
        pairs = self.pairs(param_str, module, mat, subsampling)
        parts = [square_sum(s, x, weights) for s, x in pairs]
        return self.put_together(param_str, module, parts)

    def param_mjp_square_norm(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Any,
        subsampling: Rows = None,
    ) -> Tensor:
        """Squared norms of each sample's ``J_pᵀ mat``, summed over V: ``[V, *out] -> [N]``."""
        pairs = self.pairs(param_str, module, mat, subsampling)
        first, *others = (square_norm(s, x) for s, x in pairs)
        return sum(others, start=first)
