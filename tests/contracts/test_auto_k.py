"""The laws of k="auto": it learns from the past alone, and moves where it should."""

from __future__ import annotations

import numpy as np

from paceline.events import GradientArrived, LossSeen
from paceline.strategies import LGC
from paceline.strategies.auto_k import BY_SAMPLES, DISCARDED, SCALED, UNSCALED, AutoK, Skew
from paceline.strategies.lgc import settled


def chooser_after(times, *, use=SCALED, rounds=20, skew=None, blocks=4, fresh=None):
    chooser = AutoK(use)
    for version in range(rounds):
        for worker, seconds in enumerate(times):
            chooser.arrived(
                GradientArrived(
                    worker=worker, version=version, blocks_done=blocks, blocks=blocks, work_seconds=seconds
                ),
                round_seconds=seconds,
            )
            if skew is not None:
                mean = 1.0 + skew * worker
                chooser.loss_seen(LossSeen(worker=worker, version=version, mean=mean, variance=1.0, samples=32))
        chooser.closed(set(range(len(times))) if fresh is None else fresh(version))
    return chooser


def test_with_nothing_seen_it_takes_seven_tenths_and_half_where_it_did_before() -> None:
    assert [AutoK(BY_SAMPLES).k(members=members) for members in (1, 2, 3, 10, 20)] == [1, 2, 3, 7, 14]
    for use in (SCALED, UNSCALED, DISCARDED):
        assert [AutoK(use).k(members=members) for members in (1, 2, 3, 10, 20)] == [1, 1, 2, 5, 10]


def test_k_is_chosen_by_what_becomes_of_late_work_in_the_run() -> None:
    begins = settled(LGC(k="auto")).start().chooser
    goes_on = settled(LGC(k="auto"), True).start().chooser
    assert (begins.k(members=10), goes_on.k(members=10)) == (7, 5)


def test_work_that_weighs_less_costs_nothing_where_all_hold_alike_data() -> None:
    """Steps are as long as those of a full round; with skew, what was done least is learned last."""
    times = [1.0] * 5 + [4.0] * 5
    alike, skewed = (chooser_after(times, use=BY_SAMPLES, skew=skew) for skew in (0.0, 5.0))
    assert alike._progress(1.0) == 1.0
    assert skewed._progress(1.0) < skewed._progress(4.0) == 1.0
    scaled = chooser_after(times, use=SCALED, skew=0.0)
    assert scaled._progress(1.0) < 1.0


def test_the_skew_is_known_as_soon_as_the_second_round_has_losses() -> None:
    def value(at_once, versions):
        skew = Skew(unseen=0.5, at_once=at_once)
        for version in range(versions):
            for worker, mean in enumerate((1.0, 5.0, 9.0)):
                skew.note(LossSeen(worker=worker, version=version, mean=mean, variance=1.0, samples=32))
        return skew.value

    assert [value(True, versions) > 0.9 for versions in (1, 2, 3)] == [False, True, True]
    assert [value(False, versions) > 0.9 for versions in (1, 2, 3)] == [False, False, True]


def test_it_leaves_out_the_one_slow_worker() -> None:
    times = [1.0] * 9 + [50.0]
    for use in (SCALED, BY_SAMPLES, UNSCALED, DISCARDED):
        assert chooser_after(times, use=use, skew=0.0).k(members=10) == 9


def test_with_equal_workers_it_takes_everybody() -> None:
    assert chooser_after([1.0] * 10, skew=0.0).k(members=10) == 10


def test_skewed_data_asks_for_more_workers() -> None:
    times = list(1.0 + 0.1 * np.arange(10))
    alike, skewed = chooser_after(times, skew=0.0), chooser_after(times, skew=2.0)
    assert alike.k(members=10) < skewed.k(members=10)


def test_persistent_stragglers_ask_for_more_workers_when_late_work_is_thrown_away() -> None:
    times = list(1.0 + 0.15 * np.arange(10))
    rotating = chooser_after(times, use=DISCARDED, skew=0.0, fresh=lambda v: {(v * 5 + i) % 10 for i in range(5)})
    persistent = chooser_after(times, use=DISCARDED, skew=0.0, fresh=lambda v: set(range(5)))
    assert rotating.k(members=10) < persistent.k(members=10)


def test_partial_work_tells_the_time_of_the_whole_batch() -> None:
    whole, partial = AutoK(SCALED), AutoK(SCALED)
    for chooser, done in ((whole, 4), (partial, 1)):
        for worker in range(3):
            seconds = (1.0 + worker) * done / 4
            event = GradientArrived(worker=worker, version=0, blocks_done=done, blocks=4, work_seconds=seconds)
            chooser.arrived(event, round_seconds=9.9)
        chooser.closed({0, 1, 2})
    assert whole.state_dict()["order_seconds"] == partial.state_dict()["order_seconds"]


def test_skew_is_nothing_where_workers_differ_no_more_than_their_samples_do() -> None:
    """Means of 32 samples of variance 1 differ by chance; over 200 versions the measured share stays below 0.1.

    The share of a version is at most about 0.05 then (its mean is 0.01); a false alarm needs 6 deviations.
    """
    generator, skew = np.random.default_rng(0), Skew(unseen=0.5, at_once=True)
    for version in range(200):
        for worker in range(10):
            losses = generator.normal(2.0, 1.0, 32)
            skew.note(
                LossSeen(
                    worker=worker,
                    version=version,
                    mean=float(losses.mean()),
                    variance=float(losses.var()),
                    samples=32,
                )
            )
    assert skew.value < 0.1


def test_a_worker_that_left_no_longer_counts() -> None:
    chooser = chooser_after([1.0] * 9 + [50.0], skew=0.0)
    chooser.forget(9)
    chooser.closed(set(range(9)))
    assert max(chooser.state_dict()["order_seconds"]) == 1.0


def test_no_workers_no_times_no_crash() -> None:
    chooser = AutoK(SCALED)
    chooser.arrived(GradientArrived(worker=0, version=0), round_seconds=0.0)
    chooser.closed({0})
    assert chooser.k(members=1) == 1


def test_nobody_waits_for_workers_never_heard_of() -> None:
    chooser = chooser_after([1.0, 1.0, 1.0, 1.0, 1.0], skew=5.0)
    assert chooser.k(members=10) <= 5
