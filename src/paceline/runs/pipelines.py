"""A recipe carried out by pipelines: what it must be, and one rank's side of it.

rank = replica * stages + stage. A replica is a worker of the recipe, with its shard and its batches; so with one
replica a run comes to the losses of one process, up to rounding.

folder/recipe.json    what runs here, as for any other ranks
folder/plan.json      where the model is cut
folder/rank-0/        a rank's checkpoints: of its own layers
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.drivers.ranks.launch import STORE
from paceline.recipes.assembly import load_data, make_training, resolved
from paceline.recipes.recipe import Recipe
from paceline.recipes.sections import ClusterSection
from paceline.runs.cluster import delay_of
from paceline.runs.ranks import MEET_SECONDS, agree_on_data, write_recipe
from paceline.runs.simulation import Result
from paceline.settings import SettingError
from paceline.traces import summarise

if TYPE_CHECKING:
    from paceline.distributed.stores import StoreGather
    from paceline.drivers.ranks.launch import Place
    from paceline.pipeline.plan import Plan
    from paceline.traces.run_status import RunStatus
    from paceline.training import Training


def check_pipelined(recipe: Recipe) -> None:
    """Refuse what a recipe with a pipeline cannot have beside it, and say what to write instead.

    >>> check_pipelined(Recipe().with_settings(pipeline={"stages": 2}))
    Traceback (most recent call last):
    paceline.settings.SettingError: a pipeline takes a step with all gradients of ... (strategy=lgc); ...
    """
    workers, replicas = recipe.cluster.workers, recipe.pipeline.replicas
    if recipe.strategy.name != "full":
        raise SettingError(
            ("strategy", "name"),
            f"a pipeline takes a step with all gradients of a round, which is strategy full "
            f'(strategy={recipe.strategy.name}); add --strategy full, or name = "full" below [strategy]',
        )
    if workers not in (ClusterSection().workers, replicas):
        raise SettingError(
            ("cluster", "workers"),
            f"the workers of a pipeline are its replicas (workers={workers}, replicas={replicas}); leave workers out, "
            f"or give replicas = {workers} below [pipeline]",
        )
    if recipe.pruning.on:
        raise SettingError(
            ("pruning", "name"),
            f"pruning asks for the loss of each sample, and a pipeline tells only their mean "
            f"(pruning={recipe.pruning.name}); leave [pruning] out, or stages",
        )


def for_ranks(recipe: Recipe, ranks: int | None = None) -> Recipe:
    """Return the same run with a worker for each replica.

    A launch of so many `ranks` says how many replicas there are, where the recipe does not.

    >>> recipe = Recipe().with_strategy("full").with_settings(pipeline={"stages": 2})
    >>> for_ranks(recipe).cluster.workers, for_ranks(recipe, 6).pipeline.replicas
    (1, 3)
    >>> for_ranks(recipe, 3)
    Traceback (most recent call last):
    ValueError: a pipeline of 2 stages needs 2 ranks, or a multiple of it (ranks=3)
    """
    stages, replicas = recipe.pipeline.stages, recipe.pipeline.replicas
    ranks = recipe.pipeline.ranks if ranks is None else ranks
    check_pipelined(recipe)
    if ranks % stages:
        raise ValueError(f"a pipeline of {stages} stages needs {stages} ranks, or a multiple of it (ranks={ranks})")
    if replicas not in (1, ranks // stages):
        raise ValueError(
            f"{replicas} replicas of {stages} stages need {replicas * stages} ranks (ranks={ranks}); start so many, or "
            f"give replicas = {ranks // stages}"
        )
    replicas = ranks // stages
    # However samples are dealt, one worker gets all of them; and it could not hold only some of the classes.
    data = {"split": "iid"} if replicas == 1 else {}
    return recipe.with_settings(pipeline={"replicas": replicas}, cluster={"workers": replicas}, data=data)


# -- one rank's side ---------------------------------------------------------------------------------------------------


def train_stage(
    recipe: Recipe,
    place: Place,
    *,
    folder: Path,
    resume: bool,
    rounds: int | None = None,
    training: Training | None = None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_standing: Callable[[RunStatus], None] = lambda standing: None,
) -> Result | None:
    """Run one rank of a recipe's pipelines; return on rank 0 what they came to.

    With `resume` it goes on from the checkpoints in the folder; else only from those of this very launch.
    `training` is what the recipe comes to, if whoever forked this rank has made it already.
    """
    import torch

    from paceline.drivers.pipelining.job import PipelineJob, PipelineRun
    from paceline.drivers.pipelining.planning import keep_plan
    from paceline.drivers.ranks.checkpoints import RankCheckpoints, agreed_start
    from paceline.drivers.ranks.rendezvous import joined
    from paceline.workers.threads import threads_for, torch_threads

    recipe = for_ranks(recipe, place.world)
    dataset = load_data(recipe) if training is None else training.dataset
    if not resume:  # a run that was begun before `resolved` existed goes on with its recipe as it was kept
        recipe = resolved(recipe, dataset)
    if training is None:
        training = make_training(recipe, dataset)
    size = sum(parameter.numel() for parameter in training.module.parameters())
    document, defaults = recipe.to_document(), Recipe().to_document()
    stall_seconds = recipe.server.stall_seconds
    # Ranks that were started on this machine share its cores; whoever launches others says how many each has.
    threads = max(1, torch.get_num_threads() // (place.world if STORE in os.environ else 1))
    with (
        joined(place, timeout_seconds=max(MEET_SECONDS, stall_seconds)) as gather,
        torch_threads(threads),
        threads_for(size),
    ):
        agree_on_data(training.dataset, gather)
        state = agreed_start(
            RankCheckpoints(folder, place.rank), gather, resume=resume, recipe=document, defaults=defaults
        )
        if rounds or (state is None and not resume):
            write_recipe(recipe, folder, rounds=rounds)
        plan = _plan(recipe, training, gather, folder, goes_on=state is not None)
        on_plan(plan)

        def describe() -> None:
            write_recipe(recipe, folder, rounds=rounds)
            keep_plan(plan, folder)

        job = PipelineJob(
            training=training,
            plan=plan,
            rounds=rounds or recipe.rounds,
            folder=folder,
            strategy=recipe.strategy.name,
            evaluate_every=recipe.evaluate_every,
            checkpoint_every=recipe.server.checkpoint_every,
            timeout_seconds=stall_seconds,
            delay_seconds=delay_of(recipe),
            recipe=document,
            describe=describe,
        )
        run = PipelineRun(job, gather, on_standing=on_standing)
        trace = run.run(state)
    return (
        None
        if trace is None
        else Result(summary=summarise(trace), trace=trace, parameters=run.parameters, state_dict=run.whole)
    )


def _plan(recipe: Recipe, training: Training, gather: StoreGather, folder: Path, *, goes_on: bool) -> Plan:
    from paceline.drivers.pipelining.planning import PLAN, keep_plan, plan_of_run
    from paceline.pipeline.planning import optimizer_states
    from paceline.training import Batches

    plan = plan_of_run(
        recipe.pipeline,
        training.module,
        Batches(training).assignment(worker=0, draw=0, blocks=1).inputs,
        gather,
        batch_size=recipe.worker.batch_size,
        states=optimizer_states(training.optimizer),
        kept=folder / PLAN if goes_on else None,
    )
    if goes_on:
        return plan
    if not recipe.pipeline.plan:
        plan = dataclasses.replace(plan, model=recipe.model.name)
    keep_plan(plan, folder)
    return plan
