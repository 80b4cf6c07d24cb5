"""Activations that act on each entry alone: ``y = f(x)``, with Jacobian ``diag(f'(x))``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import ELU, SELU, LeakyReLU, LogSigmoid, Module, ReLU, Sigmoid, Tanh

from backpack.core.derivatives.basederivatives import BaseDerivatives, Grads, Rows
from backpack.core.registry import register
from backpack.utils.subsampling import subsample


class ElementwiseDerivatives(BaseDerivatives):
    """Derivatives of ``y = f(x)``, applied to each entry. A subclass gives ``df`` and ``d2f``."""

    def df(self, module: Any, subsampling: Rows) -> Tensor:
        """First derivative ``f'(x)``: ``[*in]``."""
        raise NotImplementedError

    def d2f(self, module: Any, subsampling: Rows) -> Tensor:
        """Second derivative ``f''(x)``: ``[*in]``."""
        raise NotImplementedError

    def hessian_is_zero(self, module: Module) -> bool:
        """Return False: activations are nonlinear unless a subclass says otherwise."""
        return False

    def hessian_is_diagonal(self, module: Module) -> bool:
        """Return True: output i depends on input i alone."""
        return True

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return mat * self.df(module, subsampling)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return mat * self.df(module, subsampling)

    def _ea_jac_t_mat_jac_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        df = self.df(module, subsampling).flatten(1)
        return mat * (df.T @ df) / df.shape[0]

    def _hessian_diagonal(self, module: Any, g_inp: Grads, g_out: Any, subsampling: Rows) -> Tensor:
        if self.hessian_is_zero(module):
            return super()._hessian_diagonal(module, g_inp, g_out, subsampling)
        return subsample(g_out[0], subsampling=subsampling) * self.d2f(module, subsampling)


class PiecewiseLinearDerivatives(ElementwiseDerivatives):
    """An activation made of straight pieces: the second derivative is zero (almost everywhere)."""

    def hessian_is_zero(self, module: Module) -> bool:
        """Return True."""
        return True


def _x(module: Any, subsampling: Rows) -> Tensor:
    return subsample(module.input0, subsampling=subsampling)


def _y(module: Any, subsampling: Rows) -> Tensor:
    return subsample(module.output, subsampling=subsampling)


@register(ReLU)
class ReLUDerivatives(PiecewiseLinearDerivatives):
    """``f'(x) = [x > 0]``."""

    def df(self, module: Any, subsampling: Rows) -> Tensor:
        """First derivative ``[x > 0]``."""
        x = _x(module, subsampling)
        return (x > 0).to(x.dtype)


@register(LeakyReLU)
class LeakyReLUDerivatives(PiecewiseLinearDerivatives):
    """``f'(x) = 1 if x > 0 else a``."""

    def df(self, module: Any, subsampling: Rows) -> Tensor:
        """First derivative, 1 or the negative slope."""
        x = _x(module, subsampling)
        return torch.where(x > 0, x.new_ones(()), x.new_tensor(module.negative_slope))


@register(Sigmoid)
class SigmoidDerivatives(ElementwiseDerivatives):
    """``y = σ(x)``: ``f' = y (1 - y)``, ``f'' = y (1 - y) (1 - 2 y)``."""

    needs_output = True

    def df(self, module: Any, subsampling: Rows) -> Tensor:
        """First derivative ``y (1 - y)``."""
        y = _y(module, subsampling)
        return y * (1 - y)

    def d2f(self, module: Any, subsampling: Rows) -> Tensor:
        """Second derivative ``y (1 - y) (1 - 2 y)``."""
        y = _y(module, subsampling)
        return y * (1 - y) * (1 - 2 * y)


@register(Tanh)
class TanhDerivatives(ElementwiseDerivatives):
    """``y = tanh(x)``: ``f' = 1 - y²``, ``f'' = -2 y (1 - y²)``."""

    needs_output = True

    def df(self, module: Any, subsampling: Rows) -> Tensor:
        """First derivative ``1 - y²``."""
        return 1 - _y(module, subsampling).square()

    def d2f(self, module: Any, subsampling: Rows) -> Tensor:
        """Second derivative ``-2 y (1 - y²)``."""
        y = _y(module, subsampling)
        return -2 * y * (1 - y.square())


@register(LogSigmoid)
class LogSigmoidDerivatives(ElementwiseDerivatives):
    """``y = log σ(x)``: ``f' = σ(-x)``, ``f'' = -σ(x) σ(-x)``."""

    def df(self, module: Any, subsampling: Rows) -> Tensor:
        """First derivative ``σ(-x)``."""
        return torch.sigmoid(-_x(module, subsampling))

    def d2f(self, module: Any, subsampling: Rows) -> Tensor:
        """Second derivative ``-σ(x) σ(-x)``."""
        x = _x(module, subsampling)
        return -torch.sigmoid(x) * torch.sigmoid(-x)


class ExponentialUnitDerivatives(ElementwiseDerivatives):
    """``f(x) = λ x`` for positive x, else ``λ α (exp(x) - 1)``."""

    def coefficients(self, module: Any) -> tuple[float, float]:
        """Return λ and α."""
        raise NotImplementedError

    def df(self, module: Any, subsampling: Rows) -> Tensor:
        """First derivative: λ, or ``λ α exp(x)``."""
        x, (scale, alpha) = _x(module, subsampling), self.coefficients(module)
        # min(x, 0): exp of a large positive x would be inf, and inf * 0 is nan in a double backward
        return scale * torch.where(x > 0, 1.0, alpha * x.clamp(max=0).exp()).to(x.dtype)

    def d2f(self, module: Any, subsampling: Rows) -> Tensor:
        """Second derivative: 0, or ``λ α exp(x)``."""
        x, (scale, alpha) = _x(module, subsampling), self.coefficients(module)
        return scale * torch.where(x > 0, 0.0, alpha * x.clamp(max=0).exp()).to(x.dtype)


@register(ELU)
class ELUDerivatives(ExponentialUnitDerivatives):
    """ELU: λ = 1."""

    def coefficients(self, module: Any) -> tuple[float, float]:
        """Return λ and α."""
        return 1.0, module.alpha


@register(SELU)
class SELUDerivatives(ExponentialUnitDerivatives):
    """SELU: the fixed point of Klambauer et al. (2017), as in torch."""

    def coefficients(self, module: Any) -> tuple[float, float]:
        """Return λ and α."""
        return 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
