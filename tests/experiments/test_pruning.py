"""The experiments of data fine-pruning: their claims turn where their outcomes are turned."""

from __future__ import annotations

import functools
import json

import pytest

from experiments.core.pages import Told, page, series_of
from experiments.core.story import NAN, Runs, Size
from experiments.papers.pruning.plateaus import stretches_of
from experiments.papers.pruning.schedules import run_plan
from experiments.papers.pruning.tables import model_of
from experiments.papers.pruning.training import FINE_PRUNING, POLICIES, PruningSize, mean_of_three
from experiments.papers.published import PRUNING_NETWORKS, PRUNING_TABLE_1, PRUNING_TABLE_2
from paceline import FinePruning
from paceline.data.pruning.fine_pruning import FineSchedule
from paceline.data.pruning.plan import plan_fine
from paceline.models import MODELS
from tests.experiments.telling import EXPERIMENTS, TOY, assert_a_swap_is_reported, conclude

SEEDS = Size("toy", (200, 201, 202))


def claim(found, part):
    return next(each for each in found.claims if part in each.text)


def missed(found):
    return [each.text for each in found.missed]


@functools.cache
def laid_out(name):
    """What the jobs of an experiment that trains nothing come to, as they are kept."""
    return json.dumps({key: run_plan(job.of(200)) for key, job in EXPERIMENTS[name].jobs(TOY).items()})


# -- pruning-1 ---------------------------------------------------------------------------------------------------------

PLATEAUS = [2.3, 1.6, 1.3, 1.2, 1.19, 1.18, 1.18, 0.9, 0.8, 0.79, 0.79, 0.79, 0.79]


def curve(losses):
    accuracies = [None if loss is None else 100 - 30 * loss for loss in losses]
    return {"curve": {"losses": losses, "accuracies": accuracies, "changes": [6]}}


def test_a_curve_with_plateaus_holds_and_one_without_does_not():
    good = curve(PLATEAUS)
    assert not conclude("pruning-1", good).missed
    turned = {"curve": good["curve"] | {"losses": PLATEAUS[::-1]}}
    assert len(conclude("pruning-1", turned).missed) >= 3
    late = [2.3, 2.29, 2.28, 2.27, 2.0, 1.3, 0.9, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]
    found = conclude("pruning-1", {"curve": good["curve"] | {"losses": late}})
    assert missed(found) == ["a plateau in epochs 1 to 6: the second half moves less than the first"]


@pytest.mark.parametrize("known", [0, 1, 7, 10])
def test_a_curve_that_ends_in_a_run_that_diverged_has_no_plateau_after_it(known):
    found = conclude("pruning-1", curve(PLATEAUS[:known] + [None] * (len(PLATEAUS) - known)))
    before = "a plateau in epochs 1 to 6: the second half moves less than the first"
    assert [each.text for each in found.claims if each.holds] == ([before] if known >= 7 else [])
    assert page([Told(experiment=EXPERIMENTS["pruning-1"], size=TOY, findings=found)])


def test_stretches_are_cut_where_the_rate_changes():
    found = stretches_of(list(range(41)), [12, 24, 32])
    assert [(each.first, each.last) for each in found] == [(1, 12), (13, 24), (25, 32), (33, 40)]
    assert found[1].before == 11
    assert found[-1].end == 39


# -- pruning-2 ---------------------------------------------------------------------------------------------------------

DIFFERING = "rise in one training and fall in the other"


def losses_of(rising):
    """The losses of as many samples, which rise or fall."""
    return {"losses": [[1.0, 2.0] if rises else [2.0, 1.0] for rises in rising]}


def two(first, second):
    return {"training": losses_of(first), "another training": losses_of(second)}


def test_a_training_that_is_the_first_once_more_is_reported():
    first, second = [True, True, False, False], [True, False, True, False]
    outcomes = two(first, second) | {"the first once more": losses_of(first)}
    assert_a_swap_is_reported("pruning-2", outcomes, ("another training", "the first once more"), DIFFERING)


def test_samples_that_do_the_same_in_both_trainings_are_no_second_figure():
    found = conclude("pruning-2", two([True, False, False], [True, False, False]))
    assert missed(found) == [claim(found, DIFFERING).text]
    assert found.numbers["shares"]["rises in one, falls in the other"] == pytest.approx(0.0)
    found = conclude("pruning-2", two([True] * 3, [True] * 3))
    assert not claim(found, DIFFERING).holds  # chance has none that differ either
    assert not claim(found, "fall in both").holds


