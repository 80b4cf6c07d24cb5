"""Variance of the individual gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack.core.engine.products import Products
from backpack.extensions.backprop_extension import ChoosesSamples
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension


class Variance(ChoosesSamples, FirstOrderBackpropExtension):
    r"""Variance of the individual gradients, saved in ``variance``.

    .. math::
        \frac1N \sum_{n=1}^N g_n \odot g_n
        - \left(\frac1N \sum_{n=1}^N g_n\right) \odot \left(\frac1N \sum_{n=1}^N g_n\right)

    The biased estimate: ``sum_grad_squared / N - (grad / N)²``, with N the number of samples that
    are looked at; where rounding would make it negative, zero.

    :Shape: ``[*p]``
    :Scale: With a mean it carries 1/N²: multiply it by N² for the variance of the gradients of the
        samples' own losses. In ``float16``, it is infinite where the sum of squares is more than
        65504, and squares of entries below 2e-4 are zero: use ``bfloat16``, or ``torch.autocast``,
        where parameters are of ``float32``.
    :Cost: That of :class:`SumGradSquared`.
    :Source: Dangel, Kunstner, Hennig, BackPACK: packing more into backprop (ICLR 2020).
    """

    savefield = "variance"
    needs = ("square", "gradient")
    shape = ("*p",)

    def extract(self, products: Products) -> Tensor:
        """Return ``[*p]``."""
        n, gradient = products.num_samples, products["gradient"]
        variance = torch.addcmul(products["square"], gradient, gradient, value=-1 / n).div_(n)
        # a difference of what is almost equal may be rounded to less than zero: a root is nan
        return variance if variance.is_complex() else variance.clamp_(min=0)
