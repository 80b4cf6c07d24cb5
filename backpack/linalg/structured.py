"""Operators whose eigenvectors are known: they have inverses, determinants and samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from math import prod
from typing import Any

import torch
from torch import Generator, Tensor

from backpack.core.values import at_least_single
from backpack.linalg.operators import LinearOperator, one_number
from backpack.utils.convert_parameters import vector_to_parameter_list
from backpack.utils.kroneckers import (
    EigenKronecker,
    apply_kfac_mat_prod,
    diagonal_of,
    eigh_semidefinite,
    factored_damping,
    transposed,
)

BLOCK_ENTRIES = 2**27  # of products that are kept at once
# Kronecker factors of each diagonal block; no blocks at all stand for the identity.
Blocks = Sequence[Sequence[Tensor]]


class SpectralOperator(LinearOperator):
    """``Q diag(f) Qᵀ``, with an orthogonal matrix Q and eigenvalues f.

    Args:
        spectrum: The eigenvalues f. ``[P]``
        bases: Q is block-diagonal, each block a Kronecker product of these matrices
            ``[d_1, d_1], [d_2, d_2], …`` (or diagonals ``[d_1], …``). Default: the identity.
        order: The entries of vectors in the order of the rows of Q. Default: as they are. ``[P]``
    """

    def __init__(self, spectrum: Tensor, bases: Blocks = (), order: Tensor | None = None):
        sizes = [_size(block) for block in bases]
        if spectrum.dim() != 1 or (sizes and sum(sizes) != len(spectrum)):
            raise ValueError(
                "Expected eigenvalues [P], and blocks of eigenvectors with P rows together (or "
                f"none), got shape {list(spectrum.shape)}, and blocks with {sizes} rows."
            )
        super().__init__(len(spectrum), spectrum.dtype, spectrum.device)
        self._given = spectrum, bases
        self.order = order

    @property
    def spectrum(self) -> Tensor:
        """The eigenvalues ``[P]``, in the order of the eigenvectors."""
        return self._given[0]

    @property
    def bases(self) -> Blocks:
        """Kronecker factors of the blocks of Q."""
        return self._given[1]

    def _ordered(self, vectors: Tensor) -> Tensor:
        """Bring entries to the order of the rows of Q."""
        return vectors if self.order is None else vectors[self.order]

    def _restored(self, vectors: Tensor) -> Tensor:
        """Bring them back."""
        if self.order is None:
            return vectors
        return torch.empty_like(vectors).index_copy_(0, self.order, vectors)

    def in_eigenbasis(self, matrix: Tensor) -> Tensor:
        """Multiply with Qᵀ: ``[P, V] -> [P, V]``."""
        back = [list(map(transposed, factors)) for factors in self.bases]
        return _multiply(back, self._ordered(matrix))

    def _matmat(self, matrix: Tensor) -> Tensor:
        turned = self.spectrum.unsqueeze(1) * self.in_eigenbasis(matrix)
        return self._restored(_multiply(self.bases, turned))

    def diagonal(self) -> Tensor:
        """Return the diagonal ``[P]``."""
        squares = [[q.square() for q in factors] for factors in self.bases]
        return self._restored(_multiply(squares, self.spectrum.clone()))

    def trace(self) -> Tensor:
        """Return the trace, a scalar."""
        return at_least_single(self.spectrum).sum()

    def logdet(self, damping: float = 0.0) -> Tensor:
        """Return ``log det(A + damping · I)``, a scalar.

        Raises:
            ValueError: If the matrix is not positive definite.
        """
        damping = one_number(self, damping)
        damped = at_least_single(self.spectrum) + damping
        if not damped.min() > 0:
            raise ValueError(f"{self!r} with damping {damping:g} is {_NOT_POSITIVE}")
        return damped.log().sum()

    def inverse(self, damping: float = 0.0) -> SpectralOperator:
        """Return ``(A + damping · I)⁻¹``, exactly.

        Raises:
            ValueError: If the matrix is singular.
        """
        damping = one_number(self, damping)
        damped = self.spectrum + damping
        if not damped.abs().min() > 0:
            raise ValueError(
                f"{self!r} with damping {damping:g} is singular. Use a positive damping."
            )
        return SpectralOperator(1 / damped, self.bases, self.order)

    def by_eigenvector(self, values: Tensor, what: str = "value") -> Tensor:
        """Bring numbers that each block has in common to the order of the eigenvectors.

        Args:
            values: One for each entry of a vector. ``[P]``
            what: Names them in messages.

        Returns:
            One for each eigenvector. ``[P]``

        Raises:
            ValueError: If those of a block differ, whose eigenvectors mix its entries.
        """
        rows, start = self._ordered(values), 0
        for block in self.bases:
            size = _size(block)
            own = rows[start : start + size]
            if (own != own[:1]).any():
                raise ValueError(
                    f"A block of {size} rows of {self!r} belongs to entries of different {what}, "
                    f"which do not share its eigenvectors. Use one {what} for them, or "
                    "KroneckerGGN, EKFAC or DiagonalGGN, which have a block for each parameter."
                )
            start += size
        return rows

    def plus_diagonal(self, diagonal: Tensor, what: str = "value") -> SpectralOperator:
        """Return ``A + diag(d)``, with the same eigenvectors.

        Args:
            diagonal: d, one number for each block. ``[P]``
            what: Names the numbers in messages.

        Raises:
            ValueError: If entries of a block differ.
        """
        spectrum = self.spectrum + self.by_eigenvector(diagonal, what)
        return SpectralOperator(spectrum, self.bases, self.order)

    def root(self) -> SpectralOperator:
        """Return the symmetric square root, whose product with itself is the matrix.

        Raises:
            ValueError: If the matrix is not positive semidefinite.
        """
        if not self.spectrum.min() >= 0:
            raise ValueError(f"{self!r} has no root: it is {_NOT_POSITIVE}")
        return SpectralOperator(self.spectrum.sqrt(), self.bases, self.order)

    def sample(self, num_samples: int = 1, generator: Generator | None = None) -> Tensor:
        """Draw from the normal distribution with mean zero and this matrix as its covariance.

        The posterior of a Laplace approximation with prior precision d is ``A.inverse(d)``.

        Args:
            num_samples: Number of samples S.
            generator: Source of random numbers, on the device of the operator.

        Returns:
            A sample in each column. ``[P, S]``

        Raises:
            ValueError: If the matrix is not positive semidefinite.
        """
        if not self.spectrum.min() >= 0:
            raise ValueError(f"{self!r} is no covariance: it is {_NOT_POSITIVE}")
        noise = torch.randn(
            self.shape[0], num_samples, dtype=self.dtype, device=self.device, generator=generator
        )
        return self._restored(_multiply(self.bases, self.spectrum.sqrt().unsqueeze(1) * noise))


class DiagonalOperator(SpectralOperator):
    """A diagonal matrix.

    Args:
        diagonal: Its diagonal, such as ``parameter_list_to_vector(p.diag_ggn_exact for p in
            params)``. ``[P]``
    """

    def __init__(self, diagonal: Tensor):
        super().__init__(diagonal)


class KroneckerOperator(SpectralOperator):
    """A block-diagonal matrix whose blocks are Kronecker products ``A ⊗ B ⊗ …``.

    The eigendecompositions of the factors, on which all but products rest, are computed once, when
    they are needed.

    Args:
        factors: For each block its factors, symmetric and positive semidefinite, such as
            ``[p.kfac for p in params]``. ``[d_1, d_1], [d_2, d_2], …``; a vector ``[d]`` stands for
            a diagonal matrix, as for the large factors of :class:`~backpack.extensions.KFAC`.
        order: The entries of vectors in the order of the rows of the factors, which is another one
            for the weights of transposed convolutions. Default: as they are. ``[P]``

    Raises:
        ValueError: If a factor is neither a square matrix nor a vector, or there is none; and if
            one is found not to be symmetric and positive semidefinite, when it is decomposed.
    """

    def __init__(self, factors: Blocks, order: Tensor | None = None):
        factors = list(factors)
        alone: Any = next((b for b in factors if isinstance(b, Tensor) and b.dim() == 2), None)
        if alone is not None:  # whose rows would be diagonals
            raise ValueError(
                "Expected a list of Kronecker factors for each block, got a tensor of shape "
                f"{list(alone.shape)}. A block that is one matrix is [matrix], an operator of it "
                "alone KroneckerOperator([[matrix]])."
            )
        factors = [list(block) for block in factors]
        shapes = [[list(factor.shape) for factor in block] for block in factors]
        if not shapes or any(
            not block or any(len(s) not in (1, 2) or s[0] != s[-1] for s in block)
            for block in shapes
        ):
            raise ValueError(
                "Expected lists of square Kronecker factors, or diagonals of some, got shapes "
                f"{shapes}."
            )
        self.factors = factors
        self.order = order
        first = self.factors[0][0]
        LinearOperator.__init__(self, sum(map(_size, factors)), first.dtype, first.device)

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self._restored(_multiply(self.factors, self._ordered(matrix)))

    @cached_property
    def _eigenpairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        return [[self._decomposed(factor) for factor in block] for block in self.factors]

    def _decomposed(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Return eigenvalues and eigenvectors of a factor, if it is positive semidefinite."""
        eps = torch.finfo(factor.dtype).eps
        if factor.dim() == 2:
            difference, factor = factor - factor.mT, (factor + factor.mT) / 2
            # what was computed in lower precision is nearly symmetric
            if difference.norm() > max(eps**0.5, 1e-2) * factor.norm():
                raise ValueError(
                    f"{self!r}: a factor of shape {list(factor.shape)} is not symmetric. Its "
                    "inverse, spectrum, determinant and samples would be those of another matrix."
                )
        values, basis = eigh_semidefinite(factor, in_double=True)
        negative = values.sum() - diagonal_of(factor).sum()  # which are zero among these
        if negative > eps**0.5 * values.sum():
            raise ValueError(
                f"{self!r}: a factor of shape {list(factor.shape)} is not positive semidefinite. "
                "Its inverse, spectrum, determinant and samples would be those of another matrix."
            )
        return values, basis

    @property
    def spectrum(self) -> Tensor:
        """The eigenvalues ``[P]``, products of those of the factors."""
        return torch.cat([_outer([values for values, _ in block]) for block in self._eigenpairs])

    @property
    def bases(self) -> Blocks:
        """The eigenvectors of the factors."""
        return [[basis for _, basis in block] for block in self._eigenpairs]

    def diagonal(self) -> Tensor:
        """Return the diagonal ``[P]``."""
        blocks = [_outer(list(map(diagonal_of, block))) for block in self.factors]
        return self._restored(torch.cat(blocks))

    def trace(self) -> Tensor:
        """Return the trace, a scalar."""
        sums = [[at_least_single(diagonal_of(f)).sum() for f in b] for b in self.factors]
        traces = [torch.stack(of_block).prod() for of_block in sums]
        return torch.stack(traces).sum()

    def inverse(self, damping: float = 0.0, split: bool = False) -> SpectralOperator:
        """Return ``(A + damping · I)⁻¹``, block by block.

        Args:
            damping: Multiple of the identity that is added.
            split: Damp the factors instead of the matrix: ``A ⊗ B + λ I`` becomes
                ``(A + π √λ I) ⊗ (B + √λ / π I)``, where ``π²`` is the ratio of the mean
                eigenvalues of A and B. That is an approximation; it has Kronecker structure itself.
                Source: Martens, Grosse, Optimizing neural networks with Kronecker-factored
                approximate curvature (ICML 2015), section 6.3. For m factors, the shift of one is
                ``λ^(1/m)`` times the ratio of its mean eigenvalue to the geometric mean of all.

        Returns:
            The inverse. It multiplies with the eigenvectors of the factors, and has samples
            and a determinant itself.

        Raises:
            ValueError: If the matrix is singular.
        """
        damping = one_number(self, damping)
        if not split:
            return super().inverse(damping)
        blocks = [[values for values, _ in block] for block in self._eigenpairs]
        shifts = [factored_damping(values, damping) for values in blocks]
        damped = [
            _outer([v + shift for v, shift in zip(values, block_shifts, strict=True)])
            for values, block_shifts in zip(blocks, shifts, strict=True)
        ]
        return SpectralOperator(torch.cat(damped), self.bases, self.order).inverse()


