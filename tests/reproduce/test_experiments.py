"""Laws of every experiment that `paceline reproduce` lists. Toy sizes: figures mean nothing, but all of it runs."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import unescape
from typing import Any

import pytest
from rich.console import Console

from paceline.data import DATASETS
from paceline.reproduce import EXPERIMENTS, experiment_named
from paceline.reproduce.documents import Reproduction, claim_lines, document, page
from paceline.reproduce.experiment import Claim, ExperimentPlan, Outcome
from paceline.reproduce.hpsgd.lanes import LANES, PAPER, REBASED, TARGETS, Case
from paceline.reproduce.hpsgd.scaling import jobs_of_figure_5a
from paceline.reproduce.hpsgd.seconds import cases_of_figure_5b, cases_of_figure_6a, cases_of_figure_6b
from paceline.reproduce.lgc.setting import LANES as LGC_LANES
from paceline.reproduce.lgc.skew import figure_3_job, persistences, skews
from paceline.reproduce.running import check_names, run_experiment
from paceline.terminal import WIDTH
from tests.reproduce.in_process import compute_here

TOY = ExperimentPlan(size="toy")
CORES, MOST_MINUTES = 2, 10


@pytest.fixture(scope="module", params=EXPERIMENTS)
def ran(request, tmp_path_factory):
    """An experiment that was run at toy size, the folder with its outcomes, and the names of its jobs."""
    experiment, folder = experiment_named(request.param), tmp_path_factory.mktemp("reproduce")
    with pytest.MonkeyPatch.context() as patched:
        computed = compute_here(patched)
        findings = run_experiment(experiment, TOY, folder)
    return Reproduction(experiment=experiment, plan=TOY, findings=findings), folder, computed


def test_ours_stands_beside_the_paper_s(ran):
    reproduction, _, _ = ran
    headings = [heading.lower() for table in reproduction.findings.tables for heading in table.headings]
    assert any("paper" in heading for heading in headings)
    assert any("ours" in heading for heading in headings)
    assert reproduction.findings.charts
    assert reproduction.findings.remarks


def test_something_is_claimed_and_says_by_which_figures(ran):
    reproduction, _, _ = ran
    claims = reproduction.findings.claims
    assert claims
    assert all(claim.text and claim.because for claim in claims)
    assert len({claim.text for claim in claims}) == len(claims)
    assert len(claim_lines(reproduction)) == len(claims) + 1


def test_tables_are_of_text_and_fit_a_terminal(ran):
    reproduction, _, _ = ran
    for table in reproduction.findings.tables:
        assert all(len(row) == len(table.headings) for row in table.rows)
        assert all(isinstance(cell, str) for row in table.rows for cell in row)
        shown = io.StringIO()
        Console(file=shown, width=WIDTH).print(table.rich())
        assert "…" not in shown.getvalue(), shown.getvalue()
        assert max(map(len, shown.getvalue().splitlines())) <= WIDTH


def test_results_are_plain_json(ran):
    reproduction, _, _ = ran
    text = json.dumps(document(reproduction), allow_nan=False)
    assert json.loads(text)["experiment"] == reproduction.experiment.name


def test_the_page_shows_every_claim_and_names_each_chart_once(ran):
    reproduction, _, _ = ran
    names = [chart.name for chart in reproduction.findings.charts]
    assert len(set(names)) == len(names)
    html = unescape(page([reproduction])).replace("\N{NO-BREAK SPACE}", " ")
    assert reproduction.experiment.name in html
    for claim in reproduction.findings.claims:
        assert claim.text in html
    series = {f"s{index}" for index in range(len(reproduction.findings.series))}
    for chart in reproduction.findings.charts:
        json.dumps([chart.data, chart.layout], allow_nan=False)
        assert {key.series for key in chart.keys} <= series  # else the page had no colour for it


def test_a_second_run_computes_nothing(ran, monkeypatch):
    reproduction, folder, computed = ran
    assert len(set(computed)) == len(computed)
    again = compute_here(monkeypatch)
    findings = run_experiment(reproduction.experiment, TOY, folder)
    assert again == []
    assert findings.claims == reproduction.findings.claims
    assert findings.numbers == reproduction.findings.numbers


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_described_in_a_line_and_its_jobs_can_be_sent_to_a_process(name):
    experiment = experiment_named(name)
    assert experiment.name == name
    assert len(experiment.question) < WIDTH
    assert experiment.source
    assert set(experiment.data) <= set(DATASETS)
    for size in ("toy", "laboratory", "full"):
        plan = ExperimentPlan(size=size, seeds=tuple(range(200, 200 + experiment.seeds)))
        jobs = experiment.jobs(plan)
        check_names(jobs)
        for job in jobs:
            assert json.loads(json.dumps(dict(job.settings), allow_nan=False)) == dict(job.settings)
            assert getattr(importlib.import_module(job.run.__module__), job.run.__qualname__) is job.run
            assert job.seconds > 0
        if size == "laboratory":
            estimate = sum(job.seconds for job in jobs) / 60 / (1 if experiment.timed else CORES)
            assert estimate <= MOST_MINUTES
            assert experiment.minutes <= MOST_MINUTES


# -- a winner that loses is reported ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Swap:
    """Outcomes made by hand in which the source's winner wins, two lanes to exchange, and what is then wrong.

    Lanes are parts of the names of jobs, or whole names. Every claim whose text contains `wrong` must hold before and
    not after.
    """

    outcomes: Callable[[], dict[str, Outcome]]
    lanes: tuple[str, str]
    wrong: str


def _figure_1_of_lgc() -> dict[str, Outcome]:
    return {"full, complete": {"seconds": 6.5}, "lgc, complete": {"seconds": 4.0}, "lgc, partial": {"seconds": 4.2}}


def _figure_3_of_lgc() -> dict[str, Outcome]:
    accuracies = {"full": 0.50, "lgc": 0.495, "fastest-k": 0.10}
    return {
        figure_3_job(c, h, lane, 200): {"accuracy": accuracies[lane]}
        for c in skews(TOY)
        for h in persistences(TOY)
        for lane in LGC_LANES
    }


def _figure_2_of_pruning() -> dict[str, Outcome]:
    """Two trainings that have nothing to do with each other, and one, not asked for, that is the first once more."""
    rises, falls = [1.0, 2.0], [2.0, 1.0]
    first, second = {"losses": [rises, rises, falls, falls]}, {"losses": [rises, falls, rises, falls]}
    return {"seed 200": first, "seed 201": second, "the first once more": first}


SECONDS = {"ssgd": 36.0, "local-sgd": 15.0, PAPER: 12.0, REBASED: 12.0, "psgd": 11.9}
COMPUTING = {"ssgd": 11.7, "local-sgd": 14.0, PAPER: 11.8, REBASED: 11.8, "psgd": 11.8}


def _lane_of_hpsgd(lane: str, *, seconds: float | None = None, apart: tuple[float, float] = (0.1, 0.1)) -> Outcome:
    """Return a lane's outcome; it was measured so many seconds before and after it reached its targets."""
    total = SECONDS[lane] if seconds is None else seconds
    computing = min(total, COMPUTING[lane])
    split = {"computing": computing, "waiting": 0.0, "network": total - computing}
    after, by = ({"seconds": total + off, **split, "computing": computing + off} for off in (-apart[0], apart[1]))
    reached = {f"{target:g}": {"seconds": total, **split, "after": after, "by": by} for target in TARGETS}
    return {"seconds": total, "rounds": 20, "split": split, "reached": reached, "accuracy": 0.9}


