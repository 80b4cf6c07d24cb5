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


def _permanent(cls: type[Module]) -> type[Module]:
    """Derive a class that is always on from one of ``torch.nn``."""
    described = {"__doc__": f"``torch.nn.{cls.__name__}``, always on."}
    return type(f"Permanent{cls.__name__}", (_Permanent, cls), described)


PermanentDropout = _permanent(nn.Dropout)
PermanentDropout1d = _permanent(nn.Dropout1d)
PermanentDropout2d = _permanent(nn.Dropout2d)
PermanentDropout3d = _permanent(nn.Dropout3d)
PermanentAlphaDropout = _permanent(nn.AlphaDropout)
PermanentFeatureAlphaDropout = _permanent(nn.FeatureAlphaDropout)
PermanentRReLU = _permanent(nn.RReLU)


class PermanentAttention(_Permanent, ScaledDotProductAttention):
    """``ScaledDotProductAttention``, with dropout in any mode."""


# The class that is always on, for each that follows the training mode.
ALWAYS_ON: dict[type[Module], type[Module]] = {
    cls.__bases__[-1]: cls for cls in _Permanent.__subclasses__()
}
