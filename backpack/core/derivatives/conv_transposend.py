"""Transposed convolutions: the transpose of a convolution's Jacobian as a module."""

from __future__ import annotations

from collections.abc import Set
from math import inf
from typing import Any

import torch
from torch import Tensor, einsum
from torch.nn import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from torch.nn.functional import pad

from backpack.core import fast
from backpack.core.derivatives import affine
from backpack.core.derivatives.convnd import (
    ConvolutionDerivatives,
    correlate,
    per_axis,
    unfolded,
    weight_jac_t_save_memory,
)
from backpack.core.derivatives.facts import always
from backpack.core.derivatives.linear_maps import map_rows
from backpack.core.derivatives.patches import Geometry
from backpack.core.record.context import Context
from backpack.core.record.registry import register


@register(ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
class ConvTransposeNDDerivatives(ConvolutionDerivatives):
    """Derivatives of ``torch.nn.ConvTranspose1d``, ``ConvTranspose2d`` and ``ConvTranspose3d``.

    Letters: n sample, t position, g group, i input channel, o entry of an output patch.
    """

    kronecker_rows_are_constant = True
    kronecker_swaps_axes = True
    repeats_output = always

    def _geometry(self, c: Context) -> Geometry:
        size, module = c.params["weight"].shape[2:], c.module
        settings = module.stride, module.dilation, module.padding
        stride, dilation, padding = per_axis(len(size), *settings)
        return Geometry(size, stride, dilation, padding, padding, module.groups, "constant")

    def _options(self, c: Context) -> tuple[Any, ...]:
        moves = self._geometry(c)
        shapes = c.output.shape[2:], c.input.shape[2:]
        sizes = zip(*shapes, moves.stride, moves.before, moves.dilation, moves.size, strict=True)
        # that of the call at hand: `output_size` may have changed the module's
        added = [out - ((x - 1) * s - 2 * p + d * (k - 1) + 1) for out, x, s, p, d, k in sizes]
        return moves.stride, moves.before, moves.dilation, True, added

    def _by_output(self, t: Tensor, groups: int) -> Tensor:
        return t.transpose(0, 1).flatten(1, 2)

    @fast.body("One product sums over all samples.", "param_vjp")
    def weight_vjp_sum(self, c: Context, v: Tensor) -> Tensor:
        return self._multiply(c, v, sum_batch=True)

    def _multiply(self, c: Context, v: Tensor, sum_batch: bool) -> Tensor:
        """Multiply the input with the patches of ``v``, or (low memory) correlate them."""
        x, moves = c.x, self._geometry(c)
        if weight_jac_t_save_memory.active:
            padding, small = [0] * len(moves.size), x.unsqueeze(0)
            each = (correlate(s, small, moves, padding, sum_batch) for s in self._pad(c, moves, v))
            return torch.cat(list(each))
        small = x.reshape(x.shape[0], moves.groups, -1, x.shape[2:].numel())
        big = self._unfold(c, v)
        equation = "ngit,vngot->vgio" if sum_batch else "ngit,vngot->vngio"
        product = einsum(equation, small, big)
        batch = () if sum_batch else (x.shape[0],)
        return product.reshape(v.shape[0], *batch, *c.params["weight"].shape)

    def _pad(self, c: Context, moves: Geometry, v: Tensor) -> Tensor:
        """Pad (or crop) ``v`` to the entries that the input positions write to."""
        v = pad(v, [p for p in reversed(moves.before) for _ in range(2)])
        sizes = zip(c.input.shape[2:], moves.stride, moves.dilation, moves.size, strict=True)
        for axis, (x, s, d, k) in enumerate(sizes, start=3):
            v = v.narrow(axis, 0, (x - 1) * s + d * (k - 1) + 1)
        return v

    def _unfold(self, c: Context, v: Tensor) -> Tensor:
        """Return each input position's patch: ``[V, N, O, *] -> [V, N, G, O/G·k, T]``."""
        moves, positions = self._geometry(c), c.input.shape[2:]
        return map_rows(lambda s: unfolded(s, moves, positions), self._pad(c, moves, v))

    @fast.body("Norms are those of Gram matrices.", "param_vjp")
    def reduced(
        self, c: Context, name: str, v: Any, wanted: Set[str], weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Reduce the individual products; norms by Gram matrices, if that is cheaper."""
        if name == "weight" and wanted <= {"gradient", "square_norm"}:
            x = c.x.flatten(2).unflatten(1, (c.module.groups, -1)).flatten(0, 1).mT
            features = c.params["weight"].shape[1:].numel()
            if affine.gram_is_cheaper(len(v), features, *x.shape[1:]):
                return self._by_gram(c, v, wanted, lambda: (self._unfold(c, v).flatten(1, 2).mT, x))
        return super().reduced(c, name, v, wanted, weights)

    def kron_rows(self, c: Context, name: str, v: Any, approximation: str | None = None) -> Tensor:
        """Sum or keep the positions: ``[V, N, O, *] -> [V, N', G, O/G]`` (bias: G = 1)."""
        rows = affine.position_rows(v.flatten(3).transpose(2, 3), approximation)
        return rows.unflatten(2, (c.module.groups if name == "weight" else 1, -1))

    def kron_inputs(
        self, c: Context, name: str, approximation: str | None = None, max_size: float = inf
    ) -> list[Tensor]:
        """Return A of the unfolded input, ``[I·k, I·k]``, or its diagonal ``[I·k]``."""
        if name != "weight":
            return []
        return [affine.input_factor(self._unfold_input(c).mT, approximation, max_size)]

    def kron_means(self, c: Context, name: str, num_n: int) -> Tensor | None:
        """Average the unfolded input of each sample: ``[N, 1, I·k]``."""
        if name != "weight":
            return None
        return self._unfold_input(c).mean(2).unflatten(0, (num_n, -1)).mean(1, keepdim=True)

    def _unfold_input(self, c: Context) -> Tensor:
        """Return what each entry of the kernel is multiplied with, ``[N, I·k, T]``."""
        x, kernel = c.x, self._geometry(c).size
        channels, taps = x.shape[1], torch.Size(kernel).numel()
        # one output channel for each entry of the kernel copies x to where that entry reads it
        one_hot = torch.eye(taps, dtype=x.dtype, device=x.device)
        weight = one_hot.repeat(channels, 1, 1).reshape(channels, taps, *kernel)
        return self._convolve(c, x, weight, channels).flatten(2)
