"""All figures that train share the lanes that are compared, what these train, and a lane's run.

    lane    ssgd, local-sgd, hpsgd as in the paper, hpsgd with `rebase`, psgd
    Case    a network on data, at a rate, for so many rounds; a job for each lane and seed

The laboratory has small networks on digits or Fashion-MNIST, plain SGD, batches of 32, and virtual seconds: a step
takes 0.9 s plus an exponential of mean 0.1 s, and an average of all workers takes as long as two mean steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.recipes import Recipe
from paceline.reproduce.claims import mean
from paceline.reproduce.experiment import ExperimentPlan, Job, Outcome
from paceline.reproduce.hpsgd.reached import Reached, measured_around
from paceline.reproduce.published import HPSGD_SETTING
from paceline.reproduce.recipe_runs import SPLIT, figures, worker_split
from paceline.runs.simulation import simulate
from paceline.traces import Trace
from paceline.traces.records import seconds_to_accuracy

if TYPE_CHECKING:
    from torch import nn

PAPER, REBASED = "hpsgd (paper)", "hpsgd (rebase)"
LANES: dict[str, dict[str, Any]] = {
    "ssgd": {"name": "ssgd"},
    "local-sgd": {"name": "local-sgd", "period": int(HPSGD_SETTING["period"])},
    PAPER: {"name": "hpsgd", "rebase": False},
    REBASED: {"name": "hpsgd", "rebase": True},
    "psgd": {"name": "psgd"},
}
SHOWN = {
    "ssgd": "ssgd",
    "local-sgd": "local-\nsgd",
    PAPER: "hpsgd\n(paper)",
    REBASED: "hpsgd\n(rebase)",
    "psgd": "psgd",
}
WITHOUT_PSGD = tuple(lane for lane in LANES if lane != "psgd")
TARGETS = (0.4, 0.8)
WORKERS = 4
STEP_SECONDS, NOISE_SECONDS, RING_STEPS = 0.9, 0.1, 2.0
TOY_SECONDS = 0.5
SAMPLES = {"digits": 1500, "fashion-mnist": 60_000, "cifar10": 50_000}
SMALLER = (
    "Small networks, digits or Fashion-MNIST, batches of 32 and few epochs stand in place of CIFAR-10, batches of 128 "
    "and 100 epochs."
)
VIRTUAL = (
    "Seconds are virtual: a step takes 0.9 s plus an exponential of mean 0.1 s, and an average takes as long as two "
    "steps."
)
REBASE = (
    "hpsgd (paper) is Algorithm 2 without a barrier. hpsgd (rebase) is the default here: a worker keeps its own change "
    "that is still being averaged. Claims are held against the first."
)


def small_network(*, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return two convolutions with batch normalisation and one linear layer.

    >>> len(small_network(input_shape=(1, 8, 8), classes=10))
    8
    """
    from torch import nn

    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 8, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * (-(-height // 4)) * (-(-width // 4)), classes),
    )  # fmt: skip


SMALL_NETWORK = "paceline.reproduce.hpsgd:small_network"  # the folder's name: outcomes are known by it
NAMES = {SMALL_NETWORK: "small CNN, BN"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case says what is trained: a network on data, at a rate, for so many rounds of the workers' batches.

    >>> Case(network="mlp", rate=0.01, rounds=400).title
    'mlp, rate 0.01'
    """

    network: str
    rate: float
    rounds: int
    data: str = "digits"
    batch: int = 32
    evaluate_every: int = 2
    workers: int = WORKERS
    job_seconds: float = 3.0

    @property
    def title(self) -> str:
        """Return the network and the rate, as tables name them."""
        return f"{NAMES.get(self.network, self.network)}, rate {self.rate:g}"

    @property
    def rounds_of_an_epoch(self) -> float:
        """Return the rounds in which as many samples are drawn as there are."""
        return SAMPLES[self.data] / self.workers / self.batch

    def recipe(self, lane: str, seed: int) -> Recipe:
        """Return the recipe of a lane."""
        hops = 2 * (self.workers - 1)
        ring_seconds = RING_STEPS * (STEP_SECONDS + NOISE_SECONDS)
        return Recipe(
            seed=seed, rounds=self.rounds, evaluate_every=self.evaluate_every, evaluation_samples=2000, target_loss=None
        ).with_settings(
            data={"name": self.data, "split": "iid"},
            model={"name": self.network},
            worker={"batch_size": self.batch},
            optimizer={"lr": self.rate, "momentum": 0.0, "weight_decay": 0.0},  # the paper says SGD, and no more
            cluster={"workers": self.workers},
            delay={"shift_seconds": STEP_SECONDS, "mean_seconds": NOISE_SECONDS, "persistence": 1},
            network={"latency_seconds": ring_seconds / hops},
            strategy=LANES[lane],
        )

    def job(self, lane: str, seed: int) -> Job:
        """Return the job of a lane."""
        settings = {"recipe": self.recipe(lane, seed).to_document(), "targets": list(TARGETS)}
        return Job(name=self.job_name(lane, seed), run=run_lane, settings=settings, seconds=self.job_seconds)

    def job_name(self, lane: str, seed: int) -> str:
        """Return the name of a lane's job, unique among the cases of an experiment."""
        return f"{self.title}, {self.workers} workers, {lane} seed {seed}"


def full_case(network: str, *, rate: float | None = None, workers: int = WORKERS) -> Case:
    """Return the paper's own setting for a network.

    >>> full_case("resnet101").rounds
    9766
    """
    batch, epochs = int(HPSGD_SETTING["batch"]), int(HPSGD_SETTING["epochs"])
    rounds = round(epochs * SAMPLES["cifar10"] / batch / workers)
    return Case(
        network=network,
        rate=float(HPSGD_SETTING["lr"]) if rate is None else rate,
        rounds=rounds,
        data="cifar10",
        batch=batch,
        evaluate_every=max(1, rounds // epochs),
        workers=workers,
        job_seconds=4.0 * rounds * workers,
    )


def run_lane(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate a recipe; return its figures, and where the seconds went up to each target and in all."""
    result = simulate(Recipe.from_document(settings["recipe"]))
    trace = result.trace
    reached = {f"{target:g}": split_around(trace, target) for target in settings["targets"]}
    return {**figures(result), "split": worker_split(trace), "reached": reached}


def split_around(trace: Trace, target: float) -> dict[str, Any] | None:
    """Return the seconds to an accuracy and where they went, and both for the measurements before and after; or None.

    >>> from paceline.traces import Evaluation, Work
    >>> work = Work(worker=0, version=0, started_seconds=0.0, finished_seconds=3.0, arrived_seconds=4.0)
    >>> points = [Evaluation(round=n, seconds=4.0 * n, loss=1.0, accuracy=0.5 * n) for n in range(2)]
    >>> trace = Trace(strategy="ssgd", seed=0, workers=1, recipe={}, rounds_done=1, seconds=4.0, used=1,
    ...               works=(work,), evaluations=tuple(points))
    >>> found = split_around(trace, 0.25)
    >>> [(each["seconds"], each["computing"]) for each in (found["after"], found, found["by"])]
    [(0.0, 0.0), (2.0, 2.0), (4.0, 3.0)]
    """
    seconds, around = seconds_to_accuracy(trace, target), measured_around(trace.evaluations, target)
    if seconds is None or around is None:
        return None
    after, by = around
    return {**_split_until(trace, seconds), "after": _split_until(trace, after), "by": _split_until(trace, by)}


def _split_until(trace: Trace, seconds: float) -> dict[str, float | None]:
    split = worker_split(trace, seconds) if seconds else dict.fromkeys(SPLIT, 0.0)
    return {"seconds": seconds, **split}


def setting_remarks(plan: ExperimentPlan) -> tuple[str, ...]:
    """Return what is not as in the paper, as remarks: at full size only the seconds.

    >>> len(setting_remarks(ExperimentPlan())), len(setting_remarks(ExperimentPlan(size="full")))
    (2, 1)
    """
    return (VIRTUAL,) if plan.size == "full" else (SMALLER, VIRTUAL)


def jobs_of(cases: Sequence[Case], lanes: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """Return a job for each case, lane and seed."""
    return [case.job(lane, seed) for seed in seeds for case in cases for lane in lanes]


def mean_of(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], case: Case, lane: str, *path: str) -> float | None:
    """Return the mean over seeds of a figure that stands under these keys; None where a seed has none."""
    found: list[float | None] = []
    for seed in plan.seeds:
        value: Any = outcomes[case.job_name(lane, seed)]
        for key in path:
            value = None if value is None else value[key]
        found.append(value)
    return mean(found)


def reached_of(
    plan: ExperimentPlan, outcomes: Mapping[str, Outcome], case: Case, lane: str, target: float, part: str = "seconds"
) -> Reached | None:
    """Return the seconds to an accuracy, or a part of them: the mean over seeds; None where a seed never reached it."""
    after, at, by = (
        mean_of(plan, outcomes, case, lane, "reached", f"{target:g}", *key, part) for key in (("after",), (), ("by",))
    )
    return None if after is None or at is None or by is None else Reached(after=after, at=at, by=by)


def accuracy_of(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], case: Case, lane: str) -> float:
    """Return the accuracy at the end; a run that diverged has guessed nothing."""
    return statistics.mean(outcomes[case.job_name(lane, seed)]["accuracy"] or 0.0 for seed in plan.seeds)