def _lanes_of_hpsgd(cases: list[Case]) -> dict[str, Outcome]:
    return {case.job_name(lane, 200): _lane_of_hpsgd(lane) for case in cases for lane in LANES}


def _figure_5a_of_hpsgd() -> dict[str, Outcome]:
    share = {"ssgd": 0.3, "local-sgd": 0.7, "hpsgd": 0.95, "psgd": 1.0}
    return {
        job.name: {"batches_per_second": share[job.settings["member"]] * job.settings["workers"]}
        for job in jobs_of_figure_5a(TOY)
    }


def _levels_of_the_lecture() -> dict[str, Outcome]:
    figures = {1: (80.0, 1100.0), 16: (5.0, 11_000.0), 162: (1.1, 51_000.0)}
    return {
        f"s = {levels}": {
            "elements": 26_122, "distance": 1.0, "moment": [moment, 0.1], "nonzero": [80.0, 0.1], "bits": [bits, 1.0]
        }
        for levels, (moment, bits) in figures.items()
    }  # fmt: skip


def _tradeoff_of_the_lecture() -> dict[str, Outcome]:
    figures = {1: (900, 1100.0), 0: (40, 836_000.0)}
    return {
        f"s = {levels}, rate {rate}, seed 200": {"rounds": rounds if rate == "0.1" else None, "bits": bits, "seen": 900}
        for levels, (rounds, bits) in figures.items()
        for rate in ("0.1", "0.5")
    }


