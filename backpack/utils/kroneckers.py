"""Linear algebra with Kronecker products that are never formed.

A list of factors ``[A, B, ...]`` stands for ``A ⊗ B ⊗ ...``. Its rows and columns are indexed
row-major, so if ``A`` acts on the first axis of a tensor and ``B`` on the second, the product acts
on the flattened tensor. A vector ``[D]`` among the factors stands for a diagonal matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial, reduce
from math import prod

import torch
from torch import Size, Tensor

from backpack.utils.autocast import without_autocast

Shift = float | Tensor | Sequence[float | Tensor] | None


def kfacs_to_mat(factors: Sequence[Tensor]) -> Tensor:
    """Multiply the factors out into a matrix.

    Args:
        factors: Kronecker factors, ``[O_1, I_1], [O_2, I_2], ...``

    Returns:
        The Kronecker product ``A ⊗ B ⊗ ...``, never an alias of a factor.
        ``[O_1·O_2·…, I_1·I_2·…]``

    Raises:
        ValueError: If there are no factors, or one is not a matrix.
    """
    _check_matrices(factors)
    matrices = (factor.diag() if factor.dim() == 1 else factor for factor in factors)
    # torch.kron refuses some pairs of layouts, such as eigenvectors (column by column) and others;
    # contiguous() leaves the strides of a column as they are
    return reduce(torch.kron, [m.clone(memory_format=torch.contiguous_format) for m in matrices])


def kfac_mat_prod(factors: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return :func:`apply_kfac_mat_prod` for these factors, ``[O_1, I_1], [O_2, I_2], ...``.

    Raises:
        ValueError: If there are no factors, or one is not a matrix.
    """
    _check_matrices(factors)
    return partial(apply_kfac_mat_prod, factors)


def apply_kfac_mat_prod(factors: Sequence[Tensor], mat: Tensor) -> Tensor:
    """Multiply a Kronecker product with a matrix or vector, axis by axis.

    Args:
        factors: Kronecker factors, ``[O_1, I_1], [O_2, I_2], ...``
        mat: Matrix or vector. ``[I_1·I_2·…, K]`` or ``[I_1·I_2·…]``

    Returns:
        The product ``(A ⊗ B ⊗ ...) mat``. ``[O_1·O_2·…, K]`` or ``[O_1·O_2·…]``

    Raises:
        ValueError: If there are no factors, one is not a matrix, or ``mat`` does not fit them.
    """
    _check_matrices(factors)
    in_dims = [factor.shape[-1] for factor in factors]
    if mat.dim() not in (1, 2) or mat.shape[0] != prod(in_dims):
        raise ValueError(
            f"Expected mat of shape [{prod(in_dims)}, K] or [{prod(in_dims)}] for factors of "
            f"shapes {_shapes(factors)}, got {tuple(mat.shape)}."
        )

    tensor = mat.reshape(*in_dims, *mat.shape[1:])
    # A step turns the last of the factors' axes into the first: after all steps, order is restored.
    last = len(factors) - 1
    with without_autocast():
        for factor in reversed(factors):
            if factor.dim() == 1:
                tensor = (tensor.movedim(last, -1) * factor).movedim(-1, 0)
            else:
                tensor = torch.tensordot(factor, tensor, dims=([1], [last]))
    return tensor.reshape(prod(factor.shape[0] for factor in factors), *mat.shape[1:])


