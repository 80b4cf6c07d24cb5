"""Variance of the individual gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backpack.core.products import Products
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension


class Variance(FirstOrderBackpropExtension):
    """Variance of the individual gradients, saved in ``variance`` as ``[*p]``.

    ``sum_grad_squared / N - (grad / N)²``, the biased estimate. N is the number of samples that are
    looked at.
    """

    needs = ("square", "gradient")

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Store which samples to look at (default: all)."""
        super().__init__("variance", subsampling=subsampling)

    def extract(self, products: Products) -> Tensor:
        """Return ``[*p]``."""
        n, gradient = products.num_samples, products["gradient"]
        return torch.addcmul(products["square"], gradient, gradient, value=-1 / n).div_(n)
