"""What the strategies' updates add up to: unbiasedness, telescoping, equality with K = N."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.events import Drop, GradientArrived, Joined, Send, Step
from paceline.strategies import LGC, Async, FastestK, Full
from paceline.strategies.combine import Combiner
from paceline.strategies.lgc import settled, weighing_in
from paceline.strategies.shares import SharesBySpeed
from tests.contracts.play import Deliver, Join, Leave, histories, play, steps_of

quick = settings(deadline=None, max_examples=40, derandomize=True)
WEIGHTS = (True, False, "samples")  # of partial late work


class Server:
    """A strategy and a combiner; gradients are given by (worker, version)."""

    def __init__(self, strategy, workers, gradient, samples=lambda worker, version: 0):
        self.running, self.combiner, self.gradient, self.samples = strategy.start(), Combiner(), gradient, samples
        self.updates, self.steps = [], []
        for worker in range(workers):
            self.running.handle(Joined(worker=worker))

    def arrives(self, worker, version):
        event = GradientArrived(worker=worker, version=version, samples=self.samples(worker, version))
        for action in self.running.handle(event):
            if isinstance(action, Step):
                self.steps.append(action)
                self.updates.append(
                    self.combiner.update(action, lambda share: self.gradient(share.worker, share.version))
                )


def updates_of(strategy, orders, gradient, **sizes):
    """Every round all workers come in the order given; those that miss their round arrive in the next, first."""
    server = Server(strategy, len(orders[0]), gradient, **sizes)
    late = []
    for version, order in enumerate(orders):
        for worker in late:
            server.arrives(worker, version - 1)
        late = []
        for worker in order:
            if server.running.version == version:
                server.arrives(worker, version)
            else:
                late.append(worker)
    return server.updates


def made_up_gradient(dtype=torch.float64):
    return lambda worker, version: torch.randn(
        7, generator=torch.Generator().manual_seed(1000 * version + worker), dtype=dtype
    )


@st.composite
def orders(draw, workers):
    rounds = draw(st.integers(1, 6))
    return [draw(st.permutations(range(workers))) for _ in range(rounds)]


@quick
@given(data=st.data(), workers=st.integers(1, 6))
def test_with_k_of_everybody_lgc_fastest_k_and_full_agree_to_the_last_bit(data, workers):
    arrivals = data.draw(orders(workers))
    gradient = made_up_gradient(torch.float32)
    everybody = updates_of(Full(), arrivals, gradient)
    assert len(everybody) == len(arrivals)
    for strategy in (FastestK(k=workers), *(LGC(k=workers, scale_partial=how) for how in WEIGHTS), LGC(k=99)):
        for expected, found in zip(everybody, updates_of(strategy, arrivals, gradient), strict=True):
            assert torch.equal(expected, found)


@quick
@given(data=st.data(), workers=st.integers(1, 6))
def test_an_update_does_not_depend_on_the_order_of_arrival_within_a_full_round(data, workers):
    arrivals = data.draw(orders(workers))
    gradient = made_up_gradient(torch.float32)
    in_order = updates_of(Full(), [list(range(workers))] * len(arrivals), gradient)
    for expected, found in zip(in_order, updates_of(Full(), arrivals, gradient), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("how", WEIGHTS)
@quick
@given(data=st.data(), workers=st.integers(1, 6))
def test_lgc_telescopes_to_the_full_means_and_the_last_fresh_mean(how, data, workers):
    arrivals = data.draw(orders(workers))
    k = data.draw(st.integers(1, workers))
    gradient = made_up_gradient()
    found = torch.stack(updates_of(LGC(k=k, scale_partial=how), arrivals, gradient)).sum(0)
    full_means = [
        torch.stack([gradient(worker, version) for worker in range(workers)]).mean(0)
        for version in range(len(arrivals) - 1)
    ]
    last = len(arrivals) - 1
    last_fresh = torch.stack([gradient(worker, last) for worker in arrivals[last][:k]]).mean(0)
    torch.testing.assert_close(found, sum(full_means, last_fresh), rtol=0, atol=1e-12)


@quick
@given(data=st.data(), workers=st.integers(1, 6))
def test_lgc_telescopes_to_the_means_over_all_samples_whatever_the_sizes_of_batches(data, workers):
    arrivals = data.draw(orders(workers))
    k = data.draw(st.integers(1, workers))
    sizes = data.draw(st.lists(st.integers(1, 60), min_size=workers * len(arrivals), max_size=workers * len(arrivals)))
    gradient, last = made_up_gradient(), len(arrivals) - 1

    def samples(worker, version):
        return sizes[version * workers + worker]

    def mean(of, version):
        total = sum(samples(worker, version) for worker in of)
        return sum(samples(worker, version) / total * gradient(worker, version) for worker in of)

    for strategy in (*(LGC(k=k, scale_partial=how) for how in WEIGHTS), LGC(k=k, shares=SharesBySpeed(batch_size=8))):
        found = torch.stack(updates_of(strategy, arrivals, gradient, samples=samples)).sum(0)
        full_means = [mean(range(workers), version) for version in range(last)]
        torch.testing.assert_close(found, sum(full_means, mean(arrivals[last][:k], last)), rtol=0, atol=1e-12)


@quick
@given(data=st.data(), workers=st.integers(1, 6))
def test_with_whole_late_work_all_three_weights_give_the_same_bits(data, workers):
    arrivals, k = data.draw(orders(workers)), data.draw(st.integers(1, workers))
    sizes = data.draw(st.lists(st.integers(1, 60), min_size=workers * len(arrivals), max_size=workers * len(arrivals)))
    gradient = made_up_gradient(torch.float32)
    for samples in (lambda worker, version: 0, lambda worker, version: sizes[version * workers + worker]):
        first, *others = (
            updates_of(LGC(k=k, scale_partial=how), arrivals, gradient, samples=samples) for how in WEIGHTS
        )
        for other in others:
            assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_by_samples_a_round_and_what_is_made_up_for_it_are_the_mean_over_all_samples_that_were_computed():
    batches, done = {0: 8, 1: 16, 2: 40, 3: 12}, {2: 3, 3: 1}  # two are late, with 30 of 40 and 3 of 12 samples
    means = {worker: torch.tensor([10.0**worker], dtype=torch.float64) for worker in batches}
    running, combiner, updates = LGC(k=2, scale_partial="samples").start(), Combiner(), []
    sent = {(worker, 0): done.get(worker, 4) / 4 * means[worker] for worker in batches}
    sent |= {(worker, 1): torch.zeros(1, dtype=torch.float64) for worker in batches}
    for worker in batches:
        running.handle(Joined(worker=worker))
    for worker, version in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1)):
        blocks_done = done.get(worker, 4) if version == 0 else 4
        event = GradientArrived(
            worker=worker, version=version, blocks_done=blocks_done, blocks=4, samples=batches[worker]
        )
        for action in running.handle(event):
            if isinstance(action, Step):
                updates.append(combiner.update(action, lambda share: sent[share.worker, share.version]))
    computed = {worker: size * done.get(worker, 4) / 4 for worker, size in batches.items()}
    mean = sum(computed[worker] * means[worker] for worker in batches) / sum(computed.values())
    torch.testing.assert_close(updates[0] + updates[1], mean)


@pytest.mark.parametrize("how", WEIGHTS)
def test_late_work_that_was_kept_weighs_the_same_after_a_checkpoint(how):
    def late_shares(reload):
        running = LGC(k=1, scale_partial=how).start()
        for worker in range(3):
            running.handle(Joined(worker=worker))
        running.handle(GradientArrived(worker=0, version=0, blocks=4, blocks_done=4, samples=8))
        for worker, done in ((1, 1), (2, 3)):
            running.handle(GradientArrived(worker=worker, version=0, blocks=4, blocks_done=done, samples=24))
        if reload:
            state, running = running.state_dict(), LGC(k=1, scale_partial=how).start()
            running.load_state_dict(state)
        step = running.handle(GradientArrived(worker=0, version=1, blocks=4, blocks_done=4, samples=8))[0]
        return step.late, step.previous_mean_weight

    assert late_shares(reload=False) == late_shares(reload=True)


def late_weights(running):
    """Return the weights of late work in the second step of a run of three workers, of which two are late."""
    for worker in range(3):
        running.handle(Joined(worker=worker))
    running.handle(GradientArrived(worker=0, version=0, blocks=4, blocks_done=4, samples=8))
    for worker, done in ((1, 1), (2, 3)):
        running.handle(GradientArrived(worker=worker, version=0, blocks=4, blocks_done=done, samples=24))
    return running.handle(GradientArrived(worker=0, version=1, blocks=4, blocks_done=4, samples=8))[0].late


def test_a_run_that_begins_weighs_by_samples_and_one_that_goes_on_as_it_began():
    by = {how: late_weights(LGC(k=1, scale_partial=how).start()) for how in WEIGHTS}
    assert len(set(by.values())) == len(WEIGHTS)
    assert late_weights(LGC(k=1).start()) == late_weights(settled(LGC(k=1)).start()) == by["samples"]
    for how in WEIGHTS:
        assert late_weights(settled(LGC(k=1), how).start()) == by[how]
        assert settled(LGC(k=1, scale_partial=False), how) == LGC(k=1, scale_partial=False)
        assert weighing_in(repr(LGC(k=1, scale_partial=how))) == how
    assert weighing_in(repr(LGC(k=1))) is None


def test_a_weight_that_there_is_not_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"true, false, 'samples' or 'auto' \(scale_partial='blocks'\)"):
        LGC(k=2, scale_partial="blocks")


@quick
@given(data=st.data(), workers=st.integers(1, 6), size=st.integers(1, 64))
def test_batches_that_are_said_to_be_equal_give_the_bits_of_those_whose_size_nobody_says(data, workers, size):
    arrivals, k = data.draw(orders(workers)), data.draw(st.integers(1, workers))
    gradient = made_up_gradient(torch.float32)
    for strategy in (Full(), FastestK(k=k), LGC(k=k)):
        unsaid = updates_of(strategy, arrivals, gradient)
        said = updates_of(strategy, arrivals, gradient, samples=lambda worker, version: size)
        assert all(torch.equal(one, other) for one, other in zip(unsaid, said, strict=True))


# Four workers on skewed data: worker i's gradient is always SKEWED[i]. What matters is the mean update.
SKEWED = [1.0, 2.0, 3.0, 10.0]
TRUE_MEAN = sum(SKEWED) / 4
ROUNDS, K = 3000, 2


def mean_update(strategy, arrivals):
    def gradient(worker, version):
        return torch.tensor([SKEWED[worker]], dtype=torch.float64)

    return float(torch.stack(updates_of(strategy, arrivals, gradient)).mean())


def test_with_stragglers_drawn_anew_each_round_fastest_k_is_unbiased():
    generator = random.Random(7)
    arrivals = [generator.sample(range(4), 4) for _ in range(ROUNDS)]
    # K of N without replacement; updates of different rounds are independent. 4.9 deviations: false alarm 1e-6.
    variance = sum((value - TRUE_MEAN) ** 2 for value in SKEWED) / 3
    deviation = math.sqrt(variance / K * (1 - K / 4) / ROUNDS)
    assert abs(mean_update(FastestK(k=K), arrivals) - TRUE_MEAN) < 4.9 * deviation


def test_with_persistent_stragglers_fastest_k_is_biased_and_lgc_is_not():
    arrivals = [[0, 1, 2, 3]] * ROUNDS  # the worker that holds the odd data is always last
    assert mean_update(FastestK(k=K), arrivals) == pytest.approx(1.5)
    # What does not telescope away is the last round's bias alone: at most the largest spread, divided by the rounds.
    assert abs(mean_update(LGC(k=K), arrivals) - TRUE_MEAN) <= 9.0 / ROUNDS


def test_with_random_stragglers_lgc_is_unbiased_too_and_steadier_than_fastest_k():
    generator = random.Random(7)
    arrivals = [generator.sample(range(4), 4) for _ in range(ROUNDS)]
    assert abs(mean_update(LGC(k=K), arrivals) - TRUE_MEAN) <= 9.0 / ROUNDS


@quick
@given(moves=histories)
def test_an_asynchronous_gradient_is_divided_by_one_plus_its_staleness(moves):
    for step in steps_of(play(Async().start(), moves)):
        (share,) = step.fresh
        assert share.weight == 1 / (1 + step.version - share.version)
    for step in steps_of(play(Async(staleness_scaling=False).start(), moves)):
        assert step.fresh[0].weight == 1.0


@pytest.mark.parametrize("strategy", [FastestK(k=1, warmup_rounds=2), LGC(k=1, warmup_rounds=2)], ids=str)
def test_warmup_rounds_wait_for_everybody(strategy):
    gradient = made_up_gradient(torch.float32)
    arrivals = [[2, 0, 1], [1, 0, 2], [1, 2, 0], [1, 2, 0]]
    everybody, found = updates_of(Full(), arrivals, gradient), updates_of(strategy, arrivals, gradient)
    assert all(torch.equal(a, b) for a, b in zip(everybody[:2], found[:2], strict=True))
    assert torch.equal(found[2], gradient(1, 2))


@pytest.mark.parametrize("late", [[], [2], [3], [2, 3]], ids=str)
def test_compensation_counts_the_late_gradients_that_arrived(late):
    server = Server(LGC(k=2), 4, made_up_gradient())
    for worker in (0, 1):
        server.arrives(worker, 0)
    for worker in late:
        server.arrives(worker, 0)
    for worker in (0, 1):
        server.arrives(worker, 1)
    step = server.steps[1]
    assert [share.worker for share in step.late] == late
    assert [share.weight for share in step.late] == [1 / 4] * len(late)
    assert step.previous_mean_weight == len(late) / 4


def test_a_dead_worker_is_a_straggler_that_never_arrives():
    """The same updates whether worker 3 died after round 0 was closed without it, or is only very slow."""
    gradient = made_up_gradient(torch.float32)
    slow, dead = (Server(LGC(k=2), 4, gradient) for _ in range(2))
    for server in (slow, dead):
        for worker in (0, 1):
            server.arrives(worker, 0)
    play(dead.running, [Leave(3)])
    for server in (slow, dead):
        for worker, version in ((2, 0), (0, 1), (1, 1)):
            server.arrives(worker, version)
    assert all(torch.equal(a, b) for a, b in zip(slow.updates, dead.updates, strict=True))
    assert dead.updates[1].shape == slow.updates[1].shape


@pytest.mark.parametrize("strategy", [FastestK(k=3), LGC(k=3)], ids=str)
def test_k_is_capped_by_the_workers_alive(strategy):
    running = strategy.start()
    play(running, [Join(worker) for worker in range(5)])
    assert running.k == 3
    play(running, [Leave(4), Leave(3), Leave(2)])
    assert running.k == 2
    play(running, [Join(2), Join(3)])
    assert running.k == 3


def test_n_of_the_compensation_follows_the_workers_alive():
    running = LGC(k=1).start()
    play(running, [Join(worker) for worker in range(5)])
    play(running, [Leave(4), Leave(3)])
    (step,) = steps_of(play(running, [Deliver(0), Deliver(1, age=1), Deliver(0)]))[1:]
    assert step.late[0].weight == 1 / 3
    assert step.previous_mean_weight == 1 / 3


def test_n_of_the_compensation_counts_a_worker_that_delivered_and_then_died():
    running = LGC(k=2).start()
    play(running, [Join(worker) for worker in range(4)])
    play(running, [Deliver(0), Leave(0), Deliver(1)])
    (step,) = steps_of(play(running, [Deliver(2, age=1), Deliver(1), Deliver(3)]))
    assert [(share.worker, share.weight) for share in step.late] == [(2, 1 / 4)]
    assert step.previous_mean_weight == 1 / 4


def test_full_takes_the_gradient_of_a_worker_that_died_after_it_delivered_and_waits_for_the_living():
    """A worker delivers and is gone. The others are on time, so `full` must still have them in its mean."""
    running = Full().start()
    play(running, [Join(0), Join(1), Join(2), Deliver(0), Leave(0), Deliver(1)])
    assert running.version == 0, "worker 2 is alive, has not delivered, and full waits for everybody"
    (step,) = steps_of(play(running, [Deliver(2)]))
    assert [share.worker for share in step.fresh] == [0, 1, 2]


def test_a_worker_that_was_not_in_a_round_has_no_late_gradient_of_it():
    """Worker 1 dies in round 0, which closes with N=1, and comes back: its old gradient is not part of that N."""
    running = LGC(k=1).start()
    play(running, [Join(0), Join(1), Leave(1), Deliver(0), Join(1)])
    ((_, actions),) = play(running, [Deliver(1, age=1)])
    assert [type(action) for action in actions] == [Drop]
    (step,) = steps_of(play(running, [Deliver(0)]))
    assert step.previous_mean_weight == 0.0


def test_a_late_gradient_that_misses_the_next_round_too_is_dropped():
    running = LGC(k=1).start()
    play(running, [Join(0), Join(1), Deliver(0), Deliver(0)])
    ((_, actions),) = play(running, [Deliver(1, age=2)])
    (drop,) = actions
    assert (drop.worker, drop.version) == (1, 0)
    assert "missed" in drop.reason


def test_an_asynchronous_step_answers_its_worker_alone():
    running = Async().start()
    play(running, [Join(0), Join(1)])
    ((_, actions),) = play(running, [Deliver(1)])
    assert actions[-1] == Send(workers=(1,))


def test_compensating_before_any_step_is_refused():
    from paceline.events import Share

    step = Step(version=1, fresh=(Share(worker=0, version=1, weight=1.0),), previous_mean_weight=0.5)
    with pytest.raises(ValueError, match="step 1 compensates for a step before it"):
        Combiner().update(step, lambda share: torch.ones(1))


def test_a_combiner_goes_on_from_its_state_dict():
    gradient = made_up_gradient()
    first = Server(LGC(k=1), 2, gradient)
    first.arrives(0, 0)
    copy = Combiner()
    copy.load_state_dict(first.combiner.state_dict())
    first.arrives(1, 0)
    first.arrives(0, 1)
    found = copy.update(first.steps[1], lambda share: gradient(share.worker, share.version))
    assert torch.equal(found, first.updates[1])


@pytest.mark.parametrize("make", [FastestK, LGC])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"k": 0}, "k=0"),
        ({"k": -1}, "k=-1"),
        ({"k": True}, "k=True"),
        ({"k": 1.5}, "k=1.5"),
        ({"k": 1, "warmup_rounds": -2}, "warmup_rounds=-2"),
    ],
)
def test_bad_settings_are_refused_with_what_was_given(make, bad, message):
    with pytest.raises(ValueError, match=message):
        make(**bad)
