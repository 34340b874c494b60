"""The pruning policies against reference_pruning.py, epoch by epoch, on random losses, batches and schedules."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.pruning.fine_pruning import FinePolicy, FineSchedule
from paceline.data.pruning.info_batch import InfoPolicy
from tests.oracles import pruning as reference

some = settings(max_examples=100)

# Eighths, so that sums come out the same in any order. Levels of one value make everybody equal.
LEVELS = {
    "equal": [1.0],
    "few": [0.0, 1.0, 2.0],
    "many": [eighths / 8 for eighths in range(64)],
    "broken": [0.5, 1.0, 4.0, float("inf"), float("nan")],
}
HOW = ("at once", "batch by batch", "through a state in the middle")


@dataclass(frozen=True)
class Run:
    """Losses and batches by epoch, repeatable; of an epoch that is broken off only some batches are told of."""

    samples: int
    epochs: int
    batch_size: int
    levels: str
    breaks: bool
    seed: int

    def loss(self, epoch, sample):
        return random.Random(f"{self.seed} {epoch} {sample}").choice(LEVELS[self.levels])

    def batches(self, epoch, kept):
        chance = random.Random(f"{self.seed} {epoch}")
        order = sorted(kept)
        chance.shuffle(order)
        cut = [order[place : place + self.batch_size] for place in range(0, len(order), self.batch_size)]
        return cut[: chance.choice((0, len(cut) // 2, len(cut)))] if self.breaks else cut


runs = st.builds(
    Run,
    samples=st.integers(1, 12),
    epochs=st.integers(1, 24),
    batch_size=st.integers(1, 13),
    levels=st.sampled_from(list(LEVELS)),
    breaks=st.booleans(),
    seed=st.integers(0, 1000),
)


@st.composite
def schedules(draw, samples):
    window, block = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    return FineSchedule(
        window=window,
        starting_point=draw(st.integers(0, window)),
        attenuation=draw(st.sampled_from([1, 1.5, 2, 3])),
        block=block,
        count=draw(st.integers(min(1, block), block)),
        prune=draw(st.integers(0, samples - 1)),
    )


def history(new_policy, run, how="at once"):
    """The decision of every epoch as [(kept samples, their weights)], and the policy at the end."""
    policy, found = new_policy(), []
    for epoch in range(1, run.epochs + 1):
        if how == HOW[2] and epoch == run.epochs // 2 + 1:
            state, policy = policy.state_dict(), new_policy()
            policy.load_state_dict(state)
        decision = policy.decide(epoch, (epoch - 1) / run.epochs)
        kept = list(range(run.samples)) if decision.keep is None else np.flatnonzero(decision.keep).tolist()
        weights = [1.0] * len(kept) if decision.weights is None else decision.weights[kept].tolist()
        found.append((kept, weights))
        told = run.batches(epoch, kept)
        for group in [[batch] for batch in told] if how == HOW[1] else [told]:
            members = [sample for batch in group for sample in batch]
            losses = np.array([run.loss(epoch, sample) for sample in members], np.float32)
            ends = np.cumsum([len(batch) for batch in group], dtype=np.int64)
            policy.judge(epoch, np.array(members, np.int64), losses, ends)
        policy.end_epoch(decision.keep)
    return found, policy


def sat_out(kept_by_epoch, samples):
    return [sum(sample not in kept for kept in kept_by_epoch) for sample in range(samples)]


@pytest.mark.parametrize("how", HOW)
@some
@given(run=runs, data=st.data(), tolerance=st.sampled_from([0.0, 0.25, 0.5]))
def test_fine_pruning_keeps_whom_the_papers_listings_keep(how, run, data, tolerance):
    schedule = data.draw(schedules(run.samples))

    def new():
        return FinePolicy(run.samples, schedule, tolerance=tolerance, seed=run.seed)

    found, policy = history(new, run, how)
    expected = reference.fine_pruning(
        run.samples,
        run.batches,
        run.loss,
        lambda epoch, tied: new().tie_lots(epoch, tied).tolist(),
        epochs=run.epochs,
        window=schedule.window,
        starting_point=schedule.starting_point,
        attenuation=schedule.attenuation,
        block=schedule.block,
        count=schedule.count,
        pruning_num=schedule.prune,
        tolerance=tolerance,
    )
    assert [kept for kept, _ in found] == expected
    assert all(weights == [1.0] * len(kept) for kept, weights in found)
    assert policy.times_pruned.tolist() == sat_out(expected, run.samples)


@pytest.mark.parametrize("how", HOW)
@some
@given(
    run=runs,
    ratio=st.sampled_from([0.0, 0.25, 0.3, 0.5, 0.75, 0.875]),
    delta=st.sampled_from([0.0, 0.3, 0.5, 0.875, 1.0]),
)
def test_info_batch_keeps_and_weighs_as_its_reference(how, run, ratio, delta):
    def lots(epoch, many):
        return InfoPolicy(run.samples, seed=run.seed).generator("lots", epoch).random(many, np.float32).tolist()

    found, policy = history(lambda: InfoPolicy(run.samples, ratio=ratio, delta=delta, seed=run.seed), run, how)
    expected = reference.info_batch(
        run.samples, run.batches, run.loss, lots, epochs=run.epochs, ratio=ratio, delta=delta
    )
    assert [kept for kept, _ in found] == [list(weights) for weights in expected]
    for (_, weights), exactly in zip(found, expected, strict=True):
        assert weights == np.array(list(exactly.values()), np.float32).tolist()
    assert policy.times_pruned.tolist() == sat_out(expected, run.samples)


def test_the_runs_above_do_prune_tie_and_break_off():
    """A comparison of runs in which nothing happens would be none."""
    run = Run(samples=12, epochs=24, batch_size=5, levels="few", breaks=True, seed=3)
    schedule = FineSchedule(window=9, starting_point=2, attenuation=2, block=2, count=1, prune=4)
    policy, tied = FinePolicy(12, schedule), []
    draws = policy.tie_lots
    policy.tie_lots = lambda epoch, many: tied.append((epoch, many)) or draws(epoch, many)
    found, _ = history(lambda: policy, run)
    assert {len(kept) for kept, _ in found} == {8, 12}
    assert tied
    told = [sum(map(len, run.batches(epoch, range(12)))) for epoch in range(1, 25)]
    assert {0, 12} < set(told)
    whole = replace(run, breaks=False)
    assert all(sum(map(len, whole.batches(epoch, range(12)))) == 12 for epoch in range(1, 25))
    info, _ = history(lambda: InfoPolicy(12, seed=1), whole)
    assert {weight for _, weights in info for weight in weights} == {1.0, 2.0}
