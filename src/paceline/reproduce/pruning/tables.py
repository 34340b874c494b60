"""pruning-table-1 and pruning-table-2: the same runs give the time and the accuracy with and without pruning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, percent, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.pruning.setting import NOT_STATED, SMALLER, size_document, size_of
from paceline.reproduce.published import PRUNING_NETWORKS, PRUNING_TABLE_1, PRUNING_TABLE_2

TABLE_SIZE = {"images": 25_000, "epochs": 40, "fewer": 0.15}
WAYS = {"regular": "none", "pruned": "fine-pruning", "fewer epochs": "fewer-epochs"}
NAMES = {name: name.replace("-", "").replace("VGG", "vgg").replace("ResNet", "resnet").replace("WRN", "wrn").lower()
         for name in PRUNING_NETWORKS}  # fmt: skip


def networks(plan: ExperimentPlan) -> tuple[str, ...]:
    """Return the networks, by the paper's names."""
    return PRUNING_NETWORKS if plan.size == "full" else PRUNING_NETWORKS[:1]


def run_training(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train with a policy; return accuracies, samples and CPU seconds."""
    from paceline.reproduce.pruning_training import PruningTask, train

    task = PruningTask(model=settings["model"], policy=settings["policy"], seed=settings["seed"])
    ending = train(size_of(settings["size"]), task)
    return dataclasses.asdict(ending) | {"best_three": ending.best_three, "last_three": ending.accuracy}


def table_job(network: str, way: str, seed: int) -> str:
    return f"{network}, {way}, seed {seed}"


def jobs_of_tables(plan: ExperimentPlan) -> list[Job]:
    size = size_document(plan, laboratory=TABLE_SIZE)
    return [
        Job(
            name=table_job(network, way, seed),
            run=run_training,
            settings={"size": size, "model": NAMES[network], "policy": policy, "seed": seed},
            seconds=plan.choose(toy=2.0, laboratory=85.0, full=1_600.0 if network == "LeNet" else 200_000.0),
        )
        for seed in plan.seeds
        for network in networks(plan)
        for way, policy in WAYS.items()
    ]


def _mean_of(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], network: str, way: str, name: str) -> float:
    return fmean(float(outcomes[table_job(network, way, seed)][name]) for seed in plan.seeds)


def conclude_table_1(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows: list[tuple[str, ...]] = []
    claims: list[Claim] = []
    numbers: dict[str, Any] = {}
    paper_saved: list[float | None] = []
    our_saved: list[float | None] = []
    for place, network in enumerate(PRUNING_NETWORKS):
        theirs = {name: values[place] for name, values in PRUNING_TABLE_1.items()}
        written = [f"{theirs[name]:,.0f}" for name in ("regular", "pruned")]
        written += [f"{theirs['overhead']:.2f}", f"{theirs['speedup']:.2f} %"]
        if network not in networks(plan):
            rows.append((network, *written, "-", "-", "-", "-"))
            continue
        regular, pruned = (_mean_of(plan, outcomes, network, way, "cpu_seconds") for way in ("regular", "pruned"))
        sampling = [_mean_of(plan, outcomes, network, way, "sampling_seconds") for way in ("regular", "pruned")]
        samples = [_mean_of(plan, outcomes, network, way, "samples") for way in ("regular", "pruned")]
        overhead, saved, share = max(0.0, sampling[1] - sampling[0]), 1 - pruned / regular, 1 - samples[1] / samples[0]
        rows.append(
            (network, *written, f"{regular:.1f}", f"{pruned - overhead:.1f}", f"{overhead:.2f}", f"{100 * saved:.2f} %")
        )
        paper_saved.append(theirs["speedup"] / 100)
        our_saved.append(saved)
        numbers[network] = {
            "regular": regular,
            "pruned": pruned,
            "overhead": overhead,
            "saved": saved,
            "samples": share,
        }
        claims += [
            ahead(f"{network}: quicker with pruning", {"pruned": pruned, "regular": regular}, best="low"),
            within(
                f"{network}: the time saved is the share of the samples saved, to 1.5 points",
                saved - share,
                least=-0.015,
                most=0.015,
                kind="shape",
                write=percent,
            ),
            within(
                f"{network}: the overhead is below 1 % of the time", overhead / regular, most=0.01, kind="shape",
                write=lambda value: "none" if value is None else f"{value:.2%}",
            ),
        ]  # fmt: skip
    return Findings(
        tables=(
            PlainTable(
                title="Seconds of training",
                headings=("network", "paper:\nregular", "\npruned", "over-\nhead", "\nsaved", "ours:\nregular",
                          "\npruned", "over-\nhead", "\nsaved"),
                rows=rows,
                caption="Pruned is without the overhead. Ours are seconds of one core (CPU time), the paper's those of "
                "a GTX 1080 Ti.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            bar_chart(
                "saved",
                "Time saved",
                "By pruning, of the time without it.",
                list(networks(plan)),
                {"paper": paper_saved, "ours": our_saved},
                y="time saved",
                percent=True,
            ),
        ),
        series=("paper", "ours"),
        remarks=(*_table_remarks(plan), "So many sit out that 15 % of the samples are saved."),
        numbers=numbers,
    )  # fmt: skip


def conclude_table_2(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    most = max(
        regular - pruned for regular, pruned in zip(PRUNING_TABLE_2["regular"], PRUNING_TABLE_2["pruned"], strict=True)
    )
    rows: list[tuple[str, ...]] = []
    claims: list[Claim] = []
    numbers: dict[str, Any] = {}
    for place, network in enumerate(PRUNING_NETWORKS):
        theirs = [PRUNING_TABLE_2[name][place] for name in ("regular", "pruned")]
        written = [f"{theirs[0]:.2f}", f"{theirs[1]:.2f}", points(theirs[0] - theirs[1])]
        if network not in networks(plan):
            rows.append((network, *written, "-", "-", "-", "-"))
            continue
        best = {way: _mean_of(plan, outcomes, network, way, "best_three") for way in WAYS}
        last = {way: _mean_of(plan, outcomes, network, way, "last_three") for way in WAYS}
        behind = {way: best["regular"] - best[way] for way in WAYS}
        rows.append(
            (
                network,
                *written,
                f"{best['regular']:.2f}",
                f"{best['pruned']:.2f}",
                points(behind["pruned"]),
                points(behind["fewer epochs"]),
            )
        )
        numbers[network] = {"best_three": best, "last_three": last}
        claims += [
            within(
                f"{network}: at most {most:.2f} points behind regular training",
                behind["pruned"],
                most=most + 1e-9,
                write=points,
            ),
            ahead(
                f"{network}: above as much saved by fewer epochs",
                {"pruned": best["pruned"], "fewer epochs": best["fewer epochs"]},
                best="high",
                write=lambda value: "none" if value is None else f"{value:.2f} %",
            ),
            within(
                f"{network}: behind by the mean of the last three epochs, which no lucky epoch helps",
                last["regular"] - last["pruned"],
                most=most,
                write=points,
                judged=False,
            ),
        ]
    return Findings(
        tables=(
            PlainTable(
                title="Test accuracy in per cent, the mean of the best three epochs",
                headings=("network", "paper:\nregular", "\npruned", "\nbehind", "ours:\nregular", "\npruned",
                          "\nbehind", "fewer epochs\nbehind"),
                rows=rows,
                caption="Behind is regular training minus this. Fewer epochs save as many samples, without a method.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            bar_chart(
                "accuracy",
                "Test accuracy, best three epochs",
                "Without pruning, with it, and with fewer epochs.",
                list(networks(plan)),
                {way: [numbers[network]["best_three"][way] / 100 for network in networks(plan)] for way in WAYS},
                y="test accuracy",
                percent=True,
            ),
        ),
        series=tuple(WAYS),
        remarks=(
            *_table_remarks(plan),
            "The runs are those of pruning-table-1. Fewer epochs is a control of ours, with 15 % fewer.",
        ),
        numbers=numbers,
    )  # fmt: skip


def points(value: float | None) -> str:
    """Write a difference of accuracies in per cent.

    >>> points(0.43), points(None)
    ('+0.43', 'none')
    """
    return "none" if value is None else f"{value:+.2f}"


def _table_remarks(plan: ExperimentPlan) -> tuple[str, ...]:
    smaller = f"{SMALLER.format(**TABLE_SIZE)} Images are averaged to 16x16; the other networks are left out."
    return (NOT_STATED,) if plan.size == "full" else (smaller, NOT_STATED)
