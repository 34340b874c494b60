"""Strangers and broken peers against a running server: it goes on, keeps its workers, and says why it refused whom.

Most tests share one running cluster, so each leaves it as it found it. When the last is done, the run must replay to
the last bit: nothing of what was refused has come near the model.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.codecs import BFloat16, Identity
from paceline.data.sketch import sketch_of
from paceline.drivers.served.messages import (
    KINDS,
    MOST_BODY_BYTES,
    PREFIX_BYTES,
    PROTOCOL,
    Beat,
    Chunk,
    Goodbye,
    Gradient,
    Leave,
    Model,
    Ready,
    encode,
)
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data
from paceline.traces.journal import Evaluated, Refused, RunBegan, StepRecord, WorkerLeft
from paceline.traces.step_times import read_times, times_path
from tests.cluster.peers import (
    Peer,
    RawFrames,
    Visited,
    Working,
    closed_by_peer,
    connect,
    hello,
    poison,
)
from tests.waiting import until

HEALTHY = {0, 1, 2}
PACED = (  # some ten rounds a second, whatever the machine
    ("delay.inject", "true"), ("delay.shift-seconds", 0.1), ("delay.mean-seconds", 0.0),
    ("server.stall-seconds", 3), ("checkpoint-every", 1000),
)  # fmt: skip

pytestmark = pytest.mark.xdist_group("strangers")  # one cluster for all of them


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Visited(tmp_path_factory.mktemp("lgc"), workers=3, k=2, settings=PACED) as cluster:
        cluster.until_round(3)
        yield cluster
        _check_the_end(cluster)


@pytest.fixture(scope="module")
def full_cluster(tmp_path_factory):
    with Visited(tmp_path_factory.mktemp("full"), workers=3, strategy="full", settings=PACED) as cluster:
        cluster.until_round(3)
        yield cluster
        _check_the_end(cluster)


def _check_the_end(cluster):
    """The workers were members to the end, the model is finite, and the trace tells the run as it was."""
    cluster.until_round(21)  # by then the model was measured after round 10, whatever is measured when it is stopped
    cluster.stop()
    gone = [record for record in cluster.records if isinstance(record, WorkerLeft) and record.worker in HEALTHY]
    assert all("SIGTERM" in record.reason for record in gone), gone
    assert "Traceback" not in cluster.log
    measured = [record for record in cluster.records if isinstance(record, Evaluated)]
    assert measured
    assert all(record.loss is not None and math.isfinite(record.loss) for record in measured)
    assert measured[-1].loss < measured[0].loss
    assert cluster.replay()["identical"]


@contextlib.contextmanager
def unharmed(cluster, *, says=None, refused=None):
    """What happens within leaves the server going on with its workers.

    `says` is a new line of its log, `refused` is part of the reason in a new record of the trace (and of a line).
    """
    lines, records = len(cluster.log.splitlines()), len(cluster.records)
    yield
    pattern = says or (f"refused .*{refused}" if refused else None)
    if pattern:
        cluster.until(lambda: _matching(cluster, lines, pattern), f"a line like {pattern!r}", seconds=20)
        assert len(_matching(cluster, lines, pattern)[0]) < 500
    if refused:
        cluster.until(
            lambda: any(isinstance(r, Refused) and re.search(refused, r.reason) for r in cluster.records[records:]),
            f"a record of {refused!r}",
        )
    cluster.until_goes_on(3, seconds=30)
    assert cluster.alive >= HEALTHY, cluster.log
    assert cluster.server.poll() is None


def _matching(cluster, after, pattern):
    return [line for line in cluster.log.splitlines()[after:] if re.search(pattern, line)]


# -- bad gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_its_worker_stays_if_the_next_are_good(cluster, value):
    before = len(cluster.records)
    with unharmed(cluster, says=r"worker 3 sent a gradient that is not finite: refused", refused=None):
        working = Working(cluster.address, poison(value, at={2}))
        cluster.until(lambda: working.sends >= 8 or working.error, "eight gradients")
        assert working.error is None
        assert working.number == 3
        assert 3 in cluster.alive
    new = cluster.records[before:]
    refusals = [(record.worker, record.reason) for record in new if isinstance(record, Refused)]
    assert refusals == [(3, "not finite")]
    used = {worker for record in new if isinstance(record, StepRecord) for worker, _ in (*record.fresh, *record.late)}
    assert 3 in used
    working.stop()
    cluster.until_alive(HEALTHY)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_worker_whose_gradients_are_never_finite_is_dismissed_for_good(cluster, value):
    cluster.until_goes_on(3)  # what a worker 3 before this one had sent is used by then
    before = len(cluster.records)
    with unharmed(cluster, says="worker 3 left: it sent 3 gradients in a row that are not finite"):
        working = Working(cluster.address, poison(value, at=range(100)))
        cluster.until(lambda: working.error, "the worker gives up")
    assert working.error.startswith("WorkerRefused: the server at")
    assert "3 gradients in a row that are not finite" in working.error
    assert working.sends in (3, 4)  # the fourth had begun before it was told
    new = cluster.records[before:]
    assert [record.reason for record in new if isinstance(record, Refused)] == ["not finite"] * 3
    assert not any(share[0] == 3 for r in new if isinstance(r, StepRecord) for share in (*r.fresh, *r.late))
    cluster.until_alive(HEALTHY)


def _header(peer, **changes):
    """A gradient's frame with any values at all in its header."""
    frame = encode(peer.gradient())
    values = json.loads(frame[PREFIX_BYTES:]) | changes
    header = json.dumps(values).encode()
    return struct.pack("<BII", Gradient.KIND, len(header), len(peer.zeros)) + header + peer.zeros


