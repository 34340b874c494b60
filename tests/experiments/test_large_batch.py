"""`large-batch` is fair and says what came out; its figures are made up here."""

from __future__ import annotations

import json

import pytest

from experiments.core.story import Runs, Size
from experiments.questions.large_batch import BY_RULE, FINAL, OPTIMIZERS, TUNING, TUNING_SEED
from tests.experiments.telling import EXPERIMENTS

STORY = EXPERIMENTS["large-batch"]
SMALL, LARGE = 64, 256
RATES = (0.05, 0.1)


def towards_lars(key):
    """LARS is best at the larger rate, SGD at the smaller one."""
    return 50 + key[3] if key[1] == "LARS" else 50 - key[3]


def told(tuned=towards_lars, final=lambda key, seed: 50.0, seeds=(200, 201), **settings):
    """The findings with made-up outcomes, and the jobs of both phases by their keys."""
    size, asked = Size("toy", seeds), {}

    def outcome(key, seed):
        if key[0] == TUNING:
            return {"held_out": tuned(key), "accuracy": 0.0, "training_loss": 1.0}
        return {"held_out": 0.0, "accuracy": final(key, seed), "training_loss": 1.0}

    def answer(jobs):
        asked.update(jobs)
        return Runs({key: [outcome(key, seed) for seed in seeds] for key in jobs})

    return STORY.tell(size, answer, **settings), asked


def settings_of(asked, *, seeds=(200, 201)):
    return {json.dumps(dict(job.of(seed)), sort_keys=True) for job in asked.values() for seed in seeds}


def test_both_optimisers_try_the_same_rates_with_a_seed_that_is_not_reported():
    for seeds in ((200, 201), (999, 1000)):
        _, asked = told(seeds=seeds)
        tuning = [(key, job) for key, job in asked.items() if key[0] == TUNING]
        tried = {}
        for (_, optimizer, batch, rate), _ in tuning:
            tried.setdefault((optimizer, batch), []).append(rate)
        assert set(tried) == {(optimizer, batch) for optimizer in OPTIMIZERS for batch in (SMALL, LARGE)}
        assert all(rates == list(RATES) for rates in tried.values())
        (tuning_seed,) = {job.of(seed)["seed"] for _, job in tuning for seed in seeds}
        assert tuning_seed >= TUNING_SEED
        reported = {job.of(seed)["seed"] for key, job in asked.items() if key[0] != TUNING for seed in seeds}
        assert reported == set(seeds)
        assert tuning_seed not in reported


def test_final_runs_take_the_best_rate_and_the_rule_scales_that_of_the_smallest_batch():
    _, asked = told()
    rates = {(key[1], job.of(200)["rate"]) for key, job in asked.items() if key[0] == FINAL}
    assert rates == {("SGD", min(RATES)), ("LARS", max(RATES))}
    ((key, by_rule),) = ((key, job) for key, job in asked.items() if key[0] == BY_RULE)
    assert key == (BY_RULE, "SGD", LARGE)
    assert by_rule.of(200)["rate"] == pytest.approx(min(RATES) * LARGE / SMALL)
    assert by_rule.of(201)["seed"] == 200  # one seed


def test_a_rate_that_diverged_is_never_the_best_and_one_at_the_edge_is_told():
    rates = (0.1, 0.2, 0.3)
    inner, asked = told(lambda key: {0.1: 10.0, 0.2: 20.0}.get(key[3]), rates=rates)
    assert {job.of(200)["rate"] for key, job in asked.items() if key[0] == FINAL} == {0.2}
    assert not any("edge" in remark for remark in inner.remarks)
    outer, _ = told(lambda key: {0.1: 30.0, 0.2: 20.0}.get(key[3]), rates=rates)
    assert sum("edge" in remark for remark in outer.remarks) == 4
    lost, asked = told(lambda key: None, rates=rates)
    assert {job.of(200)["rate"] for key, job in asked.items() if key[0] == FINAL} == {0.1}
    assert "-" in lost.tables[1].rows[2][1]


