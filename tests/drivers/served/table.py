"""A coordinator of a tiny model, and all around it: what the laws of the coordinator are tried on."""

from __future__ import annotations

import copy
import json
from collections import Counter

import pytest
import torch
from hypothesis import strategies as st

from paceline.codecs import make_codec
from paceline.drivers.served.coordinator import Coordinator, ReceivedGradient
from paceline.drivers.served.membership import NoSeatError, Seats
from paceline.drivers.served.messages import Gradient, ProtocolError
from paceline.strategies import LGC, Async, FastestK, Full
from paceline.strategies.shares import SharesBySpeed
from paceline.traces.journal import StepRecord
from paceline.training import TrainState

SHARDS, MOST = 3, 5
MOST_BAD = 3  # gradients in a row that are not finite
FOREVER = 10**6

SHARES = SharesBySpeed(batch_size=32, least=4, multiple=4, period=2)
strategies_by_speed = st.sampled_from(
    [Full(shares=SHARES)] + [kind(k=k, shares=SHARES) for kind in (FastestK, LGC) for k in (1, 2, 3, "auto")]
)
strategies = strategies_by_speed | st.sampled_from(
    [Full(), Async(), Async(staleness_scaling=False)]
    + [kind(k=k) for kind in (FastestK, LGC) for k in (1, 2, 3, 9, "auto")]
    + [LGC(k=2, warmup_rounds=2), LGC(k=2, scale_partial=False), LGC(k=2, scale_partial="samples")]
)

_workers = range(MOST)
_move = st.sampled_from(
    6 * [("deliver", worker, 4) for worker in _workers]
    + [("deliver", worker, blocks) for worker in _workers for blocks in (1, 3)]
    + [("join", worker) for worker in _workers]
    + [("leave", worker) for worker in _workers]
    + [(kind, worker) for worker in _workers for kind in ("bad", "older", "never sent", "twice")]
)
histories = st.builds(
    lambda first, moves: [("join", worker) for worker in range(first)] + moves,
    st.integers(0, MOST),
    st.lists(_move, max_size=10) | st.lists(_move, min_size=20, max_size=40),
)


class Table:
    """A coordinator of a tiny model, and all around it: the server's part, the workers' and a clock."""

    def __init__(self, strategy, *, total_steps=FOREVER, wait_for=1, seed=0):
        torch.manual_seed(seed)
        module = torch.nn.Linear(2, 1)
        train_state = TrainState(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        self.records, self.released, self.held = [], Counter(), Counter()
        self.coordinator = Coordinator(
            strategy=strategy,
            train_state=train_state,
            codec=make_codec("identity"),
            seats=Seats(shards=SHARDS, most=MOST),
            total_steps=total_steps,
            wait_for=wait_for,
            write=self.records.append,
        )
        self.clock, self.received, self.draws, self.sent = 0.0, 0, {}, {}
        self.bad, self.sent_seconds = Counter(), {}

    @property
    def now(self):
        return self.clock if self.coordinator.begun else 0.0

    def play(self, moves):
        for kind, worker, *more in moves:
            self.clock = round(self.clock + 0.25, 6)
            if kind == "join":
                self.join(worker)
            elif kind == "leave":
                self.coordinator.left(worker, "it left", self.now)
            elif worker in self.coordinator.alive:
                self.say(kind, worker, *more)
            self.send()
            yield

    def join(self, wish):
        try:
            seat = self.coordinator.seats.take(wish)
        except NoSeatError:
            return
        self.draws[seat.worker], self.sent[seat.worker], self.bad[seat.worker] = seat.first_draw, [], 0
        self.coordinator.joined(seat, threads=1, host="here", now=self.now)

    def say(self, kind, worker, blocks_done=4):
        """A gradient, as a worker would send it if it can, or as none can."""
        member, version = self.coordinator.members[worker], None
        if kind == "never sent":
            for impossible in (member.sent_version + 1, member.answered_version):
                with pytest.raises(ProtocolError):
                    self.deliver(worker, impossible)
            return
        unanswered = [sent for sent in self.sent[worker] if sent > member.answered_version]
        if unanswered:
            version = unanswered[0] if kind == "older" else unanswered[-1]
            blocks_done = 4 if version == self.coordinator.train_state.version else blocks_done
            self.deliver(worker, version, blocks_done, bad=kind == "bad")
            if kind == "twice" and worker in self.coordinator.alive:
                with pytest.raises(ProtocolError):
                    self.deliver(worker, version)

    def deliver(self, worker, version, blocks_done=4, *, bad=False):
        number, draw = self.received, self.draws[worker]
        vector = torch.tensor([float("nan") if bad else 0.1 * (worker + 1), -0.2 * blocks_done, 1e30 * (worker == 4)])
        message = Gradient(
            version=max(version, 0), draw=draw, blocks_done=blocks_done, blocks=4, work_seconds=0.01 * (worker + 1),
            held_seconds=0.02, samples=8, loss_mean=1.0 + worker + draw, loss_variance=0.5, payload_bytes=12,
            buffer_bytes=0, batch_samples=self.asked(worker, version),
        )  # fmt: skip

        def release():
            self.released[number] += 1
            self.held[worker, version] -= 1

        received = ReceivedGradient(
            worker=worker, message=message, vector=vector, buffer_changes=torch.zeros(0), release=release
        )
        self.coordinator.gradient(received, now=self.now) if version >= 0 else refuse()
        self.received, self.draws[worker] = number + 1, draw + 1
        self.held[worker, version] += 1
        self.bad[worker] = self.bad[worker] + 1 if bad else 0
        if self.bad[worker] == MOST_BAD and not self.coordinator.over:  # the server ends its stream
            self.coordinator.left(worker, "refused", self.now)

    def asked(self, worker, version):
        return self.coordinator.members[worker].asked_samples.get(version, 0)

    def send(self):
        """What the server does with what the coordinator asks."""
        workers, self.coordinator.to_send = self.coordinator.to_send, []
        for worker in workers:
            member, version = self.coordinator.members[worker], self.coordinator.train_state.version
            if member.alive and not self.coordinator.done:
                member.sent(version, self.now, self.coordinator.sizes.samples(worker))
                self.sent[worker].append(version)
                self.sent_seconds[worker, version] = self.now

    @property
    def waiting(self):
        return +self.held


def refuse():
    raise ProtocolError("a version below 0 is refused when it is decoded")


def on_disk(coordinator):
    plain, tensors = coordinator.train_state.state()
    return json.loads(json.dumps({"trainee": plain, **coordinator.boundary})), copy.deepcopy(tensors)


def decisions(records):
    return [(record.fresh, record.late, record.fingerprint) for record in records if isinstance(record, StepRecord)]
