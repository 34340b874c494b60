"""Ranks in processes of their own, and the lines of JSON that they write: no rank outlives its block.

    python -m MODULE FOLDER RANK [MORE ...]     a rank; it appends a line to FOLDER/lines-RANK.jsonl for every figure

The ranks of a pipeline are here too: a process for each stage on this machine, one thread each, by the loopback
interface. All processes of a machine read one clock, so what they write down can be laid side by side:

    rank 0   |F0|F1|......|===B0===|===B1===|         busy: what is computed
    rank 1      |F0|F1|===B0===|===B1===|             step: from the first begin to the last end
             '------------ step -------------'        idle = 1 - busy / (ranks x step)

A receive is waited for before a piece's forward or backward is called, so waiting is in no span; nor are the loss, the
sending, and what the ranks tell each other between steps.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from experiments.core.running import ExperimentError
from experiments.core.story import Step
from paceline.pipeline.plan import Plan
from paceline.pipeline.timing import Span, Timeline

if TYPE_CHECKING:
    from experiments.core.cut_models import Subject

ROOT = Path(__file__).parents[2]
LINE_SECONDS = 180.0  # for the next line of all ranks
LOOK_SECONDS = 0.1
TIMEOUT_SECONDS = 120.0  # of a collective

Processes: TypeAlias = Sequence[subprocess.Popen[bytes]]
Line: TypeAlias = dict[str, Any]


@contextlib.contextmanager
def started(
    module: str, folder: Path, ranks: int, *more: str, hosts: Sequence[tuple[str, str]] = ()
) -> Iterator[Processes]:
    """Start ranks with one thread each, and kill them when the block ends.

    They are on this machine, or shared out in their order over `hosts`, each a network namespace and its interface.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            command, interface = [sys.executable, "-m", module, str(folder), str(rank), *more], "lo"
            if hosts:
                host, interface = hosts[rank * len(hosts) // ranks]
                command = ["ip", "netns", "exec", host, *command]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
            with (folder / f"rank-{rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(20)


def lines_of(
    processes: Processes, folder: Path, labels: Sequence[str], *, writers: int | None = None, total: int | None = None
) -> Generator[Step, None, list[list[Line]]]:
    """Yield a step before each line that all ranks write, or the first so many `writers`, and return each one's lines.

    It is an error as soon as a rank ends badly, or when no line comes for long.
    """
    files = [folder / f"lines-{rank}.jsonl" for rank in range(writers or len(processes))]
    done, deadline = 0, time.monotonic() + LINE_SECONDS
    yield Step(labels[0], total)
    while done < len(labels):
        time.sleep(LOOK_SECONDS)
        bad = [rank for rank, process in enumerate(processes) if process.poll()]
        written = min(file.read_bytes().count(b"\n") if file.exists() else 0 for file in files)
        for label in labels[done + 1 : written + 1]:
            yield Step(label, total)
        if written > done:
            done, deadline = written, time.monotonic() + LINE_SECONDS
        if bad or time.monotonic() > deadline:
            log = (folder / f"rank-{bad[0] if bad else 0}.log").read_text(encoding="utf-8", errors="replace")
            missing = labels[min(done, len(labels) - 1)]
            ended = f"; rank {bad[0]} ended with {processes[bad[0]].poll()}" if bad else ""
            raise ExperimentError(
                f"the ranks wrote {done} of {len(labels)} lines, and none for {missing!r}{ended}:\n{log[-2000:]}"
            )
    texts = [file.read_text(encoding="utf-8").splitlines() for file in files]
    return [[json.loads(line) for line in lines[: len(labels)]] for lines in texts]


def told_by_ranks(
    module: str, ranks: int, job: Mapping[str, Any], labels: Sequence[str], *,
    hosts: Sequence[tuple[str, str]] = (), total: int | None = None,
) -> Generator[Step, None, list[Line]]:  # fmt: skip
    """Start ranks that are given the job as JSON, and return the lines that rank 0 writes: one for each label."""
    with (
        ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="paceline-ranks-") as name,
        started(module, Path(name), ranks, json.dumps(job), hosts=hosts) as processes,
    ):
        (lines,) = yield from lines_of(processes, Path(name), labels, writers=1, total=total)
    return lines


def write_lines(folder: Path, rank: int, ranks: int, lines: Callable[[], Iterable[Line]], *, address: str = "") -> None:
    """Be a rank: meet the others on gloo, with one thread, and append each line when it comes.

    They meet by a file of the folder, which is polled; at an `address`, where what is measured asks the store.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    store = f"tcp://{address}" if address else f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    with (folder / f"lines-{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as file:
        for line in lines():
            file.write(json.dumps(line) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def by_lane(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Return the lines of each lane, in the order in which lanes came first.

    >>> by_lane([{"lane": "b"}, {"lane": "a"}, {"lane": "b"}])
    {'b': [{'lane': 'b'}, {'lane': 'b'}], 'a': [{'lane': 'a'}]}
    """
    lanes = dict.fromkeys(line["lane"] for line in lines)
    return {lane: [line for line in lines if line["lane"] == lane] for lane in lanes}


def free_address() -> str:
    """Return an address of this machine at which no process listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a SIGTERM end what is within as an exception does: namespaces outlive the process that made them."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- ranks of a pipeline -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Steps of one pipeline, with so many micro-batches each."""

    plan: str
    microbatches: int


def pipeline_steps(
    subject: Subject, plans: Mapping[str, Plan], lanes: Sequence[Lane], *, turns: int, total: int | None = None
) -> Generator[Step, None, list[list[Timeline]]]:
    """Take a step in every lane, turn after turn; return each lane's, but those of the first turn, which warms up."""
    ranks = next(iter(plans.values())).stages
    job = {"subject": asdict(subject), "ranks": ranks, "turns": 1 + turns, "lanes": [asdict(lane) for lane in lanes]}
    labels = [f"{lane.plan}, {lane.microbatches} micro-batches" for lane in lanes] * (1 + turns)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        for key, plan in plans.items():
            plan.save(folder / f"{key}.json")
        with started("experiments.core.ranks", folder, ranks) as processes:
            lines = yield from lines_of(processes, folder, labels, total=total)
    steps = [step_of([line["spans"] for line in of_all]) for of_all in zip(*lines, strict=True)]
    return [steps[len(lanes) + number :: len(lanes)] for number in range(len(lanes))]


def step_of(spans: Sequence[Sequence[Sequence[Any]]]) -> Timeline:
    """Return what all ranks did in a step, in seconds from its first begin.

    >>> step_of([[(0, 0, "F", 0, 7.0, 8.0)], [(1, 1, "F", 0, 8.0, 9.0)]]).idle
    0.5
    """
    rows = [sorted((Span(*span) for span in row), key=lambda span: span.begin) for row in spans]
    first = min(span.begin for row in rows for span in row)
    moved = [[span._replace(begin=span.begin - first, end=span.end - first) for span in row] for row in rows]
    return Timeline(rows=tuple(map(tuple, moved)))


def main(folder: Path, rank: int) -> None:
    """Be a rank of a pipeline: FOLDER/job.json says what is done, and each step's line what was computed when."""
    from torch import nn

    from experiments.core.cut_models import Subject
    from paceline.drivers.pipelining.pipeline import Pipeline

    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))

    def steps() -> Iterator[Line]:
        subject = Subject(**job["subject"])
        model = subject.built()
        pipes = {
            name: Pipeline(model, Plan.load(folder / f"{name}.json"), timeout_seconds=TIMEOUT_SECONDS, record=True)
            for name in dict.fromkeys(lane["plan"] for lane in job["lanes"])
        }
        batches = {lane["microbatches"]: subject.batch(lane["microbatches"]) for lane in job["lanes"]}
        loss_function = nn.CrossEntropyLoss()
        for lane in job["lanes"] * job["turns"]:
            pipe = pipes[lane["plan"]]
            pipe.step(*batches[lane["microbatches"]], loss_function)
            yield {"spans": [list(span) for span in pipe.spans]}
        for pipe in pipes.values():
            pipe.close()

    write_lines(folder, rank, job["ranks"], steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
