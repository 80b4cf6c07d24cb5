"""Kronecker-factored eigenvectors with the eigenvalues that fit them best: EKFAC."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Size, Tensor

from backpack.core.engine.extracted import EIGEN_SQUARES, GRAMS, IN_BASES, JOINT_EIGEN_SQUARES
from backpack.core.engine.products import Products
from backpack.extensions.curvature import Curvature
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.hbp import (
    HBP,
    Approximation,
    ExpectationApproximation,
    Fisher,
    strategies,
)
from backpack.utils.kroneckers import EigenKronecker


class EKFAC(SecondOrderBackpropExtension):
    r"""Eigenvectors of KFAC with corrected eigenvalues, saved in ``ekfac``.

    .. math::
        G = \sum_n J_n^\top H_n J_n \approx Q \, \mathrm{diag}\left(Q^\top G \, Q\right) Q^\top
        \qquad Q = U_B \otimes U_A

    U_A and U_B are the eigenvectors of the Kronecker factors A and B of :class:`KFAC`. The
    eigenvalues are those with the smallest error in the Frobenius norm: second moments of the
    individual products along the eigenvectors. So the trace is that of G, and the error is not
    larger than that of the Kronecker product. A parameter without Kronecker factors (a bias, a
    small one) has its block itself; of a bias at several positions, ``approximation="expand"`` has
    other eigenvectors.

    With ``joint_bias=True``, a weight of a linear layer or a convolution and its bias have one
    block, saved at the weight: it acts on ``[O, I + 1]``, the weight with its axes from the second
    one flattened and the bias as the last column (on ``[I + 1, O]`` for a weight ``[I, O]`` of
    ``transformers.pytorch_utils.Conv1D``). The bias has an empty list, then.

    The value is a :class:`~backpack.utils.kroneckers.EigenKronecker`, with ``bases``,
    ``eigenvalues``, ``product``, ``solve`` and ``dense``;
    :class:`~backpack.linalg.EigenOperator` makes an operator of those of several parameters, and
    :class:`~backpack.linalg.EKFAC` is that of a data set. Results are differentiable but for the
    eigenvectors, which count as constants.

    :Shape: ``bases`` are those of :class:`HBP`, ``[O, O]`` and ``[I, I]`` for a weight ``[O, I]``,
        and ``eigenvalues`` ``[O, I]``.
    :Scale: That of the loss: with a mean the eigenvalues carry 1/N once.
    :Cost: That of :class:`KFAC`, an eigendecomposition for each factor, and the product of the
        factors of each individual gradient with the eigenvectors. What travels back does so twice
        where it has to be cut into slices: the eigenvectors are those of the whole batch.
    :Source: George, Laurent, Bouthillier, Ballas, Vincent, Fast approximate natural gradient
        descent in a Kronecker-factored eigenbasis (NeurIPS 2018).
    """

    _optimiser = "KFAC(..., ekfac=True)"

    def __init__(
        self,
        mc_samples: int = 1,
        subsampling: Sequence[int] | None = None,
        approximation: Approximation = None,
        fisher: Fisher = "sampled",
        joint_bias: bool = False,
    ):
        """Store the options.

        Args:
            mc_samples: Number M of Monte-Carlo samples, for ``fisher="sampled"``.
            subsampling: Samples of the batch to look at. Default: all.
            approximation: How the factors treat weights that are used at several positions, see
                :class:`HBP`. The eigenvalues are those of G in any case.
            fisher: ``"sampled"``, ``"exact"`` or ``"empirical"``, see :class:`KFAC`.
            joint_bias: Whether a weight and its bias have one block, see :class:`HBP`.

        Raises:
            ValueError: If an option is unknown, or ``fisher`` is ``"inputs"``: there is nothing to
                correct eigenvalues with.
        """
        if fisher == "inputs":
            raise ValueError(
                "EKFAC needs what travels back: fisher='inputs' has nothing to correct the "
                "eigenvalues with. Use 'sampled', 'exact' or 'empirical'."
            )
        factors = HBP(
            Curvature.GGN,
            *strategies(fisher, mc_samples),
            ExpectationApproximation.BOTEV_MARTENS,
            mc_samples=mc_samples,
            approximation=approximation,
        )
        self.propagation = factors.propagation
        self.approximation = approximation
        squares = JOINT_EIGEN_SQUARES if joint_bias else EIGEN_SQUARES
        self.needs = GRAMS[approximation], squares[approximation]  # type: ignore[misc]
        super().__init__("ekfac", subsampling=subsampling)

    @property
    def reads(self) -> tuple[str, ...]:
        """The squares, and the factors that they are along the eigenvectors of."""
        return (*self.needs, *IN_BASES[self.needs[1]])

    def extract(self, products: Products) -> EigenKronecker | list[Tensor]:
        """Return eigenvectors and eigenvalues; an empty list for a bias that is joined."""
        p, (_, squares) = products.parameter, self.needs
        known = products.eigenbases(squares)
        if not known:
            return []
        bases = [basis.to(p.dtype, copy=True) for basis in known]  # others may have them
        shape = Size(map(len, bases))
        shape = p.shape if shape.numel() == p.numel() else shape
        return EigenKronecker(bases, products.take(squares).to(p.dtype), shape, products.swaps_axes)