def _theorem_of_the_lecture() -> dict[str, Outcome]:
    """Return outcomes with the gap at t = 30 in proportion to sigma, and falling by a little more than sqrt(3)."""
    constants = {"beta": 16.0, "radius": 5.0, "least": 0.1, "start": 2.0}
    return {
        f"s = {levels}, seed 200": {
            **constants, "sigma": sigma, "sigma_visited": sigma, "gaps": {"10": gap, "30": gap / 2}
        }
        for levels, sigma, gap in ((0, 8.0, 0.5), (1, 24.0, 1.5))
    }  # fmt: skip


def _placement_of_the_lecture() -> dict[str, Outcome]:
    cuts = {"equal counts": 0.8, "torchgpipe": 0.7, "ours": 0.6}
    found = {method: {"at": [9], "predicted": seconds, "measured": seconds} for method, seconds in cuts.items()}
    return {"lenet, 2 stages": {"layers": 12, "cuts": found}}


SWAPS: dict[str, list[Swap]] = {
    "lgc-1": [Swap(outcomes=_figure_1_of_lgc, lanes=("full, complete", "lgc, complete"), wrong="lgc before full")],
    "lgc-3": [
        Swap(outcomes=_figure_3_of_lgc, lanes=("lgc", "fastest-k"), wrong=wrong)
        for wrong in ("LGC above K-SGD", "LGC at most a point behind Full")
    ],
    "pruning-2": [
        Swap(
            outcomes=_figure_2_of_pruning,
            lanes=("seed 201", "the first once more"),
            wrong="rise in one training and fall in the other",
        )
    ],
    "hpsgd-5a": [
        Swap(outcomes=_figure_5a_of_hpsgd, lanes=(", hpsgd,", ", local-sgd,"), wrong="HPSGD / Local SGD"),
        Swap(outcomes=_figure_5a_of_hpsgd, lanes=(", local-sgd,", ", ssgd,"), wrong="Local SGD / SSGD"),
    ],
    "hpsgd-5b": [
        Swap(
            outcomes=lambda: _lanes_of_hpsgd(cases_of_figure_5b(TOY)),
            lanes=(PAPER, other),
            wrong="an epoch of HPSGD is shorter",
        )
        for other in ("local-sgd", "ssgd")
    ],
    "hpsgd-6a": [
        Swap(
            outcomes=lambda: _lanes_of_hpsgd(cases_of_figure_6a(TOY)),
            lanes=lanes,
            wrong=wrong,
        )
        for lanes, wrong in (
            (("local-sgd", "ssgd"), "Local SGD before SSGD"),
            (("local-sgd", "ssgd"), "Local SGD computes longer than SSGD"),
            ((PAPER, "local-sgd"), "HPSGD before Local SGD"),
            ((PAPER, "ssgd"), "HPSGD before Local SGD"),
            ((PAPER, "ssgd"), "HPSGD before SSGD"),
        )
    ],
    "hpsgd-6b": [
        Swap(
            outcomes=lambda: _lanes_of_hpsgd(cases_of_figure_6b(TOY)),
            lanes=(PAPER, other),
            wrong=f"HPSGD before {other}",
        )
        for other in ("local-sgd", "ssgd")
    ],
    "lecture-qsgd": [
        Swap(outcomes=_levels_of_the_lecture, lanes=("s = 1", "s = 162"), wrong=wrong)
        for wrong in ("the larger s, the smaller the second moment", "the larger s, the more bits")
    ],
    "lecture-tradeoff": [
        Swap(outcomes=_tradeoff_of_the_lecture, lanes=("s = 1,", "s = 0,"), wrong=wrong)
        for wrong in ("no free lunch", "fewer bits, more iterations")
    ],
    "lecture-theorem": [
        Swap(outcomes=_theorem_of_the_lecture, lanes=("s = 1,", "s = 0,"), wrong="the larger the variance, the slower")
    ],
}
"""Experiments whose source names a winner. A new one is a line here."""


