"""Functions that are evaluated again draw none of the program's random numbers, in any thread."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core.record.generators import OwnGenerators, evaluated_apart

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
    "generator of the user": lambda: torch.rand(3, generator=torch.default_generator),
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
        lambda x: nn.functional.embedding(torch.tensor([0]), x.flatten(1)),
    ],
)
def test_no_draw(function: Callable[[Tensor], Any]) -> None:
    assert not evaluated_apart(lambda: function(torch.ones(1, 2, 3, 4)))[1]


def test_seed() -> None:
    """The numbers are those after torch.manual_seed."""
    with OwnGenerators(5):
        own = [torch.rand(3), torch.rand_like(own_like := torch.ones(3)), torch.randint(9, (4,))]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = [torch.rand(3), torch.rand_like(own_like), torch.randint(9, (4,))]
    assert all(map(torch.equal, own, expected))


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
    ("draw", "seed", "times"),
    [
        (lambda: torch.rand(()), torch.manual_seed, 10**6),
        (random.random, random.seed, 3),
        (numpy.random.rand, numpy.random.seed, 3),
    ],
    ids=["torch", "python", "numpy"],
)
@pytest.mark.parametrize("as_loss", [False, True])
def test_another_thread_draws_meanwhile(draw: Any, seed: Any, times: int, as_loss: bool) -> None:
    """It gets each of its numbers once, and the module is not taken for random."""
    torch.manual_seed(0)
    X, y = torch.rand(N, 3), torch.randint(4, (N,))
    model, cross_entropy, leaf = nn.Linear(3, 4), nn.CrossEntropyLoss(), Meanwhile(draw, times)
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
    assert len(seen) >= 3
    seed(1)
    assert seen == [float(draw()) for _ in seen]
