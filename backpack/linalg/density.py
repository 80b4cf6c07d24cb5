"""Densities of eigenvalues, and traces of matrix functions, by stochastic Lanczos quadrature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from backpack.core.values import at_least_single
from backpack.linalg.algebra import known_spectrum
from backpack.linalg.estimators import (
    Estimate,
    Randomness,
    average,
    certain,
    lengths,
    widest,
)
from backpack.linalg.operators import LinearOperator, one_number
from backpack.utils.autocast import without_autocast
from backpack.utils.progress import with_bar


@dataclass(frozen=True)
class SpectralDensity:
    """How the eigenvalues of a symmetric matrix are distributed.

    Each of V random vectors gives K nodes θ with weights w, a quadrature for the mean of a function
    over the eigenvalues: ``1/P tr f(A) ≈ mean_v sum_k w_vk f(θ_vk)``.

    Attributes:
        nodes: ``[V, K]``. The extreme ones are near to the extreme eigenvalues.
        weights: ``[V, K]``, with sum 1 for each vector.
        size: P, number of eigenvalues.
        products: How many vectors were multiplied with the matrix; 0 if these are its eigenvalues.
    """

    nodes: Tensor
    weights: Tensor
    size: int
    products: int

    def trace_of(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        """Estimate ``tr f(A)``; an infinite error says that one vector has no spread.

        Args:
            function: Maps eigenvalues entry by entry: ``[V, K] -> [V, K]``.

        Returns:
            The trace, and its standard error (of the random vectors, not of the quadrature).
        """
        return self._average(self.size * (self.weights * function(self.nodes)).sum(1))

    def density(self, grid: Tensor, width: float | None = None) -> Estimate:
        """Smooth the density with a normal distribution, and evaluate it.

        Args:
            grid: Where. ``[G]``
            width: Standard deviation of the normal distribution. Default: a hundredth of the range
                of the nodes, or of their size where they are equal up to rounding.

        Returns:
            The density, whose integral is 1, and its standard error: ``[G]`` each.

        Raises:
            ValueError: If the width is not positive.
        """
        if width is None:
            spread = float(self.nodes.max() - self.nodes.min())
            largest = float(self.nodes.abs().max())
            is_rounding = spread <= 100 * torch.finfo(self.nodes.dtype).eps * largest
            width = (largest if is_rounding else spread) / 100 or 1.0
        if not width > 0:
            raise ValueError(f"The width has to be positive, got {width}.")
        distance = (grid.to(self.nodes).unsqueeze(1) - self.nodes.unsqueeze(1)) / width
        kernel = (-distance.square() / 2).exp() / (width * (2 * torch.pi) ** 0.5)  # [V, G, K]
        with without_autocast():
            each = (kernel @ self.weights.unsqueeze(2)).squeeze(2).T
        return self._average(each)

    def counts(self, edges: Tensor) -> Estimate:
        """Estimate how many eigenvalues lie in each of some intervals.

        Args:
            edges: Of the intervals ``[a, b)``, in ascending order. ``[B + 1]``

        Returns:
            ``[B]`` numbers, and their standard errors.
        """
        place = torch.bucketize(self.nodes, edges.to(self.nodes), right=True)  # 0: below all
        # many small weights, whose sum would stop to grow in single precision
        weights = self.weights.to(widest(self.weights))
        counts = weights.new_zeros(len(weights), len(edges) + 1)
        counts = counts.scatter_add(1, place, weights)[:, 1:-1].T
        return self._average((self.size * counts).to(self.nodes.dtype))

    def _average(self, each: Tensor) -> Estimate:
        if not self.products:
            return certain(each.squeeze(-1))
        return average(each, self.products)


def spectral_density(
    operator: LinearOperator,
    num_vectors: int = 10,
    steps: int = 50,
    generator: Generator | None = None,
    vectors_at_once: int | None = None,
    progress: bool = False,
) -> SpectralDensity:
    """Estimate how the eigenvalues of a symmetric matrix are distributed.

    Lanczos iterations from random vectors of unit length, with full orthogonalisation.

    Args:
        operator: The matrix. ``[P, P]``
        num_vectors: V, number of starting vectors, which are multiplied together.
        steps: K, number of iterations: products with V vectors. Polynomials of a degree up to
            ``2 K - 1`` are integrated exactly. Memory: ``K V P``.
        generator: Source of random numbers, on the device of the operator.
        vectors_at_once: How many are multiplied at once. Default: all.
        progress: Show a bar (needs ``tqdm``).

    Returns:
        Nodes and weights, from which densities, counts and traces of functions follow. For
        structured operators, the eigenvalues with equal weights.

    Raises:
        ValueError: If the matrix is not known to be symmetric, or a number is not positive.

    Source: Ubaru, Chen, Saad, Fast estimation of tr(f(A)) via stochastic Lanczos quadrature (SIMAX
    2017), algorithm 1; Lin, Saad, Yang, Approximating spectral densities of large matrices (SIAM
    Review 2016), section 3.2.
    """
    draw = Randomness(operator, generator, vectors_at_once, progress=False)
    operator._need_symmetric("spectral densities")
    if num_vectors < 1 or steps < 1:
        raise ValueError(f"Needs vectors and steps, got num_vectors={num_vectors}, steps={steps}.")
    size = operator.shape[0]
    spectrum = known_spectrum(operator)
    if spectrum is not None:
        nodes = at_least_single(spectrum).unsqueeze(0)
        return SpectralDensity(nodes, torch.full_like(nodes, 1 / size), size, 0)
    start = draw.normal(num_vectors)
    nodes, weights, products = _lanczos(draw, start / start.norm(dim=0), steps, progress)
    return SpectralDensity(nodes, weights, size, products)


def logdet(
    operator: LinearOperator,
    damping: float = 0.0,
    num_vectors: int = 10,
    steps: int = 50,
    generator: Generator | None = None,
    vectors_at_once: int | None = None,
    progress: bool = False,
) -> Estimate:
    """Estimate ``log det(A + damping · I)`` of a symmetric positive definite matrix.

    Args:
        operator: The matrix A. ``[P, P]``
        damping: Multiple of the identity that is added. The quadrature converges with the root of
            the condition number.
        num_vectors: As for :func:`spectral_density`.
        steps: The same.
        generator: The same.
        vectors_at_once: The same.
        progress: The same.

    Returns:
        The logarithm of the determinant, a scalar, and its standard error (of the random vectors,
        not of the quadrature). Exact for structured operators.

    Raises:
        ValueError: If the matrix is found not to be positive definite, or as for
            :func:`spectral_density`.

    Source: Ubaru, Chen, Saad (SIMAX 2017), section 4.1.
    """
    damping = one_number(operator, damping)
    found = spectral_density(operator, num_vectors, steps, generator, vectors_at_once, progress)
    least = float(found.nodes.min()) + damping
    if not least > 0:
        raise ValueError(
            f"{operator!r} with damping {damping:g} is not positive definite: there is an "
            f"eigenvalue of at most {least:.1e}. Use more damping, or the GGN instead of the "
            "Hessian."
        )
    return found.trace_of(lambda nodes: (nodes + damping).log())


def _lanczos(
    draw: Randomness, start: Tensor, steps: int, progress: bool
) -> tuple[Tensor, Tensor, int]:
    """Return nodes and weights ``[V, K]`` for starting vectors ``[P, V]`` of unit length.

    A vector whose Krylov space is exhausted goes on with zeros: nodes without weight.
    """
    size, count = start.shape
    steps = min(steps, size)
    q = start
    bases = [q]
    T = start.new_zeros(count, steps, steps)
    for k in with_bar(list(range(steps)), "Lanczos", progress):
        image = draw.multiply(q)
        T[:, k, k] = (q * image).sum(0)
        if k + 1 == steps:
            break
        known = torch.stack(bases)  # [k + 1, P, V]
        rest = image
        for _ in range(2):  # twice is enough
            rest = rest - (known * (known * rest).sum(1, keepdim=True)).sum(0)
        length, scale = lengths(rest).to(rest), lengths(image).to(rest)
        is_new = length > 10 * len(bases) * torch.finfo(rest.dtype).eps * scale
        length = torch.where(is_new, length, 0)
        q = torch.where(is_new, rest / torch.where(is_new, length, 1), 0)
        T[:, k, k + 1] = T[:, k + 1, k] = length
        bases.append(q)
    nodes, vectors = torch.linalg.eigh(T)
    weights = vectors[:, 0].square()
    # what is not reached has no weight: let it be where others are
    heaviest = nodes.gather(1, weights.argmax(1, keepdim=True))
    nodes = torch.where(weights > torch.finfo(weights.dtype).eps ** 2, nodes, heaviest)
    return nodes, weights, steps * count
