"""Samples along any axis, tensors without samples, functions: right, or an error that says why."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack import backpack, extend, extensions
from backpack.core import fast
from backpack.core.engine.backpropagation import slice_bytes
from backpack.core.record import alive
from backpack.core.record.layout import Layout, Place
from backpack.custom_module.branching import SumModule

TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}


class Model(nn.Module):
    """Runs a function; has whatever functions may want to use."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(2, 3)
        self.tokens, self.others = nn.Embedding(5, 3), nn.Embedding(5, 3)
        self.positions = nn.Embedding(5, 3)
        self.lstm = nn.LSTM(3, 3)
        self.gru = nn.GRU(3, 3, batch_first=True)
        self.weight, self.bias = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3))
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self, x))


def vectors(n: int) -> Tensor:
    return torch.randn(n, 2, dtype=torch.float64)


def steps(n: int) -> Tensor:
    return torch.randn(n, 4, 2, dtype=torch.float64)


def text(n: int) -> Tensor:
    return torch.randint(5, (n, 4))


def two_embeddings(m: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return m.lstm(m.tokens(x) + m.others(x))[0].mean(0)


def two_embeddings_multiplied(m: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return m.lstm(m.tokens(x) * m.others(x))[1][0][-1]


def positions_expanded(m: Any, x: Tensor) -> Tensor:
    p = m.positions(torch.arange(x.shape[1])).unsqueeze(0).expand(x.shape[0], -1, -1)
    return (m.tokens(x) * p).sum(1)


def positions_with_an_axis(m: Any, x: Tensor) -> Tensor:
    p = m.positions(torch.arange(x.shape[1]).unsqueeze(0))
    return (m.tokens(x) + p).tanh().sum(1)


def attention_pooling(m: Any, x: Tensor) -> Tensor:
    query = m.bias.expand(x.shape[0], 1, -1)
    h = m.first(x)
    return m.attention(query, h, h)[0].squeeze(1)


def started_by_a_parameter(m: Any, x: Tensor) -> Tensor:
    h = m.first(x[:, 0]).unsqueeze(0)
    return m.gru(m.bias.expand(x.shape[0], 2, -1), h)[0][:, -1]


def permuted_tokens(m: Any, x: Tensor) -> Tensor:
    return m.gru(m.tokens(x.transpose(0, 1)).permute(1, 0, 2))[0][:, -1]


def samples_last_and_first(m: Any, x: Tensor) -> Tensor:
    """Behind an axis of one entry, which a batch of one cannot be told from."""
    return m.first(x[:, :3])[..., :1].permute(1, 2, 0).sin().movedim(2, 0).flatten(1)


def class_token(m: Any, x: Tensor) -> Tensor:
    token = m.bias.expand(x.shape[0], 1, -1)
    return torch.cat((token, m.first(x), 2 * token), 1).sin().sum(1)


def rows_of_a_table(m: Any, x: Tensor) -> Tensor:
    index = (x[:, 0] > 0).long()
    table = m.tokens.weight
    return (table[index] * m.first(x)).sin() + torch.index_select(table, 0, 1 - index)


def padded_tables(m: Any, x: Tensor) -> Tensor:
    table = F.pad(m.weight.expand(x.shape[0], -1, -1), (0, 0, 1, 0), value=3.0)
    return torch.stack((table.sum(1), m.first(x)), 1).sin().sum(1)


def pooled_in_one_axis(m: Any, x: Tensor) -> Tensor:
    h = F.max_pool1d(m.first(x).transpose(0, 1), 2, 1)
    return F.avg_pool1d(nn.ReplicationPad1d((1, 0))(h), 3, 1, 1).transpose(0, 1).tanh().sum(1)


def pooled_in_two_axes(m: Any, x: Tensor) -> Tensor:
    h = F.max_pool2d(m.first(x).unsqueeze(0).sin(), (2, 1), 1)
    return F.adaptive_avg_pool2d(h, (2, 3))[0].sin().sum(1)


RIGHT: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[int], Tensor]]] = {
    "two embeddings, sequence first": (two_embeddings, text),
    "their product": (two_embeddings_multiplied, text),
    "positions, expanded": (positions_expanded, text),
    "positions, with an axis of one": (positions_with_an_axis, text),
    "attention pooling": (attention_pooling, steps),
    "a parameter as the sequence": (started_by_a_parameter, steps),
    "samples last, then first": (samples_last_and_first, steps),
    "class token": (class_token, steps),
    "rows of a table": (rows_of_a_table, vectors),
    "padded tables": (padded_tables, vectors),
    "pooled in one axis": (pooled_in_one_axis, steps),
    "pooled in two axes": (pooled_in_two_axes, steps),
    "first layer by hand": (lambda m, x: (x @ m.weight + m.bias).tanh(), vectors),
    "first layer as a function": (lambda m, x: F.linear(x, m.weight.t(), m.bias).exp(), vectors),
    "square root": (lambda m, x: (m.first(x).sigmoid() ** 0.5).log(), vectors),
    "normalised": (lambda m, x: F.normalize(m.first(x), dim=1), vectors),
    "masked": (lambda m, x: m.first(x) * (x[:, :1] > 0), vectors),
    "chunks": (lambda m, x: torch.cat(m.first(x).chunk(3, 1)[::-1], 1).sin(), vectors),
    "an empty part": (
        lambda m, x: torch.cat([t.exp() for t in m.first(x).split([3, 0], 1)], 1),
        vectors,
    ),
    "tokens, sequence first": (permuted_tokens, text),
    "samples one by one": (
        lambda m, x: torch.cat([m.first(row.unsqueeze(0)) for row in x]).sin(),
        vectors,
    ),
    "softmax of one entry": (lambda m, x: m.first(x) * m.first(x)[:, :1].softmax(1), vectors),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str, n: int, create_graph: bool) -> None:
    function, data = RIGHT[name]
    torch.manual_seed(0)
    model, X = Model(function).double(), data(n)
    y = torch.randint(3, (n,))
    original = copy.deepcopy(model)
    converted, lossfunc = extend(model, use_converter=True), extend(nn.CrossEntropyLoss())
    exts = [extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.DiagHessian()]
    for active in (exts[:1], exts):
        loss = lossfunc(converted(X), y)
        with backpack(*active):
            loss.backward(create_graph=create_graph)
        problem = (original, nn.CrossEntropyLoss(), X, y)
        used = [p.grad is not None for p in model.parameters()]
        for ext, function_ in zip(
            active, (oracle.batch_grad, oracle.ggn_diag, oracle.hessian_diag), strict=False
        ):
            values = function_(*problem)
            for p, value, is_used in zip(model.parameters(), values, used, strict=True):
                if is_used:
                    mine = getattr(p, ext.savefield)
                    torch.testing.assert_close(mine, value, **TOLERANCE)
        model.zero_grad()


