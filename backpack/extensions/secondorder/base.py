"""Base class of second-order extensions."""

from __future__ import annotations

from backpack.extensions.backprop_extension import BackpropExtension


class SecondOrderBackpropExtension(BackpropExtension):
    """An extension for which curvature travels back from a scalar loss."""

    def expects_backpropagation_quantities(self) -> bool:
        """Return True: curvature travels back."""
        return True
