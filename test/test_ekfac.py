"""The kinds of Fisher information, and eigenvalues corrected in Kronecker-factored eigenbases."""

from __future__ import annotations

import copy
from typing import Any

import oracle
import pytest
import torch
from cases import CASES, Case, Problem, select, truth
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from backpack import backpack, extend, extensions, linalg, summary
from backpack.core import fast
from backpack.core.engine.backpropagation import slice_bytes
from backpack.core.engine.extracted import EIGEN_SQUARES
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.extensions import EKFAC, KFAC, KFLR
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.linalg import GGN, EigenOperator, EmpiricalFisher, KroneckerGGN, KroneckerOperator
from backpack.utils.kroneckers import EigenKronecker, kfacs_to_mat

TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}
PER_SAMPLE = [case for case in CASES if "mixing" not in case.tags]
# where the mechanism is the engine's: all networks, every fifth module
FEWER = [c for i, c in enumerate(PER_SAMPLE) if "network" in c.tags or i % 5 == 0]
APPROXIMATIONS = [None, "expand", "reduce"]
BLOCKS = {"exact": oracle.ggn_blocks, "empirical": oracle.empirical_blocks}


def run(problem: Problem, *exts: Any, seed: int = 1) -> list[Any]:
    """Run a backward pass; return the trainable parameters."""
    model, lossfunc = extend(problem.model), extend(problem.loss)
    torch.manual_seed(seed)
    loss = lossfunc(model(problem.X), problem.y)
    with backpack(*exts):
        loss.backward()
    return oracle.trainable(problem.model)


