"""`paceline plan-pruning`: what pruning would save, before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from paceline.cli.options import UsageError
from paceline.data.pruning import PRUNINGS, PruningSettings
from paceline.data.pruning.fine_pruning import FineSchedule
from paceline.lookup import unknown

if TYPE_CHECKING:
    from paceline.data.pruning.plan import PruningPlan

MOST_WIDTH = 80
WHOLE_NUMBERS = ("window", "starting_point", "block", "count")


FINE, INFO = FineSchedule(), PruningSettings()


def _setting(metavar: str, default: object) -> Any:
    """An option that is text, empty unless it is given; the default that it stands for is told in the help."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"[{default}]")


@dataclass(frozen=True)
class PlanPruningOptions:
    """Show which epochs pruning would shorten, and what that saves; nothing is trained."""

    samples: int = 50_000
    """Samples of the data set."""
    epochs: int = 200
    """Epochs of the run."""
    batch_size: int = 128
    """Samples of a step, of all ranks together."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is not full."""
    policy: str = "fine-pruning"
    """fine-pruning or info-batch."""
    window: Annotated[str, _setting("INT", FINE.window)] = ""
    """fine-pruning: epochs of a window; counts are cleared when one begins."""
    starting_point: Annotated[str, _setting("INT", FINE.starting_point)] = ""
    """fine-pruning: from which epoch of the first window on it prunes."""
    attenuation: Annotated[str, _setting("NUMBER", FINE.attenuation)] = ""
    """fine-pruning: what the starting point is divided by from window to window."""
    block: Annotated[str, _setting("INT", FINE.block)] = ""
    """fine-pruning: epochs of a block, of which some are pruned."""
    count: Annotated[str, _setting("INT", FINE.count)] = ""
    """fine-pruning: how many epochs of a block are pruned."""
    prune: Annotated[str, _setting("NUMBER", FINE.prune)] = ""
    """fine-pruning: who sits out in a pruned epoch, a share (0.3) or a number of samples (15000)."""
    overhead_seconds: Annotated[str, _setting("NUMBER", 0)] = ""
    """fine-pruning: what pruning itself costs in a pruned epoch."""
    ratio: Annotated[str, _setting("NUMBER", INFO.ratio)] = ""
    """info-batch: how likely a sample below the mean loss sits out."""
    delta: Annotated[str, _setting("NUMBER", INFO.delta)] = ""
    """info-batch: up to which share of the run it prunes."""
    batch_seconds: Annotated[str, _setting("NUMBER", "none")] = ""
    """What a step takes; with it, times are told in seconds."""
    json: bool = False
    """Print one JSON document to stdout, and nothing else there."""
    debug: bool = False
    """Show the traceback of an error."""


def plan_pruning(options: PlanPruningOptions, overrides: dict[str, str]) -> None:
    """`paceline plan-pruning`."""
    if options.policy not in PLANNERS:
        raise UsageError(str(unknown("pruning", options.policy, PLANNERS)))
    settings, planner = PLANNERS[options.policy]
    for other, (others, _) in PLANNERS.items():
        for name in sorted(set(others) - set(settings)):
            if getattr(options, name):
                raise UsageError(f"{_flag(name)} is a setting of {other}; add --policy {other}")
    given = {name: _value(name, text) for name in (*settings, "batch_seconds") if (text := getattr(options, name))}
    plan = planner(options, given)
    if options.json:
        print(json.dumps(plan.document(), indent=2, allow_nan=False))
    else:
        _print(plan)


def _fine(options: PlanPruningOptions, given: dict[str, Any]) -> PruningPlan:
    from paceline.data.pruning.plan import plan_fine

    times = {name: given.pop(name, None) for name in ("overhead_seconds", "batch_seconds")}
    return plan_fine(
        FineSchedule(**given),
        options.samples,
        epochs=options.epochs,
        batch_size=options.batch_size,
        drop_last=options.drop_last,
        **times,
    )


def _info(options: PlanPruningOptions, given: dict[str, Any]) -> PruningPlan:
    from paceline.data.pruning.plan import plan_info

    return plan_info(
        options.samples,
        epochs=options.epochs,
        ratio=given.get("ratio", INFO.ratio),
        delta=given.get("delta", INFO.delta),
        batch_size=options.batch_size,
        drop_last=options.drop_last,
        batch_seconds=given.get("batch_seconds"),
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _value(name: str, text: str) -> int | float:
    """The number that was given; `prune` is a number of samples if it is a whole number, else a share."""
    try:
        if name in WHOLE_NUMBERS or (name == "prune" and text.lstrip("+-").isdecimal()):
            return int(text)
        return float(text)
    except ValueError:
        kind = "a whole number" if name in WHOLE_NUMBERS else "a number"
        raise UsageError(f"{_flag(name)} must be {kind} (found {text!r})") from None


PLANNERS: dict[str, tuple[tuple[str, ...], Callable[[PlanPruningOptions, dict[str, Any]], PruningPlan]]] = {
    "fine-pruning": (
        (*(name for name in PRUNINGS["fine-pruning"].settings if name != "tolerance"), "overhead_seconds"),
        _fine,
    ),
    "info-batch": (PRUNINGS["info-batch"].settings, _info),
}
"""Every policy that can be planned: the options that are its own, and who plans it."""


def _print(plan: PruningPlan) -> None:
    """The text, coloured where the terminal has colours, and in ASCII where it knows no blocks."""
    console = Console(highlight=False, markup=False)
    text = plan.text(width=MOST_WIDTH)
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        text = plan.text(width=MOST_WIDTH, ascii_only=True)
    headline, _, rest = text.partition("\n\n")
    console.print(headline, style="bold", soft_wrap=True)
    console.print()
    coloured = Text(rest)
    coloured.highlight_regex("█+", "cyan")
    coloured.highlight_regex("[░·]+", "dim")
    console.print(coloured, soft_wrap=True)
