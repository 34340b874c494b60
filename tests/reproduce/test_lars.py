"""The experiments on LARS: toy runs of all of them, and claims that other outcomes turn round."""

from __future__ import annotations

import functools
import json
import math
import re

import pytest

from paceline.reproduce import EXPERIMENTS, experiment_named
from paceline.reproduce.documents import Reproduction, document, page
from paceline.reproduce.experiment import ExperimentPlan
from paceline.reproduce.large_batch_training import ImageChoice, LargeBatchRun
from paceline.reproduce.lars.cells import LarsCell
from paceline.reproduce.lars.googlenet import table_6_cells
from paceline.reproduce.lars.grid import batches, cells_at, rates
from paceline.reproduce.lars.initial_ratios import (
    CAFFE_BIASES,
    CAFFE_DEVIATIONS,
    TABLE_2_LAYERS,
    caffe_alexnet,
    paper_ratios,
)
from paceline.reproduce.lars.more_epochs import (
    PAPER_LARGE_BATCH,
    TABLE_5_PAPER,
    paper_runs_of_100_epochs,
    table_5_cells,
)
from paceline.reproduce.lars.outcomes import CHANCE
from paceline.reproduce.lars.rate_plateau import figure_3_cells, plateau
from paceline.reproduce.lars.training_curves import figure_1_cells, figure_2_cells
from paceline.reproduce.published import (
    LARS_TABLE_1,
    LARS_TABLE_1_WARMUP,
    LARS_TABLE_2,
    LARS_TABLE_3,
    LARS_TABLE_3_WARMUP,
    LARS_TABLE_4,
    LARS_TABLE_5,
    LARS_TABLE_6,
)
from paceline.reproduce.running import check_names, identity

NAMES = [name for name, module in EXPERIMENTS.items() if module == "lars"]
TOY, LABORATORY, FULL = ExperimentPlan(size="toy"), ExperimentPlan(), ExperimentPlan(size="full")
SEED = LABORATORY.seeds[0]


@functools.cache
def computed(function, settings):
    """A job's outcome, as it would be read from a file; cells that experiments share are computed once."""
    return json.loads(json.dumps(function(json.loads(settings)), allow_nan=False))


def outcomes_of(experiment, plan):
    return {job.name: computed(job.run, json.dumps(job.settings)) for job in experiment.jobs(plan)}


def made_up(experiment, plan, accuracy):
    """Outcomes without any training: `accuracy` of a job's settings, and a plain curve."""
    found = {}
    for job in experiment.jobs(plan):
        value = accuracy(job.settings)
        loss = 2 - value / 60
        curve = [
            {"epoch": epoch, "train_loss": loss + 1 / epoch, "test_loss": loss + 1 / epoch + 0.05, "accuracy": value,
             "ratios": {"0.weight": 1.0, "3.weight": 2.0}}
            for epoch in (8, 64)
        ]  # fmt: skip
        found[job.name] = {
            "held_out": value,
            "accuracy": value,
            "training_loss": loss,
            "first_ratios": {"0.weight": 3.0, "3.weight": 5.0},
            "curve": curve,
        }
    return found


def verdicts(name, accuracy, plan=LABORATORY):
    experiment = experiment_named(name)
    return {claim.text: claim for claim in experiment.conclude(plan, made_up(experiment, plan, accuracy)).claims}


def held(claims, *words):
    """Whether the only claim with these words holds."""
    (found,) = (claim for text, claim in claims.items() if all(word in text for word in words))
    return found.holds


# -- all of them -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_toy_run_ends_in_tables_claims_charts_and_a_page(name):
    experiment = experiment_named(name)
    findings = experiment.conclude(TOY, outcomes_of(experiment, TOY))
    for table in findings.tables:
        headings = " ".join(table.headings)
        assert "paper" in headings
        assert "ours" in headings
        assert all(len(row) == len(table.headings) for row in table.rows)
    assert findings.tables[0].rows
    assert findings.claims
    assert findings.charts
    assert findings.remarks
    for chart in findings.charts:
        assert len(findings.series) >= len(chart.keys)
    reproduction = Reproduction(experiment=experiment, plan=TOY, findings=findings, data_remarks=())
    assert json.loads(json.dumps(document(reproduction), allow_nan=False))["experiment"] == name
    assert findings.charts[0].title in page([reproduction])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", ["toy", "laboratory", "full"])
