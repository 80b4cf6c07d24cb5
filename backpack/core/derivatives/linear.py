"""Linear layers, ``y = x Wᵀ + b``, with any number of extra axes between batch and features."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from torch import Size, Tensor
from torch.nn import Linear, Module

from backpack.core.derivatives import shared_weight
from backpack.core.derivatives.basederivatives import BatchAxis
from backpack.core.record.registry import register
from backpack.core.record.tape import Call, bound
from backpack.core.rows import Rows
from backpack.core.types import Grads
from backpack.utils.subsampling import subsample


def positions(mat: Tensor) -> Tensor:
    """Return ``[V, N, *, O]`` as ``[V, N, T, O]``, T positions (1 without extra axes)."""
    return mat.unsqueeze(2) if mat.dim() == 3 else mat.flatten(2, -2)


@register(Linear)
class LinearDerivatives(shared_weight.SharedWeightDerivatives):
    """Derivatives of ``torch.nn.Linear``.

    Letters: n sample, t position, o output, i input feature, v vector.
    """

    params = ("weight", "bias")
    batch_axis = BatchAxis.LEADING
    kronecker_rows_are_constant = True
    kronecker_rows_are_shared = True
    squares_with_input = True

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return mat @ module.weight.T

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return mat @ module.weight

    def _get_additional_dims(self, module: Module) -> Size:
        """Return the sizes of the axes between batch and features (a name that programs use)."""
        with bound(module) as m:
            return m.input0.shape[1:-1]

    def costly_gradients(self, call: Call, wanted: Set[str]) -> tuple[str, ...]:
        """Return the weight, if there are several positions, or somebody wants its gradient.

        The sum of a single position's individual gradients takes a product, too.
        """
        return ("weight",) if len(call.shape_out[0]) > 2 or "gradient" in wanted else ()

    def repeats_output(self, call: Call) -> bool:
        """Return True."""
        return True

    def reaches_one_output(self, call: Call) -> bool:
        """Return whether there is a single position."""
        return len(call.shape_out[0]) == 2

    def kronecker_rows_are_outputs(self, call: Call) -> bool:
        """Return whether there is a single position (and no rule of a user counts it otherwise)."""
        return self.is_ours and len(call.shape_out[0]) == 2 and not call.is_unbatched

    def min_dims(self, module: Module) -> int:
        """Return 2: batch and features."""
        return 2

    def trailing_axes(self, module: Module) -> int:
        """Return 1: the features."""
        return 1

    def jacobian_is_constant(self, module: Module) -> bool:
        """Return True."""
        return True

    def _ea_jac_t_mat_jac_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        if module.input0.dim() > 2:
            return super()._ea_jac_t_mat_jac_prod(module, g_inp, g_out, mat, subsampling)
        right = self._jac_t_mat_prod(module, None, None, mat.T, subsampling)  # matᵀ J
        return self._jac_t_mat_prod(module, None, None, right.T, subsampling)

    # ------------------------------------------------------------------ parameters

    def reads(self, param_str: str, module: Any, rows: Rows) -> list[Tensor | None]:
        """Return what a parameter is multiplied with: for the weight the input."""
        if param_str != "weight":
            return [None]
        x = subsample(module.input0, subsampling=rows)
        return [x.flatten(1, -2) if x.dim() > 2 else x]

    def pairs(
        self, param_str: str, module: Any, mat: Any, rows: Rows
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return ``mat`` at each position, and the input."""
        s = mat.flatten(2, -2) if mat.dim() > 3 else mat
        return [(s, x) for x in self.reads(param_str, module, rows)]

    def kronecker_rows(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Any,
        subsampling: Rows = None,
        approximation: str | None = None,
    ) -> Tensor:
        """Sum or keep the positions: ``[V, N, *, O] -> [V, N', 1, O]``."""
        if mat.dim() > 3:
            mat = shared_weight.position_rows(positions(mat), approximation)
        return mat.unsqueeze(2)

    def kronecker_input_factors(
        self,
        param_str: str,
        module: Module,
        subsampling: Rows = None,
        approximation: str | None = None,
    ) -> list[Tensor]:
        """Return A of the input, ``[I, I]``, for the weight."""
        (x,) = self.reads(param_str, module, subsampling)
        return [] if x is None else [shared_weight.input_factor(x, approximation)]


@register("transformers.pytorch_utils.Conv1D")
class TransposedLinearDerivatives(LinearDerivatives):
    """Derivatives of ``y = x W + b``, a linear layer that stores its weight as ``[I, O]``.

    Everything about the weight is transposed; its Kronecker factors are ``[A, B]``.
    """

    kronecker_input_first = True
    squares_with_input = True

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return mat @ module.weight

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return mat @ module.weight.T

    def _param_jac_mat_prod(self, param_str: str, *args: Any) -> Any:
        module, g_inp, g_out, mat, subsampling = args
        mat = mat.mT if param_str == "weight" else mat
        return super()._param_jac_mat_prod(param_str, module, g_inp, g_out, mat, subsampling)

    def put_together(self, param_str: str, module: Any, parts: Sequence[Tensor]) -> Tensor:
        """Return ``[*, I, O]`` for the weight."""
        whole = super().put_together(param_str, module, parts)
        return whole.mT if param_str == "weight" else whole
