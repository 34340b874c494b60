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
from paceline.data.pruning import EPOCHS_STARTING_POINT, EPOCHS_WINDOW, PRUNINGS, PruningSettings
from paceline.lookup import unknown
from paceline.terminal import can_print

if TYPE_CHECKING:
    from paceline.data.pruning.plan import PruningPlan

WHOLE_NUMBERS = ("window", "starting_point", "block", "count")
DEFAULTS = PruningSettings()  # but for the window, which is of epochs here


def _setting(metavar: str, default: object) -> Any:
    """Return the type of an option that is text, empty unless it is given; the help shows the default it stands for."""
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
    window: Annotated[str, _setting("INT", EPOCHS_WINDOW)] = ""
    """fine-pruning: epochs of a window; counts are cleared when one begins."""
    starting_point: Annotated[str, _setting("INT", EPOCHS_STARTING_POINT)] = ""
    """fine-pruning: from which epoch of the first window on it prunes."""
    attenuation: Annotated[str, _setting("NUMBER", f"{DEFAULTS.attenuation:g}")] = ""
    """fine-pruning: what the starting point is divided by from window to window."""
    block: Annotated[str, _setting("INT", DEFAULTS.block)] = ""
    """fine-pruning: epochs of a block, of which some are pruned."""
    count: Annotated[str, _setting("INT", DEFAULTS.count)] = ""
    """fine-pruning: how many epochs of a block are pruned."""
    prune: Annotated[str, _setting("NUMBER", DEFAULTS.prune)] = ""
    """fine-pruning: who sits out in a pruned epoch, a share (0.3) or a number of samples (15000)."""
    overhead_seconds: Annotated[str, _setting("NUMBER", 0)] = ""
    """fine-pruning: what pruning itself costs in a pruned epoch."""
    ratio: Annotated[str, _setting("NUMBER", DEFAULTS.ratio)] = ""
    """info-batch: how likely a sample below the mean loss sits out."""
    delta: Annotated[str, _setting("NUMBER", DEFAULTS.delta)] = ""
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
    from paceline.data.pruning.fine_pruning import FineSchedule
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
        ratio=given.get("ratio", DEFAULTS.ratio),
        delta=given.get("delta", DEFAULTS.delta),
        batch_size=options.batch_size,
        drop_last=options.drop_last,
        batch_seconds=given.get("batch_seconds"),
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _value(name: str, text: str) -> int | float:
    """Return the number that was given; `prune` is a number of samples if it is a whole number, else a share."""
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
"""Every policy that can be planned: its options, and the function that plans it."""


def _print(plan: PruningPlan) -> None:
    """Print the text, coloured where the terminal has colours, and in ASCII where it knows no blocks."""
    console = Console(highlight=False, markup=False)
    text = plan.text()
    if not can_print(text, console.encoding):
        text = plan.text(ascii_only=True)
    headline, _, rest = text.partition("\n\n")
    console.print(headline, style="bold", soft_wrap=True)
    console.print()
    coloured = Text(rest)
    coloured.highlight_regex("█+", "cyan")
    coloured.highlight_regex("[░·]+", "dim")
    console.print(coloured, soft_wrap=True)
