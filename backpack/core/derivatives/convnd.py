"""Convolutions of one, two and three dimensions: stride, dilation, groups, every padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, einsum
from torch.nn import Conv1d, Conv2d, Conv3d, Module
from torch.nn.functional import conv1d, conv2d, conv3d, pad

from backpack.core.derivatives.basederivatives import BaseDerivatives, Grads, Rows
from backpack.core.derivatives.linear_maps import apply_transposed, fold, unfold_like
from backpack.core.derivatives.shared_weight import input_factor, position_rows
from backpack.core.registry import register
from backpack.utils.subsampling import subsample

CONVOLUTION = {1: conv1d, 2: conv2d, 3: conv3d}


class weight_jac_t_save_memory:
    """Context manager: per-sample weight products of convolutions without unfolding the input.

    Args:
        save_memory: Whether to use the low-memory rule. Default: True.
    """

    active = False

    def __init__(self, save_memory: bool = True):
        """Remember the choice."""
        self._save_memory = save_memory

    def __enter__(self) -> None:
        """Select the rule."""
        self._outer = weight_jac_t_save_memory.active
        weight_jac_t_save_memory.active = self._save_memory

    def __exit__(self, *exception: object) -> None:
        """Restore the rule that was selected before."""
        weight_jac_t_save_memory.active = self._outer


def patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    positions: Sequence[int],
) -> Tensor:
    """View the patches that a kernel sees: ``[N, C, *in] -> [N, C, *kernel, *positions]``."""
    spatial = x.stride()[2:]
    return x.as_strided(
        (*x.shape[:2], *kernel, *positions),
        (
            *x.stride()[:2],
            *(s * d for s, d in zip(spatial, dilation, strict=True)),
            *(s * step for s, step in zip(spatial, stride, strict=True)),
        ),
        x.storage_offset(),
    )


class PerSampleConvolution:
    """Weight gradients of a convolution for each sample: what both kinds of convolution share.

    A convolution's weight gradient correlates its padded input with the gradient of its output; a
    transposed convolution's correlates the padded gradient of its output with its input.
    """

    @staticmethod
    def unfolded(x: Tensor, module: Any, positions: Sequence[int]) -> Tensor:
        """Return patches by group: padded ``[N, C, *in] -> [N, G, C/G·k, T]``."""
        view = patches(x, module.kernel_size, module.stride, module.dilation, positions)
        return view.reshape(x.shape[0], module.groups, -1, torch.Size(positions).numel())

    @staticmethod
    def correlate(
        big: Tensor, small: Tensor, module: Any, padding: Sequence[int], sum_batch: bool
    ) -> Tensor:
        """Correlate with one grouped convolution: groups are samples (unless summed) and groups.

        Args:
            big: ``[N, C, *in]``.
            small: ``[V, N, K, *positions]``.
            module: The convolution, for its stride, dilation and groups.
            padding: Zeros to add to ``big`` at both ends of each axis.
            sum_batch: Sum over the samples.

        Returns:
            ``[V, N, K, C/G, *kernel]``, without N if summed.
        """
        num_v, num_n, k = small.shape[:3]
        groups, kernel = module.groups, module.kernel_size
        # channels in the order (sample,) group, vector, channel of the group
        small = small.reshape(num_v, num_n, groups, k // groups, *small.shape[3:])
        small = small.transpose(0, 1).transpose(1, 2).flatten(1, 3)
        if not sum_batch:
            big, small = big.flatten(0, 1).unsqueeze(0), small.flatten(0, 1).unsqueeze(0)
        samples = 1 if sum_batch else num_n
        per_group = big.shape[1] // (samples * groups)
        weight = big.new_empty(1).expand(samples * num_v * k, per_group, *kernel)
        _, result, _ = torch.ops.aten.convolution_backward(
            small,
            big,
            weight,
            None,
            module.stride,
            padding,
            module.dilation,
            False,
            [0] * len(kernel),
            samples * groups,
            [False, True, False],
        )
        result = result.reshape(samples, groups, num_v, k // groups, per_group, *kernel)
        result = result.permute(2, 0, 1, 3, *range(4, result.dim())).flatten(2, 3)
        return result.squeeze(1) if sum_batch else result

    @staticmethod
    def square_norm(unfolded: Tensor, small: Tensor, groups: int) -> Tensor | None:
        """Squared norms from Gram matrices of the positions, if that is the cheaper way.

        Args:
            unfolded: ``[N, G, C/G·k, T]``.
            small: ``[V, N, K, T]``.
            groups: G.

        Returns:
            ``[N]``, summed over V; None if materialising the products is cheaper.
        """
        num_v, _, k, t = small.shape
        features = unfolded.shape[2]
        if t * (num_v * k + groups * features) > num_v * k * features:
            return None
        small = small.reshape(num_v, -1, groups, k // groups, t)
        gram = einsum("vngot,vngou->ngtu", small, small)
        return (gram * einsum("ngit,ngiu->ngtu", unfolded, unfolded)).sum((1, 2, 3))


def crop(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Keep the first entries along the last axes."""
    for axis, size in enumerate(sizes, start=x.dim() - len(sizes)):
        x = x.narrow(axis, 0, size)
    return x


