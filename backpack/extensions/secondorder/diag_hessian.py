"""The diagonal of the Hessian, of the batch and of each sample."""

from __future__ import annotations

from backpack.core.engine.propagations import HessianFactors
from backpack.extensions.backprop_extension import ChoosesSamples
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension


class DiagHessian(ChoosesSamples, SecondOrderBackpropExtension):
    r"""Diagonal of the Hessian, saved in ``diag_h``.

    .. math:: \mathrm{diag}\left(\nabla_p^2 \mathcal{L}\right)

    The Hessian is the GGN and a signed term for every nonlinear module (:doc:`mathematics`). It
    equals :class:`DiagGGNExact` if all activations are piecewise linear (ReLU).

    :Shape: ``[*p]``
    :Scale: That of the loss: with a mean it carries 1/N once.
    :Cost: That of :class:`DiagGGNExact`, and for every activation that is not piecewise linear as
        many columns as it has entries for a sample.
    :Source: Mizutani, Dreyfus, Second-order stagewise backpropagation for Hessian-matrix analyses
        and investigation of negative curvature (Neural Networks 2008).
    """

    savefield = "diag_h"
    propagation = HessianFactors()
    needs = ("square",)
    shape = ("*p",)


class BatchDiagHessian(ChoosesSamples, SecondOrderBackpropExtension):
    r"""Diagonal of each sample's Hessian, saved in ``diag_h_batch``.

    .. math:: \mathrm{diag}\left(\nabla_p^2 \ell_n\right) \qquad n = 1, \ldots, N

    :Shape: ``[N, *p]``
    :Scale: With a mean each carries 1/N. They sum to :class:`DiagHessian`.
    :Cost: That of :class:`DiagHessian`, and the memory of N gradients.
    :Source: That of :class:`DiagHessian`.
    """

    savefield = "diag_h_batch"
    propagation = HessianFactors()
    needs = ("batch_square",)
    shape = ("N", "*p")
