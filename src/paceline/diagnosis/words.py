"""A diagnosis in sentences: the verdict first, then what supports it, and what could not be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.diagnosis.diagnosis import MATTERS, WOULD_BE_SEEN, Diagnosis, LinkSpeed, Suspect, behind_slow_links
from paceline.diagnosis.lateness import FEWEST_ROUNDS
from paceline.diagnosis.timings import PHASES
from paceline.quantities import counted, duration_text, percent_text, seconds_text
from paceline.traces.worker_counts import WorkerCounts, dropped_sentence, mostly_dropped

PART_NAMES = {
    "input": "input",
    "forward": "forward",
    "backward": "backward",
    "optimiser": "optimiser",
    "computing": "computing",
    "waiting": "waiting for others",
    "wire": "wire",
    "server": "server",
    "gone": "gone",
    "warm-up": "warm-up",
    "unexplained": "unexplained",
}
"""The parts of a worker's time -> what they are called, in the order in which they are shown."""
OWN_WORK = (*PHASES, "computing")
_PHASE_WORDS = {
    "input": "while it prepares its input",
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "optimiser": "in its optimiser",
    "computing": "in its computing",
    "transfer": "on its link",
    "other": "outside of the phases of a step (an evaluation or a checkpoint, say)",
}
MOST_NAMED = 3
A_LOT_OF_WIRE = 0.2
A_LOT_UNEXPLAINED = 0.2
A_LOT_OF_WAITING = 0.05
A_LOT_LATE = 0.2
A_FEW = 0.02


def verdict(found: Diagnosis) -> list[str]:
    """Return the verdict: who is slow, or that nobody is, or why that cannot be told; one paragraph for each thing."""
    if found.status == "slow":
        named = [each for each in found.suspects if each.matters and each.pattern != "once"]
        paragraphs = [_slow(found, named, index) for index in range(min(len(named), MOST_NAMED))]
        if len(named) > MOST_NAMED:
            more = len(named) - MOST_NAMED
            paragraphs.append(
                f"{counted(more, f'other {found.noun}')} {'is' if more == 1 else 'are'} slow as well (--json lists "
                f"all). Without all {len(named)} together the run would have taken "
                f"{_instead(found, found.saved_seconds)}."
            )
        return paragraphs
    if found.status == "once":
        pauses = [each for each in found.suspects if each.matters][:MOST_NAMED]
        said = [_slow(found, pauses, index) for index in range(len(pauses))]
        return [f"Nobody is slow as a rule. {said[0]}", *said[1:]]
    if found.status == "link":
        return [_slow_link(found, next(link for link in found.links if link.slow))]
    if found.status == "small":
        first, more = found.suspects[0], len(found.suspects) - 1
        cost = f"{duration_text(found.suspects[-1].all_saved_seconds)} of {duration_text(found.run_seconds)}"
        also = f", and {counted(more, 'other')} as well" if more else ""
        return [
            f"{_name(found, first)} {_late(found, first)}{also}, but {'together ' if more else ''}it is small: {cost}."
        ]
    if found.status == "harmless":
        return [_harmless(found, each) for each in found.suspects[:MOST_NAMED]]
    if found.status == "nobody":
        return [_nobody(found)]
    return [_cannot_tell(found)]


def evidence(found: Diagnosis) -> list[str]:
    """Return what supports the verdict and what else is to be known, one sentence or two for each thing."""
    return [*_where_time_went(found), *_on_the_wire(found), *_on_learning(found), *_left_out(found), *found.notes]


# -- the verdict -------------------------------------------------------------------------------------------------------


def _name(found: Diagnosis, each: Suspect) -> str:
    numbers = _listed(each.members)
    if each.whole_host:
        return f"Host {each.host} ({found.noun}s {numbers})"
    host = f" on {each.host}" if each.host and len({worker.host for worker in found.by_worker}) > 1 else ""
    return f"{found.noun.capitalize()} {numbers}{host}"


def _listed(numbers: Sequence[int]) -> str:
    first = ", ".join(map(str, numbers[:6]))
    return f"{first} and {len(numbers) - 6:,} more" if len(numbers) > 6 else first


