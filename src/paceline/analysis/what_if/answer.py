"""The question and the answer: which remedies, how long the run would have taken with each, and the words for it.

A prediction is the time that the simulator comes to, times recorded / re-simulated, so that what the simulator does not
know (a run that comes out 3 % short) is not taken for a gain.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.analysis.what_if import remedies
from paceline.analysis.what_if.measured_run import MeasuredRun, WhatIfError, measured_run
from paceline.analysis.what_if.remedies import MOST_UNSEEN, Mark, Remedy
from paceline.analysis.what_if.replayed_times import MOST_ERROR, ReplayDifference, play, played_error
from paceline.quantities import percent_text, seconds_text
from paceline.strategies import LGC, Async, FastestK, Full, bare_name
from paceline.strategies.averaging import AVERAGING
from paceline.strategies.averaging.members import SETTINGS
from paceline.traces.recorded_run import read_run

WORTH_SAYING = 0.05  # share of a round that messages must take for faster ones to be tried unasked
MOST_TRIED = 200
ORDER = ("lgc", "full", "fastest-k", "async")  # of remedies that take equally long, by what they keep of the work


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The remedies that are asked for; nothing of all stands for a sensible list.

    A link is (worker or None for all, factor).

    >>> Wanted(k=(2, "auto")).anything, Wanted().anything
    (True, False)
    """

    k: tuple[int | Literal["auto"], ...] = ()
    strategies: tuple[str, ...] = ()
    period: tuple[int, ...] = ()
    without: tuple[int, ...] = ()
    replace: tuple[int, ...] = ()
    add: tuple[int, ...] = ()
    links: tuple[tuple[int | None, float], ...] = ()
    codecs: tuple[str, ...] = ()
    on_ranks: bool = False

    @property
    def anything(self) -> bool:
        """Whether any remedy is asked for."""
        return any(getattr(self, each.name) for each in dataclasses.fields(self))


@dataclass(frozen=True, kw_only=True, eq=False)
class PredictedRemedy:
    """How long the run would have taken with a remedy; `measured_seconds` is what a real check took."""

    remedy: Remedy
    seconds: float
    saved: float
    mark: Mark
    unseen_share: float = 0.0
    measured_seconds: float | None = None
    check_note: str = ""

    @property
    def name(self) -> str:
        """The remedy's name."""
        return self.remedy.name

    @property
    def off(self) -> float | None:
        """How far the prediction was from the real check, as a share of that."""
        return None if self.measured_seconds is None else self.seconds / self.measured_seconds - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What a recorded run took, how well the simulator plays it again, and what each remedy would have taken."""

    folder: Path
    run: MeasuredRun
    replayed_seconds: float
    error: ReplayDifference
    predictions: tuple[PredictedRemedy, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def best(self) -> PredictedRemedy | None:
        """The remedy that saves most, if one saves anything."""
        found = [each for each in self.predictions if not each.remedy.bound and each.saved > 0]
        return found[0] if found else None

    def to_document(self) -> dict[str, Any]:
        """Return the answer as one machine-readable document."""
        return {
            "run": str(self.folder),
            "strategy": self.run.label,
            "workers": self.run.workers,
            "rounds": self.run.rounds,
            "recorded_seconds": self.run.seconds,
            "resimulated_seconds": self.replayed_seconds,
            "resimulation_error": self.error.total,
            "median_round_error": self.error.median_round,
            "remedies": [
                {
                    "name": each.name,
                    "predicted_seconds": each.seconds,
                    "saved": each.saved,
                    "mark": each.mark,
                    "bound": each.remedy.bound,
                    "unseen_share": each.unseen_share,
                    "how": each.remedy.advice or None,
                    "measured_seconds": each.measured_seconds,
                    "off": each.off,
                    "check": each.check_note or None,
                }
                for each in self.predictions
            ],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Return the document as text."""
        return json.dumps(self.to_document(), indent=2, allow_nan=False)


