"""Two workers with a link of 512 kbit/s each: three rounds of a model with a million parameters, default settings.

    server ==== 512 kbit/s ==== worker 0        network namespaces, tc tbf; needs root and iproute2
           ==== 512 kbit/s ==== worker 1

The wire's limit is the bodies alone, 4 MB down and 4 MB up in each round, both links at once: 375 s. A body takes a
minute, four times the silence after which a peer counts as dead: this shows whether arriving bytes are signs of life.
A reconnection is a connection that was given up and made anew; the bytes of a body that was under way are lost.

What is judged: all rounds are done, in at most 1.3 times what the bodies alone take, without a reconnection.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.core.hosts import Star, why_not
from experiments.core.ranks import ended_by_signals, started
from experiments.core.running import ExperimentError
from experiments.core.story import NAN, Numbers, Size, Skipped, Step, Telling, experiment
from experiments.core.turns import bar
from paceline import Full, Worker, serve
from paceline.drivers.served.transport import tune_worker_process
from paceline.reports.table import PlainTable
from paceline.traces.journal import StepRecord, WorkerJoined
from paceline.traces.journal_files import read_journal

PORT = 29400  # in a network namespace of its own
START_SECONDS = 120.0
GIVE_UP = 1.5  # times the wire's limit, and a minute
LOOK_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is sent over which links."""

    parameters: int = 1_000_000
    rounds: int = 3
    workers: int = 2
    bits_per_second: int = 512_000

    @property
    def body_bytes(self) -> int:
        """What a link carries of models, and of gradients, in all rounds."""
        return self.rounds * 4 * self.parameters

    @property
    def wire_seconds(self) -> float:
        """What the bodies alone take, down and up in each round.

        >>> Plan().wire_seconds
        375.0
        """
        return 2 * self.body_bytes * 8 / self.bits_per_second


@experiment("slow-link", question="rounds of the server over links of 512 kbit/s", minutes=7)
def slow_link(size: Size) -> Telling:
    reason = why_not()
    if reason:
        yield Skipped(reason)
        return
    plan: Plan = size.pick(Plan(parameters=40_000, rounds=2, bits_per_second=2_000_000), Plan())
    figures = yield from measured(plan)
    sent = "; ".join(f"{down / 1e6:.1f} and {up / 1e6:.1f}" for down, up in figures["wire_bytes"])
    links = f"{plan.workers} links of {plan.bits_per_second / 1000:,.0f} kbit/s"
    yield PlainTable(
        title=f"{plan.rounds} rounds, {plan.parameters:,} parameters, {links}",
        headings=("", "measured", "wire's limit"),
        rows=[
            ("seconds", f"{figures['seconds']:.1f}", f"{plan.wire_seconds:.1f}"),
            ("MB down and up, each link", sent, f"{plan.body_bytes / 1e6:.1f} each"),
        ],
    )
    yield bar("rounds done", figures["rounds"], least=plan.rounds)
    yield bar("seconds / the wire's", figures["seconds"] / plan.wire_seconds, most=1.3)
    yield bar("reconnections", figures["reconnections"], most=0)
    yield Numbers(figures)


def measured(plan: Plan) -> Generator[Step, None, dict[str, Any]]:
    """Run server and workers until all rounds are done, or for half as long again as they may take."""
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="paceline-slow-link-") as name:
        folder, total, shown = Path(name), 2 * plan.workers * plan.body_bytes, 0
        with Star(plan.workers, f"{plan.bits_per_second}bit") as star:
            hosts = [(host, "lo") for host in (star.hub, *star.spokes)]
            with started(__name__, folder, len(hosts), json.dumps(asdict(plan)), hosts=hosts) as processes:
                deadline = time.monotonic() + START_SECONDS + GIVE_UP * plan.wire_seconds
                while processes[0].poll() is None and time.monotonic() < deadline:
                    sent = sum(sum(star.bytes_at_hub(worker)) for worker in range(plan.workers))
                    for percent in range(shown, min(99, 100 * sent // total) + 1):
                        yield Step(f"{percent} % of the bytes", 100)
                        shown = percent + 1
                    time.sleep(LOOK_SECONDS)
                wires = [star.bytes_at_hub(worker) for worker in range(plan.workers)]
        log = (folder / "rank-0.log").read_text(encoding="utf-8", errors="replace")
        trace = folder / "run" / "trace.jsonl"
        if not trace.exists():
            raise ExperimentError(f"the server did not start:\n{log[-2000:]}")
        return figures_of(plan, trace) | {"wire_bytes": wires, "log": log[-4000:]}


def figures_of(plan: Plan, trace: Path) -> dict[str, Any]:
    """Read the journal: its clock starts when all workers are in and the first model leaves."""
    records = read_journal(trace).records
    steps = [record.at_seconds for record in records if isinstance(record, StepRecord)]
    joins = sum(isinstance(record, WorkerJoined) for record in records)
    return {
        "rounds": len(steps),
        "seconds": steps[-1] if len(steps) == plan.rounds else NAN,
        "step_seconds": steps,
        "reconnections": joins - plan.workers,
        "wire_seconds": plan.wire_seconds,
    }


# -- the processes in the namespaces: 0 is the server, the others are workers ------------------------------------------


def main(folder: Path, number: int, plan: Plan) -> None:
    """Serve all rounds, or be a worker that computes nothing: the model in, the gradient out."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)9d %(process)d %(message)s")
    model = nn.ParameterList([nn.Parameter(torch.zeros(plan.parameters // 4000, 1000)) for _ in range(4)])
    open_file = folder / "open"
    if number == 0:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        serve(
            model, optimizer, strategy=Full(), workers=plan.workers, rounds=plan.rounds, listen=f"0.0.0.0:{PORT}",
            insecure=True, out=folder / "run", on_open=lambda port: open_file.touch(),
        )  # fmt: skip
        return
    torch.set_num_threads(1)
    tune_worker_process()
    deadline = time.monotonic() + START_SECONDS
    while not open_file.exists():
        if time.monotonic() > deadline:
            raise SystemExit("the server did not open")
        time.sleep(LOOK_SECONDS)
    with Worker(f"{Star.hub_address(number - 1)}:{PORT}", model, local=False) as worker:
        while worker.running():
            worker.begin_batch(1)
            worker.block_done()
            worker.send()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Plan(**json.loads(sys.argv[3])))
