"""k=auto against every fixed K, by time to a target loss, over delays, their persistence, and the skew of the data.

For each setting, the mean over seeds of the cluster's seconds until the training loss first reaches the target,
for K = 1..N and for auto. The figure is auto's mean against the smallest of the fixed Ks' means.

That is a hard peer, and a flattered one: the best fixed K is the minimum of ten noisy means, picked after the
fact. "held out" picks K by the other seeds and measures it on the seed left out, which is what somebody
who tuned K beforehand would have got.

A run stops at the target. One that does not get there within the rounds has no time, and a mean over seeds of which
one has no time is '-'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal, TypeAlias

from benchmarks.choice_of_k_figures import Figures, Times, figures
from benchmarks.choice_of_k_tables import noise_note, settings_table
from benchmarks.options import Options, chosen
from benchmarks.output import save, tables, titled
from benchmarks.pool import run_all
from paceline.data import Dataset
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data
from paceline.runs.simulation import make_run
from paceline.traces.records import seconds_to_target

K: TypeAlias = int | Literal["auto"]

DELAYS = ("shifted-exponential", "pareto", "slow-worker")
STRATEGIES = ("fastest-k", "lgc")
FIRST_SEED = 200  # constants were fitted on seeds from 100 on
CLASSES = 10  # of digits: a worker that may hold all ten is dealt alike data


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    delays: tuple[str, ...] = DELAYS
    strategies: tuple[str, ...] = STRATEGIES
    persistences: tuple[int, ...] = (1, 10, 50)
    classes_per_worker: tuple[int, ...] = (1, 3, CLASSES)
    ks: tuple[K, ...] = (*range(1, 11), "auto")
    first_seed: int = FIRST_SEED
    seeds: int = 5
    rounds: int = 250
    target_loss: float = 0.05
    evaluate_every: int = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A strategy in a cluster, apart from its K."""

    strategy: str
    delay: str
    persistence: int
    classes_per_worker: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run."""

    setting: Setting
    k: K
    seed: int
    rounds: int
    target_loss: float
    evaluate_every: int

    def recipe(self) -> Recipe:
        """The default recipe with what the task changes; late work is what really happens."""
        base, setting = Recipe(), self.setting
        split = "iid" if setting.classes_per_worker == CLASSES else "non-iid"
        data = dataclasses.replace(base.data, split=split, classes_per_worker=setting.classes_per_worker)
        return dataclasses.replace(
            base,
            seed=self.seed,
            rounds=self.rounds,
            target_loss=self.target_loss,
            evaluate_every=self.evaluate_every,
            data=data,
            delay=dataclasses.replace(base.delay, name=setting.delay, persistence=setting.persistence, slow_factor=5.0),
            cluster=dataclasses.replace(base.cluster, workers=10, late_work="partial"),
            strategy=dataclasses.replace(base.strategy, name=setting.strategy, k=self.k),
        )


@lru_cache(maxsize=1)
def _dataset() -> Dataset:
    return load_data(Recipe())


def time_to_target(task: Task) -> float | None:
    """The cluster's seconds until the target loss, or None; the run ends there."""
    run = make_run(task.recipe(), dataset=_dataset())
    for progress in run:
        if progress.loss is not None and progress.loss <= task.target_loss:
            break
    return seconds_to_target(run.trace)


def run(options: Options) -> None:
    """`python -m benchmarks choice-of-k`."""
    plan = _plan(options)
    settings = [
        Setting(strategy=strategy, delay=delay, persistence=persistence, classes_per_worker=classes)
        for strategy, delay, persistence, classes in product(
            plan.strategies, plan.delays, plan.persistences, plan.classes_per_worker
        )
    ]
    seeds = range(plan.first_seed, plan.first_seed + plan.seeds)
    tasks = [_task(plan, setting, k, seed) for setting in settings for k in plan.ks for seed in seeds]
    seconds = run_all(time_to_target, tasks, label="choice of k: runs")
    measured = {setting: figures(_times(plan, setting, tasks, seconds)) for setting in settings}
    _show(plan, measured, quick=options.quick)
    save(options, "choice-of-k", _document(plan, measured))


def _plan(options: Options) -> Plan:
    plan = Plan(
        delays=chosen(options.only, DELAYS, "delay model"),
        strategies=chosen(options.strategies, STRATEGIES, "strategy"),
        first_seed=options.first_seed or FIRST_SEED,
        seeds=options.seeds or (2 if options.quick else Plan.seeds),
    )
    if not options.quick:
        return plan
    return dataclasses.replace(
        plan,
        delays=plan.delays[:1],
        persistences=(10,),
        classes_per_worker=(3,),
        ks=(7, 10, "auto"),
        rounds=20,
        target_loss=1.0,
    )


def _task(plan: Plan, setting: Setting, k: K, seed: int) -> Task:
    return Task(
        setting=setting,
        k=k,
        seed=seed,
        rounds=plan.rounds,
        target_loss=plan.target_loss,
        evaluate_every=plan.evaluate_every,
    )


def _times(plan: Plan, setting: Setting, tasks: Sequence[Task], seconds: Sequence[float | None]) -> Times:
    """{K: its seconds, seed by seed} of one setting."""
    times: Times = {k: [] for k in plan.ks}
    for task, found in zip(tasks, seconds, strict=True):
        if task.setting == setting:
            times[task.k].append(found)
    return times


def _show(plan: Plan, measured: dict[Setting, Figures], *, quick: bool) -> None:
    console = tables()
    for strategy, delay in product(plan.strategies, plan.delays):
        rows = {
            (setting.persistence, setting.classes_per_worker): found
            for setting, found in measured.items()
            if (setting.strategy, setting.delay) == (strategy, delay)
        }
        seeds = f"seeds {plan.first_seed} to {plan.first_seed + plan.seeds - 1}"
        title = f"{strategy}, {delay}: seconds to loss {plan.target_loss}, mean over {seeds}"
        console.print(settings_table(rows, title=titled(title, quick=quick), judged=strategy == "lgc"))
    for strategy in plan.strategies:
        console.print(noise_note(strategy, [f for s, f in measured.items() if s.strategy == strategy]))


def _document(plan: Plan, measured: dict[Setting, Figures]) -> dict[str, object]:
    rows = [dataclasses.asdict(setting) | found.as_numbers() for setting, found in measured.items()]
    return {"plan": dataclasses.asdict(plan), "rows": rows}
