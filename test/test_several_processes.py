"""Quantities on several processes, against one process that has all samples."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from apart import run
from ranks import run_on_ranks
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend
from backpack import extensions as e
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)
from backpack.optim import KFAC, DiagGGN

# How long processes of a group wait for each other, in seconds.
PATIENCE = 20

Program = Callable[[int, int], None]


def in_processes(program: Program, tmp_path: Path, count: int = 2, within: float = 240) -> None:
    """Run a program on several processes that know of each other."""
    store = str(tmp_path / "store")
    run_on_ranks([partial(_in_group, i, program, count, store) for i in range(count)], within)


def leave() -> NoReturn:
    """End a process of a group that is broken, at once.

    A thread of gloo may still wait within a collective, and an interpreter that ends meanwhile
    aborts: torch's matter, after what a program has checked.
    """
    os._exit(0)


def _in_group(rank: int, program: Program, count: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=PATIENCE),
    )
    try:
        program(rank, count)
    finally:
        distributed.destroy_process_group()


# ------------------------------------------------------------------ models and losses


class Net(nn.Module):
    """A convolution, a layer that is used twice, functions between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.twice, self.last = nn.Conv1d(2, 3, 2), nn.Linear(4, 4), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.sigmoid(self.twice(torch.tanh(self.twice(torch.sigmoid(self.conv(x))))))
        return self.last(z.flatten(1))


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model(x), y)


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def net(converter: Any) -> nn.Module:
    if converter is False:
        return plain_net()
    torch.manual_seed(0)
    return Net()


def batch(sizes: list[int], rank: int | None = None, seed: int = 1) -> tuple[Tensor, Tensor]:
    """All samples, or those of one process."""
    torch.manual_seed(seed)
    X, y = torch.randn(sum(sizes), 2, 5), torch.randint(3, (sum(sizes),))
    return (X, y) if rank is None else (X.split(sizes)[rank], y.split(sizes)[rank])


SUMMED = {
    "sum_grad_squared": e.SumGradSquared,
    "variance": e.Variance,
    "diag_ggn_exact": e.DiagGGNExact,
    "diag_h": e.DiagHessian,
    "kflr": e.KFLR,
    "ggnmp": e.GGNMP,
    "hmp": e.HMP,
    "pchmp": e.PCHMP,
}
OF_SAMPLES = {
    "grad_batch": (e.BatchGrad, 0),
    "batch_l2": (e.BatchL2Grad, 0),
    "diag_ggn_exact_batch": (e.BatchDiagGGNExact, 0),
    "diag_h_batch": (e.BatchDiagHessian, 0),
    "sqrt_ggn_exact": (e.SqrtGGNExact, 1),
}


def quantities(model: nn.Module, names: Any = (*SUMMED, *OF_SAMPLES)) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"grad": [p.grad.clone() for p in model.parameters()]}  # type: ignore[union-attr]
    for name in names:
        found[name] = []
        for p in model.parameters():
            value = getattr(p, name)
            if callable(value) and not isinstance(value, Tensor):
                torch.manual_seed(3)
                value = value(torch.randn(2, *p.shape))
            found[name].append(value)
    return found


def all_extensions() -> list[BackpropExtension]:
    return [make() for make in SUMMED.values()] + [make() for make, _ in OF_SAMPLES.values()]


def one_process(
    model: nn.Module, lossfunc: nn.Module, sizes: list[int], factor: float = 1
) -> dict[str, list[Any]]:
    """What one process finds, without the part of the library that is tested here."""
    model, lossfunc = extend(model, use_converter=True), extend(lossfunc)
    X, y = batch(sizes)
    model.zero_grad()
    with backpack(*all_extensions(), process_group=None):
        (factor * lossfunc(model(X), y)).backward()
    return quantities(model)


def check_same(found: Any, expected: Any, what: Any) -> None:
    def message(text: str) -> str:
        return f"{what}: {text}"

    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=message)


# ------------------------------------------------------------------ every quantity


