"""What a round of the parameter server costs without computation, beside gloo with the same tensor.

The server sends the model to every worker and gets a gradient from each: 2 N tensors through one process. A ring
all-reduce moves 2 (N - 1) / N tensors per process, and all processes work at once. So on one machine the ratio says how
much of the memory's speed is lost to copies, and not how the two compare between machines. The lane "gloo, as a server"
moves the server's tensors with gloo's send and recv, and nothing else: no membership, no trace, no checks.

All lanes take turns in one run, and the best round of each counts. Every process runs torch on one thread but a server,
which has the machine's: it is the one that adds up.

The second question is whether the server's event loop, which must answer every worker, is kept from it by a codec that
takes long: the longest time in a round in which nothing else had its turn.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from experiments.core.ranks import Line, started, told_by_ranks, write_lines
from experiments.core.story import Numbers, Size, Step, Telling, experiment
from experiments.core.turns import bar, seconds_of, verdict
from paceline.reports.table import PlainTable

GATHER_SECONDS = 300.0
BEAT_SECONDS = 0.002
GLOO, GLOO_SERVER = "gloo all-reduce", "gloo, as a server"
SERVERS: dict[str, dict[str, Any]] = {
    "server, same machine, identity": {"codec": "identity", "local": True},
    "server, TCP, identity": {"codec": "identity"},
    "server, TCP, bfloat16": {"codec": "bfloat16"},
}
MOST_OF_GLOO = dict(zip(SERVERS, (1.3, 3.0, 2.0), strict=True))
PARTS = "identity", "bfloat16"
ENTROPY = "qsgd levels=7 lossless=entropy"
GAPS = "identity", "qsgd levels=7", ENTROPY
MOST_GAP_MS = {ENTROPY: 50.0}


@experiment("overhead", question="a server's round without computation against gloo's all-reduce", minutes=5)
def overhead(size: Size) -> Telling:
    elements, workers, turns, rounds = size.pick((40_000, 2, 1, 4), (11_000_000, 4, 4, 12))
    coded, coded_rounds, codecs = size.pick((40_000, 4, GAPS[-1:]), (5_000_000, 8, GAPS))
    total = turns * (2 + len(SERVERS)) + len(PARTS) + len(codecs)
    times: dict[str, list[float]] = {name: [] for name in (GLOO, GLOO_SERVER, *SERVERS)}
    parts, gaps = {}, {}
    for name in list(times) * turns:
        if name in SERVERS:
            yield Step(name, total)
            seconds, _ = served(elements, workers, rounds, **SERVERS[name])
        else:
            ranks = workers + (name == GLOO_SERVER)
            job = {"lane": name, "ranks": ranks, "elements": elements, "rounds": rounds}
            lines = yield from told_by_ranks(
                __name__, ranks, job | {"server_threads": torch.get_num_threads()}, [name], total=total
            )
            seconds = lines[0]["seconds"]
        times[name] += seconds[1:]  # the first round waits for pages and threads
    for codec in PARTS:
        yield Step(f"the server's parts, {codec}", total)
        parts[codec] = server_parts(elements, workers, codec, repeats=turns + 1)
    for codec in codecs:
        yield Step(f"event loop, {codec}", total)
        gaps[codec] = served(coded, 2, coded_rounds, codec)[1][1:]
    yield from tell_rounds(f"A round without computation, {elements:,} parameters, {workers} workers", times)
    yield from tell_parts(parts, times)
    yield from tell_gaps(f"The longest time that a round keeps the event loop, {coded:,} parameters, 2 workers", gaps)
    yield Numbers({"elements": elements, "workers": workers, "times": times, "parts": parts, "gaps": gaps})


def tell_rounds(title: str, times: Mapping[str, Sequence[float]]) -> Telling:
    """Yield the rounds of every lane, and those of a server against gloo's all-reduce."""
    shown = []
    for name, seconds in times.items():
        ratio, passed = min(seconds) / min(times[GLOO]), ""
        if name in MOST_OF_GLOO:
            claim = bar(f"{name}: the best round over gloo's all-reduce", ratio, most=MOST_OF_GLOO[name])
            passed = verdict(claim)
            yield claim
        shown.append((name, f"{1e3 * min(seconds):.0f}", f"{1e3 * median(seconds):.0f}", f"{ratio:.2f}", passed))
    yield PlainTable(title=title, headings=("lane", "best ms", "median ms", "x gloo", ""), rows=shown)


