"""Synthetic recordings: what N ranks or workers would have written, with delays that are known, by the real writers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.traces.journal import FORMAT as JOURNAL_FORMAT
from paceline.traces.journal import Arrival, RunBegan, RunEnded, StepRecord, WorkerJoined
from paceline.traces.journal_files import JournalWriter
from paceline.traces.step_times import (
    FORMAT,
    BucketsMade,
    LinkTimed,
    ServerTimes,
    StepTimes,
    TimesBegan,
    TimesEnded,
    TimesWriter,
    times_path,
)

USUAL = {"input": 0.010, "forward": 0.030, "backward": 0.055, "optimiser": 0.005}
"""The seconds of a rank's phases without noise: 100 ms in all."""


@dataclass(frozen=True, kw_only=True)
class Delay:
    """Delays of one rank: so many seconds in a phase, with a probability in each step from `first` to `last`."""

    rank: int
    seconds: float = 0.2
    phase: str = "forward"
    probability: float = 1.0
    first: int = 0
    last: int = 10**9
    busy: bool = False


def noise(random, kind, shape, spread):
    """Factors around 1: lognormal, or mostly 1 with a heavy tail, or bursts that last several steps."""
    if kind == "lognormal":
        return random.lognormal(0.0, spread, shape)
    if kind == "pareto":
        return 1.0 + spread * random.pareto(2.0, shape)
    bursts = random.random(shape) < 0.05
    for _ in range(4):
        bursts[1:] |= bursts[:-1] & (random.random((shape[0] - 1, shape[1])) < 0.7)
    return random.lognormal(0.0, 0.02, shape) + spread * bursts


def phase_times(ranks, steps, *, seed, kind="lognormal", spread=0.1, delays=()):
    """Phases x steps x ranks, in seconds, and the processor's seconds."""
    random = np.random.default_rng(seed)
    times = {name: usual * noise(random, kind, (steps, ranks), spread) for name, usual in USUAL.items()}
    processor = sum(times.values())
    for delay in delays:
        rows = np.arange(steps)
        hit = (rows >= delay.first) & (rows <= delay.last) & (random.random(steps) < delay.probability)
        times[delay.phase][:, delay.rank] += delay.seconds * hit
        processor[:, delay.rank] += delay.seconds * hit * delay.busy
    return times, processor


def watched(folder: Path, ranks=4, steps=100, *, wire=0.005, hosts=None, links=(), killed=(), bucket_bytes=0, **more):
    """Write what a watched DDP script leaves: all wait for the last in every step, then for the wire."""
    times, processor = phase_times(ranks, steps, **more)
    hosts = hosts or ["node"] * ranks
    before = np.zeros(ranks)  # when each begins its step, on the common clock that no rank sees
    writers = [TimesWriter(times_path(folder, "rank", rank)) for rank in range(ranks)]
    for rank, writer in enumerate(writers):
        writer.write(
            TimesBegan(
                format=FORMAT, paceline="0.2.0", noun="rank", number=rank, workers=ranks, host=hosts[rank], launch="x",
                sync="ddp",
            )
        )  # fmt: skip
        if bucket_bytes:
            writer.write(BucketsMade(step=0, bytes=(bucket_bytes,)))
        for source, target, rate in links:
            if source == rank:
                seconds = 8e6 / rate + 1e-4
                writer.write(LinkTimed(at_seconds=0.0, to=target, bytes=10**6, seconds=seconds, latency_seconds=1e-4))
    for step in range(steps):
        ready = before + sum(times[name][step] for name in ("input", "forward", "backward"))
        done = ready.max() + wire
        after = done + times["optimiser"][step]
        for rank, writer in enumerate(writers):
            if rank in killed and step >= steps * 2 // 3:
                continue
            writer.write(
                StepTimes(
                    step=step,
                    started_seconds=before[rank],
                    seconds=after[rank] - before[rank],
                    wait_seconds=done - ready[rank],
                    processor_seconds=processor[step, rank],
                    buckets=((ready[rank] - before[rank], done - before[rank]),),
                    **{f"{name}_seconds": times[name][step, rank] for name in USUAL},
                )
            )
        before = after
    for rank, writer in enumerate(writers):
        if rank not in killed:
            writer.write(TimesEnded(at_seconds=float(before[rank]), reason="the script ended"))
        writer.close()
        assert not writer.error
    return folder


