"""The section of a recipe that says into how many stages a model is cut, and how batches go through them."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.pipeline.schedules import SCHEDULES, why_not
from paceline.settings import Checked, SettingError, setting

MOST_STAGES = 512
BYTES_OF_MB, BYTES_PER_SECOND_OF_MBIT = 1_000_000, 125_000


@dataclass(frozen=True, kw_only=True)
class PipelineSection(Checked):
    """A model in stages, one process each; BatchNorm sees micro-batches. Real runs of strategy full alone.

    >>> PipelineSection(stages=2).on, PipelineSection().on
    (True, False)
    >>> PipelineSection(stages=8)
    Traceback (most recent call last):
    paceline.settings.SettingError: 1f1b needs at least as many micro-batches as stages (microbatches=4, ...
    >>> PipelineSection(replicas=2)
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
    bandwidth_mbit: float = setting(0.0, "of the link between stages, for the cut; 0: not counted", least=0, most=1e9)
    latency_ms: float = setting(0.0, "of the link between stages, for the cut; 0: not counted", least=0, most=1e6)
    plan: str = setting("", "file that `paceline plan --save` has written; empty: measured when the run begins")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.on:
            self._check_off()
        refused = why_not(self.schedule, self.stages, self.microbatches, self.chunks or None)
        if self.on and refused:
            named = ("chunks", "microbatches", "stages")
            given = [name for name in named if getattr(self, name) != type(self).__dataclass_fields__[name].default]
            told = [name for name in given if f"{name}=" in refused]  # which of what was written it names
            raise SettingError((told[0] if told else "schedule",), refused)

    def _check_off(self) -> None:
        for name, said in (("replicas", "are of a pipeline"), ("plan", "is of a pipeline")):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise SettingError(
                    (name,),
                    f"{name} {said}, and there is none: give stages, or memory_mb ({name}={getattr(self, name)!r})",
                )

    @property
    def on(self) -> bool:
        """Whether there is a pipeline: several stages, or a limit that one stage must keep to.

        >>> PipelineSection(memory_mb=100.0).on
        True
        """
        return self.stages > 1 or self.memory_mb > 0

    @property
    def ranks(self) -> int:
        """Processes of a run.

        >>> PipelineSection(stages=2, replicas=3).ranks
        6
        """
        return self.stages * self.replicas

    @property
    def memory_bytes(self) -> int | None:
        """The limit of each device; None if there is none.

        >>> PipelineSection(memory_mb=1.5).memory_bytes
        1500000
        """
        return max(1, int(self.memory_mb * BYTES_OF_MB)) if self.memory_mb else None


def refuse_pipeline(section: PipelineSection, because: str) -> None:
    """Refuse a pipeline where it cannot be carried out.

    >>> refuse_pipeline(PipelineSection(stages=2), "a pipeline has no server")
    Traceback (most recent call last):
    paceline.settings.SettingError: a pipeline has no server (stages=2); use `paceline train`, or leave ...
    """
    if section.on:
        given = f"stages={section.stages}" if section.stages > 1 else f"memory_mb={section.memory_mb:g}"
        raise SettingError(("stages",), f"{because} ({given}); use `paceline train`, or leave [pipeline] out")
