"""Scaled dot-product attention as a module."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F


class ScaledDotProductAttention(Module):
    """``softmax(scale q kᵀ + mask) v``: ``torch.nn.functional.scaled_dot_product_attention``."""

    def __init__(
        self,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ):
        """Store the options of the function.

        Args:
            dropout_p: Probability to drop an attention weight, in training mode.
            is_causal: Whether position l attends to positions up to l only.
            scale: Factor of the scores. Default: one over the square root of E.
            enable_gqa: Whether groups of query heads share a head of keys and values.
        """
        super().__init__()
        self.dropout_p = dropout_p
        self.is_causal = is_causal
        self.scale = scale
        self.enable_gqa = enable_gqa

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Average ``[*, L, E], [*, S, E], [*, S, Ev] -> [*, L, Ev]``.

        The mask, which expands to ``[*, L, S]``, is added to the scores, or True where a position
        takes part.
        """
        options = {"enable_gqa": True} if self.enable_gqa else {}
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p=self.dropout_p if self.training else 0.0,
            is_causal=self.is_causal,
            scale=self.scale,
            **options,
        )

    def extra_repr(self) -> str:
        """Return the options that differ from their defaults."""
        defaults = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
        own = {name: getattr(self, name) for name in defaults}
        return ", ".join(f"{name}={x}" for name, x in own.items() if x != defaults[name])