def sum_positions(mat: Tensor) -> Tensor:
    """Sum ``[V, N, O, *positions]`` over the positions."""
    return mat.flatten(3).sum(3)


class ChannelBiasDerivatives(BaseDerivatives):
    """A bias for each channel, added at every position."""

    params = ("weight", "bias")
    kronecker_rows_are_constant = True

    def min_dims(self, module: Any) -> int:
        """Return the number of spatial axes, and batch and channels."""
        return len(module.kernel_size) + 2

    def _bias_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        out = subsample(module.output, subsampling=subsampling)
        positions = (1,) * (out.dim() - 2)
        return mat.reshape(mat.shape[0], 1, -1, *positions).expand(-1, *out.shape)

    def _bias_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        product = sum_positions(mat)
        return product.sum(1) if sum_batch else product


@register(Conv1d, Conv2d, Conv3d)
class ConvNDDerivatives(ChannelBiasDerivatives):
    """Derivatives of ``torch.nn.Conv1d``, ``Conv2d`` and ``Conv3d``.

    Letters: n sample, t position, g group, o output channel, i entry of an input patch.
    """

    # ------------------------------------------------------------------ padding

    def _margins(self, module: Any) -> list[tuple[int, int]]:
        """Return the entries added before and after each spatial axis."""
        if module.padding == "valid":
            return [(0, 0) for _ in module.kernel_size]
        if module.padding == "same":
            totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
            return [(total // 2, total - total // 2) for total in totals]
        return [(p, p) for p in module.padding]

    def _native_padding(self, module: Any) -> list[int]:
        """Return the padding that the convolution itself can do, zeros if it cannot."""
        margins = self._margins(module)
        native = module.padding_mode == "zeros" and all(a == b for a, b in margins)
        return [a if native else 0 for a, _ in margins]

    def _pad(self, module: Any, x: Tensor, explicit: bool = False) -> Tensor:
        """Pad what the convolution itself does not pad (or, ``explicit``, everything)."""
        margins = self._margins(module)
        if not any(a or b for a, b in margins):
            return x
        if not explicit and any(self._native_padding(module)):
            return x
        widths = [width for pair in reversed(margins) for width in pair]
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        return pad(x, widths, mode=mode)

    # ------------------------------------------------------------------ Jacobians

    def _convolve(self, module: Any, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        return CONVOLUTION[len(module.kernel_size)](
            self._pad(module, x),
            weight,
            None,
            module.stride,
            tuple(self._native_padding(module)),
            module.dilation,
            groups,
        )

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return unfold_like(self._convolve(module, fold(mat), module.weight, module.groups), mat)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        folded = fold(mat)
        shape = (folded.shape[0], *module.input0.shape[1:])
        # only the shape of this tensor is read
        padded = self._pad(module, mat.new_zeros(1).expand(1, *shape[1:]))
        product, _, _ = torch.ops.aten.convolution_backward(
            folded,
            padded[:1].expand(shape[0], *padded.shape[1:]),
            module.weight,
            None,
            module.stride,
            self._native_padding(module),
            module.dilation,
            False,
            [0] * len(module.kernel_size),
            module.groups,
            [True, False, False],
        )
        if padded.shape[1:] != shape[1:]:
            product = apply_transposed(lambda x: self._pad(module, x), shape, product)
        return unfold_like(product, mat)

    def jacobian_is_constant(self, module: Module) -> bool:
        """Return True."""
        return True

    # ------------------------------------------------------------------ weight

    def _weight_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        x = subsample(module.input0, subsampling=subsampling)
        num_v, out_channels = mat.shape[:2]
        groups = module.groups
        # output channels in the order group, vector, channel of the group
        weight = mat.reshape(num_v, groups, -1, *mat.shape[2:]).transpose(0, 1).flatten(0, 2)
        out = self._convolve(module, x, weight, groups)
        out = out.reshape(x.shape[0], groups, num_v, -1, *out.shape[2:])
        return out.permute(2, 0, 1, 3, *range(4, out.dim())).reshape(
            num_v, x.shape[0], out_channels, *out.shape[4:]
        )

    def _weight_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool,
        subsampling: Rows,
    ) -> Tensor:
        x = subsample(module.input0, subsampling=subsampling)
        if sum_batch or weight_jac_t_save_memory.active:
            padding = self._native_padding(module)
            return PerSampleConvolution.correlate(
                self._pad(module, x), mat, module, padding, sum_batch
            )
        s = mat.reshape(*mat.shape[:2], module.groups, -1, mat.shape[3:].numel())
        product = einsum("vngot,ngit->vngoi", s, self._unfold(module, x))
        return product.reshape(*mat.shape[:2], *module.weight.shape)

    def _unfold(self, module: Any, x: Tensor) -> Tensor:
        """Return the patches of the input: ``[N, I, *in] -> [N, G, I/G·k, T]``."""
        return PerSampleConvolution.unfolded(
            self._pad(module, x, explicit=True), module, module.output.shape[2:]
        )

    def param_mjp_square_norm(
        self,
        param_str: str,
        module: Any,
        g_inp: Grads,
        g_out: Grads,
        mat: Any,
        subsampling: Rows = None,
    ) -> Tensor:
        """Squared norms of each sample's ``J_pᵀ mat``, summed over V: ``[V, N, *out] -> [N]``."""
        if param_str == "weight":
            x = subsample(module.input0, subsampling=subsampling)
            unfolded = self._unfold(module, x)
            norms = PerSampleConvolution.square_norm(unfolded, mat.flatten(3), module.groups)
            if norms is not None:
                return norms
        return super().param_mjp_square_norm(param_str, module, g_inp, g_out, mat, subsampling)

    def kronecker_rows(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Any,
        subsampling: Rows = None,
        approximation: str | None = None,
    ) -> Tensor:
        """Sum ``mat`` over the positions or keep them: ``[V, N, O, *] -> [V, N', 1, O]``."""
        return position_rows(mat.flatten(3).transpose(2, 3), approximation).unsqueeze(2)

    def kronecker_input_factors(
        self,
        param_str: str,
        module: Any,
        subsampling: Rows = None,
        approximation: str | None = None,
    ) -> list[Tensor]:
        """Return A of the patches, see :func:`input_factor`: ``[I/G·k, I/G·k]``, mean over G."""
        if param_str != "weight":
            return []
        x = self._unfold(module, subsample(module.input0, subsampling=subsampling))
        return [input_factor(x.flatten(0, 1).transpose(1, 2), approximation)]
