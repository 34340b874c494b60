"""The commands of a real cluster: train, serve, work, keys, replay."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.progress import Progress

from paceline.cli.options import UsageError
from paceline.cli.output import new_folder, show_results
from paceline.drivers.ranks.launch import place_in
from paceline.recipes import Recipe
from paceline.traces.journal import TRACE, RunEnded
from paceline.traces.journal_files import read_journal

if TYPE_CHECKING:
    from paceline.cli.progress import RunView
    from paceline.runs.cluster import Trained


@dataclass(frozen=True)
class TrainOptions:
    """Train with real processes: a parameter server and its workers, ranks that average, or the stages of a pipeline.

    Ranks (hpsgd, local-sgd, ...; stages = 2) also join a launch: torchrun ... -m paceline train RECIPE --out DIR
    """

    recipe_file: RecipeFile = ""
    """A recipe (TOML); without one, the default."""
    out: str = ""
    """Folder for trace, checkpoints and report [runs/train, or the next that is free]."""
    resume: str = ""
    """Go on with the run in this folder, from its newest checkpoint."""
    listen: str = "127.0.0.1:0"
    """Where the server listens; more workers can join there."""
    json: bool = False
    """Print one JSON document to stdout, and nothing else there."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class ServeOptions:
    """Serve a recipe to workers on other machines."""

    recipe_file: RecipeFile = ""
    """A recipe (TOML); without one, the default."""
    listen: str = "127.0.0.1:29400"
    """HOST:PORT to listen on; 0.0.0.0:29400 for every interface."""
    tls: str = ""
    """Certificate and key without their endings, such as keys/server; ca.crt lies beside."""
    insecure: bool = False
    """Listen beyond this machine without TLS: anybody who reaches the port can join."""
    out: str = ""
    """Folder for trace, checkpoints and report [runs/serve, or the next that is free]."""
    resume: str = ""
    """Go on with the run in this folder, from its newest checkpoint."""
    json: bool = False
    """Print one JSON document to stdout, and nothing else there."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class WorkOptions:
    """Work for a server, until training is over."""

    address: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="HOST:PORT")]
    """Where the server is."""
    tls: str = ""
    """Certificate and key without their endings, such as keys/worker; ca.crt lies beside."""
    model: str = ""
    """A network of your own as module:factory, if the server trains one: a server never names code."""
    data_directory: str = ""
    """Folder with the data set's files; a server never names paths."""
    delay_file: str = ""
    """CSV file, if the server injects recorded delays."""
    number: int = -1
    """The worker's number, if it matters which shard it gets [the first that is free]."""
    threads: int = 0
    """Threads for torch [torch's own choice]."""
    patience_seconds: float = 60.0
    """How long to look for a server that cannot be reached."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class KeysOptions:
    """Make a private CA and certificates for a server and its workers."""

    directory: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Folder for them; what is there already stays."""
    hosts: str = ""
    """Names and addresses of the server's machine, with commas between (localhost is always in)."""
    workers: int = 1
    """How many worker certificates; one is enough for all workers."""
    days: int = 3650
    """How long they are valid."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class ReplayOptions:
    """Recompute a recorded run, and say whether it comes out the same to the last bit."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    model: str = ""
    """The network as module:factory, if the run trained one of your own."""
    data_directory: str = ""
    """Folder with the data set's files, if it has moved."""
    json: bool = False
    """Print one JSON document to stdout, and nothing else there."""
    debug: bool = False
    """Show the traceback of an error."""


