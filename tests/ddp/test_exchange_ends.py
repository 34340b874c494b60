"""The end of an exchange is told once to each that waits, also where two threads come to tell it."""

from __future__ import annotations

import threading

from torch.futures import Future

from paceline.drivers.ranks.exchanging import ConnectionLostError, Underway, _end_all, _State


def test_two_threads_that_end_the_same_exchange_tell_each_future_once(caplog):
    for _ in range(50):
        futures = [Future() for _ in range(4)]
        told = [(lambda underway, outcome, future=future: future.set_result(outcome)) for future in futures]
        state = _State([], None, 1.0)
        state.broken = ConnectionLostError("lost")
        state.underway.append(Underway(protocol=None, finished=told))
        threads = [threading.Thread(target=_end_all, args=(state,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert all(future.done() for future in futures)
        assert not state.underway
    assert not caplog.records
