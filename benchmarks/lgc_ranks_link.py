"""Part `link` of the benchmark `lgc-ranks`: rounds a second over 200 Mbit/s, by all-reduce and by the server.

    host A: rank 0, rank 1, and the server ==== 200 Mbit/s each way ==== host B: rank 2, rank 3

Both train the same million parameters with next to no computation, `full` and `lgc` with K = 3. The same processes are
ranks in one turn and workers of the server in the next. The server is where it has least to send: on the host of two of
its workers, which hand their gradients over in memory. What must cross the cable in a round of `full`, in models each
way: the ring 2 (N - 1) / N = 1.5 at once both ways, the server 2 down and then 2 up. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.table import Table

from benchmarks.cable import ADDRESSES, RATE, Cable, why_not
from benchmarks.lgc_ranks_round import PLAIN, PlainLoop, SyncedLoop, backward, made, reduction_costs
from benchmarks.options import Options
from benchmarks.output import Bar, coloured, titled
from benchmarks.ranks import ROOT, ended_by_signals, measured

PORT = 29577  # of the ranks' store; each run of the server has one of the next
FASTER = Bar(sign=">=", limit=2.0)
FIRST_ROUNDS = 2  # of a turn, not timed
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """What ranks and server do."""

    ranks_per_host: int
    elements: int
    turns: int
    rounds: int

    @property
    def ranks(self) -> int:
        """The ranks on both hosts."""
        return 2 * self.ranks_per_host

    @property
    def strategies(self) -> dict[str, int]:
        """K of each strategy; that of `full` is the number of ranks."""
        return {"full": self.ranks, f"lgc, K={self.ranks - 1}": self.ranks - 1}

    @property
    def lanes(self) -> list[tuple[int, str, str]]:
        """Every turn of every lane: its number, where it runs, and its strategy."""
        return [
            (turn, where, strategy)
            for turn in range(self.turns)
            for strategy in self.strategies
            for where in (PLAIN, "ranks", "server")
            if where != PLAIN or strategy == "full"
        ]


def link(options: Options, folder: Path) -> tuple[list[Table | str], dict[str, Any]]:
    """Measure both, in turns."""
    reason = why_not()
    if reason:
        return [f"lgc-ranks, link: skipped, and no bar judged: {reason}"], {"skipped": reason}
    plan = LinkPlan(
        ranks_per_host=1 if options.quick else 2,
        elements=40_000 if options.quick else 1_000_000,
        turns=1 if options.quick else options.repeat or 2,
        rounds=2 if options.quick else 12,
    )
    text = json.dumps(asdict(plan))
    labels = ["all-reduces", *(f"{strategy}, {where}, turn {turn + 1}" for turn, where, strategy in plan.lanes)]
    with ended_by_signals(), Cable() as cable, _server(cable, folder, text):
        first, *lines = measured(
            "lgc-ranks, link",
            "benchmarks.lgc_ranks_link",
            text,
            labels,
            cable,
            folder,
            ranks_per_host=plan.ranks_per_host,
        )
    for line in lines:
        if line["where"] == "server":
            line["times"] = _served_times(folder / f"run-{line['run']}" / "trace.jsonl")
        times = line["times"][FIRST_ROUNDS - 1 :]
        line["rounds_per_second"] = plan.rounds / (times[-1] - times[0])
    rows = link_rows(lines, plan)
    return [_table(rows, plan, quick=options.quick)], {"rows": rows, "lines": lines, "costs": first}


@contextlib.contextmanager
def _server(cable: Cable, folder: Path, plan: str) -> Iterator[None]:
    """The server's process on the first host, for all turns."""
    command = ["ip", "netns", "exec", cable.hosts[0], sys.executable, "-m", "benchmarks.lgc_ranks_link"]
    with (folder / "server.log").open("wb") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*command, str(folder), "server", plan], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.kill()
        process.wait(20)


