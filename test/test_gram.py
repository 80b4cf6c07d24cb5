"""Inner products and projections of individual gradients, and what follows from them."""

from __future__ import annotations

import re
from typing import Any

import oracle
import pytest
import torch
from cases import CASES, Case, truth
from torch import Tensor, nn
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.core.engine import factored, sources
from backpack.extensions import BatchGrad, GradGram, ProjectedGrad
from backpack.linalg import NTK, DiagonalOperator
from backpack.linalg.ntk import output_covariances
from backpack.utils.gram import cosine_similarities, gradient_diversity, noise_scale, total_gram

PER_SAMPLE = [case for case in CASES if "mixing" not in case.tags]
TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}


def run(problem: Any, *exts: Any) -> list[Any]:
    model, lossfunc = extend(problem.model), extend(problem.loss)
    torch.manual_seed(1)
    with backpack(*exts):
        lossfunc(model(problem.X), problem.y).backward()
    return oracle.trainable(problem.model)


def rows_of(grads: Tensor) -> Tensor:
    return grads.reshape(len(grads), -1)


@pytest.mark.parametrize("case", PER_SAMPLE, ids=str)
def test_every_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection is linear in gradients that come as factors, or not."""
    rows = [rows_of(g) for g in truth(oracle.batch_grad, case)]

    def found() -> list[list[Tensor]]:
        together = run(case.build(), GradGram(), ProjectedGrad(5))
        for p, own in zip(together, rows, strict=True):
            assert_close(p.grad_gram, own @ own.T, **TOLERANCE)
        outer = run(case.build(), ProjectedGrad(5, outer=True))
        return [[p.grad_projected for p in params] for params in (together, outer)]

    as_it_comes = found()
    alone = run(case.build(), ProjectedGrad(5))
    assert_close([p.grad_projected for p in alone], as_it_comes[0], **TOLERANCE)
    monkeypatch.setattr(sources, "entries_of", lambda source: 0)
    assert_close(found(), as_it_comes, **TOLERANCE)


def network() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 2), nn.Flatten(), nn.Linear(8, 5), nn.Linear(5, 3)
    ).double()
    return extend(model), torch.randn(6, 2, 3).double(), torch.randint(3, (6,))  # type: ignore


def step(model: nn.Module, X: Tensor, y: Tensor, *exts: Any) -> list[Any]:
    with backpack(*exts):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()
    return list(model.parameters())


@pytest.mark.parametrize("distribution", ["rademacher", "normal"])
@pytest.mark.parametrize("outer", [False, True])
def test_projections_keep_inner_products(distribution: Any, outer: bool) -> None:
    """Those of the whole gradients, as parameters have directions of their own."""
    model, X, y = network()
    ext = ProjectedGrad(20000, 3, distribution, outer)
    ps = step(model, X, y, ext, GradGram())
    sketch, gram = sum(p.grad_projected for p in ps), total_gram(model)
    assert (sketch @ sketch.T - gram).abs().max() < 0.06 * gram.diagonal().max()


@pytest.mark.parametrize("outer", [False, True])
def test_directions_belong_to_seed_and_parameter(outer: bool) -> None:
    """They are not those of a batch, its size, or the slices that are computed."""
    model, X, y = network()
    whole = [p.grad_projected for p in step(model, X, y, ProjectedGrad(7, 1, outer=outer))]
    one = [p.grad_projected for p in step(model, X[2:3], y[2:3], ProjectedGrad(7, 1, outer=outer))]
    assert_close([w[2:3] * 6 for w in whole], one)
    part = step(model, X, y, ProjectedGrad(7, 1, outer=outer, subsampling=[4, 0]))
    assert_close([p.grad_projected for p in part], [w[[4, 0]] for w in whole])
    other = step(model, X, y, ProjectedGrad(7, 2, outer=outer))
    assert not any(torch.allclose(p.grad_projected, w) for p, w in zip(other, whole, strict=True))


class Recurrent(nn.Module):
    """Layers that are converted to others, are used several times, or share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.cell = nn.LSTM(4, 4, 2, batch_first=True), nn.RNNCell(4, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.uses_both = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x)[0]
        h = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
        h = torch.tanh(self.first(h))
        return self.second(h) if self.uses_both else h + 0 * self.second.bias


