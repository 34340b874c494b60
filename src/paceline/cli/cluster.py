"""The commands that train on a real cluster: `paceline train` and `paceline serve`.

`paceline train` runs a recipe in one of two ways, depending on its strategy: with a parameter server, as `paceline
serve` does, or with ranks, which have no server and average or are the stages of pipelines. Ranks are forked here, or
the command is itself a rank of a launch by torchrun.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli.live import live_option, live_page, live_port
from paceline.cli.options import (
    RECIPE_FILE,
    UsageError,
    argument,
    debug_option,
    given_recipe,
    json_option,
    log_option,
    option,
    out_option,
    resume_option,
    trust_option,
)
from paceline.cli.output import ResultsNotKept, is_ranks_run, new_folder, note, run_folder, show_results
from paceline.cli.progress import logging_view
from paceline.decoding import parse_object
from paceline.drivers.ranks.launch import place_in
from paceline.errors import PacelineError, warn
from paceline.files import read_plain
from paceline.loggers import check_log
from paceline.lookup import unknown
from paceline.recipes import Recipe
from paceline.recipes.assembly import averages
from paceline.recipes.extension import Extension, extend, may_be_restated
from paceline.runs.cluster import GIVEN_AGAIN
from paceline.runs.ranks import by_ranks, read_recipe_of, refuse_restated, rounds_to_train
from paceline.slurm.ranks import LAUNCHER, STARTED
from paceline.traces.journal import TRACE, RunEnded
from paceline.traces.journal_files import read_journal
from paceline.traces.run_folder import MOST_RESULTS_BYTES, RESULTS

if TYPE_CHECKING:
    from paceline.pipeline.plan import Plan
    from paceline.runs.cluster import Trained, WorkerOptions

ELSEWHERE = {"ray": "paceline.cli.on_ray", "slurm": "paceline.cli.on_slurm"}
"""What `train --on` may name beside server and ranks of this machine: schedulers that start processes elsewhere."""

RAY_OPTIONS = ("ray_address", "ray_working_dir", "ray_cpus_per_worker")


@dataclass(frozen=True)
class TrainOptions:
    """Train with real processes.

    A parameter server and its workers, ranks without one, or the stages of a pipeline.

    Ranks (--on ranks; hpsgd, ...; stages = 2) also join a launch: torchrun ... -m paceline train RECIPE --out FOLDER
    """

    recipe_file: str = argument("[RECIPE]", RECIPE_FILE, default="")
    out: str = out_option("trace, checkpoints and report", "runs/train")
    resume: str = resume_option()
    listen: str = option("127.0.0.1:0", "where the server listens; more workers can join there", metavar="HOST:PORT")
    log: str = log_option()
    live: str | None = live_option()
    ray_address: str = option(
        "", "with --on ray: the cluster's address", metavar="HOST:PORT", shown="RAY_ADDRESS", common=False
    )
    ray_working_dir: str = option(
        "", "with --on ray: folder that Ray sends to every node, for code of your own", metavar="FOLDER", common=False
    )
    ray_cpus_per_worker: float = option(
        1.0, "with --on ray: CPUs for each worker, which has as many threads", common=False
    )
    trust: bool = trust_option()
    json: bool = json_option()
    debug: bool = debug_option()


@dataclass(frozen=True)
class ServeOptions:
    """Serve a recipe to workers on other machines."""

    recipe_file: str = argument("[RECIPE]", RECIPE_FILE, default="")
    listen: str = option("127.0.0.1:29400", "where to listen; 0.0.0.0:29400 for every interface", metavar="HOST:PORT")
    tls: str = option(
        "", "certificate and key without their endings, such as keys/server; ca.crt lies beside", metavar="PATH"
    )
    insecure: bool = option(False, "listen beyond this machine without TLS: anybody who reaches the port can join")
    open: bool = option(False, "on loopback without TLS: let in workers of every user of this machine")
    out: str = out_option("trace, checkpoints and report", "runs/serve")
    resume: str = resume_option()
    log: str = log_option()
    live: str | None = live_option()
    trust: bool = trust_option()
    json: bool = json_option()
    debug: bool = debug_option()


def train(options: TrainOptions, overrides: dict[str, str]) -> None:
    from paceline.runs.launch import launched_place
    from paceline.runs.training import train_recipe

    place = overrides.get("strategy.on", "")
    for name in RAY_OPTIONS:
        if place != "ray" and getattr(options, name) != getattr(TrainOptions(), name):
            raise UsageError(f"--{name.replace('_', '-')} is for --on ray: give both, or none of them")
    if place and place not in (places := ("server", "ranks", *ELSEWHERE)):
        raise UsageError(f"--on: {unknown('place', place, places)}")
    if place in ELSEWHERE:
        if options.live is not None:
            raise UsageError("--live is for runs of this machine: leave it out, and `paceline live FOLDER` follows it")
        launch: Callable[[TrainOptions, dict[str, str]], None] = import_module(ELSEWHERE[place]).train
        return launch(options, {name: text for name, text in overrides.items() if name != "strategy.on"})
    check_resume_alone(options, overrides)
    recipe = recipe_to_begin(options, overrides)
    if by_ranks(recipe) or (options.resume and is_ranks_run(options.resume)):
        return _train_ranks(options, recipe, overrides)
    if not options.resume:
        launched_place(recipe)  # a launch by torchrun is refused before its processes compete for the folder
    greeting = "server at {address}; more workers: paceline work {address}"
    run = functools.partial(train_recipe, listen=options.listen)
    train_served(options, recipe, run, command="train", greeting=greeting, overrides=overrides)


def serve(options: ServeOptions, overrides: dict[str, str]) -> None:
    from paceline.runs import cluster

    check_resume_alone(options, overrides)
    endpoint = cluster.ServerEndpoint(
        listen=options.listen, tls=options.tls or None, insecure=options.insecure, open=options.open
    )
    recipe = recipe_to_begin(options, overrides)
    if by_ranks(recipe) and not options.resume:
        kind = "a pipeline" if recipe.pipeline.on else "averaging" if averages(recipe) else recipe.strategy.label
        raise UsageError(f"{kind} has no server: use `paceline train`, or torchrun ... -m paceline train RECIPE")
    greeting = "server at {address}: waiting for {workers} workers"
    run = functools.partial(cluster.serve_recipe, endpoint=endpoint)
    tls = f" --tls {options.tls}" if options.tls else ""
    again = f" --listen {options.listen}{tls}{' --insecure' * options.insecure}{' --open' * options.open}"
    train_served(options, recipe, run, command="serve", greeting=greeting, overrides=overrides, to_repeat=again)


def recipe_to_begin(options: TrainOptions | ServeOptions, overrides: dict[str, str]) -> Recipe:
    """Return the recipe that was given; beside --resume the default, which the run's own then stands in place of."""
    if options.resume:
        return Recipe()
    recipe = given_recipe(options.recipe_file, overrides, trust=options.trust)
    warn_of_idle_delays(recipe, overrides)
    return recipe


