"""Inner products of the columns of a square root of the GGN."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from backpack.core.engine.products import Products
from backpack.core.engine.propagations import ExactFactor, SampledFactor
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension


class GGNGram(SecondOrderBackpropExtension):
    r"""Inner products of all pairs of columns of the GGN's square root, saved in ``ggn_gram``.

    .. math::
        G_{cn, dm} = V_{cn}^\top V_{dm}
        \qquad V_{cn} = J_n^\top s_{nc}

    The GGN is the sum of the outer products of the same columns. So the matrix ``[C·N, C·N]`` has
    its eigenvalues other than zero, and an eigenvector u with eigenvalue λ belongs to the
    eigenvector :math:`\sum_{cn} u_{cn} V_{cn} / \sqrt{λ}` of the GGN. That is for a parameter's
    block; of the whole matrix, :func:`backpack.utils.gram.total_gram` adds up
    the Gram matrices, and :class:`backpack.linalg.GGNSpectrum` has the eigenvectors as well.

    :Shape: ``[C, N, C, N]``; with Monte-Carlo samples ``[M, N, M, N]``.
    :Scale: That of the GGN: with a mean it carries 1/N.
    :Cost: C (or M) columns travel back where the gradient is one. Where a column is a sum of few
        outer products, inner products are those of their sides, and the square root is not formed.
    :Source: Dangel, Tatzel, Hennig, ViViT: curvature access through the generalized Gauss-Newton's
        low-rank structure (TMLR 2022), section 2.
    """

    needs = ("factored",)
    shape = ("V", "N", "V", "N")

    def __init__(self, mc_samples: int | None = None, subsampling: Sequence[int] | None = None):
        """Choose the matrix and the samples.

        Args:
            mc_samples: Number M of Monte-Carlo samples; they follow ``torch.manual_seed``. Default:
                exact.
            subsampling: Indices of the samples of the batch to look at. Default: all.

        Raises:
            ValueError: If ``mc_samples`` is no positive number.
        """
        self.mc_samples = mc_samples
        self.propagation = ExactFactor() if mc_samples is None else SampledFactor(mc_samples)
        super().__init__("ggn_gram", subsampling=subsampling)

    def extract(self, products: Products) -> Tensor:
        """Return ``[V, N, V, N]``."""
        columns = products["factored"]
        shape = (columns.columns, len(columns) // columns.columns)
        return columns.gram().reshape(*shape, *shape)
