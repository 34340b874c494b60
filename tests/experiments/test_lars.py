"""The experiments on LARS: claims that other outcomes turn round, and the paper's own setting at full size."""

from __future__ import annotations

import json
import math
import re

import pytest

from experiments.core.pages import Told, page
from experiments.core.story import Runs, Size
from experiments.papers.lars.augmentation import cells_with
from experiments.papers.lars.cells import BEHIND_BASELINE, CHANCE, batches, cells_at
from experiments.papers.lars.googlenet import table_6_cells
from experiments.papers.lars.initial_ratios import (
    CAFFE_BIASES,
    CAFFE_DEVIATIONS,
    LAYERS,
    caffe_alexnet,
    paper_ratios,
)
from experiments.papers.lars.more_epochs import COLUMN, PAPER_LARGE_BATCH, paper_runs_of_100_epochs, table_5_cells
from experiments.papers.lars.rate_plateau import plateau
from experiments.papers.lars.run import LargeBatchRun
from experiments.papers.published import (
    LARS_TABLE_1,
    LARS_TABLE_1_WARMUP,
    LARS_TABLE_2,
    LARS_TABLE_3,
    LARS_TABLE_3_WARMUP,
    LARS_TABLE_4,
    LARS_TABLE_5,
    LARS_TABLE_6,
)
from tests.experiments.telling import EXPERIMENTS, TOY, conclude

NAMES = [name for name in EXPERIMENTS if name.startswith("lars-")]
OF_CELLS = [name for name in NAMES if name != "lars-table-2"]
LABORATORY, FULL = Size(), Size("full")
DIVERGED = {"held_out": None, "accuracy": None, "training_loss": None, "first_ratios": None, "curve": []}


def made_up(accuracy):
    """Return what makes an outcome of a cell without any training: `accuracy` of the cell, and a plain curve."""

    def outcome(cell):
        value = accuracy(cell)
        loss = 2 - value / 60
        curve = [
            {"epoch": epoch, "train_loss": loss + 1 / epoch, "test_loss": loss + 1 / epoch + 0.05, "accuracy": value,
             "ratios": {"0.weight": 1.0, "3.weight": 2.0}}
            for epoch in (8, 64)
        ]  # fmt: skip
        first = {"0.weight": 3.0, "3.weight": 5.0}
        return {"held_out": value, "accuracy": value, "training_loss": loss, "first_ratios": first, "curve": curve}

    return outcome


def verdicts(name, accuracy, size=LABORATORY):
    return {claim.text: claim for claim in conclude(name, made_up(accuracy), size).claims}


def held(claims, *words):
    """Whether the only claim with these words holds."""
    (found,) = (claim for text, claim in claims.items() if all(word in text for word in words))
    return found.holds


def settings_of(name, size):
    """The settings of an experiment's jobs."""
    return [dict(job.of(size.seeds[0])) for job in EXPERIMENTS[name].jobs(size).values()]


def texts_of(name, size):
    """What the jobs of an experiment are known by, but for their function."""
    return {json.dumps(settings, sort_keys=True) for settings in settings_of(name, size)}


# -- all of them -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", ["toy", "laboratory", "full"])
def test_no_two_cells_of_an_experiment_are_the_same_run(name, size):
    asked = Size(size)
    assert len(texts_of(name, asked)) == len(EXPERIMENTS[name].jobs(asked))


@pytest.mark.parametrize("name", NAMES)
def test_the_minutes_and_the_hours_are_those_of_the_jobs(name):
    experiment = EXPERIMENTS[name]
    of_laboratory, of_full = (
        sum(job.seconds for job in experiment.jobs(size).values()) / 2 for size in (LABORATORY, FULL)
    )
    assert experiment.minutes == pytest.approx(of_laboratory / 60, rel=0.35, abs=0.3)
    assert experiment.full_hours == pytest.approx(of_full / 3600, rel=0.35, abs=0.1)


