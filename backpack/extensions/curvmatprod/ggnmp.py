"""Products with the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Sequence

from backpack.core.propagations import Blocks
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension


class GGNMP(SecondOrderBackpropExtension):
    """Product with the parameter's diagonal block of the GGN, a function ``[V, *p] -> [V, *p]``.

    It may be called until the parameters change or the next backward pass replaces it.
    """

    propagation = Blocks(modify=None)
    needs = ("product",)

    def __init__(self, savefield: str = "ggnmp", subsampling: Sequence[int] | None = None):
        """Store the savefield and which samples to look at (default: all)."""
        super().__init__(savefield, subsampling=subsampling)
