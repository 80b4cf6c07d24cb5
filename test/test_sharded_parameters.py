"""Quantities of parameters that ``fully_shard`` has sharded, against one process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from apart import run
from test_several_processes import (
    OF_SAMPLES,
    PATIENCE,
    SUMMED,
    Branches,
    Checkpointed,
    Fails,
    Moments,
    Unknown,
    WithLoss,
    all_extensions,
    batch,
    check_averaged,
    check_same,
    in_processes,
    leave,
    local_quantities,
    net,
    one_process,
    plain_net,
    quantities,
    rows,
    step,
    sums,
    sums_of_one_process,
)
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import backpack as top
from backpack import backpack, extend
from backpack import extensions as e
from backpack.core.engine.backpropagation import slice_bytes
from backpack.core.record import shards
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from backpack.monitor import Monitor
from backpack.optim import KFAC, DiagGGN

Extensions = Callable[[], Sequence[Any]]


def whole(value: Any) -> Any:
    """What all processes have together."""
    if isinstance(value, list):
        return [whole(v) for v in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def shard(model: nn.Module, **options: Any) -> Any:
    """Every layer with parameters, and the root."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in list(model.children()):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


LIKE_PARAMETERS = {"grad", "sum_grad_squared", "variance", "diag_ggn_exact", "diag_h"}


def found_in(model: nn.Module, names: Any = (*SUMMED, *OF_SAMPLES)) -> dict[str, list[Any]]:
    """The quantities, with shards put together; checks where they are."""
    found = quantities(model, names)
    for name, values in found.items():
        for p, value in zip(model.parameters(), values, strict=True):
            assert isinstance(p, DTensor)
            is_shard = name in LIKE_PARAMETERS
            assert isinstance(value, DTensor) == is_shard, name
            if is_shard:
                assert value.placements == p.placements
                assert value.to_local().shape == p.to_local().shape
    return {name: whole(values) for name, values in found.items()}


def check_quantities(
    found: dict[str, Any], expected: dict[str, Any], rank: int, sizes: list[int], what: Any
) -> None:
    for name, values in found.items():
        there = expected[name]
        if name in OF_SAMPLES:
            _, axis = OF_SAMPLES[name]
            there = [value.split(sizes, axis)[rank] for value in there]
        check_same(values, there, (name, what))


# ------------------------------------------------------------------ every quantity

SHARDED: dict[str, Callable[[nn.Module], Any]] = {
    "layers": shard,
    "root": fully_shard,
    "kept": lambda model: shard(model, reshard_after_forward=False),
    "let go": lambda model: shard(model, reshard_after_forward=True),
}


def _every_quantity(rank: int, count: int) -> None:
    sizes = [3] * count
    X, y = batch(sizes, rank)
    for converter in (False, True, "record"):
        for reduction in ("mean", "sum"):
            expected = one_process(
                net(converter),
                nn.CrossEntropyLoss(reduction=reduction),
                sizes,
                1 if reduction == "mean" else 1 / count,
            )
            for name, fully in SHARDED.items() if reduction == "mean" else [("layers", shard)]:
                model = fully(extend(net(converter), use_converter=converter))
                lossfunc = extend(nn.CrossEntropyLoss(reduction=reduction))
                for _ in range(2):
                    model.zero_grad()
                    with backpack(*all_extensions()):
                        lossfunc(model(X), y).backward()
                    check_quantities(
                        found_in(model), expected, rank, sizes, (converter, reduction, name)
                    )


@pytest.mark.slow
def test_every_quantity(tmp_path: Path) -> None:
    in_processes(_every_quantity, tmp_path)


# ------------------------------------------------------------------ other models


def _other_graph_of_one(rank: int, count: int) -> None:
    sizes = [3] * count
    X, y = batch(sizes, rank)
    lossfunc = extend(nn.CrossEntropyLoss())
    expected = one_process(plain_net(), nn.CrossEntropyLoss(), sizes)
    for where in range(count):
        for exts in (all_extensions(), [e.BatchGrad(), e.BatchL2Grad()]):
            model = shard(extend(plain_net()))
            logged = lossfunc(model(X), y)
            if rank != where:
                del logged  # one keeps losses, as for a report
            with backpack(*exts):
                lossfunc(model(X), y).backward()
            found = found_in(model, [ext.savefield for ext in exts])
            check_quantities(found, expected, rank, sizes, (where, len(exts)))


