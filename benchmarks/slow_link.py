"""Two workers with a link of 512 kbit/s each: three rounds of a model with a million parameters, default settings.

    server ==== 512 kbit/s ==== worker 0        network namespaces, tc tbf; needs root and iproute2
           ==== 512 kbit/s ==== worker 1

The wire's limit is the bodies alone, 4 MB down and 4 MB up in each round, both links at once: 375 s. A body takes a
minute, four times the silence after which a peer counts as dead: this shows whether arriving bytes are signs of life.
A reconnection is a connection that was given up and made anew; the bytes of a body that was under way are lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.cable import Star, why_not
from benchmarks.options import Options
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from benchmarks.ranks import ROOT, ended_by_signals

PORT = 29400
SECONDS = Bar(sign="<=", limit=1.3)
RECONNECTIONS = Bar(sign="<=", limit=0, style=".0f")
GIVE_UP = 1.5  # times the wire's limit, and a minute


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is sent over which links."""

    parameters: int = 1_000_000
    rounds: int = 3
    workers: int = 2
    bits_per_second: int = 512_000

    @property
    def wire_seconds(self) -> float:
        """What the bodies alone take: down and up in each round."""
        return self.rounds * 2 * 4 * self.parameters * 8 / self.bits_per_second


QUICK = Plan(parameters=40_000, rounds=2, bits_per_second=2_000_000)


def run(options: Options) -> None:
    """`python -m benchmarks slow-link`."""
    reason = why_not()
    if reason:
        tables().print(f"slow-link: skipped, and no bar judged: {reason}")
        save(options, "slow-link", {"skipped": reason})
        return
    plan = QUICK if options.quick else Plan()
    folder = Path(tempfile.mkdtemp(prefix="paceline-slow-link-"))
    try:
        with ended_by_signals(), Star(plan.workers, f"{plan.bits_per_second}bit") as star:
            figures = measured(plan, star, folder)
    finally:
        shutil.rmtree(folder)
    tables().print(_table(plan, figures, quick=options.quick))
    save(options, "slow-link", figures)


# -- measuring -----------------------------------------------------------------------------------------------------


def measured(plan: Plan, star: Star, folder: Path) -> dict[str, Any]:
    """Run server and workers until all rounds are done, or for half as long again as they may take."""
    log = folder / "log"
    trace = folder / "run" / "trace.jsonl"
    with contextlib.ExitStack() as processes, progress_bar() as progress:
        bar = progress.add_task("slow-link: bytes", total=2 * plan.rounds * plan.workers * 4 * plan.parameters)
        server = processes.enter_context(_process(star.hub, log, "server", str(folder / "run"), plan))
        _until(lambda: trace.exists() and "listening" in log.read_text(encoding="utf-8"), server, log)
        for number, spoke in enumerate(star.spokes):
            address = f"{star.hub_address(number)}:{PORT}"
            processes.enter_context(_process(spoke, log, "worker", address, plan))
        deadline = time.monotonic() + GIVE_UP * plan.wire_seconds + 60
        while server.poll() is None and time.monotonic() < deadline:
            steps = trace.read_text(encoding="utf-8").count('"stepped"')
            sent = sum(sum(star.bytes_at_hub(number)) for number in range(plan.workers))
            progress.update(bar, completed=sent, description=f"slow-link: {steps} of {plan.rounds} rounds; bytes")
            time.sleep(0.2)
        wires = [star.bytes_at_hub(number) for number in range(plan.workers)]
    return _figures(plan, trace) | {"wire_bytes": wires, "log": log.read_text(encoding="utf-8")[-4000:]}


@contextlib.contextmanager
def _process(host: str, log: Path, side: str, place: str, plan: Plan) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this module in a namespace, which does not outlive the block."""
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "benchmarks.slow_link", side, place]
    command += [str(plan.parameters), str(plan.rounds), str(plan.workers)]
    with log.open("ab") as out:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def _until(happened: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            raise ValueError(f"slow-link: the server did not start:\n{log.read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.05)


def _figures(plan: Plan, trace: Path) -> dict[str, Any]:
    """Read the journal: its clock starts when all workers are in and the first model leaves."""
    from paceline.traces.journal import StepRecord, WorkerJoined
    from paceline.traces.journal_files import read_journal

    records = read_journal(trace).records
    steps = [record for record in records if isinstance(record, StepRecord)]
    joins = sum(isinstance(record, WorkerJoined) for record in records)
    done = len(steps) == plan.rounds
    return {
        "rounds": len(steps),
        "seconds": steps[-1].at_seconds if done else None,
        "step_seconds": [step.at_seconds for step in steps],
        "reconnections": joins - plan.workers,
        "wire_seconds": plan.wire_seconds,
    }


# -- the processes in the namespaces -------------------------------------------------------------------------------


def main() -> None:
    """`python -m benchmarks.slow_link server FOLDER ...` or `... worker ADDRESS ...`."""
    import logging

    import torch

    from benchmarks.overhead_sides import network, worker_side
    from paceline import Full, serve

    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)9d %(process)d %(message)s")
    side, place, *numbers = sys.argv[1:]
    parameters, rounds, workers = map(int, numbers)
    if side == "worker":
        worker_side(place, parameters)
        return
    model = network(parameters)
    serve(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        strategy=Full(),
        workers=workers,
        rounds=rounds,
        listen=f"0.0.0.0:{PORT}",
        insecure=True,
        folder=place,
        on_open=lambda port: print("listening", flush=True),
    )


# -- the table -----------------------------------------------------------------------------------------------------


def _table(plan: Plan, figures: dict[str, Any], *, quick: bool) -> Table:
    what = f"{plan.rounds} rounds, {plan.parameters:,} parameters, {plan.workers} links of"
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled(f"{what} {plan.bits_per_second / 1000:,.0f} kbit/s", quick=quick),
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    table.add_column("what")
    for name in ("measured", "bar"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    seconds, reconnections = figures["seconds"], figures["reconnections"]
    ratio = None if seconds is None else seconds / plan.wire_seconds
    rounds = Bar(sign=">=", limit=plan.rounds, style=".0f")
    taken = "-" if seconds is None else f"{seconds:.1f}"
    table.add_row("rounds done", str(figures["rounds"]), str(rounds), coloured(rounds.verdict(figures["rounds"])))
    table.add_row("seconds", taken, f"wire: {plan.wire_seconds:.1f}", "")
    table.add_row("seconds / the wire's", SECONDS.show(ratio), str(SECONDS), coloured(SECONDS.verdict(ratio)))
    table.add_row(
        "reconnections", str(reconnections), str(RECONNECTIONS), coloured(RECONNECTIONS.verdict(reconnections))
    )
    sent = "; ".join(f"{down / 1e6:.1f} and {up / 1e6:.1f}" for down, up in figures["wire_bytes"])
    least = plan.rounds * 4 * plan.parameters / 1e6
    table.add_row("MB down and up, each link", sent, f"bodies: {least:.1f} each", "")
    return table


if __name__ == "__main__":
    main()
