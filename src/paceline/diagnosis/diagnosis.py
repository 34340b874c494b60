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
    BINS,
    FEWEST_ROUNDS,
    LateSpan,
    excesses,
    kth_arrival,
    later_than_chance,
    levels,
    saved_seconds,
    sharp_edge,
    together_later,
)
from paceline.diagnosis.timings import Bools, Coupling, Floats, Timings, medians, timings_of
from paceline.traces.recorded_run import RecordedRun, RunKind
from paceline.traces.worker_counts import WorkerCounts

Status: TypeAlias = Literal["slow", "once", "link", "small", "harmless", "nobody", "cannot tell"]
Pattern: TypeAlias = Literal["chronic", "intermittent", "once"]
Rule: TypeAlias = Literal["shuffled", "together", "far", "stretch", "pauses"]
Busy: TypeAlias = Literal["computed more", "waited", "unknown"]

MATTERS = 0.02  # of the run's time; below it nobody would change anything for it
WOULD_BE_SEEN = 0.05
CHRONIC_SHARE = 0.7  # of the steps of a stretch
A_PAUSE = 10.0  # times as long as the longest delay that is none, of anybody
MOST_PAUSES = 3  # from there on it is late now and then
CLEARLY = 2.0  # times as late as anybody else ever was
CLEARLY_ROUNDS, CLEARLY_SHARE = 5, 0.05  # in so many rounds, and in such a share of them
STRETCH_ROUNDS, STRETCH_SHARE = 24, 0.1  # how long a stretch is at least
HIGH_QUANTILE = 0.95  # of the others' delays in a stretch
MOST_STRETCHES = 64  # ranks, the latest ones, whose stretches are looked at
ALIKE = 0.5  # of the lateness of another one
MUCH_MORE = 3.0  # times what those before it save
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
    measured phase takes longer than the others' in a late step. `rule` is how it was found: by the shuffled order of
    all, as one of several that are later together, far later than anybody else, in a stretch of the run, or by single
    pauses. `chance` is how likely a balanced run looks like it, None where the rule computes none.

    `saved_seconds` is what the run had taken less without this one alone. Of two that are equally slow that is next to
    nothing, for each hides behind the other. `all_saved_seconds` is without this one and `together`, those that are to
    be taken out with it and all that are listed before: they matter by what that saves.
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
    chance: float | None
    rule: Rule
    together: tuple[int, ...]
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

    `hidden_seconds` is what one worker could cost without being told from chance. `synchronisations` are the rounds
    that were compared: `steps` of them, or fewer where ranks meet every few steps. `missing` are those whose times are
    not here, or not all of them.
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
    synchronisations: int
    skipped_steps: int
    missing: tuple[int, ...]
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
        synchronisations=len(timings.step),
        missing=timings.missing,
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
        notes=(*timings.notes, *(f"{words[:1].upper()}{words[1:]}." for words in run.missing)),
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
    wire = float(timings.parts.get("wire", np.zeros(1)).mean())
    if timings.missing and wire >= WOULD_BE_SEEN * timings.run_seconds:
        return "cannot tell"  # it may be one of those whom all wait for
    return "nobody" if hidden < WOULD_BE_SEEN * timings.run_seconds else "cannot tell"


# -- who, since when, in which phase -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """Who was found, by which rule; `pauses` are the rounds of single pauses, where that is the rule."""

    members: Bools
    rule: Rule
    chance: float | None = None
    whole_host: bool = False
    pauses: Bools | None = None


