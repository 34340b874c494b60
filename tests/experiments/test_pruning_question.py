"""`pruning` compares like with like and says what came out; what its turns and `pruning-bookkeeping` measure."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.core.pages import Told, page
from experiments.core.story import Runs, Size
from experiments.papers.pruning.training import FEWER_EPOCHS, FINE_PRUNING, POLICIES, TRIED, WHOLE, PruningSize
from experiments.papers.pruning.turns import TurnsPolicy
from experiments.questions.pruning import NETWORKS, PAPER, best_of, claims_of, paper_row, row_of, spread_text
from experiments.timings import pruning_overhead
from experiments.timings.pruning_overhead import POLICIES as MEASURED
from experiments.timings.pruning_overhead import (
    Bookkeeping,
    Case,
    Epoch,
    LoaderEpochs,
    bookkeeping,
    loader_epochs,
    made_up_losses,
    one_epoch,
)
from paceline import FinePruning
from paceline.data.pruning import PRUNINGS
from tests.experiments.telling import EXPERIMENTS, TOY, conclude

INFO_BATCH = "info-batch"
PRUNING = {name for name, policy in POLICIES.items() if policy.sampler}


def outcome(accuracy, *, samples=1000, cpu=10.0, wall=20.0):
    return {
        "accuracies": [1.0, accuracy],
        "samples": samples,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "sampling_seconds": 0.5,
        "best_three": accuracy,
        "last_three": accuracy,
    }


def study(**accuracies):
    """Runs of LeNet: policies with their accuracy for each seed; who prunes sees 700 of 1,000 samples."""
    runs = Runs()
    for name, each in accuracies.items():
        share = {} if name == WHOLE else {"samples": 700, "cpu": 8.0}
        runs["lenet", name.replace("_", "-")] = [outcome(accuracy, **share) for accuracy in each]
    return runs


def rows_of(runs):
    return [row_of(runs, model, policy) for model, policy in runs]


# -- what is run -------------------------------------------------------------------------------------------------------


def test_every_policy_of_the_library_is_measured():
    assert PRUNING - {TRIED} == set(PRUNINGS) == set(MEASURED)


def test_the_control_leaves_out_epochs_and_its_rate_falls_at_the_same_shares_of_them():
    size = PruningSize(epochs=40, fewer=0.25)
    assert POLICIES[FEWER_EPOCHS].epochs(size) == 30
    assert {POLICIES[name].epochs(size) for name in POLICIES if name != FEWER_EPOCHS} == {40}
    for epochs in (30, 40):
        falls = [
            epoch for epoch in range(1, epochs) if size.rate_at(epoch / epochs) < size.rate_at((epoch - 1) / epochs)
        ]
        assert falls == [share * epochs for share in (0.3, 0.6, 0.8)]


def test_policies_that_are_asked_for_are_set_beside_none():
    experiment = EXPERIMENTS["pruning"]
    chosen = experiment.with_settings({"models": "lenet", "policies": "info-batch, take-turns"})
    assert list(experiment.jobs(TOY, **chosen)) == [("lenet", policy) for policy in (WHOLE, INFO_BATCH, TRIED)]
    assert list(experiment.jobs(TOY, models=(), policies=())) == [(m, p) for m in NETWORKS for p in POLICIES]


def test_a_toy_takes_settings_that_are_given_and_else_its_own():
    def size_of(**settings):
        return EXPERIMENTS["pruning"].jobs(TOY, **settings)["lenet", WHOLE].of(200)["size"]

    assert (size_of()["data"], size_of()["epochs"]) == ("digits", 10)
    assert (size_of(epochs=3)["data"], size_of(epochs=3)["epochs"]) == ("digits", 3)


def test_another_share_of_epochs_makes_other_runs_of_the_control_and_of_no_other():
    usual, other = (EXPERIMENTS["pruning"].jobs(Size(), fewer=fewer) for fewer in (0.3, 0.5))
    assert {policy for (model, policy) in usual if usual[model, policy].of(0) != other[model, policy].of(0)} == {
        FEWER_EPOCHS
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 0}, r"epochs must be at least 1 \(epochs=0\)"),
        ({"images": 8}, r"images must be at least one batch of 32 \(images=8\)"),
        ({"shrink": 0}, r"shrink must be at least 1 pixel \(shrink=0\)"),
        ({"rate": -1.0}, r"rate must be above 0 and finite \(rate=-1.0\)"),
        ({"fewer": 1.0}, r"fewer must be at least 0 and below 1 \(fewer=1.0\)"),
        ({"policies": ("coarse",)}, "unknown policy 'coarse'; choose from none, fewer-epochs, "),
        ({"models": ("vgg",)}, "unknown network 'vgg'; choose from lenet, pooled-cnn"),
    ],
)
def test_bad_settings_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        EXPERIMENTS["pruning"].jobs(TOY, **given)


# -- what is made of it ------------------------------------------------------------------------------------------------


def test_a_policy_is_compared_seed_by_seed():
    runs = study(none=[70.0, 80.0], info_batch=[69.0, 78.0])
    row = row_of(runs, "lenet", INFO_BATCH)
    assert (row.samples_saved, row.cpu_saved) == (pytest.approx(30.0), pytest.approx(20.0))
    assert (row.accuracy, row.behind) == ([69.0, 78.0], [1.0, 2.0])
    assert spread_text(row.behind, "+.2f") == "+1.50 ±0.71"
    assert row.sampling_ms == 250.0
    whole = row_of(runs, "lenet", WHOLE)
    assert (whole.samples_saved, whole.behind) == (0.0, [0.0, 0.0])


def test_time_saved_is_that_of_all_seeds_together():
    runs = study(none=[70.0, 70.0], info_batch=[70.0, 70.0])
    for one, seconds in zip(runs["lenet", INFO_BATCH], (25.0, 5.0), strict=True):
        one["wall_seconds"] = seconds
    assert row_of(runs, "lenet", INFO_BATCH).wall_saved == pytest.approx(100 * (1 - 30 / 40))


def test_the_best_policy_holds_the_accuracy_and_is_never_one_that_does_not_prune():
    runs = study(none=[70.0], fewer_epochs=[75.0], fine_pruning=[69.9], info_batch=[69.0])
    runs["lenet", FINE_PRUNING][0]["samples"] = 850
    assert best_of(rows_of(runs)).policy == FINE_PRUNING  # info-batch saves more, at a whole point
    runs |= study(info_batch=[69.8])
    assert best_of(rows_of(runs)).policy == INFO_BATCH
    assert best_of(rows_of(study(none=[70.0], fewer_epochs=[75.0]))) is None


def test_claims_are_of_means_and_what_was_not_run_is_a_miss():
    found = claims_of("lenet", rows_of(study(none=[70.0, 72.0], fine_pruning=[69.8, 71.5])))
    assert [each.because.split(" is ")[0] for each in found[:3]] == ["30.0 %", "20.0 %", "+0.35"]
    assert [each.holds for each in found[:3]] == [True, True, True]
    assert [each.holds for each in found[3:]] == [True, False, False]  # 30 % of the samples, 20 % of the time, 0.35
    assert {each.kind for each in found} == {"bar"}
    assert {each.holds for each in claims_of("lenet", rows_of(study(none=[70.0])))} == {False}


def test_a_run_that_diverged_wins_nothing_and_is_told():
    figures = [name for name in outcome(70.0) if name != "accuracies"]

    def of(cell):
        lost = {"accuracies": [], **dict.fromkeys(figures)}
        return lost if cell[1] in (FINE_PRUNING, INFO_BATCH) else outcome(70.0, samples=700)

    found = conclude("pruning", of)
    assert not any(each.holds for each in found.claims if FINE_PRUNING in each.text)
    assert {each.text.split(", ")[1].split(":")[0] for each in found.claims} == {FINE_PRUNING, "best (take-turns)"}
    assert found.remarks[0].startswith("Diverged: lenet fine-pruning, lenet info-batch, pooled-cnn fine-pruning, ")
    assert page([Told(experiment=EXPERIMENTS["pruning"], size=TOY, findings=found)])


def test_runs_are_told_whole():
    found = conclude("pruning", lambda cell: outcome(70.0))
    assert len(found.numbers["runs"]) == len(NETWORKS) * len(POLICIES)
    assert found.numbers["runs"][0] == {"model": "lenet", "policy": WHOLE, "seed": 200, **outcome(70.0)}
    assert found.numbers["size"]["epochs"] == 10


def test_the_papers_figures_are_those_of_its_text():
    saved = [figures[0] for figures in PAPER.values()]
    behind = [round(regular - pruned, 2) for _, regular, pruned in PAPER.values()]
    assert (len(PAPER), min(saved), max(saved)) == (10, 7.40, 14.29)
    assert (min(behind), max(behind), behind[0]) == (0.01, 0.43, 0.43)
    for model in NETWORKS:
        assert paper_row(model)[0].startswith("the paper, ")


# -- bookkeeping -------------------------------------------------------------------------------------------------------


def test_bookkeeping_is_scaled_to_all_samples_and_what_a_plain_loop_pays_is_taken_off():
    found = Bookkeeping(
        policy=INFO_BATCH,
        case=Case(samples=100, epochs=2),
        epochs=[
            Epoch(decide_seconds=1.0, rest_seconds=4.0, handed_out=50),
            Epoch(decide_seconds=1.0, rest_seconds=5.0, handed_out=100),
        ],
        mean_seconds=2.0,
        bytes_before=1,
        bytes_peak=2,
        peak_by="",
    )
    assert found.best is found.epochs[1]  # the other hands out half as many in nearly as long
    assert (found.all_seconds, found.own_seconds) == (6.0, 4.0)


def test_the_best_epoch_of_a_loader_is_beside_torch_s_best():
    both = LoaderEpochs(policy="", workers=0, slow_collate=False, batches=1, ours=[3.0, 1.5], theirs=[1.0, 2.0])
    assert both.ratio == 1.5


@pytest.mark.parametrize("policy", MEASURED)
def test_every_epoch_that_is_measured_is_a_pruned_one(policy):
    found = bookkeeping(policy, Case(samples=1000, epochs=2))
    assert len(found.epochs) == 2
    assert all(500 <= epoch.handed_out < 900 for epoch in found.epochs)
    assert found.bytes_peak >= found.bytes_before > 0


@pytest.mark.parametrize("samples", [129, 257])
def test_an_epoch_whose_last_sample_joins_the_batch_before_it_is_measured(samples):
    """Else a policy that draws how many sit out would end the measurement now and then."""
    found = one_epoch(FinePruning(samples, batch_size=128, prune=0.0), made_up_losses(samples))
    assert found.handed_out == samples


def test_the_two_loaders_take_turns_and_which_is_first_changes(monkeypatch):
    taken, measured = [], pruning_overhead.one_loader_epoch

    def one(loader, losses, observe):
        taken.append("theirs" if observe is torch.mean else "ours")
        return measured(loader, losses, observe)

    monkeypatch.setattr(pruning_overhead, "one_loader_epoch", one)
    found = loader_epochs(INFO_BATCH, samples=1000, workers=0, slow_collate=False, turns=3)
    assert taken == ["ours", "ours", "theirs", *("theirs", "ours"), *("ours", "theirs"), *("theirs", "ours")]
    assert len(found.ours) == len(found.theirs) == 3


def test_the_many_samples_are_those_whose_memory_is_judged_and_each_bar_has_its_claim(monkeypatch):
    def made_up(policy, case):
        epoch = Epoch(decide_seconds=0.0, rest_seconds=1.0, handed_out=case.samples)
        own = {"mean_seconds": 0.98, "bytes_before": 0, "bytes_peak": case.samples * 100_000, "peak_by": "hand"}
        return Bookkeeping(policy=policy, case=case, epochs=[epoch], **own)

    def loaders(policy, *, samples, workers, slow_collate, turns):
        times = {"ours": [1.0] * turns, "theirs": [0.9] * turns}
        return LoaderEpochs(policy=policy, workers=workers, slow_collate=slow_collate, batches=1, **times)

    monkeypatch.setattr(pruning_overhead, "bookkeeping", made_up)
    monkeypatch.setattr(pruning_overhead, "loader_epochs", loaders)
    steps = []
    found = EXPERIMENTS["pruning-bookkeeping"].tell(TOY, lambda jobs: Runs(), on_step=steps.append)
    assert len(steps) == steps[0].total == 8
    held = {each.text: each.holds for each in found.claims}
    assert [held[f"{policy}, bookkeeping of 2,000 samples"] for policy in MEASURED] == [False, False]  # 20 ms of 15
    assert [held[f"{policy}, bookkeeping of 4,000 samples"] for policy in MEASURED] == [True, True]  # of 2,000
    assert [text for text in held if "memory" in text] == [f"{each}, memory for 4,000 samples" for each in MEASURED]
    assert sum("loader" in text for text in held) == 4
    assert len(found.numbers["loaders"]) == len(found.numbers["bookkeeping"]) == 4


def test_loaders_that_take_no_turn_are_refused():
    with pytest.raises(ValueError, match=r"repeat must be at least 1 \(repeat=0\)"):
        EXPERIMENTS["pruning-bookkeeping"].jobs(TOY, repeat=0)


# -- what was tried ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.6, 0.75])
def test_in_turns_every_sample_stays_as_often_as_it_should_and_none_waits_long(ratio):
    policy, epochs = TurnsPolicy(50, ratio=ratio, seed=3), 40
    stays = np.stack([policy.draw_kept(epoch) for epoch in range(1, epochs + 1)])
    assert np.abs(stays.sum(0) - epochs * (1 - ratio)).max() <= 1.001  # by lot it would be several
    longest = np.ceil(1 / (1 - ratio)) - 1
    for sample in range(50):
        gaps = np.diff(np.flatnonzero(stays[:, sample])) - 1
        assert gaps.max() <= longest


def test_whose_turn_it_is_depends_on_the_seed_and_in_every_epoch_some_are_out():
    first, second = (TurnsPolicy(50, seed=seed).draw_kept(5) for seed in (0, 1))
    assert not np.array_equal(first, second)
    assert 0.2 < first.mean() < 0.6
