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
        "BatchGrad": 10.0,
        "BatchL2Grad": 4.0,
        "SumGradSquared": 4.0,
        "Variance": 4.0,
        "DiagGGNMC": 5.0,
        "KFAC": 7.0,
        "DiagGGNExact": 30.0,
        SETS[2]: 10.0,
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
