"""The parameter server's network side: streams of workers in front of a `Coordinator`.

    WorkerStream  -- admit, ready, arrived -->  Server  -- joined, gradient, left -->  Coordinator
    WorkerStream  <-- send_model -------------  Server  <-- to_send -----------------  Coordinator

Everything runs in one event loop, so nothing here needs a lock. Work that takes long is done in threads: a gradient is
decoded and looked through while the next ones arrive; for measuring the model and writing checkpoints see `run.py`.

A thread per stream was as quick, but a thousand silent strangers were a thousand threads. Deadlines are checked four
times a second for all streams, instead of timeouts for every read. When the server itself was busy, everybody is
excused for as long.

Memory of gradients is kept here and not by malloc. A gradient is received into memory that was used before, and floats
are decoded where they arrive: a payload lies at the end of the room for its vector and is widened from the front. So a
gradient is one model of memory and costs no page faults. Large blocks of all else go back to the system at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import torch

from paceline.codecs.floats import Floats, Identity
from paceline.codecs.naming import unsendable
from paceline.drivers.served.admission import Guard
from paceline.drivers.served.coordinator import Coordinator, ReceivedGradient, microseconds
from paceline.drivers.served.handover import SLOTS, HandoverServer, Slot
from paceline.drivers.served.membership import NoSeatError, Seat
from paceline.drivers.served.messages import (
    PROTOCOL,
    Assembly,
    Gradient,
    Hello,
    Model,
    ProtocolError,
    Ready,
    Sizes,
    Welcome,
    tensors_to_send,
)
from paceline.drivers.served.settings import ServerSettings
from paceline.drivers.served.stream import ModelMessage, StreamEnd, WorkerStream
from paceline.drivers.served.times import RunTimes, bounded
from paceline.drivers.served.transport import Wire
from paceline.traces.step_times import ServerTimes, StepTimes
from paceline.training import all_finite

log = logging.getLogger("paceline.served")

CHECK_SECONDS = 0.25
DECODING_THREADS = 2
LEAST_FREE = 2  # of the memories for gradients that wait for the next
BACKLOG = 4096  # connections that wait to be accepted; the system may set a lower limit
HANDSHAKE_PAUSE_SECONDS = 0.01
MOST_CHANGES = 16  # that wait for one worker: one so far behind is better off with the whole
MOST_STALLS = 3  # in a row, without one gradient: a worker cannot know by itself that nothing of it counts
REFUSALS_AT_ONCE, REFUSALS_PER_SECOND = 200, 5.0


STRANGER = (
    "this run is its user's alone: a worker must be of the same user, who alone can read the key in the run's folder "
    "(--run FOLDER, in Python run=), or its server must let in every user of this machine (paceline serve --open, in "
    "Python open=True)"
)


class RefusalLimiter:
    """Says which refusals are logged: the first ones, then so many a second; counts the others.

    Strangers must not fill the log at the pace they choose.

    >>> limiter = RefusalLimiter()
    >>> sum(limiter.allows(0.0) for _ in range(1000)), limiter.allows(1.0), limiter.take_suppressed()
    (200, True, 800)
    """

    def __init__(self) -> None:
        self._left = float(REFUSALS_AT_ONCE)
        self._seen_seconds = 0.0
        self._suppressed = 0

    def allows(self, clock: float) -> bool:
        """Return whether one more refusal may be logged now."""
        more = REFUSALS_PER_SECOND * max(0.0, clock - self._seen_seconds)
        self._left, self._seen_seconds = min(REFUSALS_AT_ONCE, self._left + more), clock
        allowed = self._left >= 1
        self._left -= allowed
        self._suppressed += not allowed
        return allowed

    def take_suppressed(self) -> int:
        """Return how many were not logged since this was called last."""
        count, self._suppressed = self._suppressed, 0
        return count


class Server:
    """Connects workers that come and go with a coordinator.

    `changed` is called after everything that may have moved the run on; `times` is told where the time goes.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        settings: ServerSettings,
        *,
        signature: str,
        started_seconds: float = 0.0,
        times: RunTimes | None = None,
    ) -> None:
        self.times = times
        self._timed_version = coordinator.train_state.version
        self._decode_seconds = 0.0  # of the gradients since the last step
        self.coordinator, self.limits = coordinator, settings.limits
        model = coordinator.train_state.model
        self.sizes = Sizes(
            most_payload_bytes=coordinator.codec.most_bytes(model.parameters.numel()),
            buffer_bytes=4 * model.buffers.numel(),
        )
        self.changed: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None
        self._settings, self.signature = settings, signature
        self._tensors = tensors_to_send(settings.module)
        self._started_seconds = started_seconds
        self._began: float | None = None
        self._opened = time.monotonic()
        self._streams: set[WorkerStream] = set()
        self._members: dict[int, WorkerStream] = {}
        self._seats: dict[WorkerStream, Seat] = {}
        self._whole: ModelMessage | None = None  # the newest model, for all who get it whole
        self._handover: HandoverServer | None = None
        self._outgoing: list[torch.Tensor] = []  # memory for whole models
        self._in_slots: dict[int, ModelMessage] = {}  # what lies there
        self._free: list[Assembly] = []  # memory for gradients as they come
        self._free_vectors: list[torch.Tensor] = []  # and for what is decoded from them
        self._elements = model.parameters.numel()
        self._decoders = ThreadPoolExecutor(DECODING_THREADS, "paceline-decode", lambda: torch.set_num_threads(1))
        self._refusals = RefusalLimiter()
        self._handshakes = (
            RefusalLimiter()
        )  # one of their own: strangers must not keep what members do wrong out of the log
        self._stalls: Counter[int] = Counter()  # of workers, since their last gradients
        self._warned_of_nobody = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[socket.socket] = []
        self._listening: list[asyncio.Task[None]] = []
        self._has_let_go = False
        self.guard: Guard | None = None  # of a run that is its user's alone
        self._closing: tuple[str, str] | None = None
        self._parting = 0  # strangers that have been told goodbye and are still connected

    def now(self) -> float:
        """Return the seconds of the run, in whole microseconds: its clock starts with its first round."""
        if self._began is None:
            if not self.coordinator.begun:
                return self._started_seconds
            self._began = time.monotonic()
        return microseconds(self._started_seconds + time.monotonic() - self._began)

    def clock(self) -> float:
        """Return the seconds of a clock that always runs, for deadlines."""
        return time.monotonic()

    async def open(self, host: str, port: int, credentials: ssl.SSLContext | None = None) -> int:
        """Listen, and return the port."""
        self._listeners = _listeners(host, port)
        found: int = self._listeners[0].getsockname()[1]
        self._opened = self.clock()
        self._timed_version = self.coordinator.train_state.version
        if self.guard is not None:
            try:
                self.guard.link(listener.getsockname()[:2] for listener in self._listeners)
            except OSError as error:
                log.warning("workers must be given the run's folder (--run): %s", error)
        self._open_handover()
        accepting = [self._accept(listener, credentials) for listener in self._listeners]
        self._listening = [asyncio.create_task(work) for work in (self._check_deadlines(), *accepting)]
        for task in self._listening:
            task.add_done_callback(self.fail_with)
        return found

    def _open_handover(self) -> None:
        """Share memory with the workers on this machine, where the system can; models lie in it for all workers."""
        most = self.coordinator.train_state.outgoing.whole_bytes + self.sizes.buffer_bytes
        try:
            self._handover = HandoverServer(self.sizes, most, self.fail_with)
            self._outgoing = [memory.bytes for memory in self._handover.models]
        except (OSError, AttributeError):  # no Linux, or one that is too old
            self._outgoing = [torch.empty(most, dtype=torch.uint8) for _ in range(SLOTS)]

    async def close(self, what: str, reason: str) -> None:
        """Say goodbye to everybody and stop listening."""
        self._closing = what, reason  # whoever comes back now is told the same
        last = set(self._streams)
        for stream in last:
            stream.end(StreamEnd(what, reason))
        deadline = time.monotonic() + self.limits.farewell_seconds
        while last & self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for listener in self._listeners:  # a connection that has just come would be given to a task that is cancelled
            asyncio.get_running_loop().remove_reader(listener)
        for task in self._listening:
            task.cancel()
        if self._tasks:  # workers hear the goodbye, and close
            await asyncio.wait(self._tasks, timeout=self.limits.farewell_seconds)
        for task in tuple(self._tasks):
            task.cancel()
        self.let_go()

    def let_go(self) -> None:
        """Let go of ports, key and threads, also where nobody could be told goodbye; once."""
        if self._has_let_go:
            return
        self._has_let_go = True
        for listener in self._listeners:
            with suppress(RuntimeError):  # of a loop that is closed
                asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        if self.guard is not None:
            self.guard.close()
        if self._handover is not None:
            self._handover.close()
        self._decoders.shutdown(wait=True)

    # -- streams -----------------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket, credentials: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # no more files, or a peer that is gone already
                if self._refusals.allows(self.clock()):
                    log.warning("cannot accept a connection: %s", error.strerror or error)
                await asyncio.sleep(CHECK_SECONDS)
                continue
            task = asyncio.create_task(self._work(connection, f"{address[0]}:{address[1]}", credentials))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(self.fail_with)
            # Strangers may come quicker than they are accepted, and a handshake keeps this loop busy for a millisecond:
            # those inside get their turn.
            await asyncio.sleep(0 if credentials is None else HANDSHAKE_PAUSE_SECONDS)

    async def _work(self, connection: socket.socket, peer: str, credentials: ssl.SSLContext | None) -> None:
        stream = WorkerStream(self, peer)
        self._make_room()
        self._streams.add(stream)
        end, wire = StreamEnd("return", "its connection was lost"), None
        try:
            stream.opening = asyncio.create_task(self._wire(connection, credentials))
            try:
                await asyncio.wait({stream.opening})
            finally:
                stream.opening.cancel()
            refused = None if stream.opening.cancelled() else stream.opening.exception()
            if refused is not None:
                self._turned_away(peer, refused)
            elif not stream.opening.cancelled():
                wire = stream.opening.result()
                end = await stream.serve(wire)
        finally:
            self._streams.discard(stream)
            try:
                self._ended(stream, stream.ended or end)
            except Exception as error:
                self.fail(error)
            if wire is None:
                connection.close()
            else:
                await self._part(wire, stranger=stream.worker is None)

    async def _part(self, wire: Wire, *, stranger: bool) -> None:
        """End a connection; strangers that come in crowds are not waited for."""
        crowd = stranger and self._parting >= self.limits.most_strangers
        self._parting += stranger
        try:
            await wire.farewell(0.0 if crowd else self.limits.farewell_seconds)
        finally:
            self._parting -= stranger

    async def _wire(self, connection: socket.socket, credentials: ssl.SSLContext | None) -> Wire:
        """Return the connection as a wire, once TLS is agreed on."""
        patience = {} if credentials is None else {"ssl_handshake_timeout": self.limits.hello_seconds}
        _, wire = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Wire(self.clock, self.count), connection, ssl=credentials, **patience
        )
        return wire

    def count(self, sent: int, received: int) -> None:
        """Count bytes that came and went, also those that were handed over in shared memory."""
        self.coordinator.sent_bytes += sent
        self.coordinator.received_bytes += received

    def fail(self, error: BaseException) -> None:
        """End a run that itself failed (an optimiser, a schedule): strategy and model may disagree from now on."""
        if self._closing is not None:  # too late to end the run
            log.error("the server failed as it closed: %s: %s", type(error).__name__, error)
        self.failure = self.failure or error
        self.coordinator.stop()
        self.changed()

    def fail_with(self, task: asyncio.Task[None]) -> None:
        """End the run if a task that nobody waits for has ended by an error: without it the server would be deaf."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    def _make_room(self) -> None:
        """Of too many streams without a worker, end the one that is silent longest: they must not keep a worker out."""
        strangers = [stream for stream in self._streams if stream not in self._seats and stream.ended is None]
        if len(strangers) >= self.limits.most_strangers:
            oldest = min(strangers, key=lambda stream: stream.opened)
            oldest.end(StreamEnd("return", "too many connections that have not said who they are", refused=True))

    def _ended(self, stream: WorkerStream, end: StreamEnd) -> None:
        seat = self._seats.pop(stream, None)
        if end.refused:
            self._refused(stream, end.reason)
        if seat is None:
            return
        if self._members.get(seat.worker) is stream:
            del self._members[seat.worker]
            if not self.coordinator.over:
                log.info("worker %d left: %s", seat.worker, end.reason)
            now = self.now()
            self.coordinator.left(seat.worker, end.reason, now)
            if self.coordinator.begun and not self.coordinator.alive and not self.coordinator.over:
                log.warning("no worker is left: waiting for one to come")
            self._act(now)
            if self.times is not None:
                self.times.left(seat.worker)
        else:
            self.coordinator.seats.release(seat.worker)

    def _refused(self, stream: WorkerStream, reason: str) -> None:
        if stream.worker is None and not self._refusals.allows(self.clock()):
            return
        who = f"worker {stream.worker}" if stream.worker is not None else stream.peer
        more = f" (and {count} more like it)" if (count := self._refusals.take_suppressed()) else ""
        log.warning("refused %s: %s%s", who, reason, more)
        self.coordinator.refused(reason, worker=stream.worker, peer=stream.peer, now=self.now())

    def _turned_away(self, peer: str, error: BaseException) -> None:
        """Log that TLS has refused a peer; one that hung up itself, as a probe of the port does, is none."""
        if isinstance(error, ConnectionResetError) or not self._handshakes.allows(self.clock()):
            return
        more = f" (and {count} more like it)" if (count := self._handshakes.take_suppressed()) else ""
        log.warning("refused %s: %s%s", peer, _why_turned_away(error), more)

    def admit(self, stream: WorkerStream, hello: Hello) -> Welcome:
        """Give a new worker a seat; `StreamEnd` if it may not join, there is none, or nothing to do."""
        if self.guard is not None and not self.guard.admits(hello.token):
            raise StreamEnd("refused", STRANGER, refused=True)
        if self._closing is not None:
            raise StreamEnd(*self._closing)
        if self.coordinator.done:
            raise StreamEnd("over", "training is over")
        for former, seat in self._seats.items():
            # It came back before its old stream was missed: it gets its own number again, a moment later.
            same = former.host and former.host == hello.host and seat.worker == hello.wish
            if same if self.guard is None else former.token == hello.token:
                former.end(StreamEnd("return", "it came back on a new connection"))
                raise StreamEnd("return", "its old connection is being ended: come again")
        try:
            seat = self.coordinator.seats.take(hello.wish)
        except NoSeatError as error:
            raise StreamEnd("return", str(error), refused=True) from None
        self._seats[stream], stream.token = seat, hello.token
        invitation = ""
        if self._handover is not None:
            invitation, stream.invited = self._handover.invite()
        return Welcome(
            protocol=PROTOCOL,
            worker=seat.worker,
            shard=seat.shard,
            first_draw=seat.first_draw,
            blocks=self._settings.blocks,
            codec=self._settings.codec,
            seed=self._settings.seed,
            signature=self.signature,
            tensors=self._tensors,
            silence_seconds=self.limits.silence_seconds,
            handover=invitation,
            first_sample=seat.first_sample,
            recipe=self._settings.recipe_of_workers,
            data=dict(self._settings.data),
        )

    def ready(self, stream: WorkerStream, ready: Ready) -> None:
        """Let a worker that has its model take part."""
        if ready.signature != self.signature:
            raise ProtocolError("its model is another one: names, shapes or kinds of its parameters differ")
        seat = self._seats[stream]
        stream.member = True
        self._members[seat.worker] = stream
        log.info("worker %d joined from %s (shard %d)", seat.worker, stream.host or stream.peer, seat.shard)
        now = self.now()
        self.coordinator.joined(seat, threads=stream.threads, host=stream.host, now=now)
        self._act(now)
        if self.times is not None:
            self.times.joined(seat.worker, host=stream.host, local=stream.shares_memory)

    def arrived(self, stream: WorkerStream, received: ReceivedGradient) -> None:
        """Give a whole gradient to the coordinator."""
        member, message, now = self.coordinator.members[received.worker], received.message, self.now()
        self._check_blocks(message.blocks)
        self._check_samples(message.batch_samples, member.asked_samples.get(message.version, 0))
        sent = member.sent_seconds(message.version, now)
        self.coordinator.gradient(received, now=now)
        del self._stalls[received.worker]
        self._decode_seconds += received.decode_seconds
        stream.owes = member.owes
        if not received.finite:
            what = unsendable(self.coordinator.codec).rstrip(",")
            log.warning("worker %d sent a gradient that is %s: refused", received.worker, what)
            bad = self.coordinator.bad_gradients.in_a_row(received.worker)
            if bad >= self.limits.most_bad_gradients and not self.coordinator.over:
                raise StreamEnd("refused", f"it sent {bad} gradients in a row that are {what}: look at its data")
        self._act(now)
        if self.times is not None:  # after the models are on their way
            self.times.gradient(
                received.worker,
                self._step_times(received, sent, now),
                arrived_seconds=now,
                least_round_trip_seconds=stream.least_round_trip_seconds,
            )

    def _step_times(self, received: ReceivedGradient, sent: float, now: float) -> StepTimes:
        """Return where the time of a gradient went, from the model's being sent until now."""
        most = self.coordinator.train_state.outgoing.whole_bytes + self.sizes.buffer_bytes
        times = bounded(received.message, seconds=max(0.0, now - sent), most_down_bytes=most)
        assert times.trip is not None
        transfer = times.seconds - times.trip.held_seconds
        decode = min(received.decode_seconds, transfer)
        up = min(received.up_seconds, transfer - decode)
        down = min(times.trip.down_seconds, transfer - decode - up)
        trip = replace(times.trip, down_seconds=down, up_seconds=up, up_bytes=received.up_bytes, decode_seconds=decode)
        return replace(times, started_seconds=sent, trip=trip)

    def _check_blocks(self, blocks: int) -> None:
        """Refuse a gradient of blocks that no worker has: a recipe says how many, and a script's batch has no more."""
        most = self._settings.blocks
        if blocks > most or (blocks < most and self._settings.recipe):
            raise ProtocolError(f"a batch has {most} blocks here (blocks={blocks})")

    def _check_samples(self, samples: int, asked: int) -> None:
        """Refuse a batch of another size than a recipe's worker was asked for; a script's may have fewer samples."""
        if asked and samples != asked and self._settings.recipe:
            raise ProtocolError(f"the worker was asked for a batch of {asked} samples (batch_samples={samples})")

    # -- gradients ---------------------------------------------------------------------------------------------

    def assembly(self) -> Assembly:
        """Return memory for one more gradient: some that was used before, if there is any."""
        if self._free:
            return self._free.pop()
        return Assembly(self.sizes, self._elements if isinstance(self.coordinator.codec, Floats) else 0)

    async def decoded(
        self, worker: int, message: Gradient, body: Assembly | Slot, release: Callable[[], None] | None = None
    ) -> ReceivedGradient:
        """Return a gradient that is whole, decoded and looked through, while others arrive."""
        began = self.clock()
        let_go = release if release is not None else lambda: self._let_go(body)
        buffers, out = body.buffers, self._room(body)
        try:
            vector, finite = await asyncio.get_running_loop().run_in_executor(self._decoders, self._decode, body, out)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        finite = finite and all_finite(buffers)
        received = ReceivedGradient(
            worker=worker, message=message, vector=vector, buffer_changes=buffers, checked=finite
        )
        received.decode_seconds = self.clock() - began
        if isinstance(body, Slot):
            self.count(0, message.payload_bytes + message.buffer_bytes)
        if _lies_in(vector, body.memory):
            received.release = let_go
        else:
            received.release = lambda: self._let_vector_go(vector)
            let_go()
        return received

    def _room(self, body: Assembly | Slot) -> torch.Tensor | None:
        """Return where the vector of a body is decoded to; None if it needs no decoding."""
        codec = self.coordinator.codec
        if isinstance(codec, Identity):
            return None
        if isinstance(codec, Floats) and isinstance(body, Assembly):
            return body.vector
        return self._free_vectors.pop() if self._free_vectors else torch.empty(self._elements)

    def _decode(self, body: Assembly | Slot, out: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
        """Return the vector of a body, and whether it is finite."""
        codec, payload = self.coordinator.codec, body.payload
        if isinstance(codec, Floats):
            return codec.decode_and_check(payload, expected_length=self._elements, out=out)
        if isinstance(body, Slot):
            payload = payload.clone()  # its worker can still write there, and what is decoded says how to go on
        vector = codec.decode(payload, expected_length=self._elements, out=out)
        return vector, all_finite(vector)

    def _let_go(self, body: Assembly | Slot) -> None:
        """Keep memory for the next gradients."""
        if isinstance(body, Assembly) and len(self._free) < self._most_free(body.memory.numel()):
            self._free.append(body)

    def _let_vector_go(self, vector: torch.Tensor) -> None:
        if len(self._free_vectors) < self._most_free(self.sizes.most_bytes):
            self._free_vectors.append(vector)

    def _most_free(self, other_bytes: int) -> int:
        """Return how many memories of one kind may wait: as many as there are workers, where one is all that is needed.

        Where a gradient takes a payload of `other_bytes` and a vector, one of them would wait while the other is used.
        """
        alone = isinstance(self.coordinator.codec, Floats) or other_bytes <= self._elements
        return len(self._members) if alone else LEAST_FREE

    # -- models --------------------------------------------------------------------------------------------------

    def _act(self, event_seconds: float) -> None:
        """Send the model to the workers that the coordinator wants to have it, after an event at `event_seconds`."""
        workers, self.coordinator.to_send = self.coordinator.to_send, []
        stepped = self.now()
        for worker in workers:
            stream, member = self._members.get(worker), self.coordinator.members[worker]
            if stream is None or self.coordinator.over:
                continue
            samples = self.coordinator.sizes.samples(worker)
            member.sent(self.coordinator.train_state.version, self.now(), samples)
            self._deliver(stream, samples)
        sent = self.now()
        self.changed()
        version, before = self.coordinator.train_state.version, self._timed_version
        if self.times is not None and version > before:
            self._timed_version, decode_seconds, self._decode_seconds = version, self._decode_seconds, 0.0
            self.times.stepped(
                ServerTimes(
                    version=before,
                    steps=version - before,
                    closed_seconds=event_seconds,
                    step_seconds=max(0.0, stepped - event_seconds),
                    send_seconds=sent - stepped,
                    decode_seconds=decode_seconds,
                    beside_seconds=self.now() - sent,
                )
            )

    def _deliver(self, stream: WorkerStream, samples: int) -> None:
        """Send the model: as the changes since the version that the worker was last sent, or whole if that is smaller.

        A new worker, and one for which too many changes wait already, gets the whole model. `samples` is the size of
        the batch that the worker is to begin with it.
        """
        train_state = self.coordinator.train_state
        changes = train_state.outgoing.changes_since(stream.promised) if stream.promised is not None else []
        newest, buffers, backlog = train_state.version, self.sizes.buffer_bytes, stream.backlog_bytes
        waiting = sum(backlog) + sum(payload.numel() + buffers for _, payload in changes)
        few = len(backlog) + len(changes) <= MOST_CHANGES
        if changes and few and waiting < train_state.outgoing.whole_bytes + buffers:
            messages = [self._message(payload, version, more=newest - version) for version, payload in changes]
            stream.send_model(newest, messages, whole=False, samples=samples)
        else:
            if self._whole is None or self._whole.message.version != newest:
                self._whole = self._whole_message(newest)
            stream.send_model(newest, [self._whole], whole=True, samples=samples)

    def _whole_message(self, version: int) -> ModelMessage:
        """Return the whole model on its way out, in memory that nobody reads any more if there is some."""
        outgoing = self.coordinator.train_state.outgoing
        for number, memory in enumerate(self._outgoing):
            user = self._in_slots.get(number)
            if user is None or not user.users:
                payload = outgoing.whole(memory[: outgoing.whole_bytes])
                message = self._message(payload, version, slot=number if self._handover is not None else None)
                self._in_slots[number] = message
                return message
        return self._message(outgoing.whole(), version)

    def _message(
        self, payload: torch.Tensor, version: int, *, more: int | None = None, slot: int | None = None
    ) -> ModelMessage:
        """Return a model on its way out: as the change from the version before if `more` of them follow, else whole."""
        buffers = self.coordinator.train_state.model.buffers
        message = Model(
            version=version,
            since=None if more is None else version - 1,
            more=more or 0,
            payload_bytes=payload.numel(),
            buffer_bytes=4 * buffers.numel(),
            slot=slot,
        )
        if slot is not None and buffers.numel():
            self._outgoing[slot][payload.numel() : payload.numel() + 4 * buffers.numel()] = buffers.view(torch.uint8)
        return ModelMessage(message, payload, buffers)

    # -- deadlines --------------------------------------------------------------------------------------------

    async def _check_deadlines(self) -> None:
        before = self.clock()
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = self.clock()
            busy = now - before - CHECK_SECONDS
            if busy > CHECK_SECONDS:
                for stream in self._streams:
                    stream.extend_deadlines(busy)
            before = now
            for stream in [stream for stream in self._streams if stream.ended is None]:
                if (end := stream.overdue(now)) is not None:
                    if end.stalled and stream.worker is not None:
                        end = self._stalled_again(stream.worker, end)
                    stream.end(end)
            self._begin_if_patience_is_out(now)

    def _stalled_again(self, worker: int, end: StreamEnd) -> StreamEnd:
        """Return how a stream ends whose worker got no further, and has not since its last gradient, or ever."""
        self._stalls[worker] += 1
        if self._stalls[worker] < MOST_STALLS:
            return end
        del self._stalls[worker]  # who comes in its place begins anew
        reason = (
            f"{MOST_STALLS} times in a row it got no further for {self.limits.stall_seconds:g} s, and sent nothing: "
            "if it needs longer for a block, give a batch more blocks or raise server.stall_seconds"
        )
        return StreamEnd("refused", reason, refused=True)

    @property
    def gathering_seconds_left(self) -> float:
        """How long the first round will wait for all workers, if they do not come before."""
        return max(0.0, self._opened + self.limits.gather_seconds - self.clock())

    def _begin_if_patience_is_out(self, clock: float) -> None:
        coordinator = self.coordinator
        if coordinator.begun or clock - self._opened <= self.limits.gather_seconds:
            return
        if not coordinator.alive and not self._warned_of_nobody:
            self._warned_of_nobody = True
            log.warning("nobody has come for %g s: the first to come begins", self.limits.gather_seconds)
        if coordinator.alive:
            log.warning("begins with %d of %d workers", len(coordinator.alive), coordinator.wait_for)
            now = self.now()
            coordinator.begin(now)
            self._act(now)


def check_listens(host: str, port: int) -> None:
    """Raise an OSError if a server cannot listen there, before anything of its run is written.

    >>> check_listens("127.0.0.1", 0)
    """
    for listener in _listeners(host, port):
        listener.close()


def _listeners(host: str, port: int) -> list[socket.socket]:
    try:
        return _listen(host, port)
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(f"cannot listen on {host}:{port}: is the port in use? ({why})") from None


def _listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on a host's addresses, all on one port, without those that this machine lacks."""
    found = dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
    listeners: list[socket.socket] = []
    lacking: OSError | None = None
    try:
        for family, kind, protocol, _, address in found:
            try:
                listener = socket.socket(family, kind, protocol)
                listeners.append(listener)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    with suppress(OSError):
                        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if len(found) > 1 else 0)
                same = port or (listeners[0].getsockname()[1] if listeners[1:] else 0)
                listener.bind((address[0], same, *address[2:]))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                lacking = error
                if error.errno == errno.EADDRNOTAVAIL:
                    listeners.pop().close()
                continue
            listener.listen(BACKLOG)
            listener.setblocking(False)
        if not listeners and lacking is not None:
            raise lacking
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _lies_in(vector: torch.Tensor, memory: torch.Tensor) -> bool:
    return vector.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def _why_turned_away(error: BaseException) -> str:
    """Return why a peer was refused before it could say who it is."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not good here ({error.verify_message})"
    if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in text:
        return "it shows no certificate, and workers need one (--tls)"
    if any(name in text for name in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")):
        return "it does not speak TLS, and workers need it (--tls)"
    if isinstance(error, ConnectionAbortedError):
        return "it did not finish the TLS handshake in time"
    return f"no TLS was agreed on ({text or type(error).__name__})"
