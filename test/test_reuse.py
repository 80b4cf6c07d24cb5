"""What was found out about a model in one step is reused in the next one only if it still holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.core.derivatives.following import Following

N = 5


class Turning(nn.Module):
    """Moves the samples by numbers, of its own and given: column n of the result is one of x."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shift = 0
        self.shifts = [0]
        self.register_buffer("table", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        by = self.shift + sum(self.shifts) + int(self.table) + int(more.sum())
        return x.roll(by, 0).T


class Plain(Turning):
    """Has no attribute but those that can be compared."""

    def __init__(self) -> None:
        super().__init__()
        del self.shifts

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        return x.roll(self.shift + int(self.table) + int(more.sum()), 0).T


class Model(nn.Module):
    def __init__(self, turning: nn.Module) -> None:
        super().__init__()
        self.turning, self.layer = turning, nn.Linear(3, 2)
        self.more = torch.zeros(2, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.turning(x, self.more).T)


def set_shift(model: Any) -> None:
    model.turning.shift = 2


def extend_list(model: Any) -> None:
    model.turning.shifts.append(2)


def change_buffer(model: Any) -> None:
    model.turning.table += 2


def replace_buffer(model: Any) -> None:
    model.turning.table = torch.full((1,), 2)


def change_argument(model: Any) -> None:
    model.more += 1


def replace_argument(model: Any) -> None:
    model.more = torch.ones(2, dtype=torch.long)


def step(model: nn.Module, x: Tensor, y: Tensor, lossfunc: nn.Module) -> list[Tensor]:
    with backpack(extensions.BatchGrad()):
        lossfunc(model(x), y).backward()
    found: Any = [p.grad_batch for p in model.parameters()]  # type: ignore[attr-defined]
    return found


def truth(model: Any, x: Tensor, y: Tensor, by: int) -> list[Tensor]:
    """Gradients of the losses of the rows that come from each sample."""
    parameters = [*model.parameters()]
    rows = [
        torch.autograd.grad((model.layer(x[n]) - y[(n + by) % N]).square().sum(), parameters)
        for n in range(N)
    ]
    return [torch.stack(each) for each in zip(*rows, strict=True)]


CHANGES = [set_shift, change_buffer, replace_buffer, change_argument, replace_argument]


@pytest.mark.parametrize(
    ("make", "change"),
    [*((make, change) for make in (Turning, Plain) for change in CHANGES), (Turning, extend_list)],
)
def test_a_step_after_a_change(make: type[Turning], change: Callable[[Any], None]) -> None:
    """Where samples go depends on values, and on the state of a module."""
    torch.manual_seed(0)
    model = extend(Model(make()).double(), use_converter="record")
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    x, y = torch.rand(N, 3).double(), torch.rand(N, 2).double()
    for by in (0, 2):
        for _ in range(2):
            for found, true in zip(
                step(model, x, y, lossfunc), truth(model, x, y, by), strict=True
            ):
                torch.testing.assert_close(found, true)
        change(model)


@pytest.mark.parametrize(("make", "count"), [(Turning, 3), (Plain, 1)])
def test_an_answer_that_is_reused(
    make: type[Turning], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list may have changed: it is found out again what a module does that has one."""
    model = extend(Model(make()), use_converter="record")
    lossfunc, places = extend(nn.MSELoss()), Following.places
    searches: list[nn.Module] = []

    def search(following: Following) -> Any:
        searches.append(following.call.module)
        return places(following)

    monkeypatch.setattr(Following, "places", search)
    for _ in range(3):
        step(model, torch.rand(N, 3), torch.rand(N, 2), lossfunc)
    assert searches.count(model.turning) == count
