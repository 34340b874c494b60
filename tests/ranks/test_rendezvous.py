"""How ranks find each other through a store that remembers the dead; in threads, for nothing here needs a process."""

from __future__ import annotations

import datetime
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from paceline.distributed import RankGoneError
from paceline.distributed.stores import StoreGather
from paceline.drivers.ranks.launch import Place
from paceline.drivers.ranks.rendezvous import Handshake, meet, open_store

PATIENCE_SECONDS = 60.0
SOON_SECONDS = 0.3


def file_stores(tmp_path):
    return lambda: dist.FileStore(str(tmp_path / "store"))


def tcp_stores(tmp_path):
    timeout = datetime.timedelta(seconds=PATIENCE_SECONDS)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    keep = [server]
    return lambda: dist.TCPStore("127.0.0.1", keep[0].port, is_master=False, timeout=timeout)


@pytest.fixture(params=[file_stores, tcp_stores])
def new_store(request, tmp_path):
    """A connection of its own for every process, to what the launch keeps through all its lives."""
    return request.param(tmp_path)


def life(new_store, world):
    """All ranks of a life meet; what each was called to."""

    def be(rank):
        return meet(new_store(), rank, world, timeout_seconds=PATIENCE_SECONDS)

    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(be, reversed(range(world))))


def test_all_ranks_meet_under_one_name_and_the_next_life_under_another_of_the_same_launch(new_store):
    first, second = life(new_store, 3), life(new_store, 3)
    for calls in (first, second):
        assert len({call.attempt for call in calls}) == 1
    assert first[0].attempt != second[0].attempt
    assert {call.launch for call in first + second} == {first[0].launch}


def test_two_launches_are_never_taken_for_one(tmp_path):
    one, other = (dist.FileStore(str(tmp_path / name)) for name in "ab")
    assert (
        meet(one, 0, 1, timeout_seconds=PATIENCE_SECONDS).launch
        != meet(other, 0, 1, timeout_seconds=PATIENCE_SECONDS).launch
    )


def test_two_machines_that_count_their_restarts_differently_meet_again():
    """torchrun counts on each machine the deaths of its own workers: node 1 comes to 1, node 0 stays at 0."""
    timeout = datetime.timedelta(seconds=PATIENCE_SECONDS)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def store(rank, restarts):
        environment = where | {"TORCHELASTIC_RESTART_COUNT": str(restarts)}
        return open_store(environment, Place(rank=rank, world=2), timeout)

    for rank in range(2):  # the first life: rank 1 is killed before it answers
        handshake = Handshake(store=store(rank, restarts=0), rank=rank, world=2)
        handshake.write_token()
    with ThreadPoolExecutor(2) as ranks:
        found = ranks.map(lambda rank: meet(store(rank, rank), rank, 2, timeout_seconds=PATIENCE_SECONDS), range(2))
        one, other = found
    assert one == other


def test_who_comes_again_while_the_others_wait_is_called_again(new_store):
    """Rank 1 answers a call and dies before all have; its next life must not be taken for it."""
    handshakes = [Handshake(store=new_store(), rank=rank, world=3) for rank in range(3)]
    for handshake in handshakes:
        handshake.write_token()
    zero, one, two = handshakes
    assert zero.advance() is None
    assert one.advance() is None  # it has answered, and dies
    again = Handshake(store=new_store(), rank=1, world=3)
    again.write_token()
    for handshake in (two, zero, two, again, two):
        assert handshake.advance() is None
    calls = [handshake.advance() for handshake in (zero, again, two)]
    assert len({call.attempt for call in calls}) == 1
    assert calls[0].tokens == [zero.token, again.token, two.token]
    assert one.advance() is None  # were it alive still, it would know that it is not meant


def test_whatever_the_order_they_all_meet_and_nobody_goes_on_before_all_have_answered(tmp_path):
    for number, order in enumerate(itertools.permutations(range(3))):
        store = dist.FileStore(str(tmp_path / f"store-{number}"))
        handshakes = [Handshake(store=store, rank=rank, world=3) for rank in range(3)]
        met = {}
        for rank in order:
            assert not met
            handshakes[rank].write_token()
            for other in order[: order.index(rank) + 1]:
                handshakes[other].advance()
        for _ in range(3):
            for rank in order:
                call = handshakes[rank].advance()
                if call is not None:
                    assert all(other.acknowledged == call.attempt for other in handshakes)
                    met[rank] = call.attempt
        assert len(met) == 3
        assert len(set(met.values())) == 1


