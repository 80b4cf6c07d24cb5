"""Multiplication by a constant as a module."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module


class ScaleModule(Module):
    """Multiplication by a constant number, which is not a parameter."""

    __constants__ = ("weight",)
    _divisor: float | None = None  # whose reciprocal the factor was made of

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

    @classmethod
    def of_division(cls, divisor: float) -> ScaleModule:
        """Return the module that divides by a number, with the rounding of a division."""
        module = cls(1 / divisor)
        module._divisor = divisor
        return module

    def forward(self, input: Tensor) -> Tensor:
        """Scale the input, of any shape."""
        if self._divisor is not None and self.weight == 1 / self._divisor:
            return input / self._divisor
        return input * self.weight

    def extra_repr(self) -> str:
        """Return the factor for the module's representation."""
        return f"weight={self.weight}"
