"""The experiments of Live Gradient Compensation: whole at toy size, and what they conclude from other outcomes."""

from __future__ import annotations

import json

import pytest

from paceline.reproduce import experiment_named
from paceline.reproduce.experiment import ExperimentPlan
from paceline.reproduce.running import check_names

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