def test_graph_that_one_process_keeps(tmp_path: Path) -> None:
    in_processes(_other_graph_of_one, tmp_path, within=60)


class Attending(nn.Module):
    """First-order quantities of an attention read its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x).unflatten(0, (-1, 1)).expand(-1, 2, -1)
        return self.last(self.attention(z, z, z, need_weights=False)[0].mean(1))


def _put_off_on_one(rank: int, count: int) -> None:
    sizes = [3] * count
    X, y = rows(sizes, rank)
    lossfunc = extend(nn.CrossEntropyLoss())

    def ready() -> Any:
        model = shard(extend(Attending(), use_converter="record"))
        model.set_requires_gradient_sync(syncs)
        logged = lossfunc(model(X), y) if rank == 0 else (lossfunc(model(X), y), None)[1]
        return model, logged

    alone = extend(Attending(), use_converter="record")
    with backpack(e.BatchGrad(), e.Variance(), process_group=None):
        lossfunc(alone(X), y).backward()
    for exts, options, syncs, factor in (
        ([e.BatchGrad()], {}, True, count),
        ([e.Variance()], {"process_group": None}, True, 1),
        ([e.Variance()], {}, False, 1),
    ):
        model, logged = ready()
        with backpack(*exts, **options):  # type: ignore[arg-type]
            lossfunc(model(X), y).backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            name = exts[0].savefield
            check_same(factor * getattr(p, name), getattr(q, name), (name, options, syncs))
        assert not any(one.is_there for one in shards.KNOWN.values() if one.parameter is p)
        del logged

    model, (X, y) = shard(extend(Recurrent(), use_converter="record")), batch(sizes, rank)
    with backpack(*([e.BatchL2Grad()] if rank == 0 else [])):  # nothing is sent
        lossfunc(model(X), y).backward()


def _differ(rank: int, count: int) -> None:
    sizes = [3] * count
    X, y = rows(sizes, rank)
    lossfunc = extend(nn.CrossEntropyLoss())
    expected = sums_of_one_process(sizes)
    model: Any = fully_shard(extend(Branches(), use_converter="record"))
    with backpack(*sums()):
        lossfunc(model(X, "ab" if rank else "ba"), y).backward()
    for name in ("sum_grad_squared", "diag_ggn_exact", "kflr"):
        found = [whole(getattr(p, name)) for p in model.parameters()]
        check_same(found, expected[name], ("branches in another order", name))

    own = batch(sizes, rank)
    model = shard(extend(plain_net()))
    with pytest.raises(RuntimeError, match=r"process 0: Variance\(subsampling=\[0\]\)"):
        step(model, own, e.Variance(subsampling=[0] if rank == 0 else None))

    models = [shard(extend(plain_net())) for _ in range(2)]  # of the same names
    losses = [lossfunc(one(own[0]), own[1]) for one in models]
    logged = losses[rank]
    del losses
    step(models[0], own, e.Variance())
    del logged

    for options in ({}, {"process_group": None}):
        loss = lossfunc(models[0](own[0]), own[1])
        if rank == 0:  # an error of a local model does not concern the others
            probe = extend(nn.Linear(4, 3))
            with pytest.raises(ValueError), backpack(e.DiagGGNExact(), **options):  # type: ignore[arg-type]
                probe(torch.ones(2, 4)).sum().backward()
        with backpack(e.Variance()):
            loss.backward()
    if rank == 0:
        writer: Any = SimpleNamespace(add_scalar=lambda tag, value, step: None)
        values = Monitor(models[0], ["variance.mean"], writer, process_group=None).step()
        mean = models[0][0].weight.variance.to_local().mean()
        check_same(values["variance.mean/0.weight"], mean, "what the process has")


@pytest.mark.parametrize("program", [_put_off_on_one, _differ])
def test_programs_that_differ_between_processes(program: Any, tmp_path: Path) -> None:
    in_processes(program, tmp_path, within=100)


class Odd(nn.Module):
    """A tied embedding, a table of positions, attention, a parameter that a function reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.positions = nn.Parameter(torch.randn(3, 4))
        self.scale = nn.Parameter(torch.rand(4))
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.positions
        a, _ = self.attention(h, h, h, need_weights=False)
        return self.head(self.norm(h + self.scale * a).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.transpose(1, 2))[0][:, -1])


