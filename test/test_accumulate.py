"""Several backward passes that act as the one of the summed loss."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_several_processes import (
    Double,
    SquaresOfDouble,
    all_extensions,
    batch,
    check_averaged,
    check_same,
    in_processes,
    local_quantities,
    net,
    plain_net,
    quantities,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import backpack as library
from backpack import backpack, extend
from backpack import extensions as e
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)
from backpack.monitor import gradient_snr

SIZES = [2, 3, 1]


@pytest.fixture(autouse=True)
def precise() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def accumulate(
    model: nn.Module,
    lossfunc: nn.Module,
    parts: Sequence[tuple[Tensor, Tensor]],
    *exts: BackpropExtension,
    factor: float = 1,
    **options: Any,
) -> None:
    for X, y in parts:
        with backpack(*exts, accumulate=True, **options):
            (factor * lossfunc(model(X), y)).backward()


def parts() -> list[tuple[Tensor, Tensor]]:
    return [batch(SIZES, i) for i in range(len(SIZES))]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("converter", [False, True, "record"])
def test_every_quantity(converter: Any, reduction: str) -> None:
    model = extend(net(converter), use_converter=converter)
    lossfunc = extend(nn.CrossEntropyLoss(reduction=reduction))
    if reduction == "sum":
        accumulate(model, lossfunc, parts(), *all_extensions())
        X, y = batch(SIZES)
    else:
        even = [part[:2] for part in batch([6])]
        pairs = [(even[0][i : i + 1], even[1][i : i + 1]) for i in range(2)]
        accumulate(model, lossfunc, pairs, *all_extensions(), factor=1 / 2)
        X, y = even
    found = quantities(model)
    model.zero_grad()
    with backpack(*all_extensions()):
        lossfunc(model(X), y).backward()
    check_same(found, quantities(model), (converter, reduction))


def test_square_roots_of_outputs_of_several_sizes() -> None:
    """The tasks of a model have passes of their own: the GGN is that of the sum of their losses."""
    torch.manual_seed(0)
    tasks = nn.ModuleList(nn.Linear(5, size) for size in (2, 4, 3))
    body, lossfunc = extend(nn.Linear(4, 5)), extend(nn.CrossEntropyLoss())
    extend(tasks)
    X, y = torch.rand(6, 4), torch.randint(2, (6,))
    exts = e.SqrtGGNExact(), e.BatchDiagGGNExact(), e.DiagGGNExact()
    for task in tasks:
        with backpack(*exts, accumulate=True):
            lossfunc(task(body(X)), y).backward()
    for p in body.parameters():
        assert p.sqrt_ggn_exact.shape == (4, 18, *p.shape)
        torch.testing.assert_close(p.sqrt_ggn_exact.square().sum((0, 1)), p.diag_ggn_exact)
        torch.testing.assert_close(p.sqrt_ggn_exact.square().sum(0), p.diag_ggn_exact_batch)


def test_draws_and_approximations() -> None:
    model, lossfunc = extend(plain_net()), extend(nn.CrossEntropyLoss(reduction="sum"))
    exts = e.KFAC(2), e.DiagGGNMC(3), e.KFLR(approximation="expand"), e.BatchDiagGGNMC(2)
    torch.manual_seed(0)
    data = parts()
    torch.manual_seed(0)
    accumulate(model, lossfunc, data, *exts)
    found = [(p.kfac, p.kflr, p.diag_ggn_mc, p.diag_ggn_mc_batch) for p in model.parameters()]
    assert all(len(rows) == sum(SIZES) for *_, rows in found)
    torch.manual_seed(0)
    each: list[Any] = []
    for X, y in data:
        with backpack(*exts):
            lossfunc(model(X), y).backward()
        each.append([(p.kfac, p.kflr, p.diag_ggn_mc) for p in model.parameters()])
    for i, (kfac, kflr, diagonal, _) in enumerate(found):
        check_same(diagonal, sum(one[i][2] for one in each), "diag_ggn_mc")
        for k, factors in enumerate((kfac, kflr)):
            check_same(factors[0], sum(one[i][k][0] for one in each), "B")
            for A in factors[1:]:
                weighted = [n * one[i][k][1] for n, one in zip(SIZES, each, strict=True)]
                check_same(A, sum(weighted) / sum(SIZES), "A")


def test_extensions_in_any_order() -> None:
    model, lossfunc = extend(plain_net()), extend(nn.CrossEntropyLoss(reduction="sum"))
    exts = [e.Variance(), e.SumGradSquared()]
    for part in parts():
        accumulate(model, lossfunc, [part], *exts)
        exts.reverse()
    X, y = batch(SIZES)
    names = ["variance", "sum_grad_squared"]
    found = quantities(model, names)
    model.zero_grad()
    with backpack(*exts):
        lossfunc(model(X), y).backward()
    check_same(found, quantities(model, names), "any order")


def test_until_when() -> None:
    model, lossfunc = extend(plain_net()), extend(nn.CrossEntropyLoss(reduction="sum"))
    first, second, third = parts()
    exts = e.BatchGrad(), e.Variance()
    accumulate(model, lossfunc, [first, second], *exts)
    assert len(model[0].weight.grad_batch) == 5
    accumulate(model, lossfunc, [third], *exts)
    assert len(model[0].weight.grad_batch) == 6
    pickle.dumps(model[0].weight)

    accumulate(model, lossfunc, [first], e.SumGradSquared())  # others go on on their own
    assert len(model[0].weight.grad_batch) == 6

    library.clear(model)
    accumulate(model, lossfunc, [first], *exts)
    assert len(model[0].weight.grad_batch) == 2
    with backpack(*exts):
        lossfunc(model(second[0]), second[1]).backward()
    accumulate(model, lossfunc, [third], *exts)
    assert len(model[0].weight.grad_batch) == 1


def test_results_belong_to_the_caller() -> None:
    model, lossfunc = extend(plain_net()), extend(nn.CrossEntropyLoss(reduction="sum"))
    exts = e.BatchGrad(), e.SumGradSquared(), e.Variance(), e.KFLR(), e.DiagGGNExact()
    first, second, _ = parts()
    accumulate(model, lossfunc, [first], *exts)
    for p in model.parameters():
        for value in (p.grad_batch, p.sum_grad_squared, p.variance, p.diag_ggn_exact, *p.kflr):
            value.zero_()
    accumulate(model, lossfunc, [second], *exts)
    found = [(p.grad_batch, p.sum_grad_squared, p.variance, p.kflr) for p in model.parameters()]
    library.clear(model)
    accumulate(model, lossfunc, [first, second], *exts)
    expected = [(p.grad_batch, p.sum_grad_squared, p.variance, p.kflr) for p in model.parameters()]
    check_same(found, expected, "changed in place")


def test_what_is_refused() -> None:
    model, lossfunc = extend(plain_net()), extend(nn.CrossEntropyLoss())
    with pytest.raises(NotImplementedError, match="KFRA"):
        accumulate(model, lossfunc, parts(), e.KFRA())
    accumulate(model, lossfunc, parts(), e.Variance())
    before = model[0].weight.variance
    with pytest.raises(ValueError, match=r"variance, sum_grad_squared.*backpack.clear"):
        accumulate(model, lossfunc, parts(), e.Variance(), e.SumGradSquared())
    assert model[0].weight.variance is before
    accumulate(model, lossfunc, parts()[:1], e.KFAC(2))
    with pytest.raises(ValueError, match="other options"):
        accumulate(model, lossfunc, parts()[1:], e.KFAC(3))


class GradientsOfDouble(FirstOrderModuleExtension):
    def __init__(self) -> None:
        super().__init__(["weight"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantities: Any) -> Tensor:
        return 2 * module.input0 * g_out[0]


def test_rules_of_users() -> None:
    model = extend(nn.Sequential(plain_net(), Double()))
    lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
    gradients, squares, both = e.BatchGrad(), e.SumGradSquared(), e.Variance()
    for ext, rule in ((gradients, GradientsOfDouble()), (squares, SquaresOfDouble())):
        ext.set_module_extension(Double, rule)
    accumulate(model, lossfunc, parts(), gradients, squares)
    found = [(p.grad_batch, p.sum_grad_squared) for p in model.parameters()]
    with backpack(gradients, squares):
        lossfunc(model(batch(SIZES)[0]), batch(SIZES)[1]).backward()
    check_same(found, [(p.grad_batch, p.sum_grad_squared) for p in model.parameters()], "rules")
    both.set_module_extension(Double, SquaresOfDouble())
    with pytest.raises(NotImplementedError, match="your own rule"):
        accumulate(model, lossfunc, parts(), both)


class NeedsLess(FirstOrderBackpropExtension):
    needs = ("square",)

    def __init__(self) -> None:
        super().__init__("needs_less")

    def extract(self, products: Any) -> Tensor:
        return products["square"] - products["gradient"]


def test_an_extension_that_does_not_say_what_it_reads() -> None:
    model, lossfunc = extend(plain_net()), extend(nn.CrossEntropyLoss())
    with pytest.raises(LookupError, match=r"'gradient'.*needs"):
        accumulate(model, lossfunc, parts(), NeedsLess())
    with backpack(NeedsLess()):
        lossfunc(model(batch(SIZES)[0]), batch(SIZES)[1]).backward()


class Power(FirstOrderBackpropExtension):
    needs = ("gradient",)

    def __init__(self, exponent: int) -> None:
        super().__init__("power")
        self.exponent = exponent

    def extract(self, products: Any) -> Tensor:
        return products["gradient"] ** self.exponent


def test_the_latest_extension_makes_the_result() -> None:
    model, lossfunc = extend(plain_net()), extend(nn.CrossEntropyLoss())
    accumulate(model, lossfunc, parts()[:2], Power(1))
    accumulate(model, lossfunc, parts()[2:], Power(2))
    for p in model.parameters():
        torch.testing.assert_close(p.power, p.grad**2)


@pytest.mark.parametrize("by", ["extract", "hook"])
def test_a_pass_that_fails_while_it_writes_counts_nothing(by: str) -> None:
    model, lossfunc = extend(plain_net()), extend(nn.CrossEntropyLoss())
    accumulate(model, lossfunc, parts(), SquaresOfSome())
    expected = [p.squares_of_some for p in model.parameters()]
    library.clear(model)

    def fail(*_: Any) -> None:
        raise MemoryError

    for X, y in parts():
        loss = lossfunc(model(X), y)
        failing = {"extension_hook": fail} if by == "hook" else {}
        with pytest.raises(MemoryError), backpack(SquaresOfSome(1), accumulate=True, **failing):
            loss.backward(retain_graph=True)
        with backpack(SquaresOfSome(), accumulate=True):
            loss.backward()
    torch.testing.assert_close([p.squares_of_some for p in model.parameters()], expected)


class SquaresOfSome(FirstOrderBackpropExtension):
    """Fails behind so many parameters."""

    needs = ("square_norm", "square")

    def __init__(self, count: int = 99) -> None:
        super().__init__("squares_of_some")
        self.count = count

    def extract(self, products: Any) -> Tensor:
        self.count -= 1
        if self.count < 0:
            raise MemoryError
        return products["square"]


def test_signal_to_noise() -> None:
    model, lossfunc = extend(plain_net()), extend(nn.CrossEntropyLoss(reduction="sum"))
    accumulate(model, lossfunc, parts(), e.BatchL2Grad())
    found = gradient_snr(list(model.parameters()))
    model.zero_grad()
    with backpack(e.BatchL2Grad()):
        X, y = batch(SIZES)
        lossfunc(model(X), y).backward()
    check_same(found, gradient_snr(list(model.parameters())), "all at once")
    library.clear(model)
    accumulate(model, lossfunc, parts(), e.BatchL2Grad())  # but not the gradient from before
    with pytest.raises(RuntimeError, match="zero_grad"):
        gradient_snr(list(model.parameters()))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_signal_to_noise_where_the_gradient_alone_was_cleared(set_to_none: bool) -> None:
    """It was the signal of the last part, and the noise of all of them."""
    model, lossfunc = extend(plain_net()), extend(nn.CrossEntropyLoss(reduction="sum"))
    for part in parts():
        model.zero_grad(set_to_none)
        accumulate(model, lossfunc, [part], e.BatchL2Grad())
    with pytest.raises(RuntimeError, match=r"backpack\.clear\(model\)"):
        gradient_snr(list(model.parameters()))


def _without_synchronisation(rank: int, count: int) -> None:
    """Two batches on each process: the gradients are averaged at the last, or at both."""
    sizes = [2, 1, 3, 1]  # of process 0, of process 1
    local = local_quantities(plain_net(), sizes)
    lossfunc = extend(nn.CrossEntropyLoss())
    own = [batch(sizes, i) for i in (2 * rank, 2 * rank + 1)]
    found = []
    for synchronised in (False, True):
        model = extend(plain_net())
        wrapped = DistributedDataParallel(model)
        if synchronised:
            accumulate(wrapped, lossfunc, own[:1], *all_extensions())
        else:
            with wrapped.no_sync():
                accumulate(wrapped, lossfunc, own[:1], *all_extensions())
            check_same(quantities(model), local[2 * rank], "local so far")
        accumulate(wrapped, lossfunc, own[1:], *all_extensions())
        found.append(quantities(model))
    check_same(found[0], found[1], "no_sync()")
    summed = []
    for i in (0, 2):  # the loss of a process is the sum of those of its batches
        model = extend(plain_net())
        accumulate(model, lossfunc, [batch(sizes, i), batch(sizes, i + 1)], *all_extensions())
        summed.append(quantities(model))
    check_averaged(found[0], summed, rank, [3, 4], "accumulated")


def test_without_synchronisation(tmp_path: Path) -> None:
    in_processes(_without_synchronisation, tmp_path)
