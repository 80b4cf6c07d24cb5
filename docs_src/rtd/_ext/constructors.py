"""Lines that say nothing on a page: that above the arguments of a constructor, and Python's own."""

from __future__ import annotations

from inspect import getdoc
from typing import Any

from sphinx.application import Sphinx


def leave_out_first_line(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Take the first line of ``__init__`` out of the text of its class, which precedes it there."""
    if lines[:1] and lines[0].startswith("Alias for field number "):  # of a named tuple
        lines.clear()
    if what not in ("class", "exception"):
        return
    if issubclass(obj, tuple):  # a line that Python has written
        lines[:] = [line for line in lines if not line.startswith("Create new instance of ")]
    first = (getdoc(obj.__init__) or "").partition("\n")[0]
    if first and first in lines[1:]:
        lines.remove(first)


def setup(app: Sphinx) -> dict[str, Any]:
    """Be there before the docstring is read as one of Google's style."""
    app.connect("autodoc-process-docstring", leave_out_first_line, priority=100)
    return {"parallel_read_safe": True}
