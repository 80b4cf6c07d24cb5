"""Activations that act on each entry alone: ``y = f(x)``, with Jacobian ``diag(f'(x))``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import softplus

from backpack.core import fast
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.facts import always, constant, never
from backpack.core.derivatives.reductions import gram
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.layout import Layout
from backpack.core.record.registry import register


class ElementwiseDerivatives(BaseDerivatives):
    """Derivatives of ``y = f(x)``, applied to each entry. A subclass gives ``df`` and ``d2f``."""

    batch_axis = BatchAxis.LEADING
    trailing_axes = constant(0)

    def autograd_stores(self, call: Call) -> bool:
        """Return whether the output says everything: autograd keeps it as well."""
        return self.reads_output

    def df(self, c: Context) -> Tensor:
        """First derivative ``f'(x)``: ``[*in]``."""
        raise NotImplementedError

    def d2f(self, c: Context) -> Tensor:
        """Second derivative ``f''(x)``: ``[*in]``."""
        raise NotImplementedError

    hessian_is_zero = never  # unless a subclass says otherwise
    hessian_is_diagonal = always

    def _slope(self, c: Context) -> Tensor:
        """Return ``f'(x)``, which is computed once in a context."""
        found = vars(c).get("slope")
        if found is None:
            found = vars(c)["slope"] = self.df(c)
        return found

    def jvp(self, c: Context, t: Tensor) -> Tensor:
        return t * self._slope(c)

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        return v * self._slope(c)

    @fast.body("Diagonal Jacobians average to one matrix of factors.", "vjp")
    def batch_averaged(self, c: Context, mat: Tensor) -> Tensor:
        """Multiply with the average of ``f' f'ᵀ``."""
        df = self.df(c).unsqueeze(-1).flatten(1)  # a sample may be a number alone
        return gram(df, len(df)).mul_(mat)

    def hessian_diag(self, c: Context) -> Tensor:
        if not self.is_curved(c.call):
            return super().hessian_diag(c)
        g: Any = c.grad_out[0]
        return c.select(g) * self.d2f(c)


class PiecewiseLinearDerivatives(ElementwiseDerivatives):
    """An activation made of straight pieces: the second derivative is zero (almost everywhere)."""

    hessian_is_zero = always


@register(nn.ReLU)
class ReLUDerivatives(PiecewiseLinearDerivatives):
    """``f'(x) = [x > 0] = [y > 0]``."""

    reads_output = True
    reads_input = False

    def df(self, c: Context) -> Tensor:
        y = c.y
        return (y > 0).to(y.dtype)


@register(nn.LeakyReLU)
class LeakyReLUDerivatives(PiecewiseLinearDerivatives):
    """``f'(x) = 1 if x > 0 else a``."""

    def df(self, c: Context) -> Tensor:
        x = c.x
        return torch.where(x > 0, x.new_ones(()), x.new_tensor(c.module.negative_slope))


@register(nn.PReLU)
class PReLUDerivatives(PiecewiseLinearDerivatives):
    """``y = max(x, 0) + a min(x, 0)``, with one trained slope or one for each channel."""

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
        return torch.where(c.x > 0, 1, self._spread(c, c.params["weight"]))

    def _spread(self, c: Context, t: Tensor) -> Tensor:
        """Give ``[V, *p]`` (or ``[*p]``) the axes of ``[V, N, *]`` (or ``[N, *]``)."""
        dims, channels = c.input.dim(), c.module.num_parameters
        shape = (1,) * dims if channels == 1 else (1, channels, *(1,) * (dims - 2))
        return t.reshape(*t.shape[: t.dim() - c.params["weight"].dim()], *shape)

    def weight_jvp(self, c: Context, t: Tensor) -> Tensor:
        """Multiply with ``∂y/∂a = min(x, 0)``."""
        return self._spread(c, t) * c.x.clamp(max=0)

    def weight_vjp(self, c: Context, v: Tensor) -> Tensor:
        """Multiply with ``min(x, 0)``, and sum over what shares a slope."""
        products = v * c.x.clamp(max=0)
        sums = products.reshape(*v.shape[:2], c.module.num_parameters, -1).sum(3)
        return sums.reshape(*v.shape[:2], *c.params["weight"].shape)


@register(nn.Sigmoid)
class SigmoidDerivatives(ElementwiseDerivatives):
    """``y = σ(x)``: ``f' = y (1 - y)``, ``f'' = y (1 - y) (1 - 2 y)``."""

    needs_output = True
    reads_output = True
    reads_input = False

    def df(self, c: Context) -> Tensor:
        y = c.y
        return y * (1 - y)

    def d2f(self, c: Context) -> Tensor:
        y = c.y
        return y * (1 - y) * (1 - 2 * y)


