"""Operators over a data set, and private steps, on several processes with samples of their own."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from test_several_processes import Net, batch, in_processes, plain_net
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from backpack import backpack, extend
from backpack.distributed.agreement import digest
from backpack.linalg import (
    EKFAC,
    GGN,
    DiagonalGGN,
    DiagonalHessian,
    EmpiricalFisher,
    FisherMC,
    Hessian,
    KroneckerGGN,
)
from backpack.optim import DPSGD, AdaptiveClipping

SIZES = [5, 2]


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batches(rank: int | None) -> list[tuple[Tensor, Tensor]]:
    """Two batches of each process, or those of all."""
    each = [[batch(SIZES, r, seed) for seed in (1, 2)] for r in range(len(SIZES))]
    return each[rank] if rank is not None else [one for own in each for one in own]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


OPERATORS = [
    (Hessian, {}),
    (GGN, {}),
    (EmpiricalFisher, {}),
    (DiagonalGGN, {}),
    (DiagonalHessian, {}),
    (KroneckerGGN, {}),
    (KroneckerGGN, {"approximation": "expand"}),
    (KroneckerGGN, {"fisher": "empirical"}),
    (KroneckerGGN, {"fisher": "inputs"}),
    (KroneckerGGN, {"joint_bias": True}),
    (EKFAC, {}),
]


def _operators(rank: int, count: int) -> None:
    world = distributed.group.WORLD
    for kind, options in OPERATORS:
        for reduction in ("mean", "sum"):
            loss = nn.CrossEntropyLoss(reduction=reduction, ignore_index=1)
            given = {**options, "progress": False}
            new = plain_net if "joint_bias" in options else model  # not for layers used twice
            expected = kind(new(), loss, batches(None), process_group=None, **given).to_dense()
            own = kind(new(), loss, batches(rank), process_group=world, **given)
            close(own.to_dense(), expected)
            wrapped = DistributedDataParallel(new())
            close(kind(wrapped, loss, batches(rank), **given).to_dense(), expected)
            assert all(p.grad is None for p in wrapped.parameters())
            loss(wrapped(batches(rank)[0][0]), batches(rank)[0][1]).backward()  # as it was


def test_operators(tmp_path: Path) -> None:
    """Those of one process that has all data; wrapped models are left as they were."""
    in_processes(_operators, tmp_path)


def _ignored(rank: int, count: int) -> None:
    """A process of which no target counts adds zeros."""
    loss, world = nn.CrossEntropyLoss(), distributed.group.WORLD
    parts = [[(X, y if r else torch.full_like(y, -100)) for X, y in batches(r)] for r in range(2)]
    for kind, options in OPERATORS:
        given = {**options, "progress": False}
        new = plain_net if "joint_bias" in options else model
        whole = kind(new(), loss, parts[0] + parts[1], process_group=None, **given)
        own = kind(new(), loss, parts[rank], process_group=world, **given)
        close(own.to_dense(), whole.to_dense())


def test_processes_whose_targets_do_not_count(tmp_path: Path) -> None:
    in_processes(_ignored, tmp_path)


def _empty(rank: int, count: int) -> None:
    """A process whose batches are all empty adds zeros."""
    loss, world = nn.CrossEntropyLoss(), distributed.group.WORLD
    own = [(X[: len(X) * rank], y[: len(y) * rank]) for X, y in batches(rank)]
    for kind, options in OPERATORS:
        given = {**options, "progress": False}
        new = plain_net if "joint_bias" in options else model
        whole = kind(new(), loss, batches(1), process_group=None, **given)
        close(kind(new(), loss, own, process_group=world, **given).to_dense(), whole.to_dense())


def test_processes_whose_batches_are_empty(tmp_path: Path) -> None:
    in_processes(_empty, tmp_path)


def test_vectors_are_told_apart() -> None:
    """Also those that have as many entries of each kind."""
    signs = torch.tensor(list(product([-1.0, 1.0], repeat=10)))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex128):
        assert len({digest(row.to(dtype)) for row in signs}) == len(signs)


def _solutions(rank: int, count: int) -> None:
    loss, world = nn.CrossEntropyLoss(), distributed.group.WORLD
    whole = GGN(model(), loss, batches(None), progress=False, process_group=None)
    torch.manual_seed(3)
    b = torch.randn(whole.shape[0], 2)
    own = GGN(model(), loss, batches(rank), progress=False, process_group=world)
    found = own.solve(b, damping=0.1, tolerance=1e-12)
    close(found, whole.solve(b, damping=0.1, tolerance=1e-12))
    drawn = FisherMC(model(), loss, batches(rank), None, 200, process_group=world, progress=False)
    for tensor in (found, drawn @ b):
        of_first = tensor.clone()
        distributed.broadcast(of_first, 0)
        assert torch.equal(tensor, of_first)
    distance = (drawn.to_dense() - whole.to_dense()).norm() / whole.to_dense().norm()
    assert distance < 0.2


def test_solutions_and_drawn_targets(tmp_path: Path) -> None:
    """All processes have the same."""
    in_processes(_solutions, tmp_path)


def _mistakes(rank: int, count: int) -> None:
    loss, world = nn.CrossEntropyLoss(), distributed.group.WORLD
    for kind in (GGN, DiagonalGGN):
        with pytest.raises(NotImplementedError, match=r"process_group=torch\.distributed"):
            kind(model(), loss, batches(rank))
    with pytest.raises(ValueError, match="process_group"):
        GGN(model(), loss, batches(rank), process_group="world")  # type: ignore[arg-type]
    own = GGN(model(), loss, batches(rank), progress=False, process_group=world)
    with pytest.raises(RuntimeError, match="product of GGN with vectors"):
        own @ torch.full((own.shape[0],), 1.0 + rank)
    empty = GGN(model(), loss, batches(rank) if rank else [], progress=False, process_group=world)
    with pytest.raises((ValueError, RuntimeError), match="no batches"):
        empty @ torch.ones(own.shape[0])
    data = batches(rank) if rank else []
    with pytest.raises((ValueError, RuntimeError), match="no batches"):
        KroneckerGGN(model(), loss, data, progress=False, process_group=world)
    close(own @ torch.ones(own.shape[0]), own @ torch.ones(own.shape[0]))  # the group still works


def test_mistakes_are_errors_on_all(tmp_path: Path) -> None:
    in_processes(_mistakes, tmp_path)


# ------------------------------------------------------------------ private steps


def optimiser(net: nn.Module, seed: int, is_adaptive: bool, **options: Any) -> DPSGD:
    return DPSGD(
        net.parameters(),
        lr=0.5,
        momentum=0.9,
        max_grad_norm=0.3,
        noise_multiplier=0.7,
        expected_batch_size=sum(SIZES),
        generator=torch.Generator().manual_seed(seed),
        adaptive=AdaptiveClipping() if is_adaptive else None,
        **options,
    )


def private_step(net: nn.Module, opt: DPSGD, X: Tensor, y: Tensor, group: Any) -> None:
    opt.zero_grad()
    with backpack(*opt.extensions, process_group=group):
        extend(nn.CrossEntropyLoss())(net(X), y).backward()
    opt.step()


def as_one_process(opt: DPSGD) -> None:
    """Do a step that does not know of other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "get_world_size", lambda: 1)
        opt.step()


