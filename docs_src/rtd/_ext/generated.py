"""Pages and pictures that are made from the code and from measurements, at every build."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mistakes
import way
from costs import NETWORKS, TASKS, cost_rows, one_screen
from figures_of_peers import comparison
from gallery_order import sort_into_groups
from matplotlib import pyplot as plt
from sphinx.application import Sphinx

from backpack import support
from backpack.core.engine import propagations
from backpack.extensions import HBP
from backpack.support import all_extensions
from benchmark import plots
from benchmark.figures import Data
from benchmark.report import with_families

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmark" / "results" / "cpu.json"

PROPAGATED = {
    type(None): "gradient",
    propagations.ExactFactor: "exact factor :math:`S`",
    propagations.SampledFactor: r"sampled factor :math:`\tilde S`",
    propagations.HessianFactors: "signed factors of the Hessian",
    propagations.BatchAveraged: "batch average",
    propagations.Blocks: "on demand",
}
EXTRACTED = {
    "as is": ("individual", "factored"),
    "squared": ("square", "batch_square"),
    "its norm": ("square_norm",),
    "Kronecker factors": ("gram",),
    "product": ("product",),
}


def idea() -> str:
    """Return the table of what is propagated × what is extracted."""
    exts = [ext for ext in all_extensions() if type(ext) is not HBP]  # the family of three others
    rows = [["propagated ↓ extracted →", *EXTRACTED]]
    for propagation, title in PROPAGATED.items():
        names = [
            [
                f":class:`~backpack.extensions.{type(ext).__name__}`"
                for ext in exts
                if type(ext.propagation) is propagation and ext.needs[0] in needs
            ]
            for needs in EXTRACTED.values()
        ]
        rows.append([title, *(" |br| ".join(cell) for cell in names)])
    placed = "".join(cell for row in rows for cell in row).count(":class:")
    if placed != len(exts):
        raise ValueError("PROPAGATED or EXTRACTED has no place for an extension.")
    return list_table(rows, "idea")


def list_table(rows: list[list[str]], name: str) -> str:
    """Return a table in reST, with a header row and a header column."""
    lines = [".. |br| raw:: html", "", "   <br>", "", ".. list-table::", f"   :class: {name}"]
    lines += ["   :header-rows: 1", "   :stub-columns: 1", ""]
    for row in rows:
        lines += [f"   {'*' if i == 0 else ' '} - {cell}".rstrip() for i, cell in enumerate(row)]
    return "\n".join(lines) + "\n"


def costs_of(task: str) -> str:
    """Return the costs of what a task takes, for the end of its page."""
    rows = cost_rows(Data(json.loads(RESULTS.read_text(encoding="utf-8"))), TASKS[task])
    header = ["time / memory", *NETWORKS.values()]
    return f"{COSTS_ARE}\n{list_table([header, *rows], 'costs')}"


COSTS_ARE = """\
Time and memory of a step, relative to those of a plain forward and backward pass (– takes too long
or too much memory to be measured). :doc:`/generated/benchmark` says which networks these are.
"""


def support_matrix(summary: bool) -> str:
    """Return the table of modules and extensions, explanations first."""
    table, explanations = support.report(markdown=True, summary=summary).split("\n\n")
    return f"{explanations}\n\n{table}\n"


def natural_mistakes() -> str:
    """Run the mistakes of the tests; return the programs and what they are told."""
    lines = code_block("python", mistakes.preamble())
    for mistake in mistakes.MISTAKES:
        told = textwrap.fill(f"{mistake.kind.__name__}: {mistake.message()}", 78)
        lines += [mistake.title, "-" * len(mistake.title), ""]
        code = re.sub(r"  # type: ignore\[.*\]", "", mistake.code())
        lines += [*code_block("python", code), *code_block("text", told)]
    return "\n".join(lines)


def code_block(language: str, code: str) -> list[str]:
    """Return the lines of a block of code in reST."""
    return [f".. code-block:: {language}", "", textwrap.indent(code, "    "), ""]


def without_relative_links(text: str) -> str:
    """Replace links to files of the repository, which are no pages here, by their text."""
    return re.sub(r"(?<!!)\[([^]]+)\]\((?!https?:|#|mailto:)[^)]*\)", r"\1", text)


def performance(folder: Path) -> str:
    """Return one screen of costs, plots of the same networks, all figures, and the method."""
    contents = json.loads(RESULTS.read_text(encoding="utf-8"))
    data = Data(contents)
    pictures = []
    for problem in NETWORKS:
        name = f"benchmark-{problem}.png"
        plots.plot_problem(data, problem, folder / name)
        pictures.append(
            f"### {data.problems[problem]['title']}\n\n![Time of all quantities]({name})\n"
        )
    report = with_families(RESULTS)
    reading = report[report.index("Times are ratios") : report.index("[How it is measured]")]
    report = report[report.index("## Goals") :]
    report = re.sub(r"!\[cpu-\w+\.png\]\(cpu-\w+\.png\)\n", "", report)
    report = re.sub("(?<=<summary>).*(?=</summary>)", with_code, report)
    method = (ROOT / "benchmark" / "README.md").read_text(encoding="utf-8")
    method = method.replace("# The benchmark\n", "## Method\n").replace("\n## ", "\n### ")
    reading = f"## How to read the figures below\n\n{reading}"
    parts = [one_screen(data), "## Plots\n", *pictures, reading, report, method]
    return without_relative_links("\n".join(parts))


def with_code(match: re.Match[str]) -> str:
    """Write what is in backticks as HTML, since Markdown in HTML is left alone."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", match[0])


