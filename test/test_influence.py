"""Influence against dense formulas in float64, and against training without a sample."""

from __future__ import annotations

import builtins
import copy
import gc
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from cases import CASES, Case
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from backpack import backpack, extend
from backpack.extensions import ProjectedGrad
from backpack.influence import Influence, ProjectedInfluence, TracIn
from backpack.linalg import GGN, DiagonalGGN, EmpiricalFisher, Hessian, KroneckerGGN
from backpack.linalg.order import SameInEachPass
from backpack.utils.files import load_tensors, save_tensors

N, Q, DAMPING = 9, 4, 0.05
SIZES = (4, 3, 2)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Compute in double precision."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class Sequence(nn.Module):
    """A recurrent model with functions in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(6, 3), nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0][:, -1].relu())


class Tagger(nn.Module):
    """An output at each position, some of which do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).transpose(1, 2)


def problem(name: str, reduction: str = "mean") -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A model, a loss, and N + Q samples."""
    count = N + Q
    labels = torch.randint(3, (count,))
    if name == "mlp":
        model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        return model, nn.CrossEntropyLoss(reduction=reduction), torch.randn(count, 3), labels
    if name == "mse":
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        loss = nn.MSELoss(reduction=reduction)
        return model, loss, torch.randn(count, 3), torch.randn(count, 3)
    if name == "cnn":
        body = (nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
        loss = nn.CrossEntropyLoss(reduction=reduction)
        return nn.Sequential(*body), loss, torch.randn(count, 1, 6, 6), labels
    if name == "sequence":
        loss = nn.CrossEntropyLoss(reduction=reduction)
        return Sequence(), loss, torch.randint(6, (count, 5)), labels
    y = torch.randint(3, (count, 4))
    y[0, 1] = y[5] = y[-1, :2] = -100
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]), reduction=reduction)
    return Tagger(), loss, torch.randn(count, 4, 2), y


def batches(X: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X[:N].split(SIZES), y[:N].split(SIZES), strict=True))


def summed(loss: nn.Module) -> nn.Module:
    """The same loss as a sum of its terms."""
    options = {"weight": loss.weight} if isinstance(loss, nn.CrossEntropyLoss) else {}
    return type(loss)(**options, reduction="sum")  # type: ignore[arg-type]


def sample_gradients(model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> Tensor:
    """``∇ℓ_n`` of the sums of terms, sample by sample with plain autograd: [N, P]."""
    rows = []
    for n in range(len(X)):
        value = summed(loss)(model(X[n : n + 1]), y[n : n + 1])
        gradient = torch.autograd.grad(value, [*model.parameters()])
        rows.append(torch.cat([g.flatten() for g in gradient]))
    return torch.stack(rows)


def num_terms(loss: Any, y: Tensor) -> float:
    """What the mean over the training data divides by."""
    if loss.reduction == "sum":
        return 1.0
    if isinstance(loss, nn.MSELoss):
        return float(y[:N].numel())
    weight = torch.ones(3) if loss.weight is None else loss.weight
    return float(sum(weight[k] for k in y[:N].flatten() if k >= 0))


NAMES = ("mlp", "mse", "cnn", "sequence", "tagger")


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["identity", DiagonalGGN, KroneckerGGN, GGN, Hessian])
def test_scores(name: str, kind: Any, reduction: str) -> None:
    """``∇ℓ_qᵀ (H + λI)⁻¹ ∇ℓ_n / W``, from dense matrices."""
    model, loss, X, y = problem(name, reduction)
    data = batches(X, y)
    damping = 2.0 if kind is Hessian else DAMPING  # it has negative eigenvalues
    damping *= num_terms(problem(name)[1], y) if reduction == "sum" else 1
    kept = [p.clone() for p in model.parameters()]
    influence = Influence(model, loss, data, kind, damping, tolerance=1e-12)
    G = sample_gradients(model, loss, X, y)
    H = torch.eye(G.shape[1])
    if kind != "identity":
        H = kind(model, loss, data).to_dense() + damping * H
    both = G @ torch.linalg.solve(H, G[:N].T) / num_terms(loss, y)
    found = influence.scores((X[N:], y[N:]))
    assert_close(found, both[N:], rtol=1e-6, atol=1e-8)
    several = [(X[N : N + 1], y[N : N + 1]), (X[N + 1 :], y[N + 1 :])]
    assert_close(influence.scores(several), found, rtol=1e-6, atol=1e-8)
    assert_close(influence.self_scores(), both[:N].diagonal(), rtol=1e-6, atol=1e-8)
    assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, model.parameters(), kept))
    assert not hasattr(next(iter(model.children())), "_backpack_extend")


@pytest.mark.parametrize("case", [c for c in CASES if "mixing" not in c.tags], ids=str)
def test_every_case(case: Case) -> None:
    """Inner products of individual gradients, of models that are not extended."""
    torch.set_default_dtype(torch.float32)
    given = case.build()
    model, loss, X, y = given.model, given.loss, given.X, given.y
    try:
        influence = Influence(model, loss, [(X, y)], "identity")
    except ValueError as error:
        assert "model.eval()" in str(error) or "'reduction'" in str(error) or "mixes" in str(error)
        pytest.skip(str(error))
    gradients = oracle.batch_grad(*case.reference())
    rows = torch.cat([g.reshape(len(g), -1) for g in gradients], 1)
    weight = influence._objective.weight(X, model(X), (y,))
    expected = weight * rows @ rows.T
    assert_close(influence.scores([(X, y)]), expected, rtol=1e-6, atol=1e-9)
    assert_close(influence.self_scores(), expected.diagonal(), rtol=1e-6, atol=1e-9)


def test_scores_do_not_depend_on_the_reduction() -> None:
    found = []
    for reduction in ("mean", "sum"):
        torch.manual_seed(3)
        model, loss, X, y = problem("mlp", reduction)
        damping = DAMPING * (N if reduction == "sum" else 1)
        influence = Influence(model, loss, batches(X, y), KroneckerGGN, damping)
        found.append(influence.scores((X[N:], y[N:])))
    assert_close(*found)


@pytest.mark.parametrize("name", ["mlp", "cnn", "sequence"])
def test_parts_add_up(name: str) -> None:
    """Scores by module and by parameter, each from the blocks of its parameters."""
    model, loss, X, y = problem(name)
    influence = Influence(model, loss, batches(X, y), damping=DAMPING)
    queries = (X[N:], y[N:])
    whole = influence.scores(queries)
    for by in ("module", "parameter"):
        parts = influence.scores(queries, by=by)
        assert_close(torch.stack([*parts.values()]).sum(0), whole)
    assert list(parts) == [n for n, _ in model.named_parameters()]
    G = sample_gradients(model, loss, X, y)
    first, *_ = model.parameters()
    some = slice(0, first.numel())
    H = KroneckerGGN(model, loss, batches(X, y)).to_dense()[some, some]
    H = H + DAMPING * torch.eye(len(H))
    expected = G[N:, some] @ torch.linalg.solve(H, G[:N, some].T) / N
    assert_close(parts[next(iter(parts))], expected)


class Transformer(nn.Module):
    """A causal language model, whose parts are as simple as they can be.

    With ``each``, parameters of its own for each sample and position, it is its own oracle: the
    gradients with respect to these are the terms of the gradient.
    """

    def __init__(self, tied: bool = False, flat: bool = False) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(6, 4), nn.Embedding(5, 4)
        self.norm, self.mix, self.head = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 6)
        self.flat = flat
        if tied:
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]).expand_as(ids))
        h = self.norm(self.attend(x))
        h = h.flatten(0, 1) if self.flat else h
        logits = self.head(torch.tanh(self.mix(h)))
        return (logits.unflatten(0, ids.shape) if self.flat else logits).transpose(1, 2)

    @staticmethod
    def attend(x: Tensor) -> Tensor:
        return x + nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    def spread(self, ids: Tensor, each: list[dict[str, Tensor]]) -> Tensor:
        """Compute the same with parameters ``[N, T, *p]``, those of the second use apart."""
        first, second = each
        n, t = torch.meshgrid(*map(torch.arange, ids.shape), indexing="ij")
        x = first["token.weight"][n, t, ids] + first["place.weight"][n, t, t]
        h = nn.functional.layer_norm(self.attend(x), [4])
        h = h * first["norm.weight"] + first["norm.bias"]
        h = (first["mix.weight"] @ h.unsqueeze(3)).squeeze(3) + first["mix.bias"]
        head = second["token.weight"] if "head.weight" not in first else first["head.weight"]
        y = (head @ h.tanh().unsqueeze(3)).squeeze(3) + first["head.bias"]
        return y.transpose(1, 2)


def token_terms(model: Transformer, loss: nn.Module, X: Tensor, y: Tensor) -> Tensor:
    """The terms of the samples' gradients, ``[N, T, P]``."""
    own = dict(model.named_parameters())
    each = [
        {k: p.detach().expand(*X.shape, *p.shape).clone().requires_grad_() for k, p in own.items()}
        for _ in range(2)
    ]
    loss(model.spread(X, each), y).backward()
    zero = torch.zeros(())
    sums = [each[0][k].grad + (zero if each[1][k].grad is None else each[1][k].grad) for k in own]
    return torch.cat([g.flatten(2) for g in sums], 2)


