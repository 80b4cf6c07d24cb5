"""The oracle against finite differences, formulas by hand, and identities between quantities."""

from __future__ import annotations

import copy
from collections.abc import Callable

import oracle
import pytest
import torch
from cases import CASES, Case, Problem, select
from torch import Tensor, kron, nn
from torch.testing import assert_close

SEQUENTIAL = select(without="nonsequential tied mixing sequence")
# a recurrent weight enters nonlinearly: its own second derivative is part of the Hessian alone
LINEAR_IN_PARAMS = [case for case in SEQUENTIAL if not case.tags & {"unknown", "recurrent"}]


def close(actual: object, expected: object, tol: float = 1e-9) -> None:
    assert_close(actual, expected, rtol=tol, atol=tol / 100)


def seeded(quantity: Callable[..., list], problem: Problem, *args: str) -> list:
    """Evaluate a function of the oracle with the same dropout masks every time."""
    torch.manual_seed(7)
    return quantity(*problem, *args)


def tiny(*layers: nn.Module, N: int = 3, C: int = 3, loss: nn.Module | None = None) -> Problem:
    """Return a problem with inputs [N, 4] and class indices."""
    torch.manual_seed(0)
    model = nn.Sequential(*(copy.deepcopy(layer) for layer in layers)).double()
    X = torch.randn(N, 4, dtype=torch.float64)
    return Problem(model, loss or nn.CrossEntropyLoss(), X, torch.randint(C, (N,)))


def mlp(**kwargs: object) -> Problem:
    torch.manual_seed(1)
    return tiny(nn.Linear(4, 2), nn.Sigmoid(), nn.Linear(2, 3), nn.Tanh(), **kwargs)


# --------------------------------------------------------------------------------------
# Finite differences
# --------------------------------------------------------------------------------------


def differences(f: Callable[[], Tensor], p: Tensor, eps: float = 1e-5) -> Tensor:
    """Return df/dp [*f, *p] by central differences."""
    columns = []
    for i in range(p.numel()):
        values = []
        for step in (eps, -2 * eps):
            p.data.view(-1)[i] += step
            values.append(f().detach().clone())
        p.data.view(-1)[i] += eps
        columns.append((values[0] - values[1]) / (2 * eps))
    return torch.stack(columns, -1).reshape(*columns[0].shape, *p.shape)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_finite_differences(reduction: str) -> None:
    problem = mlp(loss=nn.CrossEntropyLoss(reduction=reduction))
    model, loss, X, y = problem
    factor = 1 / len(X) if reduction == "mean" else 1

    def contributions() -> Tensor:  # [N]
        return torch.stack([factor * loss(model(X[n, None]), y[n, None]) for n in range(len(X))])

    for i, p in enumerate(oracle.trainable(model)):

        def batch_grad(i: int = i) -> Tensor:
            return oracle.batch_grad(*problem)[i]  # [N, *p]

        close(batch_grad(), differences(contributions, p), 1e-7)
        close(oracle.grad(*problem)[i], differences(lambda: loss(model(X), y), p), 1e-7)

        hessians = differences(batch_grad, p).reshape(len(X), p.numel(), p.numel())
        close(oracle.hessian_blocks(*problem)[i], hessians.sum(0), 1e-7)
        close(
            oracle.batch_hessian_diag(*problem)[i].flatten(1),
            hessians.diagonal(dim1=1, dim2=2),
            1e-7,
        )

        J = differences(lambda: model(X), p).flatten(2)  # [N, C, P]
        probs = model(X).softmax(1)
        H = factor * (probs.diag_embed() - probs.unsqueeze(2) * probs.unsqueeze(1))
        close(oracle.ggn_blocks(*problem)[i], (J.mT @ H @ J).sum(0), 1e-7)


# --------------------------------------------------------------------------------------
# Formulas by hand
# --------------------------------------------------------------------------------------


def test_variance_formula() -> None:
    problem = mlp()
    N = len(problem.X)
    for grad, squared, variance in zip(
        oracle.grad(*problem),
        oracle.sum_grad_squared(*problem),
        oracle.variance(*problem),
        strict=True,
    ):
        close(variance, squared / N - (grad / N) ** 2)


