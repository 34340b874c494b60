"""Weights of partial late work: what follows from the losses at the end, seed by seed."""

from __future__ import annotations

import io
import json
import math
from collections import Counter

import pytest
from rich.console import Console

from experiments.__main__ import main
from experiments.core.story import Runs, Size
from experiments.questions.late_weights import geometric_mean, ratio
from paceline.terminal import WIDTH
from tests.experiments.telling import EXPERIMENTS

FIVE = Size("laboratory", (200, 201, 202, 203, 204))
LOSSES = {"full": 1.0, "scaled": 1.06, "unscaled": 1.0, "samples": 1.02}


def told(losses=None, size=FIVE, **settings):
    """What is found where each lane ends at its loss, times one more hundredth for each seed."""
    losses = LOSSES | (losses or {})

    def outcome(lane, seed):
        loss = losses[lane]
        return {"loss": None if loss is None else loss * (1 + (seed - 200) / 100), "accuracy": 0.9, "seconds": 1.0}

    return EXPERIMENTS["late-weights"].tell(
        size, lambda jobs: Runs({key: [outcome(key[3], seed) for seed in size.seeds] for key in jobs}), **settings
    )


def test_each_weight_has_a_bar_over_all_settings_of_a_data_set():
    found = told()
    assert [claim.holds for claim in found.claims] == [False, True, True] * 2
    assert all(claim.judged and claim.kind == "bar" for claim in found.claims)
    swapped = told({"scaled": LOSSES["samples"], "samples": LOSSES["scaled"]})
    assert [claim.holds for claim in swapped.claims] == [True, True, False] * 2


def test_losses_are_compared_on_the_same_seed():
    rows = told(data=("digits",)).numbers["rows"]
    assert [row["setting"] for row in rows][-2:] == ["c = 3, h = 50", "all"]
    for row in rows:
        assert row["loss scaled"] == pytest.approx(1.06)  # though every loss grows with the seed
    assert rows[-1]["error scaled"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("gone", ["full", "scaled"])
def test_a_run_that_diverged_meets_no_bar_and_is_not_the_lowest(gone):
    found = told({gone: None})
    lost = [claim for claim in found.claims if gone in ("full", claim.text.split(": ")[-1].split(",")[0])]
    assert len(lost) == (6 if gone == "full" else 2)
    assert not any(claim.holds for claim in lost)
    (lowest,) = {column for _, column in found.tables[0].marked} or {None}
    assert lowest == (None if gone == "full" else 2)
    assert json.dumps(found.numbers, allow_nan=False)


def test_the_error_over_seeds_is_shown_where_there_are_several():
    several, one = (told(size=size, data=("digits",)).tables[0].rows for size in (FIVE, Size()))
    assert several[-1][:4] == ("± over seeds", "0.000", "0.000", "0.000")
    assert one[-1][0] == "all"


def test_tables_fit_a_terminal():
    for table in told().tables:
        shown = io.StringIO()
        Console(file=shown, width=WIDTH).print(table.rich())
        assert "…" not in shown.getvalue()
        assert max(map(len, shown.getvalue().splitlines())) <= WIDTH


def test_full_is_trained_once_for_each_data_set_skew_and_seed():
    jobs = EXPERIMENTS["late-weights"].jobs(FIVE)
    texts = {json.dumps(job.of(seed)) for job in jobs.values() for seed in FIVE.seeds}
    recipes = [json.loads(text)["recipe"] for text in texts]
    found = Counter((recipe["data"]["name"], recipe["strategy"]["name"]) for recipe in recipes)
    assert found == {
        (data, lane): count for data in ("digits", "cifar10") for lane, count in (("full", 15), ("lgc", 135))
    }


def test_a_data_set_that_is_not_measured_cannot_be_chosen(tmp_path, capsys):
    assert {row["data"] for row in told(data=("digits",)).numbers["rows"]} == {"digits"}
    assert {row["data"] for row in told(data=()).numbers["rows"]} == {"digits", "cifar10"}
    assert main(["late-weights", "--toy", "--set", "data=mnist", "--out", str(tmp_path)]) == 2
    assert "unknown data set 'mnist'" in capsys.readouterr().err


def test_a_mean_of_ratios_needs_all_of_them():
    assert math.isnan(ratio(1.0, 0.0))
    assert all(map(math.isnan, map(geometric_mean, ([], [0.0, 1.0], [math.nan]))))