def sentences() -> tuple[Tensor, Tensor]:
    X, y = torch.randint(6, (N + Q, 5)), torch.randint(6, (N + Q, 5))
    y[1, :2] = y[2] = y[-1, 4] = -100
    return X, y


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["identity", KroneckerGGN, DiagonalGGN])
def test_token_scores(kind: Any, tied: bool, flat: bool, rank: int | None) -> None:
    """Terms of the gradient at each position, from parameters of their own for each."""
    model, loss, (X, y) = Transformer(tied, flat), nn.CrossEntropyLoss(), sentences()
    influence = Influence(model, loss, batches(X, y), kind, DAMPING, query_rank=rank)
    queries = (X[N:], y[N:])
    found = influence.token_scores(queries)
    assert found.shape == (Q, N, 5)
    assert_close(found.sum(2), influence.scores(queries))
    assert not found[:, 2].any()
    by = influence.token_scores(queries, by="parameter")
    assert_close(torch.stack([*by.values()]).sum(0), found)
    assert list(by) == [name for name, _ in model.named_parameters()]
    if rank is None:
        terms = token_terms(model, nn.CrossEntropyLoss(reduction="sum"), X, y)
        G = terms.sum(1)[N:]
        along = influence.precondition(G.T).T
        expected = torch.einsum("qp,ntp->qnt", along, terms[:N]) / (y[:N] >= 0).sum()
        assert_close(found, expected)


def test_token_scores_are_those_of_the_losses_where_tokens_do_not_meet() -> None:
    model, loss, X, y = problem("tagger")
    influence = Influence(model, loss, batches(X, y), KroneckerGGN, DAMPING)
    G = sample_gradients(model, loss, X[N:], y[N:])
    along = influence.precondition(G.T).T
    found = influence.token_scores([(X[N : N + 1], y[N : N + 1]), (X[N + 1 :], y[N + 1 :])])
    for t in range(4):
        one = sample_gradients(model, loss, X[:N, t : t + 1], y[:N, t : t + 1])
        assert_close(found[:, :, t], along @ one.T / num_terms(loss, y))


def test_token_scores_of_batches_of_several_lengths(tmp_path: Path) -> None:
    """Batches with fewer tokens have zeros at the end; results are read from a folder."""
    model, loss, (X, y) = Transformer(), nn.CrossEntropyLoss(reduction="sum"), sentences()
    data = [(X[:4], y[:4]), (X[4:7, :3], y[4:7, :3]), (X[7:N, :4], y[7:N, :4])]
    influence = Influence(model, loss, data, KroneckerGGN, DAMPING)
    queries = (X[N:], y[N:])
    found = influence.token_scores(queries, folder=tmp_path)
    assert not found[:, 4:7, 3:].any()
    assert found[:, 4:7, 2].any()
    assert_close(found.sum(2), influence.scores(queries))
    assert_close(influence.token_scores(queries, folder=tmp_path), found)
    with pytest.raises(ValueError, match="other queries, options"):
        influence.scores(queries, folder=tmp_path)


class Grid(nn.Module):
    """Layers at positions ``[T1, T2]``, which forwards have along axes of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:  # [N, T1, T2, 3]
        num_n, first, second, _ = x.shape
        kind = self.kind
        h = torch.tanh(self.first(x.flatten(1, 2) if kind == "unflatten" else x))
        h = h + h.mean(tuple(range(1, h.dim() - 1)), keepdim=True)  # positions meet
        if kind == "unflatten":
            h = h.unflatten(1, (first, second))
        elif kind == "flatten":
            h = h.flatten(1, 2)
        elif kind == "batch":
            h = h.flatten(0, 1)
        elif kind == "rows":
            h = h.flatten(0, 2)
        elif kind == "positions first":
            h = h.permute(1, 0, 2, 3)
        elif kind in ("transposed", "windows"):
            h = h.transpose(1, 2)
        h = h.flatten(0, 1) if kind == "windows" else h
        y = self.second(h)
        if kind == "positions first":
            y = y.permute(1, 0, 2, 3)
        elif kind == "windows":
            y = y.unflatten(0, (num_n, second)).transpose(1, 2)
        elif kind == "transposed":
            y = y.transpose(1, 2)
        return y.reshape(num_n, first, second, 3).movedim(3, 1)

    def terms(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Gradients of the summed loss along parameters of each position, ``[N, T1, T2, *p]``."""
        lead = x.shape[:3]
        own = {
            name: p.detach().expand(*lead, *p.shape).clone().requires_grad_()
            for name, p in self.named_parameters()
        }
        h = (own["first.weight"] @ x.unsqueeze(4)).squeeze(4) + own["first.bias"]
        h = torch.tanh(h)
        h = h + h.mean((1, 2), keepdim=True)
        out = (own["second.weight"] @ h.unsqueeze(4)).squeeze(4) + own["second.bias"]
        nn.functional.cross_entropy(out.movedim(3, 1), y, reduction="sum").backward()
        return {name: p.grad for name, p in own.items() if p.grad is not None}


