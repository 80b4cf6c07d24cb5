"""Derivatives of modules and losses, one file for each family, in one registry."""

from __future__ import annotations

from backpack.core.derivatives.along_axis import (
    GLUDerivatives,
    LogSoftmaxDerivatives,
    Softmax2dDerivatives,
    SoftmaxDerivatives,
    SoftminDerivatives,
)
from backpack.core.derivatives.attention import (
    MultiheadAttentionDerivatives,
    ScaledDotProductAttentionDerivatives,
)
from backpack.core.derivatives.automatic import (
    AutomaticDerivatives,
    FunctionDerivatives,
    RefusedDerivatives,
)
from backpack.core.derivatives.automatic_loss import AutomaticLossDerivatives, CTCLossDerivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.bcewithlogitsloss import BCEWithLogitsLossDerivatives
from backpack.core.derivatives.bilinear import BilinearDerivatives
from backpack.core.derivatives.check import check_rule
from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.crossentropyloss import (
    CrossEntropyLossDerivatives,
    NLLLossDerivatives,
)
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
from backpack.core.derivatives.elementwise_losses import (
    BCELossDerivatives,
    ElementwiseLossDerivatives,
    GaussianNLLLossDerivatives,
    HuberLossDerivatives,
    LogisticLossDerivatives,
    MultiLabelSoftMarginLossDerivatives,
    PiecewiseLinearLossDerivatives,
    PoissonNLLLossDerivatives,
    SoftMarginLossDerivatives,
)
from backpack.core.derivatives.embedding import EmbeddingBagDerivatives, EmbeddingDerivatives
from backpack.core.derivatives.functions import (
    AnyFunctionDerivatives,
    ParameterModuleDerivatives,
    ReindexingDerivatives,
    SumModuleDerivatives,
)
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.linear_maps import (
    ConstantPadDerivatives,
    LinearMapDerivatives,
    PadDerivatives,
)
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.derivatives.margin_losses import (
    MultiLabelMarginLossDerivatives,
    MultiMarginLossDerivatives,
)
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.core.derivatives.normalization import (
    GroupNormDerivatives,
    InstanceNormNdDerivatives,
    LayerNormDerivatives,
    NormalizationDerivatives,
    RMSNormDerivatives,
)
from backpack.core.derivatives.pooling import (
    AdaptiveMaxPoolNDDerivatives,
    MaxPoolNDDerivatives,
    SelectionDerivatives,
)
from backpack.core.derivatives.prelu import PReLUDerivatives
from backpack.core.derivatives.recurrent import (
    GRUCellDerivatives,
    GRUDerivatives,
    LSTMCellDerivatives,
    LSTMDerivatives,
    RNNCellDerivatives,
    RNNDerivatives,
)
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.derivatives.unknown_module import UnknownModuleDerivatives
from backpack.core.derivatives.upsample import UpsampleDerivatives
from backpack.core.derivatives.weighted_loss import WeightedLossDerivatives
from backpack.core.record.registry import REGISTRY, derivatives_of, register

from backpack.core.derivatives import aliases  # isort: skip  # of what is registered by now

__all__ = [
    "REGISTRY",
    "AdaptiveMaxPoolNDDerivatives",
    "AnyFunctionDerivatives",
    "AutomaticDerivatives",
    "AutomaticLossDerivatives",
    "BCELossDerivatives",
    "BCEWithLogitsLossDerivatives",
    "BaseDerivatives",
    "BaseLossDerivatives",
    "BatchAxis",
    "BatchNormNdDerivatives",
    "BilinearDerivatives",
    "CELUDerivatives",
    "CTCLossDerivatives",
    "ConstantPadDerivatives",
    "ConvNDDerivatives",
    "ConvTransposeNDDerivatives",
    "CrossEntropyLossDerivatives",
    "ELUDerivatives",
    "ElementwiseDerivatives",
    "ElementwiseLossDerivatives",
    "EmbeddingBagDerivatives",
    "EmbeddingDerivatives",
    "FunctionDerivatives",
    "GLUDerivatives",
    "GRUCellDerivatives",
    "GRUDerivatives",
    "GaussianNLLLossDerivatives",
    "GroupNormDerivatives",
    "HuberLossDerivatives",
    "InstanceNormNdDerivatives",
    "LSTMCellDerivatives",
    "LSTMDerivatives",
    "LayerNormDerivatives",
    "LeakyReLUDerivatives",
    "LinearDerivatives",
    "LinearMapDerivatives",
    "LogSigmoidDerivatives",
    "LogSoftmaxDerivatives",
    "LogisticLossDerivatives",
    "MSELossDerivatives",
    "MaxPoolNDDerivatives",
    "MultiLabelMarginLossDerivatives",
    "MultiLabelSoftMarginLossDerivatives",
    "MultiMarginLossDerivatives",
    "MultiheadAttentionDerivatives",
    "NLLLossDerivatives",
    "NormalizationDerivatives",
    "PReLUDerivatives",
    "PadDerivatives",
    "ParameterModuleDerivatives",
    "PiecewiseLinearDerivatives",
    "PiecewiseLinearLossDerivatives",
    "PoissonNLLLossDerivatives",
    "RMSNormDerivatives",
    "RNNCellDerivatives",
    "RNNDerivatives",
    "RandomSlopeDerivatives",
    "ReLUDerivatives",
    "RefusedDerivatives",
    "ReindexingDerivatives",
    "SELUDerivatives",
    "ScaledDotProductAttentionDerivatives",
    "SelectionDerivatives",
    "SigmoidDerivatives",
    "SmoothDerivatives",
    "SoftMarginLossDerivatives",
    "Softmax2dDerivatives",
    "SoftmaxDerivatives",
    "SoftminDerivatives",
    "StraightDerivatives",
    "SumModuleDerivatives",
    "TanhDerivatives",
    "UnknownModuleDerivatives",
    "UpsampleDerivatives",
    "WeightedLossDerivatives",
    "aliases",
    "check_rule",
    "derivatives_of",
    "register",
]
