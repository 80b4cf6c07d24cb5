"""What extensions cost on five networks, from the results of the benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from figures_of_peers import GROUPS

from benchmark.figures import OURS, Data, geometric_mean
from benchmark.problems import PROBLEMS
from benchmark.quantities import NONE, TOGETHER
from benchmark.report import environment, table

NETWORKS = {
    "mlp": "MLP",
    "3c3d": "CNN",
    "wrn-32": "Wide ResNet",
    "lstm": "LSTM",
    "transformer": "Transformer",
}
# what a page about a task needs
TASKS = {
    "optimiser": ("DiagGGNMC", "KFAC", "KFLR", "DiagGGNExact"),
    "private": ("BatchL2Grad", "BatchGrad"),
    "noise": ("BatchL2Grad", "SumGradSquared", "Variance"),
    "pruning": ("DiagGGNMC", "DiagGGNExact", "DiagHessian"),
    "debugging": ("BatchL2Grad", "Variance", "DiagGGNMC", "GGNMP"),
    "lora": ("BatchGrad", "DiagGGNMC", "KFAC"),
    "influence": ("BatchGrad", "KFLR", "DiagGGNExact"),
    "laplace": ("DiagGGNMC", "DiagGGNExact", "KFAC", "KFLR"),
}
NOT_MEASURED = "–"


def cost(data: Data, problem: str, quantity: str) -> str:
    """Return time and memory of a quantity, relative to the plain pass."""
    cell, time = data.get(problem, quantity), data.overhead(problem, quantity)
    if cell is None or time is None:
        return NOT_MEASURED
    memory = cell["bytes"] / cell["plain_bytes"]
    digits = 1 if max(time.median, memory) < 10 else 0
    return f"{time.median:.{digits}f}\N{NO-BREAK SPACE}/\N{NO-BREAK SPACE}{memory:.{digits}f}"


def cost_rows(data: Data, quantities: Iterable[str]) -> list[list[str]]:
    """Return a row for each quantity, with a cell for each network."""
    return [
        [f"``{q.replace('+', ', ')}``", *(cost(data, p, q) for p in NETWORKS)] for q in quantities
    ]


def networks(data: Data) -> list[list[str]]:
    """Return a row for each network: what it is, its size, and a plain pass of it."""
    rows = []
    for problem, name in NETWORKS.items():
        about, cell = data.problems[problem], data.get(problem, "BatchL2Grad")
        assert cell is not None
        milliseconds = 1000 * statistics.median(cell["plain"])
        mebibytes = cell["plain_bytes"] / 2**20
        size = f"{about['parameters']:,}"
        title = about["title"] if about["title"].startswith(name) else f"{name}: {about['title']}"
        rows.append([title, size, f"{milliseconds:.0f} ms", f"{mebibytes:.0f} MiB"])
    return rows


def ratios_of_groups(data: Data) -> list[list[str]]:
    """Return a row for each library, with our time over its time for each group of quantities."""
    rows = []
    for library, title in data.titles.items():
        if library != OURS:
            row = [title]
            for names in GROUPS.values():
                cells = [(p, q) for p in data.problems if p in PROBLEMS for q in names]
                ratios = [r.median for p, q in cells if (r := data.against(p, q, library))]
                spread = f" ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""
                row.append(f"**{geometric_mean(ratios):.2f}**{spread}" if ratios else NOT_MEASURED)
            rows.append(row)
    return rows


def of_which_runs(data: Data) -> str:
    """Name the machine and the latest run; the report has all of them."""
    latest, *others = environment(data).split(" What was not measured again then")
    dates = [run["date"] for run in data.environment.get("earlier", ())]
    if not others or not dates:
        return f"Measured with: {latest}"
    return f"Measured with: {latest} Some figures are of earlier runs, the first of {min(dates)}."


def one_screen(data: Data) -> str:
    """Return what comes first on the page about performance, in Markdown."""
    alone = [name for names in GROUPS.values() for name in names]
    costs = cost_rows(data, [NONE, *alone, *("+".join(names) for names in TOGETHER)])
    return ONE_SCREEN.format(
        costs=table(["time / memory", *NETWORKS.values()], costs),
        comparison=table(["", *GROUPS], ratios_of_groups(data)),
        networks=table(["network", "parameters", "plain pass", "its memory"], networks(data)),
        environment=of_which_runs(data),
    )


ONE_SCREEN = """\
# Performance

## What an extension costs

Time and memory of a step with an extension, each **relative to a plain forward and backward pass**
of the same model: 2.0 / 1.3 takes twice the time and 1.3 times the memory. – takes too long or too
much memory to be measured.

{costs}
{networks}
## How that compares

Time of this library **divided by that of the other one**: geometric mean over all networks and
quantities that both can do (lowest–highest). Below 1, this library is faster.

{comparison}
## What to take

- **Sampled curvature** (`DiagGGNMC`, `KFAC`) costs the same whatever the number of classes. **Exact
  curvature** grows with it, and with the positions of a sequence.
- What has an entry for each sample (`BatchGrad`, `SqrtGGNExact`) takes the memory that it is made
  of: the batch size times that of the parameters. Norms, second moments and variances
  (`BatchL2Grad`, `SumGradSquared`, `Variance`) do not.
- Extensions that run together share what they have in common.
- `python -m backpack support module:factory` says which modules of your model have rules.

{environment}
"""
