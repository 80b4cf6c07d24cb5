"""Symmetric linear operators on vectors of parameters, for torch and for scipy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class LinearOperator(ABC):
    """A symmetric matrix ``[P, P]`` that is known by its products with vectors.

    Vectors are the parameters, flattened and concatenated;
    :func:`~backpack.utils.convert_parameters.vector_to_parameter_list` and
    :func:`~backpack.utils.convert_parameters.parameter_list_to_vector` convert them from and to
    the format of ``model.parameters()``.

    Attributes:
        shape: ``(P, P)``.
        dtype: Precision of the vectors that it multiplies with, and of the products.
        device: Their device.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device):
        """Store the shape ``(size, size)``, the precision and the device."""
        self.shape = (size, size)
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def _matmat(self, matrix: Tensor) -> Tensor:
        """Multiply with a matrix: ``[P, V] -> [P, V]``."""

    def __matmul__(self, other: Tensor) -> Tensor:
        """Multiply with a vector or a matrix.

        Args:
            other: ``[P]`` or ``[P, V]``

        Returns:
            The product, of the shape of ``other``.

        Raises:
            TypeError: If ``other`` is not a tensor.
            ValueError: If its length, precision or device is not that of the operator.
        """
        if not isinstance(other, Tensor):
            raise TypeError(
                f"{self!r} multiplies with tensors, got {type(other).__name__}. For numpy arrays, "
                "use to_scipy()."
            )
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

    def __repr__(self) -> str:
        """Name the class and the shape."""
        return f"{type(self).__name__}(shape={self.shape})"

    @property
    def T(self) -> LinearOperator:
        """The transposed matrix: itself."""
        return self

    def damped(self, damping: float) -> DampedOperator:
        """Add a multiple of the identity: ``A + damping · I``."""
        return DampedOperator(self, damping)

    def to_dense(self) -> Tensor:
        """Return the matrix ``[P, P]``, from P products: for small models."""
        return self @ torch.eye(self.shape[0], dtype=self.dtype, device=self.device)

    def to_scipy(self) -> Any:
        """Return a ``scipy.sparse.linalg.LinearOperator``.

        Its vectors are arrays of float64 if that is the precision of the operator, else of float32.

        Raises:
            ImportError: If scipy is not installed.
        """
        linalg = _scipy_linalg()

        def product(array: Any) -> Any:
            return _to_numpy(self @ torch.as_tensor(array, dtype=self.dtype, device=self.device))

        return linalg.LinearOperator(
            self.shape,
            matvec=product,
            rmatvec=product,
            matmat=product,
            rmatmat=product,
            dtype=_to_numpy(torch.empty(0, dtype=self.dtype)).dtype,
        )

    def solve(
        self,
        rhs: Tensor,
        damping: float = 0.0,
        tolerance: float = 1e-5,
        max_iterations: int | None = None,
    ) -> Tensor:
        """Solve ``(A + damping · I) x = rhs`` by conjugate gradients, one product an iteration.

        The matrix has to be positive definite; that is not checked.

        Args:
            rhs: Right-hand side. ``[P]``
            damping: Multiple of the identity that is added.
            tolerance: Norm of the residual, relative to that of ``rhs``, at which to stop.
            max_iterations: Stop after so many iterations, whatever the residual. Default: ``10 P``,
                after which it is an error not to have converged.

        Returns:
            The solution x. ``[P]``

        Raises:
            ImportError: If scipy is not installed.
            ValueError: If ``rhs`` is not a vector of the length of the operator.
            RuntimeError: If conjugate gradients do not converge.
        """
        if rhs.shape != self.shape[:1]:
            raise ValueError(
                f"{self!r} solves for vectors [{self.shape[0]}], got shape {list(rhs.shape)}."
            )
        damped = self.damped(damping)
        array, info = _scipy_linalg().cg(
            damped.to_scipy(), _to_numpy(rhs), rtol=tolerance, maxiter=max_iterations
        )
        solution = torch.as_tensor(array, dtype=self.dtype, device=self.device)
        if info and max_iterations is None:
            residual = (damped @ solution - rhs).norm() / rhs.norm()
            raise RuntimeError(
                f"Conjugate gradients with {self!r} and damping {damping:g} have stopped at a "
                f"relative residual of {residual:.1g}. Is the matrix positive definite? Use more "
                "damping, a larger tolerance, or set max_iterations."
            )
        return solution

    def eigsh(self, k: int = 6, which: str = "LA", tolerance: float = 0.0) -> tuple[Tensor, Tensor]:
        """Compute some eigenpairs by the Lanczos method (ARPACK), from a fixed starting vector.

        Args:
            k: Number of eigenpairs, less than P.
            which: ``"LA"`` for the largest, ``"SA"`` for the smallest (the most negative), ``"LM"``
                for the largest in magnitude, ``"BE"`` for half from each end.
            tolerance: Relative accuracy of the eigenvalues. Default: that of the precision.

        Returns:
            Eigenvalues in ascending order ``[k]``, and eigenvectors in the columns of ``[P, k]``.

        Raises:
            ImportError: If scipy is not installed.
            ValueError: If there are not more than k eigenpairs.
        """
        if not 0 < k < self.shape[0]:
            raise ValueError(
                f"{self!r}: k must be between 1 and {self.shape[0] - 1}, got {k}. For all "
                "eigenpairs, use torch.linalg.eigh(operator.to_dense())."
            )
        operator = self.to_scipy()
        start = torch.randn(self.shape[0], generator=torch.Generator().manual_seed(0))
        values, vectors = _scipy_linalg().eigsh(
            operator, k, which=which, tol=tolerance, v0=start.numpy().astype(operator.dtype)
        )
        order = values.argsort()
        return tuple(  # type: ignore[return-value]
            torch.as_tensor(array, dtype=self.dtype, device=self.device)
            for array in (values[order], vectors[:, order])
        )


class DampedOperator(LinearOperator):
    """``A + damping · I``."""

    def __init__(self, operator: LinearOperator, damping: float):
        """Store the operator A and the multiple of the identity."""
        super().__init__(operator.shape[0], operator.dtype, operator.device)
        self.operator = operator
        self.damping = damping

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.operator @ matrix + self.damping * matrix


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
