"""Gradients of single samples where tensors have none: autograd has summed over them."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor

from backpack.core.derivatives.evaluation import close
from backpack.core.engine import call_products, checks
from backpack.core.engine.backpropagation import State
from backpack.core.engine.factors import Factor
from backpack.core.engine.plan import READS_PARAMETER, Plan
from backpack.core.record.context import context_of
from backpack.core.record.origins import Origin, parameter_behind
from backpack.core.record.visits import Visit

COMBINE = f"Combine it with data in a module, such as SumModule. {checks.CONVERT}"
NUMBERS = (
    "Multiply learned weights with the loss of each sample (reduction='none'), before the mean; "
    "leave a penalty to the optimiser (weight_decay), or add it outside of the model; add losses "
    "by + rather than torch.stack."
)

# Precisions rougher than this have three digits or less.
FINE = torch.finfo(torch.float32).eps


def separate_samples(plan: Plan) -> None:
    """Find each sample's gradient where a tensor has no samples: autograd has summed over them.

    Only calls that combine such a tensor with one that has samples, and calls above them, take
    part; a tensor in which no call with trained parameters has a part needs none.
    """
    if not any(map(attrgetter("is_unbatched"), plan.calls)):
        return
    alone: list[Visit] = []
    trained: set[Origin | None] = set()
    for call in plan.calls:
        if call.trained or not trained.isdisjoint(call.origins_in):
            trained |= {*call.origins_out} - {None}
            alone += [call] if call.is_unbatched else []
    if not alone:
        return
    plan.check_one_batch_for_all(alone[0])
    state = State()
    apart = {o for call in alone for o in call.origins_out}
    for call in reversed(plan.calls):
        if call in plan.losses or call.derivatives is None:
            continue
        if call in alone:
            found = state.fetch(call)
            mats = [None] * len(call.outputs) if found is None else found[1]
            call.g_samples = [None if mat is None else mat.squeeze(0) for mat in mats]
            for total, each in zip(call.g_out, call.g_samples, strict=True):
                if total is not None and (each is None or not _add_up(plan, call, each, total)):
                    advice = COMBINE if any(call.shape_out) else NUMBERS
                    for one in filter(attrgetter("is_unbatched"), plan.calls):
                        if any(parameter_behind(x) is not None for x in one.inputs):
                            advice = READS_PARAMETER.format(one)
                    raise ValueError(
                        f"{call!r} has no samples, and reaches the loss on a way on which those of "
                        "the loss cannot be told apart (not through a module that combines it with "
                        f"data). {advice}"
                    )
        grads = call.gradients()
        if apart.isdisjoint(call.origins_in) or all(g is None for g in grads):
            continue
        mats = [None if g is None else g.unsqueeze(0) for g in grads]
        backs = call_products.transposed(context_of(call), mats)
        factors = [
            Factor(back, back.shape[1], adds_up=True)
            if back is not None and origin in apart
            else None
            for origin, back in zip(call.origins_in, backs, strict=True)
        ]
        state.deliver(plan, call, factors)


def _add_up(plan: Plan, call: Visit, each: Tensor, total: Tensor) -> bool:
    """Whether the gradients of samples are those that autograd has summed, up to rounding.

    In half precisions, half of the digits tell nothing: the norm does, of many entries.
    """
    rounding, difference = call.rounding, each.sum(0) - total
    add_up = close(each.sum(0), total, rounding)
    if add_up and rounding > FINE:
        add_up = _norm(difference) <= 10 * rounding * (_norm(each) + _norm(total))
    return add_up or _cancels(plan, call, difference)


def _norm(x: Tensor, order: int = 2) -> float:
    wide = torch.promote_types(x.dtype, torch.float32)
    return float(torch.linalg.vector_norm(x, order, dtype=wide))


def _cancels(plan: Plan, call: Visit, difference: Tensor) -> bool:
    """Whether a difference of gradients is the rounding of larger ones, which have cancelled."""
    size, seen, stack = 0.0, set(call.origins_out) - {None}, [call]
    while stack:
        own = set(stack.pop().origins_out) - {None}
        for reader in plan.calls:
            if own.isdisjoint(reader.origins_in):
                continue
            if reader.is_unbatched:
                stack += [] if seen.issuperset(reader.origins_out) else [reader]
                seen |= set(reader.origins_out)
            order = 1 if reader.rounding <= FINE else 2
            size += reader.rounding * sum(_norm(g, order) for g in reader.g_out if g is not None)
    return float(difference.abs().max()) <= 10 * size
