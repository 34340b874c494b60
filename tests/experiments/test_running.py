"""Jobs and their outcomes: what is kept is not computed again, and only what is kept by this very job is believed."""

from __future__ import annotations

import importlib
import json
import sys
import time
from itertools import product

import pytest

from experiments.__main__ import main
from experiments.core import running
from experiments.core.running import (
    JOBS,
    ExperimentError,
    file_name,
    fingerprint,
    identity,
    read_outcome,
    run_experiment,
)
from experiments.core.story import EXPERIMENTS, Experiment, Job, Numbers, Size, Step
from paceline.data import load_dataset
from tests.experiments.telling import TOY, compute_here


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
    return {"loss": float("nan"), "curve": [1.0, float("inf")]}


def _jobs(run=squared, numbers=(1, 2, 3)):
    return {f"number {number}": Job(run, {"number": number}) for number in numbers}


def _experiment(jobs, *, timed=False, name="squares"):
    def story(size):
        runs = yield jobs
        yield Numbers({key: outcomes[0] for key, outcomes in runs.items()})

    return Experiment(name=name, question="?", minutes=0.1, story=story, timed=timed)


def _known(number, run=squared, data=None):
    return identity(run, {"number": number}, data or {})


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder in which all three outcomes are kept, and the names of what is computed from now on."""
    compute_here(monkeypatch)
    run_experiment(_experiment(_jobs()), TOY, tmp_path)
    return tmp_path, compute_here(monkeypatch)


def test_jobs_run_in_processes_and_their_outcomes_come_by_key(tmp_path):
    heard = []
    findings = run_experiment(_experiment(_jobs()), TOY, tmp_path, processes=1, on_job=lambda *told: heard.append(told))
    assert findings.numbers == {f"number {number}": {"square": number**2} for number in (1, 2, 3)}
    assert sorted(heard) == [(f"number {number}", 1.0, 3.0) for number in (1, 2, 3)]
    assert len(list((tmp_path / JOBS).iterdir())) == 3


def test_a_job_that_fails_names_itself_and_what_was_done_is_kept(tmp_path, monkeypatch):
    last = {"number 4": Job(failing, {"number": 4}, 0.1)}  # the longest begin first
    with pytest.raises(ExperimentError, match="number 4: RuntimeError: no figures today"):
        run_experiment(_experiment(_jobs() | last), TOY, tmp_path, processes=1)
    again = compute_here(monkeypatch)
    run_experiment(_experiment(_jobs()), TOY, tmp_path)
    assert again == []


def test_a_setting_that_is_refused_is_told_as_it_is(tmp_path):
    with pytest.raises(ValueError, match=r"^number -1: number must be positive"):
        run_experiment(_experiment(_jobs(refusing, [-1])), TOY, tmp_path, processes=1)


def test_what_is_kept_is_not_computed_again(kept):
    folder, computed = kept
    findings = run_experiment(_experiment(_jobs()), TOY, folder)
    assert computed == []
    assert findings.numbers["number 3"] == {"square": 9}


def test_the_processor_time_of_a_job_is_kept_beside_its_outcome(tmp_path, monkeypatch):
    compute_here(monkeypatch)
    run_experiment(_experiment({"busy": Job(busy, {"seconds": 0.05})}), TOY, tmp_path)
    known = identity(busy, {"seconds": 0.05}, {})
    held = json.loads((tmp_path / JOBS / file_name(known)).read_text(encoding="utf-8"))
    assert 0.05 <= held["processor_seconds"] < 5.0


def test_equal_jobs_are_one_whatever_they_are_called(kept):
    folder, computed = kept
    twice = {(place, key): job for place in "ab" for key, job in _jobs(numbers=(3, 4)).items()}
    findings = run_experiment(_experiment(twice), TOY, folder)
    assert computed == ["a number 4"]
    assert findings.numbers == {str(key): {"square": job.of(0)["number"] ** 2} for key, job in twice.items()}


def test_a_job_with_a_seed_is_computed_with_each_and_one_without_once(tmp_path, monkeypatch):
    computed = compute_here(monkeypatch)
    jobs = {"seeded": Job(squared, lambda seed: {"number": seed}), "plain": Job(squared, {"number": 5})}

    def story(size):
        runs = yield jobs
        assert runs.each("square") == {"seeded": [9.0, 16.0], "plain": [25.0, 25.0]}
        assert runs.mean("square")["seeded"] == 12.5
        yield Numbers({"told": True})

    told = Experiment(name="seeds", question="?", minutes=0.1, story=story)
    assert run_experiment(told, Size("toy", (3, 4)), tmp_path).numbers == {"told": True}
    assert computed == ["seeded, seed 3", "seeded, seed 4", "plain, seed 3"]


def test_a_story_may_yield_jobs_that_depend_on_the_first(tmp_path, monkeypatch):
    computed = compute_here(monkeypatch)

    def story(size):
        first = yield _jobs(numbers=(1, 2))
        best = max(first, key=first.mean("square").__getitem__)
        then = yield {best: Job(squared, {"number": 10})}
        yield Numbers({key: outcomes[0]["square"] for key, outcomes in then.items()})

    told = Experiment(name="twice", question="?", minutes=0.1, story=story)
    assert run_experiment(told, TOY, tmp_path).numbers == {"number 2": 100}
    assert computed == ["number 1", "number 2", "number 2"]


def test_a_timing_says_what_it_measures_and_keeps_nothing(tmp_path):
    heard = []

    def story(size, *, lanes=("a", "b")):
        for lane in lanes:
            yield Step(lane, len(lanes))
        yield Numbers({"lanes": len(lanes)})

    told = Experiment(name="timing", question="?", minutes=0.1, story=story)
    asked = {"lanes": ("b",)}
    found = run_experiment(told, TOY, tmp_path, on_step=lambda step: heard.append(step.label), settings=asked)
    assert (heard, found.numbers) == (["b"], {"lanes": 1})
    assert not (tmp_path / JOBS).exists()


def test_a_run_that_was_interrupted_goes_on(tmp_path, monkeypatch):
    first = compute_here(monkeypatch, most=2)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(_experiment(_jobs()), TOY, tmp_path)
    rest = compute_here(monkeypatch)
    run_experiment(_experiment(_jobs()), TOY, tmp_path)
    assert (first, rest) == (["number 1", "number 2"], ["number 3"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"square": 4', '"square": NaN'),
        lambda text: "[1, 2]",
        lambda text: json.dumps(json.loads(text) | {"outcome": 4}),
        lambda text: json.dumps(json.loads(text) | {"torch": "0.0.1"}),
        lambda text: json.dumps(json.loads(text) | {"source": "0" * 32}),
        lambda text: json.dumps(json.loads(text) | {"function": "os:system"}),
        lambda text: json.dumps(json.loads(text) | {"settings": {"number": 3}}),
        lambda text: json.dumps(json.loads(text) | {"more": 1}),
    ],
    ids=["empty", "cut", "nan", "list", "no figures", "version", "source", "function", "settings", "more"],
)
def test_a_file_that_is_damaged_or_of_something_else_is_computed_anew(kept, damage):
    folder, computed = kept
    file = folder / JOBS / file_name(_known(2))
    file.write_text(damage(file.read_text(encoding="utf-8")), encoding="utf-8")
    findings = run_experiment(_experiment(_jobs()), TOY, folder)
    assert computed == ["number 2"]
    assert findings.numbers["number 2"] == {"square": 4}
    assert read_outcome(folder, _known(2)) == {"square": 4}


def test_bytes_that_are_no_text_are_computed_anew(kept):
    folder, computed = kept
    (folder / JOBS / file_name(_known(1))).write_bytes(b"\xff\xfe\x00")
    run_experiment(_experiment(_jobs()), TOY, folder)
    assert computed == ["number 1"]


def test_other_settings_another_function_and_other_data_are_other_outcomes(kept):
    folder, computed = kept
    run_experiment(_experiment(_jobs()), TOY, folder, data={"cifar10": "50000-10000-0badcafe"})
    assert computed == ["number 1", "number 2", "number 3"]
    assert read_outcome(folder, _known(1, run=failing)) is None
    assert read_outcome(folder, _known(1.5)) is None


def test_changed_code_is_not_shown_with_the_figures_of_the_code_before(tmp_path, monkeypatch):
    """A function that was changed to return another figure must not come back with the old one."""
    monkeypatch.syspath_prepend(tmp_path)
    compute_here(monkeypatch)
    file = tmp_path / "changing_job.py"
    figures = []
    for factor in (1, 100):
        file.write_text(f"def run(settings):\n    return {{'figure': {factor} * settings['number']}}\n")
        sys.modules.pop("changing_job", None)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        running._sum_of.cache_clear()  # as in the process of another day
        job = Job(importlib.import_module("changing_job").run, {"number": 7})
        figures.append(run_experiment(_experiment({"a": job}), TOY, tmp_path / "out").numbers["a"]["figure"])
    sys.modules.pop("changing_job", None)
    assert figures == [7, 700]


def test_a_data_set_is_known_by_all_of_it():
    digits = load_dataset("digits")
    before = fingerprint(digits)
    for part, of in product((digits.train, digits.test), ("inputs", "targets")):
        last = getattr(part, of)
        kept = last[-1].clone()
        last[-1] = last[-1] + 1
        assert fingerprint(digits) != before
        last[-1] = kept
    assert fingerprint(digits) == before


def test_an_experiment_of_seconds_has_the_machine_for_itself(tmp_path, monkeypatch):
    asked = []

    def computed(jobs, processes, directory):
        asked.append(processes)
        return ((each, *running.run_timed(each[1].run, dict(each[2]))) for each in jobs)

    monkeypatch.setattr(running, "computed", computed)
    run_experiment(_experiment(_jobs(), timed=True), TOY, tmp_path, processes=8)
    run_experiment(_experiment(_jobs(numbers=[7])), TOY, tmp_path, processes=8)
    assert asked == [1, 8]


def test_a_run_that_diverged_has_no_figures_and_ends_nothing(tmp_path, monkeypatch):
    compute_here(monkeypatch)
    findings = run_experiment(_experiment(_jobs(diverging, numbers=(1,))), TOY, tmp_path)
    assert findings.numbers == {"number 1": {"loss": None, "curve": [1.0, None]}}


@pytest.fixture
def listed(monkeypatch):
    """Two experiments in the list, of which the first fails."""

    def breach(size):
        yield Step("something", 1)
        raise ExperimentError("a payload was taken")

    def fine(size):
        yield "nothing was asked"

    for name, story in (("breach", breach), ("fine", fine)):
        story.__module__ = "experiments.questions.made_up"
        monkeypatch.setitem(EXPERIMENTS, name, Experiment(name=name, question="?", minutes=0.1, story=story))


def test_what_fails_does_not_keep_the_others_from_running_and_fails_at_the_end(listed, tmp_path, capsys):
    assert main(["breach", "fine", "--toy", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "breach failed: a payload was taken" in told.err
    assert "failed: breach" in told.err.splitlines()[-1]
    assert json.loads((tmp_path / "fine" / "results.json").read_text(encoding="utf-8"))["experiment"] == "fine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lgc-33"], "unknown experiment 'lgc-33'; did you mean 'lgc-3'"),
        (["lgc-3", "--seeds", "1000"], "--seeds must be between 1 and 100 (seeds=1000)"),
        (["lgc-3", "--of", "timings"], "unknown experiment 'lgc-3'"),
        (["--of", "paper"], "unknown room 'paper'"),
        (["lgc-3", "--toy", "--full"], "give one of them"),
        (["lgc-3", "--toy", "--set", "rounds=3"], "lgc-3 has no setting 'rounds'; it has none"),
        (["lgc-3", "--toy", "--set", "rounds"], "--set takes NAME=VALUE (set='rounds')"),
    ],
)
def test_what_cannot_be_asked_for_is_told_in_a_line(arguments, words, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert words in told
    assert len(told.splitlines()) == 1