def test_every_size_has_jobs_with_names_of_their_own_and_plain_settings(name, size):
    experiment = experiment_named(name)
    jobs = experiment.jobs(ExperimentPlan(size=size, seeds=(200, 201)))
    check_names(jobs)
    assert len({json.dumps(job.settings, sort_keys=True) for job in jobs}) == len(jobs)
    assert all(job.seconds > 0 for job in jobs)


@pytest.mark.parametrize("name", NAMES)
def test_the_minutes_are_those_of_the_jobs_and_at_most_ten(name):
    experiment = experiment_named(name)
    minutes = sum(job.seconds for job in experiment.jobs(LABORATORY)) / 2 / 60
    assert minutes <= 10
    assert experiment.minutes == pytest.approx(minutes, rel=0.35, abs=0.3)


@pytest.mark.parametrize("name", NAMES)
def test_the_full_size_takes_the_hours_of_its_jobs(name):
    experiment = experiment_named(name)
    hours = sum(job.seconds for job in experiment.jobs(FULL)) / 2 / 3600
    assert experiment.full_hours == pytest.approx(hours, rel=0.35, abs=0.1)


def test_experiments_share_their_cells():
    jobs = {
        name: {json.dumps(identity(job, {}), sort_keys=True) for job in experiment_named(name).jobs(LABORATORY)}
        for name in NAMES
    }
    assert jobs["lars-figure-1"] <= jobs["lars-table-1"]
    assert jobs["lars-figure-2"] <= jobs["lars-table-3"]
    assert jobs["lars-figure-4"] <= jobs["lars-table-4"]
    assert len(jobs["lars-table-1"] & jobs["lars-table-3"]) == 12  # SGD: two networks, two rates and four
    assert len(jobs["lars-figure-3"] & jobs["lars-table-3"]) == 8  # LARS: two batches, four rates
    assert len(jobs["lars-table-5"] & jobs["lars-table-3"]) == 2  # the longest at the large batch


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lars-table-2"])
def test_runs_that_diverged_lose_and_break_nothing(name):
    experiment = experiment_named(name)
    diverged = {"held_out": None, "accuracy": None, "training_loss": None, "first_ratios": None, "curve": []}
    findings = experiment.conclude(LABORATORY, {job.name: diverged for job in experiment.jobs(LABORATORY)})
    winners = [claim for claim in findings.claims if claim.kind == "winner"]
    assert not any(claim.holds for claim in winners)
    page([Reproduction(experiment=experiment, plan=LABORATORY, findings=findings, data_remarks=())])


# -- each with outcomes that are as in the paper, and turned round -----------------------------------------------------


def as_in_the_paper(settings, *, swapped=False):
    """SGD falls with the batch and diverges without normalisation; LARS stays; longer and gentler is better."""
    normed = settings["model"] == "small-cnn-bn"
    optimizer = {"SGD": "LARS", "LARS": "SGD"}[settings["optimizer"]] if swapped else settings["optimizer"]
    octaves = math.log2(settings["batch"] / 128)
    if optimizer == "SGD":
        if not normed and settings["rate"] >= 0.8:
            return 10.0
        return 86.0 - (0.4 if normed else 1.2) * octaves
    value = 86.2 - 0.1 * octaves - (1.0 if octaves > 6 else 0.0)
    value -= 0.3 * max(0.0, 64 - settings["epochs"]) / 8 * (octaves > 3)
    value += 2.0 if settings["augment"] == "extended" and octaves < 3 else 0.0
    value += 3 * (settings["warmup"] - 0.3) if octaves > 3 else 0.0
    return value


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lars-table-2"])
def test_outcomes_as_in_the_paper_meet_every_claim(name):
    claims = verdicts(name, as_in_the_paper)
    assert not [claim.line for claim in claims.values() if claim.judged and not claim.holds]


@pytest.mark.parametrize("network", ["AlexNet", "AlexNet-BN"])
def test_table_3_with_sgd_and_lars_swapped_is_reported_as_wrong(network):
    claims = verdicts("lars-table-3", functools.partial(as_in_the_paper, swapped=True))
    assert not held(claims, f"{network}: LARS ahead of SGD")
    assert not held(claims, f"{network}: LARS at 8K at most")


def test_table_6_with_sgd_and_lars_swapped_is_reported_as_wrong():
    assert not held(verdicts("lars-table-6", functools.partial(as_in_the_paper, swapped=True)), "LARS ahead of SGD")


