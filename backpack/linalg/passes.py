"""Backward passes that leave no trace at the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from backpack.extensions.backprop_extension import FAIL_ERROR, BackpropExtension


def values_of(
    params: Sequence[Parameter],
    exts: Sequence[BackpropExtension],
    root: Tensor,
    what: str = "loss",
    retain_graph: bool = False,
) -> list[list[Any]]:
    """Run a backward pass, in a context of extensions that wants no gradients; return their values.

    Args:
        params: The parameters.
        exts: Extensions that are active; where they save to is changed.
        root: What is differentiated, of an extended model.
        what: Names it in messages.
        retain_graph: Keep its graph.

    Returns:
        For each extension the values of the parameters.

    Raises:
        ValueError: If it does not depend on a parameter.
    """
    for i, ext in enumerate(exts):
        ext.savefield = f"_backpack_linalg_{i}"
        ext._fail_mode = FAIL_ERROR  # a part of the uses is another matrix
        ext.is_of_operator = True
    try:
        root.backward(inputs=list(params), retain_graph=retain_graph)
    finally:
        values = [[vars(p).pop(ext.savefield, None) for p in params] for ext in exts]
    of_first, *_ = values
    unused = [list(p.shape) for p, v in zip(params, of_first, strict=True) if v is None]
    if unused:
        raise ValueError(
            f"The {what} does not depend on the parameters of shapes {unused} through an extended "
            "module. Leave them out (params=...)."
        )
    return values
