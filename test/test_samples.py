"""Samples are followed from the model's inputs through every function and module.

Whatever shape a layer sees, individual gradients are those of the samples of the model's data: a
loop over samples is the truth. Sizes that happen to be equal change nothing.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from threading import Thread
from typing import Any
from unittest import mock

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from backpack import backpack, extend, extensions
from backpack.core.derivatives import function_derivatives
from backpack.core.engine.backpropagation import slice_bytes
from backpack.core.record import alive, data_notes
from backpack.core.record.data_notes import noted
from backpack.core.record.layout import Layout, Owners, Place
from backpack.optim import DPSGD

TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}
Forward = Callable[[Any, Tensor], Tensor]


class Rotations(nn.Module):
    """Depends on positions; the samples say which precision is wanted."""

    @torch.no_grad()
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return positions[..., None].expand(-1, -1, 3).to(x).cos()


class Scale(nn.Module):
    """A leaf without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sin()


class Router(Scale):
    """A leaf without a rule that returns its rows and their places."""

    def forward(self, x: Tensor, *, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        rows = super().forward(x.reshape(-1, 3)) * factor
        return rows, rows.argmax(1)


class Model(nn.Module):
    """Runs a function; has whatever functions may want to use."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.lstm, self.gru = nn.LSTM(3, 3), nn.GRU(3, 3, batch_first=True)
        self.positions, self.conv = nn.Embedding(7, 3), nn.Conv1d(3, 3, 1)
        self.norm, self.slopes = nn.LayerNorm(3), nn.PReLU(3)
        self.rotations, self.scale, self.router = Rotations(), Scale(), Router()
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


def first_has_no_rows(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x).reshape(-1, 3)
    none, rows = torch.where(h[:, 0] > 1e9)[0], torch.arange(len(h))
    out = torch.zeros(len(h), 3, dtype=h.dtype)
    out = out.index_add(0, none, m.norm(h[none]) * h[none, :1])
    return merged(m, out.index_add(0, rows, F.linear(h[rows], m.weight) * h[rows, 1:2]), x)


def shifted(m: Any, x: Tensor) -> Tensor:
    later = x.new_zeros(x.shape)
    later[:, 1:] = x[:, :-1]
    return m.head(m.layer(later)).sum(1)


def data_and_a_row_for_each(m: Any, x: Tensor) -> Tensor:
    """The first step of an autoregressive flow: what is known of every sample are zeros."""
    rows = m.layer(torch.zeros(x.shape, dtype=x.dtype))
    return m.head(torch.stack([x[..., 0] - rows[..., 0], x[..., 1], x[..., 2]], -1)).sum(1)


def written_through_a_view(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x).transpose(1, 2)
    h /= 2
    h.add_(1)
    return m.head(h.transpose(1, 2).tanh()).sum(1)


def changed_through_a_view(m: Any, x: Tensor) -> Tensor:
    """A part of what has its samples second in memory."""
    h = m.layer(x).transpose(0, 1).contiguous().transpose(0, 1).sin()
    later = h[:, 1:]
    later *= 2
    return m.head(later.tanh()).sum(1)


def views_of_what_changed(m: Any, x: Tensor) -> Tensor:
    """Views that were made before: a function and a layer read them."""
    h = m.layer(x).transpose(0, 1).sin()
    steps, later = h.transpose(0, 1), h[1:]
    h *= 2
    later += 1
    return m.head(h.tanh() * steps.transpose(0, 1)).sum(0) + m.head(steps).sum(1)


def product_changed_in_place(m: Any, x: Tensor) -> Tensor:
    """The result of ``einsum`` is a view of what it has computed."""
    scores = torch.einsum("ntd,sd->nts", m.layer(x), m.weight)
    scores *= torch.arange(3.0)
    first = scores.transpose(1, 2)
    first += 1
    return m.head(scores.tanh()).sum(1)


def filled(m: Model, x: Tensor, rows: Tensor, others: float | None = None) -> Tensor:
    """Let a mask choose the samples that fill some rows, perhaps others the other rows."""
    is_chosen = x[:, 0, 0] > 0
    rows[is_chosen] = m.layer(x[is_chosen])
    if others is not None:
        rows[~is_chosen] = others * x[~is_chosen]
    return m.head(rows.tanh()).sum(1)


def windows(m: Any, x: Tensor) -> Tensor:
    """Overlapping windows of samples that come second in memory."""
    h = m.layer(x).transpose(0, 1).contiguous().transpose(0, 1)
    per_sample, step, entry = h.stride()
    h = h.as_strided((len(x), x.shape[1] - 1, 2, 3), (per_sample, step, step, entry))
    return m.head(h.prod(2)).sum(1)


def packed(m: Any, x: Tensor) -> PackedSequence:
    """Sequences whose lengths depend on the data."""
    lengths = (x[:, 1:, 0] > 0).sum(1) + 1
    return pack_padded_sequence(m.layer(x), lengths, batch_first=True, enforce_sorted=False)


def states_of_both(m: Any, x: Tensor) -> Tensor:
    """The last state of one recurrent layer, and the outputs of another."""
    sequences = packed(m, x)
    _, (h, _) = m.lstm(sequences)
    return m.head(h[-1] + pad_packed_sequence(m.gru(input=sequences)[0])[0].sum(0))


def packed_rows(m: Any, x: Tensor) -> Tensor:
    """Layers that read the rows of packed sequences."""
    output, _ = m.gru(packed(m, x))
    rows = output._replace(data=m.head(output.data.tanh()))
    return pad_packed_sequence(rows, batch_first=True)[0].sum(1)


def routed(m: Any, x: Tensor) -> Tensor:
    rows, numbers = m.router(m.layer(x), factor=2.0)
    return merged(m, rows * m.weight[numbers], x)


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


def lengths(x: Tensor) -> list[int]:
    """Different numbers of rows for the samples, 1 to all."""
    return [1 + n % x.shape[1] for n in range(x.shape[0])]


def mask(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]) < torch.tensor(lengths(x))[:, None]


def split_for_each_sample(m: Any, x: Tensor) -> Tensor:
    parts = m.layer(x)[mask(x)].split(lengths(x))
    return m.head(torch.stack([part.sum(0) for part in parts]).tanh())


def padded_again(m: Any, x: Tensor) -> Tensor:
    parts = m.layer(x)[mask(x)].split(lengths(x))
    return m.head(nn.utils.rnn.pad_sequence(parts, batch_first=True).tanh()).sum(1)


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
    "repeated samples": lambda m, x: (
        m.head(m.layer(x).repeat_interleave(2, 0).tanh()).reshape(len(x), -1, 2).sum(1)
    ),
    "chosen rows": lambda m, x: (
        m.head(m.layer(x)[torch.ones(x.shape[:2], dtype=torch.bool)].tanh())
        .reshape(len(x), -1, 2)
        .sum(1)
    ),
    "two copies, a function": lambda m, x: (
        m.head(F.linear(torch.cat([m.layer(x), 2 * x]), m.weight).tanh())
        .reshape(2, len(x), -1, 2)
        .sum((0, 2))
    ),
    "reversed samples, no rule": lambda m, x: m.head(m.scale(m.layer(x).flip(0)).flip(0)).sum(1),
    "windows": windows,
    "packed sequences": lambda m, x: m.head(pad_packed_sequence(m.gru(packed(m, x))[0])[0].sum(0)),
    "states of packed sequences": lambda m, x: m.head(m.lstm(packed(m, x))[1][0][-1]),
    "packed sequences, two layers": states_of_both,
    "rows of packed sequences": packed_rows,
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
    "states of torch": lambda m, x: m.head(
        m.gru(x, torch.zeros(1, len(x), 3, dtype=x.dtype))[0]
    ).sum(1),
    "zeros that samples fill": lambda m, x: filled(m, x, torch.zeros(x.shape, dtype=x.dtype)),
    "memory that samples fill": lambda m, x: filled(m, x, torch.empty(x.shape, dtype=x.dtype), 1),
    "a mask of torch": lambda m, x: masked(
        m, x, torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
    ),
    "constants of torch": lambda m, x: m.head(
        m.layer(x) * m.layer(torch.full((x.shape[1], 3), 2.0, dtype=x.dtype).cumsum(0))
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
    "no rows are chosen first": first_has_no_rows,
    "shifted data": shifted,
    "split for each sample": split_for_each_sample,
    "padded again": padded_again,
    "data and a row for each": data_and_a_row_for_each,
    "written through a view": written_through_a_view,
    "changed through a view": changed_through_a_view,
    "views of what changed": views_of_what_changed,
    "a product changed in place": product_changed_in_place,
    "routed": routed,
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


@CONVERTERS
@pytest.mark.parametrize(
    "name",
    [
        *("repeated samples", "chosen rows", "two copies, a function", "no rows are chosen"),
        *("reversed samples, no rule", "windows", "a product changed in place"),
        *("packed sequences", "rows of packed sequences"),
        *("states of packed sequences", "packed sequences, two layers"),
    ],
)
@pytest.mark.parametrize("chosen", [[3, 1], None], ids=str)
def test_functions_that_return_more_rows(
    chosen: list[int] | None, name: str, converter: Any
) -> None:
    """Of some samples: those of a subsampling, or of a slice."""
    exts = [extensions.BatchDiagGGNExact(chosen), extensions.BatchDiagHessian(chosen)]
    with slice_bytes(2**8):
        model, used, *problem = check(name, converter, (5, 4), *exts)
    names = dict(model.named_parameters())
    ggn = dict(zip(names, oracle.batch_ggn_diag(model, *problem), strict=True))
    hessian = dict(zip(names, oracle.batch_hessian_diag(model, *problem), strict=True))
    rows = chosen or slice(None)
    for key, p in used.items():
        torch.testing.assert_close(p.diag_ggn_exact_batch, ggn[key][rows], **TOLERANCE)
        torch.testing.assert_close(p.diag_h_batch, hessian[key][rows], **TOLERANCE)


class WithTable(Scale):
    """A leaf without a rule that returns something without samples as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.weight.exp()


def test_leaves_that_return_a_table_as_well() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        rows, table = m.scale(m.layer(x))
        return m.head(rows * table).sum(1)

    torch.manual_seed(0)
    model, lossfunc = Model(function), nn.MSELoss()
    model.scale = WithTable()
    X, y = torch.randn(5, 4, 3), torch.randn(5, 2)
    problem = model.double(), lossfunc, X.double(), y.double()
    expected = oracle.batch_grad(*problem), oracle.ggn_diag(*problem)
    recorded = extend(copy.deepcopy(model), use_converter="record")
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        extend(lossfunc)(recorded(problem[2]), problem[3]).backward()
    for p, *values in zip(recorded.parameters(), *expected, strict=True):
        if p.grad is not None:
            torch.testing.assert_close((p.grad_batch, p.diag_ggn_exact), tuple(values))


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


class Function(nn.Module):
    """Several arguments."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.words, self.layer = nn.Embedding(9, 3), nn.Linear(3, 3)
        self.lstm, self.head = nn.LSTM(3, 3), nn.Linear(3, 2)

    def forward(self, *given: Any) -> Tensor:
        return self.function(self, *given)


TABLES: dict[str, tuple[Callable[..., Tensor], Callable[[int, int], tuple[Tensor, ...]]]] = {
    "positions": (
        lambda m, t, x: m.head((m.words(x) * m.words(t)).tanh()),
        lambda n, t: (torch.arange(t), torch.randint(9, (n, t))),
    ),
    "a table": (
        lambda m, t, x: m.head(m.layer(x + t).tanh()),
        lambda n, t: (torch.randn(t, 3).double(), torch.randn(n, t, 3).double()),
    ),
    "scales": (
        lambda m, t, x: m.head(m.layer(x * t).tanh()),
        lambda n, t: (torch.randn(3).double(), torch.randn(n, t, 3).double()),
    ),
}


@CONVERTERS
@pytest.mark.parametrize("sizes", [(5, 4), (4, 4), (3, 3)], ids=str)
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_before_the_data(
    name: str, summed: bool, sizes: tuple[int, int], converter: Any
) -> None:
    """Which argument has the samples does not depend on their order, nor on equal sizes."""
    function, draw = TABLES[name]
    torch.manual_seed(0)
    model = Function(lambda m, *xs: function(m, *xs).sum(1) if summed else function(m, *xs))
    model = model.double()
    table, x = draw(*sizes)
    y = torch.randn_like(model(table, x))
    expected = oracle.batch_grad(_at(model, x, table), nn.MSELoss(), x, y)
    recorded = extend(copy.deepcopy(model), use_converter=converter)
    loss = extend(nn.MSELoss())(recorded(table, x), y)
    with backpack(extensions.BatchGrad()):
        loss.backward()
    for p, value in zip(recorded.parameters(), expected, strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad_batch, value, **TOLERANCE)


@CONVERTERS
def test_arguments_that_do_not_tell_which_has_the_samples(converter: Any) -> None:
    """Two tables and one tensor of data: the output says that the choice was wrong."""
    model = extend(
        Function(lambda m, a, b, x: m.head(m.layer(x * a.sum(-2)) + b.sum(-2))),
        use_converter=converter,
    )
    given = torch.randn(4, 3), torch.randn(4, 3), torch.randn(5, 3)
    f = model(*given)
    loss = extend(nn.MSELoss())(f, torch.zeros_like(f))
    with pytest.raises(ValueError, match="4 was taken for"), backpack(extensions.BatchGrad()):
        loss.backward()
    f = model(given[0][None], given[1][None], given[2])
    with backpack(extensions.BatchGrad()):
        extend(nn.MSELoss())(f, torch.zeros_like(f)).backward()
    assert model.layer.weight.grad_batch.shape == (5, 3, 3)


@CONVERTERS
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("n", [1, 5])
def test_tables_of_what_samples_have(n: int, summed: bool, converter: Any) -> None:
    """They have as many rows as a sample has: also if there is one sample alone."""

    def function(m: Any, x: Tensor, a: Tensor, mask: Tensor) -> Tensor:
        h = m.head(m.layer(x * a))
        h = h.masked_fill(mask, 0.0)
        return h.sum(1) if summed else h.flatten(0, 1)

    model = Function(function)
    x, a, mask = torch.randn(n, 4, 3), torch.randn(4, 3), torch.rand(4, 2) > 0.5
    plain, extended = copy.deepcopy(model), extend(model, use_converter=converter)
    f = extended(x, a, mask)
    with backpack(extensions.BatchGrad()):
        extend(nn.MSELoss(reduction="sum"))(f, torch.zeros_like(f)).backward()
    for i in range(n):
        plain.zero_grad()
        plain(x[i : i + 1], a, mask).square().sum().backward()
        for p, q in zip(extended.parameters(), plain.parameters(), strict=True):
            if q.grad is not None:
                assert len(p.grad_batch) == n
                torch.testing.assert_close(p.grad_batch[i], q.grad)


def test_data_that_is_no_argument_is_named() -> None:
    """An innocent function behind it is not all that the error speaks of."""

    class Box:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    model = extend(
        Function(lambda m, box: m.head(m.layer(box.x.transpose(0, 1))).sum(0)),
        use_converter="record",
    )
    loss = extend(nn.MSELoss())(model(Box(torch.randn(5, 4, 3))), torch.rand(5, 2))
    with (
        pytest.raises(ValueError, match=r"data that 'layer' .* no argument of the model"),
        backpack(extensions.BatchGrad()),
    ):
        loss.backward()


OF_OTHER_ROWS: dict[str, Callable[..., Tensor]] = {
    "prompts": lambda m, x: torch.cat(
        [m.words(m.table[None].expand(len(x), -1)[:1]).repeat(len(x), 1, 1), m.words(x)], 1
    ),
    "graph": lambda m, x: m.layer(m.graph @ m.layer(m.nodes))[x],
}


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("name", OF_OTHER_ROWS)
def test_data_that_is_no_argument_has_no_samples_if_it_has_other_rows(name: str, n: int) -> None:
    """What else the model was called with tells how many rows have those that have samples."""
    torch.manual_seed(0)
    model = Function(lambda m, x: m.head(OF_OTHER_ROWS[name](m, x).tanh().mean(1))).double()
    vars(model).update(table=torch.arange(4), nodes=torch.randn(5, 3).double())
    vars(model).update(graph=torch.rand(5, 5).double())
    x, y = torch.randint(5, (n, 2)), torch.randint(2, (n,))
    expected = oracle.batch_grad(model, nn.CrossEntropyLoss(), x, y)
    recorded = extend(copy.deepcopy(model), use_converter="record")
    loss = extend(nn.CrossEntropyLoss())(recorded(x), y)
    with backpack(extensions.BatchGrad()):
        loss.backward()
    for p, value in zip(recorded.parameters(), expected, strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad_batch, value, **TOLERANCE)
    optimizer = DPSGD(
        recorded.parameters(), 0.1, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=n
    )
    with backpack(*optimizer.extensions):
        extend(nn.CrossEntropyLoss())(recorded(x), y).backward()
    with pytest.raises(ValueError, match=r"other rows .*register_buffer"):  # may be that of samples
        optimizer.step()


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "resize_": lambda x: x.resize_(10, 4, 3).normal_(),
    "set_": lambda x: x.set_(torch.randn(10, 2, 3)),
    "data": lambda x: setattr(x, "data", torch.randn(10, 4, 3)),
    "transpose_": lambda x: x.transpose_(0, 1),
}


@pytest.mark.parametrize("second", [False, True, "record"])
@CONVERTERS
@pytest.mark.parametrize("n", [5, 4])
@pytest.mark.parametrize("with_graph", [False, True])
def test_data_that_another_model_has_seen(
    n: int, with_graph: bool, converter: Any, second: Any
) -> None:
    """Where a model has the samples of its data says nothing of other models."""

    def tokens() -> nn.Module:
        torch.manual_seed(1)
        model = Function(lambda m, x: m.head(m.layer(x).tanh()))
        return extend(model, use_converter=second)

    def run(model: Any, X: Tensor) -> Tensor:
        f = model(X)
        loss = extend(nn.MSELoss())(f, torch.zeros_like(f))
        with backpack(extensions.BatchGrad()):
            loss.backward(retain_graph=True)
        return model.layer.weight.grad_batch if model.layer.weight.grad is not None else f

    others = {
        "steps first": lambda m, x: m.head(m.lstm(x)[0].tanh()).sum(0),
        "refused": lambda m, x: m.head(m.layer(x) + x[0]).sum(1),
    }
    for name, function in others.items():
        X = torch.randn(n, 4, 3, requires_grad=with_graph)
        X = X * 1 if with_graph else X
        expected = run(tokens(), X.detach().clone())
        other = extend(Function(function), use_converter=converter)
        if name == "refused":
            with pytest.raises(ValueError, match="SumModule"):
                run(other, X)
        else:
            run(other, X)
        torch.testing.assert_close(run(tokens(), X), expected)


@CONVERTERS
@pytest.mark.parametrize("name", CHANGES)
def test_data_that_changes_its_shape(name: str, converter: Any) -> None:
    """A tensor for many batches: its samples are counted in each call of the model."""
    model = extend(Function(lambda m, x: m.head(m.layer(x).tanh())), use_converter=converter)
    X = torch.randn(5, 4, 3)
    for _ in range(2):
        f = model(X)
        with backpack(extensions.BatchGrad()):
            extend(nn.MSELoss())(f, torch.zeros_like(f)).backward()
        assert model.layer.weight.grad_batch.shape[0] == len(X)
        CHANGES[name](X)


def test_an_interrupted_call_leaves_no_notes() -> None:
    """Hooks are not called then: the next call puts it right."""

    def interrupt(m: Any, x: Tensor) -> Tensor:
        if len(x) == 4:
            raise KeyboardInterrupt
        return m.head(m.layer(x))

    model = extend(Function(interrupt), use_converter="record")
    data_notes.running().clear()  # interrupted calls of the models of other tests
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(torch.rand(4, 3))
        model(torch.rand(5, 3))
        assert not data_notes.running()


def interrupts(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_call_of_a_converted_model_leaves_no_notes_in_the_next() -> None:
    one, other = (
        extend(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), use_converter="trace")
        for _ in range(2)
    )
    data_notes.running().clear()  # interrupted calls of the models of other tests
    known: list[list[Any]] = []
    one.get_submodule("1").register_forward_hook(interrupts)
    other.get_submodule("0").register_forward_hook(lambda *_: known.append([*data_notes.running()]))
    with pytest.raises(KeyboardInterrupt):
        one(torch.rand(4, 3))
    (stale,) = data_notes.running()
    other(torch.rand(5, 3))
    (during,) = known
    assert len(during) == 1 and stale not in during and not data_notes.running()


def _at(model: nn.Module, positions: Tensor, table: Tensor | None = None) -> nn.Module:
    class At(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x, positions) if table is None else self.model(table, x)

    return At()


REFUSED: dict[str, tuple[Forward, str]] = {
    "normalised over the batch": (lambda m, x: m.head(m.layer(x.softmax(0))).sum(1), "Softmax"),
    "one sample for all": (lambda m, x: m.head(m.layer(x) + x[0]).sum(1), "'(add|sum0).*SumModule"),
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
    assert noted(X) is None
    key = id(X)
    del X
    assert key not in data_notes.OF_DATA
    assert not [call for m in model.modules() for call in alive.live_calls(m)]


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


@pytest.mark.parametrize("affine", [True, False])
def test_statistics_of_chosen_rows(affine: bool) -> None:
    """Batch normalisation in training mode: rows that samples do not have are no data."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
            self.norm = nn.BatchNorm1d(3, affine=affine)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.layer(x)[mask(x)]).tanh()
            rows = torch.zeros(x.shape, dtype=x.dtype).index_put((mask(x),), h)
            return self.head(rows).sum(1)

    torch.manual_seed(0)
    model, X = Normalised().double(), torch.randn(4, 3, 3, dtype=torch.float64)
    problem = nn.MSELoss(), X, torch.randn(4, 2, dtype=torch.float64)
    extended = extend(copy.deepcopy(model), use_converter="record")
    with backpack(extensions.DiagGGNExact(), extensions.DiagHessian(), extensions.GGNMP()):
        extend(nn.MSELoss())(extended(X), problem[2]).backward()
    for p, ggn, hessian in zip(
        extended.parameters(),
        oracle.joint_ggn_diag(model, *problem),
        oracle.hessian_diag(model, *problem),
        strict=True,
    ):
        torch.testing.assert_close(p.diag_ggn_exact, ggn, **TOLERANCE)
        torch.testing.assert_close(p.diag_h, hessian, **TOLERANCE)
        units = torch.eye(p.numel(), dtype=torch.float64)
        products = p.ggnmp(units.reshape(-1, *p.shape)).reshape(p.numel(), -1)
        torch.testing.assert_close(products.diagonal().view_as(p), ggn, **TOLERANCE)


