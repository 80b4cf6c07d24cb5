"""Products with the Hessian."""

from __future__ import annotations

from collections.abc import Sequence

from backpack.core.propagations import Blocks, identity
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension


class HMP(SecondOrderBackpropExtension):
    """Product with the parameter's diagonal block of the Hessian, ``[V, *p] -> [V, *p]``.

    It may be called until the parameters change or the next backward pass replaces it.
    """

    propagation = Blocks(modify=identity)
    needs = ("product",)

    def __init__(self, savefield: str = "hmp", subsampling: Sequence[int] | None = None):
        """Store the savefield and which samples to look at (default: all)."""
        super().__init__(savefield, subsampling=subsampling)
