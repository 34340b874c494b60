"""From a recipe to a plan: which model, which batch, measured how; and plans that are placed anew."""

from __future__ import annotations

import pytest
import torch

from paceline.analysis.pipeline_plan import plan_recipe, revised_plan
from paceline.optim import OPTIMIZERS, OptimizerSettings
from paceline.pipeline.devices import Device, Link
from paceline.pipeline.planning import optimizer_states
from paceline.pipeline.settings import PipelineSettings
from paceline.recipes import Recipe
from tests.reports.pipeline_plans import made_plan

SMALL = Recipe().with_settings(data={"name": "synthetic", "samples": 60, "size": 4, "channels": 1})


def test_a_recipes_plan_is_of_its_model_batch_and_pipeline_with_the_threads_of_a_rank() -> None:
    before, threads = torch.get_num_threads(), set()
    recipe = SMALL.with_settings(
        pipeline={"stages": 2, "microbatches": 4, "bandwidth_mbit": 100.0, "latency_ms": 2.0, "memory_mb": 50.0},
        optimizer={"name": "adam"},
        worker={"batch_size": 16},
    )
    rounds = []

    def on_round(done: int, of: int) -> None:
        threads.add(torch.get_num_threads())
        rounds.append((done, of))

    torch.set_num_threads(2)
    try:
        plan = plan_recipe(recipe, speeds=(1.0, 0.5), repeats=3, on_round=on_round)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == {1}
    assert rounds[-1][0] == rounds[-1][1]
    assert plan.model == "mlp"
    assert plan.batch.samples == 16
    assert plan.shapes == ((4, 1, 4, 4),)
    assert plan.states == 2.0
    assert plan.links == Link(bytes_per_second=12.5e6, latency_seconds=0.002)
    assert plan.placement.devices == tuple(Device(speed=speed, memory_bytes=50_000_000) for speed in (1.0, 0.5))


@pytest.mark.parametrize(
    ("optimizer", "kept"),
    [
        ({"name": "sgd"}, 1.0),
        ({"name": "sgd", "momentum": 0.0}, 0.0),
        ({"name": "lars"}, 1.0),
        ({"name": "adam"}, 2.0),
        ({"name": "adamw"}, 2.0),
    ],
)
def test_what_an_optimiser_keeps_is_counted(optimizer, kept) -> None:
    assert optimizer_states(OptimizerSettings(**optimizer)) == kept
    assert optimizer["name"] in OPTIMIZERS


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({"stages": 2}, {"speeds": (1.0, 0.0)}, r"speed must be above 0 and finite \(speed=0.0\)"),
        ({"stages": 2}, {"speeds": (1.0,)}, r"speeds must be one for each stage \(speeds=1.0, stages=2\)"),
        ({"stages": 2}, {"threads": 0}, r"threads must be between 1 and 1,024 \(threads=0\)"),
        ({"stages": 2}, {"states": float("nan")}, "optimizer_states must be between 0 and 1,000"),
        ({"stages": 2}, {"repeats": 2}, r"repeats must be between 3 and 1,000 \(repeats=2\)"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(settings, options, said) -> None:
    recipe = SMALL.with_settings(pipeline=settings)
    with pytest.raises(ValueError, match=said):
        plan_recipe(recipe, on_round=lambda done, of: pytest.fail("measured"), **options)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    recipe = SMALL.with_settings(pipeline={"stages": 2}, worker={"batch_size": 64})
    with pytest.raises(ValueError, match=r"batch_size must be between 1 and 60, the training samples of synthetic"):
        plan_recipe(recipe)


def test_a_plan_placed_anew_keeps_what_nobody_asked_to_change() -> None:
    plan = made_plan(memory_bytes=400_000, speeds=(1.0, 2.0, 0.5), microbatches=6)
    own = {"stages": 3, "microbatches": 6}
    same = revised_plan(plan, PipelineSettings(**own))
    assert same.placement == plan.placement
    assert same.links == plan.links
    slower = revised_plan(plan, PipelineSettings(**own, latency_ms=3.0), given={"latency_ms"})
    assert slower.links == Link(bytes_per_second=plan.links.bytes_per_second, latency_seconds=0.003)
    assert slower.placement.devices == plan.placement.devices
    free = revised_plan(plan, PipelineSettings(**own), given={"memory_mb"}, speeds=(1.0, 1.0, 1.0), states=0.0)
    assert set(free.placement.devices) == {Device()}
    assert sum(free.placement.device_bytes) < sum(plan.placement.device_bytes)
    fewer = revised_plan(plan, PipelineSettings(stages=2, microbatches=6, schedule="gpipe"), given={"stages"})
    assert fewer.placement.devices == (plan.placement.devices[0],) * 2
    assert fewer.schedule == "gpipe"
    with pytest.raises(ValueError, match=r"microbatches must be those of the plan, 6.*\(microbatches=4\)"):
        revised_plan(plan, PipelineSettings(stages=3, microbatches=4))