def matrix(found: EigenKronecker) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors in columns, and the eigenvalues, in the order of the parameter."""
    Q = kfacs_to_mat(found.bases)
    if found.swaps_axes:
        order = torch.arange(len(Q)).reshape(found.shape).transpose(0, 1).flatten()
        Q = torch.empty_like(Q).index_copy(0, order, Q)
    return Q, found.eigenvalues.flatten()


def check(found: EigenKronecker, p: Tensor, block: Tensor) -> None:
    """The eigenvectors are orthogonal, and the eigenvalues the best ones for them."""
    Q, values = matrix(found)
    assert found.shape == p.shape
    assert_close(Q.T @ Q, torch.eye(len(Q), dtype=Q.dtype), **TOLERANCE)
    assert_close(values, (Q.T @ block @ Q).diagonal(), **TOLERANCE)
    assert_close(found.dense(), Q @ values.diag() @ Q.T, **TOLERANCE)


def diagonalises(bases: list[Tensor], factors: list[Tensor]) -> None:
    """The bases are eigenvectors of the factors."""
    for Q, factor in zip(bases, factors, strict=True):
        values = (Q.T @ factor @ Q).diagonal()
        assert_close(Q @ values.diag() @ Q.T, factor, **TOLERANCE)


# --------------------------------------------------------------------------------------
# Kinds of Fisher information
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PER_SAMPLE, ids=str)
def test_empirical_and_inputs(case: Case) -> None:
    exts = {"empirical": oracle.kfac_empirical, "inputs": oracle.kfac_inputs}
    for fisher, function in exts.items():
        params = run(case.build(), KFAC(fisher=fisher))  # type: ignore[arg-type]
        for p, factors in zip(params, truth(function, case), strict=True):
            assert_close(p.kfac, factors, **TOLERANCE)


@pytest.mark.parametrize("case", FEWER, ids=str)
def test_exact_is_kflr(case: Case) -> None:
    assert repr(KFAC(fisher="exact")) == "KFAC(fisher='exact')"
    for p in run(case.build(), KFAC(fisher="exact"), KFLR()):
        assert_close(p.kfac, p.kflr, rtol=0, atol=0)


@pytest.mark.parametrize("case", FEWER, ids=str)
def test_slices_of_the_empirical_fisher(case: Case) -> None:
    whole = run(case.build(), KFAC(fisher="empirical"), EKFAC(fisher="empirical"))
    with slice_bytes(1):
        sliced = run(case.build(), KFAC(fisher="empirical"), EKFAC(fisher="empirical"))
    for p, q in zip(whole, sliced, strict=True):
        assert_close(q.kfac, p.kfac, **TOLERANCE)
        assert_close(q.ekfac.eigenvalues.sum(), p.ekfac.eigenvalues.sum(), **TOLERANCE)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(count: int = 6, *shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, *shape, 4).double(), torch.randint(3, (count, *shape))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_targets_of_the_model_make_the_empirical_fisher_a_sampled_one(reduction: Any) -> None:
    """The scale: averaged over targets that follow the prediction, it is the exact one."""
    model, (X, _) = mlp(), batch()
    p = model(X).softmax(1).detach()
    total = 0
    count = 3000
    lossfunc = extend(nn.CrossEntropyLoss(reduction=reduction))
    X, many = X.repeat(count, 1), p.repeat(count, 1)
    y = many.multinomial(1).squeeze(1)
    with backpack(KFAC(fisher="empirical"), KFLR()):
        lossfunc(extend(model)(X), y).backward()
    total = model[2].weight.kfac[0]
    assert (total - model[2].weight.kflr[0]).norm() < 0.05 * total.norm()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empirical_blocks_are_those_of_the_operator(reduction: Any) -> None:
    model, (X, y) = mlp(), batch()
    lossfunc = nn.CrossEntropyLoss(torch.tensor([0.5, 1, 2]).double(), reduction=reduction)
    dense = EmpiricalFisher(model, lossfunc, [(X, y)], params=[model[2].bias]).to_dense()
    with backpack(KFAC(fisher="empirical")):
        extend(lossfunc)(extend(model)(X), y).backward()
    assert_close(model[2].bias.kfac[0], dense)


def test_own_losses() -> None:
    """A loss of your own is the mean over the samples, if it says that it is a mean."""

    class Own(nn.Module):
        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(f, y)

    model, (X, y) = extend(mlp()), batch()
    loss = extend(Own())(model(X), y)
    with (
        pytest.raises(ValueError, match="attribute 'reduction'"),
        backpack(KFAC(fisher="empirical")),
    ):
        loss.backward()
    own, usual = extend(Own()), extend(nn.CrossEntropyLoss())
    own.reduction = "mean"
    found = []
    for lossfunc in (own, usual):
        with backpack(KFAC(fisher="empirical")):
            lossfunc(model(X), y).backward()
        found.append(model[0].weight.kfac)
    assert_close(*found)


def test_a_factor_of_the_loss() -> None:
    model, (X, y) = extend(mlp()), batch()
    lossfunc, found = extend(nn.CrossEntropyLoss()), []
    for scale in (1.0, 3.0):
        loss = scale * lossfunc(model(X), y)
        with backpack(KFAC(fisher="empirical"), EKFAC(fisher="empirical")):
            loss.backward()
        weight: Any = model[0].weight
        found.append((weight.kfac[0], weight.kfac[1], weight.ekfac.eigenvalues))
    (B, A, values), (more, same, larger) = found
    assert_close((more, same, larger), (3 * B, A, 3 * values))


def test_several_predictions_have_no_gradient_at_one() -> None:
    model = extend(mlp())
    X, _ = batch()
    loss = extend(nn.TripletMarginLoss())(model(X), model(X + 1), model(X - 1))
    context = backpack(KFAC(fisher="empirical"))
    with pytest.raises(NotImplementedError, match="several inputs"), context:
        loss.backward()


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="'sampled', 'exact', 'empirical', 'inputs', got 'true'"):
        KFAC(fisher="true")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draws nothing"):
        KFAC(mc_samples=3, fisher="exact")
    with pytest.raises(ValueError, match="nothing to correct"):
        EKFAC(fisher="inputs")
    with pytest.raises(ValueError, match="None, 'expand' or 'reduce'"):
        EKFAC(approximation="sum")  # type: ignore[arg-type]


@pytest.mark.parametrize("fisher", ["exact", "empirical", "inputs"])
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_positions(fisher: Any, approximation: Any) -> None:
    """All approximations, by definition, for a layer with several positions."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    X, y = batch(5, 2)
    f = model(X)
    lossfunc = nn.CrossEntropyLoss()

    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(0, 1)

    loss = extend(lossfunc)(extend(nn.Sequential(model, nn.Flatten(0, 1)))(X), y.flatten())
    with backpack(KFAC(fisher=fisher, approximation=approximation)):
        loss.backward()
    B, A = model.weight.kfac  # type: ignore[attr-defined]
    sums = X.sum(1)
    expected = {
        None: torch.einsum("nti,ntj->ij", X, X) / 5,
        "expand": torch.einsum("nti,ntj->ij", X, X) / 10,
        "reduce": sums.T @ sums / (5 * 4),
    }
    assert_close(A, expected[approximation])
    if fisher == "inputs":
        assert_close(B, torch.eye(3).double())
    elif fisher == "empirical":
        (g,) = torch.autograd.grad(lossfunc(f.flatten(0, 1), y.flatten()), f)
        rows = g.flatten(0, 1) if approximation == "expand" else g.sum(1)
        assert_close(B, 10 * rows.T @ rows)