def exchanged(outcomes: Mapping[str, Outcome], lanes: tuple[str, str]) -> dict[str, Outcome]:
    """Return outcomes in which each of two lanes has the figures of the other."""
    first, second = lanes
    if first in outcomes:
        return {**outcomes, first: outcomes[second], second: outcomes[first]}
    names = {
        name: name.replace(first, "\0").replace(second, first).replace("\0", second)
        if (first in name) != (second in name)
        else name
        for name in outcomes
    }
    return {name: outcomes[names[name] if names[name] in outcomes else name] for name in outcomes}


def _judged(name: str, outcomes: Mapping[str, Outcome], text: str) -> list[bool]:
    findings = experiment_named(name).conclude(TOY, outcomes)
    return [claim.holds for claim in findings.claims if text in claim.text and claim.judged]


@pytest.mark.parametrize(
    ("name", "swap"),
    [(name, swap) for name, swaps in SWAPS.items() for swap in swaps],
    ids=lambda value: str(value)[:20],
)
def test_a_winner_whose_figures_are_the_loser_s_is_reported_as_wrong(name, swap):
    outcomes = swap.outcomes()
    before, after = (_judged(name, found, swap.wrong) for found in (outcomes, exchanged(outcomes, swap.lanes)))
    assert before, f"no claim of {name} has the words {swap.wrong!r}"
    assert all(before)
    assert not any(after)


def test_an_exact_cut_that_is_slower_is_reported():
    outcomes = _placement_of_the_lecture()
    cuts = outcomes["lenet, 2 stages"]["cuts"]
    worse = {
        "lenet, 2 stages": {"layers": 12, "cuts": {**cuts, "ours": cuts["equal counts"], "equal counts": cuts["ours"]}}
    }
    assert all(_judged("lecture-placement", outcomes, "the exact cut"))
    assert not any(_judged("lecture-placement", worse, "the exact cut"))


def _theorem_claims(**changed: Mapping[str, float]) -> dict[str, Claim]:
    """Return the claims of the theorem by their text, with some gaps of plain gradients or of one level changed."""
    lanes = {"plain": "s = 0, seed 200", "coarse": "s = 1, seed 200"}
    outcomes = _theorem_of_the_lecture()
    for lane, gaps in changed.items():
        found = outcomes[lanes[lane]]
        outcomes[lanes[lane]] = {**found, "gaps": {**found["gaps"], **gaps}}
    return {claim.text: claim for claim in experiment_named("lecture-theorem").conclude(TOY, outcomes).claims}


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"plain": {"10": 0.3}}, "falls as 1/sqrt(t) or faster, to a tenth: plain"),
        ({"coarse": {"10": 0.8}}, "falls as 1/sqrt(t) or faster, to a tenth: s = 1"),
        ({"coarse": {"10": 0.5, "30": 0.3}}, "in proportion to sigma"),
        ({"coarse": {"30": 1.6}}, "in proportion to sigma"),
    ],
)
def test_a_gap_that_does_not_behave_as_the_theorem_s_bound_is_reported(changed, wrong):
    before, after = (
        [claim for text, claim in claims.items() if wrong in text]
        for claims in (_theorem_claims(), _theorem_claims(**changed))
    )
    assert [(claim.judged, claim.holds) for claim in before] == [(True, True)]
    assert [(claim.judged, claim.holds) for claim in after] == [(True, False)]


