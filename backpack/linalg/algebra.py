"""What is known exactly of sums, multiples and sub-matrices of structured operators."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack.linalg.operators import (
    DampedOperator,
    LinearOperator,
    ScaledOperator,
    SubmatrixOperator,
    SumOperator,
)
from backpack.linalg.structured import SpectralOperator


def known_diagonal(operator: LinearOperator) -> Tensor | None:
    """Return the diagonal ``[P]`` of a square operator if its parts know theirs, else None."""
    if isinstance(operator, SpectralOperator):
        return operator.diagonal()
    if isinstance(operator, DampedOperator):
        inner = known_diagonal(operator.operator)
        return None if inner is None else inner + operator.damping
    if isinstance(operator, ScaledOperator):
        inner = known_diagonal(operator.operator)
        return None if inner is None else operator.factor * inner
    if isinstance(operator, SubmatrixOperator):
        inner = known_diagonal(operator.operator)
        same = torch.equal(operator.rows, operator.columns)
        return None if inner is None or not same else inner[operator.rows]
    if isinstance(operator, SumOperator):
        known = [known_diagonal(one) for one in operator.operators]
        found = [one for one in known if one is not None]
        return torch.stack(found).sum(0) if len(found) == len(known) else None
    return None


def known_spectrum(operator: LinearOperator) -> Tensor | None:
    """Return the eigenvalues ``[P]`` of a symmetric operator if they are known, else None."""
    if isinstance(operator, SpectralOperator):
        return operator.spectrum
    if isinstance(operator, DampedOperator):
        inner = known_spectrum(operator.operator)
        return None if inner is None else inner + operator.damping
    if isinstance(operator, ScaledOperator):
        inner = known_spectrum(operator.operator)
        return None if inner is None else operator.factor * inner
    return None
