"""What second-order quantities need: a ``backward()`` of constants times scalar losses."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Module

from backpack.core.engine.loss_terms import is_linear_in
from backpack.core.engine.plan import Plan
from backpack.core.engine.spread import words
from backpack.core.record.module_state import describe
from backpack.core.record.origins import is_foreign_function, origin
from backpack.core.record.visits import Visit
from backpack.core.types import Extension
from backpack.core.values import has_values
from backpack.utils.warning import warn

# Autograd nodes that scale, add or reshape: what a loss may pass through before backward().
LINEAR_NODES = words(
    "Add Sub Rsub Neg Sum Nansum Cumsum Mean Stack Cat View Reshape Unsafe Squeeze Unsqueeze "
    "Expand Clone ToCopy Select Slice Index Unbind Alias Permute T Where BackpackOutput"
)


def check_losses(
    plan: Plan, roots: Sequence[Tensor | GradientEdge], exts: Sequence[Extension]
) -> bool:
    """Refuse losses of several numbers; warn if ``backward()`` is not of constants times losses.

    That is an error for ``exts`` of an operator, which is the curvature of the loss that it was
    given. Return whether the ``roots``, which it was called on, are known to be such multiples.
    """
    for call in plan.losses:
        if call.shape_out[0].numel() != 1:
            raise ValueError(
                "Second-order quantities need a scalar loss, but the output of "
                f"{call!r} is not. Use reduction='mean' or 'sum', and "
                "backpack.custom_module.weighted_loss.WeightedLoss if samples have weights."
            )
        for mark in call.origins_in:
            producer = plan.producers.get(mark)
            if producer is not None and producer.call in plan.after_loss:
                raise ValueError(
                    f"{call!r} has the value of another extended loss as its input. Combine losses "
                    "outside of extended modules: their sums and multiples, also by learned "
                    "weights, need none."
                )
    losses = {o for call in plan.losses for o in call.origins_out}
    changes = [_nonlinear_node(root, losses, plan.uses) for root in roots] if losses else []
    for change in changes:
        if change is not None:
            names = ", ".join(describe(call.module) for call in plan.losses)
            if any(ext.is_of_operator for ext in exts):
                raise ValueError(
                    f"The loss makes more of {names} than a sum of multiples ({change}): the "
                    f"curvature would be that of {names} alone. Compute all terms of a loss of "
                    "your own by functions, without modules inside (F.cross_entropy), and leave "
                    "penalties of parameters out: A.damped(c) adds that of 0.5 * c * "
                    "p.square().sum()."
                )
            warn(
                f"backward() was called on a loss that was modified after {names} ({change}): "
                "second-order quantities are those of the extended losses alone, multiplied "
                "with the derivative of the modified loss (where gradients enter a Hessian, "
                "they are those of the modified loss). Add the curvature of a penalty by "
                "hand (0.5 * c * p.square().sum() adds c to the diagonal), and make any other "
                "change a part of the loss module.",
            )
    return bool(changes) and not any(changes)


def _nonlinear_node(
    root: Tensor | GradientEdge, losses: set[Any], params: Collection[Tensor]
) -> str | None:
    """Find an operation between the losses and ``root`` that is not a sum of constant multiples.

    Constant is what neither the network nor its parameters have a part in, such as learned weights
    of tasks: it enters no second derivative with respect to one parameter of the network.
    """
    start = root.grad_fn if isinstance(root, Tensor) else root.node
    if start is None or origin(root) in losses:
        return None
    # those that functions have computed, for torch.func.functional_call, have no leaf of their own
    computed = {(p.grad_fn, p.output_nr) for p in params if p.grad_fn is not None}
    stack, seen = [(start, root.output_nr)], set()
    while stack:
        node, slot = stack.pop()
        marks: Any = node.metadata
        if node in seen or marks.get(("backpack", slot)) in losses:
            continue
        seen.add(node)
        above = [(parent, nr) for parent, nr in node.next_functions if parent is not None]
        parents = [one for one in above if not _is_constant(one, params, computed)]
        if above and not parents:
            continue
        name = node.name().partition("Backward")[0]
        inputs = [i for i, one in enumerate(node.next_functions) if one in parents]
        is_sum = name in LINEAR_NODES or name.startswith("View")
        if not (is_sum or is_linear_in(name, inputs)):
            return "a parameter" if hasattr(node, "variable") else node.name()
        stack += parents
    return None


def _is_constant(
    start: tuple[Any, int], params: Collection[Tensor], computed: Set[tuple[Any, int]]
) -> bool:
    """Whether a gradient function leads to no recorded call, nor to ``params`` (or their nodes)."""
    stack, seen = [start], set()
    while stack:
        node, slot = stack.pop()
        if is_foreign_function(node) or ("backpack", slot) in node.metadata:
            return False
        if getattr(node, "variable", None) in params or (node, slot) in computed:
            return False
        above = [(parent, nr) for parent, nr in node.next_functions if parent is not None]
        stack += [one for one in above if one not in seen]
        seen.update(above)
    return True


def loss_scale(call: Visit) -> Tensor:
    """Return the constant that the loss was multiplied with before ``backward()``: ``[]``.

    The rule of a loss with several outputs multiplies each with its own.
    """
    if len(call.g_out) > 1:
        return torch.ones_like(call.outputs[0])
    (scale,) = call.g_out
    assert scale is not None
    return scale.reshape(())


def root_of_scale(call: Visit, savefields: str) -> Tensor | None:
    """Return :func:`root_of_factor` for the constant factor of a loss."""
    return root_of_factor(loss_scale(call), call.module, savefields)


def root_of_factor(scale: Tensor, loss: Module, savefields: str) -> Tensor | None:
    """Return the root of what a loss was multiplied with; None for 1, a ValueError if it is < 0."""
    value = float(scale) if has_values(scale) else None
    if value is not None and value < 0:
        raise ValueError(
            f"{savefields}: the loss {describe(loss)} was multiplied with a negative "
            f"number ({value:g}). Its curvature has no square root."
        )
    return None if value == 1 and not scale.requires_grad else scale.sqrt()
