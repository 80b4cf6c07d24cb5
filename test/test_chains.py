"""Equalities between quantities, on networks that are too large for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from cases import Case, Residual, network, real, soft_binary
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.core.engine.backpropagation import slice_bytes
from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.utils.kroneckers import kfacs_to_mat

TOLERANCE = {"rtol": 1e-8, "atol": 1e-12}
N = 8


def cnn(activation: type[nn.Module], pool: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        activation(),
        pool,
        nn.Conv2d(4, 6, 3, stride=2, groups=2),
        activation(),
        Residual(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), activation(), nn.Dropout2d(0.2))),
        nn.ConvTranspose2d(6, 3, 2, stride=2),
        activation(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(27, 10),
    ).eval()


def mlp(activation: type[nn.Module], *widths: int) -> nn.Module:
    layers = [
        m
        for i, o in pairwise([20, *widths])
        for m in (nn.Linear(i, o), nn.Dropout(0.1), activation())
    ]
    return nn.Sequential(*layers[:-2]).eval()


def large(
    name: str,
    model: Callable[[], nn.Module],
    shape: tuple[int, ...],
    *loss: Callable,
    number: int = N,
) -> Case:
    """Return a case with a batch of ``number`` samples."""
    batch = torch.Size([number, *shape])
    return network(name, model, shape, *loss, train=False, input=lambda: torch.randn(batch))


IMAGE = (1, 16, 16)
MSE, BCE = (nn.MSELoss, real), (nn.BCEWithLogitsLoss, soft_binary)
SMOOTH = [
    large("cnn", lambda: cnn(nn.Sigmoid, nn.AvgPool2d(2)), IMAGE),
    large("cnn-mse", lambda: cnn(nn.ELU, nn.MaxPool2d(2)), IMAGE, *MSE),
    large("mlp", lambda: mlp(nn.Tanh, 50, 50, 10), (20,)),
    large("mlp-bce", lambda: mlp(nn.LogSigmoid, 50, 5), (20,), *BCE),
    large("mlp-axes", lambda: mlp(nn.SELU, 50, 4), (6, 20), *MSE),
]
PIECEWISE_LINEAR = [
    large("relu-cnn", lambda: cnn(nn.ReLU, nn.MaxPool2d(2)), IMAGE),
    large("relu-mlp", lambda: mlp(nn.ReLU, 50, 50, 10), (20,)),
    large("leaky-mlp-bce", lambda: mlp(nn.LeakyReLU, 50, 5), (20,), *BCE),
]
CASES = [*SMOOTH, *PIECEWISE_LINEAR]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def run(case: Case, *exts: object) -> list[nn.Parameter]:
    """Run a backward pass; return the parameters."""
    problem = case.build()
    model, lossfunc = extend(problem.model), extend(problem.loss)
    with backpack(*exts):
        lossfunc(model(problem.X), problem.y).backward()
    return list(model.parameters())


def close(one: Tensor, other: Tensor) -> None:
    assert other.abs().max() > 0
    torch.testing.assert_close(one, other, **TOLERANCE)


def vectors(p: Tensor, number: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(p.numel())
    return torch.randn(number, *p.shape, dtype=p.dtype, generator=generator)


@each_case
def test_first_order(case: Case) -> None:
    exts = [
        extensions.BatchGrad(),
        extensions.BatchL2Grad(),
        extensions.SumGradSquared(),
        extensions.Variance(),
    ]
    alone = [run(case, ext) for ext in exts]
    for p, l2, squares, variance in zip(*alone, strict=True):
        grads = p.grad_batch
        assert grads.shape == (N, *p.shape)
        close(grads.sum(0), p.grad)
        close(l2.batch_l2, grads.square().flatten(1).sum(1))
        close(squares.sum_grad_squared, grads.square().sum(0))
        close(variance.variance, grads.var(0, correction=0))


@each_case
def test_ggn(case: Case) -> None:
    exts = [
        extensions.SqrtGGNExact(),
        extensions.BatchDiagGGNExact(),
        extensions.DiagGGNExact(),
        extensions.GGNMP(),
    ]
    alone = [run(case, ext) for ext in exts]
    for p, batch_diag, diag, product in zip(*alone, strict=True):
        root = p.sqrt_ggn_exact
        close(batch_diag.diag_ggn_exact_batch, root.square().sum(0))
        close(diag.diag_ggn_exact, batch_diag.diag_ggn_exact_batch.sum(0))
        v = vectors(p)
        flat = root.flatten(2).flatten(0, 1)
        close(product.ggnmp(v), (v.flatten(1) @ flat.T @ flat).reshape(v.shape))


@pytest.mark.parametrize("limit", [None, 2**8, 2**12])
def test_more_columns_than_entries(limit: int | None) -> None:
    case = large("bottleneck", lambda: mlp(nn.Tanh, 12, 6, 12, 20), (20,))
    exts = [extensions.BatchDiagGGNExact(), extensions.DiagGGNExact(), extensions.KFLR()]
    with nullcontext() if limit is None else slice_bytes(limit):
        found = run(case, *exts)
    for p, q in zip(run(case, extensions.SqrtGGNExact()), found, strict=True):
        root = p.sqrt_ggn_exact
        close(q.diag_ggn_exact_batch, root.square().sum(0))
        close(q.diag_ggn_exact, root.square().sum((0, 1)))
        if p.dim() == 1:
            rows = root.flatten(0, 1)
            close(q.kflr[0], rows.T @ rows)


@each_case
def test_monte_carlo(case: Case) -> None:
    exts = [
        extensions.SqrtGGNMC(mc_samples=3),
        extensions.BatchDiagGGNMC(mc_samples=3),
        extensions.DiagGGNMC(mc_samples=3),
    ]
    alone = []
    for ext in exts:
        torch.manual_seed(0)
        alone.append(run(case, ext))
    for p, batch_diag, diag in zip(*alone, strict=True):
        close(batch_diag.diag_ggn_mc_batch, p.sqrt_ggn_mc.square().sum(0))
        close(diag.diag_ggn_mc, batch_diag.diag_ggn_mc_batch.sum(0))


@pytest.mark.parametrize(
    "case",
    [
        large("mlp", lambda: mlp(nn.Tanh, 30, 10), (20,), number=1),
        large("mlp-mse", lambda: mlp(nn.Sigmoid, 30, 10), (20,), *MSE, number=1),
    ],
    ids=str,
)
def test_kflr_is_the_block_of_one_sample(case: Case) -> None:
    for p in run(case, extensions.KFLR(), extensions.SqrtGGNExact()):
        root = p.sqrt_ggn_exact.flatten(2).flatten(0, 1)
        close(kfacs_to_mat(p.kflr), root.T @ root)


@pytest.mark.parametrize("case", [c for c in CASES if "mlp" in c.name], ids=str)
def test_kflr_is_the_block_of_a_bias(case: Case) -> None:
    params = run(case, extensions.KFLR(), extensions.SqrtGGNExact())
    biases = [p for p in params if p.dim() == 1]
    assert len(biases) == len(params) / 2
    for p in biases:
        root = p.sqrt_ggn_exact.flatten(2).flatten(0, 1)
        close(p.kflr[0], root.T @ root)


@pytest.mark.parametrize("case", PIECEWISE_LINEAR, ids=str)
def test_ggn_is_the_hessian_of_a_piecewise_linear_network(case: Case) -> None:
    ggn = run(case, extensions.BatchDiagGGNExact(), extensions.DiagGGNExact(), extensions.GGNMP())
    hessian = run(case, extensions.BatchDiagHessian(), extensions.DiagHessian(), extensions.HMP())
    for p, q in zip(ggn, hessian, strict=True):
        close(q.diag_h, p.diag_ggn_exact)
        close(q.diag_h_batch, p.diag_ggn_exact_batch)
        v = vectors(p)
        close(q.hmp(v), p.ggnmp(v))


@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_hessian_diagonal(case: Case) -> None:
    exts = [extensions.DiagHessian(), extensions.BatchDiagHessian(), extensions.HMP()]
    alone = [run(case, ext) for ext in exts]
    for p, batch_diag, product in zip(*alone, strict=True):
        close(batch_diag.diag_h_batch.sum(0), p.diag_h)
        entries = torch.randperm(p.numel(), generator=torch.Generator().manual_seed(0))[:20]
        units = torch.eye(p.numel(), dtype=p.dtype)[entries].reshape(-1, *p.shape)
        columns = product.hmp(units).flatten(1)
        close(columns[range(len(entries)), entries], p.diag_h.flatten()[entries])


@each_case
def test_products_are_those_of_plain_autograd(case: Case) -> None:
    params = run(case, extensions.HMP(), extensions.GGNMP())
    problem = case.build()
    plain = list(problem.model.parameters())
    output = problem.model(problem.X)
    loss = problem.loss(output, problem.y)
    for i, p in enumerate(params):
        v = vectors(p, 1)
        others = [torch.zeros_like(q) for q in plain]
        others[i] = v[0]
        close(p.hmp(v)[0], hessian_vector_product(loss, plain[i], v[0])[0])
        close(p.ggnmp(v)[0], ggn_vector_product(loss, output, problem.model, others)[i])


@pytest.mark.parametrize("case", SMOOTH, ids=str)
@pytest.mark.parametrize("modify", ["clip", "abs"])
def test_positive_curvature_lies_above(case: Case, modify: str) -> None:
    """Its blocks are symmetric, positive, and ``v' PCH v >= v' H v``."""
    params = run(case, extensions.HMP(), extensions.PCHMP(modify=modify), extensions.GGNMP())
    for p in params:
        v = vectors(p, 10)
        positive, hessian, ggn = (
            (v * product(v)).flatten(1).sum(1) for product in (p.pchmp, p.hmp, p.ggnmp)
        )
        slack = 1e-12 * positive.max()
        assert (positive >= hessian - slack).all()
        assert (positive >= ggn - slack).all()
        one, other = p.pchmp(v[0]), p.pchmp(v[1])
        close((one * v[1]).sum(), (other * v[0]).sum())
