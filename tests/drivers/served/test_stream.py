"""One stream on the server's side: what may be said when, and how long it may take. No network, and a clock by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import gc

import grpc
import pytest
import torch

from paceline.drivers.served.messages import (
    Beat,
    Chunk,
    Goodbye,
    Leave,
    Model,
    ProtocolError,
    Ready,
    Sizes,
    Welcome,
    decode,
    encode,
)
from paceline.drivers.served.settings import Limits
from paceline.drivers.served.stream import MOST_HELD, MOST_QUEUED, StreamEnd, WorkerStream
from tests.drivers.served.test_messages import EXAMPLES, GRADIENT

HELLO, WELCOME = EXAMPLES[0], EXAMPLES[1]
SIZES = Sizes(most_payload_bytes=40, buffer_bytes=8)
LIMITS = Limits(silence_seconds=3, stall_seconds=10, hello_seconds=5, joining_seconds=20, farewell_seconds=0.05)
WHOLE = dataclasses.replace(GRADIENT, payload_bytes=40, buffer_bytes=8)


class FakeServer:
    """A server that believes everything that gets through."""

    def __init__(self):
        self.limits, self.sizes, self.seconds, self.received = LIMITS, SIZES, 100.0, []

    def clock(self):
        return self.seconds

    def admit(self, stream, hello):
        return WELCOME

    def ready(self, stream, ready):
        if ready.signature != WELCOME.signature:
            raise ProtocolError("its model is another one")
        stream.member = True

    def arrived(self, stream, received):
        self.received.append(received)

    def decoded(self, payload):
        return payload.view(torch.float32)

    def count_bytes(self, *, sent=0, received=0):
        pass


class Context:
    """What gRPC gives a handler. Without `reads`, the other side takes nothing."""

    def __init__(self, reads=True):
        self.incoming, self.written, self._reads = asyncio.Queue(), [], reads

    def peer(self):
        return "nobody"

    async def read(self):
        return await self.incoming.get()

    async def write(self, frame):
        if not self._reads:
            await asyncio.sleep(3600)
        self.written.append(decode(frame)[0])


def play(*said, reads=True, close=True, then=None):
    """Say frames on a stream; returns how it ended, its server, its context."""

    async def run():
        server, context = FakeServer(), Context(reads)
        stream = WorkerStream(server, context)
        for frame in said:
            context.incoming.put_nowait(frame if isinstance(frame, bytes) else encode(*frame))
        if close:
            context.incoming.put_nowait(grpc.aio.EOF)
        if then is None:
            end = await asyncio.wait_for(stream.serve(), 10)
        else:
            serving = asyncio.create_task(stream.serve())
            await then(server, stream, context)
            end = await asyncio.wait_for(serving, 10)
        return end, server, context

    return asyncio.run(run())


JOINED = ((HELLO,), (Ready(signature="s"),))


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_worker_that_does_as_it_should_is_welcomed_and_its_gradient_arrives():
    body = torch.arange(12, dtype=torch.float32).numpy().tobytes()
    end, server, context = play(
        *JOINED, (WHOLE, body[:20]), (Chunk(), body[20:44]), (Chunk(), body[44:]), (Leave(reason=""),)
    )
    assert (end.what, end.reason, end.refused) == ("return", "it left", False)
    assert [type(message) for message in context.written] == [Welcome, Goodbye]
    (received,) = server.received
    assert received.message == WHOLE
    assert received.vector.tolist() == list(range(10))
    assert received.buffer_changes.tolist() == [10.0, 11.0]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([(HELLO,), (HELLO,)], "a Hello is out of place here"),
        ([(Beat(progress=1),)], "a Beat is out of place here"),
        ([(Leave(reason="x"),)], "a Leave is out of place here"),
        ([(Ready(signature="s"),)], "a Ready is out of place here"),
        ([(WHOLE, bytes(48))], "a Gradient is out of place here"),
        ([(HELLO,), (WHOLE, bytes(48))], "a Gradient is out of place here"),
        ([(HELLO,), (Ready(signature="other"),)], "its model is another one"),
        ([*JOINED, (Ready(signature="s"),)], "a Ready is out of place here"),
        ([*JOINED, (Chunk(), b"x")], "a Chunk is out of place here"),
        ([*JOINED, (WHOLE,)], "a body of 48 bytes got 0"),
        ([*JOINED, (WHOLE, bytes(49))], "a body of 48 bytes got 49"),
        ([*JOINED, (WHOLE, b"x"), (Chunk(), bytes(48))], "a body of 48 bytes got 49"),
        ([*JOINED, (WHOLE, b"x"), (WHOLE, b"x")], "began before the body of the one before was whole"),
        ([*JOINED, (dataclasses.replace(WHOLE, payload_bytes=44), b"x")], "between 1 and 40 bytes"),
        ([*JOINED, (dataclasses.replace(WHOLE, buffer_bytes=12), b"x")], "must be 8 bytes"),
        ([*JOINED, *[(WHOLE, bytes(48))] * (MOST_HELD + 1)], "more than 2 gradients of one worker are held"),
        ([*JOINED, (Beat(progress=1), b"body")], "a Beat has no body"),
        ([(WELCOME,)], "a Welcome is out of place here"),
        (
            [*JOINED, (Model(version=0, since=None, more=0, payload_bytes=1, buffer_bytes=0),)],
            "a Model is out of place here",
        ),
        ([*JOINED, (Goodbye(what="over", reason=""),)], "a Goodbye is out of place here"),
        ([b"\x17 anything"], "no message has kind 23"),
        ([bytes(SIZES.most_message_bytes + 1)], f"a message has at most {SIZES.most_message_bytes} bytes"),
    ],
)
def test_what_is_out_of_place_ends_the_stream_and_both_sides_are_told_why(said, reason):
    end, server, context = play(*said)
    assert end.refused
    assert end.what == "refused"
    assert reason in end.reason
    assert context.written[-1] == Goodbye(what="refused", reason=end.reason)
    assert len(server.received) in (0, MOST_HELD)


def test_memory_of_a_gradient_that_is_given_back_is_used_again():
    async def then(server, stream, context):
        for number in range(5):
            context.incoming.put_nowait(encode(WHOLE, bytes(48)))
            await settle()
            assert len(server.received) == number + 1
            server.received[-1].release()
        assert len({received.vector.data_ptr() for received in server.received}) == 1
        context.incoming.put_nowait(grpc.aio.EOF)

    play(*JOINED, close=False, then=then)


def overdue_after(seconds, *said, reads=True, owes=True, meanwhile=()):
    """What the watchman says when so many seconds have passed; `meanwhile` is said second by second, over and over."""
    found = []

    async def then(server, stream, context):
        await settle()
        stream.owes = owes
        for second in range(seconds):
            server.seconds += 1
            if meanwhile:
                context.incoming.put_nowait(encode(*meanwhile[second % len(meanwhile)]))
            await settle()
            end = stream.overdue(server.seconds)
            if end is not None:
                found.append((second + 1, end))
                stream.end(end)
                return
        stream.end(StreamEnd("over", "the end"))

    play(*said, reads=reads, close=False, then=then)
    return (found[0][0], found[0][1].reason) if found else None


def test_a_stream_that_opens_and_says_nothing_ends():
    assert overdue_after(30) == (6, "said nothing for 5 s")


def test_a_worker_that_falls_silent_is_gone():
    assert overdue_after(30, *JOINED) == (4, "silent for 3 s")


def test_a_worker_that_never_gets_ready_is_gone_though_it_beats():
    assert overdue_after(30, (HELLO,), meanwhile=[(Beat(progress=0),)]) == (21, "not ready after 20 s")


def test_a_worker_that_beats_and_gets_no_further_is_gone_if_it_owes_a_gradient():
    beats = [(Beat(progress=0),)]
    assert overdue_after(30, *JOINED, meanwhile=beats)[1] == "no progress for 10 s (server.stall_seconds)"
    assert overdue_after(30, *JOINED, meanwhile=beats, owes=False) is None


def test_a_worker_that_gets_further_is_waited_for():
    beats = [(Beat(progress=number),) for number in range(40)]
    assert overdue_after(40, *JOINED, meanwhile=beats) is None


@pytest.mark.parametrize(
    "meanwhile",
    [[(Chunk(), b"x")], [(Chunk(), b"x"), (Beat(progress=1),), (Beat(progress=2),)]],
    ids=["byte by byte", "and with progress in its beats"],
)
def test_a_gradient_that_trickles_in_is_no_progress(meanwhile):
    found = overdue_after(30, *JOINED, (WHOLE, b"x"), meanwhile=meanwhile)
    assert found is not None
    assert found[1] == "no progress for 10 s (server.stall_seconds)"
    assert found[0] <= 12


def test_a_gradient_that_comes_in_whole_chunks_is_progress():
    server = FakeServer()
    server.sizes = Sizes(most_payload_bytes=10 * 4 * 2**20, buffer_bytes=0)
    stream = WorkerStream(server, Context())
    stream.worker, stream.member, stream.owes = 0, True, True
    chunk = bytes(server.sizes.chunk_bytes)
    for number in range(9):
        server.seconds += 9
        message = Chunk() if number else dataclasses.replace(WHOLE, payload_bytes=40 * 2**20, buffer_bytes=0)
        stream._handle(message, memoryview(chunk))
        stream._heard = server.seconds
        assert stream.overdue(server.seconds) is None


def test_a_server_that_was_busy_itself_blames_nobody():
    async def then(server, stream, context):
        await settle()
        server.seconds += 4
        assert stream.overdue(server.seconds) is not None
        stream.extend_deadlines(4)
        assert stream.overdue(server.seconds) is None
        context.incoming.put_nowait(grpc.aio.EOF)

    play(*JOINED, close=False, then=then)


def test_nothing_piles_up_for_a_peer_that_never_reads_and_its_goodbye_is_not_waited_for():
    async def then(server, stream, context):
        await settle()
        for _ in range(1000):
            stream.send_model(3, [[b"model"]], whole=True)
            stream._enqueue(b"beat")
        assert len(stream._queue) <= MOST_QUEUED
        assert list(stream._models) == [[b"model"]]
        stream.end(StreamEnd("return", "no progress"))

    end, _, context = play(*JOINED, reads=False, close=False, then=then)
    assert end.reason == "no progress"
    assert context.written == []


def test_a_peer_that_goes_while_it_is_written_to_leaves_no_trace_of_python_in_the_log():
    complaints = []

    class Going(Context):
        async def write(self, frame):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                raise RuntimeError("RPC already finished.") from None

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        context = Going()
        serving = asyncio.create_task(WorkerStream(FakeServer(), context).serve())
        context.incoming.put_nowait(encode(HELLO))
        await settle()
        serving.cancel()
        end = await serving
        await settle()
        gc.collect()
        return end.reason

    assert asyncio.run(run()) == "its connection was lost"
    assert complaints == []


def test_a_reason_of_several_lines_is_said_in_one():
    async def then(server, stream, context):
        await settle()
        stream.end(StreamEnd("over", "one\ntwo"))

    _, _, context = play(*JOINED, close=False, then=then)
    assert context.written[-1].reason == "one two"
