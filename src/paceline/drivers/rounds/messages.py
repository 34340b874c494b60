"""What ranks and their decider tell each other: reports to it, notices from it, through the launch's store.

    report/1, report/2, ...    in the order in which they came: a counter in the store gives out the numbers
    notice/0, notice/1, ...    one sequence, which every rank follows in order

A store's `get` waits for a key on the store's side, so a report is with the decider, and a notice with all ranks, a
fraction of a millisecond after it was written (with a TCPStore; a FileStore takes 10 ms). Every thread has its own
connection, since a `get` that waits holds up all others of its connection. The store carries control and gloo carries
the numbers: a `get` in the store costs neither polling nor Python's lock.

A notice has one place in the sequence and one writer: whoever comes second finds the first (`compare_set`). So a rank
that fails can write `Failed` at the next free place itself; it wakes all, and the decider too.

What is written is JSON, and every rank is of the same launch: nothing here comes from strangers.
"""

from __future__ import annotations

import datetime
import json
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from paceline.events import Assign, Drop, Share, Step

FOREVER = datetime.timedelta(days=365)  # of a `get`: whoever waits is woken by a notice, also of a failure


# -- reports -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReady:
    """A rank has a gradient of this version: `blocks_done` of `blocks`, and a fingerprint of its parameters.

    `work_seconds` is how long the rank computed, `held_seconds` how long ago it took the model. A gradient that is not
    `finite` is in no step; the rank goes on with its next batch, at the same version. `epoch` counts the epochs of the
    rank from 1, and `epoch_ends` is the round after the last of this one; 0 where the script has no epochs.

    `samples` is how many losses are in `loss_mean`; `batch_samples` the size of the whole batch, 0 where nobody knows,
    and `first_sample` where the batch begins in the rank's order, where that is known. `behind_seconds` is how long the
    model lay there before the rank took it, being busy: said where batches are by speed, since it is no part of the
    time that a batch takes. `rates` are the learning rates of the optimiser's groups.

    >>> GradientReady(rank=1, version=4, draw=4, blocks_done=3, blocks=4, work_seconds=0.4, held_seconds=0.5,
    ...         fingerprint=17).finite
    True
    """

    rank: int
    version: int
    draw: int
    blocks_done: int
    blocks: int
    work_seconds: float
    held_seconds: float
    fingerprint: int
    loss_mean: float | None = None
    loss_variance: float | None = None
    samples: int = 0
    finite: bool = True
    epoch: int = 0
    epoch_ends: int = 0
    batch_samples: int = 0
    first_sample: int = 0
    behind_seconds: float = 0.0
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A rank trains no further until all ranks are at one place; `leaving` for good.

    With `again` all were at this version before, and its batches since were dropped: the others may go on without it.

    >>> Waiting(rank=1, version=40, fingerprint=17).leaving
    False
    """

    rank: int
    version: int
    fingerprint: int
    leaving: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """A rank has waited too long for round `version` to close, or for all ranks to come to a flush (`flushing`).

    >>> Overdue(rank=1, version=40, seconds=600.0).seconds
    600.0
    """

    rank: int
    version: int
    seconds: float
    flushing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The decider's own process wants it to end."""


