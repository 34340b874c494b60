"""Whole lives of two ranks, from the first line to the exit code: what tests of how processes end have in common.

    scenes = Lives("tests.rounds.scenes", folder)  ->  python -m tests.distributed.lives tests.rounds.scenes FOLDER
    codes, logs = scenes("frozen")

A module of scenes has SCENES, functions of (rank, folder) by their name, and AWAITED, the ranks whose end is awaited
where that is not both. Loading torch takes seconds, so one process loads it, and becomes the ranks of several scenes at
once, which wait for each other most of the time. Each ends as any script does, by its last line or an error that nobody
catches. What became of them is printed as JSON.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo  # torch keeps the default group for ever if this is loaded while there is one
import torch.distributed as dist

from tests import warm
from tests.distributed.ranks import ROOT
from tests.waiting import Late, until, until_there

WAIT_SECONDS = 40.0  # for all that must happen in a scene
AT_ONCE = 6


class Lives:
    """The scenes of a module, each played once: called with a scene's name, its exit codes and what its ranks wrote."""

    def __init__(self, module, folder):
        self._folder = folder
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "tests.distributed.lives", module, str(folder)]
        done = warm.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        self._codes = json.loads(done.stdout)

    def __call__(self, scene):
        return self._codes[scene], [(self._folder / scene / f"rank-{rank}.log").read_text() for rank in range(2)]


def joined(rank, folder, port=0, name="port"):
    """Make a process group of two ranks; the first keeps the store, and leaves word of its port in the folder."""
    seconds = datetime.timedelta(seconds=WAIT_SECONDS)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=seconds)
        (folder / f"{name}.new").write_text(str(store.port))
        (folder / f"{name}.new").rename(folder / name)
    else:
        until_there(folder / name, seconds=WAIT_SECONDS)
        port = int((folder / name).read_text())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=seconds)
    return store.port


def main(module, folder):
    module = importlib.import_module(module)
    found, names = {}, list(module.SCENES)
    for first in range(0, len(names), AT_ONCE):
        under_way = {}
        for name in names[first : first + AT_ONCE]:
            under_way[name] = begin(module.SCENES[name], folder / name)
            if under_way[name] is None:
                return  # a rank, at the end of its script: and so to the end of the interpreter
        for name, children in under_way.items():
            found[name] = finish(children, getattr(module, "AWAITED", {}).get(name, (0, 1)))
    print(json.dumps(found))


def begin(scene, folder):
    """Fork the two ranks of a scene; return their process ids, and None in a rank when it has come to its end."""
    folder.mkdir()
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            torch.set_num_threads(1)
            scene(rank, folder)
            return None
    return children


def finish(children, awaited):
    """Return the exit codes of the ranks that are awaited, and end the others."""
    codes = [ended(children[rank]) for rank in awaited]
    for rank, child in enumerate(children):
        if rank not in awaited:
            killed(child)
    return codes


def ended(child):
    """Return the exit code of a child; None if it does not end in time."""
    try:
        _, status = until(lambda: exited(child), "the end of a rank", seconds=WAIT_SECONDS)
    except Late:
        killed(child)
        return None
    return os.waitstatus_to_exitcode(status)


def exited(child):
    """Return the number of a child and how it has ended; None while it lives."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return (pid, status) if pid else None


def killed(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