def _sized(peer, payload_bytes, buffer_bytes=None):
    buffer_bytes = peer.model.buffer_bytes if buffer_bytes is None else buffer_bytes
    body = bytes(payload_bytes + buffer_bytes)
    return encode(peer.gradient(payload_bytes=payload_bytes, buffer_bytes=buffer_bytes), body)


def _encoded(peer, codec, elements):
    payload = codec.encode(torch.zeros(elements)).numpy().tobytes()
    return encode(peer.gradient(payload_bytes=len(payload)), payload + bytes(peer.model.buffer_bytes))


def _cut(peer):
    size = peer.model.payload_bytes - 1
    return encode(peer.gradient(payload_bytes=size), peer.zeros[:size] + bytes(peer.model.buffer_bytes))


BAD_GRADIENTS = {
    "another shape": (lambda p: _encoded(p, Identity(), 1), "elements was expected \\(this one has 1\\)"),
    "another codec": (lambda p: _encoded(p, BFloat16(), 9), "payload is of codec number 2"),
    "less than a header": (lambda p: _sized(p, 4), "a payload has at least 16 bytes"),
    "a number too many": (lambda p: _sized(p, p.model.payload_bytes + 4), "payload of a Gradient must be between"),
    "half a number": (lambda p: _cut(p), "the payload's body must have"),
    "what is no payload": (lambda p: _sized(p, p.model.payload_bytes - 1), "a payload begins with"),
    "a body where there is no gradient": (lambda p: _header(p, payload_bytes=0, buffer_bytes=0), "has no body"),
    "buffers it has not": (lambda p: _sized(p, p.model.payload_bytes, 4), "buffers of a Gradient must be 0 bytes"),
    "a version never sent": (lambda p: _header(p, version=p.model.version + 10**6), "cannot be: the worker was sent"),
    "more blocks than there are": (lambda p: _header(p, blocks_done=5, blocks=4), "5 of 4 blocks cannot be done"),
    "blocks that no batch has": (
        lambda p: _header(p, blocks=10**6, blocks_done=10**6),
        "a batch has 4 blocks here \\(blocks=1000000\\)",
    ),
    "fewer blocks than the recipe's": (
        lambda p: _header(p, blocks=3, blocks_done=3),
        "a batch has 4 blocks here \\(blocks=3\\)",
    ),
    "a batch of the far future": (lambda p: _header(p, draw=2**53), "cannot be: the worker's next is batch"),
    "a negative version": (
        lambda p: _header(p, version=-1),
        "a Gradient: version must be a whole number",
    ),
    "a negative time": (
        lambda p: _header(p, work_seconds=-1),
        "a Gradient: work_seconds must be a number",
    ),
    "an absurd time": (
        lambda p: _header(p, work_seconds=1e300),
        "a Gradient: work_seconds must be a number",
    ),
    "a negative phase": (
        lambda p: _header(p, backward_seconds=-1),
        "a Gradient: backward_seconds must be a number",
    ),
    "more bytes than there are": (
        lambda p: _header(p, down_bytes=2**60),
        "a Gradient: down_bytes must be a whole number",
    ),
    "an absurd loss": (
        lambda p: _header(p, loss_mean=-1e300),
        "a Gradient: loss_mean must be a number",
    ),
    "a whole number beyond all floats": (
        lambda p: _header(p, held_seconds=10**400),
        "a Gradient: held_seconds",
    ),
    "a size beyond all memory": (lambda p: _header(p, payload_bytes=2**53), "payload of a Gradient must be between"),
    "a negative size": (
        lambda p: _header(p, payload_bytes=-4),
        "a Gradient: payload_bytes must be a whole number",
    ),
    "text for a number": (lambda p: _header(p, draw="0"), "a Gradient: draw must be a whole number"),
    "a longer body than announced": (lambda p: encode(p.gradient(), p.zeros + b"x"), "a body of \\d+ bytes got"),
    "no body": (lambda p: encode(p.gradient()), "a body of \\d+ bytes got 0"),
}