def warn_of_idle_delays(recipe: Recipe, overrides: dict[str, str]) -> None:
    """Say of delays that were typed that a real run has none of them unless they are injected."""
    typed = [
        name for name in overrides if name.startswith("delay.") and name not in (*GIVEN_AGAIN.values(), "delay.inject")
    ]
    if typed and not recipe.delay.inject:
        warn(f"--{typed[0].replace('_', '-')} is ignored: a real run has delays of a recipe only with --inject-delays")


def check_resume_alone(options: TrainOptions | ServeOptions, overrides: dict[str, str]) -> None:
    """Refuse what cannot stand beside --resume."""
    check_log(options.log)
    if options.live is not None:
        live_port(options.live)
    if not options.resume:
        return
    unknown = [
        name for name in overrides if name not in (*GIVEN_AGAIN.values(), "rounds") and not may_be_restated(name)
    ]
    refused = [f"--{name.replace('_', '-')}" for name in unknown]
    refused += ["--out"] if options.out else []
    refused += [options.recipe_file] if options.recipe_file else []
    refused += ["--trust"] if options.trust else []
    if refused:
        raise UsageError(
            f"--resume goes on with the run's own recipe, in its own folder: leave out {', '.join(refused)}; "
            "--model, --data, --loss, --data-directory and --delay-file may be given, which name code and paths, and "
            "--rounds for more"
        )
    if "rounds" not in overrides and (given := [name for name in overrides if may_be_restated(name)]):
        raise UsageError(f"--{given[0].replace('_', '-')} is given again only with --rounds, which extends the run")


def names_given(overrides: dict[str, str]) -> WorkerOptions:
    """Return the code and the paths that were typed beside --resume."""
    from paceline.runs.cluster import WorkerOptions

    typed = {option: overrides.get(name, "") for option, name in GIVEN_AGAIN.items()}
    return WorkerOptions(
        model=typed["--model"],
        data=typed["--data"],
        loss=typed["--loss"],
        data_directory=typed["--data-directory"],
        delay_file=typed["--delay-file"],
    )


