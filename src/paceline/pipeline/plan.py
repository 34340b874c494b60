"""A plan: where a model is cut, what each piece costs, and what a step will take under each schedule.

A plan is plain values. It holds the profile, so that other schedules, devices and links can be tried without measuring
again, and it can be saved and read: plan once on one machine, train on many. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.pipeline import PipelineError
from paceline.pipeline.advice import Advice, advise
from paceline.pipeline.certainty import Certainty, certainty
from paceline.pipeline.devices import Device, Link
from paceline.pipeline.placement import Placement, place, priced
from paceline.pipeline.profile import Profile, Whole
from paceline.pipeline.schedules import SCHEDULES, find, in_flight, lecture_idle, orders, why_not
from paceline.pipeline.timing import MessageCost, PieceCost, Timeline, slot_timeline, timeline

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The mini-batch that a plan was made for: its samples, and the shapes and types of one micro-batch's inputs.

    >>> Batch(samples=64, shapes=((8, 3, 32, 32),), dtypes=("float32",)).microbatch
    8
    """

    samples: Whole
    shapes: tuple[tuple[Whole, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def microbatch(self) -> int:
        """The number of samples of a micro-batch."""
        return self.shapes[0][0]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The step that is predicted under one schedule with the best cut for it; or `why_not`.

    `idle` is the predicted share of idle time, `slots` its count where all pieces take equally long, `lecture` the
    figure of `schedules.lecture_idle`, which is half of gpipe's count.
    """

    schedule: str
    step_seconds: float = 0.0
    idle: float = 0.0
    slots: float = 0.0
    lecture: float = 0.0
    most_bytes: int = 0
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model's way through a pipeline; `print` it for a table and a picture. `plan_pipeline` makes one."""

    model: str
    profile: Profile
    placement: Placement
    batch: Batch
    microbatches: int
    schedule: str = "1f1b"
    links: Link | tuple[Link, ...] = field(default_factory=Link)
    states: float = 1.0
    fingerprint: str = ""

    @property
    def stages(self) -> int:
        """The number of devices in the row."""
        return len(self.placement.devices)

    @property
    def chunks(self) -> int:
        """The number of pieces of each device."""
        return len(self.placement.pieces) // self.stages

    @property
    def cuts(self) -> tuple[int, ...]:
        """The layers before which the model is cut."""
        return self.placement.cuts

    @property
    def batch_size(self) -> int:
        """The number of samples of a mini-batch."""
        return self.batch.samples

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of one micro-batch's inputs."""
        return self.batch.shapes

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The types of the inputs' elements."""
        import torch

        return tuple(getattr(torch, name) for name in self.batch.dtypes)

    @property
    def evaluates(self) -> bool:
        """Whether the pieces do in eval mode what the model does."""
        return self.profile.evaluates

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the placement and of the profile, and one where the noise of the measurement decides."""
        doubt = (self.certainty.note,) if self.certainty.note else ()
        return (*self.placement.notes, *self.profile.notes, *doubt)

    @property
    def slowest_link(self) -> Link:
        """The least bytes per second and the most latency of all links."""
        links = (self.links,) if isinstance(self.links, Link) else self.links
        return Link(
            bytes_per_second=min((link.bytes_per_second for link in links), default=math.inf),
            latency_seconds=max((link.latency_seconds for link in links), default=0.0),
        )

    # -- predictions --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The predicted step."""
        return timeline(orders(self.schedule, self.stages, self.microbatches, self.chunks), self.costs, self.messages)

    @property
    def costs(self) -> list[PieceCost]:
        """The cost of one micro-batch for each piece."""
        return [
            PieceCost(
                forward_seconds=piece.forward_seconds,
                input_seconds=piece.input_seconds,
                weight_seconds=piece.weight_seconds,
            )
            for piece in self.placement.pieces
        ]

    @property
    def messages(self) -> list[MessageCost]:
        """The cost of the messages between each two pieces."""
        pieces = self.placement.pieces
        return [
            MessageCost(forward_seconds=piece.send_seconds, gradient_seconds=behind.return_seconds)
            for piece, behind in itertools.pairwise(pieces)
        ]

    @property
    def one_device_seconds(self) -> float:
        """The step on one device of speed 1 that holds the whole model, micro-batch by micro-batch."""
        return self.microbatches * math.fsum(layer.seconds for layer in self.profile.layers)

    @property
    def speedup(self) -> float:
        """How many times shorter the step is than on one device."""
        step = self.timeline.step_seconds
        return self.one_device_seconds / step if step > 0 else 1.0

    @functools.cached_property
    def alternatives(self) -> dict[str, Plan | PipelineError]:
        """This plan under every schedule, each with the best cut for it; or the error that says why there is none."""
        found: dict[str, Plan | PipelineError] = {}
        for name in SCHEDULES:
            try:
                found[name] = self if name == self.schedule else self.revised(schedule=name)
            except PipelineError as error:
                found[name] = error
        return found

    @functools.cached_property
    def predictions(self) -> tuple[Prediction, ...]:
        """The step that is predicted under every schedule."""
        return tuple(
            Prediction(
                schedule=name,
                step_seconds=plan.timeline.step_seconds,
                idle=plan.timeline.idle,
                slots=slot_timeline(name, plan.stages, plan.microbatches, plan.chunks).idle,
                lecture=lecture_idle(plan.stages, plan.microbatches),
                most_bytes=max(plan.placement.device_bytes),
            )
            if isinstance(plan, Plan)
            else Prediction(schedule=name, why_not=str(plan))
            for name, plan in self.alternatives.items()
        )

    @functools.cached_property
    def certainty(self) -> Certainty:
        """How far the cut and the predicted step depend on the spread of what was measured."""
        return certainty(self)

    @functools.cached_property
    def advice(self) -> Advice:
        """The steps that other numbers of micro-batches would come to."""
        return advise(
            self.schedule,
            self.costs,
            self.messages,
            batch_samples=self.batch.samples,
            microbatches=self.microbatches,
            fixed_seconds=[
                sum(layer.fixed_seconds for layer in self.profile.layers[piece.first : piece.last])
                / self.placement.devices[piece.device].speed
                for piece in self.placement.pieces
            ],
            latency_seconds=self.slowest_link.latency_seconds,
            chunks=self.chunks,
        )

    @functools.cached_property
    def even(self) -> Placement | None:
        """The placement with equal numbers of layers on every device, for comparison; None where it is impossible."""
        pieces, layers = len(self.placement.pieces), len(self.profile.layers)
        cuts = [round(number * layers / pieces) for number in range(1, pieces)]
        try:
            return priced(self.profile, cuts, self.placement.devices, **self.conditions(self.stages, self.chunks))
        except ValueError:  # a cut that is not possible
            return None

    # -- other plans ---------------------------------------------------------------------------------------------------

    def revised(
        self,
        *,
        schedule: str | None = None,
        stages: int | None = None,
        chunks: int | None = None,
        devices: Sequence[Device] | None = None,
        links: Link | Sequence[Link] | None = None,
        states: float | None = None,
    ) -> Plan:
        """Return the best plan of the same profile under other conditions; nothing is measured again."""
        schedule = self.schedule if schedule is None else schedule
        kept = self.chunks if schedule == self.schedule else find(schedule).chunks
        plan = dataclasses.replace(
            self,
            schedule=schedule,
            links=self.links if links is None else links if isinstance(links, Link) else tuple(links),
            states=self.states if states is None else states,
        )
        devices = self.placement.devices if devices is None else tuple(devices)
        if stages is not None and stages != len(devices):
            devices = (devices[0],) * stages
        return plan.placed(devices, chunks=kept if chunks is None else chunks)

    def placed(self, devices: Sequence[Device], *, chunks: int) -> Plan:
        """Return the same plan with its model placed anew on these devices."""
        conditions = self.conditions(len(devices), chunks)
        return dataclasses.replace(self, placement=place(self.profile, devices, **conditions))

    def conditions(self, stages: int, chunks: int) -> dict[str, Any]:
        """Return what `place` and `priced` need besides profile and devices; PipelineError if the schedule refuses."""
        refused = why_not(self.schedule, stages, self.microbatches, chunks)
        if refused:
            raise PipelineError(refused)
        return {
            "microbatches": self.microbatches,
            "in_flight": in_flight(self.schedule, stages, self.microbatches, chunks),
            "links": self.links,
            "chunks": chunks,
            "states": self.states,
        }

    # -- in words and in files -----------------------------------------------------------------------------------------

    def __str__(self) -> str:
        from paceline.pipeline.text import describe

        return describe(self)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as JSON."""
        from paceline.pipeline.plan_file import write

        write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that was saved."""
        from paceline.pipeline.plan_file import read

        return read(Path(path))
