"""Simulated runs of workers that average among themselves: times by hand, laws of what is trained, and the replay."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools

import pytest
import torch
from torch import nn

from paceline.codecs.naming import parse_codec
from paceline.data import load_dataset, split
from paceline.drivers.replayed.averaged_run import replay_averages
from paceline.drivers.replayed.served_run import ReplayError
from paceline.drivers.simulated.averaging_cluster import AveragingCluster, AveragingSetup, SimulatedAverage
from paceline.drivers.simulated.averaging_simulation import AveragedSimulation
from paceline.drivers.simulated.delays import Recorded, ShiftedExponential, SlowWorkers
from paceline.drivers.simulated.network import Network
from paceline.events import Standing, Window
from paceline.exchanges.plans import traffic_of
from paceline.optim import OptimizerSettings, make_optimizer
from paceline.reports.timeline import segments
from paceline.strategies.averaging import AVERAGING, make_averaging
from paceline.training import Batches, Training
from paceline.training.averaging_workers import AveragingWorkers
from paceline.training.replica import local_gradient
from tests.contracts.averaging_play import VARIANTS, Play

WORKERS, ROUNDS = 3, 7
everyone = pytest.mark.parametrize("member", VARIANTS.values(), ids=VARIANTS)
ONE_BIT = "one-bit"
BYTE_A_SECOND = Network(worker_bits_per_second=8.0)


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits")


def network(*, norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, 10)]
    return nn.Sequential(*layers)


def trained(digits, *, workers=WORKERS, rounds=ROUNDS, norm=False, codec="identity", plan="auto", **optimizer):
    return Training(
        module=network(norm=norm),
        dataset=digits,
        shards=split(digits.train.targets, workers=workers, kind="iid", seed=0),
        optimizer=OptimizerSettings(**({"lr": 0.05} | optimizer)),
        total_steps=rounds,
        batch_size=8,
        evaluation_samples=100,
        codec=parse_codec(codec),
        plan=plan,
    )


def setup(member, *, workers=WORKERS, rounds=ROUNDS, delays=None, **others):
    delays = delays or SlowWorkers(base=ShiftedExponential(), slow=1, factor=3.0)
    return AveragingSetup(member=member, workers=workers, rounds=rounds, delays=delays, **others)


def simulate(member, training, *, evaluate_every=3, **others):
    run = AveragedSimulation(setup(member, **others), training=training, evaluate_every=evaluate_every)
    run.progress = list(run)
    return run


def times(member, rows, *, rounds, message_bytes=0, **others):
    workers = len(rows[0])
    run = AveragedSimulation(
        setup(member, workers=workers, rounds=rounds, delays=Recorded(rows=rows), **others), message_bytes=message_bytes
    )
    list(run)
    return run.trace


def played(member, training, **others):
    """A run's team, and the windows of its averages."""
    cluster = setup(member, **others)
    team = AveragingWorkers(training, member, workers=cluster.workers)
    averages = [
        happened for happened in AveragingCluster(cluster, trainer=team).run() if isinstance(happened, SimulatedAverage)
    ]
    return team, averages


@pytest.fixture(scope="module")
def whole_run(digits):
    """One run of each member for all tests that only look at it: with BatchNorm, and a rate that falls on the way."""
    training = trained(digits, norm=True, decay_at=(0.4,))
    return functools.cache(lambda member: (training, *played(member, training)))


# -- times ----------------------------------------------------------------------------------------------------------


def test_where_training_waits_a_window_takes_as_long_as_the_slowest_and_the_ring():
    rows = ((1.0, 2.0), (3.0, 1.0), (1.0, 5.0))
    ring = 2 * (2 - 1) * (0.25 + 4 / 2)  # latency, and half of four bytes at a byte a second
    slow = dataclasses.replace(BYTE_A_SECOND, latency_seconds=0.25)
    closed = [
        each.closed_seconds for each in times(AVERAGING["ssgd"], rows, rounds=3, message_bytes=4, network=slow).rounds
    ]
    assert closed == list(itertools.accumulate([2.0 + ring, 3.0 + ring, 5.0 + ring]))
    local = times(make_averaging("local-sgd", period=2), rows, rounds=3, message_bytes=4, network=slow)
    assert [each.closed_seconds for each in local.rounds] == [4.0 + ring, 4.0 + ring + 5.0 + ring]