WRONG: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[int], Tensor], str]] = {
    "mean over the batch": (
        lambda m, x: m.first(x) - m.first(x).mean(0),
        vectors,
        "combines different samples",
    ),
    "shuffled": (
        lambda m, x: m.first(x) + m.first(x)[torch.tensor([0, 2, 1, 3])],
        vectors,
        "combines different samples",
    ),
    "samples one by one": (
        lambda m, x: torch.stack([m.first(row) for row in x]),
        vectors,
        r"combines different samples .*torch.cat\(\[layer\(row.unsqueeze\(0\)\) for row in x\]\)",
    ),
    "random": (
        lambda m, x: torch._standard_gamma(m.first(x).exp()),
        vectors,
        "evaluated again",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_error(name: str) -> None:
    function, data, message = WRONG[name]
    torch.manual_seed(0)
    model, X = extend(Model(function).double(), use_converter=True), data(4)
    lossfunc = extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(X), torch.randint(3, (4,)))
    with (
        pytest.raises((ValueError, NotImplementedError), match=message),
        backpack(extensions.DiagGGNExact()),
    ):
        loss.backward()


class Constant(nn.Module):
    """A prediction that does not depend on the data."""

    def __init__(self, function: Callable[[Tensor, int], Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.p = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.p, x.shape[0])


def test_a_tensor_without_samples_as_the_prediction() -> None:
    model = extend(Constant(lambda p, _: p.tanh(), 4, 3), use_converter=True)
    lossfunc = extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(4, 2)), torch.rand(4, 3))
    with pytest.raises(ValueError, match="no samples"), backpack(extensions.BatchGrad()):
        loss.backward()


REPEATED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "expanded": lambda p, n: p.expand(n, -1),
    "stacked": lambda p, n: torch.stack([p] * n),
}


