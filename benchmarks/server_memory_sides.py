"""The two processes of the server-memory benchmark: a server that is measured, and stand-ins for all of its workers.

A stand-in is a connection of a real worker without a model: what arrives is counted and let go, and every gradient is
the same payload. So 32 workers of a model with 50 million parameters take one process and some 200 MB, not 19 GB.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.overhead_sides import network
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
from paceline.training.outgoing import whole_codec_of

ROUNDS = 4
EVERY = 2  # rounds from one checkpoint, and one evaluation, to the next


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a run of the server."""

    parameters: int
    workers: int
    strategy: str = "full"
    codec: str = "identity"
    local: bool = False

    @property
    def model_bytes(self) -> int:
        """The size of the model's parameters."""
        return 4 * self.parameters

    @property
    def first(self) -> Case:
        """The tiny run before it, which loads what any run loads: threads, compiled codecs."""
        return dataclasses.replace(self, parameters=4000, workers=2)


# -- the server ----------------------------------------------------------------------------------------------------


def server_side(case: Case, told: Any) -> None:
    """Serve the tiny run, then the case; tell ("port", n) of each, ("base", bytes), ("peak", bytes), ("held", n)."""
    _serve(case.first, told)
    told.put(("base", _reset_peak_bytes()))
    held = _serve(case, told)
    told.put(("peak", _status_bytes("self")["VmHWM"]))
    told.put(("held", held))


def _serve(case: Case, told: Any) -> int:
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


# -- the stand-ins -------------------------------------------------------------------------------------------------


def stand_ins(case: Case, ports: Any) -> None:
    """All workers of the tiny run and of the case, whose ports come in a queue."""
    torch.set_num_threads(1)
    for each in (case.first, case):
        _work(f"127.0.0.1:{ports.get()}", each)


def _work(address: str, case: Case) -> None:
    """All workers of a run, each a thread with a connection of its own, until training is over."""
    module = network(case.parameters)
    signature, shapes = model_signature(module), [parameter.shape for parameter in module.parameters()]
    del module
    gradient = torch.empty(case.parameters).normal_(generator=torch.Generator().manual_seed(0))
    codec = parse_codec(case.codec).fresh(shapes)
    payload = codec.encode(gradient, torch.Generator().manual_seed(0))
    del gradient
    threads = [
        threading.Thread(target=_stand_in, args=(address, signature, payload, number, case), daemon=True)
        for number in range(case.workers)
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
        """Any memory will do."""
        return self._scratch[:body_bytes]

    def added(self, body_bytes: int) -> Model | None:
        """Count."""
        self._missing -= body_bytes
        return None if self._missing else self._message


def _stand_in(address: str, signature: str, payload: torch.Tensor, number: int, case: Case) -> None:
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
                version=version,
                draw=draw,
                blocks_done=welcome.blocks,
                blocks=welcome.blocks,
                work_seconds=0.0,
                held_seconds=0.0,
                samples=0,
                loss_mean=None,
                loss_variance=None,
                payload_bytes=payload.numel(),
                buffer_bytes=0,
                slot=place,
            )
            if slot is not None:
                slot.fill(payload, torch.zeros(0))
                connection.say(gradient)
            else:
                connection.send(frames(gradient, payload, torch.zeros(0)), lambda: None)
            connection.progress += 1
            draw += 1
    connection.close()


# -- what a process holds ------------------------------------------------------------------------------------------


def _status_bytes(process: int | str) -> dict[str, int]:
    """The counts of /proc/PROCESS/status that are sizes, in bytes."""
    text = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _reset_peak_bytes() -> int:
    """Let the kernel count this process's peak from now on; return what it holds now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_bytes("self")["VmRSS"]


class SharedMemory:
    """What a process holds in memory files (memfd), each counted once, mapped or not, however often.

    The kernel's resident size counts a file once for every mapping that was touched, and not at all where none was.
    """

    def __init__(self) -> None:
        self.most_bytes = 0

    def look(self, pid: int) -> int:
        """Look at a process, and return all that it holds, in bytes; 0 if it is gone."""
        try:
            shared, status = _memory_files_bytes(pid), _status_bytes(pid)
            private = status["VmRSS"] - status["RssShmem"]
        except (OSError, KeyError):
            return 0
        self.most_bytes = max(shared, self.most_bytes)
        return private + shared


def _memory_files_bytes(pid: int) -> int:
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