def grids(first: int = 2, second: int = 3) -> tuple[Tensor, Tensor]:
    X = torch.randn(N + Q, first, second, 3)
    return X, torch.randint(3, X.shape[:3])


@pytest.mark.parametrize(
    "kind", ["axes", "flatten", "unflatten", "batch", "rows", "positions first"]
)
def test_token_scores_of_several_axes_of_positions(kind: str) -> None:
    """The last axis is counted first, however layers have the axes."""
    model, loss, (X, y) = Grid(kind), nn.CrossEntropyLoss(), grids()
    influence = Influence(model, loss, batches(X, y), damping=DAMPING)
    queries = (X[N:], y[N:])
    found = influence.token_scores(queries)
    terms = model.terms(X, y)
    flat = torch.cat([g.flatten(3) for g in terms.values()], 3)
    along = influence.precondition(flat.sum((1, 2))[N:].T).T
    each = along.split([g.flatten(3).shape[3] for g in terms.values()], 1)
    expected = {
        name: torch.einsum("qp,nabp->qnab", d, g[:N].flatten(3)) / (N * 6)
        for (name, g), d in zip(terms.items(), each, strict=True)
    }
    assert found.shape == (Q, N, 6)
    assert_close(found.unflatten(2, (2, 3)), torch.stack([*expected.values()]).sum(0))
    for name, part in influence.token_scores(queries, by="parameter").items():
        assert_close(part.unflatten(2, (2, 3)), expected[name])


@pytest.mark.parametrize("kind", ["transposed", "windows"])
def test_token_scores_of_axes_in_another_order(kind: str) -> None:
    """Positions are not added to others; those of each layer are in its own order."""
    (X, y), loss = grids(), nn.CrossEntropyLoss()
    found = []
    for each in ("axes", kind):
        torch.manual_seed(2)
        influence = Influence(Grid(each), loss, batches(X, y), "identity")
        found.append(influence.token_scores((X[N:], y[N:]), by="module"))
    plain, other = found
    assert_close(other["first"], plain["first"])
    by_axes = other["second"].unflatten(2, (3, 2)).transpose(2, 3)
    assert_close(by_axes, plain["second"].unflatten(2, (2, 3)))
    with pytest.raises(ValueError, match=r"'second.weight' is used at 3 x 2 .* at 2 x 3\. .*by="):
        influence.token_scores((X[N:], y[N:]))


def test_token_scores_of_merged_windows() -> None:
    """Windows that are merged with the samples may have another order than merged axes."""
    X, y = grids()
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 3), nn.Unflatten(0, (-1, 2)))
    last = nn.Sequential(nn.Flatten(1, 2), nn.Linear(3, 3), nn.Unflatten(1, (2, 3)))
    whole = nn.Sequential(*model, *last, nn.Tanh(), ChannelsFirst())
    influence = Influence(whole, nn.CrossEntropyLoss(), batches(X, y), "identity")
    with pytest.raises(ValueError, match=r"'4.weight' is used at 6 .* at 2 x 3\. .*by="):
        influence.token_scores((X[N:], y[N:]))


class ChannelsFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 1)


def test_token_scores_of_batches_with_axes_of_several_lengths() -> None:
    """Zeros are at the end of each axis."""
    model, loss = Grid("flatten"), nn.CrossEntropyLoss(reduction="sum")
    sizes = [(2, 3), (1, 4), (2, 2)]
    data = [grids(*size) for size in sizes]
    queries = grids()
    influence = Influence(model, loss, data, "identity")
    found = influence.token_scores(queries).unflatten(2, (2, 4))
    for i, ((first, second), batch) in enumerate(zip(sizes, data, strict=True)):
        alone = Influence(model, loss, [batch], "identity").token_scores(queries)
        own = found[:, i * (N + Q) : (i + 1) * (N + Q)]
        assert_close(own[:, :, :first, :second].flatten(2), alone)
        assert not own[:, :, first:].any()
        assert not own[:, :, :, second:].any()


def test_token_scores_of_layers_without_tokens() -> None:
    model, loss, X, y = problem("cnn")
    influence = Influence(model, loss, batches(X, y), "identity")
    with pytest.raises(NotImplementedError, match=r"'weight' of '0' \(Conv2d\).*params="):
        influence.token_scores((X[N:], y[N:]))
    model = nn.Sequential(nn.Linear(2, 3), nn.Flatten(), nn.Linear(12, 3))
    X, y = torch.randn(N + Q, 4, 2), torch.randint(3, (N + Q,))
    influence = Influence(model, nn.CrossEntropyLoss(), batches(X, y), damping=DAMPING)
    with pytest.raises(ValueError, match=r"'2\.weight' is used at 1 positions.* at 4"):
        influence.token_scores((X[N:], y[N:]))
    parts = influence.token_scores((X[N:], y[N:]), by="module")
    assert [part.shape[2] for part in parts.values()] == [4, 1]
    assert_close(parts["0"].sum(2) + parts["2"].sum(2), influence.scores((X[N:], y[N:])))


def test_top() -> None:
    model, loss, X, y = problem("mlp")
    influence = Influence(model, loss, batches(X, y), damping=DAMPING)
    queries = (X[N:], y[N:])
    scores = influence.scores(queries)
    for harmful in (False, True):
        order = scores.argsort(1, descending=not harmful)[:, :3]
        values, numbers = influence.top(3, queries, harmful)
        assert_close(numbers, order)
        assert_close(values, scores.gather(1, order))
        assert_close(influence.top(3, scores, harmful), (values, numbers))
        assert_close(influence.top(torch.tensor(3), scores, harmful), (values, numbers))  # type: ignore[arg-type]
    assert (values < 0).any() or scores.min() >= 0
    with pytest.raises(ValueError, match="less than 10 samples: 9"):
        influence.top(10, queries)
    with pytest.raises(ValueError, match="k has to be at least 1, got -1"):
        influence.top(-1, queries)
    with pytest.raises(ValueError, match=r"Scores are \[Q, N\], .*got \[9\]"):
        influence.top(3, scores[0])


def test_low_rank_queries() -> None:
    """Singular vectors of what is preconditioned; all of them are exact."""
    model, loss, X, y = problem("cnn")
    data, queries = batches(X, y), (X[N:], y[N:])
    exact = Influence(model, loss, data, damping=DAMPING)
    full = Influence(model, loss, data, damping=DAMPING, query_rank=2)
    assert_close(
        full.scores(queries, by="parameter")["0.weight"],
        exact.scores(queries, by="parameter")["0.weight"],
    )
    one = Influence(model, loss, data, damping=DAMPING, query_rank=1)
    G = sample_gradients(model, loss, X, y)
    inverse = KroneckerGGN(model, loss, data).inverse(DAMPING)
    along = (inverse @ G[N:].T).T[:, -27:-3].reshape(Q, 3, 8)
    left, values, right = torch.linalg.svd(along, full_matrices=False)
    near = torch.einsum("qo,q,qi->qoi", left[:, :, 0], values[:, 0], right[:, 0]).flatten(1)
    expected = near @ G[:N, -27:-3].T / N
    assert_close(one.scores(queries, by="parameter")["4.weight"], expected)


