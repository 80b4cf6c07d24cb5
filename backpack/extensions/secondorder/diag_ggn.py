"""The diagonal of the generalised Gauss-Newton matrix, of the batch and of each sample."""

from __future__ import annotations

from collections.abc import Sequence

from backpack.core.propagations import ExactFactor, SampledFactor
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension


class DiagGGNExact(SecondOrderBackpropExtension):
    """Diagonal of the GGN, saved in ``diag_ggn_exact`` as ``[*p]``.

    The exact factor of the loss Hessian travels back. Source: Dangel, Kunstner, Hennig, BackPACK
    (ICLR 2020).
    """

    propagation = ExactFactor()
    needs = ("square",)

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Store which samples to look at (default: all)."""
        super().__init__("diag_ggn_exact", subsampling=subsampling)


class DiagGGNMC(SecondOrderBackpropExtension):
    """Monte-Carlo estimate of the GGN's diagonal, saved in ``diag_ggn_mc`` as ``[*p]``."""

    needs = ("square",)

    def __init__(self, mc_samples: int = 1, subsampling: Sequence[int] | None = None):
        """Store the number of Monte-Carlo samples and which samples of the batch to look at."""
        self.propagation = SampledFactor(mc_samples)
        super().__init__("diag_ggn_mc", subsampling=subsampling)


class BatchDiagGGNExact(SecondOrderBackpropExtension):
    """Diagonal of each sample's GGN, saved in ``diag_ggn_exact_batch`` as ``[N, *p]``."""

    propagation = ExactFactor()
    needs = ("batch_square",)

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Store which samples to look at (default: all)."""
        super().__init__("diag_ggn_exact_batch", subsampling=subsampling)


class BatchDiagGGNMC(SecondOrderBackpropExtension):
    """Monte-Carlo estimate of each sample's GGN diagonal, in ``diag_ggn_mc_batch``: ``[N, *p]``."""

    needs = ("batch_square",)

    def __init__(self, mc_samples: int = 1, subsampling: Sequence[int] | None = None):
        """Store the number of Monte-Carlo samples and which samples of the batch to look at."""
        self.propagation = SampledFactor(mc_samples)
        super().__init__("diag_ggn_mc_batch", subsampling=subsampling)
