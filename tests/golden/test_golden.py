"""What the last release has written still resumes, replays and prints as it did; tests/golden/README.md says how."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.cli import main
from paceline.renaming import with_new_names
from paceline.runs.cluster import WorkerOptions
from tests import warm
from tests.golden import states
from tests.golden.machine import AnyFingerprint, kind_of_machine

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent
ROOT = GOLDEN.parents[1]
MODEL = "tests.golden.network:tiny"
SAME_MACHINE = json.loads((GOLDEN / "machine.json").read_text()) == kind_of_machine()
ALL_TAKEN = ("not those of its checkpoint", "the final weights differ")  # every step was, and the last bits differ
NEARLY = 1e-4  # of the weights' length, where roundings differ
ENDS_WITHIN_SECONDS = 120


@pytest.fixture
def golden(tmp_path):
    """Return a function that copies a golden folder to where a test may change it."""

    def copied(name):
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copied


def same(found, expected):
    """Hold tensors or numbers against the golden ones: bits on the same kind of machine, else within 1e-4."""
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    assert found.shape == expected.shape
    if SAME_MACHINE or not expected.dtype.is_floating_point:
        assert torch.equal(found, expected)
    else:
        apart = torch.linalg.vector_norm((found - expected).double())
        assert apart <= NEARLY * torch.linalg.vector_norm(expected.double())


def run_paceline(*arguments, cwd):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    settings = {"cwd": cwd, "env": environment, "capture_output": True, "text": True}
    done = warm.run(command, nursing=True, timeout=ENDS_WITHIN_SECONDS, **settings)
    assert done.returncode == 0, done.stderr
    return done


def replayed(folder):
    """Replay a run whatever its bits, and return the weights that it ends with."""
    found = []
    verdict = paceline.replay(
        folder,
        WorkerOptions(model=MODEL),
        on_end=lambda batches, training, module: found.append(states.weights(module)),
    )
    return verdict, found[0]


def check_replay(folder, monkeypatch):
    """The replay makes every decision of the run and ends with its weights."""
    with monkeypatch.context() as patched:
        if not SAME_MACHINE:
            patched.setattr("paceline.drivers.replayed.served_run.fingerprint", AnyFingerprint)
        verdict, weights = replayed(folder)
    if SAME_MACHINE:
        assert verdict.identical, verdict.difference
    else:
        assert verdict.difference is None or any(words in verdict.difference for words in ALL_TAKEN), verdict.difference
    return weights


def newest(folder):
    return max(folder.glob("checkpoint-*[0-9]"))


# -- runs with a server -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["served", "served-stopped"])
def test_a_served_run_replays_with_every_decision_of_lgc_qsgd_lars_and_fine_pruning(name, golden, monkeypatch):
    folder = golden(name)
    weights = check_replay(folder, monkeypatch)
    same(weights, load_file(newest(folder) / "tensors.safetensors")["parameters"])


def test_k_is_chosen_again_as_it_was_for_work_that_was_scaled(golden, monkeypatch):
    folder = golden("auto")
    weights = check_replay(folder, monkeypatch)
    same(weights, load_file(newest(folder) / "tensors.safetensors")["parameters"])


def test_a_run_that_scaled_partial_work_goes_on_scaling_it(golden, tmp_path, monkeypatch):
    folder = golden("auto")
    shutil.rmtree(newest(folder))  # it was killed before it was written
    (folder / "results.json").unlink()
    run_paceline("train", "--resume", folder, "--model", MODEL, cwd=tmp_path)
    recipe = json.loads((newest(folder) / "state.json").read_text())["recipe"]
    assert recipe["strategy"]["scale_partial"] is True
    check_replay(folder, monkeypatch)


def test_a_stopped_served_run_goes_on_to_its_end_and_replays(golden, tmp_path, monkeypatch):
    folder = golden("served-stopped")
    before = (folder / "trace.jsonl").read_text()
    told = run_paceline("train", "--resume", folder, "--model", MODEL, cwd=tmp_path).stderr
    assert "goes on from checkpoint 32" in told
    assert (folder / "trace.jsonl").read_text().startswith(before)
    (result,) = json.loads((folder / "results.json").read_text())["results"]
    assert (result["rounds"], result["used"]) == (54, 108)
    check_replay(folder, monkeypatch)


# -- runs of ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hpsgd", "diloco"])
def test_ranks_replay(name, golden, monkeypatch):
    check_replay(golden(name), monkeypatch)


def without_newest(folder):
    """Take the newest checkpoint of every rank away: the run was killed before it was written."""
    for rank in folder.glob("rank-*"):
        shutil.rmtree(newest(rank))
    (folder / "results.json").unlink()


def test_ranks_go_on_from_a_checkpoint_and_replay(golden, tmp_path, monkeypatch):
    folder = golden("hpsgd")
    without_newest(folder)
    run_paceline("train", "--resume", folder, "--model", MODEL, cwd=tmp_path)
    (result,) = json.loads((folder / "results.json").read_text())["results"]
    assert result["rounds"] >= 30
    check_replay(folder, monkeypatch)


def test_a_pipeline_goes_on_from_a_checkpoint_to_the_same_weights(golden, tmp_path):
    folder = golden("pipeline")
    without_newest(folder)
    run_paceline("train", "--resume", folder, "--model", MODEL, cwd=tmp_path)
    assert (folder / "plan.json").read_bytes() == (GOLDEN / "pipeline/plan.json").read_bytes()
    for rank in ("rank-0", "rank-1"):
        expected = load_file(newest(GOLDEN / "pipeline" / rank) / "tensors.safetensors")
        found = load_file(newest(folder / rank) / "tensors.safetensors")
        manifests = [
            json.loads((newest(place / rank) / "manifest.json").read_text()) for place in (GOLDEN / "pipeline", folder)
        ]
        assert manifests[0].keys() == manifests[1].keys()
        assert len(found) == len(expected)
        for name, tensor in expected.items():
            if tensor.dtype == torch.float32:  # the others are times
                same(found[name], tensor)


# -- states -------------------------------------------------------------------------------------------------------


def saved(name):
    found = torch.load(GOLDEN / "saved" / f"{name}.pt", weights_only=True)
    return found["state"], found["after"]


@pytest.mark.parametrize("name", states.LARS_SETTINGS)
def test_lars_goes_on_from_its_state(name):
    state, after = saved(name)
    same(states.lars_after(name, state), after)


@pytest.mark.parametrize("moment", ["between", "middle"])
@pytest.mark.parametrize("name", states.SAMPLERS)
@pytest.mark.filterwarnings("ignore:the 12 epochs are over")
def test_a_sampler_goes_on_from_its_state_with_the_same_batches(name, moment):
    state, after = saved(name)
    found = states.sampler_after(name, state[moment])
    assert [batch for batch, _ in found] == [batch for batch, _ in after[moment]]
    same([mean for _, mean in found], [mean for _, mean in after[moment]])


def test_ranks_go_on_from_the_state_of_their_averaging(tmp_path):
    settings = {"cwd": ROOT, "stderr": -1, "text": True}
    ranks = [
        warm.Popen(states.rank_command(GOLDEN / "saved", rank, tmp_path), **settings) for rank in range(states.RANKS)
    ]
    try:
        for process in ranks:
            errors = process.communicate(timeout=ENDS_WITHIN_SECONDS)[1]
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    for name in states.AVERAGERS:
        for rank in range(states.RANKS):
            same(torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True), saved(f"{name}-{rank}")[1])


# -- what is printed ----------------------------------------------------------------------------------------------


def rows(text):
    """Return each strategy's cells: name, rounds, time, saved, to target, loss, accuracy, used, late, dropped."""
    found = [line.replace(" %", "%").split() for line in text.splitlines()]
    return [row for row in found if len(row) == 10 and row[0] in ("full", "fastest-k", "lgc", "async")]


