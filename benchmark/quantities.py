"""What is computed: a quantity is the set of extensions that are active together."""

from __future__ import annotations

from dataclasses import dataclass

NONE = "no extension"


@dataclass(frozen=True)
class Quantity:
    """A quantity.

    Args:
        extensions: Names of the extensions.
        order: 1 for what follows from individual gradients, 2 for curvature, 0 for products with a
            vector and for an extended model without extension.
        random: The value depends on random numbers.
    """

    extensions: tuple[str, ...]
    order: int
    random: bool = False

    @property
    def name(self) -> str:
        """The name in tables and on the command line."""
        return "+".join(self.extensions) or NONE

    @property
    def parts(self) -> tuple[str, ...]:
        """The quantities of a set, by name; none if it is a single one."""
        return self.extensions if len(self.extensions) > 1 else ()


FIRST = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
SAMPLED = ("DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC", "KFAC")
EXACT = ("DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR", "KFRA")
HESSIAN = ("DiagHessian", "BatchDiagHessian")
PRODUCTS = ("GGNMP", "HMP", "PCHMP")
TOGETHER = (
    FIRST,
    ("DiagGGNExact", "KFLR", "SqrtGGNExact"),
    ("Variance", "DiagGGNMC", "KFAC"),
)

QUANTITIES = {
    quantity.name: quantity
    for quantity in (
        Quantity((), 0),
        *(Quantity((name,), 1) for name in FIRST),
        *(Quantity((name,), 2, random=True) for name in SAMPLED),
        *(Quantity((name,), 2) for name in (*EXACT, *HESSIAN)),
        *(Quantity((name,), 0) for name in PRODUCTS),
        *(Quantity(names, 0, random="KFAC" in names) for names in TOGETHER),
    )
}

SETS = tuple("+".join(names) for names in TOGETHER)
EVERY = tuple(QUANTITIES)
# the Hessian's diagonal is that of the GGN, and costs the same
PIECEWISE_LINEAR = tuple(name for name in EVERY if name not in HESSIAN)
CORE = (NONE, *FIRST, "DiagGGNMC", "KFAC", "DiagGGNExact", "KFLR", *SETS)
SCALED = ("BatchGrad", "Variance", "DiagGGNMC", "KFAC", "DiagGGNExact", "KFLR")