def _served_times(trace: Path) -> list[float]:
    from paceline.traces.journal import StepRecord
    from paceline.traces.journal_files import read_journal

    return [record.at_seconds for record in read_journal(trace).records if isinstance(record, StepRecord)]


# -- the processes in the namespaces -----------------------------------------------------------------------------------


def serve_turns(folder: Path, plan: LinkPlan) -> None:
    """Serve one run after the other, each at a port of its own."""
    from paceline import LGC, Full, serve

    for run, (_, where, strategy) in enumerate(plan.lanes):
        if where != "server":
            continue
        model, optimizer = made(plan.elements)
        k = plan.strategies[strategy]
        serve(
            model,
            optimizer,
            strategy=Full() if k == plan.ranks else LGC(k=k),
            workers=plan.ranks,
            rounds=FIRST_ROUNDS + plan.rounds,
            listen=f"0.0.0.0:{PORT + 1 + run}",
            insecure=True,
            folder=folder / f"run-{run}",
            checkpoint_every=10**9,
        )


def work(address: str, plan: LinkPlan) -> None:
    """Work for the server until its run is over."""
    from paceline import Worker

    model, _ = made(plan.elements)
    with Worker(address, model) as worker:
        while worker.running():
            worker.begin_batch(1)
            backward(model)
            worker.block_done()
            worker.send()


def turns(plan: LinkPlan) -> Iterator[Row]:
    """Take all turns as one rank; of the server's, the figures are in its journal."""
    yield reduction_costs(plan.elements)
    for run, (turn, where, strategy) in enumerate(plan.lanes):
        dist.barrier()
        line: Row = {"turn": turn, "where": where, "strategy": strategy, "run": run}
        if where == PLAIN:
            line["times"] = PlainLoop(plan.elements).seconds(FIRST_ROUNDS + plan.rounds)
        elif where == "ranks":
            loop = SyncedLoop(plan.elements, plan.strategies[strategy])
            line["times"] = loop.seconds(FIRST_ROUNDS + plan.rounds)
            loop.sync.close()
        else:
            work(f"{ADDRESSES[0]}:{PORT + 1 + run}", plan)
        dist.barrier()
        yield line


def main(folder: Path, who: str, plan: LinkPlan) -> None:
    """Be a rank, or the server."""
    torch.set_num_threads(1)
    if who == "server":
        serve_turns(folder, plan)
        return
    address, timeout = f"tcp://{ADDRESSES[0]}:{PORT}", timedelta(seconds=180)
    dist.init_process_group("gloo", init_method=address, rank=int(who), world_size=plan.ranks, timeout=timeout)
    with (folder / f"lanes-{who}.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        for line in turns(plan):
            lines.write(json.dumps(line) + "\n")
    dist.barrier()
    dist.destroy_process_group()


# -- rows and the table ------------------------------------------------------------------------------------------------


def link_rows(lines: Sequence[Row], plan: LinkPlan) -> list[Row]:
    """Return a row for each strategy: the best turn's rounds a second of ranks and server, and their ratio."""
    rows: list[Row] = []
    for strategy in plan.strategies:
        best = {
            where: max(
                line["rounds_per_second"] for line in lines if (line["where"], line["strategy"]) == (where, strategy)
            )
            for where in ("ranks", "server")
        }
        rows.append({"strategy": strategy, **best, "ratio": best["ranks"] / best["server"]})
    return rows


def _table(rows: Sequence[Row], plan: LinkPlan, *, quick: bool) -> Table:
    title = f"Rounds a second, {plan.elements:,} parameters, {plan.ranks} ranks on two hosts, {RATE}/s"
    table = Table(box=box.SIMPLE_HEAD, title=titled(title, quick=quick), padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    for name in ("ranks", "server", "ranks / server", "bar"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        table.add_row(
            row["strategy"],
            f"{row['ranks']:.2f}",
            f"{row['server']:.2f}",
            FASTER.show(row["ratio"]),
            str(FASTER),
            coloured(FASTER.verdict(row["ratio"])),
        )
    return table


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], LinkPlan(**json.loads(sys.argv[3])))