def test_a_bound_that_not_moving_meets_is_no_merit_but_can_be_missed():
    """All bounds are above f(w0) - f* here: 2 against 23 and more."""
    text = "below the bound where not moving is below it too, 4 of 4 rows"
    met, missed = (
        next(claim for each, claim in claims.items() if each.startswith(text))
        for claims in (_theorem_claims(), _theorem_claims(plain={"10": 100.0}))
    )
    assert (met.judged, met.holds) == (False, True)
    assert (missed.judged, missed.holds) == (True, False)


def test_a_bound_that_not_moving_exceeds_is_judged():
    outcomes = {
        job: {**found, "start": 60.0 if "s = 0" in job else 2.0} for job, found in _theorem_of_the_lecture().items()
    }
    assert _judged("lecture-theorem", outcomes, "below the bound, plain") == [True, True]
    outcomes["s = 0, seed 200"] = {**outcomes["s = 0, seed 200"], "gaps": {"10": 60.0, "30": 0.25}}
    assert _judged("lecture-theorem", outcomes, "below the bound, plain") == [False, True]


FIGURES_6: Any = {"hpsgd-6a": cases_of_figure_6a, "hpsgd-6b": cases_of_figure_6b}
BEFORE_LOCAL_SGD = {"hpsgd-6a": "HPSGD before Local SGD", "hpsgd-6b": "HPSGD before local-sgd"}


@pytest.mark.parametrize("name", FIGURES_6)
def test_nobody_wins_by_never_reaching_the_target(name):
    never = {
        job: {**found, "reached": dict.fromkeys(found["reached"])} if PAPER in job else found
        for job, found in _lanes_of_hpsgd(FIGURES_6[name](TOY)).items()
    }
    judged = _judged(name, never, "HPSGD before")
    assert judged
    assert not any(judged)


def _measured_apart(name: str, hpsgd: Outcome, local_sgd: Outcome) -> list[Claim]:
    """Return the claims that HPSGD is before Local SGD, with these outcomes of the two."""
    outcomes = {
        job: hpsgd if PAPER in job else local_sgd if "local-sgd" in job else found
        for job, found in _lanes_of_hpsgd(FIGURES_6[name](TOY)).items()
    }
    claims = experiment_named(name).conclude(TOY, outcomes).claims
    return [claim for claim in claims if claim.text.startswith(BEFORE_LOCAL_SGD[name])]


@pytest.mark.parametrize("name", FIGURES_6)
@pytest.mark.parametrize("seconds", [5.0, 15.0], ids=["behind", "ahead"])
def test_lanes_that_the_measurements_cannot_tell_apart_are_reported_with_the_reason(name, seconds):
    """Local SGD was first measured after HPSGD was at the target, so either may have been the first."""
    local_sgd = _lane_of_hpsgd("local-sgd", seconds=seconds, apart=(seconds, 20.0 - seconds))
    claims = _measured_apart(name, _lane_of_hpsgd(PAPER), local_sgd)
    assert claims
    for claim in claims:
        assert not claim.judged
        assert "too few measurements to tell" in claim.because
        assert "local-sgd 0.0-20.0" in claim.because


