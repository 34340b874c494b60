"""`paceline.serve`: a server in a script, which logs how it goes and leaves the same pages as a command.

    server at 127.0.0.1:29400: waiting for 10 workers
    worker 3 joined from node7 pid 4711 (shard 3)
    round 42 of 300, 3.9 s, 8.3 rounds/s, loss 0.3488, test 85.2%; late: worker 0
    ends after 300 rounds: all rounds are done
    report: runs/serve/report.html

`pages.py` has where the lines go, and the pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from paceline.codecs import Codec
from paceline.codecs.naming import text_of
from paceline.drivers.served.run import RunOutcome, open_run
from paceline.drivers.served.security import check_exposed, join_address, parse_address, server_credentials
from paceline.drivers.served.server import check_listens
from paceline.drivers.served.settings import Limits, ServeError, ServerSettings, measured_by
from paceline.loggers import Log
from paceline.quantities import counted
from paceline.renaming import renamed
from paceline.runs.event_loops import StopReason, run_to_end
from paceline.runs.pages import shown_log, write_pages
from paceline.runs.simulation import Result
from paceline.strategies import Full, Strategy
from paceline.traces import summarise
from paceline.traces.history import trace_of
from paceline.traces.journal import TRACE
from paceline.traces.journal_files import read_journal
from paceline.traces.run_folder import check_asked, next_free_folder, removing_unused
from paceline.traces.run_status import RunStatus, StatusLines, StatusLog
from paceline.training.train_state import Schedule
from paceline.training.training import MeasuredCopy

logger = logging.getLogger("paceline.served")


def serve(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    strategy: Strategy | None = None,
    listen: str = "127.0.0.1:29400",
    rounds: int = 1000,
    workers: int | None = None,
    most_workers: int = 0,
    schedule: Schedule | None = None,
    codec: str | Codec = "identity",
    seed: int = 0,
    blocks: int = 4,
    tls: str | Path | None = None,
    insecure: bool = False,
    open: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 50,
    evaluate: Callable[[nn.Module], Sequence[float | None]] | None = None,
    evaluate_every: int = 10,
    limits: Limits | None = None,
    on_open: Callable[[int], None] = lambda port: None,
    on_standing: Callable[[RunStatus], None] = lambda standing: None,
    log: Log | None = None,
    folder: str | Path | None = None,
) -> RunOutcome:
    """Train `model` with the gradients of workers that come and go; returns when all rounds are done.

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        paceline.serve(model, optimizer, strategy=paceline.LGC(k=7), workers=10, rounds=300, listen="127.0.0.1:29400")

    The first round, also of a run that is resumed, waits for `workers` (by default as many as the strategy's K), but at
    most `limits.gather_seconds`; `most_workers`, by default twice as many, may be there at once. `limits` is a
    `paceline.cluster.Limits`. `schedule` is stepped after every step of the optimiser, like torch's.

    Trace, checkpoints, results.json and report.html go to `out` (runs/serve, or the next that is free); `resume=True`
    goes on from the newest checkpoint there, if it is of the same run: strategy, codec, seed, workers, blocks, and the
    kinds of optimiser and schedule; the optimiser's rate is the checkpoint's. `evaluate` gets a copy of the model, in
    eval mode, and returns two numbers, its loss and accuracy, or three, with its test loss; anything else ends the run
    there and then. `codec` is one of `paceline.codecs`, or words that name it ("qsgd levels=7"); `seed` is for its
    random numbers.
    Beyond loopback `tls` is needed ("keys/server"; `paceline keys` makes them), or `insecure=True`. On loopback without
    keys the run is its user's: workers of other users are let in with `open=True`.

    Its address, who joins, a line every few seconds and where the report is are logged (`paceline.served`), and shown
    on stderr if the script has not set up logging. `log` is called with figures and the number of rounds as rounds
    are done (`paceline.loggers`). In a notebook, where an event loop runs already, the server runs in a thread of its
    own, which calls these functions. `folder` is the old name of `out`.
    """
    out = renamed("folder", folder, "out", out)
    check_asked(out, resume)
    host, port = parse_address(listen)
    check_exposed(host, tls=tls, insecure=insecure, open=open)
    strategy = strategy if strategy is not None else Full()
    if workers is None:
        workers = getattr(strategy, "k", None)
        if not isinstance(workers, int):
            raise ServeError("give workers: how many the first round waits for (the strategy has no fixed K)")
    credentials = server_credentials(tls) if tls is not None else None
    check_listens(host, port)
    wanted = Path("runs", "serve") if out is None else Path(out)
    settings = ServerSettings(
        module=model,
        optimizer=optimizer,
        schedule=schedule,
        strategy=strategy,
        rounds=rounds,
        workers=workers,
        most_workers=most_workers,
        folder=wanted,
        codec=codec if isinstance(codec, str) else text_of(codec),
        seed=seed,
        blocks=blocks,
        limits=limits if limits is not None else Limits(),
        measure=None if evaluate is None else MeasuredCopy(model, lambda module: measured_by(evaluate, module)),
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
    )
    lines, figures = StatusLines(lambda line: logger.info("%s", line)), StatusLog(log)

    def opened(port: int) -> None:
        logger.info("server at %s: waiting for %s", join_address(host, port), counted(settings.workers, "worker"))
        on_open(port)

    def show(status: RunStatus) -> None:
        lines.show(status)
        figures.show(status)
        on_standing(status)

    async def run(reason: StopReason) -> RunOutcome:
        return await open_run(settings, resume=resume).serve(
            (host, port),
            credentials,
            open=open,
            on_open=opened,
            on_standing=show,
            reason_to_stop=lambda standing: reason(),
        )

    with shown_log(), removing_unused():
        if out is None and not resume:
            settings = replace(settings, folder=next_free_folder(wanted))
        outcome = run_to_end(run)
        trace = trace_of(read_journal(settings.folder / TRACE))
        write_pages(Result(summary=summarise(trace), trace=trace), settings.folder)
    return outcome
