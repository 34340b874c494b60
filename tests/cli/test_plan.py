"""`paceline plan pipeline` as a user meets it."""

from __future__ import annotations

import io
import json
import sys

import pytest

from paceline.analysis.pipeline_plan import plan_document
from paceline.cli import main
from paceline.pipeline.plan import Plan
from paceline.pipeline.text import describe
from tests.reports.pipeline_plans import made_plan

pytestmark = pytest.mark.slow

SMALL = ["--data", "synthetic", "--data.samples", "60", "--data.size", "4", "--data.channels", "1"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def saved(folder):
    """A saved plan, so that nothing needs to be measured."""
    plan = made_plan(memory_bytes=400_000)
    plan.save(folder / "mine.json")
    return plan


@pytest.fixture
def asked(monkeypatch):
    """The recipes and options that would be measured."""
    calls = []

    def plan_recipe(recipe, **options):
        calls.append((recipe, options))
        options["on_round"](1, 2)
        return made_plan()

    monkeypatch.setattr("paceline.analysis.pipeline_plan.plan_recipe", plan_recipe)
    return calls


def test_a_recipe_is_measured_told_and_written_down(folder, capsys) -> None:
    assert main(["plan", "pipeline", *SMALL, "--stages", "2", "--microbatches", "4", "--repeats", "3"]) == 0
    told = capsys.readouterr()
    plan = Plan.load(folder / "runs/plan/plan.json")
    assert max(map(len, told.out.splitlines())) <= 80
    assert told.out.startswith(describe(plan))
    assert told.out.startswith("mlp: 6 layers on 2 devices, 4 micro-batches of 8 samples, 1f1b: ")
    assert "measured here with 1 thread" in told.out
    assert "sgd keeps 1 number for each weight" in " ".join(told.out.split())
    # Before them a slow machine is told how far the measuring is.
    assert told.err.splitlines()[-2:] == ["plan: runs/plan/plan.json", "report: runs/plan/report.html"]
    page = (folder / "runs/plan/report.html").read_text(encoding="utf-8")
    assert "<h1>mlp in 2 stages" in page
    results = json.loads((folder / "runs/plan/results.json").read_text(encoding="utf-8"))
    assert results["recipe"]["pipeline"]["stages"] == 2
    assert results["cuts"] == list(plan.cuts)


def test_as_json_it_is_the_plan(saved, capsys) -> None:
    assert main(["plan", "pipeline", "--load", "mine.json", "--json", "--out", "here"]) == 0
    found = json.loads(capsys.readouterr().out)
    conditions = found.pop("conditions")
    expected = plan_document(saved)
    assert expected.pop("conditions") == []
    assert found == json.loads(json.dumps(expected))
    assert conditions[0] == "costs as saved in mine.json"
    assert "links of 800 Mbit/s and 0.1 ms" in conditions
    assert Plan.load("here/plan.json") == saved


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (["--schedule", "gpipe"], {"schedule": "gpipe"}),
        (["--stages", "2"], {"stages": 2}),
        (["--optimizer-states", "2"], {"states": 2.0}),
    ],
)
def test_a_saved_plan_is_placed_anew_as_revised_does(saved, capsys, options, changes) -> None:
    assert main(["plan", "pipeline", "--load", "mine.json", *options, "--save", "other.json"]) == 0
    assert Plan.load("other.json") == saved.revised(**changes)
    assert "plan: other.json" in capsys.readouterr().err


def test_a_recipes_pipeline_is_planned_and_options_come_first(folder, asked) -> None:
    (folder / "my.toml").write_text('[pipeline]\nstages = 2\nschedule = "gpipe"\nmemory_mb = 9.0\nlatency_ms = 3.0\n')
    assert main(["plan", "pipeline", "my.toml"]) == 0
    changed = (
        "--stages 3 --microbatches 8 --schedule interleaved --chunks 3 --memory 2GB --bandwidth 125MB/s "
        "--latency 500us --speeds 1,2,0.5 --optimizer-states 2 --repeats 7 --threads 2"
    )
    assert main(["plan", "pipeline", "my.toml", *changed.split()]) == 0
    (first, plain), (second, options) = asked
    assert (first.pipeline.stages, first.pipeline.schedule, first.pipeline.memory_mb) == (2, "gpipe", 9.0)
    assert (plain["speeds"], plain["states"], plain["repeats"], plain["threads"]) == ((), None, 5, 1)
    section = second.pipeline
    assert (section.stages, section.microbatches, section.schedule, section.chunks) == (3, 8, "interleaved", 3)
    assert (section.memory_mb, section.bandwidth_mbit, section.latency_ms) == (2000.0, 1000.0, 0.5)
    assert (options["speeds"], options["states"]) == ((1.0, 2.0, 0.5), 2.0)
    assert (options["repeats"], options["threads"]) == (7, 2)


