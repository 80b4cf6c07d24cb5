"""Quantities of several processes mean what gradients mean, or all processes have an error."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from test_several_processes import (
    Program,
    batch,
    check_same,
    in_processes,
    local_quantities,
    one_process,
    plain_net,
    quantities,
    step,
)
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from backpack import backpack, clear, extend
from backpack import extensions as e

NAMES = ("sum_grad_squared", "diag_ggn_exact", "grad_batch")


def _some() -> list[Any]:
    return [e.SumGradSquared(), e.DiagGGNExact(), e.BatchGrad()]


def _products(rank: int, count: int) -> None:
    sizes = [3] * count
    model = extend(plain_net())
    step(DistributedDataParallel(model), batch(sizes, rank), e.GGNMP(), e.HMP())
    p: Any = model[0].weight
    ones = torch.ones(2, *p.shape)
    with pytest.raises(RuntimeError, match=r"same vectors, .*process 0: GGNMP\(\) of 0\.weight"):
        p.ggnmp(ones + rank)
    with pytest.raises(RuntimeError, match=r"\[2, 3, 2, 2\].*\[3, 3, 2, 2\]"):
        p.ggnmp(torch.ones(2 + rank, *p.shape))
    with pytest.raises(RuntimeError, match=r"process 0: GGNMP\(\).*process 1: HMP\(\)"):
        (p.hmp if rank else p.ggnmp)(ones)
    with pytest.raises(ValueError if rank else RuntimeError, match="Expected vectors of shape"):
        p.ggnmp(ones[..., rank:])
    found = p.ggnmp(ones)  # the next product is not disturbed
    alone = extend(plain_net())
    with backpack(e.GGNMP(), process_group=None):
        extend(nn.CrossEntropyLoss())(alone(batch(sizes)[0]), batch(sizes)[1]).backward()
    check_same(found, alone[0].weight.ggnmp(ones), "a product")  # type: ignore[operator]


def _frozen_when_wrapped(rank: int, count: int) -> None:
    """Torch does not average gradients of what was frozen then."""
    sizes = [2, 3]
    local = local_quantities(plain_net(), sizes)
    for thaws_first in (True, False):
        model = extend(plain_net())
        model[0].requires_grad_(False)
        wrapped = DistributedDataParallel(model)
        if not thaws_first:
            step(wrapped, batch(sizes, rank), *_some())
        model.requires_grad_(True)
        model.zero_grad()
        step(wrapped, batch(sizes, rank), *_some())
        found = quantities(model, NAMES)
        for name in ("grad", *NAMES):
            of_first = [each[:2] for each in (found[name], local[rank][name])]
            check_same(*of_first, (name, "of the process"))
        for i in range(2, 6):
            average = sum(each["diag_ggn_exact"][i] for each in local) / count
            check_same(found["diag_ggn_exact"][i], average, "average")


def _frozen_beside_sparse_gradients(rank: int, count: int) -> None:
    """Whose buckets have no memory that could tell what is averaged."""
    torch.manual_seed(0)
    embedding = nn.Embedding(5, 4, sparse=True)
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(8, 3), nn.Linear(3, 2))
    model[2].requires_grad_(False)
    X, y = torch.randint(5, (4, 2)), torch.randint(2, (4,))
    step(DistributedDataParallel(extend(model)), (X[rank::count], y[rank::count]), e.BatchGrad())
    p: Any = model[3].weight
    total = p.grad_batch.sum(0)
    distributed.all_reduce(total)
    check_same(total, p.grad, "a part of the average for each sample")


def _beside_an_older_graph(rank: int, count: int) -> None:
    """The model is called in its wrapper, whose last forward pass counts, and again outside."""
    sizes = [3] * count
    expected = one_process(plain_net(), nn.CrossEntropyLoss(), sizes)
    model = extend(plain_net())
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        kept = [wrapped(batch(sizes, rank)[0])]
    kept.append(wrapped(batch(sizes, rank)[0]))
    step(model, batch(sizes, rank), *_some())
    found = quantities(model, NAMES)
    for name in ("grad", "sum_grad_squared", "diag_ggn_exact"):
        check_same(found[name], expected[name], name)


def _accumulated_on_one(rank: int, count: int) -> None:
    own = batch([3] * count, rank)
    model = extend(plain_net())
    wrapped = DistributedDataParallel(model)
    step(wrapped, own, *_some(), accumulate=True)
    if rank == 1:
        clear(model)
    with pytest.raises(RuntimeError, match=r"0: .*behind 1 averaged.*1: .*behind 0 averaged"):
        step(wrapped, own, *_some(), accumulate=True)
    clear(model)
    with pytest.raises(RuntimeError, match=r"0: accumulate=True .*1: SumGradSquared"):
        step(wrapped, own, *_some(), accumulate=rank == 0)


def _one_comes_late(rank: int, count: int) -> None:
    """Nobody takes what others send for something else."""
    group = distributed.new_group(timeout=timedelta(seconds=2))
    X, y = batch([3] * count, rank)
    loss = extend(nn.CrossEntropyLoss())(extend(plain_net())(X), y)
    distributed.barrier()
    if rank == 1:
        time.sleep(4)
    match = "has waited for the others" if rank == 0 else "has come too late"
    with pytest.raises(RuntimeError, match=match), backpack(e.Variance(), process_group=group):
        loss.backward()
    distributed.barrier()
    number = torch.tensor([rank])
    distributed.all_reduce(number, group=group)
    assert number == 1
    model = extend(plain_net())
    step(model, (X, y), e.Variance(), process_group=group)
    assert hasattr(model[0].weight, "variance")


class Largest(e.SumGradSquared):
    """Has the shape of the parameter, which may have as many entries as there are samples."""

    needs = ("individual",)

    def extract(self, products: Any) -> Any:
        return products["individual"].flatten(0, 1).amax(0)


def _as_many_samples_as_entries(rank: int, count: int) -> None:
    model = extend(nn.Linear(3, 3))
    wrapped = DistributedDataParallel(model)
    X, y = torch.rand(3, 3), torch.randint(3, (3,))
    with pytest.raises(NotImplementedError, match=r"Largest\(\): .*without an axis of samples"):
        step(wrapped, (X, y), Largest())
    step(wrapped, (X, y), e.BatchGrad(), e.BatchL2Grad(), e.SumGradSquared())
    assert model.weight.grad_batch.shape == (3, 3, 3)


@pytest.mark.parametrize(
    "program",
    [
        _products,
        _frozen_when_wrapped,
        _frozen_beside_sparse_gradients,
        _beside_an_older_graph,
        _accumulated_on_one,
        _one_comes_late,
        _as_many_samples_as_entries,
    ],
)
def test_programs(program: Program, tmp_path: Path) -> None:
    in_processes(program, tmp_path, within=100)