@pytest.mark.parametrize("outer", [False, True])
def test_directions_do_not_depend_on_how_functions_are_seen(outer: bool) -> None:
    X, y, found = torch.randn(6, 3, 4), torch.randint(3, (6,)), []
    for use_converter in (True, "record"):
        torch.manual_seed(0)
        model = Recurrent()
        step(extend(model, use_converter=use_converter), X, y, ProjectedGrad(7, outer=outer))
        found.append([p.grad_projected for p in model.parameters()])  # type: ignore[attr-defined]
    assert_close(found[0], found[1])


@pytest.mark.parametrize("change", ["length", "use"])
def test_directions_do_not_depend_on_how_often_a_parameter_is_used(change: str) -> None:
    """Projections are the same linear map of the individual gradients in both passes."""
    model = Recurrent().double()
    extended = extend(model, use_converter="record")
    passes = [(3, True), (2, True)] if change == "length" else [(3, True), (3, False)]
    params: list[Any] = [model.cell.weight_ih, model.first.weight]
    rows: list[list[Tensor]] = [[], []]
    sketches: list[list[Tensor]] = [[], []]
    for length, model.uses_both in passes:
        X, y = torch.randn(12, length, 4).double(), torch.randint(3, (12,))
        step(extended, X, y, ProjectedGrad(5), BatchGrad())
        for i, p in enumerate(params):
            rows[i].append(p.grad_batch.flatten(1))
            sketches[i].append(p.grad_projected)
    for own, sketch in zip(rows, sketches, strict=True):
        both = torch.cat(own)  # [24, 16]: more rows than unknowns
        unknown = torch.linalg.lstsq(both, torch.cat(sketch)).solution
        assert_close(both @ unknown, torch.cat(sketch))


def test_projections_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, y = network()
    whole = [p.grad_projected for p in step(model, X, y, ProjectedGrad(7))]
    monkeypatch.setattr(factored.reductions, "SLICE_ENTRIES", 1)
    monkeypatch.setattr(factored, "BLOCK_ENTRIES", 1)
    assert_close([p.grad_projected for p in step(model, X, y, ProjectedGrad(7))], whole)


def test_what_a_gram_matrix_says() -> None:
    model, X, y = network()
    ps = step(model, X, y, GradGram(), BatchGrad())
    rows, gram = torch.cat([rows_of(p.grad_batch) for p in ps], 1), total_gram(ps)
    assert_close(gram, rows @ rows.T)
    expected = torch.cosine_similarity(rows.unsqueeze(0), rows.unsqueeze(1), dim=2)
    assert_close(cosine_similarities(gram), expected)
    assert_close(gradient_diversity(gram), rows.square().sum() / rows.sum(0).square().sum())
    variance = rows.var(0).sum()
    assert_close(noise_scale(gram), variance / (rows.mean(0).square().sum() - variance / 6))
    assert_close(noise_scale(49 * gram), noise_scale(gram))
    assert gradient_diversity(torch.eye(3)) == 1 and gradient_diversity(torch.ones(4, 4)) == 0.25
    assert cosine_similarities(torch.diag(torch.tensor([0.0, 4.0]))).tolist() == [[0, 0], [0, 1]]


def test_noise_scale_finds_the_truth() -> None:
    """For gradients with mean 1 and unit variance in 10 dimensions: 10 / 10."""
    torch.manual_seed(0)
    rows = 1 + torch.randn(20000, 10).double()
    assert noise_scale(rows[:5000] @ rows[:5000].T).item() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: total_gram(nn.Linear(2, 2)), r"No parameter has 'grad_gram'.*backpack\(GradGram"),
        (lambda: noise_scale(torch.ones(1, 1)), "at least two samples, got 1"),
        (lambda: ProjectedGrad(0), "dim has to be at least 1, got 0"),
        (lambda: ProjectedGrad(distribution="uniform"), "'normal', got 'uniform'"),  # type: ignore
    ],
)
def test_mistakes(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("function", [noise_scale, gradient_diversity, cosine_similarities])
def test_what_is_no_gram_matrix(function: Any) -> None:
    name = function.__name__
    with pytest.raises(TypeError, match=rf"got Linear\. .*{name}\(total_gram\(model\)\)"):
        function(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=rf"{name} needs .*got one of shape \[3, 2\]"):
        function(torch.ones(3, 2))


def jacobian(model: nn.Module, X: Tensor, params: list[Any]) -> Tensor:
    """Return ``[N, C, P]`` by autograd."""
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(y, params, retain_graph=True)])
        for x in X
        for y in model(x.unsqueeze(0)).flatten()
    ]
    return torch.stack(rows).unflatten(0, (len(X), -1))


