"""The harness itself: a run with nothing wrong."""

from tests.cluster.harness import Cluster

WHOLE = {
    "identical": True,
    "steps": 40,
    "redone": 0,
    "difference": None,
    "checkpoint": 40,
    "nearly": None,
    "missing": None,
}


def test_an_undisturbed_run_ends_well_and_replays_to_the_last_bit(tmp_path):
    with Cluster(tmp_path, workers=3, k=2, rounds=40) as cluster:
        assert cluster.server.wait(120) == 0, cluster.log
        assert cluster.round == 40
        assert cluster.replay() == WHOLE
