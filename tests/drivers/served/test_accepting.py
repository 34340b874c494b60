"""Strangers at a server's door, in one process: it listens where it can, and those inside are served."""

from __future__ import annotations

import asyncio
import copy
import re
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
import torch

import paceline
from paceline.drivers.served import server as module
from paceline.drivers.served.coordinator import ReceivedGradient
from paceline.drivers.served.handover import HandoverServer
from paceline.drivers.served.keys import make_keys
from paceline.drivers.served.messages import Sizes
from paceline.drivers.served.run import open_run
from paceline.drivers.served.settings import Limits, ServerSettings
from tests.cluster.peers import closed_by_peer, connect
from tests.drivers.served.test_messages import GRADIENT
from tests.drivers.served.test_worker import batches, network, serving, work
from tests.waiting import until

LIMITS = Limits(silence_seconds=5.0, gather_seconds=30.0, hello_seconds=1.0, farewell_seconds=0.5)


def until_closed(connections):
    until(lambda: all(map(closed_by_peer, connections)), "all are hung up on", every_seconds=0.05)


@pytest.mark.slow
def test_two_hundred_silent_strangers_keep_no_worker_out_and_are_hung_up_on(tmp_path):
    served = network()
    model = copy.deepcopy(served)
    with serving(served, tmp_path, limits=LIMITS) as (address, ended), ExitStack() as held:
        strangers = [held.enter_context(connect(address)) for _ in range(200)]
        with paceline.Worker(address, model) as worker:
            assert worker.running()
            until_closed(strangers)
            work(worker, model, batches(100))
    assert ended[0].finished


@pytest.mark.slow
def test_two_hundred_strangers_in_the_middle_of_a_handshake_keep_no_worker_out(tmp_path):
    make_keys(tmp_path / "keys")
    served = network()
    model = copy.deepcopy(served)
    keys = {"tls": tmp_path / "keys" / "server"}
    with serving(served, tmp_path, limits=LIMITS, **keys) as (address, ended), ExitStack() as held:
        strangers = [held.enter_context(connect(address)) for _ in range(200)]
        for stranger in strangers:
            stranger.sendall(b"\x16\x03\x01\x02\x00")
        with paceline.Worker(address, model, tls=tmp_path / "keys" / "worker") as worker:
            assert worker.running()
            until_closed(strangers)
            work(worker, model, batches(100))
    assert ended[0].finished


@pytest.mark.slow
def test_those_that_tls_refuses_are_logged_at_a_bounded_rate_and_a_probe_of_the_port_is_not(
    tmp_path, monkeypatch, caplog
):
    make_keys(tmp_path / "keys")
    monkeypatch.setattr(module, "REFUSALS_AT_ONCE", 5)
    served = network()
    model = copy.deepcopy(served)

    def lines():
        return [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]

    with serving(served, tmp_path, limits=LIMITS, tls=tmp_path / "keys" / "server") as (address, _):
        began = time.monotonic()
        for _ in range(20):
            with connect(address):
                pass
        with ExitStack() as held:
            strangers = [held.enter_context(connect(address)) for _ in range(40)]
            for stranger in strangers:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            until_closed(strangers)
        seconds = time.monotonic() - began
        assert 5 <= len(lines()) <= 5 + module.REFUSALS_PER_SECOND * seconds + 1
        assert all(re.fullmatch(r"refused 127\.0\.0\.1:\d+: it does not speak TLS.*", line) for line in lines())
        with paceline.Worker(address, model, tls=tmp_path / "keys" / "worker") as worker:
            work(worker, model, batches(100))


def server_of(model, folder):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = ServerSettings(
        module=model, optimizer=optimizer, schedule=None, strategy=paceline.Full(), rounds=100, workers=1,
        folder=folder / "run", limits=LIMITS,
    )  # fmt: skip
    return open_run(settings).server


