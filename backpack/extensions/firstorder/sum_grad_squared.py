"""Second moment of the individual gradients."""

from __future__ import annotations

from backpack.extensions.backprop_extension import ChoosesSamples
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension


class SumGradSquared(ChoosesSamples, FirstOrderBackpropExtension):
    r"""Sum of the squared individual gradients, saved in ``sum_grad_squared``.

    .. math:: \sum_{n=1}^N g_n \odot g_n

    :Shape: ``[*p]``
    :Scale: With a mean it carries 1/N².
        In ``float16``, sums of squares are infinite from 65504 on, and squares of entries below
        2e-4 are zero: use ``bfloat16``, or ``torch.autocast``, where parameters are of
        ``float32``.
    :Cost: The products of the gradient, squared in slices: the individual gradients are not held
        all at once, unless the parameter is used several times.
    :Source: Dangel, Kunstner, Hennig, BackPACK: packing more into backprop (ICLR 2020).
    """

    savefield = "sum_grad_squared"
    needs = ("square",)
    shape = ("*p",)
