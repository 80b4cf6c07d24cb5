"""Functions of the entries along one axis: softmax and its relatives, gated linear units.

The samples may be along any other axis, as in attention scores: where, is found out by
:class:`~backpack.core.derivatives.function_derivatives.FunctionDerivatives`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import GLU, LogSoftmax, Softmax, Softmax2d, Softmin

from backpack.core import fast
from backpack.core.derivatives.basederivatives import FIRST_DERIVATIVES
from backpack.core.derivatives.facts import always, constant
from backpack.core.derivatives.function_derivatives import FunctionDerivatives
from backpack.core.derivatives.vectors import map_vectors
from backpack.core.record.context import Context
from backpack.core.record.registry import register


class AlongAxisDerivatives(FunctionDerivatives):
    """A nonlinear function of one tensor that acts along one of its axes."""

    is_curved = is_deterministic = always  # without trying

    def axis(self, c: Context) -> int:
        """Return the axis, counted from the last one."""
        dim, dims = c.module.dim, c.input.dim()
        if dim is None:  # what torch chooses, with a warning
            return -dims if dims in (1, 3) else 1 - dims
        return dim - dims if dim >= 0 else dim

    def _x(self, c: Context) -> Tensor:
        return c.select(c.input, self.axis_in(c, 0))

    def _y(self, c: Context) -> Tensor:
        return c.select(c.output, self.axis_out(c, 0))

    def _g(self, c: Context) -> Tensor:
        g: Any = c.grad_out[0]
        return c.select(g, self.axis_out(c, 0))


@register(Softmax)
class SoftmaxDerivatives(AlongAxisDerivatives):
    """``y = softmax(f x)`` with ``f² = 1``: ``J = f (diag(y) - y yᵀ)``, which is symmetric."""

    needs_output = True
    factor: ClassVar[int] = 1

    def _slope(self, c: Context, y: Tensor, t: Tensor) -> Tensor:
        """Apply ``diag(y) - y yᵀ``."""
        weighted = y * t
        total = weighted.sum(self.axis(c), keepdim=True)
        return torch.addcmul(weighted, y, total, value=-1)

    def jvp(self, c: Context, t: Any) -> Tensor:
        y = self._y(c)
        return map_vectors(lambda t: self._slope(c, y, self.factor * t), t)

    def vjp(self, c: Context, v: Any) -> Tensor:
        return self.jvp(c, v)

    @fast.body("The second derivative is a formula.", *FIRST_DERIVATIVES)
    def hvp(self, c: Context, t: Any) -> Tensor:
        """Return the change of ``y (g - y·g)`` along t; ``f² = 1``."""
        y, g, dim = self._y(c), self._g(c), self.axis(c)
        centered = g - (y * g).sum(dim, keepdim=True)

        def change(t: Tensor) -> Tensor:
            dy = self._slope(c, y, t)
            return dy * centered - y * (dy * g).sum(dim, keepdim=True)

        return map_vectors(change, t)


@register(Softmax2d)
class Softmax2dDerivatives(SoftmaxDerivatives):
    """Softmax over the channels, ``[N, C, H, W]``."""

    axis = constant(-3)  # that of the channels


@register(Softmin)
class SoftminDerivatives(SoftmaxDerivatives):
    """Softmax of ``-x``."""

    factor = -1


@register(LogSoftmax)
class LogSoftmaxDerivatives(AlongAxisDerivatives):
    """``y = log softmax(x)``: ``J = I - 1 sᵀ`` with ``s = exp(y)``."""

    needs_output = True

    def jvp(self, c: Context, t: Any) -> Tensor:
        s = self._y(c).exp()
        return t - (s * t).sum(self.axis(c), keepdim=True)

    def vjp(self, c: Context, v: Any) -> Tensor:
        s = self._y(c).exp()
        return v - s * v.sum(self.axis(c), keepdim=True)

    @fast.body("The second derivative is a formula.", *FIRST_DERIVATIVES)
    def hvp(self, c: Context, t: Any) -> Tensor:
        """Return the change of ``g - s (1·g)`` along t."""
        s, g, dim = self._y(c).exp(), self._g(c), self.axis(c)
        weighted = s * t
        ds = weighted - s * weighted.sum(dim, keepdim=True)
        return -ds * g.sum(dim, keepdim=True)


@register(GLU)
class GLUDerivatives(AlongAxisDerivatives):
    """``y = a σ(b)`` of the two halves ``x = (a, b)``: ``∂y/∂a = σ``, ``∂y/∂b = a σ (1 - σ)``."""

    def _halves(self, c: Context, t: Tensor) -> tuple[Tensor, ...]:
        return t.chunk(2, self.axis(c))

    def _pieces(self, c: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return a, σ and ``σ' = σ (1 - σ)``."""
        a, b = self._halves(c, self._x(c))
        s = b.sigmoid()
        return a, s, s * (-b).sigmoid()

    def jvp(self, c: Context, t: Any) -> Tensor:
        a, s, ds = self._pieces(c)
        t_a, t_b = self._halves(c, t)
        return s * t_a + a * ds * t_b

    def vjp(self, c: Context, v: Any) -> Tensor:
        a, s, ds = self._pieces(c)
        return torch.cat([s * v, a * ds * v], self.axis(c))

    @fast.body("The second derivative is a formula.", *FIRST_DERIVATIVES)
    def hvp(self, c: Context, t: Any) -> Tensor:
        """Apply ``∂²y/∂a∂b = σ'`` and ``∂²y/∂b² = a σ''`` with ``σ'' = σ' (1 - 2 σ)``."""
        a, s, ds = self._pieces(c)
        slope = self._g(c) * ds
        t_a, t_b = self._halves(c, t)
        return torch.cat([slope * t_b, slope * (t_a + a * (1 - 2 * s) * t_b)], self.axis(c))
