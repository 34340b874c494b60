"""The queue between the exchange thread and the training thread keeps the order of the notices."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from paceline.codecs.requests import AllReduce
from paceline.drivers.rounds import exchange as exchange_module
from paceline.drivers.rounds.exchange import Exchange, Update
from paceline.drivers.rounds.messages import AllWaiting, Failed, RoundClosed
from paceline.events import Share, Step
from paceline.training.contributions import VectorPool


def make_exchange(mailbox=None, gradients=None, round_sum=None, group=None):
    pool, device = VectorPool(1, torch.float32, torch.device("cpu")), torch.device("cpu")
    limits = {"most_behind": 10, "timeout_seconds": 1.0, "heartbeats": SimpleNamespace(), "detector": None}
    return Exchange(mailbox, gradients, pool, round_sum, group, ranks=[0], rank=0, device=device, **limits)


class Notices:
    """A mailbox with one notice, after which the store is gone."""

    def __init__(self, *notices):
        self.notices = list(notices)

    def next_notice(self):
        if not self.notices:
            raise RuntimeError("Broken pipe")
        return self.notices.pop()


class Gradients:
    """A rank that brings zeros."""

    def has_part_in(self, step):
        return False

    def contribute(self, step):
        return torch.zeros(1)


class Adding:
    """A sum that asks once, and then fails as torch does where shapes do not fit."""

    def add_up(self, vector, version, *, brings):
        yield AllReduce(vector)
        raise RuntimeError("The size of tensor a must match")


class Done:
    """A collective that is over."""

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(None)
        return future

    def wait(self):
        pass


class Broken(Done):
    """A collective that has failed."""

    def wait(self):
        raise RuntimeError("Connection closed by peer")


def cannot_start(request, group):
    raise RuntimeError("Connection reset by peer")


def update(version):
    step = Step(version=version, fresh=(Share(worker=0, version=version, weight=1.0),))
    return Update(notice=RoundClosed(step=step), vector=torch.zeros(1), done=0.0)


def test_what_came_after_a_flush_is_not_applied_in_it():
    """A fast rank may close the next round before a slow training thread hears that all were waiting."""
    exchange, first, second = make_exchange(), update(0), update(1)
    exchange._queue.append(first)
    exchange._follow(AllWaiting(version=1, leaving=False))
    exchange._queue.append(second)
    assert exchange.next_release() is None
    assert exchange.next_update() is first
    exchange.applied(first)
    assert exchange.next_update() is None
    assert exchange.next_release().version == 1
    assert exchange.next_update() is second


def test_a_wait_ends_with_what_it_waits_for_or_with_a_failure():
    exchange = make_exchange()
    assert not exchange.wait(0.0, lambda: exchange.has_come)
    exchange._follow(AllWaiting(version=0, leaving=False))
    assert exchange.wait(60.0, lambda: exchange.has_come)
    exchange._follow(Failed(reason="rank 1 has left"))
    assert not exchange.wait(60.0, lambda: False)
    assert exchange.failure.reason == "rank 1 has left"


@pytest.mark.parametrize(
    ("notices", "start", "failure"),
    [
        ([], None, Failed(reason="ConnectionLostError: Broken pipe", kind="lost")),
        ([0], cannot_start, Failed(reason="ConnectionLostError: Connection reset by peer", kind="lost")),
        (
            [0],
            lambda request, group: (request.tensor, Broken()),
            Failed(reason="ConnectionLostError: Connection closed by peer", kind="lost"),
        ),
        (
            [0],
            lambda request, group: (request.tensor, Done()),
            Failed(reason="RuntimeError: The size of tensor a must match", kind="fault"),
        ),
    ],
    ids=["the store", "starting", "a collective", "decoding"],
)
def test_only_what_goes_over_a_connection_can_be_a_lost_one(notices, start, failure, monkeypatch):
    monkeypatch.setattr(exchange_module, "start", start)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    exchange = make_exchange(Notices(*(update(version).notice for version in notices)), Gradients(), Adding(), group)
    exchange.start()
    assert exchange.join(60.0)
    assert exchange.failure == failure


def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(10)


def test_the_exchange_thread_computes_with_the_threads_of_the_training_thread():
    """The bits of some codecs depend on how many there are, and a replay has as many."""
    seen, before = [], torch.get_num_threads()

    class Threads:
        def next_notice(self):
            seen.append(torch.get_num_threads())
            raise RuntimeError("the store is gone")

    try:
        torch.set_num_threads(before + 1)
        in_a_thread(lambda: torch.set_num_threads(before + 2))  # what a new thread of torch's would have
        assert torch.get_num_threads() == before + 1
        exchange = make_exchange(mailbox=Threads())
        exchange.start()
        assert exchange.join(10)
    finally:
        in_a_thread(lambda: torch.set_num_threads(before))
        torch.set_num_threads(before)
    assert seen == [before + 1]