def test_the_table_of_a_race_is_the_same_to_the_digit(tmp_path, capsys):
    """Times and counts on every machine; losses, and what follows from them, where roundings are the same."""
    assert main(["race", "--out", str(tmp_path / "race")]) == 0
    found, expected = capsys.readouterr().out, (GOLDEN / "printed/race.txt").read_text()
    if SAME_MACHINE:
        assert found == expected
    assert len(rows(found)) == 4
    for row, wanted in zip(rows(found), rows(expected), strict=True):
        assert (*row[:4], *row[7:]) == (*wanted[:4], *wanted[7:])
        assert float(row[5]) == pytest.approx(float(wanted[5]), abs=2e-3)
        assert float(row[6][:-1]) == pytest.approx(float(wanted[6][:-1]), abs=1.0)


@pytest.mark.parametrize("strategy", ["lgc", "hpsgd"])
def test_a_simulated_run_prints_what_it_printed(strategy, tmp_path, capsys):
    settings = {
        "strategy": strategy,
        "rounds": 30,
        "evaluate-every": 10,
        "workers": 4,
        "k": 3,
        "evaluation-samples": 300,
    }
    given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    assert main(["simulate", *given, "--json", "--out", str(tmp_path / "run")]) == 0
    found, expected = (
        json.loads(capsys.readouterr().out),
        json.loads((GOLDEN / f"printed/simulate-{strategy}.json").read_text()),
    )
    assert expected["recipe"]["strategy"].pop("scale_partial") is True  # the default then, of late work that was whole
    check_holds(found["recipe"], with_new_names(expected["recipe"]))
    (result,), (wanted,) = found["results"], expected["results"]
    for name, value in wanted.items():
        if name == "seconds":  # a sum of delays; their logarithm is our own, no longer the C library's
            assert result[name] == pytest.approx(value, rel=1e-12)
        elif name in ("loss", "accuracy"):
            assert result[name] == (value if SAME_MACHINE else pytest.approx(value, rel=1e-3))
        elif name == "sent_bytes" and strategy == "hpsgd":  # once the size of a message, now what a ring makes of it
            assert result[name] == 2 * (4 - 1) / 4 * value
        else:
            assert result[name] == value, name


