"""The experiments of data fine-pruning: each runs at toy size, and its claims turn where its outcomes are turned."""

from __future__ import annotations

import copy
import functools
import json

import pytest

from paceline.data.pruning.fine_pruning import FineSchedule
from paceline.data.pruning.plan import plan_fine
from paceline.reproduce import EXPERIMENTS as NAMES
from paceline.reproduce.documents import Reproduction, document, page
from paceline.reproduce.experiment import ExperimentPlan
from paceline.reproduce.pruning import EXPERIMENTS
from paceline.reproduce.pruning.plateaus import stretches_of
from paceline.reproduce.pruning.setting import size_of
from paceline.reproduce.pruning.tables import NAMES as MODELS_OF
from paceline.reproduce.pruning.tables import jobs_of_tables, table_job
from paceline.reproduce.published import PRUNING_NETWORKS, PRUNING_TABLE_1, PRUNING_TABLE_2

names = pytest.mark.parametrize("name", EXPERIMENTS)


def plan_of(name):
    return ExperimentPlan(size="toy", seeds=(200, 201)[: EXPERIMENTS[name].seeds])


@functools.cache
def computed(name):
    """What the jobs of an experiment come to at toy size; as JSON, as they are kept."""
    outcomes = {job.name: job.run(dict(job.settings)) for job in EXPERIMENTS[name].jobs(plan_of(name))}
    return json.dumps(outcomes, allow_nan=False)


def outcomes_of(name):
    shared = {"pruning-table-2": "pruning-table-1"}.get(name, name)
    return json.loads(computed(shared))


def findings(name, outcomes):
    return EXPERIMENTS[name].conclude(plan_of(name), outcomes)


def claim(found, part):
    return next(each for each in found.claims if part in each.text)


def test_every_experiment_is_listed():
    assert [name for name, module in NAMES.items() if module == "pruning"] == list(EXPERIMENTS)


@names
def test_an_experiment_runs_and_has_the_paper_beside_ours(name):
    found = findings(name, outcomes_of(name))
    headings = " ".join(heading for table in found.tables for heading in table.headings)
    assert "paper" in headings
    assert "ours" in headings
    assert found.claims
    assert found.charts
    done = Reproduction(experiment=EXPERIMENTS[name], plan=plan_of(name), findings=found)
    json.dumps(document(done), allow_nan=False)
    assert EXPERIMENTS[name].question in page([done])


@names
def test_all_sizes_have_jobs_of_plain_settings_within_the_minutes(name):
    experiment = EXPERIMENTS[name]
    for size in ("toy", "laboratory", "full"):
        jobs = experiment.jobs(ExperimentPlan(size=size, seeds=(200, 201)[: experiment.seeds]))
        assert len({job.name for job in jobs}) == len(jobs)
        for job in jobs:
            json.dumps(dict(job.settings), allow_nan=False)
    jobs = experiment.jobs(ExperimentPlan(seeds=(200, 201)[: experiment.seeds]))
    seconds = sum(job.seconds for job in jobs)
    cores = 1 if experiment.timed else min(2, len(jobs))
    assert seconds / cores <= 60 * experiment.minutes <= 600


# -- the figures ----------------------------------------------------------------------------------------------------


def test_a_curve_with_plateaus_holds_and_one_without_does_not():
    plan = plan_of("pruning-1")
    losses = [2.3, 1.6, 1.3, 1.2, 1.19, 1.18, 1.18, 0.9, 0.8, 0.79, 0.79, 0.79, 0.79]
    accuracies = [100 - 30 * loss for loss in losses]
    good = {f"seed {plan.seeds[0]}": {"losses": losses, "accuracies": accuracies, "changes": [6]}}
    assert not findings("pruning-1", good).missed
    turned = copy.deepcopy(good)
    turned[f"seed {plan.seeds[0]}"]["losses"] = losses[::-1]
    assert len(findings("pruning-1", turned).missed) >= 3
    late = copy.deepcopy(good)
    late[f"seed {plan.seeds[0]}"]["losses"] = [2.3, 2.29, 2.28, 2.27, 2.0, 1.3, 0.9, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]
    missed = findings("pruning-1", late).missed
    assert [each.text for each in missed] == ["a plateau in epochs 1 to 6: the second half moves less than the first"]


def test_stretches_are_cut_where_the_rate_changes():
    found = stretches_of(list(range(41)), [12, 24, 32])
    assert [(each.first, each.last) for each in found] == [(1, 12), (13, 24), (25, 32), (33, 40)]
    assert found[1].before == 11
    assert found[-1].end == 39


