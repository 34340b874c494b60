"""The sides of the overhead benchmark: rounds of the parameter server, and the same tensors by gloo.

Every process runs torch on one thread but a server, which has the machine's: it is the one that adds up.
"""

from __future__ import annotations

import asyncio
import inspect
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
BEAT_SECONDS = 0.002


def network(elements: int) -> nn.Module:
    """A network of so many parameters, in a few tensors."""
    rows = 1000
    return nn.ParameterList([nn.Parameter(torch.zeros(elements // rows // 4, rows)) for _ in range(4)])


def local_is_known() -> bool:
    """Whether a worker on the server's machine can hand its gradients over in memory."""
    from paceline import Worker

    return "local" in inspect.signature(Worker).parameters


def worker_side(address: str, elements: int, local: bool = False) -> None:
    """A worker that computes nothing: the model in, the gradient out."""
    from paceline import Worker
    from paceline.drivers.served.transport import tune_worker_process

    torch.set_num_threads(1)
    tune_worker_process()
    model = network(elements)
    options: dict[str, Any] = {"local": local} if local_is_known() else {}
    with Worker(address, model, **options) as worker:
        while worker.running():
            worker.begin_batch(1)
            worker.block_done()
            worker.send()


def server_rounds(elements: int, workers: int, rounds: int, codec: str, *, local: bool = False) -> list[float]:
    """Seconds of each round, from the first byte of a model to the next step of it."""
    return _served(elements, workers, rounds, codec, local=local)[0]


def loop_gaps(elements: int, workers: int, rounds: int, codec: str) -> list[float]:
    """The longest time in each round for which the server's event loop did nothing else; the first round left out."""
    return _served(elements, workers, rounds, codec, local=False)[1][1:]


def _served(elements: int, workers: int, rounds: int, codec: str, *, local: bool) -> tuple[list[float], list[float]]:
    from paceline import Full
    from paceline.drivers.served.run import ServerRun, open_run
    from paceline.drivers.served.settings import Limits, ServerSettings
    from paceline.drivers.served.transport import tune_server_process
    from paceline.traces.journal import StepRecord
    from paceline.traces.journal_files import read_journal

    context = multiprocessing.get_context("spawn")
    packs: list[Any] = []

    def opened(port: int) -> None:
        for _ in range(workers):
            process = context.Process(target=worker_side, args=(f"127.0.0.1:{port}", elements, local), daemon=True)
            process.start()
            packs.append(process)

    gaps = [0.0] * (rounds + 1)

    async def beat(run: ServerRun) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.perf_counter()
            version = run.coordinator.train_state.version
            gaps[version] = max(gaps[version], now - before - BEAT_SECONDS)
            before = now

    async def run(settings: ServerSettings) -> None:
        tune_server_process()
        served = open_run(settings)
        beating = asyncio.create_task(beat(served))
        await served.serve(("127.0.0.1", 0), on_open=opened)
        beating.cancel()

    model = network(elements)
    with tempfile.TemporaryDirectory() as folder:
        settings = ServerSettings(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            schedule=None,
            strategy=Full(),
            workers=workers,
            rounds=rounds,
            codec=codec,
            folder=Path(folder, "run"),
            checkpoint_every=10**9,
            limits=Limits(gather_seconds=GIVE_UP_SECONDS),  # fewer workers would be another benchmark
        )
        asyncio.run(run(settings))
        for process in packs:
            process.join(30)
        records = read_journal(Path(folder, "run", "trace.jsonl")).records
        times = [0.0, *(record.at_seconds for record in records if isinstance(record, StepRecord))]
    return [after - before for before, after in pairwise(times)], gaps[1:-1]


def all_reduce_side(rank: int, workers: int, elements: int, repeats: int, store: str, out: Any) -> None:
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


def gloo_server_side(rank: int, workers: int, elements: int, repeats: int, store: str, out: Any) -> None:
    """A parameter server in a few lines of gloo: rank 0 sends the model to all, gets all gradients, adds and steps."""
    import torch.distributed as dist

    if rank:
        torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers + 1)
    vector, times = torch.zeros(elements), []
    received = [torch.zeros(elements) for _ in range(0 if rank else workers)]
    dist.barrier()
    for _ in range(repeats):
        began = time.perf_counter()
        if rank:
            dist.recv(vector, 0)
            dist.send(vector, 0)
            continue
        sending = [dist.isend(vector, worker) for worker in range(1, workers + 1)]
        receiving = [dist.irecv(into, worker) for worker, into in enumerate(received, start=1)]
        for work in (*sending, *receiving):
            work.wait()
        for gradient in received[1:]:
            received[0] += gradient
        vector.add_(received[0], alpha=0.0)
        times.append(time.perf_counter() - began)
    dist.barrier()
    if not rank:
        out.put(times)
    dist.destroy_process_group()


def gloo_all_reduces(elements: int, workers: int, repeats: int) -> list[float]:
    """Seconds of each all-reduce."""
    return _gloo(all_reduce_side, workers, (workers, elements, repeats))


def gloo_server_rounds(elements: int, workers: int, repeats: int) -> list[float]:
    """Seconds of each round of a parameter server that is written in gloo."""
    return _gloo(gloo_server_side, workers + 1, (workers, elements, repeats))


def _gloo(side: Callable[..., None], ranks: int, arguments: tuple[int, int, int]) -> list[float]:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=side, args=(rank, *arguments, store, out), daemon=True) for rank in range(ranks)
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
