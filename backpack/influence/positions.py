"""What each position of a sample (token) contributes to inner products with its gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Parameter, RMSNorm

from backpack.core.engine import call_products
from backpack.core.engine.products import Products, Use
from backpack.core.record.calls import describe
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension

# Entries of the outputs' tangents that are kept at once.
BLOCK_ENTRIES = 2**24


class PositionProducts(FirstOrderBackpropExtension):
    r"""Inner products of individual gradients with directions, position by position.

    A layer that treats positions alike has the gradient :math:`g_n = \sum_t J_{nt}^\top s_{nt}`,
    with what arrives at its output and the Jacobian of that with respect to the parameter. The
    terms of :math:`d_q^\top g_n = \sum_t s_{nt}^\top (J_{nt} d_q)` are kept apart.

    :Shape: ``[Q, N, T]``
    :Scale: That of the loss.
    :Cost: A forward pass of the layer for each direction.
    """

    needs = ("factored",)

    def __init__(self, directions: Mapping[Parameter, Tensor]):
        """Store the directions.

        Args:
            directions: ``[Q, *p]`` for each parameter.
        """
        super().__init__("position_products")
        self._directions = directions

    def extract(self, products: Products) -> Tensor:
        """Return ``[Q, N, T]``, summed over the uses of the parameter.

        Raises:
            NotImplementedError: If the parameter belongs to another layer, or is used with
                different numbers of positions.
        """
        directions = self._directions[products.parameter]
        found = [_of_use(use, directions, products.num_samples) for use in products.uses]
        if len({each.shape for each in found}) > 1:
            places = ", ".join(
                f"{each.shape[2]} in '{use.name}' of {describe(use.call.module)}"
                for each, use in zip(found, products.uses, strict=True)
            )
            raise NotImplementedError(
                f"token_scores: a parameter {list(products.parameter.shape)} is used at different "
                f"numbers of positions: {places}. Leave it out (params=...)."
            )
        return torch.stack(found).sum(0)


def _of_use(use: Use, directions: Tensor, num_samples: int) -> Tensor:
    """Return ``[Q, N, T]`` for one use of a parameter."""
    features, cotangents = _feature_axes(use), use.factor.mat  # [1, R, *out]
    step = max(1, BLOCK_ENTRIES // max(1, cotangents.numel()))
    found = []
    for some in directions.split(step):
        (tangents,) = call_products.param_forward(use.c, use.name, some)
        products = (tangents * cotangents).flatten(-features).sum(-1)
        found.append(products.reshape(len(some), num_samples, -1))
    return torch.cat(found)


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