def find_suspects(timings: Timings) -> tuple[tuple[Suspect, ...], float]:
    """Return who is later than chance explains, the costliest first, and what chance could hide in seconds."""
    workers = len(timings.numbers)
    if workers < 2 or len(timings.step) < FEWEST_ROUNDS:
        return (), timings.run_seconds
    groups: list[_Group] = []
    left = np.ones(workers, dtype=bool)

    def add(group: _Group) -> None:
        groups.append(group)
        left[group.members] = False

    for members, chance in _slow_hosts(timings):
        add(_Group(members=members, rule="shuffled", chance=chance, whole_host=True))
    columns = np.flatnonzero(left)
    alike, chance = together_later(timings.arrival[:, columns])
    for column in alike:
        add(_Group(members=np.arange(workers) == columns[column], rule="together", chance=chance))
    columns = np.flatnonzero(left)
    test = later_than_chance(timings.arrival[:, columns])
    for column, chance in zip(test.late, test.chances, strict=True):
        if (~left).sum() < max(1, workers // 2):
            add(_Group(members=np.arange(workers) == columns[column], rule="shuffled", chance=chance))
    for find in (_far_from_the_others, _late_in_a_stretch, _pauses):
        for group in find(timings, left):
            add(group)
    suspects = [_suspect(timings, group, among=_others(groups, group.members)) for group in groups]
    return tuple(_in_order(timings, suspects)), test.hidden_seconds


def _in_order(timings: Timings, suspects: list[Suspect]) -> list[Suspect]:
    """Return the suspects, each time the one that saves most beside those before it.

    Where several have to be taken out until anything is saved, they matter together.
    """
    gone, saved, before = np.zeros(len(timings.numbers), dtype=bool), 0.0, 0.0
    left = [(each, np.isin(timings.numbers, each.members)) for each in suspects]
    lateness = np.maximum(0.0, np.nan_to_num(excesses(timings.arrival))).sum(axis=0)
    groups: list[tuple[list[Suspect], float]] = []  # with what each saves beside those before it
    waiting: list[Suspect] = []
    while left:
        joint = [saved_seconds(timings, gone | members) for _, members in left]
        place = max(range(len(left)), key=lambda index: (joint[index], lateness[left[index][1]].mean()))
        each, members = left.pop(place)
        gone, saved = gone | members, max(saved, joint[place])
        waiting.append(replace(each, all_saved_seconds=saved, matters=False))
        if saved - before >= MATTERS * timings.run_seconds:
            gain, group = saved - before, waiting
            while groups and gain > MUCH_MORE * groups[-1][1]:  # then the last group was only a part of this one
                first, least = groups.pop()
                group, gain = [*first, *group], gain + least
            groups.append((group, gain))
            waiting, before = [], saved
    ordered = [each for group, _ in groups for each in _all_together(timings, group, lateness)]
    if timings.coupling == "first" and any(each.matters for each in ordered):
        # The K-th arrival closes a round: without one of several slow ones it may be in time, and all are slow alike.
        least = min(_lateness(timings, each, lateness) for each in ordered if each.matters)
        alike = [_lateness(timings, each, lateness) >= ALIKE * least for each in waiting]
        ordered += [replace(each, matters=True) for each, slow in zip(waiting, alike, strict=True) if slow]
        waiting = [each for each, slow in zip(waiting, alike, strict=True) if not slow]
    return sorted([*ordered, *waiting], key=lambda each: not each.matters)


def _lateness(timings: Timings, each: Suspect, lateness: Floats) -> float:
    return float(lateness[np.isin(timings.numbers, each.members)].mean())


def _all_together(timings: Timings, group: list[Suspect], lateness: Floats) -> list[Suspect]:
    """Return those of a group that matter: the last one, which made the difference, and who is about as late."""
    own, saved = [_lateness(timings, each, lateness) for each in group], group[-1].all_saved_seconds
    slow = [index == len(group) - 1 or own[index] >= ALIKE * max(own) for index in range(len(group))]
    numbers = tuple(number for each, counts in zip(group, slow, strict=True) if counts for number in each.members)
    return [
        replace(
            each,
            matters=counts,
            all_saved_seconds=saved if counts else each.all_saved_seconds,
            together=tuple(number for number in numbers if number not in each.members) if counts else (),
        )
        for each, counts in zip(group, slow, strict=True)
    ]


def _others(groups: Sequence[_Group], members: Bools) -> Bools:
    """Return with whom a suspect is compared: all who are none, or all others where too few are left."""
    named = np.any([group.members for group in groups], axis=0)
    return ~named if (~named).any() else ~members


def _slow_hosts(timings: Timings) -> list[tuple[Bools, float]]:
    """Return the hosts all of whose ranks are late alike, with the chance of each to be so late."""
    hosts = [host for host in dict.fromkeys(timings.hosts) if host]
    at = np.array(timings.hosts)
    if len(hosts) < 2 or all((at == host).sum() < 2 for host in hosts):
        return []
    arrival = np.stack([medians(timings.arrival[:, at == host]) for host in hosts], axis=1)
    test, found = later_than_chance(arrival), []
    for column, chance in zip(test.late, test.chances, strict=True):
        members = at == hosts[column]
        excess = np.nanmean(timings.arrival[:, members] - medians(timings.arrival[:, ~members])[:, None], axis=0)
        if members.sum() > 1 and excess.min() >= 0.5 * excess.max() > 0:
            found.append((members, chance))
    return found


def _adds(timings: Timings, members: Bools, left: Bools) -> float:
    """Return what it saves to take these out as well, where those who are not left are out already."""
    return saved_seconds(timings, ~left | members) - saved_seconds(timings, ~left)


def _far_from_the_others(timings: Timings, left: Bools) -> Iterator[_Group]:
    """Yield who was later than anybody else ever was, in many rounds, if that cost enough.

    Shuffled blocks are few in a short run, and one long stretch is one witness: they cannot tell what is plain to see.
    """
    if left.sum() < 2:
        return
    columns = np.flatnonzero(left)
    found = np.nan_to_num(excesses(timings.arrival[:, columns]))
    worst = int(np.sort(found, axis=0)[-MOST_PAUSES:].sum(axis=0).argmax())
    others = max(float(np.delete(found, worst, axis=1).max()), 1e-9)
    clearly = int((found[:, worst] > CLEARLY * others).sum())
    members = np.arange(len(left)) == columns[worst]
    if clearly < max(CLEARLY_ROUNDS, CLEARLY_SHARE * len(found)):
        return
    if _adds(timings, members, left) >= WOULD_BE_SEEN * timings.run_seconds:
        yield _Group(members=members, rule="far")


def _late_in_a_stretch(timings: Timings, left: Bools) -> Iterator[_Group]:
    """Yield who was far later than nearly all of the others' delays, in most rounds of a long stretch of the run.

    Two that are slow one after the other hide each other from a look at the whole run, and not from one at a stretch.
    """
    least = max(STRETCH_ROUNDS, int(STRETCH_SHARE * len(timings.step)))
    columns = np.flatnonzero(left)
    if len(columns) < 2 or len(timings.step) < least:
        return
    found = np.nan_to_num(excesses(timings.arrival[:, columns])) / timings.steps[:, None]
    often = (found > 0).mean(axis=0) * np.maximum(found, 0.0).sum(axis=0)
    slow = []
    for column in np.argsort(-often, kind="stable")[:MOST_STRETCHES]:
        for span in levels(found[:, column]):
            rows = slice(span.first, span.last + 1)
            others = float(np.quantile(np.delete(found[rows], column, axis=1), HIGH_QUANTILE))
            clearly = float((found[rows, column] > CLEARLY * max(others, 1e-9)).mean())
            if span.last + 1 - span.first >= least and clearly >= CHRONIC_SHARE:
                slow.append(int(columns[column]))
                break
    slow = slow[: len(left) - 1 - int((~left).sum())]  # somebody has to be left to compare with
    named = np.isin(np.arange(len(left)), slow)
    if slow and _adds(timings, named, left) >= WOULD_BE_SEEN * timings.run_seconds:
        for column in slow:
            yield _Group(members=np.arange(len(left)) == column, rule="stretch")


def _pauses(timings: Timings, left: Bools) -> Iterator[_Group]:
    """Yield whose single delays are by far longer than all that are none, of anybody, if they cost enough.

    The more ranks have such a delay, the larger the gap must be: heavy tails have gaps as well.
    """
    if left.sum() < 2:
        return
    columns = np.flatnonzero(left)
    found = np.nan_to_num(excesses(timings.arrival[:, columns]))
    most = max(MOST_PAUSES, int(CLEARLY_SHARE * len(found)))
    order = np.argsort(-found, axis=None, kind="stable")[: most + 1]
    rows, whose = np.unravel_index(order, found.shape)
    seconds = np.maximum(found[rows, whose], 1e-9)
    for count in range(len(order) - 1, 0, -1):
        ranks = set(whose[:count].tolist())
        if seconds[count - 1] <= A_PAUSE * len(ranks) ** 2 * seconds[count]:
            continue
        for column in sorted(ranks):
            members = np.arange(len(left)) == columns[column]
            pauses = np.zeros(len(found), dtype=bool)
            pauses[rows[:count][whose[:count] == column]] = True
            if _adds(timings, members, left) >= MATTERS * timings.run_seconds:
                yield _Group(members=members, rule="pauses", pauses=pauses)
        return


def _suspect(timings: Timings, group: _Group, *, among: Bools) -> Suspect:
    members, pauses = group.members, group.pauses
    late_by = _excess(timings.arrival, members, among)
    each_step = late_by / timings.steps
    threshold = _threshold(timings, each_step, members, among)
    late = each_step > threshold if pauses is None else pauses
    if not late.any():  # a little later than the others as a rule, and never by much
        late = each_step >= np.median(each_step)
    span = _span(each_step, late, threshold)
    within = np.zeros(len(late), dtype=bool)
    within[span.first : span.last + 1] = True
    share = float(late[within].mean()) if within.any() else 0.0
    steps_late = int(timings.steps[late].sum())
    where = np.flatnonzero(late)
    pattern: Pattern = "chronic" if share >= CHRONIC_SHARE else "intermittent"
    if pauses is not None:
        pattern = "once" if pauses.sum() <= MOST_PAUSES else "intermittent"
    elif steps_late <= MOST_PAUSES and where[-1] - where[0] < MOST_PAUSES:
        pattern = "once"
    rows = within if pattern == "chronic" else late
    known = ~np.all([np.isnan(values[:, members]).all(axis=1) for values in timings.phases.values()], axis=0)
    phases, seconds = _phases(timings, members, among, rows & known, float(late_by[rows & known].sum()))
    saved = saved_seconds(timings, members)
    last_row = int(where[-1]) if pattern == "once" else span.last
    last = int(timings.step[last_row] + timings.steps[last_row] - 1)
    to_the_end = span.last >= len(late) - 1 - len(late) // 20
    numbers = tuple(int(number) for number, inside in zip(timings.numbers, members, strict=True) if inside)
    return Suspect(
        members=numbers,
        host=timings.hosts[int(np.flatnonzero(members)[0])],
        whole_host=group.whole_host,
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
        chance=group.chance,
        rule=group.rule,
        together=(),
        matters=saved >= MATTERS * timings.run_seconds,
    )


def _since(timings: Timings, row: int) -> int:
    """Return the step of a row; whoever is late from the first row on was so in the warm-up, as far as one can see."""
    return int(timings.step[row]) - (timings.skipped_steps if row == 0 else 0)


def _excess(values: Floats, members: Bools, among: Bools) -> Floats:
    """Return for each round how much the members have more than the median of the others, 0 where that is unknown."""
    own = np.nanmean(np.where(np.isnan(values[:, members]).all(axis=1, keepdims=True), 0.0, values[:, members]), axis=1)
    missing = np.isnan(values[:, members]).all(axis=1) | np.isnan(values[:, among]).all(axis=1)
    return np.asarray(np.where(missing, 0.0, own - np.nan_to_num(medians(values[:, among]))))


def _threshold(timings: Timings, each_step: Floats, members: Bools, among: Bools) -> float:
    """Return from how many seconds a step is late: above the others' spread, or half of what is usual for it."""
    others = excesses(timings.arrival[:, among]) / timings.steps[:, None] if among.sum() > 1 else np.zeros((1, 1))
    spread = 3 * 1.4826 * float(np.nanmedian(np.abs(others))) if not np.isnan(others).all() else 0.0
    usual = float(np.median(each_step))
    least = MATTERS / 2 * float(np.median(timings.seconds / timings.steps))
    return max(least, min(spread, usual / 2) if usual > spread / 3 else spread)


def _span(each_step: Floats, late: Bools, threshold: float) -> LateSpan:
    """Return from when to when somebody was late as a rule, by the levels of its excess over time."""
    cap = 2 * float(np.median(each_step[late])) if late.any() else 0.0
    series = np.clip(each_step, -cap, cap)
    found = levels(series)
    highest = max(span.level_seconds for span in found)
    high = [span for span in found if span.level_seconds > min(threshold, highest / 2) and span.level_seconds > 0]
    if not high:
        where = np.flatnonzero(late)
        return LateSpan(
            first=int(where[0]) if len(where) else 0, last=int(where[-1]) if len(where) else 0, level_seconds=0
        )
    first = _edge(series, [(span.first, span.level_seconds) for span in found], high[0].first)
    mirrored = [(len(series) - 1 - span.last, span.level_seconds) for span in found[::-1]]
    last = len(series) - 1 - _edge(series[::-1], mirrored, len(series) - 1 - high[-1].last)
    return LateSpan(first=min(first, last), last=max(first, last), level_seconds=high[0].level_seconds)


def _edge(series: Floats, found: Sequence[tuple[int, float]], at: int) -> int:
    """Return the very row at which a stretch begins: the levels are those of bins, a few rows each."""
    place = [first for first, _ in found].index(at)
    before = found[place - 1][1] if place else 0.0
    width = 3 * -(-len(series) // BINS)
    return sharp_edge(series, at, width=width, before=before, after=found[place][1])


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
    if in_none > explained and in_none >= EXPLAINS * late_by:
        return ("other",), seconds
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
    if timings.coupling == "none":
        return charged
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
