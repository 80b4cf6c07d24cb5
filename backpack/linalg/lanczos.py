"""Some eigenpairs of a symmetric matrix by the Lanczos method of ARPACK, also where it is singular.

Imported where they are computed: scipy need not be installed.
"""

from __future__ import annotations

from typing import Any

import numpy
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh  # type: ignore[import-untyped]

Pairs = tuple[Any, Any]  # arrays: eigenvalues in ascending order [k], vectors in columns [P, k]
# After how many restarts eigenvalues are looked for in another way.
RESTARTS = 50


def eigenpairs(A: LinearOperator, k: int, which: str, tolerance: float, start: Any) -> Pairs:
    """Return k eigenpairs, by those of a multiple of about unit size.

    ARPACK's accuracy is relative to an eigenvalue, or to a fixed number that is larger. Arguments
    are those of :func:`_eigenpairs`.
    """
    unit = A.dtype.type(abs(A @ start).max())
    if not (unit and numpy.isfinite(unit)):
        return _eigenpairs(A, k, which, tolerance, start)

    def product(x: Any) -> Any:
        return (A @ x) / unit

    scaled = LinearOperator(A.shape, product, product, product, A.dtype, product)
    values, vectors = _eigenpairs(scaled, k, which, tolerance, start)
    return values * unit, vectors


def _eigenpairs(A: LinearOperator, k: int, which: str, tolerance: float, start: Any) -> Pairs:
    """Return k eigenpairs.

    Args:
        A: The matrix ``[P, P]``.
        k: Their number.
        which: ``"LA"``, ``"SA"``, ``"LM"`` or ``"BE"``.
        tolerance: Accuracy.
        start: The vector to start from, ``[P]``.
    """
    size, nothing = A.shape[0], start[:, None][:, :0]
    if which in ("LA", "LM"):
        found = _quickly(A, k, which, tolerance, start)
        if found is not None:
            return found
    if which == "LA":
        return _largest(A, k, tolerance, start, nothing)
    if which == "BE":
        largest = _eigenpairs(A, k - k // 2, "LA", tolerance, start)
        if k == 1:
            return largest
        return _joined(_smallest(A, k // 2, tolerance, start, largest[1]), largest)
    smallest = _smallest(A, k, tolerance, start, nothing)
    if which == "SA":
        return smallest
    ends = smallest, _largest(A, min(k, size - k), tolerance, start, smallest[1])
    values, vectors = _joined(*ends)
    chosen = sorted(abs(values).argsort(kind="stable")[-k:])
    return values[chosen], vectors[:, chosen]


def _quickly(A: LinearOperator, k: int, which: str, tolerance: float, start: Any) -> Pairs | None:
    """Return what ARPACK finds at once; None if it has two of one eigenspace, and may miss others.

    In 600 random matrices with such spaces it has never missed one without having two others.
    """
    try:
        values, vectors = _lanczos(A, k, which, tolerance, start, RESTARTS)
    except ArpackError:
        return None
    close = 50 * numpy.finfo(A.dtype).eps * abs(values).max()
    return None if (numpy.diff(values) <= close).any() else (values, vectors)


def _largest(A: LinearOperator, k: int, tolerance: float, start: Any, apart: Any) -> Pairs:
    """Return the largest eigenpairs, as :func:`_smallest`."""
    values, vectors = _smallest(-A, k, tolerance, start, apart)
    return _joined((-values, vectors))


def _smallest(A: LinearOperator, k: int, tolerance: float, start: Any, apart: Any) -> Pairs:
    """Return the smallest eigenpairs, but for vectors that are known: ``apart``, ``[P, K]``.

    ARPACK's accuracy is relative to the eigenvalue, which one that is 0 never has. So the spectrum
    is shifted to where all are as large as the largest. And what one vector starts meets each
    eigenspace once: of those of several dimensions, such as the kernel, it may miss some. Other
    vectors find them, once those that are known have been moved to the other end.
    """
    (largest,), _ = _lanczos(A, 1, "LM", 0.1, start)
    shift = 2 * abs(largest) or 1.0
    eps, generator = numpy.finfo(A.dtype).eps, numpy.random.default_rng(0)

    def find(count: int, known: Any, restarts: int | None = None) -> Pairs:
        def product(matrix: Any) -> Any:
            return A @ matrix.astype(A.dtype) + shift * (matrix + 4 * known @ (known.T @ matrix))

        moved = LinearOperator(A.shape, product, product, product, float, product)
        accuracy, begin = max(tolerance, 50 * eps), generator.standard_normal(len(start))
        values, vectors = _lanczos(moved, count, "SA", accuracy, begin, restarts)
        return values - shift, vectors

    try:
        values, vectors = find(k, apart, RESTARTS)
    except ArpackError:  # too many in one eigenspace
        values, vectors = find(1, apart)
    while True:
        other = find(1, numpy.concatenate([apart, vectors], axis=1))
        is_complete = len(values) == k
        if is_complete and other[0][0] >= values[-1] - shift * max(tolerance, 1000 * eps):
            return values, vectors
        values, vectors = _joined((values, vectors), other)
        values, vectors = values[:k], vectors[:, :k]


def _lanczos(
    A: LinearOperator, k: int, which: str, tolerance: float, start: Any, restarts: int | None = None
) -> Pairs:
    try:
        return _joined(eigsh(A, k, which=which, tol=tolerance, v0=start, maxiter=restarts))
    except ArpackError as error:
        image = A @ start
        if not numpy.isfinite(image).all():
            raise ValueError(
                "The matrix has entries that are not finite, and no eigenvalues. Look for them in "
                "parameters, data and loss."
            ) from error
        if image.any():
            raise
        vectors = numpy.eye(len(start), k, dtype=A.dtype)  # of a matrix of zeros
        return vectors[0] * 0, vectors


def _joined(*pairs: Pairs) -> Pairs:
    """Bring eigenpairs in the order of their eigenvalues."""
    values = numpy.concatenate([one for one, _ in pairs])
    order = values.argsort(kind="stable")
    return values[order], numpy.concatenate([one for _, one in pairs], axis=1)[:, order]
