r"""What a recorded run tells of its times, as the simulator needs it to play the run again.

Of every gradient the record has when it arrived, how long the worker computed, how long model and gradient were on the
wire. When its worker had waited for the model, all that is between the close of the round before and its arrival is

    close of version - 1                                      arrival
      |  S  |  down |  o  |############ work ############|  up  |
            |<----------- transfer = down + up ------------->|          (without o and work)

    S   the server's own time: the least of (arrival - transfer - work - close - o) over the workers of a round, for
        the first to be served waits for little else. Under `async` a step has one worker: the least of the whole run.
        Where the server wrote its own times (times/server.jsonl), no more than those say.
    o   what the worker did besides computing (loading the model, encoding). A worker that is late does nothing else
        between two batches, so there it is (arrival - arrival before - work). Of one that had waited it is the rest,
        with how much longer than usual its messages took this time. It belongs to this draw.

On ranks there is no server, and S is all that passes until everybody has the update: the least of (arrival - work -
close). In a DDP script that was watched S is the least wait of all ranks, for the last to come waits for nobody.

A worker's draws stay in their order, so that who was slow for a while is slow for as long again. A batch that was cut
short is taken as long as its blocks say ("extrapolated"). A draw that nobody measured is as long as the one before it
("guessed"), and one that the run's end cut off at least as long as it had taken by then. Where workers had batches by
their speed, a draw is as long as the batch that it was: nothing is dealt anew, and a note says so.
"""

from __future__ import annotations

import math
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal, TypeAlias

from paceline.drivers.simulated.cluster import LateWork, Place
from paceline.drivers.simulated.network import BITS_PER_BYTE, OneWayLink, WorkerLink
from paceline.errors import PacelineError
from paceline.recipes.assembly import averages, codec_text_of, make_member, make_strategy
from paceline.recipes.recipe import Recipe
from paceline.renaming import as_recorded
from paceline.strategies import LGC, STRATEGIES, Async, FastestK, Full, Strategy, bare_name
from paceline.strategies.averaging import Averaging
from paceline.traces.history import SHORTEST_SECONDS
from paceline.traces.journal import Arrived, StepRecord, WorkerJoined
from paceline.traces.journal_files import Journal, effective
from paceline.traces.recorded_run import RecordedRun
from paceline.traces.records import Trace
from paceline.traces.step_times import StepTimes, WorkerTimes

HANDLING_SECONDS = 0.001  # of a message's way, what is taken to be no matter of its bytes where links were not probed
HARDLY_LONGER = 1 + 1e-6
MOST_DRAWS = 5_000_000  # as many as the simulator plays
DrawMark: TypeAlias = Literal["measured", "extrapolated", "guessed"]


class WhatIfError(PacelineError, ValueError):
    """A run of which nothing can be predicted, and why.

    >>> raise WhatIfError("runs/train has no round that closed")
    Traceback (most recent call last):
    paceline.analysis.what_if.measured_run.WhatIfError: runs/train has no round that closed
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One batch of one worker: its seconds as a whole batch, what came beside them, and how far that was measured.

    >>> Draw(seconds=0.5).mark
    'measured'
    """

    seconds: float
    beside_seconds: float = 0.0
    mark: DrawMark = "measured"


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredRun:
    """A recorded run in the simulator's terms; a remedy is the same run with something changed.

    `strategy` is None where the ranks average, `member` where they do not. `steps` are those of the model, `rounds`
    what a recipe counts. `server_seconds` is S of each step in turn, for averages the seconds of each;
    `versions` are those of these steps where a journal has them, which may have holes.
    """

    label: str
    workers: int
    rounds: int
    steps: int
    blocks: int
    on: Place
    late_work: LateWork = "partial"
    strategy: Strategy | None = None
    member: Averaging | None = None
    draws: tuple[tuple[Draw, ...], ...]
    server_seconds: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    links: tuple[WorkerLink, ...] = ()
    up_bytes: int = 0
    down_bytes: int = 0
    seconds: float
    round_seconds: tuple[float, ...] = ()
    processor_seconds: float | None = None  # of a draw, where all workers were on one machine
    recipe: Mapping[str, Any] | None = None
    codec: str = "identity"
    hosts: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> str:
        """What those who compute are called."""
        return "worker" if self.on == "server" and self.member is None else "rank"

    @property
    def was_here(self) -> bool:
        """Whether all workers were on this machine, so that its cores are the ones they shared."""
        return self.hosts == {platform.node()}

    @property
    def transfer_seconds(self) -> float:
        """What model and gradient take on the wire, for the worker in the middle."""
        if not self.links:
            return 0.0
        return median(link.down.seconds(self.down_bytes) + link.up.seconds(self.up_bytes) for link in self.links)

    def typical_seconds(self, worker: int) -> float:
        """Return the median of a worker's batches, with what came beside them."""
        return median(draw.seconds + draw.beside_seconds for draw in self.draws[worker])

    @property
    def slowest(self) -> int:
        """The worker whose batches take longest, on average."""
        means = [fmean(draw.seconds + draw.beside_seconds for draw in column) for column in self.draws]
        return means.index(max(means))


