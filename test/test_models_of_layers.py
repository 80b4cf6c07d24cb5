"""Models that were not converted: the samples are where the layers take them to be, or one hears.

A layer takes the rows of its input for the samples. What the model was called with says how many
samples there are, and where in memory. Ordinary networks must not be warned of.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from backpack import backpack, extend, extensions

Forward = Callable[..., Any]


class Model(nn.Module):
    """Runs a function; has whatever functions may want to use."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function
        self.layer, self.head, self.narrow = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2)
        self.lstm, self.gru = nn.LSTM(3, 3), nn.GRU(3, 3, batch_first=True)
        self.words, self.positions = nn.Embedding(7, 3), nn.Embedding(7, 3)
        self.conv, self.norm = nn.Conv2d(3, 2, 3), nn.LayerNorm(3)
        self.activation = nn.ReLU()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def used(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.grad is not None}


def run(function: Forward, *data: Tensor, lossfunc: nn.Module, y: Tensor) -> Model:
    """Return a model with individual gradients."""
    torch.manual_seed(0)
    model = Model(function).to(torch.float64)
    extend(model)
    with backpack(extensions.BatchGrad()):
        extend(lossfunc)(model(*data), y).backward()
    return model


N, T = 5, 4
X, STEPS, IMAGES = (
    torch.rand(N, T, 3).double(),
    torch.rand(T, N, 3).double(),
    torch.rand(3, 3, 4, 4),
)
WORDS = torch.randint(7, (N, T))

