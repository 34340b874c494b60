"""Data fine-pruning: its figures, formulas and tables.

    pruning-1            test loss and accuracy over the epochs: a plateau after each change of the rate
    pruning-2            the losses of the same samples in two trainings
    pruning-3            an example of a schedule
    pruning-formulas     how many epochs are pruned: formulas (3) and (4) beside the schedule itself
    pruning-table-1      time with and without pruning
    pruning-table-2      accuracy with and without pruning; the same runs
    pruning-overhead     what pruning itself costs in 200 epochs
    pruning-bad-samples  whether other trainings and other networks prune the same samples (the paper's future work)

The laboratory has LeNet, which is one of the paper's ten networks, on CIFAR-10 made smaller. The paper states neither
how many samples sit out (PruningNum) nor the tolerance: ours are in `pruning_training.fine_settings`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from paceline.data.pruning.fine_pruning import FineSchedule, estimated_n_prune
from paceline.data.pruning.plan import plan_fine
from paceline.recipes import Recipe
from paceline.reports.figures import Series, bar_chart, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, falling, figure, mean, percent, within
from paceline.reproduce.experiment import Claim, Experiment, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.published import (
    PRUNING_EPOCHS,
    PRUNING_FIRST_INTERVAL,
    PRUNING_NETWORKS,
    PRUNING_RATE_CHANGES,
    PRUNING_TABLE_1,
    PRUNING_TABLE_2,
)

CIFAR_SAMPLES, PAPER_BATCH = 50_000, 128
NO_FIGURE = "not readable: the text has no figures"
SMALLER = "LeNet on {images:,} images of CIFAR-10, {epochs} epochs, in place of 50,000 and 200."
NOT_STATED = "The paper states neither PruningNum nor the tolerance, the block or the count: these are ours."
OVERHEAD_SECONDS = fmean(PRUNING_TABLE_1["overhead"])  # "around averaged 4.2 seconds over 200 epochs"


def points(value: float | None) -> str:
    """Write a difference of accuracies in per cent.

    >>> points(0.43), points(None)
    ('+0.43', 'none')
    """
    return "none" if value is None else f"{value:+.2f}"


def size_document(plan: ExperimentPlan, *, laboratory: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of a training at the size of the plan, as plain values.

    >>> size_document(ExperimentPlan(size="full"), laboratory={"images": 1000})["images"]
    50000
    """
    from paceline.reproduce.pruning_training import PruningSize

    toy = PruningSize(data="digits", shrink=1, images=128, epochs=10, batch=32, padding=1)
    full = PruningSize(shrink=1, images=CIFAR_SAMPLES, epochs=PRUNING_EPOCHS, padding=4)
    small = dataclasses.replace(PruningSize(), **laboratory)
    document = dataclasses.asdict(plan.choose(toy=toy, laboratory=small, full=full))
    return {**document, "falls_at": list(document["falls_at"])}


def size_of(document: Mapping[str, Any]) -> Any:
    from paceline.reproduce.pruning_training import PruningSize

    return PruningSize(**{**document, "falls_at": tuple(document["falls_at"])})


# -- figure 1 ----------------------------------------------------------------------------------------------------------

FIGURE_1_SIZE = {"shrink": 1, "padding": 4, "images": 20_000, "epochs": 40}


