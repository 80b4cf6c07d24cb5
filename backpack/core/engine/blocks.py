"""What stands for the Kronecker factors of a parameter whose rules know none: its block, or axes.

A small parameter has its whole block. A larger one has a factor for each axis, which follow from
the *marginals* of the block. Both are made of the individual products ``[V, N, *p]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import torch
from torch import Tensor

from backpack.core.derivatives.reductions import gram, mean_square

# A parameter has its whole block up to this many entries.
WHOLE_BLOCK_ENTRIES = 2**11


def block(products: Tensor, max_size: float) -> Tensor:
    """Sum the outer products of individual products: ``[P, P]``, or the diagonal ``[P]``."""
    return gram(products.reshape(-1, prod(products.shape[2:])), 1, max_size)


def marginals(products: Tensor, max_size: float) -> list[Tensor]:
    """Return ``M_k = sum over v, n of G_(k) G_(k)ᵀ`` of the unfoldings of individual products.

    ``[d_k, d_k]`` (or its diagonal), for each axis k that is longer than 1.
    """
    stacked = products.flatten(0, 1)
    axes = [i for i, size in enumerate(stacked.shape) if i > 0 and size > 1]
    return [_marginal(stacked, axis, max_size) for axis in axes]


def _marginal(stacked: Tensor, axis: int, max_size: float) -> Tensor:
    size = stacked.shape[axis]
    if size > max_size:
        others = [i for i in range(stacked.dim() - 1) if i != axis - 1]
        return reduce(torch.add, [mean_square(each, others, 1) for each in stacked])
    if axis == stacked.dim() - 1:
        rows = stacked.reshape(-1, size)
        return rows.mT @ rows
    unfolded = stacked.movedim(axis, 0).flatten(1)
    return unfolded @ unfolded.mT


def axis_factors(marginals: Sequence[Tensor]) -> list[Tensor]:
    """Turn marginals into Kronecker factors of equal weight.

    A marginal is a partial trace of the block. If the block is a Kronecker product, it is
    ``M_1 ⊗ … ⊗ M_m / tr^(m-1)``, with ``tr`` its trace; in any case, that has its trace.
    """
    count, first = len(marginals), marginals[0]
    # not trace(), which torch 2.6 does not have in bfloat16
    trace = (first if first.dim() == 1 else first.diagonal()).sum()
    scale = torch.where(trace > 0, trace.clamp(min=torch.finfo(trace.dtype).tiny), 1)
    return [m / scale ** ((count - 1) / count) for m in marginals]