def tokens() -> Problem:
    torch.manual_seed(0)
    X, y = torch.randn(4, 5, 3).double(), torch.randint(3, (4, 5))
    y[0, 3:], y[2, 1:] = -100, -100
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), Permute(0, 2, 1)).double()
    return Problem(model, nn.CrossEntropyLoss(), X, y)


@pytest.mark.parametrize("limit", [1, 2**24])
def test_ignored_targets_are_no_samples(limit: int) -> None:
    """Expand: A is an average over the tokens that count; they alone make the same factors."""
    problem = tokens()
    model, loss, X, y = copy.deepcopy(problem)
    alone = Problem(model[:2], loss, X[y >= 0], y[y >= 0])
    exts = KFLR(approximation="expand"), EKFAC(fisher="exact", approximation="expand")
    with slice_bytes(limit):
        params = run(problem, *exts)
    for p, q in zip(params, run(alone, KFLR()), strict=True):
        assert_close(p.kflr, q.kflr)
        diagonalises(p.ekfac.bases, q.kflr)


@pytest.mark.parametrize("limit", [1, 2**24])
def test_ignored_targets_of_a_sequence_first_model(limit: int) -> None:
    torch.manual_seed(0)
    layers = [nn.LSTM(3, 4), ReduceTuple(), nn.Linear(4, 3), Permute(1, 2, 0)]
    model, (_, loss, X, y) = nn.Sequential(*layers).double(), tokens()
    X = X.transpose(0, 1).contiguous()
    with slice_bytes(limit):
        params = run(Problem(model, loss, X, y), KFLR(approximation="expand"))
    hidden = model[0](X)[0].transpose(0, 1)[y >= 0]
    assert_close(params[-2].kflr[1], (hidden.T @ hidden / len(hidden)).detach())


def test_ignored_targets_of_a_data_set() -> None:
    """Batches have different numbers of tokens that count."""
    model, loss, X, y = tokens()
    data = [(X[:1], y[:1]), (X[1:], y[1:])]
    operator = KroneckerGGN(model, loss, data, approximation="expand")
    alone = Problem(copy.deepcopy(model[:2]), nn.CrossEntropyLoss(), X[y >= 0], y[y >= 0])
    assert_close(operator.factors, [p.kflr for p in run(alone, KFLR())])


class Chosen(nn.Module):
    """What a loss gets: all rows, in one of four shapes, or those that have a target."""

    def __init__(self, form: str, y: Tensor):
        super().__init__()
        self.form, self.y = form, y
        self.layers = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 3))

    def forward(self, X: Tensor) -> Tensor:
        f = self.layers(X)
        if self.form == "chosen":
            return f[self.y >= 0]
        if self.form == "chosen before":
            first, between, last = self.layers
            return last(between(first(X))[self.y >= 0])
        if self.form == "turned":
            return f.flip(1).transpose(1, 2)
        if self.form == "pixels":
            return f.movedim(-1, 1)
        return f.transpose(0, 1).flatten(0, 1) if self.form == "rows" else f.transpose(1, 2)


@pytest.mark.parametrize("joint_bias", [False, True])
@pytest.mark.parametrize("limit", [1, 2**24])
@pytest.mark.parametrize("form", ["tokens", "rows", "pixels"])
def test_positions_where_nothing_arrives_for_another_reason_count(
    form: str, limit: int, joint_bias: bool
) -> None:
    """Where all units are dead, the loss has a target: such a position is a sample."""
    torch.manual_seed(0)
    X, y = torch.randn(4, 6, 3).double(), torch.randint(3, (4, 6))
    y[0, 3:], y[2, 1:], y[3] = -100, -100, -100
    target = y.T.flatten() if form == "rows" else y
    if form == "pixels":
        X, y, target = X.reshape(4, 2, 3, 3), y.reshape(4, 2, 3), y.reshape(4, 2, 3)
    model = extend(Chosen(form, y).double(), use_converter=True)
    hidden = model.layers[:2](X)
    dead = (hidden == 0).all(-1)
    assert (dead & (y >= 0)).any()
    assert (dead & (y < 0)).any()
    inputs = X[y >= 0], hidden[y >= 0].detach()
    ext = KFLR(approximation="expand", joint_bias=joint_bias)
    with slice_bytes(limit), backpack(ext):
        loss = extend(nn.CrossEntropyLoss())(model(X), target)
        loss.backward()
    for layer, x in zip((model.layers[0], model.layers[2]), inputs, strict=True):
        x = torch.cat([x, torch.ones(len(x), 1).double()], 1) if joint_bias else x
        assert_close(layer.weight.kflr[1], x.T @ x / len(x))


