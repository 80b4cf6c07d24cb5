"""Short steps are made of what Python does, which is counted: noise of the clock hides it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import backpack as package
from backpack import backpack, extend
from backpack.core.engine.backward_pass import BackwardPass
from backpack.core.record import tape
from backpack.extensions import KFAC, BatchGrad, DiagGGNExact, Variance

ROOT = os.path.dirname(package.__file__)


def calls_of(work: Callable[[], Any]) -> int:
    """Count the calls of functions of this library."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(ROOT)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


class Step:
    """The example of the README: a forward and a backward pass."""

    def __init__(self) -> None:
        layers = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
        self.model = extend(nn.Sequential(*layers))
        self.lossfunc = extend(nn.CrossEntropyLoss())
        self.data = torch.rand(8, 1, 6, 6), torch.randint(3, (8,))

    def forward(self) -> None:
        X, y = self.data
        self.loss = self.lossfunc(self.model(X), y)

    def backward(self) -> None:
        self.loss.backward()


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rules of users, and failed passes that the errors of other tests hold."""
    monkeypatch.setattr(tape, "_ruled", set())
    monkeypatch.setattr(BackwardPass, "_running", {})


# A little more than is counted: short steps are not to become longer without notice. Comprehensions
# are calls before Python 3.12.
@pytest.mark.parametrize(
    ("extensions", "forward", "backward"),
    [
        ([], 115, 25),
        ([Variance], 115, 325),
        ([DiagGGNExact], 115, 495),
        ([BatchGrad, DiagGGNExact, KFAC], 115, 995),
    ],
    ids=["none", "first order", "second order", "all"],
)
def test_calls_of_a_step(extensions: list[Any], forward: int, backward: int) -> None:
    step = Step()
    for _ in range(3):  # what is found out once
        step.forward()
        with backpack(*[ext() for ext in extensions]):
            step.backward()
    assert calls_of(step.forward) <= forward
    if not extensions:
        assert calls_of(step.backward) <= backward
        return
    with backpack(*[ext() for ext in extensions]):
        assert calls_of(step.backward) <= backward
