"""One stream on the server's side: what may be said when, and how long it may take. No network, and a clock by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import gc

import pytest
import torch

from paceline.drivers.served.coordinator import ReceivedGradient
from paceline.drivers.served.messages import (
    MOST_BODY_BYTES,
    Assembly,
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
from paceline.drivers.served.stream import (
    MOST_HELD,
    MOST_QUEUED,
    TRICKLE_BYTES,
    ModelMessage,
    StreamEnd,
    WorkerStream,
)
from paceline.drivers.served.transport import Wire
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

    def assembly(self):
        return Assembly(self.sizes)

    async def decoded(self, worker, message, assembly):
        vector = assembly.payload.view(torch.float32)
        return ReceivedGradient(worker=worker, message=message, vector=vector, buffer_changes=assembly.buffers)

    def fail(self, error):
        raise error


class FarEnd:
    """The worker's end of a wire, in the place of a transport. Without `reads`, it takes nothing."""

    def __init__(self, server, reads=True):
        self.wire, self.written, self._reads, self._reading, self._bytes = Wire(server.clock), [], reads, True, b""
        self.wire.connection_made(self)

    def get_extra_info(self, name):
        return None

    def set_write_buffer_limits(self, high, low):
        assert low == 0

    def is_closing(self):
        return False

    def write(self, piece):
        if self._reads:
            self.written.append(decode(bytes(piece))[0])
        else:
            self.wire.pause_writing()

    def say(self, frame):
        """Send bytes: as they can be read, and all of them once `settle` is over."""
        self._bytes += frame
        self._flow()

    def close(self):
        self._flow()
        self.wire.connection_lost(None)

    def pause_reading(self):
        self._reading = False

    def resume_reading(self):
        self._reading = True
        asyncio.get_running_loop().call_soon(self._flow)

    def _flow(self):
        while self._bytes and self._reading:
            room = self.wire.get_buffer(-1)
            piece, self._bytes = self._bytes[: len(room)], self._bytes[len(room) :]
            room[: len(piece)] = piece
            self.wire.buffer_updated(len(piece))


def play(*said, reads=True, close=True, then=None):
    """Say frames on a stream; returns how it ended, its server, its far end."""

    async def run():
        server = FakeServer()
        far = FarEnd(server, reads)
        stream = WorkerStream(server, "nobody")
        serving = asyncio.create_task(stream.serve(far.wire))
        for frame in said:
            far.say(frame if isinstance(frame, bytes) else encode(*frame))
            await settle()
        if then is not None:
            await then(server, stream, far)
        if close and not serving.done():
            far.close()
        return await asyncio.wait_for(serving, 10), server, far

    return asyncio.run(run())


JOINED = ((HELLO,), (Ready(signature="s"),))


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_worker_that_does_as_it_should_is_welcomed_and_its_gradient_arrives():
    body = torch.arange(12, dtype=torch.float32).numpy().tobytes()
    end, server, far = play(
        *JOINED, (WHOLE, body[:20]), (Chunk(), body[20:44]), (Chunk(), body[44:]), (Leave(reason=""),)
    )
    assert (end.what, end.reason, end.refused) == ("return", "it left", False)
    assert [type(message) for message in far.written] == [Welcome, Goodbye]
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
        ([(Chunk(), bytes(MOST_BODY_BYTES + 1))], f"the body of a frame is at most {MOST_BODY_BYTES} bytes"),
        ([*JOINED, (WHOLE, b"x"), (Chunk(), bytes(MOST_BODY_BYTES + 1))], "the body of a frame is at most"),
        ([b"\x01\xff\xff\xff\xff\0\0\0\0{}"], "the header of a Hello is at most 65536 bytes"),
        ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], "it speaks gRPC, as paceline did before"),
    ],
)
def test_what_is_out_of_place_ends_the_stream_and_both_sides_are_told_why(said, reason):
    end, server, far = play(*said)
    assert end.refused
    assert end.what == "refused"
    assert reason in end.reason
    assert far.written[-1] == Goodbye(what="refused", reason=end.reason)
    assert len(server.received) in (0, MOST_HELD)


def test_gradients_that_are_given_back_make_room_for_others():
    async def then(server, stream, far):
        for number in range(3 * MOST_HELD):
            far.say(encode(WHOLE, bytes(48)))
            await settle()
            assert len(server.received) == number + 1
            server.received[-1].release()

    play(*JOINED, then=then)


def overdue_after(seconds, *said, reads=True, owes=True, meanwhile=()):
    """What the watchman says when so many seconds have passed; `meanwhile` is said second by second, over and over."""
    found = []

    async def then(server, stream, far):
        await settle()
        stream.owes = owes
        for second in range(seconds):
            server.seconds += 1
            if meanwhile:
                far.say(encode(*meanwhile[second % len(meanwhile)]))
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


