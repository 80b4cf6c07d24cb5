"""Products with the positive-curvature Hessian."""

from __future__ import annotations

from collections.abc import Sequence

from backpack.core.engine.propagations import POSITIVE_PART, Blocks
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension


class PCHMP(SecondOrderBackpropExtension):
    r"""Product with the parameter's block of the positive-curvature Hessian, saved in ``pchmp``.

    .. math::
        v \mapsto \sum_n \left(J_p z_n\right)^\top \, \mathcal{C}_{z_n} \, J_p z_n \, v
        \qquad \mathcal{C}_x = (J_x z)^\top \mathcal{C}_z \, J_x z
        + \left(\sum_i \nabla_x^2 z_i \, g_i\right)_{\!+}

    The second derivative of every module (weighted with the gradient g) is made positive
    semidefinite on the way back.

    :Shape: A function ``[V, *p] -> [V, *p]``.
    :Scale: That of the loss: with a mean it carries 1/N once.
    :Cost: As :class:`HMP`.
    :Source: Chen, Chou, Chang, EA-CG: an approximate second-order method for training
        fully-connected neural networks (AAAI 2019).
    """

    needs = ("product",)

    def __init__(
        self,
        savefield: str = "pchmp",
        modify: str = "clip",
        subsampling: Sequence[int] | None = None,
    ):
        """Store the options.

        Args:
            savefield: Attribute of the parameter.
            modify: What becomes of negative second derivatives: ``"clip"`` sets them to zero,
                ``"abs"`` takes their magnitude.
            subsampling: Samples of the batch to look at. Default: all.

        Raises:
            ValueError: If ``modify`` is neither.
        """
        if modify not in POSITIVE_PART:
            raise ValueError(f"modify is one of {', '.join(POSITIVE_PART)}, got {modify!r}.")
        self.propagation = Blocks(modify=POSITIVE_PART[modify])
        super().__init__(savefield, subsampling=subsampling)
