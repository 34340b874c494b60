"""The experiments of Live Gradient Compensation: whole at toy size, and what they conclude from other outcomes."""

from __future__ import annotations

import io
import itertools
import json

import pytest
from rich.console import Console

from paceline.reproduce import experiment_named
from paceline.reproduce.experiment import ExperimentPlan
from paceline.reproduce.lgc.setting import base_recipe
from paceline.reproduce.lgc.skew import figure_3_job
from paceline.reproduce.recipe_runs import run_recipe
from paceline.reproduce.running import check_names
from paceline.terminal import WIDTH

TOY, LABORATORY = ExperimentPlan(size="toy"), ExperimentPlan(size="laboratory", seeds=(200, 201))
NAMES = ("lgc-4", "lgc-5", "lgc-6", "lgc-sizes")
every_experiment = pytest.mark.parametrize("name", NAMES)


def made_up(name, plan, figures):
    """Outcomes in which a lane's figures are those of `figures`, by a word of the job's name: (loss, accuracy, s)."""
    outcomes = {}
    for job in experiment_named(name).jobs(plan):
        loss, accuracy, seconds = next(value for word, value in figures.items() if word in job.name)
        recipe = job.settings["recipe"]
        k = recipe["strategy"]["k"] if recipe["strategy"]["name"] != "full" else recipe["cluster"]["workers"]
        seconds *= 0.5 + k / recipe["cluster"]["workers"]
        points = [(0, 2.3), (50, loss + 0.2), (100, loss)]
        curve = [{"round": r, "seconds": seconds * r / 100, "loss": at, "accuracy": accuracy} for r, at in points]
        outcomes[job.name] = {
            "loss": loss, "accuracy": accuracy, "seconds": seconds, "rounds": 100, "diverged": False, "curve": curve
        }  # fmt: skip
    return outcomes


AS_PUBLISHED = {"fastest-k": (1.5, 0.40, 19.5), "unscaled": (1.25, 0.47, 19.5), "full": (1.2, 0.5, 24.0)}
AS_PUBLISHED |= {"": (1.21, 0.49, 19.5)}  # lgc, scaled
SWAPPED = {"fastest-k": (1.21, 0.49, 19.5), "unscaled": (1.21, 0.49, 19.5), "full": (1.2, 0.5, 24.0)}
SWAPPED |= {"": (1.5, 0.40, 19.5)}


def winners(findings):
    return [claim for claim in findings.claims if claim.kind == "winner"]


@every_experiment
def test_at_toy_size_it_runs_to_its_findings(name):
    experiment = experiment_named(name)
    jobs = experiment.jobs(TOY)
    check_names(jobs)
    findings = experiment.conclude(TOY, {job.name: job.run(job.settings) for job in jobs})
    headings = [heading for table in findings.tables for heading in table.headings]
    assert any("paper" in heading for heading in headings)
    assert any("ours" in heading for heading in headings)
    assert findings.claims
    assert findings.charts
    assert findings.remarks
    assert json.dumps(findings.numbers, allow_nan=False)
    for table in findings.tables:
        assert {len(row) for row in table.rows} == {len(table.headings)}


@every_experiment
def test_outcomes_as_published_hold_and_swapped_ones_name_another_winner(name):
    experiment = experiment_named(name)
    published = experiment.conclude(LABORATORY, made_up(name, LABORATORY, AS_PUBLISHED))
    assert [claim.line for claim in published.missed] == []
    swapped = experiment.conclude(LABORATORY, made_up(name, LABORATORY, SWAPPED))
    held = [claim.line for claim in winners(swapped) if claim.holds]
    # Full before LGC holds all the more, and with equal figures nobody is ahead; all else must have turned.
    assert all("Full ends no higher" in line for line in held)
    assert len(winners(swapped)) > len(held)


