"""What bad guests do to a server. Each runs in a process of its own that the nursery forks; see soak_nursery.py."""

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

GUEST_SECONDS = 20.0
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def work(address: str, dice: random.Random, number: int | None) -> None:
    """A good worker; SIGTERM makes it leave politely."""
    from paceline.runs.cluster import WorkerOptions, work_for

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    work_for(address, WorkerOptions(wish=number, threads=1, patience_seconds=120.0))


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
        while worker.training():
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
    "nan": send_nan,
    "garbage": send_garbage,
    "garbage-bytes": send_garbage_bytes,
    "flood": flood,
}


def be_guest(order: dict[str, Any]) -> None:
    """What the nursery's child does; a bad guest ends after 20 s in any case."""
    if order["kind"] != "worker":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, GUEST_SECONDS)
    GUESTS[order["kind"]](order["address"], random.Random(order["seed"]), order["number"])
