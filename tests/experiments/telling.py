"""Stories of experiments told with outcomes that are made by hand, and jobs in the process of a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from experiments.__main__ import load
from experiments.core import running
from experiments.core.story import Claim, Experiment, Findings, Outcome, Runs, Size

TOY = Size("toy")
EXPERIMENTS: dict[str, Experiment] = load()


def conclude(name: str, outcomes: Mapping[Any, Outcome] | Callable[[Any], Outcome], size: Size = TOY) -> Findings:
    """Return what an experiment says of outcomes by key, or of what a function of the key returns: one for all seeds.

    Where a story yields jobs again, the same answer is asked with their keys.
    """
    of = outcomes if callable(outcomes) else outcomes.__getitem__
    return EXPERIMENTS[name].tell(size, lambda jobs: Runs({key: [of(key)] * len(size.seeds) for key in jobs}))


def judged(name: str, outcomes: Mapping[Any, Outcome], text: str) -> list[bool]:
    """Return whether each judged claim with these words holds."""
    return [claim.holds for claim in conclude(name, outcomes).claims if text in claim.text and claim.judged]


def swapped(outcomes: Mapping[Any, Outcome], first: Any, second: Any) -> dict[Any, Outcome]:
    """Return outcomes in which two lanes have each other's: two keys, or the same part of several keys."""
    if first in outcomes:
        other = {first: second, second: first}
        return {key: outcomes[other.get(key, key)] for key in outcomes}

    def exchanged(key: Any) -> Any:
        parts = tuple(second if part == first else first if part == second else part for part in key)
        return parts if parts in outcomes else key

    return {key: outcomes[exchanged(key)] for key in outcomes}


def assert_a_swap_is_reported(name: str, outcomes: Mapping[Any, Outcome], lanes: tuple[Any, Any], wrong: str) -> None:
    """Every claim with the words `wrong` must hold, and none when the two lanes have each other's outcomes."""
    before, after = judged(name, outcomes, wrong), judged(name, swapped(outcomes, *lanes), wrong)
    assert before, f"no claim of {name} has the words {wrong!r}"
    assert all(before)
    assert not any(after)


def claims_of(name: str, outcomes: Mapping[Any, Outcome]) -> dict[str, Claim]:
    """Return the claims of an experiment by their text."""
    return {claim.text: claim for claim in conclude(name, outcomes).claims}


def compute_here(monkeypatch: pytest.MonkeyPatch, *, most: int | None = None) -> list[str]:
    """Let jobs be computed one after the other, in this process; return the list that their names are added to.

    With `most`, the run is interrupted before it computes more.
    """
    names: list[str] = []

    def computed(jobs, processes, directory):
        for each in jobs:
            if most is not None and len(names) >= most:
                raise KeyboardInterrupt
            names.append(each[0])
            yield each, *running.run_timed(each[1].run, dict(each[2]))

    monkeypatch.setattr(running, "computed", computed)
    return names
