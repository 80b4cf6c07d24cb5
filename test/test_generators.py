"""Functions that are evaluated again draw none of the program's random numbers, in any thread."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core.record.generators import evaluated_apart, seeded

N = 3
DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "like another": lambda: torch.rand_like(torch.ones(3)),
    "integers": lambda: torch.randint(2, 90, (9,)),
    "integers from 0": lambda: torch.randint(90, (9,)),
    "permutation": lambda: torch.randperm(30),
    "normal": lambda: torch.normal(torch.zeros(3), 1.0),
    "in place": lambda: torch.zeros(3).uniform_(),
    "choice": lambda: torch.multinomial(torch.ones(90), 9),
    "dropout": lambda: F.dropout(torch.ones(30)),
    "rrelu": lambda: torch.rrelu(-torch.ones(9), 0.1, 0.9, True),
    "attention": lambda: F.scaled_dot_product_attention(
        *torch.ones(3, 1, 2, 9, 4).unbind(), dropout_p=0.5
    ),
    "layers": lambda: nn.LSTM(2, 3, 2, dropout=0.5)(torch.ones(4, 2))[0].detach(),
    "generator in an argument": lambda: torch.rand(3, generator=torch.default_generator),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_numbers_are_the_same_each_time_and_not_those_of_the_program(draw: Any) -> None:
    state = torch.get_rng_state()
    first, second = evaluated_apart(draw), evaluated_apart(draw)
    assert torch.equal(first[0], second[0]) and first[1]
    assert torch.equal(state, torch.get_rng_state())
    twice, _ = evaluated_apart(lambda: (draw(), draw()))
    assert not torch.equal(*twice)


@pytest.mark.parametrize("draw", [random.random, lambda: random.randint(0, 9), numpy.random.rand])
def test_numbers_of_others_are_put_back(draw: Callable[[], float]) -> None:
    def fails() -> None:
        draw()
        raise KeyError

    states = random.getstate(), str(numpy.random.get_state())
    assert evaluated_apart(draw)[1]
    with pytest.raises(KeyError):
        evaluated_apart(fails)
    assert states == (random.getstate(), str(numpy.random.get_state()))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sin().sum(),
        lambda x: F.dropout(x, training=False),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: torch.rand(3, generator=torch.Generator().manual_seed(0)),
    ],
)
def test_no_draw(function: Callable[[Tensor], Any]) -> None:
    assert not evaluated_apart(lambda: function(torch.ones(1, 2, 3, 4)))[1]


def test_seed() -> None:
    """The numbers are those after torch.manual_seed."""
    state = torch.get_rng_state()
    with seeded(5):
        own = torch.rand(3)
    assert torch.equal(state, torch.get_rng_state())
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert torch.equal(own, torch.rand(3))


def test_two_threads_seed() -> None:
    """One after another: else the second one would put back the seed of the first one."""
    state, order = torch.get_rng_state(), []
    waits, first = Event(), seeded()

    def other() -> None:
        waits.set()
        with seeded():
            order.append("other")

    with first:
        thread = Thread(target=other)
        thread.start()
        waits.wait(60)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]
    assert torch.equal(state, torch.get_rng_state())


@torch.library.custom_op("backpack_test::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draw where no mode of torch sees it."""
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def in_another_thread() -> Tensor:
    found: list[Tensor] = []
    thread = Thread(target=lambda: found.append(torch.rand(3)))
    thread.start()
    thread.join()
    return found[0]


def with_a_seed() -> Tensor:
    torch.manual_seed(3)
    return torch.rand(3)


@pytest.mark.parametrize("draw", [lambda: noisy(torch.ones(3)), in_another_thread, with_a_seed])
def test_hidden_draws(draw: Callable[[], Tensor]) -> None:
    torch.manual_seed(1)
    torch.rand(3)
    state = torch.get_rng_state()
    assert evaluated_apart(draw)[1]
    assert torch.equal(state, torch.get_rng_state())


def test_nested() -> None:
    assert evaluated_apart(lambda: evaluated_apart(lambda: torch.rand(3)))[0][1]


class Meanwhile(nn.Module):
    """A leaf during which another thread draws."""

    def __init__(self, draw: Callable[[], float], times: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4))
        self.numbers: tuple[list[float], ...] = ([],)  # which no evaluation resets
        self.draw, self.times = draw, times

    def forward(self, x: Tensor) -> Tensor:
        own = self.numbers[0]
        if len(own) < self.times:
            thread = Thread(target=lambda: own.append(float(self.draw())))
            thread.start()
            thread.join()
        return (x * self.w).sin()


@pytest.mark.parametrize(
    ("draw", "seed"),
    [
        (lambda: torch.rand(()), torch.manual_seed),
        (random.random, random.seed),
        (numpy.random.rand, numpy.random.seed),
    ],
    ids=["torch", "python", "numpy"],
)
@pytest.mark.parametrize("as_loss", [False, True])
def test_another_thread_draws_meanwhile(draw: Any, seed: Any, as_loss: bool) -> None:
    """It gets each of its numbers once, and the module is not taken for random."""
    torch.manual_seed(0)
    X, y = torch.rand(N, 3), torch.randint(4, (N,))
    model, cross_entropy, leaf = nn.Linear(3, 4), nn.CrossEntropyLoss(), Meanwhile(draw, 4)
    leaf.w.requires_grad_(not as_loss)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf, self.of = leaf, cross_entropy

        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            return self.of(self.leaf(f), y)

    loss: nn.Module = Loss() if as_loss else cross_entropy
    model = extend(model if as_loss else nn.Sequential(model, leaf))
    seed(1)
    with backpack(extensions.DiagHessian(), extensions.BatchGrad()):
        extend(loss)(model(X), y).backward()
    seen = leaf.numbers[0]
    assert len(seen) == 4
    seed(1)
    assert seen == [float(draw()) for _ in seen]
