"""A collective under way tells when it is over, until it is detached: then the backend's thread calls no Python."""

from __future__ import annotations

import threading

import pytest
import torch

from paceline.distributed.collectives import PendingCollective


class Work:
    """What a backend returns, of which the test is the backend."""

    def __init__(self):
        self._begun = torch.futures.Future()
        self._future = self._begun.then(self._end)
        self.error = None

    def _end(self, _):
        if self.error is not None:
            raise self.error

    def get_future(self):
        return self._future

    def is_completed(self):
        return self._future.done()

    def end(self, error=None):
        """End it as gloo does, on a thread of its own."""
        self.error = error
        thread = threading.Thread(target=self._begun.set_result, args=(None,))
        thread.start()
        thread.join()


class Counting(PendingCollective):
    """Counts the callbacks."""

    calls = 0

    def _on_done(self, future):
        self.calls += 1
        super()._on_done(future)


ENDS = pytest.mark.parametrize(
    "error", [None, RuntimeError("connection closed by peer")], ids=["well", "with an error"]
)


@ENDS
def test_its_end_wakes_who_waits(error):
    work = Work()
    pending = PendingCollective(work, torch.device("cpu"))
    assert not pending.done()
    work.end(error)
    pending.wait(5.0)
    assert pending.done()
    assert pending.done_at is not None


@ENDS
def test_detached_it_is_not_called_back_and_can_still_be_asked(error):
    work = Work()
    pending = Counting(work, torch.device("cpu"))
    pending.detach()
    calls = pending.calls
    assert not pending.done()
    work.end(error)
    assert pending.calls == calls
    assert pending.done()


@ENDS
def test_what_is_over_may_be_detached(error):
    work = Work()
    pending = PendingCollective(work, torch.device("cpu"))
    work.end(error)
    pending.detach()
    pending.detach()
    assert pending.done()