def test_those_who_do_not_come_are_named(new_store):
    with pytest.raises(RankGoneError, match=r"^rank 2 waited 0.3 s for rank 0 and rank 1 to come$"):
        meet(new_store(), 2, 3, timeout_seconds=SOON_SECONDS)
    with pytest.raises(RankGoneError, match=r"^rank 0 waited 0.3 s for rank 1 to come$"):  # rank 2 has been here
        meet(new_store(), 0, 3, timeout_seconds=SOON_SECONDS)
    life(new_store, 2)
    with pytest.raises(RankGoneError, match=r"^rank 0 waited 0.3 s for rank 1 to come$"):  # though it has left a token
        meet(new_store(), 0, 2, timeout_seconds=SOON_SECONDS)
    with pytest.raises(RankGoneError, match=r"^rank 1 waited 0.3 s for rank 0 to come$"):
        meet(new_store(), 1, 2, timeout_seconds=SOON_SECONDS)


# -- words through the store ------------------------------------------------------------------------------------------


def gathers(world, **settings):
    store = dist.HashStore()
    return [
        StoreGather(store, rank, world, **({"timeout_seconds": PATIENCE_SECONDS} | settings)) for rank in range(world)
    ]


def test_everybody_hears_everybody_call_after_call():
    def be(gather):
        return [gather.gather("count", [call, gather.rank]) for call in range(3)]

    with ThreadPoolExecutor(3) as ranks:
        heard = list(ranks.map(be, gathers(3)))
    assert heard == [[[[call, rank] for rank in range(3)] for call in range(3)]] * 3


def test_who_does_not_answer_is_named_and_what_for():
    first, _, _ = gathers(3, timeout_seconds=SOON_SECONDS)
    with pytest.raises(RankGoneError, match=r"^rank 0 waited 0.3 s for rank 1 and rank 2 to tell its times$"):
        first.gather("tell its times", None)


def test_who_left_with_an_error_is_not_waited_for():
    first, second, third = gathers(3)
    second.post_failure("ValueError: the disk is full")
    for gather in (first, third):
        with pytest.raises(RankGoneError, match=r"^rank 1 has left: ValueError: the disk is full \(it was to begin"):
            gather.gather("begin to train", None)


def test_words_of_one_who_left_after_its_answer_still_count():
    first, second = gathers(2, timeout_seconds=SOON_SECONDS)
    with pytest.raises(RankGoneError):
        second.gather("answer", "here")
    second.post_failure("tired of waiting")
    assert first.gather("answer", "too") == ["too", "here"]


class CountingStore:
    """A store that counts what it is asked."""

    def __init__(self, store):
        self.store, self.asked = store, 0

    def __getattr__(self, name):
        self.asked += 1
        return getattr(self.store, name)


def test_a_rank_that_waits_asks_one_question_a_look_however_many_ranks_there_are(monkeypatch):
    def questions(seconds):
        store = CountingStore(dist.HashStore())
        with pytest.raises(RankGoneError):
            StoreGather(store, 0, 40, timeout_seconds=seconds).gather("begin", None)
        return store.asked

    monkeypatch.setattr("paceline.distributed.stores.POLL_SECONDS", (0.02, 0.02))
    looks = 30
    assert questions(0.02 * looks) - questions(0.02) <= looks + 1


@pytest.mark.parametrize("tries", [3, 30])
def test_the_keys_of_a_gather_are_deleted_when_all_have_come_to_the_next(tries):
    world, store = 3, dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = store.num_keys()

    def be(rank):
        gather = StoreGather(store, rank, world, timeout_seconds=PATIENCE_SECONDS)
        return [gather.gather("count", [call, rank]) for call in range(tries)]

    with ThreadPoolExecutor(world) as ranks:
        for heard in ranks.map(be, range(world)):
            assert heard == [[[call, rank] for rank in range(world)] for call in range(tries)]
    assert store.num_keys() - before <= 2 * world + 1  # the values of the last, and the counts


def test_a_store_that_does_not_answer_is_not_waited_for_longer_than_was_asked():
    silent = CountingStore(dist.HashStore())
    answer = threading.Event()
    silent.add = lambda key, number: answer.wait(PATIENCE_SECONDS)
    try:
        with pytest.raises(RankGoneError, match=r"rank 0, which keeps the store, has not answered for 0\.3 s"):
            StoreGather(silent, 1, 2, timeout_seconds=SOON_SECONDS).gather("begin", None)
    finally:
        answer.set()
