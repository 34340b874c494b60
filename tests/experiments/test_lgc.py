"""The experiments of Live Gradient Compensation: what they conclude from outcomes made by hand, and what they run."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter

import pytest
from rich.console import Console

from experiments.core.story import Runs, Size
from experiments.papers.lgc.setting import LANES, smaller_remarks
from paceline.terminal import WIDTH
from tests.experiments.telling import EXPERIMENTS, assert_a_swap_is_reported, claims_of, conclude

LABORATORY = Size("laboratory", (200, 201))
every_experiment = pytest.mark.parametrize("name", ["lgc-4", "lgc-5", "lgc-6", "lgc-sizes"])


def recipes(name, size):
    """The recipe of each key's job, with the first seed."""
    return {key: job.of(size.seeds[0])["recipe"] for key, job in EXPERIMENTS[name].jobs(size).items()}


def different(name, size):
    """The recipes that are run: equal ones once."""
    texts = {json.dumps(job.of(seed)) for job in EXPERIMENTS[name].jobs(size).values() for seed in size.seeds}
    return [json.loads(text)["recipe"] for text in texts]


def made_up(name, figures):
    """Outcomes in which a lane has these figures: (loss, accuracy, seconds)."""
    outcomes = {}
    for key, recipe in recipes(name, LABORATORY).items():
        strategy, workers = recipe["strategy"], recipe["cluster"]["workers"]
        loss, accuracy, seconds = figures["unscaled" if strategy["scale_partial"] is False else strategy["name"]]
        seconds *= 0.5 + (workers if strategy["name"] == "full" else strategy["k"]) / workers
        points = [(0, 2.3), (50, loss + 0.2), (100, loss)]
        curve = [{"round": r, "seconds": seconds * r / 100, "loss": at, "accuracy": accuracy} for r, at in points]
        outcomes[key] = {
            "loss": loss, "accuracy": accuracy, "seconds": seconds, "rounds": 100, "diverged": False, "curve": curve
        }  # fmt: skip
    return outcomes


GOOD, BAD = (1.21, 0.49, 19.5), (1.5, 0.40, 19.5)
FULL = (1.2, 0.5, 24.0)
AS_PUBLISHED = {"full": FULL, "fastest-k": BAD, "unscaled": (1.25, 0.47, 19.5), "lgc": GOOD}
SWAPPED = {"full": FULL, "fastest-k": GOOD, "unscaled": GOOD, "lgc": BAD}


def winners(findings):
    return [claim for claim in findings.claims if claim.kind == "winner"]


@every_experiment
def test_outcomes_as_published_hold_and_swapped_ones_name_another_winner(name):
    published = conclude(name, made_up(name, AS_PUBLISHED), LABORATORY)
    assert [claim.line for claim in published.missed] == []
    swapped = conclude(name, made_up(name, SWAPPED), LABORATORY)
    held = [claim.line for claim in winners(swapped) if claim.holds]
    # Full before LGC holds all the more, and with equal figures no lane is ahead; all else must have turned.
    assert all("Full ends no higher" in line for line in held)
    assert len(winners(swapped)) > len(held)


@pytest.mark.parametrize(("loss", "holds"), [(1.24, True), (1.26, False)])
def test_a_full_that_ends_more_than_three_per_cent_above_lgc_is_reported(loss, holds):
    claims = claims_of("lgc-4", made_up("lgc-4", AS_PUBLISHED | {"full": (loss, 0.5, 24.0)}))
    assert claims["Full ends no higher than LGC, but for 3 %"].holds == holds


def test_it_is_lgc_with_scaling_that_must_be_above_k_sgd():
    findings = conclude("lgc-6", made_up("lgc-6", AS_PUBLISHED | {"unscaled": (2.0, 0.1, 19.5)}))
    assert not findings.missed


@every_experiment
def test_a_run_that_has_no_loss_wins_nothing(name):
    gone = {"loss": None, "accuracy": None, "curve": [], "diverged": True}
    strategies = {key: recipe["strategy"]["name"] for key, recipe in recipes(name, LABORATORY).items()}
    outcomes = {
        key: found if strategies[key] == "full" else found | gone for key, found in made_up(name, AS_PUBLISHED).items()
    }
    findings = conclude(name, outcomes, LABORATORY)
    assert not any(claim.holds for claim in winners(findings))
    assert json.dumps(findings.numbers, allow_nan=False)


def test_seconds_that_are_missing_are_no_time_saved():
    outcomes = made_up("lgc-4", AS_PUBLISHED)
    outcomes["lgc"] |= {"seconds": None}
    saved = claims_of("lgc-4", outcomes)["LGC saves 30 to 38 % of the time of Full"]
    assert (saved.holds, saved.because) == (False, "none is not between 30.0 % and 38.0 %")


@every_experiment
@pytest.mark.parametrize("size", ["laboratory", "full"])
def test_jobs_have_the_papers_cluster(name, size):
    found = different(name, Size(size, (200, 201)))
    for recipe in found:
        assert recipe["data"]["classes_per_worker"] == 3
        assert recipe["delay"]["persistence"] == 10
        assert (recipe["delay"]["shift_seconds"], recipe["delay"]["mean_seconds"]) == (0.05, 0.02)
        assert (recipe["worker"]["batch_size"], recipe["worker"]["blocks"]) == (32, 4)
        assert recipe["cluster"]["late_work"] == "complete"
        assert recipe["model"]["name"] == ("vgg11" if size == "full" else "lenet")
    assert {recipe["seed"] for recipe in found} == {200, 201}