def run_curve(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train without pruning; return test loss and accuracy before the first epoch and after each."""
    from paceline.randomness import torch_generator
    from paceline.reproduce.pruning_training import PruningTask, make_loop, make_sampler, measured

    size, task = size_of(settings["size"]), PruningTask(model=settings["model"], policy="none", seed=settings["seed"])
    sampler, _ = make_sampler(size, task)
    loop = make_loop(size, task, sampler)
    found = [measured(loop.model, loop.parts.test)]
    for epoch in range(size.epochs):
        loop.epoch(epoch, size.epochs, torch_generator(task.seed, "augment", epoch))
        found.append(measured(loop.model, loop.parts.test))
    changes = [round(share * size.epochs) for share in size.falls_at]
    return {"losses": [each[0] for each in found], "accuracies": [each[1] for each in found], "changes": changes}


def jobs_of_figure_1(plan: ExperimentPlan) -> list[Job]:
    size = size_document(plan, laboratory=FIGURE_1_SIZE)
    model = plan.choose(toy="lenet", laboratory="lenet", full="resnet18")
    return [
        Job(
            name=f"seed {seed}",
            run=run_curve,
            settings={"size": size, "model": model, "seed": seed},
            seconds=plan.choose(toy=2.0, laboratory=140.0, full=130_000.0),
        )
        for seed in plan.seeds
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """The epochs of one learning rate: the loss before them, in their middle and at their end.

    >>> Stretch(first=1, last=12, before=2.3, middle=1.4, end=1.3).early, 2.3 - 1.4
    (0.8999999999999999, 0.8999999999999999)
    """

    first: int
    last: int
    before: float
    middle: float
    end: float

    @property
    def early(self) -> float:
        """By how much the loss falls in the first half."""
        return self.before - self.middle

    @property
    def late(self) -> float:
        """By how much the loss falls in the second half."""
        return self.middle - self.end


def stretches_of(losses: Sequence[float], changes: Sequence[int]) -> list[Stretch]:
    """Cut a curve (before the first epoch, and after each) where the rate changes; each value is a mean of up to three.

    >>> [(each.first, each.last, each.late) for each in stretches_of([3, 2, 2, 2, 1, 1, 1], [3])]
    [(1, 3, 0.0), (4, 6, 0.0)]
    """
    found = []
    for first, last in zip((0, *changes), (*changes, len(losses) - 1), strict=True):
        middle, wide = (first + last + 1) // 2, min(3, max(1, (last - first) // 2))
        found.append(
            Stretch(
                first=first + 1,
                last=last,
                before=fmean(losses[max(first - wide + 1, 0) : first + 1]) if first else losses[0],
                middle=fmean(losses[middle - wide // 2 : middle - wide // 2 + wide]),
                end=fmean(losses[last - wide + 1 : last + 1]),
            )
        )
    return found


def conclude_figure_1(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    curves = [outcomes[f"seed {seed}"] for seed in plan.seeds]
    changes = curves[0]["changes"]
    losses = [fmean(values) for values in zip(*(curve["losses"] for curve in curves), strict=True)]
    accuracies = [fmean(values) / 100 for values in zip(*(curve["accuracies"] for curve in curves), strict=True)]
    stretches = stretches_of(losses, changes)
    falls = [each.before - each.end for each in stretches]
    told = f"{PRUNING_FIRST_INTERVAL[0]} to {PRUNING_FIRST_INTERVAL[1]}"
    words = [told, *["slower than before, then a plateau"] * (len(stretches) - 1)]
    claims = [
        within(
            f"a plateau in epochs {each.first} to {each.last}: the second half moves less than the first",
            abs(each.late) / abs(each.early) if each.early else None,
            most=1.0,
            kind="shape",
        )
        for each in stretches
    ]
    claims.append(
        within(
            "the loss falls most before the first change of the rate",
            falls[0] - max(falls[1:]),
            least=1e-9,
            kind="shape",
        )
    )
    claims.append(
        within("the accuracy rises as the loss falls", _agreement(losses, accuracies), least=0.9, kind="shape")
    )
    return Findings(
        tables=(
            PlainTable(
                title="Test loss in each stretch of the learning rate",
                headings=("epochs", "paper", "ours:\nbefore", "ours:\nmiddle", "ours:\nend"),
                rows=[
                    (f"{each.first}-{each.last}", word, f"{each.before:.3f}", f"{each.middle:.3f}", f"{each.end:.3f}")
                    for each, word in zip(stretches, words, strict=True)
                ],
                caption=f"The paper's rate changes at {', '.join(map(str, PRUNING_RATE_CHANGES))} of "
                f"{PRUNING_EPOCHS} epochs; ours at {', '.join(map(str, changes))} of {len(losses) - 1}.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            line_chart(
                "loss",
                "Test loss over the epochs",
                "Before the first epoch, and after each.",
                [Series(name="ours", points=list(enumerate(losses)))],
                x="epochs",
                y="test loss",
                wide=False,
            ),
            line_chart(
                "accuracy",
                "Test accuracy over the epochs",
                "",
                [Series(name="ours", points=list(enumerate(accuracies)))],
                x="epochs",
                y="test accuracy",
                percent=True,
                wide=False,
            ),
        ),
        series=("ours",),
        remarks=() if plan.size == "full" else (
            f"LeNet in place of ResNet-18. {SMALLER.format(**_numbers(FIGURE_1_SIZE))} "
            "The paper's 1.5 is after its first epochs, ours is before any.",
        ),
        numbers={"losses": losses, "accuracies": accuracies, "changes": list(changes)},
    )  # fmt: skip


def _agreement(losses: Sequence[float], accuracies: Sequence[float]) -> float:
    """Return the share of pairs of epochs, ten apart or the most there are, whose loss and accuracy move oppositely."""
    apart = min(10, len(losses) - 1)
    moves = [
        (losses[place + apart] - losses[place]) * (accuracies[place + apart] - accuracies[place]) <= 0
        for place in range(len(losses) - apart)
    ]
    return sum(moves) / len(moves)


def _numbers(size: Mapping[str, Any]) -> dict[str, Any]:
    return {"images": size["images"], "epochs": size["epochs"]}


# -- figure 2 ----------------------------------------------------------------------------------------------------------

FIGURE_2_SIZE = {"images": 5_000, "epochs": 40}
WATCHED = 2_000


def two_seeds(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the seeds of the trainings that are compared: two at least."""
    return plan.seeds if len(plan.seeds) > 1 else (plan.seeds[0], plan.seeds[0] + 1)


def run_histories(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train without pruning, and return the loss of each watched sample in every epoch."""
    from paceline.data.pruning.sampler import FinePruning
    from paceline.randomness import torch_generator
    from paceline.reproduce.pruning_training import PruningTask, make_loop

    size, task = size_of(settings["size"]), PruningTask(model=settings["model"], policy="none", seed=settings["seed"])
    watch = range(min(settings["watched"], size.images))
    sampler = FinePruning(size.images, batch_size=size.batch, prune=0.0, watch=watch, seed=task.seed)
    loop = make_loop(size, task, sampler)
    for epoch in range(size.epochs):
        loop.epoch(epoch, size.epochs, torch_generator(task.seed, "augment", epoch))
    return {"losses": [[round(loss, 4) for _, loss in sampler.loss_history[sample]] for sample in watch]}


def jobs_of_figure_2(plan: ExperimentPlan) -> list[Job]:
    size = size_document(plan, laboratory=FIGURE_2_SIZE)
    model = plan.choose(toy="lenet", laboratory="lenet", full="resnet18")
    return [
        Job(
            name=f"seed {seed}",
            run=run_histories,
            settings={"size": size, "model": model, "seed": seed, "watched": WATCHED},
            seconds=plan.choose(toy=2.0, laboratory=25.0, full=130_000.0),
        )
        for seed in two_seeds(plan)
    ]


def trend(losses: Sequence[float]) -> float:
    """Return by how much a sample's loss rises: the mean of the last fifth of the epochs minus that of the first.

    >>> trend([1.0, 2.0, 2.0, 2.0, 4.0])
    3.0
    """
    part = max(1, len(losses) // 5)
    return fmean(losses[-part:]) - fmean(losses[:part])


def conclude_figure_2(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    runs = [outcomes[f"seed {seed}"]["losses"] for seed in two_seeds(plan)][:2]
    trends = [[trend(losses) for losses in run] for run in runs]
    pairs = list(zip(*trends, strict=True))
    changed = [sample for sample, (first, second) in enumerate(pairs) if first * second < 0]
    both_fall = [sample for sample, pair in enumerate(pairs) if max(pair) < 0]
    both_rise = [sample for sample, pair in enumerate(pairs) if min(pair) > 0]
    steady = min(range(len(pairs)), key=lambda sample: max(pairs[sample]))
    turned = max(range(len(pairs)), key=lambda sample: abs(pairs[sample][0] - pairs[sample][1])
                 if sample in set(changed) else -1.0)  # fmt: skip
    shown = {f"sample {steady}": steady, f"sample {turned}": turned}
    series = [
        Series(name=f"{name}, training {number}", points=list(enumerate(runs[number - 1][sample], start=1)))
        for number in (1, 2)
        for name, sample in shown.items()
    ]
    return Findings(
        tables=(
            PlainTable(
                title=f"Losses of {len(pairs):,} samples in two trainings of the same network",
                headings=("their loss", "paper", "ours:\nsamples", "ours:\nshare"),
                rows=[
                    ("falls in both", "data 1", f"{len(both_fall):,}", percent(len(both_fall) / len(pairs))),
                    (
                        "rises in one, falls in the other",
                        "data 2",
                        f"{len(changed):,}",
                        percent(len(changed) / len(pairs)),
                    ),
                    ("rises in both", "-", f"{len(both_rise):,}", percent(len(both_rise) / len(pairs))),
                ],
                caption=f"Values of the paper: {NO_FIGURE}. Rises: the mean of the last fifth of the epochs is above "
                "that of the first.",
            ),
        ),
        claims=(
            within(
                "there are samples whose loss rises in one training and falls in the other",
                float(len(changed)),
                least=1.0,
                kind="shape",
            ),
            within(
                "there are samples whose loss falls in both", float(len(both_fall)), least=1.0, kind="shape"
            ),
        ),
        charts=(
            line_chart(
                "losses",
                "The same two samples in two trainings",
                "One whose loss falls in both, and the one of those that rise in one and fall in the other whose two "
                "trends differ most.",
                series,
                x="epoch",
                y="loss",
            ),
        ),
        series=tuple(each.name for each in series),
        remarks=() if plan.size == "full" else (
            f"The paper does not say which network it was. {SMALLER.format(**_numbers(FIGURE_2_SIZE))} "
            "Losses are those of training: each epoch's crop and mirroring of an image differ.",
        ),
        numbers={"falls in both": len(both_fall), "changed": len(changed), "rises in both": len(both_rise),
                 "samples": len(pairs)},
    )  # fmt: skip


# -- figure 3 and the formulas -----------------------------------------------------------------------------------------

WINDOWS_AT = list(PRUNING_RATE_CHANGES)
SCHEDULES: dict[str, tuple[dict[str, Any], int]] = {
    "the defaults of paceline": ({}, PRUNING_EPOCHS),
    "window 30": ({"window": 30, "starting_point": 15}, PRUNING_EPOCHS),
    "attenuation 1": ({"attenuation": 1}, PRUNING_EPOCHS),
    "attenuation 1, whole blocks": ({"attenuation": 1, "starting_point": 28}, 180),
}
BEST_SAVED, LEAST_SAVED = max(PRUNING_TABLE_1["speedup"]) / 100, min(PRUNING_TABLE_1["speedup"]) / 100


def run_plan(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Lay out a schedule, and count its pruned epochs by the paper's formulas too.

    >>> run_plan({"schedule": {}, "epochs": 200})["formula"]
    48
    """
    given = settings["schedule"]
    schedule = FineSchedule(**{**given, "window_at": tuple(given.get("window_at", ()))})
    plan = plan_fine(schedule, CIFAR_SAMPLES, epochs=settings["epochs"], batch_size=PAPER_BATCH)
    return {
        "pruned": list(plan.pruned_epochs),
        "samples": plan.epoch_samples,
        "share_saved": plan.share_saved,
        "windows": [{"first": row.first, "last": row.last, "start": row.start or 0} for row in plan.rows],
        "formula": estimated_n_prune(schedule, settings["epochs"]),
        "epochs": settings["epochs"],
    }


def jobs_of_figure_3(plan: ExperimentPlan) -> list[Job]:
    schedule = {"window_at": WINDOWS_AT}
    return [Job(name="schedule", run=run_plan, settings={"schedule": schedule, "epochs": PRUNING_EPOCHS}, seconds=0.1)]


def conclude_figure_3(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    found = outcomes["schedule"]
    rows, early = [], 0
    for window in found["windows"]:
        pruned = [epoch for epoch in found["pruned"] if window["first"] <= epoch <= window["last"]]
        begins = 0 if window is found["windows"][0] else window["first"]
        early += sum(epoch - begins < window["start"] for epoch in pruned)
        length = window["last"] - window["first"] + 1
        rows.append((f"{window['first']}-{window['last']}", NO_FIGURE.split(":")[0], str(window["start"]),
                     f"{len(pruned)} of {length}"))  # fmt: skip
    return Findings(
        tables=(
            PlainTable(
                title=f"A schedule over {found['epochs']} epochs",
                headings=("window", "paper", "ours: starting\npoint", "ours: pruned\nepochs"),
                rows=rows,
                caption="Windows begin where the paper's learning rate changes. The picture of figure 3 is not in the "
                "text that we have.",
            ),
        ),
        claims=(
            within(
                "pruned epochs lie in the later part of a window, from its starting point on",
                float(early),
                most=0.0,
                kind="shape",
            ),
            falling(
                "pruning begins earlier from window to window", [float(each["start"]) for each in found["windows"]]
            ),
        ),
        charts=(
            line_chart(
                "schedule",
                "Samples of each epoch",
                "Pruned epochs have 30 % fewer.",
                [Series(name="ours", points=list(enumerate(found["samples"], start=1)))],
                x="epoch",
                y="samples",
            ),
        ),
        series=("ours",),
        remarks=(NOT_STATED,),
        numbers={"pruned": found["pruned"], "share_saved": found["share_saved"]},
    )


def jobs_of_formulas(plan: ExperimentPlan) -> list[Job]:
    return [
        Job(name=name, run=run_plan, settings={"schedule": dict(schedule), "epochs": epochs}, seconds=0.1)
        for name, (schedule, epochs) in SCHEDULES.items()
    ]


def conclude_formulas(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows = [
        (name, str(found["epochs"]), str(found["formula"]), str(len(found["pruned"])), percent(found["share_saved"]))
        for name, found in outcomes.items()
    ]
    whole, usual = outcomes["attenuation 1, whole blocks"], outcomes["the defaults of paceline"]
    pruned_share = len(usual["pruned"]) / usual["epochs"]
    needed = {saved: saved / pruned_share for saved in (BEST_SAVED, LEAST_SAVED)}
    return Findings(
        tables=(
            PlainTable(
                title="Pruned epochs",
                headings=("schedule", "epochs", "paper:\n(3) or (4)", "ours:\nexact", "ours: samples\nsaved"),
                rows=rows,
                caption="Window 60, starting point 30, attenuation 2, block 4, count 2, where nothing else is said; "
                "30 % sit out. The paper prints no values.",
            ),
        ),
        claims=(
            _counts("the formula counts the pruned epochs: every window starts at one point, blocks are whole", whole),
            _counts("the formula counts the pruned epochs: attenuation 2, as the text wants it", usual),
            *(
                Claim(
                    kind="value",
                    text=f"to save {percent(saved)}, as the paper's table 1 does, so many must sit out",
                    holds=True,
                    because=f"{share:.1%} of the samples",
                    judged=False,
                )
                for saved, share in needed.items()
            ),
        ),
        charts=(
            bar_chart(
                "epochs",
                "Pruned epochs",
                "By the paper's formulas, and by its listing.",
                list(outcomes),
                {
                    "formula": [float(found["formula"]) for found in outcomes.values()],
                    "exact": [float(len(found["pruned"])) for found in outcomes.values()],
                },
                y="pruned epochs",
            ),
        ),
        series=("formula", "exact"),
        remarks=(
            "The formulas know no attenuation, and take all epochs after a window's last whole block as pruned.",
            NOT_STATED,
        ),
        numbers={name: {"formula": found["formula"], "exact": len(found["pruned"])} for name, found in outcomes.items()}
        | {"prune needed": {f"{saved:.4f}": share for saved, share in needed.items()}},
    )


def _counts(text: str, found: Outcome) -> Claim:
    formula, exact = found["formula"], len(found["pruned"])
    return Claim(kind="value", text=text, holds=formula == exact, because=f"{formula} by the formula, {exact} exactly")


# -- tables 1 and 2 ----------------------------------------------------------------------------------------------------

TABLE_SIZE = {"images": 25_000, "epochs": 40, "fewer": 0.15}
WAYS = {"regular": "none", "pruned": "fine-pruning", "fewer epochs": "fewer-epochs"}
NAMES = {name: name.replace("-", "").replace("VGG", "vgg").replace("ResNet", "resnet").replace("WRN", "wrn").lower()
         for name in PRUNING_NETWORKS}  # fmt: skip


def networks(plan: ExperimentPlan) -> tuple[str, ...]:
    """The networks, by the paper's names."""
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
        own = [_mean_of(plan, outcomes, network, way, "sampling_seconds") for way in ("regular", "pruned")]
        samples = [_mean_of(plan, outcomes, network, way, "samples") for way in ("regular", "pruned")]
        overhead, saved, share = max(0.0, own[1] - own[0]), 1 - pruned / regular, 1 - samples[1] / samples[0]
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


def _table_remarks(plan: ExperimentPlan) -> tuple[str, ...]:
    smaller = f"{SMALLER.format(**_numbers(TABLE_SIZE))} Images are averaged to 16x16; the other networks are left out."
    return (NOT_STATED,) if plan.size == "full" else (smaller, NOT_STATED)


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
                caption="Behind: regular training minus this. Fewer epochs: as many samples saved, without a method.",
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
            "The runs are those of pruning-table-1. Fewer epochs, a control of ours, has 15 % fewer.",
        ),
        numbers=numbers,
    )  # fmt: skip


# -- the overhead ------------------------------------------------------------------------------------------------------


def run_overhead(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Go through the epochs of a run without training; return the CPU seconds of the sampler, and of `mean()` alone."""
    import torch

    from paceline.data.pruning.sampler import FinePruning

    samples, epochs = settings["samples"], settings["epochs"]
    values = torch.rand(samples, generator=torch.Generator().manual_seed(settings["seed"])).requires_grad_()
    losses = list(torch.split(values, PAPER_BATCH))
    sampler = FinePruning(samples, batch_size=PAPER_BATCH, window_at=settings["window_at"],
                          starting_point=settings["starting_point"], seed=settings["seed"])  # fmt: skip
    sampling = plain = 0.0
    for _ in range(epochs):
        begun, step = time.process_time(), 0
        for batch in sampler:
            each = losses[step]
            sampler.observe(each if len(each) == len(batch) else each[: len(batch)])
            step += 1
        sampling += time.process_time() - begun
        begun = time.process_time()
        for each in losses[:step]:
            each.mean()
        plain += time.process_time() - begun
    return {"seconds": sampling - plain, "sampling": sampling, "mean": plain, "epochs": epochs,
            "pruned": len(sampler.plan(epochs).pruned_epochs)}  # fmt: skip


def jobs_of_overhead(plan: ExperimentPlan) -> list[Job]:
    settings = plan.choose(
        toy={"samples": 1_000, "epochs": 20, "window_at": [6, 12], "starting_point": 3},
        laboratory={"samples": CIFAR_SAMPLES, "epochs": PRUNING_EPOCHS, "window_at": WINDOWS_AT, "starting_point": 30},
        full={"samples": CIFAR_SAMPLES, "epochs": PRUNING_EPOCHS, "window_at": WINDOWS_AT, "starting_point": 30},
    )
    return [
        Job(
            name=f"seed {seed}",
            run=run_overhead,
            settings={**settings, "seed": seed},
            seconds=plan.choose(toy=1.0, laboratory=3.0, full=3.0),
        )
        for seed in plan.seeds
    ]


def conclude_overhead(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    ours = mean([float(outcomes[f"seed {seed}"]["seconds"]) for seed in plan.seeds])
    low, high = min(PRUNING_TABLE_1["overhead"]), max(PRUNING_TABLE_1["overhead"])
    found = outcomes[f"seed {plan.seeds[0]}"]
    return Findings(
        tables=(
            PlainTable(
                title=f"Seconds that pruning costs in {found['epochs']} epochs, {found['pruned']} of them pruned",
                headings=("", "paper", "ours"),
                rows=[
                    ("on average", f"{OVERHEAD_SECONDS:.2f}", figure(ours)),
                    ("in the ten networks", f"{low:.2f}-{high:.2f}", "-"),
                ],
                caption="Ours: the sampler's CPU seconds on one core, its batches, losses and decisions, without the "
                "mean of losses that any loop takes.",
            ),
        ),
        claims=(
            ahead("no more than the paper's overhead", {"ours": ours, "paper": OVERHEAD_SECONDS}, best="low"),
        ),
        charts=(
            bar_chart(
                "overhead",
                "Seconds that pruning costs",
                "In 200 epochs of 50,000 samples.",
                ["overhead"],
                {"paper": [OVERHEAD_SECONDS], "ours": [ours]},
                y="seconds",
            ),
        ),
        series=("paper", "ours"),
        remarks=("Another machine than the paper's. Nothing is trained: losses are random numbers.",),
        numbers={"ours": ours, "paper": OVERHEAD_SECONDS},
    )  # fmt: skip


# -- bad samples -------------------------------------------------------------------------------------------------------

BAD = "bad-samples"


def run_pruned_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate a recipe of one worker that prunes; return how often each sample sat out."""
    from paceline.runs.simulation import make_run, result_of
    from paceline.training import pruning_of

    recipe = Recipe.from_document(settings["recipe"])
    run: Any = make_run(recipe)
    for _ in run:
        pass
    totals = pruning_of(run.batches, run.batches.training)
    return {"times_pruned": totals.times_pruned.tolist(), "accuracy": result_of(run).accuracy}


def bad_networks(plan: ExperimentPlan) -> tuple[str, ...]:
    return ("lenet", "vgg13", "resnet18") if plan.size == "full" else ("mlp", "lenet")


def bad_recipe(plan: ExperimentPlan, network: str, seed: int) -> Recipe:
    """Return the recipe of a training whose pruned samples are looked at.

    >>> bad_recipe(ExperimentPlan(), "mlp", 200).pruning.window
    12
    """
    epochs = plan.choose(toy=10, laboratory=40, full=PRUNING_EPOCHS)
    window = int(0.3 * epochs)
    return Recipe(seed=seed, epochs=epochs, evaluate_every=10**6, target_loss=None).with_settings(
        data={"name": plan.choose(toy="digits", laboratory="digits", full="cifar10"), "split": "iid",
              "augment": plan.size == "full"},
        model={"name": network},
        cluster={"workers": 1},
        worker={"batch_size": plan.choose(toy=32, laboratory=32, full=PAPER_BATCH)},
        optimizer={"lr": 0.05, "decay": 0.2, "decay_at": [0.3, 0.6, 0.8]},
        strategy={"name": "full"},
        pruning={"name": "fine-pruning", "window": window, "starting_point": window // 2},
    )  # fmt: skip


def jobs_of_bad_samples(plan: ExperimentPlan) -> list[Job]:
    return [
        Job(
            name=f"{network}, seed {seed}",
            run=run_pruned_recipe,
            settings={"recipe": bad_recipe(plan, network, seed).to_document()},
            seconds=plan.choose(toy=2.0, laboratory=9.0, full=60_000.0),
        )
        for seed in two_seeds(plan)
        for network in bad_networks(plan)
    ]


def conclude_bad_samples(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    from paceline.traces.pruning_overlap import overlap_of

    found: dict[str, list[tuple[str, Any]]] = {"the same network, another seed": [], "another network": []}
    runs = [(network, seed) for network in bad_networks(plan) for seed in two_seeds(plan)]
    for place, (network, seed) in enumerate(runs):
        for other, again in runs[place + 1 :]:
            pair = (outcomes[f"{network}, seed {seed}"], outcomes[f"{other}, seed {again}"])
            kind = "the same network, another seed" if network == other else "another network"
            name = f"{network} {seed}, {other} {again}"
            found[kind].append((name, overlap_of(pair[0]["times_pruned"], pair[1]["times_pruned"])))
    means = {kind: mean([each.jaccard for _, each in pairs]) for kind, pairs in found.items()}
    chance = mean([each.chance for pairs in found.values() for _, each in pairs])
    rows = [
        (kind, name, "-", f"{each.jaccard:.3f}", f"{each.chance:.3f}", figure(each.shared))
        for kind, pairs in found.items()
        for name, each in pairs
    ]
    same, other_network = means.values()
    return Findings(
        tables=(
            PlainTable(
                title="Overlap of the most pruned tenths of two trainings",
                headings=("two trainings of", "", "paper", "ours:\noverlap", "by\nchance", "samples\nin both"),
                rows=rows,
                caption="In both, of those in one or both. The paper has no figures: it leaves the question open.",
            ),
        ),
        claims=(
            ahead(
                "some data are commonly identified as bad: other seeds prune the same ones",
                {"another seed": same, "chance": chance},
                best="high",
            ),
            ahead(
                "bad data relate to the type of the network: other networks prune others",
                {"another seed": same, "another network": other_network},
                best="high",
                judged=False,
            ),
        ),
        charts=(
            bar_chart(
                "overlap",
                "Overlap of the most pruned tenths",
                "Means over pairs of trainings.",
                [*means, "chance"],
                {"ours": [*means.values(), chance]},
                y="overlap",
                percent=True,
            ),
        ),
        series=("ours",),
        remarks=() if plan.size == "full" else (
            "An mlp and LeNet on the digits, 40 epochs. The paper names neither networks nor data for this.",
        ),
        numbers={**means, "chance": chance},
    )  # fmt: skip


EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment(
            name="pruning-1",
            source="Data fine-pruning, figure 1",
            question="test loss and accuracy over the epochs: plateaus between changes of the rate",
            minutes=2.5,
            full_hours=40,
            data=("cifar10",),
            jobs=jobs_of_figure_1,
            conclude=conclude_figure_1,
        ),
        Experiment(
            name="pruning-2",
            source="Data fine-pruning, figure 2",
            question="the losses of the same samples in two trainings",
            minutes=0.7,
            full_hours=40,
            data=("cifar10",),
            seeds=2,
            jobs=jobs_of_figure_2,
            conclude=conclude_figure_2,
        ),
        Experiment(
            name="pruning-3",
            source="Data fine-pruning, figure 3",
            question="an example of a schedule",
            minutes=0.2,
            full_hours=0.01,
            jobs=jobs_of_figure_3,
            conclude=conclude_figure_3,
        ),
        Experiment(
            name="pruning-formulas",
            source="Data fine-pruning, formulas (2) to (7)",
            question="how many epochs are pruned: the formulas, and the schedule itself",
            minutes=0.2,
            full_hours=0.01,
            jobs=jobs_of_formulas,
            conclude=conclude_formulas,
        ),
        Experiment(
            name="pruning-table-1",
            source="Data fine-pruning, table 1",
            question="time with and without pruning",
            minutes=4.5,
            full_hours=1500,
            data=("cifar10",),
            timed=True,
            jobs=jobs_of_tables,
            conclude=conclude_table_1,
        ),
        Experiment(
            name="pruning-table-2",
            source="Data fine-pruning, table 2",
            question="accuracy with and without pruning",
            minutes=4.5,
            full_hours=1500,
            data=("cifar10",),
            timed=True,
            jobs=jobs_of_tables,
            conclude=conclude_table_2,
        ),
        Experiment(
            name="pruning-overhead",
            source="Data fine-pruning, section 5",
            question="what pruning itself costs in 200 epochs",
            minutes=0.3,
            full_hours=0.01,
            timed=True,
            jobs=jobs_of_overhead,
            conclude=conclude_overhead,
        ),
        Experiment(
            name="pruning-bad-samples",
            full_data=("cifar10",),
            source="Data fine-pruning, section 6",
            question="whether other trainings and networks prune the same samples",
            minutes=0.6,
            full_hours=100,
            seeds=2,
            jobs=jobs_of_bad_samples,
            conclude=conclude_bad_samples,
        ),
    )
}
