"""Graphs and other ragged samples: ``assign_samples`` says which sample each row belongs to."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import assign_samples, backpack, extend, extensions
from backpack.core.record.data_notes import layout_of
from backpack.influence import Influence
from backpack.linalg import EmpiricalFisher, KroneckerGGN
from backpack.linalg.objective import Objective
from backpack.optim import DPSGD

Batch = tuple[Tensor, Tensor, Tensor]
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def graphs(sizes: Sequence[int], seed: int = 0) -> Batch:
    """Nodes, edges of rings, and the graph of each node."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    ring = [(a + i, a + (i + 1) % n) for a, n in zip(starts, sizes, strict=True) for i in range(n)]
    edges = torch.tensor(ring + [(j, i) for i, j in ring]).T
    return torch.rand(len(numbers), 4, generator=generator, dtype=torch.float64), edges, numbers


class Network(nn.Module):
    """Two layers that pass messages, and a readout of graphs or of nodes."""

    def __init__(self, passing: str = "sum", readout: str = "sum") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.attention, self.passing, self.readout = nn.Linear(10, 1), passing, readout
        self.double()

    def messages(self, h: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        received = h[source]
        if self.passing == "attention":
            score = self.attention(torch.cat([h[source], h[target]], 1)).exp()
            total = score.new_zeros(len(h), 1).index_add(0, target, score)
            received = received * score / total[target]
        return h + torch.zeros_like(h).index_add(0, target, received)

    def forward(self, x: Tensor, edges: Tensor, numbers: Tensor, count: int) -> Tensor:
        h = torch.tanh(self.messages(self.first(x), edges))
        h = torch.tanh(self.messages(self.second(h), edges))
        if self.readout == "max":
            index = numbers.unsqueeze(1).expand_as(h)
            h = h.new_zeros(count, 5).scatter_reduce(0, index, h, "amax", include_self=False)
        elif self.readout != "nodes":
            h = h.new_zeros(count, 5).index_add(0, numbers, h)
        if self.readout == "mean":
            h = h / torch.bincount(numbers, minlength=count).clamp(min=1).unsqueeze(1)
        return self.last(h)


def targets(network: Network, batch: Batch, count: int) -> Tensor:
    return torch.arange(len(batch[0]) if network.readout == "nodes" else count) % 3


def individual_gradients(network: Network, batch: Batch, count: int) -> list[Tensor]:
    """Those of graphs one by one, of their part of the mean over all."""
    x, edges, numbers = batch
    y, rows = targets(network, batch, count), []
    for g in range(count):
        own = (numbers == g).nonzero().flatten()
        renumbered = torch.full((len(x),), -1).index_put((own,), torch.arange(len(own)))
        inside = renumbered[edges[:, numbers[edges[0]] == g]]
        output = network(x[own], inside, torch.zeros(len(own), dtype=torch.long), 1)
        target = y[own] if network.readout == "nodes" else y[g : g + 1]
        loss = nn.functional.cross_entropy(output, target, reduction="sum") / len(y)
        found = torch.autograd.grad(loss, [*network.parameters()], allow_unused=True)
        pairs = zip(found, network.parameters(), strict=True)
        rows.append([torch.zeros_like(p) if grad is None else grad for grad, p in pairs])
    return [torch.stack(each) for each in zip(*rows, strict=True)]


def ggn_diagonals(network: Network, batch: Batch, count: int) -> list[Tensor]:
    output = network(*batch, count)
    p = output.softmax(1).detach()
    hessian = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) / len(p)
    found = []
    for w in network.parameters():
        rows = [
            torch.autograd.grad(o, w, retain_graph=True, allow_unused=True)[0]
            for o in output.flatten()
        ]
        J = torch.stack([torch.zeros_like(w) if row is None else row for row in rows])
        J = J.reshape(*output.shape, -1)
        found.append(torch.einsum("nca,ncd,nda->a", J, hessian, J).reshape(w.shape))
    return found


def trained(network: Network) -> list[int]:
    """Numbers of the parameters that the network uses."""
    named = enumerate(network.named_parameters())
    return [i for i, (name, _) in named if network.passing == "attention" or name[:2] != "at"]


