"""The check that links inside of the site lead to what exists, without which the build fails."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from sphinx.application import Sphinx


class Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, text: str):
        super().__init__()
        self.links: dict[str, None] = {}
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "id" or (name == "name" and tag == "a")):
                self.anchors.add(value)
            elif value and name in ("href", "src"):
                self.links[value] = None


def dead_links(site: Path) -> list[tuple[str, str]]:
    """Return page and target of all links inside of a site that lead nowhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            known = pages[target].anchors if target in pages else None
            if not target.exists() or (anchor and known is not None and anchor not in known):
                found.append((str(path.relative_to(site)), link))
    return found


def check(app: Sphinx, exception: Exception | None) -> None:
    """Warn of each dead link, which is an error in ``make docs``."""
    from sphinx.util import logging

    if exception is None and app.builder.name == "html":
        for page, link in dead_links(Path(app.outdir).resolve()):
            logging.getLogger(__name__).warning("%s: the link to %s is dead", page, link)


def setup(app: Sphinx) -> dict[str, Any]:
    """Check when all is written."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True}
