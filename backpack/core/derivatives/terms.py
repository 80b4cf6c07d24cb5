"""How many terms a loss is the mean of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Module, NLLLoss

from backpack.custom_module.weighted_loss import WeightedLoss
from backpack.utils.batches import tensors_of

REDUCTIONS = ("mean", "sum", "batchmean")


def torch_loss(kind: type) -> type[Module] | None:
    """Return the loss of ``torch.nn`` that a class is or inherits from; those take a tensor."""
    modules = (one for one in kind.__mro__ if issubclass(one, Module))
    return next((one for one in modules if one.__module__ == "torch.nn.modules.loss"), None)


def num_terms(
    loss_function: Module, output: Any, targets: Sequence[Any], axis_of_samples: Callable[[], int]
) -> float:
    """Return what the mean of a loss divides by, or 1 if it is a sum; an error if that is unknown.

    That is the number of terms of the loss of a model's output ``[N, *]``: of samples and positions
    for most, of entries for losses such as ``MSELoss``; for targets that are classes, the sum of
    their weights, where ``ignore_index`` counts zero. A loss of your own is the mean over the
    samples, unless it inherits from one of torch and leaves the mean to it; which axis of the
    output has them is asked then.
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
        base = torch_loss(type(loss))
        is_torchs = base is not None
        if base is not None and type(loss).forward is not base.forward:
            is_torchs = _unreduced(loss, output, targets).dim() > 0
        classes = is_torchs and isinstance(loss, (CrossEntropyLoss, NLLLoss))
        if classes and not targets[0].is_floating_point():
            y = targets[0].long()
            counted = y[y != loss.ignore_index]
            each = torch.ones_like(counted) if loss.weight is None else loss.weight[counted]
            return float(each.sum(dtype=torch.promote_types(each.dtype, torch.float32)))
        if isinstance(loss, WeightedLoss):
            y, _, *options = targets
            return float(loss.loss.forward(output, y, *options).numel())
        if reduction == "mean" and is_torchs:
            return float(_unreduced(loss, output, targets).numel())
    # of several outputs, too
    axis = axis_of_samples()
    if is_torchs and axis:
        raise ValueError(
            f"{type(loss).__name__} with reduction={reduction!r} divides by the size of the first "
            f"axis, but the samples of the output of shape {list(output.shape)} are along axis "
            f"{axis}. Use reduction='sum', or let the model return the samples first."
        )
    counts = {x.shape[axis] for x in tensors_of(output) if x.dim() > axis}
    if len(counts) != 1:
        raise ValueError(
            f"{type(loss).__name__} is the mean over the samples, but how many there are is not to "
            f"be seen in what the model returns: {sorted(counts) or 'no'} rows."
        )
    return float(*counts)


def _unreduced(loss: Module, output: Any, targets: Sequence[Any]) -> Tensor:
    """Return the terms of a loss; a scalar of one that reduces them whatever it is told."""
    unreduced: Any = copy(loss)
    unreduced.reduction = "none"
    return unreduced.forward(output, *targets)
