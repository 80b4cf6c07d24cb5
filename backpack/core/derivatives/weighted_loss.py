"""Weighted sums of the samples' losses: the Hessian of each is that of the loss times a weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from backpack.core.derivatives.automatic_loss import AutomaticLossDerivatives
from backpack.core.derivatives.lossbase import BaseLossDerivatives, is_negative, not_convex
from backpack.core.record.registry import derivatives_of, register
from backpack.core.rows import Rows
from backpack.custom_module.weighted_loss import WeightedLoss
from backpack.utils.subsampling import subsample


@register(WeightedLoss)
class WeightedLossDerivatives(BaseLossDerivatives):
    """Derivatives of ``backpack.custom_module.weighted_loss.WeightedLoss``.

    The rule of the loss inside does the work: the Hessian of sample n is ``a_n = c w_n`` times that
    of the loss. If there is no rule, the Hessian of the weighted loss is found by autograd.
    """

    def hessian_is_psd(self) -> bool:
        """Return False: weights may be negative."""
        return False

    def has_likelihood(self, module: Any) -> bool:
        """Return whether the loss inside has one."""
        return self._rule(module).has_likelihood(module.loss)

    def sees_chosen_rows(self, module: Any) -> bool:
        """Return whether the loss inside does."""
        return self._rule(module).sees_chosen_rows(module.loss)

    def predictions(self, module: Any) -> tuple[int, ...]:
        """Number the inputs that are predictions of the loss inside."""
        return self._rule(module).predictions(module)

    def couples_samples(self, module: Any) -> bool:
        """Return whether the loss inside does."""
        with self._inside(module) as (rule, loss):
            return rule.couples_samples(loss)

    def check_call(self, module: Any) -> None:
        """Refuse what the loss inside refuses."""
        super().check_call(module)
        with self._inside(module) as (rule, loss):
            rule.check_call(loss)

    def _rule(self, module: Any) -> BaseLossDerivatives:
        rule = derivatives_of(module.loss)
        return rule if isinstance(rule, BaseLossDerivatives) else AutomaticLossDerivatives()

    @contextmanager
    def _inside(self, module: Any) -> Iterator[tuple[BaseLossDerivatives, Any]]:
        """Give the loss inside the tensors of the call, without the weights."""
        rule, own, loss = self._rule(module), vars(module), module.loss
        if isinstance(rule, AutomaticLossDerivatives):  # evaluates the call as a whole
            yield rule, module
            return
        inputs = [own[f"input{i}"] for i in range(len(module._backpack_call.inputs))]
        attributes = {f"input{i}": x for i, x in enumerate(inputs[:2] + inputs[3:])}
        attributes |= {name: own[name] for name in ("output", "_backpack_call", "_backpack_saved")}
        vars(loss).update(attributes)
        try:
            yield rule, loss
        finally:
            for name in attributes:
                vars(loss).pop(name)

    def _scale(self, module: Any, subsampling: Rows) -> Tensor:
        """Return a: ``[N, *1]`` with as many axes as the prediction."""
        x = module.input0
        with self._inside(module) as (_, loss):
            if loss is module:
                return x.new_ones(())
            call = module._backpack_call
            scale = module.input2.to(x.dtype)
            if module.reduction == "mean":
                with torch.no_grad():
                    leaves = [leaf for i, leaf in enumerate(call.inputs) if i != 2]
                    scale = scale / loss.forward(*leaves).numel()
        return subsample(scale.reshape(-1, *(1,) * (x.dim() - 1)), subsampling=subsampling)

    def _need_convex(self, module: Any, subsampling: Rows) -> None:
        with self._inside(module) as (rule, loss):
            rule._need_convex(loss, subsampling)
        if is_negative(self._scale(module, subsampling)):
            raise not_convex(module, "the weight of a sample is negative")

    def _sqrt_hessian(self, module: Any, subsampling: Rows) -> Any:
        with self._inside(module) as (rule, loss):
            factor = rule._sqrt_hessian(loss, subsampling)
        return _scaled(factor, self._scale(module, subsampling).sqrt())

    def _sqrt_hessian_sampled(self, module: Any, mc_samples: int) -> Tensor:
        scale = self._scale(module, None)
        if is_negative(scale):
            raise not_convex(module, "the weight of a sample is negative")
        with self._inside(module) as (rule, loss):
            return rule._sqrt_hessian_sampled(loss, mc_samples) * scale.sqrt()

    def _hessian_factor(self, module: Any, subsampling: Rows) -> tuple[Any, Tensor | None]:
        with self._inside(module) as (rule, loss):
            columns, weights = rule._hessian_factor(loss, subsampling)
        scale = self._scale(module, subsampling)
        if is_negative(scale):
            signs = scale.sign().flatten().expand(columns.shape[:2])
            weights = signs if weights is None else weights * signs
        return _scaled(columns, scale.abs().sqrt()), weights

    def _hessian_mat_prod(self, module: Any, mat: Any, subsampling: Rows) -> Any:
        with self._inside(module) as (rule, loss):
            product = rule._hessian_mat_prod(loss, mat, subsampling)
        return _scaled(product, self._scale(module, subsampling))

    def _ggn_mat_prod(self, module: Any, mat: Any, subsampling: Rows) -> Any:
        with self._inside(module) as (rule, loss):
            product = rule._ggn_mat_prod(loss, mat, subsampling)
        return _scaled(product, self._scale(module, subsampling))


def _scaled(columns: Any, scale: Tensor) -> Any:
    return columns * scale if isinstance(columns, Tensor) else columns
