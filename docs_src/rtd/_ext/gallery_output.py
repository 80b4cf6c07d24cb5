"""What each program of the gallery has to show, and may not leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gallery_order import ORDER
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError


def check_output(app: Sphinx) -> None:
    """Refuse programs that show neither picture nor table, or leave a file where they run."""
    if not app.config.sphinx_gallery_conf["plot_gallery"]:
        return
    for page in Path(app.srcdir, "gallery").rglob("*.rst"):
        text = page.read_text(encoding="utf-8")
        if page.stem in ORDER and ".. image-sg::" not in text and "────" not in text:
            raise ExtensionError(f"{page.stem} ends with neither a picture nor a table.")
    for file in Path(app.srcdir, "generated", "examples").rglob("*.*"):
        if file.stem not in (*ORDER, "GALLERY_HEADER"):
            raise ExtensionError(f"A program of the gallery leaves a file: {file.name}.")


def setup(app: Sphinx) -> dict[str, Any]:
    """Look at the pages when the programs have run."""
    app.connect("builder-inited", check_output, priority=900)
    return {"parallel_read_safe": True}
