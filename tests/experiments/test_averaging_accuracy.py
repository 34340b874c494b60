"""What averaging-accuracy concludes of outcomes that are made by hand, and which members it runs."""

from __future__ import annotations

import pytest

from experiments.core.story import Findings, Runs, Size
from experiments.questions.averaging_accuracy import NO_REBASE, REBASE, SETTINGS, small_cnn
from paceline.data import load_dataset
from paceline.recipes import Recipe
from paceline.recipes.assembly import make_model
from tests.experiments.telling import EXPERIMENTS

NAME, RATE = "averaging-accuracy", "momentum, 0.01"
SIZE = Size("laboratory", (200, 201))


def outcome(accuracy):
    return {"accuracy": accuracy, "loss": 1.0, "samples": 96, "steps_per_window": 2.0, "seconds_per_round": 2.0}


def told(changed) -> Findings:
    """Return the findings where every run has 90 %, but for the accuracies by seed of some cells."""

    def answer(jobs):
        return Runs({cell: [outcome(one) for one in changed.get(cell, (0.9, 0.9))] for cell in jobs})

    return EXPERIMENTS[NAME].tell(SIZE, answer)


def claim_on(findings, setting, member, optimiser=RATE):
    (claim,) = (
        each for each in findings.claims if each.text.startswith(f"{setting}; {optimiser}: points that {member} is")
    )
    return claim


def test_a_member_that_is_more_than_half_a_point_behind_misses_the_bar():
    findings = told(
        {("iid, small rates", RATE, NO_REBASE): (0.90, 0.892), ("iid, small rates", RATE, REBASE): (0.9, 0.88)}
    )
    assert all(claim.kind == "bar" for claim in findings.claims)
    assert [claim_on(findings, "iid, small rates", each).holds for each in (NO_REBASE, REBASE)] == [True, False]
    assert len(findings.missed) == 1
    found = findings.numbers[f"iid, small rates: {RATE}: {NO_REBASE}"]
    assert found["behind_by_seed"] == pytest.approx([0.0, 0.8])
    assert (found["behind"], found["spread"]) == pytest.approx((0.4, 0.8))


def test_a_run_that_diverged_misses_the_bar_and_one_of_ssgd_lets_all_beside_it_miss():
    findings = told({("iid", "plain, 0.4", REBASE): (0.9, None), ("iid", "plain, 0.2", "ssgd"): (None, 0.9)})
    missed = [
        ("iid", "plain, 0.4", REBASE),
        *(("iid", "plain, 0.2", each) for each in ("local-sgd", NO_REBASE, REBASE)),
    ]
    assert {claim.text for claim in findings.missed} == {
        f"{setting}; {rate}: points that {member} is behind ssgd" for setting, rate, member in missed
    }
    assert findings.numbers[f"iid: plain, 0.4: {REBASE}"]["spread"] is None


def test_long_windows_are_measured_against_ssgd_with_short_ones_seed_by_seed():
    assert "ssgd" not in SETTINGS["long windows"].members
    findings = told({("iid, small rates", RATE, "ssgd"): (0.95, 0.91)})
    assert findings.numbers[f"long windows: {RATE}: {REBASE}"]["behind_by_seed"] == pytest.approx([5.0, 1.0])
    assert not claim_on(findings, "long windows", REBASE).holds


def test_what_the_paper_does_not_claim_is_reported_only():
    setting = "non-IID(2), one slow"
    claims = [claim for claim in told({(setting, RATE, REBASE): (0.1, 0.1)}).claims if claim.text.startswith(setting)]
    assert claims
    assert not any(claim.judged for claim in claims)
    assert not all(claim.holds for claim in claims)


def test_a_member_s_words_are_its_settings():
    jobs = EXPERIMENTS[NAME].jobs(SIZE)
    found = {
        member: Recipe.from_document(job.of(0)["recipe"]).strategy
        for (setting, _, member), job in jobs.items()
        if setting == "non-IID(2), one slow"
    }
    assert {member: (each.name, each.rebase, each.normalize) for member, each in found.items()} == {
        "ssgd": ("ssgd", False, False),
        "local-sgd": ("local-sgd", False, False),
        "hpsgd, no rebase": ("hpsgd", False, False),
        "hpsgd": ("hpsgd", True, False),
        "hpsgd, no rebase, normalize": ("hpsgd", False, True),
        "hpsgd, normalize": ("hpsgd", True, True),
    }


def test_recipes_find_the_network_by_its_place():
    job = next(iter(EXPERIMENTS[NAME].jobs(Size("toy")).values()))
    network = make_model(Recipe.from_document(job.of(0)["recipe"]), load_dataset("digits"))
    assert str(network) == str(small_cnn(input_shape=(1, 8, 8), classes=10))