@pytest.mark.parametrize("converter", [True, "record"])
@pytest.mark.parametrize("readout", ["sum", "mean", "max", "nodes"])
@pytest.mark.parametrize("passing", ["sum", "attention"])
def test_batches_of_graphs(passing: str, readout: str, converter: Any) -> None:
    """Batches of the same shapes hold other graphs: what one has shown is not used for others."""
    plain = Network(passing, readout)
    model, lossfunc = (
        extend(copy.deepcopy(plain), use_converter=converter),
        extend(nn.CrossEntropyLoss()),
    )
    parameters = [*model.parameters()]
    for sizes in ([3, 2, 4], [2, 4, 3], [5, 4], [9], [1, 1, 2]):
        batch, count = graphs(sizes), len(sizes)
        y = targets(plain, batch, count)
        assign_samples(batch[0], batch[2])
        with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            lossfunc(model(*batch, count), y).backward()
        individual, diagonals = (
            individual_gradients(plain, batch, count),
            ggn_diagonals(plain, batch, count),
        )
        for i in trained(plain):
            torch.testing.assert_close(parameters[i].grad_batch, individual[i], **TOLERANCE)
            torch.testing.assert_close(parameters[i].diag_ggn_exact, diagonals[i], **TOLERANCE)


def test_rows_in_any_order_and_samples_without_rows() -> None:
    plain = Network()
    x, edges, numbers = graphs([3, 4, 2])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    place = torch.argsort(order)
    batch = x[order], place[edges], 2 * numbers[order]  # no rows of samples 1, 3 and 5
    model, lossfunc = (
        extend(copy.deepcopy(plain), use_converter=True),
        extend(nn.CrossEntropyLoss()),
    )
    assert assign_samples(batch[0], batch[2], 6) is batch[0]
    with backpack(extensions.BatchGrad()):
        lossfunc(model(*batch, 6), targets(plain, batch, 6)).backward()
    wanted = individual_gradients(plain, batch, 6)
    parameters = [*model.parameters()]
    for i in trained(plain):
        torch.testing.assert_close(parameters[i].grad_batch, wanted[i], **TOLERANCE)


@pytest.mark.parametrize("numbers", [[0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 2]])
def test_rows_of_samples_in_a_model_without_a_converter(numbers: list[int]) -> None:
    """Its data were taken for as many samples as rows: right results came with a warning."""
    X, y, owner = torch.rand(6, 4).double(), torch.tensor([0, 1, 2, 2, 1, 0]), torch.tensor(numbers)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model, lossfunc = extend(copy.deepcopy(plain)), nn.CrossEntropyLoss(reduction="sum")
    assign_samples(X, owner)
    with warnings.catch_warnings(), backpack(extensions.BatchGrad()):
        warnings.simplefilter("error")
        extend(copy.deepcopy(lossfunc))(model(X), y).backward()
    for n in range(3):
        loss = lossfunc(plain(X[owner == n]), y[owner == n])
        own = torch.autograd.grad(loss, list(plain.parameters()))
        for p, g in zip(model.parameters(), own, strict=True):
            torch.testing.assert_close(p.grad_batch[n], g, **TOLERANCE)  # type: ignore[attr-defined]


def test_rows_that_a_model_without_a_converter_moves() -> None:
    class Turned(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flip(0))  # type: ignore[no-any-return]

    X = assign_samples(torch.rand(6, 4), torch.tensor([0, 0, 0, 1, 2, 2]))
    model = extend(Turned(nn.Linear(4, 3)))
    loss = extend(nn.CrossEntropyLoss())(model(X), torch.tensor([0, 1, 2, 2, 1, 0]))
    with (
        pytest.warns(UserWarning, match="are not those of samples"),
        backpack(extensions.BatchGrad()),
    ):
        loss.backward()


def test_edges_between_graphs_are_refused() -> None:
    x, edges, numbers = graphs([3, 2, 4])
    edges[1, 0] = 5
    model, lossfunc = extend(Network(), use_converter="record"), extend(nn.CrossEntropyLoss())
    assign_samples(x, numbers)
    loss = lossfunc(model(x, edges, numbers, 3), torch.arange(3))
    with (
        pytest.raises(ValueError, match="combines different samples"),
        backpack(extensions.BatchGrad()),
    ):
        loss.backward()


PRIVATE: Any = {
    **{"lr": 1.0, "max_grad_norm": 0.1, "noise_multiplier": 0.0},
    "expected_batch_size": 3,
}


