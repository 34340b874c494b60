"""Hierarchical Parallel SGD: its figures.

    hpsgd-4a         accuracy over samples, several networks, 4 workers
    hpsgd-4b         the same for 4 to 16 workers
    hpsgd-5a         scale efficiency, by simulated times alone
    hpsgd-5b         seconds of an epoch
    hpsgd-6a         seconds to 40 % and to 80 % accuracy: computing, and everything else
    hpsgd-6b         the same totals for several networks
    hpsgd-analysis   section 3.2: averages and local steps in the time of a loop of Local SGD

The laboratory has small networks on digits or Fashion-MNIST, plain SGD, batches of 32, and virtual seconds: a step
takes 0.9 s plus an exponential of mean 0.1 s, and an average of all workers as long as two mean steps. HPSGD is shown
twice: as the paper has it (`rebase` off), and as it is here by default (on). Claims are held against the first.

Two settings are shown where seconds to an accuracy count: the paper's rate of 0.01, and a rate five times higher with
another network.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.quantities import percent_text
from paceline.recipes import Recipe
from paceline.reports.chart import Chart
from paceline.reports.figures import Series, bar_chart, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, mean, percent, within
from paceline.reproduce.experiment import Claim, Experiment, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.published import HPSGD_FIGURE_5A, HPSGD_SETTING
from paceline.reproduce.recipe_runs import SPLIT, figures, worker_split
from paceline.reproduce.scaling import HARDWARE, batches_per_second, implied_by
from paceline.runs.simulation import simulate
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
SETTING = (
    "Small networks, digits or Fashion-MNIST, batches of 32 and few epochs in place of CIFAR-10, batches of 128 and "
    "100 epochs. Seconds are virtual: a step takes 0.9 s plus an exponential of mean 0.1 s, an average as long as two "
    "steps."
)
REBASE = (
    "hpsgd (paper) is Algorithm 2 without a barrier. hpsgd (rebase) is the default here: a worker keeps its own change "
    "that is still being averaged. Claims are held against the first."
)
BETWEEN = (
    "A target is reached on the straight line between two measurements. local-sgd is measured after its averages, "
    "every 8 steps: where it reaches a target before the first of them, its seconds are that line's alone."
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


SMALL_NETWORK = f"{__name__}:small_network"
NAMES = {SMALL_NETWORK: "small CNN, BN"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained: a network on data, at a rate, for so many rounds of the workers' batches.

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
        """The network and the rate, as tables name them."""
        return f"{NAMES.get(self.network, self.network)}, rate {self.rate:g}"

    @property
    def rounds_of_an_epoch(self) -> float:
        """The rounds in which as many samples are drawn as there are."""
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
    reached: dict[str, dict[str, float | None] | None] = {}
    for target in settings["targets"]:
        seconds = seconds_to_accuracy(trace, target)
        reached[f"{target:g}"] = None if seconds is None else {"seconds": seconds, **worker_split(trace, seconds)}
    return {**figures(result), "split": worker_split(trace), "reached": reached}


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


def accuracy_of(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], case: Case, lane: str) -> float:
    """Return the accuracy at the end; a run that diverged has guessed nothing."""
    return statistics.mean(outcomes[case.job_name(lane, seed)]["accuracy"] or 0.0 for seed in plan.seeds)


# -- figures 4a and 4b -------------------------------------------------------------------------------------------------


def cases_of_figure_4a(plan: ExperimentPlan) -> list[Case]:
    if plan.size == "full":
        return [full_case(network) for network in ("resnet101", "densenet121", "mobilenetv2", "googlenet")]
    if plan.toy:
        return [Case(network="mlp", rate=0.01, rounds=16, evaluate_every=4, job_seconds=TOY_SECONDS)]
    return [
        Case(network=network, rate=0.01, rounds=600, data="fashion-mnist", evaluate_every=20, job_seconds=seconds)
        for network, seconds in (("mlp", 6.0), ("lenet", 22.0), (SMALL_NETWORK, 10.0))
    ]


def jobs_of_figure_4a(plan: ExperimentPlan) -> list[Job]:
    return jobs_of(cases_of_figure_4a(plan), WITHOUT_PSGD, plan.seeds)


def curve_of(outcome: Outcome, case: Case) -> list[tuple[float, float | None]]:
    """Return the accuracy over epochs."""
    return [(point["round"] / case.rounds_of_an_epoch, point["accuracy"]) for point in outcome["curve"]]


def roughness(curve: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the standard deviation of the changes from one measurement to the next, over the second half of a curve.

    >>> roughness([(epoch, 0.5) for epoch in range(6)])
    0.0
    >>> roughness([(0, 0.1), (1, 0.5), (2, 0.5), (3, 0.7), (4, 0.5), (5, 0.7)]) > 0.1
    True
    """
    half = [value for at, value in curve if value is not None and at >= curve[-1][0] / 2]
    changes = [after - before for before, after in itertools.pairwise(half)]
    return statistics.pstdev(changes) if len(changes) > 1 else None


