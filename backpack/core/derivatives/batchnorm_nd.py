"""Batch normalisation, ``y = γ x̂ + β`` with ``x̂ = (x - μ) / s`` and ``s = sqrt(σ² + ε)``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, distributed
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module, SyncBatchNorm

from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.convnd import sum_positions
from backpack.core.record.layout import Owners
from backpack.core.record.registry import register
from backpack.core.record.tape import Call, describe
from backpack.core.rows import Rows
from backpack.core.types import Grads
from backpack.utils.subsampling import subsample


@register(BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)
class BatchNormNdDerivatives(BaseDerivatives):
    """Derivatives of ``torch.nn.BatchNorm1d``, ``BatchNorm2d`` and ``BatchNorm3d``.

    With running statistics (evaluation mode) the module is a linear map of each sample. With the
    statistics of the batch (training mode, or no running statistics) it mixes samples: its Jacobian
    acts on the batch as a whole, ``J = (γ/s) (I - 1 1ᵀ/m - x̂ x̂ᵀ/m)``, m entries in a channel.
    ``SyncBatchNorm`` is the same in one process, and refused where it mixes those of several.
    """

    params = ("weight", "bias")

    def refusal(self, module: Module) -> str | None:
        """Refuse statistics of samples that are not here."""
        alone = not (distributed.is_available() and distributed.is_initialized())
        if not isinstance(module, SyncBatchNorm) or not self.mixes_samples(module):
            return None
        if alone or distributed.get_world_size(module.process_group) == 1:
            return None
        return (
            f"{describe(module)} mixes the samples of several processes, and only those of one are "
            "known. Use eval(), or BatchNorm for the statistics of this process."
        )

    def mixes_samples(self, module: Any) -> bool:
        """Return whether the statistics are those of the batch."""
        return module.training or module.running_mean is None

    def repeats_output(self, call: Call) -> bool:
        """Return whether the statistics are constants."""
        return not call.mixes_samples

    def hessian_is_zero(self, module: Module) -> bool:
        """Return whether the statistics are constants."""
        return not self.mixes_samples(module)

    def jacobian_is_constant(self, module: Module) -> bool:
        """Return whether the statistics are constants."""
        return not self.mixes_samples(module)

    # ------------------------------------------------------------------ the pieces: x̂, s, γ

    def _per_channel(self, module: Any, values: Tensor) -> Tensor:
        """Shape ``[C]`` such that it multiplies ``[N, C, *]``."""
        return values.reshape(1, -1, *(1,) * (module.input0.dim() - 2))

    def _mean(self, module: Any, mat: Tensor) -> Tensor:
        """Average over the entries of each channel: ``[..., N, C, *] -> [..., 1, C, 1…]``.

        Rows that were added, where samples have different numbers of them, are zero and no entries.
        """
        axes, owners = module.input0.dim(), self._uneven(module)
        mean = mat.mean([-axes, *range(2 - axes, 0)], keepdim=True)
        return mean if owners is None else mean * (owners.rows / len(owners.numbers))

    @staticmethod
    def _uneven(module: Any) -> Owners | None:
        """Return the samples of the rows, if these have different numbers of them."""
        call = vars(module).get("_backpack_call")
        place = None if call is None or call.is_plain else call.place_in(0)
        owners = None if place is None else place.owners
        return None if owners is None or owners.is_even else owners

    def _without_added(self, module: Any, mat: Tensor) -> Tensor:
        """Let rows be zero that were added, in a tensor ``[..., N, C, *]`` of all rows."""
        owners = self._uneven(module)
        if owners is None:
            return mat
        kept = mat.new_zeros(owners.rows, *(1,) * (module.input0.dim() - 1))
        kept[owners.places] = 1
        return mat * kept

    def _normalized(self, module: Any, subsampling: Rows = None) -> tuple[Tensor, Tensor]:
        """Return x̂ of some rows, and s."""
        x = module.input0
        if self.mixes_samples(module):
            centered = self._without_added(module, x - self._mean(module, x))
            s = (self._mean(module, centered.square()) + module.eps).sqrt()
            return subsample(centered / s, subsampling=subsampling), s
        x = subsample(x, subsampling=subsampling)
        s = self._per_channel(module, (module.running_var + module.eps).sqrt())
        return (x - self._per_channel(module, module.running_mean)) / s, s

    def _gain(self, module: Any, s: Tensor) -> Tensor:
        """Return γ/s."""
        return 1 / s if module.weight is None else self._per_channel(module, module.weight) / s

    # ------------------------------------------------------------------ Jacobians

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        if not self.mixes_samples(module):
            s = self._per_channel(module, (module.running_var + module.eps).sqrt())
            return mat * self._gain(module, s)
        self._whole_batch(module, subsampling)
        x_hat, s = self._normalized(module)
        return self._gain(module, s) * self._project(module, x_hat, mat)

    def _project(self, module: Any, x_hat: Tensor, mat: Tensor) -> Tensor:
        """Apply ``I - 1 1ᵀ/m - x̂ x̂ᵀ/m``."""
        mat = self._without_added(module, mat)
        centered = self._without_added(module, mat - self._mean(module, mat))
        return centered - x_hat * self._mean(module, mat * x_hat)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return self._jac_mat_prod(module, g_inp, g_out, mat, subsampling)  # J is symmetric

    def _whole_batch(self, module: Any, subsampling: Rows) -> None:
        if subsampling is not None:
            raise ValueError(
                f"{describe(module)} mixes the samples of the batch: its Jacobian acts on the "
                f"whole batch, got subsampling={subsampling}."
            )

    def _residual_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Any, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        # the change of Jᵀ g_out along mat
        if self.hessian_is_zero(module):
            return super()._residual_mat_prod(module, g_inp, g_out, mat, subsampling)
        self._whole_batch(module, subsampling)
        self._need_g_out(module, g_out)
        (g,) = g_out
        x_hat, s = self._normalized(module)
        d_s = self._mean(module, x_hat * mat)
        d_x_hat = self._project(module, x_hat, mat) / s
        change = d_s / s * self._project(module, x_hat, g)
        change = change + d_x_hat * self._mean(module, g * x_hat)
        change = change + x_hat * self._mean(module, g * d_x_hat)
        return -self._gain(module, s) * change

    # ------------------------------------------------------------------ parameters

    def _weight_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        x_hat, _ = self._normalized(module, subsampling)
        return mat.reshape(mat.shape[0], *self._per_channel(module, mat[0]).shape) * x_hat

    def _bias_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        out = subsample(module.output, subsampling=subsampling)
        return mat.reshape(mat.shape[0], *self._per_channel(module, mat[0]).shape).expand(
            -1, *out.shape
        )

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
        product = sum_positions(mat.unsqueeze(-1))
        return product.sum(1) if sum_batch else product