def test_linear_mse() -> None:
    N, C = 3, 2
    model, loss, X, _ = tiny(nn.Linear(4, C), loss=nn.MSELoss())
    y = torch.randn(N, C, dtype=torch.float64)
    problem = Problem(model, loss, X, y)

    error = 2 / (N * C) * (model(X) - y).detach()
    close(oracle.batch_grad(*problem), [error[:, :, None] * X[:, None, :], error])
    close(oracle.batch_l2(*problem), [(error**2).sum(1) * (X**2).sum(1), (error**2).sum(1)])
    eye = 2 / (N * C) * torch.eye(C, dtype=torch.float64)
    expected = [kron(eye, X.T @ X), N * eye]
    close(oracle.ggn_blocks(*problem), expected)
    close(oracle.joint_ggn_blocks(*problem), expected)
    close(oracle.hessian_blocks(*problem), expected)
    factors = [[N * eye, X.T @ X / N], [N * eye]]
    close(oracle.kflr(*problem), factors)
    close(oracle.kfra(*problem), factors)


def _two_layers() -> tuple[Problem, Tensor, Tensor, Tensor, Tensor]:
    """Return ``W2 sigmoid(W1 x)`` with J [N, C, D], H [N, C, C] and residual [N, D]."""
    torch.manual_seed(2)
    problem = tiny(nn.Linear(4, 2), nn.Sigmoid(), nn.Linear(2, 3))
    model, _, X, y = problem
    with torch.no_grad():
        z = model[:2](X)
        p = model(X).softmax(1)
        first, second = z * (1 - z), z * (1 - z) * (1 - 2 * z)
        J = model[2].weight * first[:, None, :]
        H = (p.diag_embed() - p[:, :, None] * p[:, None, :]) / 3
        delta = (p - nn.functional.one_hot(y, 3)) / 3 @ model[2].weight
    return problem, X, J, H, delta * second


def test_pch_of_two_layers() -> None:
    problem, X, J, H, residual = _two_layers()
    assert residual.min() < 0 < residual.max()
    for modify, positive in {"clip": residual.clamp(min=0), "abs": residual.abs()}.items():
        curvature = J.mT @ H @ J + positive.diag_embed()
        expected = sum(kron(c, x.outer(x)) for c, x in zip(curvature, X, strict=True))
        close(oracle.pch_blocks(*problem, modify)[0], expected)
        close(oracle.pch_blocks(*problem, modify)[1], curvature.sum(0))


def test_kflr_and_kfra_of_two_layers() -> None:
    problem, X, J, H, _ = _two_layers()
    z = problem.model[:2](X).detach()
    A1, A2 = X.T @ X / 3, z.T @ z / 3
    B1 = (J.mT @ H @ J).sum(0)
    close(oracle.kflr(*problem), [[B1, A1], [B1], [H.sum(0), A2], [H.sum(0)]])
    B1 = (J.mT @ H.sum(0) @ J).mean(0)
    close(oracle.kfra(*problem), [[B1, A1], [B1], [H.sum(0), A2], [H.sum(0)]])


# --------------------------------------------------------------------------------------
# Identities that hold in all cases
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_samples_sum_to_the_whole(case: Case) -> None:
    problem = case.reference()
    close(
        [g.sum(0) for g in seeded(oracle.batch_grad, problem)],
        list(seeded(oracle.grad, problem)),
    )
    diag = seeded(oracle.ggn_diag, problem)
    close([d.sum(0) for d in seeded(oracle.batch_ggn_diag, problem)], diag)
    if "mixing" not in case.tags:
        close(seeded(oracle.joint_ggn_diag, problem), diag)


@pytest.mark.parametrize("case", select("network"), ids=str)
def test_per_sample_hessians_sum_to_the_whole(case: Case) -> None:
    problem = case.reference()
    close(
        [d.sum(0) for d in seeded(oracle.batch_hessian_diag, problem)],
        seeded(oracle.hessian_diag, problem),
    )


@pytest.mark.parametrize("case", select("piecewise_linear"), ids=str)
def test_piecewise_linear_networks_have_one_curvature(case: Case) -> None:
    problem = case.reference()
    ggn = oracle.ggn_blocks(*problem)
    close(oracle.hessian_blocks(*problem), ggn)
    close(oracle.pch_blocks(*problem, "clip"), ggn)
    close(oracle.pch_blocks(*problem, "abs"), ggn)


