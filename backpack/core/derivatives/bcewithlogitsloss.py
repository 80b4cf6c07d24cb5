"""Binary cross entropy, ``ℓ = -c · sum_i w_i [q_i y_i log σ(f_i) + (1 - y_i) log σ(-f_i)]``."""

from __future__ import annotations

from torch import Tensor
from torch.nn import BCEWithLogitsLoss

from backpack.core.derivatives.elementwise_losses import LogisticLossDerivatives, as_prediction
from backpack.core.record.context import Context
from backpack.core.record.registry import register


@register(BCEWithLogitsLoss)
class BCEWithLogitsLossDerivatives(LogisticLossDerivatives):
    """Derivatives of ``torch.nn.BCEWithLogitsLoss``: the Hessian is ``diag(a σ(f) (1 - σ(f)))``.

    ``a = c w (q y + 1 - y)`` with the weight w, the weight of positive answers q (``pos_weight``)
    and c = 1/(N D) for the mean.
    """

    def weight(self, c: Context) -> Tensor | float:
        """Return ``w (q y + 1 - y)``."""
        weight, pos_weight, y = super().weight(c), c.params.get("pos_weight"), c.inputs[1]
        return (
            weight
            if pos_weight is None
            else weight * (as_prediction(c.call, pos_weight) * y + 1 - y)
        )
