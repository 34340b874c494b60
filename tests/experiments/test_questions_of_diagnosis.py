"""What is said of recorded runs, on outcomes made by hand: alternatives predicted and run, and false alarms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from experiments.core.story import Runs, Size
from experiments.questions import what_if
from experiments.questions.false_alarms import KINDS
from experiments.questions.what_if import CASES
from tests.experiments.telling import EXPERIMENTS, conclude

ALL = Size()
WITHIN, ORDERED = "predicted within 10 %", "predicted in the right order"


def _outcome(case, *pairs, recorded=10.0):
    alternatives = [
        {"remedy": f"remedy {number}", "mark": "modelled", "predicted_seconds": one, "measured_seconds": other}
        for number, (one, other) in enumerate(pairs)
    ]
    return {"case": case, "recorded_seconds": recorded, "resimulation_error": 0.01, "alternatives": alternatives}


def _told(*pairs, **changed):
    """Return by their texts what is claimed where every run has these alternatives."""
    claims = conclude("what-if", lambda case: _outcome(case, *pairs, **changed), ALL).claims
    return {text: claim for claim in claims for text in (WITHIN, ORDERED) if claim.text.startswith(text)}


@pytest.fixture(autouse=True)
def _with_links(monkeypatch):
    monkeypatch.setattr(what_if, "why_not", lambda: None)


def test_predictions_that_are_near_and_in_order_are_good():
    claims = _told((8.0, 8.5), (6.0, 6.2), (12.0, 11.5))
    assert [claim.holds for claim in claims.values()] == [True, True]
    assert f"{3 * len(CASES)} alternatives" in claims[WITHIN].text
    assert f"{6 * len(CASES)} pairs" in claims[ORDERED].text


def test_a_prediction_that_is_off_is_reported():
    claims = _told((8.0, 9.0), (6.0, 6.2), (12.0, 11.5))
    assert (claims[WITHIN].holds, claims[ORDERED].holds) == (False, True)


def test_predictions_in_the_wrong_order_are_reported():
    claims = _told((8.7, 8.0), (7.5, 8.9))
    assert claims[ORDERED].holds is False


def test_pairs_that_take_about_as_long_have_no_order():
    claims = _told((10.5, 9.95), (9.5, 10.05))
    assert "of 0 pairs" in claims[ORDERED].text
    assert (claims[WITHIN].holds, claims[ORDERED].holds) == (True, False)


@pytest.mark.parametrize("pair", [(None, 8.0), (8.0, None)])
def test_a_figure_that_is_missing_is_neither_near_nor_in_order(pair):
    assert [claim.holds for claim in _told(pair, recorded=None).values()] == [False, False]


def test_runs_over_links_are_left_out_where_there_can_be_none(monkeypatch):
    monkeypatch.setattr(what_if, "why_not", lambda: "it needs root")
    findings = conclude("what-if", lambda case: _outcome(case, (8.0, 8.0)), ALL)
    assert [run["case"] for run in findings.numbers["runs"]] == [case.name for case in CASES if not case.rate]
    assert findings.remarks == ["Runs over shaped links were left out: it needs root."]
    only = str(next(number for number, case in enumerate(CASES) if case.rate))
    skipped = EXPERIMENTS["what-if"].tell(ALL, lambda jobs: pytest.fail("nothing can be run"), only=(only,))
    assert (skipped.skipped, skipped.claims) == ("it needs root", [])


def test_runs_are_chosen_by_their_numbers():
    jobs = EXPERIMENTS["what-if"].jobs(ALL, only=("1", "3"))
    assert list(jobs) == [CASES[1].name, CASES[3].name]
    assert [job.of(200)["seed"] for job in jobs.values()] == [1, 3]
    assert [job.of(202)["seed"] for job in jobs.values()] == [201, 203]
    with pytest.raises(ValueError, match="unknown run '10'"):
        EXPERIMENTS["what-if"].jobs(ALL, only=("10",))


def test_recorded_runs_have_names_and_seeds_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.recipe(3).delay.inject
        assert len(case.asked) == 3


def test_of_a_run_that_others_disturb_the_less_disturbed_try_counts(monkeypatch, tmp_path):
    """The first try takes 9 s with half of the cores gone, the second 7 s; its record is the one that is kept."""
    shares, seconds = iter([0.5, 0.3]), {}

    def train(recipe, out):
        out.mkdir(parents=True)
        (out / "try").write_text(str(len(seconds)), encoding="utf-8")
        seconds[str(len(seconds))] = (9.0, 7.0)[len(seconds)]
        return SimpleNamespace(outcome=SimpleNamespace(finished=True))

    monkeypatch.setattr(what_if, "train_recipe", train)
    monkeypatch.setattr(what_if.Others, "share", lambda self: next(shares))
    monkeypatch.setattr(what_if, "read_run", lambda folder: (folder / "try").read_text(encoding="utf-8"))
    monkeypatch.setattr(what_if, "measured_run", lambda number: SimpleNamespace(seconds=seconds[number]))
    case = CASES[0]
    assert what_if.real(case, case.recipe(0), tmp_path / "recorded", 0) == 7.0
    assert (tmp_path / "recorded" / "try").read_text(encoding="utf-8") == "1"


def test_what_diagnose_said_is_counted_over_all_jobs():
    said = {kind: {"nobody": 3, "slow": 1, "harmless": 1} for kind in KINDS}
    heard = {"rank and phase": 2, "another": 1}
    findings = EXPERIMENTS["false-alarms"].tell(
        ALL, lambda jobs: Runs({key: [said if key[0] == "balanced" else heard] for key in jobs})
    )
    jobs = EXPERIMENTS["false-alarms"].jobs(ALL)
    balanced, delayed = ([key for key in jobs if key[0] == name] for name in ("balanced", "delayed"))
    assert (len(balanced), len(delayed)) == (20, 5)
    assert [row[:3] for row in findings.tables[0].rows] == [(kind, "100", "60") for kind in KINDS]
    assert findings.remarks == [
        "A rank was named in 120 of 300 balanced runs.",
        "Of 15 runs with one delay, named: rank and phase 10, rank alone 0, cannot tell 0, another 5.",
    ]


def test_every_run_is_diagnosed_once():
    for key, count in (("balanced", 1000), ("delayed", 250)):
        jobs = [job.of(200) for name, job in EXPERIMENTS["false-alarms"].jobs(ALL).items() if name[0] == key]
        seeds = [job["first"] + place for job in jobs for place in range(job["runs"])]
        assert seeds == list(range(7_000_000, 7_000_000 + count))