def words(sizes: list[int], rank: int | None = None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    X, y = torch.randint(7, (sum(sizes), 3)), torch.randint(7, (sum(sizes),))
    return (X, y) if rank is None else (X.split(sizes)[rank], y.split(sizes)[rank])


def blocks(model: Any) -> Any:
    """Norm and attention alone; the root has what is tied, and its own parameters."""
    fully_shard(model.norm)
    fully_shard(model.attention)
    return fully_shard(model)


def first_order() -> Sequence[Any]:
    return e.BatchGrad(), e.BatchL2Grad(), e.Variance()


def second_order() -> Sequence[Any]:
    return e.DiagGGNExact(), e.DiagHessian(), e.KFLR(), e.HMP()


def every() -> Sequence[Any]:
    return (*first_order(), *second_order())


def results(model: nn.Module, exts: Sequence[Any]) -> dict[str, list[Any]]:
    return quantities(model, [ext.savefield for ext in exts])


def compare(
    make: Callable[[], nn.Module],
    data: Callable[..., tuple[Tensor, Tensor]],
    exts: Extensions,
    fully: Callable[[nn.Module], Any],
    converter: Any,
    rank: int,
) -> None:
    """Two steps of a sharded model, against one process with all samples."""
    sizes = [3, 3]
    torch.manual_seed(0)
    alone = extend(make(), use_converter=converter)
    step(alone, data(sizes), *exts(), process_group=None)
    expected = results(alone, exts())
    torch.manual_seed(0)
    model = fully(extend(make(), use_converter=converter))
    for _ in range(2):
        model.zero_grad()
        step(model, data(sizes, rank), *exts())
        found = {name: whole(values) for name, values in results(model, exts()).items()}
        check_quantities(found, expected, rank, sizes, (make, fully, converter))


def _other_models(rank: int, count: int) -> None:
    for fully in (fully_shard, blocks):
        for exts in (first_order, second_order):
            compare(Odd, words, exts, fully, "record", rank)
    compare(Odd, words, every, fully_shard, True, rank)
    compare(Recurrent, batch, every, shard, "record", rank)


@pytest.mark.slow
def test_other_models(tmp_path: Path) -> None:
    in_processes(_other_models, tmp_path)


def _wrapped_after_extend(rank: int, count: int) -> None:
    def fully(model: nn.Module) -> Any:
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
        return shard(model)

    for exts in (first_order, second_order):
        compare(plain_net, batch, exts, fully, False, rank)


def test_extended_layers_in_wrappers_that_are_sharded(tmp_path: Path) -> None:
    """The wrappers of checkpoints are not extended themselves."""
    in_processes(_wrapped_after_extend, tmp_path, within=60)


# ------------------------------------------------------------------ options and ways to use it


def _ways(rank: int, count: int) -> None:
    sizes = [3, 3]
    own = batch(sizes, rank)
    expected = one_process(plain_net(), nn.CrossEntropyLoss(), sizes)
    layers = (0, 3, 5)

    def check(model: nn.Module, what: str) -> None:
        check_quantities(found_in(model), expected, rank, sizes, what)

    for converter in (False, "record"):
        model = extend(shard(plain_net()), use_converter=converter)
        step(model, own, *all_extensions())
        check(model, "extended behind")

    model = shard(extend(plain_net()), offload_policy=CPUOffloadPolicy(pin_memory=False))
    step(model, own, *all_extensions())
    check(model, "offloaded")

    model = shard(extend(plain_net()), shard_placement_fn=lambda p: Shard(min(1, p.dim() - 1)))
    step(model, own, *all_extensions())
    check(model, "other axes")

    with slice_bytes(200):  # a few samples at a time
        model = shard(extend(plain_net()))
        step(model, own, *all_extensions())
        check(model, "slices")

    # what is ignored is on all processes, and its gradient is that of each
    model = extend(plain_net())
    fully_shard(model, mesh=init_device_mesh("cpu", (count,)), ignored_params={model[5].bias})
    step(model, own, e.Variance(), e.BatchGrad(), e.DiagGGNExact())
    check_same(whole(model[0].weight.variance), expected["variance"][0], "beside what is ignored")
    last = model[5].bias
    assert not isinstance(last.variance, DTensor)
    check_same(last.grad_batch.sum(0), last.grad, "ignored")

    for inner in (WithLoss(plain_net(), nn.CrossEntropyLoss()), Checkpointed(use_reentrant=False)):
        model = extend(inner)
        for i in layers:
            fully_shard(model.model[i])
        fully_shard(model)
        if isinstance(inner, WithLoss):
            with backpack(*all_extensions()):
                model(*own).backward()
        else:
            step(model, own, *all_extensions())
        check(model, type(inner).__name__)

    # the sum of gradients is divided by another number
    summed = one_process(plain_net(), nn.CrossEntropyLoss(reduction="sum"), sizes)
    model = shard(extend(plain_net()))
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
    with backpack(*all_extensions()):
        extend(nn.CrossEntropyLoss(reduction="sum"))(model(own[0]), own[1]).backward()
    check_quantities(found_in(model), summed, rank, sizes, "divided")

    # frozen parameters have nothing
    model = extend(plain_net())
    model[3].weight.requires_grad_(False)
    model = shard(model)
    step(model, own, *all_extensions())
    assert not hasattr(model[3].weight, "variance")
    check_same(whole(model[0].weight.diag_h), expected["diag_h"][0], "below a frozen one")


def _precision(rank: int, count: int) -> None:
    sizes = [3, 3]
    X, y = batch(sizes, rank)
    expected = one_process(plain_net(), nn.CrossEntropyLoss(), sizes)
    for lower, dtype, tolerance in (
        (torch.float32, torch.float64, 1e-4),
        (torch.bfloat16, torch.float32, 0.2),
    ):
        policy = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=dtype, output_dtype=dtype)
        model = shard(extend(plain_net().to(dtype)), mp_policy=policy)
        torch.set_default_dtype(dtype)
        step(model, (X.to(dtype), y), *all_extensions())
        found = {name: whole(values) for name, values in quantities(model).items()}
        torch.set_default_dtype(torch.float64)
        for name, values in found.items():
            there = expected[name]
            if name in OF_SAMPLES:
                there = [value.split(sizes, OF_SAMPLES[name][1])[rank] for value in there]
            for value, known in zip(values, there, strict=True):
                if not name.endswith("mp"):  # whose vectors are drawn in the other precision
                    _check_rounded(value, known, dtype, tolerance)