def _every_quantity(rank: int, count: int) -> None:
    sizes = [3] * count
    for converter in (False, True, "record"):
        for reduction in ("mean", "sum"):
            expected = one_process(
                net(converter),
                nn.CrossEntropyLoss(reduction=reduction),
                sizes,
                1 if reduction == "mean" else 1 / count,
            )
            model = extend(net(converter), use_converter=converter)
            lossfunc = extend(nn.CrossEntropyLoss(reduction=reduction))
            wrapped = DistributedDataParallel(model)
            X, y = batch(sizes, rank)
            with backpack(*all_extensions()):
                lossfunc(wrapped(X), y).backward()
            check_quantities(quantities(model), expected, rank, sizes, (converter, reduction))


def check_quantities(
    found: dict[str, Any], expected: dict[str, Any], rank: int, sizes: list[int], what: Any
) -> None:
    for name, values in found.items():
        whole = expected[name]
        if name in OF_SAMPLES:
            _, axis = OF_SAMPLES[name]
            whole = [value.split(sizes, axis)[rank] for value in whole]
        check_same(values, whole, (name, what))


def test_every_quantity(tmp_path: Path) -> None:
    in_processes(_every_quantity, tmp_path)


def _other_graph_of_one(rank: int, count: int) -> None:
    sizes = [3] * count
    X, y = batch(sizes, rank)
    lossfunc = extend(nn.CrossEntropyLoss())
    for converter in (False, "record"):
        expected = one_process(net(converter), nn.CrossEntropyLoss(), sizes)
        model = extend(net(converter), use_converter=converter)
        wrapped = DistributedDataParallel(model)
        logged = [lossfunc(model(X), y)] if rank == 0 else []  # as a program may keep losses
        with backpack(*all_extensions()):
            lossfunc(wrapped(X), y).backward()
        check_quantities(quantities(model), expected, rank, sizes, converter)
        del logged


def test_graph_that_one_process_keeps(tmp_path: Path) -> None:
    in_processes(_other_graph_of_one, tmp_path, within=60)


# ------------------------------------------------------------------ what differs between processes


