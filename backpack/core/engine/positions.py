"""Which positions of a sample count, where Kronecker factors treat each on its own (expand)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backpack.core.derivatives.loss_hessian import LossHessian
from backpack.core.engine.plan import Plan
from backpack.core.record.layout import Owners
from backpack.core.rows import row_numbers


def counted(
    plan: Plan, subsampling: Sequence[int] | None, savefields: str
) -> tuple[Tensor, Owners | None] | None:
    """Return at which rows of the loss a target counts, and whose they are; None: everywhere.

    Of several losses of one prediction, a target counts if it does for any of them. Those of
    several predictions have to ignore the same ones.
    """
    losses, predictions = plan.losses, plan.predictions
    rows = [plan.rows(call, subsampling) for call in losses]
    hessians = list(map(LossHessian, losses, rows))
    masks = list(map(LossHessian.counted, hessians))
    known = [mask for mask in masks if mask is not None]
    if not known:
        return None
    count = len(row_numbers(plan.base, subsampling)) if plan.base else 1
    first, *others = [mask.reshape(count, -1).to(known[0].device) for mask in known]
    of_one = len({tuple(call.origins_in[i] for i in predictions[call]) for call in losses}) == 1
    alike = all(mask.shape == first.shape for mask in others)
    if alike and of_one:
        merged = torch.stack([first, *others]).any(0), hessians[0].owners
        return merged if len(known) == len(masks) else None
    if len(known) < len(masks) or not (alike and all(torch.equal(m, first) for m in others)):
        names = ", ".join(map(repr, losses))
        raise ValueError(
            f"{savefields}: approximation='expand' leaves out positions whose targets the "
            f"loss ignores, but the losses ignore different ones: {names}. Use one backward "
            "pass for each loss, or approximation=None."
        )
    return first, hessians[0].owners
