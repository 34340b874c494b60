"""The commands that train on a real cluster: `paceline train` and `paceline serve`.

`paceline train` runs a recipe in one of two ways, depending on its strategy: with a parameter server, as `paceline
serve` does, or with ranks, which have no server and average or are the stages of pipelines. Ranks are forked here, or
the command is itself a rank of a launch by torchrun.
"""

from __future__ import annotations

import functools
import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paceline.cli.options import (
    RECIPE_FILE,
    UsageError,
    argument,
    debug_option,
    given_recipe,
    json_option,
    option,
    out_option,
)
from paceline.cli.output import ResultsNotKept, is_ranks_run, new_folder, note, run_folder, show_results
from paceline.cli.progress import RunView
from paceline.drivers.ranks.launch import place_in
from paceline.errors import PacelineError
from paceline.processes import check_processes
from paceline.recipes import Recipe
from paceline.recipes.assembly import averages
from paceline.recipes.extension import Extension, check_extendable, extend, may_be_restated
from paceline.runs.ranks import read_recipe_of, rounds_in
from paceline.traces.journal import TRACE, RunEnded
from paceline.traces.journal_files import read_journal
from paceline.traces.run_folder import check_free

if TYPE_CHECKING:
    from paceline.drivers.ranks.launch import Place
    from paceline.pipeline.plan import Plan
    from paceline.runs.cluster import Trained, WorkerOptions

# The settings of a recipe that name code and paths: no folder of a run may name them, so they are given again.
GIVEN_AGAIN = ("model.name", "data.directory", "delay.file")


@dataclass(frozen=True)
class TrainOptions:
    """Train with real processes.

    A parameter server and its workers, ranks without one, or the stages of a pipeline.

    Ranks (--on ranks; hpsgd, ...; stages = 2) also join a launch: torchrun ... -m paceline train RECIPE --out FOLDER
    """

    recipe_file: str = argument("[RECIPE]", RECIPE_FILE, default="")
    out: str = out_option("trace, checkpoints and report", "runs/train")
    resume: str = option(
        "",
        "go on with the run in this folder, from its newest checkpoint; a folder names no code and no paths, so give "
        "--model, --data-directory and --delay-file again if the run has them",
        metavar="FOLDER",
    )
    listen: str = option("127.0.0.1:0", "where the server listens; more workers can join there", metavar="HOST:PORT")
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
    out: str = out_option("trace, checkpoints and report", "runs/serve")
    resume: str = option(
        "",
        "go on with the run in this folder, from its newest checkpoint; a folder names no code and no paths, so give "
        "--model, --data-directory and --delay-file again if the run has them",
        metavar="FOLDER",
    )
    json: bool = json_option()
    debug: bool = debug_option()


def train(options: TrainOptions, overrides: dict[str, str]) -> None:
    from paceline.runs import cluster

    _check_resume_alone(options, overrides)
    place = place_in(os.environ)
    if options.resume and is_ranks_run(options.resume):
        folder = Path(options.resume)
        document = read_recipe_of(folder).to_document()
        began = cluster.recipe_of_run(folder, document, _names_given(overrides))
        return _train_ranks(options, began, place, rounds=_rounds_of_ranks(folder, began, overrides))
    recipe = given_recipe(options.recipe_file, overrides)
    if _by_ranks(recipe) and not options.resume:
        return _train_ranks(options, _for_world(recipe, place), place)
    if place is not None:
        raise UsageError(
            f"{recipe.strategy.name} has a server, and starts its workers itself: run it without torchrun, or use "
            "`paceline serve` and `paceline work`; with --on ranks full, fastest-k and lgc run under torchrun, and "
            "hpsgd, its family and pipelines do"
        )
    greeting = "server at {address}; more workers: paceline work {address}"
    run = functools.partial(cluster.train, listen=options.listen)
    _serve(options, recipe, run, command="train", greeting=greeting, overrides=overrides)


def serve(options: ServeOptions, overrides: dict[str, str]) -> None:
    from paceline.runs import cluster

    _check_resume_alone(options, overrides)
    endpoint = cluster.ServerEndpoint(listen=options.listen, tls=options.tls or None, insecure=options.insecure)
    recipe = given_recipe(options.recipe_file, overrides)
    if _by_ranks(recipe) and not options.resume:
        kind = "a pipeline" if recipe.pipeline.on else "averaging" if averages(recipe) else recipe.strategy.label
        raise UsageError(f"{kind} has no server: use `paceline train`, or torchrun ... -m paceline train RECIPE")
    greeting = "server at {address}: waiting for {workers} workers"
    run = functools.partial(cluster.serve_recipe, endpoint=endpoint)
    _serve(options, recipe, run, command="serve", greeting=greeting, overrides=overrides)


