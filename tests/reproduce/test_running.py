"""Jobs and their outcomes: what is kept is not computed again, and only what is kept by this very job is believed."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from paceline.reproduce.experiment import Experiment, ExperimentPlan, Findings, Job
from paceline.reproduce.running import (
    JOBS,
    ReproductionError,
    outcome_file,
    read_outcome,
    run_experiment,
)
from tests.reproduce.in_process import compute_here

PLAN = ExperimentPlan(size="toy")


def squared(settings):
    return {"square": settings["number"] ** 2}


def busy(settings):
    began = time.process_time()
    while time.process_time() - began < settings["seconds"]:
        pass
    return {}


def failing(settings):
    raise RuntimeError("no figures today")


def refusing(settings):
    raise ValueError("number must be positive (number=-1)")


def diverging(settings):
    return {"loss": float("nan")}


def _jobs(run=squared, numbers=(1, 2, 3)):
    return [Job(name=f"number {number}", run=run, settings={"number": number}) for number in numbers]


def _experiment(jobs, *, timed=False):
    return Experiment(
        name="squares",
        source="nowhere",
        question="?",
        minutes=0.1,
        full_hours=0.1,
        jobs=lambda plan: jobs,
        conclude=lambda plan, outcomes: Findings(tables=(), claims=(), numbers=dict(outcomes)),
        timed=timed,
    )


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder in which all three outcomes are kept, and the names of what is computed from now on."""
    compute_here(monkeypatch)
    run_experiment(_experiment(_jobs()), PLAN, tmp_path)
    return tmp_path, compute_here(monkeypatch)


def test_jobs_run_in_processes_and_their_outcomes_come_by_name(tmp_path):
    heard = []
    findings = run_experiment(
        _experiment(_jobs()), PLAN, tmp_path, processes=1, on_job=lambda *told: heard.append(told)
    )
    assert findings.numbers == {f"number {number}": {"square": number**2} for number in (1, 2, 3)}
    assert sorted(heard) == [(f"number {number}", 1.0, 3.0) for number in (1, 2, 3)]
    assert len(list((tmp_path / JOBS).iterdir())) == 3


def test_a_job_that_fails_names_itself_and_what_was_done_is_kept(tmp_path, monkeypatch):
    jobs = [*_jobs(), *_jobs(failing, [4])]
    jobs[-1] = dataclasses.replace(jobs[-1], seconds=0.1)  # the longest begin first
    with pytest.raises(ReproductionError, match="number 4: RuntimeError: no figures today"):
        run_experiment(_experiment(jobs), PLAN, tmp_path, processes=1)
    again = compute_here(monkeypatch)
    run_experiment(_experiment(jobs[:-1]), PLAN, tmp_path)
    assert again == []


def test_a_setting_that_is_refused_is_told_as_it_is(tmp_path):
    with pytest.raises(ValueError, match=r"^number -1: number must be positive"):
        run_experiment(_experiment(_jobs(refusing, [-1])), PLAN, tmp_path, processes=1)


def test_what_is_kept_is_not_computed_again(kept):
    folder, computed = kept
    findings = run_experiment(_experiment(_jobs()), PLAN, folder)
    assert computed == []
    assert findings.numbers["number 3"] == {"square": 9}


def test_the_processor_time_of_a_job_is_kept_beside_its_outcome(tmp_path, monkeypatch):
    compute_here(monkeypatch)
    job = Job(name="busy", run=busy, settings={"seconds": 0.05})
    run_experiment(_experiment([job]), PLAN, tmp_path)
    held = json.loads(outcome_file(tmp_path, job, {}).read_text(encoding="utf-8"))
    assert 0.05 <= held["processor_seconds"] < 5.0


def test_an_outcome_that_was_kept_without_its_processor_time_is_believed(kept):
    folder, computed = kept
    file = outcome_file(folder, _jobs()[1], {})
    held = json.loads(file.read_text(encoding="utf-8"))
    del held["processor_seconds"]
    file.write_text(json.dumps(held), encoding="utf-8")
    run_experiment(_experiment(_jobs()), PLAN, folder)
    assert computed == []


