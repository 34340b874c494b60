"""Recorded runs made by the simulator: their times are known to the last digit, so what is made of them can be held."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from paceline.drivers.simulated.cluster import Cluster, MeasuredCosts, NoTraining, Setup
from paceline.drivers.simulated.delays import Sequences
from paceline.drivers.simulated.network import OneWayLink, WorkerLink
from paceline.strategies import LGC, Async, FastestK, Full
from paceline.traces.history import trace_of
from paceline.traces.journal import FORMAT as JOURNAL_FORMAT
from paceline.traces.journal import Arrival, RunBegan, StepRecord
from paceline.traces.journal_files import Journal
from paceline.traces.recorded_run import RecordedRun

BYTES = 1000
NAMES = {Full: "full", LGC: "lgc", FastestK: "fastest-k", Async: "async"}


def costs_of(workers, *, server=0.004, beside=0.002, down=0.003, up=0.005, on="server"):
    """What a run costs besides computing, the same in every round."""
    link = WorkerLink(down=OneWayLink(latency_seconds=down), up=OneWayLink(latency_seconds=up))
    return MeasuredCosts(
        server_seconds=(server,),
        worker_seconds=Sequences(columns=((beside,),) * workers),
        links=(link,) * workers if on == "server" else (),
    )


def recorded(columns, strategy=None, *, rounds=20, blocks=4, costs=None, on="server", name=""):
    """A run of these delays, played by the simulator and written down as a server's journal has it."""
    workers, strategy = len(columns), strategy or Full()
    costs = costs_of(workers, on=on) if costs is None else costs
    setup = Setup(
        name="x", strategy=strategy, workers=workers, rounds=rounds, delays=Sequences(columns=columns), blocks=blocks,
        on=on, costs=costs,
    )  # fmt: skip
    cluster = Cluster(setup, trainer=NoTraining(up=BYTES, down=BYTES))
    steps = [taken.step for taken in cluster.run(rounds * strategy.updates_per_round(workers))]
    draws: Counter[int] = Counter()
    arrivals = []
    for work in sorted(cluster.record.works, key=lambda work: (work.worker, work.version)):
        if work.arrived_seconds is not None:
            down = costs.links[work.worker].down.latency_seconds if costs.links else 0.0
            arrivals.append(
                Arrival(
                    worker=work.worker, version=work.version, draw=draws[work.worker], blocks_done=work.blocks_done,
                    blocks=work.blocks, at_seconds=work.arrived_seconds, work_seconds=work.compute_seconds,
                    transfer_seconds=down + work.arrived_seconds - work.finished_seconds, loss_mean=None,
                    loss_variance=None, samples=0,
                )
            )  # fmt: skip
        draws[work.worker] += 1
    return as_run(steps, arrivals, strategy, workers=workers, blocks=blocks, on=on, name=name)


def as_run(steps, arrivals, strategy, *, workers, blocks, on="server", name=""):
    arrivals = sorted(arrivals, key=lambda arrival: arrival.at_seconds)
    records = [
        RunBegan(
            format=JOURNAL_FORMAT, paceline="0.2.0", strategy=name or NAMES[type(strategy)], seed=0, workers=workers,
            blocks=blocks,
            recipe={}, signature="", codec="identity", on=on,
        )
    ]  # fmt: skip
    opened = 0.0
    for step in steps:
        arrived = tuple(each for each in arrivals if each.at_seconds <= step.at_seconds)
        arrivals = arrivals[len(arrived) :]
        records.append(
            StepRecord(
                at_seconds=step.at_seconds, version=step.version, opened_seconds=opened,
                fresh=tuple((share.worker, share.version) for share in step.fresh),
                late=tuple((share.worker, share.version) for share in step.late), dropped=(), arrivals=arrived,
                fingerprint=0, sent_bytes=BYTES * workers, received_bytes=BYTES * workers,
            )
        )  # fmt: skip
        opened = step.at_seconds
    journal = Journal(records=tuple(records), torn=False)
    return RecordedRun(folder=Path("runs/made"), kind="server", trace=trace_of(journal), journal=journal)