def _joined(numbers: Sequence[int]) -> str:
    """Return numbers in a sentence.

    >>> _joined([2, 3, 5]), _joined(list(range(9)))
    ('2, 3 and 5', '0, 1, 2, 3, 4, 5 and 3 more')
    """
    if len(numbers) > 6 or len(numbers) < 2:
        return _listed(numbers)
    return f"{_listed(numbers[:-1])} and {numbers[-1]}"


def _steps(found: Diagnosis) -> str:
    return "steps" if found.kind == "watched" else "averages" if _averaged(found) else "rounds"


def _averaged(found: Diagnosis) -> bool:
    return found.noun == "rank" and found.kind in ("averaging", "simulated")


def _late(found: Diagnosis, each: Suspect) -> str:
    by, unit = duration_text(each.late_seconds), _steps(found)
    if each.pattern == "once":
        times = round(each.late_share * found.steps)
        if times > 1:
            return f"was late {times} times, by {by}{_where(each)}, first in {unit[:-1]} {each.since_step:,}"
        return f"was late in {unit[:-1]} {each.since_step:,}, by {by}{_where(each)}"
    share = percent_text(each.late_share)
    if each.pattern == "intermittent":
        first = f"first in {unit[:-1]} {each.since_step:,}"
        rows = round(each.late_share * found.synchronisations)
        if rows < A_FEW * found.synchronisations and found.steps == found.synchronisations:
            often = f"in {counted(rows, unit[:-1])} of {found.steps:,}"
        else:
            often = f"in {share} of the {unit}"
        return f"is late now and then, {often}, by {by}{_where(each)}, {first}"
    if each.until_step is not None:
        stretch = f"{unit} {each.since_step:,} to {each.until_step:,}"
        return f"was late in {share} of the {stretch}, by {by}{_where(each)}"
    return f"is late in {share} of the {unit}, by {by}{_where(each)}, since {unit[:-1]} {each.since_step:,}"


def _where(each: Suspect) -> str:
    if not each.phases:
        return ""
    words = [_PHASE_WORDS[name] for name in each.phases]
    passes = [name for name in each.phases if name in ("forward", "backward")]
    if len(passes) == 2 and len(words) == 2:
        return ", in its forward and backward pass"
    return ", " + " and ".join(words)


def _slow(found: Diagnosis, named: Sequence[Suspect], place: int) -> str:
    """Return who is late and what that costs; several that hide behind each other cost it together."""
    each = named[place]
    sentence = f"{_name(found, each)} {_late(found, each)}."
    group = {*each.members, *each.together}
    if not any(set(other.members) <= group for other in named[place + 1 :]):
        before = any(not set(other.members) <= group for other in named[:place])
        without = "them" if each.whole_host else "it"
        if each.together:
            without = f"{found.noun}s {_joined(sorted(group))} together"
        sentence += f" Without {without}{' as well' if before else ''} the run would have taken "
        sentence += f"{_instead(found, each.all_saved_seconds)}."
    if not each.phases:
        sentence += " In which phase cannot be told: what was measured does not explain it."
    if each.busy == "waited" and each.phases != ("transfer",):
        sentence += " It waited for a processor, for I/O or in a sleep; it did not compute more."
    if each.busy == "computed more":
        sentence += " Its processor did as much more work."
    return sentence


def _instead(found: Diagnosis, saved: float) -> str:
    return f"{seconds_text(found.run_seconds - saved)} s instead of {seconds_text(found.run_seconds)} s"


def _harmless(found: Diagnosis, each: Suspect) -> str:
    why = (
        f"a round closes with the first {found.k:g} of {found.workers}"
        if found.coupling == "first"
        else found.by_design or "nobody waits for it"
    )
    if found.coupling == "first":
        return f"{_name(found, each)} {_late(found, each)}, but it costs no time: {why}."
    took = f"takes {duration_text(each.late_seconds)} longer than the others in {percent_text(each.late_share)}"
    limit = " It limits how often an average is made, not how fast the others step." if _averaged(found) else ""
    return (
        f"{_name(found, each)} {took} of the {_steps(found)}{_where(each)}. It costs the others no time: {why}.{limit}"
    )