def tell_parts(parts: Mapping[str, Mapping[str, float]], times: Mapping[str, Sequence[float]]) -> Telling:
    """Yield what the server does in a round, and what is left for the network and the workers."""
    rest = {codec: min(times[f"server, TCP, {codec}"]) - sum(found.values()) for codec, found in parts.items()}
    names = next(iter(parts.values()))
    rows = [(name, *(f"{1e3 * found[name]:.1f}" for found in parts.values())) for name in names]
    rows.append(("the rest: network, both ways, and workers", *(f"{1e3 * seconds:.1f}" for seconds in rest.values())))
    yield PlainTable(title="Where the server's time goes over TCP, ms", headings=("part", *parts), rows=rows)


def tell_gaps(title: str, gaps: Mapping[str, Sequence[float]]) -> Telling:
    """Yield for how long the event loop did nothing else, and whether that is within the bar."""
    shown = []
    for codec, seconds in gaps.items():
        usual, passed = 1e3 * median(seconds), ""
        if codec in MOST_GAP_MS:
            claim = bar(f"{codec}: ms that a round keeps the event loop, median", usual, most=MOST_GAP_MS[codec])
            passed = verdict(claim)
            yield claim
        shown.append((codec, f"{usual:.0f}", f"{1e3 * max(seconds):.0f}", passed))
    yield PlainTable(title=title, headings=("codec", "median ms", "most ms", ""), rows=shown)


# -- the parameter server ----------------------------------------------------------------------------------------------


