"""``reduction="none"`` with a single entry: a scalar loss, whatever its number of axes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions

EXTENSIONS: list[Callable[[], Any]] = [
    extensions.BatchGrad,
    extensions.DiagGGNExact,
    lambda: extensions.DiagGGNMC(mc_samples=2),
    extensions.BatchDiagGGNExact,
    extensions.DiagHessian,
    extensions.BatchDiagHessian,
    extensions.SqrtGGNExact,
    lambda: extensions.KFAC(mc_samples=2),
    extensions.KFLR,
    extensions.KFRA,
    extensions.GGNMP,
    extensions.HMP,
    lambda: extensions.PCHMP(modify="clip"),
]
LOSSES: dict[str, tuple[Any, int, Callable[[], Tensor]]] = {
    "cross entropy": (nn.CrossEntropyLoss, 3, lambda: torch.tensor([1])),
    "squared error": (nn.MSELoss, 1, lambda: torch.randn(1, 1)),
    "logistic": (nn.BCEWithLogitsLoss, 1, lambda: torch.ones(1, 1)),
}


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Compute in float64."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def results(model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor, finish: Any) -> list[Any]:
    found = []
    for make in EXTENSIONS:
        ext, own, torch_loss = make(), extend(copy.deepcopy(model)), extend(copy.deepcopy(loss))
        torch.manual_seed(1)
        value = finish(torch_loss(own(X), y))
        with backpack(ext):
            value.backward()
        for p in own.parameters():
            value = getattr(p, ext.savefield)
            found.append(value(torch.ones(1, *p.shape)) if callable(value) else value)
    return found


@pytest.mark.parametrize("finish", ["itself", "sum", "first"])
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_sum(name: str, finish: str) -> None:
    loss, outputs, target = LOSSES[name]
    finishes = {"itself": lambda x: x, "sum": lambda x: 3 * x.sum(), "first": lambda x: x[0]}
    model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, outputs))
    batch = torch.randn(1, 4), target()
    factor = 3 if finish == "sum" else 1
    expected = results(model, loss(reduction="sum"), *batch, lambda x: factor * x)
    found = results(model, loss(reduction="none"), *batch, finishes[finish])
    torch.testing.assert_close(found, expected)


def test_several_entries_are_refused() -> None:
    model, loss = extend(nn.Linear(4, 3)), extend(nn.CrossEntropyLoss(reduction="none"))
    value = loss(model(torch.randn(2, 4)), torch.tensor([0, 1])).sum()
    with backpack(extensions.DiagGGNExact()), pytest.raises(ValueError, match="scalar loss"):
        value.backward()