@pytest.mark.parametrize("frame_bytes", [2**20, TRICKLE_BYTES, 5000], ids=["large frames", "frames", "small frames"])
def test_a_gradient_that_comes_slowly_is_progress_with_every_so_many_bytes(frame_bytes):
    """64 kB within ten seconds: a slow link only takes its time, whether the bytes fill whole frames or not."""
    large = dataclasses.replace(WHOLE, payload_bytes=20 * TRICKLE_BYTES, buffer_bytes=0)
    body, said = bytes(large.payload_bytes), b""
    for start in range(0, len(body), frame_bytes):
        said += encode(Chunk() if start else large, body[start : start + frame_bytes])

    async def then(server, stream, far):
        server.sizes = Sizes(most_payload_bytes=large.payload_bytes, buffer_bytes=0)
        stream.owes = True
        for start in range(0, len(said), TRICKLE_BYTES // 4):
            server.seconds += 2.2
            far.say(said[start : start + TRICKLE_BYTES // 4])
            await settle()
            assert stream.overdue(server.seconds) is None
        assert len(server.received) == 1

    play(*JOINED, then=then)


def test_a_server_that_was_busy_itself_blames_nobody():
    async def then(server, stream, far):
        await settle()
        server.seconds += 4
        assert stream.overdue(server.seconds) is not None
        stream.extend_deadlines(4)
        assert stream.overdue(server.seconds) is None

    play(*JOINED, then=then)


def test_nothing_piles_up_for_a_peer_that_never_reads_and_its_goodbye_is_not_waited_for():
    model = ModelMessage(EXAMPLES[3], torch.zeros(400, dtype=torch.uint8), torch.zeros(2))

    async def then(server, stream, far):
        for _ in range(1000):
            stream.send_model(3, [model], whole=True)
            stream._enqueue(b"beat")
        assert len(stream._queue) <= MOST_QUEUED
        assert list(stream._models) == [(model, 0)]
        stream.end(StreamEnd("return", "no progress"))

    end, _, far = play(*JOINED, reads=False, close=False, then=then)
    assert end.reason == "no progress"
    assert far.written == []


@pytest.mark.parametrize("error", [None, ConnectionResetError(104, "Connection reset by peer")], ids=str)
def test_a_peer_that_goes_while_it_is_written_to_leaves_no_trace_of_python_in_the_log(error):
    complaints = []

    async def then(server, stream, far):
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        far.wire.connection_lost(error)
        await settle()
        gc.collect()

    end, _, _ = play((HELLO,), reads=False, close=False, then=then)
    gc.collect()
    assert end.reason.startswith("its connection was lost")
    assert not end.refused
    assert complaints == []


@pytest.mark.parametrize("where", ["_write_queued", "_write_model"])
def test_an_error_of_the_writer_ends_the_stream_and_the_run_with_it(where):
    bug, failed = RuntimeError("a bug"), []

    async def broken(wire):
        raise bug

    async def then(server, stream, far):
        await settle()
        server.fail = failed.append
        setattr(stream, where, broken)
        stream._enqueue(encode(Beat(progress=0)))
        await settle()

    end, _, _ = play(*JOINED, then=then)
    assert failed == [bug]
    assert (end.what, end.reason, end.refused) == ("return", "the server failed", False)


def test_an_error_of_the_writer_is_heard_also_if_it_comes_with_the_last_words():
    bug, failed = RuntimeError("a bug"), []

    async def broken(wire):
        raise bug

    async def then(server, stream, far):
        await settle()
        server.fail = failed.append
        stream._write_queued = broken
        stream.end(StreamEnd("over", "all rounds are done"))

    end, _, _ = play(*JOINED, close=False, then=then)
    assert failed == [bug]
    assert end.reason == "all rounds are done"


@pytest.mark.parametrize("size", [0, 1, 8, 9, 20])
def test_a_peer_that_goes_in_the_middle_of_a_message_is_lost_and_not_refused(size):
    end, server, _ = play(*JOINED, encode(WHOLE, bytes(48))[:size])
    assert end.reason == "its connection was lost (the other side closed the connection)"
    assert not end.refused
    assert server.received == []


def test_a_reason_of_several_lines_is_said_in_one():
    async def then(server, stream, far):
        await settle()
        stream.end(StreamEnd("over", "one\ntwo"))

    _, _, far = play(*JOINED, close=False, then=then)
    assert far.written[-1].reason == "one two"


def test_a_stream_that_is_ended_between_the_handshake_and_its_first_read_ends():
    async def run():
        server = FakeServer()
        far, stream = FarEnd(server), WorkerStream(server, "nobody")
        stream.end(StreamEnd("return", "too many", refused=True))
        return await asyncio.wait_for(stream.serve(far.wire), 5), far

    end, far = asyncio.run(run())
    assert end.reason == "too many"
    assert far.written == [Goodbye(what="return", reason="too many")]
