"""Mean squared error, ``ℓ = c · sum_i (f_i - y_i)²`` with c = 1/(N D) for the mean."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import MSELoss

from backpack.core.derivatives.elementwise_losses import ElementwiseLossDerivatives, drawn
from backpack.core.record.registry import register
from backpack.core.rows import Rows
from backpack.utils.subsampling import subsample


@register(MSELoss)
class MSELossDerivatives(ElementwiseLossDerivatives):
    """Derivatives of ``torch.nn.MSELoss``: the Hessian is ``2 c I``."""

    def second(self, module: Any, subsampling: Rows) -> Tensor:
        """Return 2."""
        return torch.full_like(subsample(module.input0, subsampling=subsampling), 2)

    def score(self, module: Any, mc_samples: int) -> Tensor:
        """Return ``2 (f - y)`` with ``y ~ N(f, I/2)``: sqrt(2) times a standard normal."""
        return sqrt(2) * drawn(torch.randn_like, module.input0, mc_samples)
