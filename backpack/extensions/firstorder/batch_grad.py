"""Individual gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backpack.core.products import Products
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension


class BatchGrad(FirstOrderBackpropExtension):
    """Individual gradients, saved in ``grad_batch`` as ``[N, *p]``.

    They carry the loss's reduction: with a mean, the factor 1/N. They sum to ``param.grad``.
    """

    needs = ("individual",)

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Store which samples to look at (default: all)."""
        super().__init__("grad_batch", subsampling=subsampling)

    def extract(self, products: Products) -> Tensor:
        """Return ``[N, *p]``."""
        individual = products.take("individual")  # [1, N, *p]
        # not a view: its memory is then known to be nobody else's
        return torch.ops.aten._unsafe_view(individual, individual.shape[1:])