def what_if(
    folder: str | Path,
    wanted: Wanted | None = None,
    *,
    strategy: str = "",
    on_remedy: Callable[[str], None] = lambda name: None,
) -> Answer:
    """Predict how long a recorded run would have taken with each of some remedies.

    WhatIfError if the run itself is not played again to within a tenth of its time. `strategy` says which run is meant
    where a folder holds several. `on_remedy` is called with the name of each remedy before it is played.
    """
    place = Path(folder)
    run = measured_run(read_run(place, strategy=strategy))
    on_remedy("the run as it was")
    again = play(run)
    error = played_error(run, again)
    if error.refused:
        raise WhatIfError(_refusal(place, run, again.seconds, error))
    tried = list(_tried(run, wanted or Wanted()))
    if len(tried) > MOST_TRIED:
        raise WhatIfError(f"at most {MOST_TRIED} remedies at once ({len(tried):,} were asked for)")
    calibration = run.seconds / again.seconds
    predictions = []
    for remedy in tried:
        on_remedy(remedy.name)
        played = play(remedy.run)
        seconds = played.seconds * calibration
        mark: Mark = "guessed" if played.unseen_share > MOST_UNSEEN else remedy.mark
        predictions.append(
            PredictedRemedy(
                remedy=remedy,
                seconds=seconds,
                saved=1 - seconds / run.seconds,
                mark=mark,
                unseen_share=played.unseen_share,
            )
        )
    predictions.sort(key=lambda each: (round(each.seconds, 6), _preference(each.remedy)))
    return Answer(
        folder=place,
        run=run,
        replayed_seconds=again.seconds,
        error=error,
        predictions=tuple(predictions),
        notes=tuple(_notes(run, predictions)),
    )


def _preference(remedy: Remedy) -> int:
    name = bare_name(remedy.run.label)
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _refusal(folder: Path, run: MeasuredRun, seconds: float, error: ReplayDifference) -> str:
    """Return why nothing is predicted, and what to do."""
    why = run.notes[0] if run.notes else "the record does not explain its time"
    return (
        f"{folder} took {seconds_text(run.seconds)} s, and played again it takes {seconds_text(seconds)} s: "
        f"{error.total:+.0%}, more than {MOST_ERROR:.0%} off, so nothing is predicted from it ({why}); record it again "
        "with step times and nothing else on the machine, or ask `paceline diagnose` where its time went"
    )


# -- which remedies ------------------------------------------------------------------------------------------------


def _tried(run: MeasuredRun, wanted: Wanted) -> Iterable[Remedy]:
    yield remedies.nobody_straggles(run)
    found = _asked(run, wanted) if wanted.anything else _sensible(run)
    seen = set[str]()
    for remedy in found:
        if remedy.name not in seen:
            seen.add(remedy.name)
            yield remedy


def _asked(run: MeasuredRun, wanted: Wanted) -> Iterable[Remedy]:
    averaging = [name for name in wanted.strategies if name in AVERAGING]
    for name in wanted.strategies:
        if name in averaging:
            for period in (wanted.period if "period" in SETTINGS[name] else ()) or (None,):
                yield remedies.with_strategy(run, name, period=period)
            continue
        placed = f"{name}@ranks" if wanted.on_ranks and "@" not in name else name
        waits = bare_name(name) in ("lgc", "fastest-k")
        for k in wanted.k if waits and wanted.k else (None,):
            yield remedies.with_strategy(run, placed, k=k)
    if wanted.k and not any(bare_name(name) in ("lgc", "fastest-k") for name in wanted.strategies):
        for k in wanted.k:
            yield remedies.with_k(run, k)
    if wanted.period and not averaging:
        named = run.member.name if run.member is not None else ""
        name = named if "period" in SETTINGS.get(named, ()) else "local-sgd"
        for period in wanted.period:
            yield remedies.with_strategy(run, name, period=period)
    if wanted.on_ranks and not wanted.strategies:
        yield _on_ranks(run)
    yield from (remedies.without(run, worker) for worker in wanted.without)
    yield from (remedies.replaced(run, worker) for worker in wanted.replace)
    yield from (remedies.added(run, count) for count in wanted.add)
    yield from (remedies.with_links(run, factor, worker) for worker, factor in wanted.links)
    yield from (remedies.with_codec(run, text) for text in wanted.codecs)


def _on_ranks(run: MeasuredRun) -> Remedy:
    if run.on == "ranks":
        raise WhatIfError("the run had no server: leave --on ranks out")
    name = bare_name(run.label)
    name = name if name in ("full", "lgc", "fastest-k") else "lgc"
    return remedies.with_strategy(run, f"{name}@ranks", k=_k_of(run))