class Branches(nn.Module):
    """Two layers of one shape, in any order, and a head that may be called outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.functions = {"a": torch.tanh, "b": torch.sigmoid}

    def forward(self, x: Tensor, names: str, with_head: bool = True) -> Tensor:
        branches = [self.functions[name](getattr(self, name)(x)) for name in names]
        z = branches[0] if len(branches) == 1 else branches[0] + branches[1]
        return self.head(z) if with_head else z


SUMS = ("sum_grad_squared", "diag_ggn_exact", "kflr")


def sums() -> list[BackpropExtension]:
    return [e.SumGradSquared(), e.DiagGGNExact(), e.KFLR()]


def rows(sizes: list[int], rank: int | None = None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    X, y = torch.randn(sum(sizes), 4), torch.randint(3, (sum(sizes),))
    return (X, y) if rank is None else (X.split(sizes)[rank], y.split(sizes)[rank])


def sums_of_one_process(sizes: list[int]) -> dict[str, list[Any]]:
    alone = extend(Branches(), use_converter="record")
    X, y = rows(sizes)
    with backpack(*sums(), process_group=None):
        extend(nn.CrossEntropyLoss())(alone(X, "ab"), y).backward()
    return quantities(alone, SUMS)


def _other_order(rank: int, count: int) -> None:
    sizes = [3] * count
    expected, (X, y) = sums_of_one_process(sizes), rows(sizes, rank)
    lossfunc = extend(nn.CrossEntropyLoss())
    model = extend(Branches(), use_converter="record")
    wrapped = DistributedDataParallel(model)
    with backpack(*sums()):
        lossfunc(wrapped(X, "ab" if rank else "ba"), y).backward()
    check_same(quantities(model, SUMS), expected, "branches in another order")

    model = extend(Branches(), use_converter="record")
    wrapped = DistributedDataParallel(model)
    with backpack(*sums()):
        lossfunc(model.head(wrapped(X, "ab", with_head=False)), y).backward()
    check_same(quantities(model, SUMS), expected, "a head outside of the wrapper")

    wrapped = DistributedDataParallel(
        extend(Branches(), use_converter="record"), find_unused_parameters=True
    )
    with (
        pytest.raises(RuntimeError, match=r"process 0: .*\(.*a\.weight.*process 1: .*b\.weight"),
        backpack(e.SumGradSquared()),
    ):
        lossfunc(wrapped(X, "ab"[rank]), y).backward()


def _other_order_of_groups(rank: int, count: int) -> None:
    patience = timedelta(seconds=PATIENCE)
    groups = [distributed.new_group(timeout=patience) for _ in range(2)]
    models = [DistributedDataParallel(extend(plain_net()), process_group=g) for g in groups]
    lossfunc, (X, y) = extend(nn.CrossEntropyLoss()), batch([3] * count, rank)
    with backpack(e.Variance()):
        losses = [lossfunc(model(X), y) for model in (models if rank else models[::-1])]
        (losses[0] + losses[1]).backward()
    first, second = (quantities(model.module, ("variance",)) for model in models)
    check_same(first, second, "the same twice")


def _local_on_one(rank: int, count: int) -> None:
    lossfunc, (X, y) = extend(nn.CrossEntropyLoss()), batch([3] * count, rank)
    model = extend(plain_net())
    wrapped = DistributedDataParallel(model)
    loss = lossfunc(wrapped(X), y)
    start = time.monotonic()
    for ext in (e.DiagGGNExact(), e.Variance()) if rank == 0 else ():
        probe = extend(nn.Linear(4, 3))
        with pytest.raises(ValueError), backpack(ext):
            probe(torch.ones(0 if ext.savefield == "variance" else 2, 4)).sum().backward()
    with backpack(e.Variance(), e.BatchL2Grad()):
        loss.backward()
    check_same(*[quantities(model, ("variance",))] * 2, "is there")

    alone = extend(plain_net())
    with backpack(e.Variance(), process_group=None):
        lossfunc(alone(X), y).backward()
    loss = lossfunc(wrapped(X), y)
    if rank == 0:
        with backpack(e.Variance()):  # returns gradients that nobody averages
            torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            check_same(p.variance, q.variance, "torch.autograd.grad")  # type: ignore[attr-defined]
    loss.backward()
    assert time.monotonic() - start < PATIENCE / 2  # nobody has waited


class Longest(FirstOrderBackpropExtension):
    """Takes the axis of samples away, of which each process has another part."""

    needs = ("square_norm",)

    def __init__(self) -> None:
        super().__init__("longest")

    def extract(self, products: Any) -> Tensor:
        return products["square_norm"].max()


def _over_own_samples(rank: int, count: int) -> None:
    own, model = batch([3] * count, rank), extend(plain_net())
    wrapped = DistributedDataParallel(model)
    with pytest.raises(NotImplementedError, match=r"Longest\(\): .*without an axis of samples"):
        step(wrapped, own, Longest())
    assert not any(hasattr(p, "longest") for p in model.parameters())
    step(wrapped, own, Longest(), process_group=None)


@pytest.mark.parametrize(
    "program", [_other_order, _other_order_of_groups, _local_on_one, _over_own_samples]
)
def test_programs_that_differ_between_processes(program: Program, tmp_path: Path) -> None:
    in_processes(program, tmp_path, within=60)


# ------------------------------------------------------------------ ways to wrap a model

WRAPPED: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
]


def _ways_to_wrap(rank: int, count: int) -> None:
    sizes = [2, 3]  # a mean over processes is then no mean over samples
    X, y = batch(sizes, rank)
    for converter in (False, True, "record"):
        local = local_quantities(net(converter), sizes)
        for options in WRAPPED:
            for place in ("inside", "outside", "loss inside"):
                model = net(converter)
                if place == "inside":
                    model = extend(model, use_converter=converter)
                lossfunc: nn.Module = nn.CrossEntropyLoss()
                if place == "loss inside":
                    model = extend(WithLoss(model, lossfunc), use_converter=converter)
                wrapped: nn.Module = DistributedDataParallel(model, **options)
                if place == "outside":
                    wrapped = extend(wrapped, use_converter="record" if converter else False)
                # a static graph is known after the first step
                for step in range(3 if "static_graph" in options else 1):
                    wrapped.zero_grad()
                    with backpack(*all_extensions()):
                        if place == "loss inside":
                            wrapped(X, y).backward()
                        else:
                            extend(lossfunc)(wrapped(X), y).backward()
                    check_averaged(
                        quantities(wrapped), local, rank, sizes, (converter, options, place, step)
                    )


def local_quantities(model: nn.Module, sizes: list[int]) -> list[dict[str, Any]]:
    """What each process finds of its own samples, at the scale of its own loss."""
    model, lossfunc = extend(model, use_converter=True), extend(nn.CrossEntropyLoss())
    found = []
    for rank in range(len(sizes)):
        X, y = batch(sizes, rank)
        model.zero_grad()
        with backpack(*all_extensions(), process_group=None):
            lossfunc(model(X), y).backward()
        found.append(quantities(model))
    return found


def check_averaged(
    found: dict[str, Any], local: list[dict[str, Any]], rank: int, sizes: list[int], what: Any
) -> None:
    """Compare with the definition: the loss of each process counts 1/W."""
    W, N = len(sizes), sum(sizes)
    for name, values in found.items():
        expected = []
        for i in range(len(values)):
            own = [each[name][i] for each in local]
            if name in ("grad_batch", "batch_l2"):
                expected.append(own[rank] / W ** (2 if name == "batch_l2" else 1))
            elif name in OF_SAMPLES:
                expected.append(own[rank] / (W**0.5 if name == "sqrt_ggn_exact" else W))
            elif name == "sum_grad_squared":
                expected.append(sum(own) / W**2)
            elif name == "variance":
                squares = sum(each["sum_grad_squared"][i] for each in local) / W**2
                gradient = sum(each["grad"][i] for each in local) / W
                expected.append(squares / N - (gradient / N) ** 2)
            elif name == "kflr":
                B = sum(factors[0] for factors in own) / W
                A = [f[1] * n / N for n, f in zip(sizes, own, strict=True) if len(f) > 1]
                expected.append([B, sum(A)] if A else [B])
            else:
                expected.append(sum(own) / W)
        check_same(values, expected, (name, what))


@pytest.mark.slow
def test_ways_to_wrap_a_model(tmp_path: Path) -> None:
    in_processes(_ways_to_wrap, tmp_path)


# ------------------------------------------------------------------ what is reduced, and what not


def step(
    wrapped: nn.Module, data: tuple[Tensor, Tensor], *exts: BackpropExtension, **options: Any
) -> None:
    X, y = data
    with backpack(*exts, **options):
        extend(nn.CrossEntropyLoss())(wrapped(X), y).backward()


def _choices(rank: int, count: int) -> None:
    sizes = [2, 3]
    own = batch(sizes, rank)
    local = local_quantities(plain_net(), sizes)
    alone = {name: value for name, value in local[rank].items() if name != "grad"}
    model = extend(plain_net())
    wrapped = DistributedDataParallel(model)

    step(wrapped, own, *all_extensions(), process_group=None)
    found = quantities(model)
    del found["grad"]  # which is averaged
    check_same(found, alone, "process_group=None")

    wrapped.zero_grad()
    with wrapped.no_sync():
        step(wrapped, own, *all_extensions(), process_group=distributed.group.WORLD)
    check_same(quantities(model), local[rank], "no_sync()")

    wrapped.zero_grad()
    one = [distributed.new_group([i]) for i in range(count)][rank]  # type: ignore[union-attr]
    step(wrapped, own, *all_extensions(), process_group=one)
    found = quantities(model)
    del found["grad"]
    check_same(found, alone, "a group of one")

    model.zero_grad()  # the program averages gradients itself
    step(model, own, *all_extensions(), process_group=distributed.group.WORLD)
    for p in model.parameters():
        distributed.all_reduce(p.grad)
        p.grad /= count  # type: ignore[operator]
    check_averaged(quantities(model), local, rank, sizes, "a group")

    model.zero_grad()
    step(model, own, *all_extensions())
    check_same(quantities(model), local[rank], "no wrapper")

    # nothing is sent for what stays with the samples
    wrapped.zero_grad()
    X, y = own
    if rank == 0:
        step(wrapped, own, e.BatchGrad(), e.BatchL2Grad())
    else:
        extend(nn.CrossEntropyLoss())(wrapped(X), y).backward()
    if rank == 0:
        for p, g in zip(model.parameters(), local[rank]["grad_batch"], strict=True):
            check_same(p.grad_batch, g / count, "grad_batch on one process")


def _sampled(rank: int, count: int) -> None:
    """Kronecker factors of drawn targets, and subsampling."""
    sizes, own = [2, 3], batch([2, 3], rank)
    model = extend(plain_net())
    wrapped = DistributedDataParallel(model)
    exts = e.KFAC(2), e.DiagGGNMC(3), e.KFLR(approximation="expand"), e.Variance([1, 0])
    torch.manual_seed(rank)
    step(wrapped, own, *exts)
    local: list[list[Any]] = []
    for r in range(count):
        data = batch(sizes, r)
        torch.manual_seed(r)
        step(model, data, *exts, e.SumGradSquared([0, 1]), process_group=None)
        local.append(
            [(p.kfac, p.kflr, p.diag_ggn_mc, p.sum_grad_squared) for p in model.parameters()]
        )
    torch.manual_seed(rank)
    wrapped.zero_grad()
    step(wrapped, own, *exts)
    for p, *each in zip(model.parameters(), *local, strict=True):
        for k in (0, 1):
            factors = [one[k] for one in each]
            found: Any = (p.kfac, p.kflr)[k]
            check_same(found[0], (factors[0][0] + factors[1][0]) / 2, ("B", k))
            if len(found) == 2:
                check_same(found[1], (2 * factors[0][1] + 3 * factors[1][1]) / 5, ("A", k))
        check_same(p.diag_ggn_mc, (each[0][2] + each[1][2]) / 2, "diag_ggn_mc")


def test_what_is_reduced(tmp_path: Path) -> None:
    in_processes(_choices, tmp_path)


def _diagonal_factors(rank: int, count: int) -> None:
    """Of large Kronecker factors the diagonal is sent, and is that of the whole factor."""
    sizes = [3] * count
    expected = one_process(plain_net(), nn.CrossEntropyLoss(), sizes)["kflr"]
    wrapped = DistributedDataParallel(extend(plain_net()))
    step(wrapped, batch(sizes, rank), e.KFLR(max_factor_size=4))
    for p, factors in zip(wrapped.parameters(), expected, strict=True):
        own = [f if len(f) <= 4 else f.diagonal() for f in factors]
        check_same(p.kflr, own, list(p.shape))


def test_diagonals_of_large_factors(tmp_path: Path) -> None:
    in_processes(_diagonal_factors, tmp_path)


def test_draws_approximations_and_subsampling(tmp_path: Path) -> None:
    in_processes(_sampled, tmp_path)


# ------------------------------------------------------------------ programs around it


class Moments(FirstOrderBackpropExtension):
    """An extension of a user: the third moment has no sum, but what it reads has one."""

    needs = ("square", "gradient")
    shape = ("*p",)

    def __init__(self) -> None:
        super().__init__("moments")

    def extract(self, products: Any) -> Tensor:
        return products["square"] / (1 + products["gradient"].square()) * products.num_samples


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x * self.weight


class SquaresOfDouble(FirstOrderModuleExtension):
    def __init__(self) -> None:
        super().__init__(["weight"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantities: Any) -> Tensor:
        return (2 * module.input0 * g_out[0]).square().sum(0)


class Checkpointed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model, self.options = plain_net(), options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, **self.options)


def _programs(rank: int, count: int) -> None:
    sizes = [2, 3]
    own, everything = batch(sizes, rank), batch([2, 2])
    even = [part.split(2)[rank] for part in everything]

    # an extension and a rule of users
    results = []
    for several in (True, False):
        model = extend(nn.Sequential(plain_net(), Double()))
        squares = e.SumGradSquared()
        squares.set_module_extension(Double, SquaresOfDouble())
        wrapped = DistributedDataParallel(model) if several else model
        step(wrapped, even if several else everything, Moments(), squares, process_group="module")
        results.append(
            [(getattr(p, "moments", 0), p.sum_grad_squared) for p in model[0].parameters()]
            + [model[1].weight.sum_grad_squared]
        )
    check_same(*results, "of users")

    # hooks see what is there in the end, each module once
    model = extend(plain_net())
    seen: list[Any] = []

    def hook(module: nn.Module) -> None:
        seen.append([(p, p.variance.clone()) for p in module.parameters()])

    step(DistributedDataParallel(model), own, e.Variance(), extension_hook=hook)
    assert len(seen) == len(list(model)) + 1
    assert all(torch.equal(value, p.variance) for pairs in seen for p, value in pairs)

    # checkpoints
    results = []
    for module in (Checkpointed(use_reentrant=False), plain_net()):
        model = extend(module)
        step(DistributedDataParallel(model), own, e.Variance(), e.DiagGGNExact())
        results.append([(p.variance, p.diag_ggn_exact) for p in model.parameters()])
    check_same(*results, "checkpoint")
    model = extend(Checkpointed(use_reentrant=True))
    X, y = own
    with pytest.raises(NotImplementedError, match="use_reentrant=False"):
        step(DistributedDataParallel(model), (X.requires_grad_(), y), e.Variance())
    distributed.barrier()

    # the gradient of data that one process looks at is not waited for
    results = []
    for is_looked_at in (True, False):
        model, (X, y) = extend(plain_net()), own
        wrapped = DistributedDataParallel(model)
        X = X.clone().requires_grad_()
        output = wrapped(X)
        loss = extend(nn.CrossEntropyLoss())(output, y)
        with backpack(e.Variance(), e.DiagGGNExact()):
            if is_looked_at and rank == 0:
                torch.autograd.grad(output.sum(), X, retain_graph=True)
            loss.backward()
        results.append([(p.variance, p.diag_ggn_exact) for p in model.parameters()])
    check_same(*results, "gradient of data")

    # no loss of all samples has the value of these
    model = extend(plain_net())
    wrapped = DistributedDataParallel(model)
    with pytest.raises(NotImplementedError, match="KFRA"):
        step(wrapped, own, e.KFRA())
    step(wrapped, own, e.KFRA(), process_group=None)
    wrapped = DistributedDataParallel(extend(plain_net()))
    with wrapped.join(), pytest.raises(NotImplementedError, match="join"):
        step(wrapped, own, e.Variance())
    with backpack(e.Variance(), process_group=distributed.group.WORLD):
        loss = extend(nn.CrossEntropyLoss())(extend(plain_net())(X.detach()), y)
        with pytest.raises(NotImplementedError, match="create_graph"):
            loss.backward(create_graph=True)


def test_programs(tmp_path: Path) -> None:
    in_processes(_programs, tmp_path)


def _four(rank: int, count: int) -> None:
    sizes = [1, 3, 2, 4]
    local = local_quantities(net(True), sizes)
    model = extend(net(True), use_converter=True)
    step(DistributedDataParallel(model), batch(sizes, rank), *all_extensions())
    check_averaged(quantities(model), local, rank, sizes, "four")


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    in_processes(_four, tmp_path, 4)


# ------------------------------------------------------------------ when something is wrong


def _empty_batch(rank: int, count: int) -> None:
    wrapped = DistributedDataParallel(extend(plain_net()))
    kind = ValueError if rank == 1 else RuntimeError
    for ext in (e.Variance(), e.DiagGGNExact()):
        with pytest.raises(kind, match="empty batch"):
            step(wrapped, batch([4, 0], rank), ext)


def test_an_empty_batch_on_a_process(tmp_path: Path) -> None:
    in_processes(_empty_batch, tmp_path, within=100)


class Unknown(nn.Module):
    """Has a parameter, and a rule that fails if it is asked to."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.weight, self.fails = nn.Parameter(torch.ones(3)), fails

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Fails(FirstOrderModuleExtension):
    def __init__(self) -> None:
        super().__init__(["weight"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantities: Any) -> Tensor:
        if module.fails:
            raise ArithmeticError("a rule has failed")
        return (module.input0 * g_out[0]).square().sum(0)


def _mistakes(rank: int, count: int) -> None:
    own = batch([2, 3], rank)
    model = extend(plain_net())
    wrapped = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"process 0: SumGradSquared.*process 1: Variance"):
        step(wrapped, own, (e.SumGradSquared, e.Variance)[rank]())
    assert not any(hasattr(p, "variance") for p in model.parameters())
    step(wrapped, own, e.Variance())  # the next step is not disturbed

    model = extend(nn.Sequential(plain_net(), Unknown(fails=rank == 1)))
    wrapped = DistributedDataParallel(model)
    for second in ((), (e.DiagGGNExact(),)):
        squares = e.SumGradSquared()
        squares.set_module_extension(Unknown, Fails())
        kind = ArithmeticError if rank == 1 else RuntimeError
        with pytest.raises(kind, match="a rule has failed"):
            step(wrapped, own, squares, *second)
        assert not any(hasattr(p, "sum_grad_squared") for p in model.parameters())

    with pytest.raises(ValueError, match="process_group is a group"):
        backpack(e.Variance(), process_group="all")  # type: ignore[arg-type]


