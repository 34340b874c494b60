"""Reports and notices: as they were sent, in one order for all, and whoever waits is woken."""

from __future__ import annotations

import datetime
import threading

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline.drivers.rounds.messages import (
    AllWaiting,
    Failed,
    GradientReady,
    Mailbox,
    Overdue,
    RoundClosed,
    Stop,
    Waiting,
    decode,
    encode,
)
from paceline.events import Drop, Share, Step

WAIT_SECONDS = 20.0

counts, seconds = st.integers(0, 2**53), st.floats(0, 1e9)
weights = st.floats(0, 4)
texts = st.text(max_size=20)
shares = st.lists(
    st.builds(Share, worker=st.integers(0, 9), version=st.integers(0, 3), weight=st.sampled_from([0.25, 1 / 3, 0.1])),
    max_size=12,
).map(tuple)
steps = st.builds(Step, version=counts, fresh=shares, late=shares, previous_mean_weight=weights, at_seconds=seconds)
drops = st.lists(st.builds(Drop, worker=counts, version=counts, reason=texts), max_size=3).map(tuple)
losses = st.none() | st.floats(-1e30, 1e30)
messages = st.one_of(
    st.builds(
        GradientReady,
        rank=counts,
        version=counts,
        draw=counts,
        blocks_done=counts,
        blocks=counts,
        work_seconds=seconds,
        held_seconds=seconds,
        fingerprint=st.integers(-(2**63), 2**63 - 1),
        loss_mean=losses,
        loss_variance=losses,
        samples=counts,
        finite=st.booleans(),
    ),
    st.builds(Waiting, rank=counts, version=counts, leaving=st.booleans()),
    st.builds(Overdue, rank=counts, version=counts, seconds=seconds, flushing=st.booleans()),
    st.just(Stop()),
    st.builds(RoundClosed, step=steps, dropped=drops),
    st.builds(AllWaiting, version=counts, leaving=st.booleans(), dropped=drops),
    st.builds(Failed, reason=texts, kind=st.sampled_from(["drift", "late", "diverged", "gone"])),
)


@given(messages)
def test_a_message_comes_out_as_it_went_in(message):
    assert decode(encode(message)) == message
    assert decode(encode(message).encode()) == message


def test_a_step_of_a_thousand_equal_shares_is_short():
    fresh = tuple(Share(worker=worker, version=7, weight=1 / 1000) for worker in range(1000))
    assert len(encode(RoundClosed(step=Step(version=7, fresh=fresh)))) < 6 * 1000


# -- the store ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["hash", "file", "tcp"])
def connect(request, tmp_path):
    """Returns a mailbox on a connection of its own, as every thread has one."""
    if request.param == "hash":
        store = dist.HashStore()
    elif request.param == "file":
        store = dist.FileStore(str(tmp_path / "store"), -1)
    else:
        wait = datetime.timedelta(seconds=WAIT_SECONDS)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
    return lambda: Mailbox(dist.PrefixStore("rounds", store.clone()))


def closed(number):
    return RoundClosed(step=Step(version=number, fresh=(Share(worker=0, version=number, weight=1.0),)))


def in_thread(function, *args):
    """Start it; the function that is returned waits for its result."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*args)), daemon=True)
    thread.start()

    def result():
        thread.join(WAIT_SECONDS)
        assert found, "it waits for ever"
        return found[0]

    return result


def test_everybody_reads_the_same_notices_in_the_same_order(connect):
    def read(mailbox):
        return [mailbox.next_notice() for _ in range(6)]

    results = [in_thread(read, connect()) for _ in range(3)]
    decider = connect()
    for number in range(6):
        assert decider.publish(number, closed(number)) == closed(number)
    assert [result() for result in results] == [[closed(number) for number in range(6)]] * 3


def test_reports_of_many_ranks_come_once_each_and_those_of_a_rank_in_its_order(connect):
    def send(rank):
        mailbox = connect()
        for version in range(8):
            mailbox.report(Waiting(rank=rank, version=version, fingerprint=0))
        return True

    senders = [in_thread(send, rank) for rank in range(3)]
    decider = connect()
    heard = [in_thread(decider.next_report)() for _ in range(24)]
    assert all(sender() for sender in senders)
    for rank in range(3):
        assert [report.version for report in heard if report.rank == rank] == list(range(8))


def test_two_ranks_that_fail_at_once_leave_one_failure_and_everybody_reads_it(connect):
    decider, ranks = connect(), [connect() for _ in range(3)]
    for number in range(2):
        decider.publish(number, closed(number))
    assert [ranks[2].next_notice() for _ in range(2)] == [closed(0), closed(1)]
    waiting = in_thread(ranks[2].next_notice)  # it is woken
    failures = [Failed(reason=f"rank {place} has left") for place in range(2)]
    posted = [
        in_thread(lambda place=place: ranks[place].post_failure(failures[place], first=place) or True)
        for place in range(2)
    ]
    assert all(done() for done in posted)
    woken = waiting()
    assert woken in failures
    assert decider.publish(2, closed(2)) == woken  # the decider finds it too, and ends
    late = connect()
    assert [late.next_notice() for _ in range(3)] == [closed(0), closed(1), woken]


def test_a_notice_that_is_there_already_is_kept(connect):
    one, other = connect(), connect()
    assert one.publish(0, closed(0)) == closed(0)
    assert other.publish(0, Failed(reason="too late")) == closed(0)


def test_notices_that_all_have_read_are_deleted_all_of_them(connect):
    mailbox, other = connect(), connect()
    for number in range(7):
        mailbox.publish(number, closed(number))
    mailbox.forget_notices(before=3)
    mailbox.forget_notices(before=6)
    there = [number for number in range(7) if other._store.check([f"notice/{number}"])]
    assert there == [6]
