"""How processes end when a run is over: with an exit code of their own, never by a signal.

A thread that comes back from an operation of torch's while the interpreter ends aborts the process ("terminate called
without an active exception"). So the connection's thread is kept busy with a model here, while the script ends.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from torch import nn

from paceline.codecs import Identity
from paceline.drivers.served.messages import Model, encode, frames, model_signature
from paceline.workers.flat import FlatModel
from tests import warm
from tests.cluster.peers import FakeServer, welcome

SCRIPT = """
import sys, time, torch, paceline
import paceline.drivers.served.connection as module

added, large, models = module.IncomingModel.added, torch.zeros(1_000_000), []

def slow_added(*given):
    models.append(given)
    end = time.monotonic() + (1.0 if len(models) > 1 else 0.0)
    while time.monotonic() < end:
        large.add_(1)
    return added(*given)

def begin():
    worker.running()
    while len(models) < 2:
        time.sleep(0.01)

module.IncomingModel.added = slow_added
worker = paceline.Worker(sys.argv[1], torch.nn.Linear(3, 2))
"""
ENDS = {
    "left": ("with worker: begin()", 0),
    "never closed": ("begin()", 0),
    "an error of the script": ("begin(); raise ValueError", 1),
    "stopped while it closes": (
        "import threading, _thread\n"
        "try:\n"
        "    with worker:\n"
        "        begin()\n"
        "        threading.Timer(0.2, _thread.interrupt_main).start()\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)",
        130,
    ),
}


class TwoModels(FakeServer):
    """A server that sends two models, one right after the other."""

    def __init__(self):
        model = FlatModel(nn.Linear(3, 2))
        payload = Identity().encode(model.parameters)
        models = [
            Model(version=version, since=None, more=0, payload_bytes=payload.numel(), buffer_bytes=0)
            for version in (0, 1)
        ]
        self._models = [
            b"".join(bytes(part) for frame in frames(each, payload, model.buffers) for part in frame) for each in models
        ]
        super().__init__(encode(welcome(blocks=1, signature=model_signature(model.module), recipe={})))

    def _work(self, heard):
        next(heard)
        yield self._answer
        next(heard)
        yield self._models[0]
        time.sleep(0.2)
        yield self._models[1]
        for _ in heard:  # until the worker goes
            pass


@pytest.mark.parametrize("end", ENDS)
def test_a_script_of_a_worker_ends_by_no_signal_though_its_connection_is_busy(end):
    words, code = ENDS[end]
    with TwoModels() as server:
        command = [sys.executable, "-c", SCRIPT + words, server.address]
        scripts = [warm.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        said = [script.communicate(timeout=60)[1] for script in scripts]
    assert [script.returncode for script in scripts] == [code] * 3, said
    assert "terminate called" not in "".join(said)
