"""Losses that act on each entry alone: ``ℓ = c · sum_i w_i l(f_i, y_i)``, Hessian ``c w l''``.

The factor c is that of the reduction, 1/(N D) for the mean; the weight w is that of an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import logsigmoid

from backpack.core import fast
from backpack.core.derivatives.facts import constant
from backpack.core.derivatives.loss_hessian import SomeColumns
from backpack.core.derivatives.lossbase import (
    BaseLossDerivatives,
    is_negative,
    not_convex,
    scaled_identity,
    some_of_identity,
)
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.module_state import describe
from backpack.core.record.registry import register
from backpack.core.record.visits import Visit


class ElementwiseLossDerivatives(BaseLossDerivatives):
    """Derivatives of a loss that acts on each entry alone: the Hessian is diagonal.

    A subclass implements ``second``; ``score`` if the loss is a negative log likelihood; ``root``
    where the square root of the second derivative has a formula without a singularity.
    """

    batch_axis = BatchAxis.LEADING
    trailing_axes = constant(0)

    def couples_samples_unseen(self, call: Visit) -> bool:
        """Return whether predictions meet targets of other samples, which broadcast."""
        x, y = call.shape_in[:2]
        if super().couples_samples_unseen(call):
            return True
        if x is None or y is None or x == y:
            return False
        is_aligned = len(x) == len(y) and x[:1] == y[:1]
        if is_aligned and all(i in (1, j) for i, j in zip(x, y, strict=True)):
            return False  # an entry of a sample meets several targets of it
        if torch.broadcast_shapes(x, y) != x:
            return True
        return len(y) < len(x) and y[:1] == x[:1]

    def second(self, c: Context) -> Tensor:
        """Second derivative ``l''(f, y)``: ``[N, *d]``."""
        raise NotImplementedError

    def score(self, c: Context, mc_samples: int) -> Tensor:
        """First derivatives ``l'(f, y)`` of all rows, targets y drawn given f: ``[M, N, *d]``."""
        raise NotImplementedError

    def has_likelihood(self, module: Module) -> bool:
        """Return whether there is a ``score``."""
        return type(self).score is not ElementwiseLossDerivatives.score

    def root(self, c: Context) -> Tensor:
        """Square root of ``|l''|``: ``[N, *d]``."""
        second = self.second(c).abs()
        curved = second > 0  # the root of zero has no derivative
        return torch.where(curved, second.where(curved, 1).sqrt(), 0)

    def weight(self, c: Context) -> Tensor | float:
        """Weight of each entry without the factor of the reduction: ``[N, *d]``."""
        # that of a loss of a user may be neither a parameter nor a buffer
        weight = c.params.get("weight", getattr(c.module, "weight", None))
        return 1.0 if weight is None else as_prediction(c.call, weight)

    def _scale(self, c: Context) -> Tensor:
        """Return ``c w``: ``[N, *d]``."""
        x, y = c.input, c.inputs[1]
        if x.shape != y.shape:  # a sample's Hessian would not be its own
            raise ValueError(
                f"{describe(c.module)}: prediction and target need one shape, got "
                f"{[list(x.shape), list(y.shape)]}."
            )
        terms = max(1, x.numel()) if c.module.reduction == "mean" else 1
        scale = torch.full_like(x, 1 / terms) * self.weight(c)
        return c.select(scale.to(x.dtype))

    def need_convex(self, c: Context) -> None:
        """Refuse negative second derivatives."""
        hessian = self._hessian(c)
        if is_negative(hessian):
            raise not_convex(c.module, f"a second derivative is {hessian.min().item():g}")

    def _hessian(self, c: Context) -> Tensor:
        return self._scale(c) * self.second(c)

    def hessian_root(self, c: Context) -> Tensor:
        """Return ``diag(sqrt(c w l''))``."""
        return scaled_identity(self._root_of_diagonal(c))

    def _root_of_diagonal(self, c: Context) -> Tensor:
        return self._scale(c).abs().sqrt() * self.root(c)

    @fast.body("Columns are made when they travel.", "hessian_root")
    def some_of_root(self, c: Context) -> SomeColumns:
        """Return what makes columns of ``diag(sqrt(c w l''))``."""
        return some_of_identity(self._root_of_diagonal(c))

    @fast.body("Columns are made when they travel.", "some_of_root", "signed_hessian_root")
    def some_of_signed_root(self, c: Context) -> SomeColumns | None:
        """Return the same, unless a second derivative is negative."""
        return None if is_negative(self._hessian(c)) else self.some_of_root(c)

    @fast.body("The sum of diagonal matrices is diagonal.", "hessian_root")
    def hessian_sum(self, c: Context) -> Tensor:
        """Return ``diag(sum_n c w l'')``."""
        self.check_call(c)
        self.need_convex(c)
        return self._hessian(c).sum(0).flatten().diag()

    @fast.body("That is what it is for.", "hessian_sum", "hessian_root")
    def knows_hessian_sum(self, c: Context) -> bool:
        """Return that it is known."""
        return True

    def signed_hessian_root(self, c: Context) -> tuple[Tensor, Tensor | None]:
        """Return the root, or unit vectors with the Hessian as weights if some are negative."""
        hessian = self._hessian(c)
        if is_negative(hessian):
            return scaled_identity(torch.ones_like(hessian)), hessian.reshape(len(hessian), -1).T
        return self.hessian_root(c), None

    def sampled_hessian_root(self, c: Context, mc_samples: int) -> Tensor:
        """Return ``sqrt(c w) l'`` for targets drawn given f."""
        c = c.at(None)
        scale = self._scale(c)
        if is_negative(scale):
            raise not_convex(c.module, "a weight is negative")
        return scale.sqrt() * self.score(c, mc_samples)

    def hessian_product(self, c: Context, t: Tensor) -> Tensor:
        """Multiply with ``c w l''``."""
        return t * self._hessian(c)


