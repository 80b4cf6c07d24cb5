"""Sequences through the engine: recurrent layers and cells, embeddings, a batch axis anywhere.

What each quantity is for a single network is tested in test_quantities.py, and the products of
the modules in test_recurrent.py and test_embedding.py.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from cases import CASES, Case, Problem, select
from test_quantities import TOLERANCE, check, run
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from backpack import assign_samples, backpack, extend, extensions
from backpack.core.derivatives import FunctionDerivatives, reductions, register
from backpack.core.record import alive
from backpack.custom_module.permute import Permute
from backpack.custom_module.slicing import Slicing


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, **TOLERANCE)


def named(*names: str) -> list[Case]:
    found = [case for case in CASES if case.name in names]
    assert len(found) == len(names)
    return found


# --------------------------------------------------------------------------------------
# Kronecker factors
# --------------------------------------------------------------------------------------

NETWORKS = [
    case
    for case in select("network", without="rows")
    if case.tags & {"recurrent", "embedding", "function", "sequence"}
]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("case", NETWORKS, ids=str)
def test_kfra_is_kflr_for_equal_samples(case: Case, times: int) -> None:
    """Among them a single one, whose axis is hard to tell from others."""
    model, loss, X, y = case.build()
    X, y = torch.cat([X[:1]] * times), torch.cat([y[:1]] * times)
    for p in run(Problem(model, loss, X, y), extensions.KFRA(), extensions.KFLR()):
        close(p.kfra, p.kflr)


@pytest.mark.parametrize("case", NETWORKS, ids=str)
def test_kfra_has_the_shapes_of_kflr(case: Case) -> None:
    for p in run(case.build(), extensions.KFRA(), extensions.KFLR()):
        for factor, other in zip(p.kfra, p.kflr, strict=True):
            assert factor.shape == other.shape
            assert torch.linalg.eigvalsh(factor).min() > -1e-10


@pytest.mark.parametrize("case", select("recurrent"), ids=str)
def test_biases_have_their_block(case: Case) -> None:
    """They have no input, hence no other factor; weights have one."""
    params = run(case.build(), extensions.KFLR())
    for p, block in zip(params, oracle.ggn_blocks(*case.reference()), strict=True):
        assert len(p.kflr) == p.dim()
        if p.dim() == 1:
            close(p.kflr, [block])


# --------------------------------------------------------------------------------------
# The samples are along any axis
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", select("time_first"), ids=str)
def test_samples_of_a_loss_on_rows_of_a_sequence(case: Case) -> None:
    """The rows belong to time first, but quantities have one entry for each sample."""
    exts = [
        extensions.BatchGrad,
        extensions.BatchL2Grad,
        extensions.BatchDiagGGNExact,
        extensions.BatchDiagHessian,
    ]
    whole = run(case.build(), *(ext() for ext in exts))
    part = run(case.build(), *(ext(subsampling=[2, 0]) for ext in exts))
    for p, q in zip(whole, part, strict=True):
        for ext in exts:
            field = ext().savefield
            assert len(getattr(p, field)) == 3
            close(getattr(q, field), getattr(p, field)[[2, 0]])


class Classifier(nn.Module):
    """Classify sequences; the same network in three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.lstm = nn.LSTM(2, 2, batch_first=way == "batch first")
        self.exchange, self.head = Permute(1, 0, 2), nn.Linear(2, 3)
        self.last = Slicing((-1,) if way == "time first" else (slice(None), -1))

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, 2] -> [N, 3]."""
        if self.way == "batch first":
            x, _ = self.lstm(x)
        elif self.way == "time first":
            x, _ = self.lstm(x.transpose(0, 1))
        else:
            x, _ = self.lstm(x.transpose(0, 1))
            x = self.exchange(x)
        return self.head(self.last(x))


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_the_batch_axis_changes_nothing(steps: int) -> None:
    """Also where the axes have the same length, or a single entry."""
    exts = [
        extensions.BatchGrad(),
        extensions.BatchDiagGGNExact(),
        extensions.KFLR(),
        extensions.KFRA(),
        extensions.DiagHessian(),
        extensions.SqrtGGNExact(),
    ]
    for samples in (1, 3):
        torch.manual_seed(0)
        X = torch.randn(samples, steps, 2, dtype=torch.float64)
        y = torch.randint(3, (samples,))
        found = []
        for way in ("batch first", "time first", "exchanged"):
            torch.manual_seed(1)
            model = Classifier(way).double()
            found.append(run(Problem(model, nn.CrossEntropyLoss(), X, y), *exts))
        for other in found[1:]:
            for p, q in zip(found[0], other, strict=True):
                for ext in exts:
                    close(getattr(q, ext.savefield), getattr(p, ext.savefield))


class Wave(nn.Module):
    """A function with a parameter, of tensors ``[T, N, 2]``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        """[T, N, 2] -> [T, N, 2]."""
        return (x * self.weight).sin()


