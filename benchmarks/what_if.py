"""`paceline what-if` against the world: recorded runs, three alternatives of each predicted, and all of them run.

Ten runs of six to eight seconds each are recorded: 3 to 8 workers, delays of four kinds injected, all strategies with a
server, with and without a codec; two of them over links of a few Mbit/s (network namespaces, tc tbf; needs root and
iproute2, and is left out without). Of each, three alternatives are predicted from the record alone, and then run:

    another strategy, K or codec     the same recipe with that setting: delays are those of the model, also beyond the
                                     draws that the record has
    a worker gone or replaced        the recorded delays of the others, from a file
    links of another rate            the same recipe over links of that rate

Other work on the machine makes real runs slower, and no record of another run tells of it. So a real run during which
other processes had more than a fifth of the cores is run once more, and the less disturbed of the two counts.

A prediction is good if it is within 10 % of the measured time. An order is that of two among a run and its alternatives
whose measured times differ by more than 10 %, and right if predicted so. Seeds other than --seed 0 were used to tune.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.cable import Star, why_not
from benchmarks.options import Options
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from benchmarks.ranks import ROOT, ended_by_signals
from paceline.analysis.what_if import Answer, PredictedRemedy, Wanted, what_if
from paceline.analysis.what_if.checking import check
from paceline.analysis.what_if.measured_run import measured_run
from paceline.recipes import Recipe
from paceline.runs.training import train_recipe
from paceline.traces.recorded_run import read_run

NEAR = 0.10
WITHIN = Bar(sign=">=", limit=0.90, style=".0%")
ORDERED = Bar(sign=">=", limit=0.95, style=".0%")
PORT = 29400
QUICK_ROUNDS = 8
GIVE_UP_SECONDS = 180.0
DISTURBED = 0.2  # share of the cores that others may have during a run


@dataclass(frozen=True, kw_only=True)
class Case:
    """One recorded run: its settings by section, and what is asked of it; `rate` is that of shaped links."""

    name: str
    rounds: int
    workers: int
    strategy: dict[str, Any]
    delay: dict[str, Any]
    asked: tuple[Wanted, ...]
    codec: str = "identity"
    rate: int = 0  # bits per second
    tries: int = 2  # of a run that others disturb

    def recipe(self, seed: int, rounds: int | None = None) -> Recipe:
        """The recipe that is recorded."""
        return Recipe(rounds=rounds or self.rounds, seed=seed).with_settings(
            target_loss=None,
            cluster={"workers": self.workers, "late_work": "partial"},
            strategy=self.strategy,
            delay={"inject": True, **self.delay},
            codec={"name": self.codec},
        )


def _exponential(persistence: int, shift: float = 0.06, mean: float = 0.04) -> dict[str, Any]:
    return {
        "name": "shifted-exponential", "shift_seconds": shift, "mean_seconds": mean, "persistence": persistence
    }  # fmt: skip


def _pareto(persistence: int) -> dict[str, Any]:
    return {"name": "pareto", "scale_seconds": 0.07, "shape": 2.5, "persistence": persistence}


def _slow(factor: float, persistence: int = 3) -> dict[str, Any]:
    return {**_exponential(persistence, 0.05, 0.02), "name": "slow-worker", "slow_workers": 1, "slow_factor": factor}


FULL, ASYNC = {"name": "full"}, {"name": "async"}
CASES = (
    Case(name="full", rounds=40, workers=6, strategy=FULL, delay=_exponential(5),
         asked=(Wanted(strategies=("lgc",), k=(4,)), Wanted(strategies=("async",)), Wanted(without=(2,)))),
    Case(name="full, pareto", rounds=40, workers=4, strategy=FULL, delay=_pareto(1),
         asked=(Wanted(strategies=("lgc",), k=(3,)), Wanted(strategies=("fastest-k",), k=(2,)),
                Wanted(codecs=("qsgd",)))),
    Case(name="lgc 4 of 6", rounds=60, workers=6, strategy={"name": "lgc", "k": 4}, delay=_exponential(10),
         asked=(Wanted(strategies=("full",)), Wanted(k=(3,)), Wanted(k=(5,)))),
    Case(name="lgc 5 of 8, pareto", rounds=60, workers=8, strategy={"name": "lgc", "k": 5}, delay=_pareto(3),
         asked=(Wanted(strategies=("full",)), Wanted(strategies=("async",)), Wanted(replace=(1,)))),
    Case(name="fastest-k 3 of 5, slow", rounds=70, workers=5, strategy={"name": "fastest-k", "k": 3}, delay=_slow(3.0),
         asked=(Wanted(strategies=("full",)), Wanted(strategies=("lgc",), k=(4,)), Wanted(without=(0,)))),
    Case(name="async", rounds=60, workers=4, strategy=ASYNC, delay=_exponential(5),
         asked=(Wanted(strategies=("full",)), Wanted(strategies=("lgc",), k=(3,)), Wanted(replace=(3,)))),
    Case(name="full, one slow", rounds=25, workers=3, strategy=FULL, delay=_slow(4.0),
         asked=(Wanted(strategies=("lgc",), k=(2,)), Wanted(replace=(0,)), Wanted(strategies=("async",)))),
    Case(name="full, qsgd", rounds=40, workers=8, strategy=FULL, delay=_exponential(5), codec="qsgd",
         asked=(Wanted(strategies=("lgc",), k=(6,)), Wanted(codecs=("identity",)), Wanted(strategies=("async",)))),
    Case(name="full, 20 Mbit/s", rounds=35, workers=4, strategy=FULL, delay=_exponential(5), rate=20_000_000,
         asked=(Wanted(links=((None, 2.0),)), Wanted(codecs=("qsgd",)), Wanted(strategies=("lgc",), k=(3,)))),
    Case(name="lgc 2 of 3, 10 Mbit/s", rounds=30, workers=3, strategy={"name": "lgc", "k": 2}, delay=_exponential(5),
         rate=10_000_000,
         asked=(Wanted(links=((None, 0.5),)), Wanted(codecs=("qsgd",)), Wanted(strategies=("full",)))),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One alternative: predicted and measured seconds."""

    case: str
    remedy: str
    mark: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def off(self) -> float:
        """How far the prediction is from the measured time, as a share of that."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(kw_only=True)
class CaseResult:
    """A recorded run, and its alternatives."""

    case: str
    recorded_seconds: float
    error: float
    compared: list[Compared] = field(default_factory=list)

    def orders(self) -> list[bool]:
        """For each pair that differs by more than a tenth when measured: whether it was predicted in that order."""
        pairs = [(self.recorded_seconds, self.recorded_seconds)]
        pairs += [(each.predicted_seconds, each.measured_seconds) for each in self.compared]
        return [
            (one[0] < other[0]) == (one[1] < other[1])
            for one, other in itertools.combinations(pairs, 2)
            if max(one[1], other[1]) > (1 + NEAR) * min(one[1], other[1])
        ]


def run(options: Options) -> None:
    """`python -m benchmarks what-if`."""
    reason = why_not()
    cases = [case for case in CASES if not (case.rate and reason)]
    if options.only:
        words = options.only.split(",")
        cases = [case for number, case in enumerate(CASES) if case in cases and str(number) in words]
    if options.quick:
        cases = [replace(cases[0], workers=3, asked=(Wanted(k=(2,)),), tries=1)] if cases else []
    if not cases:
        raise ValueError(f"what-if: --only {options.only} names none of the runs 0 to {len(CASES) - 1} that can be had")
    folder = Path(tempfile.mkdtemp(prefix="paceline-what-if-"))
    results: list[CaseResult] = []
    try:
        with ended_by_signals(), progress_bar() as progress:
            bar = progress.add_task("what-if", total=sum(1 + len(case.asked) for case in cases))
            for case in cases:
                rounds = QUICK_ROUNDS if options.quick else None
                number = next(at for at, each in enumerate(CASES) if each.name == case.name)
                seed = 100 * options.seed + number
                results.append(
                    _one(case, case.recipe(seed, rounds), folder / str(number), lambda: progress.advance(bar))
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console = tables()
    console.print(_table(results, quick=options.quick))
    if reason:
        console.print(f"runs over shaped links were left out: {reason}")
    save(options, "what-if", _figures(results))


def _one(case: Case, recipe: Recipe, folder: Path, advance: Any) -> CaseResult:
    """Record a run; predict and run its alternatives."""
    recorded = folder / "recorded"
    _real(case, recipe, recorded, case.rate)
    advance()
    result: CaseResult | None = None
    for number, wanted in enumerate(case.asked):
        answer = what_if(recorded, wanted)
        prediction = next(each for each in answer.predictions if not each.remedy.bound)
        result = result or CaseResult(case=case.name, recorded_seconds=answer.run.seconds, error=answer.error.total)
        measured = _alternative(case, recipe, answer, prediction, wanted, folder / f"alternative-{number}")
        result.compared.append(
            Compared(
                case=case.name,
                remedy=prediction.name,
                mark=prediction.mark,
                predicted_seconds=prediction.seconds,
                measured_seconds=measured,
            )
        )
        print(f"{case.name}: {prediction.name}: {result.compared[-1].off:+.1%}", file=sys.stderr)
        advance()
    if result is None:
        raise ValueError(f"nothing is asked of {case.name}")
    return result


def _alternative(
    case: Case, recipe: Recipe, answer: Answer, prediction: PredictedRemedy, wanted: Wanted, folder: Path
) -> float:
    remedy = prediction.remedy
    if wanted.links:
        ((_, factor),) = wanted.links
        return _real(case, recipe, folder, round(case.rate * factor))
    if remedy.workers_kept is not None or remedy.replaced is not None:
        seconds = check(answer, prediction, folder).measured_seconds
        if seconds is None:
            raise ValueError(f"{prediction.name} was not run")
        return seconds
    return _real(case, recipe.with_settings(**(remedy.settings or {})), folder, case.rate)


# -- real runs -------------------------------------------------------------------------------------------------------


def _real(case: Case, recipe: Recipe, folder: Path, rate: int) -> float:
    """Run a recipe for real, on this machine or over shaped links; return the seconds of its rounds."""
    tries: list[tuple[float, float]] = []
    while not tries or (tries[-1][0] > DISTURBED and len(tries) < case.tries):
        place = folder.with_name(f"{folder.name}-{len(tries)}") if tries else folder
        others = _Others()
        if rate:
            _over_links(recipe, place, rate)
        elif not train_recipe(recipe, out=place).outcome.finished:
            raise KeyboardInterrupt
        tries.append((others.share(), measured_run(read_run(place)).seconds))
        if len(tries) == 2 and tries[1][0] < tries[0][0]:  # the record is the one that counts
            shutil.rmtree(folder)
            place.rename(folder)
    return min(tries)[1]


class _Others:
    """Tells which share of the cores other processes than ours had since it was made; 0 where nobody knows."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def share(self) -> float:
        took = max(1e-9, time.monotonic() - self._began) * (os.cpu_count() or 1)
        others = (_busy_seconds() - self._busy) - (_own_seconds() - self._own)
        return max(0.0, others / took)