class Last(nn.Module):
    """Recurrent layers have the samples along the second axis, unless told otherwise."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 3, batch_first=batch_first), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@CONVERTERS
@pytest.mark.parametrize("time", [4, 5])
def test_all_rows_of_one_sample(converter: Any, time: int) -> None:
    """``batch_first`` was forgotten: the output is that of one sample of four, at all times."""
    warnings_of: dict[bool, list[str]] = {}
    X, y = torch.randn(time, 4, 3).double(), torch.randn(time, 2).double()
    for batch_first in (False, True):
        model = Last(batch_first).double()
        extended = extend(copy.deepcopy(model), use_converter=converter)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = extend(nn.MSELoss())(extended(X.clone()), y)
            with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
                loss.backward()
        warnings_of[batch_first] = [str(w.message) for w in caught]
        truth = oracle.joint_ggn_diag(model, nn.MSELoss(), X, y)
        for p, ggn in zip(extended.parameters(), truth, strict=True):
            torch.testing.assert_close(p.diag_ggn_exact, ggn, **TOLERANCE)
    assert not [w for w in warnings_of[True] if "of sample" in w]
    (message,) = [w for w in warnings_of[False] if "of sample" in w]
    assert f"MSELoss reads [{time}, 2], all of it of sample number 3 of 4" in message
    assert "batch_first=True" in message


class PackedRows(nn.Module):
    """A layer for rows of sequences of given lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor, **_: Any) -> Tensor:
        rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        rows = rows._replace(data=self.layer(rows.data).tanh())
        return pad_packed_sequence(rows, batch_first=True)[0].sum(1)


