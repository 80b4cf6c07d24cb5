"""Estimators of traces, diagonals, norms and densities against dense formulas in float64."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from backpack.linalg import (
    DiagonalOperator,
    Estimate,
    KroneckerOperator,
    LinearOperator,
    diagonal,
    frobenius_norm,
    logdet,
    spectral_density,
    trace,
)
from backpack.linalg.estimators import _xdiag, randomness

P = 40


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Compute in double precision."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class Dense(LinearOperator):
    """A matrix that counts the vectors it is multiplied with."""

    def __init__(self, matrix: Tensor):
        super().__init__((matrix.shape[0], matrix.shape[1]), matrix.dtype, matrix.device)
        self.matrix = matrix
        self.is_symmetric = matrix.shape[0] == matrix.shape[1] and torch.equal(matrix, matrix.T)
        self.chunks: list[int] = []

    def _matmat(self, matrix: Tensor) -> Tensor:
        self.chunks.append(matrix.shape[1])
        return self.matrix @ matrix

    def _rmatmat(self, matrix: Tensor) -> Tensor:
        self.chunks.append(matrix.shape[1])
        return self.matrix.T @ matrix


def with_spectrum(values: Tensor) -> Tensor:
    Q, _ = torch.linalg.qr(torch.randn(P, P))
    matrix = Q @ values.diag() @ Q.T
    return (matrix + matrix.T) / 2


def falling() -> Tensor:
    return with_spectrum(torch.logspace(0, -4, P))


def indefinite() -> Tensor:
    return with_spectrum(torch.logspace(0, -3, P) * torch.tensor([1.0, -1.0]).repeat(P // 2))


def of_rank(rank: int) -> Tensor:
    return with_spectrum(torch.cat([torch.rand(rank) + 0.5, torch.zeros(P - rank)]))


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


ESTIMATORS: dict[str, tuple[Callable[..., Estimate], str, Callable[[Tensor], Tensor]]] = {
    "hutchinson": (trace, "hutchinson", torch.trace),
    "hutch++": (trace, "hutch++", torch.trace),
    "xtrace": (trace, "xtrace", torch.trace),
    "diagonal": (diagonal, "hutchinson", torch.diagonal),
    "xdiag": (diagonal, "xdiag", torch.diagonal),
    "norm": (frobenius_norm, "hutchinson", torch.linalg.matrix_norm),
    "norm++": (frobenius_norm, "hutch++", torch.linalg.matrix_norm),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("make", [falling, indefinite])
def test_mean_and_error(name: str, make: Callable[[], Tensor]) -> None:
    """Over many seeds, the mean is the truth, and the spread is what the error says."""
    estimate, method, truth = ESTIMATORS[name]
    matrix, generator, runs = make(), seeded(), 400
    found = [estimate(Dense(matrix), 12, method, generator) for _ in range(runs)]
    values = torch.stack([one.value for one in found])
    mean, expected = values.mean(0), truth(matrix)
    if estimate is frobenius_norm:  # the square has no bias
        values, mean = values.square(), values.square().mean(0)
        expected = expected.square()
    deviation = values.std(0)
    assert ((mean - expected).abs() < 5 * deviation / runs**0.5).all()
    if estimate is frobenius_norm:
        errors = torch.stack([2 * one.error * one.value for one in found])
    else:
        errors = torch.stack([one.error for one in found])
    ratio = errors.square().mean(0).sqrt() / deviation
    low = 0.6 if name in ("xtrace", "xdiag") else 0.85  # dependent terms
    assert low < ratio.mean() < 1.2


@pytest.mark.parametrize("name", ESTIMATORS)
def test_products(name: str) -> None:
    """The number of products is what is asked for, in chunks, and the seed decides the result."""
    estimate, method, _ = ESTIMATORS[name]
    operator = Dense(falling())
    found = estimate(operator, 12, method, seeded())
    assert found.products == sum(operator.chunks) == 12
    chunked = Dense(operator.matrix)
    again = estimate(chunked, 12, method, seeded(), vectors_at_once=2, progress=True)
    assert max(chunked.chunks) == 2
    assert_close(again, found)
    assert not torch.equal(estimate(operator, 12, method, seeded(1)).value, found.value)


def test_hutchinson_formulas() -> None:
    matrix = falling() + torch.randn(P, P)  # need not be symmetric
    signs = torch.empty(P, 9).bernoulli_(0.5, generator=seeded()) * 2 - 1
    forms = (signs * (matrix @ signs)).sum(0)
    found = trace(Dense(matrix), 9, "hutchinson", seeded())
    assert_close(found, Estimate(forms.mean(), forms.std() / 3, 9))
    entries = signs * (matrix @ signs)
    found = diagonal(Dense(matrix), 9, "hutchinson", seeded())
    assert_close(found, Estimate(entries.mean(1), entries.std(1) / 3, 9))
    squares = (matrix @ signs).square().sum(0)
    assert_close(
        frobenius_norm(Dense(matrix), 9, "hutchinson", seeded()).value, squares.mean().sqrt()
    )


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_xtrace_leaves_one_out(is_symmetric: bool) -> None:
    """Hutch++ with each of the vectors as the only test vector, basis by basis."""
    matrix = falling() if is_symmetric else torch.randn(P, P)
    V = torch.randn(P, 6, generator=seeded())
    each = []
    for i in range(6):
        others = [j for j in range(6) if j != i]
        Q, _ = torch.linalg.qr(matrix @ V[:, others])
        rest = V[:, i] - Q @ (Q.T @ V[:, i])
        rest = rest * (P - 5) ** 0.5 / rest.norm()
        each.append((Q.T @ matrix @ Q).trace() + rest @ matrix @ rest)
    values = torch.stack(each)
    found = trace(Dense(matrix), 12, "xtrace", seeded())
    assert_close(found, Estimate(values.mean(), values.std() / 6**0.5, 12))


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_xdiag_leaves_one_out(is_symmetric: bool) -> None:
    matrix = falling() if is_symmetric else torch.randn(P, P)
    V = torch.empty(P, 6).bernoulli_(0.5, generator=seeded()) * 2 - 1
    each = []
    for i in range(6):
        others = [j for j in range(6) if j != i]
        Q, _ = torch.linalg.qr(matrix @ V[:, others])
        image = matrix @ V[:, i]
        each.append((Q @ Q.T @ matrix).diagonal() + V[:, i] * (image - Q @ (Q.T @ image)))
    values = torch.stack(each)
    found = diagonal(Dense(matrix), 12, "xdiag", seeded())
    assert_close(found, Estimate(values.mean(0), values.std(0) / 6**0.5, 12))


def test_hutchpp_formula() -> None:
    matrix, generator = indefinite(), seeded()
    sketch = torch.empty(P, 4).bernoulli_(0.5, generator=generator) * 2 - 1
    signs = torch.empty(P, 4).bernoulli_(0.5, generator=generator) * 2 - 1
    Q, _ = torch.linalg.qr(matrix @ sketch)
    rest = signs - Q @ (Q.T @ signs)
    forms = (rest * (matrix @ rest)).sum(0)
    expected = (Q.T @ matrix @ Q).trace() + forms.mean()
    found = trace(Dense(matrix), 12, "hutch++", seeded())
    assert_close(found, Estimate(expected, forms.std() / 2, 12))


@pytest.mark.parametrize("name", ["hutch++", "xtrace", "xdiag", "norm++"])
def test_low_rank_is_exact(name: str) -> None:
    """If the vectors span the range, nothing is left to chance."""
    estimate, method, truth = ESTIMATORS[name]
    matrix = of_rank(3)
    value, error, _ = estimate(Dense(matrix), 15, method, seeded())
    assert_close(value, truth(matrix))
    assert error.max() < 1e-10
    zero = estimate(Dense(torch.zeros(P, P)), 15, method, seeded())
    assert not zero.value.any() and not zero.error.any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_enough_vectors_are_exact(name: str) -> None:
    estimate, method, truth = ESTIMATORS[name]
    matrix = torch.randn(7, 7)
    found = estimate(Dense(matrix), 8, method)
    assert_close(found, Estimate(truth(matrix), torch.zeros_like(truth(matrix)), 7))


def test_xdiag_of_few_rows() -> None:
    """Equal signs span less than other vectors: that is no exact result."""
    matrix = torch.randn(5, 5)
    generator = seeded()
    found = [diagonal(Dense(matrix), 4, "xdiag", generator) for _ in range(300)]
    values = torch.stack([one.value for one in found])
    assert all((one.error > 0).any() for one in found)
    expected = matrix.diagonal()
    assert ((values.mean(0) - expected).abs() < 5 * values.std(0) / 300**0.5).all()


def test_rectangular_norm() -> None:
    matrix = torch.randn(9, P)
    assert_close(frobenius_norm(Dense(matrix), 36, "hutch++").value, matrix.norm())
    with pytest.raises(ValueError, match="not square"):
        trace(Dense(matrix))


# --------------------------------------------------------------------------------------
# Spectral densities
# --------------------------------------------------------------------------------------


def test_quadrature_of_all_steps_is_exact() -> None:
    """With as many steps as eigenvalues, ``vᵀ f(A) v`` is exact for each vector."""
    matrix = indefinite()
    v = torch.randn(P, 4, generator=seeded())
    v = v / v.norm(dim=0)
    values, vectors = torch.linalg.eigh(matrix)
    weights = (vectors.T @ v).square()  # [P, V]
    found = spectral_density(Dense(matrix), 4, P, seeded())
    assert_close(found.nodes.sort(1).values, values.expand(4, P), rtol=1e-8, atol=1e-10)
    forms = P * (weights * values.exp().unsqueeze(1)).sum(0)
    assert_close(found.trace_of(torch.exp), Estimate(forms.mean(), forms.std() / 2, 4 * P))
    grid = torch.linspace(-1.2, 1.2, 13)
    normal = torch.distributions.Normal(values, 0.1)
    density = normal.log_prob(grid.unsqueeze(1)).exp() @ weights  # [G, V]
    smooth = found.density(grid, 0.1)
    assert_close(smooth, Estimate(density.mean(1), density.std(1) / 2, 4 * P))
    edges = torch.tensor([-2.0, -0.011, 0.011, 2.0])
    counts = torch.stack(
        [P * weights[(values >= a) & (values < b)].sum(0) for a, b in itertools.pairwise(edges)]
    )
    assert_close(found.counts(edges).value, counts.mean(1))
    assert_close(found.counts(edges).value.sum(), torch.tensor(float(P)))


def test_few_steps_integrate_polynomials() -> None:
    """K steps are exact up to the degree 2K - 1, and not beyond."""
    matrix = indefinite()
    v = torch.randn(P, 3, generator=seeded())
    v = v / v.norm(dim=0)
    found = spectral_density(Dense(matrix), 3, 3, seeded())
    for degree in (1, 5, 6):
        forms = P * (v * (torch.linalg.matrix_power(matrix, degree) @ v)).sum(0)
        value = found.trace_of(lambda nodes, d=degree: nodes**d).value
        assert torch.isclose(value, forms.mean(), rtol=1e-9) == (degree < 6)


def test_density_in_chunks() -> None:
    operator = Dense(indefinite())
    chunked = Dense(operator.matrix)
    expected = spectral_density(operator, 5, 4, seeded())
    found = spectral_density(chunked, 5, 4, seeded(), vectors_at_once=2, progress=True)
    assert_close((found.nodes, found.weights), (expected.nodes, expected.weights))
    assert set(chunked.chunks) == {2, 1}
    assert sum(chunked.chunks) == found.products == 20


def test_low_rank_density() -> None:
    """A Krylov space that is exhausted early adds neither nodes nor weight."""
    matrix = of_rank(3)
    found = spectral_density(Dense(matrix), 50, 20, seeded())
    assert_close(found.weights.sum(1), torch.ones(50))
    spectrum = torch.linalg.eigvalsh(matrix)
    assert (found.nodes.unsqueeze(2) - spectrum).abs().amin(2).max() < 1e-10
    value, error, _ = found.counts(torch.tensor([0.25, 2.0]))
    assert abs(value.item() - 3) < 4 * error.item()
    identity = spectral_density(Dense(torch.eye(P)), 2, 5)
    assert_close(identity.trace_of(torch.exp).value, P * torch.tensor(1.0).exp())


def test_logdet() -> None:
    matrix = falling()
    expected = torch.logdet(matrix + 0.1 * torch.eye(P))
    found = [logdet(Dense(matrix), 0.1, 4, 30, seeded(i)) for i in range(100)]
    values = torch.stack([one.value for one in found])
    assert (values.mean() - expected).abs() < 5 * values.std() / 10
    errors = torch.stack([one.error for one in found])
    assert 0.8 < errors.square().mean().sqrt() / values.std() < 1.2
    with pytest.raises(ValueError, match="not positive definite"):
        logdet(Dense(indefinite()), 0.1)
    with pytest.raises(ValueError, match="not known to be symmetric"):
        logdet(Dense(torch.randn(P, P)))


# --------------------------------------------------------------------------------------
# Structured operators
# --------------------------------------------------------------------------------------


def structured() -> dict[str, LinearOperator]:
    factors = [torch.randn(d, d) for d in (2, 3, 4)]
    K = KroneckerOperator([[factors[0] @ factors[0].T, factors[1] @ factors[1].T]])
    D = DiagonalOperator(torch.rand(6) + 0.1)
    return {
        "diagonal": D,
        "kronecker": K,
        "inverse": K.inverse(0.1),
        "damped": K.damped(0.3),
        "multiple": 2 * K.damped(0.3),
        "sum": K + 0.5 * D,
        "submatrix": K.submatrix([4, 1, 1]),
    }


@pytest.mark.parametrize("name", structured())
def test_structured_operators_answer_exactly(name: str, monkeypatch: Any) -> None:
    operator = structured()[name]
    dense = operator.to_dense()
    assert_close(trace(operator), Estimate(dense.trace(), torch.tensor(0.0), 0))
    found = diagonal(operator)
    assert_close(found, Estimate(dense.diagonal(), torch.zeros(len(dense)), 0))
    norm = frobenius_norm(operator)
    assert_close(norm.value, dense.norm())
    if name in ("sum", "submatrix"):  # with as many products as there are rows
        assert norm.products == len(dense)
        return
    assert norm.products == 0
    assert_close(
        logdet(operator, 0.2),
        Estimate(torch.logdet(dense + 0.2 * torch.eye(len(dense))), torch.tensor(0.0), 0),
    )
    found = spectral_density(operator).trace_of(torch.exp)
    assert_close(found, Estimate(torch.linalg.eigvalsh(dense).exp().sum(), torch.tensor(0.0), 0))


def test_wrong_arguments() -> None:
    operator = Dense(falling())
    with pytest.raises(ValueError, match=r"hutchinson, hutch\+\+, xtrace, got 'xdiag'"):
        trace(operator, method="xdiag")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hutch\+\+ .* at least 6 vectors, got num_vectors=5"):
        trace(operator, 5, "hutch++")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        trace(operator, vectors_at_once=0)
    with pytest.raises(ValueError, match="vectors_at_once has to be at least 1, got -1"):
        frobenius_norm(operator, vectors_at_once=-1)
    with pytest.raises(ValueError, match="steps=0"):
        spectral_density(operator, steps=0)
    with pytest.raises(ValueError, match="width"):
        spectral_density(operator, 2, 3).density(torch.zeros(1), 0.0)


@pytest.mark.parametrize(
    "estimate", [trace, diagonal, frobenius_norm, spectral_density, partial(logdet, damping=1.0)]
)
def test_a_model_in_place_of_an_operator(estimate: Any) -> None:
    with pytest.raises(TypeError, match=r"operators, such as backpack.linalg.GGN\(.*got Linear"):
        estimate(torch.nn.Linear(2, 2))


def test_progress_needs_no_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def guarded(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.split(".")[0] == "tqdm":
            raise ImportError(module)
        return original(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    operator = Dense(falling())
    shown = trace(operator, 12, generator=seeded(), vectors_at_once=2, progress=True)
    assert_close(shown, trace(operator, 12, generator=seeded()))


def test_single_precision() -> None:
    matrix = falling()
    found = trace(Dense(matrix.float()), 12, generator=seeded())
    assert found.value.dtype == torch.float32
    assert (found.value - matrix.trace()).abs() < 6 * found.error
    low = Dense(matrix.bfloat16())
    assert trace(low, 12, generator=seeded()).value.dtype == torch.float32


class Diagonal(LinearOperator):
    """A diagonal matrix that is known by its products alone."""

    def __init__(self, entries: Tensor):
        super().__init__(len(entries), entries.dtype, entries.device)
        self.entries = entries

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.entries.unsqueeze(1) * matrix


def test_many_rows_in_single_precision() -> None:
    """What is small beside the largest is no rounding because vectors are long."""
    size, largest = 100_000, torch.full((5,), 100.0)
    entries = torch.cat([largest, torch.full((size - 5,), 0.01)]).float()
    found = trace(Diagonal(entries), 18, generator=seeded())
    assert 0 < found.error < 20 and found.products == 18
    assert (found.value - entries.double().sum()).abs() < 5 * found.error
    each = diagonal(Diagonal(entries), 18, generator=seeded())
    assert each.products == 18 and each.error.min() > 0

    entries = torch.cat([torch.tensor([1e7]), torch.ones(1000)]).float()  # images hide each other
    for method in ("hutch++", "xtrace"):
        found = trace(Diagonal(entries), 30, method, seeded())
        assert (found.value - entries.double().sum()).abs() < 5 * found.error + 5
    each = diagonal(Diagonal(entries), 30, generator=seeded())
    assert (each.value - entries)[1:].abs().max() < 5 * each.error.max() + 1e-2

    flat = Diagonal(torch.linspace(1, 1.01, size, dtype=torch.float32))
    nodes = spectral_density(flat, 2, 6, generator=seeded()).nodes
    assert nodes.min() < 1.001 and nodes.max() > 1.009


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e21, 1e30])
def test_scales_whose_squares_single_precision_does_not_hold(scale: float) -> None:
    """Such as the curvature of a network that is certain: estimates have the scale, errors too."""
    matrix = (torch.randn(P, P) / P).float()
    matrix = matrix @ matrix.T
    estimators = [
        *(partial(trace, method=name) for name in ("hutchinson", "hutch++", "xtrace")),
        *(partial(diagonal, method=name) for name in ("hutchinson", "xdiag")),
        *(partial(frobenius_norm, method=name) for name in ("hutchinson", "hutch++")),
        partial(frobenius_norm, num_vectors=P),
    ]
    for estimate in estimators:
        arguments: Any = {"num_vectors": 24, "generator": seeded(), **estimate.keywords}
        expected = estimate.func(Dense(matrix), **arguments)
        arguments["generator"] = seeded()
        found = estimate.func(Dense(matrix * scale), **arguments)
        for x, y in zip(found[:2], expected[:2], strict=True):
            assert_close(x.double() / scale, y.double(), rtol=1e-2, atol=1e-6)
    nodes = [spectral_density(Dense(matrix * s), 3, 8, seeded()).nodes for s in (1, scale)]
    assert_close(nodes[1].double() / scale, nodes[0].double(), rtol=1e-3, atol=1e-5)
    values = matrix.diagonal()
    norm = frobenius_norm(DiagonalOperator(values * scale)).value.double()
    assert_close(norm / scale, values.norm().double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [3e-4, 1.0, -2.0])
def test_density_of_equal_eigenvalues(value: float) -> None:
    """The default width is none of rounding, which no grid would meet."""
    matrix = with_spectrum(torch.full((P,), value)).float()
    found = spectral_density(Dense(matrix), 3, 5, seeded())
    grid = torch.linspace(-0.5, 0.5, 400).float() * abs(value) + value
    density = found.density(grid).value
    assert_close(torch.trapezoid(density, grid), torch.tensor(1.0).float(), rtol=1e-3, atol=0)


def test_xdiag_has_no_bias_where_signs_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over all signs there are is the truth, with as many products as were asked for."""
    matrix = torch.randn(4, 4)
    total, operator = torch.zeros(4), Dense(matrix)
    # minus a vector is as good as that; three are drawn: of which two may be the same, one alone
    columns = [(1.0, *rest) for rest in itertools.product([-1.0, 1.0], repeat=3)]
    triples = list(itertools.product(columns, repeat=3))
    for triple in triples:
        draw = randomness(operator, None, None, False)
        monkeypatch.setattr(type(draw), "signs", lambda *_, triple=triple: torch.tensor(triple).T)
        operator.chunks.clear()
        found = _xdiag(draw, 6)
        assert found.products == sum(operator.chunks) <= 6
        total += found.value
    assert_close(total / len(triples), matrix.diagonal())