def _check_rounded(value: Any, known: Any, dtype: torch.dtype, tolerance: float) -> None:
    if isinstance(value, list):
        for v, k in zip(value, known, strict=True):
            _check_rounded(v, k, dtype, tolerance)
        return
    assert value.dtype == dtype
    assert (value - known).abs().max() <= tolerance * known.abs().max()


def test_ways_to_shard_a_model(tmp_path: Path) -> None:
    in_processes(_ways, tmp_path)


def test_mixed_precision(tmp_path: Path) -> None:
    in_processes(_precision, tmp_path)


def _choices(rank: int, count: int) -> None:
    sizes = [2, 3]
    own = batch(sizes, rank)
    for converter in (False, True):
        local = local_quantities(net(converter), sizes)
        for limit in (2**20, 200):  # processes have other numbers of slices
            with slice_bytes(limit):
                model = shard(extend(net(converter), use_converter=converter))
                step(model, own, *all_extensions())
                check_averaged(found_in(model), local, rank, sizes, ("uneven", converter, limit))
    local = local_quantities(plain_net(), sizes)
    alone = {name: value for name, value in local[rank].items() if name != "grad"}

    model = shard(extend(plain_net()))
    step(model, own, *all_extensions(), process_group=None)
    found = quantities(model)
    del found["grad"]  # which is averaged
    check_same(found, alone, "process_group=None")

    model.zero_grad()
    model.set_requires_gradient_sync(False)
    step(model, own, *all_extensions())
    names = [name for name in alone if not name.endswith("mp")]
    for name in names:
        check_same([getattr(p, name) for p in model.parameters()], alone[name], "not averaged")
    model.set_requires_gradient_sync(True)

    model = shard(extend(plain_net()))
    step(model, own, *all_extensions(), process_group=distributed.group.WORLD)
    check_averaged(found_in(model), local, rank, sizes, "a group")
    one = [distributed.new_group([i]) for i in range(count)][rank]  # type: ignore[union-attr]
    with pytest.raises(NotImplementedError, match="other processes"):
        step(model, own, e.BatchGrad(), process_group=one)
    distributed.barrier()

    # nothing is sent for what stays with the samples
    model.zero_grad()
    step(model, own, *([e.BatchGrad(), e.BatchL2Grad()] if rank == 0 else []))
    if rank == 0:
        for p, g in zip(model.parameters(), alone["grad_batch"], strict=True):
            check_same(p.grad_batch, g / count, "grad_batch on one process")


