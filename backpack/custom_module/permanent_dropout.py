"""Dropout that ``eval()`` does not switch off, like ``functional.dropout(x, training=True)``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import Module

from backpack.custom_module.attention import ScaledDotProductAttention


class _Permanent(Module):
    """Stays in training mode."""

    def train(self, mode: bool = True) -> Any:
        """Ignore the mode."""
        return super().train(True)


class PermanentDropout(_Permanent, nn.Dropout):
    """``torch.nn.Dropout``, always on."""


class PermanentDropout1d(_Permanent, nn.Dropout1d):
    """``torch.nn.Dropout1d``, always on."""


class PermanentDropout2d(_Permanent, nn.Dropout2d):
    """``torch.nn.Dropout2d``, always on."""


class PermanentDropout3d(_Permanent, nn.Dropout3d):
    """``torch.nn.Dropout3d``, always on."""


class PermanentAlphaDropout(_Permanent, nn.AlphaDropout):
    """``torch.nn.AlphaDropout``, always on."""


class PermanentFeatureAlphaDropout(_Permanent, nn.FeatureAlphaDropout):
    """``torch.nn.FeatureAlphaDropout``, always on."""


class PermanentRReLU(_Permanent, nn.RReLU):
    """``torch.nn.RReLU``, always random."""


class PermanentAttention(_Permanent, ScaledDotProductAttention):
    """``ScaledDotProductAttention``, with dropout in any mode."""


# The class that is always on, for each that follows the training mode.
ALWAYS_ON: dict[type[Module], type[Module]] = {
    cls.__bases__[-1]: cls for cls in _Permanent.__subclasses__()
}