@pytest.mark.parametrize("case", select("network", without="rows") + select("batchnorm"), ids=str)
def test_ggn_is_hessian_where_the_residual_vanishes(case: Case) -> None:
    model, _, X, _ = case.reference()
    torch.manual_seed(7)
    problem = Problem(model, nn.MSELoss(), X, model(X).detach())
    close(seeded(oracle.joint_ggn_blocks, problem), seeded(oracle.hessian_blocks, problem))


@pytest.mark.parametrize("case", LINEAR_IN_PARAMS[::2], ids=str)
def test_pch_and_hessian(case: Case) -> None:
    """The recursion is linear in the residual, and ``r = 2 max(r, 0) - |r|``."""
    problem = case.reference()
    hessian = seeded(oracle.hessian_blocks, problem)
    clip, absolute = (seeded(oracle.pch_blocks, problem, modify) for modify in ("clip", "abs"))
    close([2 * c - a for c, a in zip(clip, absolute, strict=True)], hessian)


@pytest.mark.parametrize("case", [c for c in SEQUENTIAL if "loss" not in c.tags], ids=str)
def test_kfra_is_kflr_for_one_sample(case: Case) -> None:
    problem = case.reference()
    y = problem.y[: len(problem.y) // len(problem.X)]
    problem = problem._replace(X=problem.X[:1], y=y)
    close(seeded(oracle.kfra, problem), seeded(oracle.kflr, problem))


# --------------------------------------------------------------------------------------
# Kronecker factors
# --------------------------------------------------------------------------------------


def test_kflr_is_exact_for_one_sample() -> None:
    problem = mlp(N=1)
    for factors, block in zip(oracle.kflr(*problem), oracle.ggn_blocks(*problem), strict=True):
        close(kron(*factors) if len(factors) == 2 else factors[0], block)


KRON_CASES = [*select("linear"), *select("conv"), *select("convtranspose")]


@pytest.mark.parametrize("case", KRON_CASES, ids=str)
def test_unfolded_input_times_weight(case: Case) -> None:
    """The weight's matrix times the unfolded input is the module's output."""
    problem = case.reference()
    for module, x, out in oracle._record_calls(problem.model, problem.X)[1]:
        N, G = x.shape[0], getattr(module, "groups", 1)
        unfolded = oracle.unfold_input(module, x).detach()
        unfolded = unfolded.reshape(N, G, -1, unfolded.shape[-1])  # [N, G, a/G, T]
        if isinstance(module, oracle.CONV_TRANSPOSE) or oracle.is_transposed(module):
            weights = module.weight.transpose(0, 1).chunk(G, 1)  # [O/G, I/G, *k] each
        else:
            weights = module.weight.chunk(G, 0)
        product = [W.flatten(1) @ unfolded[:, g] for g, W in enumerate(weights)]
        product = torch.cat(product, 1)  # [N, O, T]
        if module.bias is not None:
            product = product + module.bias.unsqueeze(1)
        if isinstance(module, nn.Linear) or oracle.is_transposed(module):
            product = product.transpose(1, 2)
        close(product.reshape(out.shape), out)


def _kflr_of(*layers: nn.Module, X: Tensor) -> list[list[Tensor]]:
    """Return the factors for the model with tanh and a sum over everything as a head."""
    model = nn.Sequential(*layers, nn.Tanh(), nn.Flatten()).double()
    return oracle.kflr(model, nn.MSELoss(reduction="sum"), X, torch.zeros_like(model(X)))


def test_linear_with_positions_is_a_convolution() -> None:
    linear, conv = nn.Linear(2, 3), nn.Conv1d(2, 3, 1)
    conv.weight.data, conv.bias.data = linear.weight.data.unsqueeze(2), linear.bias.data
    X = torch.randn(3, 4, 2, dtype=torch.float64)
    close(_kflr_of(linear, X=X), _kflr_of(conv, X=X.transpose(1, 2)))


def test_transposed_convolution_is_a_convolution() -> None:
    transposed, conv = nn.ConvTranspose1d(2, 3, 3), nn.Conv1d(2, 3, 3, padding=2)
    conv.weight.data = transposed.weight.data.transpose(0, 1).flip(2)
    conv.bias.data = transposed.bias.data
    X = torch.randn(3, 2, 4, dtype=torch.float64)
    (B, A), bias = _kflr_of(transposed, X=X)
    A = A.reshape(2, 3, 2, 3).flip(1, 3).reshape(6, 6)
    close([[B, A], bias], _kflr_of(conv, X=X))


def test_groups_are_averaged() -> None:
    X = torch.randn(3, 4, 5, dtype=torch.float64)
    for cls in (nn.Conv1d, nn.ConvTranspose1d):
        grouped = cls(4, 4, 2, groups=2, bias=False)
        halves = [cls(2, 2, 2, bias=False) for _ in range(2)]
        for half, weight in zip(halves, grouped.weight.chunk(2), strict=True):
            half.weight.data = weight.data
        ((B, A),) = _kflr_of(grouped, X=X)
        B_halves, A_halves = zip(
            *(_kflr_of(half, X=x)[0] for half, x in zip(halves, X.chunk(2, 1), strict=True)),
            strict=True,
        )
        if cls is nn.Conv1d:  # full B, mean of A
            close([B[:2, :2], B[2:, 2:]], list(B_halves))
            close(A, sum(A_halves) / 2)
        else:  # mean of B, full A
            close(B, sum(B_halves) / 2)
            close([A[:4, :4], A[4:, 4:]], list(A_halves))


class _Loop(nn.Module):
    """Call one Linear per position."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        calls = zip(self.linears, x.unbind(1), strict=True)
        return torch.stack([linear(x_t) for linear, x_t in calls], 1)


def test_calls_count_as_positions() -> None:
    X = torch.randn(3, 4, 2, dtype=torch.float64)
    linear = nn.Linear(2, 3)
    expected = _kflr_of(linear, X=X)
    close(_kflr_of(_Loop(*[linear] * 4), X=X), expected)

    tied = [nn.Linear(2, 3) for _ in range(4)]
    for other in tied:
        other.weight, other.bias = linear.weight, linear.bias
    close(_kflr_of(_Loop(*tied), X=X), expected)


# --------------------------------------------------------------------------------------
# What the tests of the library rely on
# --------------------------------------------------------------------------------------

FUNCTIONS = [
    oracle.grad,
    oracle.batch_grad,
    oracle.batch_l2,
    oracle.sum_grad_squared,
    oracle.variance,
    oracle.ggn_blocks,
    oracle.ggn_diag,
    oracle.batch_ggn_diag,
    oracle.joint_ggn_blocks,
    oracle.joint_ggn_diag,
    oracle.hessian_blocks,
    oracle.hessian_diag,
    oracle.batch_hessian_diag,
    oracle.kflr,
    oracle.kfra,
    lambda *problem: oracle.pch_blocks(*problem, "abs"),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_runs_the_model_once_and_leaves_it_alone(function: Callable[..., list]) -> None:
    problem = mlp()
    calls = []
    problem.model[0].register_forward_hook(lambda *args: calls.append(args))
    before = copy.deepcopy(problem.model.state_dict())
    result = function(*problem)
    assert len(calls) == 1
    assert len(result) == len(list(problem.model.parameters()))
    assert all(p.grad is None for p in problem.model.parameters())
    assert len(problem.model[2]._forward_hooks) == 0
    close(problem.model.state_dict(), before)


def test_frozen_parameters_are_left_out() -> None:
    (case,) = [case for case in CASES if case.name == "frozen-some"]
    problem = case.reference()
    for function in FUNCTIONS:
        assert len(function(*problem)) == 4


def test_kronecker_factors_are_only_for_weights_of_known_modules() -> None:
    (case,) = [case for case in CASES if case.name == "tied-embedding"]
    problem = case.reference()
    close([b for (b,) in oracle.kflr(*problem)], oracle.ggn_blocks(*problem))


def test_only_for_sequential() -> None:
    (residual,) = [case for case in CASES if case.name == "residual"]
    (tied,) = [case for case in CASES if case.name == "reused-in-sequential"]
    with pytest.raises(TypeError, match="Residual"):
        oracle.kfra(*residual.build())
    with pytest.raises(ValueError, match="once"):
        oracle.kfra(*tied.build())
