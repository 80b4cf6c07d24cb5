"""The GGN through the Gram matrix of its square root: every case, and what follows from it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch
from cases import CASES, Case, truth
from test_factored import agree
from test_gram import run
from torch import Tensor, einsum, nn
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.core.engine import factored, sources
from backpack.core.engine.factored import FactoredGrad
from backpack.extensions import BatchGrad, GGNGram, SqrtGGNExact, SqrtGGNMC
from backpack.linalg import GGN, GGNSpectrum
from backpack.utils.gram import total_gram

FEWER = [c for i, c in enumerate(CASES) if "network" in c.tags or "mixing" in c.tags or i % 3 == 0]
TOLERANCE = {"rtol": 1e-7, "atol": 1e-9}


@pytest.fixture(params=[False, True], ids=["as it comes", "factored"])
def keeps_factors(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[bool]:
    """Keep factors where they are larger than the columns, too: the cases are small."""
    if request.param:
        monkeypatch.setattr(sources, "entries_of", lambda source: 0)
    yield request.param


def rows_of(columns: Tensor) -> Tensor:
    """Return ``[V·N, P]`` of ``[V, N, *p]``."""
    return columns.flatten(0, 1).reshape(columns.shape[:2].numel(), -1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gram_of_every_case(case: Case, keeps_factors: bool) -> None:
    """Its eigenvalues are those of the GGN's blocks by autograd, and some zeros."""
    of_case = oracle.joint_ggn_blocks if "mixing" in case.tags else oracle.ggn_blocks
    blocks = truth(of_case, case)
    found = run(case.build(), GGNGram())
    for p, block in zip(found, blocks, strict=True):
        v, n = p.ggn_gram.shape[:2]
        gram = p.ggn_gram.reshape(v * n, v * n)
        for power in (1, 2, 3):  # that determines them
            one, other = (torch.linalg.matrix_power(m, power).trace() for m in (gram, block))
            assert_close(one, other, **TOLERANCE)
    if case in FEWER:
        for p, q in zip(found, run(case.build(), SqrtGGNExact()), strict=True):
            rows = rows_of(q.sqrt_ggn_exact)
            assert_close(p.ggn_gram.flatten(2).flatten(0, 1), rows @ rows.T, **TOLERANCE)


@pytest.mark.parametrize("case", FEWER, ids=str)
def test_sampled_gram(case: Case, keeps_factors: bool) -> None:
    for p, q in zip(run(case.build(), GGNGram(2)), run(case.build(), SqrtGGNMC(2)), strict=True):
        rows = rows_of(q.sqrt_ggn_mc)
        assert p.ggn_gram.shape[0] == 2
        assert_close(p.ggn_gram.flatten(2).flatten(0, 1), rows @ rows.T, **TOLERANCE)


@pytest.mark.parametrize("case", FEWER, ids=str)
def test_factored_columns(case: Case, keeps_factors: bool) -> None:
    """Every method of an object with several columns for each sample."""
    exact = run(case.build(), SqrtGGNExact())
    for p, q in zip(run(case.build(), SqrtGGNExact(factored=True)), exact, strict=True):
        columns = q.sqrt_ggn_exact
        assert isinstance(p.sqrt_ggn_exact, FactoredGrad)
        assert p.sqrt_ggn_exact.columns == len(columns)
        agree(p.sqrt_ggn_exact, columns.flatten(0, 1))
        index = [columns.shape[:2].numel() - 1, 0, 1]
        agree(p.sqrt_ggn_exact[index], columns.flatten(0, 1)[index])
    few = run(case.build(), SqrtGGNMC(3, factored=True), BatchGrad(factored=True))
    columns = [p.sqrt_ggn_mc for p in run(case.build(), SqrtGGNMC(3))]
    gradients = [p.grad_batch for p in run(case.build(), BatchGrad())]
    for p, column, gradient in zip(few, columns, gradients, strict=True):
        agree(p.sqrt_ggn_mc, column.flatten(0, 1))
        expected = rows_of(column) @ gradient.reshape(len(gradient), -1).T
        assert_close(p.sqrt_ggn_mc.gram(p.grad_batch), expected, **TOLERANCE)


def test_factored_columns_in_slices(monkeypatch: pytest.MonkeyPatch, keeps_factors: bool) -> None:
    monkeypatch.setattr(factored.reductions, "SLICE_ENTRIES", 1)
    monkeypatch.setattr(factored, "BLOCK_ENTRIES", 1)
    for case in FEWER[::7]:
        exact = run(case.build(), SqrtGGNExact())
        for p, q in zip(run(case.build(), SqrtGGNExact(factored=True)), exact, strict=True):
            agree(p.sqrt_ggn_exact, q.sqrt_ggn_exact.flatten(0, 1))


