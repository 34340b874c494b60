"""Small values through the store: who comes in the moment in which another gives up, or comes again."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from paceline.distributed import RankGoneError
from paceline.distributed.stores import CAME, StoreGather


class Meddling:
    """A store in which something happens just before a rank counts itself as not come."""

    def __init__(self, store, happens):
        self._store, self._happens = store, happens

    def __getattr__(self, name):
        return getattr(self._store, name)

    def add(self, key, value):
        if key == CAME and value == -1 and self._happens is not None:
            happens, self._happens = self._happens, None
            happens()
        return self._store.add(key, value)


def test_the_last_rank_that_comes_as_another_gives_up_goes_on_with_it():
    """Either all go on, or none: one that went on alone would wait in what follows."""
    store, found = dist.HashStore(), []
    late = StoreGather(store, 1, 2, timeout_seconds=5.0)

    def come():
        found.append(late.ask("begin", "late", threading.Event(), again=True))

    patient = StoreGather(Meddling(store, come), 0, 2, timeout_seconds=0.05)
    found.append(patient.ask("begin", "patient", threading.Event(), again=True))
    assert found == [["patient", "late"]] * 2
    again = [StoreGather(store, rank, 2, timeout_seconds=5.0) for rank in (0, 1)]
    thread = threading.Thread(target=lambda: found.append(again[1].gather("go on", 1)))
    thread.start()
    assert again[0].gather("go on", 0) == [0, 1]
    thread.join(10)


def wait_in_vain(store, rank, errors):
    try:
        StoreGather(store, rank, 3, timeout_seconds=0.05).ask("begin", rank, threading.Event(), again=True)
    except RankGoneError as error:
        errors.append(str(error))


def test_ranks_that_gave_up_meet_when_they_come_again_and_hear_nothing_of_before():
    store = dist.HashStore()
    for _ in range(3):
        errors = []

        threads = [threading.Thread(target=wait_in_vain, args=(store, rank, errors)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(errors) == 2
        assert all(error.endswith("waited 0.05 s for rank 2 to begin") for error in errors)
    found = {}
    gathers = [StoreGather(store, rank, 3, timeout_seconds=10.0) for rank in range(3)]
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: gathers[rank].gather("begin", rank)}))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [found[rank] for rank in range(3)] == [[0, 1, 2]] * 3


def test_a_rank_that_has_left_is_named_with_its_reason():
    store = dist.HashStore()
    StoreGather(store, 1, 2, timeout_seconds=1.0).post_failure("ValueError: no")
    with pytest.raises(RankGoneError, match=r"rank 1 has left: ValueError: no \(it was to begin\)"):
        StoreGather(store, 0, 2, timeout_seconds=5.0).gather("begin", 0)
