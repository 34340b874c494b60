"""Shares by speed on simulated clusters: how gradients weigh, how long rounds take, and what is learned."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import load_dataset, split
from paceline.drivers.simulated.cluster import Cluster, MeasuredCosts, Setup
from paceline.drivers.simulated.delays import Pareto, Recorded, Sequences, ShiftedExponential, SlowWorkers
from paceline.drivers.simulated.learner import Learner
from paceline.drivers.simulated.network import Network
from paceline.drivers.simulated.simulation import Simulation
from paceline.drivers.simulated.timing import RoundTimes
from paceline.events import Assign
from paceline.models import build_model
from paceline.optim import OptimizerSettings
from paceline.strategies import LGC, FastestK, Full
from paceline.strategies.combine import Combiner
from paceline.strategies.shares import SharesBySpeed
from paceline.training import Batches, BatchPlace, Training
from paceline.workers.gradients import LoopGradients
from paceline.workers.paced import seconds_of_batch

quick = settings(deadline=None, max_examples=25, derandomize=True)
BATCH, BLOCKS = 32, 4
BY_SPEED = SharesBySpeed(batch_size=BATCH, least=BLOCKS, multiple=BLOCKS)
SAMPLE_BY_SAMPLE = SharesBySpeed(batch_size=BATCH)


def cluster_of(strategy, delays, *, workers, **settings):
    settings = {"blocks": BLOCKS} | settings
    return Cluster(Setup(name="x", strategy=strategy, workers=workers, rounds=1, delays=delays, **settings))


def assigned_by(cluster):
    """Every assignment of a run, as it is carried out."""
    seen, carry_out = [], cluster._carry_out

    def watched(actions):
        seen.extend(dict(action.samples) for action in actions if isinstance(action, Assign))
        carry_out(actions)

    cluster._carry_out = watched
    return seen


strategies_with_shares = st.sampled_from(
    [Full(shares=BY_SPEED), FastestK(k=3, shares=BY_SPEED), LGC(k=2, shares=BY_SPEED), LGC(k="auto", shares=BY_SPEED)]
)
any_delays = st.one_of(
    st.builds(SlowWorkers, base=st.builds(ShiftedExponential, seed=st.integers(0, 99)), factor=st.floats(0.2, 9.0)),
    st.builds(Pareto, seed=st.integers(0, 99), persistence=st.sampled_from([1, 10]), shape=st.just(1.3)),
    st.lists(st.tuples(*[st.floats(0.05, 2.0)] * 5), min_size=1, max_size=9).map(
        lambda rows: Recorded(rows=tuple(rows))
    ),
)


@quick
@given(
    strategy=strategies_with_shares,
    delays=any_delays,
    late_work=st.sampled_from(["partial", "complete"]),
    on=st.sampled_from(["server", "ranks"]),
    fixed_seconds=st.sampled_from([0.0, 0.03, 9.0]),
    latency=st.sampled_from([0.0, 0.01]),
)
def test_every_fresh_weight_is_the_samples_of_the_task_in_those_of_all(
    strategy, delays, late_work, on, fixed_seconds, latency
):
    cluster = cluster_of(
        strategy,
        delays,
        workers=5,
        late_work=late_work,
        on=on,
        fixed_seconds=fixed_seconds,
        network=Network(latency_seconds=latency),
    )
    places = {worker: {} for worker in range(5)}
    for taken in cluster.run(60):
        sizes = [task.samples for task in taken.fresh]
        assert [share.weight for share in taken.step.fresh] == [size / sum(sizes) for size in sizes]
        assert all(size % BLOCKS == 0 and size >= BLOCKS for size in sizes)
        for task in (*taken.fresh, *taken.late):
            places[task.worker][task.draw] = task
    for worker, tasks in places.items():  # no sample of a worker's order is drawn twice, and none is left out
        for before, after in itertools.pairwise(sorted(tasks)):
            if after == before + 1:
                assert tasks[after].first == tasks[before].first + tasks[before].samples
        for draw, task in tasks.items():
            delay = delays.seconds(np.asarray(worker), np.asarray(draw)).item()
            assert task.seconds == seconds_of_batch(delay, task.samples, batch_size=BATCH, fixed_seconds=fixed_seconds)


@pytest.mark.parametrize("late_work", ["partial", "complete"])
@pytest.mark.parametrize("on", ["server", "ranks"])
@pytest.mark.parametrize("strategy", [Full, lambda **how: FastestK(k=3, **how), lambda **how: LGC(k=3, **how)])
def test_where_everybody_is_as_quick_shares_by_speed_are_equal_shares(strategy, on, late_work):
    times = {"delays": Recorded(rows=((0.5,) * 5,)), "workers": 5, "on": on, "late_work": late_work}
    equal, by_speed = cluster_of(strategy(), **times), cluster_of(strategy(shares=BY_SPEED), **times)
    steps = [[taken.step for taken in cluster.run(30)] for cluster in (equal, by_speed)]
    assert steps[0] == steps[1]
    assert equal.record.works == by_speed.record.works


def test_without_shares_nobody_says_a_size():
    cluster = cluster_of(LGC(k=2), ShiftedExponential(), workers=3)
    heard, handle = [], cluster._strategy.handle
    cluster._strategy.handle = lambda event: heard.append(event) or handle(event)
    for taken in cluster.run(10):
        assert all((task.samples, task.first) == (0, 0) for task in (*taken.fresh, *taken.late))
    assert {getattr(event, "samples", 0) for event in heard} == {0}
    assert cluster.record.shares is None


def ideal_seconds(sample_seconds, *, batch=BATCH, fixed_seconds=0.0):
    """All compute until the same moment: the batch, divided by the sum of the speeds."""
    return fixed_seconds + batch * len(sample_seconds) / sum(1 / each for each in sample_seconds)


@pytest.mark.parametrize("on", ["server", "ranks"])
@pytest.mark.parametrize("fixed_seconds", [0.0, 0.3])
@pytest.mark.parametrize("workers", [2, 4, 10])
def test_with_one_worker_three_times_slower_rounds_come_near_the_ideal(workers, fixed_seconds, on):
    # A batch of 320 samples each: whole numbers of samples must not be what keeps it from the ideal.
    shares = SharesBySpeed(batch_size=320)
    seconds = [fixed_seconds + 3.0] + [fixed_seconds + 1.0] * (workers - 1)
    cluster = cluster_of(
        Full(shares=shares),
        Recorded(rows=(tuple(seconds),)),
        workers=workers,
        on=on,
        blocks=1,
        fixed_seconds=fixed_seconds,
    )
    closes = [taken.step.at_seconds for taken in cluster.run(25)]
    last = closes[-1] - closes[-2]
    ideal = ideal_seconds([3.0 / 320] + [1.0 / 320] * (workers - 1), batch=320, fixed_seconds=fixed_seconds)
    assert ideal * (1 - 1e-9) <= last <= 1.02 * ideal
    summary = cluster.record.shares.summary()
    assert summary.round_seconds == pytest.approx(last, rel=0.02)
    assert summary.equal_seconds == pytest.approx(max(seconds), rel=0.02)
    assert summary.batch == 320 * workers


def test_a_worker_that_is_slow_for_a_while_gets_less_and_later_more_again():
    usual, slow = (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 4.0, 1.0)
    cluster = cluster_of(
        Full(shares=SAMPLE_BY_SAMPLE),
        Recorded(rows=(usual,) * 30 + (slow,) * 40 + (usual,) * 60),
        workers=4,
        blocks=1,
    )
    sizes = [{task.worker: task.samples for task in taken.fresh} for taken in cluster.run(130)]
    assert all(sum(each.values()) == 4 * BATCH for each in sizes)
    assert set(sizes[29].values()) == {BATCH}
    assert sizes[69][2] < 0.4 * BATCH < BATCH < min(sizes[69][worker] for worker in (0, 1, 3))
    assert sizes[129][2] == pytest.approx(BATCH, abs=2)


@pytest.mark.parametrize("seed", range(5))
def test_a_jitter_of_twenty_per_cent_changes_no_share(seed):
    jitter = np.random.default_rng(seed)
    delays = Recorded(rows=tuple(map(tuple, (1.0 + 0.2 * jitter.uniform(-1, 1, size=(300, 6))).tolist())))
    cluster = cluster_of(Full(shares=BY_SPEED), delays, workers=6)
    seen = assigned_by(cluster)
    for _ in cluster.run(300):
        pass
    assert seen == []
    assert cluster.record.shares.summary().changes == 0


def test_the_summary_compares_rounds_with_themselves_under_equal_shares():
    delays = SlowWorkers(base=ShiftedExponential(seed=7), slow=1, factor=4.0)
    settings = {"workers": 6, "late_work": "complete"}
    by_speed = cluster_of(Full(shares=SAMPLE_BY_SAMPLE), delays, **settings, blocks=1)
    equal = cluster_of(Full(), delays, **settings, blocks=1)
    taken = list(by_speed.run(80))
    summary = by_speed.record.shares.summary()
    since = slice(summary.since, None)
    closes = [0.0, *(each.step.at_seconds for each in equal.run(80))]
    as_it_was = [each.step.at_seconds - each.opened_seconds for each in taken][since]
    with_equal = np.diff(closes)[since]
    assert summary.round_seconds == pytest.approx(np.mean(as_it_was))
    assert summary.equal_seconds == pytest.approx(np.mean(with_equal), rel=0.05)  # the fixed part is an estimate
    assert summary.round_seconds < 0.7 * summary.equal_seconds
    assert [share.samples for share in summary.workers] == [task.samples for task in taken[-1].fresh]
    assert by_speed.record.shares.summary() == summary  # to ask changes nothing


def test_what_is_recorded_is_played_as_it_was():
    delays = Sequences(columns=((1.0, 3.0), (1.0,)))
    cluster = cluster_of(
        Full(shares=BY_SPEED), delays, workers=2, costs=MeasuredCosts(server_seconds=(0.5,), worker_seconds=delays)
    )
    assert [taken.step.version for taken in cluster.run(20)] == list(range(20))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"multiples of the blocks.*multiple=1, blocks=4"):
        cluster_of(Full(shares=SAMPLE_BY_SAMPLE), ShiftedExponential(), workers=2)
    with pytest.raises(ValueError, match=r"fixed_seconds must be 0 or more \(fixed_seconds=-1"):
        cluster_of(Full(), ShiftedExponential(), workers=2, fixed_seconds=-1.0)
    setup = Setup(name="full", strategy=Full(shares=BY_SPEED), workers=2, rounds=2, delays=ShiftedExponential())
    with pytest.raises(ValueError, match="event by event"):
        RoundTimes(setup)


# -- what is learned ---------------------------------------------------------------------------------------------------


def training_of(model="mlp", *, workers=4, seed=0, rounds=12):
    digits = load_dataset("digits")
    return Training(
        module=build_model(model, input_shape=digits.input_shape, classes=10, seed=seed),
        dataset=digits,
        shards=split(digits.train.targets, workers=workers, kind="iid", seed=seed),
        optimizer=OptimizerSettings(lr=0.05, momentum=0.0, weight_decay=0.0),
        total_steps=rounds,
        batch_size=BATCH,
        blocks=BLOCKS,
        seed=seed,
        evaluation_samples=300,
    )


@pytest.mark.parametrize("late_work", ["partial", "complete"])
@pytest.mark.parametrize("strategy", [Full(shares=BY_SPEED), LGC(k=3, shares=BY_SPEED)], ids=["full", "lgc"])
def test_the_model_is_that_of_a_plain_loop_over_the_same_batches(strategy, late_work):
    """Every step is taken again, one gradient after the other: batches by their places, weights by their samples."""
    training, delays = training_of(), Recorded(rows=((1.0, 1.1, 1.3, 4.0),))
    setup = Setup(name="x", strategy=strategy, workers=4, rounds=12, delays=delays, late_work=late_work, blocks=BLOCKS)
    learner = Learner(training)
    steps = list(Cluster(setup, trainer=learner).run(12))
    assert len({task.samples for taken in steps for task in taken.fresh}) > 2

    loop, combiner, batches = LoopGradients(copy.deepcopy(training.module)), Combiner(), Batches(training)
    models, buffers = [loop.model.parameters.clone()], loop.model.buffers
    for taken in steps:
        gradients = {}
        for task in (*taken.late, *taken.fresh):
            assignment = batches.assignment(
                worker=task.worker,
                draw=task.draw,
                blocks=task.blocks,
                blocks_done=task.blocks_done,
                place=BatchPlace(first=task.first, samples=task.samples),
            )
            assert len(assignment.inputs) == task.samples
            gradients[task.worker, task.version] = loop.compute(models[task.version], buffers, [assignment]).gradients[
                0
            ]
        update = combiner.update(taken.step, lambda share, held=gradients: held[share.worker, share.version])
        models.append(models[-1] - 0.05 * update)
    torch.testing.assert_close(learner.parameters, models[-1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("late_work", ["partial", "complete"])
def test_the_same_run_twice_is_the_same_to_the_last_bit_and_times_do_not_depend_on_training(late_work):
    delays = SlowWorkers(base=ShiftedExponential(seed=3, mean_seconds=0.01), slow=1, factor=3.0)
    setup = Setup(
        name="x",
        strategy=LGC(k=3, shares=BY_SPEED),
        workers=4,
        rounds=12,
        delays=delays,
        late_work=late_work,
        blocks=BLOCKS,
    )
    runs = [Simulation(setup, training=training_of()), Simulation(setup, training=training_of()), Simulation(setup)]
    for run in runs:
        for _ in run:
            pass
    first, second, timed = runs
    assert torch.equal(first.learner.parameters, second.learner.parameters)
    assert first.trace == second.trace
    assert timed.trace.rounds == first.trace.rounds
    assert timed.trace.shares == first.trace.shares
