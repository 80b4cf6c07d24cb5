"""Dropout and its variants: an affine map of each entry, with a random slope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from backpack.core.derivatives.elementwise import PiecewiseLinearDerivatives
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.record.context import Context
from backpack.core.record.lookup import geometry_of, part_of
from backpack.core.record.origins import is_output
from backpack.core.record.registry import register
from backpack.custom_module.stochastic_depth import StochasticDepth


def _nodes_of(x: Tensor) -> list[Any]:
    """List the node of a tensor and those above that it depends on alone.

    A module that works in place was recorded with a copy of what the nodes of the output lead to.
    """
    nodes = [torch.autograd.graph.get_gradient_edge(x).node]
    while len(nodes[-1].next_functions) == 1:
        (parent, _) = nodes[-1].next_functions[0]
        if parent is None:
            break
        nodes.append(parent)
    return nodes


def _pull_back(node: Any, grad: Tensor, targets: Sequence[Any]) -> Tensor:
    """Apply the nodes between two tensors by hand: autograd would run the hooks on them."""
    grads = grad if is_output(node) else node(grad)
    grads = grads if isinstance(grads, tuple) else (grads,)
    parts = [
        g if parent in targets else _pull_back(parent, g, targets)
        for (parent, _), g in zip(node.next_functions, grads, strict=True)
        if parent is not None and g is not None
    ]
    return sum(parts)  # type: ignore[return-value]


@register(nn.AlphaDropout, nn.Dropout, nn.RReLU, StochasticDepth)
class RandomSlopeDerivatives(PiecewiseLinearDerivatives):
    """``y = a x + b`` with a random slope a for each entry.

    The slope is read off the autograd graph of the call: an output of zero does not tell whether
    the entry was dropped or the input was zero.
    """

    def saved(
        self, module: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Keep the slopes, ``[*in]``."""
        (x, *_), (y,) = inputs, outputs
        if y is x:
            return {}
        slope = _pull_back(y.grad_fn, torch.ones_like(y), _nodes_of(x))
        return {"slope": slope if y._base is None else part_of(slope, geometry_of(y))}

    def df(self, c: Context) -> Tensor:
        """Slopes that were drawn; 1 if nothing was (evaluation mode)."""
        slope, call = c.saved.get("slope"), c.call
        if slope is None:
            return torch.ones_like(c.x)
        if call.is_unbatched:
            slope = slope.unsqueeze(0).expand(call.copies, *slope.shape)
        elif not call.samples_come_first:
            place: Any = call.place_in(0)
            slope = place.to_canonical(slope)
        return c.select(slope)


@register(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
class RandomChannelDerivatives(RandomSlopeDerivatives):
    """Dropout of whole channels: the first axis is that of the batch."""

    batch_axis = BatchAxis.FIXED
