"""The diagonal of the Hessian, of the batch and of each sample."""

from __future__ import annotations

from collections.abc import Sequence

from backpack.core.propagations import HessianFactors
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension


class DiagHessian(SecondOrderBackpropExtension):
    """Diagonal of the Hessian, saved in ``diag_h`` as ``[*p]``."""

    propagation = HessianFactors()
    needs = ("square",)

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Store which samples to look at (default: all)."""
        super().__init__("diag_h", subsampling=subsampling)


class BatchDiagHessian(SecondOrderBackpropExtension):
    """Diagonal of each sample's Hessian, saved in ``diag_h_batch`` as ``[N, *p]``."""

    propagation = HessianFactors()
    needs = ("batch_square",)

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Store which samples to look at (default: all)."""
        super().__init__("diag_h_batch", subsampling=subsampling)
