"""A linear layer that stores its weight transposed, as ``x @ W`` reads it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Module, Parameter


class TransposedLinear(Module):
    """``y = x W + b``, with a weight ``[I, O]``; what ``x @ weight`` is recorded as."""

    __constants__ = ("in_features", "out_features")
    bias: Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        """Draw weight and bias as ``nn.Linear`` does.

        Args:
            in_features: Number of inputs I.
            out_features: Number of outputs O.
            bias: Whether there is a bias.
        """
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        shape = in_features, out_features
        self.weight = Parameter(torch.empty(shape).uniform_(-bound, bound))
        own = Parameter(torch.empty(out_features).uniform_(-bound, bound)) if bias else None
        self.register_parameter("bias", own)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply: ``[N, *, I] -> [N, *, O]``."""
        y = input @ self.weight
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Return the sizes for the module's representation."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"