@pytest.mark.parametrize("bad", BAD_GRADIENTS)
def test_a_gradient_that_cannot_be_is_refused_and_its_sender_told_why(cluster, bad):
    frame, reason = BAD_GRADIENTS[bad]
    with unharmed(cluster, refused=reason), Peer(cluster.address) as peer:
        peer.join()
        peer.say_bytes(frame(peer))
        said = peer.goodbye()
        assert said.what == "refused"
        assert re.search(reason, said.reason)
        assert len(said.reason) < 300


def test_whoever_takes_the_seat_of_one_that_lied_about_its_batches_goes_on_where_the_truth_ended(cluster):
    first_draws = []
    for _ in range(2):
        with unharmed(cluster, refused="the worker's next is batch"), Peer(cluster.address) as peer:
            peer.join()
            assert peer.welcome.worker == 3
            first_draws.append(peer.welcome.first_draw)
            peer.say_bytes(_header(peer, draw=peer.welcome.first_draw + 10**9))
            peer.goodbye()
    assert first_draws[0] == first_draws[1]


def test_times_that_a_worker_makes_up_are_cut_to_what_the_server_has_seen(cluster):
    names = ("held", "input", "forward", "backward", "behind", "processor", "down")
    absurd = {f"{name}_seconds": 1e9 for name in names}

    def make_up(worker):  # its gradients go by shared memory, as small messages
        connection = worker.connection
        say = connection.say
        if worker.sends == 1:
            connection.say = lambda said: say(
                replace(said, **absurd, down_bytes=2**53) if isinstance(said, Gradient) else said
            )

    working = Working(cluster.address, make_up)
    with unharmed(cluster):
        cluster.until(lambda: working.sends > 6, "it has sent some")
        working.stop()
    steps = read_times(times_path(cluster.run, "worker", working.number)).steps[-4:]
    for step in steps:
        assert step.computing_seconds + step.wait_seconds <= step.seconds + 5e-6
        assert step.seconds < 1e4
        assert step.input_seconds == step.seconds, "it claimed to have held the model all the time"
        assert step.trip.down_bytes < 10**6


@pytest.mark.parametrize("shared", [False, True], ids=["in frames", "in shared memory"])
def test_a_gradient_sent_twice_counts_once(cluster, shared):
    def twice(worker):
        connection = worker.connection
        send, say = connection.send, connection.say

        def send_again(frames, sent):
            frames = list(frames)
            send(frames, lambda: None)
            send(frames, sent)

        def say_again(message):
            for _ in range(1 + isinstance(message, Gradient)):
                say(message)

        if not shared:
            connection.free_slot = lambda: None
        if worker.sends == 3:
            connection.send, connection.say = send_again, say_again

    with unharmed(cluster, refused="and has answered|slot . cannot hold a gradient"):
        working = Working(cluster.address, twice)
        cluster.until(lambda: working.error, "it is refused")
    assert "WorkerRefused" in working.error


