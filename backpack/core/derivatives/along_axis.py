"""Functions of the entries along one axis: softmax and its relatives, gated linear units.

The samples may be along any other axis, as in attention scores: where, is found out by
:class:`~backpack.core.derivatives.automatic.FunctionDerivatives`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import GLU, LogSoftmax, Module, Softmax, Softmax2d, Softmin

from backpack.core.derivatives.automatic import FunctionDerivatives
from backpack.core.derivatives.vectors import map_vectors
from backpack.core.record.registry import register
from backpack.core.rows import Rows
from backpack.core.types import Grads
from backpack.utils.subsampling import subsample


class AlongAxisDerivatives(FunctionDerivatives):
    """A nonlinear function of one tensor that acts along one of its axes."""

    def hessian_is_zero(self, module: Module) -> bool:
        """Return False."""
        return False

    def axis(self, module: Any) -> int:
        """Return the axis, counted from the last one."""
        dims = module.input0.dim()
        if module.dim is None:  # what torch chooses, with a warning
            return -dims if dims in (1, 3) else 1 - dims
        return module.dim - dims if module.dim >= 0 else module.dim

    def _x(self, module: Any, subsampling: Rows) -> Tensor:
        return subsample(module.input0, self.batch_axis_in(module, 0), subsampling)

    def _y(self, module: Any, subsampling: Rows) -> Tensor:
        return subsample(module.output, self.batch_axis_out(module, 0), subsampling)

    def _g(self, module: Any, g_out: Any, subsampling: Rows) -> Tensor:
        self._need_g_out(module, g_out)
        return subsample(g_out[0], self.batch_axis_out(module, 0), subsampling)


@register(Softmax)
class SoftmaxDerivatives(AlongAxisDerivatives):
    """``y = softmax(c x)``: ``J = c (diag(y) - y yᵀ)``, which is symmetric."""

    needs_output = True
    factor: ClassVar[int] = 1

    def _slope(self, module: Any, y: Tensor, mat: Tensor) -> Tensor:
        """Apply ``diag(y) - y yᵀ``."""
        weighted = y * mat
        total = weighted.sum(self.axis(module), keepdim=True)
        return torch.addcmul(weighted, y, total, value=-1)

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        y = self._y(module, subsampling)
        return map_vectors(lambda t: self._slope(module, y, self.factor * t), mat)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        return self._jac_mat_prod(module, g_inp, g_out, mat, subsampling)

    def _residual_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        # the change of y (g - y·g) along mat; c² = 1
        y, g = self._y(module, subsampling), self._g(module, g_out, subsampling)
        dim = self.axis(module)
        centered = g - (y * g).sum(dim, keepdim=True)

        def change(t: Tensor) -> Tensor:
            dy = self._slope(module, y, t)
            return dy * centered - y * (dy * g).sum(dim, keepdim=True)

        return map_vectors(change, mat)


@register(Softmax2d)
class Softmax2dDerivatives(SoftmaxDerivatives):
    """Softmax over the channels, ``[N, C, H, W]``."""

    def axis(self, module: Module) -> int:
        """Return the axis of the channels."""
        return -3


@register(Softmin)
class SoftminDerivatives(SoftmaxDerivatives):
    """Softmax of ``-x``."""

    factor = -1


@register(LogSoftmax)
class LogSoftmaxDerivatives(AlongAxisDerivatives):
    """``y = log softmax(x)``: ``J = I - 1 sᵀ`` with ``s = exp(y)``."""

    needs_output = True

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        s = self._y(module, subsampling).exp()
        return mat - (s * mat).sum(self.axis(module), keepdim=True)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        s = self._y(module, subsampling).exp()
        return mat - s * mat.sum(self.axis(module), keepdim=True)

    def _residual_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        # the change of g - s (1·g) along mat
        s, g = self._y(module, subsampling).exp(), self._g(module, g_out, subsampling)
        dim, weighted = self.axis(module), s * mat
        ds = weighted - s * weighted.sum(dim, keepdim=True)
        return -ds * g.sum(dim, keepdim=True)


@register(GLU)
class GLUDerivatives(AlongAxisDerivatives):
    """``y = a σ(b)`` of the two halves ``x = (a, b)``: ``∂y/∂a = σ``, ``∂y/∂b = a σ (1 - σ)``."""

    def _halves(self, module: Any, mat: Tensor) -> tuple[Tensor, ...]:
        return mat.chunk(2, self.axis(module))

    def _pieces(self, module: Any, subsampling: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return a, σ and ``σ' = σ (1 - σ)``."""
        a, b = self._halves(module, self._x(module, subsampling))
        s = b.sigmoid()
        return a, s, s * (-b).sigmoid()

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        a, s, ds = self._pieces(module, subsampling)
        t_a, t_b = self._halves(module, mat)
        return s * t_a + a * ds * t_b

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        a, s, ds = self._pieces(module, subsampling)
        return torch.cat([s * mat, a * ds * mat], self.axis(module))

    def _residual_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        # ∂²y/∂a∂b = σ', ∂²y/∂b² = a σ'' with σ'' = σ' (1 - 2 σ)
        a, s, ds = self._pieces(module, subsampling)
        slope = self._g(module, g_out, subsampling) * ds
        t_a, t_b = self._halves(module, mat)
        return torch.cat([slope * t_b, slope * (t_a + a * (1 - 2 * s) * t_b)], self.axis(module))
