"""Normalisation within a sample, ``y = γ x̂ + β``: layer, group, instance and RMS normalisation.

Groups of m entries are normalised together, ``x̂ = (x - μ) / s`` with ``s = sqrt(σ² + ε)``. In a
group, ``∂x̂/∂x = P / s`` with the symmetric ``P = I - 1 1ᵀ/m - x̂ x̂ᵀ/m``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from backpack.context import disable
from backpack.core import fast
from backpack.core.derivatives.basederivatives import FIRST_DERIVATIVES, BaseDerivatives
from backpack.core.derivatives.facts import always, constant, never
from backpack.core.derivatives.linear_maps import spatial_axes
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.derivatives.vectors import map_vectors
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.generators import OwnGenerators
from backpack.core.record.registry import register
from backpack.core.types import Changes, OfInputs, OfParams
from backpack.core.values import at_least_single


class NormalizationDerivatives(BaseDerivatives):
    """Derivatives of ``y = γ x̂ + β``. A subclass says what a group is, and where γ belongs.

    The entries of a group are neighbours in memory: a tensor is ``[R, m]``, R groups in all.
    """

    params: ClassVar[tuple[str, ...]] = ("weight", "bias")
    subtracts_mean: ClassVar[bool] = True  # whether there is a μ
    is_linear_in_params = always
    hessian_is_zero = never  # the scale that a group is divided by depends on its entries
    inner_axes = constant(0)  # the number of axes behind those of γ
    group_size: Callable[[Context], int]  # m, the number of entries of a group

    def epsilon(self, c: Context) -> float:
        """Return ε, which is added to the variance."""
        return c.module.eps

    # ------------------------------------------------------------------ parameters

    def _x_hat(self, c: Context) -> Tensor:
        """Return x̂: ``[N, *in]``."""
        x_hat, _ = self._normalized(c)
        return x_hat.reshape(-1, *c.input.shape[1:])

    def _spread(self, c: Context, t: Tensor) -> Tensor:
        """Give ``[V, *p]`` the axes of ``[V, N, *out]``."""
        shape, inner = t.shape[1:], self.inner_axes(c)
        outer = c.input.dim() - len(shape) - inner
        return t.reshape(len(t), *(1,) * outer, *shape, *(1,) * inner)

    def _sum(self, c: Context, name: str, v: Tensor, sum_batch: bool = False) -> Tensor:
        """Sum over what shares a parameter: ``[V, N, *out]`` to ``[V, N, *p]`` or ``[V, *p]``."""
        shape, inner = c.params[name].shape, self.inner_axes(c)
        outer = v.dim() - len(shape) - inner
        sizes = prod(v.shape[2:outer]), *shape, prod(v.shape[v.dim() - inner :])
        product = v.reshape(*v.shape[:2], *sizes)
        return product.sum((1, 2, -1) if sum_batch else (2, -1))

    def weight_jvp(self, c: Context, t: Tensor) -> Tensor:
        """Multiply with x̂."""
        return self._spread(c, t) * self._x_hat(c)

    def bias_jvp(self, c: Context, t: Tensor) -> Tensor:
        """Repeat for all that share a β."""
        return self._spread(c, t).expand(-1, *c.y.shape)

    def weight_vjp(self, c: Context, v: Tensor) -> Tensor:
        """Multiply with x̂, and sum over what shares a γ."""
        x_hat = self._x_hat(c)
        return map_vectors(lambda v: self._sum(c, "weight", v * x_hat), v)

    def bias_vjp(self, c: Context, v: Tensor) -> Tensor:
        """Sum over what shares a β."""
        return self._sum(c, "bias", v)

    # ------------------------------------------------------------------ the pieces: x̂, s, P, γ

    def _mean(self, c: Context, mat: Tensor) -> Tensor:
        """Average over the entries of each group: ``[..., m] -> [..., 1]``."""
        return mat.mean(-1, keepdim=True)

    def _groups(self, c: Context, mat: Tensor) -> Tensor:
        """Tell the groups apart: ``[V, N, *in] -> [V, R, m]``."""
        return mat.reshape(len(mat), -1, self.group_size(c))

    def _normalized(self, c: Context) -> tuple[Tensor, Tensor]:
        """Return x̂ and s: ``[R, m]``, ``[R, 1]``."""
        (x,) = self._groups(c, c.x.unsqueeze(0))
        centered = x - self._mean(c, x) if self.subtracts_mean else x
        s = (self._mean(c, centered.square()) + self.epsilon(c)).sqrt()
        return centered / s, s

    def _project(self, c: Context, x_hat: Tensor, mat: Tensor) -> Tensor:
        """Apply P: ``[V, R, m] -> [V, R, m]``."""
        centered = mat - self._mean(c, mat) if self.subtracts_mean else mat
        return torch.addcmul(centered, x_hat, self._mean(c, mat * x_hat), value=-1)

    def _slope(self, c: Context, mat: Tensor) -> Tensor:
        """Apply ``∂x̂/∂x = P / s``, which is symmetric: ``[V, N, *in] -> [V, N, *in]``."""
        x_hat, s = self._normalized(c)
        return (self._project(c, x_hat, self._groups(c, mat)) / s).reshape(mat.shape)

    def _gain(self, c: Context, s: Tensor) -> Tensor:
        """Return γ/s at each entry: ``[R, m]``."""
        s = s.expand(-1, self.group_size(c)).reshape(1, -1, *c.input.shape[1:])
        weight = c.params.get("weight")
        gain = 1 / s if weight is None else self._spread(c, weight.unsqueeze(0)) / s
        return self._groups(c, gain)[0]

    def jvp(self, c: Context, t: Tensor) -> Tensor:
        """Apply ``diag(γ/s) P``."""
        x_hat, s = self._normalized(c)
        gain, each = self._gain(c, s), self._groups(c, t)
        return map_vectors(lambda t: gain * self._project(c, x_hat, t), each).reshape(t.shape)

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        """Apply ``P diag(γ/s)``: s is the same for all entries of a group."""
        x_hat, s = self._normalized(c)
        gain, each = self._gain(c, s), self._groups(c, v)
        return map_vectors(lambda v: self._project(c, x_hat, gain * v), each).reshape(v.shape)

    def _second(self, c: Context, t: Tensor) -> Tensor:
        """Return the change of ``Jᵀ g = P γ/s g`` along t."""
        x_hat, s = self._normalized(c)
        (g,) = self._groups(c, _gradient(c).unsqueeze(0))
        g = self._gain(c, s) * g
        along, projected = self._mean(c, g * x_hat), self._project(c, x_hat, g)

        def change(t: Tensor) -> Tensor:
            d_s, d_x_hat = self._mean(c, x_hat * t), self._project(c, x_hat, t) / s
            return -d_s / s * projected - d_x_hat * along - x_hat * self._mean(c, g * d_x_hat)

        return map_vectors(change, self._groups(c, t)).reshape(t.shape)

    @fast.body("The second derivative is a formula.", *FIRST_DERIVATIVES)
    def mixed_hvp(
        self, c: Context, inputs: OfInputs, params: OfParams, sum_batch: bool = False
    ) -> Changes:
        """Apply the second derivative of ``⟨g, γ x̂ + β⟩``: in x, and between x and γ."""
        (t,), g = inputs, _gradient(c)
        like = next(mat for mat in [*params.values(), t] if mat is not None)
        t = like.new_zeros(len(like), *g.shape) if t is None else t
        d_x, changes = self._second(c, t), {}
        if "weight" in params:
            d_x = d_x + self._slope(c, g * self._spread(c, params["weight"]))
            changes["weight"] = self._sum(c, "weight", g * self._slope(c, t), sum_batch)
        if "bias" in params:
            changes["bias"] = self._sum(c, "bias", torch.zeros_like(t), sum_batch)
        return [d_x], changes


def _gradient(c: Context) -> Tensor:
    """Return g of the selected rows: ``[N, *out]``."""
    g: Any = c.grad_out[0]
    return c.select(g)


@register(nn.LayerNorm)
class LayerNormDerivatives(NormalizationDerivatives):
    """Derivatives of ``torch.nn.LayerNorm``: groups are the last axes, those of γ."""

    batch_axis = BatchAxis.LEADING

    def min_dims(self, module: Any) -> int:
        return self.trailing_axes(module) + 1

    def trailing_axes(self, module: Any) -> int:
        return len(module.normalized_shape)

    def group_size(self, c: Context) -> int:
        return c.input.shape[-self.trailing_axes(c.module) :].numel()


@register(nn.RMSNorm)
class RMSNormDerivatives(LayerNormDerivatives):
    """Derivatives of ``torch.nn.RMSNorm``: ``x̂ = x / s`` with ``s = sqrt(x·x/m + ε)``."""

    params = ("weight",)
    subtracts_mean = False

    def epsilon(self, c: Context) -> float:
        """Return ε; by default that of the precision torch computes in."""
        if c.module.eps is not None:
            return c.module.eps
        own = c.call.inputs[0].dtype  # not the one that the derivatives are computed in
        return torch.finfo(torch.promote_types(own, torch.float32)).eps


@register("transformers.models.*RMSNorm", "transformers.models.*LayerNorm")
class TransformersRMSNormDerivatives(RMSNormDerivatives):
    """Derivatives of ``LlamaRMSNorm`` and its like, which compute x̂ in float32 (of doubles, too).

    Here it is rounded to no less than the precision of the input.
    """

    trailing_axes = constant(1)  # features

    @staticmethod
    def suits(module_class: type[Any]) -> bool:
        """Return whether a class computes ``γ x̂`` as ``LlamaRMSNorm`` does: most of them do."""
        x, weight, epsilon = torch.linspace(-2, 3, 12).reshape(3, 4), torch.linspace(0.5, 2, 4), 0.1
        with disable(), torch.no_grad(), torch.device("cpu"), OwnGenerators(), suppress(Exception):
            module = module_class(4).float()
            module.weight.copy_(weight)
            module.variance_epsilon = epsilon
            expected = weight * x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
            has_one = [name for name, _ in module.named_parameters()] == ["weight"]
            return has_one and torch.allclose(module.forward(x), expected, rtol=1e-5)
        return False

    def epsilon(self, c: Context) -> float:
        return c.module.variance_epsilon

    def _normalized(self, c: Context) -> tuple[Tensor, Tensor]:
        (x,) = self._groups(c, c.x.unsqueeze(0))
        wide = at_least_single(x)
        s = (self._mean(c, wide.square()) + self.epsilon(c)).sqrt()
        return (wide / s).to(x.dtype), s.to(x.dtype)


@register(nn.GroupNorm)
class GroupNormDerivatives(NormalizationDerivatives):
    """Derivatives of ``torch.nn.GroupNorm``: a group is some channels, γ has an entry for each."""

    min_dims = constant(2)  # batch and channels

    def inner_axes(self, c: Context) -> int:
        return c.input.dim() - 2

    def group_size(self, c: Context) -> int:
        return c.input.shape[1:].numel() // c.module.num_groups


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormNdDerivatives(GroupNormDerivatives):
    """Derivatives of ``torch.nn.InstanceNorm1d``, ``InstanceNorm2d`` and ``InstanceNorm3d``.

    A group is a channel. With running statistics (evaluation mode) they are constants, ``P = I``.
    """

    def min_dims(self, module: nn.Module) -> int:
        return spatial_axes(module) + 2

    def group_size(self, c: Context) -> int:
        return c.input.shape[2:].numel()

    def hessian_is_zero(self, module: Any) -> bool:
        return module.track_running_stats and not module.training

    def is_curved(self, call: Call) -> bool:
        return call.training or not call.module.track_running_stats

    def jacobian_is_constant(self, c: Context) -> bool:
        return not self.is_curved(c.call)

    def _normalized(self, c: Context) -> tuple[Tensor, Tensor]:
        if self.is_curved(c.call):
            return super()._normalized(c)
        x, s = c.x, (c.params["running_var"] + c.module.eps).sqrt()
        mean, s = (t.repeat(len(x)).unsqueeze(1) for t in (c.params["running_mean"], s))
        return (x.reshape(len(mean), -1) - mean) / s, s

    def _project(self, c: Context, x_hat: Tensor, mat: Tensor) -> Tensor:
        return super()._project(c, x_hat, mat) if self.is_curved(c.call) else mat

    def _second(self, c: Context, t: Tensor) -> Tensor:
        return super()._second(c, t) if self.is_curved(c.call) else torch.zeros_like(t)