def test_mistakes_are_errors_on_all_processes(tmp_path: Path) -> None:
    in_processes(_mistakes, tmp_path, within=100)


def _graph_outlives_its_group(rank: int, count: int) -> None:
    own = batch([2, 3], rank)
    group = distributed.new_group()
    alive = DistributedDataParallel(extend(plain_net()), process_group=group)(own[0])
    distributed.destroy_process_group(group)
    squares = e.SumGradSquared()
    squares.set_module_extension(Unknown, Fails())
    with pytest.raises(ArithmeticError, match="a rule has failed"):
        step(extend(nn.Sequential(plain_net(), Unknown(fails=True))), own, squares)
    assert alive.requires_grad


def test_errors_beside_the_graph_of_a_group_that_is_gone(tmp_path: Path) -> None:
    in_processes(_graph_outlives_its_group, tmp_path, within=100)


def _one_dies(rank: int, count: int) -> None:
    wrapped = DistributedDataParallel(extend(plain_net()))
    if rank == 1:
        with backpack(e.DiagGGNExact()):
            loss = extend(nn.CrossEntropyLoss())(wrapped(batch([2], 0)[0]), batch([2], 0)[1])
            queue = torch.autograd.Variable._execution_engine.queue_callback
            loss.register_hook(lambda _: queue(lambda: os._exit(0)))
            loss.backward()
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        step(wrapped, batch([2], 0), e.DiagGGNExact())
    assert time.monotonic() - start < 2 * PATIENCE
    leave()