def test_experiments_share_their_cells():
    jobs = {name: texts_of(name, LABORATORY) for name in NAMES}
    assert jobs["lars-figure-1"] <= jobs["lars-table-1"]
    assert jobs["lars-figure-2"] <= jobs["lars-table-3"]
    assert jobs["lars-figure-4"] <= jobs["lars-table-4"]
    assert len(jobs["lars-table-1"] & jobs["lars-table-3"]) == 12  # SGD: two networks, two rates and four
    assert len(jobs["lars-figure-3"] & jobs["lars-table-3"]) == 8  # LARS: two batches, four rates
    assert len(jobs["lars-table-5"] & jobs["lars-table-3"]) == 2  # the longest at the large batch
    functions = {job.run for name in OF_CELLS for job in EXPERIMENTS[name].jobs(LABORATORY).values()}
    assert len(functions) == 1


@pytest.mark.parametrize("name", OF_CELLS)
@pytest.mark.parametrize("size", ["toy", "laboratory", "full"])
def test_runs_that_diverged_lose_and_break_nothing(name, size):
    findings = conclude(name, lambda cell: DIVERGED, Size(size))
    winners = [claim for claim in findings.claims if claim.kind == "winner"]
    assert not any(claim.holds for claim in winners)
    page([Told(experiment=EXPERIMENTS[name], size=Size(size), findings=findings)])


# -- each with outcomes that are as in the paper, and turned round -----------------------------------------------------


def as_in_the_paper(cell):
    """SGD falls with the batch and diverges without normalisation; LARS stays; longer and gentler is better."""
    normed = cell.network in ("normed", "residual")
    octaves = math.log2(cell.batch / 128)
    if cell.optimizer == "SGD":
        if not normed and cell.rate >= 0.8:
            return 10.0
        return 86.0 - (0.4 if normed else 1.2) * octaves
    value = 86.2 - 0.1 * octaves - (1.0 if octaves > 6 else 0.0)
    value -= 0.3 * max(0.0, 64 - cell.epochs) / 8 * (octaves > 3)
    value += 2.0 if cell.augment == "extended" and octaves < 3 else 0.0
    value += 3 * (cell.warmup - 0.3) if octaves > 3 else 0.0
    return value


def other_optimizer(cell):
    return cell._replace(optimizer={"SGD": "LARS", "LARS": "SGD"}[cell.optimizer])


@pytest.mark.parametrize("name", OF_CELLS)
def test_outcomes_as_in_the_paper_meet_every_claim(name):
    claims = verdicts(name, as_in_the_paper)
    assert not [claim.line for claim in claims.values() if claim.judged and not claim.holds]


@pytest.mark.parametrize("network", ["AlexNet", "AlexNet-BN"])
def test_table_3_with_sgd_and_lars_swapped_is_reported_as_wrong(network):
    def swapped(cell):
        return as_in_the_paper(other_optimizer(cell))

    claims = verdicts("lars-table-3", swapped)
    assert not held(claims, f"{network}: LARS ahead of SGD")
    assert not held(claims, f"{network}: LARS at 8K at most")


def test_table_6_with_sgd_and_lars_swapped_is_reported_as_wrong():
    swapped = verdicts("lars-table-6", lambda cell: as_in_the_paper(other_optimizer(cell)))
    assert not held(swapped, "LARS ahead of SGD")


def test_figure_2_with_sgd_and_lars_swapped_is_reported_as_wrong():
    unlike = {"SGD": 86.0, "LARS": 89.0}
    assert held(verdicts("lars-figure-2", lambda cell: unlike[cell.optimizer]), "matches the small one")
    swapped = verdicts("lars-figure-2", lambda cell: unlike[other_optimizer(cell).optimizer])
    assert not held(swapped, "matches the small one")


def test_table_1_with_the_networks_swapped_is_reported_as_wrong():
    def swapped(cell):
        return as_in_the_paper(cell._replace(network={"plain": "normed", "normed": "plain"}[cell.network]))

    claims = verdicts("lars-table-1", swapped)
    for words in ("bears the highest rate", "less is lost", "widens the range", "SGD diverges at the highest rate"):
        assert not held(claims, words)
    rising = verdicts("lars-table-1", lambda cell: 80 + cell.batch / 1000)
    assert not held(rising, "AlexNet:", "falls as the batch grows")


