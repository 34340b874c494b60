"""A collective under way tells when it is over, until it is detached: then the backend's thread calls no Python."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch

import paceline
from paceline.distributed.collectives import PendingCollective

SOURCE = Path(paceline.__file__).parent
WAITS_WITH_A_LIMIT = [
    "drivers/pipelining/ranks.py",  # Message: a pipeline that fails closes its connections by it
    "drivers/watching/links.py",  # a group of the probe's own, which a failure is the end of
]


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


# -- a wait that runs out ----------------------------------------------------------------------------------------------


def test_a_wait_with_a_limit_never_asks_the_backend_to_wait_with_one():
    """gloo closes the connections of a whole group when such a wait runs out: nothing could be exchanged any more."""

    class Waited(Work):
        def wait(self, *limit, **limits):
            assert not limit, limits

        def is_completed(self):
            return False

    for device in ("cpu", "meta"):  # a backend that calls back, and one that is asked
        pending = PendingCollective(Waited(), torch.device(device))
        pending.wait(0.01)
        assert not pending.done()
        pending.check()


def test_no_wait_of_a_backend_has_a_limit_but_that_which_is_to_close_connections():
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "wait":
                of = getattr(node.func.value, "attr", getattr(node.func.value, "id", ""))
                if of.strip("_").endswith("work") and (node.args or node.keywords):
                    found.append(file.relative_to(SOURCE).as_posix())
    assert found == WAITS_WITH_A_LIMIT