@pytest.mark.parametrize("converter", [True, "record"])
@pytest.mark.parametrize("name", REPEATED)
def test_a_prediction_that_is_repeated_for_all_samples(name: str, converter: Any) -> None:
    model = extend(Constant(REPEATED[name], 3).double(), use_converter=converter)
    lossfunc = nn.MSELoss()
    X, y = torch.rand(4, 2).double(), torch.rand(4, 3).double()
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        extend(lossfunc)(model(X), y).backward()
    (p,) = model.parameters()
    torch.testing.assert_close(p.grad_batch, 2 * (p.detach() - y) / 12)
    torch.testing.assert_close(p.diag_ggn_exact, torch.full_like(p, 2 / 3))


def test_dropout_of_a_tensor_without_samples() -> None:
    function = lambda m, x: m.first(x) + m.drop(m.bias)  # noqa: E731
    model = extend(Model(function).double(), use_converter=True)
    lossfunc = extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(vectors(4)), torch.randint(3, (4,)))
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    torch.testing.assert_close(model.bias.grad_batch.sum(0), model.bias.grad)


@pytest.mark.parametrize("pool", [nn.FractionalMaxPool2d(2, 2), nn.MaxPool2d(2)], ids=repr)
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.pool(x.transpose(0, 1)).transpose(0, 1),
        lambda m, x: m.pool(torch.stack([x, x**2], 1).flatten(0, 1)).unflatten(0, (-1, 2)).sum(1),
        lambda m, x: x[:, :, :2, :2] * m.pool(m.table),
    ],
    ids=["second axis", "merged axes", "no samples"],
)
def test_poolings_find_their_maxima_where_samples_are(function: Any, pool: nn.Module) -> None:
    """Windows that are drawn are those of the forward pass."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.rand(1, 2, 5, 5))
            self.first, self.pool, self.head = nn.Conv2d(1, 2, 2), pool, nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(function(self, self.first(x)).flatten(1))

    torch.manual_seed(0)
    model = Pooled().double()
    X, y = torch.rand(4, 1, 6, 6, dtype=torch.float64), torch.randint(3, (4,))
    plain, lossfunc = copy.deepcopy(model), extend(nn.CrossEntropyLoss())
    if "table" not in function.__code__.co_names:
        del plain.table
        del model.table
    torch.manual_seed(1)
    truth = oracle.ggn_diag(plain, nn.CrossEntropyLoss(), X, y)
    torch.manual_seed(1)
    loss = lossfunc(extend(model, use_converter=True)(X), y)
    with backpack(extensions.DiagGGNExact()):
        loss.backward()
    for p, expected in zip(model.parameters(), truth, strict=True):
        torch.testing.assert_close(p.diag_ggn_exact, expected, **TOLERANCE)


def test_prediction_without_an_axis_for_outputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)).double()
    X, y = vectors(4), torch.randn(4, dtype=torch.float64)
    expected = oracle.ggn_diag(copy.deepcopy(model), nn.MSELoss(), X, y)
    loss = extend(nn.MSELoss())(extend(model)(X), y)
    with backpack(extensions.DiagGGNExact()):
        loss.backward()
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_ggn_exact, value, **TOLERANCE)


@pytest.mark.parametrize("paths", [nullcontext, fast.disabled], ids=["fast", "generic"])
@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.PReLU(init=0.5)], ids=repr)
def test_activations_of_a_number_for_each_sample(paths: Any, activation: nn.Module) -> None:
    X, y, found = vectors(4), torch.rand(4, dtype=torch.float64), []
    for tail in ([nn.Flatten(0), activation], [activation, nn.Flatten(0)]):
        torch.manual_seed(0)
        model = extend(nn.Sequential(nn.Linear(2, 1), *tail).double())
        loss = extend(nn.MSELoss())(model(X), y)
        with paths(), backpack(extensions.KFRA(), extensions.DiagGGNExact()):
            loss.backward()
        found.append([t for p in model.parameters() for t in (*p.kfra, p.diag_ggn_exact)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


def test_no_leak_of_chosen_outputs() -> None:
    function = lambda m, x: (lambda parts: parts[0] * parts[1])(m.first(x).chunk(3, 1))  # noqa: E731
    model = extend(Model(function), use_converter=True)
    model.head = extend(nn.Linear(1, 3))
    for _ in range(3):
        model(torch.rand(4, 2))
    gc.collect()
    assert not [call for m in model.modules() for call in alive.live_calls(m)]


def test_places() -> None:
    assert Layout(1, 3).place([3, 4]) == Place(0, 1, 3)
    assert Layout(1, 3).place([1, 3, 4]) == Place(1, 1, 3)
    assert Layout(4, 3).place([4, 3, 2]) == Place(1, 1, 3)
    assert Layout(4, 3).place([12, 2]) == Place(0, 4, 3)
    apart = Place(1, 1, 3, is_split=True)  # samples merged with what follows them
    assert Layout(4, 3).place([4, 6]) == apart
    assert Layout(8, 3).place([4, 6]) == Place(1, 2, 3, is_split=True)
    assert Layout(2, 3).place([4, 6]) is None  # in the middle of an axis
    x = torch.arange(24).reshape(4, 6)
    assert apart.to_canonical(x).flatten(1).tolist() == [
        n.flatten().tolist() for n in x.reshape(4, 3, 2).transpose(0, 1)
    ]
    assert apart.from_canonical(apart.to_canonical(x).unsqueeze(0), 1).tolist() == [x.tolist()]
    x = torch.arange(12)
    canonical = Place(0, 4, 3).to_canonical(x)
    assert canonical.tolist() == x.reshape(4, 3).T.flatten().tolist()
    assert Place(0, 4, 3).from_canonical(canonical.unsqueeze(0), 4).tolist() == [x.tolist()]


def test_assumptions_are_corrected_together() -> None:
    one, other = Layout.of_axis([5, 3], 0, assumed=True), Layout.of_axis([5, 3], 0, assumed=True)
    one.unify(other)
    one.correct([5, 3], 1)
    assert (other.before, other.samples, other.assumed) == (5, 3, False)
    derived = Layout(3, 5, True, sources=[Layout.of_axis([5, 3], 0, assumed=True)])
    with pytest.raises(ValueError, match="assumption"):
        derived.correct([3, 5], 0)


class WithNeighbours(nn.Module):
    """Lets a module read the features of each sample, and those of the one before."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.first, self.module = nn.Linear(3, 4), module

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        found = self.module(h.roll(1, 0), h, *[h] * isinstance(self.module, ATTENTION))
        return found[0] if isinstance(found, tuple) else found


