"""The diagonal of the generalised Gauss-Newton matrix, of the batch and of each sample."""

from __future__ import annotations

from collections.abc import Sequence

from backpack.core.engine.propagations import ExactFactor, SampledFactor
from backpack.extensions.backprop_extension import ChoosesSamples
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension


class _Sampled(SecondOrderBackpropExtension):
    """An extension that propagates sampled gradients: a subclass has a ``savefield``."""

    def __init__(self, mc_samples: int = 1, subsampling: Sequence[int] | None = None):
        """Choose the samples.

        Args:
            mc_samples: Number M of Monte-Carlo samples.
            subsampling: Indices of the samples of the batch to look at. Default: all.
        """
        self.propagation = SampledFactor(mc_samples)
        super().__init__(self.savefield, subsampling=subsampling)


class DiagGGNExact(ChoosesSamples, SecondOrderBackpropExtension):
    r"""Diagonal of the GGN, saved in ``diag_ggn_exact``.

    .. math::
        \mathrm{diag}\left(\sum_n J_n^\top H_n J_n\right)
        = \sum_n \sum_c \left(J_n^\top s_{nc}\right)^2
        \qquad H_n = \sum_c s_{nc} s_{nc}^\top

    The exact factor of the loss Hessian travels back.

    :Shape: ``[*p]``
    :Scale: That of the loss: with a mean it carries 1/N once.
    :Cost: C columns travel back where the gradient is one (C - 1 for softmax cross entropy, fewer
        where a sample's activation is smaller).
    :Source: Dangel, Kunstner, Hennig, BackPACK: packing more into backprop (ICLR 2020).
    """

    savefield = "diag_ggn_exact"
    propagation = ExactFactor()
    needs = ("square",)
    shape = ("*p",)

    _optimiser = "DiagGGN"


class DiagGGNMC(_Sampled):
    r"""Monte-Carlo estimate of the GGN's diagonal, saved in ``diag_ggn_mc``.

    .. math::
        \sum_n \sum_{m=1}^M \left(J_n^\top \tilde s_{nm}\right)^2
        \qquad \mathbb{E}\left[\sum_m \tilde s_{nm} \tilde s_{nm}^\top\right] = H_n

    Gradients with respect to the output travel back, for targets drawn from the model's own
    prediction. The loss has to be a negative log likelihood; ``torch.manual_seed`` repeats the
    draws.

    :Shape: ``[*p]``
    :Scale: That of :class:`DiagGGNExact`, which is its expectation (but see :doc:`losses` for those
        whose Hessian depends on the targets).
    :Cost: M columns travel back where the gradient is one, whatever the number of classes.
    :Source: Dangel, Kunstner, Hennig, BackPACK: packing more into backprop (ICLR 2020).
    """

    savefield = "diag_ggn_mc"
    needs = ("square",)
    shape = ("*p",)

    _optimiser = "DiagGGN"


class BatchDiagGGNExact(ChoosesSamples, SecondOrderBackpropExtension):
    r"""Diagonal of each sample's GGN, saved in ``diag_ggn_exact_batch``.

    .. math:: \mathrm{diag}\left(J_n^\top H_n J_n\right) \qquad n = 1, \ldots, N

    :Shape: ``[N, *p]``
    :Scale: With a mean each carries 1/N. They sum to :class:`DiagGGNExact`.
    :Cost: That of :class:`DiagGGNExact`, and the memory of N gradients.
    :Source: Dangel, Kunstner, Hennig, BackPACK: packing more into backprop (ICLR 2020).
    """

    savefield = "diag_ggn_exact_batch"
    propagation = ExactFactor()
    needs = ("batch_square",)
    shape = ("N", "*p")


class BatchDiagGGNMC(_Sampled):
    r"""Monte-Carlo estimate of each sample's GGN diagonal, saved in ``diag_ggn_mc_batch``.

    .. math:: \sum_{m=1}^M \left(J_n^\top \tilde s_{nm}\right)^2 \qquad n = 1, \ldots, N

    :Shape: ``[N, *p]``
    :Scale: With a mean each carries 1/N. They sum to :class:`DiagGGNMC`.
    :Cost: That of :class:`DiagGGNMC`, and the memory of N gradients.
    :Source: Dangel, Kunstner, Hennig, BackPACK: packing more into backprop (ICLR 2020).
    """

    savefield = "diag_ggn_mc_batch"
    needs = ("batch_square",)
    shape = ("N", "*p")