def test_private_steps() -> None:
    """Gradients of graphs are clipped."""
    plain, batch = Network(), graphs([3, 2, 4])
    model, lossfunc = (
        extend(copy.deepcopy(plain), use_converter=True),
        extend(nn.CrossEntropyLoss()),
    )
    used = [[*model.parameters()][i] for i in trained(plain)]
    optimizer = DPSGD(used, lr=1.0, max_grad_norm=0.1, noise_multiplier=0.0, expected_batch_size=3)
    assign_samples(batch[0], batch[2])
    with backpack(*optimizer.extensions):
        lossfunc(model(*batch, 3), torch.arange(3)).backward()
    optimizer.step()
    each = individual_gradients(plain, batch, 3)
    norms = sum(3**2 * g.flatten(1).square().sum(1) for g in each).sqrt()
    factors = (0.1 / norms).clamp(max=1)
    before = [*plain.parameters()]
    for p, i in zip(used, trained(plain), strict=True):
        step = torch.einsum("n,n...->...", factors, 3 * each[i]) / 3
        torch.testing.assert_close(p, before[i] - step, **TOLERANCE)


class TwoKinds(nn.Module):
    """Samples with rows of two kinds, which are in other orders."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, z: Tensor, of_x: Tensor, of_z: Tensor) -> Tensor:
        zeros = self.last.weight.new_zeros(3, 4)
        a = zeros.index_add(0, of_x, self.first(x).tanh())
        return self.last(a * zeros.index_add(0, of_z, self.second(z).tanh()))


class Centred(TwoKinds):
    """One kind is centred, by all samples."""

    def forward(self, x: Tensor, z: Tensor, of_x: Tensor, of_z: Tensor) -> Tensor:
        with torch.no_grad():
            z = z - z.mean(0)
        return super().forward(x, z, of_x, of_z)


class Weighed(TwoKinds):
    """One kind has a weight for each row, which nobody has said the samples of."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.rand(6, 1).double()

    def forward(self, x: Tensor, z: Tensor, of_x: Tensor, of_z: Tensor) -> Tensor:
        return super().forward(x * self.weights, z, of_x, of_z)


@pytest.mark.parametrize("of_x", [[0, 0, 1, 1, 2, 2], [1, 0, 2], [0, 1, 2]])
@pytest.mark.parametrize("of_z", [[0, 1, 2, 0, 1, 2], [2, 1, 0, 1, 0, 2], [2, 0, 1]])
def test_private_steps_with_rows_in_two_orders(of_x: list[int], of_z: list[int]) -> None:
    """Inputs of as many rows were taken to have the same order, and the step was refused."""
    plain, y = TwoKinds().double(), torch.tensor([0, 2, 1])
    x, z = torch.rand(len(of_x), 3).double(), torch.rand(len(of_z), 2).double()
    numbers = torch.tensor(of_x), torch.tensor(of_z)
    model = extend(copy.deepcopy(plain), use_converter="record")
    optimizer = DPSGD(model.parameters(), **PRIVATE)
    assign_samples(x, numbers[0]), assign_samples(z, numbers[1])
    if 3 in (len(of_x), len(of_z)):  # as many as there are samples
        assign_samples(y, torch.arange(3))
        for index in numbers:
            assign_samples(index, None)
    with backpack(*optimizer.extensions):
        extend(nn.CrossEntropyLoss())(model(x, z, *numbers), y).backward()
    optimizer.step()
    total = [torch.zeros_like(p) for p in plain.parameters()]
    for n in range(3):
        kept = [index == n for index in numbers]
        rows = x[kept[0]], z[kept[1]], *[torch.full([int(k.sum())], n) for k in kept]
        loss = nn.functional.cross_entropy(plain(*rows)[n], y[n])
        grads = torch.autograd.grad(loss, [*plain.parameters()])
        factor = min(1.0, 0.1 / torch.cat([g.flatten() for g in grads]).norm().item())
        total = [t + factor * g for t, g in zip(total, grads, strict=True)]
    for p, before, t in zip(model.parameters(), plain.parameters(), total, strict=True):
        torch.testing.assert_close(p, before - t / 3, **TOLERANCE)


