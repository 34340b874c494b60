"""A recipe carried out on real workers: the server's side, a worker's side, and both on one machine."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data import DATASETS
from paceline.errors import PacelineError
from paceline.pipeline.settings import refuse_pipeline
from paceline.quantities import counted
from paceline.recipes.assembly import (
    NOTHING_GIVEN,
    Given,
    averages,
    codec_text_of,
    going_on,
    load_data,
    make_delays,
    make_strategy,
    make_training,
    recorded_recipe,
    refuse_late_blocks,
    resolved,
)
from paceline.recipes.extension import Extension
from paceline.recipes.recipe import Recipe
from paceline.renaming import as_recorded
from paceline.runs.event_loops import StopReason, run_to_end
from paceline.runs.forked_workers import ForkedWorkers, Reasons
from paceline.runs.simulation import Result, give_notices, state_with
from paceline.strategies import STRATEGIES
from paceline.traces import summarise
from paceline.traces.run_folder import next_free_folder, take_folder
from paceline.user_code import is_code

if TYPE_CHECKING:
    from paceline.data import Dataset
    from paceline.drivers.served.run import RunOutcome
    from paceline.drivers.served.security import Tls
    from paceline.drivers.served.settings import ServerSettings
    from paceline.traces.run_status import RunStatus
    from paceline.workers.paced import Delay

OnStanding = Callable[["RunStatus"], None]
WorkersProcess = subprocess.Popen[bytes] | ForkedWorkers


@dataclass(frozen=True, kw_only=True)
class ServerEndpoint:
    """Where a server listens, and with which keys; an address that is open to strangers is refused.

    >>> ServerEndpoint(listen="127.0.0.1:0").tls is None
    True
    >>> ServerEndpoint(listen="0.0.0.0:29400")
    Traceback (most recent call last):
    paceline.drivers.served.security.AddressError: ...
    """

    listen: str = "127.0.0.1:29400"
    tls: Tls | None = None
    insecure: bool = False
    open: bool = False  # on loopback, to every user of this machine

    def __post_init__(self) -> None:
        from paceline.drivers.served.security import check_exposed

        host, _ = self.address
        check_exposed(host, tls=self.tls, insecure=self.insecure, open=self.open)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port."""
        from paceline.drivers.served.security import parse_address

        return parse_address(self.listen)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run that is over: how it ended, what it came to, and the folder with its trace and checkpoints.

    Inside a launch (torchrun) rank 0 has the result, and the others None.
    """

    outcome: RunOutcome
    result: Result | None
    folder: Path


class WorkersEndedError(PacelineError, ChildProcessError):
    """All workers that were started for a run have ended before it was over; `trained` is what it had come to.

    >>> raise WorkersEndedError("all 4 workers have ended: worker 2: there is no my_models")
    Traceback (most recent call last):
    paceline.runs.cluster.WorkersEndedError: all 4 workers have ended: worker 2: there is no my_models
    """

    def __init__(self, reason: str, trained: Trained | None = None) -> None:
        super().__init__(reason)
        self.trained = trained


def make_served(
    recipe: Recipe,
    folder: Path,
    dataset: Dataset | None = None,
    *,
    extension: Extension | None = None,
    given: Given = NOTHING_GIVEN,
) -> ServerSettings:
    """Put together the server's side of a recipe, or of one whose total is another by now."""
    began = recipe.to_document()
    if extension is not None:
        recipe = extension.of(recipe)
    refuse_without_server(recipe)
    from paceline.data.sketch import sketch_of
    from paceline.drivers.served.settings import Limits, ServerSettings
    from paceline.optim import make_optimizer
    from paceline.training.training import MeasuredCopy, measure

    training = make_training(recipe, load_data(recipe, given) if dataset is None else dataset, given)
    module = training.module
    optimizer, schedule = make_optimizer(training.optimizer, module.parameters(), total_steps=training.total_steps)
    return ServerSettings(
        module=module,
        optimizer=optimizer,
        schedule=schedule,
        strategy=make_strategy(recipe),
        rounds=recipe.rounds,
        workers=recipe.cluster.workers,
        folder=folder,
        codec=codec_text_of(recipe),
        blocks=recipe.worker.blocks,
        seed=recipe.seed,
        most_workers=recipe.server.most_workers,
        limits=Limits(
            silence_seconds=recipe.server.silence_seconds,
            stall_seconds=recipe.server.stall_seconds,
            gather_seconds=recipe.server.gather_seconds,
        ),
        measure=MeasuredCopy(module, lambda model: measure(model, training)),
        evaluate_every=recipe.evaluate_every,
        checkpoint_every=recipe.server.checkpoint_every,
        recipe=began,
        changes={} if extension is None else extension.changes,
        recipe_defaults=Recipe().to_document(),
        data=sketch_of(training.dataset),
    )


