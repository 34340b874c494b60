"""The diagnosis of a run: where its time went, who is slow, since when, in which phase, and what it cost.

    status        what it means
    slow          somebody is later than chance explains, and costs at least MATTERS of the run's time
    once          nobody is slow as a rule, but a single pause of somebody cost as much
    link          nobody is late, but the wire takes long, and one link is much slower than the others
    small         somebody is later than chance explains, and costs less than that
    harmless      somebody is slow, and nobody waits for it
    nobody        one who cost WOULD_BE_SEEN of the run's time or more would have been seen
    cannot tell   chance alone could hide somebody who costs more than that; or there is nothing to compare with

Everything is computed from what was recorded, by pure functions; the same record gives the same diagnosis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from paceline.diagnosis.lateness import (
    FEWEST_ROUNDS,
    LateSpan,
    excesses,
    kth_arrival,
    later_than_chance,
    levels,
    saved_seconds,
)
from paceline.diagnosis.timings import Bools, Coupling, Floats, Timings, timings_of
from paceline.traces.recorded_run import RecordedRun, RunKind
from paceline.traces.worker_counts import WorkerCounts

Status: TypeAlias = Literal["slow", "once", "link", "small", "harmless", "nobody", "cannot tell"]
Pattern: TypeAlias = Literal["chronic", "intermittent", "once"]
Busy: TypeAlias = Literal["computed more", "waited", "unknown"]

MATTERS = 0.02  # of the run's time; below it nobody would change anything for it
WOULD_BE_SEEN = 0.05
CHRONIC_SHARE = 0.7  # of the steps of a stretch
A_PAUSE = 10.0  # times as long as the longest delay of anybody else
MOST_PAUSES = 3
CLEARLY = 2.0  # times as late as anybody else ever was
CLEARLY_ROUNDS, CLEARLY_SHARE = 5, 0.05  # in so many rounds, and in such a share of them
SLOW_LINK = 1.5  # times slower than the median of the others; one link's probes agree within a few per cent
EXPLAINS = 0.5  # of the lateness, by phases that were measured
A_PHASE = 0.3  # of what the phases explain: from here on a phase is named
MOST_WAITED_FOR = 2_000  # workers up to which it is noted who waited for whom


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTime:
    """Where the seconds of one rank or worker went; the parts add up to the run's time.

    `charged_seconds` is what others waited for it, all of them added up; `waited_for` is whom it waited for most.
    """

    number: int
    host: str
    parts: Mapping[str, float]
    charged_seconds: float
    waited_for: int | None
    waited_for_seconds: float
    late_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank or worker that is later than chance explains, or all those of one host, if they are slow alike.

    It is late in `late_share` of the steps from `since_step` to `until_step` (None: to the end), typically by
    `late_seconds` a step. `phases` are where that comes from, empty where it cannot be told; `phase_seconds` what each
    measured phase takes longer than the others' in a late step. `chance` is how likely a balanced run looks like it.

    `saved_seconds` is what the run had taken less without this one. Who is nearly as slow hides behind who is slower:
    `all_saved_seconds` is without this one and all that are listed before it; it matters by what it adds to theirs.
    """

    members: tuple[int, ...]
    host: str
    whole_host: bool
    pattern: Pattern
    late_share: float
    late_seconds: float
    since_step: int
    until_step: int | None
    phases: tuple[str, ...]
    phase_seconds: Mapping[str, float]
    busy: Busy
    saved_seconds: float
    all_saved_seconds: float
    charged_seconds: float
    chance: float
    matters: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """A link as it was probed, beside the median of the other links; `saved_seconds` is modelled: the wire's time goes
    with the rate of the slowest link."""

    source: int
    target: int
    bits_per_second: float
    latency_seconds: float
    others_bits_per_second: float
    slow: bool
    saved_seconds: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that was found. `sentences` say it in words; `total` is where the time of all went, in seconds of a worker.

    `hidden_seconds` is what one worker could cost without being told from chance, `last_rows` how it was looked at.
    """

    run: str
    kind: RunKind
    noun: Literal["rank", "worker"]
    workers: int
    coupling: Coupling
    by_design: str
    strategy: str
    split: str
    steps: int
    skipped_steps: int
    run_seconds: float
    step_seconds: float
    k: float
    status: Status
    suspects: tuple[Suspect, ...]
    saved_seconds: float
    hidden_seconds: float
    longest_pause: tuple[int, int, float] | None
    total: Mapping[str, float]
    by_worker: tuple[WorkerTime, ...]
    links: tuple[LinkSpeed, ...]
    learning: tuple[WorkerCounts, ...]
    notes: tuple[str, ...]


def diagnose(run: RecordedRun, *, skip: int | None = None) -> Diagnosis:
    """Return the diagnosis of a recorded run; `skip` first steps are taken for a warm-up (None: a few)."""
    return diagnose_timings(run, timings_of(run, skip=skip))


def diagnose_timings(run: RecordedRun, timings: Timings) -> Diagnosis:
    """Return the diagnosis of a run whose times are at hand."""
    suspects, hidden = find_suspects(timings)
    links = link_speeds(run, timings)
    found = np.nan_to_num(excesses(timings.arrival))
    steps = int(timings.steps.sum())
    all_of_them = np.isin(timings.numbers, [number for each in suspects if each.matters for number in each.members])
    return Diagnosis(
        run=str(run.folder),
        kind=run.kind,
        noun=timings.noun,
        workers=run.workers,
        coupling=timings.coupling,
        by_design=timings.by_design,
        strategy=run.trace.strategy if run.trace is not None else _sync_of(run),
        split=_split_of(run.trace.recipe) if run.trace is not None else "",
        steps=steps,
        skipped_steps=timings.skipped_steps,
        run_seconds=timings.run_seconds,
        step_seconds=float(np.median(timings.seconds / timings.steps)),
        k=float(np.median(timings.k)),
        status=_status(timings, suspects, links, hidden),
        suspects=suspects,
        saved_seconds=saved_seconds(timings, all_of_them),
        hidden_seconds=hidden,
        longest_pause=_longest_pause(timings, found),
        total={name: float(seconds.mean()) for name, seconds in timings.parts.items()},
        by_worker=_by_worker(timings, found),
        links=links,
        learning=_learning(run),
        notes=timings.notes,
    )


def _sync_of(run: RecordedRun) -> str:
    return next((times.began.sync for times in run.times.get("rank", {}).values()), "")


def _split_of(recipe: Mapping[str, Any]) -> str:
    data = recipe.get("data")
    split = data.get("split") if isinstance(data, Mapping) else None
    return split if isinstance(split, str) else ""


def _status(timings: Timings, suspects: Sequence[Suspect], links: Sequence[LinkSpeed], hidden: float) -> Status:
    if any(each.matters for each in suspects):
        return "slow" if any(each.matters and each.pattern != "once" for each in suspects) else "once"
    if any(link.slow for link in links):
        return "link"
    if suspects:
        slow = any(each.late_seconds >= 5 * MATTERS * np.median(timings.seconds / timings.steps) for each in suspects)
        return "harmless" if timings.coupling != "all" and slow else "small"
    if len(timings.numbers) < 2 or len(timings.step) < FEWEST_ROUNDS:
        return "cannot tell"
    return "nobody" if hidden < WOULD_BE_SEEN * timings.run_seconds else "cannot tell"


# -- who, since when, in which phase -----------------------------------------------------------------------------------


def find_suspects(timings: Timings) -> tuple[tuple[Suspect, ...], float]:
    """Return who is later than chance explains, the costliest first, and what chance could hide in seconds."""
    workers = len(timings.numbers)
    if workers < 2 or len(timings.step) < FEWEST_ROUNDS:
        return (), timings.run_seconds
    groups: list[tuple[Bools, float, bool]] = []
    left = np.ones(workers, dtype=bool)
    for members, chance in _slow_hosts(timings):
        groups.append((members, chance, True))
        left &= ~members
    columns = np.flatnonzero(left)
    test = later_than_chance(timings.arrival[:, columns])
    for column, chance in zip(test.late, test.chances, strict=True):
        groups.append((np.arange(workers) == columns[column], chance, False))
        left[columns[column]] = False
    apart, pauses = _far_from_the_others(timings, left)
    if apart is not None and not pauses.any():
        groups.append((apart, test.least_chance, False))
    suspects = [
        _suspect(timings, members, chance, whole_host=whole, among=_others(groups, members))
        for members, chance, whole in groups
    ]
    if apart is not None and pauses.any():
        among = _others([*groups, (apart, 1.0, False)], apart)
        suspects.append(_suspect(timings, apart, 1.0, whole_host=False, among=among, pauses=pauses))
    return tuple(_in_order(timings, suspects)), test.hidden_seconds


def _in_order(timings: Timings, suspects: list[Suspect]) -> Iterator[Suspect]:
    """Yield the suspects, each time the one that saves most beside those before it."""
    gone, saved = np.zeros(len(timings.numbers), dtype=bool), 0.0
    left = [(each, np.isin(timings.numbers, each.members)) for each in suspects]
    while left:
        together = [saved_seconds(timings, gone | members) for _, members in left]
        place = max(range(len(left)), key=lambda index: (together[index], left[index][0].saved_seconds))
        each, members = left.pop(place)
        gone, before, saved = gone | members, saved, max(saved, together[place])
        yield replace(each, all_saved_seconds=saved, matters=saved - before >= MATTERS * timings.run_seconds)


def _others(groups: Sequence[tuple[Bools, float, bool]], members: Bools) -> Bools:
    """Return with whom a suspect is compared: all who are none, or all others where too few are left."""
    named = np.any([each for each, _, _ in groups], axis=0)
    return ~named if (~named).any() else ~members


def _slow_hosts(timings: Timings) -> list[tuple[Bools, float]]:
    """Return the hosts all of whose ranks are late alike, with the chance of each to be so late."""
    hosts = [host for host in dict.fromkeys(timings.hosts) if host]
    at = np.array(timings.hosts)
    if len(hosts) < 2 or all((at == host).sum() < 2 for host in hosts):
        return []
    arrival = np.stack([_median(timings.arrival[:, at == host]) for host in hosts], axis=1)
    test, found = later_than_chance(arrival), []
    for column, chance in zip(test.late, test.chances, strict=True):
        members = at == hosts[column]
        excess = np.nanmean(timings.arrival[:, members] - _median(timings.arrival[:, ~members])[:, None], axis=0)
        if members.sum() > 1 and excess.min() >= 0.5 * excess.max() > 0:
            found.append((members, chance))
    return found


def _far_from_the_others(timings: Timings, left: Bools) -> tuple[Bools | None, Bools]:
    """Return who was later than anybody else ever was, in many rounds or by far in a few, if that cost enough.

    Shuffled blocks are few in a short run, and one long stretch is one witness: they cannot tell what is plain to see.
    The second value marks the rounds of single pauses.
    """
    nothing = np.zeros(len(timings.step), dtype=bool)
    if left.sum() < 2:
        return None, nothing
    columns = np.flatnonzero(left)
    found = np.nan_to_num(excesses(timings.arrival[:, columns]))
    worst = int(np.sort(found, axis=0)[-MOST_PAUSES:].sum(axis=0).argmax())
    others = max(float(np.delete(found, worst, axis=1).max()), 1e-9)
    members = np.arange(len(left)) == columns[worst]
    if saved_seconds(timings, members) < MATTERS * timings.run_seconds:
        return None, nothing
    clearly = int((found[:, worst] > CLEARLY * others).sum())
    much = saved_seconds(timings, members) >= WOULD_BE_SEEN * timings.run_seconds
    if much and clearly >= max(CLEARLY_ROUNDS, CLEARLY_SHARE * len(found)):
        return members, nothing
    pauses = found[:, worst] > A_PAUSE * others
    return (members, pauses) if 1 <= pauses.sum() <= MOST_PAUSES else (None, nothing)


def _suspect(
    timings: Timings, members: Bools, chance: float, *, whole_host: bool, among: Bools, pauses: Bools | None = None
) -> Suspect:
    late_by = _excess(timings.arrival, members, among)
    each_step = late_by / timings.steps
    threshold = _threshold(timings, each_step, members, among)
    late = each_step > threshold if pauses is None else pauses
    if not late.any():  # a little later than the others as a rule, and never by much
        late = each_step >= np.median(each_step)
    span = _span(each_step, late)
    within = np.zeros(len(late), dtype=bool)
    within[span.first : span.last + 1] = True
    share = float(late[within].mean()) if within.any() else 0.0
    steps_late = int(timings.steps[late].sum())
    where = np.flatnonzero(late)
    pattern: Pattern = "chronic" if share >= CHRONIC_SHARE else "intermittent"
    if pauses is not None or (steps_late <= MOST_PAUSES and where[-1] - where[0] < MOST_PAUSES):
        pattern = "once"
    rows = within if pattern == "chronic" else late
    known = ~np.all([np.isnan(values[:, members]).all(axis=1) for values in timings.phases.values()], axis=0)
    phases, seconds = _phases(timings, members, among, rows & known, float(late_by[rows & known].sum()))
    saved = saved_seconds(timings, members)
    last = int(timings.step[span.last] + timings.steps[span.last] - 1)
    to_the_end = span.last >= len(late) - 1 - len(late) // 20
    numbers = tuple(int(number) for number, inside in zip(timings.numbers, members, strict=True) if inside)
    return Suspect(
        members=numbers,
        host=timings.hosts[int(np.flatnonzero(members)[0])],
        whole_host=whole_host,
        pattern=pattern,
        late_share=share if pattern == "chronic" else float(late.mean()),
        late_seconds=float(np.median(each_step[rows & late])) if (rows & late).any() else 0.0,
        since_step=_since(timings, span.first if pattern == "chronic" else int(np.argmax(late))),
        until_step=None if to_the_end and pattern != "once" else last,
        phases=phases,
        phase_seconds=seconds,
        busy=_busy(timings, members, among, rows, float(late_by[rows].sum())),
        saved_seconds=saved,
        all_saved_seconds=saved,
        charged_seconds=float(_charged(timings)[members].sum()),
        chance=chance,
        matters=saved >= MATTERS * timings.run_seconds,
    )


def _since(timings: Timings, row: int) -> int:
    """Return the step of a row; whoever is late from the first row on was so in the warm-up, as far as one can see."""
    return int(timings.step[row]) - (timings.skipped_steps if row == 0 else 0)


def _excess(values: Floats, members: Bools, among: Bools) -> Floats:
    """Return for each round how much the members have more than the median of the others, 0 where that is unknown."""
    own = np.nanmean(np.where(np.isnan(values[:, members]).all(axis=1, keepdims=True), 0.0, values[:, members]), axis=1)
    missing = np.isnan(values[:, members]).all(axis=1) | np.isnan(values[:, among]).all(axis=1)
    return np.asarray(np.where(missing, 0.0, own - np.nan_to_num(_median(values[:, among]))))


def _threshold(timings: Timings, each_step: Floats, members: Bools, among: Bools) -> float:
    """Return from how many seconds a step is late: above the others' spread, or half of what is usual for it."""
    others = excesses(timings.arrival[:, among]) / timings.steps[:, None] if among.sum() > 1 else np.zeros((1, 1))
    spread = 3 * 1.4826 * float(np.nanmedian(np.abs(others))) if not np.isnan(others).all() else 0.0
    usual = float(np.median(each_step))
    least = MATTERS / 2 * float(np.median(timings.seconds / timings.steps))
    return max(least, min(spread, usual / 2) if usual > spread / 3 else spread)


