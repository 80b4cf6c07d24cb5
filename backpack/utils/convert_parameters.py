"""Conversion between one long vector and the shapes of parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def vector_to_parameter_list(vec: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Cut a vector into pieces that have the shapes of the parameters.

    Args:
        vec: Concatenation of the flattened pieces. ``[D]``
        parameters: Tensors whose shapes the pieces take, with ``D`` entries in total.

    Returns:
        Views of ``vec``, one per parameter. ``[*p]``

    Raises:
        TypeError: If ``vec`` is not a tensor.
        ValueError: If ``vec`` is not a vector with as many entries as the parameters.
    """
    if not isinstance(vec, Tensor):
        raise TypeError(f"Expected vec to be a torch.Tensor, got {type(vec).__name__}.")

    shapes = [parameter.shape for parameter in parameters]
    sizes = [shape.numel() for shape in shapes]
    if vec.shape != (sum(sizes),):
        raise ValueError(
            f"vec has shape {tuple(vec.shape)}, but the parameters have {sum(sizes)} entries."
        )
    return [piece.view(shape) for piece, shape in zip(vec.split(sizes), shapes, strict=True)]


def parameter_list_to_vector(tensors: Iterable[Tensor]) -> Tensor:
    """Flatten and concatenate tensors; the inverse of :func:`vector_to_parameter_list`.

    Args:
        tensors: The pieces, such as gradients. ``[*p]`` each

    Returns:
        Concatenation of the flattened pieces, a tensor of its own. ``[D]``
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
