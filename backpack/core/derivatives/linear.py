"""Linear layers, ``y = x Wᵀ + b``, with any number of extra axes between batch and features."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Linear, Module

from backpack.core.derivatives import shared_weight
from backpack.core.derivatives.basederivatives import BaseDerivatives, BatchAxis, Grads, Rows
from backpack.core.registry import register
from backpack.utils.subsampling import subsample


def positions(mat: Tensor) -> Tensor:
    """Return ``[V, N, *, O]`` as ``[V, N, T, O]``, T positions (1 without extra axes)."""
    return mat.reshape(*mat.shape[:2], -1, mat.shape[-1])


def _input(param_str: str, module: Any, subsampling: Rows) -> Tensor | None:
    """Return what a parameter is multiplied with: for the weight the input, ``[N, T, I]``."""
    if param_str != "weight":
        return None
    return positions(subsample(module.input0, subsampling=subsampling).unsqueeze(0)).squeeze(0)


@register(Linear)
class LinearDerivatives(BaseDerivatives):
    """Derivatives of ``torch.nn.Linear``.

    Letters: n sample, t position, o output, i input feature, v vector.
    """

    params = ("weight", "bias")
    batch_axis = BatchAxis.LEADING
    kronecker_rows_are_constant = True

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return mat @ module.weight.T

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return mat @ module.weight

    def min_dims(self, module: Module) -> int:
        """Return 2: batch and features."""
        return 2

    def trailing_axes(self, module: Module) -> int:
        """Return 1: the features."""
        return 1

    def jacobian_is_constant(self, module: Module) -> bool:
        """Return True."""
        return True

    # ------------------------------------------------------------------ parameters

    def _weight_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return self._jac_p_mat_prod("weight", module, mat, subsampling)

    def _bias_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return self._jac_p_mat_prod("bias", module, mat, subsampling)

    def _jac_p_mat_prod(
        self, param_str: str, module: Any, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        out = subsample(module.output, subsampling=subsampling)
        x, num_t = _input(param_str, module, subsampling), out.shape[1:-1].numel()
        product = shared_weight.jac_mat_prod(mat, x, out.shape[0], num_t)
        return product.reshape(-1, *out.shape)

    def _weight_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        x = _input("weight", module, subsampling)
        return shared_weight.mjp(positions(mat), x, sum_batch)

    def _bias_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        return shared_weight.mjp(positions(mat), None, sum_batch)

    def param_mjp_batch_square(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Any,
        subsampling: Rows = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Sum the squares of ``J_pᵀ mat`` over V, with weights: ``[V, *out] -> [N, *p]``."""
        x = _input(param_str, module, subsampling)
        return shared_weight.batch_square(positions(mat), x, weights)

    def param_mjp_square_sum(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Any,
        subsampling: Rows = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Sum the squares of ``J_pᵀ mat`` over V and N, with weights: ``[V, *out] -> [*p]``."""
        x = _input(param_str, module, subsampling)
        return shared_weight.square_sum(positions(mat), x, weights)

    def param_mjp_square_norm(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Any,
        subsampling: Rows = None,
    ) -> Tensor:
        """Squared norms of each sample's ``J_pᵀ mat``, summed over V: ``[V, *out] -> [N]``."""
        return shared_weight.square_norm(positions(mat), _input(param_str, module, subsampling))

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
        return shared_weight.position_rows(positions(mat), approximation).unsqueeze(2)

    def kronecker_input_factors(
        self,
        param_str: str,
        module: Module,
        subsampling: Rows = None,
        approximation: str | None = None,
    ) -> list[Tensor]:
        """Return A of the input, ``[I, I]``, for the weight."""
        x = _input(param_str, module, subsampling)
        return [] if x is None else [shared_weight.input_factor(x, approximation)]


@register("transformers.pytorch_utils.Conv1D")
class TransposedLinearDerivatives(LinearDerivatives):
    """Derivatives of ``y = x W + b``, a linear layer that stores its weight as ``[I, O]``.

    Everything about the weight is transposed; its Kronecker factors are ``[A, B]``.
    """

    kronecker_input_first = True

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return mat @ module.weight

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return mat @ module.weight.T

    def _weight_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return super()._weight_jac_mat_prod(module, g_inp, g_out, mat.mT, subsampling)

    def _weight_jac_t_mat_prod(self, *args: Any) -> Tensor:
        return super()._weight_jac_t_mat_prod(*args).mT

    def param_mjp_batch_square(self, param_str: str, *args: Any, **options: Any) -> Tensor:
        """Sum the squares of ``J_pᵀ mat`` over V, with weights: ``[V, *out] -> [N, *p]``."""
        squares = super().param_mjp_batch_square(param_str, *args, **options)
        return squares.mT if param_str == "weight" else squares

    def param_mjp_square_sum(self, param_str: str, *args: Any, **options: Any) -> Tensor:
        """Sum the squares of ``J_pᵀ mat`` over V and N, with weights: ``[V, *out] -> [*p]``."""
        squares = super().param_mjp_square_sum(param_str, *args, **options)
        return squares.mT if param_str == "weight" else squares