def _private(rank: int, count: int) -> None:
    world = distributed.group.WORLD
    for is_adaptive in (False, True):
        one, own = (extend(model(), use_converter=True) for _ in range(2))
        whole = optimiser(one, 0, is_adaptive)
        parts = optimiser(own, rank, is_adaptive, process_group=world)  # the first one draws
        for seed in (1, 2):
            with pytest.raises(NotImplementedError, match="process_group"):
                private_step(one, whole, *batch(SIZES, None, seed), None)
            as_one_process(whole)
            private_step(own, parts, *batch(SIZES, rank, seed), "module")
        X, y = batch(SIZES, 0, 3)
        one.zero_grad()
        with backpack(*whole.extensions):
            extend(nn.CrossEntropyLoss())(one(X), y).backward()
        as_one_process(whole)
        if rank == 0:
            private_step(own, parts, X, y, "module")
        else:
            parts.step_without_samples()
        assert whole.max_grad_norm == pytest.approx(parts.max_grad_norm, rel=1e-12)
        for p, q in zip(one.parameters(), own.parameters(), strict=True):
            close(q, p)
            of_first = q.detach().clone()
            distributed.broadcast(of_first, 0)
            assert torch.equal(q, of_first)
    parts.zero_grad()
    with pytest.raises(RuntimeError, match="no backward pass since the last step"):
        if rank == 0:
            private_step(own, parts, X, y, "module")
        else:  # has forgotten its backward pass
            parts.step()


class Optional(nn.Module):
    """A layer that not every process uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 3)
        self.uses_second = True

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        return self.second(z) if self.uses_second else z


def _unused(rank: int, count: int) -> None:
    """Steps whose processes use other layers, and what is left of one that an error has stopped."""
    net, bound = extend(Optional(), use_converter="record"), 0.1
    options: dict[str, Any] = {"noise_multiplier": 0.0, "expected_batch_size": 1.0}
    world = distributed.group.WORLD
    opt = DPSGD(net.parameters(), 1.0, max_grad_norm=bound, process_group=world, **options)
    X, y = torch.randn(1, 4), torch.tensor([rank])

    def length_of_step(*, samples: bool = True) -> float:
        before = [p.detach().clone() for p in net.parameters()]
        if samples:
            private_step(net, opt, X, y, "module")
        else:
            opt.step_without_samples()
        moves = [p.detach() - q for p, q in zip(net.parameters(), before, strict=True)]
        return float(torch.cat([m.flatten() for m in moves]).norm())

    net.uses_second = rank == 0
    assert 0 < length_of_step() <= 2 * bound
    assert 0 < length_of_step(samples=rank == 0) <= bound
    net.uses_second = True
    if rank == 0:  # no context: an error of one is one of both, at once
        opt.zero_grad()
        nn.CrossEntropyLoss()(net(X), y).backward()
        with pytest.raises(RuntimeError, match="has the grad_clipped that was used"):
            opt.step()
    else:
        with pytest.raises(RuntimeError, match="has the grad_clipped that was used"):
            private_step(net, opt, X, y, "module")
    assert 0 < length_of_step() <= 2 * bound  # nothing of the step before
    with pytest.raises(ValueError, match="process_group"):
        DPSGD(net.parameters(), 1.0, max_grad_norm=1, process_group="module", **options)  # type: ignore[arg-type]


def test_private_steps_of_other_layers(tmp_path: Path) -> None:
    in_processes(_unused, tmp_path)


def test_private_steps(tmp_path: Path) -> None:
    """Those of one process with all samples, which draws the noise of the first."""
    in_processes(_private, tmp_path)
