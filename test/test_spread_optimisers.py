"""KFAC whose decompositions are spread over processes, against one process with all samples."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from test_several_processes import Net, batch, check_same, in_processes
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from backpack import backpack, extend, optim
from backpack.distributed.shards import whole
from backpack.extensions import KFLR
from backpack.optim import KFAC

STEPS = 5


def net() -> nn.Module:
    torch.manual_seed(0)
    return extend(Net(), use_converter="record")


def plain() -> nn.Module:
    """A network whose weights can be joined with their biases."""
    torch.manual_seed(0)
    layers = nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    return extend(nn.Sequential(*layers))


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))


def optimiser(model: nn.Module, **options: Any) -> KFAC:
    given = {"lr": 0.5, "weight_decay": 0.1, "inverse_every": 2, "extension": KFLR()}
    return KFAC(model.parameters(), **{**given, **options})


def backward(model: nn.Module, opt: Any, data: tuple[Tensor, Tensor]) -> None:
    X, y = data
    opt.zero_grad()
    with backpack(*opt.extensions):
        extend(nn.CrossEntropyLoss())(model(X), y).backward()


def weights(model: nn.Module) -> list[Tensor]:
    return [whole(p.detach()).clone() for p in model.parameters()]


def one_process(sizes: list[int], make: Callable[[], nn.Module], **options: Any) -> list[Tensor]:
    """The weights after some steps with all samples."""
    model = make()
    opt = optimiser(model, **options)
    for seed in range(STEPS):
        backward(model, opt, batch(sizes, seed=seed))
        with pytest.MonkeyPatch.context() as patch:  # as if there was one
            patch.setattr(distributed, "is_initialized", lambda: False)
            opt.step()
    return weights(model)


def check_equal_on_all(found: list[Tensor]) -> None:
    own = torch.cat([value.flatten() for value in found])
    of_first = own.clone()
    distributed.broadcast(of_first, 0)
    assert torch.equal(own, of_first)


def compare(
    wrap: Callable[[nn.Module], nn.Module],
    fraction: float,
    rank: int,
    count: int,
    make: Callable[[], nn.Module] = net,
    **options: Any,
) -> KFAC:
    """Train spread over all processes; return the optimiser."""
    sizes = [2] * count
    model = wrap(make())
    opt = optimiser(
        model, process_group=distributed.group.WORLD, worker_fraction=fraction, **options
    )
    for seed in range(STEPS):
        backward(model, opt, batch(sizes, rank, seed))
        opt.step()
    check_same(weights(model), one_process(sizes, make, **options), (wrap, fraction, options))
    check_equal_on_all(weights(model))
    return opt


def _steps(rank: int, count: int) -> None:
    """Those of one process; eigenvectors are where the fraction says."""
    fractions = [k / count for k in range(1, count + 1) if count % k == 0]
    for fraction in fractions:
        opt = compare(DistributedDataParallel, fraction, rank, count)
        holds = torch.tensor([float("eigenvectors" in state) for state in opt.state.values()])
        distributed.all_reduce(holds)
        assert (holds == fraction * count).all()
    compare(DistributedDataParallel, 1 / count, rank, count, factored=False, curvature_every=2)
    compare(DistributedDataParallel, 1.0, rank, count, extension=KFLR(max_factor_size=4))
    for wrap in (DistributedDataParallel, sharded):
        compare(wrap, 1 / count, rank, count, plain, extension=KFLR(joint_bias=True))
    for fraction in (1 / count, 1.0):
        compare(sharded, fraction, rank, count)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps(tmp_path: Path, count: int) -> None:
    in_processes(_steps, tmp_path, count)


def _work(rank: int, count: int) -> None:
    """Each factor is decomposed once, and no process has all the work."""
    model = DistributedDataParallel(net())
    done: list[float] = []
    eigh = torch.linalg.eigh

    def counted(matrix: Tensor) -> Any:
        done.append(float(len(matrix)) ** 3)
        return eigh(matrix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", counted)
        opt = optimiser(model, process_group=distributed.group.WORLD, kl_clip=None)
        backward(model, opt, batch([2] * count, rank))
        opt.step()
    total = torch.tensor([float(len(done)), sum(done)])
    distributed.all_reduce(total)
    curvatures = [factor for state in opt.state.values() for factor in state["curvature"]]
    assert total[0] == len(curvatures)
    assert total[1] == sum(len(factor) ** 3 for factor in curvatures)
    assert 0 < len(done) < len(curvatures)
    largest = max(sum(len(f) ** 3 for f in s["curvature"]) for s in opt.state.values())
    assert sum(done) <= total[1] / count + largest


def test_each_factor_is_decomposed_once(tmp_path: Path) -> None:
    in_processes(_work, tmp_path)


def _copies(rank: int, count: int) -> None:
    """A copy of model and optimiser goes on in the same way."""
    model = net()
    opt = optimiser(model, process_group=distributed.group.WORLD, worker_fraction=0.5)
    data = batch([2, 2])

    def step(model: nn.Module, opt: KFAC) -> None:
        X, y = data
        opt.zero_grad()
        with backpack(*opt.extensions, process_group=distributed.group.WORLD):
            extend(nn.CrossEntropyLoss())(model(X), y).backward()
        opt.step()

    for _ in range(3):
        step(model, opt)
    other, opt_of_other = deepcopy((model, opt))
    for _ in range(3):
        step(model, opt)
        step(other, opt_of_other)
    check_same(weights(other), weights(model), "copy")


def _pickled(rank: int, count: int) -> None:
    """Not with a group, which is one of this program; copies have the same one."""
    world, sums = distributed.group.WORLD, {"max_grad_norm": 1.0, "noise_multiplier": 0.0}
    sizes: Any = {**sums, "expected_batch_size": 4, "loss_reduction": "sum", "process_group": world}
    X, y = batch([2, 2], rank)
    for make in (
        lambda params: optim.KFAC(params, extension=KFLR(), process_group=world),
        lambda params: optim.DPSGD(params, lr=0.1, **sizes),
        lambda params: optim.DPOptimizer(torch.optim.Adam(params), **sizes),
    ):
        model = plain()
        opt: Any = make(list(model.parameters()))
        for dump in (pickle.dumps, lambda what: torch.save(what, BytesIO())):
            with pytest.raises(
                TypeError, match=r"process_group cannot .* state_dict\(\), and read"
            ):
                dump(opt)
        pairs = [(model, opt), deepcopy((model, opt))]
        assert pickle.loads(pickle.dumps(opt.state_dict()))["param_groups"]
        for net_of, its in pairs:
            its.zero_grad()
            context = getattr(its, "averaged_over", "module")
            with backpack(*its.extensions, process_group=world if context else None):
                extend(nn.CrossEntropyLoss(reduction="sum"))(net_of(X), y).backward()
            for p in net_of.parameters() if context else ():
                distributed.all_reduce(p.grad)
            its.step()
        check_same(weights(pairs[1][0]), weights(model), make)
        check_equal_on_all(weights(model))


def _made_again(rank: int, count: int) -> None:
    """Optimisers that are made again, as for each fold of the data, leave no groups behind."""
    known = distributed.distributed_c10d._world.pg_map
    sizes = []
    for _ in range(3):
        for fraction in (1.0, 0.5):
            optimiser(plain(), process_group=distributed.group.WORLD, worker_fraction=fraction)
        sizes.append(len(known))
    assert sizes == [sizes[0]] * 3


def _mistakes(rank: int, count: int) -> None:
    """An error of one is one of all, at once; the step can be done again."""
    world = distributed.group.WORLD
    own = batch([2, 2], rank)
    wrapped = DistributedDataParallel(net())
    with pytest.raises(ValueError, match=r"worker_fraction of 2 processes is one of 1/2, 2/2"):
        optimiser(wrapped, process_group=world, worker_fraction=0.3)
    for group in ("module", "all"):
        with pytest.raises(ValueError, match="process_group"):
            optimiser(wrapped, process_group=group)
    with pytest.raises(ValueError, match="ekfac=True"):
        optimiser(wrapped, process_group=world, ekfac=True)
    opt = optimiser(wrapped, process_group=world, worker_fraction=0.5)
    backward(wrapped, opt, own)
    before = weights(wrapped)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch.linalg, "eigh", lambda matrix: 1 / 0)
        with pytest.raises(ZeroDivisionError if rank == 1 else RuntimeError, match="by zero"):
            opt.step()
    assert all(map(torch.equal, before, weights(wrapped)))
    assert not opt.state
    opt.step()
    assert not any(map(torch.equal, before, weights(wrapped)))
    check_equal_on_all(weights(wrapped))
    backward(wrapped, opt, own)
    of_first = [opt.state_dict()]
    distributed.broadcast_object_list(of_first, 0)
    opt.load_state_dict(of_first[0])
    for group in opt.param_groups:
        group["inverse_every"] = 100
    for state in opt.state.values():
        state["step"] = 150
    backward(wrapped, opt, own)
    with pytest.raises(RuntimeError, match=r"no eigenvectors of parameter . of group 0"):
        opt.step()


@pytest.mark.parametrize("program", [_copies, _mistakes, _pickled, _made_again])
def test_copies_and_mistakes(program: Any, tmp_path: Path) -> None:
    in_processes(program, tmp_path, within=100)
