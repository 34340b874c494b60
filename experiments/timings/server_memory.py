"""The parameter server's memory in multiples of its model, for models of three sizes and up to 32 workers.

A server process of its own for every row: the peak of what it holds (the kernel's high-water mark, memory files counted
once) less what it held before the model was made. Every run has four rounds, with checkpoints and evaluations as a user
would have them. Gradients come over TCP, or in memory that the server shares with workers on its machine.

    bar  =  4 models                         parameters, update, what is being sent, a copy that is saved or measured
            + the optimiser's state          1 for momentum
            + 1 where something is remembered: compensation (lgc), a codec that sends changes (qsgd)
            + 1.25 for each gradient that was held at once

`held` counts the gradients that the server had memory for at once, from the first byte that comes until the step: under
lgc a worker's late gradient waits while its next one arrives.

One process stands in for all workers, and is not measured. A stand-in is a connection of a real worker without a model:
what arrives is counted and let go, and every gradient is the same payload. So 32 workers of a model with 50 million
parameters take one process and some 200 MB, not 19 GB.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.core.ranks import ended_by_signals
from experiments.core.running import ExperimentError
from experiments.core.story import NAN, Numbers, Size, Step, Telling, chosen, experiment
from experiments.core.turns import bar, verdict
from experiments.timings.overhead import network
from paceline.codecs.naming import parse_codec
from paceline.drivers.served.admission import Credential
from paceline.drivers.served.connection import IncomingModel, ServerConnection, TrainingOver
from paceline.drivers.served.handover import Slot, fetch_slots
from paceline.drivers.served.messages import (
    MOST_BODY_BYTES,
    PROTOCOL,
    Gradient,
    Hello,
    Model,
    Sizes,
    frames,
    model_signature,
)
from paceline.drivers.served.transport import tune_server_process
from paceline.reports.table import PlainTable
from paceline.training.outgoing import whole_codec_of

SIZES = {"1M": 1_000_000, "10M": 10_000_000, "50M": 50_000_000}
WORKERS = ("2", "8", "32")
STRATEGIES = ("full", "lgc")
CODECS = "bfloat16", "qsgd levels=7"  # at 10 M parameters and 8 workers
ROUNDS = 4
EVERY = 2  # rounds from one checkpoint, and one evaluation, to the next
LOOK_SECONDS = 0.01
GIVE_UP_SECONDS = 600.0
SPARE_BYTES = 1_500_000_000  # what the rest of the machine keeps, whatever a server takes


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a run of the server.

    >>> Case(parameters=1_000_000, workers=8, strategy="lgc").most_models(held=8)
    16.0
    """

    parameters: int
    workers: int
    strategy: str = "full"
    codec: str = "identity"
    local: bool = False

    @property
    def way(self) -> str:
        """The strategy, the codec if there is one, and whether gradients come in memory."""
        codec = "" if self.codec == "identity" else f", {self.codec}"
        return f"{self.strategy}{codec}{', in memory' if self.local else ''}"

    @property
    def name(self) -> str:
        """Model, workers and the way."""
        return f"{self.parameters:,} parameters, {self.workers} workers, {self.way}"

    @property
    def first(self) -> Case:
        """The tiny run before it, which loads what any run loads: threads, compiled codecs."""
        return dataclasses.replace(self, parameters=4000, workers=2)

    def most_models(self, held: int) -> float:
        """Return the most that a server may hold, in models."""
        remembered = self.strategy == "lgc" or self.codec.startswith("qsgd")
        return 4 + 1 + remembered + 1.25 * held


@experiment("server-memory", question="the server's peak memory in multiples of its model", minutes=15)
def server_memory(
    size: Size,
    *,
    sizes: tuple[str, ...] = tuple(SIZES),
    workers: tuple[str, ...] = WORKERS,
    strategies: tuple[str, ...] = STRATEGIES,
) -> Telling:
    cases = cases_of(sizes, workers, strategies)
    if size.toy:
        cases = [Case(parameters=40_000, workers=3, strategy="lgc", local=True)]
    found = {}
    for case in cases:
        yield Step(case.name, len(cases))
        found[case] = measured(case)
    yield from tell(found)


def cases_of(sizes: Sequence[str], workers: Sequence[str], strategies: Sequence[str]) -> list[Case]:
    """Return the rows of some sizes, numbers of workers and strategies; others than there are are refused."""
    sizes = chosen("size", sizes, tuple(SIZES))
    workers, strategies = chosen("number of workers", workers, WORKERS), chosen("strategy", strategies, STRATEGIES)
    cases = [
        Case(parameters=SIZES[size], workers=int(count), strategy=strategy, local=local)
        for size in sizes
        for count in workers
        for strategy in strategies
        for local in ((False, True) if strategy == "full" else (False,))
    ]
    if "10M" in sizes and "8" in workers and "full" in strategies:
        cases += [Case(parameters=SIZES["10M"], workers=8, codec=codec) for codec in CODECS]
    return cases