def test_a_batch_of_the_past_is_refused(cluster):
    def again(worker):
        if worker.sends == 3:
            worker.draw -= 1

    with unharmed(cluster, refused="cannot be: the worker's next is batch"):
        working = Working(cluster.address, again)
        cluster.until(lambda: working.error, "it is refused")
    assert "cannot be: the worker's next is batch" in working.error


def test_a_gradient_of_long_ago_is_dropped_and_one_from_before_that_refused(cluster):
    with unharmed(cluster, refused="and has answered"), Peer(cluster.address) as peer:
        first = peer.join().version
        peer.beat()
        while peer.next_model().version < first + 4:
            pass
        peer.say(peer.gradient(version=first), peer.zeros)

        def dropped():
            found = [r for r in cluster.records if isinstance(r, StepRecord)]
            return any((d.worker, d.version) == (peer.welcome.worker, first) for r in found for d in r.dropped)

        cluster.until(dropped, "it is dropped")
        assert peer.welcome.worker in cluster.alive
        peer.say(peer.gradient(version=first - 1, draw=peer.welcome.first_draw + 1), peer.zeros)
        assert peer.goodbye().what == "refused"


def test_a_worker_is_told_which_data_the_server_has(cluster):
    """Its own must fit: tests/cluster/test_same_data.py."""
    with Peer(cluster.address) as peer:
        theirs = peer.greet().data
    assert theirs == json.loads(json.dumps(sketch_of(load_data(Recipe()))))


# -- out of turn ----------------------------------------------------------------------------------------------------


def _greet_and(*said):
    def script(peer):
        peer.greet()
        for message in said:
            peer.say(message)

    return script


def _join_and(*said):
    def script(peer):
        peer.join()
        for message in said:
            peer.say(*message) if isinstance(message, tuple) else peer.say(message)

    return script


def _gradient_before_ready(peer):
    peer.greet()
    peer.model = Model(version=0, since=None, more=0, payload_bytes=4, buffer_bytes=0)
    peer.say(peer.gradient(), bytes(4))