def test_hpsgd_trains_on_and_merges_at_the_first_step_boundary_after_the_ring():
    """Worker 0 steps every second, worker 1 every 2.5; the ring takes 2 (4 bytes, halves, two hops).

    w0  |#B#|##|##|##M##          enters 0 at 1; 0 ends at 4.5; merged at 5 with 4 steps open, which begin 1
    w1  |####B####.####M          enters 0 at 2.5; merged at 5 with 1 step open, which begins 1
    """
    trace = times(AVERAGING["hpsgd"], ((1.0, 2.5),), rounds=6, message_bytes=2, network=BYTE_A_SECOND)
    first, second = ([work for work in trace.works if work.version == number] for number in (0, 1))
    assert [(work.finished_seconds, work.sent_seconds, work.arrived_seconds) for work in first] == [
        (1.0, 2.5, 4.5),
        (2.5, 2.5, 4.5),
    ]
    assert [(work.started_seconds, work.finished_seconds, work.sent_seconds) for work in second] == [
        (1.0, 5.0, 5.0),
        (2.5, 5.0, 5.0),
    ]
    assert (trace.rounds[1].opened_seconds, trace.rounds[1].closed_seconds) == (4.5, 7.0)
    # 2 steps in average 0, 4 + 1 in 1, then 2 + 1 (of 5 to 7 and 5 to 7.5) and 3 + 1 (of 7 to 10): 14 of at least 12.
    # What was begun meanwhile, 10 to 12 and 10 to 12.5, comes in last: 2 + 1.
    assert trace.used == 17


def test_a_fast_worker_of_hpsgd_never_waits_and_takes_more_steps():
    trace = times(AVERAGING["hpsgd"], ((0.1, 1.0),), rounds=20, message_bytes=1, network=BYTE_A_SECOND)
    fast = sorted((work for work in trace.works if work.worker == 0), key=lambda work: work.version)
    assert all(one.finished_seconds == other.started_seconds for one, other in itertools.pairwise(fast))
    busy = [
        bar for bar in segments(trace, 0) if bar.activity == "waiting" and bar.end_seconds <= fast[-1].finished_seconds
    ]
    assert busy == []
    waits = times(make_averaging("local-sgd", period=1), ((0.1, 1.0),), rounds=20)
    assert trace.used >= 40 == waits.used
    assert trace.seconds < waits.seconds


def test_an_average_that_costs_nothing_is_merged_at_the_next_step_boundary_and_begins_the_next(whole_run):
    _, _, averages = whole_run(AVERAGING["hpsgd"])
    windows = [window for average in averages for window in average.windows if window.standing is Standing.TRAINING]
    assert all(window.steps >= 1 for window in windows)
    assert all(window.merged_after == window.steps for window in windows[WORKERS:])


def test_psgd_is_as_long_as_its_slowest_worker_and_one_ring():
    trace = times(AVERAGING["psgd"], ((1.0, 2.0),), rounds=5, message_bytes=4, network=BYTE_A_SECOND)
    assert trace.seconds == 5 * 2.0 + 4.0
    assert (trace.used, trace.rounds_done, len(trace.rounds)) == (10, 5, 1)


@everyone
def test_the_budget_is_spent_and_every_step_is_merged(member):
    run = AveragedSimulation(setup(member, workers=5, rounds=40))
    seconds = [progress.seconds for progress in run]
    trace = run.trace
    assert seconds == sorted(seconds)
    assert trace.dropped == {}
    assert trace.used > 200 if member.overlap else trace.used == 200
    assert trace.rounds_done == trace.used // 5
    assert len({(work.worker, work.version) for work in trace.works}) == len(trace.works)


@everyone
def test_one_worker_takes_its_steps_and_nothing_else(member):
    trace = times(member, ((1.5,),), rounds=4, message_bytes=100, network=BYTE_A_SECOND)
    assert (trace.seconds, trace.used, trace.rounds_done, trace.sent_bytes) == (6.0, 4, 4, 0)


