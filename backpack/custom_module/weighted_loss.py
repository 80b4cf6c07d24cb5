"""A weight for each sample's loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module


class WeightedLoss(Module):
    """Weighted sum of the samples' losses, ``sum_n w_n l_n``, divided by their number for the mean.

    With all weights 1 and ``reduction="mean"``, this is the mean of what the loss returns. Negative
    weights are possible: the Hessian is known then, and there is no GGN.
    """

    def __init__(self, loss: Module, reduction: str = "mean"):
        """Store the loss.

        Args:
            loss: A loss with ``reduction="none"``.
            reduction: ``"mean"`` or ``"sum"``. Default: ``"mean"``.

        Raises:
            ValueError: If the loss is reduced, or the reduction is something else.
        """
        super().__init__()
        inner = getattr(loss, "reduction", "none")
        if inner != "none":
            raise ValueError(
                f"WeightedLoss needs the losses of the samples: use {type(loss).__name__}"
                f"(reduction='none') instead of reduction={inner!r}."
            )
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}.")
        self.loss = loss
        self.reduction = reduction

    def forward(self, prediction: Tensor, target: Any, weights: Tensor, *options: Any) -> Tensor:
        """Evaluate the loss.

        Args:
            prediction: What the network returns. ``[N, *d]``
            target: What it should return.
            weights: Weight of each sample. ``[N]``
            *options: Further arguments of the loss, such as the variance of ``GaussianNLLLoss``.

        Returns:
            A scalar.

        Raises:
            ValueError: If there is not one weight for each sample, or the loss has reduced them.
        """
        # its forward alone: hooks would record the losses of the samples as a loss of their own
        losses = self.loss.forward(prediction, target, *options)
        if losses.dim() == 0 or weights.shape != losses.shape[:1]:
            raise ValueError(
                f"WeightedLoss needs one weight for each sample: the losses have shape "
                f"{list(losses.shape)}, the weights {list(weights.shape)}."
            )
        rows = losses.flatten(1) if losses.dim() > 1 else losses.unsqueeze(1)
        total = (rows.sum(1) * weights).sum()
        return total / losses.numel() if self.reduction == "mean" else total

    def extra_repr(self) -> str:
        """Show the reduction."""
        return f"reduction={self.reduction!r}"
