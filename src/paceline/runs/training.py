"""`paceline.train`: a recipe in real processes, from a script, which logs how it goes and leaves the command's pages.

server at 127.0.0.1:40219; more workers: paceline work 127.0.0.1:40219
round 42 of 300, 3.9 s, 8.3 rounds/s, loss 0.3488, test 85.2%; late: worker 0
report: runs/train/report.html
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.loggers import Log
from paceline.processes import check_processes
from paceline.recipes.assembly import NOTHING_GIVEN, Given
from paceline.recipes.extension import Extension
from paceline.recipes.recipe import Recipe
from paceline.renaming import renamed
from paceline.runs.cluster import (
    LocalWorkers,
    OnStanding,
    ServerEndpoint,
    Trained,
    WorkersEndedError,
    check_loopback,
    folder_to_train,
    serve_recipe,
)
from paceline.runs.launch import RanksToTrain, launched_place, train_ranks
from paceline.runs.pages import shown_log, write_pages
from paceline.runs.ranks import by_ranks
from paceline.traces.run_folder import check_asked, removing_unused
from paceline.traces.run_status import RunStatus, StatusLines, StatusLog

if TYPE_CHECKING:
    from paceline.data import Dataset
    from paceline.pipeline.plan import Plan

logger = logging.getLogger("paceline.served")

LISTEN = "127.0.0.1:0"


def train(
    recipe: Recipe,
    *,
    data: Any = None,
    model: Any = None,
    loss: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    extension: Extension | None = None,
    listen: str = LISTEN,
    on_open: Callable[[str], None] = lambda address: None,
    on_standing: OnStanding = lambda standing: None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    log: Log | None = None,
    folder: str | Path | None = None,
) -> Trained:
    """Carry out a recipe in real processes, as `paceline train` does: with a server and workers, or with ranks.

        trained = paceline.train(Recipe().with_strategy("hpsgd").with_settings(cluster={"workers": 4}))
        trained.result.accuracy, trained.folder

    The processes are started on this machine, and are gone when it returns. Inside a launch (torchrun) this process is
    one of the ranks, and `out` must be given; a strategy with a server is refused there. What a recipe cannot be is
    said before a process is started. How it goes is logged (`paceline.served`), a line every few seconds, and shown on
    stderr if the script has not set up logging.

    Args:
        data: Data of your own in place of those that the recipe names: (train, test), each a torch Dataset or a pair of
            tensors, or a function that returns them.
        model: A module of your own, or a function that makes one.
        loss: A function of outputs and targets.
        out: The folder for trace, checkpoints and report; without it runs/train, or the next that is free.
        resume: Go on with the run in `out`, from its newest checkpoint; the recipe must be the same.
        extension: Another number of rounds in all for a run that is resumed.
        listen: Where the server listens; more workers can join there.
        on_open: Called with the server's address once it can be joined.
        on_standing: Called from time to time with where the run stands.
        on_plan: Called with the plan of a pipeline, before it runs.
        log: Called with figures and the number of rounds as rounds are done (`paceline.loggers`).
        folder: The old name of `out`.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM has stopped the run; its checkpoint and pages are written.
        WorkersEndedError: All workers have ended before the run was over; it says why the first one did.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"train takes a Recipe, not a {type(recipe).__name__}; Recipe.load reads one from a file")
    lines, figures = StatusLines(lambda line: logger.info("%s", line)), StatusLog(log)

    def opened(address: str) -> None:
        logger.info("server at %s; more workers: paceline work %s", address, address)
        on_open(address)

    def show(status: RunStatus) -> None:
        lines.show(status)
        figures.show(status)
        on_standing(status)

    with shown_log(), leaving_pages() as leave:
        return leave(
            train_recipe(
                recipe,
                given=Given(data=data, model=model, loss=loss),
                out=renamed("folder", folder, "out", out),
                resume=resume,
                extension=extension,
                listen=listen,
                on_open=opened,
                on_standing=show,
                on_plan=on_plan,
            )
        )


@contextmanager
def leaving_pages() -> Iterator[Callable[[Trained], Trained]]:
    """Write the pages of a run that is over, however it ended; one that a signal has stopped is a KeyboardInterrupt.

    A script that goes on would take an unfinished run for a finished one.
    """

    def leave(trained: Trained) -> Trained:
        if trained.result is not None:
            write_pages(trained.result, trained.folder)
        if not trained.outcome.finished:
            raise KeyboardInterrupt(f"{trained.outcome.reason}; {how_to_go_on(trained)}")
        return trained

    try:
        yield leave
    except WorkersEndedError as error:
        if error.trained is not None and error.trained.result is not None:
            write_pages(error.trained.result, error.trained.folder)
            error.add_note(how_to_go_on(error.trained))
        raise


def how_to_go_on(trained: Trained) -> str:
    """Return what a script does to go on with a run that was stopped."""
    return f"go on with the run with resume=True, out={str(trained.folder)!r}"


def train_recipe(
    recipe: Recipe,
    *,
    given: Given = NOTHING_GIVEN,
    out: str | Path | None = None,
    resume: bool = False,
    extension: Extension | None = None,
    listen: str = LISTEN,
    on_open: Callable[[str], None] = lambda address: None,
    on_standing: OnStanding = lambda standing: None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
) -> Trained:
    """Carry out a recipe in real processes, with a server and workers, or with ranks; log and print nothing."""
    check_asked(out, resume)
    recipe = given.named(recipe)
    place = launched_place(recipe)
    if by_ranks(recipe):
        if listen != LISTEN:
            raise ValueError("--listen is for a parameter server, and ranks have none: torchrun says where they meet")
        ranks = RanksToTrain(recipe=recipe, out=out, resume=resume, extension=extension, given=given)
        with removing_unused():
            return train_ranks(ranks, place, on_standing=on_standing, on_plan=on_plan)
    endpoint = ServerEndpoint(listen=listen, insecure=True)
    check_loopback(endpoint)
    check_processes(recipe.cluster.workers)
    with removing_unused():
        return _train_served(
            recipe,
            endpoint,
            out,
            resume=resume,
            extension=extension,
            given=given,
            on_open=on_open,
            on_standing=on_standing,
        )


def _train_served(
    recipe: Recipe,
    endpoint: ServerEndpoint,
    out: str | Path | None,
    *,
    resume: bool,
    extension: Extension | None,
    given: Given,
    on_open: Callable[[str], None],
    on_standing: OnStanding,
) -> Trained:
    """Start workers on this machine, serve the recipe to them, and end them."""
    taken = folder_to_train(out, resume=resume)
    started: list[LocalWorkers] = []

    def start(dataset: Dataset) -> None:
        objects = given.objects()
        inherited = replace(objects, data=dataset) if objects else objects  # loaded once for all that are forked
        started.append(LocalWorkers(recipe, range(recipe.cluster.workers), inherited, run=taken.absolute()))

    def opened(address: str) -> None:
        started[0].send_address(address)
        on_open(address)

    finished = False
    try:
        trained = serve_recipe(
            recipe,
            endpoint,
            taken,
            resume=resume,
            extension=extension,
            given=given,
            on_ready=start,
            on_open=opened,
            on_standing=on_standing,
            workers_gone=lambda: started[0].why_gone,
        )
        finished = trained.outcome.finished
        return trained
    finally:
        for workers in started:
            workers.end(by_themselves=finished)
