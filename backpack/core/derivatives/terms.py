"""How many terms a loss is the mean of."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Module, NLLLoss
from torch.nn.functional import nll_loss

from backpack.custom_module.weighted_loss import WeightedLoss

REDUCTIONS = ("mean", "sum", "batchmean")


def num_terms(loss_function: Module, output: Tensor, targets: Sequence[Any]) -> float:
    """Return what the mean of a loss divides by, or 1 if it is a sum.

    That is the number of terms of the loss of a model's output ``[N, *]``: of samples and positions
    for most, of entries for losses such as ``MSELoss``; for targets that are classes, the sum of
    their weights, where ``ignore_index`` counts zero. A loss of your own is the mean over the
    samples.

    Raises:
        ValueError: If the loss does not say with ``reduction`` whether it is a mean or a sum.
    """
    loss: Any = loss_function
    reduction = getattr(loss, "reduction", None)
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"How the losses of several samples are put together is up to the attribute "
            f"'reduction' of {type(loss).__name__}: 'mean' or 'sum', but it is {reduction!r}. A "
            "loss of your own needs the attribute too."
        )
    if reduction == "sum":
        return 1.0
    with torch.no_grad():
        classes = isinstance(loss, (CrossEntropyLoss, NLLLoss))
        if classes and not targets[0].is_floating_point():
            ones = torch.ones_like(output)
            return float(
                nll_loss(-ones, targets[0], loss.weight, None, loss.ignore_index, None, "sum")
            )
        if isinstance(loss, WeightedLoss):
            y, _, *options = targets
            return float(loss.loss.forward(output, y, *options).numel())
        if reduction == "mean" and type(loss).__module__ == "torch.nn.modules.loss":
            unreduced = copy(loss)
            unreduced.reduction = "none"
            return float(unreduced.forward(output, *targets).numel())
    return float(len(output))
