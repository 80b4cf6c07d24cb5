"""Normalisation within a sample, ``y = γ x̂ + β``: layer, group, instance and RMS normalisation.

Groups of m entries are normalised together, ``x̂ = (x - μ) / s`` with ``s = sqrt(σ² + ε)``. In a
group, ``∂x̂/∂x = P / s`` with the symmetric ``P = I - 1 1ᵀ/m - x̂ x̂ᵀ/m``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import (
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    Module,
    RMSNorm,
)

from backpack.core.derivatives.basederivatives import BaseDerivatives, BatchAxis
from backpack.core.derivatives.vectors import map_vectors
from backpack.core.record.registry import register
from backpack.core.record.tape import bound
from backpack.core.rows import Rows
from backpack.core.types import Grads
from backpack.utils.subsampling import subsample


class NormalizationDerivatives(BaseDerivatives):
    """Derivatives of ``y = γ x̂ + β``. A subclass says what a group is, and where γ belongs.

    The entries of a group are neighbours in memory: a tensor is ``[R, m]``, R groups in all.

    Attributes:
        subtracts_mean: Whether there is a μ.
    """

    params: ClassVar[tuple[str, ...]] = ("weight", "bias")
    subtracts_mean: ClassVar[bool] = True

    def group_size(self, module: Any) -> int:
        """Return m."""
        raise NotImplementedError

    def inner_axes(self, module: Any) -> int:
        """Return the number of axes behind those of γ."""
        return 0

    def epsilon(self, module: Any) -> float:
        """Return ε."""
        return module.eps

    def hessian_is_zero(self, module: Module) -> bool:
        """Return False."""
        return False

    # ------------------------------------------------------------------ the pieces: x̂, s, P, γ

    def _groups(self, module: Any, mat: Tensor) -> Tensor:
        """Tell the groups apart: ``[V, N, *in] -> [V, R, m]``."""
        return mat.reshape(len(mat), -1, self.group_size(module))

    def _normalized(self, module: Any, subsampling: Rows) -> tuple[Tensor, Tensor]:
        """Return x̂ and s: ``[R, m]``, ``[R, 1]``."""
        x = subsample(module.input0, subsampling=subsampling)
        (x,) = self._groups(module, x.unsqueeze(0))
        centered = x - _mean(x) if self.subtracts_mean else x
        s = (_mean(centered.square()) + self.epsilon(module)).sqrt()
        return centered / s, s

    def _project(self, module: Any, x_hat: Tensor, mat: Tensor) -> Tensor:
        """Apply P: ``[V, R, m] -> [V, R, m]``."""
        centered = mat - _mean(mat) if self.subtracts_mean else mat
        return torch.addcmul(centered, x_hat, _mean(mat * x_hat), value=-1)

    def _slope(self, module: Any, mat: Tensor, subsampling: Rows) -> Tensor:
        """Apply ``∂x̂/∂x = P / s``, which is symmetric: ``[V, N, *in] -> [V, N, *in]``."""
        x_hat, s = self._normalized(module, subsampling)
        return (self._project(module, x_hat, self._groups(module, mat)) / s).reshape(mat.shape)

    def _spread(self, module: Any, mat: Tensor) -> Tensor:
        """Give ``[V, *p]`` the axes of ``[V, N, *out]``."""
        shape, inner = module.weight.shape, self.inner_axes(module)
        outer = module.input0.dim() - len(shape) - inner
        return mat.reshape(len(mat), *(1,) * outer, *shape, *(1,) * inner)

    def _gain(self, module: Any, s: Tensor) -> Tensor:
        """Return γ/s at each entry: ``[R, m]``."""
        s = s.expand(-1, self.group_size(module)).reshape(1, -1, *module.input0.shape[1:])
        weight = module.weight
        gain = 1 / s if weight is None else self._spread(module, weight.unsqueeze(0)) / s
        return self._groups(module, gain)[0]

    # ------------------------------------------------------------------ Jacobians

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        # diag(γ/s) P
        x_hat, s = self._normalized(module, subsampling)
        gain, t = self._gain(module, s), self._groups(module, mat)
        return map_vectors(lambda t: gain * self._project(module, x_hat, t), t).reshape(mat.shape)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        # P diag(γ/s): s is the same for all entries of a group
        x_hat, s = self._normalized(module, subsampling)
        gain, t = self._gain(module, s), self._groups(module, mat)
        return map_vectors(lambda t: self._project(module, x_hat, gain * t), t).reshape(mat.shape)

    # ------------------------------------------------------------------ parameters

    def _weight_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return self._spread(module, mat) * self._x_hat(module, subsampling)

    def _bias_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        out = subsample(module.output, subsampling=subsampling)
        return self._spread(module, mat).expand(-1, *out.shape)

    def _x_hat(self, module: Any, subsampling: Rows) -> Tensor:
        """Return x̂: ``[N, *in]``."""
        x_hat, _ = self._normalized(module, subsampling)
        return x_hat.reshape(-1, *module.input0.shape[1:])

    def _weight_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        x_hat = self._x_hat(module, subsampling)
        return map_vectors(lambda s: self._sum(module, s * x_hat, sum_batch), mat)

    def _bias_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        return self._sum(module, mat, sum_batch)

    def _sum(self, module: Any, mat: Tensor, sum_batch: bool) -> Tensor:
        """Sum over what shares a γ: ``[V, N, *out]`` to ``[V, N, *p]`` or ``[V, *p]``."""
        inner = prod(mat.shape[mat.dim() - self.inner_axes(module) :])
        product = mat.reshape(*mat.shape[:2], -1, *module.weight.shape, inner)
        return product.sum((1, 2, -1) if sum_batch else (2, -1))

    # ------------------------------------------------------------------ second derivative

    def _residual_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Any, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        # the change of Jᵀ g_out = P γ/s g_out along mat
        self._need_g_out(module, g_out)
        x_hat, s = self._normalized(module, subsampling)
        (g,) = self._groups(module, subsample(g_out[0], subsampling=subsampling).unsqueeze(0))
        g = self._gain(module, s) * g
        along, projected = _mean(g * x_hat), self._project(module, x_hat, g)

        def change(t: Tensor) -> Tensor:
            d_s, d_x_hat = _mean(x_hat * t), self._project(module, x_hat, t) / s
            return -d_s / s * projected - d_x_hat * along - x_hat * _mean(g * d_x_hat)

        return map_vectors(change, self._groups(module, mat)).reshape(mat.shape)

    def mixed_residual(
        self,
        module: Any,
        g_out: Grads,
        inputs: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
        subsampling: Rows = None,
        sum_batch: bool = False,
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Apply the second derivative of ``⟨g_out, γ x̂ + β⟩``: in x, and between x and γ."""
        (t,) = inputs
        with bound(module):
            self._need_g_out(module, g_out)
            assert g_out is not None and g_out[0] is not None
            g = subsample(g_out[0], subsampling=subsampling)
            like = next(mat for mat in [*params.values(), t] if mat is not None)
            t = like.new_zeros(len(like), *g.shape) if t is None else t
            d_x = self._residual_mat_prod(module, None, g_out, t, subsampling)
            if "weight" in params:
                g_change = g * self._spread(module, params["weight"])
                d_x = d_x + self._slope(module, g_change, subsampling)
            d_x_hat = self._slope(module, t, subsampling)
            changes = {"weight": g * d_x_hat, "bias": torch.zeros_like(t)}
            d_params = {name: self._sum(module, changes[name], sum_batch) for name in params}
        return [d_x], d_params


