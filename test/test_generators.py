"""Functions that are evaluated again draw none of the program's random numbers, in any thread."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core.record.generators import OwnGenerators, evaluated_alike, evaluated_apart
from backpack.linalg import FisherMC

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
def test_numbers_are_not_those_of_the_program(draw: Any) -> None:
    state = torch.get_rng_state()
    assert evaluated_apart(draw)[1]
    first, second = evaluated_alike(draw), evaluated_alike(draw)
    assert torch.equal(first, second)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(*evaluated_alike(lambda: (draw(), draw())))


@pytest.mark.parametrize("draw", [random.random, lambda: random.randint(0, 9), numpy.random.rand])
def test_numbers_of_others_are_put_back(draw: Callable[[], float]) -> None:
    def fails() -> None:
        draw()
        raise KeyError

    states = random.getstate(), str(numpy.random.get_state(legacy=False))
    assert evaluated_apart(draw)[1]
    with pytest.raises(KeyError):
        evaluated_apart(fails)
    assert states == (random.getstate(), str(numpy.random.get_state(legacy=False)))


def test_another_generator_of_numpy() -> None:
    """Its state is no tuple."""
    usual = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(0))
    try:
        test_numbers_of_others_are_put_back(numpy.random.rand)
        assert not evaluated_apart(lambda: torch.ones(3).sin())[1]
    finally:
        numpy.random.set_bit_generator(usual)


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


def in_another_thread() -> Tensor:
    found: list[Tensor] = []
    thread = Thread(target=lambda: found.append(torch.rand(3)))
    thread.start()
    thread.join()
    return found[0]


def test_seed() -> None:
    """The numbers are those after torch.manual_seed, whatever other threads draw meanwhile."""

    torch.manual_seed(1)
    expected = [in_another_thread() for _ in DRAWS]
    torch.manual_seed(1)
    with OwnGenerators(5):
        found = [(draw(), in_another_thread()) for draw in DRAWS.values()]
    own, others = zip(*found, strict=True)
    assert all(map(torch.equal, others, expected))
    torch.manual_seed(5)
    assert all(map(torch.equal, own, [draw() for draw in DRAWS.values()]))


@torch.library.custom_op("backpack_test::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draw where no mode of torch sees it."""
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


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
    """A leaf during which another thread draws, a few times."""

    def __init__(self, other: ThreadPoolExecutor, draw: Callable[[], float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4))
        self.seen = SimpleNamespace(numbers=[])  # an object, which no evaluation resets
        self.other, self.draw = other, draw

    def forward(self, x: Tensor) -> Tensor:
        if len(self.seen.numbers) < 3:
            self.seen.numbers.append(float(self.other.submit(self.draw).result()))
        return (x * self.w).sin()


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(int).result()
        yield thread


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
def test_another_thread_draws_meanwhile(
    other: ThreadPoolExecutor, draw: Any, seed: Any, as_loss: bool
) -> None:
    """It gets each of its numbers once, and the module is not taken for random."""
    torch.manual_seed(0)
    X, y = torch.rand(N, 3), torch.randint(4, (N,))
    model, cross_entropy, leaf = nn.Linear(3, 4), nn.CrossEntropyLoss(), Meanwhile(other, draw)
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
    seen = leaf.seen.numbers
    assert len(seen) == 3
    seed(1)
    assert seen == [float(draw()) for _ in seen]


@pytest.mark.parametrize(
    ("lossfunc", "targets"),
    [
        (nn.CrossEntropyLoss(), torch.randint(4, (N,))),
        (nn.MSELoss(), torch.rand(N, 4)),
        (nn.PoissonNLLLoss(), torch.rand(N, 4)),
        (nn.BCEWithLogitsLoss(), torch.rand(N, 4).round()),
    ],
)
def test_fisher_while_another_thread_draws(lossfunc: nn.Module, targets: Tensor) -> None:
    """It is one matrix, and the other thread gets its own numbers."""
    torch.manual_seed(0)
    model, data = nn.Linear(3, 4), [(torch.rand(N, 3), targets)] * 3
    operator = FisherMC(model, lossfunc, data, mc_samples=2, progress=False)
    vectors = torch.rand(operator.shape[0], 2)
    expected, ends, seen = operator @ vectors, Event(), []

    def draw() -> None:
        while not ends.is_set():
            seen.append(float(torch.rand(())))

    torch.manual_seed(1)
    thread = Thread(target=draw)
    thread.start()
    found = [operator @ vectors for _ in range(5)]
    ends.set()
    thread.join()
    assert all(torch.equal(one, expected) for one in found)
    torch.manual_seed(1)
    assert len(seen) > 9 and seen == torch.stack([torch.rand(()) for _ in seen]).tolist()


def test_attributes_are_there_while_a_module_is_evaluated_again() -> None:
    """Passes of other threads look at the modules of all calls."""

    class Seen:
        """An attribute that looks at its module when it is replaced."""

        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def __del__(self) -> None:
            looked.append("_parameters" in vars(self.module))

    class Leaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = Seen(self)
            return (x * self.w).sin()

    looked: list[bool] = []
    model = extend(nn.Sequential(nn.Linear(3, 4), Leaf()))
    with backpack(extensions.DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(model(torch.rand(N, 3)), torch.tensor([0, 1, 2])).backward()
    assert len(looked) > 1 and all(looked)
