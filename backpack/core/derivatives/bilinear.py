"""Bilinear layers, ``y_o = xᵀ W_o z + b_o``: linear layers with the input ``x ⊗ z``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, einsum
from torch.nn import Bilinear

from backpack.core import fast
from backpack.core.derivatives import affine
from backpack.core.derivatives.basederivatives import FIRST_DERIVATIVES, BaseDerivatives
from backpack.core.derivatives.facts import always, constant, never
from backpack.core.derivatives.linear import positions
from backpack.core.record.context import Context
from backpack.core.record.registry import register
from backpack.core.types import Changes, OfInputs, OfParams, Pairs


@register(Bilinear)
class BilinearDerivatives(BaseDerivatives):
    """Derivatives of ``torch.nn.Bilinear``.

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

    # ------------------------------------------------------------------ inputs

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

    @fast.body("The second derivative is a formula.", *FIRST_DERIVATIVES)
    def hvp(self, c: Context, t: Any) -> list[Tensor | None]:
        """Apply ``∂²⟨g, y⟩/∂x∂z``."""
        return self._second(c, t)

    def _second(self, c: Context, t: Any) -> list[Tensor | None]:
        """Apply ``∂²⟨g, y⟩/∂x∂z = sum_o g_o W_o``."""
        mixed = einsum("nto,oij->ntij", self._gradient(c), c.params["weight"])
        t_x, t_z = (one if one is None else positions(one) for one in t)
        d_x = None if t_z is None else einsum("ntij,vntj->vnti", mixed, t_z)
        d_z = None if t_x is None else einsum("ntij,vnti->vntj", mixed, t_x)
        return [d if d is None else self._unflatten_positions(c, d) for d in (d_x, d_z)]

    def _gradient(self, c: Context) -> Tensor:
        """Return g: ``[N, T, O]``."""
        grad: Any = c.grad_out[0]
        (g,) = positions(c.select(grad).unsqueeze(0))
        return g

    def _unflatten_positions(self, c: Context, mat: Tensor) -> Tensor:
        """Give ``[V, N, T, I]`` the axes of the positions."""
        return mat.reshape(*mat.shape[:2], *c.output.shape[1:-1], mat.shape[-1])

    @fast.body("The second derivative is a formula.", *FIRST_DERIVATIVES)
    def mixed_hvp(
        self, c: Context, inputs: OfInputs, params: OfParams, sum_batch: bool = False
    ) -> Changes:
        """Apply the second derivative of ``⟨g, xᵀ W z + b⟩``, in which two of x, W, z vary."""
        g, (x, z) = self._gradient(c), self._inputs(c)
        like = next(mat for mat in [*params.values(), *inputs] if mat is not None)
        t_x, t_z = (
            like.new_zeros(len(like), *tensor.shape) if t is None else positions(t)
            for t, tensor in zip(inputs, (x, z), strict=True)
        )
        pulled: Any = self._second(c, [self._unflatten_positions(c, t) for t in (t_x, t_z)])
        (d_x, d_z), d_params = pulled, {}
        if "weight" in params:
            mixed = einsum("nto,voij->vntij", g, params["weight"])
            d_x = d_x + self._unflatten_positions(c, einsum("vntij,ntj->vnti", mixed, z))
            d_z = d_z + self._unflatten_positions(c, einsum("vntij,nti->vntj", mixed, x))
            u = einsum("vnti,ntj->vntij", t_x, z) + einsum("nti,vntj->vntij", x, t_z)
            total = "voij" if sum_batch else "vnoij"
            d_params["weight"] = einsum(f"nto,vntij->{total}", g, u)
        if "bias" in params:
            samples = [] if sum_batch else [len(x)]
            d_params["bias"] = like.new_zeros(len(like), *samples, g.shape[-1])
        return [d_x, d_z], d_params

    # ------------------------------------------------------------------ parameters

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
