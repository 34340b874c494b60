"""The steps of several ranks on one time axis, although nobody compares clocks.

Each rank times its steps on a clock of its own, which began when the rank did. But an all-reduce ends for all ranks at
nearly the same moment, so the end of the same all-reduce is a mark on every clock:

    rank 0   ----|input|forward|backward|~~~~~~E|opt|----      E the last bucket's mean is there
    rank 1   --|input|forward  |backward    |~~E|opt|-----
               <-> offset of rank 1: the median over all steps of (E on rank 0's clock - E on its own)

The median leaves out the steps in which one of them was late to notice. Where no buckets were recorded, the moment at
which the optimiser began stands for the end of the all-reduce. Ranks that never wait for each other (`sync` is "none")
have nothing in common, and keep their clocks.

A launch that was restarted begins its clock again; each stretch between two beginnings has an offset of its own, and on
the clock of the first rank one stretch follows the other.

Lines that are sums are of the same steps on all ranks. Where they are not (a rank lacks a line, or began again within
a sum), `steps_in_common` adds up what overlaps:

    rank 0   |  4  5  |  6  7  |            ->   steps 4 to 5, and 6 to 7, of both
    rank 1   |4 |5 |  6  7  |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from paceline.traces.step_times import StepTimes, WorkerTimes, summed


def steps_in_common(ranks: Mapping[int, WorkerTimes]) -> list[dict[int, StepTimes]]:
    """Return the steps in order, by rank; each step is in one place only, summed where a rank's lines are sums.

    In a place are the ranks that have all steps of it; one that lacks some of them is not compared there.

    >>> from paceline.traces.step_times import FORMAT, TimesBegan
    >>> def rank(number, lines):
    ...     began = TimesBegan(format=FORMAT, paceline="0.2.0", noun="rank", number=number, workers=2, host="a",
    ...                        launch="1", sync="ddp")
    ...     return WorkerTimes(began=began, steps=tuple(
    ...         StepTimes(step=step, steps=steps, started_seconds=0.0, seconds=1.0 * steps) for step, steps in lines))
    >>> places = steps_in_common({0: rank(0, [(4, 2), (6, 2)]), 1: rank(1, [(4, 1), (5, 1), (6, 2), (8, 2)])})
    >>> [{rank: (each.step, each.steps, each.seconds) for rank, each in place.items()} for place in places]
    [{0: (4, 2, 2.0), 1: (4, 2, 2.0)}, {0: (6, 2, 2.0), 1: (6, 2, 2.0)}, {1: (8, 2, 2.0)}]
    """
    lines = sorted(
        ((each, rank) for rank, times in ranks.items() for each in times.steps),
        key=lambda line: (line[0].step, -line[0].steps, line[1]),
    )
    places: list[dict[int, list[StepTimes]]] = []
    behind = 0  # the step after the last one of this place
    for each, rank in lines:
        if not places or each.step >= behind:
            places.append({})
            behind = each.step
        before = places[-1].setdefault(rank, [])
        if not before or before[-1].step + before[-1].steps <= each.step:  # else it is in a sum already
            before.append(each)
        behind = max(behind, each.step + each.steps)
    found = []
    for place in places:
        by_rank = {rank: steps[0] if len(steps) == 1 else summed(steps) for rank, steps in place.items()}
        most = max(each.steps for each in by_rank.values())
        found.append({rank: each for rank, each in by_rank.items() if each.steps == most})
    return found


def aligned_starts(ranks: Mapping[int, WorkerTimes]) -> dict[int, dict[int, float]]:
    """Return when each rank's steps began, by rank and step, on the clock of the lowest rank.

    >>> from paceline.traces.step_times import FORMAT, TimesBegan
    >>> def rank(number, started):
    ...     began = TimesBegan(format=FORMAT, paceline="0.2.0", noun="rank", number=number, workers=2, host="a",
    ...                        launch="1", sync="ddp")
    ...     steps = [StepTimes(step=step, started_seconds=started + step, seconds=1.0, buckets=((0.5, 0.75),))
    ...              for step in range(3)]
    ...     return WorkerTimes(began=began, steps=tuple(steps))
    >>> aligned_starts({0: rank(0, started=0.0), 1: rank(1, started=7.0)})[1]
    {0: 0.0, 1: 1.0, 2: 2.0}
    """
    if not ranks:
        return {}
    first = min(ranks)
    reference = _in_a_row(_stretches(ranks[first]))
    by_step = {each.step: each for each in ranks[first].steps}
    found = {first: reference}
    for rank, times in ranks.items():
        if rank == first:
            continue
        starts: dict[int, float] = {}
        behind = 0.0
        for stretch in _stretches(times):
            common = [
                reference[each.step] + _mean_there(by_step[each.step]) - each.started_seconds - _mean_there(each)
                for each in stretch
                if each.step in by_step and by_step[each.step].steps == each.steps
            ]
            alone = times.began.sync == "none" or not common
            offset = max(0.0, behind - stretch[0].started_seconds) if alone else median(common)
            starts.update({each.step: each.started_seconds + offset for each in stretch})
            behind = stretch[-1].started_seconds + offset + stretch[-1].seconds
        found[rank] = starts
    return found


def _stretches(times: WorkerTimes) -> list[list[StepTimes]]:
    """Return the steps, apart wherever the clock began again, or went back."""
    stretches: list[list[StepTimes]] = []
    restarts = set(times.restarts)
    for each in times.steps:
        went_back = bool(stretches) and each.started_seconds < stretches[-1][-1].started_seconds
        if not stretches or went_back or each.step in restarts:
            stretches.append([])
        stretches[-1].append(each)
    return stretches


def _in_a_row(stretches: Sequence[Sequence[StepTimes]]) -> dict[int, float]:
    starts: dict[int, float] = {}
    behind = 0.0
    for stretch in stretches:
        offset = max(0.0, behind - stretch[0].started_seconds)
        starts.update({each.step: each.started_seconds + offset for each in stretch})
        behind = stretch[-1].started_seconds + offset + stretch[-1].seconds
    return starts


def _mean_there(times: StepTimes) -> float:
    """Return when the last mean of a step was there, in seconds since the step began."""
    if times.buckets and times.steps == 1:
        return max(done for _, done in times.buckets)
    return times.seconds - min(times.optimiser_seconds, times.seconds)
