"""Modules that are linear up to a constant: average pooling, padding, resizing, shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack.core import fast
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.by_autograd import transposed
from backpack.core.derivatives.facts import always, constant, never
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.derivatives.vectors import map_vectors
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.layout import Layout
from backpack.core.record.registry import register
from backpack.custom_module.pad import Pad
from backpack.custom_module.scale_module import ScaleModule

# How many axes in space the inputs of modules have that act on each channel alone.
AXES = {
    getattr(nn, f"{name}{axes}d"): axes
    for axes in (1, 2, 3)
    for name in (
        *("AvgPool", "AdaptiveAvgPool", "MaxPool", "AdaptiveMaxPool", "MaxUnpool"),
        *("CircularPad", "ReflectionPad", "ReplicationPad", "InstanceNorm"),
    )
} | {nn.FractionalMaxPool2d: 2, nn.FractionalMaxPool3d: 3}


def spatial_axes(module: nn.Module) -> int:
    """Return how many of the last axes such a module combines."""
    return next(AXES[cls] for cls in type(module).__mro__ if cls in AXES)


def map_rows(function: Callable[[Tensor], Tensor], mat: Tensor) -> Tensor:
    """Apply a function of ``[N, *]`` to all columns at once, in memory order: ``[V, N, *]``."""
    if mat.stride(1) > mat.stride(0):  # the columns of a sample are next to each other
        return map_rows(function, mat.transpose(0, 1)).transpose(0, 1)
    return function(mat.flatten(0, 1)).unflatten(0, mat.shape[:2])


def apply_transposed(
    linear_map: Callable[[Tensor], Tensor], shape: Sequence[int], mat: Tensor
) -> Tensor:
    """Apply the transpose of a linear map from tensors of ``shape`` by autograd."""
    (result,) = transposed(lambda vs: [linear_map(*vs)], [mat.new_zeros(shape)], [mat])
    return result


class ChannelwiseDerivatives(BaseDerivatives):
    """What acts on each channel alone: samples may be along any axis before those in space."""

    batch_axis = BatchAxis.LEADING
    folds_rows = never  # functions of torch count the axes

    def trailing_axes(self, module: nn.Module) -> int:
        return spatial_axes(module)


@register(nn.ChannelShuffle)
class LinearMapDerivatives(BaseDerivatives):
    """A map that is linear, acts on each sample alone and in the same way: ``J t = f(t)``."""

    reads_input = False
    hessian_is_zero = always
    jacobian_is_constant = always  # it is the map

    def linear_map(self, c: Context, x: Tensor) -> Tensor:
        """Apply the linear map to ``[N, *in]``. Default: the module's own forward pass."""
        with c.call.as_it_was(c.call.precision):
            return c.evaluated.forward(x)

    def jvp(self, c: Context, t: Tensor) -> Tensor:
        return map_rows(lambda x: self.linear_map(c, x), t)

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        def pull(s: Tensor) -> Tensor:
            shape = (len(s), *c.input.shape[1:])
            return apply_transposed(lambda x: self.linear_map(c, x), shape, s)

        return map_rows(pull, v)


@register(
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
)
class ChannelwiseMapDerivatives(ChannelwiseDerivatives, LinearMapDerivatives):
    """A linear map of each channel: average pooling, and padding with entries of the input."""

    reads_input = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the samples come first in a rule for other modules: which axes are in space?"""
        if "trailing_axes" not in vars(cls):
            cls.batch_axis = BatchAxis.FIXED
        super().__init_subclass__(**options)


@register(nn.PixelShuffle, nn.PixelUnshuffle, nn.Fold, nn.Unfold)
class ChannelsInSpaceDerivatives(LinearMapDerivatives):
    """Channels become neighbours in space, or the other way round."""

    reads_input = False

    def min_dims(self, module: nn.Module) -> int:
        """Return 4: batch, channels, and two axes in space, which ``Unfold`` makes one."""
        return 3 if isinstance(module, nn.Unfold) else 4


@register(nn.Flatten, nn.Identity, nn.Unflatten)
class ReshapeDerivatives(LinearMapDerivatives):
    """The same entries in the same order."""

    reads_input = False

    def keeps_rows(self, call: Call) -> bool:
        """Return whether there are as many rows before as after: none merge, and none split."""
        before, after = call.place_in(0), call.place_out(0)
        (shape_in, *_), (shape_out, *_) = call.shape_in, call.shape_out
        if before is None or after is None or shape_in is None:
            return True
        return before.rows(shape_in) == after.rows(shape_out)

    def layouts(self, call: Call) -> list[Layout | None]:
        """Find where the samples are: where they are in the input, even if that is assumed."""
        layout, shape = call.layouts_in[0], call.shape_in[0]
        place = None if layout is None or shape is None else layout.place(shape)
        if layout is None or not layout.is_batched or place is None:
            return super().layouts(call)
        return [layout]


@register(ScaleModule)
class ScaleModuleDerivatives(LinearMapDerivatives):
    """Multiplication of every entry with one number."""

    batch_axis = BatchAxis.LEADING
    trailing_axes = constant(0)


@register(
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
    *(nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    Pad,
)
class PadDerivatives(LinearMapDerivatives):
    """Padding: the linear part of that with a constant pads with zeros."""

    batch_axis = BatchAxis.LEADING
    reads_input = False

    def padding(self, module: Any) -> Sequence[int]:
        """Return how many entries are added before and after each axis, last axis first."""
        return module.pad if isinstance(module, Pad) else module.padding

    def mode(self, module: Any) -> str:
        """Return what is added."""
        return module.mode if isinstance(module, Pad) else "constant"

    def trailing_axes(self, module: Any) -> int:
        """Return how many axes are padded, counted from the last one."""
        widths = self.padding(module)
        return (max((i for i, width in enumerate(widths) if width), default=-1) + 2) // 2

    def min_dims(self, module: Any) -> int:
        """Return the number of padded axes, and that of the batch."""
        return self.trailing_axes(module) + 1

    def linear_map(self, c: Context, x: Tensor) -> Tensor:
        """Pad, with zeros instead of another constant."""
        widths, mode = self.padding(c.module), self.mode(c.module)
        if mode == "constant":
            return F.pad(x, widths)
        axes = len(widths) // 2
        flat = x.reshape(1, -1, *x.shape[-axes:])  # what other modes take
        padded = F.pad(flat, widths, mode=mode)
        return padded.reshape(*x.shape[:-axes], *padded.shape[2:])

    @fast.body("What was added is cut off, without autograd.", "linear_map")
    def vjp(self, c: Context, v: Tensor) -> Tensor:
        """Cut off what was added, or (other modes) apply the transpose."""
        if self.mode(c.module) != "constant":
            return super().vjp(c, v)
        return F.pad(v, [-width for width in self.padding(c.module)])


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


@register(nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d)
class UpsampleDerivatives(LinearMapDerivatives):
    """Interpolation, of all modes."""

    reads_input = False

    @fast.body("A kernel of torch is the transpose.", "linear_map")
    def vjp(self, c: Context, v: Tensor) -> Tensor:
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
