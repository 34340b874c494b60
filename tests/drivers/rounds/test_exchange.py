"""The queue between the exchange thread and the training thread keeps the order of the notices."""

from __future__ import annotations

import torch

from paceline.drivers.rounds.exchange import Exchange, Update
from paceline.drivers.rounds.messages import AllWaiting, Failed, RoundClosed
from paceline.events import Share, Step
from paceline.training.contributions import VectorPool


def make_exchange():
    pool, nobody = VectorPool(1, torch.float32, torch.device("cpu")), None
    device = torch.device("cpu")
    limits = {"most_behind": 10, "timeout_seconds": 1.0, "heartbeats": nobody, "detector": nobody}
    return Exchange(nobody, nobody, pool, nobody, nobody, ranks=[0], rank=0, device=device, **limits)


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
