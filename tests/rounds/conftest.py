"""Ranks that many tests share: starting them takes longer than what they are told to do."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="package")
def trio(tmp_path_factory):
    """Three ranks for the tests of rounds; none of them may be killed."""
    with Ranks(tmp_path_factory.mktemp("rounds"), 3, "tests.rounds.jobs") as ranks:
        yield ranks
