"""Products with the Hessian."""

from __future__ import annotations

from collections.abc import Sequence

from backpack.core.engine.propagations import Blocks, identity
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension


class HMP(SecondOrderBackpropExtension):
    r"""Product with the parameter's diagonal block of the Hessian, saved in ``hmp``.

    .. math:: v \mapsto \nabla_p^2 \mathcal{L} \, v

    It may be called until the parameters change or the next backward pass replaces it.

    :Shape: A function ``[V, *p] -> [V, *p]``.
    :Scale: That of the loss: with a mean it carries 1/N once.
    :Cost: As :class:`GGNMP`, and the second derivatives of the activations.
    :Source: Pearlmutter, Fast exact multiplication by the Hessian (Neural Computation 1994).
    """

    propagation = Blocks(modify=identity)
    needs = ("product",)

    def __init__(self, savefield: str = "hmp", subsampling: Sequence[int] | None = None):
        """Store the options.

        Args:
            savefield: Attribute of the parameter.
            subsampling: Indices of the samples of the batch to look at. Default: all.
        """
        super().__init__(savefield, subsampling=subsampling)