def _busy_seconds() -> float:
    """Return the seconds that all cores were busy since the machine started, by Linux's count."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _, _, interrupt, soft, *_ = map(int, fields)
    return (user + nice + system + interrupt + soft) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _over_links(recipe: Recipe, folder: Path, rate: int) -> None:
    """Serve the recipe in the middle of a star, to a worker at the end of each cable."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log, file = folder.with_suffix(".log"), folder.with_suffix(".json")
    file.write_text(json.dumps(recipe.to_document()), encoding="utf-8")
    with Star(recipe.cluster.workers, f"{rate}bit") as star, contextlib.ExitStack() as processes:
        server = processes.enter_context(_process(star.hub, log, "server", str(file), str(folder)))
        _until(lambda: "listening" in log.read_text(encoding="utf-8"), server, log)
        for number, spoke in enumerate(star.spokes):
            address = f"{star.hub_address(number)}:{PORT}"
            processes.enter_context(_process(spoke, log, "worker", address, str(number)))
        _until(lambda: server.poll() is not None, server, log)
        if server.returncode:
            raise ValueError(f"what-if: the server failed:\n{log.read_text(encoding='utf-8')[-2000:]}")


@contextlib.contextmanager
def _process(host: str, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this module in a namespace, which does not outlive the block."""
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "benchmarks.what_if", *arguments]
    with log.open("ab") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=out, stderr=out)
    try:
        yield process
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        process.kill()
        process.wait(20)


def _until(happened: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            raise ValueError(f"what-if: the server did not do it:\n{log.read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.05)


def main() -> None:
    """`python -m benchmarks.what_if server RECIPE FOLDER` or `... worker ADDRESS NUMBER`."""
    from paceline.runs.cluster import ServerEndpoint, WorkerOptions, serve_recipe, work_for

    side, place, more = sys.argv[1:]
    if side == "worker":
        work_for(place, WorkerOptions(wish=int(more), threads=1))
        return
    recipe = Recipe.from_document(json.loads(Path(place).read_text(encoding="utf-8")))
    serve_recipe(
        recipe,
        ServerEndpoint(listen=f"0.0.0.0:{PORT}", insecure=True),
        Path(more),
        on_open=lambda address: print("listening", flush=True),
    )


# -- figures ---------------------------------------------------------------------------------------------------------


def _figures(results: Sequence[CaseResult]) -> dict[str, Any]:
    compared = [each for result in results for each in result.compared]
    orders = [order for result in results for order in result.orders()]
    return {
        "runs": [
            {
                "case": result.case,
                "recorded_seconds": result.recorded_seconds,
                "resimulation_error": result.error,
                "alternatives": [
                    {
                        "remedy": each.remedy,
                        "mark": each.mark,
                        "predicted_seconds": each.predicted_seconds,
                        "measured_seconds": each.measured_seconds,
                        "off": each.off,
                    }
                    for each in result.compared
                ],
            }
            for result in results
        ],
        "within": sum(abs(each.off) <= NEAR for each in compared) / max(1, len(compared)),
        "ordered": sum(orders) / len(orders) if orders else None,
        "pairs": len(orders),
    }


def _table(results: Sequence[CaseResult], *, quick: bool) -> Table:
    figures = _figures(results)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("Predicted from a recorded run, and run for real", quick=quick),
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption=f"within {NEAR:.0%}: {WITHIN.show(figures['within'])}, bar {WITHIN}: "
        f"{coloured(WITHIN.verdict(figures['within']))}; right order of {figures['pairs']} pairs: "
        f"{ORDERED.show(figures['ordered'])}, bar {ORDERED}: {coloured(ORDERED.verdict(figures['ordered']))}",
    )
    for heading in ("recorded run", "alternative"):
        table.add_column(heading)
    for heading in ("predicted s", "measured s", "off"):
        table.add_column(heading, justify="right")
    table.add_column("figure")
    for result in results:
        table.add_row(
            result.case, "played again", f"{(1 + result.error) * result.recorded_seconds:.2f}",
            f"{result.recorded_seconds:.2f}", f"{result.error:+.1%}", "",
        )  # fmt: skip
        for each in result.compared:
            table.add_row(
                "", each.remedy, f"{each.predicted_seconds:.2f}", f"{each.measured_seconds:.2f}",
                f"{each.off:+.1%}", each.mark,
            )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
