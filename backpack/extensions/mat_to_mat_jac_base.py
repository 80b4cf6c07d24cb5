"""Module extensions whose quantity is a stack of columns ``[V, N, *]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.extensions.module_extension import ModuleExtension

if TYPE_CHECKING:
    from backpack.extensions.backprop_extension import BackpropExtension


class MatToJacMat(ModuleExtension):
    """Passes columns on with the transposed Jacobian, ``Jᵀ mat``."""

    def __init__(self, derivatives: BaseDerivatives, params: Sequence[str] | None = None):
        super().__init__(params)
        self.derivatives = derivatives
        alone = type(self).backpropagate is MatToJacMat.backpropagate
        self.is_jacobian = alone and not self._params

    def backpropagate(
        self,
        ext: BackpropExtension,
        module: Module,
        g_inp: Sequence[Any],
        g_out: Sequence[Any],
        bpQuantities: Any,
    ) -> Any:
        """Apply the transposed Jacobian: ``[V, N, *out] -> [V, N, *in]``, to each of a list.

        For several inputs, the result is a tuple; None stays None.
        """
        if bpQuantities is None:
            return None
        if isinstance(bpQuantities, list):
            return [self.backpropagate(ext, module, g_inp, g_out, mat) for mat in bpQuantities]
        return self.derivatives.jac_t_mat_prod(
            module, g_inp, g_out, bpQuantities, subsampling=ext.get_subsampling()
        )
