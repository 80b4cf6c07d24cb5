"""The most natural mistakes lead to messages that name the object and the remedy."""

from __future__ import annotations

import pytest
from mistakes import MISTAKES, Mistake


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.program.__name__)
def test_message_names_the_object_and_the_remedy(mistake: Mistake) -> None:
    message = mistake.message()
    assert mistake.names in message
    assert mistake.remedy in message


def test_the_table_is_long_enough() -> None:
    assert len({mistake.title for mistake in MISTAKES}) == len(MISTAKES) >= 20


def test_program_that_is_told_nothing_is_found() -> None:
    silent = Mistake("silent", lambda: None, UserWarning, "", "")
    with pytest.raises(AssertionError, match=r"silent: told \[\]"):
        silent.message()
