"""Results are the caller's own: editing them in place changes nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn

from backpack import backpack, extend
from backpack.extensions import (
    KFAC,
    KFLR,
    KFRA,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)

FIRST_ORDER = (BatchGrad, BatchL2Grad, SumGradSquared, Variance)
SECOND_ORDER = (
    DiagGGNExact,
    DiagGGNMC,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    SqrtGGNExact,
    SqrtGGNMC,
    DiagHessian,
    BatchDiagHessian,
    KFAC,
    KFLR,
    KFRA,
)
GROUPS = {"first order": FIRST_ORDER, "all": FIRST_ORDER + SECOND_ORDER}
Results = dict[tuple[int, str, int], Tensor]


def supported(case: Case, group: str) -> list[BackpropExtension]:
    """Return the extensions of a group that know a case."""
    exts = [kind() for kind in GROUPS[group] if kind is not KFRA or "rows" not in case.tags]
    return exts if knows(case, exts) else [ext for ext in exts if knows(case, [ext])]


def knows(case: Case, exts: list[BackpropExtension]) -> bool:
    """Whether all extensions know a case."""
    try:
        attempt(case, exts, None)
    except (NotImplementedError, ValueError):
        return False
    return True


def attempt(
    case: Case, exts: list[BackpropExtension], hook: Callable[[nn.Module], None] | None
) -> nn.Module:
    """Run a backward pass; return the model."""
    model, lossfunc, X, y = case.build()
    extend(model), extend(lossfunc)
    torch.manual_seed(1)
    loss = lossfunc(model(X), y)
    torch.manual_seed(1)
    with backpack(*exts, extension_hook=hook), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss.backward()
    return model


def results(
    params: Iterator[nn.Parameter], exts: list[BackpropExtension]
) -> Iterator[tuple[tuple[int, str, int], Tensor]]:
    """List all tensors that a pass has saved at parameters."""
    for p in params:
        for ext in exts:
            value = getattr(p, ext.savefield, None)
            if value is not None:
                for i, tensor in enumerate(value if isinstance(value, list) else [value]):
                    yield (id(p), ext.savefield, i), tensor


def overwrite(tensor: Tensor) -> None:
    """Change all entries."""
    (tensor._values() if tensor.is_sparse else tensor).fill_(1e3)


def in_order(model: nn.Module, found: Results) -> Results:
    """Name parameters by their number."""
    number = {id(p): i for i, p in enumerate(model.parameters())}
    named = {(number[p], field, i): t for (p, field, i), t in found.items()}
    return dict(sorted(named.items(), key=lambda item: item[0]))


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_editing_all_results_in_hooks_and_afterwards(case: Case, group: str) -> None:
    """Gradients and all other results are those of a pass without edits."""
    exts = supported(case, group)
    reference = attempt(case, exts, None)
    expected = in_order(reference, dict(results(reference.parameters(), exts)))
    seen: Results = {}

    def edit(module: nn.Module) -> None:
        for key, tensor in results(module.parameters(), exts):
            if key not in seen:
                seen[key] = tensor.clone()
                overwrite(tensor)

    model = attempt(case, exts, edit)
    after = dict(results(model.parameters(), exts))
    for key, tensor in after.items():
        if key in seen:
            assert (tensor._values() if tensor.is_sparse else tensor).eq(1e3).all()
        else:
            seen[key] = tensor.clone()
            overwrite(tensor)
    torch.testing.assert_close(in_order(model, seen), expected, rtol=1e-10, atol=1e-12)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)
    for one, other in combinations(map(addresses, after.values()), 2):
        assert one.isdisjoint(other)


def addresses(tensor: Tensor) -> set[int]:
    """Return where the memory of a result is."""
    parts = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
    return {part.untyped_storage().data_ptr() for part in parts if part.numel()}


def test_centring_in_a_hook() -> None:
    """What a client library does: the gradients of layers below are the same."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    lossfunc = extend(nn.CrossEntropyLoss())
    X, y = torch.rand(5, 3, dtype=torch.float64), torch.randint(2, (5,))
    expected = torch.autograd.grad(lossfunc(model(X), y), [*model.parameters()])

    def centre(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            p.grad_batch -= p.grad_batch.mean(0)

    loss = lossfunc(model(X), y)
    with backpack(BatchGrad(), extension_hook=centre):
        loss.backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)
        torch.testing.assert_close(p.grad_batch.mean(0), torch.zeros_like(p))


class Given(FirstOrderModuleExtension):
    """A rule of a user that returns what it was given."""

    def __init__(self) -> None:
        super().__init__(params=["weight", "bias"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        return module.input0

    def bias(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        return g_out[0]


@pytest.mark.parametrize("create_graph", [False, True])
def test_rules_of_users_that_return_what_they_were_given(create_graph: bool) -> None:
    """Neither the data nor the gradient changes with the result."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    lossfunc = extend(nn.MSELoss())
    X, y = torch.rand(5, 3), torch.rand(5, 2)
    data = X.clone()
    expected = torch.autograd.grad(lossfunc(model(X), y), [*model.parameters()])
    ext = FirstOrderBackpropExtension("given", {nn.Linear: Given()})

    def edit(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            with torch.no_grad():
                p.given.zero_()

    loss = lossfunc(model(X), y)
    with backpack(ext, extension_hook=edit):
        loss.backward(create_graph=create_graph)
    assert torch.equal(X, data)
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.detach(), grad)


def test_differentiable_results() -> None:
    """With ``create_graph=True``, too."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    lossfunc = extend(nn.CrossEntropyLoss())
    X, y = torch.rand(5, 3), torch.randint(2, (5,))
    expected = torch.autograd.grad(lossfunc(model(X), y), [*model.parameters()])

    def edit(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            with torch.no_grad():
                p.grad_batch.zero_()

    loss = lossfunc(model(X), y)
    with backpack(BatchGrad(), extension_hook=edit):
        loss.backward(create_graph=True)
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.detach(), grad)
