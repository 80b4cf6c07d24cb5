"""Second moment of the individual gradients."""

from __future__ import annotations

from collections.abc import Sequence

from backpack.extensions.firstorder.base import FirstOrderBackpropExtension


class SumGradSquared(FirstOrderBackpropExtension):
    """Sum of the squared individual gradients, saved in ``sum_grad_squared`` as ``[*p]``."""

    needs = ("square",)

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Store which samples to look at (default: all)."""
        super().__init__("sum_grad_squared", subsampling=subsampling)
