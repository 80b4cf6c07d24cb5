"""What all tests keep to."""

import gc
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from backpack.core import fast
from backpack.core.record import alive


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests of quantities run without fast paths, and on another device."""
    parser.addoption(
        "--without-fast-paths",
        action="store_true",
        help="switch all fast paths off: pytest test/test_quantities.py --without-fast-paths",
    )
    parser.addoption(
        "--device",
        help="where tensors are made by default: pytest test/test_quantities.py --device cuda",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Seed nothing but the CPU where there is nothing else.

    For each other kind of device, torch formats the stack at every seed, for an error to come; with
    pytest's stack that takes longer than many a test.
    """
    if config.getoption("--device") is not None:
        torch.set_default_device(config.getoption("--device"))
    if not torch.accelerator.is_available():
        patch = pytest.MonkeyPatch()
        patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        config.add_cleanup(patch.undo)


def freeze() -> None:
    """Leave what is there out of garbage collections: it stays."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Freeze a million objects of the tests themselves."""
    freeze()


_modules = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Freeze what a test has imported, which can be as much again."""
    before = item.session.stash.get(_modules, 0)
    if before != (now := len(sys.modules)):
        item.session.stash[_modules] = now
        freeze()


@pytest.fixture(scope="session", autouse=True)
def fast_paths(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take fast paths, or do not."""
    is_without = request.config.getoption("--without-fast-paths")
    with fast.disabled() if is_without else nullcontext():
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_recorded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Calls end with their graphs: none outlives the tests of a file, unless one has failed."""
    yield
    gc.collect()
    if not request.session.testsfailed:
        assert not alive.all_live_calls()
    gc.freeze()  # what the library remembers of shapes


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Build everything in float64, repeatably."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
