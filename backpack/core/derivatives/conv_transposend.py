"""Transposed convolutions: the transpose of a convolution's Jacobian as a module."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, einsum
from torch.nn import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Module
from torch.nn.functional import conv_transpose1d, conv_transpose2d, conv_transpose3d, pad

from backpack.core.derivatives.convnd import (
    ChannelBiasDerivatives,
    PerSampleConvolution,
    crop,
    shape_only,
    weight_jac_t_save_memory,
)
from backpack.core.derivatives.linear_maps import map_rows
from backpack.core.derivatives.shared_weight import (
    gram_is_cheaper,
    input_factor,
    position_rows,
    square_norm,
)
from backpack.core.record.registry import register
from backpack.core.rows import Rows
from backpack.core.types import Grads
from backpack.utils.subsampling import subsample

TRANSPOSED_CONVOLUTION = {1: conv_transpose1d, 2: conv_transpose2d, 3: conv_transpose3d}


@register(ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
class ConvTransposeNDDerivatives(ChannelBiasDerivatives):
    """Derivatives of ``torch.nn.ConvTranspose1d``, ``ConvTranspose2d`` and ``ConvTranspose3d``.

    Letters: n sample, t position, g group, i input channel, o entry of an output patch.
    """

    squares_with_input = True

    def _output_padding(self, module: Any) -> list[int]:
        """Return the output padding of the call at hand (``output_size`` may have changed it)."""
        sizes = zip(
            module.output.shape[2:],
            module.input0.shape[2:],
            module.stride,
            module.padding,
            module.dilation,
            module.kernel_size,
            strict=True,
        )
        return [out - ((x - 1) * s - 2 * p + d * (k - 1) + 1) for out, x, s, p, d, k in sizes]

    def _convolve(self, module: Any, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        return TRANSPOSED_CONVOLUTION[len(module.kernel_size)](
            x,
            weight,
            None,
            module.stride,
            module.padding,
            self._output_padding(module),
            groups,
            module.dilation,
        )

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return map_rows(lambda x: self._convolve(module, x, module.weight, module.groups), mat)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        return map_rows(lambda s: self._pull(module, s), mat)

    def _pull(self, module: Any, s: Tensor) -> Tensor:
        """Apply the transposed Jacobian: ``[N, O, *out] -> [N, I, *in]``."""
        product, _, _ = torch.ops.aten.convolution_backward(
            s,
            shape_only(s, (len(s), *module.input0.shape[1:])),
            module.weight,
            None,
            module.stride,
            module.padding,
            module.dilation,
            True,
            self._output_padding(module),
            module.groups,
            [True, False, False],
        )
        return product

    def jacobian_is_constant(self, module: Module) -> bool:
        """Return True."""
        return True

    # ------------------------------------------------------------------ weight [I, O/G, *k]

    def _weight_jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        x = subsample(module.input0, subsampling=subsampling)
        groups, num_v = module.groups, mat.shape[0]
        # output channels in the order group, vector, channel of the group
        out = self._convolve(module, x, mat.transpose(0, 1).flatten(1, 2), groups)
        out = out.reshape(x.shape[0], groups, num_v, -1, *out.shape[2:])
        return out.permute(2, 0, 1, 3, *range(4, out.dim())).flatten(2, 3)

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
        if weight_jac_t_save_memory.active:
            padded = self._pad(module, mat)
            products = [
                PerSampleConvolution.correlate(
                    s, x.unsqueeze(0), module, [0] * len(module.kernel_size), sum_batch
                )
                for s in padded
            ]
            return torch.cat(products)
        small = x.reshape(x.shape[0], module.groups, -1, x.shape[2:].numel())
        big = self._unfold(module, mat)
        equation = "ngit,vngot->vgio" if sum_batch else "ngit,vngot->vngio"
        product = einsum(equation, small, big)
        batch = () if sum_batch else (x.shape[0],)
        return product.reshape(mat.shape[0], *batch, *module.weight.shape)

    def _pad(self, module: Any, mat: Tensor) -> Tensor:
        """Pad (or crop) ``mat`` to the entries that the input positions write to."""
        widths = [p for p in reversed(module.padding) for _ in range(2)]
        sizes = zip(
            module.input0.shape[2:],
            module.stride,
            module.dilation,
            module.kernel_size,
            strict=True,
        )
        return crop(pad(mat, widths), [(x - 1) * s + d * (k - 1) + 1 for x, s, d, k in sizes])

    def _unfold(self, module: Any, mat: Tensor) -> Tensor:
        """Return each input position's patch: ``[V, N, O, *] -> [V, N, G, O/G·k, T]``."""
        positions = module.input0.shape[2:]
        return map_rows(
            lambda s: PerSampleConvolution.unfolded(s, module, positions), self._pad(module, mat)
        )

    def _param_mjp_reduced(
        self,
        param_str: str,
        module: Any,
        g_out: Grads,
        mat: Any,
        wanted: Set[str],
        subsampling: Rows,
        weights: Tensor | None,
    ) -> dict[str, Tensor]:
        if param_str == "weight" and wanted == {"square_norm"}:
            x = subsample(module.input0, subsampling=subsampling).flatten(2)
            # groups are further samples: their squared norms add up
            x = x.unflatten(1, (module.groups, -1)).flatten(0, 1).mT  # [N·G, T, I/G]
            s = self._unfold(module, mat).flatten(1, 2).mT  # [V, N·G, T, O/G·k]
            if gram_is_cheaper(len(s), s.shape[3], *x.shape[1:]):
                norms = square_norm(s, x).unflatten(0, (-1, module.groups))
                return {"square_norm": norms.sum(1)}
        return super()._param_mjp_reduced(
            param_str, module, g_out, mat, wanted, subsampling, weights
        )

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
        """Sum or keep the positions: ``[V, N, O, *] -> [V, N', G, O/G]`` (bias: G = 1)."""
        rows = position_rows(mat.flatten(3).transpose(2, 3), approximation)
        groups: Any = module.groups if param_str == "weight" else 1
        return rows.unflatten(2, (groups, -1))

    def kronecker_input_factors(
        self,
        param_str: str,
        module: Any,
        subsampling: Rows = None,
        approximation: str | None = None,
    ) -> list[Tensor]:
        """Return A of the unfolded input, see :func:`input_factor`: ``[I·k, I·k]``."""
        if param_str != "weight":
            return []
        x = subsample(module.input0, subsampling=subsampling)
        channels, taps = x.shape[1], torch.Size(module.kernel_size).numel()
        # one output channel for each entry of the kernel copies x to where that entry reads it
        one_hot = torch.eye(taps, dtype=x.dtype, device=x.device)
        weight = one_hot.repeat(channels, 1, 1).reshape(channels, taps, *module.kernel_size)
        unfolded = self._convolve(module, x, weight, channels).flatten(2)
        return [input_factor(unfolded.transpose(1, 2), approximation)]