ATTENTION = (nn.MultiheadAttention, nn.TripletMarginLoss)


@pytest.mark.parametrize("converter", ["trace", "record"])
@pytest.mark.parametrize(
    "module",
    [
        nn.Bilinear(4, 4, 2),
        nn.MultiheadAttention(4, 1, batch_first=True),
        nn.TripletMarginLoss(),
        nn.MSELoss(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_that_combine_samples_in_different_orders(module: Any, converter: Any) -> None:
    """Pairs of a sample and another one (negative examples) are no samples."""
    model = extend(WithNeighbours(module), use_converter=converter)
    output = model(torch.rand(5, 2, 3))
    loss = extend(nn.MSELoss())(output, torch.rand_like(output)) if output.dim() else output
    with (
        pytest.raises(ValueError, match=f"{type(module).__name__}.*combines different samples"),
        backpack(extensions.BatchGrad()),
    ):
        loss.backward()


class Rearranged(nn.Module):
    """Lets a module read samples in another order, with what has no samples at the same places.

    That are masks and states that are stored, or parameters.
    """

    def __init__(self, module: nn.Module, order: Sequence[int], *others: Any) -> None:
        super().__init__()
        self.first, self.module, self.last = nn.Linear(3, 4), module, nn.Linear(4, 2)
        self.others = nn.ParameterList(x for x in others if isinstance(x, nn.Parameter))
        self.stored = [x for x in others if not isinstance(x, nn.Parameter)]
        self.order = torch.tensor(order)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([h := self.first(x), h.sin()])[self.order]
        repeated = [both, both] if isinstance(self.module, nn.MultiheadAttention) else []
        found = self.module(both, *repeated, *self.others, *self.stored)
        found = found[0] if isinstance(found, tuple) else found
        return (
            self.last(torch.zeros_like(both).index_add(0, self.order, found))
            .unflatten(0, (2, -1))
            .square()
            .mean((0, 2))
        )


IN_ORDER, SOME = [0, 1, 2, 3, 4, 5], [4, 0, 3, 2, 5, 1]
PARTNERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "padding": lambda: (
        nn.MultiheadAttention(4, 1, batch_first=True),
        torch.tensor([[i == 0, i == 1, False] for i in range(6)]),
    ),
    "masks of heads": lambda: (
        nn.MultiheadAttention(4, 2, batch_first=True),
        *(None, False, torch.randn(12, 3, 3, dtype=torch.float64)),
    ),
    "mask of all": lambda: (
        nn.MultiheadAttention(4, 2, batch_first=True),
        *(None, False, torch.randn(3, 3, dtype=torch.float64)),
    ),
    "state": lambda: (
        nn.GRU(4, 4, batch_first=True),
        torch.randn(1, 6, 4, dtype=torch.float64),
    ),
    "parameter as a state": lambda: (
        nn.GRU(4, 4, batch_first=True),
        nn.Parameter(torch.randn(1, 6, 4)),
    ),
    "parameter": lambda: (nn.Bilinear(4, 4, 4), nn.Parameter(torch.randn(6, 3, 4))),
}


@pytest.mark.parametrize("converter", ["trace", "record"])
@pytest.mark.parametrize("order", [IN_ORDER, SOME], ids=["merged", "rearranged"])
@pytest.mark.parametrize("name", PARTNERS)
def test_what_has_no_samples_is_read_at_the_places_of_those(
    name: str, order: list[int], converter: Any
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        module, *others = PARTNERS[name]()
        return Rearranged(module, order, *others).double()

    X, y = torch.rand(3, 3, 3, dtype=torch.float64), torch.tensor([0, 1, 1])
    with sdpa_kernel(SDPBackend.MATH):
        truth = build(), nn.CrossEntropyLoss(), X, y
        grads, diagonals = oracle.batch_grad(*truth), oracle.batch_ggn_diag(*truth)
    model = extend(build(), use_converter=converter)
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(extensions.BatchGrad(), extensions.BatchDiagGGNExact()):
        loss.backward()
    for p, grad, diagonal in zip(model.parameters(), grads, diagonals, strict=True):
        torch.testing.assert_close(p.grad_batch, grad)
        torch.testing.assert_close(p.diag_ggn_exact_batch, diagonal)


class Flattened(nn.Module):
    """Positions are merged with the axis of samples behind a layer: the last one, or the first."""

    def __init__(self, place: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)])
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).relu()
        x = self.layers[1](x.reshape(-1, 4) if self.place == 0 else x).relu()
        return self.layers[2](x.reshape(-1, 4) if self.place == 1 else x).reshape(-1, 3)