@pytest.mark.parametrize("lengths", [[4, 3], [2, 4], [1, 1], [3, 3], [2, 4, 1]])
def test_sizes_of_packed_sequences_are_not_drawn(lengths: list[int]) -> None:
    """Other sizes of batches write anywhere in memory: torch does not check them."""
    model, count = PackedRows().double(), len(lengths)
    X, y = torch.rand(count, 4, 4, dtype=torch.float64), torch.randint(2, (count,))
    expected = [
        torch.autograd.grad(
            F.cross_entropy(model.layer(X[n, :length]).tanh().sum(0), y[n]) / count,
            model.layer.weight,
        )[0]
        for n, length in enumerate(lengths)
    ]
    model = extend(model, use_converter="record")
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(X, torch.tensor(lengths)), y).backward()
    torch.testing.assert_close(model.layer.weight.grad_batch, torch.stack(expected))


class LossOfEach(nn.Module):
    """A model that adds up the losses of some samples, one by one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(3, 2), count

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.layer(x)
        return sum(F.mse_loss(z[n : n + 1], y[n : n + 1]) for n in range(self.count)) / self.count


@CONVERTERS
@pytest.mark.parametrize("count", [4, 3])
def test_losses_of_one_sample_each(converter: Any, count: int) -> None:
    model, X, y = LossOfEach(count), torch.randn(4, 3), torch.randn(4, 2)
    loss = extend(copy.deepcopy(model), use_converter=converter)(X, y)
    with warnings.catch_warnings(record=True) as caught, backpack(extensions.BatchGrad()):
        warnings.simplefilter("always")
        loss.backward()
    messages = [str(w.message) for w in caught if "of sample number" in str(w.message)]
    assert len(messages) == (count < 4)


class Parts(nn.Module):
    """A model that returns the first sample, and all others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.layer(x)
        return z[0], z[1:]


