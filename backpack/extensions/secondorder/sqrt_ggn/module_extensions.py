"""Module extensions for ``module_exts`` of a user's own second-order extension.

They propagate a factor S of the loss Hessian, ``[V, N, *out]``: a loss starts it, every module
passes it on with its transposed Jacobian. All but the base classes are made of the registry's
derivatives, and importable from modules of this package: see ``FOR_MODULES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import Module

from backpack.core.derivatives.aliases import publish
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.engine.modified_losses import root_of_factor
from backpack.core.record.module_state import describe
from backpack.core.record.registry import REGISTRY
from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.extensions.mat_to_mat_jac_base import MatToJacMat
from backpack.extensions.secondorder.hbp import LossHessianStrategy

if TYPE_CHECKING:
    from backpack.extensions.backprop_extension import BackpropExtension

PACKAGE = "backpack.extensions.secondorder.sqrt_ggn"


class SqrtGGNBaseModule(MatToJacMat):
    """Passes the factor on, and applies the Jacobians of parameters to it.

    A method for each name in ``params`` gives ``[V, N, *p]``, the products of each sample; a
    subclass may have another.
    """

    def __init__(self, derivatives: BaseDerivatives, params: Sequence[str] | None = None):
        for name in params or ():
            if not hasattr(self, name):
                setattr(self, name, partial(self._products, name))
        super().__init__(derivatives, params)

    def _products(
        self,
        param_str: str,
        ext: BackpropExtension,
        module: Module,
        g_inp: Sequence[Any],
        g_out: Sequence[Any],
        bpQuantities: Any,
    ) -> Tensor:
        return self.derivatives.param_mjp(
            param_str,
            module,
            g_inp,
            g_out,
            bpQuantities,
            sum_batch=False,
            subsampling=ext.get_subsampling(),
        )


class SqrtGGNBaseLoss(SqrtGGNBaseModule):
    """Starts the factor of the loss Hessian, as the extension says.

    The extension has methods ``get_loss_hessian_strategy()``, which returns
    ``LossHessianStrategy.EXACT`` or ``SAMPLING``, and for the latter ``get_num_mc_samples()``.
    """

    derivatives: BaseLossDerivatives

    def backpropagate(
        self,
        ext: Any,
        module: Module,
        g_inp: Sequence[Any],
        g_out: Sequence[Any],
        bpQuantities: Any,
    ) -> Any:
        """Return the factor: ``[C, N, *in]`` if it is exact, ``[M, N, *in]`` if it is sampled.

        The root of the constant that the loss was multiplied with, ``g_out``, is part of it.

        Raises:
            ValueError: If the strategy is no other, or the constant is negative.
        """
        strategy, rows = ext.get_loss_hessian_strategy(), ext.get_subsampling()
        if strategy == LossHessianStrategy.EXACT:
            factor = self.derivatives.sqrt_hessian(module, g_inp, g_out, subsampling=rows)
        elif strategy == LossHessianStrategy.SAMPLING:
            factor = self.derivatives.sqrt_hessian_sampled(
                module, g_inp, g_out, mc_samples=ext.get_num_mc_samples(), subsampling=rows
            )
        else:
            raise ValueError(
                f"{ext!r}: the factor of {describe(module)} is LossHessianStrategy.EXACT or "
                f"SAMPLING, got {strategy!r} from get_loss_hessian_strategy()."
            )
        root = root_of_factor(g_out[0], module, ext.savefield)
        return factor if root is None else factor * root


# For modules of this package the module classes whose derivatives are passed on with.
FOR_MODULES: dict[str, tuple[type[Module], ...]] = {
    "activations": (
        nn.ELU,
        nn.LeakyReLU,
        nn.LogSigmoid,
        nn.ReLU,
        nn.SELU,
        nn.Sigmoid,
        nn.Tanh,
    ),
    "custom_module": (ScaleModule, SumModule),
    "dropout": (nn.Dropout,),
    "flatten": (nn.Flatten,),
    "losses": (nn.CrossEntropyLoss, nn.MSELoss),
    "pad": (Pad,),
    "padding": (nn.ZeroPad2d,),
    "pooling": (
        nn.AvgPool1d,
        nn.AvgPool2d,
        nn.AvgPool3d,
        nn.MaxPool1d,
        nn.MaxPool2d,
        nn.MaxPool3d,
    ),
    "slicing": (Slicing,),
}


def _made(module: str, module_class: type[Module]) -> type[SqrtGGNBaseModule]:
    """Make a class for one module class, whose instances are made without arguments."""
    rule = REGISTRY[module_class]
    base: Any = SqrtGGNBaseLoss if isinstance(rule, BaseLossDerivatives) else SqrtGGNBaseModule

    def __init__(self: SqrtGGNBaseModule) -> None:
        base.__init__(self, rule)

    return type(
        f"SqrtGGN{module_class.__name__}",
        (base,),
        {
            "__init__": __init__,
            "__module__": f"{PACKAGE}.{module}",
            "__doc__": f"Propagates the factor through ``{module_class.__name__}``.",
        },
    )


publish(
    PACKAGE,
    {
        "base": {"SqrtGGNBaseModule": SqrtGGNBaseModule},
        **{
            module: {made.__name__: made for made in (_made(module, cls) for cls in classes)}
            for module, classes in FOR_MODULES.items()
        },
    },
)
