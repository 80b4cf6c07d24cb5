"""Mean squared error, ``ℓ = c · sum_i (f_i - y_i)²`` with c = 1/(N D) for the mean."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import MSELoss

from backpack.core.derivatives.basederivatives import BatchAxis, Rows
from backpack.core.derivatives.lossbase import BaseLossDerivatives, same_shape, scaled_identity
from backpack.core.registry import register
from backpack.utils.subsampling import subsample


@register(MSELoss)
class MSELossDerivatives(BaseLossDerivatives):
    """Derivatives of ``torch.nn.MSELoss``: the Hessian is ``2 c I``."""

    batch_axis = BatchAxis.LEADING

    def _factor(self, module: Any) -> float:
        same_shape(module, [module.input0.shape, module.input1.shape])
        return 1 / module.input0.numel() if module.reduction == "mean" else 1.0

    def _sqrt_hessian(self, module: Any, subsampling: Rows) -> Tensor:
        x = subsample(module.input0, subsampling=subsampling)
        return scaled_identity(torch.full_like(x, sqrt(2 * self._factor(module))))

    def _sqrt_hessian_sampled(self, module: Any, mc_samples: int) -> Tensor:
        # y ~ N(f, I/2): the gradient 2 (f - y) is sqrt(2) times a standard normal
        x = module.input0
        normal = torch.randn(mc_samples, *x.shape, dtype=x.dtype, device=x.device)
        return normal * sqrt(2 * self._factor(module))

    def _hessian_mat_prod(self, module: Any, mat: Tensor, subsampling: Rows) -> Tensor:
        return mat * (2 * self._factor(module))
