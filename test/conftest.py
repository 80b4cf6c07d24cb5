"""What all tests keep to."""

import gc
from collections.abc import Iterator

import pytest

from backpack.core.record import tape


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_recorded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Calls end with their graphs: none outlives the tests of a file, unless one has failed."""
    yield
    gc.collect()
    if not request.session.testsfailed:
        assert not tape.all_live_calls()