@pytest.mark.parametrize("name", FIGURES_6)
def test_a_remark_counts_the_claims_that_the_measurements_leave_open(name):
    """Local SGD is measured at 0 and 20 s alone, so only SSGD, at 36 s, is told apart from it and from HPSGD."""
    local_sgd = _lane_of_hpsgd("local-sgd", seconds=15.0, apart=(15.0, 5.0))
    told = _lanes_of_hpsgd(FIGURES_6[name](TOY))
    outcomes = {job: local_sgd if "local-sgd" in job else found for job, found in told.items()}
    for given in (told, outcomes):
        findings = experiment_named(name).conclude(TOY, given)
        left_open = [claim for claim in findings.claims if "too few measurements" in claim.because]
        to_judge = sum(claim.judged for claim in findings.claims) + len(left_open)
        assert bool(left_open) == (given is outcomes)
        assert f"Of {to_judge} claims to judge, {len(left_open)} " in findings.remarks[-1]
        beside_ssgd = [claim for claim in findings.claims if "hpsgd before ssgd" in claim.text.lower()]
        assert [(claim.judged, claim.holds) for claim in beside_ssgd] == [
            (True, True) for _ in FIGURES_6[name](TOY) for _ in TARGETS
        ]


@pytest.mark.parametrize(("name", "cases"), [("hpsgd-5b", cases_of_figure_5b), *FIGURES_6.items()])
def test_small_networks_are_remarked_on_where_they_are_trained(name, cases):
    for size in ("laboratory", "full"):
        plan = ExperimentPlan(size=size)
        remarks = " ".join(experiment_named(name).conclude(plan, _lanes_of_hpsgd(cases(plan))).remarks)
        assert ("in place of CIFAR-10" in remarks) == (size == "laboratory")
        assert "Seconds are virtual" in remarks


@pytest.mark.parametrize("name", FIGURES_6)
def test_lanes_that_the_measurements_tell_apart_are_judged_however_few_there_are(name):
    """Local SGD was at the target with its first average, and HPSGD was measured below it at that time."""
    local_sgd = _lane_of_hpsgd("local-sgd", seconds=6.0, apart=(6.0, 4.0))
    late, early = (_lane_of_hpsgd(PAPER, seconds=seconds, apart=(0.5, 3.0)) for seconds in (10.5, 6.9))
    assert [(claim.judged, claim.holds) for claim in _measured_apart(name, late, local_sgd)] == [
        (True, False) for _ in FIGURES_6[name](TOY) for _ in TARGETS
    ]
    assert not any(claim.judged for claim in _measured_apart(name, early, local_sgd))


@pytest.mark.parametrize(("after", "by", "judged"), [(11.0, 12.5, True), (8.0, 12.5, False), (20.0, 21.0, True)])
def test_a_ratio_is_judged_where_the_measurements_leave_no_doubt(after, by, judged):
    """SSGD computed for 11.6 to 11.8 seconds, and the limits of the ratio are 0.9 and 1.1."""
    at = (after + by) / 2
    outcomes = _lanes_of_hpsgd(cases_of_figure_6a(TOY))
    split = {"waiting": 0.0, "network": 0.0}
    around = {"after": {"seconds": after, "computing": after, **split}, "by": {"seconds": by, "computing": by, **split}}
    reached = {f"{target:g}": {"seconds": at, "computing": at, **split, **around} for target in TARGETS}
    changed = {job: {**found, "reached": reached} if PAPER in job else found for job, found in outcomes.items()}
    found = _judged("hpsgd-6a", changed, "HPSGD computes as long as SSGD")
    assert bool(found) == judged
    assert all(holds == (at < 13) for holds in found)


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("size", ["laboratory", "full"])
def test_the_data_that_jobs_train_on_are_declared(name, size):
    """Else they are neither checked before a run nor part of what an outcome is known by."""
    experiment = experiment_named(name)
    text = json.dumps([dict(job.settings) for job in experiment.jobs(ExperimentPlan(size=size))])
    used = {data for data in ("cifar10", "cifar100", "fashion-mnist") if f'"{data}"' in text}
    assert used <= set(experiment.data_for(size))
