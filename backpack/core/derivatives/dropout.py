"""Dropout and its variants: an affine map of each entry, with a random slope."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import (
    AlphaDropout,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    FeatureAlphaDropout,
    Module,
    RReLU,
)

from backpack.core.derivatives.basederivatives import Rows
from backpack.core.derivatives.elementwise import PiecewiseLinearDerivatives
from backpack.core.registry import register
from backpack.utils.subsampling import subsample


@register(AlphaDropout, Dropout, Dropout1d, Dropout2d, Dropout3d, FeatureAlphaDropout, RReLU)
class RandomSlopeDerivatives(PiecewiseLinearDerivatives):
    """``y = a x + b`` with a random slope a for each entry.

    The slope is read off the autograd graph of the call: an output of zero does not tell whether
    the entry was dropped or the input was zero.
    """

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Keep the slopes, ``[*in]``."""
        (x, *_), (y,) = inputs, outputs
        if y is x:
            return {}
        (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        return {"slope": slope}

    def df(self, module: Any, subsampling: Rows) -> Tensor:
        """Slopes that were drawn; 1 if nothing was (evaluation mode)."""
        slope = module._backpack_saved.get("slope")
        if slope is None:
            slope = torch.ones_like(module.input0)
        return subsample(slope, subsampling=subsampling)
