"""Logged quantities on several processes, against one process that has all samples."""

from __future__ import annotations

import csv
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from test_several_processes import batch, in_processes, plain_net
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from backpack import backpack, extend
from backpack import extensions as e
from backpack.monitor import CSVWriter, Monitor, gradient_snr

METRICS = [
    "grad.norm",
    "grad.q10",
    "variance.mean",
    "batch_l2.q95",
    "batch_l2.sum",
    "diag_ggn_exact_batch.max",
    "sqrt_ggn_exact.norm",
    "grad_batch",
    gradient_snr,
]
WRAPPED: dict[str, Any] = {
    "DistributedDataParallel": DistributedDataParallel,
    "fully_shard": lambda net: fully_shard(net, mesh=init_device_mesh("cpu", (_count(),))),
}


def _count() -> int:
    return distributed.get_world_size()


def exts() -> list[Any]:
    second = e.BatchDiagGGNExact(), e.SqrtGGNExact()
    return [e.Variance(), e.BatchL2Grad(), e.BatchGrad(), *second]


def backward(net: nn.Module, data: tuple[Tensor, Tensor], *extensions: Any) -> Tensor:
    X, y = data
    net.zero_grad()
    loss = extend(nn.CrossEntropyLoss())(net(X), y)
    with backpack(*extensions):
        loss.backward()
    return loss


def read(path: Path) -> dict[tuple[str, str], float]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(row["step"], row["tag"]): float(row["value"]) for row in rows}
    assert len(found) == len(rows)
    return found


def same_on_all(found: dict[str, Tensor]) -> bool:
    """Whether all processes have the same numbers, to the last bit."""
    own = torch.cat([value.double().reshape(-1) for value in found.values()])
    each = [torch.empty_like(own) for _ in range(_count())]
    distributed.all_gather(each, own)
    return all(torch.equal(each[0], other) for other in each)


def _values(rank: int, count: int) -> None:
    """Those of one process; written once, by the first; the writers of others touch no file."""
    sizes = [3] * count
    folder = Path(shared_folder())
    extended = extend(plain_net())
    with Monitor(extended, METRICS, CSVWriter(folder / f"{rank}"), process_group=None) as monitor:
        for seed in range(2):
            loss = backward(extended, batch(sizes, seed=seed), *exts())
            assert monitor.step(loss=loss)["loss"] == loss
    expected = read(folder / f"{rank}")
    for name, wrap in WRAPPED.items():
        net = wrap(extend(plain_net()))
        path = folder / f"{name}.csv"
        with Monitor(net, METRICS, CSVWriter(path)) as monitor:
            for seed in range(2):
                loss = backward(net, batch(sizes, rank, seed), *exts())
                assert same_on_all(monitor.step(loss=loss, lr=0.1))
        if rank == 0:
            found = read(path)
            assert found.pop(("0", "lr")) == found.pop(("1", "lr")) == pytest.approx(0.1)
            assert found == pytest.approx(expected, rel=1e-9), name
        distributed.barrier()


def shared_folder() -> str:
    """A folder that all processes know: where their store is."""
    store: Any = distributed.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(Path(store.path).parent)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values(tmp_path: Path, count: int) -> None:
    in_processes(_values, tmp_path, count)


class Kept:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.tags: list[str] = []

    def add_scalar(self, tag: str, value: float, step: int, /) -> None:
        self.tags.append(tag)

    def add_histogram(self, tag: str, values: Tensor, step: int, /) -> None:
        self.tags.append(tag)

    def close(self) -> None:
        self.tags.append("closed")


