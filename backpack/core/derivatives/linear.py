"""Linear layers, ``y = x Wᵀ + b``, with any number of extra axes between batch and features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, einsum
from torch.nn import Linear, Module

from backpack.core.derivatives.basederivatives import BaseDerivatives, Grads, Rows
from backpack.core.registry import register
from backpack.utils.subsampling import subsample


def _input(module: Any, subsampling: Rows) -> Tensor:
    """Return the input as ``[N, T, I]``, T positions (1 without extra axes)."""
    x = subsample(module.input0, subsampling=subsampling)
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _positions(mat: Tensor) -> Tensor:
    """Return ``[V, N, *, O]`` as ``[V, N, T, O]``."""
    return mat.reshape(*mat.shape[:2], -1, mat.shape[-1])


def _sum_of_squares(mat: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the squares of ``[V, N, *, O]`` (one position) over V: ``[N, O]``."""
    squares = _positions(mat).squeeze(2).square()
    return squares.sum(0) if weights is None else einsum("vno,vn->no", squares, weights)


@register(Linear)
class LinearDerivatives(BaseDerivatives):
    """Derivatives of ``torch.nn.Linear``.

    Letters: n sample, t position, o output, i input feature, v vector.
    """

    params = ("weight", "bias")
    kronecker_rows_are_constant = True

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return mat @ module.weight.T

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return mat @ module.weight

    def min_dims(self, module: Module) -> int:
        """Return 2: batch and features."""
        return 2

    def jacobian_is_constant(self, module: Module) -> bool:
        """Return True."""
        return True

    def _weight_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return einsum("n...i,voi->vn...o", subsample(module.input0, subsampling=subsampling), mat)

    def _weight_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        x, s = _input(module, subsampling), _positions(mat)
        if sum_batch:
            return einsum("vnto,nti->voi", s, x)
        if x.shape[1] == 1:
            return s.squeeze(2).unsqueeze(-1) * x  # outer products: [V, N, O, 1] * [N, 1, I]
        return einsum("vnto,nti->vnoi", s, x)

    def _bias_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        out = subsample(module.output, subsampling=subsampling)
        axes = (1,) * (out.dim() - 1)
        return mat.reshape(mat.shape[0], *axes, -1).expand(-1, *out.shape)

    def _bias_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        return _positions(mat).sum((1, 2) if sum_batch else 2)

    # Without extra axes a sample's weight gradient is an outer product s xᵀ: its square is s² x²ᵀ,
    # its norm |s| |x|.

    def param_mjp_batch_square(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Sum the squares of ``J_pᵀ mat`` over V, with weights: ``[V, *out] -> [N, *p]``."""
        x = _input(module, subsampling)
        if param_str != "weight" or x.shape[1] > 1:
            return super().param_mjp_batch_square(
                param_str, module, g_inp, g_out, mat, subsampling, weights
            )
        s2 = _sum_of_squares(mat, weights)
        return s2.unsqueeze(-1) * x.square()

    def param_mjp_square_sum(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Sum the squares of ``J_pᵀ mat`` over V and N, with weights: ``[V, *out] -> [*p]``."""
        x = _input(module, subsampling)
        if param_str != "weight" or x.shape[1] > 1:
            return super().param_mjp_square_sum(
                param_str, module, g_inp, g_out, mat, subsampling, weights
            )
        s2 = _sum_of_squares(mat, weights)
        return s2.T @ x.squeeze(1).square()

    def param_mjp_square_norm(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows = None,
    ) -> Tensor:
        """Squared norms of each sample's ``J_pᵀ mat``, summed over V: ``[V, N, *out] -> [N]``."""
        x = _input(module, subsampling)
        if param_str != "weight" or x.shape[1] ** 2 > module.weight.numel():  # type: ignore[operator, union-attr]
            return super().param_mjp_square_norm(param_str, module, g_inp, g_out, mat, subsampling)
        # |sum_t s_t x_tᵀ|² = sum_{t,u} (s_t·s_u) (x_t·x_u)
        s = _positions(mat)
        gram_s = einsum("vnto,vnuo->ntu", s, s)
        return (gram_s * torch.bmm(x, x.transpose(1, 2))).sum((1, 2))

    def kronecker_rows(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Rows = None,
    ) -> Tensor:
        """Sum ``mat`` over the positions: ``[V, N, *, O] -> [V, N, 1, O]``."""
        return _positions(mat).sum(2, keepdim=True)

    def kronecker_input_factors(
        self, param_str: str, module: Module, subsampling: Rows = None
    ) -> list[Tensor]:
        """Return ``A = (1/N) sum_{n,t} x xᵀ`` of shape ``[I, I]`` for the weight."""
        if param_str != "weight":
            return []
        x = _input(module, subsampling)
        return [einsum("nti,ntj->ij", x, x) / x.shape[0]]