def conclude_figure_4a(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, claims, charts = [], list[Claim](), list[Chart]()
    numbers: dict[str, Any] = {}
    for case in cases_of_figure_4a(plan):
        ends = {lane: accuracy_of(plan, outcomes, case, lane) for lane in WITHOUT_PSGD}
        curves = {lane: curve_of(outcomes[case.job_name(lane, plan.seeds[0])], case) for lane in WITHOUT_PSGD}
        rough = {
            lane: mean([roughness(curve_of(outcomes[case.job_name(lane, seed)], case)) for seed in plan.seeds])
            for lane in WITHOUT_PSGD
        }
        rows.append((case.title, *(percent(ends[lane]) for lane in WITHOUT_PSGD), "hpsgd = ssgd"))
        rows.append(("  roughness, points", *(_points(rough[lane]) for lane in WITHOUT_PSGD), "hpsgd smoothest"))
        name = NAMES.get(case.network, case.network)
        claims.append(
            within(
                f"HPSGD's accuracy at the end is SSGD's to half a point, {name}",
                abs(ends[PAPER] - ends["ssgd"]),
                most=0.005,
                kind="shape",
                write=percent,
            )
        )
        for other in ("ssgd", "local-sgd"):
            claims.append(
                ahead(
                    f"HPSGD's curve is smoother than that of {other}, {name}",
                    {PAPER: rough[PAPER], other: rough[other]},
                    best="low",
                    write=_points,
                )
            )
        claims.append(
            within(
                f"hpsgd with rebase: its accuracy less SSGD's, {name}",
                ends[REBASED] - ends["ssgd"],
                least=-0.005,
                write=percent,
                judged=False,
            )
        )
        charts.append(
            line_chart(
                f"accuracy-{len(charts)}",
                f"Test accuracy, {case.title}",
                "The paper's figure 4a has a panel for each network.",
                [Series(name=lane, points=curve) for lane, curve in curves.items()],
                x="epochs",
                y="test accuracy",
                percent=True,
                wide=False,
            )
        )
        numbers[name] = {"accuracy": ends, "roughness": rough}
    return Findings(
        tables=(
            PlainTable(
                title="Test accuracy at the end, and how rough the curve is",
                headings=("network", *(f"ours:\n{SHOWN[lane]}" for lane in WITHOUT_PSGD), "paper"),
                rows=rows,
                caption="roughness: standard deviation of the change from one measurement to the next, in the second "
                "half.\nThe paper's curves are not readable.",
            ),
        ),
        claims=tuple(claims),
        charts=tuple(charts),
        series=WITHOUT_PSGD,
        remarks=(
            SETTING,
            REBASE,
            "The laboratory's 600 rounds are 1.3 epochs: curves still rise where the paper's end after 100, and what "
            "is behind at the end may catch up.",
        ),
        numbers=numbers,
    )


def _points(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.2f}"


def cases_of_figure_4b(plan: ExperimentPlan) -> list[Case]:
    sizes = (4, 16) if plan.toy else (4, 8, 12, 16)
    if plan.size == "full":
        return [full_case("resnet101", workers=workers) for workers in sizes]
    steps = 64 if plan.toy else 1600  # of all workers
    return [
        Case(network="mlp", rate=0.01, rounds=round(steps / workers), evaluate_every=max(1, 40 // workers),
             workers=workers, job_seconds=TOY_SECONDS if plan.toy else 2.5)
        for workers in sizes
    ]  # fmt: skip


def jobs_of_figure_4b(plan: ExperimentPlan) -> list[Job]:
    return jobs_of(cases_of_figure_4b(plan), WITHOUT_PSGD, plan.seeds)


def conclude_figure_4b(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    cases = cases_of_figure_4b(plan)
    ends = {lane: {case.workers: accuracy_of(plan, outcomes, case, lane) for case in cases} for lane in WITHOUT_PSGD}
    claims = []
    for case in cases:
        claims.append(
            within(
                f"HPSGD at most a point behind SSGD, {case.workers} workers",
                ends["ssgd"][case.workers] - ends[PAPER][case.workers],
                most=0.01,
                kind="shape",
                write=percent,
                judged=False,
            )
        )
    first, last = cases[0].workers, cases[-1].workers
    lost = {lane: ends[lane][first] - ends[lane][last] for lane in WITHOUT_PSGD}
    claims.append(
        within(
            f"HPSGD loses at most a point more than SSGD from {first} to {last} workers",
            lost[PAPER] - lost["ssgd"],
            most=0.01,
            kind="shape",
            write=percent,
        )
    )
    return Findings(
        tables=(
            PlainTable(
                title="Test accuracy after equally many samples, by the number of workers",
                headings=("workers", *(f"ours:\n{SHOWN[lane]}" for lane in WITHOUT_PSGD), "paper"),
                rows=[
                    (str(case.workers), *(percent(ends[lane][case.workers]) for lane in WITHOUT_PSGD), "not readable")
                    for case in cases
                ],
                caption=f"{cases[0].title}. The text says nothing of figure 4b.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            bar_chart(
                "workers",
                "Test accuracy after equally many samples",
                "Every worker's batch is the same, so with more workers there are fewer, larger steps.",
                [str(case.workers) for case in cases],
                {lane: [ends[lane][case.workers] for case in cases] for lane in WITHOUT_PSGD},
                x="workers",
                y="test accuracy",
                percent=True,
            ),
        ),
        series=WITHOUT_PSGD,
        remarks=(SETTING, REBASE, "What counts as the same is ours: the paper prints no number of figure 4b."),
        numbers={lane: {str(workers): value for workers, value in found.items()} for lane, found in ends.items()},
    )


# -- figure 5a ---------------------------------------------------------------------------------------------------------

MEMBERS = ("ssgd", "local-sgd", "hpsgd", "psgd")
SAME = 0.10  # two efficiencies are the same if they differ by no more than this share


def run_scale(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batches in a second of all workers together.

    >>> run_scale({"hardware": "cluster", "member": "psgd", "workers": 1, "rounds": 20})["batches_per_second"] > 4
    True
    """
    speed = batches_per_second(settings["hardware"], settings["member"], settings["workers"], settings["rounds"])
    return {"batches_per_second": speed}


def sizes_of_figure_5a(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the numbers of workers: the paper's."""
    return (4, 16) if plan.toy else (4, 8, 12, 16)


def jobs_of_figure_5a(plan: ExperimentPlan) -> list[Job]:
    rounds = plan.choose(toy=10, laboratory=400, full=9766)
    cells = [
        (hardware, member, workers)
        for hardware in HARDWARE
        for member in MEMBERS
        for workers in sizes_of_figure_5a(plan)
    ]
    return [
        Job(
            name=f"{hardware}, {member}, {workers}",
            run=run_scale,
            settings={"hardware": hardware, "member": member, "workers": workers, "rounds": rounds},
            seconds=plan.choose(toy=0.1, laboratory=0.5, full=10.0),
        )
        for hardware, member, workers in (("station", "psgd", 1), *cells)
    ]


def conclude_figure_5a(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    sizes = sizes_of_figure_5a(plan)
    alone = outcomes["station, psgd, 1"]["batches_per_second"]
    found = {
        (hardware, member, workers): outcomes[f"{hardware}, {member}, {workers}"]["batches_per_second"]
        / workers
        / alone
        for hardware in HARDWARE
        for member in MEMBERS
        for workers in sizes
    }
    gains, claims = [], list[Claim]()
    for hardware in HARDWARE:
        least = {
            other: min(found[hardware, first, workers] / found[hardware, other, workers] for workers in sizes)
            for first, other in (("hpsgd", "local-sgd"), ("local-sgd", "ssgd"))
        }
        claims.append(
            within(f"HPSGD / Local SGD, the least of all N, {hardware}", least["local-sgd"], least=0.99, kind="winner")
        )
        claims.append(
            within(f"Local SGD / SSGD, the least of all N, {hardware}", least["ssgd"], least=1.05, kind="winner")
        )
        kept = {member: found[hardware, member, sizes[-1]] / found[hardware, member, sizes[0]] for member in MEMBERS}
        claims.append(
            ahead(
                f"share of its efficiency that is kept from {sizes[0]} to {sizes[-1]} workers, {hardware}",
                {member: kept[member] for member in ("hpsgd", "local-sgd")},
                best="high",
                write=percent,
            )
        )
        for workers, over, gain in HPSGD_FIGURE_5A:
            ours = found[hardware, "hpsgd", workers] / found[hardware, over, workers] - 1
            gains.append((f"over {over}, {workers} workers, {hardware}", percent_text(gain), percent_text(ours)))
            claims.append(
                within(
                    f"HPSGD's gain over {over} is {percent_text(gain)} to a tenth, {workers} workers, {hardware}",
                    ours,
                    least=(1 - SAME) * (1 + gain) - 1,
                    most=(1 + SAME) * (1 + gain) - 1,
                    write=percent,
                )
            )
    implied = [implied_by(workers) for workers in sorted({workers for workers, _, _ in HPSGD_FIGURE_5A})]
    return Findings(
        tables=(
            PlainTable(
                title="Scale efficiency",
                headings=("hardware", "member", *(f"ours:\n{workers}" for workers in sizes)),
                rows=[
                    (hardware, member, *(percent(found[hardware, member, workers]) for workers in sizes))
                    for hardware in HARDWARE
                    for member in MEMBERS
                ],
                caption="100 %: N workers are N times as fast as one alone.",
            ),
            PlainTable(title="HPSGD's gain in scale efficiency", headings=("gain", "paper", "ours"), rows=gains),
            PlainTable(
                title="What the paper's gains imply, in mean steps",
                headings=(
                    "workers",
                    "ring,\nby ssgd",
                    "ring, by\nlocal-sgd",
                    "ring,\nby both",
                    "slowest step,\nby both",
                ),
                rows=[
                    (
                        f"{row['workers']:.0f}",
                        *(f"{row[name]:.2f}" for name in ("ring_by_ssgd", "ring_by_local_sgd", "ring", "slowest")),
                    )
                    for row in implied
                ],
                caption="If all workers were equally fast, the first two would be the same; a slowest step below 1\n"
                "cannot be. So the four gains do not go together.",
            ),
        ),
        claims=tuple(claims),
        charts=tuple(
            line_chart(
                f"efficiency-{index}",
                f"Scale efficiency, {hardware}",
                "Times are simulated, nothing is trained.",
                [
                    Series(name=member, points=[(workers, found[hardware, member, workers]) for workers in sizes])
                    for member in MEMBERS
                ],
                x="workers",
                y="scale efficiency",
                percent=True,
                wide=False,
            )
            for index, hardware in enumerate(HARDWARE)
        ),
        series=MEMBERS,
        remarks=(
            "The paper tells neither the seconds of a step nor the link. Ours: 0.20 s plus an exponential of mean "
            "0.02 s, messages of 170 MB; station: 80 Gbit/s that all share; 4 GPUs: the same, and N workers share 4 "
            "processors; cluster: 10 Gbit/s for each.",
        ),
        numbers={"efficiency": {f"{h}, {m}, {n}": value for (h, m, n), value in found.items()}, "implied": implied},
    )


# -- figures 5b and 6a -------------------------------------------------------------------------------------------------


def cases_of_figure_6a(plan: ExperimentPlan) -> list[Case]:
    """Return the paper's rate, and one that is five times as high."""
    if plan.size == "full":
        return [full_case("resnet101"), full_case("resnet101", rate=0.05)]
    if plan.toy:
        return [
            Case(network="mlp", rate=rate, rounds=8, evaluate_every=4, job_seconds=TOY_SECONDS) for rate in (0.01, 0.05)
        ]
    return [
        Case(network="mlp", rate=0.01, rounds=400, job_seconds=4.0),
        Case(network="lenet", rate=0.05, rounds=200, job_seconds=3.5),
    ]


def cases_of_figure_5b(plan: ExperimentPlan) -> list[Case]:
    return cases_of_figure_6a(plan)[:1]


def jobs_of_figure_5b(plan: ExperimentPlan) -> list[Job]:
    return jobs_of(cases_of_figure_5b(plan), tuple(LANES), plan.seeds)


def conclude_figure_5b(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    case = cases_of_figure_5b(plan)[0]

    def of_an_epoch(lane: str, *path: str) -> float | None:
        found = mean_of(plan, outcomes, case, lane, *path)
        rounds = mean_of(plan, outcomes, case, lane, "rounds")
        return None if found is None or not rounds else found / rounds * case.rounds_of_an_epoch

    total = {lane: of_an_epoch(lane, "seconds") for lane in LANES}
    split = {part: [of_an_epoch(lane, "split", part) for lane in LANES] for part in SPLIT}
    place = {lane: index + 1 for index, lane in enumerate(("psgd", "hpsgd", "local-sgd", "ssgd"))}
    hpsgd, psgd = total[PAPER], total["psgd"]
    behind = None if hpsgd is None or not psgd else hpsgd / psgd - 1
    return Findings(
        tables=(
            PlainTable(
                title="Seconds of an epoch",
                headings=("method", "ours", *(f"of which\n{part}" for part in SPLIT), "paper:\nplace"),
                rows=[
                    (
                        lane,
                        _seconds(total[lane]),
                        *(_seconds(split[part][index]) for part in SPLIT),
                        str(place["hpsgd" if lane in (PAPER, REBASED) else lane]),
                    )
                    for index, lane in enumerate(LANES)
                ],
                caption=f"{case.title}, {case.workers} workers. The paper's bars are not readable; PSGD is its lower "
                "bound.",
            ),
        ),
        claims=(
            ahead(
                "an epoch of HPSGD is shorter than one of Local SGD, and that than one of SSGD",
                {PAPER: total[PAPER], "local-sgd": total["local-sgd"], "ssgd": total["ssgd"]},
                best="low",
                write=_seconds,
            ),
            ahead(
                "PSGD is the lower bound",
                {"psgd": psgd, PAPER: hpsgd},
                best="low",
                strictly=False,
                write=_seconds,
            ),
            within("HPSGD at most 5 % above PSGD", behind, most=0.05, kind="shape", write=percent),
        ),
        charts=(
            bar_chart(
                "epoch",
                "Seconds of an epoch",
                "Means over the workers. What goes on beside computing costs nothing.",
                list(LANES),
                split,
                y="seconds",
            ),
        ),
        series=SPLIT,
        remarks=(SETTING, REBASE),
        numbers={"seconds": total, "split": {part: dict(zip(LANES, split[part], strict=True)) for part in SPLIT}},
    )


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


def jobs_of_figure_6a(plan: ExperimentPlan) -> list[Job]:
    return jobs_of(cases_of_figure_6a(plan), tuple(LANES), plan.seeds)


PAPER_WORDS = {
    "ssgd": "-",
    "local-sgd": "< ssgd",
    PAPER: "least",
    REBASED: "-",
    "psgd": "not in it",
}
PAPER_COMPUTING = {"local-sgd": "> ssgd", PAPER: "= ssgd"}


def conclude_figure_6a(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    tables, claims, charts = [], list[Claim](), list[Chart]()
    numbers: dict[str, Any] = {}
    for case in cases_of_figure_6a(plan):
        for target in TARGETS:
            key = f"{target:g}"
            found = {
                lane: {part: mean_of(plan, outcomes, case, lane, "reached", key, part) for part in ("seconds", *SPLIT)}
                for lane in LANES
            }
            tables.append(
                PlainTable(
                    title=f"Seconds to {percent_text(target)} accuracy: {case.title}",
                    headings=("method", "ours", *(f"of which\n{part}" for part in SPLIT), "paper", "paper,\ncomputing"),
                    rows=[
                        (
                            lane,
                            *(_seconds(found[lane][part]) for part in ("seconds", *SPLIT)),
                            PAPER_WORDS[lane],
                            PAPER_COMPUTING.get(lane, "-"),
                        )
                        for lane in LANES
                    ],
                )
            )
            claims += _figure_6a_claims(f"{percent_text(target)}, {case.title}", found)
            charts.append(
                bar_chart(
                    f"to-{len(charts)}",
                    f"Seconds to {percent_text(target)} accuracy: {case.title}",
                    "",
                    list(LANES),
                    {part: [found[lane][part] for lane in LANES] for part in SPLIT},
                    y="seconds",
                    wide=False,
                )
            )
            numbers[f"{case.title}, {key}"] = found
    return Findings(
        tables=tuple(tables),
        claims=tuple(claims),
        charts=tuple(charts),
        series=SPLIT,
        remarks=(SETTING, REBASE, BETWEEN),
        numbers=numbers,
    )


def _figure_6a_claims(where: str, found: Mapping[str, Mapping[str, float | None]]) -> list[Claim]:
    def ratio(first: float | None, second: float | None) -> float | None:
        return None if first is None or not second else first / second

    seconds = {lane: figures["seconds"] for lane, figures in found.items()}
    computing = {lane: figures["computing"] for lane, figures in found.items()}
    paper = found[PAPER]
    rest = None if paper["waiting"] is None or paper["network"] is None else paper["waiting"] + paper["network"]
    return [
        ahead(
            f"HPSGD before Local SGD before SSGD: {where}",
            {lane: seconds[lane] for lane in (PAPER, "local-sgd", "ssgd")},
            best="low",
            write=_seconds,
        ),
        within(
            f"HPSGD computes as long as SSGD, to 10 %: {where}",
            ratio(computing[PAPER], computing["ssgd"]),
            least=0.9,
            most=1.1,
            kind="shape",
        ),
        ahead(
            f"Local SGD computes longer than SSGD: {where}",
            {lane: computing[lane] for lane in ("ssgd", "local-sgd")},
            best="low",
            write=_seconds,
        ),
        within(
            f"HPSGD's share of time besides computing: {where}",
            ratio(rest, paper["seconds"]),
            most=0.05,
            kind="shape",
            write=percent,
            judged=False,  # the simulated one never waits: it could not fail
        ),
        ahead(
            f"hpsgd with rebase before Local SGD before SSGD: {where}",
            {lane: seconds[lane] for lane in (REBASED, "local-sgd", "ssgd")},
            best="low",
            write=_seconds,
            judged=False,
        ),
    ]


# -- figure 6b ---------------------------------------------------------------------------------------------------------


def cases_of_figure_6b(plan: ExperimentPlan) -> list[Case]:
    if plan.size == "full":
        return [full_case(network) for network in ("resnet101", "densenet121", "mobilenetv2", "googlenet")]
    if plan.toy:
        return [Case(network=SMALL_NETWORK, rate=0.01, rounds=8, evaluate_every=4, job_seconds=TOY_SECONDS)]
    return [*cases_of_figure_6a(plan), Case(network=SMALL_NETWORK, rate=0.01, rounds=400, job_seconds=6.0)]


def jobs_of_figure_6b(plan: ExperimentPlan) -> list[Job]:
    return jobs_of(cases_of_figure_6b(plan), WITHOUT_PSGD, plan.seeds)


def conclude_figure_6b(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, claims, cells = [], list[Claim](), dict[tuple[str, float], dict[str, float | None]]()
    for case in cases_of_figure_6b(plan):
        for target in TARGETS:
            found = {
                lane: mean_of(plan, outcomes, case, lane, "reached", f"{target:g}", "seconds") for lane in WITHOUT_PSGD
            }
            cells[case.title, target] = found
            rows.append(
                (
                    f"{case.title}, {percent_text(target)}",
                    *(_seconds(found[lane]) for lane in WITHOUT_PSGD),
                    "hpsgd soonest",
                )
            )
            for other in ("local-sgd", "ssgd"):
                claims.append(
                    ahead(
                        f"HPSGD before {other} at {percent_text(target)}, {case.title}",
                        {PAPER: found[PAPER], other: found[other]},
                        best="low",
                        write=_seconds,
                    )
                )
            claims.append(
                ahead(
                    f"hpsgd with rebase before both at {percent_text(target)}, {case.title}",
                    {lane: found[lane] for lane in (REBASED, "local-sgd", "ssgd")},
                    best="low",
                    write=_seconds,
                    judged=False,
                )
            )
    return Findings(
        tables=(
            PlainTable(
                title="Seconds to an accuracy",
                headings=("network, target", *(f"ours:\n{SHOWN[lane]}" for lane in WITHOUT_PSGD), "paper"),
                rows=rows,
                caption="The paper's bars are not readable.",
            ),
        ),
        claims=tuple(claims),
        charts=tuple(
            bar_chart(
                f"to-{100 * target:.0f}",
                f"Seconds to {percent_text(target)} accuracy",
                "",
                [case.title for case in cases_of_figure_6b(plan)],
                {lane: [cells[case.title, target][lane] for case in cases_of_figure_6b(plan)] for lane in WITHOUT_PSGD},
                y="seconds",
                wide=False,
            )
            for target in TARGETS
        ),
        series=WITHOUT_PSGD,
        remarks=(SETTING, REBASE, BETWEEN),
        numbers={f"{title}, {target:g}": found for (title, target), found in cells.items()},
    )


# -- section 3.2 -------------------------------------------------------------------------------------------------------

ANALYSED = ((8, 2.0), (8, 4.0), (16, 2.0), (8, 0.5))  # gamma and k, an average in steps


def run_analysis(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Time hpsgd with steps of one second and averages of k: return its averages and a worker's steps in a second."""
    workers, k = 4, settings["k"]
    recipe = Recipe(rounds=settings["rounds"]).with_settings(
        cluster={"workers": workers},
        delay={"shift_seconds": 1.0, "mean_seconds": 0.0, "persistence": 1},
        network={"latency_seconds": k / (2 * (workers - 1))},
        strategy=LANES[PAPER],
    )
    trace = simulate(recipe, timing_only=True).trace
    return {"averages": len(trace.rounds) / trace.seconds, "steps": trace.used / workers / trace.seconds}


def jobs_of_analysis(plan: ExperimentPlan) -> list[Job]:
    rounds = plan.choose(toy=400, laboratory=4000, full=4000)
    return [
        Job(name=f"k = {k:g}", run=run_analysis, settings={"k": k, "rounds": rounds}, seconds=0.5)
        for k in dict.fromkeys(k for _, k in ANALYSED)
    ]


def conclude_analysis(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, claims, numbers = [], list[Claim](), dict[str, Any]()
    averages: dict[str, list[float]] = {"paper": [], "ours": []}
    for gamma, k in ANALYSED:
        loop = gamma + 1 + k
        found = {name: loop * outcomes[f"k = {k:g}"][name] for name in ("averages", "steps")}
        paper = {"averages": (gamma + 1) / k + 1, "steps": gamma + k + 1}
        where = f"gamma = {gamma}, k = {k:g}"
        rows.append(
            (where, f"{loop:g}", *(f"{side[name]:.1f}" for name in ("averages", "steps") for side in (paper, found)))
        )
        for name, text in (("averages", "averages"), ("steps", "local steps")):
            claims.append(
                within(
                    f"{text} in the time of a loop, to one: {where}",
                    found[name],
                    least=paper[name] - 1,
                    most=paper[name] + 1,
                )
            )
        averages["paper"].append(paper["averages"])
        averages["ours"].append(found["averages"])
        numbers[where] = {"paper": paper, "ours": found}
    return Findings(
        tables=(
            PlainTable(
                title="HPSGD in the time of a loop of Local SGD",
                headings=("", "loop,\nsteps", "averages:\npaper", "averages:\nours", "steps:\npaper", "steps:\nours"),
                rows=rows,
                caption="A loop: gamma + 1 steps, and an average that takes as long as k.\n"
                "Paper: (gamma + 1) / k + 1 averages and gamma + k + 1 local steps.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            bar_chart(
                "averages",
                "Averages in the time of a loop of Local SGD",
                "Every step takes one second, an average k.",
                [f"gamma {gamma}, k {k:g}" for gamma, k in ANALYSED],
                averages,
                y="averages",
            ),
        ),
        series=("paper", "ours"),
        remarks=(
            "Algorithm 2 begins an average after a step, and so at most one a step: with k below 1 the formula counts "
            "averages that nobody begins.",
            "The paper's loop has gamma + 1 steps; local-sgd here has gamma of them.",
        ),
        numbers=numbers,
    )


EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment(
            name="hpsgd-4a",
            full_data=("cifar10",),
            source="HPSGD, figure 4a",
            question="accuracy over epochs on several networks: hpsgd, ssgd, local-sgd",
            minutes=2,
            full_hours=4000,
            data=("fashion-mnist",),
            jobs=jobs_of_figure_4a,
            conclude=conclude_figure_4a,
        ),
        Experiment(
            name="hpsgd-4b",
            full_data=("cifar10",),
            source="HPSGD, figure 4b",
            question="accuracy with 4 to 16 workers",
            minutes=1,
            full_hours=2000,
            seeds=2,
            jobs=jobs_of_figure_4b,
            conclude=conclude_figure_4b,
        ),
        Experiment(
            name="hpsgd-5a",
            source="HPSGD, figure 5a",
            question="scale efficiency with 4 to 16 workers",
            minutes=0.5,
            full_hours=0.1,
            jobs=jobs_of_figure_5a,
            conclude=conclude_figure_5a,
        ),
        Experiment(
            name="hpsgd-5b",
            full_data=("cifar10",),
            source="HPSGD, figure 5b",
            question="seconds of an epoch: ssgd, local-sgd, hpsgd, psgd",
            minutes=0.5,
            full_hours=1000,
            seeds=3,
            jobs=jobs_of_figure_5b,
            conclude=conclude_figure_5b,
        ),
        Experiment(
            name="hpsgd-6a",
            full_data=("cifar10",),
            source="HPSGD, figure 6a",
            question="seconds to 40 % and to 80 %: computing, waiting, network",
            minutes=1,
            full_hours=2000,
            seeds=3,
            jobs=jobs_of_figure_6a,
            conclude=conclude_figure_6a,
        ),
        Experiment(
            name="hpsgd-6b",
            full_data=("cifar10",),
            source="HPSGD, figure 6b",
            question="seconds to 40 % and to 80 % on several networks",
            minutes=1.5,
            full_hours=4000,
            seeds=3,
            jobs=jobs_of_figure_6b,
            conclude=conclude_figure_6b,
        ),
        Experiment(
            name="hpsgd-analysis",
            source="HPSGD, section 3.2",
            question="averages and steps in the time of a loop of Local SGD",
            minutes=0.1,
            full_hours=0.01,
            jobs=jobs_of_analysis,
            conclude=conclude_analysis,
        ),
    )
}
