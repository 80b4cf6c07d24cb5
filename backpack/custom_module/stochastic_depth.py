"""Dropout of whole samples as a module."""

from __future__ import annotations

from torch import Tensor, empty
from torch.nn import Module


class StochasticDepth(Module):
    """Set samples to zero at random, in training mode, and scale the others.

    Source: Huang et al., Deep networks with stochastic depth (ECCV 2016); the scale is that of
    ``torchvision.ops.stochastic_depth``.
    """

    __constants__ = ("p", "mode")

    def __init__(self, p: float, mode: str):
        """Store the arguments.

        Args:
            p: Probability of zero.
            mode: ``"row"`` to draw for each sample, ``"batch"`` to draw for all of them together.

        Raises:
            ValueError: If ``p`` is not a probability, or the mode unknown.
        """
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p must be between 0 and 1, got {p}.")
        if mode not in ("row", "batch"):
            raise ValueError(f"mode must be 'row' or 'batch', got {mode!r}.")
        self.p = p
        self.mode = mode

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``[N, *]`` with a factor of zero or ``1 / (1 - p)``, drawn for each sample."""
        if not self.training or self.p == 0:
            return input
        ones = [1] * (input.dim() - 1)
        shape = [input.shape[0] if self.mode == "row" else 1, *ones]
        noise = empty(shape, dtype=input.dtype, device=input.device).bernoulli_(1 - self.p)
        return input * (noise / (1 - self.p) if self.p < 1 else noise)

    def extra_repr(self) -> str:
        """Return the arguments for the module's representation."""
        return f"p={self.p}, mode={self.mode!r}"
