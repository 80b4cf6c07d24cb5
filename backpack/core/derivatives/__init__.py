"""Derivatives of modules and losses, one file for each family, in one registry."""

from __future__ import annotations

from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.bcewithlogitsloss import BCEWithLogitsLossDerivatives
from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.dropout import RandomSlopeDerivatives
from backpack.core.derivatives.elementwise import (
    ElementwiseDerivatives,
    ELUDerivatives,
    LeakyReLUDerivatives,
    LogSigmoidDerivatives,
    PiecewiseLinearDerivatives,
    ReLUDerivatives,
    SELUDerivatives,
    SigmoidDerivatives,
    TanhDerivatives,
)
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
from backpack.core.derivatives.reindexing import (
    PermuteDerivatives,
    SlicingDerivatives,
    SumModuleDerivatives,
)
from backpack.core.registry import REGISTRY, derivatives_of, register

__all__ = [
    "REGISTRY",
    "AdaptiveMaxPoolNDDerivatives",
    "BCEWithLogitsLossDerivatives",
    "BaseDerivatives",
    "BaseLossDerivatives",
    "BatchNormNdDerivatives",
    "ConstantPadDerivatives",
    "ConvNDDerivatives",
    "ConvTransposeNDDerivatives",
    "CrossEntropyLossDerivatives",
    "ELUDerivatives",
    "ElementwiseDerivatives",
    "LeakyReLUDerivatives",
    "LinearDerivatives",
    "LinearMapDerivatives",
    "LogSigmoidDerivatives",
    "MSELossDerivatives",
    "MaxPoolNDDerivatives",
    "PadDerivatives",
    "PermuteDerivatives",
    "PiecewiseLinearDerivatives",
    "RandomSlopeDerivatives",
    "ReLUDerivatives",
    "SELUDerivatives",
    "SelectionDerivatives",
    "SigmoidDerivatives",
    "SlicingDerivatives",
    "SumModuleDerivatives",
    "TanhDerivatives",
    "derivatives_of",
    "register",
]
