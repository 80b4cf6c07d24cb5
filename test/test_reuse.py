"""What was found out about a model in one step is reused in the next one only if it still holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.core.derivatives.following import Following

N = 5


class Config:
    """Options, as models of libraries have them."""

    def __init__(self) -> None:
        self.of_layers = {"shift": 0}


class Turning(nn.Module):
    """Moves the samples by numbers, of its own and given: column n of the result is one of x."""

    table: Tensor
    by = 0

    def __init__(self) -> None:
        super().__init__()
        self.shift = 0
        self.shifts = [0]
        self.config = Config()
        self.array = np.zeros(1, int)
        self.register_buffer("table", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        return x.roll(self.own_shift() + int(more.sum()), 0).T

    def own_shift(self) -> int:
        own = self.by + self.shift + sum(self.shifts) + self.config.of_layers["shift"]
        return own + int(self.table) + int(self.array[0])


class Plain(Turning):
    """Has no attribute but those that can be compared."""

    array = [0]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        del self.array


class Alone(Plain):
    """Reads no numbers but those of its own."""

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        return x.roll(self.own_shift(), 0).T


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


def change_option(model: Any) -> None:
    model.turning.config.of_layers["shift"] = 2


def change_array(model: Any) -> None:
    model.turning.array[0] = 2


def change_class(model: Any) -> None:
    type(model.turning).by = 2


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


OF_ITSELF = [set_shift, extend_list, change_option, change_array, change_class]
CHANGES = [*OF_ITSELF, change_buffer, replace_buffer, change_argument, replace_argument]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        *((make, change) for make in (Turning, Plain) for change in CHANGES),
        *((Alone, change) for change in OF_ITSELF),
    ],
)
def test_a_step_after_a_change(
    make: type[Turning], change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where samples go depends on values, and on the state of a module."""
    for name in ("by", "array"):  # of classes, to be as they were afterwards
        if hasattr(make, name):
            monkeypatch.setattr(make, name, copy.copy(getattr(make, name)))
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


@pytest.mark.parametrize(("make", "count"), [(Turning, 3), (Plain, 1), (Alone, 1)])
def test_an_answer_that_is_reused(
    make: type[Turning], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array may have changed: it is found out again what a module does that has one."""
    model = extend(Model(make()), use_converter="record")
    lossfunc, places = extend(nn.MSELoss()), Following.places
    searches: list[nn.Module] = []

    def search(following: Following) -> Any:
        searches.append(following.call.module)
        return places(following)

    monkeypatch.setattr(Following, "places", search)
    for _ in range(3):
        # of data that need no gradient, functions of the module would be recorded
        step(model, torch.rand(N, 3).requires_grad_(), torch.rand(N, 2), lossfunc)
    assert searches.count(model.turning) == count
