"""What each position of a sample (token) contributes to inner products with its gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Parameter, RMSNorm

from backpack.core.engine import call_products
from backpack.core.engine.products import Products
from backpack.core.engine.uses import Use
from backpack.core.record.module_state import describe
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension

# Entries of the outputs' tangents that are kept at once.
BLOCK_ENTRIES = 2**24


class PositionProducts(FirstOrderBackpropExtension):
    r"""Inner products of individual gradients with directions, position by position.

    A layer that treats positions alike has the gradient :math:`g_n = \sum_t J_{nt}^\top s_{nt}`,
    with what arrives at its output and the Jacobian of that with respect to the parameter. The
    terms of :math:`d_q^\top g_n = \sum_t s_{nt}^\top (J_{nt} d_q)` are kept apart.

    :Shape: ``[Q, N, R, T1, T2, ...]``: the positions of a layer with the output ``[N, T1, T2, ...,
        O]``, of which the first R may be a part of the axis of samples, ``[N·R, T1, T2, ..., O]``.
        R is 1 where there are none, and also where there are no others: ``[N·T, O]`` has ``1, T``.
    :Scale: That of the loss.
    :Cost: A forward pass of the layer for each direction.
    """

    needs = ("factored",)

    def __init__(self, directions: Mapping[Parameter, Tensor]):
        """Store the directions: ``[Q, *p]`` for each parameter."""
        super().__init__("position_products")
        self._directions = directions

    def extract(self, products: Products) -> Tensor:
        """Return ``[Q, N, R, T1, T2, ...]``, summed over the uses of the parameter.

        Raises:
            NotImplementedError: If the parameter belongs to another layer, or is used at different
                positions.
        """
        directions = self._directions[products.parameter]
        found = [_of_use(use, directions, products.num_samples) for use in products.uses]
        total = found[0]
        for each in found[1:]:
            both = sum_of_positions(total, each)
            if both is None:
                places = ", ".join(
                    f"{axes_of(each)} in '{use.name}' of {describe(use.call.module)}"
                    for each, use in zip(found, products.uses, strict=True)
                )
                raise NotImplementedError(
                    f"token_scores: a parameter {list(products.parameter.shape)} is used at "
                    f"different positions: {places}. Leave it out (params=...)."
                )
            total = both
        return total


def axes_of(scores: Tensor) -> list[int]:
    """Return the sizes of the axes of positions of ``[Q, N, R, T1, T2, ...]``; [1] if all are 1."""
    return [size for size in scores.shape[2:] if size != 1] or [1]


def sum_of_positions(one: Tensor, other: Tensor) -> Tensor | None:
    """Add the scores of positions of two layers, if their positions are in the same order.

    They are if they have the same axes, or if one has merged axes of the other. Where some axes of
    positions are merged with the samples, they may be windows: merged, these would be in another
    order.

    Returns:
        ``[Q, N, R, T1, T2, ...]`` with all axes there are; None if the order is another one, or not
        known.
    """
    split, merged = (one, other) if one.dim() >= other.dim() else (other, one)
    if len(axes_of(split)) < len(axes_of(merged)):
        split, merged = merged, split
    fine, coarse = axes_of(split), axes_of(merged)
    same = fine == coarse
    is_merged = split.shape[2] == 1 and _ends(coarse) <= _ends(fine)
    if not (same or is_merged) or prod(fine) != prod(coarse):
        return None
    return split + merged.reshape(split.shape)


def _ends(axes: Sequence[int]) -> set[int]:
    """Return after how many positions a slice along each axis ends."""
    return {prod(axes[i:]) for i in range(len(axes))}


def _of_use(use: Use, directions: Tensor, num_samples: int) -> Tensor:
    """Return ``[Q, N, R, T1, T2, ...]`` for one use of a parameter."""
    features, cotangents = _feature_axes(use), use.factor.mat  # [1, R, *out]
    step = max(1, BLOCK_ENTRIES // max(1, cotangents.numel()))
    found = []
    for some in directions.split(step):
        (tangents,) = call_products.param_forward(use.c, use.name, some)
        products = (tangents * cotangents).flatten(-features).sum(-1)
        found.append(products.unflatten(1, (num_samples, -1)))
    whole, merged = torch.cat(found), _merged(use)
    if merged > 1 and whole.shape[2:4] == (1, merged):
        whole = whole.squeeze(2)
    return whole.unsqueeze(2) if whole.dim() == 3 else whole


def _merged(use: Use) -> int:
    """Return how many positions of a sample the axis of samples has."""
    place = use.call.place_out(0)
    return 1 if place is None else place.rows_per_sample(use.call.shape_out[0])


def _feature_axes(use: Use) -> int:
    """Return how many of the last axes are features of a position.

    Raises:
        NotImplementedError: If it is not known what a position of the layer is.
    """
    module = use.call.module
    if isinstance(module, (LayerNorm, RMSNorm)):
        return len(module.normalized_shape)
    if isinstance(module, (Embedding, Linear)):
        return 1
    raise NotImplementedError(
        f"token_scores: the positions of '{use.name}' of {describe(module)} (output "
        f"{list(use.factor.mat.shape[1:])}) are not known. Linear, Embedding, LayerNorm and "
        "RMSNorm have positions: leave other parameters out (params=...)."
    )