def test_tables_4_and_5_and_figures_3_and_4_turned_round_are_reported_as_wrong():
    def other_augmentation(cell):
        return as_in_the_paper(cell._replace(augment={"minimal": "extended", "extended": "minimal"}[cell.augment]))

    claims = verdicts("lars-table-4", other_augmentation)
    assert not held(claims, "extended augmentation ahead")
    assert not held(claims, "brings the smallest batch more")
    assert not held(verdicts("lars-table-4", lambda cell: 90 - cell.batch / 1000), "lost, minimal")
    fewer = verdicts("lars-table-5", lambda cell: as_in_the_paper(cell._replace(epochs=96 - cell.epochs)))
    assert not held(fewer, "AlexNet:", "rises with the epochs")
    assert not held(fewer, "AlexNet-BN:", "bring back")
    assert not held(verdicts("lars-figure-3", lambda cell: 90 - 40 * abs(cell.rate - 0.4)), "about as good")
    assert not held(verdicts("lars-figure-3", lambda cell: cell.batch / 200), "larger batch is behind")
    assert not held(verdicts("lars-figure-4", lambda cell: 90 - cell.batch / 1000), "points behind")
    shorter = verdicts("lars-table-6", lambda cell: as_in_the_paper(cell._replace(warmup=0.5 - cell.warmup)))
    assert not held(shorter, "longer warm-up")


def test_a_gap_that_grows_with_the_batch_is_reported_as_wrong():
    def outcome(cell):
        found = made_up(as_in_the_paper)(cell)
        if cell.batch == batches(LABORATORY, "SGD")[-1]:
            for point in found["curve"]:
                point["test_loss"] += 0.1
        return found

    claims = {claim.text: claim for claim in conclude("lars-figure-1", outcome, LABORATORY).claims}
    assert not held(claims, "not larger")
    assert not held(claims, "practically the same where")
    assert not held(claims, "practically the same at the end")


def test_ratios_that_rise_are_reported_as_wrong():
    def outcome(cell):
        return {**made_up(as_in_the_paper)(cell), "first_ratios": {"0.weight": 0.5, "3.weight": 0.5}}

    claims = {claim.text: claim for claim in conclude("lars-figure-2", outcome, LABORATORY).claims}
    assert not held(claims, "ratios of most layers are lower")


def test_a_rate_is_chosen_on_images_held_out_and_shown_on_test_images():
    def outcome(cell):
        return {**made_up(lambda cell: 60.0)(cell), "held_out": -abs(cell.rate - 0.2), "accuracy": 100 * cell.rate}

    table = conclude("lars-table-1", outcome, LABORATORY).tables[0]
    large = [row for row in table.rows if row[3] == "8K"]
    assert [row[4] for row in large] == ["10.0 (0.1), 20.0* (0.2),\n40.0 (0.4), 80.0 (0.8)"] * 2


def test_accuracies_are_means_over_the_seeds_and_a_run_that_diverged_counts_as_none_right():
    size, found = Size(seeds=(200, 201)), made_up(lambda cell: 80.0)
    one_lost = EXPERIMENTS["lars-figure-4"].tell(
        size, lambda jobs: Runs({cell: [found(cell), DIVERGED] for cell in jobs})
    )
    assert set(one_lost.numbers.values()) == {40.0}
    assert {row[3] for row in one_lost.tables[0].rows} == {"none"}  # a curve ends where one of the seeds' ends


# -- table 2 -----------------------------------------------------------------------------------------------------------


def ratios(values):
    layers = {f"{layer} {kind}": {"weight": 1.0, "gradient": 1.0, "ratio": 1.0} for layer in LAYERS
              for kind in ("weight", "bias")}  # fmt: skip
    for layer, value in zip(LAYERS, values, strict=True):
        layers[f"{layer} weight"]["ratio"] = value
    return {"layers": layers}


def test_table_2_holds_with_the_papers_ratios_and_not_with_equal_ones_or_another_layer():
    paper = [paper_ratios()[f"{layer} weight"] for layer in LAYERS]

    def met(values):
        return [claim.holds for claim in conclude("lars-table-2", lambda name: ratios(values), LABORATORY).claims]

    assert met(paper) == [True] * 4
    assert met([5.0] * 8)[:2] == [False] * 2
    assert met(paper[::-1]) == [True, True, False, False]
    assert met([None] * 8) == [False] * 4
    assert met([*paper[:-1], None]) == [False, False, True, True]


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
    return settings_of(name, FULL)


