"""Samples are followed from the model's inputs through every function and module.

Whatever shape a layer sees, individual gradients are those of the samples of the model's data: a
loop over samples is the truth. Sizes that happen to be equal change nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core.record import layout, tape
from backpack.core.record.layout import Layout, Owners, Place, noted

TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}
Forward = Callable[[Any, Tensor], Tensor]


class Rotations(nn.Module):
    """Depends on positions; the samples say which precision is wanted."""

    @torch.no_grad()
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return positions[..., None].expand(-1, -1, 3).to(x).cos()


class Model(nn.Module):
    """Runs a function; has whatever functions may want to use."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.lstm, self.gru = nn.LSTM(3, 3), nn.GRU(3, 3, batch_first=True)
        self.positions, self.conv = nn.Embedding(7, 3), nn.Conv1d(3, 3, 1)
        self.norm, self.slopes = nn.LayerNorm(3), nn.PReLU(3)
        self.rotations = Rotations()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def merged(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """Sum the rows of each sample, which are next to each other."""
    return m.head(h).reshape(x.shape[0], -1, 2).sum(1)


def experts(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x).reshape(-1, 3)
    out = torch.zeros_like(h)
    chosen = torch.where(h[:, 0] > 0)[0]
    out.index_add_(0, chosen, F.linear(h[chosen], m.weight).tanh())
    others = torch.where(h[:, 0] <= 0)[0]
    out.index_add_(0, others, m.norm(h[others]))
    return merged(m, out, x)


def empty(m: Any, x: Tensor) -> Tensor:
    none = torch.where(x[:, 0] > 1e9)[0]
    return m.norm(x).index_add(0, none, m.layer(x[none]))


def shifted(m: Any, x: Tensor) -> Tensor:
    later = x.new_zeros(x.shape)
    later[:, 1:] = x[:, :-1]
    return m.head(m.layer(later)).sum(1)


def written_through_a_view(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x).transpose(1, 2)
    h /= 2
    h.add_(1)
    return m.head(h.transpose(1, 2).tanh()).sum(1)


def steps_of(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def masked(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = m.layer(x)
    scores = (h @ h.mT).masked_fill(mask.tril() == 0, -1e9)
    return m.head((scores.softmax(-1) @ x).tanh()).sum(1)


def in_the_middle(m: Any, x: Tensor) -> Tensor:
    h = torch.stack([m.layer(x), m.norm(x)]).flatten(1, 2)  # [2, N·T, 3]
    a, b = h.unbind(0)
    return merged(m, a * b.sin(), x)


FORWARDS: dict[str, Forward] = {
    "an axis in front": lambda m, x: m.head(m.layer(x.unsqueeze(0)).squeeze(0)).sum(1),
    "exchanged axes": lambda m, x: m.head(m.layer(x.transpose(0, 1)).transpose(0, 1)).mean(1),
    "merged behind a layer": lambda m, x: merged(m, m.layer(x).reshape(-1, 3), x),
    "merged data": lambda m, x: merged(m, m.layer(x.reshape(-1, 3)).tanh(), x),
    "merged, steps first": lambda m, x: (
        m.head(m.layer(x.transpose(0, 1).reshape(-1, 3)).tanh()).reshape(-1, len(x), 2).sum(0)
    ),
    "merged, normalised": lambda m, x: merged(m, m.norm(m.layer(x).reshape(-1, 3)), x),
    "merged, slopes": lambda m, x: merged(m, m.slopes(m.layer(x).reshape(-1, 3)), x),
    "merged, convolved": lambda m, x: merged(m, m.conv(m.layer(x).reshape(-1, 3, 1))[..., 0], x),
    "merged, recurrent": lambda m, x: merged(m, m.gru(m.layer(x).flip(1))[0].reshape(-1, 3), x),
    "merged data, convolved": lambda m, x: merged(m, m.conv(x.reshape(-1, 3, 1))[..., 0], x),
    "merged data, an axis of one": lambda m, x: merged(
        m, F.conv1d(x.flatten(0, 1).unsqueeze(1), m.weight[:, None]).squeeze(2), x
    ),
    "merged, a function": lambda m, x: merged(m, F.linear(x.reshape(-1, 3), m.weight), x),
    "merged in the middle": in_the_middle,
    "reversed samples": lambda m, x: m.head(m.layer(x.flip(0)).tanh().flip(0)).sum(1),
    "reversed and merged": lambda m, x: m.head(
        m.layer(x.flip(0).reshape(-1, 3)).tanh().reshape(x.shape).flip(0)
    ).sum(1),
    "chosen samples": lambda m, x: m.head(m.layer(x)[list(range(len(x)))[::-1]].flip(0)).sum(1),
    "two copies": lambda m, x: (
        m.head(m.layer(torch.cat([x, 2 * x])).tanh()).reshape(2, len(x), -1, 2).sum((0, 2))
    ),
    "a stack": lambda m, x: m.head(m.layer(torch.stack([x, 2 * x])).tanh()).sum((0, 2)),
    "recurrent, steps first": lambda m, x: m.head(m.lstm(x.transpose(0, 1))[0][-1]),
    "positions": lambda m, x: m.head(m.layer(x) * m.positions(torch.arange(x.shape[1]))).sum(1),
    "positions with an axis": lambda m, x: m.head(
        m.layer(x) * m.positions(torch.arange(x.shape[1])[None])
    ).sum(1),
    "rotations": lambda m, x: m.head(
        m.layer(x) * m.rotations(x, torch.arange(x.shape[1])[None])
    ).sum(1),
    "ones for each step": lambda m, x: m.head(
        m.layer(x) * x.new_ones(1, x.shape[1]).cumsum(1)[..., None]
    ).sum(1),
    "states of zeros": lambda m, x: m.head(m.gru(x, x.new_zeros(1, len(x), 3))[0]).sum(1),
    "states of zeros, copied": lambda m, x: m.head(
        m.gru(x, x.new_zeros(1, len(x), 3) + m.layer(x[:, 0]))[0]
    ).sum(1),
    "a mask of ones": lambda m, x: masked(m, x, x.new_ones(x.shape[1], x.shape[1])),
    "a mask like the data": lambda m, x: masked(m, x, torch.ones(x.shape[1], x.shape[1]).to(x)),
    "a mask of a type": lambda m, x: masked(m, x, torch.ones(x.shape[1], x.shape[1]).type_as(x)),
    "a mask like a sample": lambda m, x: masked(
        m, x, torch.ones_like(x[0, :, :1]).expand(-1, x.shape[1])
    ),
    "numbers of the steps": lambda m, x: m.head(
        m.layer(x) * x.new_full((x.shape[1], 1), 2.0).cumsum(0)
    ).sum(1),
    "zeros and steps": lambda m, x: m.head(
        m.layer(x) * (x.new_zeros(x.shape[1], 3) + steps_of(x)[:, None])
    ).sum(1),
    "memory that is filled": lambda m, x: m.head(
        m.layer(x) * x.new_empty(x.shape[1], 1).copy_(steps_of(x)[:, None])
    ).sum(1),
    "a layer of constants": lambda m, x: m.head(
        m.layer(x) * m.norm(m.layer(x.new_ones(x.shape[1], 3)))
    ).sum(1),
    "like a sample": lambda m, x: m.head(
        m.layer(x) * (torch.zeros_like(x[0]) + torch.arange(3))
    ).sum(1),
    "like samples": lambda m, x: m.head(m.layer(x) * torch.ones_like(x[:1]).cumsum(1)).sum(1),
    "experts": experts,
    "no rows are chosen": lambda m, x: merged(m, empty(m, x.reshape(-1, 3)), x),
    "shifted data": shifted,
    "written through a view": written_through_a_view,
}


def check(name: str, converter: Any, sizes: tuple[int, int], *exts: Any) -> tuple[Any, ...]:
    torch.manual_seed(1)
    model = Model(FORWARDS[name]).double()
    X = torch.randn(*sizes, 3, dtype=torch.float64)
    y = torch.randn(sizes[0], 2, dtype=torch.float64)
    converted, lossfunc = extend(copy.deepcopy(model), use_converter=converter), nn.MSELoss()
    loss = extend(nn.MSELoss())(converted(X), y)
    with backpack(*exts):
        loss.backward()
    mine = dict(converted.named_parameters())
    used = {name: mine[name] for name, _ in model.named_parameters() if mine[name].grad is not None}
    return model, used, lossfunc, X, y


SIZES = pytest.mark.parametrize("sizes", [(5, 4), (3, 3), (1, 4)], ids=str)
CONVERTERS = pytest.mark.parametrize("converter", [True, "record"])


@SIZES
@CONVERTERS
@pytest.mark.parametrize("name", FORWARDS)
def test_individual_gradients(name: str, converter: Any, sizes: tuple[int, int]) -> None:
    exts = [extensions.BatchGrad(), extensions.BatchL2Grad(), extensions.Variance()]
    model, used, *problem = check(name, converter, sizes, *exts)
    assert used
    expected = dict(
        zip(dict(model.named_parameters()), oracle.batch_grad(model, *problem), strict=True)
    )
    for key, p in used.items():
        value = expected[key]
        torch.testing.assert_close(p.grad_batch, value, **TOLERANCE)
        torch.testing.assert_close(p.batch_l2, value.flatten(1).square().sum(1), **TOLERANCE)
        torch.testing.assert_close(p.variance, value.var(0, correction=0), **TOLERANCE)


@SIZES
@CONVERTERS
@pytest.mark.parametrize("name", FORWARDS)
def test_second_order(name: str, converter: Any, sizes: tuple[int, int]) -> None:
    exts = [extensions.DiagGGNExact(), extensions.BatchDiagGGNExact(), extensions.SqrtGGNExact()]
    model, used, *problem = check(name, converter, sizes, *exts)
    names = dict(model.named_parameters())
    whole = dict(zip(names, oracle.ggn_diag(model, *problem), strict=True))
    each = dict(zip(names, oracle.batch_ggn_diag(model, *problem), strict=True))
    for key, p in used.items():
        torch.testing.assert_close(p.diag_ggn_exact, whole[key], **TOLERANCE)
        torch.testing.assert_close(p.diag_ggn_exact_batch, each[key], **TOLERANCE)
        torch.testing.assert_close(p.sqrt_ggn_exact.square().sum(0), each[key], **TOLERANCE)


@CONVERTERS
def test_subsampling_of_merged_rows(converter: Any) -> None:
    name, chosen = "merged data", [3, 1]
    exts = [extensions.BatchGrad(chosen), extensions.Variance(chosen)]
    model, used, *problem = check(name, converter, (5, 4), *exts)
    expected = dict(
        zip(dict(model.named_parameters()), oracle.batch_grad(model, *problem), strict=True)
    )
    for key, p in used.items():
        value = expected[key][chosen]
        torch.testing.assert_close(p.grad_batch, value, **TOLERANCE)
        torch.testing.assert_close(p.variance, value.var(0, correction=0), **TOLERANCE)


def test_positions_as_an_argument_of_the_model() -> None:
    """Data with another first axis than the rest has no samples."""

    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(5, 3), nn.Embedding(4, 3)
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return self.head((self.tokens(x) * self.positions(positions)).tanh().sum(1))

    torch.manual_seed(0)
    model, X, y = Positioned().double(), torch.randint(5, (5, 4)), torch.randint(2, (5,))
    for positions in (torch.arange(4), torch.arange(4)[None]):
        expected = oracle.batch_grad(_at(model, positions), nn.CrossEntropyLoss(), X, y)
        recorded = extend(copy.deepcopy(model), use_converter="record")
        loss = extend(nn.CrossEntropyLoss())(recorded(X, positions), y)
        with backpack(extensions.BatchGrad()):
            loss.backward()
        for p, value in zip(recorded.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad_batch, value, **TOLERANCE)


def _at(model: nn.Module, positions: Tensor) -> nn.Module:
    class At(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x, positions)

    return At()


REFUSED: dict[str, tuple[Forward, str]] = {
    "normalised over the batch": (lambda m, x: m.head(m.layer(x.softmax(0))).sum(1), "Softmax"),
    "mean of the batch": (lambda m, x: m.head(m.layer(x) - m.layer(x).mean(0)).sum(1), "mean"),
    "copies behind the steps": (
        lambda m, x: m.head(m.lstm(torch.cat([x, x]).transpose(0, 1))[0][-1]).view(2, -1, 2).sum(0),
        r"(LSTM).*axis 1 of input 0, but another axis is merged",
    ),
    "sorted samples": (
        lambda m, x: m.head(m.layer(x).sort(0).values).sum(1),
        "sort",
    ),
}

BOTH_ORDERS = (extensions.BatchGrad, extensions.DiagGGNExact)
OVER_SAMPLES: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda n: nn.Linear(n, n),
    "layer norm": nn.LayerNorm,
    "RMS norm": nn.RMSNorm,
    "softmax": lambda n: nn.Softmax(-1),
}


class OverSamples(nn.Module):
    """Has a module whose features are the samples."""

    def __init__(self, over: nn.Module, reads_data: bool) -> None:
        super().__init__()
        self.layer, self.over, self.head = nn.Linear(3, 3), over, nn.Linear(3, 2)
        self.reads_data = reads_data

    def forward(self, x: Tensor) -> Tensor:
        if self.reads_data:
            return self.head(self.layer(self.over(x.transpose(0, 2)).transpose(0, 2))).sum(1)
        return self.head(self.over(self.layer(x).transpose(0, 2)).transpose(0, 2)).sum(1)


@pytest.mark.parametrize(
    ("converter", "extension"),
    [
        (False, extensions.BatchGrad),
        *((how, ext) for how in (True, "record") for ext in BOTH_ORDERS),
    ],
)
@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize("name", OVER_SAMPLES)
def test_samples_as_features_are_refused(
    name: str, steps: int, extension: Any, converter: Any
) -> None:
    # without a converter, data without a graph is what the layers are given
    for reads_data in (False, True) if converter or name != "softmax" else (False,):
        model = extend(OverSamples(OVER_SAMPLES[name](5), reads_data), use_converter=converter)
        loss = extend(nn.MSELoss())(model(torch.rand(5, steps, 3)), torch.rand(5, 2))
        with backpack(extension()):
            if converter:
                with pytest.raises(ValueError, match="'over'"):
                    loss.backward()
            else:
                with pytest.warns(UserWarning, match="'over'|'layer'"):
                    loss.backward()


@CONVERTERS
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_named(name: str, converter: Any) -> None:
    function, culprit = REFUSED[name]
    model = extend(Model(function), use_converter=converter)
    loss = extend(nn.MSELoss())(model(torch.rand(5, 4, 3)), torch.rand(5, 2))
    with (
        pytest.raises((ValueError, NotImplementedError), match=culprit),
        backpack(extensions.BatchGrad()),
    ):
        loss.backward()


@CONVERTERS
def test_what_a_mask_has_chosen_says_nothing_of_another_one(converter: Any) -> None:
    """A mask that chooses all entries moves none; one that does not moves those of samples."""
    model = extend(
        Model(lambda m, x: m.head(m.layer(x).masked_scatter(x > 0.5, m.norm(x))).sum(1)),
        use_converter=converter,
    )
    X, y, lossfunc = torch.rand(5, 4, 3), torch.rand(5, 2), extend(nn.MSELoss())
    with backpack(extensions.BatchGrad()):
        lossfunc(model(X + 1), y).backward()
    assert model.norm.weight.grad_batch.shape == (5, 3)
    with (
        pytest.raises(ValueError, match="masked_scatter"),
        backpack(extensions.BatchGrad()),
    ):
        lossfunc(model(X), y).backward()


def test_data_is_left_as_it_was() -> None:
    """What is known of data is forgotten with it, and leaves no trace on it."""
    model = extend(Model(FORWARDS["merged data"]), use_converter="record")
    X = torch.rand(5, 4, 3)
    model(X)
    assert not vars(X)
    assert noted(X) is not None
    key = id(X)
    del X
    assert key not in layout._of_data
    assert not [call for m in model.modules() for call in tape.live_calls(m)]


def test_places_of_owners() -> None:
    owners = Owners((1, 0, 1), 2)
    place = Place(0, 1, 2, owners)
    x = torch.arange(1, 7).reshape(3, 2)
    assert place.rows(x.shape) == 4
    canonical = place.to_canonical(x)
    assert canonical.tolist() == [[3, 4], [0, 0], [1, 2], [5, 6]]
    assert place.from_canonical(canonical.unsqueeze(0)).tolist() == [x.tolist()]
    numbers = torch.tensor([[1, 1], [0, 0], [1, -1]])
    found = Layout.of_numbers(numbers, 2)
    assert found is not None
    assert found.facts == (1, 2, owners)
    again = found.numbers([3, 2])
    assert again is not None
    assert again.flatten().tolist() == [1, 0, 1]
    assert Layout.of_numbers(torch.tensor([[0, 1], [1, 0]]), 2) is None


def test_owners_are_told_apart_by_the_number_of_samples() -> None:
    """Samples that own no entry count as well: what is known of others must not be taken."""
    for samples in (3, 4):
        place = Layout(1, samples, owners=Owners((0, 0, 2, 2), samples)).place([4, 4])
        assert place is not None
        assert (place.samples, place.rows([4, 4])) == (samples, 2 * samples)


def test_owners_of_nothing() -> None:
    """Where no sample has chosen a row, each has a row of zeros."""
    found = Layout.of_numbers(torch.zeros(0, 2), 3, [1])
    assert found is not None
    place = found.place([0, 2])
    assert place is not None
    assert place.to_canonical(torch.rand(0, 2)).tolist() == 3 * [[0, 0]]
    assert place.from_canonical(torch.rand(1, 3, 2)).shape == (1, 0, 2)
    assert Layout.of_numbers(torch.zeros(3, 0), 3, [1]).facts == (1, 3, None)  # type: ignore[union-attr]


def test_a_part_of_a_recorded_model() -> None:
    """Entered through a part, a model records no functions: what is not followed warns."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.layer = nn.Embedding(7, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.positions(torch.arange(x.shape[1])))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.head = Part(), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.part(x).tanh()).mean(1)

    model, X, y = extend(Whole(), use_converter="record"), torch.rand(5, 4, 3), torch.rand(5, 2)
    with backpack(extensions.BatchGrad()):
        extend(nn.MSELoss())(model(X), y).backward()
    assert model.part.positions.weight.grad_batch.shape == (5, 7, 3)
    with (
        pytest.warns(UserWarning, match=r"not those of samples.*part\.positions"),
        backpack(extensions.BatchGrad()),
    ):
        extend(nn.MSELoss())(model.head(model.part(X)).mean(1), y).backward()
