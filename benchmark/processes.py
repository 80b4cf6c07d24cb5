"""What processes send each other for a quantity: ``python -m benchmark.processes``.

Real processes over gloo on this machine: bytes and collective operations of a step, the share of
its time that they take, and what follows for many devices from a model of the network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from backpack import backpack, extend, extensions
from backpack.core.engine.combining import Combining
from backpack.distributed import reduced_in, sums
from benchmark.measure import circumstances
from benchmark.report import table

RESULTS = Path(__file__).resolve().parent / "results"
NONE = "p.grad alone"
QUANTITIES: dict[str, Callable[[], Sequence[Any]]] = {
    NONE: lambda: (),
    "BatchGrad": lambda: (extensions.BatchGrad(),),
    "BatchL2Grad": lambda: (extensions.BatchL2Grad(),),
    "SumGradSquared": lambda: (extensions.SumGradSquared(),),
    "Variance": lambda: (extensions.Variance(),),
    "DiagGGNMC": lambda: (extensions.DiagGGNMC(),),
    "KFAC": lambda: (extensions.KFAC(),),
    "Variance, DiagGGNMC, KFAC": lambda: (
        extensions.Variance(),
        extensions.DiagGGNMC(),
        extensions.KFAC(),
    ),
}
WIDTHS = (256, 512, 512, 10)
WEAK, STRONG = "weak", "strong"
AS_THEY_ARE, BFLOAT16 = "float32", "bfloat16"


def network() -> nn.Module:
    """Return a multilayer perceptron."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width, following in pairwise(WIDTHS):
        layers += [nn.Linear(width, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@dataclass
class Figure:
    """Steps with a quantity on several processes.

    Attributes:
        quantity: Its name.
        processes: Number W of processes.
        precision: In which sums are sent.
        scaling: ``"weak"`` if each has as many samples as a single one, ``"strong"`` if these are
            divided among them.
        seconds: Of each round, a step.
        reducing: Of each round, what quantities add to the communication: waiting included.
        bytes: What one process gives to collective operations in a step, without ``p.grad``; for
            the two halves of an ``all_reduce`` in low precision, half of what each moves.
        collectives: Number of these operations.
        gradient_bytes: The same for ``p.grad``.
    """

    quantity: str
    processes: int
    scaling: str
    precision: str = AS_THEY_ARE
    seconds: list[float] = field(default_factory=list)
    reducing: list[float] = field(default_factory=list)
    bytes: int = 0
    collectives: int = 0
    gradient_bytes: int = 0

    @property
    def share(self) -> float:
        """The share of a step that goes into communication of the quantity: the median."""
        pairs = zip(self.reducing, self.seconds, strict=True)
        return statistics.median(part / whole for part, whole in pairs)


@dataclass(frozen=True)
class Network:
    """A model of many devices: a ring for collective operations, a store for agreement.

    Attributes:
        bandwidth: Bytes that a device sends in a second.
        latency: Seconds of one message.
        request: Seconds that the store of the group takes for one request; it serves one at a time.
    """

    bandwidth: float = 25e9
    latency: float = 5e-6
    request: float = 20e-6

    # add() twice, wait() and get(), see backpack/distributed/agreement.py
    REQUESTS = 4

    def all_reduce(self, count: int, size: float, collectives: int = 1) -> float:
        """Return the seconds of all-reduce operations on a ring of W devices.

        Each sends ``2 (W - 1) / W`` times the bytes, in ``2 (W - 1)`` messages for each operation.
        """
        sent = 2 * (count - 1) / count * size
        return sent / self.bandwidth + 2 * (count - 1) * self.latency * collectives

    def quantity(self, count: int, one: Figure) -> float:
        """Return the seconds that a quantity adds: agreement, and collective operations."""
        if not one.collectives:
            return 0.0
        agreement = self.REQUESTS * count * self.request
        return agreement + self.all_reduce(count, one.bytes, one.collectives)


# ------------------------------------------------------------------ measuring


class Counter:
    """Counts what is given to collective operations, and the time of reductions."""

    def __init__(self) -> None:
        self.bytes = self.collectives = 0
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside."""
        reduce = Combining.reduce

        def counted(owner: Any, name: str, share: int) -> Any:
            function = getattr(owner, name)

            def counting(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
                self.bytes += tensor.nbytes // share
                self.collectives += 1
                return function(tensor, *args, **options)

            return patch.object(owner, name, counting)

        def timed(*args: Any) -> None:
            start = time.perf_counter()
            reduce(*args)
            self.seconds += time.perf_counter() - start

        with (
            counted(distributed, "all_reduce", 1),
            counted(distributed, "all_to_all_single", 2),  # moves half of what an all_reduce does
            counted(sums, "ALL_GATHER", 2),
            patch.object(Combining, "reduce", timed),
        ):
            yield


def _measure(rank: int, count: int, folder: str, args: argparse.Namespace) -> None:
    """Measure all quantities on one of several processes; the first one writes the figures."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store-{count}", count)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    try:
        model = extend(network())
        wrapped = DistributedDataParallel(model)
        lossfunc = extend(nn.CrossEntropyLoss())
        found = [
            _steps(wrapped, lossfunc, Figure(name, count, scaling, precision), args)
            for scaling, precision in (
                (WEAK, AS_THEY_ARE),
                (STRONG, AS_THEY_ARE),
                (WEAK, BFLOAT16),
            )
            for name in args.quantities
        ]
        if rank == 0:
            text = json.dumps([asdict(one) for one in found])
            Path(folder, f"{count}.json").write_text(text)
    finally:
        distributed.destroy_process_group()


def _steps(
    wrapped: nn.Module, lossfunc: nn.Module, figure: Figure, args: argparse.Namespace
) -> Figure:
    """Measure one quantity; the first step is to warm up."""
    count = figure.processes if figure.scaling == STRONG else 1
    x = torch.rand(max(1, args.samples // count), WIDTHS[0])
    y = torch.randint(WIDTHS[-1], (len(x),))
    for _ in range(args.rounds + 1):
        wrapped.zero_grad()
        counter = Counter()
        distributed.barrier()
        start = time.perf_counter()
        low = figure.precision == BFLOAT16
        sending = reduced_in(torch.bfloat16) if low else nullcontext()
        with counter.counting(), sending, backpack(*QUANTITIES[figure.quantity]()):
            lossfunc(wrapped(x), y).backward()
        figure.seconds.append(time.perf_counter() - start)
        figure.reducing.append(counter.seconds)
    figure.seconds, figure.reducing = figure.seconds[1:], figure.reducing[1:]
    figure.bytes, figure.collectives = counter.bytes, counter.collectives
    gradients = [p.grad for p in wrapped.parameters() if p.grad is not None]
    figure.gradient_bytes = sum(g.numel() * g.element_size() for g in gradients)
    return figure


def run(args: argparse.Namespace) -> list[Figure]:
    """Measure on each number of processes."""
    found = []
    for count in args.processes:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_measure, (count, folder, args), nprocs=count)
            contents = json.loads(Path(folder, f"{count}.json").read_text())
        found += [Figure(**one) for one in contents]
    return found


# ------------------------------------------------------------------ the report


def sent(figures: Iterable[Figure]) -> str:
    """Return the table of what is sent."""
    most = max(one.processes for one in figures)
    own = [one for one in figures if one.processes == most and one.scaling == WEAK]
    low = {one.quantity: one for one in own if one.precision == BFLOAT16}
    lines = [
        [
            one.quantity,
            str(one.bytes),
            f"{one.bytes / one.gradient_bytes:.3f}",
            str(one.collectives),
            str(low[one.quantity].bytes),
            f"{low[one.quantity].bytes / one.gradient_bytes:.3f}",
            str(low[one.quantity].collectives),
        ]
        for one in own
        if one.precision == AS_THEY_ARE
    ]
    head = ["quantity", "bytes beyond p.grad's", "÷ p.grad's", "operations"]
    return table([*head, "bytes in bfloat16", "÷ p.grad's", "operations"], lines)


def scaling(figures: Sequence[Figure], kind: str) -> str:
    """Return the table of times, and of the share of communication."""
    figures = [one for one in figures if one.precision == AS_THEY_ARE]
    counts = sorted({one.processes for one in figures})
    lines = []
    for name in dict.fromkeys(one.quantity for one in figures):
        own = {f.processes: f for f in figures if f.quantity == name and f.scaling == kind}
        cells = [
            f"{1e3 * statistics.median(own[n].seconds):.1f} ms, {own[n].share:.0%}" for n in counts
        ]
        lines.append([name, *cells])
    return table(["quantity", *(f"W = {n}" for n in counts)], lines)


def extrapolated(figures: Sequence[Figure], network: Network, devices: Sequence[int]) -> str:
    """Return the table of seconds on many devices that follow from the model."""
    most = max(one.processes for one in figures)
    own = [
        one
        for one in figures
        if one.processes == most and one.scaling == WEAK and one.precision == AS_THEY_ARE
    ]
    gradient = [network.all_reduce(n, own[0].gradient_bytes) for n in devices]
    lines = [["p.grad itself", *(f"{1e3 * seconds:.2f}" for seconds in gradient)]]
    for one in own:
        if one.quantity != NONE:
            added = (network.quantity(n, one) for n in devices)
            lines.append([one.quantity, *(f"{1e3 * seconds:.2f}" for seconds in added)])
    return table(["added ms", *map(str, devices)], lines)


REPORT = """\
# Several processes

Made by `python -m benchmark.processes`: {environment}.

A perceptron {widths} in `DistributedDataParallel` over gloo, processes of one thread on one
machine.

## What is sent

What one process gives to collective operations in a step, on {most} processes. `p.grad` has
{gradient} bytes. In `bfloat16`, inside of `backpack.distributed.reduced_in`, an `all_reduce` is an
`all_to_all` and an `all_gather`, which move half of what it does each: that half is counted.

{sent}
## Share of communication

Time of a step, and which share of it the reduction of the quantity takes: to collect what is sent
(triangles of Kronecker factors), to wait for other processes, and to send; that of `p.grad` is not
in it. With more processes than cores, times say nothing about speed-up.

{samples} samples on each process (weak scaling):

{weak}
{samples} samples together (strong scaling):

{strong}
## On many devices

Milliseconds that communication would add, from the bytes above and a model of the network, not
measured. The model: `all_reduce` on a ring, on which a device sends 2 (W - 1) / W times the bytes,
at {bandwidth} GB/s, in 2 (W - 1) messages of {latency} µs; {requests} requests of each device to
the store of the group, which serves them one after the other in {request} µs each. Nothing overlaps
with computing, and all devices come at the same time.

{extrapolated}"""


def write(figures: Sequence[Figure], args: argparse.Namespace) -> None:
    """Write the figures, and a report next to them."""
    network = Network(args.bandwidth * 1e9, args.latency * 1e-6, args.request * 1e-6)
    facts = circumstances(rounds=args.rounds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    contents = {"environment": facts, "figures": [asdict(one) for one in figures]}
    args.out.write_text(json.dumps(contents, indent=1) + "\n")
    text = REPORT.format(
        environment=", ".join(f"{name} {value}" for name, value in facts.items()),
        widths="-".join(map(str, WIDTHS)),
        most=max(one.processes for one in figures),
        gradient=figures[0].gradient_bytes,
        sent=sent(figures),
        samples=args.samples,
        weak=scaling(figures, WEAK),
        strong=scaling(figures, STRONG),
        requests=Network.REQUESTS,
        bandwidth=args.bandwidth,
        latency=args.latency,
        request=args.request,
        extrapolated=extrapolated(figures, network, args.devices),
    )
    args.out.with_suffix(".md").write_text(text)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.processes", description=__doc__)
    add = parser.add_argument
    add("--processes", nargs="+", type=int, default=[1, 2, 4], metavar="W")
    add("--quantities", nargs="+", choices=[*QUANTITIES], default=[*QUANTITIES], metavar="NAME")
    add("--samples", type=int, default=128)
    add("--rounds", type=int, default=7)
    add("--devices", nargs="+", type=int, default=[8, 64, 256, 1024], metavar="W")
    add("--bandwidth", type=float, default=25.0, help="of the model, in GB/s")
    add("--latency", type=float, default=5.0, help="of the model, in microseconds")
    add("--request", type=float, default=20.0, help="to the store, of the model, in microseconds")
    add("--out", type=Path, default=RESULTS / "processes.json", help="the JSON file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write."""
    args = parse(arguments)
    figures = run(args)
    write(figures, args)
    print(args.out.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
