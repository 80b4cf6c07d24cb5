"""The way of one backward pass, drawn from what a profiler sees, and the rooms of the code.

Nothing here names a file or a function of the library: what is renamed or shortened there is drawn
as it is at the next build.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import backpack
from backpack.extensions import KFAC, BatchGrad, DiagGGNExact

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(backpack.__file__).parent
PROGRAM = "your program"
# Rooms of the picture, from the left; what all of them use is below the program.
SHARED = "for all"
COLUMNS = (SHARED, "extensions", "engine", "derivatives", "record")
EXTENSIONS = (BatchGrad, DiagGGNExact, KFAC)


class Way(NamedTuple):
    """What a profiler has seen.

    Attributes:
        files: Number of calls of the functions of each file, in the order of the first call.
        first: The file that each file was first called from, and the name of the function.
        crossings: Number of calls from one file to another.
    """

    files: Counter[str]
    first: dict[str, tuple[str, str]]
    crossings: Counter[tuple[str, str]]


def file_of(frame: FrameType) -> str | None:
    """Return the file of a function of the library, None for others."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


@cache
def walk() -> Way:
    """Follow a forward and a backward pass of a small network through the library."""
    torch.manual_seed(0)
    model = backpack.extend(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    loss_function = backpack.extend(nn.CrossEntropyLoss())
    X, y = torch.rand(8, 4), torch.randint(3, (8,))
    extensions = [extension() for extension in EXTENSIONS]
    way = Way(Counter(), {}, Counter())

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = file_of(frame) if event == "call" else None
        if file is None:
            return
        caller, above = None, frame.f_back
        while above is not None and caller is None:
            caller, above = file_of(above), above.f_back
        way.files[file] += 1
        if caller != file:
            way.first.setdefault(file, (caller or PROGRAM, frame.f_code.co_name))
            way.crossings[caller or PROGRAM, file] += 1

    def step() -> None:
        with backpack.backpack(*extensions):
            loss_function(model(X), y).backward()

    step()  # what is done once
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return way


def room(file: str) -> str:
    """Return the column of a file."""
    parts = [part for part in file.split("/")[:-1] if part in COLUMNS]
    return parts[-1] if parts else SHARED


def short(file: str, files: Collection[str]) -> str:
    """Return the name of a file without its ending, with its folder where others have that name."""
    path = Path(file)
    if path.stem == "__init__":
        return path.parent.name or PACKAGE.name
    alone = sum(Path(other).stem == path.stem for other in files) == 1
    return path.stem if alone or path.parent == Path() else f"{path.parent.name}/{path.stem}"


def about(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].rstrip(".")


# ---------------------------------------------------------------------- the picture

WIDTH, HEIGHT, GAP_X, GAP_Y, TOP, LEFT = 148, 21, 34, 8, 26, 18


def places(way: Way) -> dict[str, tuple[float, float]]:
    """Return the upper left corner of each file's box: a column for each room, in order."""
    filled = dict.fromkeys(COLUMNS, 0) | {SHARED: 2}  # below the program
    found = {PROGRAM: (float(LEFT), float(TOP))}
    for file in way.files:
        column = room(file)
        x, y = COLUMNS.index(column) * (WIDTH + GAP_X), filled[column] * (HEIGHT + GAP_Y)
        found[file] = float(LEFT + x), float(TOP + y)
        filled[column] += 1
    return found


def arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return the path from one box to another one: from side to side, or around."""
    (x0, y0), (x1, y1) = ((x, y + HEIGHT / 2) for x, y in (start, end))
    if x0 == x1:
        bow = 14 + abs(y1 - y0) * 0.06
        return f"M{x0:g} {y0:g}C{x0 - bow:g} {y0:g} {x1 - bow:g} {y1:g} {x1:g} {y1:g}"
    forward = x1 > x0
    x0, x1 = (x0 + WIDTH, x1) if forward else (x0, x1 + WIDTH)
    middle = (x0 + x1) / 2
    return f"M{x0:g} {y0:g}C{middle:g} {y0:g} {middle:g} {y1:g} {x1:g} {y1:g}"


def picture(way: Way) -> str:
    """Draw the files as boxes in the order of their first call, and who calls whom."""
    at = places(way)
    width = LEFT + len(COLUMNS) * (WIDTH + GAP_X) - GAP_X + 4
    height = max(y for _, y in at.values()) + HEIGHT + 4
    first = {(caller, file) for file, (caller, _) in way.first.items()}
    label = f"{len(way.files)} files of the library and who calls whom in one step"
    parts = [
        f'<figure class="idea way"><svg class="idea" viewBox="0 0 {width:g} {height:g}" role="img"',
        f' font-size="11" font-family="inherit" aria-label="{label}">',
        '<defs><marker id="way-to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6"',
        ' markerHeight="6" orient="auto"><path class="idea-out" d="M0 0L8 4L0 8z"/></marker>',
        "</defs>",
    ]
    edges = sorted(way.crossings.items(), key=lambda edge: edge[0] in first)
    for (caller, file), count in edges:
        told = f"{caller} → {file}: {count} calls"
        style = 'class="way-other" stroke-width="0.8"'
        if (caller, file) in first:
            told += f", first {way.first[file][1]}"
            style = 'class="way-first" stroke-width="1.4" marker-end="url(#way-to)"'
        path = f'<path {style} d="{arrow(at[caller], at[file])}">'
        parts.append(f"{path}<title>{escape(told)}</title></path>")
    parts += headings(at)
    for number, file in enumerate((PROGRAM, *way.files)):
        x, y = at[file]
        name = file if number == 0 else f"{number} {short(file, way.files)}"
        told = file if number == 0 else f"{file}: {about(PACKAGE / file)}; {way.files[file]} calls"
        parts.append(
            f'<g><title>{escape(told)}</title><rect class="idea-box" x="{x:g}" y="{y:g}" rx="4"'
            f' width="{WIDTH}" height="{HEIGHT}"/><text class="idea-text" x="{x + 6:g}"'
            f' y="{y + 14:g}">{escape(name)}</text></g>'
        )
    return "\n".join([*parts, "</svg></figure>", ""])


def headings(at: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Write the names of the rooms above their first boxes."""
    named = set[str]()
    for file, (x, y) in at.items():
        name = "" if file == PROGRAM else room(file)
        if name and name not in named:
            named.add(name)
            text = f'<text class="idea-text" font-weight="bold" x="{x:g}" y="{y - 8:g}">'
            yield f"{text}{escape(name)}</text>"


# ---------------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Sequence[Sequence[str]], widths: str) -> str:
    """Return a table in reST."""
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", ""]
    for row in (head, *rows):
        lines += [f"   {'*' if i == 0 else ' '} - {cell}".rstrip() for i, cell in enumerate(row)]
    return "\n".join(lines) + "\n"


def counts(way: Way) -> str:
    """Say how long the way is."""
    names = ", ".join(f"``{extension.__name__}``" for extension in EXTENSIONS)
    return (
        f"One step of a network with two linear layers and {names} makes {sum(way.files.values())} "
        f"calls of functions of the library, in {len(way.files)} files.\n"
    )


def rooms(way: Way) -> str:
    """Return what each file of the core is about, and its place on the way."""
    numbers = {file: str(i) for i, file in enumerate(way.files, 1)}
    parts = []
    for folder in ("core", "core/record", "core/derivatives", "core/engine"):
        paths = sorted((PACKAGE / folder).glob("*.py"))
        titles = {p.relative_to(PACKAGE).as_posix(): about(p) for p in paths}
        title = titles.pop(f"{folder}/__init__.py", "")
        rows = [
            [f"``{Path(file).name}``", text, numbers.get(file, "")] for file, text in titles.items()
        ]
        parts.append(f"``backpack/{folder}``: {title[:1].lower() + title[1:]}.\n")
        parts.append(table(["file", "what it has", "number"], rows, "22 70 8"))
    return "\n".join(parts)


def imports(pyproject: Path) -> str:
    """Return what each package may import, from the contract that ``make lint`` checks."""
    settings: dict[str, Any] = tomllib.loads(pyproject.read_text("utf-8"))
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    rows: list[list[str]] = []
    below: list[str] = []
    for layer in reversed(contract["layers"]):  # names with a colon between may import each other
        names = [name.strip().removeprefix("backpack.") for name in re.split("[:|]", layer)]
        names = [f"``{name}``" for name in names]
        may = [*(["each other"] if ":" in layer else []), *below] or ["nothing of the library"]
        rows.insert(0, [", ".join(names), ", ".join(may)])
        below = names + below
    exceptions = [f"``{line}``" for line in contract.get("ignore_imports", [])]
    text = table(["packages and files", "may import"], rows, "35 65")
    return text + (f"\nExcept for {', '.join(exceptions)}.\n" if exceptions else "")