def _check_resume_alone(options: TrainOptions | ServeOptions, overrides: dict[str, str]) -> None:
    if not options.resume:
        return
    unknown = [name for name in overrides if name not in (*GIVEN_AGAIN, "rounds") and not may_be_restated(name)]
    refused = [f"--{name.replace('_', '-')}" for name in unknown]
    refused += ["--out"] if options.out else []
    refused += [options.recipe_file] if options.recipe_file else []
    if refused:
        raise UsageError(
            f"--resume goes on with the run's own recipe, in its own folder: leave out {', '.join(refused)}; "
            "--model, --data-directory and --delay-file may be given, which name code and paths, and --rounds for more"
        )
    if "rounds" not in overrides and (given := [name for name in overrides if may_be_restated(name)]):
        raise UsageError(f"--{given[0].replace('_', '-')} is given again only with --rounds, which extends the run")


def _names_given(overrides: dict[str, str]) -> WorkerOptions:
    """Return the code and the paths that were typed beside --resume."""
    from paceline.runs.cluster import WorkerOptions

    model, directory, delay_file = (overrides.get(name, "") for name in GIVEN_AGAIN)
    return WorkerOptions(model=model, data_directory=directory, delay_file=delay_file)


def _serve(
    options: TrainOptions | ServeOptions,
    recipe: Recipe,
    run: Callable[..., Trained],
    *,
    command: str,
    greeting: str,
    overrides: dict[str, str],
) -> None:
    """Train with a server: the recipe that was given, or the one of the run to resume."""
    from paceline.runs import cluster

    notes, resume = Console(stderr=True), bool(options.resume)
    folder = run_folder(options.resume) if resume else new_folder(options.out, command)
    extension: Extension | None = None
    if resume:
        began = _recorded_recipe(folder, _names_given(overrides))
        before = cluster.extension_in(folder)
        extension = extend(began, before, overrides)
        recipe = began if extension is None else extension.of(began)
        if extension == before and _is_finished(folder, recipe.rounds):
            return _note_finished(folder, recipe.rounds)
        run = functools.partial(run, began, extension=extension)
    else:
        run = functools.partial(run, recipe)
    with notes.status(f"loading torch, {recipe.data.name} and {recipe.model.name}"):
        import paceline.drivers.served.run  # noqa: F401 - it takes seconds, and somebody is watching
    with RunView(notes) as view:

        def greet(address: str) -> None:
            view.note(greeting.format(address=address, workers=recipe.cluster.workers))

        trained = run(folder=folder, resume=resume, on_open=greet, on_standing=view.show)
    for error in dict.fromkeys(trained.outcome.errors):
        note(notes, f"error: {error}", style="red")
    kept = not trained.outcome.lost
    try:
        show_results(recipe, [trained.result], folder, notes, as_json=options.json)
    except ResultsNotKept as error:
        kept = False
        note(notes, f"error: {error}", style="red")
    if not trained.outcome.finished:
        again = _command_to_resume(command, folder, recipe) + _options_to_repeat(options)
        note(notes, f"{trained.outcome.reason}; go on with: {again}")
        raise KeyboardInterrupt
    if not kept:
        raise RunNotKept(f"all rounds are done, but not all of the run is in {folder}: see the errors above")


def _command_to_resume(command: str, folder: Path, recipe: Recipe) -> str:
    from paceline.runs.cluster import names_to_give_again

    return shlex.join(["paceline", command, "--resume", str(folder), *names_to_give_again(recipe)])


def _options_to_repeat(options: TrainOptions | ServeOptions) -> str:
    """Return the options that must be given again: they belong to the machine, not to the run."""
    if isinstance(options, TrainOptions):
        return ""
    tls = f" --tls {options.tls}" if options.tls else ""
    return f" --listen {options.listen}{tls}{' --insecure' if options.insecure else ''}"


def _is_finished(folder: Path, rounds: int) -> bool:
    """Tell whether the trace of a run says that so many rounds are done."""
    last = read_journal(folder / TRACE).records[-1] if (folder / TRACE).is_file() else None
    return isinstance(last, RunEnded) and last.rounds_done >= rounds


def _note_finished(folder: Path, rounds: int) -> None:
    text = f"{folder} is finished: all {rounds} rounds are done; for more, give --rounds with their total"
    note(Console(stderr=True), text)


def _recorded_recipe(folder: Path, names: WorkerOptions) -> Recipe:
    from paceline.runs.cluster import recipe_of_run

    document = read_journal(folder / TRACE).began.recipe
    if not document:
        raise UsageError(f"{folder} is a run of a script: resume it there (paceline.serve(..., resume=True))")
    return recipe_of_run(folder, document, names)


# -- training by ranks, without a server -------------------------------------------------------------------------------


def _by_ranks(recipe: Recipe) -> bool:
    """Tell whether a recipe is carried out by ranks, without a server.

    >>> [_by_ranks(Recipe().with_strategy(name)) for name in ("lgc", "lgc@ranks", "hpsgd")]
    [False, True, True]
    """
    return averages(recipe) or recipe.pipeline.on or recipe.strategy.rounds_on_ranks


