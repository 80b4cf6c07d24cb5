"""Derivatives of modules and losses, one file for each family, in one registry."""

from __future__ import annotations

# Importing a family registers its rules.
from backpack.core.derivatives import (  # noqa: F401
    along_axis,
    attention,
    automatic,
    automatic_loss,
    batchnorm_nd,
    conv_transposend,
    convnd,
    crossentropyloss,
    dropout,
    elementwise,
    elementwise_losses,
    embedding,
    functions,
    linear,
    linear_maps,
    margin_losses,
    multihead_attention,
    normalization,
    pooling,
    recurrent,
    unknown_module,
    weighted_loss,
)
from backpack.core.derivatives.attention import ScaledDotProductAttentionDerivatives
from backpack.core.derivatives.automatic import AutomaticDerivatives, RefusedDerivatives
from backpack.core.derivatives.automatic_loss import AutomaticLossDerivatives, CTCLossDerivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.check import check_rule
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.elementwise import ElementwiseDerivatives, PiecewiseLinearDerivatives
from backpack.core.derivatives.elementwise_losses import ElementwiseLossDerivatives
from backpack.core.derivatives.embedding import EmbeddingBagDerivatives, EmbeddingDerivatives
from backpack.core.derivatives.function_derivatives import FunctionDerivatives
from backpack.core.derivatives.functions import ParameterModuleDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.derivatives.multihead_attention import MultiheadAttentionDerivatives
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.derivatives.unknown_module import UnknownModuleDerivatives
from backpack.core.derivatives.weighted_loss import WeightedLossDerivatives
from backpack.core.record.registry import REGISTRY, derivatives_of, register

from backpack.core.derivatives import aliases  # isort: skip  # of what is registered by now

__all__ = [
    "REGISTRY",
    "AutomaticDerivatives",
    "AutomaticLossDerivatives",
    "BaseDerivatives",
    "BaseLossDerivatives",
    "BatchAxis",
    "BatchNormNdDerivatives",
    "CTCLossDerivatives",
    "ConvNDDerivatives",
    "CrossEntropyLossDerivatives",
    "ElementwiseDerivatives",
    "ElementwiseLossDerivatives",
    "EmbeddingBagDerivatives",
    "EmbeddingDerivatives",
    "FunctionDerivatives",
    "LinearDerivatives",
    "MultiheadAttentionDerivatives",
    "ParameterModuleDerivatives",
    "PiecewiseLinearDerivatives",
    "RefusedDerivatives",
    "ScaledDotProductAttentionDerivatives",
    "UnknownModuleDerivatives",
    "WeightedLossDerivatives",
    "aliases",
    "check_rule",
    "derivatives_of",
    "register",
]


def __getattr__(name: str) -> type:
    """Find the class of a rule by its name, in whatever file it is."""
    for rule in REGISTRY.values():
        if type(rule).__name__ == name:
            return type(rule)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
