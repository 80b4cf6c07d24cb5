"""Products with the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Sequence

from backpack.core.engine.propagations import Blocks
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension


class GGNMP(SecondOrderBackpropExtension):
    r"""Product with the parameter's diagonal block of the GGN, saved in ``ggnmp``.

    .. math:: v \mapsto \sum_n J_n^\top H_n J_n \, v

    It may be called until the parameters change or the next backward pass replaces it.

    :Shape: A function ``[V, *p] -> [V, *p]``.
    :Scale: That of the loss: with a mean it carries 1/N once.
    :Cost: Next to nothing in the backward pass. A product is a pass forward and a pass back over
        the modules between the parameter and the loss, for each of the V vectors.
    :Source: Schraudolph, Fast curvature matrix-vector products for second-order gradient descent
        (Neural Computation 2002).
    """

    propagation = Blocks(modify=None)
    needs = ("product",)

    def __init__(self, savefield: str = "ggnmp", subsampling: Sequence[int] | None = None):
        """Store the options.

        Args:
            savefield: Attribute of the parameter.
            subsampling: Indices of the samples of the batch to look at. Default: all.
        """
        super().__init__(savefield, subsampling=subsampling)