def _rounds_of_ranks(folder: Path, recipe: Recipe, overrides: dict[str, str]) -> int | None:
    """Return the rounds in all of a run to resume, if they are others than its recipe's."""
    now = rounds_in(folder)
    wanted = given_recipe("", {"rounds": overrides["rounds"]}).rounds if "rounds" in overrides else None
    if wanted is None or wanted == (now or recipe.rounds):
        return now
    if given := [name for name in overrides if may_be_restated(name)]:
        raise UsageError(f"ranks keep their schedule and pruning: leave --{given[0].replace('_', '-')} out")
    check_extendable(recipe)
    done = max((int(path.name.rpartition("-")[2]) for path in folder.glob("rank-*/checkpoint-[0-9]*")), default=0)
    if wanted < done:
        raise UsageError(f"rounds must be at least {done}, which are done (rounds={wanted})")
    return wanted


def _train_ranks(options: TrainOptions, recipe: Recipe, place: Place | None, *, rounds: int | None = None) -> None:
    """Be a rank, or start the ranks and wait for them."""
    if options.listen != type(options).listen:
        raise UsageError("--listen is for a parameter server, and ranks have none: torchrun says where they meet")
    if place is not None and not options.resume and not options.out:
        raise UsageError("under torchrun, give --out: all ranks, and those of a restart, must find the same folder")
    # Whether a folder that holds a run belongs to this launch, started again, is known only when its ranks have met.
    as_named = options.resume or (place is not None and options.out)
    folder = Path(as_named) if as_named else new_folder(options.out, "train")
    if as_named and not options.resume and not any(folder.glob("rank-*/launch")):
        check_free(folder)
    if options.resume and recipe.strategy.rounds_on_ranks and _is_finished(folder, rounds or recipe.rounds):
        return _note_finished(folder, rounds or recipe.rounds)
    job = _RankJob(recipe=recipe, folder=folder, resume=bool(options.resume), rounds=rounds, options=options)
    if place is None:
        _fork_ranks(job)
    else:
        job.train(place)


@dataclass(frozen=True, kw_only=True)
class _RankJob:
    """The work of each rank of a run."""

    recipe: Recipe
    folder: Path
    resume: bool
    rounds: int | None
    options: TrainOptions

    @property
    def _how(self) -> dict[str, Any]:
        return {"folder": self.folder, "resume": self.resume, "rounds": self.rounds}

    def run_forked(self, place: Place) -> int:
        """Train as a rank that was forked, and return the exit code."""
        from paceline.cli.main import exit_code

        return exit_code(lambda: self.train(place), debug=self.options.debug)

    def train(self, place: Place) -> None:
        """Train as a rank; rank 0 shows progress and results."""
        from paceline.runs.pipelines import train_stage
        from paceline.runs.ranks import train_rank

        recipe = _for_world(self.recipe, place)
        notes = Console(stderr=True)
        with RunView(notes, shown=place.rank == 0) as view:

            def show_plan(plan: Plan) -> None:
                from paceline.pipeline.text import headline

                view.note(f"pipeline: {headline(plan)}")

            if recipe.pipeline.on:
                result = train_stage(recipe, place, **self._how, on_plan=show_plan, on_standing=view.show)
            else:
                result = train_rank(recipe, place, **self._how, on_standing=view.show)
        if result is not None:
            show_results(recipe, [result], self.folder, notes, as_json=self.options.json)


def _for_world(recipe: Recipe, place: Place | None) -> Recipe:
    """Return the recipe with the launch's number of ranks; without a launch, with its own."""
    if recipe.pipeline.on:
        from paceline.runs.pipelines import for_ranks

        return for_ranks(recipe, None if place is None else place.world)
    if place is None or recipe.cluster.workers == place.world:
        return recipe
    return recipe.with_settings(cluster={"workers": place.world})


def _fork_ranks(job: _RankJob) -> None:
    from paceline.drivers.ranks.launch import LocalRanks

    recipe, folder = job.recipe, job.folder
    world = recipe.pipeline.ranks if recipe.pipeline.on else recipe.cluster.workers
    check_processes(world)
    with Console(stderr=True).status(f"loading torch, {recipe.data.name} and {recipe.model.name}"):
        if recipe.pipeline.on:  # once, before the ranks fork
            import paceline.drivers.pipelining.job
            import paceline.drivers.pipelining.planning
        elif recipe.strategy.rounds_on_ranks:
            import paceline.drivers.rounds.job
        else:
            import paceline.drivers.averaging.job  # noqa: F401
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM ends the ranks as well
    try:
        code = LocalRanks(job.run_forked, world, logs=folder).wait()
    except BaseException:
        if any((folder / "rank-0").glob("checkpoint-*")):
            again = _command_to_resume("train", folder, recipe)
            note(Console(stderr=True), f"go on from the last checkpoint with: {again}")
        raise
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    if code:
        raise SystemExit(code)  # rank 0 has printed the reason


class RunNotKept(PacelineError, OSError):  # noqa: N818 - what happened, in the past tense
    """A run that was done, and that no disk has taken whole.

    >>> raise RunNotKept("all rounds are done, but not all of the run is in runs/train: see the errors above")
    Traceback (most recent call last):
    paceline.cli.cluster.RunNotKept: all rounds are done, but not all of the run is in runs/train: see the errors above
    """
