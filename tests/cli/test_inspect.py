"""`paceline inspect rates` as a user meets it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from paceline.analysis.layer_ratios import Inspection, inspect_recipe, moments_of
from paceline.cli import inspect as inspection
from paceline.cli import main
from paceline.quantities import number_text
from paceline.recipes import Recipe

SMALL = ["--data", "synthetic", "--data.samples", "60", "--data.size", "4", "--data.channels", "1", "--workers", "2",
         "--k", "2"]  # fmt: skip
RECIPE = Recipe().with_settings(
    data={"name": "synthetic", "samples": 60, "size": 4, "channels": 1}, cluster={"workers": 2}, strategy={"k": 2}
)
LAYERS = [f"{number}.{part}" for number in (1, 3, 5) for part in ("weight", "bias")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def test_a_table_a_sentence_and_a_page(folder, capsys) -> None:
    assert main(["inspect", "rates", *SMALL]) == 0
    told = capsys.readouterr()
    assert max(len(line.rstrip()) for line in told.out.splitlines()) <= 80
    rows = [line for line in told.out.splitlines() if any(f" {name} " in line for name in LAYERS)]
    (marked,) = [line for line in rows if line.startswith(">")]
    assert f"{marked.split()[1]} limits the learning rate: |w| / |gradient| is {marked.split()[4]}." in told.out
    assert "runs/inspect/inspect.html" in told.err
    page = (folder / "runs/inspect/inspect.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert all(f'<th scope="row">{name}</th>' in page for name in LAYERS)
    assert "chart-ratios" in page
    assert "chart-course" not in page


def test_with_steps_the_last_moment_stands_beside_the_first(folder, capsys) -> None:
    assert main(["inspect", "rates", *SMALL, "--steps", "5", "--batch", "8", "--json", "--out", "here"]) == 0
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert [moment["step"] for moment in document["moments"]] == [0, 1, 2, 3, 4, 5]
    assert document["batch"] == 8
    first = {layer["name"]: layer["ratio"] for layer in document["layers"]}
    assert list(first) == LAYERS
    assert document["moments"][0]["ratios"] == first
    assert first[document["limiting"]] == min(ratio for ratio in first.values() if ratio)
    assert document["moments"][5]["ratios"] != first
    assert json.loads((folder / "here/results.json").read_text(encoding="utf-8")) == document
    page = (folder / "here/inspect.html").read_text(encoding="utf-8")
    assert "chart-course" in page
    assert "ratio after 5 steps" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "301"], "steps must be between 0 and the recipe's rounds (steps=301, rounds=300)"),
        (["--batch", "-1"], "batch must be between 1 and 1,000,000, or 0 for the recipe's (batch=-1)"),
        (["--model", "mpl"], "--model: unknown model 'mpl'; did you mean 'mlp'?"),
        (["--stesp", "5"], "unknown option --stesp; did you mean --steps?"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, capsys, arguments, said) -> None:
    assert main(["inspect", "rates", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("paceline: error: ")
    assert said in told.err
    assert told.err.count("\n") == 1
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "61"], "batch must be between 1 and 60, the training samples of synthetic (batch=61)"),
        (["--worker.batch-size", "64"], "batch must be given, between 1 and 60, the training samples of synthetic"),
        (["--worker.batch-size", "64", "--batch", "60"], ""),
    ],
)
def test_a_batch_of_more_samples_than_there_are_is_refused(folder, capsys, arguments, said) -> None:
    assert main(["inspect", "rates", *SMALL, *arguments]) == (2 if said else 0)
    assert said in capsys.readouterr().err


def test_debug_shows_where(folder, capsys) -> None:
    assert main(["inspect", "rates", "--steps", "301", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_computed(folder, capsys) -> None:
    (folder / "taken").write_text("a file")
    assert main(["inspect", "rates", "--out", "taken/here"]) == 2
    assert "cannot write to taken/here" in capsys.readouterr().err


# -- what is computed, and what is said of it -------------------------------------------------------------------------


def test_the_same_recipe_gives_the_same_ratios_and_training_goes_on_from_the_first() -> None:
    whole, start = inspect_recipe(RECIPE, steps=4), inspect_recipe(RECIPE)
    assert whole.first == start.first
    assert whole == inspect_recipe(RECIPE, steps=4)
    assert len({moment.loss for moment in whole.moments}) == 5


def test_every_moment_has_a_batch_of_its_own_and_the_weights_of_its_step() -> None:
    still = inspect_recipe(RECIPE.with_settings(optimizer={"lr": 1e-15}), steps=2)
    moved = inspect_recipe(RECIPE, steps=2)
    norms = [{row.weight_norm for row in found.last.ratios.only("weight")} for found in (still, moved)]
    assert norms[0] == {row.weight_norm for row in still.first.ratios.only("weight")} != norms[1]
    assert len({moment.loss for moment in still.moments}) == 3  # the weights stand still, so it is the batches


def test_settings_of_the_recipe_are_those_of_its_optimiser() -> None:
    recipe = RECIPE.with_settings(
        optimizer={
            "name": "lars",
            "weight_decay": 0.25,
            "trust_coefficient": 0.5,
            "exclude_bias_and_norm": False,
            "warmup": 0.5,
        }
    )
    found = inspect_recipe(recipe)
    row = found.first.ratios["1.weight"]
    assert row.local_rate == pytest.approx(0.5 * row.weight_norm / (row.gradient_norm + 0.25 * row.weight_norm))
    assert found.first.rate < recipe.optimizer.lr  # the warm-up has only begun
    limiting = found.limiting()
    said = f"LARS multiplies the rate of {limiting.name} by {number_text(limiting.local_rate)}."
    assert said in " ".join(inspection.sentences(recipe, found))


def lars(**more) -> Recipe:
    return RECIPE.with_settings(optimizer={"name": "lars", **more})


def test_with_clip_the_rates_of_lars_are_limits() -> None:
    recipe = lars(clip=True)
    found = inspect_recipe(recipe)
    name, limit = found.limiting().name, number_text(found.limiting().local_rate)
    told = " ".join(inspection.sentences(recipe, found))
    assert f"LARS holds the rate of {name} to at most {limit}. Other parameters: 2 with a limit" in told
    table = inspection.table(found)
    assert "LARS limit" in table.headings
    assert "LARS limit" in inspection.lines(found)[0]
    assert any(phrase.endswith(", clip") for phrase in inspection.conditions(recipe, found))
    for text in (told, table.caption):
        assert "multipl" not in text
    json.dumps(inspection.document(recipe, found), allow_nan=False)


def test_what_lars_leaves_out_is_said_to_take_the_rate_as_it_is() -> None:
    recipe = lars()
    found = inspect_recipe(recipe, steps=1)
    told = " ".join(inspection.sentences(recipe, found))
    assert "Other parameters: 2 with a factor of their own, 3 that take the rate as it is." in told
    cells = {row[0]: row[6] for row in inspection.table(found).rows}
    assert {name for name, cell in cells.items() if cell == "as it is"} == {"1.bias", "3.bias", "5.bias"}
    later = Inspection(batch=8, moments=(found.last,))  # biases are no longer 0
    assert later.limiting().kind == "bias"
    told = " ".join(inspection.sentences(recipe, later))
    assert f"LARS leaves {later.limiting().name} out: it takes the rate as it is, {later.first.rate:g} at" in told
    assert "by 1" not in told


def test_what_began_at_zero_does_not_limit_later() -> None:
    found = inspect_recipe(RECIPE, steps=1)
    last = found.last.ratios
    biases = [row for row in last if row.kind == "bias"]
    assert all(row.ratio > 0 for row in biases)
    assert last.limiting.kind == "bias"
    assert found.limiting(found.last).name == last.only("weight").limiting.name


def test_a_run_that_diverges_ends_there_and_says_so() -> None:
    recipe = RECIPE.with_settings(optimizer={"lr": 1e6})
    found = inspect_recipe(recipe, steps=200)
    assert found.diverged
    assert found.last.step < 200
    assert not math.isfinite(found.last.loss)
    told = " ".join(inspection.sentences(recipe, found))
    assert f"Training diverged: after {found.last.step:,} steps" in told
    assert "times of its length" in told
    json.dumps(inspection.document(recipe, found), allow_nan=False)
    assert all("nan" in line or "-" in line or " 0 " in line for line in inspection.lines(found)[1:])


def test_the_rate_is_compared_only_where_steps_go_by_the_gradient() -> None:
    found = inspect_recipe(RECIPE)
    adam = RECIPE.with_settings(optimizer={"name": "adam"})
    assert inspection.comparable_rate(RECIPE, found) == RECIPE.optimizer.lr
    assert inspection.comparable_rate(adam, found) is None
    assert "adam, does not step by the gradient itself" in " ".join(inspection.sentences(adam, found))


def test_without_a_ratio_nothing_is_claimed() -> None:
    found = inspect_recipe(RECIPE)
    nothing = Inspection(batch=8, moments=(replace(found.first, ratios=found.first.ratios.only("bias")),))
    assert inspection.headline(nothing).startswith("No layer limits the learning rate")
    assert inspection.sentences(RECIPE, nothing) == [
        "3 of 3 parameters start at 0. They have no size that a step could exceed, and are not counted."
    ]


def test_moments_are_the_first_the_last_and_few_between() -> None:
    assert moments_of(0) == [0]
    for steps in (1, 59, 60, 61, 12345):
        moments = moments_of(steps)
        assert (moments[0], moments[-1]) == (0, steps)
        assert len(set(moments)) == len(moments) <= 61
        assert moments == sorted(moments)