@pytest.mark.filterwarnings("error:.*of sample number")
def test_losses_of_one_sample_and_of_all_others() -> None:
    """They leave out no sample together."""
    model, lossfunc = extend(Parts(), use_converter="record"), extend(nn.MSELoss())
    one, others = model(torch.randn(4, 3))
    loss = lossfunc(one, torch.zeros(2)) + lossfunc(others, torch.zeros(3, 2))
    with backpack(extensions.BatchGrad()):
        loss.backward()
    assert model.layer.weight.grad_batch.flatten(1).any(1).all()


class Steps(nn.Module):
    """The features of a layer become a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lstm = nn.Linear(3, 12), nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.layer(x).unflatten(1, (3, 4)))[0]


@CONVERTERS
@pytest.mark.parametrize(
    "extension", [extensions.BatchGrad, extensions.KFLR], ids=lambda e: e.__name__
)
def test_features_that_become_samples(converter: Any, extension: Any) -> None:
    """``batch_first`` was forgotten: the LSTM takes features of the layer before for samples."""
    model = extend(Steps(), use_converter=converter)
    with pytest.raises(ValueError, match=r"layer.*batch_first=True"), backpack(extension()):
        extend(nn.MSELoss())(model(torch.randn(2, 3)), torch.randn(2, 3, 4)).backward()


def test_labels_of_chosen_rows_are_no_mixture() -> None:
    model = extend(Model(lambda m, x: m.head(m.layer(x))[mask(x)]), use_converter="record")
    X = torch.randn(5, 4, 3)
    with warnings.catch_warnings(), backpack(extensions.BatchGrad()):
        warnings.simplefilter("error")
        y = torch.randint(2, (int(mask(X).sum()),))
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    torch.testing.assert_close(model.head.weight.grad_batch.sum(0), model.head.weight.grad)


@pytest.mark.parametrize("converter", [False, True, "record"])
@pytest.mark.parametrize("split", ["first", "second"])
def test_layers_that_read_several_samples_as_one_are_named(converter: Any, split: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if split == "first":
            return m.head(m.layer(x.view(2, 2, 3)).flatten(0, 1))
        return m.head(m.layer(x).view(2, 2, -1)).flatten(0, 1)

    model = extend(Model(forward), use_converter=converter)
    loss = extend(nn.CrossEntropyLoss())(model(torch.randn(4, 3)), torch.randint(2, (4,)))
    with (
        backpack(extensions.SumGradSquared()),
        pytest.warns(UserWarning, match="individual gradients of some layers are") as caught,
    ):
        loss.backward()
    layer = "layer" if split == "first" else "head"
    assert any(f"'{layer}' (Linear) has 2" in str(w.message) for w in caught)


def test_one_warning_of_layers_with_other_rows() -> None:
    """A split axis may be that of a model whose samples only the converter follows."""
    model = extend(Model(lambda m, x: m.head(m.layer(torch.cat([x, x])).view(2, len(x), -1))[0]))
    loss = extend(nn.CrossEntropyLoss())(model(torch.randn(4, 3)), torch.randint(2, (4,)))
    with backpack(extensions.SumGradSquared()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss.backward()
    (message,) = [str(w.message) for w in caught if "individual gradients of" in str(w.message)]
    assert "use_converter=True" in message


class SequenceFirst(nn.Module):
    """Layers and functions behind one that has the sequence first."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table = kind, nn.Embedding(7, 4)
        self.lstm, self.attention = nn.LSTM(4, 4), nn.MultiheadAttention(4, 2)
        encoder = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0)
        self.encoder = nn.TransformerEncoder(encoder, 1, enable_nested_tensor=False)
        self.norm, self.hidden, self.head = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "recurrent":
            return self.head(self.hidden(self.lstm(self.table(x))[0]).relu())[-1]
        if self.kind == "encoder":
            return self.head(self.encoder(self.table(x).transpose(0, 1)).mean(0))
        z = self.table(x)
        z = z + self.attention(z, z, z)[0]
        return self.head((z + self.hidden(self.norm(z + 1)).relu()).mean(0))


