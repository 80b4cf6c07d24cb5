"""Norms of the individual gradients."""

from __future__ import annotations

from backpack.extensions.backprop_extension import ChoosesSamples
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension


class BatchL2Grad(ChoosesSamples, FirstOrderBackpropExtension):
    r"""Squared L2 norm of each individual gradient, saved in ``batch_l2``.

    .. math:: \left\lVert g_n \right\rVert^2 \qquad n = 1, \ldots, N

    That is the norm of a parameter's part of the gradient; add them up over the parameters for the
    norm of the whole.

    :Shape: ``[N]``
    :Scale: With a mean each carries 1/N².
        In ``float16``, squares are infinite from norms of 256 on, and zero for small entries (below
        2e-4): use ``bfloat16``, or ``torch.autocast``, where parameters are of ``float32``.
    :Cost: Where the individual gradient of a layer is an outer product, the product of two norms;
        over positions, of two Gram matrices. The individual gradients are then never formed.
    :Source: Goodfellow, Efficient per-example gradient computations (arXiv 1510.01799, 2015).
    """

    savefield = "batch_l2"
    needs = ("square_norm",)
    shape = ("N",)
    belongs_to_gradient = True
