"""A checkpoint is of one run: whoever would go on with another is refused, and told in which setting."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import LGC, FastestK, Full
from paceline.cli import main
from paceline.cli.options import recipe_options
from paceline.drivers.ranks import checkpoints as rank_checkpoints
from paceline.drivers.ranks.checkpoints import RankCheckpoints
from paceline.drivers.served.run import open_run
from paceline.drivers.served.settings import Limits, ServeError, ServerSettings
from paceline.recipes import Recipe
from paceline.recipes.assembly import resolved
from paceline.runs.cluster import make_served
from paceline.runs.ranks import RECIPE, read_recipe_of, write_recipe
from paceline.traces.checkpoints import read_newest, write_checkpoint
from paceline.traces.journal import line_of
from paceline.traces.journal_files import read_journal
from paceline.traces.run_settings import OF_THE_MACHINE

DEFAULTS = Recipe().to_document()
SETTINGS = {".".join(setting.path): setting.path for setting in recipe_options()}


def other(value):
    """Return another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case list():
            return [*value, 0.5]
        case None:
            return 1.0
    return f"{value}x"


def changed(document, path):
    """Return a recipe's document with another value for one setting."""
    found = copy.deepcopy(document)
    section = found[path[0]] if len(path) == 2 else found
    section[path[-1]] = other(section[path[-1]])
    return found


def settings_in(folder: Path, **changes) -> ServerSettings:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    given = {"schedule": None, "strategy": LGC(k=2), "rounds": 9, "workers": 3, "blocks": 4, "seed": 5} | changes
    if "optimizer" in given:
        optimizer = given.pop("optimizer")(module.parameters())
    if given["schedule"] is not None:
        given["schedule"] = given["schedule"](optimizer)
    return ServerSettings(module=module, optimizer=optimizer, folder=folder / "run", **given)


def begun(settings: ServerSettings) -> None:
    """Begin a run, which writes its first checkpoint, and leave it."""
    open_run(settings)._journal.close()


def resumed(settings: ServerSettings) -> None:
    open_run(settings, resume=True)._journal.close()


# -- scripts ------------------------------------------------------------------------------------------------------

OTHER_RUNS = {
    'strategy was "lgc", and is "full" now': {"strategy": Full()},
    'strategy was "lgc", and is "fastest-k" now': {"strategy": FastestK(k=2)},
    "k was 2, and is 3 now": {"strategy": LGC(k=3)},
    "warmup_rounds was 0, and is 4 now": {"strategy": LGC(k=2, warmup_rounds=4)},
    "seed was 5, and is 6 now": {"seed": 6},
    "workers was 3, and is 4 now": {"workers": 4},
    "blocks was 4, and is 2 now": {"blocks": 2},
    'optimizer was "SGD", and is "Adam" now': {"optimizer": torch.optim.Adam},
    'schedule was "none", and is "StepLR" now': {"schedule": lambda of: torch.optim.lr_scheduler.StepLR(of, 1)},
}


@pytest.mark.parametrize("said", OTHER_RUNS)
def test_a_script_does_not_go_on_with_another_run(said, tmp_path):
    begun(settings_in(tmp_path))
    trace = (tmp_path / "run" / "trace.jsonl").read_bytes()
    with pytest.raises(ServeError, match=f"^checkpoint 0 of .* is of another run: {said}; give what it was") as told:
        resumed(settings_in(tmp_path, **OTHER_RUNS[said]))
    assert "\n" not in str(told.value)
    assert (tmp_path / "run" / "trace.jsonl").read_bytes() == trace
    resumed(settings_in(tmp_path))  # nothing of the refused one is left


@pytest.mark.parametrize("how", [True, False, "samples"])
def test_a_script_that_leaves_the_weights_to_paceline_goes_on_as_its_run_began(how, tmp_path):
    """Also twice, and also if it then says what they were."""
    begun(settings_in(tmp_path, strategy=LGC(k=2, scale_partial=how)))
    for asked in ("auto", "auto", how):
        run = open_run(settings_in(tmp_path, strategy=LGC(k=2, scale_partial=asked)), resume=True)
        assert run._settings.strategy == LGC(k=2, scale_partial=how)
        assert run.coordinator.strategy._weighing == how
        run.write_first_checkpoint()
        run._journal.close()
    with pytest.raises(ServeError, match=r"scale_partial was .*, and is .* now; give what it was"):
        resumed(settings_in(tmp_path, strategy=LGC(k=2, scale_partial=how is False)))


def test_a_run_that_began_by_samples_goes_on_where_that_is_said(tmp_path):
    begun(settings_in(tmp_path))
    resumed(settings_in(tmp_path, strategy=LGC(k=2, scale_partial="samples")))


def test_checkpoints_that_do_not_say_their_weights_are_of_scaled_work(tmp_path):
    begun(settings_in(tmp_path))
    checkpoint, _ = read_newest(tmp_path / "run")
    del checkpoint.state["run"]["scale_partial"]
    write_checkpoint(tmp_path / "run", checkpoint)
    run = open_run(settings_in(tmp_path), resume=True)
    assert run._settings.strategy.scale_partial is True
    run._journal.close()


def test_a_refused_resume_leaves_the_journal_to_the_next_one(tmp_path):
    begun(settings_in(tmp_path))
    larger = nn.Linear(4, 2)
    with pytest.raises(ServeError, match="is of another model"):
        resumed(
            dataclasses.replace(settings_in(tmp_path), module=larger, optimizer=torch.optim.SGD(larger.parameters()))
        )
    resumed(settings_in(tmp_path))


