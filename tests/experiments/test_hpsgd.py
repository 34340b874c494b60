"""What the experiments on HPSGD conclude of outcomes that are made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from experiments.core.story import Claim, Outcome, Size
from experiments.papers.hpsgd.scaling import HARDWARE
from experiments.papers.hpsgd.setting import LANES, PAPER, REBASED, SMALL_NETWORK, TARGETS
from paceline.data import load_dataset
from paceline.recipes import Recipe
from paceline.recipes.assembly import make_model
from tests.experiments.telling import EXPERIMENTS, TOY, assert_a_swap_is_reported, claims_of, conclude, judged

FIGURES_6 = {"hpsgd-6a": "HPSGD before Local SGD", "hpsgd-6b": "HPSGD before local-sgd"}
SECONDS = {"ssgd": 36.0, "local-sgd": 15.0, PAPER: 12.0, REBASED: 12.0, "psgd": 11.9}
COMPUTING = {"ssgd": 11.7, "local-sgd": 14.0, PAPER: 11.8, REBASED: 11.8, "psgd": 11.8}


def lane_of(key: Any) -> str:
    return key if isinstance(key, str) else key[-1]


def outcome(lane: str, *, seconds: float | None = None, apart: tuple[float, float] = (0.1, 0.1)) -> Outcome:
    """Return a lane's outcome; it was measured so many seconds before and after it reached its targets."""
    total = SECONDS[lane] if seconds is None else seconds
    computing = min(total, COMPUTING[lane])
    split = {"computing": computing, "waiting": 0.0, "network": total - computing}
    after, by = ({"seconds": total + off, **split, "computing": computing + off} for off in (-apart[0], apart[1]))
    reached = {f"{target:g}": {"seconds": total, **split, "after": after, "by": by} for target in TARGETS}
    return {"seconds": total, "rounds": 20, "split": split, "reached": reached, "accuracy": 0.9}


def outcomes(name: str, size: Size = TOY, **changed: Outcome) -> dict[Any, Outcome]:
    """Return the outcomes of all lanes; `changed` are those of "hpsgd", as in the paper, or of "local_sgd"."""
    other = {PAPER: changed.get("hpsgd"), "local-sgd": changed.get("local_sgd")}
    return {key: other.get(lane_of(key)) or outcome(lane_of(key)) for key in EXPERIMENTS[name].jobs(size)}


def speeds(name: str) -> dict[Any, Outcome]:
    """Return the outcomes of runs in which HPSGD gains more over ssgd than the paper's does with 4 workers."""
    share = {"ssgd": 0.3, "local-sgd": 0.7, "hpsgd": 0.95, "psgd": 1.0, "bmuf": 0.7, "diloco": 0.9}
    return {cell: {"batches_per_second": share[cell[1]] * cell[2]} for cell in EXPERIMENTS[name].jobs(TOY)}


# -- a winner that loses is reported -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lanes", "wrong"), [(("hpsgd", "local-sgd"), "HPSGD / Local SGD"), (("local-sgd", "ssgd"), "Local SGD / SSGD")]
)
def test_the_less_efficient_of_two_is_reported(lanes, wrong):
    assert_a_swap_is_reported("hpsgd-5a", speeds("hpsgd-5a"), lanes, wrong)


@pytest.mark.parametrize("other", ["local-sgd", "ssgd"])
def test_a_longer_epoch_of_hpsgd_is_reported(other):
    assert_a_swap_is_reported("hpsgd-5b", outcomes("hpsgd-5b"), (PAPER, other), "an epoch of HPSGD is shorter")


@pytest.mark.parametrize(
    ("name", "lanes", "wrong"),
    [
        ("hpsgd-6a", ("local-sgd", "ssgd"), "Local SGD before SSGD"),
        ("hpsgd-6a", ("local-sgd", "ssgd"), "Local SGD computes longer than SSGD"),
        ("hpsgd-6a", (PAPER, "local-sgd"), "HPSGD before Local SGD"),
        ("hpsgd-6a", (PAPER, "ssgd"), "HPSGD before Local SGD"),
        ("hpsgd-6a", (PAPER, "ssgd"), "HPSGD before SSGD"),
        ("hpsgd-6b", (PAPER, "local-sgd"), "HPSGD before local-sgd"),
        ("hpsgd-6b", (PAPER, "ssgd"), "HPSGD before ssgd"),
    ],
)
def test_a_later_winner_is_reported(name, lanes, wrong):
    assert_a_swap_is_reported(name, outcomes(name), lanes, wrong)