@register(nn.Tanh)
class TanhDerivatives(ElementwiseDerivatives):
    """``y = tanh(x)``: ``f' = 1 - y²``, ``f'' = -2 y (1 - y²)``."""

    needs_output = True
    reads_output = True
    reads_input = False

    def df(self, c: Context) -> Tensor:
        return 1 - c.y.square()

    def d2f(self, c: Context) -> Tensor:
        y = c.y
        return -2 * y * (1 - y.square())


@register(nn.LogSigmoid)
class LogSigmoidDerivatives(ElementwiseDerivatives):
    """``y = log σ(x)``: ``f' = σ(-x)``, ``f'' = -σ(x) σ(-x)``."""

    def df(self, c: Context) -> Tensor:
        return torch.sigmoid(-c.x)

    def d2f(self, c: Context) -> Tensor:
        x = c.x
        return -torch.sigmoid(x) * torch.sigmoid(-x)


class ExponentialUnitDerivatives(ElementwiseDerivatives):
    """``f(x) = λ x`` for positive x, else ``λ α (exp(β x) - 1)``.

    A subclass says what λ, α and β of a module are.
    """

    coefficients: Callable[[Any], tuple[float, float, float]]

    def df(self, c: Context) -> Tensor:
        x, (scale, alpha, beta) = c.x, self.coefficients(c.module)
        # min(x, 0): exp of a large positive x would be inf, and inf * 0 is nan in a double backward
        slope = alpha * beta * (beta * x.clamp(max=0)).exp()
        return scale * torch.where(x > 0, 1.0, slope).to(x.dtype)

    def d2f(self, c: Context) -> Tensor:
        x, (scale, alpha, beta) = c.x, self.coefficients(c.module)
        slope = alpha * beta**2 * (beta * x.clamp(max=0)).exp()
        return scale * torch.where(x >= 0, 0.0, slope).to(x.dtype)


@register(nn.ELU)
class ELUDerivatives(ExponentialUnitDerivatives):
    """ELU: λ = β = 1."""

    coefficients = staticmethod(lambda module: (1.0, module.alpha, 1.0))


@register(nn.CELU)
class CELUDerivatives(ExponentialUnitDerivatives):
    """CELU: λ = 1, β = 1/α."""

    coefficients = staticmethod(lambda module: (1.0, module.alpha, 1 / module.alpha))


@register(nn.SELU)
class SELUDerivatives(ExponentialUnitDerivatives):
    """SELU: the fixed point of Klambauer et al. (2017), as in torch; β = 1."""

    coefficients = staticmethod(lambda module: (1.0507009873554805, 1.6732632423543772, 1.0))


# --------------------------------------------------------------------------------------
# Formulas as data. At kinks they agree with autograd.
# --------------------------------------------------------------------------------------

Formula = Callable[[Any, Tensor], Tensor]  # of the module and x


def _gelu(module: Any, x: Tensor) -> Tensor:
    """``Φ + x φ``; with ``t = tanh(u)`` for Φ: ``(1 + t + x (1 - t²) u') / 2``."""
    x = x.clamp(-20, 20)  # further out, the formula is 0 * inf
    if module.approximate == "none":
        return torch.erfc(-x / sqrt(2)) / 2 + x * _normal(x)
    t, du, _ = _gelu_tanh(x)
    return (1 + t + x * (1 - t * t) * du) / 2


def _gelu_2(module: Any, x: Tensor) -> Tensor:
    """``(2 - x²) φ``; with tanh: ``(1 - t²) (u' - x t u'² + x u'' / 2)``."""
    x = x.clamp(-20, 20)
    if module.approximate == "none":
        return (2 - x * x) * _normal(x)
    t, du, d2u = _gelu_tanh(x)
    return (1 - t * t) * (du - x * t * du * du + x * d2u / 2)


def _normal(x: Tensor) -> Tensor:
    """Density φ of the standard normal distribution."""
    return (-x * x / 2).exp() / sqrt(2 * pi)


def _gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``tanh(u)``, ``u'``, ``u''`` for ``u = sqrt(2/π) (x + 0.044715 x³)``."""
    k, c = sqrt(2 / pi), 0.044715
    return (k * (x + c * x**3)).tanh(), k * (1 + 3 * c * x * x), 6 * k * c * x