def as_prediction(call: Call, tensor: Tensor) -> Tensor:
    """Broadcast a tensor to the prediction, and bring its samples to the same place."""
    place = call.place_in(0)
    whole = tensor.expand(call.shape_in[0] or ())
    if place is not None and place.owners is not None:  # rows as they are
        return whole.movedim(place.axis, 0)
    return whole if place is None else place.to_canonical(whole)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``, and 0 where a is: there, b may be zero as well."""
    return torch.where(a == 0, 0, a / b.where(a != 0, 1))


def drawn(sample: Any, parameter: Tensor, mc_samples: int) -> Tensor:
    """Draw from a distribution with a parameter for each entry: ``[*d] -> [M, *d]``."""
    return sample(parameter.detach().expand(mc_samples, *parameter.shape))


@register(nn.MSELoss)
class MSELossDerivatives(ElementwiseLossDerivatives):
    """Derivatives of ``torch.nn.MSELoss``, ``l = (f - y)²``: the Hessian is ``2 c I``."""

    def second(self, c: Context) -> Tensor:
        return torch.full_like(c.x, 2)

    def score(self, c: Context, mc_samples: int) -> Tensor:
        """Return ``2 (f - y)`` with ``y ~ N(f, I/2)``: sqrt(2) times a standard normal."""
        return sqrt(2) * drawn(torch.randn_like, c.input, mc_samples)


@register(nn.L1Loss, nn.HingeEmbeddingLoss, nn.KLDivLoss)
class PiecewiseLinearLossDerivatives(ElementwiseLossDerivatives):
    """Derivatives of losses that are linear, at least piecewise: ``l'' = 0``.

    ``KLDivLoss`` is linear in the log-probabilities that it reads, and its GGN zero. For the
    curvature of the softmax, use ``CrossEntropyLoss`` with probabilities as targets: its gradient
    is the same as that of ``LogSoftmax`` and ``KLDivLoss(reduction="batchmean")``.
    """

    def second(self, c: Context) -> Tensor:
        return torch.zeros_like(c.x)


@register(nn.MultiLabelMarginLoss)
class MultiLabelMarginLossDerivatives(PiecewiseLinearLossDerivatives):
    """Derivatives of ``MultiLabelMarginLoss``, which compares the classes: ``l'' = 0``."""

    trailing_axes = constant(1)
    has_classes = True


@register(nn.HuberLoss, nn.SmoothL1Loss)
class HuberLossDerivatives(ElementwiseLossDerivatives):
    """Derivatives of ``HuberLoss`` and ``SmoothL1Loss``: a parabola with straight lines outside.

    ``l'' = 1`` for ``|f - y| < delta`` (Huber 1964), ``1/beta`` for ``|f - y| < beta``, else 0.
    """

    def second(self, c: Context) -> Tensor:
        x, y = c.x, c.select(c.inputs[1])
        module = c.module
        huber = isinstance(module, nn.HuberLoss)
        width, height = (module.delta, 1.0) if huber else (module.beta, 1 / (module.beta or 1))
        return ((x - y).abs() < width) * torch.full_like(x, height)


@register(nn.GaussianNLLLoss)
class GaussianNLLLossDerivatives(ElementwiseLossDerivatives):
    """Derivatives of ``GaussianNLLLoss``, ``l = (f - y)² / 2v + …``: ``l'' = 1/v``.

    The variance v (at least ``eps``) is data.
    """

    def seen(
        self, call: Visit, inputs: Sequence[Any], outputs: Sequence[Tensor]
    ) -> tuple[list[Any], list[Tensor]]:
        """Broadcast the variance to the prediction as it was called with, before axes move."""
        xs, ys = super().seen(call, inputs, outputs)
        if isinstance(inputs[2], Tensor):
            xs[2] = as_prediction(call, _of_last_axis(inputs[2], inputs[0]))
        return xs, ys

    def _variance(self, c: Context) -> Tensor:
        x, var = c.input, c.inputs[2]
        if not isinstance(var, Tensor):
            return torch.full_like(x, max(var, c.module.eps))
        return _of_last_axis(var, x).expand(x.shape).clamp(min=c.module.eps)

    def second(self, c: Context) -> Tensor:
        return 1 / c.select(self._variance(c))

    def score(self, c: Context, mc_samples: int) -> Tensor:
        """Return ``(f - y)/v`` with ``y ~ N(f, v)``: a standard normal over ``sqrt(v)``."""
        variance = self._variance(c)
        return drawn(torch.randn_like, variance, mc_samples) / variance.sqrt()


def _of_last_axis(var: Tensor, x: Tensor) -> Tensor:
    """Return the variance with the last axis of x, if it is one for all of its entries."""
    return var.unsqueeze(-1) if var.dim() == x.dim() - 1 else var


@register(nn.PoissonNLLLoss)
class PoissonNLLLossDerivatives(ElementwiseLossDerivatives):
    """Derivatives of ``PoissonNLLLoss``, ``l = λ - y log λ`` for the rate λ.

    ``λ = exp(f)`` and ``l'' = λ``, or (``log_input=False``) ``λ = f + eps`` and ``l'' = y/λ²``, at
    the targets at hand; the expectation of the Monte-Carlo factor is the Fisher information
    ``1/λ``.
    """

    def second(self, c: Context) -> Tensor:
        x, y = c.x, c.select(c.inputs[1])
        rate = self._rate(c, x)
        return rate if c.module.log_input else ratio(y.to(x.dtype), rate.square())

    def root(self, c: Context) -> Tensor:
        if not c.module.log_input:
            return super().root(c)
        return (c.x / 2).exp()

    def score(self, c: Context, mc_samples: int) -> Tensor:
        """Return ``l'`` with y from the Poisson distribution of rate λ."""
        rate = self._rate(c, c.input)
        if is_negative(rate):
            raise ValueError(
                f"{describe(c.module)}: a rate is negative, there is no Poisson distribution to "
                "draw from. Let the network end in a Softplus, or use log_input=True."
            )
        y = drawn(torch.poisson, rate, mc_samples)
        return rate - y if c.module.log_input else 1 - ratio(y, rate.expand_as(y))

    def _rate(self, c: Context, x: Tensor) -> Tensor:
        return x.exp() if c.module.log_input else x + c.module.eps


