"""Unequal batches on real ranks: gradients weigh as much as their samples, and batches follow the speed of a rank."""

from __future__ import annotations

import pytest

from tests.rounds.jobs.shares import SHARES
from tests.rounds.test_rounds import RANKS, check_counts

pytestmark = pytest.mark.xdist_group("rounds")  # one trio for all of them


@pytest.mark.parametrize("said_by", ["blocks", "step"])
@pytest.mark.parametrize(("kind", "settings"), [("full", {}), ("lgc", {"k": RANKS}), ("fastest-k", {"k": RANKS})])
def test_rounds_of_unequal_batches_are_those_of_one_process_with_all_samples(trio, kind, settings, said_by):
    """The mean over all samples, and not the mean of the means: within rounding."""
    for found in trio.do("like_one_process", kind=kind, rounds=15, sizes=[24, 8, 1], said_by=said_by, **settings):
        assert found["distance"] < 2e-5 < 0.05 < found["moved"]
        assert found["used"] == found["draws"] == 15


def test_late_gradients_and_what_they_replace_are_weighed_by_samples_too(trio):
    sizes = [16, 8, 4]
    results = trio.do("weights", rounds=12, sizes=sizes, k=2, blocks=4, scale_partial=True)
    assert len({found["digest"] for found in results}) == 1
    check_counts(results)
    assert {tuple(each) for each in results[0]["arrived"]} == set(enumerate(sizes))
    rounds = results[0]["rounds"]
    assert any(late for _, late, _ in rounds)
    for fresh, late, previous in rounds:
        total = sum(sizes[worker] for worker, _ in fresh)
        assert [weight for _, weight in fresh] == pytest.approx([sizes[worker] / total for worker, _ in fresh])
        assert [weight for _, weight in late] == pytest.approx([sizes[worker] / sum(sizes) for worker, _ in late])
        assert previous == pytest.approx(sum(sizes[worker] for worker, _ in late) / sum(sizes))


@pytest.mark.parametrize(("kind", "settings"), [("full", {}), ("lgc", {"k": 2})])
def test_a_slow_rank_gets_fewer_samples_and_all_ranks_know_the_sizes_at_the_same_version(trio, kind, settings):
    """Also after they went on from their states."""
    results = trio.do("by_speed", kind=kind, rounds=36, slow=1, **settings)
    assert len({found["digest"] for found in results}) == 1
    assert all("shares" in found["about"] for found in results)
    by_version = [dict(found["sizes"]) for found in results]
    assert [sizes[0] for sizes in by_version] == RANKS * [SHARES.batch_size]
    together = set.intersection(*(set(sizes) for sizes in by_version))
    assert {sum(sizes[version] for sizes in by_version) for version in together} == {RANKS * SHARES.batch_size}
    last = [sizes[max(together)] for sizes in by_version]
    assert last[1] < min(SHARES.batch_size, last[0], last[2])


def test_what_is_refused_where_shares_are_by_speed_says_why(trio):
    for said in trio.do("refused_shares"):
        assert "step() needs the size of the batch" in said["unsaid"]
        assert "its shares is SharesBySpeed(batch_size=12" in said["equal"]
        assert "this one's is SharesBySpeed(batch_size=8" in said["other"]
        assert said["same"] is None
        assert "shares" in said["apart"]
        assert "shares must be a SharesBySpeed" in said["none"]


@pytest.mark.parametrize("workers", [0, 1])
def test_each_sample_is_taken_once_in_an_epoch_by_one_rank_and_a_slow_one_takes_fewer(trio, workers):
    """From one order that all have in common; also by ranks that go on from their states, which had fetched ahead."""
    results = trio.do("taken", kind="lgc", k=2, rounds=20, samples=97, slow=1, workers=workers)
    assert len({(found["fewest"], found["most"]) for found in results}) == 1
    assert 3 <= results[0]["fewest"] <= results[0]["most"] <= results[0]["fewest"] + 1
    assert any(size > SHARES.batch_size for found in results for size in found["sizes"])
    assert results[1]["samples"] < min(results[0]["samples"], results[2]["samples"])
    assert not any(found["trained and open"] for found in results)
