"""Interpolation, a linear map of each channel: its transpose is a kernel of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import Upsample, UpsamplingBilinear2d, UpsamplingNearest2d

from backpack.core import fast
from backpack.core.derivatives.linear_maps import LinearMapDerivatives, map_rows
from backpack.core.derivatives.vectors import map_vectors
from backpack.core.record.context import Context
from backpack.core.record.registry import register

_aten = torch.ops.aten
# by mode and number of spatial axes; "area" is average pooling
TRANSPOSED: Mapping[tuple[str, int], Callable[..., Tensor]] = {
    ("nearest", 1): _aten.upsample_nearest1d_backward,
    ("nearest", 2): _aten.upsample_nearest2d_backward,
    ("nearest", 3): _aten.upsample_nearest3d_backward,
    ("nearest-exact", 1): _aten._upsample_nearest_exact1d_backward,
    ("nearest-exact", 2): _aten._upsample_nearest_exact2d_backward,
    ("nearest-exact", 3): _aten._upsample_nearest_exact3d_backward,
    ("linear", 1): _aten.upsample_linear1d_backward,
    ("bilinear", 2): _aten.upsample_bilinear2d_backward,
    ("bicubic", 2): _aten.upsample_bicubic2d_backward,
    ("trilinear", 3): _aten.upsample_trilinear3d_backward,
}


@register(Upsample, UpsamplingBilinear2d, UpsamplingNearest2d)
class UpsampleDerivatives(LinearMapDerivatives):
    """Derivatives of ``torch.nn.Upsample`` of all modes."""

    reads_input = False

    @fast.body("Vectors are resized while they are in the cache.", "linear_map")
    def jvp(self, c: Context, t: Tensor) -> Tensor:
        """Resize."""
        return map_vectors(lambda t: map_rows(lambda x: self.linear_map(c, x), t), t)

    @fast.body("A kernel of torch is the transpose.", "linear_map")
    def vjp(self, c: Context, v: Tensor) -> Tensor:
        """Apply the transpose."""
        module, dims = c.module, c.input.dim() - 2
        transposed = TRANSPOSED.get((module.mode, dims))
        if transposed is None:
            return super().vjp(c, v)
        shape_in, shape_out = c.input.shape[1:], list(c.output.shape[2:])
        align = [] if module.mode.startswith("nearest") else [bool(module.align_corners)]
        # the factors of the axes where torch uses them, instead of the sizes' ratios
        given = None if module.recompute_scale_factor else module.scale_factor
        factors = list(given) if isinstance(given, tuple | list) else [given] * dims

        def pull(s: Tensor) -> Tensor:
            return transposed(s, shape_out, [len(s), *shape_in], *align, *factors)

        return map_vectors(lambda v: map_rows(pull, v), v)
