"""How long workers compute: delay models, one law at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline.drivers.simulated.delays import Pareto, Recorded, ShiftedExponential, SlowWorkers, read_recorded

DRAWN = [
    ShiftedExponential(seed=3),
    ShiftedExponential(seed=3, persistence=7),
    Pareto(seed=3),
    Pareto(seed=3, persistence=7),
    SlowWorkers(base=ShiftedExponential(seed=3), slow=2),
]
FALSE_ALARM = 1e-6


def table(delays, workers, draws):
    return delays.seconds(np.arange(workers)[None, :], np.arange(draws)[:, None])


@pytest.mark.parametrize("delays", DRAWN, ids=str)
def test_a_workers_times_do_not_depend_on_how_many_others_there_are(delays):
    assert np.array_equal(table(delays, 3, 40), table(delays, 50, 90)[:40, :3])
    one_by_one = [delays.seconds(np.asarray(2), np.asarray(draw)).item() for draw in range(40)]
    assert one_by_one == table(delays, 3, 40)[:, 2].tolist()


@settings(deadline=None, max_examples=30, derandomize=True)
@given(persistence=st.integers(1, 12), seed=st.integers(0, 2**40), pareto=st.booleans())
def test_a_time_is_held_for_exactly_persistence_draws(persistence, seed, pareto):
    delays = (Pareto if pareto else ShiftedExponential)(persistence=persistence, seed=seed)
    held = table(delays, 4, 5 * persistence).reshape(5, persistence, 4)
    assert (held == held[:, :1]).all()
    assert len(np.unique(held)) == 5 * 4, "and then it is drawn again, for each worker on its own"


def test_the_seed_decides():
    assert not np.array_equal(table(ShiftedExponential(seed=0), 3, 5), table(ShiftedExponential(seed=1), 3, 5))
    assert np.array_equal(table(ShiftedExponential(seed=1), 3, 5), table(ShiftedExponential(seed=1), 3, 5))


@pytest.mark.parametrize(
    ("delays", "law"),
    [
        (ShiftedExponential(seed=11), stats.expon(loc=0.05, scale=0.02)),
        (ShiftedExponential(shift_seconds=0.0, mean_seconds=3.0, seed=12), stats.expon(scale=3.0)),
        (Pareto(seed=13), stats.pareto(2.5, scale=0.05)),
        (Pareto(scale_seconds=2.0, shape=1.5, seed=14), stats.pareto(1.5, scale=2.0)),
    ],
    ids=["exponential", "unshifted", "pareto", "heavy-tail"],
)
def test_times_follow_their_distribution(delays, law):
    """Kolmogorov and Smirnov's test over all quantiles at once; false alarm one in a million, and the seed is fixed."""
    assert stats.kstest(table(delays, 100, 200).ravel(), law.cdf).pvalue > FALSE_ALARM


def test_the_papers_delays_have_the_papers_mean():
    times = table(ShiftedExponential(seed=5), 100, 400)
    deviation = 0.02 / math.sqrt(times.size)  # an exponential's deviation is its mean
    assert abs(times.mean() - 0.07) < 4.9 * deviation  # false alarm one in a million


def test_slow_workers_are_slower_by_the_factor_and_nobody_else_is():
    base = ShiftedExponential(seed=3)
    slowed = table(SlowWorkers(base=base, slow=2, factor=4.0), 5, 10)
    assert np.array_equal(slowed, table(base, 5, 10) * [4.0, 4.0, 1.0, 1.0, 1.0])


def test_recorded_times_begin_again_at_the_top():
    rows = ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))
    assert table(Recorded(rows=rows), 2, 7).tolist() == [list(rows[draw % 3]) for draw in range(7)]


def test_recorded_times_are_read_from_a_file(tmp_path):
    file = tmp_path / "delays.csv"
    file.write_text("1.0,1.2\n\n1.5,2\n")
    assert read_recorded(file).rows == ((1.0, 1.2), (1.5, 2.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.0,fast\n", r"delays.csv:1: not a number of seconds: 'fast'"),
        ("1.0,2.0\n1.0\n", r"row 1 has 2, row 2 has 1"),
        ("1.0,-2.0\n", r"more than 0 \(row 1: \(1.0, -2.0\)\)"),
        ("1.0,nan\n", r"more than 0 \(row 1"),
        ("", r"at least one row"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_and_the_line_is_named(tmp_path, text, message):
    file = tmp_path / "delays.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recorded(file)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read recorded delays from .*missing.csv"):
        read_recorded(tmp_path / "missing.csv")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShiftedExponential(shift_seconds=-1.0), "shift_seconds=-1.0"),
        (lambda: ShiftedExponential(mean_seconds=math.inf), "mean_seconds=inf"),
        (lambda: ShiftedExponential(shift_seconds=0.0, mean_seconds=0.0), "must not both be 0"),
        (lambda: ShiftedExponential(persistence=0), "persistence=0"),
        (lambda: Pareto(scale_seconds=0.0), "scale_seconds=0.0"),
        (lambda: Pareto(shape=1.0), "shape=1.0"),
        (lambda: Pareto(shape=math.nan), "shape=nan"),
        (lambda: SlowWorkers(base=Pareto(), slow=-1), "slow=-1"),
        (lambda: SlowWorkers(base=Pareto(), factor=0.0), "factor=0.0"),
        (lambda: Recorded(rows=()), "at least one row"),
        (lambda: Recorded(rows=((1.0, 0.0),)), "row 1"),
    ],
)
def test_bad_values_are_refused_with_what_was_given(make, message):
    with pytest.raises(ValueError, match=message):
        make()