@register(nn.BCELoss)
class BCELossDerivatives(ElementwiseLossDerivatives):
    """Derivatives of ``BCELoss``, ``l = -y log f - (1-y) log(1-f)`` for a probability f.

    ``l'' = y/f² + (1-y)/(1-f)²``, at the targets at hand. The expectation of the Monte-Carlo factor
    is the Fisher information ``1/(f (1-f))``; with a ``Sigmoid`` below, it is the GGN of
    ``BCEWithLogitsLoss``.
    """

    def second(self, c: Context) -> Tensor:
        x, y = c.x, c.select(c.inputs[1])
        return ratio(y, x.square()) + ratio(1 - y, (1 - x).square())

    def score(self, c: Context, mc_samples: int) -> Tensor:
        """Return ``(f - y)/(f (1-f))`` with ``y = 1`` of probability f."""
        x = c.input
        y = drawn(torch.bernoulli, x, mc_samples)
        return ratio(1 - y, 1 - x) - ratio(y, x.expand_as(y))


class LogisticLossDerivatives(ElementwiseLossDerivatives):
    """Derivatives of ``l = -y log σ(f) - (1-y) log σ(-f)``: ``l'' = σ(f) σ(-f)``."""

    def logit(self, c: Context) -> Tensor:
        """Return the argument of the logistic function σ: ``[N, *d]``."""
        return c.x

    def second(self, c: Context) -> Tensor:
        f = self.logit(c)
        return torch.sigmoid(f) * torch.sigmoid(-f)

    def root(self, c: Context) -> Tensor:
        """Return the square root, by logarithms: that of zero has no derivative."""
        f = self.logit(c)
        return ((logsigmoid(f) + logsigmoid(-f)) / 2).exp()

    def score(self, c: Context, mc_samples: int) -> Tensor:
        """Return ``σ(f) - y`` with ``y = 1`` of probability σ(f)."""
        sigma = torch.sigmoid(self.logit(c))
        return sigma - drawn(torch.bernoulli, sigma, mc_samples)


