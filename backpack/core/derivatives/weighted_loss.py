"""Weighted sums of the samples' losses: the Hessian of each is that of the loss times a weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backpack.core.derivatives.automatic_loss import AutomaticLossDerivatives
from backpack.core.derivatives.facts import never
from backpack.core.derivatives.lossbase import BaseLossDerivatives, is_negative, not_convex
from backpack.core.record.context import Context
from backpack.core.record.registry import derivatives_of, register
from backpack.core.record.visits import Visit
from backpack.custom_module.weighted_loss import WeightedLoss


@register(WeightedLoss)
class WeightedLossDerivatives(BaseLossDerivatives):
    """Derivatives of ``backpack.custom_module.weighted_loss.WeightedLoss``.

    The rule of the loss inside does the work: the Hessian of sample n is ``a_n = c w_n`` times that
    of the loss. If there is no rule, the Hessian of the weighted loss is found by autograd.
    """

    hessian_is_psd = never  # weights may be negative

    def has_likelihood(self, module: Any) -> bool:
        return self._rule(module).has_likelihood(module.loss)

    def sees_chosen_rows(self, module: Any) -> bool:
        return self._rule(module).sees_chosen_rows(module.loss)

    def predictions(self, c: Context) -> tuple[int, ...]:
        return self._rule(c.module).predictions(c)

    def couples_samples_unseen(self, call: Visit) -> bool | None:
        """Return whether the loss inside does."""
        return self._rule(call.module).couples_samples_unseen(call)

    def couples_terms(self, c: Context) -> bool:
        rule, inside = self._inside(c)
        return rule.couples_terms(inside)

    def counted(self, c: Context) -> Tensor | None:
        rule, inside = self._inside(c)
        return rule.counted(inside)

    def check_call(self, c: Context) -> None:
        super().check_call(c)
        rule, inside = self._inside(c)
        rule.check_call(inside)

    def _rule(self, module: Any) -> BaseLossDerivatives:
        rule = derivatives_of(module.loss)
        return rule if isinstance(rule, BaseLossDerivatives) else AutomaticLossDerivatives()

    def _inside(self, c: Context) -> tuple[BaseLossDerivatives, Context]:
        """Return the rule of the loss inside and what it sees: the call without the weights."""
        rule = self._rule(c.module)
        if isinstance(rule, AutomaticLossDerivatives):  # evaluates the call as a whole
            return rule, c
        return rule, c.inside(c.module.loss, "loss.", [*c.inputs[:2], *c.inputs[3:]])

    def _scale(self, c: Context) -> Tensor:
        """Return a: ``[N, *1]`` with as many axes as the prediction."""
        x = c.input
        if isinstance(self._rule(c.module), AutomaticLossDerivatives):
            return x.new_ones(())
        scale = c.inputs[2].to(x.dtype)
        if c.module.reduction == "mean":
            leaves = [leaf for i, leaf in enumerate(c.call.inputs) if i != 2]
            with torch.no_grad(), c.call.as_it_was():
                scale = scale / c.module.loss.forward(*leaves).numel()
        return c.select(scale.reshape(-1, *(1,) * (x.dim() - 1)))

    def need_convex(self, c: Context) -> None:
        """Refuse what the loss inside refuses, and negative weights."""
        rule, inside = self._inside(c)
        rule.need_convex(inside)
        self._positive_scale(c)

    def _positive_scale(self, c: Context) -> Tensor:
        scale = self._scale(c)
        if is_negative(scale):
            raise not_convex(c.module, "the weight of a sample is negative")
        return scale

    def hessian_root(self, c: Context) -> Any:
        rule, inside = self._inside(c)
        return _scaled(rule.hessian_root(inside), self._scale(c).sqrt())

    def sampled_hessian_root(self, c: Context, mc_samples: int) -> Tensor:
        c = c.at(None)
        scale, (rule, inside) = self._positive_scale(c), self._inside(c)
        return rule.sampled_hessian_root(inside, mc_samples) * scale.sqrt()

    def signed_hessian_root(self, c: Context) -> tuple[Any, Tensor | None]:
        """Return that of the loss inside, times the root of ``|a|``, with the sign of a."""
        rule, inside = self._inside(c)
        columns, weights = rule.signed_hessian_root(inside)
        scale = self._scale(c)
        if is_negative(scale):
            signs = scale.sign().flatten().expand(columns.shape[:2])
            weights = signs if weights is None else weights * signs
        return _scaled(columns, scale.abs().sqrt()), weights

    def hessian_product(self, c: Context, t: Any) -> Any:
        rule, inside = self._inside(c)
        return _scaled(rule.hessian_product(inside, t), self._scale(c))

    def ggn_product(self, c: Context, t: Any) -> Any:
        rule, inside = self._inside(c)
        return _scaled(rule.ggn_product(inside, t), self._scale(c))


def _scaled(columns: Any, scale: Tensor) -> Any:
    return columns * scale if isinstance(columns, Tensor) else columns
