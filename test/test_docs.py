"""The code in the documentation runs, and does what the text says."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import backpack
from backpack import extensions
from backpack.core.record.registry import _CACHE, REGISTRY
from backpack.extensions import HBP

DOCS = Path(__file__).parents[1] / "docs_src" / "rtd"
EXAMPLES = DOCS.parent / "examples"
PAGES = sorted(
    str(path.relative_to(DOCS))
    for folder in (DOCS, DOCS / "tasks")
    for path in folder.glob("*.rst")
)


def helper(name: str) -> Any:
    """Import a module that the site is built with; it needs no Sphinx."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "_ext" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Forget what the examples register."""
    registered = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(registered)
    _CACHE.clear()


def blocks(page: str) -> list[str]:
    """Return the code of a page that is run when the site is built."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"\.\. testcode::\n(?:    :\w+:\n)?\n((?:    .*\n|\n)+)", text)
    return [textwrap.dedent(block) for block in found]


def run(page: str) -> dict[str, Any]:
    """Run all code of a page; return its names."""
    names: dict[str, Any] = {"__name__": "page"}
    for code in blocks(page):
        exec(code, names)
    return names


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page: str) -> None:
    """The code of a page runs, asserts included; what it prints is compared by ``make docs``."""
    names = run(page)
    assert bool(blocks(page)) == (len(names) > 1)


@pytest.mark.parametrize("page", PAGES)
def test_pages_refer_to_what_exists(page: str) -> None:
    """Links to other pages, and names of the library in double backticks."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for target in re.findall(r":doc:`(?:[^`<]*<)?([\w/]+)>?`", text):
        at = DOCS if target.startswith("/") else (DOCS / page).parent
        if not target.strip("/").startswith(("gallery/", "generated/")):  # made with the site
            assert (at / f"{target.strip('/')}.rst").exists(), target
    for name in re.findall(r"``(backpack(?:\.\w+)+)``", text):
        parts = name.split(".")
        module: Any = None
        for i in range(len(parts), 0, -1):
            try:
                module = __import__(".".join(parts[:i]), fromlist=["x"])
                break
            except ImportError:
                continue
        for part in parts[i:]:
            module = getattr(module, part)


def test_readme_leads_to_pages() -> None:
    """Its links to the site are to pages and sections that exist, those to files to files."""
    root = DOCS.parents[1]
    readme = (root / "README.md").read_text(encoding="utf-8")
    used = set(re.findall(r"\]\[(\w+)\]", readme))
    targets = dict(re.findall(r"^\[(\w+)\]: (.*)$", readme, re.M))
    assert used == set(targets)
    for target in targets.values():
        page, _, section = target.removeprefix("docs_src/_build/html/").partition("#")
        if page.startswith(("gallery/", "generated/")):
            continue  # made when the site is built
        text = (DOCS / page).with_suffix(".rst").read_text(encoding="utf-8")
        titles = re.findall(r"^(.+)\n[-=]{3,}$", text, re.M)
        assert not section or section in {t.lower().replace(" ", "-") for t in titles}, target
    for file in re.findall(r"\]\((?!https?:)([^)]*)\)", readme):
        assert (root / file).exists()


def test_public_symbols_have_docstrings() -> None:
    """That they are on a page is checked when the site is built."""
    public_api = helper("public_api")
    symbols = public_api.public_symbols()
    assert {*extensions.__all__} <= {name.rpartition(".")[2] for name in symbols}
    assert public_api.missing(set(symbols)) == []


def test_what_is_missing_is_found() -> None:
    public_api = helper("public_api")
    others = set(public_api.public_symbols()) - {"backpack.extend"}
    assert public_api.missing(others) == ["backpack.extend"]


def test_every_example_has_a_group() -> None:
    """A new script is added to ``GROUPS``, which says where the gallery shows it."""
    order = helper("gallery_order").ORDER
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= set(order)
    assert len(order) == len(set(order))


def test_the_picture_of_a_step() -> None:
    """It is drawn from the code: all rooms take part, and every file in it is one."""
    way = helper("way")
    seen = way.walk()
    assert {way.room(file) for file in seen.files} == set(way.COLUMNS)
    assert all(
        (way.PACKAGE / file).exists() and way.about(way.PACKAGE / file) for file in seen.files
    )
    assert seen.first.keys() == seen.files.keys()
    assert {caller for caller, _ in seen.first.values()} <= {way.PROGRAM, *seen.files}
    svg = ElementTree.fromstring(way.picture(seen))
    assert len(svg.findall(".//rect")) == 1 + len(seen.files)
    assert len(svg.findall(".//path")) == 1 + len(seen.crossings)
    assert len({way.short(file, seen.files) for file in seen.files}) == len(seen.files)
    rooms = way.rooms(seen)
    for file in (way.PACKAGE / "core").rglob("*.py"):
        assert file.name == "__init__.py" or f"``{file.name}``" in rooms


def test_the_table_of_imports() -> None:
    """It is made from the contract: what is below may be imported, and all is somewhere."""
    way = helper("way")
    text = way.imports(DOCS.parents[1] / "pyproject.toml")
    rows = re.findall(r"\* - (.+)\n     - (.+)\n", text)[1:]
    may = {name: allowed for names, allowed in rows for name in names.split(", ")}
    assert "``core.record``" in may["``core.derivatives``"]
    assert "``core.derivatives``" not in may["``core.record``"]
    assert "each other" in may["``optim``"]
    packages = {path.name for path in way.PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert packages - {"core"} <= {name.strip("`") for name in may}


