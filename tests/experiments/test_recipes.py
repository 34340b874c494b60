"""Where the seconds of a simulated run went, in the mean over its workers."""

from __future__ import annotations

import pytest

from experiments.core.recipes import SPLIT, worker_split
from paceline.recipes import Recipe
from paceline.runs.simulation import simulate

WORKERS, ROUNDS, RING_SECONDS, PERIOD = 4, 32, 2.0, 8
LANES = {
    "ssgd": {"name": "ssgd"},
    "local-sgd": {"name": "local-sgd", "period": PERIOD},
    "hpsgd (paper)": {"name": "hpsgd", "rebase": False},
    "hpsgd (rebase)": {"name": "hpsgd", "rebase": True},
    "psgd": {"name": "psgd"},
}


def _trace(lane, *, noise=0.25):
    recipe = Recipe(rounds=ROUNDS).with_settings(
        cluster={"workers": WORKERS},
        delay={"shift_seconds": 1.0, "mean_seconds": noise, "persistence": 1},
        network={"latency_seconds": RING_SECONDS / (2 * (WORKERS - 1))},
        strategy=LANES[lane],
    )
    return simulate(recipe, timing_only=True).trace


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_the_parts_add_up_and_none_is_negative(lane, share):
    trace = _trace(lane)
    until = share * trace.seconds
    split = worker_split(trace, until)
    assert tuple(split) == SPLIT
    assert sum(split.values()) == pytest.approx(until)
    assert min(split.values()) >= -1e-9


def test_without_noise_no_worker_waits_and_every_average_costs_a_ring():
    for lane, averages in (("ssgd", ROUNDS), ("local-sgd", ROUNDS // PERIOD)):
        trace = _trace(lane, noise=0.0)
        split = worker_split(trace, trace.rounds[-1].closed_seconds)  # then they agree that they are done
        assert split == pytest.approx({"computing": ROUNDS, "waiting": 0.0, "network": averages * RING_SECONDS})


@pytest.mark.parametrize("lane", ["hpsgd (paper)", "hpsgd (rebase)", "psgd"])
def test_an_average_beside_computing_costs_nothing(lane):
    trace = _trace(lane)
    until = 0.8 * trace.seconds  # at the end all wait for what is on its way
    assert worker_split(trace, until) == pytest.approx({"computing": until, "waiting": 0.0, "network": 0.0})


def test_workers_of_different_speed_wait_where_training_waits():
    noisy = worker_split(_trace("ssgd"), _trace("ssgd").seconds)
    assert noisy["waiting"] > 0.05 * noisy["computing"]