def test_a_smoother_curve_of_another_is_reported():
    curves = {"ssgd": 0.02, "local-sgd": 0.02, PAPER: 0.01, REBASED: 0.02}
    found = {
        key: {
            "accuracy": 0.9,
            "curve": [{"round": place, "accuracy": 0.9 + (-1) ** place * curves[lane_of(key)]} for place in range(8)],
        }
        for key in EXPERIMENTS["hpsgd-4a"].jobs(TOY)
    }
    assert_a_swap_is_reported("hpsgd-4a", found, (PAPER, "ssgd"), "smoother than that of ssgd")
    assert_a_swap_is_reported("hpsgd-4a", found, (PAPER, "local-sgd"), "smoother than that of local-sgd")


def test_accuracy_that_is_lost_with_more_workers_is_reported():
    held = {key: {"accuracy": 0.9} for key in EXPERIMENTS["hpsgd-4b"].jobs(TOY)}
    text = "HPSGD loses at most a point more than SSGD"
    assert judged("hpsgd-4b", held, text) == [True]
    for accuracy in (0.85, None):  # a run that diverged has guessed nothing
        assert judged("hpsgd-4b", {**held, ("16 workers", PAPER): {"accuracy": accuracy}}, text) == [False]


@pytest.mark.parametrize("name", FIGURES_6)
def test_no_lane_wins_by_never_reaching_the_target(name):
    found = judged(name, outcomes(name, hpsgd={"reached": {f"{target:g}": None for target in TARGETS}}), "HPSGD before")
    assert found
    assert not any(found)


# -- claims are judged where measurements can tell lanes apart ---------------------------------------------------------


def before_local_sgd(name: str, hpsgd: Outcome, local_sgd: Outcome) -> list[Claim]:
    """Return the claims that HPSGD is before Local SGD, with these outcomes of the two."""
    claims = claims_of(name, outcomes(name, hpsgd=hpsgd, local_sgd=local_sgd))
    return [claim for text, claim in claims.items() if text.startswith(FIGURES_6[name])]


def cells(name: str) -> int:
    """Return how many cases and targets there are."""
    return len({key[0] for key in EXPERIMENTS[name].jobs(TOY)}) * len(TARGETS)


@pytest.mark.parametrize("name", FIGURES_6)
@pytest.mark.parametrize("seconds", [5.0, 15.0], ids=["behind", "ahead"])
def test_lanes_that_the_measurements_cannot_tell_apart_are_reported_with_the_reason(name, seconds):
    """Local SGD was first measured after HPSGD was at the target, so either may have been the first."""
    local_sgd = outcome("local-sgd", seconds=seconds, apart=(seconds, 20.0 - seconds))
    claims = before_local_sgd(name, outcome(PAPER), local_sgd)
    assert len(claims) == cells(name)
    for claim in claims:
        assert not claim.judged
        assert "too few measurements to tell" in claim.because
        assert "local-sgd 0.0-20.0" in claim.because


@pytest.mark.parametrize("name", FIGURES_6)
def test_lanes_that_the_measurements_tell_apart_are_judged_however_few_there_are(name):
    """Local SGD was at the target with its first average, and HPSGD was measured below it at that time."""
    local_sgd = outcome("local-sgd", seconds=6.0, apart=(6.0, 4.0))
    late, early = (outcome(PAPER, seconds=seconds, apart=(0.5, 3.0)) for seconds in (10.5, 6.9))
    claims = before_local_sgd(name, late, local_sgd)
    assert [(claim.judged, claim.holds) for claim in claims] == [(True, False)] * cells(name)
    assert not any(claim.judged for claim in before_local_sgd(name, early, local_sgd))


@pytest.mark.parametrize("name", FIGURES_6)
def test_a_remark_counts_the_claims_that_the_measurements_leave_open(name):
    """Local SGD is measured at 0 and 20 s alone, so only SSGD, at 36 s, is told apart from it and from HPSGD."""
    local_sgd = outcome("local-sgd", seconds=15.0, apart=(15.0, 5.0))
    for told, some_are_open in ((outcomes(name), False), (outcomes(name, local_sgd=local_sgd), True)):
        findings = conclude(name, told)
        left_open = [claim for claim in findings.claims if "too few measurements" in claim.because]
        to_judge = sum(claim.judged for claim in findings.claims) + len(left_open)
        assert bool(left_open) == some_are_open
        assert f"Of {to_judge} claims to judge, {len(left_open)} " in findings.remarks[-1]
        beside_ssgd = [claim for claim in findings.claims if "hpsgd before ssgd" in claim.text.lower()]
        assert [(claim.judged, claim.holds) for claim in beside_ssgd] == [(True, True)] * cells(name)


