"""Multiplication by a constant as a module."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module


class ScaleModule(Module):
    """Multiplication by a constant number, which is not a parameter."""

    __constants__ = ("weight",)

    def __init__(self, weight: float = 1.0):
        """Store the factor.

        Args:
            weight: The factor.

        Raises:
            ValueError: If the factor is not a number, for instance a tensor.
        """
        super().__init__()
        if not isinstance(weight, (int, float)):
            raise ValueError(f"weight must be a number, got {type(weight).__name__}.")
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        """Scale the input, of any shape."""
        return input * self.weight

    def extra_repr(self) -> str:
        """Return the factor for the module's representation."""
        return f"weight={self.weight}"
