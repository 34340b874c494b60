"""Lanes that take turns, so that what else the machine does hits them alike; the best of several turns counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from experiments.core.claims import Writer, figure, within
from experiments.core.story import Claim, Step

Found = TypeVar("Found")


def take_turns(
    lanes: Mapping[str, Callable[[], Found]], turns: int, *, label: str = "", total: int | None = None
) -> Generator[Step, Any, dict[str, list[Found]]]:
    """Run each lane `turns` times, and return what it gave, turn by turn; each turn another lane begins.

    `label` is shown before the lanes' names. `total` is that of the bar, where it stands for more than these turns.

    >>> order = []
    >>> lanes = {name: lambda name=name: order.append(name) for name in "abc"}
    >>> steps = [step.label for step in take_turns(lanes, 2)]
    >>> order
    ['a', 'b', 'c', 'b', 'c', 'a']
    """
    found: dict[str, list[Found]] = {name: [] for name in lanes}
    names = list(lanes)
    for turn in range(turns):
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            yield Step(f"{label}{name}", turns * len(names) if total is None else total)
            found[name].append(lanes[name]())
    return found


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long a call takes by the clock."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def bar(
    text: str, value: float, *, least: float = float("-inf"), most: float = float("inf"), write: Writer = figure
) -> Claim:
    """Return the claim that a figure comes to what we ask of ourselves; one that is missing does not.

    >>> bar("a round beside gloo's", 1.02, most=1.05).line
    "bar met: 1.02 is at most 1.05 (a round beside gloo's)"
    """
    return within(text, value, least=least, most=most, kind="bar", write=write)


def verdict(claim: Claim) -> str:
    """Return a claim's word in a table."""
    return "PASS" if claim.holds else "MISS"


def cells(row: Mapping[str, Any], **styles: str) -> list[str]:
    """Return figures of a row, each written in its style; one that the row does not have is empty.

    >>> cells({"seconds": 2.0, "saved": 0.25, "of_it": math.nan}, seconds=".2f", saved=".1%", of_it=".1%", loss=".3f")
    ['2.00', '25.0 %', 'none', '']
    """
    known = {name: row[name] for name in styles if name in row}
    texts = {name: "none" if math.isnan(each) else f"{each:{styles[name]}}" for name, each in known.items()}
    return [texts.get(name, "").replace("%", " %") for name in styles]
