"""Short steps are made of what Python does, which is counted: noise of the clock hides it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from apart import run
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import backpack as package
from backpack import backpack, extend
from backpack import extensions as library
from backpack.core import features
from backpack.core.engine.intercept import InterceptBackward

ROOT = os.path.dirname(package.__file__)


def calls_of(work: Callable[[], Any]) -> tuple[int, int]:
    """Count the calls of functions of this library, and those from one of its files to another."""
    count = crossings = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count, crossings
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        count += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        if caller is not None:
            crossings += caller.f_code.co_filename != frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count, crossings


class Attention(nn.Module):
    """A model of functions: attention, and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 24), nn.Linear(8, 3)
        self.position = nn.Parameter(torch.rand(1, 6, 24))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.squeeze(1)) + self.position
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in x.chunk(3, dim=-1))
        scores = torch.softmax(q @ k.transpose(-2, -1) / 2, dim=-1)
        return self.last((scores @ v).transpose(1, 2).flatten(2).mean(1))


class Step:
    """The example of the README, or a recorded model: a forward and a backward pass."""

    def __init__(self, is_recorded: bool) -> None:
        layers = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
        self.model: nn.Module
        if is_recorded:
            self.model = extend(Attention(), use_converter="record")
        else:
            self.model = extend(nn.Sequential(*layers))
        self.lossfunc = extend(nn.CrossEntropyLoss())
        self.data = torch.rand(8, 1, 6, 6), torch.randint(3, (8,))

    def forward(self) -> None:
        X, y = self.data
        self.loss = self.lossfunc(self.model(X), y)

    def backward(self) -> None:
        self.loss.backward()


# A little more than is counted: short steps are not to become longer without notice, nor to wander
# more between files than a reader can follow. Comprehensions
# are calls before Python 3.12.
@pytest.mark.parametrize(
    ("extensions", "forward", "backward", "crossings"),
    [
        ("", 105, 25, 10),
        ("Variance", 105, 305, 122),
        ("DiagGGNExact", 105, 385, 128),
        ("BatchGrad DiagGGNExact KFAC", 105, 775, 249),
        ("recorded", 970, 50, 20),
        ("recorded BatchGrad", 970, 1230, 475),
    ],
    ids=["none", "first order", "second order", "all", "recorded", "recorded, first order"],
)
def test_calls_of_a_step(extensions: str, forward: int, backward: int, crossings: int) -> None:
    """In a process of its own: what other tests have left is looked at in each step."""
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(ROOT)}
    output = run(sys.executable, __file__, *extensions.split(), env=environment)
    found = list(map(int, output.split()))
    if not features._TAKES_VARIABLES:  # older versions of torch, for which functions stand in
        backward, crossings = backward + 5, crossings + 2
    assert found[0] <= forward and found[1] <= backward and found[2] <= crossings, found


@pytest.mark.parametrize("converter", [False, "trace"])
def test_functions_that_our_mode_sees(converter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of a context those of the program, and not each look at a tensor of its records."""
    seen: list[str] = []

    class Noting(InterceptBackward):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs)

    monkeypatch.setattr(package, "InterceptBackward", Noting)
    model = nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3))
    model, lossfunc = extend(model, use_converter=converter), extend(nn.CrossEntropyLoss())
    x, y, other = torch.rand(6, 4), torch.randint(3, (6,)), torch.rand(6, 3)
    lossfunc(model(x), y).backward()
    assert not seen
    with torch.device("cpu"), backpack(library.DiagGGNExact()):
        modes = _get_current_function_mode_stack()
        loss = lossfunc(model(x), y)
        with pytest.raises(RuntimeError):
            model(other)
        assert _get_current_function_mode_stack() == modes
        loss.backward()
    assert seen == ["linear", "sigmoid", "linear", "cross_entropy", "linear", "backward"]


def count(names: list[str]) -> None:
    """Print the calls of a forward pass; those of a backward pass, and how many change the file."""
    step = Step("recorded" in names)
    exts = [getattr(library, name) for name in names if name != "recorded"]
    for _ in range(3):  # what is found out once
        step.forward()
        with backpack(*[ext() for ext in exts]):
            step.backward()
    print(calls_of(step.forward)[0])
    if not exts:
        print(*calls_of(step.backward))
        return
    with backpack(*[ext() for ext in exts]):
        print(*calls_of(step.backward))


if __name__ == "__main__":
    count(sys.argv[1:])
