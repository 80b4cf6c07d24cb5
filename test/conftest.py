"""What all tests keep to."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from backpack.core import fast
from backpack.core.record import calls


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests of quantities run without fast paths."""
    parser.addoption(
        "--without-fast-paths",
        action="store_true",
        help="switch all fast paths off: pytest test/test_quantities.py --without-fast-paths",
    )


def pytest_collection_finish() -> None:
    """Leave a million objects of the tests themselves out of garbage collections."""
    gc.collect()
    gc.freeze()


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
        assert not calls.all_live_calls()