def tell(found: Mapping[Case, Mapping[str, Any]]) -> Telling:
    """Yield what each server held, in models; one that was ended before it took all memory misses its bar."""
    shown, rows = [], []
    for case, figures in found.items():
        held, above = figures["held"], figures["peak"] - figures["base"]
        models, most, more = above / (4 * case.parameters), case.most_models(held), "> " if figures["ended"] else ""
        claim = bar(f"{case.name}: models that the server held", NAN if figures["ended"] else models, most=most)
        yield claim
        shown.append(
            (f"{case.parameters / 1e6:g}", str(case.workers), case.way, str(held), f"{more}{above / 1e6:,.0f}",
             f"{more}{models:.1f}", f"{most:.2f}", verdict(claim))
        )  # fmt: skip
        rows.append({**asdict(case), "models": models, "bar": most, "verdict": verdict(claim), **figures})
    yield PlainTable(
        title="The server's memory above its start, in models",
        headings=("million\nparameters", "\nworkers", "\nrun", "\nheld", "\nMB", "\nmodels", "\nmost", ""),
        rows=shown,
        caption="Gradients come over TCP, or in memory. held: gradients at once. most: 4 + 1 (momentum) + 1 (lgc, "
        "qsgd) + 1.25 for each held. >: ended there, before it took all memory.",
    )
    yield Numbers({"rows": rows})


# -- measuring ---------------------------------------------------------------------------------------------------------


def measured(case: Case) -> dict[str, Any]:
    """Run a case in two processes; return its figures in bytes. A server that would take all memory is ended."""
    context = multiprocessing.get_context("forkserver")  # torch is loaded once for all processes, and none has threads
    context.set_forkserver_preload([__name__, "paceline.drivers.served.run"])
    told, ports = context.Queue(), context.Queue()
    server = context.Process(target=be_server, args=(case, told), daemon=True)
    workers = context.Process(target=be_workers, args=(case, ports), daemon=True)
    most_bytes, figures = available_bytes() - SPARE_BYTES, dict[str, Any]()
    deadline, most_held, most_shared = time.monotonic() + GIVE_UP_SECONDS, 0, 0
    with ended_by_signals():
        try:
            server.start()
            workers.start()
            while "held" not in figures:
                alive = server.is_alive()
                held, shared = held_bytes(server.pid or 0)
                most_held, most_shared = max(most_held, held if "base" in figures else 0), max(most_shared, shared)
                if "base" in figures and held > most_bytes:
                    return figures | {"peak": held, "held": case.workers, "ended": True}
                try:
                    name, value = told.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    if not alive or time.monotonic() > deadline:
                        raise ExperimentError(f"the server told no figures: {case.name}") from None
                    continue
                if name == "port":
                    ports.put(value)
                else:
                    figures[name] = value
            figures["peak"] = max(figures["peak"], most_held)  # the kernel's leaves out what no mapping has touched
            server.join(30)
            return figures | {"shared": most_shared, "ended": False}
        finally:
            for process in (server, workers):
                if process.pid is not None:
                    process.kill()
                    process.join(30)


def available_bytes() -> int:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 2**62


def status_bytes(process: int | str) -> dict[str, int]:
    """Return the counts of /proc/PROCESS/status that are sizes, in bytes."""
    text = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def held_bytes(pid: int) -> tuple[int, int]:
    """Return all that a process holds, and its memory files (memfd) alone, each counted once; nothing if it is gone.

    The kernel's resident size counts a file once for every mapping that was touched, and not at all where none was.
    """
    try:
        shared, status = memory_files_bytes(pid), status_bytes(pid)
        return status["VmRSS"] - status["RssShmem"] + shared, shared
    except (OSError, KeyError):
        return 0, 0


def memory_files_bytes(pid: int) -> int:
    found: dict[int, int] = {}
    with suppress(FileNotFoundError):
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            if "/memfd:" in line:
                span, _, _, _, inode, *_ = line.split()
                begin, end = (int(place, 16) for place in span.split("-"))
                found[int(inode)] = max(end - begin, found.get(int(inode), 0))
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:"):
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    found[status.st_ino] = 512 * status.st_blocks
    return sum(found.values())


# -- the server --------------------------------------------------------------------------------------------------------


def be_server(case: Case, told: Any) -> None:
    """Serve the tiny run, then the case; tell ("port", n) of each, ("base", bytes), ("peak", bytes), ("held", n)."""
    serve_run(case.first, told)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the kernel counts the peak from now on
    told.put(("base", status_bytes("self")["VmRSS"]))
    held = serve_run(case, told)
    told.put(("peak", status_bytes("self")["VmHWM"]))
    told.put(("held", held))


