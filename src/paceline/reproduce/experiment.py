"""What an experiment is: jobs that are computed, and what follows from their outcomes.

    Experiment ──> jobs(plan) ──> outcomes, each kept as it ends ──> conclude(plan, outcomes) ──> Findings
                   plain values   (running.py: over all cores)       pure: numbers in, claims out

`conclude` computes nothing but figures: so a test can swap the outcomes of two lanes, and a claim that names a winner
must then be reported as wrong. A job is known by its function and its settings, and by them its outcome is kept; so
experiments that need the same run share it, and a reproduction that was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from paceline.reports.chart import Chart
from paceline.reports.table import PlainTable

Size: TypeAlias = Literal["toy", "laboratory", "full"]
Outcome: TypeAlias = Mapping[str, Any]
JobFunction: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]

FIRST_SEED = 200  # constants were chosen on seeds from 100 on


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentPlan:
    """At which size, and with which seeds, an experiment is run.

    `toy` is what the tests run: seconds, on embedded data, and its figures mean nothing.

    >>> ExperimentPlan(size="laboratory", seeds=(200, 201)).toy
    False
    """

    size: Size = "laboratory"
    seeds: tuple[int, ...] = (FIRST_SEED,)

    @property
    def toy(self) -> bool:
        """Whether figures mean nothing."""
        return self.size == "toy"

    def choose(self, *, toy: Any, laboratory: Any, full: Any) -> Any:
        """Return the value of this size.

        >>> ExperimentPlan(size="full").choose(toy=1, laboratory=300, full=9360)
        9360
        """
        return {"toy": toy, "laboratory": laboratory, "full": full}[self.size]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One computation: a function of some module, called with plain settings, which returns plain figures.

    `name` is unique within its experiment. `seconds` is about how long it takes on one core.

    >>> Job(name="length", run=lambda settings: {"length": len(settings)}, settings={}).seconds
    1.0
    """

    name: str
    run: JobFunction
    settings: Mapping[str, Any]
    seconds: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Something that a source says, and whether our figures say the same, with the figures.

    A `winner` is who is ahead of whom, a `shape` how something changes, a `value` a number. What the source leaves open
    is not `judged`: it is reported, and counts neither as met nor as missed. Nor is a claim judged where measurements
    cannot tell the lanes apart, or where doing nothing would meet it.

    >>> claim = Claim(kind="winner", text="lgc ahead of fastest-k, c = 1", holds=False, because="41.0 and 47.0 %")
    >>> claim.line
    'same winner: no, because 41.0 and 47.0 % (lgc ahead of fastest-k, c = 1)'
    """

    kind: Literal["winner", "shape", "value"]
    text: str
    holds: bool
    because: str
    judged: bool = True

    @property
    def line(self) -> str:
        """The claim in a line of the terminal."""
        if not self.judged:
            return f"reported: {self.text}: {self.because}"
        if self.holds:
            return f"same {self.kind}: yes, {self.because} ({self.text})"
        return f"same {self.kind}: no, because {self.because} ({self.text})"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What an experiment came to: tables with the paper's figures beside ours, claims, charts, and remarks.

    `numbers` are plain values for results.json. `remarks` say where our setting is not the paper's.

    >>> Findings(tables=(), claims=()).missed
    ()
    """

    tables: tuple[PlainTable, ...]
    claims: tuple[Claim, ...]
    charts: tuple[Chart, ...] = ()
    series: tuple[str, ...] = ()  # of the charts, in the order of their colours: names of strategies have their own
    remarks: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def missed(self) -> tuple[Claim, ...]:
        """The claims that were judged, and do not hold."""
        return tuple(claim for claim in self.claims if claim.judged and not claim.holds)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure of a source, as something that can be run.

    `minutes` are those of the laboratory size on two cores, and `full_hours` those of the paper's own setting. `data`
    are the data sets that it needs, and `full_data` those of the paper's own setting, if they are others. An experiment
    whose figures are seconds of this machine runs its jobs one after the other (`timed`).

    >>> Experiment(name="none", source="nowhere", question="?", minutes=0.1, full_hours=0.1,
    ...            jobs=lambda plan: [], conclude=lambda plan, outcomes: Findings(tables=(), claims=())).seeds
    1
    """

    name: str
    source: str
    question: str
    minutes: float
    full_hours: float
    jobs: Callable[[ExperimentPlan], Sequence[Job]]
    conclude: Callable[[ExperimentPlan, Mapping[str, Outcome]], Findings]
    data: tuple[str, ...] = ()
    full_data: tuple[str, ...] | None = None
    seeds: int = 1
    timed: bool = False

    def data_for(self, size: Size) -> tuple[str, ...]:
        """Return the data sets that it needs at a size; a toy has what is embedded."""
        return self.full_data if size == "full" and self.full_data is not None else self.data
