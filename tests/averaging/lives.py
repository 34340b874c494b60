"""Whole lives of ranks, from the first line to the exit code: `python -m tests.averaging.lives FOLDER`.

Loading torch takes seconds, so one process loads it, and becomes the ranks of one scene after the other. Each of them
ends as any script does, by its last line or an error that nobody catches. What became of them is printed as JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # torch keeps the default group for ever if this is loaded while there is one
import torch.distributed as dist

import paceline
from paceline.drivers.ranks import group

WAIT_SECONDS = 40.0  # for all that must happen in a scene
TIMEOUT_SECONDS = 600.0  # of averages: nobody may wait for it here


def wait_until(what):
    deadline = time.monotonic() + WAIT_SECONDS
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError("the other rank did not come")
        time.sleep(0.01)


def joined(rank, folder, port=0, name="port"):
    """Two ranks with a process group; the first keeps the store, and leaves word of its port in the folder."""
    seconds = datetime.timedelta(seconds=WAIT_SECONDS)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=seconds)
        (folder / f"{name}.new").write_text(str(store.port))
        (folder / f"{name}.new").rename(folder / name)
    else:
        wait_until((folder / name).exists)
        port = int((folder / name).read_text())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=seconds)
    return store.port


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
            wait_until((folder / f"left-{life}").exists)
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
    wait_until((folder / "through-0").exists)


SCENES = {stopped: (0,), unclosed: (0,), twice: (0, 1), late: (0, 1)}  # and whose end is awaited


def main(folder):
    found = {}
    for scene, awaited in SCENES.items():
        there = folder / scene.__name__
        there.mkdir()
        children = []
        for rank in range(2):
            children.append(os.fork())
            if children[-1] == 0:
                log = os.open(there / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                torch.set_num_threads(1)
                return scene(rank, there)  # and so to the end of the interpreter
        found[scene.__name__] = [ended(children[rank]) for rank in awaited]
        for rank, child in enumerate(children):
            if rank not in awaited:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    print(json.dumps(found))
    return None


def ended(child):
    """The exit code of a child; None if it does not end in time."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