@every_experiment
def test_a_run_that_has_no_loss_wins_nothing(name):
    experiment = experiment_named(name)
    outcomes = made_up(name, LABORATORY, AS_PUBLISHED)
    gone = {"loss": None, "accuracy": None, "curve": [], "diverged": True}
    diverged = {job: each if "full" in job else each | gone for job, each in outcomes.items()}
    findings = experiment.conclude(LABORATORY, diverged)
    assert not any(claim.holds for claim in winners(findings))
    assert json.dumps(findings.numbers, allow_nan=False)


@every_experiment
@pytest.mark.parametrize("size", ["laboratory", "full"])
def test_jobs_have_names_of_their_own_and_the_papers_cluster(name, size):
    jobs = experiment_named(name).jobs(ExperimentPlan(size=size, seeds=(200, 201)))
    check_names(jobs)
    for recipe in (job.settings["recipe"] for job in jobs):
        assert recipe["data"]["classes_per_worker"] == 3
        assert recipe["delay"]["persistence"] == 10
        assert (recipe["delay"]["shift_seconds"], recipe["delay"]["mean_seconds"]) == (0.05, 0.02)
        assert (recipe["worker"]["batch_size"], recipe["worker"]["blocks"]) == (32, 4)
        assert recipe["cluster"]["late_work"] == "complete"
        assert recipe["model"]["name"] == ("vgg11" if size == "full" else "lenet")
    assert {job.settings["recipe"]["seed"] for job in jobs} == {200, 201}


def test_full_size_is_sixty_epochs_of_the_papers_schedule():
    for job in experiment_named("lgc-4").jobs(ExperimentPlan(size="full")):
        recipe = job.settings["recipe"]
        assert recipe["rounds"] == 60 * 156
        assert recipe["strategy"]["warmup_rounds"] == 2 * 156
        assert (recipe["optimizer"]["lr"], recipe["optimizer"]["decay_at"]) == (0.1, [0.5])
        assert (recipe["optimizer"]["momentum"], recipe["optimizer"]["weight_decay"]) == (0.9, 0.0005)


def test_stragglers_do_each_number_of_blocks_and_a_whole_batch_is_run_once():
    jobs = experiment_named("lgc-6").jobs(ExperimentPlan(seeds=(200,)))
    done = [job.settings["recipe"]["cluster"]["late_blocks"] for job in jobs]
    assert {each: done.count(each) for each in done} == {None: 2, 1: 3, 2: 3, 3: 3, 4: 1, "random": 3}


def test_k_is_seven_tenths_at_every_size():
    found = {
        (job.settings["recipe"]["cluster"]["workers"], job.settings["recipe"]["strategy"]["k"])
        for job in experiment_named("lgc-sizes").jobs(ExperimentPlan())
    }
    assert found == {(5, 4), (10, 7), (20, 14), (40, 28)}


# -- figure 3: skew and persistence ---------------------------------------------------------------------------------

THREE = ExperimentPlan(size="laboratory", seeds=(200, 201, 202))
LASTING = list(itertools.product((1, 2, 3), (10, 50)))  # c, and h of stragglers that last


def figure_3(accuracies, plan=THREE):
    """What is found where each lane has these accuracies, one for each seed, in every cell."""
    outcomes = {
        figure_3_job(c, h, lane, seed): {"accuracy": accuracy}
        for c in (1, 2, 3, 10)
        for h in (1, 10, 50)
        for lane, values in accuracies.items()
        for seed, accuracy in zip(plan.seeds, values, strict=True)
    }
    return experiment_named("lgc-3").conclude(plan, outcomes)


def test_figure_3_judges_all_that_is_said():
    found = figure_3({"full": [0.5] * 3, "fastest-k": [0.1] * 3, "lgc": [0.495] * 3})
    assert all(claim.judged for claim in found.claims)
    assert {claim.text for claim in found.claims} == {
        *(f"LGC above K-SGD, c = {c}, h = {h}" for c, h in LASTING),
        *(f"LGC at most a point behind Full, c = {c}, h = {h}" for c, h in LASTING),
        *(f"K-SGD at chance, c = 1, h = {h}" for h in (10, 50)),
        *(f"K-SGD little affected, c = {c}, h = 1" for c in (2, 3)),
    }
    assert {claim.text for claim in found.missed} == {f"K-SGD little affected, c = {c}, h = 1" for c in (2, 3)}


