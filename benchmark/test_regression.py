"""Guard against regressions: the time of a step, relative to a plain pass in the same rounds.

It is processor time of one thread, which other processes disturb least, and bounds are far above
what is measured when nothing is wrong. ``make benchmark-guard`` runs it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

from backpack import extend
from backpack.core.derivatives import convnd, derivatives_of
from benchmark.libraries import Backpack
from benchmark.problems import ALL
from benchmark.quantities import NONE, QUANTITIES, SETS

# largest ratio to the plain pass, about twice what is measured
BOUNDS = {
    "mlp": {
        NONE: 2.0,
        "BatchL2Grad": 4.0,
        "SumGradSquared": 5.0,
        "Variance": 8.0,
        "DiagGGNMC": 6.0,
        "KFAC": 10.0,
        "DiagGGNExact": 10.0,
        "KFLR": 20.0,
    },
    "3c3d-n32": {
        NONE: 1.5,
        "BatchGrad": 5.0,
        "BatchL2Grad": 3.0,
        "SumGradSquared": 3.0,
        "Variance": 3.5,
        "DiagGGNMC": 4.0,
        "KFAC": 5.0,
        "DiagGGNExact": 16.0,
        SETS[0]: 5.0,
        SETS[2]: 8.0,
    },
}
CELLS = [(problem, quantity) for problem, bounds in BOUNDS.items() for quantity in bounds]


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[Backpack]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Backpack(ALL[request.param], "cpu")
    torch.set_num_threads(threads)


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize(("library", "quantity"), CELLS, indirect=["library"])
def test_ratio(benchmark: BenchmarkFixture, library: Backpack, quantity: str) -> None:
    step = library.prepare(QUANTITIES[quantity])
    plain: list[float] = []

    def before() -> None:
        library.release()
        start = time.process_time()
        library.plain()
        plain.append(time.process_time() - start)
        library.release()

    benchmark.pedantic(step, setup=before, rounds=5, warmup_rounds=1)
    library.release()
    # the fastest: disturbances only ever add time
    ratio = benchmark.stats.stats.min / min(plain)
    benchmark.extra_info["ratio"] = ratio
    assert ratio <= BOUNDS[library.problem.name][quantity]


# samples, input and output channels, width of the image, kernel, padding
CONVOLUTIONS = [
    (64, 3, 64, 32, 5, 0),
    (64, 64, 96, 14, 3, 0),
    (64, 96, 128, 8, 3, 0),
    (8, 96, 96, 32, 3, 1),
    (8, 192, 192, 16, 3, 1),
    (16, 256, 256, 8, 3, 1),
    (8, 64, 64, 56, 1, 0),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_cost_model(case: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cost model of convolutions chooses is not much slower than the alternative."""
    batch, channels, filters, size, kernel, padding = case
    module = extend(nn.Conv2d(channels, filters, kernel, padding=padding))
    out = module(torch.rand(batch, channels, size, size))
    rule = derivatives_of(module)
    columns = torch.rand_like(out)[None]
    model = convnd.patches_are_cheaper
    choices = []

    def seconds(choose: object) -> float:
        monkeypatch.setattr(convnd, "patches_are_cheaper", choose)
        times = []
        with torch.no_grad():
            for _ in range(4):
                start = time.process_time()
                rule.param_mjp_reduced("weight", module, None, None, columns, ["square"])
                times.append(time.process_time() - start)
        return min(times)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    by_patches, by_convolution = seconds(lambda *_: True), seconds(lambda *_: False)
    seconds(lambda *args: choices.append(model(*args)) or choices[-1])
    torch.set_num_threads(threads)
    chosen = by_patches if choices[0] else by_convolution
    assert chosen <= 1.6 * min(by_patches, by_convolution)
