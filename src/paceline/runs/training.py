"""`paceline.train`: a recipe in real processes, from a script, which logs how it goes and leaves the command's pages.

server at 127.0.0.1:40219; more workers: paceline work 127.0.0.1:40219
round 42 of 300, 3.9 s, 8.3 rounds/s, loss 0.3488, test 85.2%; late: worker 0
report: runs/train/report.html
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.recipes.assembly import Given
from paceline.recipes.extension import Extension
from paceline.recipes.recipe import Recipe
from paceline.renaming import renamed
from paceline.runs.cluster import LISTEN, OnStanding, Trained, train_recipe
from paceline.runs.pages import shown_log, write_pages
from paceline.traces.run_status import RunStatus, StatusLines

if TYPE_CHECKING:
    from paceline.pipeline.plan import Plan

log = logging.getLogger("paceline.served")


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
        folder: The old name of `out`.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"train takes a Recipe, not a {type(recipe).__name__}; Recipe.load reads one from a file")
    lines = StatusLines(lambda line: log.info("%s", line))

    def opened(address: str) -> None:
        log.info("server at %s; more workers: paceline work %s", address, address)
        on_open(address)

    def show(status: RunStatus) -> None:
        lines.show(status)
        on_standing(status)

    with shown_log():
        trained = train_recipe(
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
        if trained.result is not None:
            write_pages(trained.result, trained.folder)
    return trained