register(Wave)(FunctionDerivatives)


def test_samples_along_another_axis_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reductions treat a few samples at a time, wherever these are."""
    monkeypatch.setattr(reductions, "SLICE_ENTRIES", 1)
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2), Permute(1, 0, 2), Wave(), Permute(1, 0, 2), nn.Flatten()]
    model, loss = nn.Sequential(*layers, nn.Linear(8, 3)).double(), nn.CrossEntropyLoss()
    X, y = torch.randn(3, 4, 2, dtype=torch.float64), torch.tensor([0, 2, 1])
    expected = oracle.batch_l2(model, loss, X, y)
    check(run(Problem(model, loss, X, y), extensions.BatchL2Grad()), "batch_l2", expected)


# --------------------------------------------------------------------------------------
# Several losses
# --------------------------------------------------------------------------------------


class TwoTasks(nn.Module):
    """Classify a sequence, and predict something at each step."""

    def __init__(self, kind: type[nn.Module], task: int | None = None) -> None:
        super().__init__()
        self.task, self.layer = task, kind(2, 2)
        self.exchange, self.last = Permute(1, 0, 2), Slicing((-1,))
        self.classify, self.predict = nn.Linear(2, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        """[N, T, 2] -> [N, 3] and [N, T, 2], or one of the two."""
        output, states = self.layer(x.transpose(0, 1))
        state = states[0] if isinstance(states, tuple) else states
        scores = self.classify(self.last(state)), self.predict(self.exchange(output))
        return scores if self.task is None else scores[self.task]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_losses_of_several_outputs(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = TwoTasks(kind).double()
    X, labels = torch.randn(3, 4, 2, dtype=torch.float64), torch.tensor([0, 2, 1])
    targets = torch.randn(3, 4, 2, dtype=torch.float64)
    truths = []
    for function in (
        oracle.batch_grad,
        oracle.ggn_diag,
        oracle.hessian_diag,
        oracle.hessian_blocks,
    ):
        parts = []
        for task, (loss, y) in enumerate(
            [(nn.CrossEntropyLoss(), labels), (nn.MSELoss(), targets)]
        ):
            model.task = task
            parts.append(function(oracle.twin(model), loss, X, y))
        truths.append([one + 2 * two for one, two in zip(*parts, strict=True)])
    model.task = None

    extend(model)
    first, second = extend(nn.CrossEntropyLoss()), extend(nn.MSELoss())
    scores, predictions = model(X)
    loss = first(scores, labels) + 2 * second(predictions, targets)
    exts = [
        extensions.BatchGrad(),
        extensions.DiagGGNExact(),
        extensions.DiagHessian(),
        extensions.HMP(),
    ]
    with backpack(*exts):
        loss.backward()
    for p, grads, ggn, diagonal, block in zip(model.parameters(), *truths, strict=True):
        close(p.grad_batch, grads)
        close(p.diag_ggn_exact, ggn)
        close(p.diag_h, diagonal)
        vectors = torch.rand(2, *p.shape, dtype=p.dtype)
        close(p.hmp(vectors).flatten(1), vectors.flatten(1) @ block)


# --------------------------------------------------------------------------------------
# Graphs and memory
# --------------------------------------------------------------------------------------

EVERY_KIND = named("rnn", "lstm-states", "gru-cell", "tagger", "attention", "class-token")

# the extension, and the truth
DIFFERENTIABLE = {
    "variance": (extensions.Variance, oracle.variance),
    "batch_l2": (extensions.BatchL2Grad, oracle.batch_l2),
    "diag_ggn_exact": (extensions.DiagGGNExact, oracle.ggn_diag),
    "diag_h": (extensions.DiagHessian, oracle.hessian_diag),
    "hmp": (extensions.HMP, oracle.hessian_blocks),
}


@pytest.mark.parametrize("field", DIFFERENTIABLE)
@pytest.mark.parametrize("case", EVERY_KIND, ids=str)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_create_graph(case: Case, field: str) -> None:
    """Derivative of a random projection of the quantity, against the oracle's differences."""
    make, truth = DIFFERENTIABLE[field]
    torch.manual_seed(0)
    problem, eps = case.reference(), 1e-4
    start = [p.detach().clone() for p in oracle.trainable(problem.model)]
    step = [torch.randn_like(p) for p in start]
    for module in problem.model.modules():  # autograd says that nothing depends on their values
        if getattr(module, "padding_idx", None) is not None:
            i = [p is module.weight for p in oracle.trainable(problem.model)].index(True)
            step[i][module.padding_idx] = 0
    weights = [torch.randn_like(value) for value in truth(*problem)]

    def projected(scale: float) -> Tensor:
        with torch.no_grad():
            for p, q, s in zip(oracle.trainable(problem.model), start, step, strict=True):
                p.copy_(q + scale * s)
        return sum((w * v).sum() for w, v in zip(weights, truth(*problem), strict=True))

    far = (projected(2 * eps) - projected(-2 * eps)) / (4 * eps)
    near = (projected(eps) - projected(-eps)) / (2 * eps)
    expected = (4 * near - far) / 3  # error O(eps^4)

    model, lossfunc, X, y = case.build()
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of torch have no second derivative
        loss = extend(lossfunc)(extend(model)(X), y)
    with backpack(make()):
        loss.backward(create_graph=True)
    params = oracle.trainable(model)
    values = [getattr(p, field) for p in params]
    if field == "hmp":
        values = [
            product(torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)).flatten(1)
            for product, p in zip(values, params, strict=True)
        ]
    total = sum((w * v).sum() for w, v in zip(weights, values, strict=True))
    close(total, projected(0.0))
    slopes = torch.autograd.grad(total, params, materialize_grads=True)
    slope = sum((g * s).sum() for g, s in zip(slopes, step, strict=True))
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", EVERY_KIND, ids=str)
def test_two_backward_passes(case: Case) -> None:
    exts = [extensions.BatchGrad(), extensions.DiagHessian(), extensions.KFLR()]
    once = run(case.build(), *exts)
    model, lossfunc, X, y = case.build()
    loss = extend(lossfunc)(extend(model)(X), y)
    for _ in range(2):
        with backpack(*exts, retain_graph=True):
            loss.backward(retain_graph=True)
        for p, q in zip(once, oracle.trainable(model), strict=True):
            for ext in exts:
                close(getattr(q, ext.savefield), getattr(p, ext.savefield))


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY_KIND, ids=str)
def test_nothing_is_left(case: Case) -> None:
    """What the forward pass recorded dies with the backward pass, without a garbage collector."""
    model, lossfunc, X, y = case.build()
    extend(model), extend(lossfunc)
    exts = [
        extensions.BatchGrad(),
        extensions.DiagGGNExact(),
        extensions.DiagHessian(),
        extensions.KFLR(),
        extensions.KFRA(),
    ]

    def step() -> int:
        """Return the number of tensors that are alive afterwards."""
        output = model(X)
        loss = lossfunc(output, y)
        recorded = [weakref.ref(call) for m in model.modules() for call in alive.live_calls(m)]
        assert len(recorded) > 3
        with backpack(*exts):
            loss.backward()
        del loss, output
        assert not any(call() for call in recorded)
        for p in model.parameters():
            p.grad = None
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    step()  # fills what is kept for good
    gc.collect()
    gc.disable()
    try:
        assert step() == step()
    finally:
        gc.enable()


