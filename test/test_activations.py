"""Closed forms of activations: derivatives against autograd, kinks and tails too."""

from __future__ import annotations

import copy
from typing import Any

import oracle
import pytest
import torch
from seen import seen
from torch import Tensor, nn

from backpack import backpack, extend
from backpack.core.derivatives import derivatives_of
from backpack.extensions import BatchGrad, DiagGGNExact, DiagHessian

ACTIVATIONS = [
    nn.CELU(0.5),
    nn.ELU(0.7),
    nn.GELU(),
    nn.GELU(approximate="tanh"),
    nn.Hardshrink(),
    nn.Hardshrink(0.0),
    nn.Hardsigmoid(),
    nn.Hardswish(),
    nn.Hardtanh(),
    nn.Hardtanh(-0.5, 2.0),
    nn.LeakyReLU(0.3),
    nn.LogSigmoid(),
    nn.Mish(),
    nn.ReLU(),
    nn.ReLU6(),
    nn.SELU(),
    nn.SiLU(),
    nn.Sigmoid(),
    nn.Softplus(),
    nn.Softplus(2.0, 3.0),
    nn.Softshrink(),
    nn.Softshrink(0.1),
    nn.Softsign(),
    nn.Tanh(),
    nn.Tanhshrink(),
    nn.Threshold(0.5, 2.0),
]
each = pytest.mark.parametrize("module", ACTIVATIONS, ids=str)

KINKS = [0.0, -0.0, 0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 6.0, 10.0, -0.1, -0.5, -1.0, -3.0]
TAILS = [sign * size for size in (19.9, 20.1, 50.0, 1e3, 1e10, 1e200, 1e300) for sign in (1, -1)]


class Called:
    """An activation and a call of it."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.module = extend(copy.deepcopy(module))
        self.rule: Any = derivatives_of(module)
        self.x = x.clone().requires_grad_()
        self.y = self.module(self.x)

    def first(self, rows: Any = None) -> Tensor:
        """First derivative."""
        return self.rule.df(seen(self.module, rows))

    def second(self, rows: Any = None) -> Tensor:
        """Second derivative."""
        return self.rule.hessian_diagonal(self.module, None, (torch.ones_like(self.x),), rows)


def points(*, kinks: bool = True, tails: bool = True) -> Tensor:
    """Return points along the axis; ``[N, 1]``."""
    smooth = torch.linspace(-8.03, 8.01, 73, dtype=torch.float64).tolist()
    x = [*smooth, *(KINKS if kinks else []), *(TAILS if tails else [])]
    return torch.tensor(x, dtype=torch.float64).unsqueeze(1)


def truth(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return f' and f'' by autograd; their limits where autograd overflows."""
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    second = torch.zeros_like(x)
    if first.requires_grad and not isinstance(module, nn.Hardsigmoid):  # torch does not know it
        (second,) = torch.autograd.grad(first.sum(), x)
    far = x.abs() > 100
    first = torch.where(far & ~first.isfinite(), (x > 0).to(x.dtype), first)
    second = torch.where(far & ~second.isfinite(), 0, second)
    return first.detach(), second.detach()


@each
def test_derivatives(module: nn.Module) -> None:
    x = points()
    first, second = truth(module, x)
    assert first.isfinite().all() and second.isfinite().all()
    call = Called(module, x)
    # the kernel of Hardsigmoid multiplies with a float32
    rtol = 1e-7 if isinstance(module, nn.Hardsigmoid) else 1e-10
    torch.testing.assert_close(call.first(), first, rtol=rtol, atol=1e-14)
    torch.testing.assert_close(call.second(), second, rtol=1e-10, atol=1e-13)
    assert call.rule.hessian_is_zero(module) == bool((second == 0).all())
    rows = [5, -1, 0]
    torch.testing.assert_close(call.first(rows), call.first()[rows], rtol=0, atol=0)
    torch.testing.assert_close(call.second(rows), call.second()[rows], rtol=0, atol=0)


@each
def test_double_backward(module: nn.Module) -> None:
    """The derivatives can be differentiated, without nan far out."""
    x = points()
    for derivative in (Called.first, Called.second):
        call = Called(module, x)
        value = derivative(call)
        if value.requires_grad:
            (slope,) = torch.autograd.grad(value.sum(), call.x)
            assert slope.isfinite().all()

    call = Called(module, points(kinks=False))
    first = call.first()
    if first.requires_grad:
        (slope,) = torch.autograd.grad(first.sum(), call.x, retain_graph=True)
        torch.testing.assert_close(slope, call.second(), rtol=1e-9, atol=1e-13)
    smooth = points(kinks=False, tails=False).requires_grad_()
    if not call.rule.hessian_is_zero(module):
        torch.autograd.gradcheck(lambda x: Called(module, x).second(), smooth)


@each
def test_low_precision(module: nn.Module) -> None:
    x = points().clamp(-6e4, 6e4).half()
    call = Called(module, x)
    for value in (call.first(), call.second()):
        assert value.dtype == torch.float16
        assert value.isfinite().all()


@each
def test_extensions(module: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), copy.deepcopy(module), nn.Linear(4, 3)).double()
    X, y = 2 * torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    lossfunc = nn.CrossEntropyLoss()
    exts = [(BatchGrad(), oracle.batch_grad), (DiagGGNExact(), oracle.ggn_diag)]
    if not isinstance(module, nn.Hardsigmoid):
        exts.append((DiagHessian(), oracle.hessian_diag))
    expected = [(ext.savefield, function(model, lossfunc, X, y)) for ext, function in exts]
    extend(model), extend(lossfunc)
    with backpack(*(ext for ext, _ in exts)):
        lossfunc(model(X), y).backward()
    for savefield, values in expected:
        for p, value in zip(model.parameters(), values, strict=True):
            torch.testing.assert_close(getattr(p, savefield), value, rtol=1e-6, atol=1e-10)


def test_subclass() -> None:
    class Swish(nn.SiLU):
        """SiLU under another name."""

    x = points()
    torch.testing.assert_close(Called(Swish(), x).first(), Called(nn.SiLU(), x).first())
