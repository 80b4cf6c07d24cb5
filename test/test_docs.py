"""The code in the documentation runs, and does what the text says."""

from __future__ import annotations

import copy
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
from backpack.core.registry import _CACHE, REGISTRY

DOCS = Path(__file__).parents[1] / "docs_src" / "rtd"


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Forget what the examples register."""
    registered = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(registered)
    _CACHE.clear()


def blocks(page: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", text)
    return [textwrap.dedent(block) for block in found]


def test_write_a_rule() -> None:
    (code,) = blocks("write_a_rule.rst")
    names: dict[str, Any] = {}
    exec(code, names)
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


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.rst")))
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
