"""A wire: bytes come out as they went in, in whatever pieces; a peer that does not read costs nothing but time."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
import warnings
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drivers.served.keys import make_keys
from paceline.drivers.served.messages import FROM_SERVER, FROM_WORKERS, KINDS, Beat, ProtocolError, Welcome, encode
from paceline.drivers.served.security import server_credentials, worker_credentials
from paceline.drivers.served.transport import BURST_BYTES, SLICE_BYTES, STAGING_BYTES, Wire, WireClosed, read_message

SECONDS = 20.0
sizes = st.one_of(st.integers(0, 300), st.sampled_from([STAGING_BYTES - 1, STAGING_BYTES, STAGING_BYTES + 1, 200_000]))


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    """Both sides' credentials for TLS, or nothing."""
    keys = tmp_path_factory.mktemp("keys")
    make_keys(keys)
    return {"plain": (None, None), "TLS": (server_credentials(keys / "server"), worker_credentials(keys / "worker"))}


@pytest.fixture(params=["plain", "TLS"])
def sides(request, credentials):
    return credentials[request.param]


@asynccontextmanager
async def pair(sides=(None, None)):
    """Two wires that are connected."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        going = asyncio.create_task(
            loop.create_connection(
                Wire, "127.0.0.1", port, ssl=sides[1], server_hostname=None if sides[1] is None else "127.0.0.1"
            )
        )
        accepted, _ = await loop.sock_accept(listener)
        _, near = await loop.connect_accepted_socket(Wire, accepted, ssl=sides[0])
        _, far = await going
    try:
        yield near, far
    finally:
        await near.farewell(0.0)
        await far.farewell(0.0)


def run(work):
    """Run a coroutine; every wait has an end, and nothing may be left open."""

    async def limited():
        async with asyncio.timeout(SECONDS):
            return await work

    gc.freeze()  # so that collecting looks at this run's objects, not at all of torch
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        found = asyncio.run(limited())
        gc.collect()
    return found


def pattern(count):
    return bytes(range(251)) * (count // 251) + bytes(range(count % 251))


@pytest.mark.parametrize("kind", ["plain", "TLS"])
@settings(max_examples=25, deadline=None)
@given(written=st.lists(sizes, max_size=12), data=st.data())
def test_what_is_written_in_any_pieces_is_read_exactly_in_any_other(credentials, kind, written, data):
    whole = pattern(sum(written))
    wanted, left = [], len(whole)
    while left:
        wanted.append(min(left, max(1, data.draw(sizes))))
        left -= wanted[-1]
    into = [data.draw(st.booleans()) for _ in wanted]

    async def write(wire):
        start = 0
        for size in written:
            await wire.write(whole[start : start + size], b"")
            start += size

    async def read(wire):
        found = b""
        for size, in_place in zip(wanted, into, strict=True):
            if in_place:
                memory = bytearray(size)
                await wire.read_into(memoryview(memory))
                found += memory
            else:
                found += await wire.read(size)
        return found

    async def work():
        async with pair(credentials[kind]) as (near, far):
            _, there, _, back = await asyncio.gather(write(near), read(far), write(far), read(near))
            assert near.received_bytes == far.received_bytes == len(whole)
            return there, back

    assert run(work()) == (whole, whole)


def test_a_large_vector_comes_whole_and_staging_keeps_its_size(sides):
    vector = pattern(20 * 2**20)

    async def work():
        async with pair(sides) as (near, far):
            memory = bytearray(len(vector))
            await asyncio.gather(near.write(b"head", memoryview(vector), b"tail"), _into(far, memory))
            assert memory == vector
            assert await far.read(4) == b"tail"
            assert len(far._staging) == STAGING_BYTES

    async def _into(wire, memory):
        assert await wire.read(4) == b"head"
        await wire.read_into(memoryview(memory))

    run(work())


def test_a_peer_that_does_not_read_stops_the_writer_and_takes_no_memory(sides):
    async def work():
        async with pair(sides) as (near, far):
            written = 0

            async def write():
                nonlocal written
                while True:
                    await near.write(bytes(SLICE_BYTES))
                    written += SLICE_BYTES

            writing = asyncio.create_task(write())
            before = -1
            while before != written:  # until it stands still
                before = written
                await asyncio.sleep(0.3)
            assert not writing.done()
            waiting = near._transport.get_write_buffer_size()
            assert waiting <= 2 * SLICE_BYTES
            assert far._end <= STAGING_BYTES
            await far.read_into(memoryview(bytearray(written)))  # it goes on when the peer does
            await far.read(1)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    run(work())


def test_memory_may_be_changed_when_it_has_been_written(sides):
    """From Python 3.12 on a transport keeps views of what it could not send at once, and no copy."""
    size, parts = 3 * SLICE_BYTES, 4

    async def work():
        async with pair(sides) as (near, far):
            memory = bytearray(size)

            async def write():
                for number in range(parts):
                    memory[:] = bytes([number]) * size
                    await near.write(memoryview(memory))
                    memory[:] = b"\xff" * size

            async def read():
                for number in range(parts):
                    found = bytearray(size)
                    await asyncio.sleep(0.05)  # the writer is ahead, and its buffers are full
                    await far.read_into(memoryview(found))
                    assert found == bytes([number]) * size

            await asyncio.gather(write(), read())

    run(work())


@pytest.mark.parametrize("count", [1, 100, STAGING_BYTES + 7])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_end_in_the_middle_is_told_and_so_is_every_later_call(sides, count, in_place):
    async def work():
        async with pair(sides) as (near, far):
            await near.write(pattern(count - 1))
            await near.farewell(0.0 if sides[0] is None else 0.2)
            for _ in range(2):
                with pytest.raises(WireClosed):
                    await (far.read_into(memoryview(bytearray(count))) if in_place else far.read(count))
            with pytest.raises(WireClosed):
                await far.write(bytes(100 * SLICE_BYTES))

    run(work())


def test_a_writer_that_waits_is_told_when_the_peer_goes(sides):
    async def work():
        async with pair(sides) as (near, far):
            writing = asyncio.create_task(_for_ever(near))
            await asyncio.sleep(0.2)
            assert not writing.done()
            far._transport.abort()
            with pytest.raises(WireClosed):
                await writing

    async def _for_ever(wire):
        while True:
            await wire.write(bytes(SLICE_BYTES))

    run(work())


def test_the_last_words_arrive_though_bytes_of_the_peer_lie_unread(sides):
    """A socket that is closed with bytes unread sends a reset, which overtakes what was written last."""

    async def work():
        async with pair(sides) as (near, far):
            flooding = asyncio.create_task(_flood(far))
            await asyncio.sleep(0.2)  # all buffers are full, and `near` reads nothing
            await near.write(b"goodbye")
            leaving = asyncio.create_task(near.farewell(5.0))
            assert await far.read(7) == b"goodbye"
            flooding.cancel()
            await far.farewell(0.0)
            began = time.monotonic()
            await leaving
            assert time.monotonic() - began < 4.0

    async def _flood(wire):
        while True:
            await wire.write(bytes(SLICE_BYTES))

    run(work())


def test_with_tls_writing_goes_on_where_a_write_limit_of_0_would_stop_it_for_ever(credentials):
    """asyncio's TLS pauses a writer at its limit, also at nothing: with 0 it is never told to go on."""

    async def work():
        async with pair(credentials["TLS"]) as (near, far):
            for writer, reader in ((near, far), (far, near)):
                for size in (1, SLICE_BYTES + 1):
                    async with asyncio.timeout(SECONDS / 8):
                        _, found = await asyncio.gather(writer.write(pattern(size)), reader.read(size))
                    assert found == pattern(size)

    run(work())