def test_a_training_that_diverged_tells_nothing_of_its_samples():
    lost = {"losses": [[None, None]] * 4}
    found = conclude("pruning-2", two([True, False, False, False], []) | {"another training": lost})
    assert not any(each.holds for each in found.claims)
    assert not found.charts


@pytest.mark.parametrize(("shared", "holds"), [(0, True), (4, True), (11, True), (13, False), (20, False)])
def test_how_many_samples_differ_is_held_against_chance(shared, holds):
    """Of 100 samples 20 rise in each training, `shared` in both: by chance 4 would, and 32 differ."""
    first = [sample < 20 for sample in range(100)]
    second = [20 - shared <= sample < 40 - shared for sample in range(100)]
    found = conclude("pruning-2", two(first, second))
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
    found = conclude("pruning-2", two(first, second))
    series = {name for chart in found.charts for name in series_of(chart)}
    assert series == {f"sample {sample}, training {number}" for sample in shown for number in (1, 2)}
    assert [caption in chart.caption for chart in found.charts] == ([] if caption is None else [True])
    assert page([Told(experiment=EXPERIMENTS["pruning-2"], size=TOY, findings=found)])


def test_every_pair_of_more_trainings_counts():
    trainings = [[True, False, False], [True, False, False], [False, True, False]]
    found = EXPERIMENTS["pruning-2"].tell(SEEDS, lambda jobs: Runs(training=[losses_of(each) for each in trainings]))
    assert found.numbers["shares"]["rises in one, falls in the other"] == pytest.approx((0 + 2 / 3 + 2 / 3) / 3)


@pytest.mark.parametrize("name", ["pruning-2", "pruning-bad-samples"])
def test_trainings_are_compared_so_a_single_seed_has_a_second_beside_it(name):
    def settings(size):
        jobs = EXPERIMENTS[name].jobs(size).values()
        return {json.dumps(dict(job.of(seed)), sort_keys=True) for job in jobs for seed in size.seeds}

    assert settings(Size("laboratory", (200,))) == settings(Size("laboratory", (200, 201)))


# -- the schedules -----------------------------------------------------------------------------------------------------


def test_a_schedule_that_prunes_early_or_ever_later_is_not_the_third_figure():
    assert not conclude("pruning-3", json.loads(laid_out("pruning-3"))).missed
    early = json.loads(laid_out("pruning-3"))
    early["schedule"]["pruned"].append(5)
    assert len(conclude("pruning-3", early).missed) == 1
    later = json.loads(laid_out("pruning-3"))
    for window, start in zip(later["schedule"]["windows"], (3, 7, 15, 30), strict=True):
        window["start"] = start
    assert any("earlier" in text for text in missed(conclude("pruning-3", later)))


def test_the_formulas_are_held_against_the_schedule_itself():
    found = conclude("pruning-formulas", json.loads(laid_out("pruning-formulas")))
    assert found.numbers["the defaults of paceline"] == {"formula": 48, "exact": 71}
    assert missed(found) == ["the formula counts the pruned epochs: attenuation 2, as the text wants it"]
    for saved, share in found.numbers["prune needed"].items():
        plan = plan_fine(FineSchedule(prune=share), 1_000_000, epochs=200, batch_size=128)
        assert plan.share_saved == pytest.approx(float(saved), abs=1e-5)


# -- the tables --------------------------------------------------------------------------------------------------------


def table_outcomes(**changes):
    """Outcomes of LeNet with the seconds and accuracies that are given, way by way."""
    usual = {
        "regular": {"cpu_seconds": 100.0, "samples": 1000, "sampling_seconds": 0.1, "best_three": 70.0},
        "pruned": {"cpu_seconds": 85.5, "samples": 850, "sampling_seconds": 0.5, "best_three": 69.8},
        "fewer epochs": {"cpu_seconds": 85.0, "samples": 850, "sampling_seconds": 0.1, "best_three": 69.0},
    }
    for way, values in changes.items():
        usual[way.replace("_", " ")] |= values
    return {("LeNet", way): {"last_three": values["best_three"], **values} for way, values in usual.items()}


def test_table_1_holds_and_is_missed_where_the_runs_are_swapped():
    assert not conclude("pruning-table-1", table_outcomes()).missed
    assert_a_swap_is_reported("pruning-table-1", table_outcomes(), ("regular", "pruned"), "quicker with pruning")
    slow = conclude("pruning-table-1", table_outcomes(pruned={"sampling_seconds": 2.0}))
    assert missed(slow) == ["LeNet: the overhead is below 1 % of the time"]


