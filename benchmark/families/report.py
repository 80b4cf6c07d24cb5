"""The report, made from the figures alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmark.families.works import ALL, OURS, WORKS, Work
from benchmark.report import size, table

Cells = dict[str, dict[str, Any]]

HEAD = """\
## Figures beside libraries for a single task

Made by `python -m benchmark.families` on {date} (commit {commit}): {cpu}, threads {threads}, torch
{torch}, Python {python}, clock {clock}, load {load:.1f}. Beside {libraries}.{earlier}

Numbers are compared first, then times are taken in turn. Times and peaks of memory are ratios to
the plain forward and backward passes over the same data, medians over the rounds; *÷ fastest* is
the median, over the rounds, of our time divided by that of the peer for which this is largest.
"""


def ratio(cell: dict[str, Any], other: dict[str, Any] | None = None) -> float:
    """Return the median ratio of times to the plain passes, or to another contestant."""
    others = cell["plain"] if other is None else other["seconds"]
    pairs = zip(cell["seconds"], others, strict=False)
    return statistics.median(a / b for a, b in pairs)


def groups(cells: list[dict[str, Any]]) -> dict[tuple[str, str], Cells]:
    """Put together what was measured side by side."""
    found: dict[tuple[str, str], Cells] = {}
    for cell in cells:
        found.setdefault((cell["work"], cell["problem"]), {})[cell["contestant"]] = cell
    return found


def verdict(value: float | None, aim: float | None) -> list[str]:
    """Return a figure, what is aimed at, and whether it is met."""
    if value is None or aim is None:
        return ["", "" if aim is None else f"{aim:.1f}", ""]
    return [f"{value:.2f}", f"{aim:.1f}", "yes" if value <= aim else "**no**"]


def row(work: Work, cells: Cells, of: Callable[[dict[str, Any]], float]) -> list[str]:
    """Return what each contestant takes, as text."""
    texts = []
    for name in work.peers:
        cell = cells.get(name)
        if cell is not None:
            figure = f"{of(cell):.2f}" if cell["status"] == "ok" else cell["reason"]
            texts.append(f"{name} {figure}")
    return [f"{of(cells[OURS]):.2f}", ", ".join(texts)]


def time_row(work: Work, cells: Cells) -> list[str]:
    """Return times."""
    ours = cells[OURS]
    peers = [c for name, c in cells.items() if name != OURS and c["status"] == "ok"]
    against = max((ratio(ours, peer) for peer in peers), default=None)
    milliseconds = f"{1000 * statistics.median(ours['seconds']):.1f}"
    return [milliseconds, *row(work, cells, ratio), *verdict(against, work.time)]


def memory_row(work: Work, cells: Cells) -> list[str]:
    """Return peaks of memory."""
    ours = cells[OURS]
    peers = [c for name, c in cells.items() if name != OURS and c["status"] == "ok"]
    smallest = min((peer["bytes"] for peer in peers), default=None)
    against = None if not smallest else ours["bytes"] / smallest

    def relative(cell: dict[str, Any]) -> float:
        return cell["bytes"] / max(1, cell["plain_bytes"])

    return [size(ours["bytes"]), *row(work, cells, relative), *verdict(against, work.memory)]


def section(contents: dict[str, Any]) -> str:
    """Return the tables, as Markdown."""
    facts, measured = contents["environment"], groups(contents["cells"])
    libraries = facts["libraries"]
    chosen = [libraries[n] for n in libraries if n not in ("backpack", "upstream", "loop")]
    runs = dict.fromkeys(f"{e['date']} (commit {e['commit']})" for e in facts.get("earlier", ()))
    earlier = f" What was not measured again then is of {', '.join(runs)}." if runs else ""
    parts = [HEAD.format(**facts | {"libraries": ", ".join(chosen), "earlier": earlier})]
    timed = {
        key: cells
        for key, cells in measured.items()
        if WORKS[key[0]].time is not None and cells[OURS]["status"] == "ok"
    }
    makers = {
        "ms": (time_row, "÷ fastest"),
        "MiB": (memory_row, "÷ smallest"),
    }
    for unit, (make, against) in makers.items():
        header = ["work", "problem", unit, "this library", "peers", against, "aim", "met"]
        rows = [[WORKS[w].title, ALL[p].title, *make(WORKS[w], c)] for (w, p), c in timed.items()]
        parts.append(table(header, rows))
    rows = [
        [WORKS[w].title, ALL[p].title, name, deviation_of(cell)]
        for (w, p), cells in measured.items()
        for name, cell in cells.items()
        if name != OURS
    ]
    title = "<details><summary>Largest relative deviation of the numbers</summary>\n"
    parts += [title, table(["work", "problem", "contestant", "deviation"], rows), "</details>\n"]
    return "\n".join(parts)


def deviation_of(cell: dict[str, Any]) -> str:
    """Return the deviation, or why there is none."""
    return cell["reason"] if cell["deviation"] is None else f"{cell['deviation']:.0e}"