def _span(each_step: Floats, late: Bools) -> LateSpan:
    """Return from when to when somebody was late as a rule, by the levels of its excess over time."""
    cap = 2 * float(np.median(each_step[late])) if late.any() else 0.0
    found = levels(np.clip(each_step, -cap, cap))
    highest = max(span.level_seconds for span in found)
    high = [span for span in found if span.level_seconds > 0 and span.level_seconds >= highest / 2]
    if not high:
        where = np.flatnonzero(late)
        return LateSpan(
            first=int(where[0]) if len(where) else 0, last=int(where[-1]) if len(where) else 0, level_seconds=0
        )
    return replace(high[0], last=high[-1].last)


def _phases(
    timings: Timings, members: Bools, among: Bools, rows: Bools, late_by: float
) -> tuple[tuple[str, ...], dict[str, float]]:
    """Return the phases that explain the lateness, the most first, and what each takes more in a late step."""
    steps = max(1, int(timings.steps[rows].sum()))
    sums = {}
    for name, values in timings.phases.items():
        if name == "optimiser":  # what follows a round makes the next one late
            values = np.vstack([np.full((1, values.shape[1]), np.nan), values[:-1]])
        sums[name] = float(_excess(values, members, among)[rows].sum())
    seconds = {name: value / steps for name, value in sums.items()}
    measured = {name: max(0.0, value) for name, value in sums.items()}
    in_none = measured.pop("other", 0.0)
    explained = sum(measured.values())
    if explained < EXPLAINS * late_by or explained <= in_none or explained <= 0:
        return (), seconds
    ordered = sorted(measured, key=lambda name: -measured[name])
    return tuple(name for name in ordered if measured[name] >= A_PHASE * explained) or (ordered[0],), seconds