def test_table_2_holds_and_is_missed_where_the_runs_are_swapped():
    assert not conclude("pruning-table-2", table_outcomes()).missed
    lanes = ("pruned", "fewer epochs")
    for wrong in ("points behind regular training", "above as much saved by fewer epochs"):
        assert_a_swap_is_reported("pruning-table-2", table_outcomes(), lanes, wrong)
    behind = conclude("pruning-table-2", table_outcomes(pruned={"best_three": 69.5}))
    assert [each.kind for each in behind.missed] == ["value"]


@pytest.mark.parametrize("name", ["pruning-table-1", "pruning-table-2"])
@pytest.mark.parametrize("way", ["regular", "pruned"])
def test_a_run_that_diverged_saves_no_time_and_is_not_accurate(name, way):
    figures = ("cpu_seconds", "samples", "sampling_seconds", "best_three", "last_three")
    found = conclude(name, table_outcomes(**{way: dict.fromkeys(figures)}))
    still = {"LeNet: above as much saved by fewer epochs"} if (name[-1], way) == ("2", "regular") else set()
    assert {each.text for each in found.claims if each.holds} == still


def test_both_tables_are_of_the_same_jobs():
    first, second = (EXPERIMENTS[f"pruning-table-{number}"].jobs(Size()) for number in (1, 2))
    assert [(key, job.run, job.of(200)) for key, job in first.items()] == [
        (key, job.run, job.of(200)) for key, job in second.items()
    ]


def test_the_full_size_has_the_papers_networks_and_epochs():
    jobs = EXPERIMENTS["pruning-table-1"].jobs(Size("full"))
    assert {network for network, _ in jobs} == set(PRUNING_NETWORKS)
    assert {model_of(network) for network in PRUNING_NETWORKS} <= set(MODELS)
    size = PruningSize(**jobs["LeNet", "regular"].of(200)["size"])
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


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_the_overhead_is_held_against_the_papers():
    def found(seconds):
        return conclude("pruning-overhead", {"epochs": {"seconds": seconds, "epochs": 20, "pruned": 7}})

    assert not found(1.0).missed
    for seconds in (4.5, None):
        assert [each.kind for each in found(seconds).missed] == ["winner"]


def test_trainings_that_prune_different_samples_have_no_common_bad_ones():
    name, samples, tenth = "pruning-bad-samples", 100, 10
    keys = list(EXPERIMENTS[name].jobs(TOY))
    apart = {
        key: {"times_pruned": [5 if place * tenth <= sample < (place + 1) * tenth else 0 for sample in range(samples)]}
        for place, key in enumerate(keys)
    }
    assert [each.kind for each in conclude(name, apart).missed] == ["winner"]
    alike = conclude(name, dict.fromkeys(keys, apart[keys[0]]))
    assert not alike.missed
    assert alike.numbers["another network"] == pytest.approx(1.0)


# -- what is trained ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [10, 30, 40, 50, 60, 100, 200])
def test_fine_pruning_saves_what_it_must_and_hardly_more(epochs):
    settings = POLICIES[FINE_PRUNING].settings(PruningSize(epochs=epochs))
    pruned = len(FinePruning(1000, batch_size=10, **settings).plan(epochs).pruned_epochs)
    assert 0.15 <= settings["prune"] * pruned / epochs + 1e-9 < 0.15 + 0.01 * pruned / epochs


def test_a_size_is_made_again_of_its_plain_values():
    size = PruningSize(images=5_000, fewer=0.15)
    again = PruningSize(**json.loads(json.dumps(size.document)))
    assert again.document == size.document


def test_accuracy_is_of_the_last_three_epochs_and_of_fewer_where_there_are_no_more():
    assert mean_of_three(sorted([90.0, 10.0, 20.0, 30.0])) == pytest.approx(140 / 3)
    assert str(mean_of_three([])) == str(NAN)


def test_data_that_is_not_there_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"^cifar10 is not in .*: put .* there, or name another folder in \$PACELINE_DATA$"
    ):
        PruningSize().load_images()


def test_more_images_than_there_are_is_told():
    with pytest.raises(ValueError, match=r"images must be at most the 1500 training images of digits \(images=10000\)"):
        PruningSize(data="digits", shrink=1, images=10_000).load_images()