def test_private_steps_that_mix_rows_in_two_orders() -> None:
    """They are refused; so are rows of which nobody has said whose they are."""
    of_x, of_z = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([2, 1, 0, 1, 0, 2])
    x, z = torch.rand(6, 3).double(), torch.rand(6, 2).double()
    assign_samples(x, of_x), assign_samples(z, of_z)

    def step(model: nn.Module) -> None:
        optimizer = DPSGD(extend(model, use_converter="record").parameters(), **PRIVATE)
        with backpack(*optimizer.extensions):
            extend(nn.CrossEntropyLoss())(model(x, z, of_x, of_z), torch.arange(3)).backward()
        optimizer.step()

    with pytest.raises(ValueError, match="would not be private"):
        step(Centred().double())
    weighed = Weighed().double()
    with pytest.raises(ValueError, match="in several orders"):
        step(weighed)
    assign_samples(weighed.weights, of_x)
    step(weighed)


@pytest.mark.parametrize(
    ("tensor", "numbers", "samples", "message"),
    [
        (torch.rand(3, 2), torch.rand(3), None, "Give integers"),
        (torch.rand(3, 2), torch.arange(2), None, r"one for each row, \[3\]"),
        (torch.rand(3, 2), torch.arange(3), 2, "largest number is 2, of 2 samples"),
        (torch.rand(3, 2).requires_grad_(), torch.arange(3), None, "detach"),
        (torch.rand(2, 2), torch.tensor([[0, 1], [1, 2]]), None, "along one axis"),
    ],
)
def test_numbers_that_do_not_fit(
    tensor: Tensor, numbers: Tensor, samples: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        assign_samples(tensor, numbers, samples)
    with pytest.raises(TypeError, match="a tensor, got list"):
        assign_samples(tensor.detach(), [0, 1])  # type: ignore[arg-type]


def test_data_without_samples() -> None:
    """A table with as many rows as there are samples, which nobody could tell from data."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.last(torch.tanh(x @ self.layer(table).T))

    torch.manual_seed(0)
    plain = Lookup().double()
    x, table = torch.rand(3, 3).double(), torch.rand(3, 2).double()
    model, lossfunc = (
        extend(copy.deepcopy(plain), use_converter="record"),
        extend(nn.MSELoss(reduction="sum")),
    )
    assign_samples(table, None)
    with backpack(extensions.BatchGrad()):
        lossfunc(model(x, table), torch.zeros(3, 1).double()).backward()
    for n in range(3):
        loss = plain(x[n : n + 1], table).square().sum()
        wanted = torch.autograd.grad(loss, [*plain.parameters()])
        for p, grad in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad_batch[n], grad, **TOLERANCE)


def test_integers_beside_data_without_samples() -> None:
    """Tokens have samples, whatever is said of a table."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.position = nn.Embedding(7, 5), nn.Linear(2, 5)
            self.last = nn.Linear(5, 3)

        def forward(self, tokens: Tensor, table: Tensor) -> Tensor:
            return self.last(torch.tanh(self.embedding(tokens) + self.position(table)).mean(1))

    torch.manual_seed(0)
    plain = Tokens().double()
    tokens, table = torch.randint(7, (4, 6)), torch.rand(6, 2).double()
    model, lossfunc = (
        extend(copy.deepcopy(plain), use_converter="record"),
        extend(nn.CrossEntropyLoss()),
    )
    assign_samples(table, None)
    y = torch.arange(4) % 3
    with backpack(extensions.BatchGrad()):
        lossfunc(model(tokens, table), y).backward()
    for n in range(4):
        loss = nn.functional.cross_entropy(plain(tokens[n : n + 1], table), y[n : n + 1]) / 4
        wanted = torch.autograd.grad(loss, [*plain.parameters()])
        for p, grad in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad_batch[n], grad, **TOLERANCE)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_padding(is_sorted: bool) -> None:
    """Rows behind the graphs of a batch, connected with themselves, that reach no loss."""
    plain = Network()
    x, edges, numbers = graphs([3, 2, 4])
    rows = torch.arange(12) if is_sorted else torch.randperm(12)
    place = torch.argsort(rows)
    padded = torch.cat([x, torch.zeros(3, 4).double()])[rows]
    own = torch.cat([numbers, torch.full((3,), -1)])[rows]
    edges = place[torch.cat([edges, torch.arange(9, 12).expand(2, 3)], 1)]
    model, lossfunc = (
        extend(copy.deepcopy(plain), use_converter="record"),
        extend(nn.CrossEntropyLoss()),
    )
    assign_samples(padded, own)
    output = model(padded, edges, torch.where(own < 0, 3, own), 4)
    y = torch.tensor([0, 1, 2, -100])
    with backpack(extensions.BatchGrad()):
        lossfunc(output, y).backward()
    individual = individual_gradients(plain, graphs([3, 2, 4]), 3)
    for p, wanted in zip(model.parameters(), individual, strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad_batch, wanted, **TOLERANCE)


