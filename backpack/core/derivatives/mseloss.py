"""Mean squared error, ``ℓ = c · sum_i (f_i - y_i)²`` with c = 1/(N D) for the mean."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor
from torch.nn import MSELoss

from backpack.core.derivatives.elementwise_losses import ElementwiseLossDerivatives, drawn
from backpack.core.record.context import Context
from backpack.core.record.registry import register


@register(MSELoss)
class MSELossDerivatives(ElementwiseLossDerivatives):
    """Derivatives of ``torch.nn.MSELoss``: the Hessian is ``2 c I``."""

    def second(self, c: Context) -> Tensor:
        """Return 2."""
        return torch.full_like(c.x, 2)

    def score(self, c: Context, mc_samples: int) -> Tensor:
        """Return ``2 (f - y)`` with ``y ~ N(f, I/2)``: sqrt(2) times a standard normal."""
        return sqrt(2) * drawn(torch.randn_like, c.input, mc_samples)
