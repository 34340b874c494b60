"""An experiment is a story: it yields its jobs, is sent their outcomes, and then yields what follows from them.

    @experiment("lgc-3", source="LGC, figure 3", question="who wins?", minutes=9.5)
    def figure_3(size):
        runs = yield {lane: Job(run_recipe, settings_of(lane)) for lane in LANES}
        mean = runs.mean("accuracy")
        yield ahead("LGC above K-SGD", {lane: mean[lane] for lane in LANES}, best="high")
        yield PlainTable(...)

What comes after the jobs is a pure function of outcomes: so a test can swap two lanes, and a claim that names a winner
must then be reported as wrong. A story may yield jobs more than once, where the next depend on the first. A timing has
no jobs: it measures between its yields, and says by `Step` what it measures next.

A figure that is missing (a run diverged, a target was never reached) is NaN: every comparison with it is false, so
no lane wins by not finishing.
"""

from __future__ import annotations

import inspect
import json
import math
import statistics
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from paceline.lookup import unknown
from paceline.reports.chart import Chart
from paceline.reports.table import PlainTable

NAN = math.nan
FIRST_SEED = 200  # constants were chosen on seeds from 100 on

SizeName: TypeAlias = Literal["toy", "laboratory", "full"]
Outcome: TypeAlias = Mapping[str, Any]
JobFunction: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Size:
    """At which size, and with which seeds, an experiment is run.

    `toy` is what the tests run: seconds, on embedded data, and its figures mean nothing. `full` is a paper's own.

    >>> Size("toy").pick(1, 300), Size().pick(1, 300, 9360), Size("full").pick(1, 300, 9360), Size("full").pick(1, 300)
    (1, 300, 9360, 300)
    """

    name: SizeName = "laboratory"
    seeds: tuple[int, ...] = (FIRST_SEED,)

    @property
    def toy(self) -> bool:
        """Whether figures mean nothing."""
        return self.name == "toy"

    def pick(self, toy: Any, laboratory: Any, full: Any = None) -> Any:
        """Return the value of this size; where nothing else is said, full is as the laboratory."""
        return {"toy": toy, "laboratory": laboratory, "full": laboratory if full is None else full}[self.name]


@dataclass(frozen=True)
class Job:
    """One computation: a function of some module, called with plain settings, which returns plain figures.

    The settings are plain values, or a function of the seed that gives them. `seconds` is about how long it takes on
    one core. Equal jobs are one, whoever asks for them.

    >>> Job(len, lambda seed: {"seed": seed}).of(7), Job(len, {"levels": 3}).of(7)
    ({'seed': 7}, {'levels': 3})
    """

    run: JobFunction
    settings: Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
    seconds: float = 1.0

    def of(self, seed: int) -> Mapping[str, Any]:
        """Return its settings with a seed."""
        return self.settings(seed) if callable(self.settings) else self.settings


class Runs(dict[Any, list[Outcome]]):
    """The outcomes of each key of the jobs, seed by seed.

    A figure is found by its name, or by the names that lead to it.

    >>> runs = Runs(lgc=[{"split": {"waiting": 1.0}}, {"split": {"waiting": 2.0}}], full=[{"split": None}] * 2)
    >>> runs.mean("split", "waiting"), runs.each("split", "waiting", lost=lambda key: 0.0)["full"]
    ({'lgc': 1.5, 'full': nan}, [0.0, 0.0])
    """

    def each(self, *path: str, lost: Callable[[Any], float] | None = None) -> dict[Any, list[float]]:
        """Return a figure of every run; where one is missing it is NaN, or what `lost` says of its key."""
        return {key: [_figure(one, path, lost, key) for one in outcomes] for key, outcomes in self.items()}

    def mean(self, *path: str, lost: Callable[[Any], float] | None = None) -> dict[Any, float]:
        """Return the means over seeds; NaN where one has no figure."""
        return {key: statistics.fmean(values) for key, values in self.each(*path, lost=lost).items()}

    def spread(self, *path: str, lost: Callable[[Any], float] | None = None) -> dict[Any, float]:
        """Return the standard deviations over seeds; NaN for a single seed, or where one has no figure."""
        return {key: deviation(values) for key, values in self.each(*path, lost=lost).items()}