def test_without_a_pipeline_there_are_four_stages_or_one_for_each_speed(folder, asked) -> None:
    assert main(["plan", "pipeline", "--memory", "1GB"]) == 0
    assert main(["plan", "pipeline", "--speeds", "1,2"]) == 0
    assert [recipe.pipeline.stages for recipe, _ in asked] == [4, 2]
    assert asked[0][0].pipeline.memory_mb == 1000.0


def test_a_terminal_without_blocks_gets_ascii(saved, monkeypatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["plan", "pipeline", "--load", "mine.json"]) == 0
    terminal.flush()
    assert terminal.buffer.getvalue().decode("ascii").startswith(describe(saved, ascii_only=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stages", "0"], "--stages: stages must be between 1 and 512 (stages=0)"),
        (["--stages", "2", "--microbatches", "5"], "microbatches must divide the batch evenly (microbatches=5, batch_"),
        (["--schedule", "1f1"], "unknown schedule '1f1'; did you mean '1f1b'?"),
        (["--chunks", "2"], "1f1b has one piece on each device (chunks=2); for more take interleaved"),
        (["--memory", "much"], "--memory must be a size above 0 such as 500MB, 2GB or 2GiB (found 'much')"),
        (["--memory", "0GB"], "--memory must be a size above 0 such as 500MB, 2GB or 2GiB (found '0GB')"),
        (["--bandwidth", "1.2.3MB/s"], "--bandwidth must be a rate above 0 such as 1Gbit/s or 125MB/s"),
        (["--latency", "-1"], "--latency must be a time such as 5ms or 200us (found '-1')"),
        (["--speeds", "1,fast"], "--speeds must be numbers above 0 with commas between"),
        (["--speeds", "1,2", "--stages", "3"], "speeds must be one for each stage (speeds=1.0,2.0, stages=3)"),
        (["--optimizer-states", "two"], "--optimizer-states: expected a number, got 'two'"),
        (["--repeats", "1"], "repeats must be between 3 and 1,000 (repeats=1)"),
        (["--threads", "0"], "threads must be between 1 and 1,024 (threads=0)"),
        (["--load", "none.json"], "cannot read the plan none.json"),
        (["--load", "mine.json", "--model", "mlp"], "--load is instead of a recipe: leave out --model, or --load"),
        (["--load", "mine.json", "--microbatches", "8"], "microbatches must be those of the plan, 4, as it was"),
        (["--load", "mine.json", "--memory", "10kB"], "layer 'block.5' alone needs "),
        (["--load", "mine.json", "--memory", "80kB"], "the model needs at least "),
        (
            ["--load", "mine.json", "--save", "no/where.json"],
            "cannot write the plan to no/where.json: give --save a file",
        ),
        (["--load", "mine.json", "--out", "mine.json/x"], "cannot write to mine.json/x"),
        (["--stage", "2"], "unknown option --stage; did you mean --stages?"),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(saved, capsys, arguments, said) -> None:
    assert main(["plan", "pipeline", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("paceline: error: ")
    assert said in told.err
    assert told.err.count("\n") == 1


def test_that_the_plan_cannot_be_kept_does_not_undo_it(saved, monkeypatch, capsys) -> None:
    def full(plan, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Plan, "save", full)
    assert main(["plan", "pipeline", "--load", "mine.json"]) == 1
    told = capsys.readouterr()
    assert told.out.startswith(describe(saved))
    assert "cannot write to runs/plan" in told.err
    assert "No space left on device" in told.err