def warmup_epochs(settings):
    """How many epochs the rate rises, by the steps that the training loop counts."""
    run = LargeBatchRun(**settings)
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
    every = {name: texts_of(name, FULL) for name in NAMES}
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
    for network, column in COLUMN.items():
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
    (table,) = conclude("lars-table-6", made_up(lambda cell: 60.0), FULL).tables
    columns = {(paper.replace("-", "0"), ours) for _, paper, _, ours, _ in table.rows if paper != "-"}
    assert len(columns) == len(LARS_TABLE_6)
    assert all(paper == ours for paper, ours in columns)


@pytest.mark.parametrize("size", [TOY, LABORATORY, FULL], ids=["toy", "laboratory", "full"])
def test_table_6_has_each_row_of_the_paper_once_in_the_table_or_its_caption(size):
    (table,) = conclude("lars-table-6", made_up(lambda cell: 60.0), size).tables
    in_table = [row[2] for row in table.rows if row[1] != "-"]
    below = re.findall(r": ([\d.]+) in", table.caption)
    assert sorted(in_table + below) == sorted(f"{row[4]:g}" for row in LARS_TABLE_6)


@pytest.mark.parametrize("name", NAMES)
def test_the_full_size_says_how_it_differs_from_the_paper(name):
    outcome = (lambda name: ratios([1.0] * 8)) if name == "lars-table-2" else made_up(lambda cell: 60.0)
    remarks = " ".join(conclude(name, outcome, FULL).remarks)
    assert "in place of ImageNet" in remarks
    assert ("does not print the augmentation" in remarks) == (
        name not in ("lars-table-2", "lars-table-4", "lars-figure-4")
    )


# -- the pieces --------------------------------------------------------------------------------------------------------


def rates(size, network, optimizer, batch):
    return [cell.rate for cell in cells_at(size, network, optimizer, batch)]


def test_both_optimisers_try_the_same_rates_in_the_laboratory_and_the_papers_in_full():
    for batch in batches(LABORATORY, "SGD"):
        assert rates(LABORATORY, "plain", "SGD", batch) == rates(LABORATORY, "normed", "LARS", batch)
    assert rates(FULL, "normed", "LARS", 32768) == [22]
    assert rates(FULL, "plain", "SGD", 8192) == [0.02, 0.03, 0.04, 0.05]
    assert {each["batch"] for each in full_settings("lars-figure-1")} == {512, 8192}
    assert [cell.epochs for cell in table_5_cells(FULL)["plain"]] == [100, 100, 125, 150, 175, 200]
    assert {cell.network for cell in table_6_cells(FULL).values()} == {"inception"}
    assert {each["batch"] for each in full_settings("lars-figure-3")} == {16384, 32768}
    assert len([each for each in full_settings("lars-figure-2") if each["optimizer"] == "LARS"]) == 1
    assert [cell.augment for cell in cells_with(LABORATORY, "extended").values()] == ["extended"] * 3


def test_a_plateau_ends_where_a_rate_loses_too_much():
    assert plateau({1.0: 80.0}, 1.0) == 1.0
    assert plateau({1.0: 80.0, 2.0: 70.0, 4.0: 80.0}, 1.0) == 1.0
    assert plateau({1.0: 79.5, 2.0: 80.0, 4.0: 79.2, 8.0: 78.0}, 1.0) == 4.0
    assert plateau({1.0: CHANCE, 2.0: CHANCE}, 1.0) == 1.0


def test_limits_are_such_that_guessing_meets_none():
    assert 10 < CHANCE < 20
    assert BEHIND_BASELINE < 5


@pytest.mark.parametrize(("epochs", "points"), [(1, 16), (10, 3), (64, 16), (5, 5), (3, 0)])
def test_points_end_with_the_run_and_are_no_more_than_asked(epochs, points):
    found = LargeBatchRun(choice={}, batch=128, rate=0.1, epochs=epochs, points=points).point_epochs
    assert len(found) <= points
    assert all(1 <= epoch <= epochs for epoch in found)
    assert not points or epochs in found
