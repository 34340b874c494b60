"""Whole lives of ranks, from the first line to the exit code: `python -m tests.rounds.lives FOLDER`.

Loading torch takes seconds, so one process loads it, and becomes the ranks of one scene after the other. Each of them
ends as any script does, by its last line or an error that nobody catches. What became of them is printed as JSON.
Rank 0 keeps the store, and takes it along when it ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from tests.averaging.lives import ended, joined
from tests.rounds.jobs.common import batch, compute, setup


def trained(rank, rounds, *, pause=0.0, **settings):
    model, _, sync = setup("lgc", **{"k": 1, "timeout_seconds": 600.0, "silence_seconds": 4.0, **settings})
    for number in range(rounds):
        time.sleep(pause)
        compute(sync, model, *batch(number, rank))
        sync.step()
    return sync


def closed(rank, folder):
    """All close, and the script's last line follows at once: nobody may miss the end because the store is gone."""
    joined(rank, folder)
    sync = trained(rank, 3, k=2)
    time.sleep(0.05 * (rank == 0 and "closed-1" in str(folder)))
    sync.close()


def unclosed(rank, folder):
    """Both end without close(), one of them sooner: a sum is under way, or a thread waits for a notice."""
    joined(rank, folder)
    trained(rank, 4 + rank, pause=0.002 * rank)


def unclosed_alone(rank, folder):
    """Rank 0 goes on, and hears that the other has come to its end."""
    joined(rank, folder)
    trained(rank, 3 if rank else 10**6, k=2)


def raised(rank, folder):
    """Rank 0 ends with an error, and takes the store along; the other says the reason."""
    joined(rank, folder)
    sync = trained(rank, 3, k=2)
    with sync:
        if rank == 0:
            raise ZeroDivisionError("out of luck")
        sync.flush()


def frozen(rank, folder):
    """Rank 0, which decides and keeps the store, is stopped while the other computes, and then reports."""
    joined(rank, folder)
    sync = trained(rank, 3, k=2)
    (folder / f"trained-{rank}").touch()
    while not (folder / "trained-1").exists():
        time.sleep(0.01)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)
    with sync:
        for parameter in sync._tracked.parameters:
            parameter.grad = torch.zeros_like(parameter)
        sync.step()


SCENES = {f"closed-{number}": closed for number in range(2)}
SCENES |= {f"unclosed-{number}": unclosed for number in range(6)}
SCENES |= {"unclosed_alone": unclosed_alone, "raised": raised, "frozen": frozen}
AWAITED = {"frozen": (1,)}  # whose end is awaited; of the others, all
AT_ONCE = 6  # they wait for each other most of the time


def begin(name, folder):
    """Fork the two ranks of a scene; return their process ids, and None in a rank when it has come to its end."""
    there = folder / name
    there.mkdir()
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            log = os.open(there / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            torch.set_num_threads(1)
            SCENES[name](rank, there)
            return None
    return children


def finish(name, children):
    awaited = AWAITED.get(name, (0, 1))
    codes = [ended(children[rank]) for rank in awaited]
    for rank, child in enumerate(children):
        if rank not in awaited:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return codes


def main(folder):
    found, names = {}, list(SCENES)
    for first in range(0, len(names), AT_ONCE):
        under_way = {}
        for name in names[first : first + AT_ONCE]:
            under_way[name] = begin(name, folder)
            if under_way[name] is None:
                return  # a rank, at the end of its script: and so to the end of the interpreter
        for name, children in under_way.items():
            found[name] = finish(name, children)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