def inv_kfac_mat_prod(factors: Sequence[Tensor], shift: Shift = None) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies with an inverse Kronecker product.

    The factors are inverted once, when this function is called. Arguments and errors as for
    :func:`inv_kfacs`; the function is that of :func:`kfac_mat_prod`.
    """
    return kfac_mat_prod(inv_kfacs(factors, shift))


def apply_inv_kfac_mat_prod(factors: Sequence[Tensor], mat: Tensor, shift: Shift = None) -> Tensor:
    """Return ``(A ⊗ B ⊗ ...)⁻¹ mat``, for ``[D_1·D_2·…, K]`` or ``[D_1·D_2·…]``.

    Arguments and errors as for :func:`inv_kfacs` and :func:`apply_kfac_mat_prod`.
    """
    return apply_kfac_mat_prod(inv_kfacs(factors, shift), mat)


def inv_kfacs(factors: Sequence[Tensor], shift: Shift = None) -> list[Tensor]:
    """Invert the factors, which are the factors of the inverse: ``(A ⊗ B)⁻¹ = A⁻¹ ⊗ B⁻¹``.

    Args:
        factors: Square Kronecker factors, ``[D_1, D_1], [D_2, D_2], ...``
        shift: Multiple of the identity added to the factors before they are inverted. A number
            for all of them, or one per factor, which may be a vector. ``None`` adds nothing.

    Returns:
        The inverses ``(A + shift·I)⁻¹, ...``, ``[D_1, D_1], [D_2, D_2], ...``, in the precision of
        the factors, and computed in single precision at least.

    Raises:
        ValueError: If there are no factors, one is not square or (with its shift) singular, or
            has an inverse that is beyond its precision, or the number of shifts is not that of
            the factors.
    """
    _check_matrices(factors)
    if any(factor.shape[0] != factor.shape[-1] for factor in factors):
        raise ValueError(f"Only square factors can be inverted, got shapes {_shapes(factors)}.")

    if isinstance(shift, Tensor) and shift.dim():  # one for each
        shift = list(shift)
    shifts = list(shift) if isinstance(shift, Sequence) else [shift] * len(factors)
    if len(shifts) != len(factors):
        raise ValueError(f"Got {len(shifts)} shifts for {len(factors)} factors.")
    return [_inverse(factor, value) for factor, value in zip(factors, shifts, strict=True)]


def _shifted(factor: Tensor, value: float | Tensor | None) -> Tensor:
    """Add a multiple of the identity: ``[D, D]``, or ``[D]``."""
    if value is None:
        return factor
    if factor.dim() == 1:
        return factor + value
    return factor + value * torch.eye(len(factor), dtype=factor.dtype, device=factor.device)


def transposed(factor: Tensor) -> Tensor:
    """Return the transposed factor, as a view: ``[I, O]``, or ``[D]``."""
    return factor if factor.dim() == 1 else factor.mT


def diagonal_of(factor: Tensor) -> Tensor:
    """Return the diagonal of a factor: ``[D]``."""
    return factor if factor.dim() == 1 else factor.diagonal()


def eigh_semidefinite(factor: Tensor, in_double: bool = False) -> tuple[Tensor, Tensor]:
    """Decompose a factor that is positive semidefinite up to round-off.

    Args:
        factor: Symmetric matrix, of any precision, ``[D, D]``; or the diagonal ``[D]`` of one.
        in_double: Compute in double precision where the device has it, which takes about twice as
            long: where an inverse with little damping is to be made, vectors of small eigenvalues
            must not have a share in those of large ones.

    Returns:
        Eigenvalues in ascending order, those that cannot be told from zero being zero, and
        eigenvectors in the columns. ``[D], [D, D]``. Of a diagonal matrix, the eigenvalues are in
        the order of its entries, and the eigenvectors the diagonal ``[D]`` of the identity.

    Raises:
        torch.linalg.LinAlgError: If the decomposition fails, as it may if an entry is not finite.
    """
    single = torch.promote_types(factor.dtype, torch.float32)  # none in less
    wide = torch.float64 if in_double and factor.device.type != "mps" else single
    if factor.dim() == 1:
        values, vectors = factor.to(wide), torch.ones_like(factor, dtype=wide)
    else:
        try:
            values, vectors = torch.linalg.eigh(factor.to(wide))
        except torch.linalg.LinAlgError as error:
            if not factor.isfinite().all():
                raise torch.linalg.LinAlgError(
                    f"A Kronecker factor of shape {list(factor.shape)} has entries that are not "
                    "finite: the data, or the outputs of the model, are not."
                ) from error
            # where entries are small, single precision may not converge: of rows that are zero
            found = torch.linalg.eigh(factor.cpu().double())
            values, vectors = (each.to(wide).to(factor.device) for each in found)
    if len(values):
        round_off = 10 * torch.finfo(single).eps * values.max()  # that of the entries
        values = torch.where(values > round_off, values, 0)
    # in rows, as files have them: products with another order in memory are rounded otherwise
    return values.to(factor.dtype), vectors.to(factor.dtype).contiguous()


def factored_damping(eigenvalues: Sequence[Tensor], shift: float) -> list[float]:
    """Split damping between Kronecker factors.

    ``A ⊗ B ⊗ …`` becomes ``(A + s_A I) ⊗ (B + s_B I) ⊗ …``. The damping of a factor is in
    proportion to its mean eigenvalue, and their product is ``shift``. For two factors, that is
    ``s_A = π sqrt(shift)`` and ``s_B = sqrt(shift) / π`` with
    ``π² = (tr A / dim A) / (tr B / dim B)``. Source: Martens, Grosse, Optimizing neural networks
    with Kronecker-factored approximate curvature (ICML 2015), section 6.3.

    Args:
        eigenvalues: Of each factor, none negative. ``[D_1], [D_2], ...``
        shift: Damping of the product.

    Returns:
        Damping of each factor.
    """
    means = [float(values.mean()) for values in eigenvalues]
    if prod(means) == 0:
        means = [1.0 for _ in means]
    return [mean * (shift / prod(means)) ** (1 / len(means)) for mean in means]


@dataclass(frozen=True)
class EigenKronecker:
    """A matrix whose eigenvectors have Kronecker structure, and whose eigenvalues need not.

    ``Q diag(λ) Qᵀ`` with ``Q = U_1 ⊗ U_2 ⊗ …``. It acts on tensors of the shape of a parameter; for
    inverse, root, determinant and samples see :class:`~backpack.linalg.EigenOperator`.

    Attributes:
        bases: Orthogonal matrices, ``[d_1, d_1], [d_2, d_2], ...``
        eigenvalues: ``[d_1, d_2, ...]``
        shape: Shape of the parameter, ``[*p]``.
        swaps_axes: Whether the first basis belongs to the second axis of the parameter (that of a
            transposed convolution), and the second one to all others.
    """

    bases: list[Tensor]
    eigenvalues: Tensor
    shape: Size
    swaps_axes: bool = False

    def product(self, mat: Tensor) -> Tensor:
        """Multiply with tensors, ``[*p]`` or ``[V, *p]``.

        Raises:
            ValueError: If the shape is another.
        """
        return self._apply(self.eigenvalues, mat)

    def solve(self, mat: Tensor, damping: float = 0.0) -> Tensor:
        """Multiply ``[*p]`` or ``[V, *p]`` with the inverse of the matrix plus damping.

        Raises:
            ValueError: If the shape is another, or the damped matrix is singular.
        """
        damped = self.eigenvalues + damping
        if not (damped.abs() > 0).all():
            raise ValueError(
                f"{self!r} with damping {damping:g} is singular. Use a positive damping."
            )
        return self._apply(1 / damped, mat)

    def dense(self) -> Tensor:
        """Return the matrix, ``[P, P]``, in the order of the parameter's entries."""
        size = self.shape.numel()
        units = torch.eye(size, dtype=self.eigenvalues.dtype, device=self.eigenvalues.device)
        return self.product(units.reshape(size, *self.shape)).reshape(size, size)

    def _apply(self, values: Tensor, mat: Tensor) -> Tensor:
        if mat.shape != self.shape and mat.shape[1:] != self.shape:
            raise ValueError(
                f"{self!r} multiplies with tensors {list(self.shape)} and "
                f"{['V', *self.shape]}, got {list(mat.shape)}."
            )
        rows = mat.unsqueeze(0) if mat.shape == self.shape else mat
        rows = rows.transpose(1, 2) if self.swaps_axes else rows
        shape = rows.shape
        columns = rows.reshape(len(rows), self.shape.numel()).T
        turned = apply_kfac_mat_prod(list(map(transposed, self.bases)), columns)
        turned = values.flatten().unsqueeze(1) * turned
        found = apply_kfac_mat_prod(self.bases, turned).T.reshape(shape)
        found = found.transpose(1, 2) if self.swaps_axes else found
        return found.reshape(mat.shape)

    def __repr__(self) -> str:
        """Show the shapes."""
        return f"EigenKronecker(shape={list(self.shape)}, bases={[len(q) for q in self.bases]})"


