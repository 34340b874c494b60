"""`pruning` compares like with like, keeps what it has, and says what came out; its figures mean nothing here."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import pruning, pruning_tables
from benchmarks.options import Options
from benchmarks.pruning_cases import (
    FEWER_EPOCHS,
    FINE_PRUNING,
    MODELS,
    POLICIES,
    QUICK,
    TRIED,
    WHOLE,
    Ending,
    Size,
    Task,
    pruning_policies,
    size_of,
    tasks_of,
)
from benchmarks.pruning_overhead_sides import POLICIES as MEASURED
from benchmarks.pruning_overhead_sides import Bookkeeping, Case, Epoch, LoaderEpochs, bookkeeping
from benchmarks.pruning_tables import PAPER, Spread, best_of, row_of, rows_of, verdicts
from benchmarks.pruning_training import load, train
from benchmarks.pruning_turns import TurnsPolicy
from paceline.data.pruning import PRUNINGS

INFO_BATCH = "info-batch"


def ending(accuracy: float = 50.0, *, samples: int = 1000, cpu: float = 10.0, wall: float = 20.0, **settings) -> Ending:
    return Ending(
        accuracies=[1.0, accuracy],
        samples=samples,
        steps=samples // 10,
        wall_seconds=wall,
        cpu_seconds=cpu,
        sampling_seconds=0.5,
        settings=settings,
    )


def study(**accuracies: list[float]) -> dict[Task, Ending]:
    """Runs of LeNet: policies with their accuracy for each seed; who prunes sees 700 of 1,000 samples."""
    return {
        Task(model="lenet", policy=policy.replace("_", "-"), seed=seed): dataclasses.replace(
            ending(samples=1000 if policy == WHOLE else 700, cpu=10.0 if policy == WHOLE else 8.0),
            accuracies=[accuracy] * 3,
        )
        for policy, each in accuracies.items()
        for seed, accuracy in enumerate(each)
    }


def made_up(size: Size, task: Task) -> Ending:
    return ending(50.0 + task.seed, **POLICIES[task.policy].settings(size))


# -- what is run -----------------------------------------------------------------------------------------------------


def test_every_policy_of_the_library_is_measured() -> None:
    assert set(pruning_policies()) - {TRIED} == set(PRUNINGS) == set(MEASURED)


def test_the_control_leaves_out_epochs_and_its_rate_falls_at_the_same_shares_of_them() -> None:
    size = Size(epochs=40, fewer=0.25)
    assert POLICIES[FEWER_EPOCHS].epochs(size) == 30
    assert {POLICIES[name].epochs(size) for name in POLICIES if name != FEWER_EPOCHS} == {40}
    for epochs in (30, 40):
        falls = [
            epoch for epoch in range(1, epochs) if size.rate_at(epoch / epochs) < size.rate_at((epoch - 1) / epochs)
        ]
        assert falls == [share * epochs for share in (0.3, 0.6, 0.8)]


@pytest.mark.parametrize("epochs", [10, 30, 40, 50, 60, 100, 200])
def test_fine_pruning_saves_what_it_must_and_hardly_more(epochs) -> None:
    from paceline import FinePruning

    settings = POLICIES[FINE_PRUNING].settings(Size(epochs=epochs))
    pruned = len(FinePruning(1000, batch_size=10, **settings).plan(epochs).pruned_epochs)
    assert 0.15 <= settings["prune"] * pruned / epochs + 1e-9 < 0.15 + 0.01 * pruned / epochs


def test_a_run_sees_what_its_policy_hands_out_and_goes_the_same_way_again() -> None:
    runs = {policy: train(QUICK, Task(model="small-cnn", policy=policy, seed=1)) for policy in POLICIES}
    assert runs[WHOLE].samples == QUICK.images * QUICK.epochs
    assert runs[FEWER_EPOCHS].samples == runs[WHOLE].samples * 0.7
    for policy, found in runs.items():
        assert found.samples == found.steps * QUICK.batch
        assert len(found.accuracies) == POLICIES[policy].epochs(QUICK)
        assert 0 < found.sampling_seconds < found.cpu_seconds
        if policy in pruning_policies():
            assert found.samples < runs[WHOLE].samples
    again = train(QUICK, Task(model="small-cnn", policy=INFO_BATCH, seed=1))
    assert (again.accuracies, again.samples) == (runs[INFO_BATCH].accuracies, runs[INFO_BATCH].samples)


def test_a_rate_that_diverges_is_told() -> None:
    with pytest.raises(ValueError, match="rate"):
        train(dataclasses.replace(QUICK, rate=1e30), Task(model="lenet", policy=WHOLE, seed=0))


def test_data_that_is_not_there_is_told_in_one_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"^cifar10 is not in .*: put .* there, or name another folder in \$PACELINE_DATA$"
    ):
        load(Size())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 0}, r"epochs must be at least 1 \(epochs=0\)"),
        ({"images": 8}, r"images must be at least one batch of 32 \(images=8\)"),
        ({"rate": -1.0}, r"rate must be above 0 and finite \(rate=-1.0\)"),
        ({"fewer": 1.0}, r"fewer must be at least 0 and below 1 \(fewer=1.0\)"),
        ({"seeds": 0}, r"seeds must be at least 1 \(seeds=0\)"),
        ({"jobs": 0}, r"jobs must be at least 1 \(jobs=0\)"),
        ({"policies": "coarse"}, "unknown policy 'coarse'; choose from none, fewer-epochs, "),
        ({"models": "vgg"}, "unknown network 'vgg'; choose from lenet, small-cnn"),
        ({"images": 10_000}, r"images must be at most the 1500 training images of digits \(images=10000\)"),
    ],
)
def test_bad_options_are_refused(given, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        pruning.run(Options(quick=True, out=str(tmp_path), **given))


# -- what is made of it ----------------------------------------------------------------------------------------------


def test_accuracy_is_of_the_last_three_epochs_and_the_papers_of_the_best_three() -> None:
    found = dataclasses.replace(ending(), accuracies=[90.0, 10.0, 20.0, 30.0])
    assert (found.accuracy, found.best_three) == (20.0, pytest.approx(140 / 3))
    assert dataclasses.replace(found, accuracies=[7.0]).accuracy == 7.0


def test_a_policy_is_compared_seed_by_seed_and_over_the_seeds_that_both_have() -> None:
    endings = study(none=[70.0, 80.0, 99.0], info_batch=[69.0, 78.0])
    row = row_of(endings, "lenet", INFO_BATCH)
    assert row is not None
    assert row.seeds == 2
    assert (row.samples_saved, row.cpu_saved) == (pytest.approx(30.0), pytest.approx(20.0))
    assert row.accuracy.mean == 73.5
    assert row.behind == Spread(mean=1.5, deviation=pytest.approx(0.5**0.5))
    whole = row_of(endings, "lenet", WHOLE)
    assert whole is not None
    assert (whole.seeds, whole.samples_saved, whole.behind.mean, whole.behind.deviation) == (3, 0.0, 0.0, 0.0)
    assert row_of(endings, "lenet", FINE_PRUNING) is None
    assert row_of(endings, "small-cnn", INFO_BATCH) is None


def test_time_saved_is_that_of_all_seeds_together() -> None:
    endings = study(none=[70.0, 70.0], info_batch=[70.0, 70.0])
    for task, found in endings.items():
        if task.policy == INFO_BATCH:
            endings[task] = dataclasses.replace(found, wall_seconds=5.0 if task.seed else 25.0)
    row = row_of(endings, "lenet", INFO_BATCH)
    assert row is not None
    assert row.wall_saved == pytest.approx(100 * (1 - 30 / 40))


def test_the_best_policy_holds_the_accuracy_and_is_never_one_that_does_not_prune() -> None:
    endings = study(none=[70.0], fewer_epochs=[75.0], fine_pruning=[69.9], info_batch=[69.0])
    for task, found in endings.items():
        if task.policy == FINE_PRUNING:
            endings[task] = dataclasses.replace(found, samples=850)
    best = best_of(rows_of(endings, "lenet"))
    assert best is not None
    assert best.policy == FINE_PRUNING  # info-batch saves more, at a whole point
    endings |= study(info_batch=[69.8])
    best = best_of(rows_of(endings, "lenet"))
    assert best is not None
    assert best.policy == INFO_BATCH
    assert best_of(rows_of(study(none=[70.0], fewer_epochs=[75.0]), "lenet")) is None


def test_verdicts_are_computed_from_means_and_what_was_not_run_is_a_miss() -> None:
    endings = study(none=[70.0, 72.0], fine_pruning=[69.8, 71.5])
    fine = [(bar.verdict(found), found) for _, bar, found in verdicts(endings, "lenet")[:3]]
    assert fine == [("PASS", pytest.approx(30.0)), ("PASS", pytest.approx(20.0)), ("PASS", pytest.approx(0.35))]
    best = [bar.verdict(found) for _, bar, found in verdicts(endings, "lenet")[3:]]
    assert best == ["PASS", "MISS", "MISS"]  # 30 % of the samples, 20 % of the time, 0.35 points
    assert {bar.verdict(found) for _, bar, found in verdicts(study(none=[70.0]), "lenet")} == {"MISS"}


def test_the_papers_figures_are_those_of_its_text() -> None:
    saved = [figures[0] for figures in PAPER.values()]
    behind = [round(regular - pruned, 2) for _, regular, pruned in PAPER.values()]
    assert (len(PAPER), min(saved), max(saved)) == (10, 7.40, 14.29)
    assert (min(behind), max(behind), behind[0]) == (0.01, 0.43, 0.43)
    for model in MODELS:
        assert pruning_tables.paper_row(model)[0].startswith("the paper, ")


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_a_run_that_is_there_is_not_run_again(tmp_path, monkeypatch, capsys) -> None:
    options, begun = Options(quick=True, out=str(tmp_path)), []

    def stopping(size, task):
        if len(begun) == 3:
            raise KeyboardInterrupt
        begun.append(task)
        return made_up(size, task)

    monkeypatch.setattr(pruning, "train", stopping)
    with pytest.raises(KeyboardInterrupt):
        pruning.run(options)
    monkeypatch.setattr(pruning, "train", lambda size, task: begun.append(task) or made_up(size, task))
    pruning.run(options)
    assert begun == tasks_of(options)
    pruning.run(dataclasses.replace(options, first_seed=1, policies=f"{WHOLE},{INFO_BATCH}", models="lenet"))
    assert [(task.policy, task.seed) for task in begun[len(tasks_of(options)) :]] == [(WHOLE, 1), (INFO_BATCH, 1)]
    (kept,) = json.loads((tmp_path / "pruning.json").read_text(encoding="utf-8"))["studies"]
    assert len(kept["runs"]) == len(begun) == len(set(begun))
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 100
    pruning.run(dataclasses.replace(options, resume=False))
    assert len(begun) == len(kept["runs"]) + len(tasks_of(options))


def test_runs_of_several_sizes_are_kept_side_by_side(tmp_path, monkeypatch) -> None:
    begun = []
    monkeypatch.setattr(pruning, "train", lambda size, task: begun.append(size) or made_up(size, task))
    options = Options(quick=True, out=str(tmp_path), models="lenet", policies=WHOLE)
    longer = dataclasses.replace(options, epochs=20)
    for each in (options, longer, options, longer):
        pruning.run(each)
    assert begun == [size_of(options), size_of(longer)]


def test_a_policy_with_other_settings_is_run_again_and_no_other(tmp_path, monkeypatch) -> None:
    begun = []
    monkeypatch.setattr(pruning, "train", lambda size, task: begun.append(task) or made_up(size, task))
    options = Options(quick=True, out=str(tmp_path))
    pruning.run(options)
    begun.clear()
    pruning.run(dataclasses.replace(options, fewer=0.5))
    assert {task.policy for task in begun} == {FEWER_EPOCHS}


def test_a_file_that_holds_something_else_is_not_written_over(tmp_path) -> None:
    file = tmp_path / "pruning.json"
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no runs of this benchmark"):
        pruning.run(Options(quick=True, out=str(tmp_path)))
    assert file.read_text(encoding="utf-8") == "[]"


# -- overhead --------------------------------------------------------------------------------------------------------


def test_bookkeeping_is_scaled_to_all_samples_and_what_a_plain_loop_pays_is_taken_off() -> None:
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
    both = LoaderEpochs(policy="", workers=0, slow_collate=False, batches=1, ours=[3.0, 1.5], theirs=[1.0, 2.0])
    assert both.ratio == 1.5


@pytest.mark.parametrize("policy", MEASURED)
def test_every_epoch_that_is_measured_is_a_pruned_one(policy) -> None:
    found = bookkeeping(policy, Case(samples=1000, epochs=2))
    assert len(found.epochs) == 2
    assert all(500 <= epoch.handed_out < 900 for epoch in found.epochs)
    assert found.bytes_peak >= found.bytes_before > 0


# -- what was tried ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.6, 0.75])
def test_in_turns_everybody_stays_as_often_as_it_should_and_nobody_waits_long(ratio):
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
