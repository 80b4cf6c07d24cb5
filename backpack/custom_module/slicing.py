"""Slicing as a module."""

from __future__ import annotations

from types import EllipsisType

from torch import Tensor
from torch.nn import Module

Part = slice | int | EllipsisType | None


class Slicing(Module):
    """Index a tensor with slices, integers, ``Ellipsis`` and ``None``."""

    __constants__ = ("slice_info",)

    def __init__(self, slice_info: Part | tuple[Part, ...]):
        """Store the index.

        Args:
            slice_info: What to write between the square brackets; several as a tuple.
        """
        super().__init__()
        self.slice_info = slice_info if isinstance(slice_info, tuple) else (slice_info,)

    def forward(self, input: Tensor) -> Tensor:
        """Return a view of the input."""
        return input[self.slice_info]

    def extra_repr(self) -> str:
        """Return the index for the module's representation."""
        return f"slice_info={self.slice_info}"
