"""What became of each worker's gradients: the counts add up, and who is mostly dropped is named."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drivers.simulated.cluster import Setup
from paceline.drivers.simulated.delays import Recorded
from paceline.strategies import LGC, FastestK, rounds
from paceline.traces import history
from paceline.traces.history import trace_of
from paceline.traces.worker_counts import (
    CAME_TOO_LATE,
    FEWEST,
    WATCHED,
    DropWatch,
    WorkerCounts,
    drop_remedy,
    dropped_sentence,
    mostly_dropped,
)
from tests.traces.test_journal_history import STRATEGIES, Recording, simulated


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_counts_of_the_workers_are_those_of_their_works_and_add_up(name: str) -> None:
    trace = trace_of(simulated(name)[0])
    outcomes = Counter((work.worker, work.outcome) for work in trace.works)
    for counts in trace.by_worker:
        assert (counts.used, counts.late, counts.dropped) == tuple(
            outcomes[counts.worker, outcome] for outcome in ("used", "late", "dropped")
        )
        assert counts.samples_used == 8 * counts.used  # eight in each gradient of these journals
        assert 0 <= counts.waited_seconds <= trace.seconds
    assert sum(counts.gradients for counts in trace.by_worker) == len(trace.works)
    waits = sum(counts.waited_seconds for counts in trace.by_worker)
    assert waits == pytest.approx(0.0, abs=1e-9) if name == "async" else waits > 0


def test_the_counts_of_the_workers_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = simulated("lgc")[0]
    whole = trace_of(kept).by_worker
    monkeypatch.setattr(history, "KEPT_WORKS", 5)
    assert trace_of(kept).by_worker == whole


def slow_worker(strategy: LGC | FastestK, *, blocks: int) -> list[int]:
    """The workers that are mostly dropped where worker 3 takes 16 times as long as the others."""
    delays = Recorded(rows=((1.0, 1.1, 1.2, 17.0),))
    cluster = Recording(Setup(name="lgc", strategy=strategy, workers=4, rounds=100, blocks=blocks, delays=delays))
    for _ in cluster.run(100):
        pass
    found = Counter((work.worker, work.outcome) for work in cluster.record.works)
    late = Counter(work.worker for work in cluster.record.works if work.reason in CAME_TOO_LATE)
    return [
        counts.worker
        for counts in mostly_dropped(
            WorkerCounts(
                worker=worker,
                used=found[worker, "used"],
                late=found[worker, "late"],
                dropped=found[worker, "dropped"],
                too_late=late[worker],
            )
            for worker in range(4)
        )
    ]


def test_what_is_said_to_help_helps() -> None:
    assert slow_worker(LGC(k=3), blocks=4) == [3]
    assert slow_worker(LGC(k=3), blocks=32) == []
    assert slow_worker(LGC(k=4), blocks=4) == []
    assert slow_worker(FastestK(k=3), blocks=32) == [3]
    assert slow_worker(FastestK(k=4), blocks=32) == []


NUMBERS = st.integers(0, 50)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=6), st.randoms(use_true_random=False))
def test_mostly_dropped_is_more_than_half_in_whatever_order(rows: list[tuple[int, ...]], random: object) -> None:
    counts = [
        WorkerCounts(worker=number, used=used, late=late, dropped=too_late + other, too_late=too_late)
        for number, (used, late, too_late, other) in enumerate(rows)
    ]
    found = mostly_dropped(counts)
    assert {each.worker for each in found} == {
        each.worker for each in counts if each.gradients >= FEWEST and each.too_late > each.gradients / 2
    }
    shuffled = list(counts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert mostly_dropped(shuffled) == found


def test_the_reasons_that_are_about_time_are_those_of_the_strategies() -> None:
    source = inspect.getsource(rounds)
    assert all(f'"{reason}"' in source for reason in CAME_TOO_LATE)


@pytest.mark.parametrize("strategy", ["full", "async", "hpsgd", "whatever"])
def test_where_nothing_is_dropped_for_being_late_no_remedy_is_told(strategy: str) -> None:
    counts = WorkerCounts(worker=1, dropped=9, too_late=9)
    assert drop_remedy(strategy, counts) == ""
    assert "What helps" not in dropped_sentence(strategy, counts)


def told_of(gradients: str) -> list[str]:
    """What a watch says of a worker, told after each of its gradients: "d" is dropped, "u" used."""
    watch, said = DropWatch("lgc"), []
    for end in range(1, len(gradients) + 1):
        dropped, used = gradients[:end].count("d"), gradients[:end].count("u")
        said += watch.sentences([WorkerCounts(worker=3, used=used, dropped=dropped, too_late=dropped)])
    return said


def test_a_worker_is_named_when_its_work_begins_to_be_dropped_and_once() -> None:
    (said,) = told_of("d" * 1000)
    assert "worker 3 is mostly dropped: 5 of its 5 gradients came too late. What helps: more blocks" in said
    (said,) = told_of("u" * 5005 + "d" * 100)  # of all its gradients two in a hundred
    assert "10 of its last 10" in said
    assert told_of("u" * 1000) == told_of("ud" * 500) == []


def test_a_worker_that_comes_and_goes_is_named_again_but_rarely() -> None:
    flapping = "u" * FEWEST + ("d" * WATCHED + "u" * WATCHED) * 500
    assert 2 <= len(told_of(flapping)) <= 8


@settings(max_examples=50)
@given(st.text("du", max_size=300))
def test_whoever_is_named_had_most_of_the_first_five_or_of_ten_gradients_dropped(gradients: str) -> None:
    ends = [FEWEST, *range(FEWEST + WATCHED, len(gradients) + 1, WATCHED)]
    judged = [gradients[start:end] for start, end in zip([0, *ends], ends, strict=False) if end <= len(gradients)]
    named = sum(2 * part.count("d") > len(part) for part in judged)
    assert bool(told_of(gradients)) == bool(named)
    assert len(told_of(gradients)) <= named
