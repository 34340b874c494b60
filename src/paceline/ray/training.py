"""`paceline.ray.train`: a recipe on a cluster of Ray's, from a script; it logs and leaves what `paceline.train` does.

    server at 10.0.0.7:40219
    worker 0 runs on 10.0.0.8
    round 42 of 300, 3.9 s, 8.3 rounds/s, loss 0.3488, test 85.2%; late: worker 0
    report: runs/train/report.html

What cannot run there is refused before anything is started. `run.py` carries the run out.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.drivers.served.keys import RunAuthority
from paceline.loggers import Log
from paceline.ray.connection import (
    connected,
    require_ray,
)
from paceline.ray.mirror import FolderCopy
from paceline.ray.run import Demands, RayRun, delay_file
from paceline.recipes.assembly import NOTHING_GIVEN, Given, refuse_late_blocks
from paceline.recipes.extension import Extension
from paceline.recipes.recipe import Recipe
from paceline.runs.cluster import OnStanding, Trained, extension_in, folder_to_train
from paceline.runs.launch import launched_place
from paceline.runs.pages import shown_log
from paceline.runs.ranks import by_ranks
from paceline.runs.simulation import give_notices
from paceline.runs.training import leaving_pages
from paceline.traces.run_folder import check_asked, removing_unused
from paceline.traces.run_status import RunStatus, StatusLines, StatusLog

logger = logging.getLogger("paceline.served")


def train(
    recipe: Recipe,
    *,
    address: str | None = None,
    data: Any = None,
    model: Any = None,
    loss: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    extension: Extension | None = None,
    cpus_per_worker: float = 1.0,
    resources_per_worker: Mapping[str, float] | None = None,
    server_cpus: float = 1.0,
    resources_seconds: float = 300.0,
    runtime_env: Mapping[str, Any] | None = None,
    on_open: Callable[[str], None] = lambda address: None,
    on_standing: OnStanding = lambda standing: None,
    log: Log | None = None,
) -> Trained:
    """Carry out a recipe with a server and workers on a cluster of Ray's; return what `paceline.train` returns.

        trained = paceline.ray.train(Recipe().with_settings(cluster={"workers": 8}), address="10.0.0.7:6379")
        trained.result.accuracy, trained.folder

    Where this process has called `ray.init`, that cluster is used. Nodes may come and go: a worker that is lost is
    started again wherever there is room, for as long as the run goes on. Trace and checkpoints are copied to `out`
    while the run goes on; a server that is lost goes on from there.

    Args:
        recipe: A recipe with a parameter server; ranks (hpsgd, lgc on ranks, pipelines) run under TorchTrainer.
        address: The cluster's, as for `ray.init`; None: RAY_ADDRESS, a cluster on this host, or one of this process.
        data: As for `paceline.train`; Ray sends objects to its nodes, and functions are called there.
        model: As for `paceline.train`, and sent as `data` is.
        loss: As for `paceline.train`, and sent as `data` is.
        out: The folder here for trace, checkpoints and report; without it runs/train, or the next that is free.
        resume: Go on with the run in `out`, from its newest checkpoint.
        extension: Another number of rounds in all for a run that is resumed.
        cpus_per_worker: The CPUs that Ray reserves for each worker; torch has as many threads there.
        resources_per_worker: Custom resources of Ray's that each worker demands.
        server_cpus: The CPUs that Ray reserves for the server.
        resources_seconds: How long the run may be without a single worker because no node has room.
        runtime_env: Ray's: {"working_dir": "."} sends code of your own to all nodes.
        on_open: Called with the server's address once it can be joined.
        on_standing: Called from time to time with where the run stands.
        log: Called here with figures and the number of rounds as rounds are done (`paceline.loggers`).
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"train takes a Recipe, not a {type(recipe).__name__}; Recipe.load reads one from a file")
    lines, figures = StatusLines(lambda line: logger.info("%s", line)), StatusLog(log)

    def show(status: RunStatus) -> None:
        lines.show(status)
        figures.show(status)
        on_standing(status)

    def opened(address: str) -> None:
        logger.info("server at %s", address)
        on_open(address)

    with shown_log(), leaving_pages() as leave:
        return leave(
            train_on_ray(
                recipe,
                address=address,
                given=Given(data=data, model=model, loss=loss),
                out=out,
                resume=resume,
                extension=extension,
                demands=Demands(
                    cpus_per_worker=cpus_per_worker,
                    resources_per_worker=dict(resources_per_worker or {}),
                    server_cpus=server_cpus,
                    resources_seconds=resources_seconds,
                ),
                runtime_env=runtime_env,
                on_open=opened,
                on_standing=show,
            )
        )


def train_on_ray(
    recipe: Recipe,
    *,
    address: str | None = None,
    given: Given = NOTHING_GIVEN,
    out: str | Path | None = None,
    resume: bool = False,
    extension: Extension | None = None,
    demands: Demands | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    quiet: bool = False,
    on_open: Callable[[str], None] = lambda address: None,
    on_standing: OnStanding = lambda standing: None,
) -> Trained:
    """Carry out a recipe on a cluster of Ray's; log how it goes, print nothing and write no page."""
    check_asked(out, resume)
    require_ray()
    recipe = given.named(recipe)
    refuse_elsewhere(recipe)
    with removing_unused():
        folder = folder_to_train(out, resume=resume)
        if resume and extension is None:
            extension = extension_in(folder)
        if not resume:
            give_notices((recipe, None))
        with connected(address, runtime_env, quiet=quiet) as own:
            run = RayRun(
                recipe,
                given,
                FolderCopy(folder),
                RunAuthority(),
                resume=resume,
                extension=extension,
                demands=demands if demands is not None else Demands(),
                loopback=own,
                on_open=on_open,
                on_standing=on_standing,
            )
            with _stopping_by_signal(run.stop):
                return run.carry_out()


def refuse_elsewhere(recipe: Recipe) -> None:
    """Refuse what cannot run on the nodes of a cluster: ranks, and paths that mean another place on each node.

    >>> refuse_elsewhere(Recipe().with_strategy("hpsgd"))
    Traceback (most recent call last):
    ValueError: hpsgd is carried out by ranks, and Ray has its own for them: use paceline.HPSGD and its family, ...
    >>> refuse_elsewhere(Recipe().with_settings(data={"name": "mnist", "directory": "data"}))
    Traceback (most recent call last):
    ValueError: data.directory is 'data', which is another place on every node of a cluster: give a whole path, ...
    """
    if by_ranks(recipe):
        kind = "a pipeline" if recipe.pipeline.on else recipe.strategy.label
        raise ValueError(
            f"{kind} is carried out by ranks, and Ray has its own for them: use paceline.HPSGD and its family, "
            "paceline.LGCSync or paceline.compress in a script under ray.train.torch.TorchTrainer (docs/ray.md), or "
            "leave out --on ray"
        )
    refuse_late_blocks(recipe)
    launched_place(recipe)  # inside torchrun every rank would start a run
    for name, path in (("data.directory", recipe.data.directory), ("delay.file", delay_file(recipe))):
        if path and not Path(path).is_absolute():
            raise ValueError(
                f"{name} is {path!r}, which is another place on every node of a cluster: give a whole path, which "
                f"every node has (here it is {Path(path).absolute()})"
            )


@contextmanager
def _stopping_by_signal(stop: Callable[[str], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the run with a checkpoint; the second time, there and then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = 0

    def handle(number: int, frame: object) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            raise KeyboardInterrupt
        stop(f"stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