@pytest.mark.parametrize("case", [c for c in FEWER if not c.tags & {"rows", "mixing"}], ids=str)
def test_subsampled_gram(case: Case, keeps_factors: bool) -> None:
    whole = run(case.build(), SqrtGGNExact())
    for p, q in zip(run(case.build(), GGNGram(subsampling=[2, 0])), whole, strict=True):
        rows = rows_of(q.sqrt_ggn_exact[:, [2, 0]])
        assert_close(p.ggn_gram.flatten(2).flatten(0, 1), rows @ rows.T, **TOLERANCE)


def whole_truth(case: Case, per: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the GGN ``[P, P]``, that of each sample, and individual gradients ``[N, P]``."""
    model, loss, X, y = case.reference()
    torch.manual_seed(1)
    f = model(X)
    H = oracle._loss_hessian_blocks(loss, f, y)
    Js = oracle._output_jacobian(f, oracle.trainable(model))
    parts = [Js] if per == "model" else [[J] for J in Js]
    each = [
        torch.block_diag(
            *[J.T @ H[n] @ J for J in (torch.cat([j[n] for j in g], 1) for g in parts)]
        )
        for n in range(len(f))
    ]
    gradients = truth(oracle.batch_grad, case)
    G = torch.stack(each)
    return G.sum(0), G, torch.cat([g.reshape(len(g), -1) for g in gradients], 1)


# an operator is that of a function of each sample, and of a loss that says how it is reduced;
# torch's kernel of Hardsigmoid has 1/6 in single precision, so that gradients have few digits
DEFINED = [
    case
    for case in FEWER
    if not case.tags & {"rows", "mixing"}
    and not any(
        word in str(case).lower()
        for word in ("dropout", "depth", "rrelu", "fractional", "rows", "hardsig")
    )
    and str(case) != "tied-embedding"
]


@pytest.mark.slow
@pytest.mark.parametrize("per", ["model", "parameter"])
@pytest.mark.parametrize("case", DEFINED, ids=str)
def test_spectrum_of_cases(case: Case, per: Any) -> None:
    G, G_n, g = whole_truth(case, per)
    problem = case.build()
    found = GGNSpectrum(problem.model, problem.loss, (problem.X, problem.y), per=per)
    assert_close(found.to_dense(), G, **TOLERANCE)
    values, vectors = found.eigh()
    assert_close(values, torch.linalg.eigvalsh(G)[len(G) - len(values) :], **TOLERANCE)
    assert_close((vectors * values) @ vectors.T, G, **TOLERANCE)
    assert_close(found.trace(), G.trace(), **TOLERANCE)
    if not len(values):
        return
    large = int((values > 1e-4 * values[-1]).sum())
    values, vectors = found.eigh(large)
    assert_close(vectors.T @ vectors, torch.eye(large, dtype=G.dtype), **TOLERANCE)
    assert_close(found.slopes(large), g @ vectors, **TOLERANCE)
    each = einsum("pk,npq,qk->nk", vectors, G_n, vectors)
    assert_close(found.curvatures(large), each, **TOLERANCE)
    expected = -vectors @ ((g.sum(0) @ vectors) / (values + 0.1))
    assert_close(found.newton_step(large, 0.1), expected, **TOLERANCE)


def network() -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, (torch.randn(6, 4).double(), torch.randint(3, (6,)))


def test_step_and_pairs_agree_with_the_operator() -> None:
    model, batch = network()
    model[0].weight.grad = grad = torch.ones_like(model[0].weight)
    loss = nn.CrossEntropyLoss()
    G, found = GGN(model, loss, [batch]), GGNSpectrum(model, loss, batch)
    assert_close(found.to_dense(), G.to_dense())
    for one, other in zip(found.eigh(4), G.eigsh(4), strict=True):
        assert_close(one.abs(), other.abs(), rtol=1e-6, atol=1e-7)
    assert len(found.eigenvalues) <= 12  # the softmax is blind to one direction of each sample
    assert model[0].weight.grad is grad
    assert not any(name.startswith("_backpack") for p in model.parameters() for name in vars(p))
    damping = torch.tensor([0.1, 0.3]).double()
    values, vectors = found.eigh(2)
    gradient = torch.cat(
        [
            g.flatten()
            for g in torch.autograd.grad(loss(model(batch[0]), batch[1]), list(model.parameters()))
        ]
    )
    assert_close(
        found.newton_step(2, damping), -vectors @ (vectors.T @ gradient / (values + damping))
    )


def test_groups() -> None:
    model, batch = network()
    a, b, c, d = model.parameters()
    found = GGNSpectrum(model, nn.CrossEntropyLoss(), batch, per=[[a, d], [c, b]])
    dense = GGN(model, nn.CrossEntropyLoss(), [batch]).to_dense()
    sizes = torch.tensor([0] * 20 + [1] * 5 + [1] * 15 + [0] * 3)
    assert_close(found.to_dense(), dense * (sizes[:, None] == sizes))
    some = GGNSpectrum(model, nn.CrossEntropyLoss(), batch, params=[c, b])
    entries = torch.cat([torch.arange(25, 40), torch.arange(20, 25)])
    assert_close(some.to_dense(), dense[entries][:, entries])


@pytest.mark.parametrize("mc_samples", [1, 7])
def test_sampled_spectrum(mc_samples: int) -> None:
    model, (X, y) = network()
    torch.manual_seed(3)
    found = GGNSpectrum(model, nn.CrossEntropyLoss(), (X, y), mc_samples=mc_samples)
    torch.manual_seed(3)
    with backpack(SqrtGGNMC(mc_samples)):
        extend(nn.CrossEntropyLoss())(extend(model)(X), y).backward()
    params: list[Any] = list(model.parameters())
    W = torch.cat([rows_of(p.sqrt_ggn_mc) for p in params], 1)
    assert_close(found.to_dense(), W.T @ W)
    assert len(found.eigenvalues) <= mc_samples * 6


def test_subsampled_spectrum() -> None:
    model, (X, y) = network()
    loss = nn.CrossEntropyLoss(reduction="sum")
    found = GGNSpectrum(model, loss, (X, y), subsampling=[4, 0])
    other = GGNSpectrum(model, loss, (X[[4, 0]], y[[4, 0]]))
    assert_close(found.to_dense(), other.to_dense())
    assert_close(found.slopes().abs(), other.slopes().abs())


def test_whole_gram_matrix() -> None:
    model, (X, y) = network()
    with backpack(GGNGram()):
        extend(nn.CrossEntropyLoss())(extend(model)(X), y).backward()
    gram = total_gram(model, "ggn_gram")
    assert gram.shape == (3, 6, 3, 6)
    dense = GGN(model, nn.CrossEntropyLoss(), [(X, y)]).to_dense()
    values = torch.linalg.eigvalsh(gram.flatten(2).flatten(0, 1))
    assert_close(values[-12:], torch.linalg.eigvalsh(dense)[-12:])


class Words(nn.Module):
    """Attention between the words of a sample; a head that sees every word on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.softmax(h @ h.mT, -1) @ h
        return self.last(h.flatten(0, 1))


def merged_columns(model: nn.Module, loss: nn.Module, batch: Any, mc_samples: int) -> Tensor:
    """Return sampled columns of all parameters, those of a sample's words summed: ``[M·N, P]``."""
    torch.manual_seed(1)
    output = extend(model, use_converter=True)(batch[0])
    with backpack(SqrtGGNMC(mc_samples)):
        extend(loss)(output, batch[1]).backward()
    params: list[Any] = list(model.parameters())
    each = [p.sqrt_ggn_mc.unflatten(1, (4, -1)).sum(2) for p in params]
    return torch.cat([rows_of(columns) for columns in each], 1)


def test_samples_that_merge() -> None:
    """The loss has a row for each word, which the attention merges: all layers have N samples."""
    torch.manual_seed(0)
    model = Words().double()
    batch = (torch.randn(4, 2, 3).double(), torch.randint(3, (8,)))
    loss = nn.CrossEntropyLoss()
    G = GGN(model, loss, [batch]).to_dense()
    assert_close(GGNSpectrum(model, loss, batch).to_dense(), G)
    by_parameter = GGNSpectrum(model, loss, batch, per="parameter")
    sizes = [p.numel() for p in model.parameters()]
    blocks = [G[i : i + n, i : i + n] for i, n in zip((0, 12, 16, 28), sizes, strict=True)]
    assert_close(by_parameter.to_dense(), torch.block_diag(*blocks))
    assert len(by_parameter.curvatures()) == len(batch[0])
    W = merged_columns(model, loss, batch, 4000)
    assert_close(W.T @ W, G, rtol=0.1, atol=0.02 * float(G.diagonal().max()))
    W = merged_columns(model, loss, batch, 5)
    torch.manual_seed(1)
    sampled = GGNSpectrum(model, loss, batch, mc_samples=5)
    assert_close(sampled.to_dense(), W.T @ W)
    values, vectors = sampled.eigh(3)
    assert_close(vectors.T @ sampled.to_dense() @ vectors, values.diag(), rtol=1e-6, atol=1e-8)
    gradients = [
        g.flatten()
        for g in torch.autograd.grad(loss(model(batch[0]), batch[1]), list(model.parameters()))
    ]
    assert_close(sampled.slopes(3).sum(0), torch.cat(gradients) @ vectors)


def test_mistakes() -> None:
    model, batch = network()
    loss = nn.CrossEntropyLoss()
    found = GGNSpectrum(model, loss, batch)
    for k in (0, len(found.eigenvalues) + 1):
        with pytest.raises(ValueError, match=rf"k must be between 1 and \d+, got {k}"):
            found.eigh(k)
    with pytest.raises(ValueError, match=r"damping is a number or \[2\].*got \[3\]"):
        found.newton_step(2, torch.ones(3))
    a, b, c, d = model.parameters()
    for per in ("layer", [[a, b]], [[a, b], [b, c, d]]):
        with pytest.raises(ValueError, match="groups that have each of params once"):
            GGNSpectrum(model, loss, batch, per=per)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mc_samples is a positive number"):
        GGNGram(0)
    first, second = extend(nn.CrossEntropyLoss()), extend(nn.MSELoss())
    output = extend(model)(batch[0])
    with (
        pytest.raises(NotImplementedError, match="sum of 2 losses"),
        backpack(GGNGram()),
    ):
        (first(output, batch[1]) + second(output, batch[0][:, :3])).backward()


def test_blocks_without_leading_pairs() -> None:
    """The eigenvectors of a few pairs have rows of zeros where a block has none of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()
    batch = torch.randn(4, 2, 4, 4).double(), torch.randint(3, (4,))
    found = GGNSpectrum(model, nn.CrossEntropyLoss(), batch, per="parameter")
    for k in range(1, 6):
        values, vectors = found.eigh(k)
        assert_close(found @ vectors, vectors * values)
        assert found.slopes(k).shape == found.curvatures(k).shape == (4, k)
        assert_close(vectors.T @ vectors, torch.eye(k).double())


def test_no_curvature() -> None:
    """Then there are no eigenpairs, and Newton's step is zero."""
    model = nn.Sequential(nn.Linear(3, 2)).double()
    batch = torch.zeros(4, 3).double(), torch.randint(2, (4,))
    found = GGNSpectrum(model, nn.CrossEntropyLoss(), batch, params=[model[0].weight])
    assert not len(found.eigenvalues) and not found.newton_step().any()
    assert found.slopes().shape == found.curvatures().shape == (4, 0)
    assert found.eigh()[1].shape == (6, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_no_eigenvalues_of_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))
    batch = torch.randn(16, 20), torch.randint(5, (16,))
    exact = GGNSpectrum(model, nn.CrossEntropyLoss(), batch)
    model, batch = model.to(dtype), (batch[0].to(dtype), batch[1])
    found = GGNSpectrum(model, nn.CrossEntropyLoss(), batch)
    assert 0 < len(found.eigenvalues) <= len(exact.eigenvalues) == 64
    step = found.newton_step(damping=1.0).float()
    assert (step - exact.newton_step(damping=1.0)).norm() < 0.1 * exact.newton_step().norm()