# Nothing is moved.
ORDINARY: dict[str, tuple[Forward, Tensor]] = {
    "layers": (lambda m, x: m.layers(x), X[:, 0]),
    "layers of sequences": (lambda m, x: m.layers(x), X),
    "convolution": (lambda m, x: m.conv(x).flatten(1).tanh(), IMAGES.double()),
    "channels last": (
        lambda m, x: m.conv(x).flatten(1),
        IMAGES.double().contiguous(memory_format=torch.channels_last),
    ),
    "channels moved": (lambda m, x: m.conv(x.permute(0, 3, 1, 2)), torch.rand(3, 4, 4, 3).double()),
    "data computed": (lambda m, x: m.head((x.double() / 2 - 1)[:, 0]), torch.rand(3, 3, 3)),
    "data of batched matrices": (lambda m, x: m.head(x.transpose(1, 2) * 2), torch.rand(3, 3, 3)),
    "a part of the data": (lambda m, x: m.narrow(x[..., 1:]), X),
    "recurrent": (lambda m, x: m.head(m.gru(x)[0][:, -1]), X),
    "words": (lambda m, x: m.head(m.gru(m.words(x))[0][:, -1]), WORDS),
    "merged, and apart again": (
        lambda m, x: m.head(m.layer(x).view(-1, 3)).view(*x.shape[:2], 2),
        X,
    ),
    "merged, an activation, and apart again": (
        lambda m, x: m.head(m.activation(m.layer(x).view(-1, 3))).view(*x.shape[:2], 2),
        X,
    ),
    "recurrent, exchanged before": (lambda m, x: m.lstm(x.transpose(0, 1))[1][0][0], X),
    "one sample": (lambda m, x: m.layers(x), X[:1, 0]),
    "reused": (lambda m, x: m.head(m.layer(m.layer(x).tanh())), X),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_networks_are_right(name: str) -> None:
    function, x = ORDINARY[name]
    x = x if x.dtype == torch.long else x.double()
    torch.manual_seed(0)
    model = Model(function).double()
    f = model(x)
    y = torch.rand_like(f)
    expected = oracle.batch_grad(model, nn.MSELoss(), x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = run(function, x, lossfunc=nn.MSELoss(), y=y)
    values = dict(zip((name for name, _ in model.named_parameters()), expected, strict=True))
    assert used(mine)
    for key, p in used(mine).items():
        torch.testing.assert_close(p.grad_batch, values[key], rtol=1e-9, atol=1e-12)


def test_ordinary_programs_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # a parametrisation computes with as many rows as there are samples
        model = nn.Sequential(orthogonal(nn.Linear(N, N)), nn.Linear(N, 2))
        loss = extend(nn.MSELoss())(extend(model)(torch.rand(N, N)), torch.rand(N, 2))
        with backpack(extensions.BatchGrad()):
            loss.backward()
        # a sequence with its steps first
        run(lambda m, x: m.head(m.lstm(x)[0]), STEPS, lossfunc=nn.MSELoss(), y=torch.rand(T, N, 2))
        run(
            lambda m, x: m.head(m.lstm(m.words(x))[0]),
            WORDS.T,
            lossfunc=nn.MSELoss(),
            y=torch.rand(T, N, 2).double(),
        )
        # the loss of a language model; entries of a loss in any shape
        torch.manual_seed(0)
        model = extend(Model(lambda m, x: m.layers(m.words(x))))
        loss = extend(nn.CrossEntropyLoss())(model(WORDS).view(-1, 2), WORDS.flatten() % 2)
        with backpack(extensions.BatchGrad()):
            loss.backward()
        assert model.layers[0].weight.grad_batch.shape == (N, 3, 3)
        loss = extend(nn.MSELoss())(model(WORDS).view(1, -1), torch.rand(1, 2 * N * T))
        with backpack(extensions.BatchGrad()):
            loss.backward()
        # data in a dictionary, arguments of other sizes, batches of two sizes
        model = extend(Model(lambda m, batch, table: m.layers(batch["x"]) + len(table)))
        with backpack(extensions.BatchGrad()):
            model({"x": torch.rand(N, 3)}, table=torch.rand(9)).sum().backward()
        model = extend(Model(lambda m, images: m.layers(torch.stack(images)[:, 0, 0])))
        with backpack(extensions.BatchGrad()):
            model([torch.rand(2, 2, 3) for _ in range(N)]).sum().backward()
        one, other = (extend(Model(lambda m, x: m.layers(x))) for _ in range(2))
        with backpack(extensions.BatchGrad()):
            (one(torch.rand(3, 3)).sum() + other(torch.rand(5, 3)).sum()).backward()


SQUARE = torch.rand(N, N, 3).double()
# What the functions do is not seen, but that they have moved the samples.
MOVED: dict[str, tuple[Forward, Tensor, str]] = {
    "an axis in front": (
        lambda m, x: m.layer(x.unsqueeze(0)).squeeze(0),
        X[:, 0],
        r"'layer' \(Linear\) has 1, the data of Model 5",
    ),
    "exchanged": (
        lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1),
        X,
        r"'layer' \(Linear\) has 4, the data of Model 5",
    ),
    "merged": (
        lambda m, x: m.layer(x.reshape(-1, 3)).reshape(x.shape),
        X,
        r"'layer' \(Linear\) has 20, the data of Model 5",
    ),
    "repeated": (
        lambda m, x: m.head(m.words(x.repeat_interleave(2, 0))).unflatten(0, (-1, 2)),
        WORDS,
        r"'words' \(Embedding\) has 10, the data of Model 5",
    ),
    "positions": (
        lambda m, x: x + m.positions(torch.arange(x.shape[1])),
        X,
        r"'positions' \(Embedding\) has 4, the data of Model 5",
    ),
    "exchanged, equal sizes": (
        lambda m, x: m.layer(x.transpose(0, 1)).mean(0),
        SQUARE,
        r"functions of the data before 'layer' \(Linear\)",
    ),
    "exchanged and copied, equal sizes": (
        lambda m, x: m.layer(2 * x.transpose(0, 1)).tanh().mean(0),
        SQUARE,
        r"functions of the data before 'layer' \(Linear\)",
    ),
    "recurrent, batch first, equal sizes": (
        lambda m, x: m.gru(x.transpose(0, 1))[0].mean(0),
        SQUARE,
        r"functions of the data before 'gru' \(GRU\)",
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_moved_samples_are_noticed(name: str) -> None:
    function, x, message = MOVED[name]
    torch.manual_seed(0)
    y = torch.rand_like(Model(function).double()(x))
    with pytest.warns(UserWarning, match=message):
        run(function, x, lossfunc=nn.MSELoss(), y=y)


def test_moved_samples_are_noticed_without_a_loss_module() -> None:
    model = extend(Model(lambda m, x: m.layer(x.reshape(-1, 3)).tanh().sum()))
    with (
        pytest.warns(UserWarning, match=r"'layer' \(Linear\) has 20, the data of Model 5"),
        backpack(extensions.BatchGrad()),
    ):
        model(X.float()).backward()


def test_a_model_that_is_part_of_another() -> None:
    """The outermost model knows what the samples are, whichever was extended first."""
    for parts_first in (True, False):
        part = Model(lambda m, x: m.layers(x))
        model = Model(lambda m, x: m.part(x.reshape(-1, 3)).reshape(*x.shape[:2], 2))
        model.part = part
        for module in (part, model) if parts_first else (model, part):
            extend(module)
        with (
            pytest.warns(UserWarning, match=r"'part\.layers\.2' \(Linear\) has 20|has 20"),
            backpack(extensions.BatchGrad()),
        ):
            model(X.float()).sum().backward()
        with warnings.catch_warnings(), backpack(extensions.BatchGrad()):
            warnings.simplefilter("error")
            part(X.float()).sum().backward()


def test_a_loss_that_merges_samples() -> None:
    """A reshape alone brings several rows of an output together in one of the loss."""
    model = extend(nn.Sequential(nn.Linear(3, 3)))
    loss = extend(nn.CrossEntropyLoss())(model(torch.rand(4, 3)).view(2, 6), torch.tensor([1, 5]))
    with (
        pytest.warns(UserWarning, match=r"CrossEntropyLoss \(which reads 4 rows as"),
        backpack(extensions.BatchGrad()),
    ):
        loss.backward()


def test_samples_that_are_mixed_behind_a_recurrent_layer() -> None:
    """Outputs of modules with several of them have a node of ours, which says nothing."""
    model = extend(Model(lambda m, x: m.gru(x)[0] - m.gru(x)[0].mean(0)))
    with (
        pytest.warns(UserWarning, match=r"functions before MSELoss \(SubBackward0, MeanBackward1"),
        backpack(extensions.BatchGrad()),
    ):
        extend(nn.MSELoss())(model(X.float()), torch.rand(N, T, 3)).backward()


def test_models_are_copied_saved_and_freed_as_before() -> None:
    model = extend(Around(nn.Sequential(nn.Linear(3, 3))))
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with (
            pytest.warns(UserWarning, match="has 1, the data of Around 3"),
            backpack(extensions.BatchGrad()),
        ):
            other(torch.rand(3, 3)).sum().backward()
    x = torch.rand(4, 3)
    gone, f = weakref.ref(x), model(x)
    del x, f
    gc.disable()
    try:
        assert gone() is None
    finally:
        gc.enable()


class Around(nn.Module):
    """Moves the samples before a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.unsqueeze(0))
