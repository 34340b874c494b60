"""What the experiments on HPSGD that train share: the lanes that are compared, what they train, and a lane's run.

    lane    ssgd, local-sgd, hpsgd as in the paper, hpsgd with `rebase`, psgd
    Case    a network on data, at a rate, for so many rounds; a job for each lane

The laboratory has small networks on digits or Fashion-MNIST, plain SGD, batches of 32, and virtual seconds: a step
takes 0.9 s plus an exponential of mean 0.1 s, and an average of all workers takes as long as two mean steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from experiments.core.recipes import SPLIT, figures, worker_split
from experiments.core.story import Job, Size
from experiments.papers.hpsgd.reached import measured_around
from experiments.papers.published import HPSGD_SETTING
from paceline.recipes import Recipe
from paceline.runs.simulation import simulate
from paceline.traces import Trace
from paceline.traces.records import seconds_to_accuracy

if TYPE_CHECKING:
    from torch import nn

Figure = TypeVar("Figure")

PAPER, REBASED = "hpsgd (paper)", "hpsgd (rebase)"
LANES: dict[str, dict[str, Any]] = {
    "ssgd": {"name": "ssgd"},
    "local-sgd": {"name": "local-sgd", "period": int(HPSGD_SETTING["period"])},
    PAPER: {"name": "hpsgd", "rebase": False},
    REBASED: {"name": "hpsgd", "rebase": True},
    "psgd": {"name": "psgd"},
}
WITHOUT_PSGD = tuple(lane for lane in LANES if lane != "psgd")
OURS = ("ours:\nssgd", "ours:\nlocal-\nsgd", "ours:\nhpsgd\n(paper)", "ours:\nhpsgd\n(rebase)")  # without psgd
TARGETS = (0.4, 0.8)
STEP_SECONDS, NOISE_SECONDS, RING_STEPS = 0.9, 0.1, 2.0
TOY_SECONDS = 0.5
SAMPLES = {"digits": 1500, "fashion-mnist": 60_000, "cifar10": 50_000}


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


SMALL_NETWORK = f"{__name__}:small_network"  # recipes find it by its place
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
    workers: int = 4
    job_seconds: float = 3.0

    @property
    def name(self) -> str:
        """The network's name."""
        return NAMES.get(self.network, self.network)

    @property
    def title(self) -> str:
        """The network and the rate, as tables name them."""
        return f"{self.name}, rate {self.rate:g}"

    @property
    def rounds_of_an_epoch(self) -> float:
        """The rounds in which as many samples are drawn as there are."""
        return SAMPLES[self.data] / self.workers / self.batch

    def recipe(self, lane: str) -> Recipe:
        """Return the recipe of a lane."""
        hops = 2 * (self.workers - 1)
        ring_seconds = RING_STEPS * (STEP_SECONDS + NOISE_SECONDS)
        return Recipe(
            rounds=self.rounds, evaluate_every=self.evaluate_every, evaluation_samples=2000, target_loss=None
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

    def job(self, lane: str) -> Job:
        """Return the job of a lane."""
        recipe, targets = self.recipe(lane), list(TARGETS)
        return Job(
            run_lane,
            lambda seed: {"recipe": recipe.with_seed(seed).to_document(), "targets": targets},
            self.job_seconds,
        )


def full_case(network: str, *, rate: float | None = None, workers: int = 4) -> Case:
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


def paper_cases() -> list[Case]:
    """Return the paper's four networks, each in its own setting."""
    return [full_case(network) for network in ("resnet101", "densenet121", "mobilenetv2", "googlenet")]


def jobs_of(cases: Iterable[Case], lanes: Iterable[str]) -> dict[tuple[str, str], Job]:
    """Return a job for each title of a case, and lane."""
    lanes = tuple(lanes)
    return {(case.title, lane): case.job(lane) for case in cases for lane in lanes}


def by_lane(figures: Mapping[tuple[str, str], Figure], title: str) -> dict[str, Figure]:
    """Return the figures of one case's lanes.

    >>> by_lane({("mlp", "ssgd"): 0.9, ("mlp", "psgd"): 0.8, ("lenet", "ssgd"): 0.7}, "mlp")
    {'ssgd': 0.9, 'psgd': 0.8}
    """
    return {lane: figure for (case, lane), figure in figures.items() if case == title}


def guessed_nothing(key: Any) -> float:
    """Return the accuracy of a run that diverged."""
    return 0.0


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


def setting_remarks(size: Size) -> Iterator[str]:
    """Yield what is not as in the paper (at full size only the seconds), and what the two lanes of HPSGD are.

    >>> len(list(setting_remarks(Size()))), len(list(setting_remarks(Size("full"))))
    (3, 2)
    """
    if size.name != "full":
        yield (
            "Small networks, digits or Fashion-MNIST, batches of 32 and few epochs stand in place of CIFAR-10, batches "
            "of 128 and 100 epochs."
        )
    yield (
        "Seconds are virtual: a step takes 0.9 s plus an exponential of mean 0.1 s, and an average takes as long as "
        "two steps."
    )
    yield (
        "hpsgd (paper) is Algorithm 2 without a barrier. hpsgd (rebase) is the default here: a worker keeps its own "
        "change that is still being averaged. Claims are held against the first."
    )
