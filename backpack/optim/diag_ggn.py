"""The damped diagonal of the generalised Gauss-Newton matrix as a preconditioner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from backpack.extensions import DiagGGNExact, DiagGGNMC
from backpack.optim.base import Group
from backpack.optim.preconditioned import PreconditionedOptimizer, Trained


class DiagGGN(PreconditionedOptimizer):
    """Gradient descent preconditioned with the damped diagonal of the GGN.

    ``θ ← θ − ν α m / (c + λ + η)``, entry by entry, with exponential moving averages m of the
    gradient and c of the diagonal, both without the bias from their start.
    Source: Dangel, Kunstner, Hennig, BackPACK (ICLR 2020), section 4 and appendix C.
    """

    like_parameters: ClassVar = ("curvature",)

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        damping: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        curvature_every: int = 1,
        *,
        extension: DiagGGNExact | DiagGGNMC | None = None,
        kl_clip: float | None = 0.01,
        adapt_damping_every: int | None = None,
    ):
        """Store the options. Those up to ``curvature_every`` may differ between groups.

        Args:
            params: Parameters, named parameters, or groups.
            lr: Step size α.
            damping: λ, in units of the curvature.
            betas: Forgetting factors of the averages of gradient (the momentum) and curvature.
            weight_decay: η, adds η/2 ‖θ‖² to the objective: ηθ to its gradient, η to its curvature.
            curvature_every: Number of steps between updates of the curvature. In between,
                ``extensions`` is empty and a step costs little more than that of SGD.
            extension: ``DiagGGNMC()`` (default) or ``DiagGGNExact()``.
            kl_clip: Bound κ for ``δᵀ(C + (λ + η) I)δ``, with δ the whole step, which is scaled down
                if it is longer. None: no bound.
            adapt_damping_every: Number of steps after which the closure runs a second time, to
                compare the gain with what the quadratic model promised: λ falls if it was more than
                3/4 of that, grows if it was less than 1/4. None: λ stays.

        Raises:
            ValueError: If an option is out of range.
        """
        extension = DiagGGNMC() if extension is None else extension
        if not isinstance(extension, DiagGGNExact | DiagGGNMC):
            raise ValueError(
                f"DiagGGN takes an instance of DiagGGNExact or DiagGGNMC, got {extension!r}."
            )
        defaults = {
            "lr": lr,
            "damping": damping,
            "betas": betas,
            "weight_decay": weight_decay,
            "curvature_every": curvature_every,
        }
        super().__init__(params, defaults, extension, kl_clip, adapt_damping_every)

    def _directions(self, trained: Sequence[Trained]) -> list[Tensor]:
        return [_solution(group, state) for group, _, state, _ in trained]


def _solution(group: Group, state: dict[str, Any]) -> Tensor:
    (curvature,) = state["curvature"]
    return state["gradient"] / (curvature + group["damping"] + group["weight_decay"])
