"""Values of tensors: whether there are any, and a precision to compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def has_values(tensor: Tensor) -> bool:
    """Whether entries can be read: not on the meta device, nor while a CUDA graph is captured."""
    if tensor.is_cuda and torch.cuda.is_initialized():  # a fake tensor needs no GPU
        return not torch.cuda.is_current_stream_capturing()
    return not tensor.is_meta


def at_least_single(tensor: Tensor) -> Tensor:
    """Return a tensor in a precision that has squares, sums and decompositions of its entries."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