def train_served(
    options: TrainOptions | ServeOptions,
    recipe: Recipe,
    run: Callable[..., Trained],
    *,
    command: str,
    greeting: str,
    overrides: dict[str, str],
    to_repeat: str = "",
) -> None:
    """Train with a server: the recipe that was given, or the one of the run to resume.

    `to_repeat` are options that must be given again to go on: they belong to the machine, not to the run.
    """
    from paceline.runs import cluster

    notes, resume = Console(stderr=True), bool(options.resume)
    folder = run_folder(options.resume) if resume else new_folder(options.out, command)
    extension: Extension | None = None
    if resume:
        if "rounds" not in overrides and (done := _finished_rounds(folder)):
            return _tell_finished(folder, done, as_json=options.json)
        began = recorded_recipe(folder, names_given(overrides))
        before = cluster.extension_in(folder)
        extension = extend(began, before, overrides)
        recipe = began if extension is None else extension.of(began)
        if extension == before and _is_finished(folder, recipe.rounds):
            return _tell_finished(folder, recipe.rounds, as_json=options.json)
        run = functools.partial(run, began, extension=extension)
    else:
        run = functools.partial(run, recipe)
    with notes.status(f"loading torch, {recipe.data.name} and {recipe.model.name}"):
        import paceline.drivers.served.run  # noqa: F401 - it takes seconds, and somebody is watching
        from paceline.drivers.served.transport import tune_server_process
    tune_server_process()
    with live_page(options.live, folder, notes), logging_view(notes, options.log, folder) as view:

        def greet(address: str) -> None:
            view.note(greeting.format(address=address, workers=recipe.cluster.workers))

        gone: cluster.WorkersEndedError | None = None
        try:
            trained = run(out=folder, resume=resume, on_open=greet, on_standing=view.show)
        except cluster.WorkersEndedError as ended:
            if ended.trained is None:
                raise
            gone, trained = ended, ended.trained
    assert trained.result is not None
    for error in dict.fromkeys(trained.outcome.errors):
        note(notes, f"error: {error}", style="red")
    kept = not trained.outcome.lost
    try:
        show_results(_recipe_of(trained, recipe), [trained.result], folder, notes, as_json=options.json)
    except ResultsNotKept as error:
        kept = False
        note(notes, f"error: {error}", style="red")
    if not trained.outcome.finished:
        again = _command_to_resume(command, folder, recipe) + to_repeat
        if gone is not None:
            note(notes, f"the run is kept; once the reason below is mended, go on with: {again}")
            raise gone
        note(notes, f"{trained.outcome.reason}; go on with: {again}")
        raise KeyboardInterrupt
    if not kept:
        raise RunNotKept(f"all rounds are done, but not all of the run is in {folder}: see the errors above")


def _command_to_resume(command: str, folder: Path, recipe: Recipe) -> str:
    from paceline.runs.cluster import names_to_give_again

    return shlex.join(["paceline", command, "--resume", str(folder), *names_to_give_again(recipe)])


def _is_finished(folder: Path, rounds: int) -> bool:
    """Tell whether the trace of a run says that so many rounds are done."""
    last = read_journal(folder / TRACE).records[-1] if (folder / TRACE).is_file() else None
    return isinstance(last, RunEnded) and last.rounds_done >= rounds


def _finished_rounds(folder: Path) -> int:
    """Return the rounds of a run that is over, or 0: nobody has to name code and paths for one that is."""
    if not (folder / TRACE).is_file():
        return 0
    journal = read_journal(folder / TRACE)
    last = journal.records[-1]
    total = journal.began.recipe.get("rounds", 0) if journal.extended is None else journal.extended.rounds
    return last.rounds_done if isinstance(last, RunEnded) and 0 < total <= last.rounds_done else 0


def _tell_finished(folder: Path, rounds: int, *, as_json: bool) -> None:
    """Say that a run is over; with --json its results are printed again, as they were stored."""
    if as_json:
        if not (folder / RESULTS).is_file():
            raise UsageError(f"{folder} is finished, but has no {RESULTS}: leave out --json, or see its {TRACE}")
        print(json.dumps(parse_object(read_plain(folder / RESULTS, most_bytes=MOST_RESULTS_BYTES)), indent=2))
    text = f"{folder} is finished: all {rounds} rounds are done; for more, give --rounds with their total"
    note(Console(stderr=True), text)


