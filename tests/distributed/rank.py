"""The processes: `python -m tests.distributed.rank FOLDER JOBS PIPES`, PIPES = [[read from, write to], ...] as JSON.

Loading torch takes seconds, so one process loads it and becomes as many ranks as there are pipes. It says who they are,
and stays until its own input ends. A rank reads jobs, and writes what they returned.
"""

from __future__ import annotations

import datetime
import functools
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # what the first optimiser would load, in every rank
import torch.distributed as dist

from paceline.processes import Processes
from tests.waiting import until_there


def store_of(folder, rank):
    """Rank 0 keeps the store, at a port that is free, and leaves word of it in the folder."""
    told, seconds = folder / "port", datetime.timedelta(seconds=40)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(told)
        return store
    until_there(told)
    return dist.TCPStore("127.0.0.1", int(told.read_text()), is_master=False, timeout=seconds)


def main(folder, jobs, pipes):
    jobs = importlib.import_module(jobs)
    gc.freeze()  # ranks share this memory as long as the collector does not look at it
    ranks = Processes()
    for rank in range(len(pipes)):
        ranks.fork(functools.partial(be, rank, folder, jobs, pipes), log=folder / f"rank-{rank}.log")
    for pipe in pipes:
        for end in pipe:
            os.close(end)
    print(json.dumps(ranks.pids), flush=True)
    sys.stdin.read()
    ranks.send_signal(signal.SIGKILL)  # not before, nor are they waited for: until then nobody else gets their numbers
    ranks.wait()


def be(rank, folder, jobs, pipes):
    for place, pipe in enumerate(pipes):
        for end in pipe if place != rank else ():
            os.close(end)
    torch.set_num_threads(1)
    store, timeout = store_of(folder, rank), datetime.timedelta(seconds=40)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(pipes), timeout=timeout)
    questions, answers = os.fdopen(pipes[rank][0]), os.fdopen(pipes[rank][1], "w", buffering=1)
    answers.write('{"result": "ready"}\n')
    for line in questions:
        settings = json.loads(line)
        try:
            answer = {"result": getattr(jobs, settings.pop("job"))(**settings)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
