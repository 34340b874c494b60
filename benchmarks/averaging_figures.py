"""The figures of the benchmark `averaging`, made of the lines that rank 0 wrote."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, TypeAlias

from benchmarks.averaging_plan import LOSS_LANES, SLOW_LANES, SPEED_LANES, WARM_UP_STEPS, Plan

Line: TypeAlias = dict[str, Any]


def speed_rows(lines: Sequence[Line], plan: Plan) -> list[Line]:
    """Samples per second of all ranks, at every ratio: of the best round, the least disturbed one, and of all."""
    rows = []
    for lane in SPEED_LANES:
        found: Line = {"lane": lane}
        for ratio in plan.ratios:
            rounds = [samples_per_second(line, plan) for line in _of(lines, "speed", lane) if line["ratio"] == ratio]
            found[f"{ratio:g}"] = {"best": max(rounds), "rounds": rounds}
        rows.append(found)
    return rows


def samples_per_second(line: Line, plan: Plan) -> float:
    """Of all ranks together."""
    return plan.batch * sum(rates(line))


def processor_rows(lines: Sequence[Line], plan: Plan) -> list[Line]:
    """The processor's seconds of a rank's step, where there is most time for averages: of the round with the least."""
    rows = []
    for lane in SPEED_LANES:
        turns = [line for line in _of(lines, "speed", lane) if line["ratio"] == plan.ratios[0]]
        rounds = [sum(turn["processor"]) / sum(turn["steps"]) for turn in turns]
        averages = fmean(turn["averages"] / (WARM_UP_STEPS + turn["steps"][0]) for turn in turns)
        rows.append({"lane": lane, "seconds": min(rounds), "rounds": rounds, "averages": averages})
    return rows


def slow_rows(lines: Sequence[Line], plan: Plan) -> list[Line]:
    """Where the last rank is slow: speed, the share of waiting, and steps per window, of the fast ranks and of it."""
    return [_slow_row(lane, _of(lines, "slow", lane), plan) for lane in SLOW_LANES]


def _slow_row(lane: str, turns: Sequence[Line], plan: Plan) -> Line:
    best = max(turns, key=lambda turn: samples_per_second(turn, plan))
    waiting = [fmean(waits(turn)[:-1]) for turn in turns]
    windows = [window for turn in turns for window in turn["windows"]]
    return {
        "lane": lane,
        "all": samples_per_second(best, plan),
        "fast": plan.batch * fmean(rates(best)[:-1]),
        "slow": plan.batch * rates(best)[-1],
        "waiting": waiting[turns.index(best)],
        "waiting_rounds": waiting,
        "fast_window": fmean(fmean(window[:-1]) for window in windows) if windows else None,
        "slow_window": fmean(window[-1] for window in windows) if windows else None,
    }


def rates(line: Line) -> list[float]:
    """Steps per second of every rank.

    >>> rates({"steps": [8, 4], "seconds": [2.0, 2.0]})
    [4.0, 2.0]
    """
    return [steps / seconds for steps, seconds in zip(line["steps"], line["seconds"], strict=True)]


def waits(line: Line) -> list[float]:
    """The share of its time in which a rank neither computes nor takes the optimiser's step; right for fast ranks only.

    >>> waits({"steps": [8], "seconds": [2.0], "computation": 0.125, "optimiser": [0.5]})
    [0.25]
    """
    parts = zip(line["steps"], line["seconds"], line["optimiser"], strict=True)
    return [1 - (steps * line["computation"] + optimiser) / seconds for steps, seconds, optimiser in parts]


def loss_rows(lines: Sequence[Line], plan: Plan, optimiser: Sequence[float]) -> list[Line]:
    """Seconds until a lane is where ssgd ends, for each seed, and their mean; None if it does not get there."""
    alike = [line for line in lines if line["part"] == "loss" and [line["rate"], line["momentum"]] == list(optimiser)]
    targets = {line["turn"]: line["losses"][-1] for line in _of(alike, "loss", "ssgd")}
    rows = []
    for lane in LOSS_LANES:
        turns = _of(alike, "loss", lane)
        seconds = [seconds_to(targets[turn["turn"]], turn["times"], turn["losses"]) for turn in turns]
        reached = [each for each in seconds if each is not None]
        rows.append(
            {
                "lane": lane,
                "steps": fmean(turn["steps"] for turn in turns),
                "seconds": fmean(turn["times"][-1] for turn in turns),
                "losses": [fmean(loss_at(plan.loss_seconds * part / 3, turn) for turn in turns) for part in range(4)],
                "to_target": fmean(reached) if len(reached) == len(seconds) else None,
                "to_target_seeds": seconds,
                "target": fmean(targets.values()),
            }
        )
    return rows


def seconds_to(target: float, times: Sequence[float], losses: Sequence[float]) -> float | None:
    """When the loss first is at the target or below.

    >>> seconds_to(1.5, [0.0, 2.0, 4.0], [3.0, 2.0, 1.0])
    4.0
    >>> seconds_to(0.5, [0.0, 2.0, 4.0], [3.0, 2.0, 1.0])
    """
    return next((elapsed for elapsed, loss in zip(times, losses, strict=True) if loss <= target), None)


def loss_at(seconds: float, turn: Line) -> float:
    """The loss of the last look before that.

    >>> loss_at(3.0, {"times": [0.0, 2.0, 4.0], "losses": [3.0, 2.0, 1.0]})
    2.0
    """
    known = [loss for elapsed, loss in zip(turn["times"], turn["losses"], strict=True) if elapsed <= seconds]
    return float(known[-1])


def _of(lines: Sequence[Line], part: str, lane: str) -> list[Line]:
    return [line for line in lines if line["part"] == part and line["lane"] == lane]
