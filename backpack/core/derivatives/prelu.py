"""Leaky ReLU with trained slopes, ``y = max(x, 0) + a min(x, 0)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import PReLU

from backpack.core.derivatives.elementwise import PiecewiseLinearDerivatives
from backpack.core.record.layout import Layout
from backpack.core.record.registry import register
from backpack.core.record.tape import Call, bound
from backpack.core.rows import Rows
from backpack.core.types import Grads
from backpack.utils.subsampling import subsample


@register(PReLU)
class PReLUDerivatives(PiecewiseLinearDerivatives):
    """Derivatives of ``torch.nn.PReLU``, with one slope or one for each channel, ``[N, C, *]``."""

    params = ("weight",)

    def min_dims(self, module: Any) -> int:
        """Return 1, and 2 if there are channels."""
        return 1 if module.num_parameters == 1 else 2

    def folds_rows(self, module: Any) -> bool:
        """Return whether the axis behind that of the batch is like the others."""
        return self.min_dims(module) == 1

    def layouts(self, call: Call) -> list[Layout | None]:
        """Find where the samples are: anywhere for one slope, else in front of the channels.

        Raises:
            ValueError: If the samples are not where the module needs them.
        """
        (layout,), (shape,), module = call.layouts_in, call.shape_in, call.module
        if self.min_dims(module) == 2 and layout is not None and layout.is_batched and shape:
            place = layout.place(shape)
            if place is None or place.axis != 0:
                raise ValueError(
                    f"{call!r} has a slope for each entry of axis 1, and needs the samples of the "
                    "batch along axis 0. Exchange the axes before and after it."
                )
            layout.confirm()
        return super().layouts(call)

    def df(self, module: Any, subsampling: Rows) -> Tensor:
        """First derivative, 1 or the slope."""
        x = subsample(module.input0, subsampling=subsampling)
        return torch.where(x > 0, 1, self._spread(module, module.weight))

    def _spread(self, module: Any, mat: Tensor) -> Tensor:
        """Give ``[V, *p]`` (or ``[*p]``) the axes of ``[V, N, *]`` (or ``[N, *]``)."""
        dims = module.input0.dim()
        one = module.num_parameters == 1
        shape = (1,) * dims if one else (1, -1, *(1,) * (dims - 2))
        return mat.reshape(*mat.shape[:-1], *shape)

    def _sum_positions(self, module: Any, mat: Tensor) -> Tensor:
        """Sum over what shares a slope: ``[V, N, *] -> [V, N, *p]``."""
        return mat.reshape(*mat.shape[:2], module.num_parameters, -1).sum(3)

    def _d_weight(self, module: Any, subsampling: Rows) -> Tensor:
        """Derivative with respect to the slope, ``min(x, 0)``."""
        return subsample(module.input0, subsampling=subsampling).clamp(max=0)

    def _weight_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return self._spread(module, mat) * self._d_weight(module, subsampling)

    def _weight_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        product = self._sum_positions(module, mat * self._d_weight(module, subsampling))
        return product.sum(1) if sum_batch else product

    def mixed_residual(
        self,
        module: Any,
        g_out: Grads,
        inputs: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
        subsampling: Rows = None,
        sum_batch: bool = False,
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Apply the second derivative of ``⟨g_out, y⟩``, ``∂²y/∂x∂a = [x ≤ 0]``."""
        (t,) = inputs
        with bound(module):
            self._need_g_out(module, g_out)
            assert g_out is not None and g_out[0] is not None
            x = subsample(module.input0, subsampling=subsampling)
            mixed = subsample(g_out[0], subsampling=subsampling) * (x <= 0)
            like = next(mat for mat in [*params.values(), t] if mat is not None)
            zeros = like.new_zeros(len(like), *x.shape)
            d_x = zeros
            if "weight" in params:
                d_x = mixed * self._spread(module, params["weight"])
            d_weight = self._sum_positions(module, mixed * (zeros if t is None else t))
            d_weight = d_weight.sum(1) if sum_batch else d_weight
        return [d_x], dict.fromkeys(params, d_weight)
