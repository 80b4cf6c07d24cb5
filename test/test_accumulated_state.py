"""What accumulates over backward passes is saved, and goes on in another program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from test_several_processes import batch, check_same, in_processes, plain_net
from test_spread_optimisers import sharded
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel

from backpack import backpack, clear, extend
from backpack import extensions as e
from backpack.distributed import (
    accumulated_state,
    load_accumulated_checkpoint,
    load_accumulated_state,
)
from backpack.distributed.shards import whole

SIZES = [4, 4]  # samples of each of two processes, in each of three passes


@pytest.fixture(autouse=True)
def precise() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def summed() -> list[Any]:
    """Extensions whose results are sums over samples, of three propagations."""
    kroneckers = [
        e.HBP("GGN", "EXACT", "SQRT", "BOTEV_MARTENS", "expanded", approximation="expand"),
        e.HBP("GGN", "EXACT", "SQRT", "BOTEV_MARTENS", "joint", joint_bias=True),
    ]
    diagonals = [e.SumGradSquared(), e.Variance(), e.DiagGGNExact(), e.DiagHessian()]
    return [*diagonals, e.KFLR(max_factor_size=7), *kroneckers]


def passes(model: nn.Module, seeds: range, *exts: Any, rank: int | None = None) -> None:
    """Accumulate over batches, of which processes have a part each."""
    loss = extend(nn.CrossEntropyLoss())
    for seed in seeds:
        X, y = batch(SIZES, rank, seed)
        with backpack(*exts, accumulate=True):
            loss(model(X), y).backward()


def found(model: nn.Module, *exts: Any) -> list[Any]:
    values = [[getattr(p, ext.savefield) for ext in exts] for p in model.parameters()]
    return [
        [[whole(v) for v in value] if isinstance(value, list) else whole(value) for value in own]
        for own in values
    ]


def expected(*exts: Any) -> list[Any]:
    model = extend(plain_net())
    passes(model, range(3), *exts)
    return found(model, *exts)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("way", ["torch.save", "checkpoint", "memory"])
def test_one_process(way: str, tmp_path: Path) -> None:
    """The rest of the passes in another model; what has an axis of samples is there, too."""
    exts = [*summed(), e.BatchGrad(), e.BatchL2Grad(), e.BatchDiagGGNExact()]
    model, other = extend(plain_net()), extend(plain_net())
    passes(model, range(2), *exts)
    before = found(model, *exts)
    state = accumulated_state(model)
    assert list(state) == [name for name, _ in model.named_parameters()]
    if way == "checkpoint":
        checkpoint.save({"accumulated": state}, checkpoint_id=tmp_path)
        load_accumulated_checkpoint(other, tmp_path)
    else:
        load_accumulated_state(other, through_a_file(state) if way == "torch.save" else state)
    assert not any(hasattr(p, ext.savefield) for p in other.parameters() for ext in exts)
    again = extend(plain_net())
    load_accumulated_state(again, accumulated_state(other))  # saved before it went on
    for each in (other, again, model):
        passes(each, range(2, 3), *exts)
        check_same(found(each, *exts), expected(*exts), way)
    assert len(before) == len(list(model.parameters()))


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "fully_shard": sharded,
}


def _write(rank: int, count: int, folder: str) -> None:
    for kind, wrap in KINDS.items():
        inner = extend(plain_net())
        passes(wrap(inner), range(2), *summed(), rank=rank)
        checkpoint.save({"accumulated": accumulated_state(inner)}, checkpoint_id=f"{folder}/{kind}")


def _read(rank: int, count: int, folder: str) -> None:
    for written in KINDS:
        for wrap in KINDS.values():
            inner = extend(plain_net())
            wrapped = wrap(inner)
            load_accumulated_checkpoint(inner, f"{folder}/{written}")
            passes(wrapped, range(2, 3), *summed(), rank=rank)
            check_same(found(inner, *summed()), expected(*summed()), (written, wrap))


def test_other_numbers_of_processes(tmp_path: Path) -> None:
    """What two processes have written, they read sharded or not, and one process does."""
    for name in ("write", "read"):
        (tmp_path / name).mkdir()
    in_processes(partial(_write, folder=str(tmp_path)), tmp_path / "write", 2)
    for kind in KINDS:
        model = extend(plain_net())
        load_accumulated_checkpoint(model, tmp_path / kind)
        passes(model, range(2, 3), *summed())
        check_same(found(model, *summed()), expected(*summed()), kind)
    in_processes(partial(_read, folder=str(tmp_path)), tmp_path / "read", 2)


def _mistakes(rank: int, count: int) -> None:
    inner = extend(plain_net())
    wrapped = DistributedDataParallel(inner)
    with wrapped.no_sync():
        passes(wrapped, range(1), e.Variance(), rank=rank)
    with pytest.raises(NotImplementedError, match=r"0\.weight .* this process alone"):
        accumulated_state(inner)
    clear(inner)
    passes(wrapped, range(1), e.BatchL2Grad(), rank=rank)
    with pytest.raises(NotImplementedError, match=r"square_norm of 0\.weight has an axis"):
        accumulated_state(inner)
    distributed.barrier()

    inner = extend(plain_net())
    model = sharded(inner)
    passes(model, range(1), e.Variance(), rank=rank)
    state = accumulated_state(inner)
    load_accumulated_state(inner, state)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    with pytest.raises(NotImplementedError, match=r"set_requires_gradient_sync\(False\)"):
        passes(model, range(1, 2), e.Variance(), rank=rank)


def test_mistakes_of_processes(tmp_path: Path) -> None:
    in_processes(_mistakes, tmp_path)


def test_mistakes(tmp_path: Path) -> None:
    model, other = extend(plain_net()), extend(plain_net())
    assert accumulated_state(model) == {}
    passes(model, range(1), e.Variance(), e.KFLR())
    state = accumulated_state(model)
    checkpoint.save({"a": state}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="no state 'accumulated', but a"):
        load_accumulated_checkpoint(other, tmp_path)
    with pytest.raises(ValueError, match="Give a checkpoint_id"):
        load_accumulated_checkpoint(other)
    with pytest.raises(ValueError, match=r"quantities of 0\.weight, which the model has not"):
        load_accumulated_state(nn.Linear(2, 3), state)
    with pytest.raises(ValueError, match=r"square of 0\.weight of shape \[3, 2, 2\], .* \[3, 5\]"):
        load_accumulated_state(nn.Sequential(nn.Linear(5, 3)), {"0.weight": state["0.weight"]})
    for exts in ([e.Variance()], [e.Variance(), e.KFLR(approximation="expand")]):
        load_accumulated_state(other, state)
        with pytest.raises(ValueError, match="accumulate=True: the extensions"):
            passes(other, range(1), *exts, e.SumGradSquared())
    load_accumulated_state(other, state)
    clear(other)
    passes(other, range(1), e.Variance(), e.KFLR())
    check_same(found(other, e.KFLR()), found(model, e.KFLR()), "cleared")
    load_accumulated_state(other, state)
    loss, (X, y) = extend(nn.CrossEntropyLoss()), batch(SIZES, None, 0)
    with backpack(e.Variance(), e.KFLR()):  # starts anew
        loss(other(X), y).backward()
    check_same(found(other, e.KFLR()), found(model, e.KFLR()), "anew")
    passes(other, range(1), e.GGNMP())
    with pytest.raises(NotImplementedError, match=r"ggnmp of 0\.weight cannot be saved"):
        accumulated_state(other)


class Turns(nn.Module):
    """Two layers that share their weight, of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.layers[1].weight = self.layers[0].weight
        self.used = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.used](x)


@pytest.mark.parametrize("used", [0, 1])
def test_a_joined_bias_is_known_after_loading(used: int, tmp_path: Path) -> None:
    model, loss = extend(Turns()), extend(nn.MSELoss())

    def one_pass() -> None:
        with backpack(e.KFLR(joint_bias=True), accumulate=True):
            loss(model(torch.rand(4, 3)), torch.rand(4, 3)).backward()

    one_pass()
    checkpoint.save({"accumulated": accumulated_state(model)}, checkpoint_id=tmp_path)
    clear(model)
    load_accumulated_checkpoint(model, tmp_path)
    model.used = used
    refusal = pytest.raises(NotImplementedError, match="joined there with")
    with refusal if used else nullcontext():
        one_pass()


def test_factors_of_other_sizes_are_refused() -> None:
    """The first layer reads other patches."""
    model = extend(plain_net())
    passes(model, range(1), e.KFLR())
    state = accumulated_state(model)
    state["0.weight"]["kflr"]["values"]["input_factors"] = [torch.zeros(3, 3)]
    load_accumulated_state(model, state)
    with pytest.raises(ValueError, match=r"0\.weight: input_factors .* \[\[3, 3\]\], .*\[4, 4\]"):
        passes(model, range(1), e.KFLR())
