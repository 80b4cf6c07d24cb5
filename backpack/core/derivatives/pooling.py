"""Maximum pooling, which selects entries of its input, and the way back."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Size, Tensor, nn

from backpack.core import fast
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.facts import always
from backpack.core.derivatives.linear_maps import ChannelwiseDerivatives, spatial_axes
from backpack.core.features import hooks_of_saved_tensors
from backpack.core.record.context import Context
from backpack.core.record.registry import register

# Their windows are drawn in the forward pass, or given: they may choose others when they run again.
RANDOM = nn.FractionalMaxPool2d, nn.FractionalMaxPool3d


def _shape(c: Context, tensor: Tensor) -> Size:
    """Return the sizes of the axes that are pooled."""
    return tensor.shape[-spatial_axes(c.module) :]


@register(
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *RANDOM,
)
class SelectionDerivatives(ChannelwiseDerivatives):
    """``y[t] = x[index(t)]``: the Jacobian gathers, its transpose scatters and adds.

    Letters: n sample, c channel (torch takes inputs without the axis C, too), t position.
    """

    hessian_is_zero = always
    autograd_stores = always  # where the maxima are

    def indices(self, c: Context) -> Tensor:
        """Return which spatial entry of its channel each output is: ``[N, C, *out]``."""
        module = copy(c.module)
        module.return_indices = True
        return module.forward(c.input.detach())[1]

    def saved(
        self, module: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Keep the indices that autograd keeps: finding them again takes a forward pass.

        Where hooks decide what autograd keeps (checkpoints, tensors saved elsewhere), to look at
        them is to call those hooks: a checkpoint would run the forward pass a second time.
        """
        if not isinstance(module, RANDOM) and hooks_of_saved_tensors(True) is not None:
            return {}
        node: Any = outputs[0].grad_fn
        if "Squeeze" in type(node).__name__:  # one dimension is a special case of two
            node = node.next_functions[0][0]
        found = "MaxPool" in type(node).__name__ and hasattr(node, "_saved_result1")
        return {"selected": node._saved_result1} if found else {}

    def _flat_indices(self, c: Context) -> Tensor:
        """Return the indices of the call at hand: ``[N, C, T]``."""
        saved, call = c.saved, c.call
        if "indices" not in saved:
            if "selected" in saved:
                own = saved["selected"].reshape(call.shape_out[0])
                _, (found, *_) = self.seen(call, call.inputs, [own, *call.outputs[1:]])
            else:
                found = self.indices(c)
            saved["indices"] = found.reshape(c.output.shape).flatten(-spatial_axes(c.module))
        return c.select(saved["indices"])

    def jvp(self, c: Context, t: Tensor) -> Tensor:
        return _gathered(t, self._flat_indices(c), _shape(c, c.output))

    def vjp(self, c: Context, v: Tensor) -> Tensor:
        index, spatial = _of_each(v, self._flat_indices(c)), _shape(c, c.input)
        num_v, num_n, *channels, _ = index.shape
        # the columns of a sample next to each other: products with a weight need no copy
        zeros = v.new_zeros(num_n, num_v, *channels, spatial.numel()).transpose(0, 1)
        return zeros.scatter_add_(-1, index, v.reshape(index.shape)).unflatten(-1, spatial)

    @fast.body("Entries of a matrix are moved, without the Jacobian.", "vjp")
    def batch_averaged(self, c: Context, mat: Tensor) -> Tensor:
        """Scatter entry (s, t) of ``mat`` to (index(s), index(t)), and average."""
        index = self._flat_indices(c)  # within a channel
        index = index.reshape(len(index), -1, index.shape[-1])
        channels, size = index.shape[1], _shape(c, c.input).numel()
        offsets = size * torch.arange(channels, device=mat.device).unsqueeze(1)
        dim = channels * size
        total = mat.new_zeros(dim * dim)
        for i in (index + offsets).flatten(1):
            total.index_add_(0, (i.unsqueeze(1) * dim + i).flatten(), mat.flatten())
        return total.reshape(dim, dim) / len(index)


def _of_each(vectors: Tensor, index: Tensor) -> Tensor:
    """Repeat indices for each of V vectors: ``[V, N, C, T]``."""
    return index.expand(len(vectors), *index.shape)


def _gathered(mat: Tensor, index: Tensor, spatial: Size) -> Tensor:
    """Take entries ``[N, C, T]`` of each channel: ``[V, N, C, *spatial]``."""
    index = _of_each(mat, index)
    flat = mat.reshape(*index.shape[:-1], -1)
    return flat.gather(-1, index).unflatten(-1, spatial)


@register(nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)
class MaxUnpoolNDDerivatives(BaseDerivatives):
    """``y[index(t)] = x[t]``, with the indices as second argument: the Jacobian scatters."""

    hessian_is_zero = always

    def jvp(self, c: Context, t: Any) -> Tensor:
        t = t if isinstance(t, Tensor) else t[0]
        spatial, index = _shape(c, c.output), _of_each(t, self._flat_indices(c))
        zeros = t.new_zeros(*index.shape[:-1], spatial.numel())
        return zeros.scatter(-1, index, t.reshape(index.shape)).unflatten(-1, spatial)

    def vjp(self, c: Context, v: Tensor) -> tuple[Tensor | None, ...]:
        spatial, others = _shape(c, c.input), [None] * (len(c.inputs) - 1)
        return _gathered(v, self._flat_indices(c), spatial), *others

    def _flat_indices(self, c: Context) -> Tensor:
        """Return the second argument for the call at hand: ``[N, C, T]``."""
        return c.select(c.inputs[1]).flatten(-spatial_axes(c.module))