def what_is_told(loss: Tensor) -> str:
    """Return the first warning or error of individual gradients; nothing if there is none."""
    with warnings.catch_warnings(), backpack(extensions.BatchGrad()):
        warnings.simplefilter("error")
        try:
            loss.backward()
        except (UserWarning, ValueError) as problem:
            return str(problem)
    return ""


@pytest.mark.parametrize("length", [3, 4])
@pytest.mark.parametrize("kind", ["recurrent", "encoder", "attention"])
def test_sequences_first_as_long_as_the_batch(kind: str, length: int) -> None:
    """The functions are looked at along the axis where the samples are: nothing to warn of."""
    shape, axis = ((4, length), 0) if kind == "encoder" else ((length, 4), 1)
    X, y = torch.randint(7, shape), torch.randint(3, (4,))
    plain = SequenceFirst(kind).double()
    model = extend(copy.deepcopy(plain))
    with warnings.catch_warnings(), backpack(extensions.BatchGrad()):
        warnings.simplefilter("error")
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    own = dict(model.named_parameters())
    for n in range(4):
        plain.zero_grad()
        (F.cross_entropy(plain(X.narrow(axis, n, 1)), y[n : n + 1]) / 4).backward()
        for name, p in plain.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(own[name].grad_batch[n], p.grad, **TOLERANCE)


@pytest.mark.parametrize("converter", [False, True])
@pytest.mark.parametrize("name", ["sine", "scaled positions", "centred samples"])
def test_functions_long_before_a_layer_with_the_sequence_first(name: str, converter: bool) -> None:
    """That layer says where the samples of the one before are; the first layer is not told."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "sine": lambda z: z.sin(),
        "scaled positions": lambda z: z * torch.arange(4.0, dtype=z.dtype)[:, None, None],
        "centred samples": lambda z: z - z.mean(1, keepdim=True),
    }

    class Before(SequenceFirst):
        def forward(self, x: Tensor) -> Tensor:
            z = functions[name](self.norm(x))
            return self.head(self.lstm(self.hidden(z))[0])[-1]

    X, y = torch.rand(4, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    plain = Before("").double()
    model = extend(copy.deepcopy(plain), use_converter=converter)
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))(model(X), y)
    told = what_is_told(loss)
    if not converter:
        assert "mixes the samples of a batch, in functions before 'hidden'" in told
    elif name == "centred samples":
        assert told
    else:
        F.cross_entropy(plain(X[:, 2:3]), y[2:3]).backward()
        torch.testing.assert_close(
            model.norm.weight.grad_batch[2], plain.norm.weight.grad, **TOLERANCE
        )
        assert not told


BEHIND_A_RECURRENT_LAYER: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "sum": (False, lambda z: z.sin() + z),
    "scaled positions": (False, lambda z: z * torch.arange(4.0, dtype=z.dtype)[:, None, None]),
    "first position": (False, lambda z: z + z[:1]),
    "softmax of positions": (False, lambda z: z.softmax(0)),
    "normalised features": (False, lambda z: F.layer_norm(z, (4,))),
    "first sample": (True, lambda z: z + z[:, :1]),
    "flipped samples": (True, lambda z: z.flip(1)),
    "rolled samples": (True, lambda z: 2 * z.roll(1, 1)),
    "softmax of samples": (True, lambda z: z.softmax(1)),
    "transposed": (True, lambda z: z + z.transpose(0, 1)),
}


@pytest.mark.parametrize("name", BEHIND_A_RECURRENT_LAYER)
def test_functions_of_sequences_first_as_long_as_the_batch(name: str) -> None:
    """They are looked at along the axis where the samples are: a warning, or an error, if mixed."""
    mixes, function = BEHIND_A_RECURRENT_LAYER[name]

    class Behind(SequenceFirst):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(function(self.lstm(self.table(x))[0])).mean(0)

    model = extend(Behind("").double())
    loss = extend(nn.CrossEntropyLoss())(
        model(torch.randint(7, (4, 4))), torch.tensor([0, 1, 2, 0])
    )
    told = what_is_told(loss)
    assert bool(told) == mixes
    if mixes:
        assert "functions before 'head'" in told or "'head' (Linear)" in told


class OfConstants(nn.Module):
    """Layers that read what is the same for all samples."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.table, self.layer, self.head = nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self, x))