def test_every_extension_is_on_the_page() -> None:
    text = (DOCS / "extensions.rst").read_text(encoding="utf-8")
    found = re.findall(r"\.\. autoclass:: (\w+)\n\n\.\. doctest::", text)
    assert sorted(found) == sorted(extensions.__all__)


@pytest.mark.parametrize("name", extensions.__all__)
def test_facts_about_an_extension(name: str) -> None:
    """Its docstring has the savefield, a formula, and what the page promises."""
    text = getattr(extensions, name).__doc__
    instance = HBP("GGN", "EXACT", "SQRT", "BOTEV_MARTENS") if name == "HBP" else None
    savefield = (instance or getattr(extensions, name)()).savefield
    assert f"``{savefield}``" in text
    assert ".. math::" in text
    for fact in ("Shape", "Scale", "Cost", "Source"):
        assert f":{fact}: " in text


def test_dead_links_are_found(tmp_path: Path) -> None:
    """Those to pages and to anchors; what is outside of the site is left alone."""
    (tmp_path / "a.html").write_text(
        '<h1 id="top"><a href="b.html#there"></a><a href="b.html#gone"></a><a href="#top"></a>'
        '<a href="c.html"></a><img src="d.png"><a href="https://pytorch.org/x#y"></a></h1>'
    )
    (tmp_path / "b.html").write_text('<a name="there" href="a.html#bottom"></a>')
    found = helper("local_links").dead_links(tmp_path)
    assert found == [
        ("a.html", "b.html#gone"),
        ("a.html", "c.html"),
        ("a.html", "d.png"),
        ("b.html", "a.html#bottom"),
    ]


def test_words_to_look_up_are_in_messages() -> None:
    """The table of the page about messages has words of messages, which may change."""
    text = (DOCS / "when_something_goes_wrong.rst").read_text(encoding="utf-8")
    words = [w.removesuffix(" ...") for w in re.findall(r"(?<![*\w])\*([^*\n]+)\*(?![*\w])", text)]
    assert len(words) >= 12
    source = "".join(
        path.read_text(encoding="utf-8")
        for path in sorted(Path(backpack.__file__).parent.rglob("*.py"))
    )
    messages = re.sub(r'"\s*\n\s*f?"', "", source)
    assert [word for word in words if word not in messages] == []