DIFFERING = "rise in one training and fall in the other"


def test_samples_that_do_the_same_in_both_trainings_are_no_second_figure():
    outcomes = outcomes_of("pruning-2")
    first, second = outcomes
    same = {first: outcomes[first], second: outcomes[first]}
    found = findings("pruning-2", same)
    assert [each.text for each in found.missed] == [claim(found, DIFFERING).text]
    assert found.numbers["shares"]["rises in one, falls in the other"] == pytest.approx(0.0)
    rising = {name: {"losses": [sorted(each) for each in run["losses"]]} for name, run in outcomes.items()}
    found = findings("pruning-2", rising)
    assert not claim(found, DIFFERING).holds  # chance has none that differ either
    assert not claim(found, "fall in both").holds


def losses_of(rising):
    """The losses of as many samples, which rise or fall."""
    return {"losses": [[1.0, 2.0] if rises else [2.0, 1.0] for rises in rising]}


@pytest.mark.parametrize(("shared", "holds"), [(0, True), (4, True), (11, True), (13, False), (20, False)])
def test_how_many_samples_differ_is_held_against_chance(shared, holds):
    """Of 100 samples 20 rise in each training, `shared` in both: by chance 4 would, and 32 differ."""
    first = [sample < 20 for sample in range(100)]
    second = [20 - shared <= sample < 40 - shared for sample in range(100)]
    found = findings("pruning-2", {"seed 200": losses_of(first), "seed 201": losses_of(second)})
    assert found.numbers["shares"]["rises in both"] == pytest.approx(shared / 100)
    assert found.numbers["chance"]["rises in one, falls in the other"] == pytest.approx(0.32)
    assert claim(found, DIFFERING).holds == holds
    assert [each.text for each in found.claims if each.judged] == [claim(found, DIFFERING).text]


@pytest.mark.parametrize(
    ("first", "second", "shown", "caption"),
    [
        ([False, True], [False, False], {0, 1}, "Sample 0 is the clearest whose loss falls in both. Sample 1 is"),
        ([False, True], [False, True], {0}, "falls in both. No loss rises in one, falls in the other."),
        ([True, True], [False, True], {0}, "falls in the other. No loss falls in both."),
        ([True, True], [True, True], set(), None),
    ],
    ids=["both", "none differs", "none falls", "neither"],
)
def test_the_chart_of_samples_says_what_it_shows_and_what_there_is_none_of(first, second, shown, caption):
    found = findings("pruning-2", {"seed 200": losses_of(first), "seed 201": losses_of(second)})
    assert set(found.series) == {f"sample {sample}, training {number}" for sample in shown for number in (1, 2)}
    assert [caption in chart.caption for chart in found.charts] == ([] if caption is None else [True])
    assert page([Reproduction(experiment=EXPERIMENTS["pruning-2"], plan=plan_of("pruning-2"), findings=found)])


def test_every_pair_of_more_trainings_counts():
    trainings = [[True, False, False], [True, False, False], [False, True, False]]
    outcomes = {f"seed {200 + place}": losses_of(each) for place, each in enumerate(trainings)}
    plan = ExperimentPlan(size="toy", seeds=(200, 201, 202))
    found = EXPERIMENTS["pruning-2"].conclude(plan, outcomes)
    assert found.numbers["shares"]["rises in one, falls in the other"] == pytest.approx((0 + 2 / 3 + 2 / 3) / 3)


def test_a_schedule_that_prunes_early_or_ever_later_is_not_the_third_figure():
    outcomes = outcomes_of("pruning-3")
    assert not findings("pruning-3", outcomes).missed
    early = copy.deepcopy(outcomes)
    early["schedule"]["pruned"].append(5)
    assert len(findings("pruning-3", early).missed) == 1
    later = copy.deepcopy(outcomes)
    for window, start in zip(later["schedule"]["windows"], (3, 7, 15, 30), strict=True):
        window["start"] = start
    assert any("earlier" in each.text for each in findings("pruning-3", later).missed)


def test_the_formulas_are_held_against_the_schedule_itself():
    found = findings("pruning-formulas", outcomes_of("pruning-formulas"))
    assert found.numbers["the defaults of paceline"] == {"formula": 48, "exact": 71}
    assert [each.text for each in found.missed] == [
        "the formula counts the pruned epochs: attenuation 2, as the text wants it"
    ]
    needed = found.numbers["prune needed"]
    for saved, share in needed.items():
        plan = plan_fine(FineSchedule(prune=share), 1_000_000, epochs=200, batch_size=128)
        assert plan.share_saved == pytest.approx(float(saved), abs=1e-5)


