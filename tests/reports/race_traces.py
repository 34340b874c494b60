"""Plausible traces without a simulator: a few lines of arithmetic that look like a race of strategies."""

from __future__ import annotations

import math
import random
from typing import Any

from paceline.traces import Evaluation, Round, Trace, Work

BLOCKS = 4
FLIGHT_SECONDS = 0.004
FLOORS = {"full": 0.20, "fastest-k": 0.31, "lgc": 0.205, "async": 0.24}


def recipe(strategy: str, *, seed: int, workers: int, rounds: int, late_work: str) -> dict[str, Any]:
    return {
        "seed": seed,
        "rounds": rounds,
        "target_loss": 0.5,
        "data": {"name": "digits", "split": "non-iid", "classes_per_worker": 3},
        "model": {"name": "mlp"},
        "cluster": {
            "workers": workers,
            "late_work": late_work,
            "delay": {"base": 0.05, "mean": 0.02, "hold": 10},
        },
        "strategy": {"name": strategy, "k": max(1, round(0.7 * workers))},
        "optimizer": {"name": "sgd", "learning_rate": 0.05, "momentum": None},
    }


def compute_seconds(seed: int, worker: int, version: int) -> float:
    """The paper's delay: 0.05 + Exp(0.02), drawn anew every ten rounds; the last worker is a slow one."""
    draw = random.Random(f"{seed}/{worker}/{version // 10}")
    jitter = random.Random(f"{seed}/{worker}/{version}").uniform(0.95, 1.05)
    return (0.05 + draw.expovariate(1 / 0.02)) * jitter * (1.3 if worker % 10 == 9 else 1.0)


def evaluations(strategy: str, ends: list[float], seed: int, every: int = 5) -> tuple[Evaluation, ...]:
    points = []
    floor = FLOORS.get(strategy, 0.3)
    for done in range(0, len(ends) + 1, every):
        wobble = random.Random(f"{strategy}/{seed}/{done}").gauss(0.0, 0.02 * math.exp(-done / 40))
        loss = floor + (2.3 - floor) * math.exp(-done / 14) + wobble
        points.append(
            Evaluation(
                round=done,
                seconds=ends[done - 1] if done else 0.0,
                loss=loss,
                accuracy=0.1 + 0.85 * (1 - loss / 2.5),
            )
        )
    return tuple(points)


def synchronous(
    strategy: str,
    *,
    seed: int = 0,
    workers: int = 10,
    rounds: int = 60,
    late_work: str = "partial",
    warmup: int = 3,
) -> Trace:
    k = workers if strategy == "full" else max(1, round(0.7 * workers))
    works: list[Work] = []
    steps: list[Round] = []
    starts = [0.0] * workers
    opened = 0.0
    late_before = 0
    for version in range(rounds):
        needed = workers if version < warmup else k
        ends = [starts[worker] + compute_seconds(seed, worker, version) for worker in range(workers)]
        closed = sorted(end + FLIGHT_SECONDS for end in ends)[needed - 1]
        late = 0
        for worker in range(workers):
            work, starts[worker] = _work(strategy, worker, version, starts[worker], ends[worker], closed, late_work)
            late += work.outcome == "late"
            works.append(work)
        steps.append(
            Round(
                version=version,
                opened_seconds=opened,
                closed_seconds=closed,
                k=needed,
                used=needed,
                late=late_before,
            )
        )
        opened, late_before = closed, late
    return _trace(strategy, seed, workers, rounds, late_work, works, steps)


def _work(
    strategy: str, worker: int, version: int, start: float, end: float, closed: float, late_work: str
) -> tuple[Work, float]:
    arrived, done, outcome, reason, next_start = end + FLIGHT_SECONDS, BLOCKS, "used", "", closed
    if arrived > closed:
        outcome, reason = ("late", "") if strategy == "lgc" else ("dropped", "its round had closed")
        if late_work == "partial":
            block = (end - start) / BLOCKS
            done = min(BLOCKS, max(1, math.ceil((closed - start) / block)))
            end = start + done * block
            next_start = max(closed, end)
            arrived = end + FLIGHT_SECONDS
    work = Work(
        worker=worker,
        version=version,
        started_seconds=start,
        finished_seconds=end,
        arrived_seconds=arrived,
        blocks_done=done,
        blocks=BLOCKS,
        outcome=outcome,  # type: ignore[arg-type]
        reason=reason,
    )
    return work, next_start


def asynchronous(*, seed: int = 0, workers: int = 10, rounds: int = 60, late_work: str = "partial") -> Trace:
    todo = []
    for worker in range(workers):
        at = 0.0
        for version in range(rounds * 2):
            end = at + compute_seconds(seed, worker, version)
            todo.append((end + FLIGHT_SECONDS, worker, at, end))
            at = end + 2 * FLIGHT_SECONDS
    todo.sort()
    works, steps, before = [], [], 0.0
    for version, (arrived, worker, start, end) in enumerate(todo[: rounds * workers]):
        works.append(
            Work(
                worker=worker,
                version=version,
                started_seconds=start,
                finished_seconds=end,
                arrived_seconds=arrived,
                blocks_done=BLOCKS,
                blocks=BLOCKS,
            )
        )
        steps.append(Round(version=version, opened_seconds=before, closed_seconds=arrived, k=1, used=1, late=0))
        before = arrived
    return _trace("async", seed, workers, rounds, late_work, works, steps)


def _trace(
    strategy: str, seed: int, workers: int, rounds: int, late_work: str, works: list[Work], steps: list[Round]
) -> Trace:
    dropped = sum(work.outcome == "dropped" for work in works)
    stride = workers if strategy == "async" else 1
    ends = [step.closed_seconds for step in steps[stride - 1 :: stride]]
    return Trace(
        strategy=strategy,
        seed=seed,
        workers=workers,
        recipe=recipe(strategy, seed=seed, workers=workers, rounds=rounds, late_work=late_work),
        rounds_done=rounds,
        seconds=steps[-1].closed_seconds,
        late_work=late_work,  # type: ignore[arg-type]
        used=sum(work.outcome == "used" for work in works),
        late=sum(work.outcome == "late" for work in works),
        dropped={"its round had closed": dropped} if dropped else {},
        rounds=tuple(steps),
        works=tuple(works),
        evaluations=evaluations(strategy, ends, seed),
    )


def race(*, seeds: int = 1, workers: int = 10, rounds: int = 60, late_work: str = "partial") -> list[Trace]:
    """All four strategies, every seed."""
    traces = []
    for seed in range(seeds):
        size = {"seed": seed, "workers": workers, "rounds": rounds, "late_work": late_work}
        traces += [synchronous(name, **size) for name in ("full", "fastest-k", "lgc")]  # type: ignore[arg-type]
        traces.append(asynchronous(**size))  # type: ignore[arg-type]
    return traces
