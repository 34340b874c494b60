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
whose measured times differ by more than 10 %, and right if predicted so. Seeds after the first were used to tune.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.core.claims import percent, within
from experiments.core.hosts import Star, why_not
from experiments.core.ranks import ROOT, ended_by_signals
from experiments.core.running import ExperimentError
from experiments.core.story import FIRST_SEED, NAN, Job, Numbers, Outcome, Runs, Size, Skipped, Telling, experiment
from paceline.analysis.what_if import Answer, PredictedRemedy, Wanted, what_if
from paceline.analysis.what_if.checking import check
from paceline.analysis.what_if.measured_run import measured_run
from paceline.lookup import unknown
from paceline.recipes import Recipe
from paceline.reports.table import PlainTable
from paceline.runs.training import train_recipe
from paceline.traces.recorded_run import read_run

NEAR = 0.10
LEAST_NEAR, LEAST_ORDERED = 0.90, 0.95
PORT = 29400
GIVE_UP_SECONDS = 180.0
DISTURBED = 0.2  # share of the cores that others may have during a run


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recorded run: its settings by section, and what is asked of it; `rate` is that of shaped links."""

    name: str
    rounds: int
    workers: int
    strategy: dict[str, Any]
    delay: dict[str, Any]
    asked: tuple[Wanted, ...]
    codec: str = "identity"
    rate: int = 0  # bits per second
    tries: int = 2  # of a run that others disturb

    def recipe(self, seed: int) -> Recipe:
        """Return the recipe that is recorded."""
        return Recipe(rounds=self.rounds, seed=seed).with_settings(
            target_loss=None,
            cluster={"workers": self.workers, "late_work": "partial"},
            strategy=self.strategy,
            delay={"inject": True, **self.delay},
            codec={"name": self.codec},
        )


def exponential(persistence: int, shift: float = 0.06, mean: float = 0.04) -> dict[str, Any]:
    return {
        "name": "shifted-exponential", "shift_seconds": shift, "mean_seconds": mean, "persistence": persistence
    }  # fmt: skip


def pareto(persistence: int) -> dict[str, Any]:
    return {"name": "pareto", "scale_seconds": 0.07, "shape": 2.5, "persistence": persistence}


def slow(factor: float, persistence: int = 3) -> dict[str, Any]:
    return {**exponential(persistence, 0.05, 0.02), "name": "slow-worker", "slow_workers": 1, "slow_factor": factor}


FULL, ASYNC = {"name": "full"}, {"name": "async"}
CASES = (
    Case(name="full", rounds=40, workers=6, strategy=FULL, delay=exponential(5),
         asked=(Wanted(strategies=("lgc",), k=(4,)), Wanted(strategies=("async",)), Wanted(without=(2,)))),
    Case(name="full, pareto", rounds=40, workers=4, strategy=FULL, delay=pareto(1),
         asked=(Wanted(strategies=("lgc",), k=(3,)), Wanted(strategies=("fastest-k",), k=(2,)),
                Wanted(codecs=("qsgd",)))),
    Case(name="lgc 4 of 6", rounds=60, workers=6, strategy={"name": "lgc", "k": 4}, delay=exponential(10),
         asked=(Wanted(strategies=("full",)), Wanted(k=(3,)), Wanted(k=(5,)))),
    Case(name="lgc 5 of 8, pareto", rounds=60, workers=8, strategy={"name": "lgc", "k": 5}, delay=pareto(3),
         asked=(Wanted(strategies=("full",)), Wanted(strategies=("async",)), Wanted(replace=(1,)))),
    Case(name="fastest-k 3 of 5, slow", rounds=70, workers=5, strategy={"name": "fastest-k", "k": 3}, delay=slow(3.0),
         asked=(Wanted(strategies=("full",)), Wanted(strategies=("lgc",), k=(4,)), Wanted(without=(0,)))),
    Case(name="async", rounds=60, workers=4, strategy=ASYNC, delay=exponential(5),
         asked=(Wanted(strategies=("full",)), Wanted(strategies=("lgc",), k=(3,)), Wanted(replace=(3,)))),
    Case(name="full, one slow", rounds=25, workers=3, strategy=FULL, delay=slow(4.0),
         asked=(Wanted(strategies=("lgc",), k=(2,)), Wanted(replace=(0,)), Wanted(strategies=("async",)))),
    Case(name="full, qsgd", rounds=40, workers=8, strategy=FULL, delay=exponential(5), codec="qsgd",
         asked=(Wanted(strategies=("lgc",), k=(6,)), Wanted(codecs=("identity",)), Wanted(strategies=("async",)))),
    Case(name="full, 20 Mbit/s", rounds=35, workers=4, strategy=FULL, delay=exponential(5), rate=20_000_000,
         asked=(Wanted(links=((None, 2.0),)), Wanted(codecs=("qsgd",)), Wanted(strategies=("lgc",), k=(3,)))),
    Case(name="lgc 2 of 3, 10 Mbit/s", rounds=30, workers=3, strategy={"name": "lgc", "k": 2}, delay=exponential(5),
         rate=10_000_000,
         asked=(Wanted(links=((None, 0.5),)), Wanted(codecs=("qsgd",)), Wanted(strategies=("full",)))),
)  # fmt: skip


@experiment("what-if", question="alternatives of recorded runs: predicted, and run for real", minutes=15, timed=True)
def predicted_and_run(size: Size, *, only: tuple[str, ...] = ()) -> Telling:
    """Tell it of all recorded runs, or `only` of those with some numbers, from 0 on."""
    for text in only:
        if text not in map(str, range(len(CASES))):
            raise unknown("run", text, map(str, range(len(CASES))))
    asked = [number for number in range(len(CASES)) if not only or str(number) in only][: size.pick(1, len(CASES))]
    reason = why_not() if any(CASES[number].rate for number in asked) else None
    numbers = [number for number in asked if not (CASES[number].rate and reason)]
    if not numbers:
        yield Skipped(str(reason))
        return

    def job(number: int) -> Job:
        def settings(seed: int) -> dict[str, Any]:
            return {"number": number, "seed": 100 * (seed - FIRST_SEED) + number, "toy": size.toy}

        return Job(run_case, settings, seconds=size.pick(10.0, 90.0))

    runs: Runs = yield {CASES[number].name: job(number) for number in numbers}
    outcomes = [outcome for several in runs.values() for outcome in several]
    rows, near, orders = [], list[bool](), list[bool]()
    for outcome in outcomes:
        recorded, error, alternatives = seconds_of(outcome)
        figures = (f"{(1 + error) * recorded:.2f}", f"{recorded:.2f}", f"{100 * error:+.1f} %", "")
        rows.append((f"{outcome['case']}: played again", *figures))
        for (predicted, measured), each in zip(alternatives, outcome["alternatives"], strict=True):
            off = predicted / measured - 1
            near.append(abs(off) <= NEAR)
            figures = (f"{predicted:.2f}", f"{measured:.2f}", f"{100 * off:+.1f} %", each["mark"])
            rows.append((f"  {each['remedy']}", *figures))
        orders += orders_of([(recorded, recorded), *alternatives])
    yield PlainTable(
        title="Predicted from a recorded run, and run for real",
        headings=("recorded run, alternative", "predicted\ns", "measured\ns", "off", "figure"),
        rows=rows,
    )
    shares = {"within": sum(near) / len(near), "ordered": sum(orders) / len(orders) if orders else NAN}
    text = f"predicted within {100 * NEAR:.0f} % of the measured time, of {len(near)} alternatives"
    yield within(text, shares["within"], least=LEAST_NEAR, kind="bar", write=percent)
    text = f"predicted in the right order, of {len(orders)} pairs"
    yield within(text, shares["ordered"], least=LEAST_ORDERED, kind="bar", write=percent)
    if reason and len(numbers) < len(asked):
        yield f"Runs over shaped links were left out: {reason}."
    yield Numbers({"runs": outcomes, **shares, "pairs": len(orders)})


def seconds_of(outcome: Outcome) -> tuple[float, float, list[tuple[float, float]]]:
    """Return a run's seconds, the error of its replay, and the predicted and measured seconds of its alternatives."""

    def known(found: Mapping[str, Any], name: str) -> float:
        return NAN if found[name] is None else float(found[name])

    pairs = [(known(each, "predicted_seconds"), known(each, "measured_seconds")) for each in outcome["alternatives"]]
    return known(outcome, "recorded_seconds"), known(outcome, "resimulation_error"), pairs