def test_low_rank_queries_in_half_precision() -> None:
    model = nn.Linear(4, 3, dtype=torch.bfloat16)
    X, y = torch.rand(5, 4, dtype=torch.bfloat16), torch.arange(5) % 3
    data, loss = [(X, y)], nn.CrossEntropyLoss()
    whole, low = (
        Influence(model, loss, data, "identity", query_rank=rank).scores((X[:2], y[:2]))
        for rank in (None, 1)  # a gradient of one position has rank 1
    )
    assert low.dtype == torch.bfloat16
    assert_close(low, whole, rtol=0.05, atol=1e-2)


def test_measure() -> None:
    """Something else than the loss of a query."""
    model, loss, X, y = problem("mlp")

    def margin(f: Tensor, y: Tensor) -> Tensor:
        return (f.gather(1, y.unsqueeze(1)).squeeze(1) - f.logsumexp(1)).sum()

    data = batches(X, y)
    measured = Influence(model, loss, data, damping=DAMPING, measure=margin)
    plain = Influence(model, loss, data, damping=DAMPING)
    queries = (X[N:], y[N:])
    assert_close(measured.scores(queries), -plain.scores(queries))  # it is minus the loss


@pytest.mark.parametrize("name", ["mlp", "seq2seq"])
@pytest.mark.parametrize("kind", [Influence, ProjectedInfluence, TracIn])
def test_measures_that_are_no_sum(kind: Any, name: str) -> None:
    """A mean depends on how the queries are cut into batches; it was taken as it is."""
    if name == "mlp":
        model, loss, X, y = problem("mlp")
    else:  # several terms for each query
        torch.manual_seed(0)
        model, loss = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4)), Flattened()
        X, y = torch.randint(5, (N + Q, 2)), torch.randint(4, (N + Q, 2))
    data, queries = batches(X, y), (X[N:], y[N:])
    more: Any = {TracIn: {"checkpoints": [model.state_dict()]}}.get(kind, {})

    def scores(measure: Any, queries: Any = queries) -> Tensor:
        return kind(model, loss, data, measure=measure, **more).scores(queries)

    def mean(f: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(f.flatten(0, -2), y.flatten())

    def total(f: Tensor, y: Tensor) -> Tensor:
        return y.numel() * mean(f, y)

    expected = kind(model, loss, data, **more).scores(queries)
    assert_close(scores(total), expected)
    for wrong in (mean, lambda f, y: f[1].sum()):
        with pytest.raises(ValueError, match=r"sum over the queries.*reduction='sum'"):
            scores(wrong)
    one = X[N : N + 1], y[N : N + 1]
    size = y[N].numel()
    assert_close(size * scores(mean, [one]), expected[:1])
    assert_close(scores(lambda f, y: f[0].sum(), [one]), scores(lambda f, y: f.sum(), [one]))
    for bad in (lambda f, y: f, lambda f, y: 1.0):
        with pytest.raises(ValueError, match=r"one number, the sum .*add \.sum\(\)"):
            scores(bad)


class Flattened(nn.CrossEntropyLoss):
    """The mean over samples and positions, ``[N, T, C]``."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return super().forward(f.transpose(1, -1), y)


def test_some_parameters_and_default_damping() -> None:
    model, loss, X, y = problem("mlp")
    data = batches(X, y)
    head = list(model[2].parameters())  # type: ignore[index]
    influence = Influence(model, loss, data, params=head)
    K = KroneckerGGN(model, loss, data, head)
    assert influence.damping == pytest.approx(float(K.trace()) / 15 / 10)
    G = sample_gradients(model, loss, X, y)[:, -15:]
    expected = G[N:] @ K.inverse(influence.damping).to_dense() @ G[:N].T / N
    assert_close(influence.scores((X[N:], y[N:])), expected)


# --------------------------------------------------------------------------------------
# Leaving out
# --------------------------------------------------------------------------------------


def trained(X: Tensor, y: Tensor, weights: Tensor, decay: float) -> Tensor:
    """Minimise ``1/N sum_n w_n ℓ_n + decay / 2 |θ|²`` of softmax regression by Newton's method."""
    theta = torch.zeros(3, X.shape[1] + 1)
    rows = torch.cat([X, torch.ones(len(X), 1)], 1)

    def objective(flat: Tensor) -> Tensor:
        f = rows @ flat.reshape(3, -1).T
        losses = nn.functional.cross_entropy(f, y, reduction="none")
        return (weights * losses).sum() / len(X) + decay / 2 * flat.square().sum()

    flat = theta.flatten()
    for _ in range(12):
        gradient = torch.autograd.functional.jacobian(objective, flat)
        flat = flat - torch.linalg.solve(
            torch.autograd.functional.hessian(objective, flat), gradient
        )
    assert torch.autograd.functional.jacobian(objective, flat).norm() < 1e-10
    return flat.reshape(3, -1)


def test_leave_one_out() -> None:
    """Rank correlation with the change of a query's loss when a sample is really left out."""
    count, decay = 40, 0.02
    X, queries = torch.randn(count, 4), torch.randn(5, 4)
    truth = torch.randn(4, 3)
    y = (X @ truth + torch.randn(count, 3)).argmax(1)
    y_queries = (queries @ truth).argmax(1)
    theta = trained(X, y, torch.ones(count), decay)
    model = nn.Linear(4, 3)

    def losses(theta: Tensor) -> Tensor:
        f = queries @ theta[:, :-1].T + theta[:, -1]
        return nn.functional.cross_entropy(f, y_queries, reduction="none")

    changes = []
    for n in range(count):
        without = trained(X, y, torch.arange(count).ne(n).double(), decay)
        changes.append(losses(without) - losses(theta))
    actual = torch.stack(changes, 1)  # [Q, N]
    with torch.no_grad():
        model.weight.copy_(theta[:, :-1])
        model.bias.copy_(theta[:, -1])
    data = list(zip(X.split(16), y.split(16), strict=True))
    correlation = {}
    for kind in (GGN, KroneckerGGN, DiagonalGGN, "identity"):
        influence = Influence(model, nn.CrossEntropyLoss(), data, kind, decay, tolerance=1e-10)
        found = influence.scores((queries, y_queries))
        name = kind if isinstance(kind, str) else kind.__name__  # type: ignore[union-attr]
        each = [spearmanr(a, b).statistic for a, b in zip(actual, found, strict=True)]
        correlation[name] = sum(each) / len(each)
        if kind is GGN:  # of a convex model: the Hessian
            assert (found - actual).norm() < 0.35 * actual.norm()
    assert correlation["GGN"] > 0.995  # approximations of it have 0.89
    assert correlation["KroneckerGGN"] > 0.85
    assert correlation["KroneckerGGN"] > correlation["identity"]


# --------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let imports of a package fail."""
    original = builtins.__import__

    def guarded(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.split(".")[0] == name:
            raise ImportError(module)
        return original(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)


@pytest.mark.parametrize("has_safetensors", [True, False])
@pytest.mark.parametrize("kind", ["identity", DiagonalGGN, KroneckerGGN])
def test_save_and_load(
    kind: Any, has_safetensors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loss, X, y = problem("cnn")
    data, queries = batches(X, y), (X[N:], y[N:])
    influence = Influence(model, loss, data, kind, DAMPING)
    path = tmp_path / "new" / "factors.safetensors"
    if not has_safetensors:
        without("safetensors", monkeypatch)
    influence.save(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    loaded = Influence.load(path, model, loss, data)
    assert loaded.damping == influence.damping
    assert_close(loaded.scores(queries), influence.scores(queries), rtol=0.0, atol=0.0)
    with pytest.raises(ValueError, match="other parameters"):
        Influence.load(path, model, loss, data, params=[next(model.parameters())])


def test_curvature_of_a_file_has_the_scale_of_its_loss(tmp_path: Path) -> None:
    """Without a curvature, the reduction does not matter."""
    model, loss, X, y = problem("cnn")
    data, queries, total = batches(X, y), (X[N:], y[N:]), nn.CrossEntropyLoss(reduction="sum")
    Influence(model, loss, data, KroneckerGGN, DAMPING).save(tmp_path / "factors")
    with pytest.raises(ValueError, match=r"reduction='mean'.* reduction='sum'"):
        Influence.load(tmp_path / "factors", model, total, data)
    plain = Influence(model, loss, data, "identity")
    plain.save(tmp_path / "identity")
    loaded = Influence.load(tmp_path / "identity", model, loss, data)
    assert_close(loaded.scores(queries), plain.scores(queries))
    assert Influence.load(tmp_path / "identity", model, total, data).curvature is None


@pytest.mark.parametrize("what", ["weight", "buffer"])
def test_other_weights_than_those_of_the_curvature(what: str, tmp_path: Path) -> None:
    """They are an error, also of a model that was loaded; the old ones have their scores again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double().eval()
    X, y = torch.rand(9, 4).double(), torch.arange(9) % 3
    data, loss, queries = [(X, y)], nn.CrossEntropyLoss(), (X[:2], y[:2])
    influence = Influence(model, loss, data, KroneckerGGN, DAMPING)
    projected = ProjectedInfluence(model, loss, data)
    before = influence.scores(queries), projected.scores(queries)
    state = copy.deepcopy(model.state_dict())
    influence.save(tmp_path / "factors")
    changed: Any = model[0].weight if what == "weight" else model[1].running_mean
    changed.data.flatten()[0] += 1e-3
    loaded = Influence.load(tmp_path / "factors", model, loss, data)
    for one in (influence, projected, loaded):
        for scores in (one.scores, one.top):
            with pytest.raises(RuntimeError, match=f"changed since {type(one).__name__} has"):
                scores(*((1,) if scores == one.top else ()), queries)
    with pytest.raises(RuntimeError, match="Build a new one"):
        influence.self_scores()
    for kind in ("identity", GGN):  # of no snapshot
        new = Influence(model, loss, data, kind, DAMPING)
        changed.data.flatten()[0] += 1e-3
        again = Influence(model, loss, data, kind, DAMPING).scores(queries)
        assert_close(new.scores(queries), again)
    model.load_state_dict(state)
    assert_close((influence.scores(queries), projected.scores(queries)), before)
    assert_close(loaded.scores(queries), before[0])


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": whole.T, "b": whole[0], "c": whole}  # share their memory
    save_tensors(tmp_path / "x", tensors, {"k": "v"})
    loaded, metadata = load_tensors(tmp_path / "x")
    assert_close(loaded, tensors)
    assert metadata == {"k": "v"}
    # the first bytes are the length of the header, and those of a zip file for this one
    save_tensors(tmp_path / "y", {"c": whole}, {"k": "v" * 19192})
    assert (tmp_path / "y").read_bytes()[:4] == b"PK\0\0"
    assert_close(load_tensors(tmp_path / "y")[0], {"c": whole})
    without("safetensors", monkeypatch)
    with pytest.raises(ImportError, match="pip install safetensors"):
        load_tensors(tmp_path / "x")


def test_matrix_free_curvature_is_not_saved(tmp_path: Path) -> None:
    model, loss, X, y = problem("mlp")
    with pytest.raises(ValueError, match="matrix-free"):
        Influence(model, loss, batches(X, y), GGN, DAMPING).save(tmp_path / "x")


class Failing:
    """Data that cannot be read to its end, at first."""

    def __init__(self, data: list[Any], last: int):
        self.data, self.last, self.reads = data, last, 0

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(self.data):
            if i > self.last:
                raise OSError("interrupted")
            self.reads += 1
            yield batch


class Wrapped(nn.Module):
    """A loss around another one, with a state that is no tensor."""

    reduction = "mean"

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.loss(output, y)
        return result

    def get_extra_state(self) -> Any:
        return {"version": 1}


def test_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that were done are not done again, and nothing else is mistaken for them."""
    model, loss, X, y = problem("mlp")
    queries = (X[N:], y[N:])
    data = Failing(batches(X, y), 1)
    curvature = KroneckerGGN(model, loss, data.data)
    influence = Influence(model, loss, data, curvature, DAMPING)
    with pytest.raises(OSError, match="interrupted"):
        influence.scores(queries, folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    data.last = 9
    computed: list[int] = []
    original = Influence._gradients

    def counting(self: Any, X: Any, targets: Any, is_query: bool = False) -> Any:
        if not is_query:
            computed.append(len(X))
        return original(self, X, targets, is_query)

    monkeypatch.setattr(Influence, "_gradients", counting)
    expected = Influence(model, loss, data.data, curvature, DAMPING).scores(queries)
    computed.clear()
    assert_close(influence.scores(queries, folder=tmp_path), expected)
    assert computed == [SIZES[-1]]
    computed.clear()
    by_parameter = influence.scores(queries, by="parameter", folder=tmp_path)
    assert_close(torch.stack([*by_parameter.values()]).sum(0), expected)
    assert_close(influence.top(2, queries, folder=tmp_path)[0], expected.topk(2).values)
    assert not computed
    with pytest.raises(ValueError, match="other queries"):
        influence.scores((X[:2], y[:2]), folder=tmp_path)
    total = nn.CrossEntropyLoss(reduction="sum")
    for other in (
        Influence(model, loss, data, curvature, 2 * DAMPING),
        Influence(model, loss, data, curvature, DAMPING, query_rank=1),
        Influence(model, loss, data, curvature, DAMPING, measure=lambda *batch: -total(*batch)),
    ):
        with pytest.raises(ValueError, match="other queries, options or parameters"):
            other.scores(queries, folder=tmp_path)
    of_outputs = {"measure": lambda f, y: f.sum()}  # whatever the loss is
    Influence(model, loss, data, curvature, DAMPING, **of_outputs).scores(
        queries, folder=tmp_path / "outputs"
    )
    for options in ({"label_smoothing": 0.1}, {"weight": torch.tensor([1.0, 2.0, 3.0])}):
        other = Influence(
            model, nn.CrossEntropyLoss(**options), data, curvature, DAMPING, **of_outputs
        )
        with pytest.raises(ValueError, match="other queries, options or parameters"):
            other.scores(queries, folder=tmp_path / "outputs")
    found = []
    for smoothing in (0.0, 0.0, 0.1):
        wrapped = Wrapped(nn.CrossEntropyLoss(label_smoothing=smoothing)).train(not found)
        one = Influence(model, wrapped, data, curvature, DAMPING, **of_outputs)
        if smoothing:
            with pytest.raises(ValueError, match="other queries, options or parameters"):
                one.scores(queries, folder=tmp_path / "wrapped")
        else:
            found.append(one.scores(queries, folder=tmp_path / "wrapped"))
    assert_close(*found)
    order = [1, 0, *range(2, len(X))]  # in one batch
    for X_now, y_now in ((X.flip(0), y.flip(0)), (X, y.flip(0)), (X[order], y[order])):
        data.data = batches(X_now, y_now)
        with pytest.raises(ValueError, match="other data"):
            Influence(model, loss, data, curvature, DAMPING).scores(queries, folder=tmp_path)


def test_a_folder_is_of_one_data_set_and_one_order(tmp_path: Path) -> None:
    """Results that were read are those that were computed; one label of many makes other data."""
    model, loss, size = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 10)), nn.CrossEntropyLoss(), 400
    X, y = torch.rand(size, 3), torch.randint(10, (size,))
    queries = X[:2], y[:2]

    def scores(X: Tensor, y: Tensor, scale: float = 1.0) -> Any:
        def measure(*batch: Tensor) -> Tensor:
            return 1e-5 * scale * nn.functional.cross_entropy(*batch, reduction="sum")

        influence = Influence(model, loss, [(X, y)], "identity", measure=measure)
        return influence.scores(queries, by="parameter", folder=tmp_path)

    computed, again = scores(X, y), scores(X, y)
    assert [*again] == [*computed] == [name for name, _ in model.named_parameters()]
    for name, values in computed.items():
        assert torch.equal(again[name], values)
    for n in range(2, size, 7):
        corrected = y.clone()
        corrected[n] = (y[n] + 1) % 10
        with pytest.raises(ValueError, match="other data"):
            scores(X, corrected)
        changed = X.clone()
        changed[n] *= 2
        with pytest.raises(ValueError, match="other data"):
            scores(changed, y)
    with pytest.raises(ValueError, match="other queries"):
        scores(X, y, scale=2)


def test_damping_and_curvature_that_are_set_later() -> None:
    model, loss, X, y = problem("mlp")
    influence, other = (
        Influence(model, loss, batches(X, y), damping=damping) for damping in (DAMPING, 10.0)
    )
    influence.self_scores()
    influence.damping = 10.0
    assert_close(influence.self_scores(), other.self_scores())
    influence.curvature = DiagonalGGN(model, loss, batches(X, y))
    other = Influence(model, loss, batches(X, y), influence.curvature, 10.0)
    assert_close(influence.self_scores(), other.self_scores())


# --------------------------------------------------------------------------------------
# Others
# --------------------------------------------------------------------------------------


def test_tracin(tmp_path: Path) -> None:
    model, loss, X, y = problem("sequence")
    data, queries = batches(X, y), (X[N:], y[N:])
    checkpoints, expected, rates, own_scores = [], torch.zeros(Q, N), (0.1, 0.3), torch.zeros(N)
    for rate in rates:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        G = sample_gradients(model, loss, X, y)
        expected += rate * G[N:] @ G[:N].T
        own_scores += rate * G[:N].square().sum(1)
        checkpoints.append({name: t.clone() for name, t in model.state_dict().items()})
    with torch.no_grad():
        model.head.bias.add_(1.0)  # type: ignore[union-attr]
    own = {name: t.clone() for name, t in model.state_dict().items()}
    torch.save(checkpoints[1], tmp_path / "last.pt")
    tracin = TracIn(model, loss, data, [checkpoints[0], tmp_path / "last.pt"], rates)
    assert_close(tracin.scores(queries), expected)
    assert_close(tracin.scores(queries, folder=tmp_path / "shards"), expected)
    assert_close(tracin.scores(queries, folder=tmp_path / "shards"), expected)
    assert_close(tracin.top(2, queries)[1], expected.topk(2).indices)
    assert_close(tracin.self_scores(), own_scores)
    assert_close(tracin.self_scores(), tracin.scores((X[:N], y[:N])).diag())
    assert_close(dict(model.state_dict()), own)
    with pytest.raises(ValueError, match="learning rate for each: got 2 and 1"):
        TracIn(model, loss, data, checkpoints, [0.1])


class WithExtraState(nn.Linear):
    """It keeps something that is no tensor in its state."""

    extra: Any = ("first",)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_checkpoints_with_extra_state() -> None:
    """It is put back as the parameters are."""
    model = WithExtraState(4, 3)
    checkpoint = {**copy.deepcopy(model.state_dict()), "_extra_state": ("other",)}
    data = [(torch.rand(5, 4), torch.arange(5) % 3)]
    scores = TracIn(model, nn.CrossEntropyLoss(), data, [checkpoint]).self_scores()
    plain = nn.Linear(4, 3)
    plain.load_state_dict({name: p.detach() for name, p in model.named_parameters()})
    assert_close(
        scores, TracIn(plain, nn.CrossEntropyLoss(), data, [plain.state_dict()]).self_scores()
    )
    assert model.extra == ("first",)


@pytest.mark.parametrize("is_file", [False, True])
def test_checkpoints_that_are_no_state_of_the_model(is_file: bool, tmp_path: Path) -> None:
    """The error says what to give; the model stays as it is."""
    model, loss, X, y = problem("mlp")
    own = copy.deepcopy(model.state_dict())
    wrapped = {"epoch": 3, "network": copy.deepcopy(model.state_dict())}
    for checkpoint, message in (
        (wrapped, "entries epoch, network, without 0.weight.*Give what is in its entry 'network'"),
        ({"other": torch.ones(2)}, r"entries other, .*Give model\.state_dict\(\)"),
        ([torch.ones(2)], "has list"),
    ):
        given: Any = checkpoint
        if is_file:
            given, message = tmp_path / "state.pt", f"state.pt has.*{message}"
            torch.save(checkpoint, given)
            message = message.replace("has.*has", "has")
        tracin = TracIn(model, loss, batches(X, y), [given])
        with pytest.raises(ValueError, match=message):
            tracin.scores((X[N:], y[N:]))
    assert_close(dict(model.state_dict()), dict(own))


def test_projections_stay_those_of_the_model() -> None:
    """Whatever is extended around it later, queries are projected as the samples were."""
    model, loss, X, y = problem("mlp")
    influence = ProjectedInfluence(model, loss, batches(X, y), ProjectedGrad(7), DAMPING)
    expected = influence.scores((X[N:], y[N:]))
    around = extend(nn.Sequential(model, nn.Softmax(1)))
    assert_close(influence.scores((X[N:], y[N:])), expected)
    del around
    gc.collect()
    assert_close(influence.scores((X[N:], y[N:])), expected)


def features(model: nn.Module, X: Tensor, y: Tensor, dim: int) -> list[Tensor]:
    """What the extension saves for a summed loss: [N, D] for each parameter."""
    model, loss = (
        extend(model, use_converter="record"),
        extend(nn.CrossEntropyLoss(reduction="sum")),
    )
    with backpack(ProjectedGrad(dim, seed=2)):
        loss(model(X), y).backward()
    found = [p.grad_projected for p in model.parameters()]  # type: ignore[attr-defined]
    for p in model.parameters():
        p.grad = None
    return found


def test_projected_influence() -> None:
    model, loss, X, y = problem("mlp")
    data, queries = batches(X, y), (X[N:], y[N:])
    influence = ProjectedInfluence(model, loss, data, ProjectedGrad(7, seed=2), DAMPING)
    tracin = TracIn(model, loss, data, [model.state_dict()], [0.5], ProjectedGrad(7, seed=2))
    found, traced = influence.scores(queries), tracin.scores(queries)
    assert_close(tracin.self_scores(), tracin.scores((X[:N], y[:N])).diag())
    own = influence.self_scores()
    each = features(model, X, y, 7)
    phi = torch.stack(each).sum(0)
    F = phi[:N].T @ phi[:N] / N + DAMPING * torch.eye(7)
    both = phi @ torch.linalg.solve(F, phi[:N].T) / N
    assert_close(found, both[N:])
    assert_close(own, both[:N].diagonal())
    expected = [0.5 * rows[N:] @ rows[:N].T for rows in each]
    assert_close(traced, torch.stack(expected).sum(0))
    assert_close(influence.top(2, queries)[1], both[N:].topk(2).indices)
    with pytest.raises(ValueError, match="all parameters together"):
        influence.scores(queries, by="parameter")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_projected_influence_in_half_precision(dtype: torch.dtype) -> None:
    model, X, y = nn.Linear(3, 4), torch.randn(6, 3), torch.randint(4, (6,))
    found = []
    for to in (dtype, torch.float64):
        data = [(X.to(to), y)]
        one = ProjectedInfluence(
            copy.deepcopy(model).to(to), nn.CrossEntropyLoss(), data, ProjectedGrad(8), 0.1
        )
        assert one.scores(data).dtype == one.self_scores().dtype == to
        found.append(one.scores(data).double())
    assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()


def test_projection_saves_where_it_did() -> None:
    """The extension that is given to these is the user's, who may compute with it as before."""
    model, loss, X, y = problem("mlp")
    data, projection = batches(X, y), ProjectedGrad(7)
    ProjectedInfluence(model, loss, data, projection, DAMPING).scores((X[N:], y[N:]))
    TracIn(model, loss, data, [model.state_dict()], None, projection).scores((X[N:], y[N:]))
    with backpack(projection):
        extend(loss)(extend(model)(X), y).backward()
    for p in model.parameters():
        assert p.grad_projected.shape == (len(X), 7)  # type: ignore[attr-defined]


def test_projection_of_some_samples() -> None:
    """It would give scores whose columns are no numbers of samples."""
    model, loss, X, y = problem("mlp")
    data, projection = batches(X, y), ProjectedGrad(7, subsampling=[1])
    with pytest.raises(ValueError, match="looks at some samples of each batch alone"):
        ProjectedInfluence(model, loss, data, projection, DAMPING)
    with pytest.raises(ValueError, match="looks at some samples of each batch alone"):
        TracIn(model, loss, data, [model.state_dict()], None, projection)


def test_projected_influence_of_many_directions() -> None:
    """With many directions it is that of the gradients, with the empirical Fisher information."""
    model, loss, X, y = problem("mlp")
    data = batches(X, y)
    G = sample_gradients(model, loss, X, y)
    F = EmpiricalFisher(model, loss, data).to_dense() + DAMPING * torch.eye(G.shape[1])
    expected = G[N:] @ torch.linalg.solve(F, G[:N].T) / N
    many = ProjectedInfluence(model, loss, data, ProjectedGrad(4000), DAMPING)
    found = many.scores((X[N:], y[N:]))
    assert (found - expected).norm() < 0.2 * expected.norm()


def test_gradients_of_the_caller_stay() -> None:
    model, loss, X, y = problem("mlp")
    loss(model(X), y).backward()
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    influence = Influence(model, loss, batches(X, y))
    influence.scores((X[N:], y[N:]))
    influence.self_scores()
    ProjectedInfluence(model, loss, batches(X, y)).scores((X[N:], y[N:]))
    assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))


SHUFFLED: dict[str, Callable[[TensorDataset], DataLoader[Any]]] = {
    "shuffle": lambda own: DataLoader(own, batch_size=4, shuffle=True),
    "random": lambda own: DataLoader(own, batch_size=4, sampler=RandomSampler(own)),
    "weighted": lambda own: DataLoader(own, sampler=WeightedRandomSampler([1.0] * N, N)),
    "subset": lambda own: DataLoader(own, sampler=SubsetRandomSampler(range(N))),
    "batches": lambda own: DataLoader(
        own, batch_sampler=BatchSampler(RandomSampler(own), 4, drop_last=False)
    ),
    "whole batches": lambda own: DataLoader(
        own, sampler=BatchSampler(RandomSampler(own), 4, drop_last=False), batch_size=None
    ),
    "processes": lambda own: DataLoader(own, sampler=DistributedSampler(own, 2, 0, shuffle=True)),
}


@pytest.mark.parametrize("kind", [Influence, ProjectedInfluence, TracIn])
@pytest.mark.parametrize("name", SHUFFLED)
def test_shuffled_loaders(name: str, kind: Any) -> None:
    """Samples have no number: not those of the data, nor queries."""
    model, loss, X, y = problem("mlp")
    given = ([model.state_dict()],) if kind is TracIn else ()
    loader = SHUFFLED[name](TensorDataset(X[:N], y[:N]))
    with pytest.raises(ValueError, match=r"numbers training samples .*shuffle=False"):
        kind(model, loss, loader, *given)
    with pytest.raises(ValueError, match=r"numbers queries .*shuffle=False"):
        kind(model, loss, batches(X, y), *given).scores(loader)


@pytest.mark.parametrize("distributed", [False, True])
def test_loaders_in_order(distributed: bool) -> None:
    model, loss, X, y = problem("mlp")
    own, queries = TensorDataset(X[:N], y[:N]), (X[N:], y[N:])
    sampler = DistributedSampler(own, 1, 0, shuffle=False) if distributed else None
    loader = DataLoader(own, batch_size=4, sampler=sampler)
    for kind, given in ((Influence, {}), (TracIn, {"checkpoints": [model.state_dict()]})):
        expected = kind(model, loss, [(X[:N], y[:N])], **given).scores(queries)
        assert_close(kind(model, loss, loader, **given).scores(queries), expected)


class Changing:
    """Batches of one kind in the first passes, of another one from then on."""

    def __init__(self, first: list[Any], later: list[Any], passes: int = 1):
        self.first, self.later, self.passes = first, later, passes

    def __iter__(self) -> Iterator[Any]:
        self.passes -= 1
        return iter(self.first if self.passes >= 0 else self.later)


@pytest.mark.parametrize("change", ["order", "rows", "inputs", "fewer", "more", "dict"])
def test_data_that_change_between_passes(change: str) -> None:
    """Samples in another order are an error, not noise; any pass is compared with the first."""
    model, loss, X, y = problem("mlp")
    data = batches(X, y)
    order = [1, 0, *range(2, N)]
    inputs = X.clone()
    inputs[0] = inputs[0] + 0.01
    later = {
        "order": data[::-1],
        "rows": batches(X[order], y[order]),
        "inputs": batches(inputs, y),
        "fewer": data[:-1],
        "more": [*data, data[0]],
        "dict": [({"x": x}, y) for x, y in batches(X[order], y)],
    }[change]
    if change == "dict":
        data = [({"x": x}, y) for x, y in data]  # type: ignore[misc]
        model = OfDict(model)
    queries = data[0]
    message = "same order in each pass .*shuffle=False"
    with pytest.raises(RuntimeError, match=message):
        Influence(model, loss, Changing(data, later)).self_scores()
    influence = Influence(model, loss, Changing(data, later, 2))
    expected = Influence(model, loss, data)
    assert_close(influence.scores(queries), expected.scores(queries))
    with pytest.raises(RuntimeError, match=message):
        influence.top(2, queries)
    with pytest.raises(RuntimeError, match=message):
        Influence(model, loss, Changing(data, later), GGN, DAMPING).scores(queries)
    states = [model.state_dict()] * 2
    with pytest.raises(RuntimeError, match=message):
        TracIn(model, loss, Changing(data, later), states).scores(queries)
    tracin = TracIn(model, loss, Changing(data, later, 2), states).scores(queries)
    assert_close(tracin, TracIn(model, loss, data, states).scores(queries))


@pytest.mark.parametrize(
    "rows",
    [
        torch.arange(6).reshape(3, 2) > 2,
        torch.arange(6).reshape(3, 2),
        torch.randn(3, 2, dtype=torch.bfloat16),
        torch.randn(3, 2, dtype=torch.complex64),
        torch.tensor([[0.0], [torch.nan], [torch.inf]]),
        torch.randn(3, 2, 9000),
        torch.randn(3, 2).T.contiguous().T,
    ],
    ids=["bool", "int", "half", "complex", "special", "long", "strided"],
)
def test_kinds_of_tensors_in_data(rows: Tensor) -> None:
    """All kinds are the same when they are read again, and another one in another order."""
    others = (torch.empty(0, 2), torch.tensor(3.0), torch.eye(2).to_sparse(), "text", None)
    data = [({"x": UserDict(rows=rows)}, *others)]
    same = SameInEachPass("Test", data)
    assert list(same) == data and list(same) == data
    data[0] = ({"x": UserDict(rows=rows.flip(0))}, *others)
    with pytest.raises(RuntimeError, match=r"Test needs the same samples .* batch 0"):
        list(same)


class OfDict(nn.Module):
    """A model of a dictionary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.model(inputs["x"])


def test_what_data_can_do_stays() -> None:
    """A curvature of one's own gets what the data are: a length, entries and attributes."""
    model, loss, X, y = problem("mlp")
    data = batches(X, y)
    seen: list[Any] = []

    def curvature(model: Any, loss: Any, own: Any, params: Any, progress: bool) -> Any:
        seen.extend([len(own), own[0], len(copy.deepcopy(own))])
        return KroneckerGGN(model, loss, own, params, progress=progress)

    Influence(model, loss, data, curvature)
    assert seen == [len(data), data[0], len(data)]
    own = TensorDataset(X[:N], y[:N])

    def of_loader(model: Any, loss: Any, loader: Any, **options: Any) -> Any:
        seen.append(loader.dataset)
        return KroneckerGGN(model, loss, loader, **options)

    Influence(model, loss, DataLoader(own), of_loader)
    assert seen[-1] is own


def test_loader_of_a_stream() -> None:
    """A ``DataLoader`` that knows no length: the bar has none either."""
    model, loss, X, y = problem("mlp")

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from zip(X[:N], y[:N], strict=True)

    loader = DataLoader(Stream(), batch_size=4)
    assert_close(
        Influence(model, loss, loader).self_scores(),
        Influence(model, loss, batches(X, y)).self_scores(),
    )


def test_inputs_that_are_tuples() -> None:
    """One batch of queries whose input is a tuple, or several."""

    class OfTuple(OfDict):
        def forward(self, inputs: Any) -> Tensor:
            return self.model(inputs[0] * inputs[1])

    model, loss, X, y = problem("mlp")
    data = [((x / 2, torch.full((len(x), 1), 2.0)), labels) for x, labels in batches(X, y)]
    influence = Influence(OfTuple(model), loss, data)
    expected = Influence(model, loss, batches(X, y))
    for queries, same in ((data[0], batches(X, y)[0]), (data, batches(X, y))):
        assert_close(influence.scores(queries), expected.scores(same))
    assert_close(influence.self_scores(), expected.self_scores())


def test_queries_that_can_be_read_once() -> None:
    """Checkpoints share them."""
    model, loss, X, y = problem("mlp")
    tracin = TracIn(model, loss, batches(X, y), [model.state_dict()] * 2)
    queries = batches(X, y)
    assert_close(tracin.scores(iter(queries)), tracin.scores(queries))


def test_wrong_arguments() -> None:
    model, loss, X, y = problem("mlp")
    data = batches(X, y)
    with pytest.raises(ValueError, match="iterator"):
        Influence(model, loss, iter(data))
    with pytest.raises(ValueError, match="needs a damping"):
        Influence(model, loss, data, GGN)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        Influence(model, loss, data, damping=-1.0)
    with pytest.raises(ValueError, match="31 entries"):
        Influence(model, loss, data, DiagonalGGN(model, loss, data, list(model[0].parameters())))  # type: ignore[index]
    with pytest.raises(ValueError, match="by is"):
        Influence(model, loss, data).scores((X, y), by="layer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="query_rank"):
        Influence(model, loss, data, query_rank=0)
    with pytest.raises(ValueError, match="positive"):
        ProjectedInfluence(model, loss, data, damping=0.0)
    with pytest.raises(TypeError, match=r"such as ProjectedGrad\(256\), got 8"):
        ProjectedInfluence(model, loss, data, projection=8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got tuple: call top\(k, queries\)"):
        Influence(model, loss, data).top((X, y), 3)  # type: ignore[arg-type]
    model.append(nn.Dropout(0.5))  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"model\.eval"):
        Influence(model, loss, data)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batches_without_samples_are_left_out(reduction: str) -> None:
    model, loss, X, y = problem("mlp", reduction)
    none, queries = (X[:0], y[:0]), (X[N:], y[N:])
    makers: list[Callable[[Any], Any]] = [
        lambda data: Influence(model, loss, data, KroneckerGGN, damping=0.1),
        lambda data: ProjectedInfluence(model, loss, data, ProjectedGrad(4), damping=0.1),
        lambda data: TracIn(model, loss, data, [model.state_dict()], [0.1]),
    ]
    for made in makers:
        found, expected = made([none, *batches(X, y), none]), made(batches(X, y))
        assert_close(found.scores([none, queries]), expected.scores(queries))
        assert_close(found.top(2, queries), expected.top(2, queries))
        assert_close(found.self_scores(), expected.self_scores())
        with pytest.raises(ValueError, match="no samples"):
            found.scores(none)