class Precise(Dense):
    """A matrix that does not multiply in lower precision."""

    def _matmat(self, matrix: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super()._matmat(matrix)

    def _rmatmat(self, matrix: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super()._rmatmat(matrix)


def test_estimates_inside_of_autocast() -> None:
    """What an estimator computes beside the products has its own precision."""
    whole, low = falling().float(), of_rank(6).float()
    grid = torch.linspace(0, 1, 20).float()
    nodes = spectral_density(Precise(whole), 4, 9, seeded())
    functions = [lambda: nodes.density(grid)]
    for matrix in (whole, low):
        for name in ("hutchinson", "hutch++", "xtrace"):
            functions.append(partial(lambda A, m: trace(A, 18, m, seeded()), Precise(matrix), name))
        for name in ("hutchinson", "xdiag"):
            functions.append(
                partial(lambda A, m: diagonal(A, 18, m, seeded()), Precise(matrix), name)
            )
        functions.append(
            partial(lambda A: frobenius_norm(A, 18, generator=seeded()), Precise(matrix))
        )
    expected = [function() for function in functions]
    with torch.autocast("cpu", torch.bfloat16):
        found = [function() for function in functions]
    for one, other in zip(found, expected, strict=True):
        assert_close(one[:2], other[:2], rtol=1e-4, atol=1e-5)