def _one_has_no_context(rank: int, count: int) -> None:
    wrapped = DistributedDataParallel(extend(plain_net()))
    own = batch([2, 3], rank)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="enter backpack" if rank == 0 else None):
        for _ in range(2):
            step(wrapped, own, *([e.Variance()] if rank == 0 else []))
    assert time.monotonic() - start < 2 * PATIENCE + 5
    leave()


@pytest.mark.slow
@pytest.mark.parametrize("program", [_one_dies, _one_has_no_context])
def test_nobody_waits_forever(program: Program, tmp_path: Path) -> None:
    in_processes(program, tmp_path, within=4 * PATIENCE)


# ------------------------------------------------------------------ optimisers


def _optimisers(rank: int, count: int) -> None:
    lossfunc = extend(nn.CrossEntropyLoss())
    makers: list[Callable[[Any], Any]] = [
        lambda params: KFAC(params, extension=e.KFLR(), curvature_every=2),
        lambda params: DiagGGN(params, extension=e.DiagGGNExact()),
        lambda params: KFAC(params),
    ]
    for make in makers:
        weights = []
        for several in (True, False):
            model = extend(plain_net())
            wrapped = DistributedDataParallel(model) if several else model
            optimizer = make(model.parameters())
            for i in range(3):
                X, y = batch([2, 2], rank if several else None, seed=i)
                torch.manual_seed(rank)
                optimizer.zero_grad()
                with backpack(*optimizer.extensions):
                    lossfunc(wrapped(X), y).backward()
                with pytest.MonkeyPatch.context() as patch:
                    if not several:  # as if there was one
                        patch.setattr(distributed, "is_initialized", lambda: False)
                    optimizer.step()
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        of_all = [torch.empty_like(weights[0]) for _ in range(count)]
        distributed.all_gather(of_all, weights[0])
        assert all(torch.equal(of_all[0], other) for other in of_all)
        if make is not makers[-1]:  # which draws targets
            check_same(*weights, "one process")

    model = extend(plain_net())
    wrapped = DistributedDataParallel(model)
    own = batch([2, 2], rank)
    optimizer = KFAC(model.parameters())
    for options in ({"process_group": None}, {}):
        before = [p.detach().clone() for p in model.parameters()]
        if options:
            step(wrapped, own, *optimizer.extensions, **options)
        else:
            with wrapped.no_sync():
                step(wrapped, own, *optimizer.extensions)
        with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
    optimizer = KFAC(model.parameters(), adapt_damping_every=2)
    with pytest.raises(NotImplementedError, match="adapt_damping_every"):
        optimizer.step(lambda: step(wrapped, own))


