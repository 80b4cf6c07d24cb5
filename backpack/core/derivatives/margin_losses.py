"""Margins between classes, ``ℓ = c · sum_n 1/C sum_k max(0, m - f_y + f_k)^p``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, MultiLabelMarginLoss, MultiMarginLoss
from torch.nn.functional import one_hot

from backpack.core.derivatives.elementwise_losses import PiecewiseLinearLossDerivatives
from backpack.core.derivatives.lossbase import BaseLossDerivatives, is_negative, not_convex
from backpack.core.record.registry import register
from backpack.core.record.tape import describe
from backpack.core.rows import Rows
from backpack.utils.subsampling import subsample


@register(MultiLabelMarginLoss)
class MultiLabelMarginLossDerivatives(PiecewiseLinearLossDerivatives):
    """Derivatives of ``torch.nn.MultiLabelMarginLoss``: piecewise linear, the Hessian is zero."""


@register(MultiMarginLoss)
class MultiMarginLossDerivatives(BaseLossDerivatives):
    """Derivatives of ``torch.nn.MultiMarginLoss``.

    With ``d_k = e_k - e_y``, the Hessian is ``sum_k a_k d_k d_kᵀ``, where ``a_k = 2 c w_y / C`` for
    ``p = 2`` and classes k that violate the margin, else 0.
    """

    def has_likelihood(self, module: Module) -> bool:
        """Return False: targets are not drawn from any distribution."""
        return False

    def _pieces(self, module: Any, subsampling: Rows) -> tuple[Tensor, Tensor]:
        """Return a ``[N, C]`` and d ``[N, C, C]``, a row for each k."""
        x, y = module.input0, module.input1
        if x.dim() < 2:
            raise ValueError(
                f"{describe(module)}: the prediction needs a batch axis, got shape {list(x.shape)}."
            )
        num_rows, num_classes = x.shape
        true = one_hot(y, num_classes).to(x.dtype)
        apart = torch.eye(num_classes, dtype=x.dtype, device=x.device) - true.unsqueeze(1)
        violated = torch.einsum("nkc,nc->nk", apart, x) + module.margin > 0
        scale = torch.full_like(x, 2 / num_classes if module.p == 2 else 0) * violated
        if module.weight is not None:
            scale = scale * module.weight[y].unsqueeze(1)
        if module.reduction == "mean":
            scale = scale / num_rows
        return (
            subsample(scale.to(x.dtype), subsampling=subsampling),
            subsample(apart, subsampling=subsampling),
        )

    def _need_convex(self, module: Any, subsampling: Rows) -> None:
        scale, _ = self._pieces(module, subsampling)
        if is_negative(scale):
            raise not_convex(module, "a weight is negative")

    def _sqrt_hessian(self, module: Any, subsampling: Rows) -> Tensor:
        scale, apart = self._pieces(module, subsampling)
        return (scale.sqrt().unsqueeze(2) * apart).movedim(1, 0)

    def _hessian_factor(self, module: Any, subsampling: Rows) -> tuple[Tensor, Tensor | None]:
        scale, apart = self._pieces(module, subsampling)
        return apart.movedim(1, 0), scale.T

    def _hessian_mat_prod(self, module: Any, mat: Tensor, subsampling: Rows) -> Tensor:
        scale, apart = self._pieces(module, subsampling)
        along = torch.einsum("nkc,vnc->vnk", apart, mat) * scale
        return torch.einsum("nkc,vnk->vnc", apart, along)
