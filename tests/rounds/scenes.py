"""Lives of two ranks that train by rounds; rank 0 keeps the store, and takes it along when it ends."""

from __future__ import annotations

import os
import signal
import time

import torch

from tests.distributed.lives import joined
from tests.rounds.jobs.common import batch, compute, setup
from tests.waiting import until_there


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
    until_there(folder / "trained-1")
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
AWAITED = {"frozen": (1,)}