@pytest.mark.parametrize(("lgc", "holds"), [([0.47, 0.5, 0.51], True), ([0.47, 0.49, 0.5], False)])
def test_figure_3_is_judged_by_means_over_the_seeds(lgc, holds):
    found = figure_3({"full": [0.5] * 3, "fastest-k": [0.6, 0.1, 0.1], "lgc": lgc})
    assert all(claim.holds for claim in found.claims if "above K-SGD" in claim.text)  # though one seed says otherwise
    assert {claim.holds for claim in found.claims if "behind Full" in claim.text} == {holds}


def test_the_table_of_figure_3_has_the_spread_over_seeds_and_fits_a_terminal():
    (table,) = figure_3({"full": [0.46, 0.48, 0.5], "fastest-k": [0.1] * 3, "lgc": [0.47] * 3}).tables
    assert all(row[1:4] == ("48.0 ± 2.0 %", "10.0 ± 0.0 %", "47.0 ± 0.0 %") for row in table.rows)
    assert "standard deviation over 3 seeds" in table.caption
    shown = io.StringIO()
    Console(file=shown, width=WIDTH).print(table.rich())
    assert "…" not in shown.getvalue()
    (table,) = figure_3({"full": [0.5], "fastest-k": [0.1], "lgc": [0.47]}, ExperimentPlan()).tables
    assert table.rows[0][1:4] == ("50.0 %", "10.0 %", "47.0 %")
    assert "±" not in table.caption


def test_a_full_or_lgc_that_diverged_with_one_seed_wins_nothing_and_a_k_sgd_has_classified_nothing():
    def missed(**accuracies):
        usual = {"full": [0.5] * 3, "fastest-k": [0.1] * 3, "lgc": [0.5] * 3}
        return {claim.text for claim in figure_3(usual | accuracies).missed if "LGC" in claim.text}

    gone = [0.5, None, 0.5]
    behind = {f"LGC at most a point behind Full, c = {c}, h = {h}" for c, h in LASTING}
    assert missed(full=gone) == behind
    assert missed(lgc=gone) == behind | {f"LGC above K-SGD, c = {c}, h = {h}" for c, h in LASTING}
    assert missed(**{"fastest-k": [0.3, None, 0.3]}) == set()
    found = figure_3({"full": [0.5] * 3, "fastest-k": [0.3, None, 0.3], "lgc": [0.5] * 3})
    assert found.numbers["c=1 h=10"]["fastest-k"] == pytest.approx(0.2)


def test_figure_3_trains_full_once_for_each_skew_and_says_how_to_get_the_papers_repeats():
    experiment = experiment_named("lgc-3")
    plan = ExperimentPlan(seeds=tuple(range(200, 200 + experiment.seeds)))
    jobs = experiment.jobs(plan)
    lanes = [job.settings["recipe"]["strategy"]["name"] for job in jobs]
    assert {lane: lanes.count(lane) for lane in lanes} == {"full": 8, "fastest-k": 24, "lgc": 24}
    few, enough = (
        figure_3({lane: [0.5] * len(given.seeds) for lane in ("full", "fastest-k", "lgc")}, given).remarks
        for given in (plan, THREE)
    )
    assert any("`--seeds 3`" in remark for remark in few)
    assert not any("--seeds" in remark for remark in enough)


def test_what_full_learns_does_not_depend_on_how_long_stragglers_last():
    recipe = base_recipe(TOY).with_strategy("full")
    losses = {
        run_recipe({"recipe": recipe.with_settings(delay={"persistence": h}).to_document()})["loss"] for h in (1, 10)
    }
    assert len(losses) == 1