def _busy(timings: Timings, members: Bools, among: Bools, rows: Bools, late_by: float) -> Busy:
    """Return whether a late one computed more than the others, or waited (for a processor, for a disk, in a sleep)."""
    if timings.processor is None or late_by <= 0 or np.isnan(timings.processor[:, members]).all():
        return "unknown"
    more = float(_excess(timings.processor, members, among)[rows].sum())
    return "waited" if more < 0.3 * late_by else "computed more" if more > 0.7 * late_by else "unknown"


# -- whose waiting, which link, what was lost --------------------------------------------------------------------------


def _last_to_come(timings: Timings) -> np.ndarray:
    """Return the column of the one whose arrival let each round go on; -1 where nobody arrived."""
    kth = kth_arrival(timings.arrival, timings.k)
    distance = np.abs(np.where(np.isnan(timings.arrival), np.inf, timings.arrival - kth[:, None]))
    return np.where(np.isfinite(distance.min(axis=1)), distance.argmin(axis=1), -1)


def _charged(timings: Timings) -> Floats:
    charged = np.zeros(len(timings.numbers))
    last = _last_to_come(timings)
    np.add.at(charged, last[last >= 0], np.nansum(timings.wait, axis=1)[last >= 0])
    return charged


def _by_worker(timings: Timings, found: Floats) -> tuple[WorkerTime, ...]:
    last, charged = _last_to_come(timings), _charged(timings)
    workers = len(timings.numbers)
    waited = np.zeros((workers, workers if workers <= MOST_WAITED_FOR else 0))
    if waited.size:
        np.add.at(waited.T, last[last >= 0], np.nan_to_num(timings.wait)[last >= 0])
    rows = []
    for index, number in enumerate(timings.numbers):
        most = int(waited[index].argmax()) if waited.size else 0
        seconds = float(waited[index, most]) if waited.size else 0.0
        rows.append(
            WorkerTime(
                number=int(number),
                host=timings.hosts[index],
                parts={name: float(each[index]) for name, each in timings.parts.items()},
                charged_seconds=float(charged[index]),
                waited_for=int(timings.numbers[most]) if seconds > 0 else None,
                waited_for_seconds=seconds,
                late_seconds=float(np.maximum(0.0, found[:, index]).sum()),
            )
        )
    return tuple(rows)


