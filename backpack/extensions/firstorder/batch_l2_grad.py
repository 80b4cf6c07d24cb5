"""Norms of the individual gradients."""

from __future__ import annotations

from collections.abc import Sequence

from backpack.extensions.firstorder.base import FirstOrderBackpropExtension


class BatchL2Grad(FirstOrderBackpropExtension):
    """Squared L2 norm of each individual gradient, saved in ``batch_l2`` as ``[N]``."""

    needs = ("square_norm",)

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Store which samples to look at (default: all)."""
        super().__init__("batch_l2", subsampling=subsampling)