def _k_of(run: MeasuredRun) -> int | Literal["auto"] | None:
    return run.strategy.k if isinstance(run.strategy, LGC | FastestK) else None


def _sensible(run: MeasuredRun) -> Iterable[Remedy]:
    """Yield what is worth trying unasked: other rules, the slowest worker gone or cured, better messages."""
    if run.member is None:
        yield from _other_rules(run)
    else:
        for name in ("hpsgd", "local-sgd", "ssgd"):
            if name != run.member.name:
                yield remedies.with_strategy(run, name)
        if run.member.period and run.member.name in ("local-sgd", "bmuf", "diloco"):
            yield remedies.with_strategy(run, run.member.name, period=2 * run.member.period)
    if run.workers > 2:
        yield remedies.without(run, run.slowest)
    if run.workers > 1:
        yield remedies.replaced(run, run.slowest)
    usual = run.seconds / max(1, run.rounds)
    messages = run.transfer_seconds if run.links else (sum(run.server_seconds) / max(1, len(run.server_seconds)))
    if messages > WORTH_SAYING * usual:
        yield remedies.with_links(run, 2.0)
        if run.up_bytes and run.codec == "identity":
            yield remedies.with_codec(run, "qsgd")


def _other_rules(run: MeasuredRun) -> Iterable[Remedy]:
    if not isinstance(run.strategy, Full):
        yield remedies.with_strategy(run, "full")
    if run.workers > 1:
        ks = {max(1, run.workers // 2), -(-7 * run.workers // 10), run.workers - 1} - {_k_of(run), run.workers}
        for k in sorted(ks):
            yield remedies.with_k(run, k)
    if run.on == "server" and not isinstance(run.strategy, Async):
        yield remedies.with_strategy(run, "async")
    if run.on == "ranks" and run.workers > 1:
        yield remedies.with_strategy(run, "hpsgd")


# -- words -------------------------------------------------------------------------------------------------------------


def _notes(run: MeasuredRun, predictions: Sequence[PredictedRemedy]) -> Iterable[str]:
    yield from run.notes
    extrapolated = sum(draw.mark == "extrapolated" for column in run.draws for draw in column)
    draws = sum(map(len, run.draws))
    if extrapolated:
        cut = percent_text(extrapolated / draws)
        yield f"{cut} of the batches were cut short, and are taken as long as their blocks say"
    for each in predictions:
        yield from each.remedy.notes
    if run.processor_seconds is not None and run.was_here:
        share = run.processor_seconds * run.workers * run.rounds / (run.seconds * (os.cpu_count() or 1))
        if share > 0.5:
            busy = percent_text(min(1.0, share))
            yield f"all workers share one machine, whose cores were busy for {busy} of the time"


def error_line(answer: Answer) -> str:
    """Return in one line how well the run is played again."""
    return (
        f"recorded {seconds_text(answer.run.seconds)} s, played again {seconds_text(answer.replayed_seconds)} s: "
        f"{answer.error.total:+.1%} (rounds: {answer.error.median_round:.1%})"
    )


def best_lines(answer: Answer) -> list[str]:
    """Return the best remedy in a sentence, and how to do it."""
    best = answer.best
    if best is None:
        return ["Nothing that was tried is quicker than the run as it was."]
    lines = [
        f"Best: {best.name}, {seconds_text(best.seconds)} s in place of {seconds_text(answer.run.seconds)} s "
        f"({percent_text(best.saved)} less, {best.mark})."
    ]
    if best.remedy.advice:
        lines.append(f"To do it: {best.remedy.advice}")
    if best.mark == "guessed":
        sure = [each for each in answer.predictions if each.mark == "modelled" and not each.remedy.bound]
        if sure and sure[0].saved > 0:
            lines.append(f"Best that is not guessed: {sure[0].name}, {seconds_text(sure[0].seconds)} s.")
    return lines


LOSSES = (
    "Time alone is predicted, for as many rounds; losses are not. lgc adds late work "
    "one round later, where fastest-k throws it away; a small K, async and long "
    "periods learn less in a round."
)
