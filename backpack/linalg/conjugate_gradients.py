"""Linear systems with several right-hand sides, by preconditioned conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from backpack.core.values import at_least_single


class Preconditioner(Protocol):
    """What is near to a matrix, and can be inverted with damping: a structured operator."""

    def inverse(self, damping: float = 0.0) -> Any:
        """Return an operator, ``(A + damping · I)⁻¹``, with a ``spectrum``."""


def check_invertible(preconditioner: Any) -> None:
    """Refuse what has no damped inverse, such as an operator that is known by products alone."""
    if isinstance(preconditioner, Tensor) or not hasattr(preconditioner, "inverse"):
        raise TypeError(
            "A preconditioner is an operator with a damped inverse, such as DiagonalGGN, "
            f"KroneckerGGN, EKFAC or DiagonalOperator, got {type(preconditioner).__name__}."
        )


class Solution(NamedTuple):
    """Solutions of linear systems, and how they were found."""

    solution: Tensor
    """Of the shape of the right-hand sides, ``[P]`` or ``[P, V]``."""
    residuals: Tensor
    """Norm of the residual of each, relative to that of its right-hand side, as the iteration has
    it. Rounding keeps the one of the solution above about ``eps ‖A‖ ‖x‖ / ‖b‖``. ``[V]``"""
    iterations: Tensor
    """After how many iterations each was accepted or given up. ``[V]``"""
    converged: bool
    """Whether all residuals are below the tolerance."""


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    rhs: Tensor,
    inverse: Any = None,
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
    name: str = "The matrix",
) -> Solution:
    """Solve ``A x = b`` for each column b, from zero.

    Columns have steps of their own and share the products; those that have converged take no part
    in further ones.

    Args:
        product: Multiplies with a symmetric positive definite matrix. ``[P, V] -> [P, V]``
        rhs: ``[P]`` or ``[P, V]``.
        inverse: Operator that is near to the inverse, with a positive ``spectrum``.
        tolerance: Relative residual at which a column has converged.
        max_iterations: Stop after so many.
        name: Names the matrix in messages.

    Raises:
        ValueError: If ``inverse`` is not positive definite, or something is not finite.
        RuntimeError: If there is a direction along which the matrix is not positive.

    Source: Hestenes, Stiefel (1952); with preconditioner Saad, Iterative methods for sparse linear
    systems (2003), algorithm 9.1.
    """
    if inverse is not None and not inverse.spectrum.min() > 0:
        raise ValueError(
            f"The damped preconditioner of {name} is not positive definite. Use more damping, or "
            "the diagonal or the factors of the GGN instead of the Hessian."
        )
    # in at least single precision, apart from the products
    b = rhs if rhs.dim() == 2 else rhs.unsqueeze(1)
    b = at_least_single(b)
    _check_finite(b, f"A right-hand side of {name}")
    # squares of tiny (or huge) entries are zero (or infinite)
    unit = b.abs().amax(0) if len(b) else b.new_ones(b.shape[1])
    unit = torch.where((unit > 0) & ((unit < 1e-10) | (unit > 1e10)), unit, 1)
    b = b / unit
    x, residual = torch.zeros_like(b), b.clone()
    scale = b.norm(dim=0)
    scale = torch.where(scale > 0, scale, 1)
    iterations = torch.zeros(len(scale), dtype=torch.long, device=b.device)

    def apply(operator: Any, columns: Tensor) -> Tensor:
        return operator(columns.to(rhs.dtype)).to(b)

    def preconditioned(columns: Tensor) -> Tensor:
        return columns if inverse is None else apply(inverse.__matmul__, columns)

    active = (residual.norm(dim=0) > tolerance * scale).nonzero().squeeze(1)
    z = preconditioned(residual)
    direction, rz = z.clone(), (residual * z).sum(0)
    for step in range(1, max_iterations + 1):
        if not len(active):
            break
        d, r = direction[:, active], residual[:, active]
        image = apply(product, d)
        _check_finite(image, f"A product with {name}")
        curvature = (d * image).sum(0)
        rounding = torch.finfo(rhs.dtype).eps * d.norm(dim=0) * image.norm(dim=0)
        if (curvature < -10 * rounding).any():
            raise RuntimeError(
                f"{name} is not positive definite: conjugate gradients have met a direction of "
                "negative curvature. Use more damping, or the GGN instead of the Hessian."
            )
        is_positive = curvature > rounding
        length = torch.where(is_positive, rz[active] / curvature, 0)
        x[:, active] += length * d
        r = r - length * image
        residual[:, active] = r
        iterations[active] = step
        z = preconditioned(r)
        now = (r * z).sum(0)
        direction[:, active] = z + torch.where(rz[active] > 0, now / rz[active], 0) * d
        rz[active] = now
        goes_on = (r.norm(dim=0) > tolerance * scale[active]) & is_positive
        active = active[goes_on]
    residuals = residual.norm(dim=0) / scale
    solution = (x * unit).to(rhs.dtype)
    return Solution(
        solution if rhs.dim() == 2 else solution.squeeze(1),
        residuals,
        iterations,
        bool((residuals <= tolerance).all()),
    )


def _check_finite(matrix: Tensor, what: str) -> None:
    """Refuse entries that are not finite: no column would be found to be unsolved.

    Raises:
        ValueError: If there is one.
    """
    if not matrix.isfinite().all():
        raise ValueError(
            f"{what} has entries that are not finite, and no solution. Look for them in "
            "parameters, data and loss; in half precision, where products overflow, use a mean or "
            "float32."
        )
