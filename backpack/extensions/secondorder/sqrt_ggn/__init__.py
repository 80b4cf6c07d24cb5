"""Square roots of the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Sequence

from backpack.core.engine.propagations import ExactFactor, SampledFactor
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.sqrt_ggn import module_extensions

__all__ = ["SqrtGGNExact", "SqrtGGNMC", "module_extensions"]


class SqrtGGNExact(SecondOrderBackpropExtension):
    r"""Matrix square root of the GGN, saved in ``sqrt_ggn_exact``.

    .. math::
        V_{cn} = J_n^\top s_{nc}
        \qquad \sum_{c, n} V_{cn} V_{cn}^\top = \sum_n J_n^\top H_n J_n

    Its contraction with itself over the first two axes is the parameter's block of the GGN. The
    ``[C·N, C·N]`` Gram matrix has the same nonzero eigenvalues.

    :Shape: ``[C, N, *p]``
    :Scale: With a mean it carries the square root of 1/N.
    :Cost: C columns travel back where the gradient is one. The memory of C·N gradients.
    :Source: Dangel, Tatzel, Hennig, ViViT: curvature access through the generalized Gauss-Newton's
        low-rank structure (TMLR 2022).
    """

    propagation = ExactFactor()
    needs = ("individual",)
    shape = ("C", "N", "*p")

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Choose the samples.

        Args:
            subsampling: Indices of the samples of the batch to look at. Default: all.
        """
        super().__init__("sqrt_ggn_exact", subsampling=subsampling)


class SqrtGGNMC(SecondOrderBackpropExtension):
    r"""Monte-Carlo estimate of a square root of the GGN, saved in ``sqrt_ggn_mc``.

    .. math:: V_{mn} = J_n^\top \tilde s_{nm}

    :Shape: ``[M, N, *p]``
    :Scale: With a mean it carries the square root of 1/N; with M samples, that of 1/M.
    :Cost: M columns travel back where the gradient is one. The memory of M·N gradients.
    :Source: Dangel, Tatzel, Hennig, ViViT: curvature access through the generalized Gauss-Newton's
        low-rank structure (TMLR 2022).
    """

    needs = ("individual",)
    shape = ("M", "N", "*p")

    def __init__(self, mc_samples: int = 1, subsampling: Sequence[int] | None = None):
        """Choose the samples.

        Args:
            mc_samples: Number M of Monte-Carlo samples.
            subsampling: Indices of the samples of the batch to look at. Default: all.
        """
        self.propagation = SampledFactor(mc_samples)
        super().__init__("sqrt_ggn_mc", subsampling=subsampling)
