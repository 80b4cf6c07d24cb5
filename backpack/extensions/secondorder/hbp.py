"""Kronecker-factored curvature: KFAC, KFLR, KFRA, and the family they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from backpack.core.products import Products
from backpack.core.propagations import BatchAveraged, ExactFactor, Propagation, SampledFactor
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension


class Curvature:
    """Matrix that is approximated."""

    GGN = "GGN"


class LossHessianStrategy:
    """What starts at the loss: the exact factor, sampled gradients, or the batch average."""

    EXACT = "EXACT"
    SAMPLING = "SAMPLING"
    AVERAGE = "AVERAGE"


class BackpropStrategy:
    """What travels back: a factor for each sample, or a matrix averaged over the batch."""

    SQRT = "SQRT"
    BATCH_AVERAGE = "BATCH_AVERAGE"


class ExpectationApproximation:
    """How the expectation of a Kronecker product becomes one: a product of expectations."""

    BOTEV_MARTENS = "BOTEV_MARTENS"


class HBP(SecondOrderBackpropExtension):
    """Kronecker factors of the GGN, ``A ⊗ B ⊗ …`` in the order of the parameter's axes.

    A weight has ``[B, A]``, with B from what travels back and A from the inputs; any other
    parameter has its whole block ``[B]``. Source: Dangel, Harmeling, Hennig, Modular block-diagonal
    curvature approximations for feedforward architectures (AISTATS 2020).
    """

    needs = ("gram",)

    def __init__(
        self,
        curv_type: str,
        loss_hessian_strategy: str,
        backprop_strategy: str,
        ea_strategy: str,
        savefield: str = "hbp",
        mc_samples: int = 1,
        subsampling: Sequence[int] | None = None,
    ):
        """Choose a member of the family.

        Args:
            curv_type: ``Curvature.GGN``.
            loss_hessian_strategy: See :class:`LossHessianStrategy`.
            backprop_strategy: See :class:`BackpropStrategy`.
            ea_strategy: ``ExpectationApproximation.BOTEV_MARTENS``.
            savefield: Attribute of the parameter.
            mc_samples: Number of Monte-Carlo samples of the sampling strategy.
            subsampling: Samples of the batch to look at. Default: all.

        Raises:
            ValueError: If there is no such member.
        """
        members: dict[tuple[str, str], Propagation] = {
            (LossHessianStrategy.SAMPLING, BackpropStrategy.SQRT): SampledFactor(mc_samples),
            (LossHessianStrategy.EXACT, BackpropStrategy.SQRT): ExactFactor(),
            (LossHessianStrategy.AVERAGE, BackpropStrategy.BATCH_AVERAGE): BatchAveraged(),
        }
        choice = (loss_hessian_strategy, backprop_strategy)
        known = curv_type == Curvature.GGN and ea_strategy == ExpectationApproximation.BOTEV_MARTENS
        if choice not in members or not known:
            raise ValueError(
                f"There is no Kronecker approximation with {curv_type=}, {loss_hessian_strategy=}, "
                f"{backprop_strategy=}, {ea_strategy=}. Curvature {Curvature.GGN!r} with "
                f"{ExpectationApproximation.BOTEV_MARTENS!r} goes with (loss, backprop) one of "
                f"{', '.join(map(str, members))}."
            )
        self.propagation = members[choice]
        super().__init__(savefield, subsampling=subsampling)

    def extract(self, products: Products) -> list[Tensor]:
        """Return the list of Kronecker factors."""
        return [products.take("gram"), *products.take("input_factors")]


class KFAC(HBP):
    """Kronecker factors with sampled gradients, saved in ``kfac``.

    Source: Martens, Grosse, Optimizing neural networks with Kronecker-factored approximate
    curvature (ICML 2015).
    """

    def __init__(self, mc_samples: int = 1, subsampling: Sequence[int] | None = None):
        """Store the number of Monte-Carlo samples and which samples of the batch to look at."""
        super().__init__(
            Curvature.GGN,
            LossHessianStrategy.SAMPLING,
            BackpropStrategy.SQRT,
            ExpectationApproximation.BOTEV_MARTENS,
            savefield="kfac",
            mc_samples=mc_samples,
            subsampling=subsampling,
        )


class KFLR(HBP):
    """Kronecker factors with the exact factor of the loss Hessian, saved in ``kflr``.

    Source: Botev, Ritter, Barber, Practical Gauss-Newton optimisation for deep learning (ICML
    2017).
    """

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Store which samples to look at (default: all)."""
        super().__init__(
            Curvature.GGN,
            LossHessianStrategy.EXACT,
            BackpropStrategy.SQRT,
            ExpectationApproximation.BOTEV_MARTENS,
            savefield="kflr",
            subsampling=subsampling,
        )


class KFRA(HBP):
    """Kronecker factors with a batch-averaged matrix travelling back, saved in ``kfra``.

    Source: Botev, Ritter, Barber, Practical Gauss-Newton optimisation for deep learning (ICML
    2017).
    """

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Store which samples to look at (default: all)."""
        super().__init__(
            Curvature.GGN,
            LossHessianStrategy.AVERAGE,
            BackpropStrategy.BATCH_AVERAGE,
            ExpectationApproximation.BOTEV_MARTENS,
            savefield="kfra",
            subsampling=subsampling,
        )
