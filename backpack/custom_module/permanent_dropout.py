"""Dropout that ``eval()`` does not switch off, like ``functional.dropout(x, training=True)``."""

from __future__ import annotations

from typing import Any

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

from backpack.custom_module.attention import ScaledDotProductAttention


class _Permanent(Module):
    """Stays in training mode."""

    def train(self, mode: bool = True) -> Any:
        """Ignore the mode."""
        return super().train(True)


class PermanentDropout(_Permanent, Dropout):
    """``torch.nn.Dropout``, always on."""


class PermanentDropout1d(_Permanent, Dropout1d):
    """``torch.nn.Dropout1d``, always on."""


class PermanentDropout2d(_Permanent, Dropout2d):
    """``torch.nn.Dropout2d``, always on."""


class PermanentDropout3d(_Permanent, Dropout3d):
    """``torch.nn.Dropout3d``, always on."""


class PermanentAlphaDropout(_Permanent, AlphaDropout):
    """``torch.nn.AlphaDropout``, always on."""


class PermanentFeatureAlphaDropout(_Permanent, FeatureAlphaDropout):
    """``torch.nn.FeatureAlphaDropout``, always on."""


class PermanentRReLU(_Permanent, RReLU):
    """``torch.nn.RReLU``, always random."""


class PermanentAttention(_Permanent, ScaledDotProductAttention):
    """``ScaledDotProductAttention``, with dropout in any mode."""


# The class that is always on, for each that follows the training mode.
ALWAYS_ON: dict[type[Module], type[Module]] = {
    cls.__bases__[-1]: cls for cls in _Permanent.__subclasses__()
}
