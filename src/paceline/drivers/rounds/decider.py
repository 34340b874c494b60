"""The strategy, on one rank: reports of all ranks go in, notices for all ranks come out.

    GradientReady ──> fingerprint equal to the others'? ──> strategy ──> Step, Assign: RoundClosed
                                                                         Drop: told with the next
    Waiting       ──> are all waiting? ──> AllWaiting; have all been there, and another goes on? ──> GoOn
    Overdue       ──> who has not come? ──> Failed

`Decider` is pure as a strategy is: whoever calls it gives the time. The strategy is the same object that runs behind a
server and on the virtual clock, so the decisions are the same for the same arrivals.

A rank that waits in a flush is still a member of the round, but nobody waits for it: when all others have delivered,
those that wait have left for the strategy (`Left`), and join again when all are released.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from paceline.decoding import Between, Count, WorkerNumber, decode
from paceline.distributed import first_line, name_ranks
from paceline.drivers.rounds.exchange import over_connections
from paceline.drivers.rounds.messages import (
    AllWaiting,
    Failed,
    GoOn,
    GradientReady,
    Mailbox,
    Notice,
    Overdue,
    Report,
    RoundClosed,
    Stop,
    Waiting,
)
from paceline.drivers.rounds.outcomes import NOT_FINITE
from paceline.events import Assign, Drop, Event, Joined, Left, Step
from paceline.strategies import Strategy
from paceline.traces.journal import Arrival
from paceline.traces.replay_events import hear
from paceline.training.bad_gradients import BadGradients

MOST_BAD_GRADIENTS = 20  # in a row that are not finite
ENDED = "the run ended"
MOST_SCALE = 1_000_000  # of a late gradient: the blocks of a batch, if one of them is done
KEPT_VERSIONS = 64  # whose fingerprints and opening times are remembered


class Decider:
    """Drives a strategy with what ranks report.

    `ranks` are their names in errors; in reports and steps a rank is known by its place among them.

    >>> from paceline.strategies import LGC
    >>> decider = Decider(LGC(k=1), ranks=[0, 1])
    >>> decider.begin(0.0)
    >>> arrived = GradientReady(rank=1, version=0, draw=0, blocks_done=1, blocks=1, work_seconds=0.1, held_seconds=0.1,
    ...                   fingerprint=5)
    >>> decider.handle(arrived, 0.1)[0].step.fresh
    (Share(worker=1, version=0, weight=1.0),)
    """

    def __init__(self, strategy: Strategy, ranks: Sequence[int]) -> None:
        self.state = strategy.start()
        self._ranks = list(ranks)
        self._arrivals: list[Arrival] = []
        self._fresh: set[int] = set()  # who has delivered in the open round
        self._waiting: dict[int, bool] = {}  # ranks that wait, and whether they are leaving
        self._again: dict[int, int] = {}  # of those, ranks that wait at a version where all have been before
        self._away: set[int] = set()  # of those, ranks that have left for the strategy
        self._undelivered: set[tuple[int, int]] = set()  # gradients that arrived, and are in no step yet
        self._dropped: list[Drop] = []
        self._fingerprints: dict[int, tuple[int, int]] = {}  # of a version: the first rank to say it, and its number
        self._rates: dict[int, tuple[int, tuple[float, ...]]] = {}  # of a version: the same of its learning rates
        self._epoch_ends: dict[int, tuple[int, int]] = {}  # of an epoch: the first rank to say it, and where it ends
        self._opened: dict[int, float] = {}
        self._bad_gradients = BadGradients(MOST_BAD_GRADIENTS)

    def begin(self, now: float) -> None:
        """Begin the first round, with all ranks."""
        self._opened[self.state.version] = now
        for place in range(len(self._ranks)):
            if place not in self.state.state_dict()["alive"]:
                self.state.handle(Joined(worker=place, at_seconds=now))

    def handle(self, report: Report, now: float) -> list[Notice]:
        """Take in a report; return the notices that follow."""
        match report:
            case GradientReady():
                return self._arrived(report, now)
            case Waiting():
                failed = self._find_drift(report)
                if failed is not None:
                    return [failed]
                self._waiting[report.rank] = report.leaving
                if report.again:
                    self._again[report.rank] = report.version
                return self._release(now) if len(self._waiting) == len(self._ranks) else self._excuse(now)
            case Overdue():
                return self._overdue(report)
            case Stop():
                return []

    # -- gradients -------------------------------------------------------------------------------------------------

    def _arrived(self, report: GradientReady, now: float) -> list[Notice]:
        failed = self._find_drift(report)
        if failed is not None:
            return [failed]
        go_on = self._let_go_on(report.version, now)
        if not report.finite:
            return go_on + self._refuse(report)
        self._bad_gradients.finite(report.rank, fresh=report.version == self.state.version)
        opened = self._opened.get(report.version, now)
        arrival = Arrival(
            worker=report.rank,
            version=report.version,
            draw=report.draw,
            blocks_done=report.blocks_done,
            blocks=report.blocks,
            at_seconds=now,
            work_seconds=round(max(0.0, report.work_seconds), 6),
            transfer_seconds=round(max(0.0, now - opened - report.held_seconds - report.behind_seconds), 6),
            loss_mean=report.loss_mean,
            loss_variance=report.loss_variance,
            samples=report.samples,
            batch_samples=report.batch_samples,
            first_sample=report.first_sample,
        )
        self._arrivals.append(arrival)
        self._undelivered.add((report.rank, report.version))
        if report.version == self.state.version:
            self._fresh.add(report.rank)
        return go_on + (self._decide(arrival) or self._excuse(now))

    def _decide(self, heard: Event | Arrival) -> list[Notice]:
        notices: list[Notice] = []
        actions = hear(self.state, heard)
        assign = next((action for action in actions if isinstance(action, Assign)), None)  # follows from the step
        for action in actions:
            if isinstance(action, Step):
                notices.append(self._close(action, assign))
            elif isinstance(action, Drop):
                self._undelivered.discard((action.worker, action.version))
                self._dropped.append(action)
        return notices

    def _close(self, step: Step, assign: Assign | None) -> RoundClosed:
        for share in (*step.fresh, *step.late):
            self._undelivered.discard((share.worker, share.version))
        dropped, self._dropped = tuple(self._dropped), []
        self._fresh = set()
        self._bad_gradients.round_closed()
        self._opened[step.version + 1] = step.at_seconds
        for old in [version for version in self._opened if version < step.version - KEPT_VERSIONS]:
            del self._opened[old]
        for old in [version for version in self._fingerprints if version < step.version - KEPT_VERSIONS]:
            del self._fingerprints[old]
        for old in [version for version in self._rates if version < step.version - KEPT_VERSIONS]:
            del self._rates[old]
        for old in [epoch for epoch, (_, ends) in self._epoch_ends.items() if ends < step.version - KEPT_VERSIONS]:
            del self._epoch_ends[old]
        return RoundClosed(step=step, dropped=dropped, assign=assign)

    def take_arrivals(self) -> tuple[Arrival, ...]:
        """Return the arrivals since the last call: right after a round has closed, those of that round."""
        arrivals, self._arrivals = tuple(self._arrivals), []
        return arrivals

    def _find_drift(self, report: GradientReady | Waiting) -> Failed | None:
        if report.version > self.state.version:
            return Failed(
                reason=f"rank {self._ranks[report.rank]} has a model of round {report.version}, and the rounds are at "
                f"{self.state.version}: the ranks have loaded different checkpoints",
                kind="drift",
            )
        if isinstance(report, GradientReady) and report.epoch:
            first, ends = self._epoch_ends.setdefault(report.epoch, (report.rank, report.epoch_ends))
            if ends != report.epoch_ends:
                return Failed(
                    reason=f"epoch {report.epoch} ends at round {ends} on rank {self._ranks[first]}, and at round "
                    f"{report.epoch_ends} on rank {self._ranks[report.rank]}: give all ranks the same epoch(loader, "
                    "rounds=...), and leave an epoch early only on all ranks at the same round",
                    kind="drift",
                )
        if isinstance(report, GradientReady) and report.finite:
            first, rates = self._rates.setdefault(report.version, (report.rank, report.rates))
            if rates != report.rates:
                theirs = dict(sorted([(self._ranks[first], rates), (self._ranks[report.rank], report.rates)]))
                return Failed(
                    reason=f"{name_ranks(theirs)} have different learning rates in round {report.version}: "
                    f"{' and '.join(map(str, theirs.values()))}. Give the scheduler to the synchronizer, and leave out "
                    "scheduler.step(); set rates by hand on all ranks alike, before epoch() or after a flush()",
                    kind="drift",
                )
        first, fingerprint = self._fingerprints.setdefault(report.version, (report.rank, report.fingerprint))
        if fingerprint == report.fingerprint:
            return None
        who = name_ranks(sorted((self._ranks[first], self._ranks[report.rank])))
        return Failed(
            reason=f"{who} have different parameters in round {report.version}: something other than sync.step() "
            "changes one of them (an optimizer that is stepped in the loop, weights that are overwritten, a setting of "
            "the optimizer that is changed); load weights, and change settings, on all ranks alike",
            kind="drift",
        )

    def _refuse(self, report: GradientReady) -> list[Notice]:
        """Drop a gradient that is not finite. Where losses are scaled all ranks may have some, until the scale fits."""
        self._dropped.append(Drop(worker=report.rank, version=report.version, reason=NOT_FINITE))
        members, fresh = set(range(len(self._ranks))) - self._waiting.keys(), report.version == self.state.version
        verdict = self._bad_gradients.refused(report.rank, fresh=fresh, members=members)
        if verdict == "again":
            return []
        rank, bad = self._ranks[report.rank], self._bad_gradients.in_a_row(report.rank)
        reason = f"rank {rank} has had {bad} gradients in a row that are not finite: look at its data"
        if verdict == "diverged":
            reason = f"the gradients of all ranks are not finite in round {report.version}: lower the learning rate"
        return [Failed(reason=reason, kind="diverged")]

    @property
    def training(self) -> list[int]:
        """The ranks that do not wait."""
        return [rank for place, rank in enumerate(self._ranks) if place not in self._waiting]

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _excuse(self, now: float) -> list[Notice]:
        """Close the round without those that wait, if all others have delivered: else they would wait for ever."""
        training = set(range(len(self._ranks))) - set(self._waiting)
        if not self._fresh or not training <= self._fresh:
            return []
        gone = sorted(set(self._waiting) - self._away)
        self._away.update(gone)
        notices: list[Notice] = []
        for place in gone:
            notices += self._decide(Left(worker=place, at_seconds=now))
        return notices

    def _let_go_on(self, version: int, now: float) -> list[Notice]:
        """Let those go on that wait where all have been before, if another trains at a version behind it."""
        places = sorted(place for place, where in self._again.items() if where < version)
        for place in places:
            del self._again[place], self._waiting[place]
            if place in self._away:
                self._away.discard(place)
                self.state.handle(Joined(worker=place, at_seconds=now))
        return [GoOn(places=tuple(places))] if places else []

    def _release(self, now: float) -> list[Notice]:
        self._again = {}
        self._opened[self.state.version] = now  # nobody took the model to compute before
        self._rates.pop(self.state.version, None)  # all ranks may set others here
        leaving = all(self._waiting.values())
        dropped = tuple(self._dropped)
        if leaving:
            unused = sorted(self._undelivered)
            dropped += tuple(Drop(worker=worker, version=version, reason=ENDED) for worker, version in unused)
            self._undelivered = set()
            self._forget_late()
        self._dropped = []
        self._waiting = {rank: gone for rank, gone in self._waiting.items() if gone}
        for place in sorted(self._away - set(self._waiting)):
            self._away.discard(place)
            self.state.handle(Joined(worker=place, at_seconds=now))
        return [AllWaiting(version=self.state.version, leaving=leaving, dropped=dropped)]

    def _forget_late(self) -> None:
        """Take back the late gradients that the strategy kept for a next step: they are dropped."""
        state = self.state.state_dict()
        if "late_scales" in state:
            self.state.load_state_dict({**state, "late_scales": []})

    def _overdue(self, report: Overdue) -> list[Notice]:
        if report.version < self.state.version:
            return []  # it has closed meanwhile
        came = set(self._waiting) if report.flushing else self._fresh | set(self._waiting)
        missing = [rank for place, rank in enumerate(self._ranks) if place not in came]
        have = "has" if len(missing) == 1 else "have"
        reason = (
            f"round {report.version} did not close in {report.seconds:g} s: {self.state.k} gradients close it, and "
            f"{name_ranks(missing)} {have} not delivered. Do all ranks take part in the same rounds?"
        )
        if report.flushing:
            reason = (
                f"rank {self._ranks[report.rank]} waited {report.seconds:g} s in a flush: {name_ranks(missing)} {have} "
                "not come. Do all ranks call flush, state_dict and close alike?"
            )
        return [Failed(reason=reason, kind="late")]

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on later, between two rounds."""
        return {"strategy": self.state.state_dict(), "undelivered": sorted(self._undelivered)}

    def load_state_dict(self, state: dict[str, Any], *, version: int) -> None:
        """Go on from a `state_dict` of this version; late gradients are with their ranks, and so may be in it."""
        form = self.state.form
        if "late_scales" in form:
            form = {**form, "late_scales": tuple[tuple[WorkerNumber, Annotated[float, Between(1, MOST_SCALE)]], ...]}
        kept = decode(dict[str, Any], state["strategy"], "strategy")
        held = decode(form, self.state.added | kept, "strategy")
        if held["version"] != version:
            raise ValueError(f"the strategy's state is of round {held['version']}, and the rank's of round {version}")
        undelivered = decode(frozenset[tuple[WorkerNumber, Count]], state["undelivered"], "undelivered")
        self.state.load_state_dict(held)
        self._undelivered = set(undelivered)