def test_figure_2_with_sgd_and_lars_swapped_is_reported_as_wrong():
    def unlike(settings, swapped):
        return {"SGD": 86.0, "LARS": 89.0}[{"SGD": "LARS", "LARS": "SGD"}[settings["optimizer"]] if swapped else
                                            settings["optimizer"]]  # fmt: skip

    assert held(verdicts("lars-figure-2", functools.partial(unlike, swapped=False)), "matches the small one")
    assert not held(verdicts("lars-figure-2", functools.partial(unlike, swapped=True)), "matches the small one")


def test_table_1_with_the_networks_swapped_is_reported_as_wrong():
    def swapped(settings):
        other = {"small-cnn": "small-cnn-bn", "small-cnn-bn": "small-cnn"}[settings["model"]]
        return as_in_the_paper({**settings, "model": other})

    claims = verdicts("lars-table-1", swapped)
    for words in ("bears the highest rate", "less is lost", "widens the range", "SGD diverges at the highest rate"):
        assert not held(claims, words)
    rising = verdicts("lars-table-1", lambda settings: 80 + settings["batch"] / 1000)
    assert not held(rising, "AlexNet:", "falls as the batch grows")


def test_tables_4_and_5_and_figures_3_and_4_turned_round_are_reported_as_wrong():
    def other_augmentation(settings):
        swap = {"minimal": "extended", "extended": "minimal"}
        return as_in_the_paper({**settings, "augment": swap[settings["augment"]]})

    claims = verdicts("lars-table-4", other_augmentation)
    assert not held(claims, "extended augmentation ahead")
    assert not held(claims, "brings the smallest batch more")
    assert not held(verdicts("lars-table-4", lambda settings: 90 - settings["batch"] / 1000), "lost, minimal")
    fewer = verdicts("lars-table-5", lambda settings: as_in_the_paper({**settings, "epochs": 96 - settings["epochs"]}))
    assert not held(fewer, "AlexNet:", "rises with the epochs")
    assert not held(fewer, "AlexNet-BN:", "bring back")
    assert not held(verdicts("lars-figure-3", lambda settings: 90 - 40 * abs(settings["rate"] - 0.4)), "about as good")
    assert not held(verdicts("lars-figure-3", lambda settings: settings["batch"] / 200), "larger batch is behind")
    assert not held(verdicts("lars-figure-4", lambda settings: 90 - settings["batch"] / 1000), "points behind")
    shorter = verdicts(
        "lars-table-6", lambda settings: as_in_the_paper({**settings, "warmup": 0.5 - settings["warmup"]})
    )
    assert not held(shorter, "longer warm-up")


def test_a_gap_that_grows_with_the_batch_is_reported_as_wrong():
    experiment = experiment_named("lars-figure-1")
    outcomes = made_up(experiment, LABORATORY, as_in_the_paper)
    for job in experiment.jobs(LABORATORY):
        if job.settings["batch"] == batches(LABORATORY, "SGD")[-1]:
            for point in outcomes[job.name]["curve"]:
                point["test_loss"] += 0.1
    claims = {claim.text: claim for claim in experiment.conclude(LABORATORY, outcomes).claims}
    assert not held(claims, "not larger")
    assert not held(claims, "practically the same where")
    assert not held(claims, "practically the same at the end")


# -- table 2 -----------------------------------------------------------------------------------------------------------


def ratios(values):
    layers = {f"{layer} {kind}": {"weight": 1.0, "gradient": 1.0, "ratio": 1.0} for layer in TABLE_2_LAYERS
              for kind in ("weight", "bias")}  # fmt: skip
    for layer, value in zip(TABLE_2_LAYERS, values, strict=True):
        layers[f"{layer} weight"]["ratio"] = value
    return {"layers": layers}


def test_table_2_holds_with_the_papers_ratios_and_not_with_equal_ones_or_another_layer():
    experiment = experiment_named("lars-table-2")
    paper = [paper_ratios()[f"{layer} weight"] for layer in TABLE_2_LAYERS]

    def met(values):
        outcomes = {job.name: ratios(values) for job in experiment.jobs(LABORATORY)}
        claims = experiment.conclude(LABORATORY, outcomes).claims
        return [claim.holds for claim in claims]

    assert met(paper) == [True] * 4
    assert met([5.0] * 8)[:2] == [False] * 2
    assert met(paper[::-1]) == [True, True, False, False]


