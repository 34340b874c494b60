"""Recipes: what is written is what is run, wherever it is written."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import Recipe, simulate
from paceline.cli.options import parse, recipe_options
from paceline.cli.simulate import RaceOptions
from paceline.codecs import CODECS
from paceline.codecs.naming import settings_of
from paceline.recipes import RecipeError, read_recipe
from paceline.recipes.assembly import load_data, make_delays, make_strategy, make_training
from paceline.recipes.sections import CODEC_SETTINGS
from paceline.runs import Race, make_run, result_of

EXAMPLES = Path(__file__).parents[2] / "examples"


def as_toml(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return repr(value) if not isinstance(value, str) else f'"{value}"'


def test_every_default_survives_a_file(tmp_path) -> None:
    lines, section = [], None
    for setting in recipe_options():
        if setting.path[:-1] != (section,) and len(setting.path) == 2:
            section = setting.path[0]
            lines.append(f"[{section}]")
        if setting.default is not None or setting.path == ("target_loss",):  # TOML has no word for what is unset
            lines.append(f"{setting.path[-1]} = {as_toml(setting.default)}")
    file = tmp_path / "all.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    assert tomllib.loads(file.read_text(encoding="utf-8"))
    assert Recipe.load(file) == Recipe()


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Nothing of its own."""


def test_every_setting_has_an_option() -> None:
    everything = {".".join(setting.path): f"text {number}" for number, setting in enumerate(recipe_options())}
    for pick in (0, -1):  # the dotted name, then the short one where there is one
        arguments = [
            part for number, setting in enumerate(recipe_options()) for part in (setting.flags[pick], f"text {number}")
        ]
        assert parse(NoOptions, arguments)[1] == everything


@given(rounds=st.integers(1, 10**6), k=st.integers(1, 10), lr=st.floats(1e-6, 10))
def test_a_file_and_the_command_line_say_the_same(rounds, k, lr) -> None:
    texts = {"rounds": str(rounds), "strategy.k": str(k), "optimizer.lr": repr(lr)}
    recipe = read_recipe(overrides=texts)
    assert (recipe.rounds, recipe.strategy.k, recipe.optimizer.lr) == (rounds, k, lr)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_the_examples_are_recipes(file) -> None:
    assert Recipe.load(file) != Recipe()


def test_the_command_line_wins_over_the_file(tmp_path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("rounds = 5\n[strategy]\nk = 2\n", encoding="utf-8")
    recipe = read_recipe(file, {"strategy.k": "auto"})
    assert (recipe.rounds, recipe.strategy.k) == (5, "auto")


def test_a_strategy_takes_its_own_settings_alone() -> None:
    assert make_strategy(Recipe().with_strategy("async")).staleness_scaling
    assert not hasattr(make_strategy(Recipe().with_strategy("full")), "k")


def test_the_same_recipe_gives_the_same_result_to_the_last_bit() -> None:
    recipe = read_recipe(overrides={"rounds": "12", "cluster.late_work": "partial", "strategy.k": "auto"})
    first, second = simulate(recipe), simulate(recipe)
    assert first.trace == second.trace
    assert first.parameters is not None
    assert second.parameters is not None
    assert bool((first.parameters == second.parameters).all())


@pytest.mark.slow
def test_racing_changes_nothing_for_the_racers() -> None:
    recipe = read_recipe(overrides={"rounds": "8"})
    race = Race(recipe, strategies=["full", "fastest-k", "lgc", "async"])
    for _ in race:
        pass
    for result in race.results:
        alone = simulate(recipe.with_strategy(result.strategy))
        assert alone.summary == result.summary


def test_everybody_races_on_the_same_delays() -> None:
    recipe = Recipe()
    tables = [make_delays(recipe.with_strategy(name)) for name in ("full", "lgc")]
    assert tables[0] == tables[1]


def test_a_race_shows_who_is_ahead() -> None:
    """Whoever is behind on the cluster's clock goes next: the first to end is the fastest."""
    race = Race(read_recipe(overrides={"rounds": "20"}), strategies=["full", "lgc"], timing_only=True)
    ended = [lane for lane, progress in race if progress.round == 20]
    assert [race.lanes[lane] for lane in ended] == ["lgc", "full"]


def test_bandwidth_is_charged_in_timing_and_in_training_alike() -> None:
    overrides = {"rounds": "6", "network.worker_bits_per_second": "1e8", "network.server_bits_per_second": "1e9"}
    recipe = read_recipe(overrides=overrides)
    timed, trained = simulate(recipe, timing_only=True), simulate(recipe)
    assert timed.seconds == trained.seconds
    assert timed.seconds > simulate(read_recipe(overrides={"rounds": "6"}), timing_only=True).seconds


def test_too_large_a_cluster_with_limited_bandwidth_is_refused() -> None:
    overrides = {"cluster.workers": "100000", "rounds": "1000", "network.server_bits_per_second": "1e9"}
    with pytest.raises(ValueError, match="at most 5,000,000"):
        simulate(read_recipe(overrides=overrides), timing_only=True)


@pytest.mark.slow
def test_skew_breaks_fastest_k_and_not_lgc() -> None:
    """The story of the race, small: one class per worker, stragglers that stay."""
    overrides = {
        "rounds": "120",
        "data.classes_per_worker": "1",
        "delay.persistence": "50",
        "evaluate_every": "120",
    }
    losses = {}
    for name in ("full", "fastest-k", "lgc"):
        run = make_run(read_recipe(overrides=overrides).with_strategy(name))
        for _ in run:
            pass
        losses[name] = result_of(run).loss
    assert losses["fastest-k"] > 1.5 * losses["full"]
    assert losses["lgc"] < 1.25 * losses["full"]


def test_recorded_delays_are_replayed_line_by_line(tmp_path) -> None:
    """The default persistence once held every line of a recording for ten batches."""
    (tmp_path / "times.csv").write_text("0.1,0.2,0.3\n0.1,0.2,0.9\n", encoding="utf-8")
    text = 'rounds = 10\n[delay]\nname = "recorded"\nfile = "times.csv"\n[cluster]\nworkers = 3\n[strategy]\nk = 2\n'
    (tmp_path / "my.toml").write_text(text, encoding="utf-8")
    recipe = Recipe.load(tmp_path / "my.toml").with_strategy("full")
    assert simulate(recipe, timing_only=True).seconds == pytest.approx(6.0)


@pytest.mark.parametrize(
    "bad",
    [{"rounds": "3"}, {"rounds": 2.5}, {"strategy": "full"}, {"target_loss": "low"}, {"seed": True}],
    ids=str,
)
def test_a_recipe_made_in_python_is_checked_too(bad) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name} must be"):
        Recipe(**bad)


