"""The journal of rounds on ranks, record by record; and how the ranks part from the store that rank 0 keeps."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from paceline.drivers.ranks import rendezvous
from paceline.drivers.ranks.launch import Place
from paceline.drivers.rounds.decider import ENDED
from paceline.drivers.rounds.journal import RoundsJournal
from paceline.drivers.rounds.outcomes import NOT_FINITE
from paceline.drivers.rounds.synchronizer import ClosedRound, Flushed
from paceline.events import Drop, Share, Step
from paceline.traces.history import trace_of
from paceline.traces.journal import (
    FORMAT,
    Arrival,
    Arrived,
    Checkpointed,
    Extended,
    Refused,
    Resumed,
    RunBegan,
    StepRecord,
)
from paceline.traces.journal_files import JournalWriter, read_journal
from paceline.traces.records import Evaluation
from paceline.workers.flat import FlatModel

BEGAN = RunBegan(
    format=FORMAT,
    paceline="0.1.0",
    strategy="lgc@ranks",
    seed=0,
    workers=2,
    blocks=1,
    recipe={"rounds": 9},
    signature="",
    codec="identity",
    on="ranks",
    torch="2.13",
)


@pytest.fixture
def opened(tmp_path):
    """How a journal is opened, to begin or to go on."""

    def open_journal(*, goes_on=False):
        model = FlatModel(torch.nn.Linear(2, 1))
        return RoundsJournal(tmp_path / "trace.jsonl", BEGAN, model=model, goes_on=goes_on)

    return open_journal


def arrival(worker, version, at_seconds):
    return Arrival(
        worker=worker,
        version=version,
        draw=version,
        blocks_done=1,
        blocks=1,
        at_seconds=at_seconds,
        work_seconds=0.5,
        transfer_seconds=0.0,
        loss_mean=None,
        loss_variance=None,
        samples=0,
    )


def closed(version, *arrivals, late=(), dropped=()):
    fresh = (Share(worker=0, version=version, weight=1.0),)
    late_shares = tuple(Share(worker=worker, version=version - 1, weight=0.5) for worker in late)
    step = Step(version=version, fresh=fresh, late=late_shares, at_seconds=version + 1.0)
    return ClosedRound(step=step, dropped=dropped, arrivals=arrivals, done=0.0, applied=0.0, sent_bytes=24)


def join(journal, at_seconds=0.0, draw=0):
    journal.join(at_seconds=at_seconds, threads=[1, 1], hosts=["a", "b"], draws=[draw, draw])


def records_of(tmp_path, kind):
    return [record for record in read_journal(tmp_path / "trace.jsonl").records if isinstance(record, kind)]


def test_a_gradient_that_is_not_finite_is_refused_and_one_that_is_too_late_is_dropped(opened, tmp_path):
    journal = opened()
    join(journal)
    dropped = (Drop(worker=1, version=0, reason=NOT_FINITE), Drop(worker=1, version=0, reason="it came twice"))
    journal.round_closed(closed(0, arrival(0, 0, 1.0), dropped=dropped))
    journal.flushed(
        Flushed(version=1, leaving=True, dropped=(Drop(worker=1, version=0, reason=ENDED),), arrivals=()), 2.0
    )
    journal.close()
    (refused,), (step,) = records_of(tmp_path, Refused), records_of(tmp_path, StepRecord)
    assert (refused.worker, refused.peer, refused.reason) == (1, "b", "not finite")
    assert [drop.reason for drop in step.dropped] == ["it came twice"]
    assert not records_of(tmp_path, Arrived)


def go_on_with_a_late_gradient(opened, *, noted):
    """Rank 1's gradient of round 0 is late when all save; they go on from there, and the next step takes it."""
    journal = opened()
    join(journal)
    journal.evaluated(Evaluation(round=0, seconds=0.0, loss=2.3, accuracy=0.1))
    journal.round_closed(closed(0, arrival(0, 0, 1.0)))
    journal.flushed(Flushed(version=1, leaving=False, dropped=(), arrivals=(arrival(1, 0, 1.5),)), 1.5)
    if noted:
        journal.checkpointed(1, 1.6)
        journal.round_closed(closed(1, arrival(0, 1, 2.0), late=[1]))  # void: the ranks die here
        journal.evaluated(Evaluation(round=2, seconds=2.0, loss=2.2, accuracy=0.2))
    journal.close()
    journal = opened(goes_on=True)
    journal.resume(version=1, at_seconds=1.5, rounds=12)
    assert journal.measured == {0}
    join(journal, at_seconds=1.5, draw=1)
    journal.round_closed(closed(1, arrival(0, 1, 2.5), late=[1]))
    journal.close()


@pytest.mark.parametrize("noted", [True, False])
def test_what_a_checkpoint_holds_goes_on_with_it_also_if_nobody_lived_to_note_it(opened, tmp_path, noted):
    go_on_with_a_late_gradient(opened, noted=noted)
    assert [record.version for record in records_of(tmp_path, Checkpointed)] == [1]
    assert [record.version for record in records_of(tmp_path, Resumed)] == [1]
    assert [record.rounds for record in records_of(tmp_path, Extended)] == [12]
    trace = trace_of(read_journal(tmp_path / "trace.jsonl"))
    assert (trace.used, trace.late, dict(trace.dropped), trace.sent_bytes) == (2, 1, {}, 48)
    assert {(work.worker, work.outcome) for work in trace.works} == {(0, "used"), (1, "late")}


def test_a_launch_that_came_to_no_checkpoint_writes_its_journal_anew(opened, tmp_path):
    journal = opened()
    join(journal)
    journal.round_closed(closed(0, arrival(0, 0, 1.0)))
    journal.close()
    opened().close()
    assert not records_of(tmp_path, StepRecord)


def test_two_launches_do_not_write_one_journal(opened, tmp_path):
    with JournalWriter(tmp_path / "trace.jsonl") as other:
        other.write(BEGAN)
        with pytest.raises(ValueError, match="another process writes it"):
            opened(goes_on=True)


def test_rank_0_keeps_its_store_until_all_others_have_parted_from_it():
    store = dist.HashStore()

    def part(rank):
        time.sleep(0.2 * rank)
        rendezvous._part(store, Place(rank=rank, world=3), seconds=30.0)
        return store.add("parted", 0)

    with ThreadPoolExecutor(3) as ranks:
        gone, *_ = ranks.map(part, range(3))
    assert gone == 3