class EigenOperator(SpectralOperator):
    """A block-diagonal matrix with eigenvectors of Kronecker structure, and any eigenvalues.

    Args:
        blocks: For each parameter its block, such as ``[p.ekfac for p in params]``.
        order: ``[P]``, the entries of the parameters in the order of the blocks. Default: that of
            blocks which have a parameter each.

    Raises:
        ValueError: If there is no block.
    """

    def __init__(self, blocks: Sequence[EigenKronecker], order: Tensor | None = None):
        blocks = list(blocks)
        if not blocks:
            raise ValueError("Expected the blocks of some parameters, got none.")
        spectrum = torch.cat([block.eigenvalues.flatten() for block in blocks])
        shapes = [(spectrum.new_empty(()).expand(b.shape), b.swaps_axes) for b in blocks]
        order = order_of(shapes) if order is None else order
        super().__init__(spectrum, [block.bases for block in blocks], order)
        self.blocks = blocks

    def solve(
        self,
        rhs: Tensor,
        damping: float = 0.0,
        tolerance: float = 0.0,
        max_iterations: int | None = None,
        preconditioner: object = None,
    ) -> Tensor:
        """Return ``(A + damping · I)⁻¹ rhs``, exactly; nothing is iterated.

        Args:
            rhs: Right-hand sides. ``[P]`` or ``[P, V]``
            damping: Multiple of the identity that is added.
            tolerance: Not used.
            max_iterations: Not used.
            preconditioner: Not used.

        Returns:
            The solutions, of the shape of ``rhs``.

        Raises:
            ValueError: If the matrix is singular, or ``rhs`` does not fit it.
        """
        return self.inverse(damping) @ rhs


