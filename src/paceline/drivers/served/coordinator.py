"""The parameter server without its network: it passes what workers do to the strategy, and carries out its actions.

`server.py` calls it, and sends the model to the workers in `to_send`. All events and steps go into a journal.

    joined, left, gradient  ->  strategy  ->  Step: the model moves
                                              Assign: `sizes` has the samples of each worker's next batch
                                              Send: `to_send` names the workers that are to get it
                                              Drop: the gradient is let go, and the journal says why

Nothing here opens a socket, starts a thread or reads a clock: whoever calls gives the time. Every time that a strategy
gets is a whole number of microseconds, as it is in the journal, so that a replay decides exactly as the run did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.codecs import Codec
from paceline.drivers.served.membership import Member, Seat, Seats
from paceline.drivers.served.messages import Gradient, ProtocolError
from paceline.events import Action, Assign, Drop, Event, Joined, Left, Send, Share, Step
from paceline.strategies import Strategy, shares_of
from paceline.strategies.shares import BatchSizes
from paceline.traces.journal import (
    Arrival,
    Arrived,
    Dropped,
    JournalRecord,
    Refused,
    StepRecord,
    WorkerJoined,
    WorkerLeft,
)
from paceline.traces.replay_events import hear, without_workers
from paceline.traces.run_status import COUNTED
from paceline.training import TrainState, all_finite, fingerprint
from paceline.training.bad_gradients import BadGradients


@dataclass(slots=True, kw_only=True, eq=False)
class ReceivedGradient:
    """A gradient that has arrived: its message, vector and buffers, and how to give its memory back.

    An empty `vector` stands for a gradient that is not finite, which a worker reports instead of sending it.
    """

    worker: int
    message: Gradient
    vector: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    buffer_changes: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    release: Callable[[], None] = lambda: None
    checked: bool | None = None  # whether its numbers are finite, if somebody has looked
    arrived_seconds: float = 0.0
    up_seconds: float = 0.0  # from its first to its last byte on the connection
    up_bytes: int = 0
    decode_seconds: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether every number in it is finite."""
        if self.checked is None:
            self.checked = self.vector.numel() > 0 and all_finite(self.vector) and all_finite(self.buffer_changes)
        return self.checked


def microseconds(seconds: float) -> float:
    """Round a time to what the journal holds.

    >>> microseconds(0.12345678)
    0.123457
    """
    return round(seconds, 6)


