"""Averaging over a slow link: who waits for the all-reduce, who does not, and what that does to speed and to loss.

Four ranks, two on each of two hosts (network namespaces of this machine) joined by 200 Mbit/s, on gloo with one thread
each. One all-reduce of the model is timed first; a step's computation is then set to this time divided by a ratio, by
padding the real forward and backward pass with sleep, as if an accelerator computed it.

speed   samples per second of all ranks, where an all-reduce takes 1, 2 and 4 times a step's computation: each rank's
        steps over the seconds between two of its step boundaries, added up. Flushes are outside the clock: none is
        needed while one trains. psgd sends nothing, and is the limit.
        The processor's time of a step, of all threads, stands beside psgd's.
loss    seconds until the shared model is as good as ssgd's at the end of its time, on samples that nobody trains on.
        All lanes have the same learning rate and momentum (of a few that were tried in one process, those with which
        ssgd learns fastest), batches, first model and shards; nothing is tuned for any other lane.
        The loss is that of copies of the shared model: rank 0 takes one whenever it has moved (some milliseconds), and
        evaluates them afterwards.
slow    the last rank computes three times as long. `hpsgd + barrier` has a barrier of all ranks in every step, as the
        authors' code has. Waiting is 1 - (steps * computation + the optimiser's own seconds) / seconds: copying and
        merging are counted as waiting, and so is what other programs on the machine take away.

Needs root and iproute2.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from benchmarks.averaging_figures import loss_rows, processor_rows, slow_rows, speed_rows
from benchmarks.averaging_plan import Plan, plan_text, stretches
from benchmarks.averaging_tables import loss_table, processor_table, slow_table, speed_table
from benchmarks.cable import RATE, Cable, why_not
from benchmarks.options import Options
from benchmarks.output import save, tables
from benchmarks.ranks import ended_by_signals, measured

FULL = Plan(
    ranks_per_host=2,
    widths=[64, 512, 512, 512, 512, 10],
    batch=32,
    ratios=[1.0, 2.0, 4.0],
    rounds=3,
    seconds=2.0,
    loss_ratio=2.0,
    loss_seconds=8.0,
    seeds=2,
    optimisers=[[0.05, 0.0], [0.02, 0.9]],
    slow_times=3,
    shard=8192,
    evaluated=512,
)
QUICK = Plan(
    ranks_per_host=1,
    widths=[16, 32, 10],
    batch=4,
    ratios=[2.0],
    rounds=1,
    seconds=0.0,
    loss_ratio=2.0,
    loss_seconds=0.05,
    seeds=1,
    optimisers=[[0.02, 0.9]],
    slow_times=3,
    shard=64,
    evaluated=64,
)


def run(options: Options) -> None:
    """`python -m benchmarks averaging`."""
    reason = why_not()
    if reason:
        tables().print(f"averaging: skipped, and no bar judged: {reason}")
        save(options, "averaging", {"skipped": reason})
        return
    plan = QUICK if options.quick else FULL
    labels = ["all-reduce", *map(str, stretches(plan))]
    folder = Path(tempfile.mkdtemp(prefix="paceline-averaging-"))
    try:
        with ended_by_signals(), Cable() as cable:
            lines = measured(
                "averaging",
                "benchmarks.averaging_rank",
                plan_text(plan),
                labels,
                cable,
                folder,
                ranks_per_host=plan.ranks_per_host,
            )
    finally:
        shutil.rmtree(folder)
    speed, processor, slow = speed_rows(lines, plan), processor_rows(lines, plan), slow_rows(lines, plan)
    losses = [loss_rows(lines, plan, optimiser) for optimiser in plan.optimisers]
    console = tables()
    for table, verdicts in (
        speed_table(speed, lines[0], plan, quick=options.quick),
        processor_table(processor, plan, quick=options.quick),
        *(
            loss_table(loss, plan, optimiser, quick=options.quick)
            for loss, optimiser in zip(losses, plan.optimisers, strict=True)
        ),
        slow_table(slow, plan, quick=options.quick),
    ):
        console.print(table)
        console.print(verdicts)
    found = {"speed": speed, "processor": processor, "loss": losses, "slow": slow}
    save(options, "averaging", {"rate": RATE, **found, "lines": lines})
