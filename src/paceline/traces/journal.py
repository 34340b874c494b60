"""What a real run writes down while it goes on: one record for each thing that happened, in the order it happened.

All times are seconds since the run began, on the server's clock. A gradient is known by its worker and the version of
the model it was computed at. Its arrival is told in the next `Stepped` record; where somebody joins or leaves before
that step, an `Arrived` record comes first, so that the order of records is the order of events:

    RunBegan  WorkerJoined  WorkerJoined  Stepped  Arrived  WorkerLeft  Stepped  Checkpointed  ...  RunEnded

`traces.journal_files` writes and reads the file, `traces.history` makes a `Trace` of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

FORMAT = 1
TRACE = "trace.jsonl"  # in a run's folder


class JournalError(ValueError):
    """A journal that cannot be read, or not be opened for writing; the message names the file and the line.

    >>> raise JournalError("trace.jsonl:17: not JSON")
    Traceback (most recent call last):
    paceline.traces.journal.JournalError: trace.jsonl:17: not JSON
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegan:
    """The first record, and the only one of its kind: what was run. `format` is the journal's own version.

    >>> RunBegan(format=FORMAT, paceline="0.1.0", strategy="lgc", seed=0, workers=3, blocks=4, recipe={},
    ...          signature="mlp/1a2b", codec="none").workers
    3
    """

    format: int
    paceline: str
    strategy: str
    seed: int
    workers: int
    blocks: int
    recipe: Mapping[str, Any]
    signature: str
    codec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker is there; it takes over a shard of the data, from batch number `first_draw` on.

    >>> WorkerJoined(at_seconds=0.5, worker=2, shard=2, first_draw=0, threads=4, host="node-7").host
    'node-7'
    """

    at_seconds: float
    worker: int
    shard: int
    first_draw: int
    threads: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    """A worker is gone, politely or not.

    >>> WorkerLeft(at_seconds=9.5, worker=2, reason="no sign of life for 5 s").worker
    2
    """

    at_seconds: float
    worker: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A gradient came in. Not a record of its own: `Stepped` and `Arrived` hold arrivals.

    `work_seconds` is how long the worker computed, `transfer_seconds` how long model and gradient were on the wire.
    What was not measured is None.

    >>> Arrival(worker=0, version=4, draw=4, blocks_done=4, blocks=4, at_seconds=2.5, work_seconds=0.4,
    ...         transfer_seconds=0.01, loss_mean=0.7, loss_variance=0.2, samples=32).samples
    32
    """

    worker: int
    version: int
    draw: int
    blocks_done: int
    blocks: int
    at_seconds: float
    work_seconds: float | None
    transfer_seconds: float
    loss_mean: float | None
    loss_variance: float | None
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A gradient that is in no update, and why. Not a record of its own either.

    >>> Dropped(worker=1, version=3, reason="its round had closed").reason
    'its round had closed'
    """

    worker: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """The model went from `version` to `version + 1`, with these gradients, each as (worker, version).

    `arrivals` are all since the record before, in order, also of gradients that wait for a later step. Bytes are those
    since the step before. `fingerprint` tells the parameters after the step from any others.

    >>> Stepped(at_seconds=2.5, version=4, opened_seconds=2.0, fresh=((0, 4), (2, 4)), late=((1, 3),), dropped=(),
    ...         arrivals=(), fingerprint=0x5EED, sent_bytes=800, received_bytes=1200).fresh[1]
    (2, 4)
    """

    at_seconds: float
    version: int
    opened_seconds: float
    fresh: tuple[tuple[int, int], ...]
    late: tuple[tuple[int, int], ...]
    dropped: tuple[Dropped, ...]
    arrivals: tuple[Arrival, ...]
    fingerprint: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What came in before a join, a departure or the end, and was in no `Stepped` record yet.

    >>> Arrived(arrivals=(), dropped=(Dropped(worker=1, version=3, reason="it came twice"),)).arrivals
    ()
    """

    arrivals: tuple[Arrival, ...]
    dropped: tuple[Dropped, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Somebody was turned away; `worker` is None where the peer did not get as far as being one.

    >>> Refused(at_seconds=1.0, worker=None, peer="10.0.0.9:51514", reason="wrong token").peer
    '10.0.0.9:51514'
    """

    at_seconds: float
    worker: int | None
    peer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The model was measured after some rounds. None is a number that was not finite.

    >>> Evaluated(at_seconds=5.0, round=10, loss=0.7, accuracy=0.9).round
    10
    """

    at_seconds: float
    round: int
    loss: float | None
    accuracy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """The state after `version` steps is on the disk.

    >>> Checkpointed(at_seconds=5.0, version=100).version
    100
    """

    at_seconds: float
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A server went on from checkpoint `version`: what was recorded after that checkpoint is void, and nobody is in.

    >>> Resumed(at_seconds=8.0, version=100, reason="restarted").version
    100
    """

    at_seconds: float
    version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The last record of a run that was not killed.

    >>> RunEnded(at_seconds=60.0, reason="all rounds done", rounds_done=200, diverged=False).diverged
    False
    """

    at_seconds: float
    reason: str
    rounds_done: int
    diverged: bool


JournalRecord: TypeAlias = (
    RunBegan | WorkerJoined | WorkerLeft | Stepped | Arrived | Refused | Evaluated | Checkpointed | Resumed | RunEnded
)
