"""`paceline train` without a server, where workers average or are pipelines: as a rank of a launch, or as who starts
the ranks.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli.folders import new_folder
from paceline.cli.lanes import Lanes
from paceline.cli.options import UsageError
from paceline.cli.telling import tell_results
from paceline.drivers.simulated.progress import Progress
from paceline.recipes import Recipe
from paceline.recipes.assembly import averages
from paceline.runs.ranks import RECIPE, read_recipe_of

if TYPE_CHECKING:
    from paceline.cli.cluster_commands import TrainOptions
    from paceline.drivers.ranks.launch import Place
    from paceline.pipeline.plan import Plan
    from paceline.traces import Evaluation


def is_ranks_run(folder: str) -> bool:
    """Whether a folder holds a run of ranks.

    >>> is_ranks_run("/nowhere")
    False
    """
    return Path(folder, RECIPE).is_file()


def by_ranks(recipe: Recipe) -> bool:
    """Whether a recipe is carried out by ranks, without a server.

    >>> by_ranks(Recipe()), by_ranks(Recipe().with_strategy("hpsgd"))
    (False, True)
    """
    return averages(recipe) or recipe.pipeline.on


def train_ranks(options: TrainOptions, recipe: Recipe | None, place: Place | None) -> None:
    """Be a rank, or start the ranks and wait for them; without a recipe, go on with the run in `options.resume`."""
    if options.listen != type(options).listen:
        raise UsageError("--listen is for a parameter server, and ranks have none: torchrun says where they meet")
    if recipe is not None:
        recipe = _for_world(recipe, place)
    if place is None:
        _start(options, recipe)
    else:
        _join(options, recipe, place)


# -- a rank ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One rank's side of a run."""

    recipe: Recipe
    folder: Path
    resume: bool
    options: TrainOptions

    def as_command(self, place: Place) -> int:
        """Train as a rank that was forked; returns the exit code."""
        from paceline.cli.main import told

        return told(lambda: self.train(place), debug=self.options.debug)

    def train(self, place: Place) -> None:
        """Train as a rank; rank 0 shows how it goes, and tells the results."""
        from paceline.runs.pipelines import train_stage
        from paceline.runs.ranks import train_rank

        recipe = _for_world(self.recipe, place)
        notes = Console(stderr=True, quiet=place.rank != 0)
        with Lanes(notes, [recipe.strategy.name], rounds=recipe.rounds) as lanes:

            def show(at: Evaluation) -> None:
                lanes.show(0, Progress(round=at.round, seconds=at.seconds, loss=at.loss, accuracy=at.accuracy))

            def tell(plan: Plan) -> None:
                from paceline.pipeline.text import headline

                lanes.note(f"pipeline: {headline(plan)}")

            if recipe.pipeline.on:
                result = train_stage(
                    recipe, place, folder=self.folder, resume=self.resume, on_plan=tell, on_progress=show
                )
            else:
                result = train_rank(recipe, place, folder=self.folder, resume=self.resume, on_progress=show)
        if result is not None:
            tell_results(recipe, [result], self.folder, notes, as_json=self.options.json)


def _join(options: TrainOptions, recipe: Recipe | None, place: Place) -> None:
    """Be a rank of a launch."""
    if not options.resume and not options.out:
        raise UsageError("under torchrun, give --out: all ranks, and those of a restart, must find the same folder")
    folder = Path(options.resume or options.out)
    recipe = recipe if recipe is not None else read_recipe_of(folder)
    # Whether a folder that holds a run is of this launch, started again, is known only when its ranks have met.
    _Run(recipe=recipe, folder=folder, resume=bool(options.resume), options=options).train(place)


def _for_world(recipe: Recipe, place: Place | None) -> Recipe:
    """The launch says how many workers there are; without one, the recipe."""
    if recipe.pipeline.on:
        from paceline.runs.pipelines import for_ranks

        return for_ranks(recipe, None if place is None else place.world)
    if place is None or recipe.cluster.workers == place.world:
        return recipe
    return recipe.with_settings(cluster={"workers": place.world})


# -- who starts the ranks ----------------------------------------------------------------------------------------------


def _start(options: TrainOptions, recipe: Recipe | None) -> None:
    from paceline.drivers.ranks.launch import LocalRanks

    folder = Path(options.resume) if options.resume else new_folder(options.out, "train")
    recipe = read_recipe_of(folder) if recipe is None else recipe
    run = _Run(recipe=recipe, folder=folder, resume=bool(options.resume), options=options)
    with Console(stderr=True).status(f"loading torch, {recipe.data.name} and {recipe.model.name}"):
        if recipe.pipeline.on:  # once, before the ranks fork
            import paceline.drivers.pipelining.job
            import paceline.drivers.pipelining.planning
        else:
            import paceline.drivers.averaging.job  # noqa: F401
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever is told to go ends its ranks first
    try:
        world = recipe.pipeline.ranks if recipe.pipeline.on else recipe.cluster.workers
        code = LocalRanks(run.as_command, world, logs=folder).wait()
    except BaseException:
        if any((folder / "rank-0").glob("checkpoint-*")):
            notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
            notes.print(f"go on from the last checkpoint with: paceline train --resume {folder}")
        raise
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    if code:
        raise SystemExit(code)  # rank 0 has said why
