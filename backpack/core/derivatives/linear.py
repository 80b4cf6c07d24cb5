"""Linear and bilinear layers, with any number of extra axes between batch and features."""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import inf
from typing import Any

from torch import Size, Tensor, einsum
from torch.nn import Bilinear, Linear, Module

from backpack.core import fast
from backpack.core.derivatives import affine
from backpack.core.derivatives.basederivatives import FIRST_DERIVATIVES, BaseDerivatives
from backpack.core.derivatives.facts import always, constant, never
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.record.calls import Call
from backpack.core.record.context import Context, at_hand
from backpack.core.record.registry import register
from backpack.core.types import Changes, OfInputs, OfParams, Pairs
from backpack.custom_module.transposed_linear import TransposedLinear


def positions(mat: Tensor) -> Tensor:
    """Return ``[V, N, *, O]`` as ``[V, N, T, O]``, T positions (1 without extra axes)."""
    return mat.unsqueeze(2) if mat.dim() == 3 else mat.flatten(2, -2)


@register(Linear)
class LinearDerivatives(BaseDerivatives):
    """Derivatives of ``torch.nn.Linear``, ``y = x Wᵀ + b``.

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
        return t @ c.params["weight"].T

    def vjp(self, c: Context, v: Tensor) -> Tensor:
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
        return t @ c.params["weight"]

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        return v @ c.params["weight"].T

    def weight_jvp(self, c: Context, t: Tensor) -> Tensor:
        """Return ``tᵀ x``."""
        return self.affine_jvp(c, t.mT, "weight")

    def assemble(self, c: Context, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return ``[*, I, O]`` for the weight."""
        whole = super().assemble(c, name, parts)
        return whole.mT if name == "weight" else whole


@register(Bilinear)
class BilinearDerivatives(BaseDerivatives):
    """Derivatives of ``torch.nn.Bilinear``, ``y_o = xᵀ W_o z + b_o``: linear in ``x ⊗ z``.

    Letters: n sample, t position, o output, i and j features of the inputs x and z, v vector.
    """

    params = ("weight", "bias")
    min_dims = constant(2)  # batch and features
    is_linear_in_params = always
    hessian_is_zero = never  # the output is linear in each input, but not in both

    def _inputs(self, c: Context) -> tuple[Tensor, Tensor]:
        """Return x and z: ``[N, T, I]``, ``[N, T, J]``."""
        x, z = (positions(c.select(one).unsqueeze(0)).squeeze(0) for one in c.inputs)
        return x, z

    def _slopes(self, c: Context) -> tuple[Tensor, Tensor]:
        """Return ``∂y/∂x = W z`` and ``∂y/∂z = Wᵀ x``: ``[N, T, O, I]``, ``[N, T, O, J]``."""
        (x, z), weight = self._inputs(c), c.params["weight"]
        return einsum("oij,ntj->ntoi", weight, z), einsum("oij,nti->ntoj", weight, x)

    def jvp(self, c: Context, t: Any) -> Tensor:
        """Return ``W z t_x + Wᵀ x t_z``."""
        products = [
            einsum("ntoi,vnti->vnto", J, positions(one))
            for J, one in zip(self._slopes(c), t, strict=True)
            if one is not None
        ]
        return sum(products[1:], start=products[0]).reshape(-1, *c.y.shape)

    def vjp(self, c: Context, v: Tensor) -> tuple[Tensor, ...]:
        """Return ``(W z)ᵀ v`` and ``(Wᵀ x)ᵀ v``."""
        products = [einsum("ntoi,vnto->vnti", J, positions(v)) for J in self._slopes(c)]
        return tuple(self._unflatten_positions(c, product) for product in products)

    def _unflatten_positions(self, c: Context, mat: Tensor) -> Tensor:
        """Give ``[V, N, T, I]`` the axes of the positions."""
        return mat.reshape(*mat.shape[:2], *c.output.shape[1:-1], mat.shape[-1])

    @fast.body("The second derivative is a formula.", *FIRST_DERIVATIVES)
    def mixed_hvp(
        self, c: Context, inputs: OfInputs, params: OfParams, sum_batch: bool = False
    ) -> Changes:
        """Apply the second derivative of ``⟨g, xᵀ W z + b⟩``, in which two of x, W, z vary."""
        grad: Any = c.grad_out[0]
        (g,), (x, z) = positions(c.select(grad).unsqueeze(0)), self._inputs(c)
        like = next(mat for mat in [*params.values(), *inputs] if mat is not None)
        t_x, t_z = (
            like.new_zeros(len(like), *tensor.shape) if t is None else positions(t)
            for t, tensor in zip(inputs, (x, z), strict=True)
        )
        mixed = einsum("nto,oij->ntij", g, c.params["weight"])  # ∂²⟨g, y⟩/∂x∂z = sum_o g_o W_o
        d_x, d_z = einsum("ntij,vntj->vnti", mixed, t_z), einsum("ntij,vnti->vntj", mixed, t_x)
        d_params = {}
        if "weight" in params:
            moved = einsum("nto,voij->vntij", g, params["weight"])
            d_x = d_x + einsum("vntij,ntj->vnti", moved, z)
            d_z = d_z + einsum("vntij,nti->vntj", moved, x)
            u = einsum("vnti,ntj->vntij", t_x, z) + einsum("nti,vntj->vntij", x, t_z)
            total = "voij" if sum_batch else "vnoij"
            d_params["weight"] = einsum(f"nto,vntij->{total}", g, u)
        if "bias" in params:
            samples = [] if sum_batch else [len(x)]
            d_params["bias"] = like.new_zeros(len(like), *samples, g.shape[-1])
        return [self._unflatten_positions(c, d) for d in (d_x, d_z)], d_params

    def affine_inputs(self, c: Context, name: str) -> list[Tensor | None]:
        """Return what a parameter is multiplied with: for the weight ``x ⊗ z``, ``[N, T, I·J]``."""
        if name != "weight":
            return [None]
        x, z = self._inputs(c)
        return [(x.unsqueeze(3) * z.unsqueeze(2)).flatten(2)]

    def affine(self, c: Context, name: str, v: Any) -> Pairs:
        """Return ``v`` at each position, and ``x ⊗ z``."""
        return [(positions(v), u) for u in self.read_by_affine(c, name)]

    def assemble(self, c: Context, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return ``[*, O, I, J]`` for the weight."""
        (whole,) = parts
        return whole.unflatten(-1, c.params["weight"].shape[1:]) if name == "weight" else whole

    def affine_jvp(self, c: Context, t: Tensor, name: str) -> Tensor:
        """Multiply with ``x ⊗ z``."""
        (u,) = self.affine_inputs(c, name)
        return affine.jvp_of_output(t.flatten(2) if name == "weight" else t, u, c.y)
