"""The settings of a pipeline, [pipeline] in a recipe: how many stages a model has, and how batches go through them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.pipeline.devices import Device, Link
from paceline.pipeline.schedules import SCHEDULES, find, why_not
from paceline.settings import Checked, SettingError, setting

MOST_STAGES = 512
BYTES_OF_MB, BYTES_PER_SECOND_OF_MBIT = 1_000_000, 125_000


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(Checked):
    """A model in stages, one process each; BatchNorm sees micro-batches. Only for real runs with strategy "full".

    >>> PipelineSettings(stages=2).on, PipelineSettings().on
    (True, False)
    >>> PipelineSettings(stages=8)
    Traceback (most recent call last):
    paceline.settings.SettingError: 1f1b needs at least as many micro-batches as stages (microbatches=4, ...
    >>> PipelineSettings(replicas=2)
    Traceback (most recent call last):
    paceline.settings.SettingError: replicas are of a pipeline, and there is none: give stages, or memory_mb ...
    """

    stages: int = setting(1, "devices in the row; 1: no pipeline", least=1, most=MOST_STAGES, alias="stages")
    microbatches: int = setting(
        4, "equal parts in which a batch goes through the stages", least=1, most=1_000_000, alias="microbatches"
    )
    schedule: str = setting("1f1b", "in which order stages work", choices=lambda: SCHEDULES)
    chunks: int = setting(0, "interleaved: pieces of each stage; 0: as is usual", least=0, most=1_000)
    replicas: int = setting(
        1, "pipelines beside each other, each with batches of its own", least=1, most=100_000, alias="replicas"
    )
    memory_mb: float = setting(
        0.0, "what a model may take of each device, in millions of bytes; 0: no limit", least=0, most=1e12
    )
    bandwidth_mbit: float = setting(
        0.0, "rate of the link between stages, for the cut; 0: not counted", least=0, most=1e9
    )
    latency_ms: float = setting(
        0.0, "latency of the link between stages, for the cut; 0: not counted", least=0, most=1e6
    )
    plan: str = setting(
        "", "file that `paceline plan pipeline --save` has written; empty: measured when the run begins"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, verb in (("replicas", "are"), ("plan", "is")):
            value = getattr(self, name)
            if not self.on and value != type(self).__dataclass_fields__[name].default:
                because = f"{name} {verb} of a pipeline, and there is none: give stages, or memory_mb"
                raise SettingError((name,), f"{because} ({name}={value!r})")
        refused = why_not(self.schedule, self.stages, self.microbatches, self.chunks or None)
        if self.on and refused:
            names = ("chunks", "microbatches", "stages")
            given = [name for name in names if getattr(self, name) != type(self).__dataclass_fields__[name].default]
            named = [name for name in given if f"{name}=" in refused]
            raise SettingError((named[0] if named else "schedule",), refused)

    @property
    def on(self) -> bool:
        """Whether there is a pipeline: several stages, or a limit that one stage must keep to.

        >>> PipelineSettings(memory_mb=100.0).on
        True
        """
        return self.stages > 1 or self.memory_mb > 0

    @property
    def ranks(self) -> int:
        """The number of processes of a run.

        >>> PipelineSettings(stages=2, replicas=3).ranks
        6
        """
        return self.stages * self.replicas

    @property
    def memory_bytes(self) -> int | None:
        """The memory of each device; None if there is no limit.

        >>> PipelineSettings(memory_mb=1.5).memory_bytes
        1500000
        """
        return max(1, int(self.memory_mb * BYTES_OF_MB)) if self.memory_mb else None

    @property
    def pieces(self) -> int:
        """The number of pieces of each device.

        >>> PipelineSettings(stages=2, schedule="interleaved").pieces
        2
        """
        return self.chunks or find(self.schedule).chunks

    @property
    def link(self) -> Link:
        """The connection between two stages.

        >>> PipelineSettings(bandwidth_mbit=8.0).link.bytes_per_second
        1000000.0
        """
        rate = self.bandwidth_mbit * BYTES_PER_SECOND_OF_MBIT
        return Link(bytes_per_second=rate or math.inf, latency_seconds=self.latency_ms / 1000)

    def devices(self, speeds: Sequence[float] = ()) -> tuple[Device, ...]:
        """Return the devices, each with its memory, and its speed where speeds are given.

        >>> [device.memory_bytes for device in PipelineSettings(stages=2, memory_mb=8.0).devices()]
        [8000000, 8000000]
        """
        return tuple(Device(speed=speed, memory_bytes=self.memory_bytes) for speed in speeds or (1.0,) * self.stages)


def refuse_pipeline(settings: PipelineSettings, because: str) -> None:
    """Refuse a pipeline where it cannot be carried out.

    >>> refuse_pipeline(PipelineSettings(stages=2), "a pipeline has no server")
    Traceback (most recent call last):
    paceline.settings.SettingError: a pipeline has no server (stages=2); use `paceline train`, or leave ...
    """
    if settings.on:
        given = f"stages={settings.stages}" if settings.stages > 1 else f"memory_mb={settings.memory_mb:g}"
        raise SettingError(("stages",), f"{because} ({given}); use `paceline train`, or leave [pipeline] out")
