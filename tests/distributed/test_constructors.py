"""Whatever meets other ranks names those that do not come, or leave before all are connected, in the time asked for."""

from __future__ import annotations

import pytest

from tests.distributed.constructor_jobs import CONSTRUCTORS
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.xdist_group("constructors")
SOON_SECONDS = 15.0  # beside the limit; a group's own limit was 30 s beyond it


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("constructors"), 3, "tests.distributed.constructor_jobs") as trio:
        yield trio


@pytest.mark.parametrize("kind", CONSTRUCTORS)
def test_a_rank_that_never_comes_is_named_alone_and_found_when_all_try_again(trio, kind):
    trio.do("prepare", kind=kind)
    for said, seconds, gone in trio.do("construct", kind=kind, limit=4.0, ranks_there=2, ranks=(0, 2)):
        assert gone, said
        assert "waited 4 s for rank 1 to" in said
        assert seconds < 4.0 + SOON_SECONDS
    for said, _, gone in trio.do("construct", kind=kind, limit=30.0):
        assert not gone, said


@pytest.mark.parametrize("kind", [kind for kind in CONSTRUCTORS if kind not in ("FullSync", "SSGD")])  # as LGC, HPSGD
def test_a_rank_that_is_killed_when_all_have_met_and_before_they_are_connected_is_named(tmp_path, kind):
    with Ranks(tmp_path, 3, "tests.distributed.constructor_jobs") as trio:
        trio.do("prepare", kind=kind)
        trio.tell("dies_when_it_connects", kind=kind, limit=2.0, ranks=(1,))
        trio.tell("construct", kind=kind, limit=2.0, ranks=(0, 2))
        for said, seconds, gone in trio.answers((0, 2)):
            assert gone or kind == "watch", said  # without its links, training is watched all the same
            assert "waited for rank 1 to connect (rank " in said
            assert seconds < 2.0 + SOON_SECONDS