def test_rates_are_chosen_by_images_held_out_and_the_table_shows_test_images():
    findings, _ = told(final=lambda key, seed: 77.0)
    assert {row[4] for row in findings.tables[0].rows} == {"77.00"}
    assert findings.tables[1].rows[0][1] == "49.95*"


MEANS = {("SGD", SMALL): 90.0, ("LARS", SMALL): 95.0, ("SGD", LARGE): 80.0, ("LARS", LARGE): 89.0}


def test_the_bars_are_held_against_means_over_seeds():
    seeds = (200, 201, 202)

    def around(key, seed):
        return MEANS[key[1], key[2]] + seed - 201

    findings, _ = told(final=around, seeds=seeds)
    assert [(claim.holds, claim.because.split()[0]) for claim in findings.claims] == [(True, "+1.00"), (True, "+9.00")]
    assert all(claim.kind == "bar" for claim in findings.claims)
    other = {"SGD": "LARS", "LARS": "SGD"}
    swapped, _ = told(final=lambda key, seed: around((key[0], other[key[1]], key[2]), seed), seeds=seeds)
    assert [claim.holds for claim in swapped.claims] == [False, False]
    spreads = [row[5] for row in findings.tables[0].rows]
    assert spreads == ["2.00", "2.00", "2.00", "", "2.00"]  # by the rule there is one seed


@pytest.mark.parametrize(("optimizer", "holds"), [("LARS", [False, False]), ("SGD", [True, True])])
def test_a_seed_that_diverged_loses(optimizer, holds):
    """SGD that diverged at the largest batch has classified nothing there, and LARS is ahead of it."""

    def final(key, seed):
        return None if (key[1:3], seed) == ((optimizer, LARGE), 201) else MEANS[key[1], key[2]]

    findings, _ = told(final=final)
    assert [claim.holds for claim in findings.claims] == holds
    (row,) = (row for row in findings.tables[0].rows if row[0] == str(LARGE) and row[2] == optimizer)
    assert (row[4], row[6]) == ("-", "-")


def test_more_rates_compute_nothing_again_and_another_size_everything():
    _, asked = told()
    _, more = told(rates=(*RATES, 0.2), tuned=lambda key: towards_lars(key) if key[3] < 0.2 else 0.0)
    assert settings_of(asked) < settings_of(more)
    assert len(settings_of(more) - settings_of(asked)) == 4
    _, longer = told(epochs=9)
    assert not settings_of(asked) & settings_of(longer)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rates": (0.1, -1.0)}, r"rates must be above 0 and finite \(rates=\(-1.0, 0.1\)\)"),
        ({"rates": ()}, r"rates must be above 0 and finite \(rates=\(\)\)"),
        ({"epochs": 0}, r"epochs must be at least 1 \(epochs=0\)"),
        ({"batches": (100000,)}, r"batches must be between 1 and the 512 images \(batch=100000\)"),
        ({"batches": ()}, r"batches must be between 1 and the 512 images \(batch=0\)"),
    ],
)
def test_settings_that_no_run_could_have_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        told(**given)


def test_settings_are_read_from_text_and_sorted():
    given = STORY.with_settings({"batches": "1024, 64", "rates": "0.1", "model": "small-cnn-bn", "epochs": "3"})
    _, asked = told(**{**given, "batches": (256, 64, 64)})
    assert given["batches"] == (1024, 64)
    assert [job.of(200)["model"] for job in asked.values()] == ["small-cnn-bn"] * len(asked)
    assert {job.of(200)["epochs"] for job in asked.values()} == {3}
    assert {key[2] for key in asked if key[0] == BY_RULE} == {256}
    with pytest.raises(ValueError, match="batches of large-batch must be a whole number"):
        STORY.with_settings({"batches": "64,many"})