def refuse_without_server(recipe: Recipe) -> None:
    """Refuse a recipe that ranks carry out: it takes a process for each of them, and the command starts them.

    >>> refuse_without_server(Recipe().with_strategy("lgc@ranks"))
    Traceback (most recent call last):
    ValueError: lgc@ranks has no server: use `paceline train`, or torchrun ... -m paceline train RECIPE; ...
    """
    refuse_pipeline(recipe.pipeline, "a pipeline has no server")
    refuse_late_blocks(recipe)
    how = "use `paceline train`, or torchrun ... -m paceline train RECIPE"
    if recipe.strategy.rounds_on_ranks:
        raise ValueError(f"{recipe.strategy.label} has no server: {how}; or give on = server")
    if averages(recipe):
        raise ValueError(f"{recipe.strategy.name} has no server: {how}; or choose from {', '.join(STRATEGIES)}")


def extension_in(folder: Path) -> Extension | None:
    """Return the total that a run's trace says it has now; None if it is that of its recipe."""
    from paceline.traces.journal import TRACE
    from paceline.traces.journal_files import read_journal

    found = read_journal(folder / TRACE).extended if (folder / TRACE).is_file() else None
    return None if found is None else Extension(rounds=found.rounds, changes=found.changes)


def serve_recipe(
    recipe: Recipe,
    endpoint: ServerEndpoint,
    out: Path,
    *,
    resume: bool = False,
    extension: Extension | None = None,
    given: Given = NOTHING_GIVEN,
    on_ready: Callable[[Dataset], None] = lambda dataset: None,
    on_open: Callable[[str], None] = lambda address: None,
    on_standing: OnStanding = lambda standing: None,
    reason_to_stop: Callable[[RunStatus], str | None] = lambda standing: None,
    workers_gone: Callable[[], str | None] = lambda: None,
) -> Trained:
    """Serve a recipe until all rounds are done, or somebody stops it.

    `extension` is another total for a run that is resumed; without it, the one that its trace has. `on_ready` is called
    with the data once nothing is left to refuse, before the server listens. `workers_gone` tells why the workers that
    were started for the run have all ended: where nobody else works, the run ends with a checkpoint, and
    WorkersEndedError is raised.
    """
    from paceline.drivers.served.run import open_run
    from paceline.drivers.served.security import join_address, server_credentials
    from paceline.drivers.served.server import check_listens
    from paceline.traces.history import trace_of
    from paceline.traces.journal import TRACE
    from paceline.traces.journal_files import read_journal
    from paceline.workers.threads import threads_for

    credentials = server_credentials(endpoint.tls) if endpoint.tls else None
    host, port = endpoint.address
    check_listens(host, port)
    if resume and extension is None:
        extension = extension_in(out)
    refuse_without_server(recipe)
    if resume and (out / TRACE).is_file():
        began = read_journal(out / TRACE).began.recipe
        recipe = going_on(recipe, recorded_recipe(began)) if began else recipe
    dataset = load_data(recipe, given)
    served = make_served(resolved(recipe, dataset), out, dataset, extension=extension, given=given)
    if not resume:
        give_notices((recipe, None))
    on_ready(dataset)
    size = sum(parameter.numel() for parameter in served.module.parameters())
    gone: list[str] = []

    def why_stop(standing: RunStatus, told: str | None) -> str | None:
        if told is not None:
            return told
        if not any(worker.alive for worker in standing.workers) and (why := workers_gone()) is not None:
            gone.append(f"all {counted(recipe.cluster.workers, 'worker')} have ended: {why}")
            return gone[0]
        return reason_to_stop(standing)

    async def run(reason: StopReason) -> tuple[RunOutcome, Any]:
        opened = open_run(served, resume=resume)
        outcome = await opened.serve(
            (host, port),
            credentials,
            open=endpoint.open,
            on_open=lambda port: on_open(join_address(host, port)),
            on_standing=on_standing,
            reason_to_stop=lambda standing: why_stop(standing, reason()),
        )
        return outcome, opened.coordinator.train_state.model

    with threads_for(size):
        outcome, model = run_to_end(run)
    trace = trace_of(read_journal(out / TRACE))
    parameters, state = model.parameters, state_with(model.module, model.parameters)
    result = Result(summary=summarise(trace), trace=trace, parameters=parameters, state_dict=state)
    trained = Trained(outcome=outcome, result=result, folder=out)
    if not outcome.finished and outcome.reason in gone:
        raise WorkersEndedError(outcome.reason, trained)
    return trained