def _figure(outcome: Outcome, path: Iterable[str], lost: Callable[[Any], float] | None, key: Any) -> float:
    value: Any = outcome
    for name in path:
        value = None if value is None else value[name]
    if value is None:
        return NAN if lost is None else lost(key)
    return float(value)


def deviation(values: list[float]) -> float:
    """Return the standard deviation; NaN for a single value, or where one is missing.

    >>> round(deviation([0.47, 0.49]), 4), deviation([0.47]), deviation([0.47, math.nan])
    (0.0141, nan, nan)
    """
    return statistics.stdev(values) if len(values) > 1 and not any(map(math.isnan, values)) else NAN


def plain(value: Any) -> Any:
    """Return values as JSON holds them: what is not finite is None, keys are texts.

    >>> plain({1: (math.nan, 2.0)})
    {'1': [None, 2.0]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- what a story tells ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Something that a source says, and whether our figures say the same, with the figures.

    A `winner` is who is ahead of whom, a `shape` how something changes, a `value` a number; a `bar` is what we ask of
    ourselves. What the source leaves open is not `judged`: it is reported, and counts neither as met nor as missed. Nor
    is a claim judged where measurements cannot tell the lanes apart, or where doing nothing would meet it.

    >>> claim = Claim(kind="winner", text="lgc ahead of fastest-k, c = 1", holds=False, because="41.0 and 47.0 %")
    >>> claim.line
    'same winner: no, because 41.0 and 47.0 % (lgc ahead of fastest-k, c = 1)'
    >>> Claim(kind="bar", text="time of a step", holds=True, because="1.02 is at most 1.05").line
    'bar met: 1.02 is at most 1.05 (time of a step)'
    """

    kind: Literal["winner", "shape", "value", "bar"]
    text: str
    holds: bool
    because: str
    judged: bool = True

    @property
    def about(self) -> str:
        """What was compared, in a word or two."""
        return self.kind if self.kind == "bar" else f"same {self.kind}"

    @property
    def line(self) -> str:
        """The claim in a line of the terminal."""
        if not self.judged:
            return f"reported: {self.text}: {self.because}"
        met = ("met:", "MISSED:") if self.kind == "bar" else ("yes,", "no, because")
        return f"{self.about}{'' if self.kind == 'bar' else ':'} {met[not self.holds]} {self.because} ({self.text})"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Plain values for results.json."""

    values: Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """What a timing does next, of how many steps in all; a bar shows it.

    >>> Step("gloo", 12).total
    12
    """

    label: str
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """Why an experiment cannot be run here. It ends the story; nothing was judged.

    >>> Skipped("it needs root").reason
    'it needs root'
    """

    reason: str


@dataclass(kw_only=True)
class Findings:
    """What an experiment came to: tables with the paper's figures beside ours, claims, charts, remarks, numbers.

    Remarks say where our setting is not the paper's.

    >>> Findings().missed
    []
    """

    tables: list[PlainTable] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""

    @property
    def missed(self) -> list[Claim]:
        """The claims that were judged, and do not hold."""
        return [claim for claim in self.claims if claim.judged and not claim.holds]

    def add(self, told: Any) -> None:
        """Take what a story has told."""
        if isinstance(told, Numbers):
            self.numbers.update(plain(told.values))
        elif isinstance(told, Skipped):
            self.skipped = told.reason
        else:
            places: dict[type, list[Any]] = {PlainTable: self.tables, Claim: self.claims, Chart: self.charts}
            places.get(type(told), self.remarks).append(told)


# -- experiments -------------------------------------------------------------------------------------------------------

Telling: TypeAlias = Generator[Any, Any, None]
Story: TypeAlias = Callable[..., Telling]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A story with its name, its source and what it takes.

    `minutes` are those of the laboratory size on two cores, and `full_hours` those of a paper's own setting. `data` are
    the data sets that it needs, and `full_data` those of the paper's own setting, if they are others. Where figures are
    seconds of this machine, jobs run one after the other (`timed`). What else the story takes by keyword can be set.

    >>> def story(size, *, lanes=("lgc", "full"), rounds=300): yield "nothing was asked"
    >>> Experiment(name="none", source="", question="?", minutes=1.0, story=story).settings
    {'lanes': ('lgc', 'full'), 'rounds': 300}
    """

    name: str
    source: str = ""
    question: str
    minutes: float
    story: Story
    full_hours: float | None = None
    data: tuple[str, ...] = ()
    full_data: tuple[str, ...] | None = None
    seeds: int = 1
    timed: bool = False

    @property
    def of(self) -> str:
        """Where it stands: papers, questions or timings."""
        return self.story.__module__.split(".")[1] if "." in self.story.__module__ else ""

    @property
    def settings(self) -> dict[str, Any]:
        """What its story takes by keyword, with the values that it has where nothing is said."""
        parameters = inspect.signature(self.story).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}

    def with_settings(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of settings that are given as text; lists have commas between.

        >>> def story(size, *, lanes=("lgc", "full"), rounds=300): yield "nothing was asked"
        >>> told = Experiment(name="none", question="?", minutes=1.0, story=story)
        >>> told.with_settings({"lanes": "lgc", "rounds": "20"})
        {'lanes': ('lgc',), 'rounds': 20}
        >>> told.with_settings({"rounds": "many"})
        Traceback (most recent call last):
        ValueError: rounds of none must be a whole number, as 300 is (rounds='many')
        """
        known = self.settings
        for name in texts:
            if name not in known:
                some = f"choose from {', '.join(known)}" if known else "it has none"
                raise ValueError(f"{self.name} has no setting {name!r}; {some}")
        return {name: _value(f"{name} of {self.name}", name, text, known[name]) for name, text in texts.items()}

    def data_for(self, size: Size, *, data: str | tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the data sets that it needs at a size: those of its setting `data`, where that is given.

        A toy has what is embedded.
        """
        if size.toy:
            return ()
        if data:
            return (data,) if isinstance(data, str) else data
        return self.full_data if size.name == "full" and self.full_data is not None else self.data

    def jobs(self, size: Size, **settings: Any) -> dict[Any, Job]:
        """Return the jobs that it begins with; those of a timing are none."""
        first = next(self.story(size, **settings))
        return first if isinstance(first, dict) else {}

    def tell(
        self,
        size: Size,
        answer: Callable[[dict[Any, Job]], Runs],
        *,
        on_step: Callable[[Step], None] = lambda step: None,
        **settings: Any,
    ) -> Findings:
        """Go through the story: `answer` returns the outcomes of jobs, and `on_step` hears what is measured next."""
        story, found = self.story(size, **settings), Findings()
        told = next(story, None)
        while told is not None:
            if isinstance(told, dict):
                try:
                    told = story.send(answer(told))
                except StopIteration:
                    break
                continue
            if isinstance(told, Step):
                on_step(told)
            else:
                found.add(told)
            told = next(story, None)
        return found


def _value(what: str, name: str, text: str, default: Any) -> Any:
    if isinstance(default, tuple):
        kind = default[0] if default else ""
        return tuple(_value(what, name, part.strip(), kind) for part in text.split(",") if part.strip())
    kinds = {bool: "true or false", int: "a whole number", float: "a number"}
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        return type(default)(text) if isinstance(default, int | float) else text
    except (ValueError, KeyError):
        shown = json.dumps(default)
        raise ValueError(f"{what} must be {kinds[type(default)]}, as {shown} is ({name}={text!r})") from None


def chosen(what: str, names: Sequence[str], choices: Collection[str]) -> tuple[str, ...]:
    """Return those of the choices that are named, in the order of the choices; all where none is.

    >>> chosen("strategy", ("lgc",), ("fastest-k", "lgc")), chosen("strategy", (), ("fastest-k", "lgc"))
    (('lgc',), ('fastest-k', 'lgc'))
    """
    for name in names:
        if name not in choices:
            raise unknown(what, name, choices)
    return tuple(choice for choice in choices if choice in (names or choices))


EXPERIMENTS: dict[str, Experiment] = {}
"""The experiments of all modules that are imported, by name: a decorator puts them here."""


def experiment(name: str, **about: Any) -> Callable[[Story], Story]:
    """List a story by its name; `about` are fields of `Experiment`."""

    def listed(story: Story) -> Story:
        if name in EXPERIMENTS:
            raise ValueError(f"two experiments have the name {name!r}")
        EXPERIMENTS[name] = Experiment(name=name, story=story, **about)
        return story

    return listed
