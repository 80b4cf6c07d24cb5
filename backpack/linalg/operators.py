"""Linear operators on vectors of parameters, for torch and for scipy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from math import prod
from numbers import Real
from typing import Any, Literal, overload

import torch
from torch import Tensor

from backpack.linalg.conjugate_gradients import (
    Preconditioner,
    Solution,
    check_invertible,
    conjugate_gradients,
)

# Chosen rows or columns: a slice, numbers, or a mask.
Index = slice | Sequence[int] | Tensor


class LinearOperator(ABC):
    """A matrix ``[M, P]`` that is known by its products with vectors; most are symmetric.

    ``A + B``, ``A - B``, ``2 * A``, ``A @ B``, ``A.T``, ``A.submatrix(rows)`` are operators, too.

    Vectors are the parameters, flattened and concatenated;
    :func:`~backpack.utils.convert_parameters.vector_to_parameter_list` and
    :func:`~backpack.utils.convert_parameters.parameter_list_to_vector` convert them from and to
    the format of ``model.parameters()``.

    Attributes:
        shape: ``(M, P)``; ``(P, P)`` if it is symmetric.
        dtype: Precision of the vectors that it multiplies with, and of the products.
        device: Their device.
        is_symmetric: Whether it is known to be its own transposed.
        of_loss: Class and reduction of the loss whose curvature it is, if that is known.
        fisher: What it is made of: ``"empirical"`` for gradients at the targets of the data, or
            ``"inputs"``, see :class:`~backpack.extensions.KFAC`. None for other curvature.
    """

    is_symmetric = True
    of_loss: tuple[type, str] | None = None
    fisher: Literal["empirical", "inputs"] | None = None

    def __init__(self, size: int | tuple[int, int], dtype: torch.dtype, device: torch.device):
        """Store the shape, ``(size, size)`` for a number, the precision and the device."""
        self.shape = (size, size) if isinstance(size, int) else size
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def _matmat(self, matrix: Tensor) -> Tensor:
        """Multiply with a matrix: ``[P, V] -> [M, V]``."""

    def _rmatmat(self, matrix: Tensor) -> Tensor:
        """Multiply the transposed with a matrix: ``[M, V] -> [P, V]``."""
        if not self.is_symmetric:
            raise NotImplementedError(f"{type(self).__name__} does not know its transposed.")
        return self._matmat(matrix)

    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...

    @overload
    def __matmul__(self, other: LinearOperator) -> LinearOperator: ...

    def __matmul__(self, other: Tensor | LinearOperator) -> Tensor | LinearOperator:
        """Multiply with a vector, a matrix, or another operator.

        Args:
            other: ``[P]`` or ``[P, V]``, or an operator of that shape.

        Returns:
            The product, ``[M]`` or ``[M, V]``; an operator if the other one is.

        Raises:
            TypeError: If ``other`` is not a tensor or an operator.
            ValueError: If its length, precision or device is not that of the operator.
        """
        if isinstance(other, LinearOperator):
            return ProductOperator(self, other)
        if not isinstance(other, Tensor):
            hint = "For numpy arrays, use to_scipy()."
            if isinstance(other, (list, tuple)) and any(isinstance(x, Tensor) for x in other):
                hint = (
                    "Tensors that are shaped like the parameters make one vector by "
                    "parameter_list_to_vector(tensors) of backpack.utils.convert_parameters."
                )
            raise TypeError(f"{self!r} multiplies with tensors, got {type(other).__name__}. {hint}")
        size = self.shape[1]
        if other.dim() not in (1, 2) or other.shape[0] != size:
            raise ValueError(
                f"{self!r} multiplies with vectors [{size}] and matrices [{size}, V], got a tensor "
                f"of shape {list(other.shape)}."
            )
        if (other.dtype, other.device) != (self.dtype, self.device):
            raise ValueError(
                f"{self!r} is of {self.dtype} on {self.device}, got a tensor of {other.dtype} on "
                f"{other.device}. Convert it with tensor.to(operator.device, operator.dtype)."
            )
        if other.dim() == 1:
            return self._matmat(other.unsqueeze(1)).squeeze(1)
        return self._matmat(other)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        """Multiply from the left: ``[M]`` to ``[P]``, or ``[V, M]`` to ``[V, P]``.

        Raises:
            ValueError: As for products from the right.
        """
        if not isinstance(other, Tensor):
            return NotImplemented
        return (self.T @ other.mT).mT if other.dim() == 2 else self.T @ other

    def __repr__(self) -> str:
        """Name the class and the shape."""
        return f"{type(self).__name__}(shape={self.shape})"

    @property
    def T(self) -> LinearOperator:
        """The transposed matrix ``[P, M]``, itself if it is symmetric."""
        return self if self.is_symmetric else TransposedOperator(self)

    def __add__(self, other: LinearOperator) -> LinearOperator:
        """Return ``A + B``, of the same shape, precision and device."""
        return SumOperator([self, other])

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        """Return ``A - B``."""
        return SumOperator([self, -other])

    def __mul__(self, factor: float) -> LinearOperator:
        """Return a multiple."""
        return ScaledOperator(self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> LinearOperator:
        """Return ``A / divisor``."""
        return ScaledOperator(self, 1 / divisor)

    def __neg__(self) -> LinearOperator:
        """Return ``-A``."""
        return ScaledOperator(self, -1.0)

    def submatrix(self, rows: Index, columns: Index | None = None) -> LinearOperator:
        """Choose rows and columns.

        Args:
            rows: Which rows: a slice, numbers, or a mask ``[M]``.
            columns: Which columns. Default: the same as rows, of a square matrix.

        Raises:
            ValueError: If a number is out of range, or columns are not given for a matrix that is
                not square.
        """
        return SubmatrixOperator(self, rows, columns)

    def damped(self, damping: float) -> DampedOperator:
        """Add a multiple of the identity: ``A + damping · I``."""
        return DampedOperator(self, damping)

    def to_dense(self) -> Tensor:
        """Return the matrix ``[M, P]``, from P products: for small models."""
        return self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.device)

    def to_scipy(self) -> Any:
        """Return a ``scipy.sparse.linalg.LinearOperator``.

        Its vectors are arrays of float64 if that is the precision of the operator, else of float32.

        Raises:
            ImportError: If scipy is not installed.
        """
        linalg = _scipy_linalg()

        def product(operator: LinearOperator, array: Any) -> Any:
            if array.dtype.kind == "c":  # of a real matrix: each part has its own
                return product(operator, array.real) + 1j * product(operator, array.imag)
            contiguous = array if min(array.strides, default=0) >= 0 else array.copy()
            own = torch.as_tensor(contiguous, dtype=self.dtype, device=self.device)
            return _to_numpy(operator @ own)

        return linalg.LinearOperator(
            self.shape,
            matvec=partial(product, self),
            rmatvec=partial(product, self.T),
            matmat=partial(product, self),
            rmatmat=partial(product, self.T),
            dtype=_to_numpy(torch.empty(0, dtype=self.dtype)).dtype,
        )

    def solve(
        self,
        rhs: Tensor,
        damping: float = 0.0,
        tolerance: float = 1e-5,
        max_iterations: int | None = None,
        preconditioner: Preconditioner | None = None,
    ) -> Tensor:
        """Solve ``(A + damping · I) x = rhs`` by conjugate gradients, one product an iteration.

        Args:
            rhs: Right-hand side, or several, which share the products. ``[P]`` or ``[P, V]``
            damping: Multiple of the identity that is added.
            tolerance: Norm of a residual, relative to that of its right-hand side, at which to
                stop.
            max_iterations: Stop after so many iterations, whatever the residual. Default: ``10 P``,
                after which it is an error not to have converged.
            preconditioner: A structured operator that is near to A, such as its Kronecker factors
                or its diagonal; it is inverted with the same damping.

        Returns:
            The solution x, of the shape of ``rhs``. For a report see :meth:`solve_with_report`.

        Raises:
            ValueError: If ``rhs`` does not have the length of the operator, that is not symmetric,
                the damped preconditioner is not positive definite or has no inverse, or something
                is not finite.
            TypeError: If the preconditioner is no operator that has an inverse.
            RuntimeError: If conjugate gradients do not converge, or meet a direction along which
                the matrix is not positive.
        """
        damping = one_number(self, damping)
        found = self.solve_with_report(rhs, damping, tolerance, max_iterations, preconditioner)
        if not found.converged and max_iterations is None:
            raise RuntimeError(
                f"Conjugate gradients with {self!r} and damping {damping:g} have stopped at a "
                f"relative residual of {float(found.residuals.max()):.1g}. Is the matrix positive "
                "definite? Use more damping, a larger tolerance, or set max_iterations."
            )
        return found.solution

    def solve_with_report(
        self,
        rhs: Tensor,
        damping: float = 0.0,
        tolerance: float = 1e-5,
        max_iterations: int | None = None,
        preconditioner: Preconditioner | None = None,
    ) -> Solution:
        """Solve as :meth:`solve`, and tell how it went: it is no error not to converge.

        Returns:
            The solution, with the relative residuals and the numbers of iterations.

        Raises:
            ValueError: As for :meth:`solve`.
            RuntimeError: If there is a direction along which the matrix is not positive.
        """
        damping = one_number(self, damping)
        self._need_symmetric("conjugate gradients")
        if preconditioner is not None:
            check_invertible(preconditioner)
        if rhs.dim() not in (1, 2) or rhs.shape[0] != self.shape[0]:
            raise ValueError(
                f"{self!r} solves for matrices [{self.shape[0]}, V] and vectors [{self.shape[0]}], "
                f"got shape {list(rhs.shape)}."
            )
        return conjugate_gradients(
            self.damped(damping).__matmul__,
            rhs,
            None if preconditioner is None else preconditioner.inverse(damping),
            tolerance,
            10 * self.shape[0] if max_iterations is None else max_iterations,
            f"{self!r} with damping {damping:g}",
        )

    def _need_symmetric(self, what: str) -> None:
        if not self.is_symmetric:
            raise ValueError(
                f"{self!r} is not known to be symmetric, which {what} need. For least squares, use "
                "A.T @ A."
            )

    def eigsh(self, k: int = 6, which: str = "LA", tolerance: float = 0.0) -> tuple[Tensor, Tensor]:
        """Compute some eigenpairs by the Lanczos method (ARPACK), from fixed starting vectors.

        An eigenvalue with several eigenvectors, such as 0 of a singular matrix, is found as often.

        Args:
            k: Number of eigenpairs, less than P.
            which: ``"LA"`` for the largest, ``"SA"`` for the smallest (the most negative), ``"LM"``
                for the largest in magnitude, ``"BE"`` for half from each end.
            tolerance: Accuracy of the eigenvalues, relative to each; of the smallest, relative to
                the largest in magnitude. Default: that of the precision.

        Returns:
            Eigenvalues in ascending order ``[k]``, and eigenvectors in the columns of ``[P, k]``.

        Raises:
            ImportError: If scipy is not installed.
            ValueError: If there are not more than k eigenpairs, or ``which`` is something else.
        """
        self._need_symmetric("eigenpairs")
        if which not in ("LA", "SA", "LM", "BE"):
            raise ValueError(
                f"{self!r}: which is 'LA' (largest), 'SA' (smallest), 'LM' (largest in magnitude) "
                f"or 'BE' (both ends), got {which!r}. Those next to 0 are the smallest of a "
                "positive matrix, and of A @ A, which has the eigenvectors of A."
            )
        if k not in range(1, self.shape[0]):
            raise ValueError(
                f"{self!r}: k is a whole number, at least 1 and less than P, got {k}. For all "
                "eigenpairs, use torch.linalg.eigh(operator.to_dense())."
            )
        _scipy_linalg()
        from backpack.linalg.lanczos import eigenpairs

        generator = torch.Generator().manual_seed(0)
        options: Any = {"dtype": torch.float32, "device": generator.device}
        start = torch.randn(self.shape[0], generator=generator, **options)
        operator = self.to_scipy()
        pairs = eigenpairs(operator, int(k), which, tolerance, start.numpy().astype(operator.dtype))
        values, vectors = (
            torch.as_tensor(each, dtype=self.dtype, device=self.device) for each in pairs
        )
        return values, vectors


class DampedOperator(LinearOperator):
    """``A + damping · I``."""

    def __init__(self, operator: LinearOperator, damping: float):
        if operator.shape[0] != operator.shape[1]:
            raise ValueError(f"{operator!r} is not square: nothing can be added to its diagonal.")
        super().__init__(operator.shape, operator.dtype, operator.device)
        self.operator = operator
        self.damping = one_number(operator, damping)
        self.is_symmetric = operator.is_symmetric

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.operator @ matrix + self.damping * matrix

    def _rmatmat(self, matrix: Tensor) -> Tensor:
        return self.operator.T @ matrix + self.damping * matrix


class InverseOperator(LinearOperator):
    """``(A + damping · I)⁻¹`` of a symmetric matrix, whose products solve by conjugate gradients.

    As exact as the tolerance. Structured operators have an exact one, ``A.inverse(damping)``.

    >>> import torch
    >>> from backpack.linalg import DiagonalOperator, InverseOperator
    >>> inverse = InverseOperator(DiagonalOperator(torch.tensor([1.0, 3.0])), damping=1.0)
    >>> inverse @ torch.ones(2)
    tensor([0.5000, 0.2500])
    """

    def __init__(
        self,
        operator: LinearOperator,
        damping: float = 0.0,
        tolerance: float = 1e-5,
        max_iterations: int | None = None,
        preconditioner: Preconditioner | None = None,
    ):
        """Store what is given; nothing is computed.

        Args:
            operator: The matrix A. ``[P, P]``
            damping: Multiple of the identity that is added.
            tolerance: As for :meth:`LinearOperator.solve`.
            max_iterations: The same.
            preconditioner: The same.

        Raises:
            ValueError: If the matrix is not known to be symmetric. Products raise what ``solve``
                does.
            TypeError: If the preconditioner is no operator that has an inverse.
        """
        operator._need_symmetric("conjugate gradients")
        if preconditioner is not None:
            check_invertible(preconditioner)
        super().__init__(operator.shape, operator.dtype, operator.device)
        self.operator, self.damping = operator, damping
        self._options = tolerance, max_iterations, preconditioner

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.operator.solve(matrix, self.damping, *self._options)


class TransposedOperator(LinearOperator):
    """``Aᵀ`` of a matrix that is not symmetric."""

    is_symmetric = False

    def __init__(self, operator: LinearOperator):
        super().__init__(operator.shape[::-1], operator.dtype, operator.device)
        self.operator = operator

    @property
    def T(self) -> LinearOperator:
        """The operator A."""
        return self.operator

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.operator._rmatmat(matrix)

    def _rmatmat(self, matrix: Tensor) -> Tensor:
        return self.operator._matmat(matrix)


class SumOperator(LinearOperator):
    """``A + B + …``.

    Raises:
        TypeError: If one is not an operator.
        ValueError: If shapes, precisions or devices differ.
    """

    def __init__(self, operators: Sequence[LinearOperator]):
        for other in operators:
            if not isinstance(other, LinearOperator):
                raise TypeError(
                    f"Operators are added to operators, got {type(other).__name__}. For a multiple "
                    "of the identity, use damped()."
                )
        first = operators[0]
        _check_alike(operators)
        if len({one.shape for one in operators}) > 1:
            raise ValueError(f"These cannot be added: {', '.join(map(repr, operators))}.")
        super().__init__(first.shape, first.dtype, first.device)
        self.operators = list(operators)
        self.is_symmetric = all(one.is_symmetric for one in operators)

    def _matmat(self, matrix: Tensor) -> Tensor:
        return torch.stack([one @ matrix for one in self.operators]).sum(0)

    def _rmatmat(self, matrix: Tensor) -> Tensor:
        return torch.stack([one.T @ matrix for one in self.operators]).sum(0)


class ScaledOperator(LinearOperator):
    """``factor · A``."""

    def __init__(self, operator: LinearOperator, factor: float):
        is_number = factor.dim() == 0 if isinstance(factor, Tensor) else isinstance(factor, Real)
        if not is_number:
            raise TypeError(f"{operator!r} is multiplied with numbers, got {factor!r}. Use A @ B.")
        super().__init__(operator.shape, operator.dtype, operator.device)
        self.operator = operator
        self.factor = float(factor)
        self.is_symmetric = operator.is_symmetric

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.factor * (self.operator @ matrix)

    def _rmatmat(self, matrix: Tensor) -> Tensor:
        return self.factor * (self.operator.T @ matrix)


class ProductOperator(LinearOperator):
    """``A B``; known to be symmetric if it is ``Aᵀ A``.

    Raises:
        ValueError: If the shapes do not fit, or precisions or devices differ.
    """

    def __init__(self, left: LinearOperator, right: LinearOperator):
        _check_alike([left, right])
        if left.shape[1] != right.shape[0]:
            raise ValueError(f"{left!r} cannot be multiplied with {right!r}.")
        super().__init__((left.shape[0], right.shape[1]), left.dtype, left.device)
        self.left, self.right = left, right
        self.is_symmetric = _is_transposed(left, right)

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.left @ (self.right @ matrix)

    def _rmatmat(self, matrix: Tensor) -> Tensor:
        return self.right.T @ (self.left.T @ matrix)


class SubmatrixOperator(LinearOperator):
    """Chosen rows and columns of a matrix, see :meth:`LinearOperator.submatrix`."""

    def __init__(self, operator: LinearOperator, rows: Index, columns: Index | None = None):
        num_rows, num_columns = operator.shape
        if columns is None and num_rows != num_columns:
            raise ValueError(f"{operator!r} is not square: say which columns, too.")
        self.rows = _numbers(rows, num_rows, operator.device)
        self.columns = self.rows if columns is None else _numbers(columns, num_columns, self.rows)
        super().__init__((len(self.rows), len(self.columns)), operator.dtype, operator.device)
        self.operator = operator
        self.is_symmetric = operator.is_symmetric and torch.equal(self.rows, self.columns)

    def _matmat(self, matrix: Tensor) -> Tensor:
        whole = matrix.new_zeros(self.operator.shape[1], matrix.shape[1])
        return (self.operator @ whole.index_add_(0, self.columns, matrix))[self.rows]

    def _rmatmat(self, matrix: Tensor) -> Tensor:
        whole = matrix.new_zeros(self.operator.shape[0], matrix.shape[1])
        return (self.operator.T @ whole.index_add_(0, self.rows, matrix))[self.columns]


def one_number(operator: LinearOperator, damping: Any) -> Any:
    """Return a damping; refuse one for each entry, which would be taken for one of each column.

    Raises:
        ValueError: If it has several entries.
    """
    shape = getattr(damping, "shape", ())
    if prod(shape) != 1:
        raise ValueError(
            f"{operator!r}: damping is one number, got shape {list(shape)}. Add other numbers by "
            "A + DiagonalOperator(d), or by plus_diagonal(d) of a structured operator."
        )
    if isinstance(damping, Tensor):
        return damping.reshape(())
    return damping.item() if hasattr(damping, "item") else damping


def _is_transposed(left: LinearOperator, right: LinearOperator) -> bool:
    """Whether the first is the transposed of the second."""
    if isinstance(left, TransposedOperator):
        return left.operator is right
    if isinstance(right, TransposedOperator):
        return right.operator is left
    return left is right and left.is_symmetric


def _check_alike(operators: Sequence[LinearOperator]) -> None:
    kinds = {(one.dtype, one.device) for one in operators}
    if len(kinds) > 1:
        raise ValueError(
            f"Operators need one precision and one device, got "
            f"{sorted(f'{dtype} on {device}' for dtype, device in kinds)}."
        )


def _numbers(index: Index, size: int, device: torch.device | Tensor) -> Tensor:
    """Return the numbers of chosen rows, ``[R]``."""
    device = device.device if isinstance(device, Tensor) else device
    if not isinstance(index, slice):
        index = torch.as_tensor(index, device=device)
        index = index if index.numel() or index.dtype is torch.bool else index.long()
        if index.dtype is torch.uint8:
            raise ValueError(
                "Rows or columns in a tensor of bytes may be numbers or a mask: use long() or "
                "bool()."
            )
        if index.dim() != 1:
            raise ValueError(
                f"Rows or columns are a slice or a list, got shape {list(index.shape)}."
            )
    try:
        return torch.arange(size, device=device)[index]
    except IndexError as error:
        raise ValueError(f"There are {size} rows or columns to choose from: {error}") from error


def _to_numpy(tensor: Tensor) -> Any:
    """Return an array of float64 if that is the precision, else of float32."""
    precision = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to("cpu", precision).numpy()


def _scipy_linalg() -> Any:
    try:
        import scipy.sparse.linalg as linalg  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "This needs scipy. Install it with `pip install backpack-for-pytorch[linalg]`."
        ) from error
    return linalg