FIRST: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "torch": lambda m, x: x * m.table(torch.zeros(x.shape[0], dtype=torch.long)),
    "new": lambda m, x: x * m.table(x.new_zeros(x.shape[0], dtype=torch.long)),
    "cast": lambda m, x: x * m.table(torch.zeros(x.shape[0]).long()),
    "expanded": lambda m, x: x * m.table(torch.arange(1).expand(x.shape[0])),
    "copied": lambda m, x: x * m.table(torch.arange(1).expand(x.shape[0]).clone()),
    "repeated": lambda m, x: x * m.table(torch.arange(1).repeat(x.shape[0])),
    "tiled": lambda m, x: x * m.table(torch.tile(torch.arange(1), (x.shape[0],))),
    "listed": lambda m, x: x * m.table(torch.tensor([0] * x.shape[0])),
    "rows": lambda m, x: x * m.table(torch.arange(3).repeat(x.shape[0], 1)).mean(1),
    "counted": lambda m, x: x * m.table(torch.ones(x.shape[0], 3).cumsum(1).long() - 1).mean(1),
    "stacked": lambda m, x: x * m.table(torch.stack([torch.arange(3)] * x.shape[0])).mean(1),
    "joined": lambda m, x: (
        x * m.table(torch.arange(3).repeat(x.shape[0])).view(x.shape[0], 3, 3).mean(1)
    ),
    "joined, sequences first": lambda m, x: (
        x * m.table(torch.arange(3).repeat_interleave(x.shape[0])).view(3, *x.shape).mean(0)
    ),
    "sums": lambda m, x: x * m.table(torch.zeros(x.shape[0], 1).long() + torch.arange(3)).mean(1),
    "state": lambda m, x: x * m.layer(torch.ones(x.shape[0], 3, dtype=x.dtype)).tanh(),
    "table": lambda m, x: x @ m.layer(torch.ones(3, 3, dtype=x.dtype)).tanh(),
}


SEVERAL = {"rows", "counted", "stacked", "sums", "joined", "joined, sequences first"}  # positions


def test_positions_expanded_for_as_many_samples() -> None:
    """Without a converter, those of N = T = 3 were told to mix samples."""
    positions = torch.arange(3)
    model = extend(OfConstants(lambda m, x: x * m.table(positions.expand(len(x), 3)).mean(1)))
    loss = extend(nn.MSELoss())(model(torch.rand(3, 3)), torch.zeros(3, 2))
    assert not what_is_told(loss)
    model = OfConstants(lambda m, x: x * m.layer(m.positions.expand(len(x), 3, 3)).mean(1))
    model.register_buffer("positions", torch.rand(3, 3))
    loss = extend(nn.MSELoss())(extend(model)(torch.rand(3, 3)), torch.zeros(3, 2))
    assert not what_is_told(loss)


@pytest.mark.parametrize("held", [True, False])
def test_data_in_a_buffer_is_data(held: bool) -> None:
    """What all samples read of all of them mixes them, also where a buffer of the model has it."""
    model = OfConstants(lambda m, x: m.layer(x.expand(3, 3, 3)).mean(1))
    model.register_buffer("data", torch.rand(3, 3))
    x = model.data if held else torch.rand(3, 3)
    loss = extend(nn.MSELoss())(extend(model)(x), torch.zeros(3, 2))
    assert "mixes the samples" in what_is_told(loss)


@pytest.mark.parametrize("converter", ["record", True])
@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("name", FIRST)
def test_kronecker_factors_of_what_is_the_same_for_all_samples(
    name: str, samples: int, converter: Any
) -> None:
    """Rows of samples count once for each: the factor of first tokens was N times as large."""
    model = extend(OfConstants(FIRST[name]).double(), use_converter=converter)
    with backpack(extensions.KFLR()):
        extend(nn.MSELoss())(
            model(torch.rand(samples, 3).double()), torch.zeros(samples, 2)
        ).backward()
    if name not in ("state", "table"):
        expected = torch.zeros(4, 4).double()
        for i in range(3 if name in SEVERAL else 1):
            expected[i, i] = 1
        factor = model.table.weight.kflr[0]
    else:  # a table has three positions, which all samples read
        expected = torch.ones(3, 3).double() * (3 if name == "table" else 1)
        factor = model.layer.weight.kflr[1]
    torch.testing.assert_close(factor, expected)


QUERIES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "expanded": lambda q, n: q.expand(n, -1, -1),
    "repeated": lambda q, n: q.unsqueeze(0).repeat(n, 1, 1),
    "tanh": lambda q, n: q.broadcast_to(n, *q.shape).tanh(),
    "interleaved": lambda q, n: q[None].repeat_interleave(n, 0),
    "merged": lambda q, n: q.repeat(n, 1),
    "first": lambda q, n: q[:1].expand(n, -1),
    "sequences first": lambda q, n: q[:, None].expand(-1, n, -1),
    "repeated, sequences first": lambda q, n: q.unsqueeze(1).repeat(1, n, 1),
    "stacked": lambda q, n: torch.stack([q] * n),
    "stacked, sequences first": lambda q, n: torch.stack([q] * n, dim=1),
    "concatenated": lambda q, n: torch.cat([q[None]] * n),
    "joined": lambda q, n: torch.cat([q] * n),
    "one for all": lambda q, n: q[:1].expand(2 * n, -1),
    "ones": lambda q, n: torch.ones(2 * n, 3, dtype=q.dtype),
    "merged, sequences first": lambda q, n: q.repeat_interleave(n, 0),
    "both, sequences first": lambda q, n: q[:1, None].expand(3, n, -1),
    "ones, sequences first": lambda q, n: torch.ones(2, n, 3, dtype=q.dtype),
}


