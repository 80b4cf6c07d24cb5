"""Kronecker factors of the generalised Gauss-Newton matrix as a preconditioner."""

from __future__ import annotations

from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from backpack import extensions
from backpack.distributed.shards import own_part, whole
from backpack.extensions import HBP
from backpack.optim.base import Group
from backpack.optim.preconditioned import PreconditionedOptimizer
from backpack.utils.kroneckers import (
    apply_kfac_mat_prod,
    eigh_semidefinite,
    factored_damping,
)


class KFAC(PreconditionedOptimizer):
    """Gradient descent preconditioned with Kronecker factors of the GGN's blocks.

    ``θ ← θ − ν α (A ⊗ B ⊗ … + (λ + η) I)⁻¹ m`` for each parameter, with exponential moving averages
    of the gradient (m) and of the factors, all without the bias from their start. Any list of
    factors will do: two for the weight of a layer, one for a bias or another small parameter, one
    for each axis of a large one.

    Sources: Martens, Grosse, Optimizing neural networks with Kronecker-factored approximate
    curvature (ICML 2015); for other factors, Botev, Ritter, Barber, Practical Gauss-Newton
    optimisation for deep learning (ICML 2017); for the bound, Ba, Grosse, Martens, Distributed
    second-order optimization using Kronecker-factored approximations (ICLR 2017).
    """

    at_least: ClassVar = {**PreconditionedOptimizer.at_least, "inverse_every": 1}

    def __init__(
        self,
        params: Any,
        lr: float = 0.2,
        damping: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        curvature_every: int = 1,
        inverse_every: int = 10,
        factored: bool = True,
        *,
        extension: HBP | None = None,
        kl_clip: float | None = 0.03,
        adapt_damping_every: int | None = None,
    ):
        """Store the options. Those up to ``factored`` may differ between groups.

        Args:
            params: Parameters, named parameters, or groups.
            lr: Step size α.
            damping: λ, in units of the curvature.
            betas: Forgetting factors of the averages of gradient (the momentum) and factors.
            weight_decay: η, adds η/2 ‖θ‖² to the objective: ηθ to its gradient, η to its curvature.
            curvature_every: Number of steps between updates of the factors. In between,
                ``extensions`` is empty.
            inverse_every: Number of steps between eigendecompositions of the factors. In each of
                the first that many steps there is one, as the averages change fast then.
            factored: Damp each factor, see :func:`~backpack.utils.kroneckers.factored_damping`,
                instead of their product.
            extension: ``KFAC()`` (default), ``KFLR()`` or ``KFRA()`` of ``backpack.extensions``.
            kl_clip: Bound κ for ``δᵀ(C + (λ + η) I)δ``, with δ the whole step, which is scaled down
                if it is longer. None: no bound.
            adapt_damping_every: Number of steps after which the closure runs a second time, to
                compare the gain with what the quadratic model promised: λ falls if it was more than
                3/4 of that, grows if it was less than 1/4. None: λ stays.

        Raises:
            ValueError: If an option is out of range.
        """
        extension = extensions.KFAC() if extension is None else extension
        if not isinstance(extension, HBP):
            raise ValueError(
                f"KFAC takes an instance of KFAC, KFLR, KFRA or HBP of backpack.extensions, got "
                f"{extension!r}."
            )
        defaults = {
            "lr": lr,
            "damping": damping,
            "betas": betas,
            "weight_decay": weight_decay,
            "curvature_every": curvature_every,
            "inverse_every": inverse_every,
            "factored": factored,
        }
        super().__init__(params, defaults, extension, kl_clip, adapt_damping_every)

    def _solve(self, group: Group, state: dict[str, Any], shift: float) -> Tensor:
        age, interval = state["step"] - 1, group["inverse_every"]
        if age < interval or age % interval == 0:  # at the start, the averages change fast
            decompositions = [eigh_semidefinite(factor) for factor in state["curvature"]]
            state["eigenvalues"] = [values for values, _ in decompositions]
            state["eigenvectors"] = [vectors for _, vectors in decompositions]

        eigenvalues = state["eigenvalues"]
        if group["factored"]:
            dampings = factored_damping(eigenvalues, shift)
            damped = reduce(torch.kron, [e + s for e, s in zip(eigenvalues, dampings, strict=True)])
        else:
            damped = reduce(torch.kron, eigenvalues) + shift
        gradient = whole(state["gradient"])
        rotated = apply_kfac_mat_prod([q.T for q in state["eigenvectors"]], gradient.flatten())
        direction = apply_kfac_mat_prod(state["eigenvectors"], rotated / damped)
        return own_part(direction.reshape(gradient.shape), state["gradient"])