def test_the_timeline_shows_waiting_for_the_others_before_the_flight():
    member = make_averaging("local-sgd", period=1)
    trace = times(member, ((1.0, 3.0),), rounds=1, message_bytes=4, network=BYTE_A_SECOND)
    bars = [(bar.activity, bar.start_seconds, bar.end_seconds) for bar in segments(trace, 0)]
    assert bars[:3] == [("used", 0.0, 1.0), ("waiting", 1.0, 3.0), ("flight", 3.0, 7.0)]


# -- what is trained ------------------------------------------------------------------------------------------------


@everyone
def test_after_the_end_all_workers_hold_the_same_model_to_the_last_bit(whole_run, member):
    _, team, _ = whole_run(member)
    states = [player.module.state_dict() for player in team.models]
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in states[0])
    assert torch.equal(team.models[0].parameters, team.parameters)


@pytest.mark.parametrize(("noun", "doubled"), [("parameters", True), ("buffers", False)])
def test_a_codec_takes_no_model_with_float64_as_it_takes_none_on_ranks(digits, noun, doubled):
    training = trained(digits, codec=ONE_BIT)
    training.module.register_buffer("precise", torch.zeros(1, dtype=torch.float64))
    if doubled:
        training.module.double()
    with pytest.raises(ValueError, match=f"this model has float64 {noun}"):
        AveragingWorkers(training, VARIANTS["local-sgd"], workers=WORKERS)


