"""The code in the documentation runs, and does what the text says."""

from __future__ import annotations

import copy
import importlib.util
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from torch import nn

from backpack import backpack, extend, extensions
from backpack.core.record.registry import _CACHE, REGISTRY
from backpack.extensions import HBP

DOCS = Path(__file__).parents[1] / "docs_src" / "rtd"
EXAMPLES = DOCS.parent / "examples"
PAGES = sorted(path.name for path in DOCS.glob("*.rst"))


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


def test_write_a_rule() -> None:
    names = run("write_a_rule.rst")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), names["Scale"](4), nn.Tanh(), nn.Linear(4, 2)).double()
    nn.init.normal_(model[1].weight)
    X, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(2, (5,))
    reference = copy.deepcopy(model)
    loss = extend(nn.CrossEntropyLoss())(extend(model)(X), y)
    quantities = {
        extensions.BatchGrad: oracle.batch_grad,
        extensions.BatchL2Grad: oracle.batch_l2,
        extensions.Variance: oracle.variance,
        extensions.DiagGGNExact: oracle.ggn_diag,
        extensions.DiagHessian: oracle.hessian_diag,
    }
    products = {extensions.GGNMP: oracle.ggn_blocks, extensions.HMP: oracle.hessian_blocks}
    with backpack(*(ext() for ext in (*quantities, *products)), extensions.KFAC()):
        loss.backward()
    for ext, truth in quantities.items():
        expected = truth(reference, nn.CrossEntropyLoss(), X, y)
        for p, value in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(getattr(p, ext().savefield), value)
    for ext, truth in products.items():
        for p, block in zip(
            model.parameters(), truth(reference, nn.CrossEntropyLoss(), X, y), strict=True
        ):
            units = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
            product = getattr(p, ext().savefield)(units)
            torch.testing.assert_close(product.reshape(block.shape), block)


@pytest.mark.parametrize("page", PAGES)
def test_pages_refer_to_what_exists(page: str) -> None:
    """Links to other pages, and names of the library in double backticks."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for target in re.findall(r":doc:`(\w+)`", text):
        assert (DOCS / f"{target}.rst").exists()
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
