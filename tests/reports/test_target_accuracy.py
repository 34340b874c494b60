"""The time to a target accuracy: against a plain reference, and where it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from paceline import Recipe, simulate
from paceline.cli.main import main
from paceline.recipes.reading import RecipeError, read_recipe
from paceline.reports.report import report_html
from paceline.reports.results import group_traces, results
from paceline.reports.sentences import headline
from paceline.reports.table import results_table
from paceline.traces import Evaluation, Trace, summarise
from paceline.traces.records import seconds_to_accuracy
from tests.reports.race_traces import race

SHARES = st.floats(0, 1).map(lambda share: round(share, 3))


def run(accuracies: Sequence[float | None], target: float | None, *, step: float = 1.0) -> Trace:
    points = tuple(Evaluation(round=n, seconds=n * step, loss=1.0, accuracy=each) for n, each in enumerate(accuracies))
    recipe = {"target_loss": 0.05, "target_accuracy": target}
    last = max(0, len(points) - 1)
    return Trace(
        strategy="full", seed=0, workers=2, recipe=recipe, rounds_done=last, seconds=last * step, evaluations=points
    )


def walked(accuracies: Sequence[float], target: float) -> float | None:
    """The first of very many moments at which the straight lines between the points are at the target."""
    moments = np.linspace(0, len(accuracies) - 1, 200 * (len(accuracies) - 1) + 1)
    values = np.interp(moments, range(len(accuracies)), accuracies)
    there = np.flatnonzero(values >= target - 1e-12)
    return float(moments[there[0]]) if len(there) else None


@given(st.lists(SHARES, min_size=1, max_size=8), SHARES.filter(bool))
def test_it_is_the_first_moment_at_which_the_straight_lines_reach_the_target(
    accuracies: list[float], target: float
) -> None:
    found, plain = seconds_to_accuracy(run(accuracies, target)), walked(accuracies, target)
    if plain is None:
        assert found is None
    else:
        assert found is not None
        assert plain - 1 / 200 - 1e-9 <= found <= plain + 1e-9


def test_points_without_an_accuracy_say_nothing() -> None:
    assert seconds_to_accuracy(run([0.0, None, 1.0], 0.5)) == 1.0
    assert seconds_to_accuracy(run([None, None], 0.5)) is None
    assert seconds_to_accuracy(run([], 0.5)) is None
    assert seconds_to_accuracy(run([0.0, 1.0], None)) is None


def test_a_recipe_asks_for_it_and_a_run_comes_to_it(tmp_path, capsys) -> None:
    assert Recipe().target_accuracy is None
    assert Recipe.from_document(Recipe().to_document()) == Recipe()
    recipe = read_recipe(overrides={"target_accuracy": "0.5", "rounds": "40", "target_loss": "none"})
    result = simulate(recipe)
    assert 0 < result.seconds_to_accuracy <= result.seconds
    assert result.seconds_to_accuracy == summarise(result.trace).seconds_to_accuracy
    for wrong in ("0", "1.5", "-1", "high"):
        with pytest.raises(RecipeError, match="--target-accuracy"):
            read_recipe(overrides={"target_accuracy": wrong})
    arguments = [
        "race",
        "--strategies",
        "full,lgc",
        "--rounds",
        "30",
        "--target-accuracy",
        "0.5",
        "--out",
        str(tmp_path / "race"),
    ]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "50 %" in shown
    assert "target accuracy 50 %" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


def asked(target: float | None) -> list[Trace]:
    return [replace(trace, recipe={**trace.recipe, "target_accuracy": target}) for trace in race(rounds=30)]


def test_nobody_who_does_not_ask_sees_it() -> None:
    page, table = report_html(asked(None)), written(asked(None))
    assert "To target (s)" in page
    assert "accuracy (s)" not in page
    assert "target accuracy" not in page
    assert " target " in table
    assert {row.seconds_to_accuracy for row in results(group_traces(asked(None)))} == {None}


def test_who_asks_reads_it_in_table_page_and_headline() -> None:
    traces = asked(0.7)
    rows, page, table = results(group_traces(traces)), report_html(traces), written(traces)
    times = {row.label: row.seconds_to_accuracy for row in rows}
    assert all(times.values())
    assert "To 70 % accuracy (s)" in page
    assert "To target loss (s)" in page
    assert "<li>target accuracy 70 %</li>" in page
    assert "70 %" in table
    assert max(map(len, table.splitlines())) <= 80
    for trace in traces:
        assert f"{times[trace.strategy]:.2f}" in table
    assert "reached the target accuracy" in headline(rows)
    assert "target loss" not in headline(rows)


def written(traces: Sequence[Trace]) -> str:
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(results_table(traces))
    return capture.get()
