"""A worker in a user's own script: gradient out, new parameters in.

running() --> blocks() --> send() --> running() ...
                 |            waits for the next model; a lost server is looked for again, for `patience_seconds`
                 ends early once the round has closed

With each gradient goes where its time went, by a clock of the worker's (`times.py` draws it): input is from having
loaded the model to blocks(), forward and backward are told apart by hooks on the model, within the loop over blocks().
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from paceline.codecs import Codec
from paceline.codecs.floats import Floats
from paceline.codecs.naming import parse_codec
from paceline.codecs.payload import NotFiniteError
from paceline.drivers.served.admission import Credential
from paceline.drivers.served.connection import (
    ConnectionLost,
    IncomingModel,
    ServerConnection,
    ServerUnreachableError,
    StagedModel,
    TrainingOver,
    WorkerRefused,
)
from paceline.drivers.served.handover import Slot, fetch_slots
from paceline.drivers.served.messages import (
    PROTOCOL,
    Gradient,
    Hello,
    Leave,
    Sizes,
    Welcome,
    frames,
    model_difference,
    model_signature,
    tensors_of,
)
from paceline.drivers.served.security import AddressError, Tls, join_address, parse_address, worker_credentials
from paceline.traces.phase_hooks import PhaseHooks
from paceline.traces.run_settings import difference
from paceline.traces.step_clock import StepClock, in_phase
from paceline.traces.step_times import StepTimes
from paceline.training import all_finite, gradient_generator
from paceline.training.outgoing import warm_up
from paceline.workers.blocks import count_samples, cut_batch
from paceline.workers.flat import FlatModel

log = logging.getLogger("paceline.served")

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
SENT_WITHIN_SECONDS = 600.0


class Worker:
    """A worker of a parameter server: computes gradients of `model` at the parameters the server sends.

        with paceline.Worker("host:29400", model, tls="keys/worker") as worker:
            while worker.running():
                inputs, targets = next(batches)
                for x, y in worker.blocks(inputs, targets):
                    loss_function(model(x), y).backward()
                worker.send()

    `tls` names a certificate and its key (`keys/worker` for `keys/worker.crt` and `keys/worker.key`, with `ca.crt`
    beside). A server that cannot be reached is tried again for `patience_seconds`. On the server's own machine vectors
    are handed over in shared memory, unless `local` is False. After the `with`, the model holds the last parameters
    that came.

    A server on this machine without TLS lets in workers of its own user, who are known by a key in the run's folder.
    Where the address alone does not lead to it (a container, a forwarded port), `run` names it.
    """

    def __init__(
        self,
        address: str,
        model: nn.Module | None,
        *,
        tls: Tls | None = None,
        patience_seconds: float = 60.0,
        wish: int | None = None,
        local: bool = True,
        run: str | Path | None = None,
    ) -> None:
        if not isinstance(address, str) or isinstance(model, str):
            raise AddressError(
                f"the address comes first, then the model: Worker('host:29400', model), not "
                f"Worker({type(address).__name__}, {type(model).__name__})"
            )
        if not patience_seconds >= 0:  # NaN is no number of seconds
            raise ValueError(f"patience_seconds must be 0 or more (patience_seconds={patience_seconds})")
        host, port = parse_address(address)
        self.address = join_address(host, port)
        self.version = -1
        self.draw = 0
        self.first_sample = 0  # where the next batch begins, where batches are by speed
        self._credentials = worker_credentials(tls) if tls is not None else None
        self._shown = None if tls is not None else Credential(self.address, run)
        self._patience_seconds = patience_seconds
        self._without_progress_since: float | None = None  # when the server was first lost after the last model
        self._wish, self._local = wish, local
        self._last_loss = ""
        self._connection: ServerConnection | None = None
        self._over = False
        self._sent = threading.Event()
        self._sent.set()
        self._blocks_done = self._blocks = self._batch_samples = 0
        self._batch_ended = True
        self._started = 0.0
        self._taken: StagedModel | None = None  # the model that is worked with
        self._behind_seconds = 0.0
        self._measured: StepTimes | None = None
        self._clock = StepClock(self._note_times, clock=time.monotonic)
        self._hooks = PhaseHooks(None, None)
        self._model: FlatModel | None = None
        self._welcome: Welcome | None = None
        if model is not None:
            self.hold(model)

    def hold(self, model: nn.Module) -> None:
        """Take the model to be trained, if it was not given at once."""
        self._model = FlatModel(model)
        if self._model.parameters.dtype is not torch.float32:
            raise ValueError(f"the model must be float32 (it is {self._model.parameters.dtype}); call .float() on it")
        self._hooks = PhaseHooks(model, self._clock)
        self._signature = model_signature(model)
        self._buffers_before = self._model.buffers

    # -- who and where -----------------------------------------------------------------------------------------

    @property
    def welcome(self) -> Welcome:
        """The server's answer when this worker last connected."""
        if self._welcome is None:
            raise RuntimeError("the worker has not met its server: use it in a `with`")
        return self._welcome

    @property
    def number(self) -> int:
        """The number the server gave this worker."""
        return self.welcome.worker

    @property
    def shard(self) -> int:
        """The number of the shard of the data that this worker holds."""
        return self.welcome.shard

    @property
    def samples(self) -> int:
        """How many samples the server wishes the next batch to have, by this worker's speed; 0: it does not care."""
        return 0 if self._taken is None else self._taken.message.samples

    @property
    def training_may_begin(self) -> bool:
        """Whether the server is there and has something to do."""
        return not self._over

    def __enter__(self) -> Worker:
        self._connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave("" if error is None else "stopped" if kind is KeyboardInterrupt else str(kind and kind.__name__))

    def leave(self, reason: str = "") -> None:
        """Tell the server that this worker goes, and close the connection."""
        self._hooks.detach()
        if self._connection is not None:
            if not self._over:
                self._connection.say(Leave(reason=reason))
            self._connection.close()
            self._connection = None

    # -- the loop ----------------------------------------------------------------------------------------------

    def running(self) -> bool:
        """Return whether there is a batch to do; False once the server says that training is over."""
        if not self._over and self.version < 0:
            self._receive()
        return not self._over

    def training(self) -> bool:
        """Return `running()`; this is its old name, which modules have for something else."""
        warnings.warn(
            "Worker.training is called running now; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.running()

    def blocks(self, *batch: Any) -> Iterator[Any]:
        """Yield the batch in equal blocks, as many as the server wishes; end early once the round has closed.

        A batch that does not divide evenly comes in fewer blocks, and no block is a single sample unless the batch is.
        """
        blocks = cut_batch(batch, self.welcome.blocks)
        self.begin_batch(len(blocks), samples=count_samples(batch))
        self._batch_ended = False
        for block in blocks:
            self._clock.enter("forward")
            yield block
            if not self.block_done():
                break
        self._clock.enter("other")
        self._batch_ended = True
        self._held().gradient_from_parameters()
        self._held().gradient.div_(len(blocks))  # the sum over the blocks done of a block's mean, divided by all blocks

    def begin_batch(self, blocks: int, *, samples: int = 0) -> None:
        """Begin a batch: wait until the last gradient is sent, and set the gradient to zero.

        `samples` is the size of the whole batch, by which the server weighs its gradient if it has asked for a size.
        """
        began = time.monotonic()
        self._clock.enter("other")
        self._wait_sent()
        self._behind_seconds += time.monotonic() - began
        self._held().gradient.zero_()
        self._held().attach_gradient()
        self._blocks, self._blocks_done, self._batch_ended = blocks, 0, True
        self._batch_samples = samples
        self._started = time.monotonic()
        self._hooks.attach()
        self._clock.enter("forward")

    def block_done(self) -> bool:
        """Note that a block is done, and return whether to go on with the next."""
        self._blocks_done += 1
        connection = self._connection
        if connection is None or connection.end is not None:
            return False
        connection.progress += 1
        return connection.begun_version <= self.version

    def send(self, losses: torch.Tensor | None = None) -> bool:
        """Send the gradient, and wait for new parameters. `losses`, of every sample done, help the server to choose K.

        Return whether the gradient was sent: not if the server was lost before, or if it is not finite.
        """
        if not self._blocks_done:
            raise RuntimeError("send() comes after a batch: go through worker.blocks(...) first")
        if not self._batch_ended:
            raise RuntimeError("the loop over worker.blocks(...) was left early: it ends by itself when it is time")
        worked = time.monotonic() - self._started
        self._clock.enter("other")
        self._hooks.detach()
        draw, self.draw = self.draw, self.draw + 1
        self.first_sample += self._batch_samples
        connection, went_out = self._connection, False
        if connection is not None and connection.end is None:
            number, slot = connection.free_slot() or (None, None)
            payload, changes = self._encoded(draw, slot)
            went_out = payload.numel() > 0
            self._clock.end_step()
            times, taken = self._measured, self._taken
            message = Gradient(
                version=self.version,
                draw=draw,
                blocks_done=self._blocks_done,
                blocks=self._blocks,
                work_seconds=worked,
                held_seconds=0.0 if taken is None else time.monotonic() - taken.whole_since,
                samples=0 if losses is None else losses.numel(),
                loss_mean=None if losses is None else _finite(losses.mean()),
                loss_variance=None if losses is None else _finite(losses.var(correction=0)),
                payload_bytes=payload.numel(),
                buffer_bytes=4 * changes.numel(),
                slot=number if went_out else None,
                input_seconds=0.0 if times is None else times.input_seconds,
                forward_seconds=0.0 if times is None else times.forward_seconds,
                backward_seconds=0.0 if times is None else times.backward_seconds,
                behind_seconds=self._behind_seconds,
                processor_seconds=None if times is None else times.processor_seconds,
                down_seconds=0.0 if taken is None else taken.down_seconds,
                down_bytes=0 if taken is None else taken.down_bytes,
                batch_samples=self._batch_samples,
            )
            if number is not None and slot is not None:
                if went_out:
                    slot.fill(payload, changes)
                else:
                    connection.keep_slot(number)
                connection.say(message)
            else:
                self._sent.clear()
                connection.send(frames(message, payload, changes), self._sent.set)
        self._blocks_done = 0
        self._receive()
        return went_out

    def _note_times(self, times: StepTimes) -> None:
        self._measured = times

    def _encoded(self, draw: int, slot: Slot | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the encoded gradient and the change of the buffers; both are empty if one is not finite."""
        model = self._held()
        changes = (model.buffers - self._buffers_before).cpu()
        try:
            if not all_finite(changes):
                raise NotFiniteError("the statistics of the model's normalisation are not finite")
            if slot is not None and isinstance(self._codec, Floats):
                payload = self._codec.encode(model.gradient, out=slot.memory)
            else:
                payload = self._codec.encode(model.gradient, gradient_generator(self.welcome.seed, self.number, draw))
        except NotFiniteError as error:
            log.warning("worker %d: %s", self.number, error)
            return torch.zeros(0, dtype=torch.uint8), torch.zeros(0)
        return payload.cpu(), changes

    # -- the server --------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to the server, trying again until `patience_seconds` have brought no progress.

        A connection alone is none: one that is lost again and again before a model has come would be tried for ever.
        """
        if self._without_progress_since is None:
            self._without_progress_since = time.monotonic()
        deadline = self._without_progress_since + self._patience_seconds
        pause, reason = FIRST_PAUSE_SECONDS, self._last_loss or "never tried"
        if time.monotonic() > deadline:
            raise ServerUnreachableError(
                f"no model from the server at {self.address} for {self._patience_seconds:g} s: {reason}"
            )
        while True:
            try:
                self._connection = self._open_connection(max(1.0, min(15.0, deadline - time.monotonic())))
                return
            except TrainingOver:
                self._connection, self._over = None, True
                return
            except ConnectionLost as error:
                if reason != str(error):
                    reason = str(error)
                    left = max(0.0, deadline - time.monotonic())
                    log.warning("no server at %s yet: %s (%.0f s of patience left)", self.address, reason, left)
            if time.monotonic() + pause > deadline:
                raise ServerUnreachableError(f"no server at {self.address} for {self._patience_seconds:g} s: {reason}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _open_connection(self, answer_seconds: float) -> ServerConnection:
        wish = self._welcome.worker if self._welcome is not None else self._wish
        address, token = (self.address, "") if self._shown is None else self._shown.find()
        hello = Hello(
            protocol=PROTOCOL,
            wish=wish,
            threads=torch.get_num_threads(),
            host=f"{platform.node()[:200]} pid {os.getpid()}",
            token=token,
        )
        try:
            connection = ServerConnection(
                address,
                hello,
                credentials=self._credentials,
                answer_seconds=answer_seconds,
                met_before=self._welcome is not None,
            )
        except WorkerRefused as error:
            if self._shown is not None and self._shown.find() != (address, token):  # a server that has only just begun
                raise ConnectionLost(str(error)) from None
            raise
        try:
            # Batches, seed and delays are those of the recipe this worker began with.
            if self._welcome is not None and difference(self._welcome.recipe, connection.welcome.recipe):
                raise WorkerRefused(f"the server at {self.address} runs another recipe now: start the worker anew")
            if self._welcome is not None and self._welcome.data != connection.welcome.data:
                raise WorkerRefused(f"the server at {self.address} has other data now: start the worker anew")
            self._codec: Codec = parse_codec(connection.welcome.codec)  # its memory begins empty with every connection
        except (ValueError, WorkerRefused):
            connection.close()
            raise
        self._welcome = connection.welcome
        self.draw, self.first_sample = connection.welcome.first_draw, connection.welcome.first_sample
        self.version = -1
        self._sent.set()
        if self._model is not None:
            self._say_ready(connection)
        return connection

    def ready(self) -> None:
        """Tell the server that model and data are there, if the model was not given at once."""
        if self._connection is None:
            raise RuntimeError("the worker has not met its server: use it in a `with`")
        self._say_ready(self._connection)

    def _say_ready(self, connection: ServerConnection) -> None:
        model = self._held()
        if connection.welcome.signature != self._signature:
            connection.close()
            different = model_difference(tensors_of(model.module), connection.welcome.tensors)
            raise ValueError(f"the server at {self.address} trains another model: {different}")
        warm_up(self._codec, model.shapes)
        self._codec = self._codec.fresh(model.shapes)
        elements, buffers = model.parameters.numel(), self._buffers_before.numel()
        incoming = IncomingModel(self._codec, elements=elements, buffers=buffers)
        sizes = Sizes(most_payload_bytes=self._codec.most_bytes(elements), buffer_bytes=4 * buffers)
        invitation = connection.welcome.handover if self._local else ""
        slots = fetch_slots(invitation, models=incoming.whole_sizes, gradients=sizes)
        connection.ready(self._signature, incoming, slots)

    def _receive(self) -> None:
        with in_phase(self._held().module, "wait"):
            self._take_next_model()

    def _take_next_model(self) -> None:
        asked = time.monotonic()
        while not self._over:
            connection = self._connection
            try:
                if connection is None:
                    raise ConnectionLost("the connection is closed")
                self._taken = taken = connection.take_model(self._load)
                self.version = taken.message.version
                self._behind_seconds = max(0.0, asked - taken.whole_since)
                self._clock.skip()
                self._without_progress_since = None
                return
            except TrainingOver:
                self._over = True
            except ConnectionLost as error:
                log.warning("lost the server at %s: %s", self.address, error)
                self._last_loss = str(error)
                if connection is not None:
                    connection.close()
                    if connection.seconds > self._patience_seconds:  # it lasted: there was nothing to do yet
                        self._without_progress_since = None
                self._connect()
                log.warning("worker %d is back at %s", self.number, self.address)

    def _load(self, incoming: IncomingModel) -> None:
        model = self._held()
        incoming.load(model)
        self._buffers_before = model.buffers

    def _wait_sent(self) -> None:
        """Wait until the gradient is sent: until then its memory is being read."""
        deadline, taken = time.monotonic() + SENT_WITHIN_SECONDS, -1
        while not self._sent.wait(0.5):
            if self._connection is None or self._connection.end is not None:
                return
            if self._connection.sent_bytes != taken:  # a slow link takes its time
                deadline, taken = time.monotonic() + SENT_WITHIN_SECONDS, self._connection.sent_bytes
            if time.monotonic() > deadline:
                raise ServerUnreachableError(
                    f"the server at {self.address} took no gradient for {SENT_WITHIN_SECONDS:g} s"
                )

    def _held(self) -> FlatModel:
        if self._model is None:
            raise RuntimeError("the worker holds no model yet")
        return self._model


def _finite(value: torch.Tensor) -> float | None:
    number = float(value)
    return number if number - number == 0 else None
