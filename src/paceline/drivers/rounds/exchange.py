"""One rank's exchange thread: it follows the notices, and takes part in one sum for each round that has closed.

    notice RoundClosed(step t) ──> contribution (zeros if this rank has nothing) ──> sum of all ──> update t, in a queue
                                                                                                   │
    training thread, at its next step boundary:  apply all updates in the queue, in order  <───────┘

A sum is one all-reduce, or where a codec is given the requests of its exchange, one after the other (`RoundSum`).

Only this thread starts collectives of its group, in the order of the notices, which is the same on every rank.

A rank that computes through several rounds finds as many updates in its queue, each of the model's size. With
`most_behind` of them there the thread enters no further sum before the training thread has applied one: then all
ranks wait for this one, and its log and theirs say so.

On a GPU the thread has a stream of its own, so that the sum does not queue behind the computation; the stream of the
training thread waits for the update's event. A gradient is complete before it is reported: whether it is finite was
read back. (Not run on a GPU yet.)
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.codecs import NotFiniteError
from paceline.codecs.requests import given_by_all
from paceline.distributed import first_line, name_ranks
from paceline.distributed.collectives import PendingCollective
from paceline.drivers.ranks.exchanging import ConnectionLostError, given_bytes, start
from paceline.drivers.ranks.heartbeats import FailureDetector, Heartbeats
from paceline.drivers.rounds.messages import AllWaiting, Failed, GoOn, Mailbox, Notice, RoundClosed
from paceline.exchanges import ExchangeProtocol, Trouble, TroubleError
from paceline.training.contributions import RankGradients, VectorPool
from paceline.training.round_sums import RoundSum

log = logging.getLogger("paceline.rounds")

SLICE_SECONDS = 0.5  # of a wait, between two looks at whether it is still wanted
WARN_SECONDS = 5.0  # after which a wait for others is told


@dataclass(slots=True, kw_only=True, eq=False)
class Update:
    """The sum of what all ranks contributed to a step, to be applied: when this rank entered it, and when it was done.

    `sent_bytes` is what all ranks together have given to the network for it.
    """

    notice: RoundClosed
    vector: torch.Tensor
    done: float
    begun: float = 0.0
    sent_bytes: int = 0
    event: Any = None  # on a GPU: what the training thread's stream waits for


class Exchange:
    """The exchange thread of a rank, and the queue between it and the training thread.

    `next_version` is what the model's version will be when all updates that have come are applied; `round_sum` is how
    ranks come to an update.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        gradients: RankGradients,
        updates: VectorPool,
        round_sum: RoundSum,
        group: dist.ProcessGroup,
        *,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        heartbeats: Heartbeats,
        detector: FailureDetector,
        most_behind: int,
        timeout_seconds: float,
    ) -> None:
        self._mailbox, self._gradients, self._pool, self.round_sum, self._group = (
            mailbox,
            gradients,
            updates,
            round_sum,
            group,
        )
        self._ranks, self._threads = ranks, 1
        self._rank, self._device, self._heartbeats, self._detector = rank, device, heartbeats, detector
        self._most_behind, self._timeout_seconds = most_behind, timeout_seconds
        self._place = list(ranks).index(rank)
        self._queue: deque[Update | AllWaiting | GoOn] = deque()  # in the order of the notices: that of all ranks
        self._behind = 0  # updates in the queue
        self._changed = threading.Condition()
        self._stopping = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.error: Exception | None = None  # what has ended a thread; the training thread makes a failure of it
        self._failure: Failed | None = None
        self.next_version = 0
        self.collective: PendingCollective | None = None  # the last one
        self.sent_bytes = 0
        self._thread = threading.Thread(target=self._run, name="paceline-exchange", daemon=True)

    def start(self) -> None:
        """Begin to follow the notices."""
        self._threads = torch.get_num_threads()
        self._thread.start()

    # -- the training thread's side --------------------------------------------------------------------------------

    @property
    def failure(self) -> Failed | None:
        """Why there are no more rounds, None while there are."""
        if self._failure is None and self.error is not None:
            kind = "lost" if isinstance(self.error, ConnectionLostError) else "fault"
            self._failure = Failed(reason=f"{type(self.error).__name__}: {first_line(self.error)}", kind=kind)
        return self._failure

    def next_update(self) -> Update | None:
        """Return the oldest update that is not applied yet; None if there is none, or all ranks waited before it."""
        with self._changed:
            return self._queue[0] if self._queue and isinstance(self._queue[0], Update) else None

    def applied(self, update: Update) -> None:
        """Take an applied update off the queue; its memory is used again."""
        with self._changed:
            self._queue.popleft()
            self._behind -= 1
            self._changed.notify_all()
        self._pool.give(update.vector)

    def next_release(self) -> AllWaiting | GoOn | None:
        """Return the notice that ends a wait, off the queue, once all updates before it are applied."""
        with self._changed:
            if self._queue and isinstance(self._queue[0], AllWaiting | GoOn):
                release, _ = self._queue[0], self._queue.popleft()
                return release
            return None

    @property
    def has_come(self) -> bool:
        """Whether something is in the queue."""
        return bool(self._queue)

    def wait(self, seconds: float, until: Callable[[], bool]) -> bool:
        """Wait until something holds, or the exchange has failed, at most so long; return whether it holds."""
        with self._changed:
            self._changed.wait_for(lambda: until() or self.failure is not None, seconds)
            return until()

    @property
    def under_way(self) -> bool:
        """Whether a collective is under way."""
        return self.collective is not None and not self.collective.done()

    @property
    def notices_read(self) -> int:
        """How many notices this rank has read."""
        return self._mailbox.notices_read

    def stop(self) -> None:
        """Enter no further sum. The thread ends with the next notice, which somebody must write."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end for a while; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._threads)  # as in the training thread: the bits of some codecs depend on them
            while not self._stopping and self._follow(self._next_notice()):
                pass
        except Exception as error:  # it is only kept: what fails on an error's way here would be heard by nobody
            self.error = self.error or error
            self._wake()

    def _next_notice(self) -> Notice:
        with over_connections():
            return self._mailbox.next_notice()

    def _follow(self, notice: Notice) -> bool:
        """Do what a notice says; return whether there may be another."""
        match notice:
            case RoundClosed():
                return self._exchange(notice)
            case AllWaiting():
                if notice.leaving and not self._leave_together(notice.version):
                    return False
                with self._changed:
                    self._queue.append(notice)
                    self._changed.notify_all()
                return not notice.leaving
            case GoOn():
                if self._place in notice.places:
                    with self._changed:
                        self._queue.append(notice)
                        self._changed.notify_all()
                return True
            case Failed():
                self._fail(notice)
                return False

    def end_with(self, error: Exception) -> None:
        """Let the rounds end with the error of another thread."""
        self.error = self.error or error
        self._wake()

    def _wake(self) -> None:
        """Let the training thread look at the error now; it does so every half second in any case."""
        with contextlib.suppress(Exception), self._changed:
            self._changed.notify_all()

    def _fail(self, failed: Failed) -> None:
        with self._changed:
            self._failure = self._failure or failed
            self._changed.notify_all()

    def _exchange(self, notice: RoundClosed) -> bool:
        version = notice.step.version
        if not self._wait_for_room(version):
            return False
        begun = time.perf_counter()
        with self._on_stream():
            brings = self._gradients.has_part_in(notice.step)
            vector = self._gradients.contribute(notice.step)
            self._heartbeats.entered = version + 1
            sent_bytes = self._add_up(self.round_sum.add_up(vector, version, brings=brings), version)
            if sent_bytes is None:
                return False
            done = time.perf_counter()
            event = None
            if self._stream is not None:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
        with self._changed:
            self._queue.append(
                Update(notice=notice, vector=vector, done=done, begun=begun, sent_bytes=sent_bytes, event=event)
            )
            self._behind += 1
            self.next_version = version + 1
            self._changed.notify_all()
        # All ranks are in this round's sum, so all have read the notices before it.
        if self._gradients.rank == 0:
            with over_connections():
                self._mailbox.forget_notices(before=self._mailbox.notices_read - 1)
        return True

    def _add_up(self, protocol: ExchangeProtocol, version: int) -> int | None:
        """Take a sum through all its requests; return what all ranks have sent for it, None if it came to no end."""
        sent_bytes = 0
        try:
            request = next(protocol)
            while True:
                with over_connections():
                    answer, work = start(request, self._group)
                self.collective = collective = PendingCollective(work, self._device)
                self.sent_bytes += given_bytes(request, self._group)
                sent_bytes += given_by_all(request, self._group.size())
                if not self._wait_for(collective, version):
                    return None
                with over_connections():
                    collective.check()
                request = protocol.send(answer)
        except StopIteration:
            return sent_bytes
        except TroubleError as error:  # all ranks have heard of it
            self._fail(_failure_of(error, self._ranks, version, self.round_sum.unsendable))
        except NotFiniteError as error:
            reason = f"round {version}: the sum of all contributions is not finite: lower the learning rate ({error})"
            self._fail(Failed(reason=reason, kind="diverged"))
        return None

    def _leave_together(self, version: int) -> bool:
        """Wait until all have read the last notice: the rank that keeps the store may end its process next."""
        with self._on_stream(), over_connections():
            work = dist.all_reduce(torch.zeros(1, device=self._device), group=self._group, async_op=True)
            self.collective = collective = PendingCollective(work, self._device)
            if not self._wait_for(collective, version):
                return False
            collective.check()
        return True

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def _wait_for_room(self, version: int) -> bool:
        warned = False
        with self._changed:
            while self._behind >= self._most_behind and not self._stopping:
                if not warned:
                    warned = True
                    log.warning(
                        "rank %d is %d updates behind, and round %d waits for it: it computes or evaluates longer than "
                        "so many rounds; cut its batches into more blocks, give more most_behind, or flush() before",
                        self._rank,
                        self._behind,
                        version,
                    )
                self._changed.wait(SLICE_SECONDS)
            return not self._stopping

    def _wait_for(self, collective: PendingCollective, version: int) -> bool:
        began, warn_seconds = time.monotonic(), WARN_SECONDS
        while not collective.done():
            collective.wait(SLICE_SECONDS)
            if self._stopping:
                return False
            waited = time.monotonic() - began
            if collective.done() or waited < warn_seconds:
                continue
            late = self._detector.missing(version)
            who = name_ranks(late) if late else "the network: all ranks have entered its sum"
            if waited > self._timeout_seconds:
                self._fail(Failed(reason=f"round {version} has waited {waited:.0f} s for {who}", kind="late"))
                return False
            log.warning("round %d has waited %.0f s for %s", version, waited, who)
            warn_seconds = min(4 * warn_seconds, self._timeout_seconds)
        return True


@contextlib.contextmanager
def over_connections() -> Iterator[None]:
    """Torch's RuntimeError in here is a lost connection, to a rank or the store."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionLostError(first_line(error)) from error


def _failure_of(error: TroubleError, ranks: Sequence[int], version: int, unsendable: str) -> Failed:
    who = name_ranks(ranks[place] for place in error.troubles)
    if Trouble.NOT_FINITE not in error.troubles.values():
        why = f" ({first_line(error.cause)})" if error.cause is not None else f"; the reason is with {who}"
        return Failed(reason=f"round {version}: {who} could not encode a contribution{why}", kind="fault")
    what = "the sum of all contributions is" if error.summed else f"the contribution of {who} is"
    why = f"{unsendable.rstrip(',')}: lower the learning rate, clip, or take another codec"
    return Failed(reason=f"round {version}: {what} {why}", kind="diverged")