class WithQueries(nn.Module):
    """Learned queries, the same for all samples, which a layer reads."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.table, self.layer, self.head = nn.Embedding(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.layer(QUERIES[self.name](self.table.weight, x.shape[0]))
        if "sequences" in self.name:
            return self.head(x * queries.reshape(-1, x.shape[0], 3)).mean(0)
        return self.head(x[:, None] * queries.reshape(x.shape[0], -1, 3)).mean(1)


@pytest.mark.parametrize("converter", ["record", True])
@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("name", QUERIES)
def test_kronecker_factors_of_learned_queries(name: str, samples: int, converter: Any) -> None:
    """The factor of a layer that reads them was N times as large."""
    plain, lossfunc = WithQueries(name).double(), nn.MSELoss()
    model = extend(copy.deepcopy(plain), use_converter=converter)
    X, y = torch.rand(samples, 3).double(), torch.rand(samples, 2).double()
    with backpack(extensions.KFLR(), extensions.BatchGrad(), extensions.DiagGGNExact()):
        extend(lossfunc)(model(X), y).backward()
    one = QUERIES[name](plain.table.weight, 1).detach().reshape(-1, 3)
    torch.testing.assert_close(model.layer.weight.kflr[1], one.T @ one)
    for field, truth in (("grad_batch", oracle.batch_grad), ("diag_ggn_exact", oracle.ggn_diag)):
        for p, known in zip(model.parameters(), truth(plain, lossfunc, X, y), strict=True):
            if p.grad is None:  # nothing is looked up
                assert not known.any()
            else:
                torch.testing.assert_close(getattr(p, field), known)


@pytest.mark.parametrize("converter", ["record", True])
def test_kronecker_factors_of_large_learned_queries(converter: Any) -> None:
    """What they are expanded to is too large to be kept."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.layer = nn.Parameter(torch.randn(16, 64)), nn.Linear(64, 2)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(self.queries.expand(len(x), -1, -1)) * x[:, None]).sum(1)

    model = extend(Large().double(), use_converter=converter)
    with backpack(extensions.KFLR()):
        extend(nn.MSELoss())(model(torch.rand(64, 2).double()), torch.zeros(64, 2)).backward()
    queries = model.queries.detach()
    torch.testing.assert_close(model.layer.weight.kflr[1], queries.T @ queries)


def parts(m: Any, x: Tensor) -> Tensor:
    first, second, _ = m.layer(x.new_ones(3, 3)).unbind(0)
    return x * first + second


CUT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "parts": parts,
    "one": lambda m, x: x * m.layer(x.new_ones(3, 3)).tanh()[0],
    "some": lambda m, x: x @ m.layer(torch.ones(3, 3, dtype=x.dtype))[:1].expand(3, 3),
    "reversed": lambda m, x: x @ m.layer(x.new_ones(3, 3)).tanh().flip(0),
    "sum": lambda m, x: x * m.layer(x.new_ones(3, 3)).tanh().sum(),
    "chosen": lambda m, x: x * m.layer(x.new_ones(3, 3)).tanh()[(x[:, 0] > 0.5).long()],
    "both": lambda m, x: (v := m.layer(torch.ones(3, 3, dtype=x.dtype)).tanh())[0] * x + x @ v,
    "expanded": lambda m, x: x @ m.layer(m.table.weight[:1].expand(3, -1)).tanh(),
    "repeated": lambda m, x: x * m.layer(m.table.weight[:1].repeat(3, 1)).tanh().sum(0),
}


