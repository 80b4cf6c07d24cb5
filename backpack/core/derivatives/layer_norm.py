"""Layer normalisation, ``y = γ x̂ + β`` with ``x̂ = (x - μ) / s`` and ``s = sqrt(σ² + ε)``."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import LayerNorm, Module

from backpack.core.derivatives.basederivatives import BaseDerivatives, BatchAxis, Grads, Rows
from backpack.core.registry import register
from backpack.utils.subsampling import subsample


@register(LayerNorm)
class LayerNormDerivatives(BaseDerivatives):
    """Derivatives of ``torch.nn.LayerNorm``.

    Mean and variance are those of the last axes, ``[*norm]``, at each position of each sample:
    ``[N, *positions, *norm]``. There ``J = diag(γ) P / s`` with the symmetric projection
    ``P = I - 1 1ᵀ/m - x̂ x̂ᵀ/m``, m entries in ``[*norm]``.
    """

    params = ("weight", "bias")
    batch_axis = BatchAxis.LEADING

    def hessian_is_zero(self, module: Module) -> bool:
        """Return False."""
        return False

    def min_dims(self, module: Any) -> int:
        """Return the number of normalised axes, and that of the batch."""
        return len(module.normalized_shape) + 1

    def trailing_axes(self, module: Any) -> int:
        """Return the number of normalised axes."""
        return len(module.normalized_shape)

    # ------------------------------------------------------------------ the pieces: x̂, s, γ

    def _mean(self, module: Any, mat: Tensor) -> Tensor:
        """Average over the normalised axes."""
        return mat.mean([*range(-len(module.normalized_shape), 0)], keepdim=True)

    def _normalized(self, module: Any, subsampling: Rows) -> tuple[Tensor, Tensor]:
        """Return x̂ and s."""
        x = subsample(module.input0, subsampling=subsampling)
        centered = x - self._mean(module, x)
        s = (self._mean(module, centered.square()) + module.eps).sqrt()
        return centered / s, s

    def _gain(self, module: Any, mat: Tensor) -> Tensor:
        """Multiply with γ."""
        return mat if module.weight is None else mat * module.weight

    def _project(self, module: Any, x_hat: Tensor, mat: Tensor) -> Tensor:
        """Apply ``I - 1 1ᵀ/m - x̂ x̂ᵀ/m``."""
        return mat - self._mean(module, mat) - x_hat * self._mean(module, mat * x_hat)

    # ------------------------------------------------------------------ Jacobians

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        x_hat, s = self._normalized(module, subsampling)
        return self._gain(module, self._project(module, x_hat, mat) / s)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        x_hat, s = self._normalized(module, subsampling)
        return self._project(module, x_hat, self._gain(module, mat)) / s

    def _residual_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Any, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        # the change of Jᵀ g_out = P γ g_out / s along mat
        self._need_g_out(module, g_out)
        g = self._gain(module, subsample(g_out[0], subsampling=subsampling))
        x_hat, s = self._normalized(module, subsampling)
        d_s = self._mean(module, x_hat * mat)
        d_x_hat = self._project(module, x_hat, mat) / s
        change = d_s / s * self._project(module, x_hat, g)
        change = change + d_x_hat * self._mean(module, g * x_hat)
        change = change + x_hat * self._mean(module, g * d_x_hat)
        return -change / s

    # ------------------------------------------------------------------ parameters [*norm]

    def _spread(self, module: Any, mat: Tensor) -> Tensor:
        """Give ``[V, *norm]`` axes for the samples and positions: ``[V, 1, …, *norm]``."""
        ones = module.output.dim() - len(module.normalized_shape)
        return mat.reshape(mat.shape[0], *(1,) * ones, *module.normalized_shape)

    def _weight_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return self._spread(module, mat) * self._normalized(module, subsampling)[0]

    def _bias_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        out = subsample(module.output, subsampling=subsampling)
        return self._spread(module, mat).expand(-1, *out.shape)

    def _weight_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        x_hat, _ = self._normalized(module, subsampling)
        return self._bias_jac_t_mat_prod(module, g_inp, g_out, mat * x_hat, sum_batch, subsampling)

    def _bias_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        product = mat.reshape(*mat.shape[:2], -1, *module.normalized_shape)
        return product.sum((1, 2) if sum_batch else 2)