def link_speeds(run: RecordedRun, timings: Timings) -> tuple[LinkSpeed, ...]:
    """Return the links that were probed, the slowest first; one is slow if it explains the time on the wire."""
    probes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for number, times in run.times.get("rank", {}).items():
        for link in times.links:
            probes.setdefault((number, link.to), []).append((link.bits_per_second, link.latency_seconds))
    # The quickest probe of each: other work on the machines makes messages slower, and none quicker.
    rates = {ends: max(rate for rate, _ in found) for ends, found in probes.items()}
    wire = float(timings.parts.get("wire", np.zeros(1)).mean())
    bytes_of_a_step = max(
        (sum(times.buckets[-1].bytes) for times in run.times.get("rank", {}).values() if times.buckets), default=0
    )
    speeds = []
    for ends, rate in sorted(rates.items(), key=lambda item: item[1]):
        others = [other for theirs, other in rates.items() if set(theirs) != set(ends)]
        usual = float(np.median(others)) if others else rate
        slow = SLOW_LINK * rate <= usual and wire >= MATTERS * timings.run_seconds
        if slow and bytes_of_a_step:
            around = 2 * (run.workers - 1) / run.workers * 8 * bytes_of_a_step / rate
            slow = around * int(timings.steps.sum()) >= EXPLAINS * wire
        speeds.append(
            LinkSpeed(
                source=ends[0],
                target=ends[1],
                bits_per_second=rate,
                latency_seconds=min(latency for _, latency in probes[ends]),
                others_bits_per_second=usual,
                slow=slow,
                saved_seconds=wire * (1 - rate / usual) if slow else 0.0,
            )
        )
    return tuple(speeds)