def test_data_of_one_batch() -> None:
    model, batch = network()
    expected = GGNSpectrum(model, nn.CrossEntropyLoss(), batch).eigenvalues
    for data in ([batch], (batch,), [list(batch)]):
        found = GGNSpectrum(model, nn.CrossEntropyLoss(), data)
        assert_close(found.eigenvalues, expected)
    for count in (2, 3):
        with pytest.raises(ValueError, match=rf"one batch \(X, y\), got {count} of them"):
            GGNSpectrum(model, nn.CrossEntropyLoss(), count * [batch])


def test_groups_of_no_parameter() -> None:
    model, batch = network()
    with pytest.raises(ValueError, match="groups"):
        GGNSpectrum(model, nn.CrossEntropyLoss(), batch, per=[list(model.parameters()), []])


def test_a_spectrum_is_saved() -> None:
    model, batch = network()
    found = GGNSpectrum(model, nn.CrossEntropyLoss(), batch)
    copied = copy.deepcopy(found)
    assert_close(copied.newton_step(damping=0.1), found.newton_step(damping=0.1))


def test_newton_step_inside_of_autocast() -> None:
    """In the precision of the spectrum, whatever the model runs in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    batch = torch.randn(9, 4), torch.randint(3, (9,))
    spectrum = GGNSpectrum(model, nn.CrossEntropyLoss(), batch)
    expected = spectrum.newton_step(4, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(spectrum.newton_step(4, 0.1), expected)