def test_experiments_share_a_job_whatever_they_call_it(kept):
    folder, computed = kept
    renamed = [dataclasses.replace(job, name=f"again {job.name}", seconds=9.0) for job in _jobs()]
    run_experiment(_experiment(renamed), PLAN, folder)
    assert computed == []


def test_a_run_that_was_interrupted_goes_on(tmp_path, monkeypatch):
    first = compute_here(monkeypatch, most=2)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(_experiment(_jobs()), PLAN, tmp_path)
    rest = compute_here(monkeypatch)
    run_experiment(_experiment(_jobs()), PLAN, tmp_path)
    assert (first, rest) == (["number 1", "number 2"], ["number 3"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"square": 4', '"square": NaN'),
        lambda text: "[1, 2]",
        lambda text: json.dumps(json.loads(text) | {"outcome": 4}),
        lambda text: json.dumps(json.loads(text) | {"paceline": "0.0.1"}),
        lambda text: json.dumps(json.loads(text) | {"function": "os:system"}),
        lambda text: json.dumps(json.loads(text) | {"settings": {"number": 3}}),
        lambda text: json.dumps(json.loads(text) | {"more": 1}),
    ],
    ids=["empty", "cut", "nan", "list", "no figures", "version", "function", "settings", "more"],
)
def test_a_file_that_is_damaged_or_of_something_else_is_computed_anew(kept, damage):
    folder, computed = kept
    file = outcome_file(folder, _jobs()[1], {})
    file.write_text(damage(file.read_text(encoding="utf-8")), encoding="utf-8")
    findings = run_experiment(_experiment(_jobs()), PLAN, folder)
    assert computed == ["number 2"]
    assert findings.numbers["number 2"] == {"square": 4}
    assert read_outcome(folder, _jobs()[1], {}) == {"square": 4}


def test_bytes_that_are_no_text_are_computed_anew(kept):
    folder, computed = kept
    outcome_file(folder, _jobs()[0], {}).write_bytes(b"\xff\xfe\x00")
    run_experiment(_experiment(_jobs()), PLAN, folder)
    assert computed == ["number 1"]


def test_other_settings_another_function_and_other_data_are_other_outcomes(kept):
    folder, computed = kept
    run_experiment(_experiment(_jobs()), PLAN, folder, data={"cifar10": "50000-10000-0badcafe"})
    assert computed == ["number 1", "number 2", "number 3"]
    assert read_outcome(folder, Job(name="number 1", run=failing, settings={"number": 1}), {}) is None
    assert read_outcome(folder, Job(name="number 1", run=squared, settings={"number": 1.5}), {}) is None


def test_two_jobs_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'number 1' comes twice"):
        run_experiment(_experiment(_jobs(numbers=[1, 1])), PLAN, tmp_path)


def test_an_experiment_of_seconds_has_the_machine_for_itself(tmp_path, monkeypatch):
    from paceline.reproduce import running

    asked = []

    def computed(jobs, processes, directory):
        asked.append(processes)
        return ((job, *running.run_timed(job.run, dict(job.settings))) for job in jobs)

    monkeypatch.setattr(running, "computed", computed)
    run_experiment(_experiment(_jobs(), timed=True), PLAN, tmp_path, processes=8)
    run_experiment(_experiment(_jobs(numbers=[7])), PLAN, tmp_path, processes=8)
    assert asked == [1, 8]


def test_an_outcome_that_is_not_finite_is_not_kept_and_its_job_is_named(tmp_path, monkeypatch):
    compute_here(monkeypatch)
    with pytest.raises(ReproductionError, match=r"number 1: its outcome has a figure that is not finite"):
        run_experiment(_experiment(_jobs(diverging, numbers=(1,))), PLAN, tmp_path)
    assert not (tmp_path / JOBS).exists()