def check_holds(found, expected, at=""):
    """All that the golden document says is in the new one, which may say more."""
    for name, value in expected.items():
        if isinstance(value, dict):
            check_holds(found[name], value, f"{at}{name}.")
        else:
            assert found[name] == value, f"{at}{name}"


def test_a_plan_that_was_saved_loads_and_prints_as_it_did(golden, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(golden("plan"))
    assert main(["plan", "--load", "plan.json", "--out", str(tmp_path / "json"), "--json"]) == 0
    check_document(json.loads(capsys.readouterr().out), json.loads((GOLDEN / "plan/printed.json").read_text()))
    assert paceline.Plan.load(GOLDEN / "plan/plan.json").save(tmp_path / "again.json") is None
    check_document(
        json.loads((tmp_path / "again.json").read_text()), json.loads((GOLDEN / "plan/plan.json").read_text())
    )


def test_a_record_of_pruning_reads_and_prints_as_it_did(golden, capsys):
    folder = golden("pruning")
    assert main(["inspect", "pruning", str(folder), "--json"]) == 0
    check_document(
        json.loads(capsys.readouterr().out), json.loads((GOLDEN / "pruning/printed.json").read_text()), "pruning"
    )
    assert main(["report", str(folder)]) == 0
    assert "<h1>" in (folder / "pruning.html").read_text(encoding="utf-8")


def check_document(found, expected, at="plan"):
    """Every value of the golden document is in the new one; numbers to a few roundings."""
    match expected:
        case dict():
            for name, value in expected.items():
                check_document(found[name], value, f"{at}.{name}")
        case list():
            assert len(found) == len(expected), at
            for number, value in enumerate(expected):
                check_document(found[number], value, f"{at}[{number}]")
        case float():
            assert found == pytest.approx(expected, rel=1e-12), at
        case _:
            assert found == expected, at