def recorded_recipe(folder: Path, names: WorkerOptions) -> Recipe:
    """Return the recipe of a run with a server, with the code and the paths that were typed."""
    from paceline.runs.cluster import recipe_of_run

    document = read_journal(folder / TRACE).began.recipe
    if not document:
        raise UsageError(f"{folder} is a run of a script: resume it there (paceline.serve(..., resume=True))")
    return recipe_of_run(folder, document, names)


# -- training by ranks, without a server -------------------------------------------------------------------------------


def _extension_of_ranks(overrides: dict[str, str]) -> Extension | None:
    """Return what was typed beside --resume to extend a run of ranks."""
    if "rounds" not in overrides:
        return None
    refuse_restated(filter(may_be_restated, overrides))
    return Extension(rounds=given_recipe("", {"rounds": overrides["rounds"]}).rounds)


def _train_ranks(options: TrainOptions, recipe: Recipe, overrides: dict[str, str]) -> None:
    """Be a rank of a launch, or start the ranks and wait for them; rank 0, or who started them, shows results."""
    from paceline.runs import cluster
    from paceline.runs.training import train_recipe

    place, resume, extension = place_in(os.environ), bool(options.resume), None
    folder = Path(options.resume or options.out)
    if resume:
        if "rounds" not in overrides and (done := _finished_rounds(folder)):
            return _tell_finished(folder, done, as_json=options.json)
        document = read_recipe_of(folder).to_document()
        recipe = cluster.recipe_of_run(folder, document, names_given(overrides))
        extension = _extension_of_ranks(overrides)
        rounds = rounds_to_train(folder, recipe, extension) or recipe.rounds
        if recipe.strategy.rounds_on_ranks and _is_finished(folder, rounds):
            return _tell_finished(folder, rounds, as_json=options.json)
    elif place is None:
        folder = new_folder(options.out, "train")
    elif options.live is not None and not options.out:
        raise UsageError("--live follows a folder: give --out FOLDER as well, the same to every rank of the launch")
    notes = Console(stderr=True)
    if place is None:
        with notes.status(f"loading torch, {recipe.data.name} and {recipe.model.name}"):
            import paceline.training  # noqa: F401 - it takes seconds, and somebody is watching
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM ends the ranks as well
    shown = place is None or place.rank == 0
    try:
        with (
            live_page(options.live if shown else None, folder, notes),
            logging_view(notes, options.log, folder, shown=shown) as view,
        ):
            trained = train_recipe(
                recipe,
                out=folder if resume or place is None else options.out or None,
                resume=resume,
                extension=extension,
                listen=options.listen,
                on_standing=view.show,
                on_plan=lambda plan: view.note(f"pipeline: {_headline(plan)}"),
            )
    except BaseException:
        if shown and os.environ.get(STARTED) != LAUNCHER:
            by_srun = STARTED in os.environ
            launcher = "" if place is None or by_srun else "torchrun ... -m "
            tell_how_to_go_on(folder, recipe, notes, launcher=launcher, to_repeat=" --on slurm" if by_srun else "")
        raise
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    if trained.result is not None:
        show_results(_recipe_of(trained, recipe), [trained.result], trained.folder, notes, as_json=options.json)


def tell_how_to_go_on(folder: Path, recipe: Recipe, notes: Console, *, launcher: str = "", to_repeat: str = "") -> None:
    """Print the command that goes on with a run of ranks, if it has a checkpoint."""
    if any((folder / "rank-0").glob("checkpoint-*")):
        again = f"{launcher}{_command_to_resume('train', folder, recipe)}{to_repeat}"
        note(notes, f"go on from the last checkpoint with: {again}")


def _recipe_of(trained: Trained, given: Recipe) -> Recipe:
    """Return the recipe that ran, with every number that it did not name."""
    document = trained.result.trace.recipe if trained.result is not None else {}
    return Recipe.from_document(document) if document else given


def _headline(plan: Plan) -> str:
    from paceline.pipeline.text import headline

    return headline(plan)


class RunNotKept(PacelineError, OSError):  # noqa: N818 - what happened, in the past tense
    """A run that was done, and that no disk has taken whole.

    >>> raise RunNotKept("all rounds are done, but not all of the run is in runs/train: see the errors above")
    Traceback (most recent call last):
    paceline.cli.cluster.RunNotKept: all rounds are done, but not all of the run is in runs/train: see the errors above
    """
