"""What workers and bad guests do to a server, each in a process of its own that the nursery forks (soak_nursery.py)."""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from paceline.drivers.served.messages import PREFIX_BYTES, PROTOCOL
from tests.long import soak_runs

GUEST_SECONDS = 20.0
SLOW_SECONDS = 5.0, 9.0
LIES_SECONDS = 1.0, 2.0
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def work(address: str, dice: random.Random, number: int | None) -> None:
    """A good worker; SIGTERM makes it leave politely."""
    from paceline.runs.cluster import WorkerOptions, work_for

    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    work_for(address, WorkerOptions(wish=number, threads=1, patience_seconds=120.0))


def _leave(signum: int, frame: object) -> None:
    raise SystemExit(0)


def work_slowly(address: str, dice: random.Random, number: int | None) -> None:
    """A good worker with a slow link, which leaves after a while."""
    _work_for(address, dice.uniform(*SLOW_SECONDS), patience_seconds=1.0)


def _work_for(address: str, seconds: float, *, patience_seconds: float) -> None:
    """Work over the network, though the server is on this machine, and leave after so many seconds."""
    import inspect

    from paceline.drivers.served.job import work as work_on
    from paceline.drivers.served.worker import Worker
    from paceline.recipes.assembly import load_data, make_training
    from paceline.runs.cluster import WorkerOptions, delay_of, trusted_recipe

    remote: dict[str, Any] = {"local": False} if "local" in inspect.signature(Worker).parameters else {}
    with Worker(address, None, patience_seconds=patience_seconds, **remote) as worker:
        signal.signal(signal.SIGALRM, _leave)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        recipe = trusted_recipe(worker.welcome.recipe, WorkerOptions())
        training = make_training(recipe, load_data(recipe))
        worker.hold(training.module)
        worker.ready()
        work_on(worker, training.module, training, delay_of(recipe))


# What a worker can say of itself and its gradient: too much, too little, or nothing that can be. Either the server
# refuses it, or it bears it, and the replay too. The gradient itself is an honest one.
LIES: tuple[dict[str, Any], ...] = (
    {"threads": 100_000},
    {"threads": 2**53},
    {"threads": -1},
    {"wish": 999_999},
    {"wish": 10**400},
    {"host": "x" * 100_000},
    {"version": 2**53 - 1},
    {"version": 0},
    {"version": "newest"},
    {"draw": 2**52},
    {"draw": 0},
    {"blocks": 10**6, "blocks_done": 10**6},
    {"blocks": 10**9},
    {"blocks_done": 0},
    {"blocks_done": 10**6},
    {"work_seconds": 1e9},
    {"work_seconds": -1.0},
    {"work_seconds": 1e308},
    {"held_seconds": 1e9},
    {"samples": 2**53},
    {"samples": -1},
    {"samples": 10**400},
    {"loss_mean": 3e38},
    {"loss_mean": -3e38},
    {"loss_mean": 1e300},
    {"loss_variance": 3e38},
    {"loss_variance": -1.0},
    {"payload_bytes": 2**50},
    {"payload_bytes": 1},
    {"payload_bytes": 0},
    {"buffer_bytes": 2**50},
    {"slot": 0},
    {"slot": 14},
    {"slot": 10**400},
    {"progress": 10**400},
)


def lie(address: str, dice: random.Random, number: int | None) -> None:
    """A worker that says what cannot be, until it is turned away or has lied for a while."""
    import dataclasses

    from paceline.drivers.served import connection, messages, worker

    claims = dice.choice(LIES)

    def lied(message: Any) -> Any:
        known = {field.name for field in dataclasses.fields(message)}
        return dataclasses.replace(message, **{name: value for name, value in claims.items() if name in known})

    honest_frames, honest_encode = messages.frames, messages.encode
    worker.frames = lambda message, *body: honest_frames(lied(message), *body)
    connection.encode = lambda message, *body: honest_encode(lied(message), *body)
    with suppress(OSError, ValueError):  # turned away, or its message cannot even be written
        _work_for(address, dice.uniform(*LIES_SECONDS), patience_seconds=3.0)