def test_settings_are_changed_by_name() -> None:
    assert Recipe().with_settings(data={"alpha": 2}).data.alpha == 2
    with pytest.raises(ValueError, match="did you mean 'rounds'"):
        Recipe().with_settings(ronds=3)
    with pytest.raises(ValueError, match="unknown setting in strategy 'kk'"):
        Recipe().with_settings(strategy={"kk": 3})


def test_simulate_takes_a_recipe_and_says_so() -> None:
    with pytest.raises(TypeError, match=r"Recipe\.load"):
        simulate("my.toml")


def test_the_codec_section_has_every_setting_of_every_codec_and_says_whose_it_is():
    found = {}
    for name in CODECS:
        for setting in settings_of(name):
            found.setdefault(setting, []).append(name)
    assert {setting: list(owners) for setting, owners in CODEC_SETTINGS.items()} == found
    with pytest.raises(RecipeError, match="levels is a setting of qsgd, and the codec is one-bit"):
        read_recipe(overrides={"codec.name": "one-bit", "codec.levels": "3"})


@pytest.mark.parametrize(
    ("asked", "kind"),
    [(False, "NoAugmentation"), (True, "PadCropFlip"), ("extended", "ExtendedAugmentation")],
)
def test_the_augmentation_is_the_one_that_was_asked_for_and_survives_a_document(asked, kind):
    recipe = Recipe().with_settings(data={"augment": asked})
    assert Recipe.from_document(recipe.to_document()).data.augment == asked
    assert type(make_training(recipe, load_data(recipe)).augmentation).__name__ == kind


def test_the_extended_augmentation_is_named_on_the_command_line_even_beside_a_folder_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "extended").mkdir()
    monkeypatch.chdir(tmp_path)
    _, overrides = parse(RaceOptions, ["--data.augment", "extended"])
    assert read_recipe(None, overrides).data.augment == "extended"


def test_the_extended_augmentation_changes_what_is_learned_and_the_seed_decides_it():
    def losses(augment, seed):
        recipe = Recipe(rounds=3, evaluate_every=3, seed=seed).with_settings(data={"augment": augment})
        return simulate(recipe).summary.loss

    assert losses("extended", 1) == losses("extended", 1)
    assert len({losses("extended", 1), losses(True, 1), losses(False, 1)}) == 3