def train(options: TrainOptions, overrides: dict[str, str]) -> None:
    """`paceline train`."""
    from paceline.runs import cluster

    place = place_in(os.environ)
    if options.resume and is_ranks_run(options.resume):
        _check_nothing_beside_resume(options, overrides)
        return train_ranks(options, None, place)
    recipe = given_recipe(options.recipe_file, overrides)
    if by_ranks(recipe) and not options.resume:
        return train_ranks(options, recipe, place)
    if place is not None:
        raise UsageError(
            f"{recipe.strategy.name} has a server, and starts its workers itself: run it without torchrun, or use "
            "`paceline serve` and `paceline work`; hpsgd and its family run under torchrun, and pipelines do"
        )

    def run(recipe: Recipe, folder: Path, live: RunView, resume: bool) -> Trained:
        def opened(address: str) -> None:
            live.note(f"server at {address}; more workers: paceline work {address}")

        return cluster.train(
            recipe, folder=folder, resume=resume, listen=options.listen, on_open=opened, on_standing=live.show
        )

    _serve(options, overrides, "train", run)


def serve(options: ServeOptions, overrides: dict[str, str]) -> None:
    """`paceline serve`."""
    from paceline.runs import cluster

    door = cluster.ServerEndpoint(listen=options.listen, tls=options.tls or None, insecure=options.insecure)
    if not options.resume:
        recipe = given_recipe(options.recipe_file, overrides)
        if by_ranks(recipe):
            what = "a pipeline" if recipe.pipeline.on else "averaging"
            raise UsageError(f"{what} has no server: use `paceline train`, or torchrun ... -m paceline train RECIPE")

    def run(recipe: Recipe, folder: Path, live: RunView, resume: bool) -> Trained:
        def opened(address: str) -> None:
            live.note(f"server at {address}: waiting for {recipe.cluster.workers} workers")

        return cluster.serve_recipe(recipe, door, folder, resume=resume, on_open=opened, on_standing=live.show)

    _serve(options, overrides, "serve", run)


