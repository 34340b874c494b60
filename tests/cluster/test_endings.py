"""How processes end when a run is over: with an exit code of their own, never by a signal.

A thread that comes back from an operation of torch's while the interpreter ends aborts the process ("terminate called
without an active exception"). So the connection's thread is kept busy with the last gradient here, while the run ends.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from torch import nn

from paceline.codecs import Identity
from paceline.drivers.served.messages import Goodbye, Model, encode, frames, model_signature
from paceline.workers.flat import FlatModel
from tests import warm
from tests.cluster.peers import FakeServer, welcome

SCRIPT = """
import sys, time, torch, paceline
from torch import nn
import paceline.drivers.served.worker as module

frames, large = module.frames, torch.zeros(1_000_000)

def slow_frames(*message):
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        large.add_(1)
    yield from frames(*message)

def train(worker):
    while worker.training():
        for x in worker.blocks(torch.randn(4, 3)):
            model(x).sum().backward()
        worker.send()

module.frames = slow_frames
model = nn.Linear(3, 2)
worker = paceline.Worker(sys.argv[1], model)
"""
ENDS = {
    "left": ("with worker: train(worker)", 0),
    "never closed": ("train(worker)", 0),
    "an error of the script": ("train(worker); raise ValueError", 1),
    "stopped while it closes": (
        "import threading, _thread; threading.Timer(0.2, _thread.interrupt_main).start()\n"
        "try:\n"
        "    with worker: train(worker)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)",
        130,
    ),
}


class SoonOver(FakeServer):
    """A server whose run is over as soon as a worker has its first model."""

    def __init__(self):
        model = FlatModel(nn.Linear(3, 2))
        payload = Identity().encode(model.parameters)
        first = Model(version=0, since=None, more=0, payload_bytes=payload.numel(), buffer_bytes=0)
        self._model = [head + body for head, body in frames(first, payload, model.buffers)]
        super().__init__(encode(welcome(blocks=1, signature=model_signature(model.module), recipe={})))

    def _work(self, heard):
        next(heard)
        yield self._answer
        next(heard)
        yield from self._model
        time.sleep(0.1)
        yield encode(Goodbye(what="over", reason="all rounds are done"))
        for _ in heard:  # until the worker goes
            pass


@pytest.mark.parametrize("end", ENDS)
def test_a_script_of_a_worker_ends_by_no_signal_though_a_gradient_is_on_its_way(end):
    words, code = ENDS[end]
    with SoonOver() as server:
        command = [sys.executable, "-c", SCRIPT + words, server.address]
        scripts = [warm.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
        said = [script.communicate(timeout=60)[1] for script in scripts]
    assert [script.returncode for script in scripts] == [code] * 4, said
    assert "terminate called" not in "".join(said)
