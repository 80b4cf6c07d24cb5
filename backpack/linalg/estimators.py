"""Traces, diagonals, norms and determinants of operators that are known by their products.

Letters: P rows, V random vectors. What a structured operator knows itself is exact, at no product.

=============== ================================= ============= ================================
method          looks at                          products      error
=============== ================================= ============= ================================
``hutchinson``  random vectors alone              V             ``1 / √V``
``hutch++``     and a random part of the range    V, in thirds  ``1 / V`` if semidefinite
``xtrace``,     the same, each vector for both    V, in halves  less; falls with the eigenvalues
``xdiag``
=============== ================================= ============= ================================

>>> import torch
>>> from backpack.linalg import DiagonalOperator, trace
>>> trace(DiagonalOperator(torch.tensor([1.0, 2.0])))
Estimate(value=tensor(3.), error=tensor(0.), products=0)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from backpack.core.values import at_least_single
from backpack.linalg.algebra import known_diagonal, known_spectrum
from backpack.linalg.operators import LinearOperator
from backpack.utils.autocast import without_autocast
from backpack.utils.progress import with_bar


class Estimate(NamedTuple):
    """An estimate, and how far off it may be."""

    value: Tensor
    """The estimate, a scalar or ``[P]``."""
    error: Tensor
    """Its standard error (of each entry), estimated from the spread of what it is a mean of; 0 for
    exact values, infinite for a single term, or if random vectors are equal. The terms of
    ``"xtrace"`` and ``"xdiag"`` depend on each other, so that it is up to 40 % too small for
    these."""
    products: int
    """How many vectors were multiplied with the operator."""


@dataclass(frozen=True)
class Randomness:
    """How random vectors are drawn, and multiplied.

    Attributes:
        operator: A square matrix.
        generator: Source of random numbers.
        vectors_at_once: How many vectors are multiplied at once.
        progress: Whether a bar is shown.
    """

    operator: LinearOperator
    generator: Generator | None
    vectors_at_once: int | None
    progress: bool

    def __post_init__(self) -> None:
        """Check the operator and the number of vectors."""
        if not isinstance(self.operator, LinearOperator):
            raise TypeError(
                "Estimates are of operators, such as backpack.linalg.GGN(model, loss_function, "
                f"data), got {type(self.operator).__name__}."
            )
        if self.vectors_at_once is not None and self.vectors_at_once < 1:
            raise ValueError(f"vectors_at_once has to be at least 1, got {self.vectors_at_once}.")

    @property
    def precision(self) -> torch.dtype:
        """That of the computation, at least single."""
        return torch.promote_types(self.operator.dtype, torch.float32)

    def normal(self, num_vectors: int) -> Tensor:
        """Draw ``[P, V]`` from the normal distribution."""
        shape, device = (self.operator.shape[1], num_vectors), self.operator.device
        return torch.randn(shape, dtype=self.precision, device=device, generator=self.generator)

    def signs(self, num_vectors: int) -> Tensor:
        """Draw ``[P, V]`` entries that are 1 or -1."""
        shape, device = (self.operator.shape[1], num_vectors), self.operator.device
        entries = torch.empty(shape, dtype=self.precision, device=device)
        return entries.bernoulli_(0.5, generator=self.generator).mul_(2).sub_(1)

    def columns(self) -> Tensor:
        """Return the matrix, from P products."""
        eye = torch.eye(self.operator.shape[1], dtype=self.precision, device=self.operator.device)
        return self.multiply(eye)

    def multiply(self, matrix: Tensor, operator: LinearOperator | None = None) -> Tensor:
        """Multiply the operator (or another one) with ``[P, K]``."""
        operator = self.operator if operator is None else operator
        chunks = matrix.to(self.operator.dtype).split(self.vectors_at_once or len(matrix.T) or 1, 1)
        bar = with_bar(list(chunks), "vectors", self.progress)
        return torch.cat([operator @ chunk for chunk in bar], 1).to(matrix)


def trace(
    operator: LinearOperator,
    num_vectors: int = 30,
    method: Literal["hutchinson", "hutch++", "xtrace"] = "xtrace",
    generator: Generator | None = None,
    vectors_at_once: int | None = None,
    progress: bool = False,
) -> Estimate:
    """Estimate the trace of a square matrix, without bias.

    Args:
        operator: The matrix. ``[P, P]``
        num_vectors: V, how many vectors are multiplied with it at most: at least 2, 6 or 4. With P
            or more, P unit vectors are, and the result is exact.
        method: ``"hutchinson"`` is the mean of ``vᵀ A v`` over random signs v (variance
            ``2 / V`` times the sum of the squared entries off the diagonal), ``"hutch++"`` treats a
            random part of the range exactly, ``"xtrace"`` uses all vectors for both in turn.
        generator: Source of random numbers, on the device of the operator.
        vectors_at_once: How many are multiplied at once. Default: all.
        progress: Show a bar (needs ``tqdm``).

    Returns:
        The trace, a scalar, and its error. Exact, at no product, for structured operators.

    Raises:
        ValueError: If the matrix is not square, there are too few vectors, or there is no such
            method.
        TypeError: If ``operator`` is something else, such as a model.

    Source: Hutchinson (1989); Meyer, Musco, Musco, Woodruff, Hutch++: optimal stochastic trace
    estimation (SOSA 2021), algorithm 1; Epperly, Tropp, Webber, XTrace: making the most of every
    sample in stochastic trace estimation (SIMAX 2024), section 2.2 and 2.3.
    """
    methods = {"hutchinson": (_hutchinson, 2), "hutch++": (_hutchpp, 6), "xtrace": (_xtrace, 4)}
    estimator = _choose(methods, method, num_vectors)
    draw = randomness(operator, generator, vectors_at_once, progress)
    known = known_diagonal(operator)
    if known is not None:
        return certain(at_least_single(known).sum())
    if num_vectors >= operator.shape[0]:
        return certain(draw.columns().trace(), operator.shape[0])
    return estimator(draw, num_vectors)


def diagonal(
    operator: LinearOperator,
    num_vectors: int = 30,
    method: Literal["hutchinson", "xdiag"] = "xdiag",
    generator: Generator | None = None,
    vectors_at_once: int | None = None,
    progress: bool = False,
) -> Estimate:
    """Estimate the diagonal of a square matrix, without bias.

    Args:
        operator: The matrix. ``[P, P]``
        num_vectors: V, how many vectors are multiplied with it (or with the transposed).
        method: ``"hutchinson"`` is the mean of ``v ∘ A v`` over random signs v: the variance of an
            entry is the sum of the squares of the others in its row, divided by V. ``"xdiag"``
            treats a random part of the range exactly.
        generator: Source of random numbers, on the device of the operator.
        vectors_at_once: How many are multiplied at once. Default: all.
        progress: Show a bar (needs ``tqdm``).

    Returns:
        The diagonal ``[P]``, and the error of each entry. Exact for structured operators.

    Raises:
        ValueError: As for :func:`trace`.

    Source: Bekas, Kokiopoulou, Saad, An estimator for the diagonal of a matrix (Applied Numerical
    Mathematics 2007); Epperly, Tropp, Webber (SIMAX 2024), section 2.4.
    """
    methods = {"hutchinson": (_hutchinson_diagonal, 2), "xdiag": (_xdiag, 4)}
    estimator = _choose(methods, method, num_vectors)
    draw = randomness(operator, generator, vectors_at_once, progress)
    known = known_diagonal(operator)
    if known is not None:
        return certain(known)
    if num_vectors >= operator.shape[0]:
        return certain(draw.columns().diagonal(), operator.shape[0])
    return estimator(draw, num_vectors)


def frobenius_norm(
    operator: LinearOperator,
    num_vectors: int = 30,
    method: Literal["hutchinson", "hutch++"] = "hutch++",
    generator: Generator | None = None,
    vectors_at_once: int | None = None,
    progress: bool = False,
) -> Estimate:
    """Estimate the root of the sum of all squared entries.

    The square is estimated without bias, as the trace of ``Aᵀ A``: the mean of ``‖A v‖²``.

    Args:
        operator: The matrix, which need not be square. ``[M, P]``
        num_vectors: V, how many vectors are multiplied with it (or with the transposed).
        method: As for :func:`trace`.
        generator: Source of random numbers, on the device of the operator.
        vectors_at_once: How many are multiplied at once. Default: all.
        progress: Show a bar (needs ``tqdm``).

    Returns:
        The norm, a scalar, and its error (to first order). Exact for structured operators.

    Raises:
        ValueError: As for :func:`trace`.
    """
    methods = {"hutchinson": (_square_norm, 2), "hutch++": (_square_norm_of_parts, 6)}
    estimator = _choose(methods, method, num_vectors)
    draw = Randomness(operator, generator, vectors_at_once, progress)
    spectrum = known_spectrum(operator)
    if spectrum is not None:
        return certain(lengths(spectrum).to(spectrum))
    if num_vectors >= operator.shape[1]:
        return certain(lengths(draw.columns()).norm().to(draw.precision), operator.shape[1])
    square, error, products = estimator(draw, num_vectors)
    norm = square.clamp(min=0).sqrt()
    error = error / (2 * norm) if norm > 0 else error
    return Estimate(norm.to(draw.precision), error.to(draw.precision), products)


# --------------------------------------------------------------------------------------
# Traces
# --------------------------------------------------------------------------------------


def _hutchinson(draw: Randomness, num_vectors: int) -> Estimate:
    signs = draw.signs(num_vectors)
    return average((signs * draw.multiply(signs)).sum(0), num_vectors)


def _hutchpp(draw: Randomness, num_vectors: int) -> Estimate:
    """``tr Qᵀ A Q + tr (I - QQᵀ) A (I - QQᵀ)``: the first exactly, the second by Hutchinson."""
    third = num_vectors // 3
    basis = _orthonormal(draw.multiply(draw.signs(third)))
    signs = _without(basis, draw.signs(third))
    exact = (basis * draw.multiply(basis)).sum()
    rest = (signs * draw.multiply(signs)).sum(0)
    estimate = average(rest, third + len(basis.T) + third)
    return estimate._replace(value=exact + estimate.value)


def _xtrace(draw: Randomness, num_vectors: int) -> Estimate:
    """Mean over i of Hutch++ whose basis leaves out vector i, and whose one test vector is i."""
    found = _LeftOut.of(draw, num_vectors // 2, draw.normal)
    Q, Z = found.basis, draw.multiply(found.basis)
    s, V = found.left, found.vectors
    with without_autocast():
        # tr Q_iᵀ A Q_i, where Q_i Q_iᵀ = Q (I - s sᵀ) Qᵀ
        exact = (Q * Z).sum() - (s * (Q.T @ Z @ s)).sum(0)
        inside = Q.T @ V
        inside = inside - s * (s * inside).sum(0)
        rest, image = V - Q @ inside, found.image - Z @ inside
    # its direction is uniform among the P - k + 1 that are left
    size = len(Q) - len(Q.T) + s.square().sum(0)
    scale = size / rest.square().sum(0)
    return average(exact + scale * (rest * image).sum(0), found.products)


# --------------------------------------------------------------------------------------
# Diagonals
# --------------------------------------------------------------------------------------


def _hutchinson_diagonal(draw: Randomness, num_vectors: int) -> Estimate:
    signs = draw.signs(num_vectors)
    return average(signs * draw.multiply(signs), num_vectors)


def _xdiag(draw: Randomness, num_vectors: int) -> Estimate:
    """Mean over i of ``diag(Q_i Q_iᵀ A) + v_i ∘ (I - Q_i Q_iᵀ) A v_i``."""
    found = _LeftOut.of(draw, num_vectors // 2, draw.signs)
    Q, Z = found.basis, draw.multiply(found.basis, draw.operator.T)
    with without_autocast():
        s, inside = found.left, Q.T @ found.image
        outside = found.image - Q @ (inside - s * (s * inside).sum(0))  # (I - Q_i Q_iᵀ) A v_i
        each = (Q * Z).sum(1, keepdim=True) - (Q @ s) * (Z @ s) + found.vectors * outside
    estimate = average(each, found.products)
    # equal signs, if P is small, are all in the basis of each other: no test vector is left
    if not s.any() and len(_orthonormal(found.vectors).T) < len(found.vectors.T):
        return estimate._replace(error=torch.full_like(estimate.error, torch.inf))
    return estimate


@dataclass
class _LeftOut:
    """Bases of the range of A that leave out one vector.

    Attributes:
        vectors: Test vectors. ``[P, k]``
        image: A times these. ``[P, k]``
        basis: Orthonormal basis Q of the image. ``[P, r]``
        left: In column i the direction ``s_i`` in the coordinates of Q that is orthogonal to all
            images but i. Zero if there is none: image i depends on others, such as those of equal
            signs, or of a matrix of low rank.
        products: How many vectors are multiplied, including those with Q.
    """

    vectors: Tensor
    image: Tensor
    basis: Tensor
    left: Tensor
    products: int

    @classmethod
    def of(cls, draw: Randomness, count: int, vectors: Callable[[int], Tensor]) -> _LeftOut:
        """Draw, multiply, and find the bases."""
        V = vectors(count)
        Y = draw.multiply(V)
        largest = Y.abs().max()
        Q, R = torch.linalg.qr(
            Y / torch.where(largest > 0, largest, 1)
        )  # R⁻ᵀ is of about unit size
        left, values, right = torch.linalg.svd(R)
        significant = _beyond_rounding(values)
        products = len(V.T) + int(significant.sum())
        if not significant.all():
            # R⁺ in the place of R⁻¹; images that depend on no others have no part in its kernel
            right = right[significant]
            is_alone = 1 - right.square().sum(0) < 10 * len(values) * torch.finfo(R.dtype).eps
            s = torch.where(is_alone, right / values[significant].unsqueeze(1), 0)
            s = s / torch.where(is_alone, s.norm(dim=0), 1)
            with without_autocast():
                Q = Q @ left[:, significant]
            return cls(V, Y, Q, s, products)
        s = torch.linalg.solve_triangular(R.T, torch.eye(len(R)).to(R), upper=False)  # R⁻ᵀ
        return cls(V, Y, Q, s / s.norm(dim=0), products)


# --------------------------------------------------------------------------------------
# Norms
# --------------------------------------------------------------------------------------


def _square_norm(draw: Randomness, num_vectors: int) -> Estimate:
    return average(lengths(draw.multiply(draw.signs(num_vectors))).square(), num_vectors)


def _square_norm_of_parts(draw: Randomness, num_vectors: int) -> Estimate:
    """``‖A Q‖² + ‖A (I - QQᵀ)‖²``, with a basis Q of a part of the range of Aᵀ."""
    third = num_vectors // 3
    transposed = Randomness(draw.operator.T, draw.generator, draw.vectors_at_once, draw.progress)
    basis = _orthonormal(transposed.multiply(transposed.signs(third)))
    exact = lengths(draw.multiply(basis)).square().sum()
    rest = lengths(draw.multiply(_without(basis, draw.signs(third)))).square()
    estimate = average(rest, third + len(basis.T) + third)
    return estimate._replace(value=exact + estimate.value)


# --------------------------------------------------------------------------------------
# What they share
# --------------------------------------------------------------------------------------


def _choose(
    methods: Mapping[str, tuple[Callable[[Randomness, int], Estimate], int]],
    method: str,
    num_vectors: int,
) -> Callable[[Randomness, int], Estimate]:
    if method not in methods:
        raise ValueError(f"method is one of {', '.join(methods)}, got {method!r}.")
    estimator, fewest = methods[method]
    if num_vectors < fewest:
        raise ValueError(
            f"{method} tells its error from at least {fewest} vectors, got num_vectors="
            f"{num_vectors}."
        )
    return estimator


def randomness(
    operator: LinearOperator, generator: Generator | None, at_once: int | None, progress: bool
) -> Randomness:
    """Check that a matrix is square."""
    draw = Randomness(operator, generator, at_once, progress)
    if operator.shape[0] != operator.shape[1]:
        raise ValueError(f"{operator!r} is not square: it has no trace, diagonal or determinant.")
    return draw


def certain(value: Tensor, products: int = 0) -> Estimate:
    """Return an estimate without error."""
    return Estimate(value, torch.zeros_like(value), products)


def widest(tensor: Tensor) -> torch.dtype:
    """Return double precision, or that of a tensor whose device has none."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


def lengths(columns: Tensor) -> Tensor:
    """Return the norms of columns ``[K]``, whose squares single precision may not hold."""
    return torch.linalg.vector_norm(columns, dim=0, dtype=widest(columns))


def average(each: Tensor, products: int) -> Estimate:
    """Average over the last axis; the standard error is that of independent terms."""
    count = each.shape[-1]
    spread = each.std(-1) if count > 1 else torch.full_like(each[..., 0], torch.inf)
    return Estimate(each.mean(-1), spread / count**0.5, products)


def _orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the range ``[P, r]``, without rounding errors."""
    left, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    return left[:, _beyond_rounding(values)]


def _beyond_rounding(values: Tensor) -> Tensor:
    """Tell which singular values are not zero, ``[k]``: however long the vectors are."""
    return values > 10 * len(values) * torch.finfo(values.dtype).eps * values[:1]


def _without(basis: Tensor, matrix: Tensor) -> Tensor:
    with without_autocast():
        return matrix - basis @ (basis.T @ matrix)