@pytest.mark.parametrize("codec", ["identity", ONE_BIT, "qsgd levels=7"])
@pytest.mark.parametrize("name", ["local-sgd", "hpsgd", "hpsgd paper", "hpsgd normalize", "psgd"])
def test_the_model_is_the_start_plus_the_weighted_sums_of_what_was_sent(digits, name, codec):
    training = trained(digits, codec=codec)
    messages, sums, member = {}, {}, VARIANTS[name]
    if member.normalize and codec == ONE_BIT:
        with pytest.raises(ValueError, match="normalize does not go with error feedback"):
            AveragingWorkers(training, member, workers=WORKERS)
        return

    class Watched(AveragingWorkers):
        def add_up(self, number, windows):
            messages[number] = [message.clone() for message in self._messages[number]]
            return super().add_up(number, windows)

        def merge(self, worker, merge):
            total = self._totals[merge.number]
            if codec == "identity":
                assert torch.equal(total, functools.reduce(torch.add, messages[merge.number]))
            change = merge.weight * total[: self._size].double()
            assert merge.number not in sums or torch.equal(sums[merge.number], change)
            sums[merge.number] = change
            super().merge(worker, merge)

    team = Watched(training, member, workers=WORKERS)
    start = team.models[0].parameters.double()
    for _ in AveragingCluster(setup(member), trainer=team).run():
        pass
    torch.testing.assert_close(team.parameters.double(), start + sum(sums.values()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("plan", ["gather", "two-step"])
@pytest.mark.parametrize("codec", [ONE_BIT, "top-k fraction=0.1"])
def test_what_a_codec_with_a_memory_sent_and_what_it_still_holds_is_what_was_trained(digits, codec, plan):
    """original == sent + all that is held back, over a whole run, of all workers and owners of shards."""
    made, sent, member = [], [], AVERAGING["hpsgd"]

    class Watched(AveragingWorkers):
        def add_up(self, number, windows):
            made.extend(message[: self._size].double() for message in self._messages[number])
            messages = self._messages[number]
            traffic = super().add_up(number, windows)
            sent.append(messages[0][: self._size].double())
            return traffic

    team = Watched(trained(digits, codec=codec, plan=plan), member, workers=WORKERS)
    averages = [
        happened
        for happened in AveragingCluster(setup(member), trainer=team).run()
        if isinstance(happened, SimulatedAverage)
    ]
    held = [model.exchange.held().double() for model in team.models]
    torch.testing.assert_close(sum(made), sum(sent) + sum(held), rtol=0, atol=1e-4)
    assert torch.stack(held).abs().max() > 1e-3
    plain, _ = played(member, trained(digits))
    assert averages[0].sent_bytes < 2 * (WORKERS - 1) * 4 * plain.parameters.numel()


@pytest.mark.parametrize(
    ("codec", "plan"),
    [("one-bit", "gather"), ("one-bit", "two-step"), ("qsgd lossless=elias", "two-step"), ("bfloat16", "all-reduce")],
)
def test_an_average_takes_what_its_plan_puts_on_the_network(digits, codec, plan):
    """The simulated run against the formulas that the choice of a plan goes by."""
    training, network = (
        trained(digits, codec=codec, plan=plan),
        Network(latency_seconds=0.5, worker_bits_per_second=8.0),
    )
    _, averages = played(AVERAGING["ssgd"], training, network=network)
    codec_of_shapes = training.codec.fresh([parameter.shape for parameter in training.module.parameters()])
    size = sum(parameter.numel() for parameter in training.module.parameters())
    most = traffic_of(plan, codec_of_shapes, size, WORKERS)
    took = averages[0].ended_seconds - averages[0].began_seconds
    assert took == pytest.approx(0.5 * most.hops + averages[0].sent_bytes / WORKERS, abs=1)
    slots_and_words = 600 if codec != "qsgd lossless=elias" else most.given_bytes  # shorter than the most by far
    assert averages[0].sent_bytes / WORKERS == pytest.approx(most.given_bytes, abs=slots_and_words)


def test_local_sgd_of_one_step_is_ssgd_with_plain_sgd(digits):
    plain = {"momentum": 0.0, "weight_decay": 0.0}
    models = [
        simulate(member, trained(digits, norm=True, **plain)).learner.parameters
        for member in (AVERAGING["ssgd"], make_averaging("local-sgd", period=1))
    ]
    torch.testing.assert_close(*models, rtol=1e-4, atol=1e-6)


@everyone
def test_one_worker_is_plain_training(digits, member):
    training = trained(digits, workers=1, decay_at=(0.5,))
    run = simulate(member, training, workers=1)
    module, batches = copy.deepcopy(training.module), Batches(training)
    optimizer, schedule = make_optimizer(training.optimizer, module.parameters(), total_steps=ROUNDS)
    for draw in range(ROUNDS):
        local_gradient(module, batches, worker=0, draw=draw)
        optimizer.step()
        schedule.step()
    plain = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    assert torch.equal(run.learner.parameters, plain)


@everyone
def test_the_schedule_follows_what_all_agree_on(whole_run, member):
    _, team, averages = whole_run(member)
    rounds = min(ROUNDS, averages[-1].steps_so_far // WORKERS)
    assert {player.schedule.last_epoch for player in team.models} == {rounds}


@everyone
def test_the_same_seed_gives_the_same_run_and_it_is_measured_at_its_start_and_its_end(digits, member):
    others = {"network": Network(latency_seconds=0.01), "evaluate_every": 100}
    first, second = (simulate(member, trained(digits), **others) for _ in range(2))
    assert first.trace == second.trace
    assert torch.equal(first.learner.parameters, second.learner.parameters)
    assert [evaluation.round for evaluation in first.trace.evaluations] == [0, first.trace.rounds_done]
    assert first.trace.evaluations[-1].loss == first.learner.evaluate().loss == first.progress[-1].loss
    assert (first.trace.averaged, first.trace.stopped) == (True, False)


def test_the_model_is_measured_whenever_it_is_due(digits):
    for name, rounds in (("ssgd", [0, 3, 6, 7]), ("psgd", [0, 3, 6, 7])):
        run = simulate(AVERAGING[name], trained(digits), evaluate_every=3)
        assert [evaluation.round for evaluation in run.trace.evaluations] == rounds


def test_a_shared_model_is_as_good_whoever_is_asked(digits):
    """While windows are open workers differ in parameters, not in what they have merged."""
    compared = []

    class Watched(AveragingWorkers):
        def compute(self, worker, draw):
            super().compute(worker, draw)
            for other in range(WORKERS):
                same = torch.equal(self.parameters_of(other), self.parameters_of(worker))
                if (
                    same
                    and self.models[other].merged
                    and not torch.equal(self.models[other].parameters, self.models[worker].parameters)
                ):
                    compared.append((self.evaluate(worker), self.evaluate(other)))

    team = Watched(trained(digits), AVERAGING["hpsgd"], workers=WORKERS)
    for _ in AveragingCluster(setup(AVERAGING["hpsgd"]), trainer=team).run():
        pass
    assert compared
    assert all(one == other for one, other in compared)


@pytest.mark.parametrize("name", ["ssgd", "hpsgd", "psgd"])
def test_a_run_that_diverges_ends(digits, name):
    run = simulate(
        AVERAGING[name], trained(digits, lr=1e6, weight_decay=1e14, rounds=50), rounds=50, evaluate_every=1000
    )
    assert run.trace.diverged
    assert run.trace.rounds_done < 50


def test_the_caller_s_model_and_random_numbers_are_left_alone(digits):
    training = trained(digits, norm=True)
    before, state = copy.deepcopy(training.module.state_dict()), torch.get_rng_state()
    simulate(AVERAGING["hpsgd"], training)
    assert all(torch.equal(value, before[name]) for name, value in training.module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


# -- the replay -----------------------------------------------------------------------------------------------------


@everyone
def test_a_run_played_again_from_its_windows_gives_the_same_model_to_the_last_bit(whole_run, member):
    training, team, averages = whole_run(member)
    again = replay_averages([average.windows for average in averages], training, member).parameters
    assert torch.equal(again, team.parameters)


@pytest.mark.parametrize(("name", "plan"), [("ssgd", "gather"), ("local-sgd", "two-step"), ("hpsgd", "two-step")])
def test_a_run_with_a_codec_that_remembers_is_played_again_to_the_last_bit(digits, name, plan):
    training, member = trained(digits, codec=ONE_BIT, plan=plan), AVERAGING[name]
    team, averages = played(member, training)
    again = replay_averages([average.windows for average in averages], training, member)
    assert torch.equal(again.parameters, team.parameters)


@pytest.mark.parametrize("name", ["ssgd", "local-sgd", "diloco overlap", "hpsgd", "psgd"])
def test_every_history_that_courses_make_can_be_played_again(digits, name):
    """With checkpoints and flushes on the way, asked for before and after merges."""
    training, member = trained(digits), VARIANTS[name]
    asks = (Standing.SETTLING, Standing.FLUSHING, Standing.SETTLING, Standing.LEAVING)
    for seed in range(3):
        steps = [[(seed + worker + 3 * place) % 5 + (place == 0) for place in range(4)] for worker in range(WORKERS)]
        play = Play(member, [list(zip(own, asks, strict=True)) for own in steps], seed=seed)
        averages = [play.windows(number) for number in play.run().averages]
        assert torch.isfinite(replay_averages(averages, training, member).parameters).all()


def test_a_record_that_a_course_would_not_have_made_is_refused_with_the_place(digits):
    training, member = trained(digits), make_averaging("local-sgd", period=2)
    good = (Window(steps=2), Window(steps=2))
    for odd, because in (
        (Window(steps=3), "recorded with 3 steps, and by its state it enters with 2"),
        (Window(steps=1), "it takes more before it enters"),
        (Window(steps=2, standing=Standing.FLUSHING), "recorded as"),
    ):
        with pytest.raises(ReplayError, match=f"average 1, worker 1: .*{because}"):
            replay_averages([good, (Window(steps=2), odd)], training, member)
    with pytest.raises(ReplayError, match="average 1 has 1 windows, and there are 2 workers"):
        replay_averages([good, good[:1]], training, member)
    leaving = tuple(Window(standing=Standing.LEAVING) for _ in good)
    replay_averages([good, leaving, good], training, member)  # all had left, and the run was extended
    with pytest.raises(ReplayError, match="no average"):
        replay_averages([], training, member)


# -- refusals -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"workers must be 1 or more \(workers=0\)"):
        setup(AVERAGING["ssgd"], workers=0)
    with pytest.raises(ValueError, match="a column for every worker"):
        setup(AVERAGING["ssgd"], workers=2, delays=Recorded(rows=((1.0,),)))
    with pytest.raises(ValueError, match=r"evaluate_every must be 1 or more"):
        AveragedSimulation(setup(AVERAGING["ssgd"]), evaluate_every=0)
