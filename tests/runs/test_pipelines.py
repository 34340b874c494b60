"""Recipes with a pipeline: read, refused, and made into what ranks do."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from paceline import Race, Recipe, simulate
from paceline.cli.main import main
from paceline.distributed.stores import StoreGather
from paceline.drivers.pipelining.job import PipelineRecorder
from paceline.drivers.pipelining.planning import difference
from paceline.pipeline.schedules import SCHEDULES, why_not
from paceline.pipeline.settings import PipelineSettings
from paceline.recipes import SettingError, read_recipe
from paceline.recipes.assembly import resolved
from paceline.reports import results_table
from paceline.runs.cluster import make_served
from paceline.runs.pipelines import check_pipelined, for_ranks
from paceline.traces import Evaluation, summarise

FULL = Recipe().with_strategy("full")


def pipelined(**settings):
    return FULL.with_settings(pipeline={"stages": 2, **settings})


def test_a_recipe_without_the_section_has_no_pipeline():
    assert not Recipe().pipeline.on
    assert not Recipe.from_document({"strategy": {"name": "full"}}).pipeline.on  # of before there were pipelines


def test_the_section_is_read_from_files_and_paths_are_relative_to_them(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('[pipeline]\nstages = 3\nmicrobatches = 8\nschedule = "gpipe"\nplan = "plans/my.json"\n')
    section = Recipe.load(file).pipeline
    assert (section.stages, section.schedule) == (3, "gpipe")
    assert section.plan == str(tmp_path / "plans/my.json")
    assert read_recipe(file, {"pipeline.stages": "4"}).pipeline.stages == 4


@pytest.mark.parametrize(
    ("given", "because"),
    [
        ({"stages": "0"}, r"--pipeline.stages: stages must be between 1 and 512 \(stages=0\)"),
        ({"stages": "2", "schedule": "1f1c"}, "--pipeline.schedule: unknown schedule '1f1c'; did you mean '1f1b'?"),
        ({"stages": "8"}, r"--pipeline.stages: 1f1b needs at least as many micro-batches as stages \(microbatches=4"),
        ({"stages": "2", "microbatches": "1"}, r"--pipeline.microbatches: 1f1b needs .* take 2 or more, or gpipe"),
        ({"stages": "2", "chunks": "2"}, "--pipeline.chunks: 1f1b has one piece on each device"),
        (
            {"stages": "2", "microbatches": "5"},
            r"microbatches must divide the batch evenly \(microbatches=5, batch_size",
        ),
        ({"replicas": "2"}, r"replicas are of a pipeline, and there is none: give stages, or memory_mb \(replicas=2\)"),
        ({"plan": "my.json"}, r"plan is of a pipeline, and there is none"),
        ({"memory_mb": "-1"}, r"memory_mb must be between 0 and .* \(memory_mb=-1.0\)"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_written(given, because):
    with pytest.raises(ValueError, match=because):
        read_recipe(overrides={f"pipeline.{name}": text for name, text in given.items()})


def test_sections_are_refused_exactly_where_schedules_are():
    def refusal(**settings):
        try:
            return PipelineSettings(**settings) and None
        except SettingError as error:
            return str(error)

    for schedule in SCHEDULES:
        for stages in range(2, 5):
            for microbatches in range(1, 9):
                found = refusal(stages=stages, microbatches=microbatches, schedule=schedule)
                assert found == why_not(schedule, stages, microbatches)


@pytest.mark.parametrize(
    ("recipe", "because"),
    [
        (Recipe().with_settings(pipeline={"stages": 2}), r"strategy full \(strategy=lgc\); add --strategy full"),
        (pipelined().with_strategy("hpsgd"), r"strategy full \(strategy=hpsgd\)"),
        (
            pipelined().with_settings(cluster={"workers": 4}),
            r"workers=4, replicas=1\); leave workers out, or give repl",
        ),
        (pipelined().with_settings(pruning={"name": "info-batch"}), "pruning asks for the loss of each sample"),
    ],
)
def test_what_cannot_stand_beside_a_pipeline_is_refused_with_what_to_do(recipe, because):
    with pytest.raises(SettingError, match=because):
        check_pipelined(recipe)


def test_a_replica_is_a_worker_and_a_launch_says_how_many_where_the_recipe_does_not():
    assert for_ranks(pipelined()).cluster.workers == 1
    assert for_ranks(pipelined()).data.split == "iid"  # one worker holds everything, and has every class
    three = for_ranks(pipelined(), 6)
    assert (three.pipeline.replicas, three.cluster.workers, three.data.split) == (3, 3, "auto")
    assert for_ranks(three, 6) == three  # as a resumed run reads it
    assert for_ranks(pipelined(replicas=3)).pipeline.ranks == 6
    with pytest.raises(ValueError, match=r"a pipeline of 2 stages needs 2 ranks, or a multiple of it \(ranks=3\)"):
        for_ranks(pipelined(), 3)
    with pytest.raises(
        ValueError, match=r"3 replicas of 2 stages need 6 ranks \(ranks=4\); start so many, or give rep"
    ):
        for_ranks(pipelined(replicas=3), 4)


def test_what_has_no_pipelines_refuses_them(tmp_path, capsys):
    with pytest.raises(SettingError, match=r"a pipeline is not simulated \(stages=2\); use `paceline train`"):
        simulate(pipelined())
    with pytest.raises(SettingError, match="a pipeline is not simulated"):
        Race(pipelined(), timing_only=True)
    with pytest.raises(SettingError, match=r"a pipeline has no server \(memory_mb=5\)"):
        make_served(FULL.with_settings(pipeline={"memory_mb": 5.0}), tmp_path)
    for command, because in (
        (["serve", "--stages", "2"], "a pipeline has no server: use `paceline train`"),
        (["simulate", "--timing-only", "--stages", "2"], "a pipeline is not simulated"),
        (["train", "--stages", "2"], "add --strategy full"),
        (["train", "--stages", "2", "--strategy", "full", "--listen", "127.0.0.1:1"], "--listen is for a parameter"),
    ):
        assert main([*command, "--out", str(tmp_path / "run")]) == 2
        assert because in capsys.readouterr().err
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_a_plan_for_something_else_is_refused_in_words_that_say_what():
    settings = PipelineSettings(stages=2, microbatches=4, memory_mb=1.0)

    def plan(**other):
        same = {"stages": 2, "microbatches": 4, "schedule": "1f1b", "chunks": 1, "batch_size": 32}
        return SimpleNamespace(**{**same, **other}, placement=SimpleNamespace(device_bytes=(7, 1_000_000)))

    assert difference(plan(), settings, 32, "my.json") == ""
    said = difference(plan(stages=4, microbatches=8), settings, 32, "my.json")
    assert "my.json is for stages = 4, microbatches = 8, and the recipe says stages = 2, microbatches = 4" in said
    less = dataclasses.replace(settings, memory_mb=0.999999)
    assert "takes 1.0 MB of a device, and memory_mb is 1.0: plan again" in difference(plan(), less, 32, "my.json")


def test_a_recorder_goes_on_where_it_was_kept_and_tells_every_step():
    recorder = PipelineRecorder(stages=1, replicas=1)
    recorder.start_clock(50.0)
    recorder.evaluations.append(Evaluation(round=0, seconds=0.0, loss=2.0, accuracy=0.1))
    recorder.add_step(50.0, 51.0)
    kept = recorder.state_dict(51.5)
    again = PipelineRecorder(stages=1, replicas=1)
    again.load_state_dict(kept)
    again.start_clock(1000.0)
    again.add_step(1000.0, 1002.0)
    again.gather(StoreGather(dist.HashStore(), 0, 1, timeout_seconds=1.0))
    recipe = for_ranks(pipelined())
    about = {"strategy": "full", "seed": 0, "recipe": recipe.to_document(), "rounds_done": 2, "seconds": 3.5}
    trace = again.trace(used=again.steps, **about)
    assert [(each.started_seconds, each.finished_seconds) for each in trace.works] == [(0.0, 1.0), (1.5, 3.5)]
    assert [round_.closed_seconds for round_ in trace.rounds] == [1.0, 3.5]
    assert (trace.used, trace.workers, len(trace.evaluations)) == (2, 1, 1)
    assert summarise(trace).rounds == 2
    assert "pipeline: 2 stages, 1f1b, 4 micro-batches" in " ".join(str(results_table([trace]).caption).split())


def test_a_run_keeps_how_many_pieces_its_stages_have():
    assert resolved(pipelined()).pipeline.chunks == 1
    assert resolved(pipelined(schedule="interleaved")).pipeline.chunks == SCHEDULES["interleaved"].chunks
    assert resolved(FULL).pipeline.chunks == 0  # there is no pipeline