def test_a_farewell_to_a_peer_that_stays_has_an_end(sides):
    async def work():
        async with pair(sides) as (near, far):
            sending = asyncio.create_task(_for_ever(far))
            await near.farewell(0.3)
            with pytest.raises(WireClosed):
                await sending
            with pytest.raises(WireClosed):
                await near.read(1)

    async def _for_ever(wire):
        while True:
            await wire.write(bytes(1000))

    run(work())


def test_every_byte_is_a_sign_of_life_also_on_a_link_that_was_quick_before():
    """The loop is woken for many bytes at once while they come quickly; when they come slowly, `look` sees the few."""

    async def work():
        async with pair() as (near, far):
            memory = memoryview(bytearray(64 * BURST_BYTES))
            reading = asyncio.create_task(far.read_into(memory))
            for _ in range(16):
                await near.write(bytes(BURST_BYTES))
                await asyncio.sleep(0)
            while far.received_bytes < 15 * BURST_BYTES:
                await asyncio.sleep(0.01)
            far._wake_for(BURST_BYTES)
            await near.write(bytes(1000))
            await asyncio.sleep(0.2)
            seen = far.received_bytes
            far.wake_for_any_byte()
            while far.received_bytes != 16 * BURST_BYTES + 1000:
                await asyncio.sleep(0.01)
            assert seen <= far.received_bytes
            assert time.monotonic() - far.heard < 5.0
            reading.cancel()

    run(work())


@pytest.mark.parametrize("kinds", [FROM_WORKERS, FROM_SERVER], ids=["the server", "a worker"])
def test_what_the_other_side_never_says_is_refused_before_its_header_is_kept(kinds):
    async def work(kind):
        async with pair() as (near, far):
            await near.write(bytes([kind.KIND]) + (50_000).to_bytes(4, "little") + bytes(4))  # and no header follows
            with pytest.raises(ProtocolError, match=f"a {kind.__name__} is out of place here"):
                await read_message(far, kinds)

    for kind in set(KINDS.values()) - kinds:
        run(work(kind))
    assert set(KINDS.values()) == FROM_WORKERS | FROM_SERVER
    assert Welcome not in FROM_WORKERS  # its header may be the largest


def test_messages_come_one_by_one_however_they_are_cut():
    frames = [encode(Beat(progress=number)) for number in range(50)]

    async def work():
        async with pair() as (near, far):
            whole = b"".join(frames)
            for start in range(0, len(whole), 7):
                await near.write(whole[start : start + 7])
            return [await read_message(far, FROM_WORKERS) for _ in frames]

    assert run(work()) == [(Beat(progress=number), 0) for number in range(50)]
