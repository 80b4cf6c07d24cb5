"""Square roots of the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backpack.core.engine.factored import FactoredGrad
from backpack.core.engine.products import Products
from backpack.core.engine.propagations import ExactFactor, SampledFactor
from backpack.extensions.backprop_extension import checked_dtype
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.sqrt_ggn import module_extensions

__all__ = ["SqrtGGNExact", "SqrtGGNMC", "module_extensions"]


class _SqrtGGN(SecondOrderBackpropExtension):
    """A square root of the GGN: ``[V, N, *p]``."""

    needs = ("individual",)

    def __init__(
        self,
        savefield: str,
        subsampling: Sequence[int] | None,
        factored: bool,
        dtype: torch.dtype | None,
    ):
        super().__init__(savefield, subsampling=subsampling)
        self.result_dtype = checked_dtype(dtype, factored)
        if factored:
            self.needs = ("factored",)  # type: ignore[misc]

    def extract(self, products: Products) -> Tensor | FactoredGrad:
        """Return ``[V, N, *p]``, or an object with these V·N columns."""
        return products["factored"] if "factored" in self.needs else products.take("individual")


class SqrtGGNExact(_SqrtGGN):
    r"""Matrix square root of the GGN, saved in ``sqrt_ggn_exact``.

    .. math::
        V_{cn} = J_n^\top s_{nc}
        \qquad \sum_{c, n} V_{cn} V_{cn}^\top = \sum_n J_n^\top H_n J_n

    Its contraction with itself over the first two axes is the parameter's block of the GGN. The
    ``[C·N, C·N]`` Gram matrix has the same nonzero eigenvalues, see :class:`GGNGram`.

    With ``factored=True`` the value is a :class:`~backpack.core.engine.factored.FactoredGrad` of
    shape ``[C·N, *p]``, column c of sample n at ``c·N + n``: where a column is a sum of few outer
    products, these are kept, and all columns of a sample share one of the sides.

    :Shape: ``[C, N, *p]``
    :Scale: With a mean it carries the square root of 1/N.
    :Cost: C columns travel back where the gradient is one. The memory of C·N gradients.
    :Source: Dangel, Tatzel, Hennig, ViViT: curvature access through the generalized Gauss-Newton's
        low-rank structure (TMLR 2022).
    """

    propagation = ExactFactor()
    shape = ("C", "N", "*p")

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        factored: bool = False,
        dtype: torch.dtype | None = None,
    ):
        """Choose the samples.

        Args:
            subsampling: Indices of the samples of the batch to look at. Default: all.
            factored: Save factors instead of the columns.
            dtype: Precision to save in, see :class:`BatchGrad`.
        """
        super().__init__("sqrt_ggn_exact", subsampling, factored, dtype)


class SqrtGGNMC(_SqrtGGN):
    r"""Monte-Carlo estimate of a square root of the GGN, saved in ``sqrt_ggn_mc``.

    .. math:: V_{mn} = J_n^\top \tilde s_{nm}

    :Shape: ``[M, N, *p]``
    :Scale: With a mean it carries the square root of 1/N; with M samples, that of 1/M.
    :Cost: M columns travel back where the gradient is one. The memory of M·N gradients.
    :Source: Dangel, Tatzel, Hennig, ViViT: curvature access through the generalized Gauss-Newton's
        low-rank structure (TMLR 2022).
    """

    shape = ("M", "N", "*p")

    def __init__(
        self,
        mc_samples: int = 1,
        subsampling: Sequence[int] | None = None,
        factored: bool = False,
        dtype: torch.dtype | None = None,
    ):
        """Choose the samples.

        Args:
            mc_samples: Number M of Monte-Carlo samples.
            subsampling: Indices of the samples of the batch to look at. Default: all.
            factored: Save factors instead of the columns, see :class:`SqrtGGNExact`.
            dtype: Precision to save in, see :class:`BatchGrad`.
        """
        self.propagation = SampledFactor(mc_samples)
        super().__init__("sqrt_ggn_mc", subsampling, factored, dtype)