def _slow_link(found: Diagnosis, link: LinkSpeed) -> str:
    share = percent_text(found.total.get("wire", 0.0) / found.run_seconds)
    behind = behind_slow_links(found.links)
    hosts = {worker.number: worker.host for worker in found.by_worker}
    host = f" (host {hosts[behind]})" if behind is not None and len(set(hosts.values())) > 1 else ""
    which = (
        f"the link from {found.noun} {link.source} to {found.noun} {link.target} is slow"
        if behind is None
        else f"{found.noun} {behind}{host} has slow links to all of its neighbours"
    )
    return (
        f"Nobody is late, but the wire takes {share} of the time, and {which}: {_rate(link.bits_per_second)}, where "
        f"the others have {_rate(link.others_bits_per_second)}. As fast as the others, the run would take about "
        f"{_instead(found, link.saved_seconds)} (modelled: the wire goes at the pace of its slowest link)."
    )


def _rate(bits_per_second: float) -> str:
    """Return a rate with its unit.

    >>> _rate(1e9), _rate(94.7e6)
    ('1 Gbit/s', '94.7 Mbit/s')
    """
    unit, size = ("Gbit/s", 1e9) if bits_per_second >= 1e9 else ("Mbit/s", 1e6)
    return f"{bits_per_second / size:.3g} {unit}"


def _nobody(found: Diagnosis) -> str:
    could = max(found.hidden_seconds, 0.0)
    pause = ""
    if found.longest_pause is not None and found.longest_pause[2] >= MATTERS * found.run_seconds:
        number, step, seconds = found.longest_pause
        pause = (
            f" The longest single delay was that of {found.noun} {number} in {_steps(found)[:-1]} {step:,}: "
            f"{duration_text(seconds)}."
        )
    return (
        f"Nobody is slow: the {found.noun}s are late in turns, as chance has it. One that had cost "
        f"{duration_text(could)} or more ({percent_text(could / found.run_seconds, 1)}) would have been seen.{pause}"
    )


def _cannot_tell(found: Diagnosis) -> str:
    wire = found.total.get("wire", 0.0)
    if found.missing and wire >= WOULD_BE_SEEN * found.run_seconds:
        missing = f"{found.noun}{'s' if len(found.missing) > 1 else ''} {_joined(found.missing)}"
        return (
            f"Cannot tell who is slow: the times of {missing} are not here, or not all of them. "
            f"{percent_text(wire / found.run_seconds)} of the time looks like the wire, and may as well be waiting for "
            f"{'them' if len(found.missing) > 1 else 'it'}."
        )
    if len(found.by_worker) < 2:
        return f"Cannot tell who is slow: there are times of one {found.noun} only, and nobody to compare it with."
    if found.synchronisations < FEWEST_ROUNDS:
        unit = _steps(found)[:-1] if found.steps == found.synchronisations else "synchronisation"
        verb = "is" if found.synchronisations == 1 else "are"
        return (
            f"Cannot tell who is slow: {counted(found.synchronisations, unit)} after the warm-up {verb} too few "
            f"(at least {FEWEST_ROUNDS})."
        )
    latest = max(found.by_worker, key=lambda worker: worker.late_seconds)
    waiting = found.total.get("waiting", 0.0)
    much = waiting >= A_LOT_OF_WAITING * found.run_seconds
    explained = (
        f"the most; all of them waited {percent_text(waiting / found.run_seconds)} of the time for each other"
        if much
        else "the most, as chance explains"
    )
    return (
        f"Cannot tell who is slow: by chance alone one {found.noun} could come late by "
        f"{duration_text(found.hidden_seconds)} more than the others in {counted(found.steps, _steps(found)[:-1])}. "
        f"{found.noun.capitalize()} {latest.number} came late {explained}. A longer record tells more."
    )


# -- what else is to be known ------------------------------------------------------------------------------------------