def test_caffes_weights_have_the_norms_that_the_paper_prints():
    """The shapes of the paper's AlexNet, and our deviations: each of its sixteen norms comes out."""
    shapes = [(96, 3 * 121), (256, 48 * 25), (384, 256 * 9), (384, 192 * 9), (256, 192 * 9), (4096, 9216), (4096, 4096),
              (1000, 4096)]  # fmt: skip
    for index, (out, fan_in) in enumerate(shapes):
        weights, biases = LARS_TABLE_2[2 * index], LARS_TABLE_2[2 * index + 1]
        assert weights[1] == pytest.approx(CAFFE_DEVIATIONS[index] * math.sqrt(out * fan_in), rel=0.01)
        assert biases[1] == pytest.approx(CAFFE_BIASES[index] * math.sqrt(out), rel=0.02)
    model = caffe_alexnet(input_shape=(3, 32, 32), classes=10)
    assert float(model[3][0].weight.detach().std()) == pytest.approx(0.01, rel=0.05)


# -- the paper's own setting -------------------------------------------------------------------------------------------


def full_settings(name):
    return [job.settings for job in experiment_named(name).jobs(FULL)]


def warmup_epochs(settings):
    """How many epochs the rate rises, by the steps that the training loop counts."""
    run = LargeBatchRun(**{**settings, "choice": ImageChoice(**settings["choice"])})
    return round(run.warmup * run.steps) * run.epochs / run.steps


def paper_warmup(epochs):
    return epochs or 0  # the paper's "N/A" and "-"


@pytest.mark.parametrize("network", ["alexnet", "alexnet-bn"])
@pytest.mark.parametrize(
    ("name", "optimizer", "table", "warmup"),
    [
        ("lars-table-1", "SGD", LARS_TABLE_1, LARS_TABLE_1_WARMUP),
        ("lars-table-3", "LARS", LARS_TABLE_3, LARS_TABLE_3_WARMUP),
    ],
)
def test_tables_1_and_3_have_the_papers_runs_in_full(name, optimizer, table, warmup, network):
    runs = [each for each in full_settings(name) if each["model"] == network and each["optimizer"] == optimizer]
    assert [(each["batch"], each["rate"]) for each in runs] == [row[:2] for row in table[network]]
    assert {each["epochs"] for each in runs} == {100}
    assert {warmup_epochs(each) for each in runs} == {warmup[network]}
    assert {each["augment"] for each in runs} == {"minimal"}


def test_the_figures_have_runs_like_those_of_the_tables_in_full():
    """But for the rates of figure 3, which are not readable."""
    every = {name: {json.dumps(each, sort_keys=True) for each in full_settings(name)} for name in NAMES}
    assert every["lars-figure-1"] <= every["lars-table-1"]
    assert every["lars-figure-2"] <= every["lars-table-1"] | every["lars-table-3"]
    assert every["lars-figure-4"] <= every["lars-table-4"]
    figure_3 = full_settings("lars-figure-3")
    assert {warmup_epochs(each) for each in figure_3} == {LARS_TABLE_3_WARMUP["alexnet-bn"]}
    assert {each["augment"] for each in figure_3} == {"minimal"}


def test_table_4_has_the_papers_batches_rates_warmup_and_augmentations_in_full():
    found = {
        (each["batch"], each["rate"], warmup_epochs(each), each["augment"]) for each in full_settings("lars-table-4")
    }
    assert found == {
        (batch, rate, paper_warmup(warmup), augment)
        for batch, rate, warmup, _, _ in LARS_TABLE_4
        for augment in ("minimal", "extended")
    }
    assert {each["epochs"] for each in full_settings("lars-table-4")} == {100}


@pytest.mark.parametrize(
    ("model", "column", "warmup", "augment"),
    [
        ("alexnet", "alexnet, 16K", LARS_TABLE_3_WARMUP["alexnet"], "minimal"),
        ("alexnet-bn", "alexnet-bn, 32K", LARS_TABLE_3_WARMUP["alexnet-bn"], "minimal"),
        ("resnet50", "resnet50, 16K", LARS_TABLE_4[3][2], "extended"),
    ],
)
def test_table_5_has_the_papers_epochs_and_the_warmup_of_its_runs_of_100_epochs_in_full(model, column, warmup, augment):
    small, *large = (each for each in full_settings("lars-table-5") if each["model"] == model)
    assert [each["epochs"] for each in large] == list(LARS_TABLE_5["epochs"])
    assert {f"{model}, {each['batch'] // 1024}K" for each in large} == {column}
    assert {warmup_epochs(each) for each in large} == {warmup}
    assert {each["augment"] for each in (small, *large)} == {augment}
    runs = full_settings("lars-table-3") + full_settings("lars-table-4")
    assert small in runs
    assert large[0] in runs


