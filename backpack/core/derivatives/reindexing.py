"""Custom modules that move entries of a sample or merge tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Size, Tensor
from torch.nn import Module

from backpack.core.derivatives.basederivatives import BaseDerivatives, Grads, Rows
from backpack.core.derivatives.linear_maps import LinearMapDerivatives
from backpack.core.registry import register
from backpack.core.tape import describe
from backpack.custom_module.branching import SumModule
from backpack.custom_module.permute import Permute
from backpack.custom_module.slicing import Slicing


@register(SumModule)
class SumModuleDerivatives(BaseDerivatives):
    """``y = x_0 + x_1 + …``: the Jacobian with respect to each input is the identity."""

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Keep the shapes of the inputs (None for a number)."""
        return {"shapes": [getattr(x, "shape", None) for x in inputs]}

    def _checked_shapes(self, module: Any) -> list[Size | None]:
        shapes = module._backpack_saved["shapes"]
        if any(shape not in (None, module.output.shape) for shape in shapes):
            raise ValueError(
                f"{describe(module)}: derivatives need inputs of one shape, got "
                f"{[list(shape or []) for shape in shapes]}. Expand them before the sum."
            )
        return shapes

    def jacobian_is_constant(self, module: Module) -> bool:
        """Return True."""
        return True

    def _jac_mat_prod(
        self,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor | Sequence[Tensor | None],
        subsampling: Rows,
    ) -> Tensor:
        self._checked_shapes(module)
        if isinstance(mat, Tensor):  # of the only input
            return mat
        return sum(m for m in mat if m is not None)  # type: ignore[return-value]

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> tuple[Tensor | None, ...]:
        return tuple(None if s is None else mat for s in self._checked_shapes(module))


def _keeps_batch_axis(module: Module, keeps: bool) -> None:
    if not keeps:
        raise ValueError(
            f"{describe(module)} changes the batch axis (axis 0), which has to stay where it is."
        )


@register(Permute)
class PermuteDerivatives(LinearMapDerivatives):
    """Reordering of the axes after the batch axis."""

    def linear_map(self, module: Any, x: Tensor) -> Tensor:
        """Permute ``[N, *in]``."""
        _keeps_batch_axis(module, module.permutation(x.dim())[0] == 0)
        return module.forward(x)


@register(Slicing)
class SlicingDerivatives(LinearMapDerivatives):
    """Indexing of the axes after the batch axis."""

    def linear_map(self, module: Any, x: Tensor) -> Tensor:
        """Slice ``[N, *in]``."""
        _keeps_batch_axis(module, module.slice_info[0] in (slice(None), Ellipsis))
        return module.forward(x)