class Coordinator:
    """Drives a strategy and a train_state with what real workers do.

    `wait_for` workers are gathered before the first round begins (`begin` begins it sooner). A worker has
    `most_bad_gradients` tries for one that is finite. `before_step` is called before the model changes.
    """

    def __init__(
        self,
        *,
        strategy: Strategy,
        train_state: TrainState,
        codec: Codec,
        seats: Seats,
        total_steps: int,
        wait_for: int,
        most_bad_gradients: int = 3,
        write: Callable[[JournalRecord], None] = lambda record: None,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.strategy, self.train_state, self.codec, self.seats = strategy.start(), train_state, codec, seats
        self.total_steps, self.wait_for = total_steps, wait_for
        self.sizes = BatchSizes(shares_of(strategy))
        self.begun = self.diverged = self.stopped = False
        self.members: dict[int, Member] = {}
        self.sent_bytes = self.received_bytes = 0  # since the last step
        self.figures = {"k": 0.0, "sent_bytes": 0.0, "received_bytes": 0.0, "wait_seconds": 0.0}  # since it began
        self.to_send: list[int] = []
        self.boundary = self._boundary_state()  # for checkpoints: strategy and seats as of the last step
        self._write, self.before_step = write, before_step
        self._pending: dict[tuple[int, int], list[ReceivedGradient]] = {}
        self._arrivals: list[Arrival] = []
        self._dropped: list[Dropped] = []
        self._opened_seconds = 0.0
        self.bad_gradients = BadGradients(most_bad_gradients)

    @property
    def done(self) -> bool:
        """Whether all steps are taken, or the model has diverged."""
        return self.diverged or self.train_state.version >= self.total_steps

    @property
    def over(self) -> bool:
        """Whether no step will be taken any more: the run is done or stopped."""
        return self.done or self.stopped

    @property
    def alive(self) -> list[int]:
        """The numbers of the workers that take part."""
        return sorted(number for number, member in self.members.items() if member.alive)

    # -- events ------------------------------------------------------------------------------------------

    def joined(self, seat: Seat, *, threads: int, host: str, now: float) -> None:
        """Let a worker that is ready take part."""
        before = self.members.get(seat.worker)
        self.members[seat.worker] = member = Member(worker=seat.worker, seat=seat, host=host, last="joined")
        if before is not None:
            for name in (*COUNTED, "refused"):
                setattr(member, name, getattr(before, name))
        self.bad_gradients.forget(seat.worker)
        self.flush()
        self._write(
            WorkerJoined(
                at_seconds=now,
                worker=seat.worker,
                shard=seat.shard,
                first_draw=seat.first_draw,
                threads=threads,
                host=host,
                first_sample=seat.first_sample if self.sizes.by_speed else None,
            )
        )
        if self.begun:
            self._decide(Joined(worker=seat.worker, at_seconds=now))
        elif len({self.members[worker].seat.shard for worker in self.alive}) >= self.wait_for:
            self.begin(now)

    def begin(self, now: float) -> None:
        """Begin the first round with the workers that are there."""
        if self.begun or self.over:
            return
        self.begun = True
        self._opened_seconds = now
        for worker in self.alive:
            self._decide(Joined(worker=worker, at_seconds=now))

    def stop(self) -> None:
        """Take no step any more; else workers that leave at the end would let the open round close without them."""
        self.stopped = True

    def left(self, worker: int, reason: str, now: float) -> None:
        """Take note that a worker has gone; what it had delivered stays valid."""
        self.seats.release(worker)
        member = self.members.get(worker)
        if member is None or not member.alive or self.over:
            return
        member.alive, member.last = False, reason
        self.flush()
        self._write(WorkerLeft(at_seconds=now, worker=worker, reason=reason))
        if self.begun:
            self._decide(Left(worker=worker, at_seconds=now))

    def gradient(self, received: ReceivedGradient, *, now: float) -> None:
        """Take a gradient that fits the model; ProtocolError if it is of a version that its worker cannot have."""
        message, member = received.message, self.members[received.worker]
        self._check_version(member, message)
        sent_seconds = member.sent_seconds(message.version, now)
        member.answered(message.version)
        first_sample = self.seats.next_sample(received.worker)
        # Samples that nobody asked for are no weight: without shares by speed all batches count alike, whatever a
        # worker says of its own, and no worker can make those of the others count for nothing.
        batch_samples = message.batch_samples if self.sizes.by_speed else 0
        self.seats.drawn(received.worker, message.draw, batch_samples)
        if self.over:
            received.release()
            return
        if not received.finite:
            self._refuse(received, now)
            return
        self.bad_gradients.finite(received.worker, fresh=message.version == self.train_state.version)
        transfer = max(0.0, now - sent_seconds - message.held_seconds)
        arrival = Arrival(
            worker=received.worker,
            version=message.version,
            draw=message.draw,
            blocks_done=message.blocks_done,
            blocks=message.blocks,
            at_seconds=now,
            work_seconds=microseconds(max(0.0, message.work_seconds)),
            transfer_seconds=microseconds(transfer),
            loss_mean=message.loss_mean,
            loss_variance=message.loss_variance,
            samples=message.samples,
            batch_samples=batch_samples,
            first_sample=first_sample,
        )
        member.note_arrival(arrival)
        self._arrivals.append(arrival)
        received.arrived_seconds = now
        # One that died and came back may deliver a version twice: the strategy drops the second.
        self._pending.setdefault((received.worker, message.version), []).append(received)
        self._decide(arrival)

    def _check_version(self, member: Member, message: Gradient) -> None:
        if not member.may_answer(message.version):
            raise ProtocolError(
                f"a gradient of version {message.version} cannot be: the worker was sent up to {member.sent_version} "
                f"and has answered {member.answered_version}"
            )
        if message.blocks_done > message.blocks:
            raise ProtocolError(f"{message.blocks_done} of {message.blocks} blocks cannot be done")
        if message.blocks_done < message.blocks and message.version == self.train_state.version:
            raise ProtocolError("a gradient of the open round must be whole: nothing has told its worker to stop")
        expected = self.seats.next_draw(member.seat.worker)
        if message.draw != expected:  # whoever has this number next goes on after it
            raise ProtocolError(f"batch {message.draw} cannot be: the worker's next is batch {expected}")
        asked = member.asked_samples.get(message.version, member.most_asked)
        if asked and not 1 <= message.batch_samples <= asked:  # a gradient weighs as much as its batch has samples
            raise ProtocolError(
                f"a batch of {message.batch_samples} samples cannot be: with version {message.version} the worker was "
                f"asked for {asked} (worker.samples)"
            )

    def _refuse(self, received: ReceivedGradient, now: float) -> None:
        """Refuse a gradient that is not finite: it never comes near the model, and the worker gets another try."""
        member, version = self.members[received.worker], received.message.version
        received.release()
        member.refused += 1
        member.last = "sent numbers that are not finite"
        self.refused("not finite", worker=received.worker, peer=member.host, now=now)
        fresh = version == self.train_state.version
        verdict = self.bad_gradients.refused(received.worker, fresh=fresh, members=self.alive)
        if verdict == "diverged":
            self.diverged = True
        elif verdict == "again" and version == member.sent_version:
            self.to_send.append(received.worker)

    def refused(self, reason: str, *, worker: int | None, peer: str, now: float) -> None:
        """Write a refusal to the journal."""
        self.flush()
        self._write(Refused(at_seconds=now, worker=worker, peer=peer, reason=reason))

    # -- actions -----------------------------------------------------------------------------------------

    def _decide(self, heard: Event | Arrival) -> None:
        if self.over:
            return
        version = self.train_state.version
        self._act(hear(self.strategy, heard))
        if self.train_state.version > version:  # with all that the gradient told that closed the round
            self.boundary = self._boundary_state()

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Step():
                    self._step(action)
                case Assign():  # also after the last step: the run may be extended
                    self.sizes.assign(action)
                case Send():
                    if not self.done:
                        self.to_send.extend(action.workers)
                case Drop():
                    self._drop(action)

    def _step(self, step: Step) -> None:
        late, fresh = ([self._take(share) for share in shares] for shares in (step.late, step.fresh))
        vectors = {(received.worker, received.message.version): received.vector for received in (*late, *fresh)}
        changes = [received.buffer_changes for received in (*late, *fresh)]
        self.before_step()
        self.diverged = not self.train_state.take(step, lambda share: vectors[share.worker, share.version], changes)
        for received in (*late, *fresh):
            received.release()
        if self.diverged:
            return
        for received in fresh:
            self.members[received.worker].used += 1
            self.members[received.worker].last = "on time"
        for received in late:
            self.members[received.worker].late += 1
            self.members[received.worker].last = "late"
        self._count(step, fresh)
        self._record(step)
        self.bad_gradients.round_closed()
        self._opened_seconds = step.at_seconds

    def _take(self, share: Share) -> ReceivedGradient:
        (received,) = self._pending.pop((share.worker, share.version))
        return received

    def _record(self, step: Step) -> None:
        self._write(
            StepRecord(
                at_seconds=step.at_seconds,
                version=step.version,
                opened_seconds=self._opened_seconds,
                fresh=tuple((share.worker, share.version) for share in step.fresh),
                late=tuple((share.worker, share.version) for share in step.late),
                dropped=tuple(self._dropped),
                arrivals=tuple(self._arrivals),
                fingerprint=fingerprint(self.train_state.model.parameters),
                sent_bytes=self.sent_bytes,
                received_bytes=self.received_bytes,
            )
        )
        self._arrivals, self._dropped = [], []
        self.sent_bytes = self.received_bytes = 0

    def _count(self, step: Step, fresh: Sequence[ReceivedGradient]) -> None:
        """Count what is worth logging: bytes, and how long workers that were in time have waited for the round."""
        self.figures["k"] = len(fresh)
        self.figures["sent_bytes"] += self.sent_bytes
        self.figures["received_bytes"] += self.received_bytes
        self.figures["wait_seconds"] += sum(max(0.0, step.at_seconds - each.arrived_seconds) for each in fresh)

    def _drop(self, drop: Drop) -> None:
        held = self._pending[drop.worker, drop.version]
        held.pop().release()
        if not held:
            del self._pending[drop.worker, drop.version]
        self.members[drop.worker].note_drop(drop.reason)
        self._dropped.append(Dropped(worker=drop.worker, version=drop.version, reason=drop.reason))

    def flush(self) -> None:
        """Write to the journal what has arrived and is in no step yet; else that is written with the next step."""
        if self._arrivals or self._dropped:
            self._write(Arrived(arrivals=tuple(self._arrivals), dropped=tuple(self._dropped)))
            self._arrivals, self._dropped = [], []

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _boundary_state(self) -> dict[str, Any]:
        """Return where strategy and batches stand between two rounds; gradients of an open round are computed again."""
        roster = self.seats.state_dict()
        if self.sizes.by_speed:
            roster["assigned"] = self.sizes.state_dict()
        return {"strategy": self.strategy.state_dict(), "roster": roster}

    def load_boundary(self, state: dict[str, Any]) -> None:
        """Go on from a state between two rounds, with no worker there."""
        self.strategy.load_state_dict(without_workers(state["strategy"]))
        self.seats.load_state_dict(state["roster"])
        if self.sizes.by_speed:
            self.sizes.load_state_dict(state["roster"].get("assigned", ()))
        self.boundary = self._boundary_state()