def _mean(mat: Tensor) -> Tensor:
    """Average over the entries of each group: ``[..., m] -> [..., 1]``."""
    return mat.mean(-1, keepdim=True)


@register(LayerNorm)
class LayerNormDerivatives(NormalizationDerivatives):
    """Derivatives of ``torch.nn.LayerNorm``: groups are the last axes, those of γ."""

    batch_axis = BatchAxis.LEADING

    def min_dims(self, module: Any) -> int:
        """Return the number of normalised axes, and that of the batch."""
        return len(module.normalized_shape) + 1

    def trailing_axes(self, module: Any) -> int:
        """Return the number of normalised axes."""
        return len(module.normalized_shape)

    def group_size(self, module: Any) -> int:
        """Return the number of normalised entries."""
        return prod(module.normalized_shape)


@register(RMSNorm)
class RMSNormDerivatives(LayerNormDerivatives):
    """Derivatives of ``torch.nn.RMSNorm``: ``x̂ = x / s`` with ``s = sqrt(x·x/m + ε)``."""

    params = ("weight",)
    subtracts_mean = False

    def epsilon(self, module: Any) -> float:
        """Return ε; by default that of the precision torch computes in."""
        if module.eps is not None:
            return module.eps
        dtype = torch.promote_types(module.input0.dtype, torch.float32)
        return torch.finfo(dtype).eps


@register(GroupNorm)
class GroupNormDerivatives(NormalizationDerivatives):
    """Derivatives of ``torch.nn.GroupNorm``: a group is some channels, γ has an entry for each."""

    def min_dims(self, module: Any) -> int:
        """Return 2: batch and channels."""
        return 2

    def inner_axes(self, module: Any) -> int:
        """Return the number of spatial axes."""
        return module.input0.dim() - 2

    def group_size(self, module: Any) -> int:
        """Return the number of a group's entries."""
        return module.input0.shape[1:].numel() // module.num_groups


@register(InstanceNorm1d, InstanceNorm2d, InstanceNorm3d)
class InstanceNormNdDerivatives(GroupNormDerivatives):
    """Derivatives of ``torch.nn.InstanceNorm1d``, ``InstanceNorm2d`` and ``InstanceNorm3d``.

    A group is a channel. With running statistics (evaluation mode) they are constants, ``P = I``.
    """

    def min_dims(self, module: Module) -> int:
        """Return the number of spatial axes, and batch and channels."""
        return next(dims for cls, dims in INSTANCE_DIMS.items() if isinstance(module, cls))

    def group_size(self, module: Any) -> int:
        """Return the number of positions."""
        return module.input0.shape[2:].numel()

    def hessian_is_zero(self, module: Any) -> bool:
        """Return whether the statistics are constants."""
        return module.track_running_stats and not module.training

    def jacobian_is_constant(self, module: Module) -> bool:
        """Return whether the statistics are constants."""
        return self.hessian_is_zero(module)

    def _normalized(self, module: Any, subsampling: Rows) -> tuple[Tensor, Tensor]:
        if not self.hessian_is_zero(module):
            return super()._normalized(module, subsampling)
        x = subsample(module.input0, subsampling=subsampling)
        s = (module.running_var + module.eps).sqrt()
        mean, s = (t.repeat(len(x)).unsqueeze(1) for t in (module.running_mean, s))
        return (x.reshape(len(mean), -1) - mean) / s, s

    def _project(self, module: Any, x_hat: Tensor, mat: Tensor) -> Tensor:
        fixed = self.hessian_is_zero(module)
        return mat if fixed else super()._project(module, x_hat, mat)

    def _residual_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Any, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        if self.hessian_is_zero(module):
            return torch.zeros_like(mat)
        return super()._residual_mat_prod(module, g_inp, g_out, mat, subsampling)


# axes of a batch
INSTANCE_DIMS = {InstanceNorm1d: 3, InstanceNorm2d: 4, InstanceNorm3d: 5}