def _accumulate(rank: int, count: int) -> None:
    parts = [[2, 1], [1, 2]]

    def exts() -> Sequence[Any]:
        sums = e.Variance(), e.SumGradSquared(), e.DiagGGNExact(), e.KFLR()
        return *sums, e.BatchL2Grad()

    lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
    alone = extend(plain_net())
    data = [batch(sizes, seed=i) for i, sizes in enumerate(parts)]
    X, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    with backpack(*exts(), process_group=None):
        (lossfunc(alone(X), y) / count).backward()
    for always in (True, False):
        model = shard(extend(plain_net()))
        for i, sizes in enumerate(parts):
            model.set_requires_gradient_sync(always or i == len(parts) - 1)
            X, y = batch(sizes, rank, seed=i)
            with backpack(*exts(), accumulate=True):
                lossfunc(model(X), y).backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            for name in ("grad", "variance", "sum_grad_squared", "diag_ggn_exact", "kflr"):
                value = getattr(p, name)
                assert name not in LIKE_PARAMETERS or isinstance(value, DTensor)
                check_same(whole(value), getattr(q, name), (always, name))
            assert len(p.batch_l2) == sum(sizes[rank] for sizes in parts)
    model.set_requires_gradient_sync(False)
    with pytest.raises(NotImplementedError, match="last backward pass"):
        step(model, batch([2, 2], rank), *exts(), accumulate=True)


def test_what_is_averaged(tmp_path: Path) -> None:
    in_processes(_choices, tmp_path)


def test_accumulation(tmp_path: Path) -> None:
    in_processes(_accumulate, tmp_path)


def _replicas(rank: int, count: int) -> None:
    sizes = [1, 3, 2, 4]
    local = local_quantities(net(True), sizes)
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    alone = init_device_mesh("cpu", (4,))
    for mesh, reshards in ((replicas, None), (alone, None), (alone, 2)):
        model = extend(net(True), use_converter=True)
        for layer in (model.conv, model.last):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
        step(model, batch(sizes, rank), *all_extensions())
        check_averaged(found_in(model), local, rank, sizes, mesh.ndim)
        if mesh.ndim == 2:
            for _ in range(2):  # an error of one is told to all
                kind = ArithmeticError if rank == 3 else RuntimeError
                with pytest.raises(kind, match="a rule has failed"):
                    failing = shard_over(mesh, rank == 3)
                    squares = e.SumGradSquared()
                    squares.set_module_extension(Unknown, Fails())
                    step(failing, batch(sizes, rank), squares)
            step(model, batch(sizes, rank), e.Variance())
            model.set_requires_all_reduce(False)
            with pytest.raises(NotImplementedError, match="set_requires_all_reduce"):
                step(model, batch(sizes, rank), e.Variance())


def shard_over(mesh: Any, fails: bool) -> Any:
    model = extend(nn.Sequential(plain_net(), Unknown(fails)))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.slow
def test_four_processes_with_and_without_replicas(tmp_path: Path) -> None:
    in_processes(_replicas, tmp_path, 4)


# ------------------------------------------------------------------ programs around it