# -- the tables -----------------------------------------------------------------------------------------------------


def table_outcomes(**changes):
    """Outcomes of LeNet with the seconds and accuracies that are given, way by way."""
    usual = {
        "regular": {"cpu_seconds": 100.0, "samples": 1000, "sampling_seconds": 0.1, "best_three": 70.0},
        "pruned": {"cpu_seconds": 85.5, "samples": 850, "sampling_seconds": 0.5, "best_three": 69.8},
        "fewer epochs": {"cpu_seconds": 85.0, "samples": 850, "sampling_seconds": 0.1, "best_three": 69.0},
    }
    for way, values in changes.items():
        usual[way.replace("_", " ")] |= values
    return {
        table_job("LeNet", way, 200): values | {"last_three": values["best_three"]} for way, values in usual.items()
    }


def test_table_1_holds_and_is_missed_where_the_runs_are_swapped():
    assert not findings("pruning-table-1", table_outcomes()).missed
    swapped = table_outcomes(regular={"cpu_seconds": 85.5}, pruned={"cpu_seconds": 100.0})
    missed = findings("pruning-table-1", swapped).missed
    assert any(each.kind == "winner" for each in missed)
    slow = table_outcomes(pruned={"sampling_seconds": 2.0})
    assert [each.text for each in findings("pruning-table-1", slow).missed] == [
        "LeNet: the overhead is below 1 % of the time"
    ]


def test_table_2_holds_and_is_missed_where_the_runs_are_swapped():
    assert not findings("pruning-table-2", table_outcomes()).missed
    swapped = table_outcomes(pruned={"best_three": 69.0}, fewer_epochs={"best_three": 69.8})
    assert [each.kind for each in findings("pruning-table-2", swapped).missed] == ["value", "winner"]
    behind = table_outcomes(pruned={"best_three": 69.5})
    assert [each.kind for each in findings("pruning-table-2", behind).missed] == ["value"]


def test_both_tables_are_of_the_same_jobs():
    first, second = (EXPERIMENTS[f"pruning-table-{number}"].jobs(ExperimentPlan()) for number in (1, 2))
    assert [(job.run, job.settings) for job in first] == [(job.run, job.settings) for job in second]


def test_the_full_size_has_the_papers_networks_and_epochs():
    from paceline.models import MODELS

    assert set(MODELS_OF) == set(PRUNING_NETWORKS)
    assert set(MODELS_OF.values()) <= set(MODELS)
    size = size_of(jobs_of_tables(ExperimentPlan(size="full"))[0].settings["size"])
    assert (size.images, size.epochs, size.shrink) == (50_000, 200, 1)
    assert [round(share * size.epochs) for share in size.falls_at] == [60, 120, 160]


def test_the_papers_speed_up_is_what_its_seconds_say():
    for place, network in enumerate(PRUNING_NETWORKS[:7]):  # those of WRN are printed in hours and minutes
        regular, pruned, overhead, printed = (
            PRUNING_TABLE_1[name][place] for name in ("regular", "pruned", "overhead", "speedup")
        )
        assert 100 * (regular - pruned - overhead) / regular == pytest.approx(printed, abs=0.01), network
    behind = [a - b for a, b in zip(PRUNING_TABLE_2["regular"], PRUNING_TABLE_2["pruned"], strict=True)]
    assert (min(behind), max(behind)) == (pytest.approx(0.01), pytest.approx(0.43))


def test_the_overhead_is_held_against_the_papers():
    outcomes = outcomes_of("pruning-overhead")
    outcomes["seed 200"]["seconds"] = 1.0
    assert not findings("pruning-overhead", outcomes).missed
    outcomes["seed 200"]["seconds"] = 4.5
    assert findings("pruning-overhead", outcomes).missed[0].kind == "winner"


def test_trainings_that_prune_different_samples_have_no_common_bad_ones():
    outcomes = outcomes_of("pruning-bad-samples")
    samples = len(next(iter(outcomes.values()))["times_pruned"])
    tenth = samples // 10
    apart = {
        name: {"times_pruned": [5 if place * tenth <= sample < (place + 1) * tenth else 0 for sample in range(samples)]}
        for place, name in enumerate(outcomes)
    }
    assert findings("pruning-bad-samples", apart).missed[0].kind == "winner"
    alike = dict.fromkeys(outcomes, next(iter(apart.values())))
    found = findings("pruning-bad-samples", alike)
    assert not found.missed
    assert found.numbers["another network"] == pytest.approx(1.0)
