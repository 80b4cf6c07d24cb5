"""Bilinear layers, ``y_o = xᵀ W_o z + b_o``: linear layers with the input ``x ⊗ z``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, einsum
from torch.nn import Bilinear, Module

from backpack.core.derivatives.linear import positions
from backpack.core.derivatives.shared_weight import SharedWeightDerivatives
from backpack.core.record.registry import register
from backpack.core.record.tape import bound
from backpack.core.rows import Rows
from backpack.core.types import Grads
from backpack.utils.subsampling import subsample


@register(Bilinear)
class BilinearDerivatives(SharedWeightDerivatives):
    """Derivatives of ``torch.nn.Bilinear``.

    Letters: n sample, t position, o output, i and j features of the inputs x and z, v vector.
    """

    params = ("weight", "bias")

    def hessian_is_zero(self, module: Module) -> bool:
        """Return False: the output is linear in each input, but not in both."""
        return False

    def min_dims(self, module: Module) -> int:
        """Return 2: batch and features."""
        return 2

    def _inputs(self, module: Any, subsampling: Rows) -> tuple[Tensor, Tensor]:
        """Return x and z: ``[N, T, I]``, ``[N, T, J]``."""
        x, z = (
            positions(subsample(tensor, subsampling=subsampling).unsqueeze(0)).squeeze(0)
            for tensor in (module.input0, module.input1)
        )
        return x, z

    def _slopes(self, module: Any, subsampling: Rows) -> tuple[Tensor, Tensor]:
        """Return ``∂y/∂x = W z`` and ``∂y/∂z = Wᵀ x``: ``[N, T, O, I]``, ``[N, T, O, J]``."""
        x, z = self._inputs(module, subsampling)
        return einsum("oij,ntj->ntoi", module.weight, z), einsum("oij,nti->ntoj", module.weight, x)

    # ------------------------------------------------------------------ inputs

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        out = subsample(module.output, subsampling=subsampling)
        pairs = zip(self._slopes(module, subsampling), mat, strict=True)
        products = [einsum("ntoi,vnti->vnto", J, positions(t)) for J, t in pairs if t is not None]
        return sum(products[1:], start=products[0]).reshape(-1, *out.shape)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> tuple[Tensor, ...]:
        slopes = self._slopes(module, subsampling)
        products = [einsum("ntoi,vnto->vnti", J, positions(mat)) for J in slopes]
        return tuple(self._apart(module, product) for product in products)

    def _residual_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Any, mat: Any, subsampling: Rows
    ) -> list[Tensor | None]:
        # ∂²⟨g, y⟩/∂x∂z = sum_o g_o W_o
        mixed = einsum("nto,oij->ntij", self._gradient(module, g_out, subsampling), module.weight)
        t_x, t_z = (t if t is None else positions(t) for t in mat)
        d_x = None if t_z is None else einsum("ntij,vntj->vnti", mixed, t_z)
        d_z = None if t_x is None else einsum("ntij,vnti->vntj", mixed, t_x)
        return [d if d is None else self._apart(module, d) for d in (d_x, d_z)]

    def _gradient(self, module: Any, g_out: Any, subsampling: Rows) -> Tensor:
        """Return ``g_out``: ``[N, T, O]``."""
        self._need_g_out(module, g_out)
        (g,) = positions(subsample(g_out[0], subsampling=subsampling).unsqueeze(0))
        return g

    def _apart(self, module: Any, mat: Tensor) -> Tensor:
        """Give ``[V, N, T, I]`` the axes of the positions."""
        return mat.reshape(*mat.shape[:2], *module.output.shape[1:-1], mat.shape[-1])

    def mixed_residual(
        self,
        module: Any,
        g_out: Grads,
        inputs: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
        subsampling: Rows = None,
        sum_batch: bool = False,
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Apply the second derivative of ``⟨g_out, xᵀ W z + b⟩``, in which two of x, W, z vary."""
        with bound(module):
            g, (x, z) = (
                self._gradient(module, g_out, subsampling),
                self._inputs(module, subsampling),
            )
            like = next(mat for mat in [*params.values(), *inputs] if mat is not None)
            t_x, t_z = (
                like.new_zeros(len(like), *tensor.shape) if t is None else positions(t)
                for t, tensor in zip(inputs, (x, z), strict=True)
            )
            both = [self._apart(module, t) for t in (t_x, t_z)]
            pulled: Any = self._residual_mat_prod(module, None, g_out, both, subsampling)
            (d_x, d_z), d_params = pulled, {}
            if "weight" in params:
                mixed = einsum("nto,voij->vntij", g, params["weight"])
                d_x = d_x + self._apart(module, einsum("vntij,ntj->vnti", mixed, z))
                d_z = d_z + self._apart(module, einsum("vntij,nti->vntj", mixed, x))
                u = einsum("vnti,ntj->vntij", t_x, z) + einsum("nti,vntj->vntij", x, t_z)
                total = "voij" if sum_batch else "vnoij"
                d_params["weight"] = einsum(f"nto,vntij->{total}", g, u)
            if "bias" in params:
                samples = [] if sum_batch else [len(x)]
                d_params["bias"] = like.new_zeros(len(like), *samples, g.shape[-1])
        return [d_x, d_z], d_params

    # ------------------------------------------------------------------ parameters

    def reads(self, param_str: str, module: Any, rows: Rows) -> list[Tensor | None]:
        """Return what a parameter is multiplied with: for the weight ``x ⊗ z``, ``[N, T, I·J]``."""
        if param_str != "weight":
            return [None]
        x, z = self._inputs(module, rows)
        return [(x.unsqueeze(3) * z.unsqueeze(2)).flatten(2)]

    def pairs(
        self, param_str: str, module: Any, mat: Any, rows: Rows
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return ``mat`` at each position, and ``x ⊗ z``."""
        return [(positions(mat), u) for u in self.reads(param_str, module, rows)]

    def put_together(self, param_str: str, module: Any, parts: Sequence[Tensor]) -> Tensor:
        """Return ``[*, O, I, J]`` for the weight."""
        whole = super().put_together(param_str, module, parts)
        return whole.unflatten(-1, module.weight.shape[1:]) if param_str == "weight" else whole

    def _param_jac_mat_prod(self, param_str: str, *args: Any) -> Any:
        module, g_inp, g_out, mat, subsampling = args
        return super()._param_jac_mat_prod(
            param_str, module, g_inp, g_out, mat.flatten(2) if mat.dim() > 2 else mat, subsampling
        )