def served(
    folder: Path, workers=4, rounds=100, *, k=None, transfer=0.005, slow_link=None, strategy="lgc", phases=False, **more
):
    """Write the journal of a server whose rounds close with the K-th arrival; who is late begins the next round late.

    The late gradient is in the next round's update (`lgc`), or dropped (`fastest-k`). With `phases` there are files of
    step times as well, of the workers and of the server.
    """
    times, processor = phase_times(workers, rounds, **more)
    if phases:
        _write_phases(folder, times, processor)
    k = k or workers
    work = times["input"] + times["forward"] + times["backward"]
    links = np.full(workers, transfer)
    if slow_link is not None:
        links[slow_link[0]] += slow_link[1]
    with JournalWriter(folder / "trace.jsonl") as journal:
        journal.write(
            RunBegan(
                format=JOURNAL_FORMAT, paceline="0.2.0", strategy=strategy, seed=0, workers=workers, blocks=1,
                recipe={"data": {"split": "non-iid"}}, signature="", codec="none",
            )
        )  # fmt: skip
        for worker in range(workers):
            journal.write(
                WorkerJoined(
                    at_seconds=0.0, worker=worker, shard=worker, first_draw=0, threads=1, host=f"host-{worker}"
                )
            )
        opened, free, pending = 0.0, np.zeros(workers), []
        for version in range(rounds):
            # Who is still on its way with an earlier gradient takes part when that is there.
            able = [worker for worker in range(workers) if free[worker] <= opened]
            late = []
            arrivals = []
            for worker in able:
                at = opened + links[worker] + work[version, worker]
                arrivals.append(
                    Arrival(
                        worker=worker, version=version, draw=version, blocks_done=1, blocks=1, at_seconds=at,
                        work_seconds=work[version, worker], transfer_seconds=links[worker], loss_mean=None,
                        loss_variance=None, samples=8,
                    )
                )  # fmt: skip
            arrivals.sort(key=lambda each: each.at_seconds)
            fresh = arrivals[: min(k, len(arrivals))]
            closed = fresh[-1].at_seconds
            for each in arrivals:
                free[each.worker] = each.at_seconds
            came = [each for each in pending if each.at_seconds <= closed]
            late = tuple((each.worker, each.version) for each in came)
            dropped = ()
            if strategy == "fastest-k":
                late, dropped = (), tuple((each.worker, each.version, "its round had closed") for each in came)
            journal.write(_step(version, opened, closed, fresh, late, dropped, sorted([*came, *fresh], key=_at)))
            pending = [each for each in pending if each.at_seconds > closed] + arrivals[len(fresh) :]
            opened = closed + 0.001
        journal.write(RunEnded(at_seconds=closed, reason="all rounds done", rounds_done=rounds, diverged=False))
    return folder


def _write_phases(folder, times, processor):
    rounds, workers = processor.shape
    for noun, number in [("server", 0), *(("worker", worker) for worker in range(workers))]:
        writer = TimesWriter(times_path(folder, noun, number))
        writer.write(
            TimesBegan(
                format=FORMAT, paceline="0.2.0", noun=noun, number=number, workers=workers, host="node", launch="x",
                sync="server",
            )
        )  # fmt: skip
        for version in range(rounds):
            if noun == "server":
                writer.write(
                    ServerTimes(
                        version=version, closed_seconds=0.0, step_seconds=0.002, send_seconds=0.001, decode_seconds=0.0
                    )
                )
                continue
            seconds = {f"{name}_seconds": times[name][version, number] for name in ("input", "forward", "backward")}
            writer.write(
                StepTimes(
                    step=version,
                    version=version,
                    started_seconds=0.0,
                    seconds=sum(seconds.values()),
                    processor_seconds=processor[version, number],
                    **seconds,
                )
            )
        writer.close()


def _at(arrival):
    return arrival.at_seconds


def _step(version, opened, closed, fresh, late, dropped, arrivals):
    from paceline.traces.journal import Dropped

    return StepRecord(
        at_seconds=closed,
        version=version,
        opened_seconds=opened,
        fresh=tuple((each.worker, each.version) for each in fresh),
        late=late,
        dropped=tuple(Dropped(worker=worker, version=of, reason=reason) for worker, of, reason in dropped),
        arrivals=tuple(arrivals),
        fingerprint=0,
        sent_bytes=0,
        received_bytes=0,
    )
