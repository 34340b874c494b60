"""Lives of two ranks that average: what each scene is, from its first line to its end."""

from __future__ import annotations

import os
import signal
import socket
import time

import torch
import torch.distributed as dist

import paceline
from paceline.drivers.ranks import group
from tests.distributed.lives import WAIT_SECONDS, joined
from tests.waiting import until_there

TIMEOUT_SECONDS = 600.0  # of averages: nobody may wait for it here


def trained(kind, steps, on_step=lambda number: None, **settings):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with kind(model, optimizer, timeout_seconds=TIMEOUT_SECONDS, **settings) as sync:
        for number in range(steps):
            on_step(number)
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    return sync


def stopped(rank, folder):
    """One rank freezes in the middle; the error of the other is caught by nobody."""
    joined(rank, folder)

    def freeze(number):
        if rank == 1 and number == 3:
            os.kill(os.getpid(), signal.SIGSTOP)

    trained(paceline.LocalSGD, 6, freeze, period=1, silence_seconds=2.0)


class AtTheEnd:
    """Ends a process when it is destroyed: as a global, while the interpreter is being finalised."""

    def __init__(self, process):
        self.process = process

    def __del__(self, kill=os.kill, sleep=time.sleep, number=signal.SIGKILL):
        kill(self.process, number)
        sleep(0.5)  # gloo's thread hears of it, and may take the interpreter's lock


def unclosed(rank, folder):
    """A script ends with an average under way, and has closed nothing; the other rank does not come to it."""
    global at_the_end
    (folder / f"process-{os.getpid()}-{rank}").touch()
    joined(rank, folder)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = paceline.HPSGD(model, optimizer, timeout_seconds=TIMEOUT_SECONDS)
    if rank == 0:
        optimizer.step()
        print("under way", sync._loop.under_way)
        (other,) = folder.glob("process-*-1")
        at_the_end = AtTheEnd(int(other.name.split("-")[1]))
    else:
        time.sleep(WAIT_SECONDS)  # it is ended when the other is through


def twice(rank, folder):
    """Two process groups in one process, one after the other, at one port."""
    port = 0
    for life in range(2):
        port = joined(rank, folder, port, f"port-{life}")
        sync = trained(paceline.HPSGD, 3)
        if rank == 0:
            until_there(folder / f"left-{life}")
        dist.destroy_process_group()
        if rank == 1:
            (folder / f"left-{life}").touch()
        elif listens(port):
            raise SystemExit("something holds on to the store: it is still served")
        print(sync.merged_steps)


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


def late(rank, folder):
    """One rank never begins."""
    group.GRACE_SECONDS = 0.0
    joined(rank, folder)
    model = torch.nn.Linear(4, 4)
    try:
        if rank == 0:
            paceline.HPSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout_seconds=1.5)
    finally:
        (folder / f"through-{rank}").touch()
    until_there(folder / "through-0")


SCENES = {"stopped": stopped, "unclosed": unclosed, "twice": twice, "late": late}
AWAITED = {"stopped": (0,), "unclosed": (0,)}
