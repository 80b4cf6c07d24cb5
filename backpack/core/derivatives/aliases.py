"""Names under which other programs import derivatives: a table, and modules made of it.

Each name is the class that the registry holds for a module class. There is no file for a module of
the table: it is made when this package is imported, and found in ``sys.modules`` from then on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

from torch import nn

from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.lossbase import BaseLossDerivatives, is_loss, is_nll
from backpack.core.record.registry import REGISTRY
from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing

# Those whose names are made of the module's: ``relu.ReLUDerivatives``.
NAMED_ALIKE = (
    *(nn.ELU, nn.LeakyReLU, nn.LogSigmoid, nn.ReLU, nn.SELU, nn.Sigmoid, nn.Tanh),
    *(nn.Dropout, nn.Flatten, nn.ZeroPad2d, Pad, Permute, Slicing),
    *(nn.LSTM, nn.RNN, nn.MSELoss, nn.Bilinear, nn.PReLU, nn.Upsample),
)
# ``conv1d.Conv1DDerivatives`` and the like.
OF_EACH_DIMENSION = {
    **{"avgpool": "AvgPool", "maxpool": "MaxPool"},
    **{"conv": "Conv", "conv_transpose": "ConvTranspose"},
}
SERVED: dict[str, dict[str, type[nn.Module]]] = {
    **{each.__name__.lower(): {f"{each.__name__}Derivatives": each} for each in NAMED_ALIKE},
    **{
        f"{file}{n}d": {f"{kind}{n}DDerivatives": getattr(nn, f"{kind}{n}d")}
        for file, kind in OF_EACH_DIMENSION.items()
        for n in (1, 2, 3)
    },
    "bcewithlogitsloss": {
        "BCELossWithLogitsDerivatives": nn.BCEWithLogitsLoss,
        "BCEWithLogitsLossDerivatives": nn.BCEWithLogitsLoss,
    },
    "scale_module": {"ScaleModuleDerivatives": ScaleModule},
    "sum_module": {"SumModuleDerivatives": SumModule},
}


def publish(package: str, table: Mapping[str, Mapping[str, Any]]) -> None:
    """Make names importable from modules of a package, whether these have a file or not.

    The package is being imported; the table has, for each module, its names and what they are.
    """
    for name, values in table.items():
        qualified = f"{package}.{name}"
        module = sys.modules.get(qualified)
        if module is None:
            module = sys.modules[qualified] = module_from_spec(ModuleSpec(qualified, None))
            setattr(sys.modules[package], name, module)
        vars(module).update(values)


publish(
    "backpack.core.derivatives",
    {
        file: {name: type(REGISTRY[module_class]) for name, module_class in names.items()}
        for file, names in SERVED.items()
    },
)
# What rules for 1.7.1 derive from.
publish(
    "backpack.core.derivatives",
    {
        "basederivatives": {
            "BaseParameterDerivatives": BaseDerivatives,
            "BaseLossDerivatives": BaseLossDerivatives,
        }
    },
)
publish("backpack.utils", {"module_classification": {"is_loss": is_loss, "is_nll": is_nll}})