def network(elements: int) -> nn.Module:
    """Return a network of so many parameters, in a few tensors."""
    rows = 1000
    return nn.ParameterList([nn.Parameter(torch.zeros(elements // rows // 4, rows)) for _ in range(4)])


def served(
    elements: int, workers: int, rounds: int, codec: str, *, local: bool = False
) -> tuple[list[float], list[float]]:
    """Serve a run; return two times of each round.

    The first is that from the first byte of a model to the next step of it, the second the longest for which the
    server's event loop did nothing else.
    """
    from paceline import Full
    from paceline.drivers.served.run import RunOutcome, ServerRun, open_run
    from paceline.drivers.served.settings import Limits, ServerSettings
    from paceline.drivers.served.transport import tune_server_process
    from paceline.traces.journal import StepRecord
    from paceline.traces.journal_files import read_journal

    gaps = [0.0] * (rounds + 1)

    async def beat(run: ServerRun) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.perf_counter()
            version = run.coordinator.train_state.version
            gaps[version] = max(gaps[version], now - before - BEAT_SECONDS)
            before = now

    async def run(settings: ServerSettings, on_open: Callable[[int], None]) -> RunOutcome:
        tune_server_process()
        opened = open_run(settings)
        beating = asyncio.create_task(beat(opened))
        outcome = await opened.serve(("127.0.0.1", 0), on_open=on_open)
        beating.cancel()
        return outcome

    model = network(elements)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
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
            limits=Limits(gather_seconds=GATHER_SECONDS),  # fewer workers would be another timing
        )

        def on_open(port: int) -> None:
            job = json.dumps({"port": port, "elements": elements, "local": local})
            stack.enter_context(started(__name__, Path(folder), workers, job))

        outcome = asyncio.run(run(settings, on_open))
        if not outcome.finished:
            raise KeyboardInterrupt
        records = read_journal(Path(folder, "run", "trace.jsonl")).records
        times = [0.0, *(record.at_seconds for record in records if isinstance(record, StepRecord))]
    return [after - before for before, after in pairwise(times)], gaps[1:-1]


def work(port: int, elements: int, local: bool) -> None:
    """Be a worker that computes nothing: the model in, the gradient out."""
    from paceline import Worker
    from paceline.drivers.served.transport import tune_worker_process

    torch.set_num_threads(1)
    tune_worker_process()
    with Worker(f"127.0.0.1:{port}", network(elements), local=local) as worker:
        while worker.running():
            worker.begin_batch(1)
            worker.block_done()
            worker.send()


def server_parts(elements: int, workers: int, codec_name: str, repeats: int) -> dict[str, float]:
    """Return the best seconds of what the server does in a round besides sending and receiving, one by one."""
    from paceline.codecs import make_codec
    from paceline.drivers.served.messages import Model, frames
    from paceline.events import Share
    from paceline.events import Step as Taken
    from paceline.training import TrainState, fingerprint

    model = network(elements)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0))
    codec = make_codec(codec_name)
    payloads = [codec.encode(torch.rand(elements)).clone() for _ in range(workers)]
    shares = tuple(Share(worker=worker, version=0, weight=1 / workers) for worker in range(workers))
    step = Taken(version=0, fresh=shares)
    vectors = [codec.decode(payload) for payload in payloads]
    begin = Model(version=0, since=None, more=0, payload_bytes=payloads[0].numel(), buffer_bytes=0)
    parts: dict[str, Callable[[], Any]] = {
        "decode": lambda: [codec.decode(payload) for payload in payloads],
        "finite?": lambda: [bool(torch.isfinite(vector.sum())) for vector in vectors],
        "sum and step": lambda: state.take(step, lambda share: vectors[share.worker], []),
        "fingerprint": lambda: fingerprint(state.model.parameters),
        "encode, frames": lambda: list(frames(begin, codec.encode(state.model.parameters), torch.zeros(0))),
    }
    return {name: min(seconds_of(part) for _ in range(repeats)) for name, part in parts.items()}


# -- gloo --------------------------------------------------------------------------------------------------------------


def all_reduces(elements: int, rounds: int) -> list[float]:
    """Return the seconds of each all-reduce of one vector."""
    vector, times = torch.ones(elements), []
    for _ in range(rounds):
        dist.barrier()
        times.append(seconds_of(partial(dist.all_reduce, vector)))
        vector.fill_(1.0)
    return times


def sends_and_receives(elements: int, rounds: int, server_threads: int) -> list[float]:
    """Be a parameter server in a few lines: rank 0 sends the model to all, gets all gradients, adds and steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    vector, times = torch.zeros(elements), []
    received = [torch.zeros(elements) for _ in range(0 if rank else ranks - 1)]
    if not rank:
        torch.set_num_threads(server_threads)
    dist.barrier()
    for _ in range(rounds):
        began = time.perf_counter()
        if rank:
            dist.recv(vector, 0)
            dist.send(vector, 0)
            continue
        sending = [dist.isend(vector, worker) for worker in range(1, ranks)]
        receiving = [dist.irecv(into, worker) for worker, into in enumerate(received, start=1)]
        for message in filter(None, (*sending, *receiving)):
            message.wait()
        for gradient in received[1:]:
            received[0] += gradient
        vector.add_(received[0], alpha=0.0)
        times.append(time.perf_counter() - began)
    return times


def main(folder: Path, rank: int, job: dict[str, Any]) -> None:
    """Be a worker of a server, or a rank of a lane of gloo's, whose one line has the seconds of its rounds."""
    if "port" in job:
        work(**job)
        return

    def lines() -> Iterator[Line]:
        elements, rounds = job["elements"], job["rounds"]
        if job["lane"] == GLOO:
            yield {"seconds": all_reduces(elements, rounds)}
        else:
            yield {"seconds": sends_and_receives(elements, rounds, job["server_threads"])}

    write_lines(folder, rank, job["ranks"], lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
