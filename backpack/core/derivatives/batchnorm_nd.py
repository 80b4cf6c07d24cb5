"""Batch normalisation, ``y = γ x̂ + β`` with ``x̂ = (x - μ) / s`` and ``s = sqrt(σ² + ε)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module, SyncBatchNorm

from backpack.core.derivatives.normalization import NormalizationDerivatives
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.layout import Owners
from backpack.core.record.module_state import describe
from backpack.core.record.registry import register


@register(BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)
class BatchNormNdDerivatives(NormalizationDerivatives):
    """Derivatives of ``torch.nn.BatchNorm1d``, ``BatchNorm2d`` and ``BatchNorm3d``.

    With running statistics (evaluation mode) the module is a linear map of each sample. With the
    statistics of the batch (training mode, or no running statistics) it mixes samples: its Jacobian
    acts on the batch as a whole, ``J = (γ/s) (I - 1 1ᵀ/m - x̂ x̂ᵀ/m)``, m entries in a channel.
    ``SyncBatchNorm`` is the same in one process, and refused where it mixes those of several.
    """

    def unsupported_reason(self, c: Context) -> str | None:
        """Refuse statistics of samples that are not here."""
        alone = not (distributed.is_available() and distributed.is_initialized())
        if not isinstance(c.module, SyncBatchNorm) or not c.call.couples_samples:
            return None
        if alone or distributed.get_world_size(c.module.process_group) == 1:
            return None
        return (
            f"{describe(c.module)} mixes the samples of several processes, and only those of one "
            "are known. Use eval(), or BatchNorm for the statistics of this process."
        )

    def couples_samples(self, module: Any) -> bool:
        """Return whether the statistics are those of the batch."""
        return module.training or module.running_mean is None

    def repeats_output(self, call: Call) -> bool:
        return not call.couples_samples

    def hessian_is_zero(self, module: Module) -> bool:
        return not self.couples_samples(module)

    def is_curved(self, call: Call) -> bool:
        return call.couples_samples

    def jacobian_is_constant(self, c: Context) -> bool:
        return not c.call.couples_samples

    # ------------------------------------------------------------------ the pieces: x̂, s, γ

    def inner_axes(self, c: Context) -> int:
        return c.input.dim() - 2

    def _per_channel(self, c: Context, values: Tensor) -> Tensor:
        """Shape ``[C]`` such that it multiplies ``[N, C, *]``."""
        return values.reshape(1, -1, *(1,) * self.inner_axes(c))

    def _mean(self, c: Context, mat: Tensor) -> Tensor:
        """Average over the entries of each channel: ``[..., N, C, *] -> [..., 1, C, 1…]``.

        Rows that were added, where samples have different numbers of them, are zero and no entries.
        """
        axes, owners = c.input.dim(), self._uneven(c)
        mean = mat.mean([-axes, *range(2 - axes, 0)], keepdim=True)
        return mean if owners is None else mean * (owners.rows / len(owners.numbers))

    @staticmethod
    def _uneven(c: Context) -> Owners | None:
        """Return the samples of the rows, if these have different numbers of them."""
        place = None if c.call.samples_come_first else c.call.place_in(0)
        owners = None if place is None else place.owners
        return None if owners is None or owners.is_even else owners

    def _without_added(self, c: Context, mat: Tensor) -> Tensor:
        """Let rows be zero that were added, in a tensor ``[..., N, C, *]`` of all rows."""
        owners = self._uneven(c)
        if owners is None:
            return mat
        kept = mat.new_zeros(owners.rows, *(1,) * (c.input.dim() - 1))
        kept[owners.places] = 1
        return mat * kept

    def _normalized(self, c: Context) -> tuple[Tensor, Tensor]:
        """Return x̂, and s."""
        if not c.call.couples_samples:
            s = self._running_s(c)
            return (c.x - self._per_channel(c, c.params["running_mean"])) / s, s
        centered = self._without_added(c, c.input - self._mean(c, c.input))
        s = (self._mean(c, centered.square()) + c.module.eps).sqrt()
        return c.select(centered / s), s

    def _running_s(self, c: Context) -> Tensor:
        return self._per_channel(c, (c.params["running_var"] + c.module.eps).sqrt())

    def _gain(self, c: Context, s: Tensor) -> Tensor:
        weight = c.params.get("weight")
        return 1 / s if weight is None else self._per_channel(c, weight) / s

    def jvp(self, c: Context, t: Tensor) -> Tensor:
        if not c.call.couples_samples:
            return t * self._gain(c, self._running_s(c))
        self._need_whole_batch(c)
        return super().jvp(c, t)

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        """Apply J, which is symmetric."""
        return self.jvp(c, v)

    def _groups(self, c: Context, mat: Tensor) -> Tensor:
        """Keep the axes, which :meth:`_mean` knows."""
        return mat

    def _project(self, c: Context, x_hat: Tensor, mat: Tensor) -> Tensor:
        """Apply ``I - 1 1ᵀ/m - x̂ x̂ᵀ/m``."""
        projected = super()._project(c, x_hat, self._without_added(c, mat))
        return self._without_added(c, projected)

    def _need_whole_batch(self, c: Context) -> None:
        if c.rows is not None:
            raise ValueError(
                f"{describe(c.module)} mixes the samples of the batch: its Jacobian acts on the "
                f"whole batch, got subsampling={c.rows}."
            )

    def hvp(self, c: Context, t: Tensor) -> Tensor:
        if not c.call.couples_samples:
            return torch.zeros_like(t)
        self._need_whole_batch(c)
        return self._second(c, t)
