"""Square roots of the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Sequence

from backpack.core.propagations import ExactFactor, SampledFactor
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension


class SqrtGGNExact(SecondOrderBackpropExtension):
    """Matrix square root of the GGN, saved in ``sqrt_ggn_exact`` as ``[C, N, *p]``.

    Its contraction with itself over the first two axes is the parameter's block of the GGN.
    """

    propagation = ExactFactor()
    needs = ("individual",)

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Store which samples to look at (default: all)."""
        super().__init__("sqrt_ggn_exact", subsampling=subsampling)


class SqrtGGNMC(SecondOrderBackpropExtension):
    """Monte-Carlo estimate of a square root of the GGN, in ``sqrt_ggn_mc``: ``[M, N, *p]``."""

    needs = ("individual",)

    def __init__(self, mc_samples: int = 1, subsampling: Sequence[int] | None = None):
        """Store the number of Monte-Carlo samples and which samples of the batch to look at."""
        self.propagation = SampledFactor(mc_samples)
        super().__init__("sqrt_ggn_mc", subsampling=subsampling)
