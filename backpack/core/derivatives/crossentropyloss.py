"""Softmax cross entropy, ``ℓ = c · sum_n w_n (-sum_k t_nk log p_nk)`` with ``p = softmax(f)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss

from backpack.core.derivatives.basederivatives import Rows
from backpack.core.derivatives.lossbase import BaseLossDerivatives
from backpack.core.registry import register
from backpack.core.tape import describe
from backpack.utils.subsampling import subsample


@register(CrossEntropyLoss)
class CrossEntropyLossDerivatives(BaseLossDerivatives):
    """Derivatives of ``torch.nn.CrossEntropyLoss``: the Hessian is ``a (diag(p) - p pᵀ)``.

    The prediction has shape ``[N, C, *d]``. The scale a, of shape ``[N, *d]``, collects the
    reduction, class weights, label smoothing, probabilities as targets and ``ignore_index``.
    """

    def _scale(self, module: Any) -> Tensor:
        """Return the factor a in front of ``diag(p) - p pᵀ``: ``[N, *d]``."""
        x, y = module.input0, module.input1
        if x.dim() < 2:
            raise ValueError(
                f"{describe(module)}: the prediction needs a batch axis, got shape {list(x.shape)}."
            )
        num_classes = x.shape[1]
        weight = x.new_ones(num_classes) if module.weight is None else module.weight.to(x.dtype)
        smooth = module.label_smoothing
        if y.is_floating_point():  # the target is a distribution over the classes
            target = (1 - smooth) * y + smooth / num_classes
            scale = torch.einsum("nc...,c->n...", target, weight)
            total: Any = scale.numel()
        else:
            kept = y != module.ignore_index
            own = torch.where(kept, weight[y.where(kept, y.new_zeros(()))], 0.0)
            scale = (1 - smooth) * own + smooth / num_classes * weight.sum() * kept
            total = own.sum()
        return scale / total if module.reduction == "mean" else scale

    def _pieces(self, module: Any, subsampling: Rows) -> tuple[Tensor, Tensor]:
        """Return p ``[N, C, *d]`` and a ``[N, 1, *d]``."""
        p = subsample(module.input0, subsampling=subsampling).softmax(1)
        return p, subsample(self._scale(module), subsampling=subsampling).unsqueeze(1)

    def _sqrt_hessian(self, module: Any, subsampling: Rows) -> Tensor:
        p, scale = self._pieces(module, subsampling)
        # S = sqrt(a) (diag(sqrt(p)) - p sqrt(p)ᵀ): column k is sqrt(p_k) (e_k - p)
        log_p = subsample(module.input0, subsampling=subsampling).log_softmax(1)
        roots = scale.sqrt() * (log_p / 2).exp()  # the root of a p of zero has no derivative
        classes = range(p.shape[1])
        columns = -roots.movedim(1, 0).unsqueeze(2) * p  # [C, N, C, *d]
        columns[classes, :, classes] += roots.movedim(1, 0)
        positions = p.shape[2:].numel()
        if positions == 1:
            return columns
        # different positions are independent: a column for each class and position
        apart = torch.eye(positions, dtype=p.dtype, device=p.device)
        columns = torch.einsum("knct,ts->ksnct", columns.flatten(3), apart)
        return columns.reshape(-1, *p.shape)

    def _sqrt_hessian_sampled(self, module: Any, mc_samples: int) -> Tensor:
        p, scale = self._pieces(module, None)
        rows = p.detach().movedim(1, -1).flatten(0, -2)
        drawn = torch.multinomial(rows, mc_samples, replacement=True)  # [N·positions, M]
        one_hot = torch.nn.functional.one_hot(drawn.T, p.shape[1]).to(p.dtype)
        one_hot = one_hot.reshape(mc_samples, p.shape[0], *p.shape[2:], p.shape[1])
        return scale.sqrt() * (p - one_hot.movedim(-1, 2))

    def _hessian_mat_prod(self, module: Any, mat: Tensor, subsampling: Rows) -> Tensor:
        p, scale = self._pieces(module, subsampling)
        return scale * (p * mat - p * (p * mat).sum(2, keepdim=True))
