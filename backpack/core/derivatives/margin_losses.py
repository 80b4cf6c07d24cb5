"""Margins between classes, ``ℓ = c · sum_n 1/C sum_k max(0, m - f_y + f_k)^p``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import MultiMarginLoss
from torch.nn.functional import one_hot

from backpack.core.derivatives.facts import never
from backpack.core.derivatives.lossbase import BaseLossDerivatives, is_negative, not_convex
from backpack.core.record.context import Context
from backpack.core.record.module_state import describe
from backpack.core.record.registry import register


@register(MultiMarginLoss)
class MultiMarginLossDerivatives(BaseLossDerivatives):
    """Derivatives of ``torch.nn.MultiMarginLoss``.

    With ``d_k = e_k - e_y``, the Hessian is ``sum_k a_k d_k d_kᵀ``, where ``a_k = 2 c w_y / C`` for
    ``p = 2`` and classes k that violate the margin, else 0.
    """

    has_classes = True
    has_likelihood = never  # targets are not drawn from any distribution

    def _pieces(self, c: Context) -> tuple[Tensor, Tensor]:
        """Return a ``[N, C]`` and d ``[N, C, C]``, a row for each k."""
        x, y = c.input, c.inputs[1]
        if x.dim() < 2:
            raise ValueError(
                f"{describe(c.module)}: the prediction needs a batch axis, got shape "
                f"{list(x.shape)}."
            )
        num_rows, num_classes = x.shape
        true = one_hot(y, num_classes).to(x.dtype)
        differences = torch.eye(num_classes, dtype=x.dtype, device=x.device) - true.unsqueeze(1)
        violated = torch.einsum("nkc,nc->nk", differences, x) + c.module.margin > 0
        scale = torch.full_like(x, 2 / num_classes if c.module.p == 2 else 0) * violated
        if c.params.get("weight") is not None:
            scale = scale * c.params["weight"][y].unsqueeze(1)
        if c.module.reduction == "mean":
            scale = scale / num_rows
        return c.select(scale.to(x.dtype)), c.select(differences)

    def need_convex(self, c: Context) -> None:
        """Refuse negative weights."""
        scale, _ = self._pieces(c)
        if is_negative(scale):
            raise not_convex(c.module, "a weight is negative")

    def hessian_root(self, c: Context) -> Tensor:
        """Return the columns ``sqrt(a_k) d_k``."""
        scale, differences = self._pieces(c)
        return (scale.sqrt().unsqueeze(2) * differences).movedim(1, 0)

    def signed_hessian_root(self, c: Context) -> tuple[Tensor, Tensor | None]:
        """Return the columns d and the weights a."""
        scale, differences = self._pieces(c)
        return differences.movedim(1, 0), scale.T

    def hessian_product(self, c: Context, t: Tensor) -> Tensor:
        """Apply ``sum_k a_k d_k d_kᵀ``."""
        scale, differences = self._pieces(c)
        along = torch.einsum("nkc,vnc->vnk", differences, t) * scale
        return torch.einsum("nkc,vnk->vnc", differences, along)