# -- notices -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClosed:
    """A round has closed with this step; `dropped` are the gradients that were dropped since the step before.

    `assign` is what the strategy assigns for the batches that begin at the version after it, if that is something new.

    >>> RoundClosed(step=Step(version=0, fresh=(Share(worker=0, version=0, weight=1.0),))).dropped
    ()
    """

    step: Step
    dropped: tuple[Drop, ...] = ()
    assign: Assign | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllWaiting:
    """All ranks are waiting, and go on from `version`; if all are `leaving`, this is the last notice.

    >>> AllWaiting(version=40, leaving=False).dropped
    ()
    """

    version: int
    leaving: bool
    dropped: tuple[Drop, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """These ranks, by place, need not wait: all were there before, and another has trained on since.

    >>> GoOn(places=(1,)).places
    (1,)
    """

    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The rounds have ended with an error; `kind` says how.

        drift      ranks do not hold the same parameters, or are in different epochs
        late       somebody has not come in time
        diverged   gradients are not finite
        gone       a rank has left, or is dead
        lost       a connection is lost: who is gone shows in a moment
        fault      this rank failed by itself

    >>> Failed(reason="rank 2 has left: ValueError", kind="gone").kind
    'gone'
    """

    reason: str
    kind: str = "gone"


Report: TypeAlias = GradientReady | Waiting | Overdue | Stop
Notice: TypeAlias = RoundClosed | AllWaiting | GoOn | Failed

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (GradientReady, Waiting, Overdue, Stop, AllWaiting, GoOn, Failed)
}


def encode(message: Report | Notice) -> str:
    """Return a message as JSON.

    >>> decode(encode(Failed(reason="rank 2 has left")))
    Failed(reason='rank 2 has left', kind='gone')
    """
    kind = type(message).__name__
    if isinstance(message, RoundClosed):
        step = message.step
        return json.dumps(
            {
                "message": kind,
                "version": step.version,
                "fresh": _pack(step.fresh),
                "late": _pack(step.late),
                "previous": step.previous_mean_weight,
                "at": step.at_seconds,
                "dropped": [[drop.worker, drop.version, drop.reason] for drop in message.dropped],
                "assigned": None if message.assign is None else message.assign.samples,
            }
        )
    fields = asdict(message)
    if isinstance(message, AllWaiting):
        fields["dropped"] = [[drop.worker, drop.version, drop.reason] for drop in message.dropped]
    return json.dumps({"message": kind, **fields})


def decode(text: str | bytes) -> Any:
    """Return the message of a JSON text.

    >>> shares = tuple(Share(worker=worker, version=3, weight=0.5) for worker in (0, 2))
    >>> notice = RoundClosed(step=Step(version=3, fresh=shares), dropped=(Drop(worker=1, version=1, reason="old"),),
    ...                      assign=Assign(samples=((0, 12), (2, 4))))
    >>> decode(encode(notice)) == notice
    True
    """
    fields = json.loads(text)
    kind = fields.pop("message")
    if "dropped" in fields:
        fields["dropped"] = tuple(Drop(worker=w, version=v, reason=reason) for w, v, reason in fields["dropped"])
    for several in ("rates", "places"):
        if several in fields:
            fields[several] = tuple(fields[several])
    if kind != RoundClosed.__name__:
        return _KINDS[kind](**fields)
    step = Step(
        version=fields["version"],
        fresh=_unpack(fields["fresh"]),
        late=_unpack(fields["late"]),
        previous_mean_weight=fields["previous"],
        at_seconds=fields["at"],
    )
    assigned = fields["assigned"]
    assign = None if assigned is None else Assign(samples=tuple((worker, samples) for worker, samples in assigned))
    return RoundClosed(step=step, dropped=fields["dropped"], assign=assign)


def _pack(shares: tuple[Share, ...]) -> list[Any]:
    """Return shares as [version, weight, workers] for each run of equal weights: there may be thousands."""
    packed: list[Any] = []
    for share in shares:
        if packed and packed[-1][:2] == [share.version, share.weight]:
            packed[-1][2].append(share.worker)
        else:
            packed.append([share.version, share.weight, [share.worker]])
    return packed


def _unpack(packed: list[Any]) -> tuple[Share, ...]:
    return tuple(
        Share(worker=worker, version=version, weight=weight)
        for version, weight, workers in packed
        for worker in workers
    )


# -- how they travel ---------------------------------------------------------------------------------------------------


class Mailbox:
    """One thread's connection to the store that reports and notices travel through."""

    def __init__(self, store: Any) -> None:
        self._store = store
        store.set_timeout(FOREVER)
        self._reports_read = self._forgotten = 0
        self.notices_read = 0

    def report(self, message: Report) -> None:
        """Send a report to the decider."""
        number = self._store.add("reports", 1)
        self._store.set(f"report/{number}", encode(message))

    def count_left(self, ranks: int) -> int:
        """Count `ranks` more that have left because of a failure; return how many have."""
        return int(self._store.add("left", ranks))

    def next_report(self) -> Report:
        """Wait for the next report, in the order in which they were numbered."""
        self._reports_read += 1
        key = f"report/{self._reports_read}"
        message: Report = decode(self._store.get(key))
        self._store.delete_key(key)
        return message

    def publish(self, number: int, notice: Notice) -> Notice:
        """Write notice `number`, and return what is there: another if somebody was first."""
        found: Notice = decode(self._store.compare_set(f"notice/{number}", "", encode(notice)))
        return found

    def next_notice(self) -> Notice:
        """Wait for the next notice."""
        notice: Notice = decode(self._store.get(f"notice/{self.notices_read}"))
        self.notices_read += 1
        return notice

    def post_failure(self, failed: Failed, *, first: int) -> None:
        """Write a failure at the first free place of the sequence from `first` on, unless one is there already."""
        number = first
        while not isinstance(self.publish(number, failed), Failed):
            number += 1

    def forget_notices(self, *, before: int) -> None:
        """Delete notices that every rank has read."""
        for number in range(self._forgotten, before):
            self._store.delete_key(f"notice/{number}")
        self._forgotten = max(self._forgotten, before)


class Outbox:
    """Talks to a store on a thread of its own: a store that does not answer holds up this thread, and no training.

    The rank that keeps the store may be stopped, or its machine gone. Whatever is given to `send` is called in order;
    the first error ends it, and goes to `failed`. The thread begins with the first call.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-reports", daemon=True)
        self._started = False

    def send(self, call: Callable[[], object]) -> None:
        """Let the thread call this."""
        self._calls.put(call)
        if not self._started:
            self._started = True
            self._thread.start()

    def close(self, seconds: float) -> None:
        """End the thread when all is sent; wait for it no longer than that."""
        self._calls.put(None)
        if self._started:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                call()
        except Exception as error:
            self._failed(error)
