"""Runs that go on beyond their end: the trace has the new total, replay follows it, nothing is stretched in silence."""

from __future__ import annotations

import json
import queue
import shutil
import sys
import threading

import pytest
import torch

import paceline
from paceline.cli.main import USER_ERROR, main
from paceline.recipes import Recipe
from paceline.recipes.extension import Extension, check_extendable, extend
from paceline.recipes.reading import RecipeError
from paceline.runs.cluster import ServerEndpoint, WorkerOptions, serve_recipe, work_for
from paceline.traces.checkpoints import read_newest
from paceline.traces.journal import TRACE, Extended
from paceline.traces.journal_files import read_journal
from tests import warm

DEADLINE_SECONDS = 60.0
PLAIN = Recipe(rounds=4).with_settings(
    strategy={"name": "full"}, cluster={"workers": 1}, data={"split": "iid"}, server={"checkpoint_every": 1000}
)
POLY = PLAIN.with_settings(optimizer={"schedule": "poly", "warmup": 0.3})
PRUNED = PLAIN.with_settings(pruning={"name": "info-batch"}, worker={"batch_size": 512})
CASES = {
    "a constant rate": (PLAIN, {}),
    "poly, given again": (POLY, {"optimizer": {"schedule": "poly", "warmup": 0.1}}),
    "poly after a constant rate": (PLAIN, {"optimizer": {"schedule": "poly"}}),
    "pruning, given again": (PRUNED, {"pruning": {"name": "info-batch"}}),
}


def run(recipe, folder, **options):
    """Serve a recipe in a thread, and work for it here, until all rounds are done."""
    opened, ended = queue.Queue(), []

    def serve():
        try:
            ended.append(
                serve_recipe(recipe, ServerEndpoint(listen="127.0.0.1:0"), folder, on_open=opened.put, **options)
            )
        except BaseException as error:
            ended.append(error)
            opened.put(None)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    address = opened.get(timeout=DEADLINE_SECONDS)
    if address is not None:
        work_for(address, WorkerOptions(threads=1, patience_seconds=10.0))
    thread.join(DEADLINE_SECONDS)
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


def final(folder):
    return read_newest(folder)[0]


@pytest.mark.parametrize("case", CASES)
def test_an_extended_run_replays_to_the_last_bit_also_after_it_went_back_before_its_extension(case, tmp_path):
    recipe, changes = CASES[case]
    run(recipe, tmp_path)
    run(recipe, tmp_path, resume=True, extension=Extension(rounds=7, changes=changes))
    assert final(tmp_path).version == 7
    verdict = paceline.replay(tmp_path)
    assert verdict.identical, verdict
    extended = [record for record in read_journal(tmp_path / TRACE).records if isinstance(record, Extended)]
    assert [(record.version, record.rounds, record.changes) for record in extended] == [(4, 7, changes)]
    assert read_journal(tmp_path / TRACE).began.recipe["rounds"] == 4

    shutil.rmtree(tmp_path / "checkpoint-00000007")  # as if the server had been killed after its last step
    assert final(tmp_path).version == 4
    run(recipe, tmp_path, resume=True)  # it knows its total
    assert final(tmp_path).version == 7
    verdict = paceline.replay(tmp_path)
    assert verdict.identical, verdict


def test_with_a_constant_rate_it_comes_to_what_a_run_of_that_length_comes_to(tmp_path):
    run(PLAIN, tmp_path / "short")
    run(PLAIN, tmp_path / "short", resume=True, extension=Extension(rounds=6))
    run(PLAIN.with_settings(rounds=6), tmp_path / "long")
    for name, tensor in final(tmp_path / "long").tensors.items():
        assert torch.equal(tensor, final(tmp_path / "short").tensors[name]), name


@pytest.fixture(scope="module")
def poly_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("poly")
    run(POLY, folder)
    return folder


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rounds", "3"], "rounds must be at least 4, which are done (rounds=3)"),
        (
            ["--rounds", "8"],
            "the learning rate's schedule is laid out over 4 rounds; for 8, say again what it is to be",
        ),
        (["--optimizer.schedule", "poly"], "--optimizer.schedule is given again only with --rounds"),
        (["--rounds", "8", "--lr", "1"], "--resume goes on with the run's own recipe"),
        (["--rounds", "0"], "rounds"),
    ],
)
def test_what_would_change_a_run_in_silence_is_refused_and_changes_nothing(options, said, poly_run, capsys):
    before = (poly_run / TRACE).read_bytes()
    restated = ["--optimizer.schedule", "poly"] if options == ["--rounds", "3"] else []
    assert main(["serve", "--listen", "127.0.0.1:0", "--resume", str(poly_run), *options, *restated]) == USER_ERROR
    assert said in " ".join(capsys.readouterr().err.split())
    assert (poly_run / TRACE).read_bytes() == before


def test_a_setting_that_is_given_again_goes_with_the_schedule_that_the_run_has():
    """Checked beside the default recipe, whose rate is constant, a warm-up of poly was refused, and a rest was not."""
    typed = {"rounds": "8", "optimizer.warmup": "0.1", "optimizer.power": "1"}
    assert extend(POLY, None, typed).changes == {"optimizer": {"warmup": 0.1, "power": 1.0}}
    with pytest.raises(RecipeError, match=r"--optimizer.decay-from: decay_from goes with schedule = poly"):
        extend(PLAIN, None, {"rounds": "8", "optimizer.decay_from": "start"})


@pytest.mark.parametrize("changes", [{"model": {"name": "evil:net"}}, {"optimizer": {"lr": 1.0}}, {"rounds": 3}])
def test_a_trace_changes_nothing_else_by_an_extension(changes):
    with pytest.raises(ValueError, match="an extension of a run cannot change"):
        Extension(rounds=640, changes=changes)


def test_a_finished_run_says_how_to_extend_it(poly_run, capsys):
    for options in ([], ["--rounds", "4"]):
        assert main(["serve", "--listen", "127.0.0.1:0", "--resume", str(poly_run), *options]) == 0
        assert "is finished: all 4 rounds are done; for more, give --rounds" in capsys.readouterr().err


# -- ranks -------------------------------------------------------------------------------------------------------------


def paceline_in(folder, *arguments):
    command = [sys.executable, "-m", "paceline", *arguments]
    return warm.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_run_of_ranks_is_extended_and_replays(tmp_path):
    options = ("--workers", "2", "--rounds", "16", "--split", "iid", "--target-loss", "none", "--out", "run")
    assert paceline_in(tmp_path, "train", "--strategy", "local-sgd", *options).returncode == 0
    done = paceline_in(tmp_path, "train", "--resume", "run", "--rounds", "40", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"][0]["rounds"] >= 40
    replayed = paceline_in(tmp_path, "replay", "run")
    assert replayed.returncode == 0, replayed.stderr
    again = paceline_in(tmp_path, "train", "--resume", "run", "--json")  # it knows its total, and is over
    assert json.loads(again.stdout)["results"][0]["rounds"] >= 40
    for typed, said in (
        (("--rounds", "8"), "rounds must be at least"),
        (("--rounds", "80", "--optimizer.warmup", "0.1"), "ranks keep their schedule and pruning"),
    ):
        refused = paceline_in(tmp_path, "train", "--resume", "run", *typed)
        assert refused.returncode == USER_ERROR
        assert said in refused.stderr


def test_ranks_whose_schedule_follows_the_total_are_not_extended():
    with pytest.raises(ValueError, match="ranks keep theirs: such a run cannot be extended"):
        check_extendable(POLY)
