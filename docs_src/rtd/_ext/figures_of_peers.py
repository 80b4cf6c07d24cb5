"""The measured comparison with other libraries, as a table."""

from __future__ import annotations

from benchmark.figures import OURS, Data, geometric_mean
from benchmark.problems import PROBLEMS
from benchmark.quantities import EXACT, FIRST, HESSIAN, PRODUCTS, SAMPLED
from benchmark.report import table

GROUPS = {
    "individual gradients and what follows": FIRST,
    "sampled curvature": SAMPLED,
    "exact curvature": EXACT,
    "Hessian diagonals": HESSIAN,
    "products": PRODUCTS,
}


def comparison(data: Data) -> str:
    """Return our time over that of each library, for each group of quantities."""
    columns = "library, quantities, figures, geometric mean, lowest, highest, deviation"
    rows = []
    for library, title in data.titles.items():
        if library == OURS:
            continue
        for group, names in GROUPS.items():
            cells = [(p, q) for p in data.problems if p in PROBLEMS for q in names]
            ratios = [r.median for p, q in cells if (r := data.against(p, q, library))]
            found = [c for p, q in cells if (c := data.get(p, q, library))]
            errors = [cell["error"] for cell in found if cell["error"] is not None]
            if ratios:
                figures = (geometric_mean(ratios), min(ratios), max(ratios))
                deviation = f"{max(errors):.0e}" if errors else "random"
                row = [title, group, str(len(ratios)), *(f"{f:.2f}" for f in figures), deviation]
                rows.append(row)
    return table(columns.split(", "), rows).replace(
        "---:", "---", 1
    )  # the second column is text, too
