"""`large-batch` is fair, goes on where it was stopped, and says what came out; its figures mean nothing here."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import large_batch
from benchmarks.large_batch_cases import (
    FINAL,
    LINEAR,
    OPTIMIZERS,
    QUICK,
    TUNING,
    TUNING_SEED,
    WITH_LARS,
    WITH_SGD,
    Cell,
    Ending,
    Task,
    best_rate,
    cells_of,
    final_tasks,
    size_of,
    tuning_tasks,
)
from benchmarks.large_batch_tables import tuning_notes, verdicts
from benchmarks.large_batch_training import load, train
from benchmarks.options import Options
from benchmarks.output import save
from paceline.reproduce import large_batch_training

SMALL, LARGE = QUICK.batches


def ending(accuracy: float | None) -> Ending:
    return Ending(accuracy=accuracy, training_loss=accuracy, seconds=0.0)


def made_up(task: Task) -> Ending:
    """LARS is best at the larger rate, SGD at the smaller one."""
    towards = 1 if task.cell.optimizer == WITH_LARS else -1
    return ending(50 + towards * task.rate)


def test_both_optimisers_try_the_same_rates_with_a_seed_that_is_not_reported() -> None:
    tuning = tuning_tasks(QUICK)
    tried = {cell: [task.rate for task in tuning if task.cell == cell] for cell in cells_of(QUICK)}
    assert {cell.optimizer for cell in tried} == set(OPTIMIZERS)
    assert all(rates == list(QUICK.rates) for rates in tried.values())
    finals = final_tasks(QUICK, {task: made_up(task) for task in tuning}, seeds=2)
    assert {task.seed for task in tuning} == {TUNING_SEED}
    assert TUNING_SEED not in {task.seed for task in finals}


def test_final_runs_take_the_best_rate_and_the_rule_scales_that_of_the_smallest_batch() -> None:
    endings = {task: made_up(task) for task in tuning_tasks(QUICK)}
    finals = final_tasks(QUICK, endings, seeds=2)
    rates = {(task.cell.optimizer, task.rate) for task in finals if task.phase == FINAL}
    assert rates == {(WITH_SGD, min(QUICK.rates)), (WITH_LARS, max(QUICK.rates))}
    (linear,) = (task for task in finals if task.phase == LINEAR)
    assert linear.cell == Cell(batch=LARGE, optimizer=WITH_SGD)
    assert linear.rate == pytest.approx(min(QUICK.rates) * LARGE / SMALL)


def test_a_rate_that_diverged_is_never_the_best_and_one_at_the_edge_is_told() -> None:
    size = dataclasses.replace(QUICK, rates=(0.1, 0.2, 0.3))
    inner = {task: ending({0.1: 10.0, 0.2: 20.0}.get(task.rate)) for task in tuning_tasks(size)}
    assert {best_rate(size, inner, cell) for cell in cells_of(size)} == {0.2}
    outer = {task: ending({0.1: 30.0, 0.2: 20.0}.get(task.rate)) for task in tuning_tasks(size)}
    assert not any("edge" in note for note in tuning_notes(size, inner))
    assert sum("edge" in note for note in tuning_notes(size, outer)) == len(cells_of(size))


def test_the_bars_are_held_against_means_over_seeds() -> None:
    means = {(SMALL, WITH_SGD): 90.0, (SMALL, WITH_LARS): 95.0, (LARGE, WITH_SGD): 80.0, (LARGE, WITH_LARS): 89.0}
    endings = {
        Task(phase=FINAL, cell=Cell(batch=batch, optimizer=name), rate=0.1, seed=seed): ending(mean + seed - 1)
        for (batch, name), mean in means.items()
        for seed in range(3)
    }
    assert [(bar.verdict(found), found) for _, bar, found in verdicts(QUICK, endings)] == [("PASS", 1.0), ("PASS", 9.0)]
    lars = Cell(batch=LARGE, optimizer=WITH_LARS)
    endings[Task(phase=FINAL, cell=lars, rate=0.1, seed=3)] = ending(None)
    assert [bar.verdict(found) for _, bar, found in verdicts(QUICK, endings)] == ["MISS", "MISS"]


def test_rates_are_chosen_by_images_that_are_neither_trained_on_nor_reported(monkeypatch) -> None:
    parts = load(QUICK)
    seen = [{image.numpy().tobytes() for image in samples.inputs} for samples in (parts.training, parts.held_out)]
    assert not seen[0] & seen[1]
    measured_on = []
    monkeypatch.setattr(large_batch_training, "accuracy", lambda model, samples: measured_on.append(samples))
    for phase in (TUNING, FINAL, LINEAR):
        train(QUICK, Task(phase=phase, cell=Cell(batch=LARGE, optimizer=WITH_LARS), rate=0.1, seed=0))
    assert [samples is parts.held_out for samples in measured_on] == [True, False, False]
    assert [samples is parts.test for samples in measured_on] == [False, True, True]


def test_a_batch_in_parts_trains_like_the_batch_at_once() -> None:
    task = Task(phase=FINAL, cell=Cell(batch=LARGE, optimizer=WITH_LARS), rate=0.1, seed=0)
    parts, whole = (train(dataclasses.replace(QUICK, part=part, epochs=3), task) for part in (96, LARGE))
    assert parts.training_loss == pytest.approx(whole.training_loss, rel=1e-4)


def test_a_run_that_diverges_ends_without_an_accuracy() -> None:
    task = Task(phase=FINAL, cell=Cell(batch=SMALL, optimizer=WITH_SGD), rate=1e30, seed=0)
    assert train(dataclasses.replace(QUICK, epochs=2), task).accuracy is None


def test_a_command_that_was_stopped_goes_on_where_it_was_even_with_more_rates(tmp_path, monkeypatch, capsys) -> None:
    options, begun = Options(quick=True, out=str(tmp_path)), []
    more = dataclasses.replace(options, rates="0.05,0.1,0.2")

    def stopping(size, task):
        if len(begun) == 5:
            raise KeyboardInterrupt
        begun.append(task)
        return made_up(task)

    monkeypatch.setattr(large_batch, "train", stopping)
    with pytest.raises(KeyboardInterrupt):
        large_batch.run(options)
    monkeypatch.setattr(large_batch, "train", lambda size, task: begun.append(task) or made_up(task))
    large_batch.run(more)
    assert len(begun) == len(set(begun)) == len(tuning_tasks(size_of(more))) + len(cells_of(QUICK)) + 1
    kept = json.loads((tmp_path / "large-batch.json").read_text(encoding="utf-8"))
    assert kept["complete"]
    assert len(kept["runs"]) == len(begun)
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 100
    large_batch.run(more)  # one that was not stopped begins anew
    assert len(begun) == 2 * len(kept["runs"])


def test_runs_of_another_size_are_not_taken_up(tmp_path) -> None:
    options = Options(quick=True, out=str(tmp_path))
    task = tuning_tasks(QUICK)[0]
    save(options, large_batch.NAME, large_batch.document(QUICK, {task: made_up(task)}, complete=False))
    assert large_batch.left_over(options, QUICK) == {task: made_up(task)}
    assert large_batch.left_over(options, dataclasses.replace(QUICK, epochs=9)) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rates": "0.1,-1"}, r"rates must be above 0 and finite \(rates=\(-1.0, 0.1\)\)"),
        ({"epochs": 0}, r"epochs must be at least 1 \(epochs=0\)"),
        ({"batches": "100000"}, r"batches must be between 1 and the 512 images \(batch=100000\)"),
    ],
)
def test_bad_options_are_refused(given, message) -> None:
    with pytest.raises(ValueError, match=message):
        size_of(Options(quick=True, **given))