@pytest.mark.parametrize("adds", ["index_add", "scatter_add", "scatter_reduce"])
@pytest.mark.parametrize("is_read_from", [True, False])
@pytest.mark.parametrize("converter", [True, "record"])
def test_nodes_that_are_not_assigned(converter: Any, is_read_from: bool, adds: str) -> None:
    """The error says how to do it, wherever nodes meet: in their neighbours, or in graphs."""
    network = Received("nodes", adds) if is_read_from else Network(readout="sum")
    if not is_read_from:
        network.messages = lambda h, edges: h  # type: ignore[method-assign]
    model = extend(network, use_converter=converter)
    batch = graphs([3, 2, 4])
    loss = extend(nn.CrossEntropyLoss())(model(*batch, 3), torch.arange(3))
    message = r"combines different samples.*each graph is a sample: .*assign_samples\(x, graph\)"
    with pytest.raises(ValueError, match=message), backpack(extensions.BatchGrad()):
        loss.backward()


@pytest.mark.parametrize("said", ["nothing", "none", "rows"])
def test_private_steps_with_other_features_of_nodes(said: str) -> None:
    """What may be data of the samples is refused until somebody says whose it is."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.position, self.last = nn.Linear(4, 5), nn.Linear(2, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor, position: Tensor, numbers: Tensor) -> Tensor:
            h = torch.tanh(self.layer(x) + self.position(position - position.mean(0)))
            return self.last(h.new_zeros(3, 5).index_add(0, numbers, h))

    (x, _, numbers), position = graphs([3, 2, 4]), torch.rand(9, 2).double()
    model, lossfunc = (
        extend(Positions().double(), use_converter="record"),
        extend(nn.CrossEntropyLoss()),
    )
    optimizer = DPSGD(
        model.parameters(), lr=1.0, max_grad_norm=0.1, noise_multiplier=0.0, expected_batch_size=3
    )
    assign_samples(x, numbers)
    if said != "nothing":
        assign_samples(position, numbers if said == "rows" else None)
    with backpack(*optimizer.extensions):
        lossfunc(model(x, position, numbers), torch.arange(3)).backward()
    if said == "none":
        optimizer.step()
        return
    message = "assign_samples" if said == "nothing" else "function of the data"
    with pytest.raises(ValueError, match=message):
        optimizer.step()


class Received(Network):
    """Nodes read what they receive: zeros, if that is nothing."""

    def __init__(self, made_of: str, adds: str) -> None:
        super().__init__()
        self.made_of, self.adds = made_of, adds

    def receive(self, h: Tensor, edges: Tensor) -> Tensor:
        sent = h[edges[0]]
        if self.made_of == "nodes":
            zeros = torch.zeros_like(h)
        else:
            zeros = sent.new_zeros(len(h), h.shape[1])
        if self.adds == "index_add":
            return zeros.index_add(0, edges[1], sent)
        index = edges[1].unsqueeze(1).expand_as(sent)
        if self.adds == "scatter_add":
            return zeros.scatter_add(0, index, sent)
        return zeros.scatter_reduce(0, index, sent, "amax", include_self=False)

    def forward(self, x: Tensor, edges: Tensor, numbers: Tensor, count: int) -> Tensor:
        h = torch.tanh(self.first(self.receive(x, edges)))
        h = torch.tanh(self.second(self.receive(h, edges)) + h)
        return self.last(h.new_zeros(count, 5).index_add(0, numbers, h))


@pytest.mark.parametrize("adds", ["index_add", "scatter_add", "scatter_reduce"])
@pytest.mark.parametrize("made_of", ["nodes", "messages"])
@pytest.mark.parametrize(
    ("sizes", "edges"),
    [
        ([1, 2, 1], [(1, 2), (2, 1), (1, 1)]),
        ([1, 2, 1], [(1, 2)]),
        ([4, 1, 1], [(0, 1), (1, 0), (0, 2)]),
        ([3, 2, 4], [(0, 1), (4, 3), (5, 6), (6, 7)]),
        ([1, 2, 3], [(3, 4), (4, 3)]),
        ([2, 1], [(0, 1), (1, 0), (0, 1)]),
    ],
    ids=str,
)
def test_nodes_that_receive_no_message(
    sizes: list[int], edges: list[tuple[int, int]], made_of: str, adds: str
) -> None:
    """Rows of zeros are those of nodes, unless there are as many messages of other graphs."""
    plain, (x, _, numbers) = Received(made_of, adds), graphs(sizes)
    batch, count = (x, torch.tensor(edges).T, numbers), len(sizes)
    model, lossfunc = (
        extend(copy.deepcopy(plain), use_converter="record"),
        extend(nn.CrossEntropyLoss()),
    )
    assign_samples(x, numbers)
    loss = lossfunc(model(*batch, count), targets(plain, batch, count))
    is_told = made_of == "nodes" or len(edges) != len(x)
    refuses = nullcontext() if is_told else pytest.raises(ValueError, match="samples of the batch")
    with refuses, backpack(extensions.BatchGrad()):
        loss.backward()
    wanted, parameters = individual_gradients(plain, batch, count), [*model.parameters()]
    for i in trained(plain) if is_told else []:
        torch.testing.assert_close(parameters[i].grad_batch, wanted[i], **TOLERANCE)


@pytest.mark.parametrize("converter", ["record", True])
@pytest.mark.parametrize("readout", ["sum", "mean", "max", "nodes"])
@pytest.mark.parametrize("passing", ["sum", "attention"])
@pytest.mark.parametrize("numbers", [[0, 2, 2], [1, 2, 2], [0, 0, 2], [1, 1, 2, 2]], ids=str)
def test_graphs_without_nodes_where_there_are_as_many_nodes(
    numbers: list[int], passing: str, readout: str, converter: Any
) -> None:
    """It was an error: zeros that are filled have a row for each graph, or for each node."""
    count, plain = len(numbers), Network(passing, readout)
    x, edges, _ = graphs([n for n in map(numbers.count, range(count)) if n])
    batch = x, edges, torch.tensor(numbers)
    model = extend(copy.deepcopy(plain), use_converter=converter)
    assign_samples(x, batch[2], count)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(model(*batch, count), targets(plain, batch, count)).backward()
    individual, diagonals = (f(plain, batch, count) for f in (individual_gradients, ggn_diagonals))
    parameters = [*model.parameters()]
    for i in trained(plain):
        torch.testing.assert_close(parameters[i].grad_batch, individual[i], **TOLERANCE)
        torch.testing.assert_close(parameters[i].diag_ggn_exact, diagonals[i], **TOLERANCE)


POOLED: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "zeros": lambda x, own, n: torch.zeros(n, 4, dtype=x.dtype).index_add(0, own, x),
    "new": lambda x, own, n: x.new_zeros(n, 4).index_add(0, own, x),
    "scattered": lambda x, own, n: torch.zeros(n, 4, dtype=x.dtype).scatter_add(
        0, own.unsqueeze(1).expand_as(x), x
    ),
}


class PoolsData(Network):
    """Adds up the nodes of each graph before the first layer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, edges: Tensor, numbers: Tensor, count: int) -> Tensor:
        return self.last(torch.tanh(self.first(POOLED[self.name](x, numbers, count))))