OF_SAMPLES: dict[str, Callable[[], Any]] = {
    "grad_batch": extensions.BatchGrad,
    "diag_ggn_exact_batch": extensions.BatchDiagGGNExact,
    "diag_h_batch": extensions.BatchDiagHessian,
    "sqrt_ggn_exact": lambda: extensions.SqrtGGNExact(subsampling=[2, 0]),
    "ggn_gram": extensions.GGNGram,
    "kflr": extensions.KFLR,
    "kflr expand": lambda: extensions.KFLR(approximation="expand"),
    "kflr reduce": lambda: extensions.KFLR([1], approximation="reduce"),
}


@pytest.mark.parametrize("size", [1, 500, 2**30])
@pytest.mark.parametrize("converter", ["trace", "record"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("what", OF_SAMPLES)
def test_layers_behind_merged_positions_have_the_same_samples(
    what: str, place: int, converter: Any, size: int
) -> None:
    """Also if each row is one of the loss, up to which no layer brings rows together."""
    torch.manual_seed(0)
    X, y = torch.rand(3, 5, 4), torch.randint(3, (15,))
    flattened, last = Flattened(place), Flattened(2)
    last.load_state_dict(flattened.state_dict())
    found = []
    for model, limit in ((flattened, size), (last, 2**30)):
        model, ext = extend(model, use_converter=converter), OF_SAMPLES[what]()
        lossfunc = extend(nn.CrossEntropyLoss(ignore_index=1))
        with slice_bytes(limit), backpack(ext):
            lossfunc(model(X), y).backward()
        found.append([getattr(p, ext.savefield) for p in model.parameters()])
    torch.testing.assert_close(*found)


class Merging(nn.Module):
    """Rows of a sample merge in several steps on one way, and at once on others."""

    def __init__(self, ways: str):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)
        self.of_two, self.of_three = nn.Linear(3, 3), nn.Linear(2, 2)
        self.ways, self.sum, self.last = ways, SumModule(), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 4] -> [N·6, 1]."""
        h = self.first(x)
        found = []
        if "2" in self.ways:
            found.append(self.of_two(self.second(h).view(-1, 3)).view(-1, 1))
        if "3" in self.ways:
            found.append(self.of_three(h.view(-1, 2)).view(-1, 1))
        if "1" in self.ways:
            found.append(self.second(h).view(-1, 1))
        return self.last(self.sum(*found))


@pytest.mark.parametrize("converter", [False, "trace", "record"])
@pytest.mark.parametrize("ways", ["2", "3", "12", "13", "23", "123"])
@pytest.mark.parametrize("size", [1, 2**30])
def test_columns_of_rows_that_merge_in_steps(ways: str, size: int, converter: Any) -> None:
    """A column belongs to the same row of the loss on each way, and at all parameters."""
    torch.manual_seed(0)
    model, X, y = Merging(ways).double(), torch.rand(3, 4).double(), torch.rand(18, 1).double()
    plain = copy.deepcopy(model)
    extended, lossfunc = extend(model, use_converter=converter), extend(nn.MSELoss())
    exts = extensions.SqrtGGNExact(), extensions.DiagGGNExact(), extensions.GGNMP()
    with slice_bytes(size), backpack(*exts, extensions.BatchDiagGGNExact()):
        lossfunc(extended(X), y).backward()
    used = {name: p for name, p in extended.named_parameters() if p.grad is not None}
    own = dict(plain.named_parameters())
    J = torch.cat(oracle._jacobian(plain(X), [own[name] for name in used]), 1)
    truth = 2 / 18 * J.T @ J
    columns: dict[int, list[tuple[slice, Tensor]]] = {}  # by the number of rows
    start = 0
    for p in used.values():
        part = slice(start, start + p.numel())
        start, block = part.stop, truth[part, part]
        diagonal = block.diagonal().view_as(p)
        torch.testing.assert_close(p.diag_ggn_exact, diagonal, **TOLERANCE)
        torch.testing.assert_close(p.diag_ggn_exact_batch.sum(0), diagonal, **TOLERANCE)
        units = torch.eye(p.numel(), dtype=p.dtype).view(-1, *p.shape)
        torch.testing.assert_close(p.ggnmp(units).flatten(1), block, **TOLERANCE)
        columns.setdefault(p.sqrt_ggn_exact.shape[1], []).append((part, p.sqrt_ggn_exact))
    assert start == len(truth)
    for each in columns.values():
        for (one, S), (other, R) in product(each, each):
            block = S.flatten(2).flatten(0, 1).T @ R.flatten(2).flatten(0, 1)
            torch.testing.assert_close(block, truth[one, other], **TOLERANCE)


def test_columns_of_losses_with_other_numbers_of_rows() -> None:
    """One loss sees all rows, the other one sees whole samples: layers join them alike."""
    torch.manual_seed(0)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(3, 3)
            self.third, self.head, self.sum = nn.Linear(1, 1), nn.Linear(6, 2), SumModule()

        def forward(self, x: Tensor) -> Any:
            one, other = self.first(x), self.second(x.view(-1, 3))
            rows = self.sum(one.view(-1, 1), other.view(-1, 1))
            return self.third(rows), self.head(self.sum(one, other.view(-1, 6)))

    model, X, truth = Heads().double(), torch.rand(3, 6).double(), 0.0
    model = extend(model, use_converter="trace")
    shared = [*model.first.parameters(), *model.second.parameters()]
    for output in model(X):
        J = torch.cat(oracle._jacobian(output, shared), 1)
        truth = truth + 2 * J.T @ J
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    with backpack(extensions.SqrtGGNExact()):
        sum(lossfunc(output, torch.zeros_like(output)) for output in model(X)).backward()
    S = torch.cat([p.sqrt_ggn_exact.flatten(2).flatten(0, 1) for p in shared], 1)
    torch.testing.assert_close(S.T @ S, truth, **TOLERANCE)


class MeanOverSamples(nn.Module):
    """A loss of one's own of sequences, with the samples along some axis."""

    reduction = "mean"

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axes = (1 - axis, 2)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).square().sum(self.axes).exp().mean()


@pytest.mark.filterwarnings("error:The network mixes")
def test_own_losses_of_sequences_along_the_first_axis() -> None:
    """They have as many samples as with the batch along the first axis, and mix none."""
    found = []
    for axis in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.RNN(3, 4, batch_first=axis == 0)).double()
        model, lossfunc = extend(model), extend(MeanOverSamples(axis))
        x, y = steps(6).transpose(0, axis), steps(6)[..., :1].transpose(0, axis) / 9
        exts = extensions.KFAC(fisher="empirical"), extensions.Variance(), extensions.KFLR()
        with backpack(*exts):
            lossfunc(model(x)[0], y).backward()
        found.append([(p.kfac, p.variance, p.kflr) for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1], **TOLERANCE)