def orders_of(pairs: list[tuple[float, float]]) -> list[bool]:
    """Return for each two that differ by more than a tenth when measured whether they were predicted in that order.

    >>> orders_of([(1.0, 1.0), (1.5, 1.05), (0.9, 2.0)])
    [False, False]
    """
    return [
        (one[0] < other[0]) == (one[1] < other[1])
        for one, other in itertools.combinations(pairs, 2)
        if max(one[1], other[1]) > (1 + NEAR) * min(one[1], other[1])
    ]


# -- a recorded run and its alternatives -------------------------------------------------------------------------------


def run_case(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Record a run; predict its alternatives and run them."""
    case = CASES[settings["number"]]
    if settings["toy"]:
        case = replace(case, rounds=8, workers=3, asked=(Wanted(k=(2,)),), tries=1)
    recipe, alternatives = case.recipe(settings["seed"]), []
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="paceline-what-if-") as name:
        folder = Path(name)
        recorded = folder / "recorded"
        real(case, recipe, recorded, case.rate)
        for number, wanted in enumerate(case.asked):
            answer = what_if(recorded, wanted)
            prediction = next(each for each in answer.predictions if not each.remedy.bound)
            measured = alternative(case, recipe, answer, prediction, wanted, folder / f"alternative-{number}")
            alternatives.append(
                {
                    "remedy": prediction.name,
                    "mark": prediction.mark,
                    "predicted_seconds": prediction.seconds,
                    "measured_seconds": measured,
                }
            )
    return {
        "case": case.name,
        "recorded_seconds": answer.run.seconds,
        "resimulation_error": answer.error.total,
        "alternatives": alternatives,
    }


def alternative(
    case: Case, recipe: Recipe, answer: Answer, prediction: PredictedRemedy, wanted: Wanted, folder: Path
) -> float:
    """Run an alternative for real, and return its seconds."""
    remedy = prediction.remedy
    if wanted.links:
        ((_, factor),) = wanted.links
        return real(case, recipe, folder, round(case.rate * factor))
    if remedy.workers_kept is not None or remedy.replaced is not None:
        seconds = check(answer, prediction, folder).measured_seconds
        if seconds is None:
            raise ExperimentError(f"{prediction.name} was not run")
        return seconds
    changed: dict[str, Any] = dict(remedy.settings or {})
    return real(case, recipe.with_settings(**changed), folder, case.rate)


# -- real runs -------------------------------------------------------------------------------------------------------


def real(case: Case, recipe: Recipe, folder: Path, rate: int) -> float:
    """Run a recipe for real, on this machine or over shaped links; return the seconds of its rounds."""
    tries: list[tuple[float, float]] = []
    while not tries or (tries[-1][0] > DISTURBED and len(tries) < case.tries):
        place = folder.with_name(f"{folder.name}-{len(tries)}") if tries else folder
        others = Others()
        if rate:
            over_links(recipe, place, rate)
        elif not train_recipe(recipe, out=place).outcome.finished:
            raise KeyboardInterrupt
        tries.append((others.share(), measured_run(read_run(place)).seconds))
        if len(tries) == 2 and tries[1][0] < tries[0][0]:  # the record is the one that counts
            shutil.rmtree(folder)
            place.rename(folder)
    return min(tries)[1]


class Others:
    """Tells which share of the cores other processes than ours had since it was made; 0 where that is not known."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), busy_seconds(), own_seconds()

    def share(self) -> float:
        took = max(1e-9, time.monotonic() - self._began) * (os.cpu_count() or 1)
        others = (busy_seconds() - self._busy) - (own_seconds() - self._own)
        return max(0.0, others / took)


def busy_seconds() -> float:
    """Return the seconds that all cores were busy since the machine started, by Linux's count."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _, _, interrupt, soft, *_ = map(int, fields)
    return (user + nice + system + interrupt + soft) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def over_links(recipe: Recipe, folder: Path, rate: int) -> None:
    """Serve the recipe in the middle of a star, to a worker at the end of each cable."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log, file = folder.with_suffix(".log"), folder.with_suffix(".json")
    file.write_text(json.dumps(recipe.to_document()), encoding="utf-8")
    with Star(recipe.cluster.workers, f"{rate}bit") as star, contextlib.ExitStack() as processes:
        server = processes.enter_context(process(star.hub, log, "server", str(file), str(folder)))
        until(lambda: "listening" in log.read_text(encoding="utf-8"), server, log)
        for number, spoke in enumerate(star.spokes):
            address = f"{star.hub_address(number)}:{PORT}"
            processes.enter_context(process(spoke, log, "worker", address, str(number)))
        until(lambda: server.poll() is not None, server, log)
        if server.returncode:
            raise ExperimentError(f"the server failed:\n{log.read_text(encoding='utf-8')[-2000:]}")


@contextlib.contextmanager
def process(host: str, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of this module in a namespace; it does not outlive the block."""
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "experiments.questions.what_if", *arguments]
    with log.open("ab") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=out, stderr=out)
    try:
        yield process
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        process.kill()
        process.wait(20)


def until(happened: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            raise ExperimentError(f"the server did not do it:\n{log.read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.05)


def main() -> None:
    """Be the server or a worker of a run over links: `... server RECIPE FOLDER` or `... worker ADDRESS NUMBER`."""
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


if __name__ == "__main__":
    main()