MASKS = {
    "some": [[0, 0, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]],
    "all of one": [[0, 0, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
}


@pytest.mark.parametrize("joint_bias", [False, True])
@pytest.mark.parametrize("limit", [1, 2**24])
@pytest.mark.parametrize("converter", ["trace", "record"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("form", ["chosen", "chosen before"])
@pytest.mark.parametrize("rows", [None, [2, 0]], ids=str)
def test_rows_that_a_loss_does_not_choose(
    rows: Any, form: str, name: str, converter: Any, limit: int, joint_bias: bool
) -> None:
    """They are at any positions: how many were chosen of a sample does not tell which."""
    torch.manual_seed(0)
    mask = torch.tensor(MASKS[name]).bool()
    X, y = torch.randn(3, 6, 3).double(), torch.where(mask, 1, -100)
    model = Chosen(form, y).double()
    model.layers[1] = nn.Tanh()
    hidden = model.layers[:2](X).detach()
    model = extend(model, use_converter=converter)
    with slice_bytes(limit), backpack(KFLR(rows, "expand", joint_bias)):
        extend(nn.CrossEntropyLoss())(model(X), y[mask]).backward()
    if rows is not None:
        X, hidden, mask = X[rows], hidden[rows], mask[rows]
    for layer, x in zip((model.layers[0], model.layers[2]), (X[mask], hidden[mask]), strict=True):
        x = torch.cat([x, torch.ones(len(x), 1).double()], 1) if joint_bias else x
        assert_close(layer.weight.kflr[1], x.T @ x / len(x))


@pytest.mark.parametrize(("form", "dead"), [("chosen", 2), ("turned", 0)])
def test_targets_of_unknown_positions(form: str, dead: int) -> None:
    """Positions are not taken for those that count where others could be."""
    torch.manual_seed(0)
    X, y = torch.rand(2, 6, 3).double(), torch.full((2, 6), 1)
    y[0, [0, 1, 3]] = -100
    X[0, dead] -= 9 * (form == "chosen")
    model = Chosen(form, y).double()
    for p in model.parameters():
        p.data.abs_()
    model, loss = extend(model, use_converter=True), extend(nn.CrossEntropyLoss())
    with (
        backpack(KFLR(approximation="expand")),
        pytest.raises(ValueError, match=r"\(Linear\).* is used at 6 positions .* is not known"),
    ):
        loss(model(X), y[y >= 0] if form == "chosen" else y).backward()


@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
def test_positions_of_certain_predictions_count(fisher: Any) -> None:
    """A prediction of probability one has no curvature, but a target."""
    problem = tokens()
    with torch.no_grad():
        problem.model[1].bias[0] = 1e4  # type: ignore[index, operator]
        y = problem.y.clamp(max=0)
    X = problem.X[y >= 0]
    (weight, *_) = run(problem._replace(y=y), KFAC(fisher=fisher, approximation="expand"))
    assert not weight.kfac[0].any()
    assert_close(weight.kfac[1], X.T @ X / len(X))


def test_positions_that_others_look_at_count() -> None:
    """The loss ignores a prompt, but what follows depends on it; nothing follows padding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 4, batch_first=True), ReduceTuple())
    model.append(nn.Linear(4, 3)).append(Permute(0, 2, 1)).double()
    X, y = torch.randn(2, 5, 3).double(), torch.tensor([[-100, -100, 1, 0, 2], [-100, 1, 2, 0, 1]])
    y[:, 4] = -100
    params = run(Problem(model, nn.CrossEntropyLoss(), X, y), KFLR(approximation="expand"))
    read, hidden = X[:, :4].flatten(0, 1), model[:3](X)[y >= 0].detach()
    assert_close(params[0].kflr[1], read.T @ read / len(read))
    assert_close(params[-2].kflr[1], hidden.T @ hidden / len(hidden))


def test_a_position_counts_for_any_of_several_losses() -> None:
    (model, loss, X, y), other = tokens(), tokens().y
    other[:] = -100
    other[0, 4], other[2, 1] = 1, 2
    model, loss = extend(model), extend(loss)
    f = model(X)
    with backpack(KFLR(approximation="expand")):
        (loss(f, y) + loss(f, other)).backward()
    x = X[(y >= 0) | (other >= 0)]
    assert_close(model[0].weight.kflr[1], x.T @ x / len(x))


def test_positions_that_are_not_those_of_the_loss() -> None:
    """Whole samples are left out; for parts, it is not known which positions belong to them."""
    torch.manual_seed(0)
    X = torch.randn(4, 6, 3).double()
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), Permute(0, 2, 1), nn.MaxPool1d(3))
    model.append(nn.Conv1d(2, 3, 1)).double()
    y = torch.tensor([[0, 1], [2, 0], [-100, -100], [1, 1]])
    ext = KFLR(approximation="expand")
    (weight, *_) = run(Problem(model, nn.CrossEntropyLoss(), X, y), ext)
    x = X[y[:, 0] >= 0].flatten(0, 1)
    assert_close(weight.kflr[1], x.T @ x / len(x))
    y[0, 1] = -100
    with pytest.raises(ValueError, match=r"'0' \(Linear\).* is used at 6 positions .* 2 targets"):
        run(Problem(model, nn.CrossEntropyLoss(), X, y), ext)


def test_inputs_of_accumulated_passes() -> None:
    """The identity stays one."""
    model, (X, y) = extend(mlp()), batch()
    lossfunc = extend(nn.CrossEntropyLoss())
    for part in (slice(0, 2), slice(2, 6)):
        with backpack(KFAC(fisher="inputs"), accumulate=True):
            lossfunc(model(X[part]), y[part]).backward()
    B, A = model[0].weight.kfac
    assert_close(B, torch.eye(5).double())
    assert_close(A, X.T @ X / 6)


def test_eigenvalues_of_accumulated_passes_are_refused() -> None:
    model, (X, y) = extend(mlp()), batch()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with (
        pytest.raises(NotImplementedError, match=r"linalg\.EKFAC"),
        backpack(EKFAC(), accumulate=True),
    ):
        loss.backward()


# --------------------------------------------------------------------------------------
# EKFAC of a batch
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PER_SAMPLE, ids=str)
def test_corrected_eigenvalues(case: Case) -> None:
    """Against the dense blocks; alone, beside others, and in slices."""
    blocks = truth(oracle.ggn_blocks, case)
    found = [run(case.build(), EKFAC(fisher="exact"), KFLR())]
    with slice_bytes(1):
        found.append(run(case.build(), EKFAC(fisher="exact"), KFLR()))
    for params in found:
        for p, block in zip(params, blocks, strict=True):
            check(p.ekfac, p, block)
            diagonalises(p.ekfac.bases, p.kflr)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("case", FEWER, ids=str)
def test_every_way_to_the_eigenvalues(case: Case, fisher: Any) -> None:
    """Without the rules' own bodies, with individual products, and for some samples."""
    blocks = truth(BLOCKS[fisher], case)
    ext = EKFAC(fisher=fisher, approximation="expand")
    found = [run(case.build(), ext)]
    if fisher == "exact":
        found.append(run(case.build(), ext, extensions.SqrtGGNExact()))
    with fast.disabled():
        found.append(run(case.build(), ext))
    for params in found:
        for p, block in zip(params, blocks, strict=True):
            check(p.ekfac, p, block)


@pytest.mark.parametrize("limit", [1, 2**24])
@pytest.mark.parametrize("approximation", [None, "expand", "reduce"])
@pytest.mark.parametrize("others", [[], [KFLR(max_factor_size=1)]], ids=repr)
def test_eigenvalues_alone(limit: int, approximation: Any, others: list[Any]) -> None:
    """They come with the factors that they belong to: whole, of what counts, from all slices."""

    class Eigenvalues(SecondOrderBackpropExtension):
        propagation = KFLR().propagation
        needs = (EIGEN_SQUARES[approximation],)

    with slice_bytes(limit):
        params = run(tokens(), Eigenvalues("eigenvalues"), *others)
    both = run(tokens(), EKFAC(fisher="exact", approximation=approximation))
    for p, q in zip(params, both, strict=True):
        assert_close(p.eigenvalues.reshape(-1), q.ekfac.eigenvalues.reshape(-1))


@pytest.mark.parametrize("case", select("mixing"), ids=str)
def test_networks_that_mix_samples(case: Case) -> None:
    blocks = truth(oracle.joint_ggn_blocks, case)
    for p, block in zip(run(case.build(), EKFAC(fisher="exact")), blocks, strict=True):
        check(p.ekfac, p, block)


@pytest.mark.parametrize("case", FEWER, ids=str)
def test_sampled(case: Case) -> None:
    """The draws of a pass are those of all extensions, in slices as well."""
    exts = [EKFAC(2), extensions.SqrtGGNMC(2), KFAC(2)]
    found = [run(case.build(), *exts), run(case.build(), *exts)]
    with slice_bytes(1):
        found.append(run(case.build(), EKFAC(2), KFAC(2)))
    reference = found[0]
    for params in found:
        for p, q in zip(params, reference, strict=True):
            root = q.sqrt_ggn_mc.reshape(-1, p.numel())
            check(p.ekfac, p, root.T @ root)
            diagonalises(p.ekfac.bases, q.kfac)


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_it_is_the_best_matrix_with_these_eigenvectors(approximation: Any) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)]
    problem = Problem(
        nn.Sequential(*layers).double(),
        nn.CrossEntropyLoss(),
        torch.randn(6, 1, 4, 4).double(),
        torch.randint(3, (6,)),
    )
    blocks = oracle.ggn_blocks(*problem)
    exts = EKFAC(fisher="exact", approximation=approximation), KFLR(approximation=approximation)
    for p, block in zip(run(problem, *exts), blocks, strict=True):
        error = (p.ekfac.dense() - block).norm()
        assert error <= (kfacs_to_mat(p.kflr) - block).norm() + 1e-10
        assert_close(p.ekfac.eigenvalues.sum(), block.trace())


def test_two_at_once_have_tensors_of_their_own() -> None:
    model, (X, y) = extend(mlp()), batch()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    other = EKFAC(fisher="exact")
    other.savefield = "other"
    with backpack(EKFAC(fisher="exact"), other, KFLR()):
        loss.backward()
    weight: Any = model[0].weight
    tensors = [*weight.ekfac.bases, weight.ekfac.eigenvalues]
    tensors += [*weight.other.bases, weight.other.eigenvalues, *weight.kflr]
    assert len({t.data_ptr() for t in tensors}) == len(tensors)
    assert_close(weight.ekfac.eigenvalues, weight.other.eigenvalues)


def test_subsampling() -> None:
    model, (X, y) = mlp(), batch()
    lossfunc = nn.CrossEntropyLoss(reduction="sum")
    rows = [4, 1]
    blocks = oracle.ggn_blocks(model, lossfunc, X[rows], y[rows])
    problem = Problem(model, lossfunc, X, y)
    params = run(problem, EKFAC(fisher="exact", subsampling=rows))
    for p, block in zip(params, blocks, strict=True):
        check(p.ekfac, p, block)


def test_eigenvalues_are_differentiable() -> None:
    """With the eigenvectors as constants."""
    model, (X, y) = extend(mlp()), batch()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(EKFAC(fisher="exact")):
        loss.backward(create_graph=True)
    bias: Any = model[2].bias
    (found,) = torch.autograd.grad(bias.ekfac.eigenvalues.sum(), [bias])
    (expected,) = torch.autograd.grad(
        (model(X).softmax(1).square().sum(1).mul(-1) + 1).mean(), [bias]
    )
    assert_close(found, expected)
    assert not bias.ekfac.bases[0].requires_grad


def test_low_precision_and_devices() -> None:
    model, (X, y) = extend(mlp().bfloat16()), batch()
    loss = extend(nn.CrossEntropyLoss())(model(X.bfloat16()), y)
    with backpack(EKFAC()):
        loss.backward()
    found = model[0].weight.ekfac
    assert {t.dtype for t in (*found.bases, found.eigenvalues)} == {torch.bfloat16}


# --------------------------------------------------------------------------------------
# The matrix
# --------------------------------------------------------------------------------------


def example(swaps_axes: bool) -> tuple[EigenKronecker, Tensor]:
    torch.manual_seed(0)
    bases = [torch.linalg.qr(torch.randn(d, d).double())[0] for d in (3, 8)]
    shape = torch.Size([2, 3, 4] if swaps_axes else [3, 2, 4])
    found = EigenKronecker(bases, torch.rand(3, 8).double(), shape, swaps_axes)
    Q, values = matrix(found)
    return found, Q @ values.diag() @ Q.T


@pytest.mark.parametrize("swaps_axes", [False, True])
def test_products(swaps_axes: bool) -> None:
    found, dense = example(swaps_axes)
    vectors = torch.randn(5, *found.shape).double()
    flat = vectors.flatten(1)
    assert_close(found.product(vectors).flatten(1), flat @ dense)
    assert_close(found.product(vectors[0]), found.product(vectors)[0])
    damped = torch.linalg.inv(dense + 0.3 * torch.eye(24).double())
    assert_close(found.solve(vectors, 0.3).flatten(1), flat @ damped)
    assert_close(found.dense(), dense)
    with pytest.raises(ValueError, match=r"\['V', .*got \[5\]"):
        found.product(torch.randn(5).double())
    singular = EigenKronecker(found.bases, torch.zeros(3, 8).double(), found.shape)
    with pytest.raises(ValueError, match="positive damping"):
        singular.solve(vectors.reshape(5, *found.shape))


@pytest.mark.parametrize("swaps_axes", [False, True])
def test_operator(swaps_axes: bool) -> None:
    block, dense = example(swaps_axes)
    operator = EigenOperator([block, block])
    dense = torch.block_diag(dense, dense)
    eye = torch.eye(48).double()
    assert_close(operator.to_dense(), dense)
    assert_close(operator.diagonal(), dense.diagonal())
    assert_close(operator.trace(), dense.trace())
    assert_close(operator.logdet(0.3), torch.logdet(dense + 0.3 * eye))
    inverse = torch.linalg.inv(dense + 0.3 * eye)
    assert_close(operator.inverse(0.3).to_dense(), inverse)
    rhs = torch.randn(48, 3).double()
    assert_close(operator.solve(rhs, 0.3), inverse @ rhs)
    assert_close(operator.solve(rhs[:, 0], 0.3), inverse @ rhs[:, 0])
    root = operator.root()
    assert_close(root @ root.to_dense(), dense)
    generator = torch.Generator().manual_seed(0)
    samples = operator.sample(40_000, generator)
    assert (samples @ samples.T / 40_000 - dense).norm() < 0.05 * dense.norm()
    with pytest.raises(ValueError, match="Expected the blocks"):
        EigenOperator([])


def test_root_of_an_indefinite_matrix() -> None:
    with pytest.raises(ValueError, match="has no root"):
        linalg.DiagonalOperator(torch.tensor([1.0, -1.0])).root()


# --------------------------------------------------------------------------------------
# A data set
# --------------------------------------------------------------------------------------

SIZES = (3, 5, 2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 2), nn.Tanh(), nn.ConvTranspose2d(2, 2, 2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(n, 1, 4, 4).double(), torch.randint(3, (n,))) for n in SIZES]


def whole(data: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    X, y = zip(*data, strict=True)
    return torch.cat(X), torch.cat(y)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_data_set_is_one_batch(fisher: Any, reduction: str, approximation: Any) -> None:
    model, data = network(), batches()
    lossfunc = nn.CrossEntropyLoss(ignore_index=1, reduction=reduction)
    options = {"fisher": fisher, "approximation": approximation}
    operator = linalg.EKFAC(model, lossfunc, data, **options)
    factors = KroneckerGGN(model, lossfunc, data, **options)
    X, y = whole(data)
    with backpack(EKFAC(**options), KFAC(**options)):
        extend(lossfunc)(extend(model)(X), y).backward()
    dense = (GGN if fisher == "exact" else EmpiricalFisher)(model, lossfunc, data).to_dense()
    start = 0
    for p, block, own in zip(model.parameters(), operator.blocks, factors.factors, strict=True):
        part = slice(start, start + p.numel())
        check(block, p, dense[part, part])
        assert_close(operator.to_dense()[part, part], block.dense())
        # without the sign of eigenvectors, and their choice where eigenvalues agree
        assert_close(own, p.kfac)  # type: ignore[attr-defined]
        diagonalises(block.bases, own)
        start += p.numel()
    assert_close(operator.trace(), dense.trace())


def test_inputs_of_a_data_set() -> None:
    model, data = network(), batches()
    operator = KroneckerGGN(model, nn.CrossEntropyLoss(), data, fisher="inputs")
    X, y = whole(data)
    with backpack(KFAC(fisher="inputs")):
        extend(nn.CrossEntropyLoss())(extend(model)(X), y).backward()
    assert_close(operator.factors, [p.kfac for p in model.parameters()])  # type: ignore[attr-defined]


def test_transposed_convolutions_have_their_entries_in_order() -> None:
    """With one position and one sample, the Kronecker product is the block itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose1d(3, 2, 1), nn.Flatten()).double()
    data = [(torch.randn(1, 3, 1).double(), torch.randint(2, (1,)))]
    lossfunc = nn.CrossEntropyLoss()
    params = [model[0].weight]
    dense = GGN(model, lossfunc, data, params=params).to_dense()
    for kind in (KroneckerGGN, linalg.EKFAC):
        operator: Any = kind(model, lossfunc, data, params=params)
        assert_close(operator.to_dense(), dense)
        assert_close(operator.diagonal(), dense.diagonal())
        assert_close(
            operator.inverse(0.1).to_dense(), torch.linalg.inv(operator.damped(0.1).to_dense())
        )
    split = KroneckerGGN(model, lossfunc, data, params=params).inverse(0.1, split=True)
    order = torch.arange(6).reshape(3, 2, 1).transpose(0, 1).flatten()
    usual = KroneckerOperator(KroneckerGGN(model, lossfunc, data, params=params).factors)
    assert_close(split.to_dense()[order][:, order], usual.inverse(0.1, split=True).to_dense())


def test_sampled_data_set() -> None:
    model, data = network(), batches()
    lossfunc = nn.CrossEntropyLoss()
    operator = linalg.EKFAC(model, lossfunc, data, fisher="sampled", mc_samples=400)
    trace = GGN(model, lossfunc, data).to_dense().trace()
    assert abs(operator.trace() / trace - 1) < 0.1
    torch.manual_seed(3)
    one = linalg.EKFAC(model, lossfunc, data, fisher="sampled")
    torch.manual_seed(3)
    assert_close(linalg.EKFAC(model, lossfunc, data, fisher="sampled").spectrum, one.spectrum)


def test_nothing_is_left_behind() -> None:
    model, data = network(), batches()
    before = [vars(p).copy() for p in model.parameters()]
    linalg.EKFAC(model, nn.CrossEntropyLoss(), data)
    for p, attributes in zip(model.parameters(), before, strict=True):
        assert p.grad is None
        assert vars(p).keys() == attributes.keys()


@pytest.mark.parametrize("operator", [linalg.EKFAC, KroneckerGGN])
def test_inverses_with_little_damping_keep_their_digits(operator: Any) -> None:
    solutions = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        layers = nn.Linear(60, 20, bias=False), nn.ReLU(), nn.Linear(20, 4, bias=False)
        model = nn.Sequential(*layers)
        X, y = torch.rand(30, 60).to(dtype), torch.randint(4, (30,))
        model.to(dtype)
        matrix = operator(
            model, nn.CrossEntropyLoss(), [(X, y)], fisher="empirical", progress=False
        )
        loss = cross_entropy(model(X[:1]), y[:1])
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        vector = torch.cat([g.flatten() for g in gradients])
        solutions.append(matrix.inverse(1e-4) @ vector)
    # with eigenvectors of single precision it is 1e-4
    assert (solutions[0] - solutions[1]).norm() < 3e-5 * solutions[1].norm()


def test_wrong_data() -> None:
    model, data = network(), batches()
    lossfunc = nn.CrossEntropyLoss()
    with pytest.raises(ValueError, match=r"EKFAC reads .* several times, but list_iterator"):
        linalg.EKFAC(model, lossfunc, iter(data))

    class Shrinking(list[Any]):
        def __iter__(self) -> Any:
            yield from list.__iter__(self)
            self.pop()

    with pytest.raises(ValueError, match="between the two passes"):
        linalg.EKFAC(model, lossfunc, Shrinking(data))
    with pytest.raises(ValueError, match="nothing to correct"):
        linalg.EKFAC(model, lossfunc, data, fisher="inputs")
    with pytest.raises(ValueError, match="fisher is one of"):
        KroneckerGGN(model, lossfunc, data, fisher="KFLR")  # type: ignore[arg-type]


def test_progress_is_off() -> None:
    """A bar is shown if asked for: tqdm is not imported before."""
    import sys

    model, data = network(), batches()
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("tqdm")}
    try:
        linalg.EKFAC(model, nn.CrossEntropyLoss(), data)
        assert "tqdm" not in sys.modules
    finally:
        sys.modules.update(hidden)


def test_deep_copies() -> None:
    model, (X, y) = extend(mlp()), batch()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(EKFAC()):
        loss.backward()
    found = model[0].weight.ekfac
    copied = copy.deepcopy(found)
    assert_close(copied.dense(), found.dense())
    assert copied.eigenvalues.data_ptr() != found.eigenvalues.data_ptr()


def test_summary() -> None:
    model, (X, y) = extend(mlp()), batch()
    loss = extend(nn.CrossEntropyLoss())(model(X), y)
    with backpack(EKFAC()):
        loss.backward()
    shapes = {row.quantity: row.shape for row in summary(model).rows if row.parameter == "0.weight"}
    expected = {"ekfac.bases[0]": (5, 5), "ekfac.bases[1]": (4, 4), "ekfac.eigenvalues": (5, 4)}
    assert shapes == {"grad": (5, 4), **expected}