def _uneven(rank: int, count: int) -> None:
    """The ratio is that of the gradients whose mean is the average over processes."""
    sizes = [2, 4]
    net = DistributedDataParallel(extend(plain_net()))
    loss = backward(net, batch(sizes, rank), e.BatchL2Grad())
    writer = Kept()
    with Monitor(net, [gradient_snr, "batch_l2.sum"], writer if rank == 0 else None) as monitor:
        found = monitor.step(loss=loss)
    assert ("loss" in writer.tags and writer.tags[-1] == "closed") == (rank == 0)
    alone = extend(plain_net())
    rows, losses = [], []
    for part in range(count):
        losses.append(backward(alone, batch(sizes, part), e.BatchGrad()))
        own = [p.grad_batch.flatten(1) for p in alone.parameters()]  # type: ignore[attr-defined]
        rows.append(torch.cat(own, 1) / count)
    each = torch.cat(rows)  # their sum is the gradient
    assert found["batch_l2.sum"].item() == pytest.approx(each.square().sum().item(), rel=1e-12)
    each = each * len(each)
    ratio = each.mean(0).square().sum() / (each - each.mean(0)).square().sum(1).mean()
    assert found["gradient_snr"].item() == pytest.approx(ratio.item(), rel=1e-10)
    mean = float(sum(losses)) / count
    assert found["loss"].item() == pytest.approx(mean, rel=1e-14)


def test_batches_of_other_sizes(tmp_path: Path) -> None:
    in_processes(_uneven, tmp_path)


def _mistakes(rank: int, count: int) -> None:
    own = batch([3, 3], rank)
    plain = extend(plain_net())
    with pytest.raises(NotImplementedError, match=r"A Monitor .*process_group="):
        Monitor(plain, ["grad.norm"], Kept())
    if rank == 0:
        with pytest.raises(ValueError, match="its writer is None"):
            Monitor(plain, ["grad.norm"], None, process_group=distributed.group.WORLD)
    alone = Monitor(plain, ["batch_l2.sum"], Kept(), process_group=None)
    backward(plain, own, e.BatchL2Grad())
    norms = torch.stack([p.batch_l2 for p in plain.parameters()])  # type: ignore[attr-defined]
    assert alone.step()["batch_l2.sum"].item() == pytest.approx(norms.sum().item())

    net = DistributedDataParallel(plain)

    def monitor(*metrics: Any) -> Monitor:
        return Monitor(net, metrics, Kept())

    def length(params: Any) -> Tensor:
        return sum(len(p.grad_batch) + rank for p in params)

    for context, metric in ((net.no_sync(), "grad.norm"), (nullcontext(), length)):
        with context:
            backward(net, own, e.BatchGrad())
        with pytest.raises(RuntimeError, match=r"(grad\.norm|length)/0\.weight is another number"):
            monitor(metric).step()

    def turned(params: Any) -> Tensor:
        return params[0].grad.flatten().roll(rank)

    def longer(params: Any) -> Tensor:
        return torch.cat([params[0].grad.flatten(), torch.zeros(rank)])

    backward(net, own)
    with pytest.raises(RuntimeError, match=r"turned/0\.weight has other values on each process"):
        monitor(turned).step()  # of the same length
    with pytest.raises(RuntimeError, match=r"longer/0\.weight \["):
        monitor(longer).step()
    with pytest.raises(ValueError, match="given grad"):
        monitor("grad").step(grad=1.0)
    backward(net, own, *[e.Variance()] * 1)
    if rank == 1:
        plain[0].weight.variance = None  # as if it was not there
    expected = AttributeError if rank == 1 else RuntimeError
    with pytest.raises(expected, match="variance"):
        monitor("variance.mean").step()
    with pytest.raises(RuntimeError, match=r"step 0 of a Monitor with grad\.(norm|mean)"):
        monitor(("grad.norm", "grad.mean")[rank]).step()
    backward(net, own, e.BatchL2Grad())
    for p in net.parameters() if rank == 1 else ():
        p.grad.add_(1)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="was changed since"):
        monitor(gradient_snr).step()
    backward(net, own)
    found = monitor("grad.norm").step()  # the group still works
    assert same_on_all(found)


def test_mistakes_are_errors_on_all(tmp_path: Path) -> None:
    """At once: nobody waits for the timeout of the group."""
    in_processes(_mistakes, tmp_path, within=100)


def _gram(rank: int, count: int) -> None:
    """Inner products of the samples of one process are refused, as are helpers of these."""
    net = DistributedDataParallel(extend(plain_net()))
    for ext in (e.GradGram(), e.GGNGram()):
        with pytest.raises(NotImplementedError, match=r"process_group=None"):
            backward(net, batch([3, 3], rank), ext)
        assert not any(hasattr(p, ext.savefield) for p in net.parameters())


def test_gram_matrices_are_refused(tmp_path: Path) -> None:
    in_processes(_gram, tmp_path)
