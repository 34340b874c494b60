"""`paceline train ... --on slurm`: where it is typed decides what it does.

on a login node            print the job, for sbatch
in a job                   start the server and its workers, or the ranks, and wait for them
in a job, on no node of it do that on the job's first node (a shell of `salloc` on a login node)
in a task of srun          be a rank
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from paceline.cli.cluster import (
    TrainOptions,
    check_resume_alone,
    names_given,
    recorded_recipe,
    tell_how_to_go_on,
    train_served,
    warn_of_idle_delays,
)
from paceline.cli.cluster import train as train_here
from paceline.cli.options import UsageError, given_recipe
from paceline.cli.output import is_ranks_run, note, run_folder
from paceline.quantities import counted
from paceline.recipes import Recipe
from paceline.runs.cluster import GIVEN_AGAIN, names_to_give_again
from paceline.runs.ranks import by_ranks, read_recipe_of
from paceline.slurm.allocation import Allocation, allocation_in
from paceline.slurm.ranks import RanksEndedError, is_rank, launch_in, launch_ranks, take_place
from paceline.slurm.requeue import began_here, claim
from paceline.slurm.script import batch_script
from paceline.slurm.steps import run_on_first_node, share_cores
from paceline.traces.journal import TRACE
from paceline.traces.run_folder import take_folder

ON_SLURM = ("--on", "slurm")


def train(options: TrainOptions, overrides: dict[str, str]) -> None:
    """Print the job of a recipe, be the launcher of one, or a rank of one."""
    if is_rank(os.environ):
        take_place(os.environ)
        return train_here(options, overrides)
    check_resume_alone(options, overrides)
    job = allocation_in(os.environ)
    if job is not None and not options.resume:
        options, overrides = _with_folder(options, overrides, job)
    recipe = _recipe(options, overrides)
    with_server = not by_ranks(recipe)
    number = ranks_of(recipe)
    if job is None:
        return _print_script(options, overrides, number=number, with_server=with_server)
    job.places(number, beside_server=with_server)  # too few tasks are refused before anything is started
    if not job.here:
        run_on_first_node(["-m", "paceline", *typed_words(options, overrides)], job)
    notes = Console(stderr=True)
    if idle := job.idle(number, beside_server=with_server):
        note(notes, f"{counted(idle, 'task')} of job {job.job} stay idle: the recipe has {number} workers")
    share_cores(job)
    if with_server:
        warn_of_idle_delays(recipe, overrides)
        _serve(options, overrides, recipe, job)
    else:
        _launch(options, overrides, recipe, job, notes)


def typed_words(options: TrainOptions, overrides: dict[str, str]) -> list[str]:
    """Return the words of a command line that was parsed, so that it can be run elsewhere.

    >>> typed_words(TrainOptions(recipe_file="my.toml", out="runs/mine"), {"cluster.workers": "4"})
    ['train', 'my.toml', '--on', 'slurm', '--out', 'runs/mine', '--cluster.workers=4']
    """
    plain = TrainOptions()
    words = ["train", *([options.recipe_file] if options.recipe_file else []), *ON_SLURM]
    for name in ("out", "resume", "listen", "log"):
        if getattr(options, name) != getattr(plain, name):
            words += [f"--{name}", getattr(options, name)]
    words += [f"--{name}" for name in ("trust", "json", "debug") if getattr(options, name)]
    return [*words, *(f"--{name.replace('_', '-')}={text}" for name, text in overrides.items())]


def _with_folder(
    options: TrainOptions, overrides: dict[str, str], job: Allocation
) -> tuple[TrainOptions, dict[str, str]]:
    """Return the options with the run's folder; where Slurm has started this job again, those to resume its run.

    Ranks are not told to resume: they are of the same launch as before (`_launch`), and go on by themselves.
    """
    folder = Path(options.out or Path("runs", f"slurm-{job.job}"))
    if not began_here(folder, job) or is_ranks_run(str(folder)) or not (folder / TRACE).is_file():
        return replace(options, out=str(folder)), overrides
    named = names_to_give_again(given_recipe(options.recipe_file, overrides, trust=options.trust))
    again = {GIVEN_AGAIN[option]: name for option, name in zip(named[::2], named[1::2], strict=True)}
    note(Console(stderr=True), f"job {job.job} was started again ({job.restarts}): it goes on with {folder}")
    return replace(options, recipe_file="", trust=False, out="", resume=str(folder)), again


def _recipe(options: TrainOptions, overrides: dict[str, str]) -> Recipe:
    """Return the recipe that is to be trained: the one that was given, or that of the run to resume."""
    if not options.resume:
        return given_recipe(options.recipe_file, overrides, trust=options.trust)
    folder = run_folder(options.resume)
    if is_ranks_run(options.resume):
        return read_recipe_of(folder)
    return recorded_recipe(folder, names_given(overrides))


def _print_script(options: TrainOptions, overrides: dict[str, str], *, number: int, with_server: bool) -> None:
    words = typed_words(options, overrides)
    print(batch_script(words, number=number, with_server=with_server), end="")
    if sys.stdout.isatty():
        typed = shlex.join(["paceline", *words])
        note(Console(stderr=True), f"this is no job of Slurm, so nothing was started; submit it: {typed} | sbatch")


def _serve(options: TrainOptions, overrides: dict[str, str], recipe: Recipe, job: Allocation) -> None:
    """Be the server of a job."""
    from paceline.slurm.served import train_on_workers

    listen = "" if options.listen == TrainOptions.listen else options.listen
    run = partial(train_on_workers, job=job, listen=listen)
    greeting = "server at {address}: waiting for {workers} workers"
    again = " " + " ".join(ON_SLURM)
    train_served(options, recipe, run, command="train", greeting=greeting, overrides=overrides, to_repeat=again)


def _launch(options: TrainOptions, overrides: dict[str, str], recipe: Recipe, job: Allocation, notes: Console) -> None:
    """Start the ranks of a job."""
    if options.listen != TrainOptions.listen:
        raise UsageError("--listen is for a parameter server, and ranks have none: leave it out")
    folder, number, launch = Path(options.resume or options.out), ranks_of(recipe), ""
    if not options.resume and began_here(folder, job):
        launch = launch_in(folder, number)
        if launch:
            note(notes, f"job {job.job} was started again ({job.restarts}): it goes on with {folder}")
    elif not options.resume:
        take_folder(folder)  # another job's run keeps its `slurm-job`: by that it goes on
        claim(folder, job)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM ends the ranks as well
    try:
        launch_ranks(typed_words(options, overrides), number, job, launch=launch)
    except (KeyboardInterrupt, RanksEndedError):
        to_repeat = " " + " ".join(ON_SLURM)
        tell_how_to_go_on(folder, recipe, notes, to_repeat=to_repeat)
        raise
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def ranks_of(recipe: Recipe) -> int:
    """Return how many workers or ranks carry out a recipe.

    >>> ranks_of(Recipe().with_settings(cluster={"workers": 4}))
    4
    """
    return recipe.pipeline.ranks if recipe.pipeline.on else recipe.cluster.workers