def measured_run(run: RecordedRun) -> MeasuredRun:
    """Return what a recorded run tells of its times; WhatIfError if it does not tell enough."""
    found = _measured(run)
    return replace(found, notes=(*run.missing, *found.notes))


def _measured(run: RecordedRun) -> MeasuredRun:
    if run.kind == "watched":
        return _watched(run)
    trace = run.trace
    if trace is None:
        raise WhatIfError(f"{run.folder} holds no trace of a run")
    if trace.averaged:
        return _averaged(run, trace)
    journal = run.journal
    if journal is None:
        return _simulated(run, trace)
    return _with_times(_journaled(run, journal), run)


# -- runs in rounds, and async ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradient:
    """A gradient that arrived, however it was recorded."""

    worker: int
    version: int
    draw: int
    blocks_done: int
    blocks: int
    at_seconds: float
    work_seconds: float | None
    transfer_seconds: float
    longer: bool = False  # than it says: it was cut short without a word of its blocks


def _journaled(run: RecordedRun, journal: Journal) -> MeasuredRun:
    began, records = journal.began, effective(journal.records)
    gradients: list[_Gradient] = []
    steps: list[StepRecord] = []
    hosts: dict[int, str] = {}
    for record in records:
        if isinstance(record, StepRecord | Arrived):
            gradients += [
                _Gradient(
                    worker=each.worker,
                    version=each.version,
                    draw=each.draw,
                    blocks_done=each.blocks_done,
                    blocks=each.blocks,
                    at_seconds=each.at_seconds,
                    work_seconds=each.work_seconds,
                    transfer_seconds=each.transfer_seconds,
                )
                for each in record.arrivals
            ]
        if isinstance(record, StepRecord):
            steps.append(record)
        elif isinstance(record, WorkerJoined):
            hosts[record.worker] = _host(record.host)
    if not steps:
        raise WhatIfError(f"{run.folder} has no round that closed: there is nothing to play again")
    strategy = _strategy_of(began.recipe, began.strategy, [len(step.fresh) for step in steps])
    sent = sum(step.sent_bytes for step in steps)
    received = sum(step.received_bytes for step in steps)
    messages = max(1, len(gradients))
    measured = _fit(
        gradients,
        closes={steps[0].version - 1: steps[0].opened_seconds, **{step.version: step.at_seconds for step in steps}},
        workers=began.workers,
        on=began.on,
        alone=isinstance(strategy, Async),
        message_bytes=(round(received / messages), round(sent / messages)),
    )
    away = [each for each in (run.trace.absences if run.trace else ()) if each.from_seconds > 0 or each.to_seconds]
    return replace(
        measured,
        label=began.strategy,
        strategy=strategy,
        blocks=began.blocks,
        rounds=max(1, len(steps) // strategy.updates_per_round(began.workers)),
        recipe=dict(began.recipe) or None,
        codec=began.codec if began.codec not in ("", "none") else "identity",
        hosts=frozenset(hosts.values()),
        notes=(
            *((f"{len(away)} times a {measured.names} was away, which the simulator does not play",) if away else ()),
            *_notes_of_shares(began.recipe),
        ),
    )


def _simulated(run: RecordedRun, trace: Trace) -> MeasuredRun:
    if not trace.rounds or not trace.works:
        raise WhatIfError(f"{run.folder} has no works of single workers: simulate it again with at most 100,000")
    strategy = _strategy_of(trace.recipe, bare_name(trace.strategy), [each.k for each in trace.rounds])
    begun: Counter[int] = Counter()
    gradients = []
    for work in sorted(trace.works, key=lambda work: (work.worker, work.version)):
        draw = begun[work.worker]
        begun[work.worker] += 1
        if work.arrived_seconds is None:
            continue
        cut = trace.late_work == "complete" and work.arrived_seconds == work.finished_seconds
        longer = cut and work.outcome != "used"
        gradients.append(
            _Gradient(
                worker=work.worker,
                version=work.version,
                draw=draw,
                blocks_done=work.blocks if longer else work.blocks_done,  # late_blocks says nothing of its time
                blocks=work.blocks,
                at_seconds=work.arrived_seconds,
                work_seconds=work.compute_seconds,
                transfer_seconds=2 * (work.arrived_seconds - work.finished_seconds),
                longer=longer,
            )
        )
    measured = _fit(
        gradients,
        closes={-1: 0.0, **{each.version: each.closed_seconds for each in trace.rounds}},
        workers=trace.workers,
        on="ranks" if trace.strategy.endswith("@ranks") else "server",
        alone=isinstance(strategy, Async),
        message_bytes=(0, 0),
    )
    return replace(
        measured,
        label=trace.strategy,
        strategy=strategy,
        blocks=max(work.blocks for work in trace.works),
        rounds=max(1, len(trace.rounds) // strategy.updates_per_round(trace.workers)),
        late_work=trace.late_work,
        codec=_codec_of(trace.recipe),
        recipe=dict(trace.recipe) or None,
        notes=_notes_of_shares(trace.recipe),
    )


def _notes_of_shares(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    worker = recipe.get("worker")
    if not isinstance(worker, Mapping) or worker.get("shares", "equal") == "equal":
        return ()
    return ("batches were by speed, and every remedy is played with the sizes that the run had",)


def _strategy_of(recipe: Mapping[str, Any], name: str, fresh: Sequence[int]) -> Strategy:
    """Return the strategy of a run: its recipe's, or where a script had none the one that its rounds show."""
    if recipe:
        settings = recipe.get("strategy")
        document = {"strategy": settings} if isinstance(settings, Mapping) else {}
        cluster = recipe.get("cluster")
        if isinstance(cluster, Mapping):
            document["cluster"] = {key: value for key, value in cluster.items() if key == "workers"}
        return make_strategy(Recipe.from_document(as_recorded(document)))
    plain = bare_name(name)
    if plain not in STRATEGIES:
        raise WhatIfError(
            f"the run's strategy is {name!r:.60}, of which no times are known; known: {', '.join(STRATEGIES)}"
        )
    usual = Counter(fresh).most_common(1)[0][0]
    kinds: dict[str, Strategy] = {
        "full": Full(),
        "async": Async(),
        "lgc": LGC(k=usual),
        "fastest-k": FastestK(k=usual),
    }
    return kinds[plain]


def _fit(
    gradients: Sequence[_Gradient],
    *,
    closes: Mapping[int, float],
    workers: int,
    on: Place,
    alone: bool,
    message_bytes: tuple[int, int],
) -> MeasuredRun:
    """Tell the parts of each gradient's time apart; see above."""
    on_wire, first, end = on == "server", min(closes), max(closes.values())
    waits, gaps, usual = _waits_and_gaps(gradients, closes, workers, on_wire=on_wire)
    own = {worker: median(found) for worker in range(workers) if (found := gaps[worker].values())}
    server = _server_seconds(waits, own, sorted(closes)[1:], alone=alone)
    last_at = {each.worker: each.at_seconds for each in gradients}
    last_version = {each.worker: each.version for each in gradients}
    by_worker: list[dict[int, _Gradient]] = [{} for _ in range(workers)]
    for each in gradients:
        if each.worker < workers:
            by_worker[each.worker][each.draw] = each
    columns: list[tuple[Draw, ...]] = []
    for worker, draws in enumerate(by_worker):
        rest = dict(gaps[worker])
        for draw, each in draws.items():
            if (worker, draw) in waits:
                busy = server.get(each.version - 1, 0.0)  # before the first step nothing was the server's
                jitter = (each.transfer_seconds - usual[worker]) if on_wire else 0.0
                rest[draw] = max(0.0, waits[worker, draw][1] - busy + jitter)
        began = max(last_at.get(worker, 0.0), closes.get(last_version.get(worker, first), 0.0))
        columns.append(_column(draws, rest, elapsed_seconds=max(0.0, end - began)))
    up, down = message_bytes
    return MeasuredRun(
        label="",
        workers=workers,
        rounds=len(server),
        steps=len(server),
        blocks=1,
        on=on,
        draws=tuple(columns),
        server_seconds=tuple(server[version] for version in sorted(server)),
        versions=tuple(sorted(server)),
        links=tuple(_link(usual[worker], up, down) for worker in range(workers)) if on_wire else (),
        up_bytes=up,
        down_bytes=down,
        seconds=end - closes[first],
        round_seconds=_durations(closes),
    )


_Waits: TypeAlias = dict[tuple[int, int], tuple[int, float]]  # by worker and draw: version, and S + o
_Gaps: TypeAlias = list[dict[int, float]]  # by worker and draw: o


def _waits_and_gaps(
    gradients: Sequence[_Gradient], closes: Mapping[int, float], workers: int, *, on_wire: bool
) -> tuple[_Waits, _Gaps, dict[int, float]]:
    """Return S + o of the draws whose worker had waited for the model, o of the others, and each worker's transfer.

    A worker had waited if its gradient before was in by the time that the model, sent on, would have let it answer at
    once: close + S + transfer. What that S is follows from those whose gradient was in when the round closed.
    """
    transfers: defaultdict[int, list[float]] = defaultdict(list)
    surely: list[float] = []
    for patience in (False, True):
        slack = median(surely) if surely else 0.0
        waits: _Waits = {}
        gaps: _Gaps = [{} for _ in range(workers)]
        before: dict[int, _Gradient] = {}
        for each in gradients:
            opened, last = closes.get(each.version - 1), before.get(each.worker)
            before[each.worker] = each
            if opened is None or each.work_seconds is None or each.longer or each.worker >= workers:
                continue
            transfer = each.transfer_seconds if on_wire else 0.0
            grace = slack + transfer if patience else 0.0
            found = each.at_seconds - transfer - each.work_seconds - opened
            if last is None or last.at_seconds <= opened + grace:
                waits[each.worker, each.draw] = each.version, found
                if not patience:
                    surely.append(found)
                    transfers[each.worker].append(transfer)
            elif patience and last.draw == each.draw - 1 and not last.longer:
                gaps[each.worker][each.draw] = max(0.0, each.at_seconds - last.at_seconds - each.work_seconds)
    usual = {worker: median(found) for worker, found in transfers.items()}
    of_all = median(usual.values()) if usual else 0.0
    return waits, gaps, {worker: usual.get(worker, of_all) for worker in range(workers)}


def _durations(closes: Mapping[int, float]) -> tuple[float, ...]:
    times = [closes[version] for version in sorted(closes)]
    return tuple(later - earlier for earlier, later in pairwise(times))


def _server_seconds(
    waits: _Waits, own: Mapping[int, float], versions: Sequence[int], *, alone: bool
) -> dict[int, float]:
    """Return S after the step of each version: the least of what the gradients of the version after it began with.

    `own` is o of the workers that were seen at work without a pause. Where nobody was, half of the least is the
    worker's: nothing tells the two apart, and a run in which nobody is late does not need to.
    """
    least: dict[int, list[float]] = {}
    usual_own = median(own.values()) if own else None
    for (worker, _), (version, found) in waits.items():
        share = found / 2 if usual_own is None else found - own.get(worker, usual_own)
        least.setdefault(version - 1, []).append(max(0.0, share))
    if alone:
        whole = min((found for each in least.values() for found in each), default=0.0)
        return dict.fromkeys(versions, whole)
    together = {version: min(each) for version, each in least.items() if len(each) > 1}
    seen = together or {version: min(each) for version, each in least.items()}
    usual = median(seen.values()) if seen else 0.0
    return {version: seen.get(version, usual) for version in versions}


def _column(own: Mapping[int, _Gradient], rest: Mapping[int, float], *, elapsed_seconds: float) -> tuple[Draw, ...]:
    """Return a worker's draws in order; what was not measured is as the draw before it."""
    usual = median(rest.values()) if rest else 0.0
    if own and max(own) >= MOST_DRAWS:
        raise WhatIfError(f"a worker has more than {MOST_DRAWS:,} batches: too many to play again")
    found: list[Draw] = []
    for number in range(max(own, default=-1) + 1):
        each, before = own.get(number), found[-1].seconds if found else 0.0
        if each is None or each.work_seconds is None:
            found.append(Draw(seconds=before, beside_seconds=usual, mark="guessed"))
            continue
        seconds = max(each.work_seconds * each.blocks / each.blocks_done, SHORTEST_SECONDS)
        mark: DrawMark = "measured" if each.blocks_done == each.blocks else "extrapolated"
        if each.longer:
            seconds, mark = max(before, seconds * HARDLY_LONGER), "extrapolated"
        found.append(Draw(seconds=seconds, beside_seconds=rest.get(number, usual), mark=mark))
    first = next((draw for draw in found if draw.seconds > 0), None)
    found = [draw if draw.seconds > 0 or first is None else replace(draw, seconds=first.seconds) for draw in found]
    last = found[-1].seconds if found else SHORTEST_SECONDS
    if elapsed_seconds > 0 or not found:  # it was at work when the run ended
        seconds = max(last, elapsed_seconds * HARDLY_LONGER)
        found.append(Draw(seconds=seconds, beside_seconds=usual, mark="guessed"))
    return tuple(found)


def _link(transfer_seconds: float, up_bytes: int, down_bytes: int) -> WorkerLink:
    """Return a link on which model and gradient take so long together: a little for each, the rest by their bytes."""
    both = up_bytes + down_bytes
    latency = transfer_seconds / 2 if not both else min(HANDLING_SECONDS, transfer_seconds / 2)
    by_bytes = transfer_seconds - 2 * latency
    rate = BITS_PER_BYTE * both / by_bytes if both and by_bytes > 0 else math.inf
    way = OneWayLink(latency_seconds=latency, bits_per_second=rate)
    return WorkerLink(down=way, up=way)


def _with_times(measured: MeasuredRun, run: RecordedRun) -> MeasuredRun:
    """Take what the server and the workers themselves wrote of their times."""
    server = run.times.get("server", {}).get(0)
    if server is not None and server.server:
        own = {each.version: (each.step_seconds + each.send_seconds) / each.steps for each in server.server}
        alone = isinstance(measured.strategy, Async)
        seconds = tuple(
            (own[version] if alone else min(own[version], found)) if version in own else found
            for version, found in zip(measured.versions, measured.server_seconds, strict=True)
        )
        moved = fmean(measured.server_seconds) - fmean(seconds)  # what is not the server's is the workers', and back
        draws = tuple(
            tuple(replace(draw, beside_seconds=max(0.0, draw.beside_seconds + moved)) for draw in column)
            for column in measured.draws
        )
        measured = replace(measured, server_seconds=seconds, draws=draws)
    workers = run.times.get("worker", {})
    links = tuple(
        _measured_link(link, workers[number].steps, measured) if number in workers else link
        for number, link in enumerate(measured.links)
    )
    return replace(measured, links=links, processor_seconds=_processor_seconds(workers))


def _measured_link(link: WorkerLink, steps: Sequence[StepTimes], measured: MeasuredRun) -> WorkerLink:
    """Return a link by what its bytes took, where a worker's times tell; all else of a message's way is latency."""
    up, down = measured.up_bytes, measured.down_bytes
    # Records without the ways of single messages have no `trip`; neither do those of messages in shared memory.
    trips = [trip for step in steps if (trip := step.trip) is not None and step.steps == 1]
    ups = [trip.up_seconds for trip in trips if trip.up_bytes and trip.up_seconds]
    downs = [trip.down_seconds for trip in trips if trip.down_bytes and trip.down_seconds]
    if not (ups and downs and up and down):
        return link
    whole = link.down.seconds(down) + link.up.seconds(up)
    up_seconds, down_seconds = median(ups), median(downs)
    latency = max(0.0, (whole - up_seconds - down_seconds) / 2)
    return WorkerLink(
        down=OneWayLink(latency_seconds=latency, bits_per_second=BITS_PER_BYTE * down / down_seconds),
        up=OneWayLink(latency_seconds=latency, bits_per_second=BITS_PER_BYTE * up / up_seconds),
    )


def _codec_of(recipe: Mapping[str, Any]) -> str:
    """Return the codec of a recorded recipe in words; "" where it does not say."""
    section = recipe.get("codec")
    return codec_text_of(Recipe.from_document({"codec": section})) if isinstance(section, Mapping) else ""


def _host(text: str) -> str:
    """Return the name of a machine, without the process on it."""
    return text.partition(" pid ")[0]


def _processor_seconds(workers: Mapping[int, WorkerTimes]) -> float | None:
    """Return the mean processor time of a draw, where all workers were on one machine and somebody looked."""
    hosts = {_host(each.began.host) for each in workers.values()}
    if len(hosts) != 1:
        return None
    found = [step for each in workers.values() for step in each.steps if step.processor_seconds is not None]
    steps = sum(step.steps for step in found)
    return sum(step.processor_seconds or 0.0 for step in found) / steps if steps else None


# -- ranks that average, and DDP scripts -----------------------------------------------------------------------------


def _averaged(run: RecordedRun, trace: Trace) -> MeasuredRun:
    settings = trace.recipe.get("strategy")
    recipe = Recipe.from_document({"strategy": settings} if isinstance(settings, Mapping) else {})
    if not averages(recipe) or not any(each.used for each in trace.rounds):
        raise WhatIfError(f"{run.folder} holds no averages of a recipe's run: there is nothing to play again")
    member = make_member(recipe)
    ranks = run.times.get("rank", {})
    wires: defaultdict[int, float] = defaultdict(float)
    for work in trace.works:
        if work.arrived_seconds is not None:
            wires[work.version] = max(
                wires[work.version],
                work.arrived_seconds - (work.finished_seconds if work.sent_seconds is None else work.sent_seconds),
            )
    if len(ranks) == trace.workers and all(each.steps for each in ranks.values()):
        draws = tuple(_rank_draws(ranks[rank].steps) for rank in range(trace.workers))
    else:
        draws = _window_draws(run, trace, member)
    last = max(each.closed_seconds for each in trace.rounds if each.used)
    return MeasuredRun(
        label=trace.strategy,
        workers=trace.workers,
        rounds=trace.rounds_done,
        steps=len(trace.rounds),
        blocks=1,
        on="ranks",
        member=member,
        draws=draws,
        server_seconds=(median(wires.values()) if wires else 0.0,),
        seconds=last,
        round_seconds=tuple(each.seconds for each in trace.rounds if each.used),
        codec=_codec_of(trace.recipe),
        recipe=dict(trace.recipe) or None,
        hosts=frozenset(_host(each.began.host) for each in ranks.values()),
    )


def _window_draws(run: RecordedRun, trace: Trace, member: Averaging) -> tuple[tuple[Draw, ...], ...]:
    """Return the steps of each rank's windows, equally long within one, where all windows have as many steps."""
    if member.overlap or member.alone(trace.workers):
        raise WhatIfError(
            f"{run.folder} has no step times of its ranks (times/rank-N.jsonl), and the windows of {member.name} "
            "differ in their steps: record it again with this version"
        )
    period = member.period or 1
    columns: list[list[Draw]] = [[] for _ in range(trace.workers)]
    ended = dict[int, float]()  # when each rank had the average before: until then it waited
    for work in sorted(trace.works, key=lambda work: work.version):
        began = max(work.started_seconds, ended.get(work.worker, 0.0))
        ended[work.worker] = work.finished_seconds if work.arrived_seconds is None else work.arrived_seconds
        seconds = max((work.finished_seconds - began) / period, SHORTEST_SECONDS)
        columns[work.worker] += [Draw(seconds=seconds, mark="measured" if period == 1 else "extrapolated")] * period
    if not all(columns):
        raise WhatIfError(f"{run.folder} has a rank without a window: there is nothing to play again")
    return tuple(tuple(column[: trace.rounds_done] or column) for column in columns)


def _rank_draws(steps: Sequence[StepTimes]) -> tuple[Draw, ...]:
    """Return a rank's steps; a line that sums several stands for as many of their mean."""
    found: list[Draw] = []
    for step in sorted(steps, key=lambda step: step.step):
        own = (step.computing_seconds + step.other_seconds) / step.steps
        mark: DrawMark = "measured" if step.steps == 1 else "extrapolated"
        found += [Draw(seconds=max(own, SHORTEST_SECONDS), mark=mark)] * step.steps
        if len(found) > MOST_DRAWS:
            raise WhatIfError(f"a rank has more than {MOST_DRAWS:,} steps: too many to play again")
    return tuple(found)


def _watched(run: RecordedRun) -> MeasuredRun:
    ranks = run.times["rank"]
    began = next(iter(ranks.values())).began
    if began.sync not in ("ddp", "fsdp", "none"):
        raise WhatIfError(f"{run.folder} was synchronised by {began.sync}, of which the times alone do not tell enough")
    missing = sorted(set(range(began.workers)) - set(ranks))
    named = f"{'ranks' if len(missing) > 1 else 'rank'} {', '.join(map(str, missing))}"
    if missing and len(ranks) < max(2, len(missing)):
        raise WhatIfError(f"{run.folder} has no times of {named} of {began.workers}")
    common = set.intersection(*({(step.step, step.steps) for step in each.steps} for each in ranks.values()))
    if not common:
        raise WhatIfError(f"{run.folder} has no step that all ranks have timed: there is nothing to play again")
    by_step = {
        rank: sorted((step for step in each.steps if (step.step, step.steps) in common), key=lambda step: step.step)
        for rank, each in sorted(ranks.items())
    }
    lines = list(zip(*by_step.values(), strict=True))
    in_the_middle = [sorted(line, key=lambda step: step.computing_seconds)[len(line) // 2] for line in lines]
    wires: list[float] = []
    durations: list[float] = []
    for line in lines:
        wires += [min(step.wait_seconds for step in line) / line[0].steps] * line[0].steps
        durations += [median(step.seconds for step in line) / line[0].steps] * line[0].steps
    last = ranks[0].buckets[-1].bytes if ranks[0].buckets else ()
    return MeasuredRun(
        label="DDP" if began.sync == "ddp" else began.sync,
        workers=began.workers,
        rounds=len(durations),
        steps=len(durations),
        blocks=1,
        on="ranks",
        strategy=Full(),
        draws=tuple(_rank_draws(by_step.get(rank, in_the_middle)) for rank in range(began.workers)),
        server_seconds=tuple(wires),
        up_bytes=sum(last),
        down_bytes=sum(last),
        seconds=sum(durations) - wires[-1],  # as in other runs, until the last gradient is in
        codec="",  # whether the script encodes its gradients is not recorded
        round_seconds=tuple(durations),
        processor_seconds=_processor_seconds(ranks),
        hosts=frozenset(_host(each.began.host) for each in ranks.values()),
        notes=(f"no times of {named} are here: played like the rank in the middle of each step",) if missing else (),
    )
