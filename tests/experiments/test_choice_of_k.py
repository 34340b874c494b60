"""k = auto against every fixed K: what follows from the seconds to a target, seed by seed."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from experiments.__main__ import main
from experiments.core.story import NAN, Runs, Size
from experiments.questions.choice_of_k import DELAYS, figures
from paceline.terminal import WIDTH
from tests.experiments.telling import EXPERIMENTS

FIVE = Size("laboratory", (200, 201, 202, 203, 204))
MISSING = [NAN, 3.0]


def told(seconds, size=FIVE, **settings):
    """What is found where each run takes the seconds that a function of strategy, delay, p, c, K and seed says."""
    return EXPERIMENTS["choice-of-k"].tell(
        size,
        lambda jobs: Runs({key: [{"seconds": seconds(*key, seed)} for seed in size.seeds] for key in jobs}),
        **settings,
    )


def usual(strategy, delay, p, c, k, seed):
    """The seconds of a setting in which K = 3 is the best, and auto as good."""
    return 3.0 + 0.1 * (seed - 200) + 0.2 * abs((3 if k == "auto" else k) - 3)


def test_a_k_that_misses_the_target_once_is_not_the_best():
    found = figures({1: [1.0, NAN], 2: [4.0, 4.0], "auto": [5.0, 5.0]})
    assert (found.best_k, found.ratio) == (2, 1.25)
    assert math.isnan(found.means[1])


@pytest.mark.parametrize("times", [{1: MISSING, "auto": [1.0, 1.0]}, {1: [1.0, 1.0], "auto": MISSING}])
def test_what_was_not_reached_has_no_ratio(times):
    found = figures(times)
    assert all(map(math.isnan, (found.ratio, found.standard_error, found.held_out)))


def test_held_out_is_the_k_that_the_other_seeds_would_have_chosen():
    found = figures({1: [1.0, 9.0, 9.0], 2: [4.0, 4.0, 4.0], "auto": [4.0, 4.0, 4.0]})
    assert (found.best_k, found.ratio, found.held_out) == (2, 1.0, 1.0)
    flattered = figures({1: [1.0, 3.0], 2: [3.0, 1.2], "auto": [2.0, 2.0]})  # each seed alone would choose the other K
    assert (flattered.best_k, flattered.ratio, flattered.held_out) == (1, 1.0, pytest.approx(2 / 3))


def test_one_seed_has_no_error_and_nothing_to_hold_out():
    found = figures({1: [2.0], "auto": [2.0]})
    assert found.ratio == 1.0
    assert math.isnan(found.standard_error)
    assert math.isnan(found.held_out)


def test_lgc_has_a_bar_in_every_setting_and_fastest_k_has_none():
    found = told(usual)
    assert len(found.claims) == 27
    assert all(claim.judged and claim.holds and claim.kind == "bar" for claim in found.claims)
    slow = told(lambda *key: usual(*key) * (1.1 if key[4] == "auto" and key[1] == "pareto" else 1.0))
    assert [claim.text.split(", ")[1] for claim in slow.missed] == ["pareto"] * 9
    assert any("lgc: auto / best K <= 1.05 in 18 of 27 settings" in remark for remark in slow.remarks)


def test_a_setting_in_which_no_k_reaches_the_target_is_not_judged_and_one_that_auto_misses_is_missed():
    never = told(lambda *key: None if key[3] == 1 else usual(*key))
    assert sum(claim.judged for claim in never.claims) == 18
    assert not never.missed
    assert any("18 of 18 settings (9 where no K reached the target)" in remark for remark in never.remarks)
    lost = told(lambda *key: None if key[4] == "auto" else usual(*key))
    assert len(lost.missed) == 27


def test_all_tables_fit_a_terminal_and_mark_the_best():
    found = told(lambda *key: 10 * usual(*key))
    assert len(found.tables) == 2 * 2 * len(DELAYS)
    for table in found.tables:
        shown = io.StringIO()
        Console(file=shown, width=WIDTH).print(table.rich())
        assert "…" not in shown.getvalue()
        assert max(map(len, shown.getvalue().splitlines())) <= WIDTH
    times = found.tables[0]
    assert times.marked == {(row, times.headings.index("K=3")) for row in range(9)}


def test_delays_and_strategies_can_be_chosen_and_none_means_all():
    found = told(usual, strategies=("lgc",), delays=("slow-worker", "pareto"))
    assert {(row["strategy"], row["delay"]) for row in found.numbers["rows"]} == {
        ("lgc", "pareto"),
        ("lgc", "slow-worker"),
    }
    assert len(told(usual, delays=()).numbers["rows"]) == 54


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("strategies=lgd", "unknown strategy 'lgd'; did you mean 'lgc'? choose from fastest-k, lgc"),
        ("delays=paretto", "unknown delay model 'paretto'; did you mean 'pareto'?"),
    ],
)
def test_what_is_not_measured_cannot_be_chosen(setting, words, tmp_path, capsys):
    assert main(["choice-of-k", "--toy", "--set", setting, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