def test_a_script_may_change_what_is_not_of_the_run_and_the_rate_is_the_checkpoints(tmp_path):
    begun(settings_in(tmp_path))
    settings = settings_in(
        tmp_path,
        rounds=20,
        most_workers=9,
        limits=Limits(silence_seconds=3.0),
        checkpoint_every=1,
        evaluate_every=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.7),
    )
    resumed(settings)
    assert settings.optimizer.param_groups[0]["lr"] == 0.1


def test_checkpoints_of_before_they_said_it_are_taken_as_they_were(tmp_path):
    begun(settings_in(tmp_path))
    checkpoint, _ = read_newest(tmp_path / "run")
    for name in ("run", "recipe"):
        del checkpoint.state[name]
    write_checkpoint(tmp_path / "run", checkpoint)
    resumed(settings_in(tmp_path, seed=6))


@pytest.mark.parametrize("senseless", [[], 7, "recipe"])
def test_a_checkpoint_whose_recipe_is_none_is_refused(senseless, tmp_path):
    begun(settings_in(tmp_path))
    checkpoint, _ = read_newest(tmp_path / "run")
    write_checkpoint(tmp_path / "run", dataclasses.replace(checkpoint, state=checkpoint.state | {"recipe": senseless}))
    with pytest.raises(ServeError, match="must be objects"):
        resumed(settings_in(tmp_path))


# -- recipes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served_recipe(tmp_path_factory):
    """A run of a recipe that has begun: its settings."""
    recipe = resolved(
        Recipe().with_settings(model={"name": "lenet"}, optimizer={"schedule": "steps", "decay_at": (0.5,)})
    )
    folder = tmp_path_factory.mktemp("served")
    settings = settings_in(folder, recipe=recipe.to_document(), recipe_defaults=DEFAULTS)
    begun(settings)
    return settings


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_of_a_recipe_changes_under_a_served_run_in_silence(setting, served_recipe):
    """Whoever changed the trace: what the checkpoint says is another value. Paths come from the command line alone."""
    altered = dataclasses.replace(served_recipe, recipe=changed(served_recipe.recipe, SETTINGS[setting]))
    if setting in OF_THE_MACHINE:
        return resumed(altered)
    with pytest.raises(ServeError, match=f" is of another run: {re.escape(setting)} was "):
        resumed(altered)


def test_a_setting_that_an_older_checkpoint_lacks_has_its_default(served_recipe, tmp_path):
    older = copy.deepcopy(served_recipe.recipe)
    del older["optimizer"]["trust_coefficient"], older["pruning"]
    begun(settings_in(tmp_path, recipe=older))
    given = settings_in(tmp_path, recipe=served_recipe.recipe, recipe_defaults=DEFAULTS)
    resumed(given)
    with pytest.raises(ServeError, match=r"optimizer\.trust_coefficient was 0\.001, and is 1\.001 now"):
        resumed(dataclasses.replace(given, recipe=changed(served_recipe.recipe, ("optimizer", "trust_coefficient"))))


def test_a_trace_that_says_another_recipe_than_the_checkpoint_is_not_gone_on_with(tmp_path, capsys):
    """Its first line was altered and sealed again: the rate, and the rounds, which makes it unfinished."""
    recipe = resolved(Recipe(rounds=5).with_settings(cluster={"workers": 2}, strategy={"k": 1}, data={"split": "iid"}))
    folder, trace = tmp_path / "run", tmp_path / "run" / "trace.jsonl"
    begun(make_served(recipe, folder))
    first = read_journal(trace).began
    for path, said in (
        (("optimizer", "lr"), "optimizer.lr was 0.05, and is 1.05 now"),
        (("rounds",), "rounds was 5, and"),
    ):
        trace.write_bytes(line_of(dataclasses.replace(first, recipe=changed(first.recipe, path))))
        assert main(["serve", "--listen", "127.0.0.1:0", "--resume", str(folder)]) == 2
        assert f"checkpoint 0 of {folder} is of another run: {said}" in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def ranks_recipe():
    return resolved(Recipe().with_settings(strategy={"name": "bmuf"}, cluster={"workers": 2}))


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_of_a_recipe_changes_under_ranks_in_silence(setting, ranks_recipe, tmp_path):
    """A value altered in recipe.json is noticed by its checksum, and by the checkpoint where there is none."""
    write_recipe(ranks_recipe, tmp_path)
    assert read_recipe_of(tmp_path) == ranks_recipe
    stored = json.loads((tmp_path / RECIPE).read_text())
    altered = changed(stored, SETTINGS[setting])
    (tmp_path / RECIPE).write_text(json.dumps(altered))
    with pytest.raises(ValueError, match=r"recipe\.json is not as it was written: its checksum does not fit"):
        read_recipe_of(tmp_path)
    del altered["crc"]
    checkpoints = RankCheckpoints(tmp_path, 0)
    checkpoints.keep(3, {"recipe": ranks_recipe.to_document()})
    _, refused = rank_checkpoints._read(checkpoints, 3, altered, DEFAULTS)
    assert setting in OF_THE_MACHINE or f"is of another recipe: {setting} was " in refused


def test_every_bit_that_flips_in_a_ranks_recipe_is_noticed_or_changes_nothing(ranks_recipe, tmp_path):
    write_recipe(ranks_recipe, tmp_path)
    path = tmp_path / RECIPE
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 37):  # each bit of a byte gets its turn
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with contextlib.suppress(ValueError):
            assert read_recipe_of(tmp_path) == ranks_recipe, f"bit {bit}"  # it is in a blank between two values
