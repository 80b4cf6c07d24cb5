"""Linear layers, ``y = x Wᵀ + b``, with any number of extra axes between batch and features."""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import inf
from typing import Any

from torch import Size, Tensor
from torch.nn import Linear, Module

from backpack.core.derivatives import affine
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.facts import always, constant
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.record.calls import Call
from backpack.core.record.context import Context, at_hand
from backpack.core.record.registry import register
from backpack.core.types import Pairs
from backpack.custom_module.transposed_linear import TransposedLinear


def positions(mat: Tensor) -> Tensor:
    """Return ``[V, N, *, O]`` as ``[V, N, T, O]``, T positions (1 without extra axes)."""
    return mat.unsqueeze(2) if mat.dim() == 3 else mat.flatten(2, -2)


@register(Linear)
class LinearDerivatives(BaseDerivatives):
    """Derivatives of ``torch.nn.Linear``.

    Letters: n sample, t position, o output, i input feature, v vector.
    """

    params = ("weight", "bias")
    batch_axis = BatchAxis.LEADING
    min_dims = constant(2)  # batch and features
    hessian_is_zero = is_linear_in_params = always
    repeats_output = always  # from the input and the parameters
    jacobian_is_constant = always  # it is W
    kronecker_rows_are_constant = True
    kronecker_rows_are_shared = True
    joins_bias = True
    has_positions_apart = True
    squares_with_input = True

    def jvp(self, c: Context, t: Tensor) -> Tensor:
        """Return ``W t``."""
        return t @ c.params["weight"].T

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        """Return ``Wᵀ v``."""
        return v @ c.params["weight"]

    def _get_additional_dims(self, module: Module) -> Size:
        """Return the sizes of the axes between batch and features (a name that programs use)."""
        return at_hand(module, None, None).input.shape[1:-1]

    def costly_gradients(self, call: Call, wanted: Set[str]) -> tuple[str, ...]:
        """Return the weight, if there are several positions, or somebody wants its gradient.

        The sum of a single position's individual gradients takes a product, too.
        """
        return ("weight",) if len(call.shape_out[0]) > 2 or "gradient" in wanted else ()

    def reaches_one_output(self, call: Call) -> bool:
        """Return whether there is a single position."""
        return len(call.shape_out[0]) == 2

    # ------------------------------------------------------------------ parameters

    def affine_jvp(self, c: Context, t: Tensor, name: str) -> Tensor:
        """Return ``t x``: the output is the sum of such products."""
        (x,) = self.affine_inputs(c, name)
        return affine.jvp_of_output(t, x, c.y)

    def affine_inputs(self, c: Context, name: str) -> list[Tensor | None]:
        """Return what a parameter is multiplied with: for the weight the input."""
        if name != "weight":
            return [None]
        x = c.x
        return [x.flatten(1, -2) if x.dim() > 2 else x]

    def affine(self, c: Context, name: str, v: Any) -> Pairs:
        """Return ``v`` at each position, and the input."""
        s = v.flatten(2, -2) if v.dim() > 3 else v
        (x,) = self.read_by_affine(c, name)
        return [(s, x)]

    def kron_rows(self, c: Context, name: str, v: Any, approximation: str | None = None) -> Tensor:
        """Sum or keep the positions: ``[V, N, *, O] -> [V, N', 1, O]``."""
        ((s, _),) = self.affine(c, name, v)
        return (affine.position_rows(s, approximation) if s.dim() > 3 else s).unsqueeze(2)

    def kron_inputs(
        self, c: Context, name: str, approximation: str | None = None, max_size: float = inf
    ) -> list[Tensor]:
        """Return A of the input for the weight, ``[I, I]``, or its diagonal ``[I]``."""
        (x,) = self.affine_inputs(c, name)
        return [] if x is None else [affine.input_factor(x, approximation, max_size)]


@register(TransposedLinear, "transformers.pytorch_utils.Conv1D")
class TransposedLinearDerivatives(LinearDerivatives):
    """Derivatives of ``y = x W + b``, a linear layer that stores its weight as ``[I, O]``.

    Everything about the weight is transposed; its Kronecker factors are ``[A, B]``.
    """

    kronecker_input_first = True
    squares_with_input = True
    hessian_is_zero = jacobian_is_constant = repeats_output = always

    def jvp(self, c: Context, t: Tensor) -> Tensor:
        """Return ``Wᵀ t``."""
        return t @ c.params["weight"]

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        """Return ``W v``."""
        return v @ c.params["weight"].T

    def weight_jvp(self, c: Context, t: Tensor) -> Tensor:
        """Return ``tᵀ x``."""
        return self.affine_jvp(c, t.mT, "weight")

    def assemble(self, c: Context, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return ``[*, I, O]`` for the weight."""
        whole = super().assemble(c, name, parts)
        return whole.mT if name == "weight" else whole