@pytest.mark.parametrize(("after", "by", "told"), [(11.0, 12.5, True), (8.0, 12.5, False), (20.0, 21.0, True)])
def test_a_ratio_is_judged_where_the_measurements_leave_no_doubt(after, by, told):
    """SSGD computed for 11.6 to 11.8 seconds, and the limits of the ratio are 0.9 and 1.1."""
    at = (after + by) / 2
    split = {"waiting": 0.0, "network": 0.0}
    around = {"after": {"seconds": after, "computing": after, **split}, "by": {"seconds": by, "computing": by, **split}}
    hpsgd = {"reached": {f"{target:g}": {"seconds": at, "computing": at, **split, **around} for target in TARGETS}}
    found = judged("hpsgd-6a", outcomes("hpsgd-6a", hpsgd=hpsgd), "HPSGD computes as long as SSGD")
    assert len(found) == (cells("hpsgd-6a") if told else 0)
    assert all(holds == (at < 13) for holds in found)


def test_a_share_that_could_not_fail_is_reported_only():
    assert not judged("hpsgd-6a", outcomes("hpsgd-6a"), "share of time besides computing")


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hpsgd-5b", *FIGURES_6])
def test_small_networks_are_remarked_on_where_they_are_trained(name):
    for size in (Size(), Size("full")):
        remarks = " ".join(conclude(name, outcomes(name, size), size).remarks)
        assert ("in place of CIFAR-10" in remarks) == (size.name == "laboratory")
        assert "Seconds are virtual" in remarks


@pytest.mark.parametrize("name", ["hpsgd-4a", "hpsgd-4b", "hpsgd-5b", *FIGURES_6])
def test_lanes_differ_in_their_strategy_alone_and_have_the_paper_s_setting_at_full_size(name):
    jobs = EXPERIMENTS[name].jobs(Size("full"))
    recipes = {key: Recipe.from_document(job.of(7)["recipe"]) for key, job in jobs.items()}
    for key, recipe in recipes.items():
        assert (recipe.seed, recipe.data.name, recipe.worker.batch_size) == (7, "cifar10", 128)
        samples = recipe.rounds * recipe.cluster.workers * recipe.worker.batch_size
        assert samples == pytest.approx(100 * 50_000, rel=1e-3)
        other = recipes[(*key[:-1], "ssgd") if isinstance(key, tuple) else "ssgd"]
        assert dataclasses.replace(recipe, strategy=other.strategy) == other
        assert recipe.strategy.name == LANES[lane_of(key)]["name"]


def test_recipes_find_the_small_network_by_its_place():
    recipe = Recipe().with_settings(model={"name": SMALL_NETWORK})
    assert len(make_model(recipe, load_dataset("digits"))) == 8


# -- scale -------------------------------------------------------------------------------------------------------------


def test_a_gain_is_to_be_reached_and_what_is_the_same_may_differ_by_a_tenth():
    told = speeds("scale")
    as_good = told | {cell: told[cell[0], "hpsgd", cell[2]] for cell in told if cell[1] == "local-sgd"}
    for hardware in HARDWARE:
        gain, same = f"hpsgd / ssgd, 4 workers, {hardware}", f"hpsgd / local-sgd, 4 workers, {hardware}, off 1 by"
        apart, alike = claims_of("scale", told), claims_of("scale", as_good)
        assert [(each[gain].holds, each[same].holds) for each in (apart, alike)] == [(True, False), (True, True)]
        assert apart[gain].kind == apart[same].kind == "bar"
    assert_a_swap_is_reported("scale", told, ("hpsgd", "ssgd"), "hpsgd / ssgd, 4 workers")


def test_no_more_workers_share_four_processors_than_there_is_something_to_tell():
    jobs = EXPERIMENTS["scale"].jobs(Size())
    most = {hardware: max(cell[2] for cell in jobs if cell[0] == hardware) for hardware in HARDWARE}
    assert most == {"station": 1024, "4 GPUs": 16, "cluster": 1024}
    findings = conclude("scale", lambda cell: {"batches_per_second": cell[2]}, Size())
    of_4_gpus = next(table for table in findings.tables if "4 GPUs" in table.title)
    assert of_4_gpus.rows[0][1:] == ("100.0 %", "100.0 %", "100.0 %", "-", "-")