class MeanSquare(FirstOrderBackpropExtension):
    """An extension of a user that reduces what is sharded."""

    needs = ("square",)
    shape = ()

    def __init__(self) -> None:
        super().__init__("mean_square")

    def extract(self, products: Any) -> Tensor:
        return products["square"].mean()


class Scaled(nn.Module):
    """A function reads a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(10, 3), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1)) * self.scale


def _programs(rank: int, count: int) -> None:
    sizes = [3, 3]
    own = batch(sizes, rank)
    alone = extend(plain_net())
    step(alone, batch(sizes), MeanSquare(), Moments(), process_group=None)
    model = shard(extend(plain_net()))
    step(model, own, MeanSquare(), Moments())
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        check_same(whole(p.mean_square), q.mean_square, "of a user")
        check_same(whole(p.moments), q.moments, "of a user")

    # hooks see parameters as users do, and calls whose inputs are views of what is let go
    seen: list[Any] = []

    def hook(module: nn.Module) -> None:
        seen.extend((p, p.variance, p.grad_batch) for p in module.parameters(recurse=False))

    exts = e.Variance(), e.BatchGrad(), e.DiagGGNExact()
    for made in (net("record"), Scaled()):
        model = shard(extend(made, use_converter="record"))
        seen.clear()
        step(model, own, *exts, extension_hook=hook)
        ids = {id(p) for p in model.parameters()} - {id(getattr(model, "scale", None))}
        assert {id(p) for p, *_ in seen} == ids
        assert all(p.variance is variance for p, variance, _ in seen)
        assert all(isinstance(variance, DTensor) for _, variance, _ in seen)
    named = dict(model.named_parameters())
    for row in top.summary(model).rows:  # of the part that is here: nobody waits for others
        value: Any = getattr(named[row.parameter], row.quantity)
        value = value.to_local() if isinstance(value, DTensor) else value
        assert (row.shape, row.bytes) == (value.shape, value.nbytes)
        assert row.norm == pytest.approx(value.norm().item())
    assert len(top.quantities(model, "variance")) == len(list(model.parameters()))
    top.clear(model)
    assert not any(hasattr(p, "variance") for p in model.parameters())

    # nothing is left where nobody sees it, and gradients are those without the library
    plain = shard(plain_net())
    nn.CrossEntropyLoss()(plain(own[0]), own[1]).backward()
    model = shard(extend(plain_net()))
    most, parameters = 0, set(map(id, model.parameters()))
    gather = shards.gathered.gather

    def watched(self: Any, wanted: Any) -> None:
        nonlocal most
        gather(self, wanted)
        most = max(most, sum(one.is_there for one in known()))

    def known() -> list[Any]:
        return [s for s in shards.KNOWN.values() if id(s.parameter) in parameters]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.gathered, "gather", watched)
        step(model, own, *all_extensions())
    assert most == 2  # the weight and the bias of one layer
    mine = known()
    assert len(mine) == 6
    assert not any(s.is_there for s in mine)
    assert all(vars(s.whole).keys() == {shards.MARK} for s in mine)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad.to_local())

    # parameters were changed
    step(model, own, e.GGNMP())
    vector = torch.ones_like(alone[0].weight)
    model[0].weight.ggnmp(vector)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    with pytest.raises(RuntimeError, match="was changed"):
        model[0].weight.ggnmp(vector)


def test_programs(tmp_path: Path) -> None:
    in_processes(_programs, tmp_path)


def _optimisers(rank: int, count: int) -> None:
    makers: list[Callable[[Any], Any]] = [
        lambda ps: KFAC(ps, extension=e.KFLR(), curvature_every=2, weight_decay=0.01),
        lambda ps: DiagGGN(ps, extension=e.DiagGGNExact()),
    ]
    for make in makers:
        weights = []
        for several in (True, False):
            model = extend(plain_net())
            model = shard(model) if several else model
            optimizer = make(model.parameters())
            for i in range(3):
                own = batch([2, 2], rank if several else None, seed=i)
                optimizer.zero_grad()
                step(model, own, *optimizer.extensions)
                with pytest.MonkeyPatch.context() as patch:
                    if not several:  # as if there was one
                        patch.setattr(distributed, "is_initialized", lambda: False)
                    optimizer.step()
            weights.append([whole(p.detach()) for p in model.parameters()])
        check_same(*weights, "one process")
    model = shard(extend(plain_net()))
    optimizer = KFAC(model.parameters())
    step(model, batch([2, 2], rank), *optimizer.extensions, process_group=None)
    with pytest.raises(NotImplementedError, match="fully_shard"):
        optimizer.step()


def test_optimisers(tmp_path: Path) -> None:
    in_processes(_optimisers, tmp_path)


@pytest.mark.slow
def test_example_is_fully_sharded() -> None:
    script = Path(__file__).parents[1] / "docs_src" / "examples" / "distributed_training.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    output = run(*launch, script, "--fully-shard", timeout=300)
    assert "weights are sharded                     True" in output
    assert "same weights on all                     True" in output


# ------------------------------------------------------------------ when something is wrong


def _mistakes(rank: int, count: int) -> None:
    own = batch([2, 3], rank)
    model = shard(extend(plain_net()))
    for some, names in (
        ((e.SumGradSquared, e.Variance), r"process 0: SumGradSquared.*process 1: Variance"),
        ((e.DiagGGNExact, e.KFLR), r"process 0: .*process 1: "),
    ):
        with pytest.raises(RuntimeError, match=names):
            step(model, own, some[rank]())
        assert not any(hasattr(p, "variance") for p in model.parameters())
        step(model, own, e.Variance(), e.DiagGGNExact())  # the next step is not disturbed
        top.clear(model)

    model = shard(extend(nn.Sequential(plain_net(), Unknown(fails=rank == 1))))
    start = time.monotonic()
    for second in ((), (e.DiagGGNExact(),)):
        squares = e.SumGradSquared()
        squares.set_module_extension(Unknown, Fails())
        kind = ArithmeticError if rank == 1 else RuntimeError
        with pytest.raises(kind, match="a rule has failed"):
            step(model, own, squares, *second)
        assert not any(hasattr(p, "sum_grad_squared") for p in model.parameters())
    model = shard(extend(plain_net()))
    for ext in (e.Variance(), e.DiagGGNExact()):
        kind = ValueError if rank == 1 else RuntimeError
        with pytest.raises(kind, match="empty batch"):
            step(model, batch([4, 0], rank), ext)
    assert time.monotonic() - start < PATIENCE  # nobody has waited for long
    step(model, own, e.Variance(), e.DiagGGNExact())


def _refused(rank: int, count: int) -> None:
    own = batch([3, 3], rank)
    model = shard(extend(plain_net()))
    for ext in (e.ClippedGrad(1.0), e.GradGram(), e.BatchGrad(factored=True), e.KFRA()):
        with pytest.raises(NotImplementedError, match="process_group=None"):
            step(model, own, ext)
        step(model, own, ext, process_group=None)
    with backpack(e.Variance()):
        loss = extend(nn.CrossEntropyLoss())(model(own[0]), own[1])
        with pytest.raises(NotImplementedError, match="create_graph"):
            loss.backward(create_graph=True)
    with pytest.raises(ValueError, match="before fully_shard"):
        extend(shard(net(True)), use_converter="trace")

    part = plain_net()
    extend(part[0])
    fully_shard(part)
    with pytest.raises(NotImplementedError, match=r"which is not extended.*fully_shard"):
        step(part, own, e.BatchGrad())
    for inside in (True, False):
        old = extend(plain_net()) if inside else plain_net()
        old = FullyShardedDataParallel(old, device_id=torch.device("cpu"), use_orig_params=True)
        with pytest.raises(NotImplementedError, match="are sharded"):
            step(old if inside else extend(old), own, e.BatchGrad())


def _tensor_parallel(rank: int, count: int) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def parallel(model: nn.Module, mesh: Any) -> Any:
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    torch.manual_seed(1)
    own = torch.randn(5, 4), torch.randint(3, (5,))  # the same on all
    alone = extend(make())
    firsts = e.BatchGrad(), e.BatchL2Grad(), e.Variance(), e.SumGradSquared()
    step(alone, own, *firsts, process_group=None)
    mesh = init_device_mesh("cpu", (count,))
    for extends_first in (True, False):
        model = parallel(extend(make()), mesh) if extends_first else extend(parallel(make(), mesh))
        step(model, own, *firsts)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            for name in ("grad", "grad_batch", "batch_l2", "variance", "sum_grad_squared"):
                check_same(whole(getattr(p, name)), getattr(q, name), name)
    seconds = e.DiagGGNExact(), e.DiagGGNMC(), e.KFLR(), e.KFRA(), e.DiagHessian(), e.GGNMP()
    for ext in (*seconds, e.BatchDiagGGNExact(), e.SqrtGGNExact()):
        with pytest.raises(NotImplementedError, match=r"DTensors \(parallelize_module"):
            step(model, own, ext)
        assert not any(hasattr(p, ext.savefield) for p in model.parameters())
    with pytest.raises(NotImplementedError, match=r"DTensors \(parallelize_module"):
        step(model, own, e.Variance(), process_group=distributed.group.WORLD)
    both = init_device_mesh("cpu", (1, count), mesh_dim_names=("data", "layers"))
    model = fully_shard(parallel(extend(make()), both["layers"]), mesh=both["data"])
    for ext in (e.Variance(), e.DiagGGNExact()):
        with pytest.raises(NotImplementedError, match="sharded otherwise"):
            step(model, own, ext)


def test_mistakes_are_errors_on_all_processes(tmp_path: Path) -> None:
    in_processes(_mistakes, tmp_path, within=100)


def test_what_is_refused(tmp_path: Path) -> None:
    in_processes(_refused, tmp_path)


def test_tensor_parallel(tmp_path: Path) -> None:
    in_processes(_tensor_parallel, tmp_path)


def _one_has_no_context(rank: int, count: int) -> None:
    model = shard(extend(plain_net()))
    own = batch([2, 3], rank)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        for _ in range(2):
            step(model, own, *([e.Variance()] if rank == 0 else []))
    assert time.monotonic() - start < 3 * PATIENCE + 5
    leave()


@pytest.mark.slow
def test_nobody_waits_forever(tmp_path: Path) -> None:
    in_processes(_one_has_no_context, tmp_path, within=5 * PATIENCE)


# ------------------------------------------------------------------ what it costs


def _sent(rank: int, count: int) -> None:
    model = shard(extend(plain_net()))
    sent: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        all_reduce = distributed.all_reduce

        def counted(value: Tensor, **options: Any) -> Any:
            sent.append(("all", value.numel()))
            return all_reduce(value, **options)

        scatter = top.distributed.sums.REDUCE_SCATTER

        def scattered(own: Tensor, value: Tensor, **options: Any) -> Any:
            sent.append(("scatter", value.numel()))
            return scatter(own, value, **options)

        patch.setattr(distributed, "all_reduce", counted)
        patch.setattr(top.distributed.sums, "REDUCE_SCATTER", scattered)
        # the layers from the last to the first, with what fills up three rows to four
        padded = [4 * 4 + 4, 4 * 12 + 4, 4 * 2 * 2 + 4]
        for ext, factor in ((e.SumGradSquared(), 1), (e.Variance(), 2), (e.DiagGGNExact(), 1)):
            sent.clear()
            step(model, batch([2, 2], rank), ext)
            assert [n for kind, n in sent if kind == "scatter"] == [factor * n for n in padded]
            assert [n for kind, n in sent if kind == "all"] == [2, 2, 2]  # numbers of samples
        for ext in (e.BatchGrad(), e.BatchL2Grad(), e.GGNMP()):
            sent.clear()
            step(model, batch([2, 2], rank), ext)
            assert not sent
        sent.clear()
        step(model, batch([2, 2], rank), e.KFAC())
        sides = [[(3, 4), (3,)], [(4, 12), (4,)], [(3, 4), (3,)]]
        numbers = [sum(d * (d + 1) // 2 for each in own for d in each) for own in sides]
        assert [n for kind, n in sent if kind == "all"] == [n for own in numbers for n in (own, 4)]


def test_what_is_sent(tmp_path: Path) -> None:
    in_processes(_sent, tmp_path)
