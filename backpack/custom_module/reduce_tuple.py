"""Selection from a tuple as a module."""

from __future__ import annotations

from typing import TypeVar

from torch.nn import Module

T = TypeVar("T")


class ReduceTuple(Module):
    """Pick one element of a tuple, such as the output of a recurrent layer."""

    def __init__(self, index: int = 0):
        super().__init__()
        self.index = index

    def forward(self, input: tuple[T, ...]) -> T:
        """Pick the element of a tuple of tensors, possibly nested."""
        return input[self.index]

    def extra_repr(self) -> str:
        """Return the index for the module's representation."""
        return f"index={self.index}"