def test_full_size_is_sixty_epochs_of_the_papers_schedule():
    assert list(smaller_remarks(Size("full"))) == []
    for recipe in recipes("lgc-4", Size("full")).values():
        assert recipe["rounds"] == 60 * 156
        assert recipe["strategy"]["warmup_rounds"] == 2 * 156
        assert (recipe["optimizer"]["lr"], recipe["optimizer"]["decay_at"]) == (0.1, [0.5])
        assert (recipe["optimizer"]["momentum"], recipe["optimizer"]["weight_decay"]) == (0.9, 0.0005)


def test_full_stands_for_both_lanes_where_all_workers_are_waited_for_and_is_run_once():
    lanes = Counter(recipe["strategy"]["name"] for recipe in different("lgc-5", Size()))
    assert lanes == {"full": 1, "fastest-k": 5, "lgc": 5}


def test_stragglers_do_each_number_of_blocks_and_a_whole_batch_is_run_once():
    done = Counter(recipe["cluster"]["late_blocks"] for recipe in different("lgc-6", Size()))
    assert done == {None: 2, 1: 3, 2: 3, 3: 3, 4: 1, "random": 3}


def test_k_is_seven_tenths_at_every_size():
    found = {(recipe["cluster"]["workers"], recipe["strategy"]["k"]) for recipe in different("lgc-sizes", Size())}
    assert found == {(5, 4), (10, 7), (20, 14), (40, 28)}


# -- figure 1 ----------------------------------------------------------------------------------------------------------


def test_of_figure_1_a_lane_that_is_slower_is_reported():
    full, lgc, partial = ("full", "complete"), ("lgc", "complete"), ("lgc", "partial")
    outcomes = {full: {"seconds": 6.5}, lgc: {"seconds": 4.0}, partial: {"seconds": 4.2}}
    assert_a_swap_is_reported("lgc-1", outcomes, (full, lgc), "lgc before full")
    assert_a_swap_is_reported("lgc-1", outcomes, (full, lgc), "takes")
    gone = {key: {"seconds": None} for key in outcomes}
    assert not any(claim.holds for claim in conclude("lgc-1", gone).claims)


# -- figure 3: skew and persistence ------------------------------------------------------------------------------------

THREE = Size("laboratory", (200, 201, 202))
LASTING = list(itertools.product((1, 2, 3), (10, 50)))  # c, and h of stragglers that last


def figure_3(accuracies, size=THREE):
    """What is found where each lane has these accuracies, one for each seed, in every cell."""
    return EXPERIMENTS["lgc-3"].tell(
        size, lambda jobs: Runs({key: [{"accuracy": each} for each in accuracies[key[2]]] for key in jobs})
    )


@pytest.mark.parametrize("wrong", ["LGC above K-SGD", "LGC at most a point behind Full"])
def test_of_figure_3_an_lgc_that_ends_as_k_sgd_is_reported(wrong):
    accuracies = {"full": 0.50, "lgc": 0.495, "fastest-k": 0.10}
    outcomes = {key: {"accuracy": accuracies[key[2]]} for key in EXPERIMENTS["lgc-3"].jobs(Size("toy"))}
    assert_a_swap_is_reported("lgc-3", outcomes, ("lgc", "fastest-k"), wrong)


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
    (table,) = figure_3({"full": [0.5], "fastest-k": [0.1], "lgc": [0.47]}, Size()).tables
    assert table.rows[0][1:4] == ("50.0 %", "10.0 %", "47.0 %")
    assert "±" not in table.caption


def test_a_full_or_lgc_that_diverged_with_one_seed_wins_nothing_and_a_k_sgd_has_classified_nothing():
    usual = {"full": [0.5] * 3, "fastest-k": [0.1] * 3, "lgc": [0.5] * 3}

    def missed(lane, accuracies):
        return {claim.text for claim in figure_3(usual | {lane: accuracies}).missed if "LGC" in claim.text}

    gone = [0.5, None, 0.5]
    behind = {f"LGC at most a point behind Full, c = {c}, h = {h}" for c, h in LASTING}
    assert missed("full", gone) == behind
    assert missed("lgc", gone) == behind | {f"LGC above K-SGD, c = {c}, h = {h}" for c, h in LASTING}
    assert missed("fastest-k", [0.3, None, 0.3]) == set()
    found = figure_3(usual | {"fastest-k": [0.3, None, 0.3]})
    assert found.numbers["c=1 h=10"]["fastest-k"] == pytest.approx(0.2)


def test_figure_3_trains_full_once_for_each_skew_and_says_how_to_get_the_papers_repeats():
    size = Size(seeds=tuple(range(200, 200 + EXPERIMENTS["lgc-3"].seeds)))
    lanes = Counter(recipe["strategy"]["name"] for recipe in different("lgc-3", size))
    assert lanes == {"full": 8, "fastest-k": 24, "lgc": 24}
    few, enough = (
        figure_3({lane: [0.5] * len(given.seeds) for lane in LANES}, given).remarks for given in (size, THREE)
    )
    assert any("`--seeds 3`" in remark for remark in few)
    assert not any("--seeds" in remark for remark in enough)