def _serve(
    options: TrainOptions | ServeOptions,
    overrides: dict[str, str],
    name: str,
    run: Callable[[Recipe, Path, RunView, bool], Trained],
) -> None:
    from paceline.cli.progress import RunView

    resume = bool(options.resume)
    notes = Console(stderr=True)
    recipe, folder = _resumed(options, overrides) if resume else _new(options, overrides, name)
    if resume and _is_finished(folder, recipe):
        notes.print(f"{folder} is finished: all {recipe.rounds} rounds are done", highlight=False, markup=False)
        return
    with notes.status(f"loading torch, {recipe.data.name} and {recipe.model.name}"):
        import paceline.drivers.served.serving  # noqa: F401 - it takes seconds, and somebody is watching
    with RunView(notes) as live:
        trained = run(recipe, folder, live, resume)
    for error in dict.fromkeys(trained.outcome.errors):
        notes.print(f"error: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
    show_results(recipe, [trained.result], folder, notes, as_json=options.json)
    if not trained.outcome.finished:
        go_on = f"paceline {name} --resume {folder}{_as_before(options)}"
        notes.print(f"{trained.outcome.reason}; go on with: {go_on}", soft_wrap=True, highlight=False, markup=False)
        raise KeyboardInterrupt


def _as_before(options: TrainOptions | ServeOptions) -> str:
    """The options that must be given again: they are of the machine, not of the run."""
    if isinstance(options, TrainOptions):
        return ""
    tls = f" --tls {options.tls}" if options.tls else ""
    return f" --listen {options.listen}{tls}{' --insecure' if options.insecure else ''}"


def _is_finished(folder: Path, recipe: Recipe) -> bool:
    last = read_journal(folder / TRACE).records[-1]
    return isinstance(last, RunEnded) and last.rounds_done >= recipe.rounds


def _new(options: TrainOptions | ServeOptions, overrides: dict[str, str], name: str) -> tuple[Recipe, Path]:
    recipe = given_recipe(options.recipe_file, overrides)
    return recipe, new_folder(options.out, name)


def _resumed(options: TrainOptions | ServeOptions, overrides: dict[str, str]) -> tuple[Recipe, Path]:
    _check_nothing_beside_resume(options, overrides)
    folder = _run_folder(options.resume)
    document = read_journal(folder / TRACE).began.recipe
    if not document:
        raise UsageError(f"{folder} is a run of a script: resume it there (paceline.serve(..., resume=True))")
    return Recipe.from_document(document), folder


def _check_nothing_beside_resume(options: TrainOptions | ServeOptions, overrides: dict[str, str]) -> None:
    if options.recipe_file or overrides or options.out:
        raise UsageError("--resume goes on with the run's own recipe, in its own folder: give neither with it")


def _run_folder(text: str) -> Path:
    if not Path(text, TRACE).is_file() and not is_ranks_run(text):
        raise UsageError(f"{text} is not a run: it has no {TRACE}")
    return Path(text)


def work(options: WorkOptions, overrides: dict[str, str]) -> None:
    """`paceline work`."""
    from paceline.cli.progress import printed_log
    from paceline.runs.cluster import WorkerOptions, work_for

    notes = Console(stderr=True)

    def welcomed(worker: int, recipe: Recipe) -> None:
        what = f"worker {worker}: {recipe.model.name} on {recipe.data.name}"
        if options.number not in (-1, worker):
            what += f" (number {options.number} is taken)"
        notes.print(what, soft_wrap=True, highlight=False, markup=False)

    own = WorkerOptions(
        tls=options.tls or None,
        model=options.model,
        data_directory=options.data_directory,
        delay_file=options.delay_file,
        wish=options.number if options.number >= 0 else None,
        patience_seconds=options.patience_seconds,
        threads=options.threads,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever is told to go says goodbye first
    with printed_log(notes):
        work_for(options.address, own, on_welcome=welcomed)
    notes.print("training is over")


def keys(options: KeysOptions, overrides: dict[str, str]) -> None:
    """`paceline keys`."""
    from paceline.drivers.served.keys import key_files, make_keys

    hosts = [host.strip() for host in options.hosts.split(",") if host.strip()]
    directory = Path(options.directory)
    made = make_keys(directory, hosts=hosts, workers=options.workers, days=options.days)
    notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for path in key_files(directory, workers=options.workers):
        notes.print(f"{'made ' if path in made else 'kept '} {path}")
    notes.print(f"server:  paceline serve RECIPE --listen 0.0.0.0:29400 --tls {directory / 'server'}")
    notes.print(f"worker:  paceline work HOST:29400 --tls {directory / 'worker'}")
    if not hosts:
        notes.print("The server's certificate is for this machine's own name; give --hosts for any other.")
    notes.print(f"Give workers ca.crt, worker.crt and worker.key; {directory / 'ca.key'} stays with you.")


def replay(options: ReplayOptions, overrides: dict[str, str]) -> None:
    """`paceline replay`."""
    from paceline.runs.cluster import WorkerOptions
    from paceline.runs.replaying import replay as replay_run

    notes = Console(stderr=True)
    own = WorkerOptions(model=options.model, data_directory=options.data_directory)
    with Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
        task = progress.add_task("replaying", total=None)
        verdict = replay_run(
            _run_folder(options.run),
            own,
            on_step=lambda step, steps: progress.update(task, completed=step, total=steps),
        )
    if options.json:
        print(json.dumps({"identical": verdict.identical, "steps": verdict.steps, "difference": verdict.difference}))
    elif verdict.identical:
        print(f"identical: {verdict.steps} steps, and the final weights to the last bit")
    elif verdict.nearly:
        print(f"the same {verdict.steps} steps; {verdict.nearly}: more than two ranks add up in an order of gloo's own")
    if not verdict.identical and not verdict.nearly:
        raise RunDiffers(f"not identical: {verdict.difference} ({verdict.steps} steps before it are)")


class RunDiffers(OSError):  # noqa: N818 - a finding, not a fault
    """A replay that came out differently: the run's fault or the machine's, not that of what was typed.

    >>> raise RunDiffers("not identical: step 3")
    Traceback (most recent call last):
    paceline.cli.cluster.RunDiffers: not identical: step 3
    """