def behind_slow_links(links: Sequence[LinkSpeed]) -> int | None:
    """Return the rank whose links to all of its neighbours are slow, where the others' are not: its own cable is.

    >>> def link(source: int, target: int, slow: bool) -> LinkSpeed:
    ...     return LinkSpeed(source=source, target=target, bits_per_second=1e8, latency_seconds=0.0,
    ...                      others_bits_per_second=2e8, slow=slow, saved_seconds=0.0)
    >>> behind_slow_links([link(0, 1, True), link(1, 2, True), link(2, 3, False), link(3, 0, False)])
    1
    >>> behind_slow_links([link(0, 1, True), link(1, 2, False), link(2, 0, False)]) is None
    True
    """
    slow = [{link.source, link.target} for link in links if link.slow]
    neighbours = {frozenset(ends) for ends in slow}
    common = set.intersection(*slow) if slow else set()
    return common.pop() if len(common) == 1 and len(neighbours) > 1 else None


def _longest_pause(timings: Timings, found: Floats) -> tuple[int, int, float] | None:
    """Return who came latest in any one round, in which step, and by how much."""
    if not found.size or found.max() <= 0:
        return None
    row, column = np.unravel_index(int(found.argmax()), found.shape)
    return int(timings.numbers[column]), int(timings.step[row]), float(found[row, column])


def _learning(run: RecordedRun) -> tuple[WorkerCounts, ...]:
    """Return what became of each worker's gradients; empty where all of them are in every update."""
    if run.trace is None or run.trace.averaged:
        return ()
    if run.trace.by_worker:
        return run.trace.by_worker
    counts: dict[int, WorkerCounts] = {}
    for work in run.trace.works:
        before = counts.get(work.worker, WorkerCounts(worker=work.worker))
        counts[work.worker] = replace(before, **{work.outcome: getattr(before, work.outcome) + 1})
    return tuple(counts[worker] for worker in sorted(counts))


def _median(values: Floats) -> Floats:
    ordered = np.sort(values, axis=1)
    last = np.maximum((~np.isnan(values)).sum(axis=1) - 1, 0)
    rows = np.arange(len(values))
    return np.asarray((ordered[rows, last // 2] + ordered[rows, (last + 1) // 2]) / 2)