def _where_time_went(found: Diagnosis) -> Iterator[str]:
    own = sum(found.total.get(name, 0.0) for name in OWN_WORK)
    rest = {PART_NAMES[name]: found.total[name] for name in PART_NAMES if name in found.total and name not in OWN_WORK}
    shares = [("computing", own), *rest.items()]
    words = ", ".join(
        f"{percent_text(seconds / found.run_seconds)} {name}"
        for name, seconds in shares
        if found.run_seconds and seconds >= 0.005 * found.run_seconds
    )
    if words:
        yield f"Of {duration_text(found.run_seconds)} of each {found.noun}: {words}."
    else:
        yield f"The record holds no time: it is {duration_text(found.run_seconds)} long."
    waiting = found.total.get("waiting", 0.0)
    if found.status == "nobody" and waiting >= A_LOT_OF_WAITING * found.run_seconds > 0:
        yield f"Waiting takes {duration_text(waiting)} all the same: in turn, one {found.noun} or another comes last."
    if found.by_design and found.status != "harmless":
        yield f"By design {found.by_design}."
    if found.run_seconds and found.total.get("unexplained", 0.0) > A_LOT_UNEXPLAINED * found.run_seconds:
        yield "Much of the time is in no phase that was measured: what happens there cannot be told."


def _on_the_wire(found: Diagnosis) -> Iterator[str]:
    share = found.total.get("wire", 0.0) / found.run_seconds if found.run_seconds else 0.0
    if share >= A_LOT_OF_WIRE and found.kind == "watched" and not any(link.slow for link in found.links):
        if found.links:
            slowest = found.links[0]
            yield (
                f"The wire takes {percent_text(share)} of the time, and no link stands out: the slowest, from rank "
                f"{slowest.source} to {slowest.target}, carries {_rate(slowest.bits_per_second)}."
            )
        else:
            yield f"The wire takes {percent_text(share)} of the time; no link was probed, so which one cannot be told."
    if found.status == "slow":
        for link in found.links:
            if link.slow:
                yield (
                    f"The link from rank {link.source} to rank {link.target} is slow as well: "
                    f"{_rate(link.bits_per_second)}, where the others have {_rate(link.others_bits_per_second)}."
                )


def _on_learning(found: Diagnosis) -> Iterator[str]:
    if found.kind == "watched":
        whole = found.coupling == "all" and not found.missing and not found.total.get("gone")
        if whole and found.strategy in ("ddp", "fsdp") and any(each.matters for each in found.suspects):
            yield "No gradient was lost: all ranks are in every step, so it costs time and no learning."
        return
    dropped = mostly_dropped(found.learning)
    for counts in dropped[:MOST_NAMED]:
        sentence = dropped_sentence(found.strategy, counts)
        yield sentence[0].upper() + sentence[1:]
    for counts in found.learning:
        if counts not in dropped and counts.gradients and counts.used < (1 - A_LOT_LATE) * counts.gradients:
            yield _late_gradients(found, counts)
    lost = [counts for counts in found.learning if counts.dropped > A_LOT_LATE * max(1, counts.gradients)]
    if lost and found.split not in ("", "iid"):
        yield (
            f"The data is split {found.split}: labels that are mostly on {found.noun} "
            f"{_listed([counts.worker for counts in lost])} are learned less."
        )


def _late_gradients(found: Diagnosis, counts: WorkerCounts) -> str:
    samples = counts.samples_used + counts.samples_late + counts.samples_dropped
    never = (
        f" ({counts.samples_dropped:,} of its {samples:,} samples are in no update)" if counts.samples_dropped else ""
    )
    return (
        f"Of the {counts.gradients:,} gradients of {found.noun} {counts.worker}, {counts.used:,} came in time, "
        f"{counts.late:,} were late and {counts.dropped:,} dropped{never}."
    )


def _left_out(found: Diagnosis) -> Iterator[str]:
    if found.skipped_steps:
        unit = _steps(found)
        first = (
            f"The first {found.skipped_steps:,} {unit} are" if found.skipped_steps > 1 else f"The first {unit[:-1]} is"
        )
        yield f"{first} left out as warm-up (--skip)."