def test_optimisers(tmp_path: Path) -> None:
    in_processes(_optimisers, tmp_path)


@pytest.mark.slow
def test_example_on_two_processes() -> None:
    script = Path(__file__).parents[1] / "docs_src" / "examples" / "distributed_training.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    output = run(*launch, script, timeout=300)
    assert "processes                                  2" in output


# ------------------------------------------------------------------ what it costs


def _bytes(rank: int, count: int) -> None:
    model = extend(plain_net())
    wrapped = DistributedDataParallel(model)
    sent: list[int] = []
    all_reduce = distributed.all_reduce

    def counted(value: Tensor, **options: Any) -> Any:
        sent.append(value.numel())
        return all_reduce(value, **options)

    distributed.all_reduce = counted  # type: ignore[assignment]
    P = sum(p.numel() for p in model.parameters())
    counts = len(list(model.parameters()))
    sides = [(3, 4), (3,), (4, 12), (4,), (3, 4), (3,)]
    K = sum(d * (d + 1) // 2 for each in sides for d in each)
    expected: dict[BackpropExtension, list[int]] = {
        e.SumGradSquared(): [P, counts],
        e.Variance(): [2 * P, counts],
        e.DiagGGNExact(): [P, counts],
        e.KFAC(): [K, 2 * counts],
        e.BatchGrad(): [],
        e.GGNMP(): [],
    }
    for ext, numbers in expected.items():
        sent.clear()
        step(wrapped, batch([2, 2], rank), ext)
        assert sent == numbers, (ext, sent, numbers)
    sent.clear()
    step(wrapped, batch([2, 2], rank), e.Variance(), e.KFAC(), e.DiagGGNExact())
    assert len(sent) == 2 and sent[0] == 3 * P + K
    sent.clear()
    model[0].weight.ggnmp(torch.ones(5, *model[0].weight.shape))
    assert sent == [5 * model[0].weight.numel()]


def test_what_is_sent(tmp_path: Path) -> None:
    in_processes(_bytes, tmp_path)
