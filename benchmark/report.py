"""The report: Markdown and pictures, made from the results file alone."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmark.figures import OURS, UPSTREAM, Data, Goal, goals
from benchmark.problems import PROBLEMS, SERIES

HEAD = """\
# Results of the benchmark

Made by `python -m benchmark report` from `{file}`. {environment}

Times are ratios to the plain forward and backward pass of the same model, in the same process and
the same round: median over the rounds ± half the interquartile range. Memory is what a step takes
beyond what is there before. The *floor* is the plain pass, plus the operations and bytes of the
quantity at the measured rates ({operations:.0f} GFLOP/s, {bytes:.1f} GB/s). The last columns are
our time divided by that of the released version and by that of the fastest peer.
[How it is measured](../README.md)
"""

# The problem whose picture is in the README of the repository.
IN_README = "3c3d"


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table; the first column is text."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def size(number: int) -> str:
    """Return bytes in MiB."""
    mebibytes = number / 2**20
    return f"{mebibytes:.0f}" if mebibytes >= 10 else f"{mebibytes:.1f}"


def environment(data: Data) -> str:
    """Return what the figures depend on."""
    e = data.environment
    rows = {
        "processor": e["cpu"],
        "GPU": e["gpu"],
        "threads": e["threads"],
        "torch": e["torch"],
        "Python": e["python"],
        "date": e["date"],
        "commit": e["commit"],
        "clock": e["clock"],
    }
    text = ", ".join(f"{name} {value}" for name, value in rows.items() if value is not None) + "."
    own = f"{e['date']} (commit {e['commit']})"
    others = {}
    for run in e.get("earlier", ()):
        what = f"{run['date']} (commit {run['commit']})"
        if (run["cpu"], run["gpu"]) != (e["cpu"], e["gpu"]):
            others[f"{what}, on another machine ({run['gpu'] or run['cpu']})"] = None
        elif what != own:
            others[what] = None
    if others:
        text += f" What was not measured again then is of {'; '.join(others)}."
    return text


def goal_section(found: list[Goal]) -> str:
    """Return the goals, each with its figures."""
    rows = []
    for goal in found:
        bounded = [check for check in goal.checks if check.bound < math.inf]
        worst = max(bounded, key=lambda c: c.value / c.bound, default=None)
        figure = "–" if worst is None else f"{worst.value:.2f} ({worst.what})"
        met = f"{sum(c.met for c in bounded)} of {len(bounded)}"
        rows.append([goal.title, f"**{goal.verdict}**", met, figure])
    parts = ["## Goals\n", table(["goal", "verdict", "figures that hold", "worst figure"], rows)]
    for goal in found:
        lines = [f"- {c.what}: {c.value:.2f}" for c in goal.checks if not c.met]
        lines += [f"- {c.what}: {c.value:.2f}" for c in goal.checks if c.bound == math.inf]
        lines += [f"- {what}: not measured" for what in goal.missing]
        if lines:
            summary = f"<summary>{goal.title}</summary>"
            parts.append("\n".join(["<details>" + summary, "", *lines, "", "</details>\n"]))
    return "\n".join(parts)


def problem_section(data: Data, problem: str) -> str:
    """Return the tables of a problem."""
    about = data.problems[problem]
    names = data.quantities(problem)
    titles = [*data.titles.values()]
    time = ["quantity", "ms", *titles, "floor", "÷ release", "÷ fastest peer"]
    memory = ["MiB", "plain", *titles, *(f"deviation, {title}" for title in titles[1:])]
    return "\n".join(
        [
            f"## {about['title']}\n",
            f"{about['parameters']:,} parameters.\n",
            table(time, [time_row(data, problem, name) for name in names]),
            reasons(data, problem),
            "<details><summary>Memory, and deviation of values</summary>\n",
            table(memory, [memory_row(data, problem, name) for name in names]),
            "</details>\n",
        ]
    )


def time_row(data: Data, problem: str, quantity: str) -> list[str]:
    """Return overheads of all libraries, and how this one compares."""
    ours = data.get(problem, quantity)
    row = [quantity.replace("+", ", ")]
    row.append(f"{1000 * statistics.median(ours['seconds']):.1f}" if ours else "")
    for library in data.titles:
        figure = data.overhead(problem, quantity, library)
        cell = data.cells.get((problem, quantity, library))
        if figure is None:
            row.append({"absent": "–"}.get(cell["status"], cell["status"]) if cell else "")
        else:
            row.append(f"**{figure}**" if library == OURS else str(figure))
    release, fastest = (
        data.against(problem, quantity, UPSTREAM),
        data.fastest_peer(problem, quantity),
    )
    figures = [
        data.floor(problem, quantity),
        release and release.median,
        fastest and fastest[1].median,
    ]
    return [*row, *("" if figure is None else f"{figure:.2f}" for figure in figures)]


def memory_row(data: Data, problem: str, quantity: str) -> list[str]:
    """Return the memory of all libraries, and how far their values are from ours."""
    cells = [data.get(problem, quantity, library) for library in data.titles]
    measured = [cell for cell in cells if cell is not None]
    errors = [None if cell is None else cell["error"] for cell in cells[1:]]
    return [
        quantity.replace("+", ", "),
        size(measured[0]["plain_bytes"]) if measured else "",
        *("" if cell is None else size(cell["bytes"]) for cell in cells),
        *("" if error is None else f"{error:.0e}" for error in errors),
    ]


def reasons(data: Data, problem: str) -> str:
    """Say why cells are empty, those of equal reason in one line."""
    found: dict[tuple[str, str], list[str]] = {}
    for quantity in data.quantities(problem):
        for library, title in data.titles.items():
            cell = data.cells.get((problem, quantity, library))
            if cell is not None and cell["reason"]:
                found.setdefault((title, cell["reason"]), []).append(quantity)
    lines = []
    for (title, reason), names in found.items():
        which = f"{len(names)} quantities" if len(names) > 6 else ", ".join(names)
        if reason != "not offered":
            lines.append(f"- {title}: {which}: {reason.replace('|', chr(92) + '|')}")
    text = "\n".join(lines)
    return f"– stands for what a library does not offer.\n\n{text}\n" if text else ""


def series_section(data: Data) -> str:
    """Return tables of the scaling."""
    parts = []
    for series in SERIES.values():
        known = {x: p for x, p in series.problems.items() if p.name in data.problems}
        if not known:
            continue
        names = list(dict.fromkeys(q for p in known.values() for q in data.quantities(p.name)))
        rows = []
        for name in names:
            for library in (OURS, UPSTREAM):
                figures = [data.overhead(p.name, name, library) for p in known.values()]
                texts = [str(figure) if figure else "" for figure in figures]
                rows.append([f"{name}, {data.titles.get(library, library)}", *texts])
        header = [series.label, *map(str, known)]
        parts += [f"### {series.title}: {series.label}\n", table(header, rows)]
    return "\n".join(["## Scaling\n", *parts]) if parts else ""


def markdown(contents: dict[str, Any], file: str, pictures: Iterable[str] = ()) -> str:
    """Return the report.

    Args:
        contents: What is in the results file.
        file: Its name.
        pictures: File names of pictures to show.
    """
    data = Data(contents)
    rates = data.environment
    parts = [
        HEAD.format(
            file=file,
            environment=environment(data),
            operations=rates["operations_per_second"] / 1e9,
            bytes=rates["bytes_per_second"] / 1e9,
        ),
        goal_section(goals(data)),
        *(f"![{name}]({name})\n" for name in pictures),
        *(problem_section(data, name) for name in data.problems if _is_problem(name)),
        series_section(data),
    ]
    return "\n".join(part for part in parts if part)


def _is_problem(name: str) -> bool:
    """Series have tables of their own."""
    return name in PROBLEMS or not any(
        name == p.name for s in SERIES.values() for p in s.problems.values()
    )


def with_families(results: Path, pictures: Iterable[str] = ()) -> str:
    """Return the report on a results file; that of the CPU ends with ``benchmark.families``."""
    from benchmark.families.report import section

    text = markdown(json.loads(results.read_text()), results.name, pictures)
    families = results.with_name("families.json")
    if results.stem != "cpu" or not families.exists():
        return text
    return text + "\n" + section(json.loads(families.read_text()))


def report(results: Path) -> Path:
    """Write the report and its pictures next to a results file; return the Markdown file."""
    from benchmark.plots import plot, plot_problem

    contents = json.loads(results.read_text())
    data = Data(contents)
    pictures = plot(data, results.parent, results.stem)
    if results.stem == "cpu" and IN_README in data.problems:
        plot_problem(data, IN_README, results.with_name("costs.png"))
    path = results.with_name("README.md" if results.stem == "cpu" else f"{results.stem}.md")
    path.write_text(with_families(results, pictures))
    return path
