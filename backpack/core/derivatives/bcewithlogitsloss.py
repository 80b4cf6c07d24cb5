"""Binary cross entropy, ``ℓ = -c · sum_i w_i [q_i y_i log σ(f_i) + (1 - y_i) log σ(-f_i)]``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import BCEWithLogitsLoss
from torch.nn.functional import logsigmoid

from backpack.core.derivatives.basederivatives import BatchAxis, Rows
from backpack.core.derivatives.lossbase import BaseLossDerivatives, same_shape, scaled_identity
from backpack.core.registry import register
from backpack.core.tape import describe
from backpack.utils.subsampling import subsample


@register(BCEWithLogitsLoss)
class BCEWithLogitsLossDerivatives(BaseLossDerivatives):
    """Derivatives of ``torch.nn.BCEWithLogitsLoss``: the Hessian is ``diag(a σ(f) (1 - σ(f)))``.

    ``a = c w (q y + 1 - y)`` with the weight w, the weight of positive answers q (``pos_weight``)
    and c = 1/(N D) for the mean.
    """

    batch_axis = BatchAxis.LEADING

    def _pieces(self, module: Any, subsampling: Rows) -> tuple[Tensor, Tensor]:
        """Return σ(f) and a, both ``[N, *d]``."""
        x, y = module.input0, module.input1
        same_shape(module, [x.shape, y.shape])
        weights = [w for w in (module.weight, module.pos_weight) if w is not None]
        if any(w.dim() > 1 for w in weights) and not module._backpack_call.is_plain:
            raise NotImplementedError(
                f"{describe(module)} has weights of shapes {[list(w.shape) for w in weights]}, but "
                "the batch axis is not the first. Transpose the prediction."
            )
        scale = torch.ones_like(x) if module.pos_weight is None else module.pos_weight * y + 1 - y
        if module.weight is not None:
            scale = scale * module.weight
        if module.reduction == "mean":
            scale = scale / x.numel()
        sigma = torch.sigmoid(subsample(x, subsampling=subsampling))
        return sigma, subsample(scale.to(x.dtype), subsampling=subsampling)

    def _hessian(self, module: Any, subsampling: Rows) -> Tensor:
        sigma, scale = self._pieces(module, subsampling)
        return scale * sigma * torch.sigmoid(-subsample(module.input0, subsampling=subsampling))

    def _sqrt_hessian(self, module: Any, subsampling: Rows) -> Tensor:
        _, scale = self._pieces(module, subsampling)
        x = subsample(module.input0, subsampling=subsampling)
        # not the root of the Hessian, which has no derivative where that is zero
        return scaled_identity(scale.sqrt() * ((logsigmoid(x) + logsigmoid(-x)) / 2).exp())

    def _sqrt_hessian_sampled(self, module: Any, mc_samples: int) -> Tensor:
        sigma, scale = self._pieces(module, None)
        drawn = torch.bernoulli(sigma.detach().expand(mc_samples, *sigma.shape))
        return scale.sqrt() * (sigma - drawn)

    def _hessian_mat_prod(self, module: Any, mat: Tensor, subsampling: Rows) -> Tensor:
        return mat * self._hessian(module, subsampling)