def _mish(module: Any, x: Tensor) -> Tensor:
    """``w + x w'`` for ``w = tanh(softplus(x))``, ``w' = (1 - w²) σ``."""
    w = softplus(x).tanh()
    return w + x * (1 - w * w) * x.sigmoid()


def _mish_2(module: Any, x: Tensor) -> Tensor:
    """``2 w' + x w''`` with ``w'' = (1 - w²) σ (1 - σ - 2 w σ)``."""
    x = x.clamp(max=40)
    w, s = softplus(x).tanh(), x.sigmoid()
    return (1 - w * w) * s * (2 + x * (1 - s - 2 * w * s))


def _silu_2(module: Any, x: Tensor) -> Tensor:
    """``σ (1 - σ) (2 + x (1 - 2 σ))``."""
    s, c = x.sigmoid(), (-x).sigmoid()
    return s * c * (2 + x * (c - s))


def _softplus_2(m: Any, x: Tensor) -> Tensor:
    """``β σ (1 - σ)`` of βx; 0 where torch takes the function to be straight."""
    x = m.beta * x
    return torch.where(x < m.threshold, m.beta * x.sigmoid() * (-x).sigmoid(), 0)


# f' and f''
SMOOTH: Mapping[type[Module], tuple[Formula, Formula]] = {
    nn.GELU: (_gelu, _gelu_2),
    nn.Hardswish: (
        lambda m, x: torch.where(x.abs() < 3, x / 3 + 0.5, (x > 0).to(x.dtype)),
        lambda m, x: (x.abs() < 3).to(x.dtype) / 3,
    ),
    nn.Mish: (_mish, _mish_2),
    nn.SiLU: (lambda m, x: x.sigmoid() * (1 + x * (-x).sigmoid()), _silu_2),
    nn.Softplus: (
        lambda m, x: torch.where(m.beta * x > m.threshold, 1, (m.beta * x).sigmoid()),
        _softplus_2,
    ),
    nn.Softsign: (
        lambda m, x: (1 / (1 + x.abs())).square(),
        lambda m, x: -2 * x.sign() * (1 / (1 + x.abs())) ** 3,
    ),
    nn.Tanhshrink: (
        lambda m, x: x.tanh().square(),
        lambda m, x: 2 * x.tanh() * (1 - x.tanh().square()),
    ),
}


def _beyond(m: Any, x: Tensor) -> Tensor:
    return (x > m.lambd) | (x < -m.lambd)


def _between(m: Any, x: Tensor) -> Tensor:
    return (x > m.min_val) & (x < m.max_val)


# f'
STRAIGHT: Mapping[type[Module], Formula] = {
    nn.Hardshrink: _beyond,
    nn.Hardsigmoid: lambda m, x: (x.abs() < 3).to(x.dtype) / 6,
    nn.Hardtanh: _between,
    nn.ReLU6: _between,
    nn.Softshrink: _beyond,
    nn.Threshold: lambda m, x: x > m.threshold,
}


def _of(formulas: Mapping[type[Module], Any], module: Module) -> Any:
    """Look a module (of a class or a subclass) up."""
    return next(formulas[cls] for cls in type(module).__mro__ if cls in formulas)


# Activations of transformers, and modules of torch that compute the same.
SAME: Mapping[str, Module] = {
    "transformers.activations.GELUActivation": nn.GELU(),
    "transformers.activations.GELUTanh": nn.GELU("tanh"),
    "transformers.activations.NewGELUActivation": nn.GELU("tanh"),
    "transformers.activations.SiLUActivation": nn.SiLU(),
}


def _of_torch(module: Module) -> Module:
    """Return the module of torch that computes the same."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__)
    return next((SAME[name] for name in names if name in SAME), module)


@register(*SMOOTH, *SAME)
class SmoothDerivatives(ElementwiseDerivatives):
    """An activation of the table ``SMOOTH``, or one that computes the same."""

    def df(self, c: Context) -> Tensor:
        module = _of_torch(c.module)
        return _of(SMOOTH, module)[0](module, c.x)

    def d2f(self, c: Context) -> Tensor:
        module = _of_torch(c.module)
        return _of(SMOOTH, module)[1](module, c.x)


@register(*STRAIGHT)
class StraightDerivatives(PiecewiseLinearDerivatives):
    """An activation of the table ``STRAIGHT``."""

    def df(self, c: Context) -> Tensor:
        return _of(STRAIGHT, c.module)(c.module, c.x).to(c.input.dtype)