def _inverse(factor: Tensor, shift: float | Tensor | None) -> Tensor:
    """Invert a matrix: by Cholesky if it is symmetric positive definite, by LU, or a diagonal."""
    eps = torch.finfo(factor.dtype).eps  # what is lost in the entries
    single = torch.promote_types(factor.dtype, torch.float32)  # torch has no solvers in less
    mat = _shifted(factor.to(single), shift)
    if mat.dim() == 1:
        sizes = mat.detach().abs()
        if not sizes.min() >= eps * sizes.max() > 0:
            raise ValueError(_SINGULAR.format(tuple(mat.shape)))
        return _as_precise(1 / mat, factor)
    # Cholesky only reads one triangle, so it must not see an asymmetric matrix.
    symmetric = bool((mat - mat.mT).norm() <= 10 * torch.finfo(single).eps * mat.norm())
    chol, info = torch.linalg.cholesky_ex(mat)
    if symmetric and info == 0:
        inverse = torch.cholesky_inverse(chol)
    else:
        inverse, info = torch.linalg.inv_ex(mat)

    with torch.no_grad():
        norm, inverse_norm = (torch.linalg.matrix_norm(m, ord=1) for m in (mat, inverse))
        # The reciprocal condition number. Written such that NaN counts as singular.
        if info != 0 or not 1 / (norm * inverse_norm) >= eps:
            raise ValueError(_SINGULAR.format(tuple(mat.shape)))
    return _as_precise(inverse, factor)


def _as_precise(inverse: Tensor, factor: Tensor) -> Tensor:
    """Return an inverse in the precision of the factor, if it has a place there."""
    found = inverse.to(factor.dtype)
    if found is not inverse and not bool(found.isfinite().all()):
        raise ValueError(_SINGULAR.format(tuple(factor.shape)))
    return found


_SINGULAR = (
    "Cannot invert a factor of shape {}: it is singular. A positive shift makes positive "
    "semi-definite factors invertible."
)


def _check_matrices(factors: Sequence[Tensor]) -> None:
    """Check that there are factors, and that they are matrices, or diagonals of some."""
    if isinstance(factors, Tensor | Mapping | Set) or not hasattr(factors, "__len__"):
        raise ValueError(f"Expected a list of matrices, got a {type(factors).__name__}.")
    if not factors or any(factor.dim() not in (1, 2) for factor in factors):
        raise ValueError(f"Expected a list of matrices, got shapes {_shapes(factors)}.")


def _shapes(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the shapes as tuples, which print nicely."""
    return [tuple(tensor.shape) for tensor in tensors]
