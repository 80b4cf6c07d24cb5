"""Individual gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backpack.core.engine.factored import FactoredGrad
from backpack.core.engine.products import Products
from backpack.extensions.backprop_extension import checked_dtype
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension


class BatchGrad(FirstOrderBackpropExtension):
    r"""Individual gradients, saved in ``grad_batch``.

    .. math:: g_n = \nabla_p \ell_n \qquad n = 1, \ldots, N

    With ``factored=True`` the value is a :class:`~backpack.core.engine.factored.FactoredGrad` of
    that shape: where a gradient is a sum of few outer products, these are kept, and norms, weighted
    sums and inner products are computed without ``[N, *p]``. A rule that a user has registered for
    this extension saves its tensor.

    :Shape: ``[N, *p]``
    :Scale: That of the loss: with a mean each carries 1/N. They sum to ``p.grad``.
    :Cost: The products of the gradient, not summed over n. The memory of N gradients.
    :Source: Dangel, Kunstner, Hennig, BackPACK: packing more into backprop (ICLR 2020).
    """

    needs = ("individual",)
    shape = ("N", "*p")

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        factored: bool = False,
        dtype: torch.dtype | None = None,
    ):
        """Choose the samples.

        Args:
            subsampling: Indices of the samples of the batch to look at. Default: all.
            factored: Save factors instead of the gradients.
            dtype: Precision to save in, such as ``torch.bfloat16`` for half the memory. What is
                computed of a parameter is rounded once it is there. Default: the parameter's.

        Raises:
            TypeError: If ``dtype`` is no precision.
            ValueError: If it has no fractions, or is given together with ``factored``.
        """
        super().__init__("grad_batch", subsampling=subsampling)
        self.result_dtype = checked_dtype(dtype, factored)
        if factored:
            self.needs = ("factored",)  # type: ignore[misc]

    def extract(self, products: Products) -> Tensor | FactoredGrad:
        """Return ``[N, *p]``."""
        if "factored" in self.needs:
            return products["factored"]
        return products.take("individual").squeeze(0)  # one column
