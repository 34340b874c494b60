"""The two sides of the overhead benchmark: rounds of the parameter server, and all-reduces of gloo, same tensor.

Every process runs torch on one thread but the server, which has the machine's: it is the one that adds up.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

GIVE_UP_SECONDS = 300.0


def network(elements: int) -> nn.Module:
    """A network of so many parameters, in a few tensors."""
    rows = 1000
    return nn.ParameterList([nn.Parameter(torch.zeros(elements // rows // 4, rows)) for _ in range(4)])


def worker_side(address: str, elements: int) -> None:
    """A worker that computes nothing: the model in, the gradient out."""
    from paceline import Worker

    torch.set_num_threads(1)
    model = network(elements)
    with Worker(address, model) as worker:
        while worker.training():
            worker.begin_batch(1)
            worker.block_done()
            worker.send()


def server_rounds(elements: int, workers: int, rounds: int, codec: str) -> list[float]:
    """Seconds of each round, from the first byte of a model to the next step of it."""
    from paceline import Full, serve
    from paceline.traces.journal import StepRecord
    from paceline.traces.journal_files import read_journal

    context = multiprocessing.get_context("spawn")
    packs: list[Any] = []

    def opened(port: int) -> None:
        for _ in range(workers):
            process = context.Process(target=worker_side, args=(f"127.0.0.1:{port}", elements), daemon=True)
            process.start()
            packs.append(process)

    model = network(elements)
    with tempfile.TemporaryDirectory() as folder:
        serve(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            strategy=Full(),
            workers=workers,
            rounds=rounds,
            listen="127.0.0.1:0",
            codec=codec,
            folder=Path(folder, "run"),
            checkpoint_every=10**9,
            on_open=opened,
        )
        for process in packs:
            process.join(30)
        records = read_journal(Path(folder, "run", "trace.jsonl")).records
        times = [0.0, *(record.at_seconds for record in records if isinstance(record, StepRecord))]
    return [after - before for before, after in pairwise(times)]


def gloo_side(rank: int, workers: int, elements: int, repeats: int, store: str, out: Any) -> None:
    """All-reduces of one vector."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    vector = torch.ones(elements)
    times = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(vector)
        times.append(time.perf_counter() - began)
        vector.fill_(1.0)
    dist.barrier()
    if rank == 0:
        out.put(times)
    dist.destroy_process_group()


def gloo_all_reduces(elements: int, workers: int, repeats: int) -> list[float]:
    """Seconds of each all-reduce."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=gloo_side, args=(rank, workers, elements, repeats, store, out), daemon=True)
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        times: list[float] = out.get(timeout=GIVE_UP_SECONDS)
        for process in processes:
            process.join(30)
    return times


def server_parts(elements: int, workers: int, codec_name: str, repeats: int) -> dict[str, float]:
    """Best seconds of what the server does in a round besides sending and receiving, one by one."""
    from paceline.codecs import make_codec
    from paceline.drivers.served.messages import Model, frames
    from paceline.events import Share, Step
    from paceline.training import TrainState, fingerprint

    model = network(elements)
    trainee = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0))
    codec = make_codec(codec_name)
    payloads = [codec.encode(torch.rand(elements)).clone() for _ in range(workers)]
    shares = tuple(Share(worker=worker, version=0, weight=1 / workers) for worker in range(workers))
    step = Step(version=0, fresh=shares)
    vectors = [codec.decode(payload) for payload in payloads]
    begin = Model(version=0, since=None, more=0, payload_bytes=payloads[0].numel(), buffer_bytes=0)
    parts: dict[str, Callable[[], Any]] = {
        "decode": lambda: [codec.decode(payload) for payload in payloads],
        "finite?": lambda: [bool(torch.isfinite(vector.sum())) for vector in vectors],
        "sum and step": lambda: trainee.take(step, lambda share: vectors[share.worker], []),
        "fingerprint": lambda: fingerprint(trainee.model.parameters),
        "encode, frames": lambda: list(frames(begin, codec.encode(trainee.model.parameters), torch.zeros(0))),
    }
    return {name: min(_seconds(part) for _ in range(repeats)) for name, part in parts.items()}


def _seconds(part: Callable[[], Any]) -> float:
    began = time.perf_counter()
    part()
    return time.perf_counter() - began
