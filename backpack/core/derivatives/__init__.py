"""Derivatives of modules and losses, one file for each family, in one registry."""

from __future__ import annotations

from backpack.core.derivatives.automatic import (
    AutomaticDerivatives,
    FunctionDerivatives,
    MultiheadAttentionDerivatives,
)
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.bcewithlogitsloss import BCEWithLogitsLossDerivatives
from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.dropout import RandomSlopeDerivatives
from backpack.core.derivatives.elementwise import (
    CELUDerivatives,
    ElementwiseDerivatives,
    ELUDerivatives,
    LeakyReLUDerivatives,
    LogSigmoidDerivatives,
    PiecewiseLinearDerivatives,
    ReLUDerivatives,
    SELUDerivatives,
    SigmoidDerivatives,
    SmoothDerivatives,
    StraightDerivatives,
    TanhDerivatives,
)
from backpack.core.derivatives.embedding import EmbeddingBagDerivatives, EmbeddingDerivatives
from backpack.core.derivatives.functions import (
    AnyFunctionDerivatives,
    ParameterModuleDerivatives,
    ReindexingDerivatives,
    SumModuleDerivatives,
)
from backpack.core.derivatives.layer_norm import LayerNormDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.linear_maps import (
    ConstantPadDerivatives,
    LinearMapDerivatives,
    PadDerivatives,
)
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.core.derivatives.pooling import (
    AdaptiveMaxPoolNDDerivatives,
    MaxPoolNDDerivatives,
    SelectionDerivatives,
)
from backpack.core.derivatives.recurrent import (
    GRUCellDerivatives,
    GRUDerivatives,
    LSTMCellDerivatives,
    LSTMDerivatives,
    RNNCellDerivatives,
    RNNDerivatives,
)
from backpack.core.registry import REGISTRY, derivatives_of, register

__all__ = [
    "REGISTRY",
    "AdaptiveMaxPoolNDDerivatives",
    "AnyFunctionDerivatives",
    "AutomaticDerivatives",
    "BCEWithLogitsLossDerivatives",
    "BaseDerivatives",
    "BaseLossDerivatives",
    "BatchNormNdDerivatives",
    "CELUDerivatives",
    "ConstantPadDerivatives",
    "ConvNDDerivatives",
    "ConvTransposeNDDerivatives",
    "CrossEntropyLossDerivatives",
    "ELUDerivatives",
    "ElementwiseDerivatives",
    "EmbeddingBagDerivatives",
    "EmbeddingDerivatives",
    "FunctionDerivatives",
    "GRUCellDerivatives",
    "GRUDerivatives",
    "LSTMCellDerivatives",
    "LSTMDerivatives",
    "LayerNormDerivatives",
    "LeakyReLUDerivatives",
    "LinearDerivatives",
    "LinearMapDerivatives",
    "LogSigmoidDerivatives",
    "MSELossDerivatives",
    "MaxPoolNDDerivatives",
    "MultiheadAttentionDerivatives",
    "PadDerivatives",
    "ParameterModuleDerivatives",
    "PiecewiseLinearDerivatives",
    "RNNCellDerivatives",
    "RNNDerivatives",
    "RandomSlopeDerivatives",
    "ReLUDerivatives",
    "ReindexingDerivatives",
    "SELUDerivatives",
    "SelectionDerivatives",
    "SigmoidDerivatives",
    "SmoothDerivatives",
    "StraightDerivatives",
    "SumModuleDerivatives",
    "TanhDerivatives",
    "derivatives_of",
    "register",
]
