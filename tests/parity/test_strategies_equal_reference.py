"""The strategies and the combiner against reference.py, on random schedules."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.events import GradientArrived, Joined, Step
from paceline.strategies import LGC, Async, FastestK, Full
from paceline.strategies.combine import Combiner
from tests.oracles import strategies as reference
from tests.oracles.strategies import PlainRound

quick = settings(deadline=None, max_examples=60, derandomize=True)
numbers = st.integers(-8, 8).map(float)


@st.composite
def schedules(draw, *, sized=False):
    """Rounds on paper, and a K; any of the stragglers arrive in the next round, with any number of blocks."""
    workers, blocks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    k = draw(st.integers(1, workers))
    warmup_rounds = draw(st.sampled_from([0, 0, 1, 2]))
    rounds = []
    for number in range(draw(st.integers(1, 5))):
        order = draw(st.permutations(range(workers)))
        late = () if number < warmup_rounds else order[k:]
        arriving = [worker for worker in late if draw(st.booleans())]
        samples = draw(st.lists(st.integers(1, 40), min_size=workers, max_size=workers)) if sized else ()
        rounds.append(
            PlainRound(
                block_gradients=draw(_gradients(workers, blocks)),
                order=order,
                late_blocks_done={worker: draw(st.integers(1, blocks)) for worker in arriving},
                samples=samples,
            )
        )
    return (
        [_as_the_server_takes_it(rounds, number, k, warmup_rounds) for number in range(len(rounds))],
        k,
        warmup_rounds,
    )


def _as_the_server_takes_it(rounds, number, k, warmup_rounds):
    """Of a straggler that never delivers this batch, the last one that it delivered; or else the mean of the others."""
    plain = rounds[number]
    if not plain.samples:
        return plain

    def delivered(worker, at):
        first = rounds[at].order if at < warmup_rounds else rounds[at].order[:k]
        return worker in first or worker in rounds[at].late_blocks_done

    def known(worker):
        return next((rounds[at].samples[worker] for at in range(number, -1, -1) if delivered(worker, at)), None)

    sizes = [known(worker) for worker in range(plain.workers)]
    said = [size for size in sizes if size is not None]
    return dataclasses.replace(plain, samples=[sum(said) / len(said) if size is None else size for size in sizes])


def _gradients(workers, blocks):
    vector = st.tuples(numbers, numbers)
    return st.lists(st.lists(vector, min_size=blocks, max_size=blocks), min_size=workers, max_size=workers)


def run(strategy, rounds):
    """The schedule as events: late gradients of the round before come in first, then the fresh ones, in order."""
    running, combiner, updates, sent = strategy.start(), Combiner(), [], {}

    def arrives(worker, version, blocks_done):
        blocks = rounds[version].block_gradients[worker]
        # What a worker sends is always the sum over the blocks it did, divided by all blocks.
        sent[worker, version] = torch.tensor(blocks[:blocks_done], dtype=torch.float64).sum(0) / len(blocks)
        event = GradientArrived(
            worker=worker,
            version=version,
            blocks_done=blocks_done,
            blocks=len(blocks),
            samples=rounds[version].samples[worker] if rounds[version].samples else 0,
        )
        for action in running.handle(event):
            if isinstance(action, Step):
                updates.append(combiner.update(action, lambda share: sent[share.worker, share.version]))

    for worker in rounds[0].order:
        running.handle(Joined(worker=worker))
    for version, plain in enumerate(rounds):
        if version:
            for worker, blocks_done in rounds[version - 1].late_blocks_done.items():
                arrives(worker, version - 1, blocks_done)
        for worker in plain.order:
            if running.version == version:
                arrives(worker, version, len(plain.block_gradients[worker]))
    return updates


def assert_same(found, expected):
    torch.testing.assert_close(torch.stack(found), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


any_schedules = schedules() | schedules(sized=True)


@quick
@given(schedule=any_schedules)
def test_full_is_the_mean_of_everybody(schedule):
    rounds, _, _ = schedule
    assert_same(run(Full(), rounds), reference.full(rounds))


@quick
@given(schedule=any_schedules)
def test_fastest_k_is_the_mean_of_the_first(schedule):
    rounds, k, warmup_rounds = schedule
    found = run(FastestK(k=k, warmup_rounds=warmup_rounds), rounds)
    assert_same(found, reference.fastest_k(rounds, k=k, warmup_rounds=warmup_rounds))


@pytest.mark.parametrize("scale_partial", [True, False, "samples"])
@quick
@given(schedule=any_schedules)
def test_lgc_is_the_fresh_mean_and_the_compensation(scale_partial, schedule):
    rounds, k, warmup_rounds = schedule
    found = run(LGC(k=k, warmup_rounds=warmup_rounds, scale_partial=scale_partial), rounds)
    expected = reference.lgc(rounds, k=k, warmup_rounds=warmup_rounds, scale_partial=scale_partial)
    assert_same(found, expected)


@pytest.mark.parametrize("staleness_scaling", [True, False])
@quick
@given(data=st.data())
def test_async_is_every_gradient_by_its_staleness(staleness_scaling, data):
    running, combiner, updates, arrivals = Async(staleness_scaling=staleness_scaling).start(), Combiner(), [], []
    for worker in range(3):
        running.handle(Joined(worker=worker))
    for _ in range(data.draw(st.integers(1, 8))):
        version = data.draw(st.integers(0, running.version))
        gradient = data.draw(st.tuples(numbers, numbers))
        arrivals.append((gradient, version))
        step = running.handle(GradientArrived(worker=version % 3, version=version))[0]
        updates.append(combiner.update(step, lambda share, g=gradient: torch.tensor(g, dtype=torch.float64)))
    assert_same(updates, reference.asynchronous(arrivals, staleness_scaling=staleness_scaling))