# --------------------------------------------------------------------------------------
# Packed sequences
# --------------------------------------------------------------------------------------


def check_samples(plain: nn.Module, y: Tensor, *inputs: Any) -> None:
    """Compare with gradients of the loss of each sample, and of each entry of the output."""
    model = extend(copy.deepcopy(plain), use_converter="record")
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        extend(nn.MSELoss(reduction="sum"))(model(*inputs), y).backward()
    params, z = list(plain.parameters()), plain(*inputs)
    losses = (z - y).square().sum(1)
    each = [torch.autograd.grad(one, params, retain_graph=True) for one in losses]
    rows = [torch.autograd.grad(one, params, retain_graph=True) for one in z.flatten()]
    for i, p in enumerate(model.parameters()):
        close(p.grad_batch, torch.stack([of_sample[i] for of_sample in each]))
        close(p.diag_ggn_exact, 2 * sum(row[i].square() for row in rows))


class OfPacked(nn.Module):
    """Reads a packed sequence, embeds its tokens, and returns the last states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(7, 3), nn.GRU(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: PackedSequence) -> Tensor:
        return self.head(self.rnn(x._replace(data=self.embedding(x.data)))[1][-1])


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("lengths", [(4, 3, 2, 1), (5, 3, 3), (2, 2), (3, 1)], ids=str)
def test_packed_sequences_as_arguments(lengths: tuple[int, ...], is_sorted: bool) -> None:
    """Steps are no samples, also if there are as many, or if the sequences came sorted."""
    torch.manual_seed(0)
    plain, y = OfPacked().double(), torch.rand(len(lengths), 2, dtype=torch.float64)
    tokens = [torch.randint(7, (n,)) for n in (lengths if is_sorted else lengths[::-1])]
    packed = pack_sequence(tokens, enforce_sorted=is_sorted)
    check_samples(plain, y, packed)


class FromStates(nn.Module):
    """Reads padded sequences of any lengths, from states that are given."""

    def __init__(self, kind: Any, states: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rnn, self.head, self.states = kind(2, 2, batch_first=True), nn.Linear(2, 2), states

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        h = self.states(x)
        _, last = self.rnn(packed, (h, h + 0.5) if isinstance(self.rnn, nn.LSTM) else h)
        return self.head((last[0] if isinstance(last, tuple) else last)[-1])


STATES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.zeros(1, len(x), 2, dtype=x.dtype),
    "like data": lambda x: x.new_zeros(1, len(x), 2),
    "different": lambda x: torch.arange(2.0 * len(x), dtype=x.dtype).view(1, len(x), 2),
    "copies": lambda x: torch.full((1, 1, 2), 0.3, dtype=x.dtype).expand(1, len(x), 2),
    "data": lambda x: x[None, :, 0],
}


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM])
@pytest.mark.parametrize("states", STATES.values(), ids=STATES)
@pytest.mark.parametrize("lengths", [(2, 3, 1), (3, 3, 3)], ids=str)
def test_packed_sequences_from_states(lengths: Any, states: Any, kind: Any) -> None:
    """Torch brings constant states, too, into the order of the lengths."""
    torch.manual_seed(0)
    X, y = torch.rand(3, 3, 2, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    check_samples(FromStates(kind, states).double(), y, X, torch.tensor(lengths))


class OfOneSample(nn.Module):
    """Makes a sequence of one sample of its steps."""

    def __init__(self, layer: nn.Module, sequence: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.sequence = nn.Linear(2, 2), layer, sequence

    def forward(self, x: Tensor) -> Tensor:
        x = self.sequence(self.first(x))  # [T, 1, 2]
        inputs = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        return self.layer(*inputs)[0][-1]


@pytest.mark.parametrize("layer", [nn.GRU(2, 2), nn.MultiheadAttention(2, 1)], ids=str)
@pytest.mark.parametrize(
    "sequence",
    [lambda x: x.view(-1, 1, 2), lambda x: x.squeeze(0).unsqueeze(1), lambda x: x.transpose(0, 1)],
)
def test_sequence_first_of_one_sample(sequence: Any, layer: nn.Module) -> None:
    torch.manual_seed(0)
    X, y = torch.rand(1, 4, 2, dtype=torch.float64), torch.rand(1, 2, dtype=torch.float64)
    check_samples(OfOneSample(layer, sequence).double(), y, X)


def test_assigned_samples_that_are_one() -> None:
    X = torch.rand(4, 1, 2, dtype=torch.float64)
    assign_samples(X, torch.zeros(4, 1, 2, dtype=torch.long))
    lstm = extend(nn.LSTM(2, 2).double())
    with backpack(extensions.BatchGrad()):
        lstm(X)[0].sum().backward()
    for p in lstm.parameters():
        close(p.grad_batch, p.grad[None])


# --------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ext", [extensions.BatchGrad(), extensions.DiagGGNExact()], ids=repr)
def test_packed_sequences(ext: Any) -> None:
    lstm, head = extend(nn.LSTM(2, 2)), extend(nn.Linear(2, 2))
    _, (h, _) = lstm(pack_sequence([torch.rand(3, 2), torch.rand(2, 2)]))
    loss = extend(nn.MSELoss())(head(h), torch.zeros(1, 2, 2))
    with pytest.raises((ValueError, NotImplementedError), match="pad_sequence"), backpack(ext):
        loss.backward()