@pytest.mark.parametrize("kind", ["server", "handover"])
def test_who_comes_in_the_moment_of_the_end_breaks_nothing(kind, tmp_path):
    """asyncio hands a connection to whoever waited for it, also when that task was cancelled a moment before."""
    model, failures = network(), []

    async def opened():
        if kind == "handover":
            return HandoverServer(Sizes(most_payload_bytes=40, buffer_bytes=8), 48, lambda task: None)
        server = server_of(model, tmp_path)
        await server.open("127.0.0.1", 0)
        return server

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context["message"]))
        server = await opened()
        await asyncio.sleep(0.01)  # it waits for connections
        listener = server._listener if kind == "handover" else server._listeners[0]
        with socket.socket(listener.family) as stranger:
            stranger.connect(listener.getsockname())
            await asyncio.sleep(0)  # what comes next and the connection are of one turn of the loop
            if kind == "handover":
                server.close()
            else:
                await server.close("stop", "the run is over")
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert not failures


def broken(*given):
    raise RuntimeError("a bug")


async def broken_later(*given):
    broken()


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (module.Server, "_work", broken),  # in the loop that accepts
        (module.Server, "_work", broken_later),  # in the task of the one that was accepted
        (module.WorkerStream, "overdue", broken),  # in the check of deadlines
        (HandoverServer, "_accept", broken_later),
    ],
    ids=["accept", "connection", "deadlines", "shared memory"],
)
def test_an_error_in_what_nobody_waits_for_ends_the_run_and_is_named(owner, name, bug, tmp_path, monkeypatch):
    monkeypatch.setattr(owner, name, bug)
    with serving(network(), tmp_path, limits=LIMITS) as (address, ended), ExitStack() as held:
        with suppress(ConnectionRefusedError):  # the server may have ended already
            held.enter_context(connect(address))
        until(lambda: ended, "the run ends")
    (error,) = ended
    assert isinstance(error, RuntimeError)
    assert str(error) == "a bug"


def test_a_stranger_whose_connection_cannot_be_opened_is_named_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    served = network()
    model = copy.deepcopy(served)
    with serving(served, tmp_path, limits=LIMITS) as (address, ended):
        with monkeypatch.context() as patched:
            patched.setattr(module.Server, "_wire", broken_later)
            with connect(address) as stranger:
                until_closed([stranger])
        with paceline.Worker(address, model) as worker:
            work(worker, model, batches(100))
    assert ended[0].finished
    assert re.search(r"refused 127\.0\.0\.1:\d+: .*a bug", caplog.text)


def test_a_worker_is_refused_for_stalls_in_a_row_and_one_gradient_begins_their_count_anew(tmp_path):
    server = server_of(network(), tmp_path)
    stream, stalled = module.WorkerStream(server, "a worker"), module.StreamEnd("return", "no progress", stalled=True)
    stream.worker = server.coordinator.seats.take().worker
    seat = module.Seat(worker=stream.worker, shard=0, first_draw=0)
    server.coordinator.joined(seat, threads=1, host="here", now=0.0)
    server._members[stream.worker] = stream
    server._act(0.0)
    for draw in range(3):
        assert [server._stalled_again(stream.worker, stalled) for _ in range(2)] == [stalled, stalled]
        message = replace(GRADIENT, version=draw, draw=draw, blocks_done=4, blocks=4, batch_samples=0)
        server.arrived(stream, ReceivedGradient(worker=stream.worker, message=message, vector=torch.zeros(67)))
        assert server.coordinator.train_state.version == draw + 1
    ends = [server._stalled_again(stream.worker, stalled).what for _ in range(3)]
    assert ends == ["return", "return", "refused"]


def test_addresses_that_this_machine_lacks_are_left_out(monkeypatch):
    """localhost is often ::1 too, where there is no IPv6."""
    plain = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*plain, ("192.0.2.1", 0)), (*plain, ("127.0.0.1", 0))]
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda *given, **options: found)
    (listener,) = module._listen("somewhere", 0)
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    found.pop()
    with pytest.raises(OSError, match="Cannot assign requested address"):
        module._listen("somewhere", 0)