def test_table_5_begins_with_accuracies_that_the_paper_has_in_tables_3_and_4():
    """So its first runs are theirs, and ResNet-50's has the extended augmentation."""
    for network, column in TABLE_5_PAPER.items():
        _, accuracy = paper_runs_of_100_epochs(network)[PAPER_LARGE_BATCH[network]]
        assert accuracy == LARS_TABLE_5[column][0]


def test_table_6_has_every_row_of_the_paper_in_full():
    runs = full_settings("lars-table-6")
    found = {(each["batch"], each["rate"], each["epochs"], warmup_epochs(each), each["optimizer"]) for each in runs}
    printed = {
        (batch, rate, epochs, paper_warmup(warmup), "LARS" if place else "SGD")
        for place, (batch, rate, epochs, warmup, _) in enumerate(LARS_TABLE_6)
    }
    assert printed <= found
    assert {(batch, rate) for batch, rate, *_ in found - printed} == {LARS_TABLE_6[-1][:2]}  # what the claims compare
    assert len(found - printed) == 3
    assert {(each["optimizer"], each["augment"]) for each in runs} == {("SGD", "minimal"), ("LARS", "extended")}


def test_table_6_shows_the_papers_warmup_beside_the_same_of_ours_in_full():
    experiment = experiment_named("lars-table-6")
    (table,) = experiment.conclude(FULL, made_up(experiment, FULL, lambda settings: 60.0)).tables
    columns = {(paper.replace("-", "0"), ours) for _, paper, _, ours, _ in table.rows if paper != "-"}
    assert len(columns) == len(LARS_TABLE_6)
    assert all(paper == ours for paper, ours in columns)


@pytest.mark.parametrize("plan", [TOY, LABORATORY, FULL], ids=["toy", "laboratory", "full"])
def test_table_6_has_each_row_of_the_paper_once_in_the_table_or_its_caption(plan):
    experiment = experiment_named("lars-table-6")
    (table,) = experiment.conclude(plan, made_up(experiment, plan, lambda settings: 60.0)).tables
    in_table = [row[2] for row in table.rows if row[1] != "-"]
    below = re.findall(r": ([\d.]+) in", table.caption)
    assert sorted(in_table + below) == sorted(f"{row[4]:g}" for row in LARS_TABLE_6)


@pytest.mark.parametrize("name", NAMES)
def test_the_full_size_says_how_it_differs_from_the_paper(name):
    experiment = experiment_named(name)
    if name == "lars-table-2":
        outcomes = {job.name: ratios([1.0] * 8) for job in experiment.jobs(FULL)}
    else:
        outcomes = made_up(experiment, FULL, lambda settings: 60.0)
    remarks = " ".join(experiment.conclude(FULL, outcomes).remarks)
    assert "in place of ImageNet" in remarks
    assert ("does not print the augmentation" in remarks) == (
        name not in ("lars-table-2", "lars-table-4", "lars-figure-4")
    )


# -- the pieces --------------------------------------------------------------------------------------------------------


def test_both_optimisers_try_the_same_rates_in_the_laboratory_and_the_papers_in_full():
    for batch in batches(LABORATORY, "SGD"):
        assert rates(LABORATORY, "plain", "SGD", batch) == rates(LABORATORY, "normed", "LARS", batch)
    assert rates(FULL, "normed", "LARS", 32768) == (22,)
    assert [cell.rate for cell in cells_at(FULL, "plain", "SGD", 8192)] == [0.02, 0.03, 0.04, 0.05]
    assert {cell.batch for cell, *_ in figure_1_cells(FULL)} == {512, 8192}
    assert [cell.epochs or 100 for cell in table_5_cells(FULL)["plain"]] == [100, 100, 125, 150, 175, 200]
    assert {cell.network for cell in table_6_cells(FULL).values()} == {"inception"}
    assert list(figure_3_cells(FULL)) == [16384, 32768]
    assert len(figure_2_cells(FULL)[1]) == 1


def test_a_plateau_ends_where_a_rate_loses_too_much():
    assert plateau({1.0: 80.0}, 1.0) == 1.0
    assert plateau({1.0: 80.0, 2.0: 70.0, 4.0: 80.0}, 1.0) == 1.0
    assert plateau({1.0: 79.5, 2.0: 80.0, 4.0: 79.2, 8.0: 78.0}, 1.0) == 4.0


def test_a_cells_name_tells_all_that_makes_it():
    cell = LarsCell(
        network="plain", optimizer="LARS", batch=128, rate=0.1, epochs=3, warmup_share=0.0, augment="minimal"
    )
    assert cell.label == "plain LARS batch 128 rate 0.1 3 epochs warm-up 0 minimal"
    assert CHANCE < 20
