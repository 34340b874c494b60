"""Models too big for one device: what each layer costs, where to cut, in which order the pieces work.

Nothing here opens a connection: what is planned here is carried out by `paceline.drivers.pipelining`.

    model ──> graph (layers in one valid order) ──> profile (seconds, bytes) ──> placement (the best cut) ──> plan
                                                                                     schedules, timing ──────┘

A model is cut into pieces. Each of the k devices holds one piece, or several where the schedule lets pieces take turns;
piece p is on device p mod k. A mini-batch goes through in m micro-batches of equal size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.lazy import lazy_names

if TYPE_CHECKING:
    from paceline.drivers.pipelining.pipeline import Pipeline
    from paceline.drivers.pipelining.planning import plan_pipeline
    from paceline.pipeline.devices import Device, Link
    from paceline.pipeline.plan import Plan

_HOMES = {
    "Device": "devices",
    "Link": "devices",
    "Plan": "plan",
    # What carries plans out stands above this package; whoever looks for it looks here.
    "Pipeline": "paceline.drivers.pipelining.pipeline",
    "plan_pipeline": "paceline.drivers.pipelining.planning",
}

__all__ = ["Device", "Link", "Pipeline", "PipelineError", "Plan", "plan_pipeline"]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__


class PipelineError(PacelineError, ValueError):
    """A model that cannot be cut, a batch that cannot be split, a rank that is not there.

    >>> raise PipelineError("stages must be between 1 and 512 (stages=0)")
    Traceback (most recent call last):
    paceline.pipeline.PipelineError: stages must be between 1 and 512 (stages=0)
    """