SCRIPTS = {
    "another protocol": (lambda p: p.say(hello(protocol=2)), f"speaks protocol 2, this one speaks {PROTOCOL}"),
    "another model": (_greet_and(Ready(signature="another")), "its model is another one"),
    "hello twice": (_greet_and(hello()), "a Hello is out of place"),
    "ready twice": (_join_and(Ready(signature="")), "a Ready is out of place"),
    "a gradient before ready": (_gradient_before_ready, "a Gradient is out of place"),
    "a chunk that nothing began": (_join_and((Chunk(), b"x")), "a Chunk is out of place"),
    "a beat before hello": (lambda p: p.say(Beat(progress=0)), "a Beat is out of place"),
    "what only a server says": (_greet_and(Goodbye(what="over", reason="")), "a Goodbye is out of place"),
    "a host of two lines": (lambda p: p.say(hello(host="a\nrefused nobody: x")), "a Hello: host must be a line"),
    "a kind that is none": (lambda p: p.say_bytes(b"\xff" * 40), "no message has kind 255"),
    "a header of four gigabytes": (
        lambda p: p.say_bytes(b"\x01\xff\xff\xff\xff\0\0\0\0{}"),
        "the header of a Hello is at most",
    ),
    "a body where there can be none": (lambda p: p.say(hello(), b"x"), "a Hello has no body"),
    "a chunk and a megabyte": (lambda p: p.say(Chunk(), bytes(2**20 + 2**18)), "a Chunk is out of place"),
    "a member's chunk and a megabyte": (_join_and((Chunk(), bytes(2**20 + 2**18))), "a Chunk is out of place"),
    "a chunk beyond all frames": (
        lambda p: p.say(Chunk(), bytes(MOST_BODY_BYTES + 1)),
        "the body of a frame is at most",
    ),
    "a member's chunk beyond all frames": (
        _join_and((Chunk(), bytes(MOST_BODY_BYTES + 1))),
        "the body of a frame is at most",
    ),
    "the preface of gRPC": (
        lambda p: p.say_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        "it speaks gRPC, as paceline did before: install the same paceline on both",
    ),
    "a TLS hello": (
        lambda p: p.say_bytes(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"),
        "it speaks TLS, and this side has no",
    ),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_what_is_out_of_turn_is_refused_and_said_to_be(cluster, what):
    script, reason = SCRIPTS[what]
    with unharmed(cluster, refused=reason), Peer(cluster.address) as peer:
        script(peer)
        said = peer.goodbye()
        assert said.what == "refused"
        assert reason in said.reason


def test_random_bytes_as_messages_are_refused_one_by_one(cluster):
    random = np.random.default_rng(0)
    with unharmed(cluster, refused="."):
        for _ in range(25):
            with Peer(cluster.address) as peer:
                frame = bytearray(random.bytes(int(random.integers(1, 2000))))
                if random.random() < 0.5:  # a kind that is known, and a header that is there
                    frame += bytes(PREFIX_BYTES)
                    header = min(len(frame) - PREFIX_BYTES, 100)
                    frame[:PREFIX_BYTES] = struct.pack("<BII", int(random.integers(1, 10)), header, 0)
                peer.say_bytes(bytes(frame) + b"\xff" * PREFIX_BYTES)
                assert peer.goodbye().what == "refused"


def test_a_flood_of_beats_holds_up_nobody(cluster):
    with unharmed(cluster), Peer(cluster.address) as peer:
        peer.join()
        before = cluster.round
        for number in range(20_000):
            peer.say(Beat(progress=number))
        peer.say(Leave(reason="done"))
        assert peer.goodbye(seconds=60).reason == "it left (done)"
        assert cluster.round > before


# -- too much -------------------------------------------------------------------------------------------------------


def _memory(cluster):
    with open(f"/proc/{cluster.server.pid}/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) // 1024


def _files(cluster):
    return len(os.listdir(f"/proc/{cluster.server.pid}/fd"))


def _threads(cluster):
    return len(os.listdir(f"/proc/{cluster.server.pid}/task"))


def test_a_message_that_says_it_has_two_gigabytes_is_cut_off_and_no_memory_is_set_aside_for_it(cluster):
    before = _memory(cluster)
    with unharmed(cluster):
        for kind in KINDS:
            for length in (2**31 - 1, 2**32 - 1):
                for sizes in ({"header_bytes": length}, {"body_bytes": length}):
                    with RawFrames(cluster.address) as raw:
                        raw.announce(kind, **sizes)
                        assert re.search("at most|has no body", raw.goodbye().reason)
        with RawFrames(cluster.address) as raw:
            raw.announce(Chunk.KIND, body_bytes=2**31)
            until(lambda: not raw.data(bytes(2**20)), "it hangs up", seconds=10)
            assert _memory(cluster) < before + 100
    assert _memory(cluster) < before + 100


@pytest.mark.parametrize("what", ["nothing but zeros", "chunks of a gradient"])
def test_a_member_that_sends_a_hundred_megabytes_at_once_is_cut_off(cluster, what):
    before = _memory(cluster)
    with unharmed(cluster, refused="no message has kind 0|a body of .* bytes got"), Peer(cluster.address) as peer:
        peer.join()
        if what == "nothing but zeros":
            said = bytes(100 * 2**20)
        else:
            said = encode(peer.gradient(), b"x") + 25 * encode(Chunk(), bytes(MOST_BODY_BYTES))
        threading.Thread(target=peer.say_bytes, args=(said,), daemon=True).start()
        assert peer.goodbye().what == "refused"
        peer.until_ended()
        assert _memory(cluster) < before + 80


def test_bytes_that_are_no_frames_are_hung_up_on(cluster):
    random = np.random.default_rng(1)
    said = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /paceline HTTP/1.0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ]
    said += [b"\xff" + random.bytes(int(size)) for size in random.integers(30, 5000, size=30)]
    files = _files(cluster)
    with unharmed(cluster):
        for number, piece in enumerate(said):
            with connect(cluster.address) as connection:
                connection.sendall(piece)
                if number != 2:  # too short to be seen to be none
                    until(lambda connection=connection: closed_by_peer(connection), "it hangs up", seconds=20)
    until(lambda: _files(cluster) <= files + 2, "its files are closed", seconds=20)


def test_connections_and_streams_that_open_and_close_at_once_leave_nothing_behind(cluster):
    files, threads, memory = _files(cluster), _threads(cluster), _memory(cluster)
    with unharmed(cluster):
        for _ in range(500):
            connect(cluster.address).close()
        for number in range(150):
            with Peer(cluster.address) as peer:
                if number % 3 == 0:
                    peer.greet()
                elif number % 3 == 1:
                    peer.say(hello())
    until(lambda: _files(cluster) <= files + 2, "its files are closed", seconds=20)
    until(lambda: _threads(cluster) <= threads + 4, "its threads are gone", seconds=20)
    assert _memory(cluster) < memory + 100
    with Peer(cluster.address) as peer:
        assert peer.join(wish=3).version  # no seat is lost either
        assert peer.welcome.worker == 3


def test_a_thousand_silent_connections_and_two_hundred_silent_streams_keep_no_worker_out(cluster):
    files, threads, memory = _files(cluster), _threads(cluster), _memory(cluster)
    with (
        unharmed(cluster, refused="too many connections that have not said who they are"),
        contextlib.ExitStack() as held,
    ):
        silent = [held.enter_context(connect(cluster.address)) for _ in range(1000)]
        trickling = [held.enter_context(connect(cluster.address)) for _ in range(5)]
        stop = threading.Event()
        held.callback(stop.set)
        threading.Thread(target=_trickle, args=(trickling, stop), daemon=True).start()
        peers = [held.enter_context(Peer(cluster.address)) for _ in range(200)]
        cluster.until_goes_on(5, seconds=30)
        assert _memory(cluster) < memory + 200
        assert _threads(cluster) < threads + 40
        cluster.add_workers([3])
        cluster.until(lambda: 3 in cluster.alive, "a healthy worker joins", seconds=50)
        cluster.until_goes_on(5, seconds=30)
        for peer in peers:
            peer.until_ended()
        until(lambda: all(map(closed_by_peer, silent + trickling)), "all are hung up on", seconds=40)
    # Worker 3 is still there: its connection, and two slots of shared memory, for each of which mmap has a file too.
    cluster.until(lambda: _files(cluster) <= files + 5 + 2, "its files are closed", seconds=30)
    assert _threads(cluster) <= threads + 6
    cluster.kill_worker(3)
    cluster.until_alive(HEALTHY)


def _trickle(connections, stop):
    """The first bytes of a Hello, one a second."""
    for byte in encode(hello()) + bytes(100):
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send(bytes([byte]))
        if stop.wait(1):
            return


# -- whoever holds up a round that waits for all ----------------------------------------------------------------------


def test_a_gradient_that_trickles_in_holds_up_a_round_no_longer_than_a_stall_may_last(full_cluster):
    with unharmed(full_cluster, says=r"worker 3 left: no progress for 3 s"), Peer(full_cluster.address) as peer:
        peer.join()
        peer.say(peer.gradient(), b"x")
        progress = iter(range(10**9))
        peer.beat(0.2, progress=lambda: next(progress))
        stop = threading.Event()

        def bytes_by_the_second():
            while not stop.wait(0.5):
                peer.say(Chunk(), b"x")

        threading.Thread(target=bytes_by_the_second, daemon=True).start()
        began = time.monotonic()
        try:
            said = peer.goodbye()
        finally:
            stop.set()
        assert said.what == "return"
        assert time.monotonic() - began < 15
    full_cluster.until_alive(HEALTHY)


def test_a_member_that_never_reads_holds_up_a_round_no_longer_than_a_stall_may_last(full_cluster):
    signature = next(record.signature for record in full_cluster.records if isinstance(record, RunBegan))
    with (
        unharmed(full_cluster, says=r"worker 3 left: no progress for 3 s"),
        Peer(full_cluster.address, reads=False) as peer,
    ):
        peer.say(hello())
        peer.say(Ready(signature=signature))
        peer.beat(0.3)
        full_cluster.until(lambda: 3 in full_cluster.alive, "it joins")
        full_cluster.until_alive(HEALTHY)
    assert _memory(full_cluster) < 2000


def test_a_member_that_falls_silent_holds_up_a_round_no_longer_than_a_silence_may_last(full_cluster):
    with unharmed(full_cluster, says=r"worker 3 left: silent for 3 s"), Peer(full_cluster.address) as peer:
        peer.join()
        assert peer.goodbye().what == "return"