@pytest.mark.parametrize("converter", ["record", True])
@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("name", CUT)
def test_parts_of_a_table_with_as_many_rows_as_samples(
    name: str, samples: int, converter: Any
) -> None:
    """It was an error that said that the samples are elsewhere."""
    plain, lossfunc = OfConstants(CUT[name]).double(), nn.MSELoss()
    model = extend(copy.deepcopy(plain), use_converter=converter)
    X, y = torch.rand(samples, 3).double(), torch.rand(samples, 2).double()
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        extend(lossfunc)(model(X), y).backward()
    for field, truth in (("grad_batch", oracle.batch_grad), ("diag_ggn_exact", oracle.ggn_diag)):
        for p, known in zip(model.parameters(), truth(plain, lossfunc, X, y), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(getattr(p, field), known)


class Decoder(nn.Module):
    """A recurrent layer, sequences first, that reads what is the same for all samples."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.layer, self.gru, self.head = nn.Linear(3, 3), nn.GRU(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        of_all = self.layer(x.new_ones(1 if self.reads == "state" else 3, x.shape[0], 3))
        reads = (x[None], of_all) if self.reads == "state" else (of_all, x[None])
        return self.head(self.gru(*reads)[0].mean(0))


@pytest.mark.parametrize("converter", [None, "record", True])
@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("reads", ["state", "inputs"])
def test_kronecker_factors_of_what_decoders_start_from(
    reads: str, samples: int, converter: Any
) -> None:
    """The factor of the layer before was N times as large with a converter."""
    plain, lossfunc = Decoder(reads).double(), nn.MSELoss()
    model = copy.deepcopy(plain)
    model = extend(model, use_converter=converter) if converter else extend(model)
    X, y = torch.rand(samples, 3).double(), torch.rand(samples, 2).double()
    with backpack(extensions.KFLR(), extensions.BatchGrad(), extensions.DiagGGNExact()):
        extend(lossfunc)(model(X), y).backward()
    factor = dict(model.named_parameters())["layer.weight"].kflr[1]
    torch.testing.assert_close(factor, torch.full_like(factor, 1 if reads == "state" else 3))
    for field, truth in (("grad_batch", oracle.batch_grad), ("diag_ggn_exact", oracle.ggn_diag)):
        for p, known in zip(model.parameters(), truth(plain, lossfunc, X, y), strict=True):
            torch.testing.assert_close(getattr(p, field), known)


def behind_attention(m: Any, x: Tensor, of_all: Tensor) -> Tensor:
    return m.attention(of_all, m.first(x), m.first(x))[0].mean(0)


OF_ALL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "queries": lambda m, x: behind_attention(m, x, m.layer(m.q[:, None].expand(-1, x.shape[1], 4))),
    "repeated": lambda m, x: behind_attention(
        m, x, m.layer(m.q[:, None].repeat(1, x.shape[1], 1).tanh()).tanh()
    ),
    "ones": lambda m, x: behind_attention(m, x, m.layer(x.new_ones(2, x.shape[1], 4))),
    "state": lambda m, x: m.gru(m.first(x), m.layer(x.new_ones(1, x.shape[1], 4)))[0].mean(0),
    "before": lambda m, x: (
        m.layer(m.q[:, None].expand(-1, x.shape[1], 4)) * m.gru(m.first(x))[0].mean(0)
    ).mean(0),
    "after": lambda m, x: (
        m.gru(m.first(x))[0].mean(0) * m.layer(m.q[:, None].expand(-1, x.shape[1], 4))
    ).mean(0),
}


class OfAll(nn.Module):
    """Sequences ``[S, N, 2]`` that meet what is the same for all samples."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.q = name, nn.Parameter(torch.randn(2, 4))
        self.first, self.layer, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.attention, self.gru = nn.MultiheadAttention(4, 2), nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(OF_ALL[self.name](self, x))


@pytest.mark.parametrize("converter", ["record", True])
@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (5, 4), (3, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("name", OF_ALL)
def test_kronecker_factors_beside_sequences_first(
    name: str, sizes: tuple[int, int], converter: Any
) -> None:
    """The number of samples was taken for S, and nobody looked again when a layer knew better."""
    plain, lossfunc = OfAll(name).double(), nn.MSELoss()
    X, y = torch.rand(*sizes, 2).double(), torch.rand(sizes[1], 2).double()
    read: list[Tensor] = []
    hook = plain.layer.register_forward_hook(lambda _, args, __: read.append(args[0].detach()))
    plain(X)
    hook.remove()
    model = extend(copy.deepcopy(plain), use_converter=converter)
    with backpack(extensions.KFLR(), extensions.BatchGrad()):
        extend(lossfunc)(model(X), y).backward()
    rows = read[0].reshape(-1, 4)
    torch.testing.assert_close(model.layer.weight.kflr[1], rows.T @ rows / sizes[1])
    for n in range(sizes[1]):
        loss = lossfunc(plain(X[:, n : n + 1]), y[n : n + 1]) / sizes[1]
        grads = torch.autograd.grad(loss, [*plain.parameters()], allow_unused=True)
        for p, grad in zip(model.parameters(), grads, strict=True):
            if grad is not None:
                torch.testing.assert_close(p.grad_batch[n], grad)


class BesideOnes(nn.Module):
    """Sequences ``[S, N, 2]``, or rows ``[N, 2]``, beside ones that a layer reads."""

    def __init__(self, meanwhile: Callable[[], Any] = int) -> None:
        super().__init__()
        self.meanwhile = meanwhile
        self.layer, self.gru, self.head = nn.Linear(3, 2), nn.GRU(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        of_all = self.layer(x.new_ones(x.shape[-2], 3))
        self.meanwhile()
        return self.head(of_all + (x if x.dim() == 2 else self.gru(x)[0].mean(0)))


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_kronecker_factors_of_a_model_that_another_thread_runs_meanwhile(samples: int) -> None:
    """It got as many rows for each constant as the other has samples, once a layer told that."""
    found: list[Tensor] = []
    inner, X = extend(BesideOnes(), use_converter="record"), torch.rand(samples, 2)

    def meanwhile() -> None:
        thread = Thread(target=lambda: found.append(inner(X)))
        thread.start()
        thread.join()

    outer = extend(BesideOnes(meanwhile), use_converter="record")
    found.append(outer(torch.rand(3, 2, 2)))
    for model, y in zip((inner, outer), found, strict=True):
        with backpack(extensions.KFLR()):
            extend(nn.MSELoss())(y, torch.zeros_like(y)).backward()
        factor = model.layer.weight.kflr[1]
        torch.testing.assert_close(factor, torch.ones_like(factor))


class Recurrent(nn.Module):
    """Sequences ``[S, N, 2]`` to as many."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


@pytest.mark.parametrize("converter", ["record", True])
@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (3, 3), (3, 1)], ids=str)
def test_kronecker_factors_behind_another_model(sizes: tuple[int, int], converter: Any) -> None:
    """It knows where the samples of its sequences are: constants had a row for each step."""
    models = [extend(one, use_converter=converter) for one in (Recurrent(), BesideOnes())]
    with backpack(extensions.KFLR()):
        y = models[1](models[0](torch.rand(*sizes, 2)))
        extend(nn.MSELoss())(y, torch.zeros_like(y)).backward()
    factor = models[1].get_parameter("layer.weight").kflr[1]
    torch.testing.assert_close(factor, torch.ones_like(factor))


def test_nothing_is_drawn_for_another_form_of_a_weight() -> None:
    """As many numbers as it has entries were drawn in each step, to see whether rows repeat."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x).tanh() @ self.table.weight.T

    model, X = extend(Tied(), use_converter="record"), torch.tensor([0, 3])
    model(X)
    with mock.patch.object(function_derivatives, "drawn", side_effect=AssertionError):
        model(X)


class BesideTable(nn.Module):
    """Rows ``[N, 2]`` beside sequences ``[T, B, 2]``, all of which each of them reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gru, self.head = nn.Linear(2, 3), nn.GRU(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.head(self.layer(x) * self.gru(table)[0].mean((0, 1)))


@pytest.mark.parametrize("converter", ["record", True])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_sequences_that_all_samples_read(batch: int, is_frozen: bool, converter: Any) -> None:
    """Their batch was taken for the samples, and all gradients were those of so many."""
    plain, lossfunc = BesideTable().double(), nn.MSELoss()
    plain.gru.requires_grad_(not is_frozen)
    X, table, y = (torch.rand(*sizes).double() for sizes in ((4, 2), (5, batch, 2), (4, 2)))
    model = extend(copy.deepcopy(plain), use_converter=converter)
    with backpack(extensions.BatchGrad()):
        extend(lossfunc)(model(X, table), y).backward()
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    for n in range(4):
        loss = lossfunc(plain(X[n : n + 1], table), y[n : n + 1]) / 4
        for name, grad in zip(trained, torch.autograd.grad(loss, trained.values()), strict=True):
            torch.testing.assert_close(model.get_parameter(name).grad_batch[n], grad)


def test_equal_features_are_no_rows_of_samples() -> None:
    """Those of as many as several samples have were taken for such, and taken back in each step."""
    model = extend(
        Model(lambda m, x: m.layer(x).repeat(1, 2) * torch.ones(6)), use_converter="record"
    )
    before = alive.corrections
    model(torch.rand(2, 3))
    assert alive.corrections == before


PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda table: table.square().sum(),
    "loss": lambda table: nn.functional.mse_loss(table, torch.zeros_like(table)),
}


@pytest.mark.parametrize("samples", [3, 4])
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_penalties_of_a_table_with_as_many_rows_as_samples(
    penalty: Callable[[Tensor], Tensor], samples: int
) -> None:
    """Each row was silently taken for that of a sample."""

    class Model(OfConstants):
        def forward(self, x: Tensor) -> Any:
            return self.head(x), penalty(self.layer(torch.ones(3, 3, dtype=x.dtype)).tanh())

    model = extend(Model(lambda _, x: x).double(), use_converter="record")
    y, added = model(torch.rand(samples, 3).double())
    loss = extend(nn.MSELoss())(y, torch.zeros_like(y)) + added
    with backpack(extensions.BatchGrad()), pytest.raises(ValueError, match="has no samples"):
        loss.backward()
