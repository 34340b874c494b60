"""`paceline replay`: a recorded run computed again, and compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli.options import argument, code_option, data_directory_option, debug_option, json_option
from paceline.cli.output import run_folder
from paceline.cli.progress import step_bar
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.drivers.replayed import Verdict


@dataclass(frozen=True)
class ReplayOptions:
    """Recompute a recorded run, and compare.

    It says whether the run comes out the same to the last bit.
    """

    run: str = argument("RUN", "the run's folder")
    model: str = code_option("network", "model.name")
    data: str = code_option("data", "data.name")
    loss: str = code_option("loss", "model.loss")
    data_directory: str = data_directory_option()
    json: bool = json_option()
    debug: bool = debug_option()


def replay(options: ReplayOptions, overrides: dict[str, str]) -> None:
    from paceline.runs.cluster import WorkerOptions
    from paceline.runs.replaying import replay as replay_run

    with step_bar(Console(stderr=True), "replaying") as update:
        verdict = replay_run(
            run_folder(options.run),
            WorkerOptions(
                model=options.model, data=options.data, loss=options.loss, data_directory=options.data_directory
            ),
            on_step=lambda step, steps: update(completed=step, total=steps),
        )
    if options.json:
        compared = {
            name: getattr(verdict, name) for name in ("identical", "steps", "redone", "difference", "checkpoint")
        }
        print(json.dumps(compared | {"nearly": verdict.nearly or None, "missing": verdict.missing or None}))
    elif verdict.difference is None:
        print(f"identical: {_compared(verdict)}")
    elif verdict.nearly:
        print(f"the same {verdict.steps} steps; {verdict.nearly}")
    if verdict.difference is not None and not verdict.nearly:
        raise RunDiffers(f"not identical: {verdict.difference} ({verdict.steps} steps before it are)")
    if verdict.missing:
        raise RunDiffers(f"not the whole run: {verdict.missing}")


def _compared(verdict: Verdict) -> str:
    """Return in words what a replay has compared.

    >>> from paceline.drivers.replayed import Verdict
    >>> _compared(Verdict(steps=57, difference=None, checkpoint=50, missing="the trace ends after step 57"))
    '57 steps, and the weights of checkpoint 50 to the last bit'
    >>> _compared(Verdict(steps=75, difference=None, checkpoint=50, redone=25))
    '50 steps (25 of them twice: the run was resumed), and the weights of checkpoint 50 to the last bit'
    """
    redone = f" ({verdict.redone} of them twice: the run was resumed)" if verdict.redone else ""
    steps = f"{verdict.steps - verdict.redone} steps{redone}"
    if verdict.checkpoint is None:
        return f"{steps} by their fingerprints, and no weights"
    return f"{steps}, and the weights of checkpoint {verdict.checkpoint} to the last bit"


class RunDiffers(PacelineError, OSError):  # noqa: N818 - a finding, not a fault
    """A replay that came out differently, or of less than the whole run: not the fault of the command line.

    >>> raise RunDiffers("not identical: step 3")
    Traceback (most recent call last):
    paceline.cli.replay.RunDiffers: not identical: step 3
    """
