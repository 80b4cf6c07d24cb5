"""Padding as a module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad as pad_function


class Pad(Module):
    """Pad a tensor, like :func:`torch.nn.functional.pad`."""

    __constants__ = ("pad", "mode", "value")

    def __init__(self, pad: Sequence[int], mode: str = "constant", value: float = 0.0):
        """Store the arguments of the padding.

        Args:
            pad: Number of entries to add (or, if negative, to remove) before and after each axis,
                starting with the last axis.
            mode: ``"constant"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
            value: Value to pad with in the mode ``"constant"``.
        """
        super().__init__()
        self.pad = tuple(pad)
        self.mode = mode
        self.value = value

    def forward(self, input: Tensor) -> Tensor:
        """Pad the input, ``[N, *]``."""
        return pad_function(input, self.pad, mode=self.mode, value=self.value)

    def extra_repr(self) -> str:
        """Return the arguments for the module's representation."""
        return f"pad={self.pad}, mode={self.mode!r}, value={self.value}"