@register(nn.BCEWithLogitsLoss)
class BCEWithLogitsLossDerivatives(LogisticLossDerivatives):
    """Derivatives of ``BCEWithLogitsLoss``, ``l = -q y log σ(f) - (1-y) log σ(-f)``.

    The Hessian is ``diag(a σ(f) (1 - σ(f)))``, ``a = c w (q y + 1 - y)``, with the weight q of
    positive answers (``pos_weight``).
    """

    def weight(self, c: Context) -> Tensor | float:
        weight, pos_weight, y = super().weight(c), c.params.get("pos_weight"), c.inputs[1]
        return (
            weight
            if pos_weight is None
            else weight * (as_prediction(c.call, pos_weight) * y + 1 - y)
        )


@register(nn.SoftMarginLoss)
class SoftMarginLossDerivatives(LogisticLossDerivatives):
    """Derivatives of ``SoftMarginLoss``, ``log(1 + exp(-y f))``: ``l'' = y² σ(y f) σ(-y f)``."""

    def logit(self, c: Context) -> Tensor:
        return c.select(c.input * c.inputs[1])

    def weight(self, c: Context) -> Tensor | float:
        """Return ``y²``, which is 1 for targets ``±1``."""
        return c.inputs[1].square()


@register(nn.MultiLabelSoftMarginLoss)
class MultiLabelSoftMarginLossDerivatives(LogisticLossDerivatives):
    """Derivatives of ``MultiLabelSoftMarginLoss``: a mean over the classes, the last axis."""

    def weight(self, c: Context) -> Tensor | float:
        """Return the weight, with the mean over the C classes unless the reduction includes it."""
        shape = c.call.shape_in[0] or c.input.shape  # before axes move
        return super().weight(c) / (1 if c.module.reduction == "mean" else shape[-1])
