"""What a second signal does to a server that is writing its last checkpoint."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import paceline
from paceline.traces.checkpoints import read_newest
from tests import warm
from tests.drivers.served.test_worker import batches, network
from tests.waiting import until, until_there

SECONDS = 60.0
ROUNDS = 3
SERVER = """
import pathlib, time
import torch
import paceline
from paceline.drivers.served import run

write, began = run.write_checkpoint, time.monotonic()

def slowly(folder, checkpoint, **options):
    if checkpoint.version:
        pathlib.Path("writing").touch()
        while not pathlib.Path("go on").exists() and time.monotonic() < began + 120:
            time.sleep(0.02)
    write(folder, checkpoint, **options)

run.write_checkpoint = slowly
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outcome = paceline.serve(
    model, optimizer, listen="127.0.0.1:0", out="run", workers=1, rounds=1000, checkpoint_every=10**6,
    on_open=lambda port: pathlib.Path("port").write_text(f"{port}.")
)
print(outcome.reason)
"""


def signalled_twice(folder, number):
    """A server that has trained a while, was told to end, and is told again while it writes its last checkpoint."""
    process = warm.Popen(
        [sys.executable, "-c", SERVER], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        port = folder / "port"
        until(lambda: port.exists() and port.read_text().endswith("."), "the port", process=process)
        model = network()
        with paceline.Worker(f"127.0.0.1:{port.read_text()[:-1]}", model) as worker:
            for _ in range(ROUNDS):
                assert worker.running()
                for x, y in worker.blocks(*next(batches(1))):
                    (model(x).sum() + y.sum()).backward()
                assert worker.send()
        process.send_signal(number)
        until_there(folder / "writing", process=process)
        process.send_signal(number)
        yield process
        yield process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)


def test_a_second_sigterm_lets_the_checkpoint_finish(tmp_path):
    """Schedulers send one with notice, and one when the time is up."""
    ending = signalled_twice(tmp_path, signal.SIGTERM)
    process = next(ending)
    time.sleep(0.3)
    assert process.poll() is None
    (tmp_path / "go on").touch()
    out, _ = next(ending)
    assert (process.returncode, out) == (0, "stopped by SIGTERM\n")
    assert read_newest(tmp_path / "run", most_bytes=10**6)[0].version == ROUNDS


def test_a_second_ctrl_c_does_not_wait_for_the_checkpoint(tmp_path):
    ending = signalled_twice(tmp_path, signal.SIGINT)
    process = next(ending)
    next(ending)
    assert process.returncode == 130
    assert not (tmp_path / "go on").exists()
    assert read_newest(tmp_path / "run", most_bytes=10**6)[0].version == 0