def serve_run(case: Case, told: Any) -> int:
    """Serve a run, and return how many gradients were held at once, at most."""
    from paceline import LGC, Full, serve
    from paceline.drivers.served.settings import Limits

    model = network(case.parameters)
    with tempfile.TemporaryDirectory(prefix="paceline-server-memory-") as folder, counted_gradients() as most:
        tune_server_process()
        outcome = serve(
            model,
            torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9),
            strategy=LGC(k=max(1, case.workers * 3 // 4)) if case.strategy == "lgc" else Full(),
            workers=case.workers,
            rounds=ROUNDS,
            listen="127.0.0.1:0",
            codec=case.codec,
            folder=Path(folder, "run"),
            checkpoint_every=EVERY,
            evaluate=lambda copy: (float(next(iter(copy.parameters())).sum()), 0.0),
            evaluate_every=EVERY,
            limits=Limits(gather_seconds=600.0),  # fewer workers would be another case
            on_open=lambda port: told.put(("port", port)),
        )
        if not outcome.finished or outcome.errors:
            raise ValueError(f"the run ended early: {outcome.reason} {outcome.errors}")
        return most[-1]


@contextmanager
def counted_gradients() -> Iterator[list[int]]:
    """Count the gradients that a server has memory for at once; the list's last number is the most so far."""
    from paceline.drivers.served.server import Server

    used, most, assembly, decoded = [0], [0], Server.assembly, Server.decoded

    def take(server: Server) -> Any:
        used[0] += 1
        most.append(max(used[0], most[-1]))
        return assembly(server)

    async def decode(server: Server, worker: int, message: Gradient, body: Any, *release_body: Any) -> Any:
        if isinstance(body, Slot):  # it lies in memory that was set aside before
            used[0] += 1
            most.append(max(used[0], most[-1]))
        received = await decoded(server, worker, message, body, *release_body)
        release = received.release

        def released() -> None:
            used[0] -= 1
            release()

        received.release = released
        return received

    Server.assembly, Server.decoded = take, decode  # type: ignore[method-assign, assignment]
    try:
        yield most
    finally:
        Server.assembly, Server.decoded = assembly, decoded  # type: ignore[method-assign]


# -- the stand-ins -----------------------------------------------------------------------------------------------------


def be_workers(case: Case, ports: Any) -> None:
    """Be all workers of the tiny run and of the case, whose ports come in a queue: each a thread with a connection."""
    torch.set_num_threads(1)
    for each in (case.first, case):
        address, module = f"127.0.0.1:{ports.get()}", network(each.parameters)
        signature, shapes = model_signature(module), [parameter.shape for parameter in module.parameters()]
        del module
        gradient = torch.empty(each.parameters).normal_(generator=torch.Generator().manual_seed(0))
        payload = parse_codec(each.codec).fresh(shapes).encode(gradient, torch.Generator().manual_seed(0))
        del gradient
        threads = [
            threading.Thread(target=stand_in, args=(address, signature, payload, number, each), daemon=True)
            for number in range(each.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Discarded(IncomingModel):
    """A model that is counted as it comes, and not kept."""

    def __init__(self, scratch: memoryview) -> None:
        self._scratch = scratch
        self._message: Model | None = None
        self._missing = 0

    def begin(self, message: Model) -> None:
        """Expect a body."""
        self._message, self._missing = message, message.payload_bytes + message.buffer_bytes

    def taken_from(self, slot: Slot, message: Model) -> bool:
        """Give the slot back at once."""
        return True

    def place(self, body_bytes: int) -> memoryview:
        """Return memory, which is the same for all."""
        return self._scratch[:body_bytes]

    def added(self, body_bytes: int) -> Model | None:
        """Count."""
        self._missing -= body_bytes
        return None if self._missing else self._message


def stand_in(address: str, signature: str, payload: torch.Tensor, number: int, case: Case) -> None:
    who, token = f"stand-in pid {os.getpid()}", Credential(address, None).find()[1]
    hello = Hello(protocol=PROTOCOL, wish=number, threads=1, host=who, token=token)
    connection = ServerConnection(address, hello, answer_seconds=120.0)
    welcome, draw = connection.welcome, connection.welcome.first_draw
    codec, slots = parse_codec(case.codec), None
    if case.local:
        models, gradients = (
            Sizes(most_payload_bytes=each.most_bytes(case.parameters), buffer_bytes=0)
            for each in (whole_codec_of(codec), codec)
        )
        slots = fetch_slots(welcome.handover, models=models, gradients=gradients)
        assert slots is not None, "the server handed no memory over"
    connection.ready(signature, Discarded(memoryview(bytearray(MOST_BODY_BYTES))), slots)
    with suppress(TrainingOver):
        while True:
            version = connection.take_model(lambda incoming: None).message.version
            place, slot = connection.free_slot() or (None, None)
            gradient = Gradient(
                version=version, draw=draw, blocks_done=welcome.blocks, blocks=welcome.blocks, work_seconds=0.0,
                held_seconds=0.0, samples=0, loss_mean=None, loss_variance=None, payload_bytes=payload.numel(),
                buffer_bytes=0, slot=place,
            )  # fmt: skip
            if slot is not None:
                slot.fill(payload, torch.zeros(0))
                connection.say(gradient)
            else:
                connection.send(frames(gradient, payload, torch.zeros(0)), lambda: None)
            connection.progress += 1
            draw += 1
    connection.close()
