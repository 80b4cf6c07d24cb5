"""Optimisers that go on after a checkpoint, on another number of processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_several_processes import batch, check_same, in_processes, plain_net
from test_spread_optimisers import sharded, weights
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel

from backpack import backpack, extend
from backpack.extensions import KFLR, DiagGGNExact
from backpack.optim import (
    DPSGD,
    KFAC,
    SOAP,
    AdaptiveClipping,
    DiagGGN,
    DPOptimizer,
    load_checkpoint,
)

SAMPLES, BEFORE, AFTER = 4, 4, 4


def kfac(model: nn.Module, least: bool) -> KFAC:
    count = distributed.get_world_size()
    options: dict[str, Any] = {"lr": 0.5, "inverse_every": 3, "extension": KFLR()}
    fraction = 1 / count if least else 1.0
    group = distributed.group.WORLD
    return KFAC(model.parameters(), process_group=group, worker_fraction=fraction, **options)


def private(model: nn.Module) -> DPSGD:
    return DPSGD(
        model.parameters(),
        lr=0.5,
        momentum=0.9,
        max_grad_norm=0.3,
        noise_multiplier=0.7,
        expected_batch_size=SAMPLES,
        generator=torch.Generator().manual_seed(1),
        adaptive=AdaptiveClipping(),
        process_group=distributed.group.WORLD,
    )


def soap(params: Any) -> SOAP:
    """Well-conditioned steps: along directions without a gradient, they are rounding over eps."""
    return SOAP(params, lr=0.1, eps=1e-3, bases_every=BEFORE)


def adam_in_private(params: Any) -> DPOptimizer:
    options = {"max_grad_norm": 0.3, "noise_multiplier": 0.0, "expected_batch_size": 6}
    return DPOptimizer(torch.optim.Adam(params), **options)


def same(model: nn.Module) -> nn.Module:
    return model


OPTIMISERS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "KFAC": (DistributedDataParallel, partial(kfac, least=False)),
    "KFAC, least memory": (DistributedDataParallel, partial(kfac, least=True)),
    "KFAC, sharded": (sharded, partial(kfac, least=True)),
    "DiagGGN": (
        DistributedDataParallel,
        lambda m: DiagGGN(m.parameters(), extension=DiagGGNExact()),
    ),
    "DiagGGN, sharded": (sharded, lambda m: DiagGGN(m.parameters(), extension=DiagGGNExact())),
    "DPSGD": (same, private),
    "SOAP": (DistributedDataParallel, lambda m: soap(m.parameters())),
    "SOAP, sharded": (sharded, lambda m: soap(m.parameters())),
}


def train(wrapped: nn.Module, opt: Any, seeds: range, rank: int, count: int) -> None:
    for seed in seeds:
        X, y = batch([SAMPLES // count] * count, rank, seed)
        opt.zero_grad()
        with backpack(*getattr(opt, "extensions", ())):
            extend(nn.CrossEntropyLoss())(wrapped(X), y).backward()
        opt.step()


def _write(rank: int, count: int, folder: str) -> None:
    for name, (wrap, make) in OPTIMISERS.items():
        inner = extend(plain_net())
        wrapped = wrap(inner)
        opt = make(inner)
        train(wrapped, opt, range(BEFORE), rank, count)
        state = {"model": inner.state_dict(), "optimizer": opt.state_dict()}
        checkpoint.save(state, checkpoint_id=f"{folder}/{name}")
        if isinstance(opt, DPSGD):
            opt.generator = torch.Generator().manual_seed(2)
        train(wrapped, opt, range(BEFORE, BEFORE + AFTER), rank, count)
        found = weights(inner)
        if rank == 0:
            torch.save(found, f"{folder}/{name}.pt")


def _read(rank: int, count: int, folder: str) -> None:
    for name, (wrap, make) in OPTIMISERS.items():
        inner = extend(plain_net())
        wrapped = wrap(inner)
        opt = make(inner)
        state = {"model": inner.state_dict()}
        checkpoint.load(state, checkpoint_id=f"{folder}/{name}")
        inner.load_state_dict(state["model"])
        for group in opt.param_groups:
            group["lr"] = 123.0
        load_checkpoint(opt, f"{folder}/{name}")
        assert opt.param_groups[0]["lr"] != 123.0
        if isinstance(opt, DPSGD):
            opt.generator = torch.Generator().manual_seed(2)
        held = [state for state in opt.state.values() if "eigenvectors" in state]
        if name == "KFAC, least memory" and count > 1:
            assert len(held) < len(opt.state)
        train(wrapped, opt, range(BEFORE, BEFORE + AFTER), rank, count)
        check_same(weights(inner), torch.load(f"{folder}/{name}.pt"), (name, count))


@pytest.mark.slow
def test_training_goes_on_elsewhere(tmp_path: Path) -> None:
    """What two processes have written, one and four read: the weights become the same."""
    (tmp_path / "write").mkdir()
    in_processes(partial(_write, folder=str(tmp_path)), tmp_path / "write", 2)
    for count in (1, 2, 4):
        (tmp_path / f"{count}").mkdir()
        in_processes(partial(_read, folder=str(tmp_path)), tmp_path / f"{count}", count)


def trained(optimizer: Any, model: nn.Module, data: tuple[Tensor, Tensor]) -> list[Tensor]:
    for _ in range(3):
        optimizer.zero_grad()
        with backpack(*getattr(optimizer, "extensions", ())):
            extend(nn.CrossEntropyLoss())(model(data[0]), data[1]).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: KFAC(params, extension=KFLR(), ekfac=False),
        lambda params: KFAC(params, extension=KFLR(), ekfac=True, inverse_every=3),
        lambda params: KFAC(params, extension=KFLR(joint_bias=True)),
        lambda params: KFAC(params, extension=KFLR(joint_bias=True), ekfac=True, inverse_every=3),
        lambda params: KFAC(params, extension=KFLR(max_factor_size=3), curvature_every=2),
        lambda params: DiagGGN(params, extension=DiagGGNExact(), curvature_every=2),
        adam_in_private,
        soap,
        torch.optim.Adam,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1),
    ],
    ids=[
        "KFAC",
        "EKFAC",
        "KFAC, joint",
        "EKFAC, joint",
        "KFAC, diagonals",
        "DiagGGN",
        "DPOptimizer",
        "SOAP",
        "Adam",
        "momentum",
        "SGD",
    ],
)
def test_one_process(make: Any, tmp_path: Path) -> None:
    """Without any group."""
    data = torch.randn(6, 2, 5).double(), torch.randint(3, (6,))
    model, other = extend(plain_net().double()), extend(plain_net().double())
    optimizer = make(model.named_parameters())
    trained(optimizer, model, data)
    checkpoint.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    other.load_state_dict(model.state_dict())
    restored = make(other.named_parameters())
    load_checkpoint(restored, tmp_path)
    check_same(trained(restored, other, data), trained(optimizer, model, data), make)
    assert restored.param_groups[0]["param_names"] == optimizer.param_groups[0]["param_names"]


def test_other_states_are_errors(tmp_path: Path) -> None:
    data = torch.randn(6, 2, 5), torch.randint(3, (6,))
    model = extend(plain_net())
    optimizer = KFAC(model.parameters())
    trained(optimizer, model, data)
    checkpoint.save({"state": optimizer.state_dict()}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="no state 'optimizer', but state"):
        load_checkpoint(optimizer, tmp_path)
    with pytest.raises(ValueError, match="Give a checkpoint_id"):
        load_checkpoint(optimizer)
    with pytest.raises(ValueError, match="the optimiser has 2 parameters"):
        load_checkpoint(KFAC(model[0].parameters()), tmp_path, "state")
    turned = KFAC(list(model.parameters())[::-1])
    with pytest.raises(ValueError, match=r"state\.0\.gradient of shape .* the same order"):
        load_checkpoint(turned, tmp_path, "state")