@pytest.mark.parametrize("two_batches", [False, True])
def test_tangent_kernel(two_batches: bool) -> None:
    model, X, _ = network()
    X2 = torch.randn(4, 2, 3).double() if two_batches else None
    params = list(model.parameters())
    params[0].grad = grad = torch.ones_like(params[0])
    J, K = (jacobian(model, x, params) for x in (X, X if X2 is None else X2))
    kernel = NTK(model, X, X2)
    assert_close(kernel.traced(), torch.einsum("ncp,mcp->nm", J, K))
    assert_close(kernel.per_output(), torch.einsum("ncp,mdp->nmcd", J, K))
    assert_close(kernel.to_dense(), J.flatten(0, 1) @ K.flatten(0, 1).T)
    lean = NTK(model, X, X2, only_traced=True)
    assert_close(lean.traced(), kernel.traced())
    for whole in (lean.per_output, lean.to_dense):
        with pytest.raises(ValueError, match=r"only_traced=True.*leave that out"):
            whole()
    assert params[0].grad is grad and not any("_backpack_linalg" in vars(p) for p in params)
    some = NTK(model, X, X2, params=params[:2]).traced()
    sizes = sum(p.numel() for p in params[:2])
    assert_close(some, torch.einsum("ncp,mcp->nm", J[..., :sizes], K[..., :sizes]))


class Tokens(nn.Module):
    """A model of T positions, with a row of its output for each, or for each sample."""

    def __init__(self, is_flat: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 2)
        self.is_flat = is_flat

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.embedding(x).tanh())
        return z.flatten(0, 1) if self.is_flat else z


def test_rows_of_outputs_that_are_no_samples() -> None:
    """They were added up for each sample without a word: kernel and covariance were of the sums."""
    ids, params = torch.randint(7, (4, 5)), torch.rand(29) + 1
    torch.manual_seed(0)
    flat = Tokens(True)
    message = r"20 rows of outputs for 4 samples: .* \[4, \.\.\.\]"
    with pytest.raises(ValueError, match=message):
        NTK(flat, ids)
    with pytest.raises(ValueError, match=message):
        output_covariances(flat, [*flat.parameters()], ids, [DiagonalOperator(params)])
    torch.manual_seed(0)
    model = Tokens(False)
    J = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(z, [*flat.parameters()])])
            for z in (flat(ids).flatten()[i] for i in range(40))
        ]
    )
    assert torch.allclose(NTK(model, ids).to_dense(), J @ J.T, atol=1e-5)
    mean, (covariance,) = output_covariances(
        model, [*model.parameters()], ids, [DiagonalOperator(params)]
    )
    rows = J.unflatten(0, (4, 10))
    assert torch.allclose(mean, flat(ids).view(4, 10))
    assert torch.allclose(covariance, rows * params @ rows.mT, atol=1e-5)


def test_tangent_kernel_of_nothing() -> None:
    model, X, _ = network()
    aside = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"parameters of shapes \[\[2\]\].*params=\.\.\."):
        NTK(model, X, params=[*model.parameters(), aside])
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        NTK(model, X, params=[])
    first, *others = model.parameters()
    first.requires_grad_(False)
    shape = re.escape(str([[*first.shape]]))
    with pytest.raises(ValueError, match=f"{shape}.*leave them out"):
        NTK(model, X, params=[first, *others])


class StepsFirst(nn.Module):
    """A recurrent model with the outputs ``[T, N, H]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RNN(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def test_tangent_kernel_of_outputs_with_the_steps_first() -> None:
    """They are no samples, also where there are as many."""
    for steps in (4, 5):
        with pytest.raises(ValueError, match=r"axis 1.*output\.transpose\(0, 1\)"):
            NTK(StepsFirst(), torch.randn(steps, 4, 3))
