"""The table of a race: it fits a terminal, and its numbers are those of the traces."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from paceline.reports import results_table
from paceline.reports.results import group_traces, results
from paceline.traces import Evaluation, Trace
from tests.reports.race_traces import asynchronous, race, synchronous


def rendered(traces: list[Trace], width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(results_table(traces))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def row_of(traces: list[Trace], strategy: str) -> list[str]:
    line = next(line for line in rendered(traces) if line.split()[:1] == [strategy])
    return line.replace(" %", "%").split()


def run(strategy: str, seconds: float, seed: int = 0, **more: object) -> Trace:
    settings = {"target_loss": 1.0, "seed": seed}
    values = {"workers": 4, "recipe": settings, "rounds_done": 100, **more}
    return Trace(strategy=strategy, seed=seed, seconds=seconds, **values)  # type: ignore[arg-type]


def learnt(seconds: float, loss: float) -> tuple[Evaluation, ...]:
    start = Evaluation(round=0, seconds=0.0, loss=2.0, accuracy=0.1)
    return (start, Evaluation(round=100, seconds=seconds, loss=loss, accuracy=0.875))


def test_the_numbers_are_those_of_the_trace() -> None:
    full = run("full", 20.0, used=400, evaluations=learnt(20.0, 0.5))
    lgc = run("lgc", 13.0, used=300, late=90, dropped={"a": 6, "b": 4}, evaluations=learnt(13.0, 0.505))
    # The loss falls from 2 to 0.5 on a straight line, so it is at 1 after two thirds of the time.
    assert " ".join(row_of([full, lgc], "full")) == "full 100 20.0 - 13.3 0.5000 87.5% 400 0 0"
    assert " ".join(row_of([full, lgc], "lgc")) == "lgc 100 13.0 35% 8.70 0.5050 87.5% 300 90 10"


def test_seeds_are_one_row_of_means() -> None:
    traces = [run("full", seconds, seed) for seed, seconds in enumerate((9.0, 10.0, 11.0))]
    traces += [run("lgc", seconds, seed) for seed, seconds in enumerate((7.0, 8.0, 9.0))]
    assert row_of(traces, "lgc")[:4] == ["lgc", "100", "8.00", "20%"]
    assert "3 seeds, means" in " ".join(" ".join(rendered(traces)).split())


def test_the_caption_names_the_conditions() -> None:
    caption = " ".join(" ".join(rendered([run("full", 1.0, late_work="complete")])).split())
    assert "virtual seconds, late work complete, timing only, nothing was trained, 1 seed" in caption


def test_a_diverged_run_is_called_so_and_saves_nothing() -> None:
    lost = run("lgc", 2.0, diverged=True, evaluations=(Evaluation(round=9, seconds=2.0, loss=1e30, accuracy=0.1),))
    assert row_of([run("full", 20.0), lost], "lgc")[3:7] == ["-", "-", "diverged", "-"]


def test_one_diverged_seed_hides_no_mean_over_the_lucky_ones() -> None:
    traces = [run("lgc", 2.0, seed, diverged=seed == 1, evaluations=learnt(2.0, 0.5)) for seed in range(3)]
    assert "1/3 div." in " ".join(rendered(traces))


def test_a_target_that_not_all_seeds_reach_has_no_mean() -> None:
    traces = [run("lgc", 2.0, seed, evaluations=learnt(2.0, 0.5 + seed)) for seed in range(2)]
    assert row_of(traces, "lgc")[4] == "1/2"


def test_without_full_nothing_is_saved_and_timing_only_has_no_loss() -> None:
    assert row_of([run("lgc", 2.0), run("async", 1.0)], "async")[3:7] == ["-", "-", "-", "-"]


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_race_fits_80_columns(seeds: int) -> None:
    lines = rendered(race(seeds=seeds, rounds=10))
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_the_largest_numbers_and_longest_names_fit_80_columns() -> None:
    huge = {"rounds_done": 10**9, "used": 10**12, "late": 10**11, "dropped": {"late": 10**10}}
    full = run("full", 3e6, evaluations=learnt(3e6, 0.5), **huge)
    slow = run("a-strategy-with-a-very-long-name", 9e7, diverged=True, **huge)
    lines = rendered([full, slow])
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_a_name_is_not_read_as_markup() -> None:
    assert any("[red]x" in line for line in rendered([run("[red]x", 1.0)]))


def test_runs_of_one_strategy_with_other_settings_are_other_rows() -> None:
    lgc = synchronous("lgc", rounds=5)
    other = replace(lgc, recipe={**lgc.recipe, "strategy": {"name": "lgc", "k": 5}})
    assert [group.label for group in group_traces([lgc, other])] == ["lgc k=7", "lgc k=5"]


def test_results_add_up_to_the_gradients_computed() -> None:
    for row in results(group_traces(race(rounds=20))):
        assert row.used + row.late + row.dropped == 10 * 20


def test_asynchronous_runs_have_a_row() -> None:
    assert row_of([asynchronous(rounds=5)], "async")[1] == "5"


def test_no_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one trace"):
        results_table([])
