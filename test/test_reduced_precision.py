"""Quantities that are sent between processes in low precision, against the rounding by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_several_processes import batch, in_processes, local_quantities, plain_net, step
from test_spread_optimisers import sharded
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from backpack import extend
from backpack import extensions as e
from backpack.distributed import reduced_in, sums
from backpack.distributed.shards import whole

SIZES = [2, 3]
NAMES = ("sum_grad_squared", "variance", "diag_ggn_exact", "kflr")


def exts() -> list[Any]:
    return [e.SumGradSquared(), e.Variance(), e.DiagGGNExact(), e.KFLR()]


def rounded_sum(each: list[Tensor]) -> Tensor:
    """The sum of rounded values in single precision, rounded."""
    total = torch.stack([value.bfloat16().float() for value in each]).sum(0)
    return total.bfloat16().double()


def expected(local: list[dict[str, Any]], name: str, i: int) -> Any:
    """A quantity of parameter i out of those of each process, whose losses count 1/2."""
    own = [each[name][i] for each in local]
    if name == "kflr":
        B = rounded_sum([factors[0] / 2 for factors in own])
        A = [f[1] * n for n, f in zip(SIZES, own, strict=True) if len(f) > 1]
        return [B, rounded_sum(A) / sum(SIZES)] if A else [B]
    if name == "diag_ggn_exact":
        return rounded_sum([value / 2 for value in own])
    squares = rounded_sum([each["sum_grad_squared"][i] / 4 for each in local])
    if name == "sum_grad_squared":
        return squares
    gradient = rounded_sum([each["grad"][i] / 2 for each in local])
    return squares / sum(SIZES) - (gradient / sum(SIZES)) ** 2


def _values(rank: int, count: int) -> None:
    local = local_quantities(plain_net(), SIZES)
    own = batch(SIZES, rank)
    for wrap in (DistributedDataParallel, sharded):
        model = wrap(extend(plain_net()))
        with reduced_in(torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # torch renames operations
            step(model, own, *exts())
        for i, p in enumerate(model.parameters()):
            gradient = sum(each["grad"][i] for each in local) / 2
            torch.testing.assert_close(whole(p.grad), gradient, rtol=1e-10, atol=1e-12)
            for name in NAMES:
                found: Any = getattr(p, name)
                found = found if isinstance(found, list) else whole(found)
                torch.testing.assert_close(found, expected(local, name, i), rtol=1e-12, atol=1e-14)
        model.zero_grad()
        step(model, own, e.DiagGGNExact())  # behind it, all is exact
        for i, p in enumerate(model.parameters()):
            exact = sum(each["diag_ggn_exact"][i] for each in local) / 2
            torch.testing.assert_close(whole(p.diag_ggn_exact), exact, rtol=1e-10, atol=1e-12)


def test_values(tmp_path: Path) -> None:
    in_processes(_values, tmp_path)


def _same_on_all(rank: int, count: int) -> None:
    sizes = [1, 2, 3, 1]
    model = DistributedDataParallel(extend(plain_net()))
    with reduced_in(torch.bfloat16):
        step(model, batch(sizes, rank), *exts())
    values = [getattr(p, name) for p in model.parameters() for name in NAMES]
    parts = [part for v in values for part in (v if isinstance(v, list) else [v])]
    own = torch.cat([part.flatten() for part in parts])
    of_first = own.clone()
    distributed.broadcast(of_first, 0)
    assert torch.equal(own, of_first)


@pytest.mark.slow
def test_four_processes_have_the_same(tmp_path: Path) -> None:
    in_processes(_same_on_all, tmp_path, 4)


def _mistakes(rank: int, count: int) -> None:
    own = batch(SIZES, rank)
    model = DistributedDataParallel(extend(plain_net()))
    with pytest.raises(ValueError, match=r"torch\.bfloat16 or as they are, got torch\.float16"):
        reduced_in(torch.float16).__enter__()
    with pytest.raises(RuntimeError, match=r"in torch\.bfloat16"):
        if rank == 0:
            with reduced_in(torch.bfloat16):
                step(model, own, e.Variance())
        else:
            step(model, own, e.Variance())
    step(model, own, e.Variance())


def test_other_precisions_are_errors_on_all(tmp_path: Path) -> None:
    in_processes(_mistakes, tmp_path, within=100)


def _bytes(rank: int, count: int) -> None:
    """Half of those of single precision, in sends and in receives."""
    sent: list[int] = []
    all_to_all, gather = distributed.all_to_all_single, sums.ALL_GATHER

    def counted(out: Tensor, value: Tensor, **options: Any) -> Any:
        sent.append(value.nbytes)
        return all_to_all(out, value, **options)

    def gathered(out: Tensor, value: Tensor, **options: Any) -> Any:
        sent.append(out.nbytes)
        return gather(out, value, **options)

    model = DistributedDataParallel(extend(plain_net().float()))
    X, y = batch(SIZES, rank)
    with pytest.MonkeyPatch.context() as patch, reduced_in(torch.bfloat16):
        patch.setattr(distributed, "all_to_all_single", counted)
        patch.setattr(sums, "ALL_GATHER", gathered)
        step(model, (X.float(), y), e.DiagGGNExact())
    P = sum(p.numel() for p in model.parameters())
    assert sent == [2 * (P + P % 2)] * 2


def test_what_is_sent(tmp_path: Path) -> None:
    in_processes(_bytes, tmp_path)
