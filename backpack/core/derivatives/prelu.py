"""Leaky ReLU with trained slopes, ``y = max(x, 0) + a min(x, 0)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import PReLU

from backpack.core import fast
from backpack.core.derivatives.basederivatives import FIRST_DERIVATIVES
from backpack.core.derivatives.elementwise import PiecewiseLinearDerivatives
from backpack.core.derivatives.facts import always
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.layout import Layout
from backpack.core.record.registry import register
from backpack.core.types import Changes, OfInputs, OfParams


@register(PReLU)
class PReLUDerivatives(PiecewiseLinearDerivatives):
    """Derivatives of ``torch.nn.PReLU``, with one slope or one for each channel, ``[N, C, *]``."""

    params = ("weight",)
    is_linear_in_params = always

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

    def df(self, c: Context) -> Tensor:
        """First derivative, 1 or the slope."""
        return torch.where(c.x > 0, 1, self._spread(c, c.params["weight"]))

    def _spread(self, c: Context, t: Tensor) -> Tensor:
        """Give ``[V, *p]`` (or ``[*p]``) the axes of ``[V, N, *]`` (or ``[N, *]``)."""
        dims, channels = c.input.dim(), c.module.num_parameters
        shape = (1,) * dims if channels == 1 else (1, channels, *(1,) * (dims - 2))
        return t.reshape(*t.shape[: t.dim() - c.params["weight"].dim()], *shape)

    def _sum_positions(self, c: Context, v: Tensor) -> Tensor:
        """Sum over what shares a slope: ``[V, N, *] -> [V, N, *p]``."""
        sums = v.reshape(*v.shape[:2], c.module.num_parameters, -1).sum(3)
        return sums.reshape(*v.shape[:2], *c.params["weight"].shape)

    def weight_jvp(self, c: Context, t: Tensor) -> Tensor:
        """Multiply with ``∂y/∂a = min(x, 0)``."""
        return self._spread(c, t) * c.x.clamp(max=0)

    def weight_vjp(self, c: Context, v: Tensor) -> Tensor:
        """Multiply with ``min(x, 0)``, and sum over what shares a slope."""
        return self._sum_positions(c, v * c.x.clamp(max=0))

    @fast.body("The second derivative is a formula.", "df", *FIRST_DERIVATIVES)
    def mixed_hvp(
        self, c: Context, inputs: OfInputs, params: OfParams, sum_batch: bool = False
    ) -> Changes:
        """Apply the second derivative of ``⟨g, y⟩``, ``∂²y/∂x∂a = [x ≤ 0]``."""
        (t,), x = inputs, c.x
        g: Any = c.grad_out[0]
        mixed = c.select(g) * (x <= 0)
        like = next(mat for mat in [*params.values(), t] if mat is not None)
        zeros = like.new_zeros(len(like), *x.shape)
        d_x = mixed * self._spread(c, params["weight"]) if "weight" in params else zeros
        d_weight = self._sum_positions(c, mixed * (zeros if t is None else t))
        return [d_x], dict.fromkeys(params, d_weight.sum(1) if sum_batch else d_weight)