def of_chosen(operator: LinearOperator, chosen: Tensor) -> SpectralOperator:
    """Return ``M A M``, with a diagonal M of ones and zeros: chosen rows and columns, others zero.

    The k chosen ones are a dense block, from k products with A; those of a diagonal stay one.

    Args:
        operator: A, symmetric.
        chosen: Which rows, boolean. ``[P]``

    Raises:
        ValueError: If entries are not finite.
    """
    if isinstance(operator, SpectralOperator) and not operator.bases:
        return SpectralOperator(torch.where(chosen, operator._restored(operator.spectrum), 0))
    block, count = operator.submatrix(chosen), int(chosen.sum())
    step = max(1, BLOCK_ENTRIES // operator.shape[0])
    columns = torch.eye(count, dtype=operator.dtype, device=operator.device).split(step, 1)
    dense = torch.cat([block @ some for some in columns], 1)
    if not dense.isfinite().all():
        raise ValueError(
            f"{operator!r} has entries that are not finite among the {count} chosen rows: the data,"
            " or the outputs of the model, are not."
        )
    single = torch.promote_types(dense.dtype, torch.float32)  # eigh knows none in less
    wide = torch.float64 if dense.device.type != "mps" else single
    values, vectors = torch.linalg.eigh((dense + dense.T).to(wide) / 2)
    largest = values.abs().max()
    is_zero = values.abs() <= 10 * torch.finfo(single).eps * largest
    # entries in half precision: what is negative by their rounding alone is zero as well
    is_zero |= (values < 0) & (-values <= 10 * torch.finfo(dense.dtype).eps * largest)
    values = values.masked_fill(is_zero, 0).to(dense.dtype)
    rest = values.new_zeros(len(chosen) - count)
    order = torch.cat([chosen.nonzero().flatten(), (~chosen).nonzero().flatten()])
    blocks = [[vectors.to(dense.dtype)], [torch.ones_like(rest)]] if len(rest) else [[vectors]]
    return SpectralOperator(torch.cat([values, rest]), blocks, order)


def order_of(parameters: Sequence[tuple[Tensor, bool]]) -> Tensor | None:
    """Return the entries ``[P]`` of parameters in the order of blocks; None if it is the usual one.

    Each parameter comes with whether its block is that of ``p.transpose(0, 1)``.
    """
    if not any(swaps for _, swaps in parameters):
        return None
    each = zip(entries_of([p for p, _ in parameters]), parameters, strict=True)
    turned = [own.transpose(0, 1) if swaps else own for own, (_, swaps) in each]
    return torch.cat([own.flatten() for own in turned])


def entries_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Number the entries of parameters, one after the other: ``[*p]`` each."""
    count = sum(p.numel() for p in parameters)
    return vector_to_parameter_list(torch.arange(count, device=parameters[0].device), parameters)


_NOT_POSITIVE = "not positive definite. Use (more) damping, or the GGN instead of the Hessian."


def _multiply(blocks: Blocks, matrix: Tensor) -> Tensor:
    """Multiply the block-diagonal matrix of Kronecker products with ``[P, V]`` or ``[P]``."""
    if not blocks:
        return matrix
    pieces = matrix.split([_size(factors) for factors in blocks])
    return torch.cat([apply_kfac_mat_prod(f, m) for f, m in zip(blocks, pieces, strict=True)])


def _size(factors: Sequence[Tensor]) -> int:
    """Number of rows of a Kronecker product."""
    return prod(map(len, factors))


def _outer(vectors: Sequence[Tensor]) -> Tensor:
    """Kronecker product of vectors."""
    return reduce(torch.kron, vectors)
