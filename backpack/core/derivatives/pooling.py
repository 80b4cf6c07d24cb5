"""Maximum pooling, which selects entries of its input, and the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import (
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    MaxUnpool1d,
    MaxUnpool2d,
    MaxUnpool3d,
    Module,
)
from torch.nn import functional as F

from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.record.registry import register
from backpack.core.record.tape import Call
from backpack.core.rows import Rows
from backpack.core.types import Grads
from backpack.utils.subsampling import subsample


class SelectionDerivatives(BaseDerivatives):
    """``y[t] = x[index(t)]``: the Jacobian gathers, its transpose scatters and adds."""

    def indices(self, module: Any) -> Tensor:
        """Return which spatial entry of its channel each output is: ``[N, C, *out]``."""
        raise NotImplementedError

    def autograd_stores(self, call: Call) -> bool:
        """Return True: where the maxima are."""
        return True

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Keep the indices that autograd keeps: finding them again takes a forward pass.

        Where hooks decide what autograd keeps (checkpoints, tensors saved elsewhere), to look at
        them is to call those hooks: a checkpoint would run the forward pass a second time.
        """
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return {}
        node: Any = outputs[0].grad_fn
        if "Squeeze" in type(node).__name__:  # one dimension is a special case of two
            node = node.next_functions[0][0]
        found = "MaxPool" in type(node).__name__ and hasattr(node, "_saved_result1")
        return {"selected": node._saved_result1} if found else {}

    def _flat_indices(self, module: Any, mat: Tensor, subsampling: Rows) -> Tensor:
        """Return the indices of the call at hand for each vector: ``[V, N, C, T]``."""
        saved, call = module._backpack_saved, module._backpack_call
        if "indices" not in saved:
            known = "selected" in saved and call.is_plain and not call.is_unbatched
            saved["indices"] = saved["selected"] if known else self.indices(module)
        index = subsample(saved["indices"], subsampling=subsampling).flatten(2)
        return index.expand(mat.shape[0], *index.shape)

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        index = self._flat_indices(module, mat, subsampling)
        gathered = mat.flatten(3).gather(3, index)
        return gathered.reshape(*mat.shape[:3], *module.output.shape[2:])

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        index = self._flat_indices(module, mat, subsampling)
        spatial = module.input0.shape[2:]
        v, n, c = mat.shape[:3]
        # the columns of a sample next to each other: products with a weight need no copy
        zeros = mat.new_zeros(n, v, c, spatial.numel()).transpose(0, 1)
        return zeros.scatter_add_(3, index, mat.flatten(3)).unflatten(3, spatial)

    def _ea_jac_t_mat_jac_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> Tensor:
        # Jᵀ M J scatters entry (s, t) of M to (index(s), index(t))
        one = mat.new_empty(1).expand(1, *module.output.shape)
        index = self._flat_indices(module, one, subsampling)[0]  # [N, C, T], within a channel
        channels, size = index.shape[1], module.input0.shape[2:].numel()
        offsets = size * torch.arange(channels, device=mat.device).unsqueeze(1)
        dim = channels * size
        total = mat.new_zeros(dim * dim)
        for i in (index + offsets).flatten(1):
            total = total.index_add(0, (i.unsqueeze(1) * dim + i).flatten(), mat.flatten())
        return total.reshape(dim, dim) / len(index)


@register(MaxPool1d, MaxPool2d, MaxPool3d)
class MaxPoolNDDerivatives(SelectionDerivatives):
    """Derivatives of ``torch.nn.MaxPool1d``, ``MaxPool2d`` and ``MaxPool3d``."""

    def indices(self, module: Any) -> Tensor:
        """Return the positions of the maxima that autograd chooses as well."""
        x = module.input0.detach()
        pool = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}[x.dim()]
        _, indices = pool(
            x,
            module.kernel_size,
            module.stride,
            module.padding,
            module.dilation,
            ceil_mode=module.ceil_mode,
            return_indices=True,
        )
        return indices


@register(AdaptiveMaxPool1d, AdaptiveMaxPool2d, AdaptiveMaxPool3d)
class AdaptiveMaxPoolNDDerivatives(SelectionDerivatives):
    """Derivatives of ``AdaptiveMaxPool1d``, ``AdaptiveMaxPool2d`` and ``AdaptiveMaxPool3d``."""

    def indices(self, module: Any) -> Tensor:
        """Return the positions of the maxima that autograd chooses as well."""
        x = module.input0.detach()
        pool = {3: F.adaptive_max_pool1d, 4: F.adaptive_max_pool2d, 5: F.adaptive_max_pool3d}
        return pool[x.dim()](x, module.output_size, return_indices=True)[1]


@register(MaxUnpool1d, MaxUnpool2d, MaxUnpool3d)
class MaxUnpoolNDDerivatives(BaseDerivatives):
    """``y[index(t)] = x[t]``, with the indices as second argument: the Jacobian scatters."""

    def _flat_indices(self, module: Any, mat: Tensor, subsampling: Rows) -> Tensor:
        index = subsample(module.input1, subsampling=subsampling).flatten(2)
        return index.expand(mat.shape[0], *index.shape)

    def _jac_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Any, subsampling: Rows
    ) -> Tensor:
        mat = mat if isinstance(mat, Tensor) else mat[0]
        spatial = module.output.shape[2:]
        zeros = mat.new_zeros(*mat.shape[:3], spatial.numel())
        index = self._flat_indices(module, mat, subsampling)
        return zeros.scatter(3, index, mat.flatten(3)).reshape(*mat.shape[:3], *spatial)

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Rows
    ) -> tuple[Tensor | None, ...]:
        gathered = mat.flatten(3).gather(3, self._flat_indices(module, mat, subsampling))
        others = [None] * (len(module._backpack_call.inputs) - 1)
        return gathered.reshape(*mat.shape[:3], *module.input0.shape[2:]), *others