def draw_table(path: Path) -> None:
    """Draw what stands in the gallery for programs that end in a table."""
    figure, axes = plt.subplots(figsize=(4, 2.8))
    for row in range(6):
        for column in range(3):
            color = "0.35" if row == 0 else "0.75"
            axes.plot([1.2 * column, 1.2 * column + 0.7], [-row, -row], color=color, linewidth=5)
    axes.axhline(-0.5, color="0.35", linewidth=1)
    axes.margins(0.25)
    axes.axis("off")
    figure.savefig(path)
    plt.close(figure)


def repository_file(name: str) -> Callable[[Path], str]:
    """Return the function that reads a Markdown file of the repository."""
    return lambda _: without_relative_links((ROOT / name).read_text(encoding="utf-8"))


# file -> what makes its contents; `.inc` is included into a page
FILES: dict[str, Callable[[Path], str]] = {
    "idea.inc.rst": lambda _: idea(),
    "way.inc.html": lambda _: way.picture(way.walk()),
    "counts.inc.rst": lambda _: way.counts(way.walk()),
    "rooms.inc.rst": lambda _: way.rooms(way.walk()),
    "imports.inc.rst": lambda _: way.imports(ROOT / "pyproject.toml"),
    "support_summary.inc.md": lambda _: support_matrix(summary=True),
    "support.inc.md": lambda _: support_matrix(summary=False),
    "comparison.inc.md": lambda _: comparison(Data(json.loads(RESULTS.read_text("utf-8")))),
    **{f"costs_{task}.inc.rst": partial(lambda task, _: costs_of(task), task) for task in TASKS},
    "mistakes.inc.rst": lambda _: natural_mistakes(),
    "benchmark.md": performance,
    "changelog.md": repository_file("CHANGELOG.md"),
    "contributing.md": repository_file("CONTRIBUTING.md"),
}


def generate(app: Sphinx) -> None:
    """Write all files; those that do not change keep their date."""
    folder = Path(app.srcdir) / "generated"
    folder.mkdir(exist_ok=True)
    sort_into_groups(ROOT / "docs_src" / "examples", folder / "examples")
    draw_table(folder / "table.png")
    for name, make in FILES.items():
        text, path = make(folder), folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Generate before anything is read, the gallery included."""
    app.connect("builder-inited", generate, priority=100)
    return {"parallel_read_safe": True}
