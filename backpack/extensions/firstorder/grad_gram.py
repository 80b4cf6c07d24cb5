"""Inner products of individual gradients."""

from __future__ import annotations

from torch import Tensor

from backpack.core.engine.products import Products
from backpack.extensions.backprop_extension import ChoosesSamples
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension


class GradGram(ChoosesSamples, FirstOrderBackpropExtension):
    r"""Inner products of all pairs of individual gradients, saved in ``grad_gram``.

    .. math:: G_{nm} = g_n^\top g_m \qquad n, m = 1, \ldots, N

    That is for a parameter's part of the gradients; :func:`backpack.utils.gram.total_gram` adds
    them up. For two batches see :meth:`~backpack.core.engine.factored.FactoredGrad.gram`.

    :Shape: ``[N, N]``
    :Scale: With a mean it carries 1/N².
    :Cost: Where a gradient is a sum of few outer products, entrywise products of two Gram
        matrices, ``N² T² (O + I)`` multiplications for ``[O, I]`` at T positions; else those of the
        gradients, in blocks.
    :Source: Dangel, Tatzel, Hennig, ViViT: curvature access through the generalized Gauss-Newton's
        low-rank structure (TMLR 2022), for the Gram matrix in place of the second moment.
    """

    savefield = "grad_gram"
    needs = ("factored",)
    shape = ("N", "N")

    def extract(self, products: Products) -> Tensor:
        """Return ``[N, N]``."""
        return products["factored"].gram()