# -- a worker's side -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """A worker's own options: code and paths, which no message of a server may name, and how patient it is.

    >>> WorkerOptions(model="my_models:net").patience_seconds
    60.0
    """

    tls: Tls | None = None
    model: str = ""
    data: str = ""
    loss: str = ""
    data_directory: str = ""
    delay_file: str = ""
    given: Given = NOTHING_GIVEN
    wish: int | None = None
    patience_seconds: float = 60.0
    threads: int = 0
    run: str = ""


def work_for(
    address: str,
    options: WorkerOptions,
    *,
    on_welcome: Callable[[int, Recipe], None] = lambda worker, recipe: None,
    on_gradient: Callable[[int], None] = lambda sent: None,
) -> None:
    """Work for a server that serves a recipe, until training is over."""
    import torch

    from paceline.data.reading import DatasetError
    from paceline.data.sketch import data_difference, refusal, sketch_of
    from paceline.drivers.served.job import work
    from paceline.drivers.served.worker import Worker
    from paceline.traces.journal import MOST_THREADS

    if not 0 <= options.threads <= MOST_THREADS:
        raise ValueError(f"threads must be between 0 and {MOST_THREADS:,} (threads={options.threads})")
    if options.threads:
        torch.set_num_threads(options.threads)
    patience, run = options.patience_seconds, options.run or None
    worker = Worker(address, None, tls=options.tls, patience_seconds=patience, wish=options.wish, run=run)
    with worker:
        if not worker.training_may_begin:
            return
        recipe = trusted_recipe(worker.welcome.recipe, options)
        refuse_pipeline(recipe.pipeline, "a pipeline has no server")
        dataset = load_data(recipe, options.given)
        if different := data_difference(sketch_of(dataset), worker.welcome.data, there=f"on {SERVER}"):
            raise DatasetError(refusal(dataset.name, different))
        training = make_training(recipe, dataset, options.given)
        on_welcome(worker.number, recipe)
        worker.hold(training.module)
        worker.ready()
        work(worker, training.module, training, delay_of(recipe), on_gradient=on_gradient)


SERVER = "the server"
CODE = (  # the options that name code, the settings that hold it, and what is said of them
    ("--model", ("model", "name"), ("trains", "a network")),
    ("--data", ("data", "name"), ("reads", "a data set")),
    ("--loss", ("model", "loss"), ("makes small", "a loss")),
)
GIVEN_AGAIN = {  # all options that name code or paths: no server and no folder of a run may name them
    **{option: ".".join(path) for option, path, _ in CODE},
    "--data-directory": "data.directory",
    "--delay-file": "delay.file",
}


def _at(recipe: Recipe, path: tuple[str, str]) -> str:
    return str(getattr(getattr(recipe, path[0]), path[1]))


def _code_to_give(
    missing: Sequence[tuple[str, str, tuple[str, str]]], recipe: Recipe, options: WorkerOptions, source: str
) -> str:
    """Return the line that asks for all that no server and no folder may name."""
    named = " and ".join(f"{does} {name!r}" for _, name, (does, _) in missing)
    if any(name.startswith("script:") for _, name, _ in missing):
        objects = ", ".join(f"{option[2:]}=..." for option, _, _ in missing)
        how = f"use paceline.replay(folder, {objects}), or paceline.train(recipe, out=folder, resume=True, {objects})"
        return f"{source} {named}, which was given by a script: {how}"
    kinds = " and ".join(what for _, _, (_, what) in missing)
    asked = {option: name for option, name, _ in missing}
    again = names_to_give_again(recipe)
    for option, given in (("--data-directory", options.data_directory), ("--delay-file", options.delay_file)):
        if option in again and not given and source != SERVER:
            asked[option] = again[again.index(option) + 1]
    words = shlex.join(word for pair in asked.items() for word in pair)
    return f"{source} {named}, which is code and not {kinds} by name; if you have it and trust it, give {words}"


def trusted_recipe(document: Mapping[str, Any], options: WorkerOptions, *, source: str = SERVER) -> Recipe:
    """Return a recipe from elsewhere with nothing in it that would import code or read a path of its source's choosing.

    >>> trusted_recipe(Recipe().with_settings(data={"directory": "/etc"}).to_document(), WorkerOptions()).data.directory
    ''
    >>> trusted_recipe(Recipe().with_settings(model={"name": "evil:net"}).to_document(), WorkerOptions())
    Traceback (most recent call last):
    ValueError: the server trains 'evil:net', which is code and not a network by name; if you have it and trust it, ...
    """
    if not document:
        raise ValueError("the server was started by a script and has no recipe; use paceline.Worker in a script too")
    recipe = Recipe.from_document(document)
    missing = []
    for option, path, kind in CODE:
        named, mine = _at(recipe, path), getattr(options, path[0] if path[1] == "name" else path[1])
        if is_code(named) and not mine and getattr(options.given, option[2:]) is None:
            missing.append((option, named, kind))
        if mine and not is_code(named) and mine != named:
            raise ValueError(f"{source} {kind[0]} {named}, and you gave {option} {mine}: leave it out")
    if missing:
        raise ValueError(_code_to_give(missing, recipe, options, source))
    norm = recipe.model.norm if options.model in ("", recipe.model.name) else ""
    recipe = recipe.with_settings(
        data={"directory": options.data_directory, "name": options.data or recipe.data.name},
        model={"name": options.model or recipe.model.name, "loss": options.loss or recipe.model.loss, "norm": norm},
    )
    recipe = options.given.named(recipe)
    if recipe.delay.name == "recorded":
        if recipe.delay.inject and not options.delay_file:
            raise ValueError(f"{source} injects recorded delays; give the file with them as --delay-file")
        recipe = recipe.with_settings(delay={"file": options.delay_file or "not read"})
    return recipe


def recipe_of_run(folder: Path, document: Mapping[str, Any], options: WorkerOptions) -> Recipe:
    """Return the recipe that a run's folder holds, with the code and the paths that `options` name.

    Nothing in a folder proves where it comes from, so what it names is asked for again, always. A pipeline's plan is
    the one in the folder.

    >>> document = Recipe().with_settings(data={"name": "mnist", "directory": "/data"}).to_document()
    >>> recipe_of_run(Path("runs/train"), document, WorkerOptions())
    Traceback (most recent call last):
    ValueError: the run in runs/train read mnist in /data, and no folder may say what is read; if that is the data, ...
    """
    document = as_recorded(document)
    source, named = f"the run in {folder}", Recipe.from_document(document)
    recipe = trusted_recipe(document, options, source=source)
    ask_for_directory(named, options.data_directory, source=source)
    if named.pipeline.plan:
        from paceline.drivers.pipelining.planning import PLAN

        return recipe.with_settings(pipeline={"plan": str(folder / PLAN)})
    return recipe


def ask_for_directory(named: Recipe, given: str, *, source: str) -> None:
    """Refuse to read data in a directory that a folder's recipe names, unless one is given.

    >>> ask_for_directory(Recipe().with_settings(data={"directory": "/data"}), "", source="the run")  # digits has none
    """
    if _reads_directory(named) and not given:
        raise ValueError(
            f"{source} read {named.data.name} in {named.data.directory}, and no folder may say what is read; "
            f"if that is the data, give --data-directory {shlex.quote(named.data.directory)}"
        )


def names_to_give_again(recipe: Recipe) -> list[str]:
    """Return the options that name a recipe's code and paths, which no server and no folder may name.

    >>> names_to_give_again(Recipe().with_settings(model={"name": "my_models:net"}))
    ['--model', 'my_models:net']
    """
    names = {option: _at(recipe, path) if is_code(_at(recipe, path)) else "" for option, path, _ in CODE} | {
        "--data-directory": recipe.data.directory if _reads_directory(recipe) else "",
        "--delay-file": recipe.delay.file if recipe.delay.name == "recorded" and recipe.delay.inject else "",
    }
    return [word for option, name in names.items() if name for word in (option, name)]


def _reads_directory(recipe: Recipe) -> bool:
    return bool(recipe.data.directory) and (is_code(recipe.data.name) or DATASETS[recipe.data.name].needs_files)


def delay_of(recipe: Recipe) -> Delay:
    """Return how many seconds a worker is slowed down, for each worker and draw."""
    from paceline.workers.paced import no_delay, seconds_of_batch

    if not recipe.delay.inject:
        return no_delay
    delays = make_delays(recipe)

    def delay_seconds(worker: int, draw: int, samples: int | None = None, /) -> float:
        column = worker % recipe.cluster.workers  # a worker beyond the shards is as slow as one of them
        seconds = float(delays.seconds(np.asarray(column, dtype=np.int64), np.asarray(draw, dtype=np.int64)))
        size = recipe.worker.batch_size
        return seconds_of_batch(
            seconds, size if samples is None else samples, batch_size=size, fixed_seconds=recipe.delay.fixed_seconds
        )

    return delay_seconds


# -- both on one machine -------------------------------------------------------------------------------------------


def folder_to_train(out: str | Path | None, *, resume: bool) -> Path:
    """Return the folder for a run: the one that was named, if it is free or goes on, or else the next that is free."""
    wanted = Path("runs", "train") if out is None else Path(out)
    if resume:
        return wanted
    return next_free_folder(wanted) if out is None else take_folder(wanted)


def check_loopback(endpoint: ServerEndpoint) -> None:
    """Refuse a server for other machines.

    >>> check_loopback(ServerEndpoint(listen="0.0.0.0:0", insecure=True))
    Traceback (most recent call last):
    ValueError: train is for this machine alone (listen=0.0.0.0:0); `paceline serve` is for others
    """
    from paceline.drivers.served.security import is_loopback

    if not is_loopback(endpoint.address[0]):
        raise ValueError(f"train is for this machine alone (listen={endpoint.listen}); `paceline serve` is for others")


class LocalWorkers:
    """Workers on this machine, which wait for the address of the server; those that are given objects are forked.

    They compute with one thread each, as all workers of one machine do. `run` is the run's folder.
    """

    def __init__(self, recipe: Recipe, numbers: Sequence[int], given: Given = NOTHING_GIVEN, *, run: Path) -> None:
        self._reasons = Reasons()
        writing = self._reasons.writing
        self._process: WorkersProcess
        if given:
            named: dict[str, Any] = {option[2:]: _at(recipe, path) for option, path, _ in CODE}
            options = WorkerOptions(
                **{option: name for option, name in named.items() if is_code(name)},
                given=given,
                data_directory=recipe.data.directory,
                delay_file=recipe.delay.file,
                threads=1,
                run=str(run),
            )
            self._process = ForkedWorkers(
                numbers, lambda address, number: work_for(address, replace(options, wish=number)), reasons=writing
            )
        else:
            arguments = ["--numbers", ",".join(map(str, numbers)), "--reasons", str(writing), "--run", str(run)]
            # In a session of its own: a Ctrl-C in the terminal is for the server, which says what becomes of workers.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.runs.local_workers", *arguments, *names_to_give_again(recipe)],
                stdin=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[writing],
            )
        self._reasons.close_writing()

    def send_address(self, address: str) -> None:
        """Send waiting workers the address of the server."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(f"{address}\n".encode())
                self._process.stdin.close()

    @property
    def why_gone(self) -> str | None:
        """Why all workers have ended, in the words of the first that failed; None while one of them runs."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return self._reasons.first or f"their process ended {how}"

    def end(self, *, by_themselves: bool, seconds: float = 5.0) -> None:
        """Wait for workers that end by themselves; others are asked to end, and at last killed."""
        process = self._process
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        for ask in (None if by_themselves else process.terminate, process.terminate, process.kill):
            if ask is not None:
                ask()
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                break
        self._reasons.close()