def send_nan(address: str, dice: random.Random, number: int | None) -> None:
    """A worker whose gradients are not finite, until the server has had enough of it."""
    import torch

    from paceline.drivers.served.worker import Worker
    from paceline.recipes.assembly import load_data, make_training
    from paceline.runs.cluster import WorkerOptions, trusted_recipe

    wrong = dice.choice([float("nan"), float("inf"), float("-inf")])
    with suppress(ConnectionRefusedError), Worker(address, None, patience_seconds=5.0) as worker:
        recipe = trusted_recipe(worker.welcome.recipe, WorkerOptions())
        module = make_training(recipe, load_data(recipe)).module
        worker.hold(module)
        worker.ready()
        while worker.running():
            for _ in worker.blocks(torch.ones(worker.welcome.blocks)):
                for parameter in module.parameters():
                    parameter.grad.view(-1)[0] = wrong
            worker.send()


def send_garbage(address: str, dice: random.Random, number: int | None) -> None:
    """Connections with messages that are none, each until the server ends it."""
    for _ in range(dice.randint(1, 6)):
        with suppress(OSError), _connected(address) as connection:
            for frame in _garbage(dice):
                connection.sendall(frame)
            connection.settimeout(5.0)
            while connection.recv(65536):
                pass


def _garbage(dice: random.Random) -> Iterator[bytes]:
    if dice.random() < 0.5:  # first as a worker would
        protocol = dice.choice([1, PROTOCOL])
        hello = json.dumps({"protocol": protocol, "wish": None, "threads": 1, "host": "garbage pid 1"}).encode()
        yield struct.pack("<BII", 1, len(hello), 0) + hello
    for _ in range(dice.randint(1, 5)):
        size = dice.choice([0, 1, 8, 9, 40, 2000, 100_000, 1_000_000])
        frame = dice.randbytes(size)
        if dice.random() < 0.6 and size >= PREFIX_BYTES:  # a kind that there is, and sizes that may be as it says
            sizes = dice.choice([(0, 0), (size - PREFIX_BYTES, 0), (0, size - PREFIX_BYTES), (2**32 - 1, 2**32 - 1)])
            frame = struct.pack("<BII", dice.randint(1, 10), *sizes) + frame[PREFIX_BYTES:]
        yield frame


def send_garbage_bytes(address: str, dice: random.Random, number: int | None) -> None:
    """Connections that speak another protocol, or none."""
    for _ in range(dice.randint(5, 30)):
        with suppress(OSError), _connected(address) as connection:
            begin = dice.choice([b"", b"GET / HTTP/1.1\r\n\r\n", HTTP2_PREFACE, b"\x16\x03\x01"])
            connection.sendall(begin + dice.randbytes(dice.choice([0, 1, 100, 10_000, 200_000])))
            if dice.random() < 0.5:
                connection.settimeout(0.2)
                connection.recv(1000)


def flood(address: str, dice: random.Random, number: int | None) -> None:
    """Many connections that say nothing, or begin to say something."""
    until = time.monotonic() + dice.uniform(0.5, 2.0)
    connections = []
    for _ in range(dice.randint(50, 300)):
        with suppress(OSError):
            connections.append(_connected(address))
            if dice.random() < 0.3:
                connections[-1].sendall(struct.pack("<BII", 1, 100, 0)[: dice.randint(1, PREFIX_BYTES)])
    time.sleep(max(0.0, until - time.monotonic()))
    for connection in connections:
        connection.close()


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=2.0)


GUESTS: dict[str, Callable[[str, random.Random, int | None], None]] = {
    "worker": work,
    "slow": work_slowly,
    "liar": lie,
    "start-and-end": soak_runs.from_start_to_end,
    "extended": soak_runs.extended,
    "full-disk": soak_runs.into_a_full_disk,
    "nan": send_nan,
    "garbage": send_garbage,
    "garbage-bytes": send_garbage_bytes,
    "flood": flood,
}


PATIENT = "worker", "start-and-end", "extended", "full-disk"  # these end by themselves


def be_guest(order: dict[str, Any]) -> None:
    """What the nursery's child does; a bad guest ends after 20 s in any case."""
    if order["kind"] not in PATIENT:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, GUEST_SECONDS)
    GUESTS[order["kind"]](order["address"], random.Random(order["seed"]), order["number"])
