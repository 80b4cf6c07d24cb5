"""The most natural mistakes lead to messages that name the object and the remedy."""

from __future__ import annotations

import _thread
import inspect
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mistakes import MISTAKES, Mistake
from torch import Tensor, nn

import backpack
from backpack import extend
from backpack.extensions import KFAC, DiagGGNExact
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.warning import warn


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.program.__name__)
def test_message_names_the_object_and_the_remedy(mistake: Mistake) -> None:
    message = mistake.message()
    assert mistake.names in message
    assert mistake.remedy in message


def test_the_table_is_long_enough() -> None:
    assert len({mistake.title for mistake in MISTAKES}) == len(MISTAKES) >= 20


def test_program_that_is_told_nothing_is_found() -> None:
    silent = Mistake("silent", lambda: None, UserWarning, "", "")
    with pytest.raises(AssertionError, match=r"silent: told \[\]"):
        silent.message()


def elsewhere() -> None:
    warnings.warn("told here", UserWarning, stacklevel=1)


def test_warning_at_a_line_that_is_not_of_the_program_is_found() -> None:
    far = Mistake("far", elsewhere, UserWarning, "", "")
    with pytest.raises(AssertionError, match=r"far: told elsewhere, .*told here"):
        far.message()


def test_warning_in_a_thread_of_autograd_is_told_where_backward_is_called() -> None:
    """Nodes of a GPU run in a thread that has no line of the program."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")

        def in_a_thread(_: Tensor) -> None:
            _thread.start_new_thread(warn, ("told from afar",))
            for _ in range(1000):
                time.sleep(0.0 if told else 0.01)

        x = torch.ones((), requires_grad=True)
        x.register_hook(in_a_thread)
        (2 * x).backward()
        line = inspect.stack()[0].lineno
    (one,) = told
    assert (one.filename, one.lineno) == (__file__, line - 1)


def test_warning_in_code_without_a_name_is_told() -> None:
    """As that of ``exec``, and of examples in documentation."""
    with pytest.warns(UserWarning, match="told"):
        exec("warn('told')", {"warn": warn})


def test_warnings_go_through_one_function() -> None:
    """It finds the line of the program, which no fixed number of levels does."""
    folder = Path(backpack.__file__).parent
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    assert [name for name, text in texts.items() if "warnings.warn" in text] == ["warning.py"]
    assert not any("from warnings import warn\n" in text for text in texts.values())


class Own(nn.Module):
    """Without a rule; a function without one; another branch in training."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.sinc() + torch.special.bessel_j0(x.detach())
        return out + 1 if self.training else out


def backward(model: nn.Module, extension: BackpropExtension) -> None:
    X = torch.rand(2, 3)
    loss = extend(nn.MSELoss())(extend(model)(X), X)
    with backpack.backpack(extension):
        loss.backward()


ELSEWHERE: dict[str, Callable[[], object]] = {
    "derivatives are computed automatically": lambda: backward(
        nn.Sequential(nn.Linear(3, 3), Own()), DiagGGNExact()
    ),
    "No rule for function": lambda: extend(Own(), use_converter=True),
    "branches on its training mode": lambda: extend(Own(), use_converter=True).eval(),
    "was made by torch.jit": lambda: extend(nn.Sequential(torch.jit.script(nn.Linear(3, 3)))),
    "there is the diagonal alone": lambda: backward(
        nn.Sequential(nn.Linear(3, 2**14 + 1), nn.Linear(2**14 + 1, 3)), KFAC()
    ),
}


@pytest.mark.parametrize("message", ELSEWHERE)
def test_warnings_are_told_at_a_line_of_the_program(message: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ELSEWHERE[message]()
    told = [w for w in caught if message in str(w.message)]
    assert told and all(w.filename == __file__ for w in told), caught