class DecidingThread:
    """The thread that decides, on one rank: until all ranks leave, or one fails.

    `arrivals` are those of each round that has closed, and of each flush, in order, for whoever keeps a journal.
    `failed` is called with the error that ends it, if it cannot be posted for all ranks.
    """

    def __init__(
        self, decider: Decider, mailbox: Mailbox, *, clock: Callable[[], float], failed: Callable[[Exception], None]
    ) -> None:
        self.decider, self._mailbox, self._clock, self._failed = decider, mailbox, clock, failed
        self.arrivals: deque[tuple[Arrival, ...]] = deque()
        self._thread = threading.Thread(target=self._run, name="paceline-decider", daemon=True)

    def start(self, now: float) -> None:
        """Begin the first round."""
        self.decider.begin(round(now, 6))
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end for a while; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        try:
            while not isinstance(report := self._next_report(), Stop):
                for notice in self.decider.handle(report, round(self._clock(), 6)):
                    if isinstance(notice, RoundClosed | AllWaiting):
                        self.arrivals.append(self.decider.take_arrivals())
                    published, number = self._publish(number, notice), number + 1
                    if isinstance(published, Failed) or (isinstance(published, AllWaiting) and published.leaving):
                        return
        except Exception as error:
            try:
                reason = f"the rank that decides has failed: {type(error).__name__}: {first_line(error)}"
                self._mailbox.post_failure(Failed(reason=reason), first=number)
            except Exception:  # the store may be lost
                self._failed(error)

    def _next_report(self) -> Report:
        with over_connections():
            return self._mailbox.next_report()

    def _publish(self, number: int, notice: Notice) -> Notice:
        with over_connections():
            return self._mailbox.publish(number, notice)