@pytest.mark.parametrize("converter", ["record", True])
@pytest.mark.parametrize("numbers", [[0, 2, 2], [1, 1], [0, 1, 2], [0, 0, 1]], ids=str)
@pytest.mark.parametrize("name", POOLED)
def test_data_of_graphs_that_is_added_up(name: str, numbers: list[int], converter: Any) -> None:
    """Zeros that data fills have a row for each graph, of as many nodes as well."""
    count = 2 if numbers[-1] == 1 else 3
    plain, (x, edges, _) = PoolsData(name), graphs([len(numbers)])
    batch = x, edges, torch.tensor(numbers)
    model = extend(copy.deepcopy(plain), use_converter=converter)
    assign_samples(x, batch[2], count)
    with backpack(extensions.BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(*batch, count), targets(plain, batch, count)).backward()
    for p, rows in zip(model.parameters(), individual_gradients(plain, batch, count), strict=True):
        if p.grad is None:  # layers that are not called
            assert not rows.any()
        else:
            torch.testing.assert_close(p.grad_batch, rows, **TOLERANCE)


class OfOne(nn.Module):
    """Takes what the network takes as one argument."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Any) -> Tensor:
        return self.network(*batch)


@pytest.mark.parametrize("readout", ["sum", "nodes"])
def test_second_moments_of_the_gradients_of_graphs(readout: str) -> None:
    """Operators add up nodes of a graph, and divide by the terms of the loss; or they refuse."""
    plain, batches, count = Network("sum", readout), [graphs([3, 2, 4]), graphs([2, 1])], [3, 2]
    model, loss = OfOne(copy.deepcopy(plain)), nn.CrossEntropyLoss()
    rows, data = [], []
    for batch, n in zip(batches, count, strict=True):
        y = targets(plain, batch, n)
        individual = individual_gradients(plain, batch, n)
        rows.append(torch.cat([individual[i].flatten(1) for i in trained(plain)], 1) * len(y))
        assign_samples(batch[0], batch[2])
        data.append(((*batch, n), y))
    terms, of_each = sum(len(y) for _, y in data), torch.cat(rows)
    params = [p for i, p in enumerate(model.parameters()) if i in trained(plain)]
    options: dict[str, Any] = {"params": params, "progress": False}
    expected = of_each.T @ of_each / terms
    scores = Influence(model, loss, data, "identity", **options).self_scores()
    torch.testing.assert_close(scores, of_each.square().sum(1) / terms)
    blocks = KroneckerGGN(model, loss, data, fisher="empirical", **options).to_dense()
    torch.testing.assert_close(blocks[-3:, -3:], expected[-3:, -3:])  # the last bias
    fisher = EmpiricalFisher(model, loss, data, **options)
    if readout == "nodes":
        with pytest.raises(NotImplementedError, match=r"9 rows of the output.* belong to 3"):
            fisher.to_dense()
    else:
        torch.testing.assert_close(fisher.to_dense(), expected)


def test_operators_move_data_that_were_assigned() -> None:
    """The samples of data on another device than the model are those that they were."""
    (x, edges, numbers), table = graphs([3, 2]), torch.rand(5, 2)
    assign_samples(x, numbers), assign_samples(table, None)
    model = nn.Linear(4, 3, device="meta")
    objective = Objective(model, nn.CrossEntropyLoss(), [((x, table, edges), numbers)], None, False)
    ((X, _),) = objective
    layouts = [layout_of(one) for one in X]
    assert [one.device.type for one in X] == ["meta"] * 3
    assert layouts[:2] == [layout_of(x), layout_of(table)]
    assert layouts[2] is None


class Receives(nn.Module):
    """A leaf that sums messages along the last axis but one."""

    def forward(self, messages: Tensor, target: Tensor, nodes: int) -> Tensor:
        shape = (*messages.shape[:-2], nodes, messages.shape[-1])
        return messages.new_zeros(shape).index_add(-2, target, messages)


class Stacks(Network):
    """Two stacks of layers, whose nodes are along the second axis."""

    def __init__(self) -> None:
        super().__init__(readout="mean")
        self.receives = Receives()

    def messages(self, h: Tensor, edges: Tensor) -> Tensor:
        stacked = torch.stack([h, h.sin()])
        return self.receives(stacked[:, edges[0]], edges[1], len(h)).sum(0)


@pytest.mark.parametrize("sizes", [[3, 3, 3], [3, 2, 4]], ids=str)
def test_leaves_without_parameters_that_see_nodes_behind_another_axis(sizes: list[int]) -> None:
    plain, batch, count = Stacks(), graphs(sizes), len(sizes)
    model = extend(copy.deepcopy(plain), use_converter="record")
    lossfunc = extend(nn.CrossEntropyLoss())
    assign_samples(batch[0], batch[2])
    with warnings.catch_warnings(), backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        warnings.simplefilter("error")
        lossfunc(model(*batch, count), targets(plain, batch, count)).backward()
    individual = individual_gradients(plain, batch, count)
    diagonals, parameters = ggn_diagonals(plain, batch, count), [*model.parameters()]
    for i in trained(plain):
        torch.testing.assert_close(parameters[i].grad_batch, individual[i], **TOLERANCE)
        torch.testing.assert_close(parameters[i].diag_ggn_exact, diagonals[i], **TOLERANCE)


ENDING = """
import torch
from backpack import assign_samples
from backpack.core.record import data_notes
x = torch.rand(3, 2)
assign_samples(x, torch.arange(3))
# both outlive the modules that know them
torch.kept, torch.notes = x, data_notes.OF_DATA
"""


def test_python_ends_without_a_word_while_samples_are_assigned() -> None:
    """It told of an ignored exception where Python had taken the notes' name away first."""
    found = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, check=True)
    assert "ignored" not in found.stderr.decode()
