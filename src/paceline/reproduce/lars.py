"""Large Batch Training of Convolutional Networks (LARS): its tables and figures.

    lars-table-1    SGD as the batch grows, with and without batch normalisation, several rates
    lars-table-2    |w| / |gradient| of AlexNet's layers before the first step
    lars-table-3    LARS as the batch grows, beside SGD
    lars-table-4    LARS with minimal and with extended augmentation
    lars-table-5    more epochs at a large batch
    lars-table-6    GoogLeNet without normalisation: more epochs and a longer warm-up
    lars-figure-1   the gap between test and training loss, small and large batch
    lars-figure-2   LARS at a large batch: accuracy, and the layers' ratios, over the epochs
    lars-figure-3   accuracy over the rate
    lars-figure-4   accuracy over the epochs as the batch grows

The laboratory has a small CNN in place of AlexNet, Fashion-MNIST averaged to 14x14 pixels in place of ImageNet, 16,384
images and 64 epochs: 128 steps at a batch of 8,192, where the paper's runs have 15,600. Batches stand for each other:

    paper    512     4096    8192    16384, 32768
    ours     128     2048    8192    16384 (all images: one step an epoch)

Every rate is one run; the best is chosen on training images that no run trains on, and tables show the test images. The
paper chooses on what it shows. Cells that several experiments have are one job.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from paceline.analysis.layer_ratios import inspect_recipe
from paceline.models.alexnet import alexnet
from paceline.recipes import Recipe
from paceline.reports.chart import Chart
from paceline.reports.figures import Series, bar_chart, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, falling, figure, mean, within
from paceline.reproduce.experiment import Claim, Experiment, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.large_batch_training import WITH_LARS, WITH_SGD, run_large_batch
from paceline.reproduce.published import (
    LARS_FIGURE_3_ACCURACY,
    LARS_FIGURE_3_BATCH,
    LARS_FIGURE_3_RATES,
    LARS_TABLE_1,
    LARS_TABLE_2,
    LARS_TABLE_3,
    LARS_TABLE_4,
    LARS_TABLE_5,
    LARS_TABLE_6,
)

PLAIN, NORMED, RESIDUAL, INCEPTION = "plain", "normed", "residual", "inception"
PAPER_NETWORK = {PLAIN: "alexnet", NORMED: "alexnet-bn"}
SHOWN = {PLAIN: "AlexNet", NORMED: "AlexNet-BN", RESIDUAL: "ResNet-50", INCEPTION: "GoogLeNet"}
LABORATORY_MODEL = {
    PLAIN: "small-cnn",
    NORMED: "small-cnn-bn",
    RESIDUAL: "small-cnn-bn",
    INCEPTION: "small-googlenet",
}
FULL_MODEL = {PLAIN: "alexnet", NORMED: "alexnet-bn", RESIDUAL: "resnet50", INCEPTION: "plain-googlenet"}
CHANCE = 15.0  # per cent; ten classes, where guessing has 10
MOST_LOST = {"minimal": 1.5, "extended": 3.5}  # table 4 loses 1.3 and 3.3 points
BEHIND_BASELINE = 1.5  # points that "matched the baseline" may be behind here, where two seeds are 0.6 apart

SMALLER = (
    "A small CNN on 16,384 images of Fashion-MNIST at 14x14 in place of AlexNet on ImageNet, 64 epochs, not 100; "
    "batches of 128, 2048, 8192 and 16384 stand for 512, 4096, 8192 and 16384 or more."
)
SAME_WARMUP = "The warm-up is a tenth of the steps for all; the paper's is 0 to 5 of 100 epochs."
IN_PLACE_OF_RESNET = (
    "A small CNN with batch normalisation on 16,384 images of Fashion-MNIST at 14x14 in place of ResNet-50 on "
    "ImageNet, which two cores cannot train; batches of 128, 2048 and 8192 stand for 256, 8K and 32K.",
    "The warm-up is a tenth of the steps for all; the paper's is 0 to 12 of 100 epochs.",
)
TRUST = (
    "LARS has trust 0.1 and leaves biases out, so its rates are a hundredth of the paper's, which has trust 0.001: a "
    "layer moves by rate times trust of its length."
)
CHOSEN = "Rates are chosen on training images held out; the paper shows the images that it chooses on."
FULL_SIZE = (
    "The paper's networks at CIFAR size on 49,152 images of Fashion-MNIST, 28x28, in place of ImageNet; its batches, "
    "epochs, rates, warm-up and trust."
)


def points(value: float | None) -> str:
    """Write an accuracy in per cent, or a difference of two.

    >>> points(86.04), points(None)
    ('86.0 %', 'none')
    """
    return "none" if value is None else f"{value:.1f} %"


def batch_text(batch: float) -> str:
    """Write a batch size as the paper does.

    >>> batch_text(512), batch_text(8192)
    ('512', '8K')
    """
    return f"{batch:g}" if batch < 1024 or batch % 1024 else f"{batch / 1024:g}K"


# -- a cell: a network, an optimiser, a batch, a rate ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LarsCell:
    """One training of a table, but for its seed; what is None is as usual for the size.

    >>> LarsCell(network="plain", optimizer="SGD", batch=128, rate=0.025).label
    'plain SGD batch 128 rate 0.025'
    """

    network: str
    optimizer: str
    batch: int
    rate: float
    epochs: int | None = None
    warmup_share: float | None = None
    augment: Literal["none", "minimal", "extended"] = "none"

    @property
    def label(self) -> str:
        """The cell in words, its own among all cells."""
        more = [
            f"{self.epochs} epochs" if self.epochs else "",
            f"warm-up {self.warmup_share:g}" if self.warmup_share is not None else "",
            self.augment if self.augment != "none" else "",
        ]
        name = f"{self.network} {self.optimizer} batch {self.batch} rate {self.rate:g}"
        return " ".join([name, *filter(None, more)])

    def job(self, seed: int) -> str:
        """Return the name of the job with this seed.

        >>> LarsCell(network="plain", optimizer="SGD", batch=128, rate=0.1).job(200)
        'plain SGD batch 128 rate 0.1 seed 200'
        """
        return f"{self.label} seed {seed}"


def usual_epochs(plan: ExperimentPlan) -> int:
    """Return the epochs of a cell that does not say how many.

    >>> usual_epochs(ExperimentPlan())
    64
    """
    return int(plan.choose(toy=2, laboratory=64, full=100))


def cell_settings(plan: ExperimentPlan, cell: LarsCell, seed: int) -> dict[str, Any]:
    """Return the settings of a cell's job; equal cells of two experiments have equal settings, and so share a run.

    >>> cell = LarsCell(network="normed", optimizer="LARS", batch=8192, rate=14)
    >>> [cell_settings(ExperimentPlan(size=size), cell, 200)["model"] for size in ("laboratory", "full")]
    ['small-cnn-bn', 'alexnet-bn']
    """
    choice = plan.choose(
        toy={"data": "digits", "shrink": 1, "images": 512, "held_out": 256},
        laboratory={"data": "fashion-mnist", "shrink": 2, "images": 16_384, "held_out": 10_000},
        full={"data": "fashion-mnist", "shrink": 1, "images": 49_152, "held_out": 10_000},
    )
    full = plan.size == "full"
    usual_warmup = _paper_warmup(cell) if full else 0.1
    return {
        "choice": choice,
        "model": (FULL_MODEL if full else LABORATORY_MODEL)[cell.network],
        "optimizer": cell.optimizer,
        "batch": cell.batch,
        "rate": cell.rate,
        "epochs": cell.epochs or usual_epochs(plan),
        "seed": seed,
        "part": plan.choose(toy=128, laboratory=1024, full=256),
        "trust_coefficient": 0.001 if full else 0.1,
        "scale_all": full,
        "warmup": usual_warmup if cell.warmup_share is None else cell.warmup_share,
        "decay_from": "start" if full else "warmup",
        "augment": cell.augment,
        "points": plan.choose(toy=2, laboratory=16, full=25),
    }


def _paper_warmup(cell: LarsCell) -> float:
    """The paper's warm-up as a share of 100 epochs, for the cells of its tables 1 and 3."""
    if cell.optimizer == WITH_SGD:
        return 0.025 if cell.network == PLAIN else 0.0
    return 0.02 if cell.network == PLAIN else 0.05


def cell_seconds(plan: ExperimentPlan, cell: LarsCell) -> float:
    """Return about how long a run takes on one core, points of its curve included.

    Measured with other work beside: the small CNN takes 0.25 s an epoch, 0.5 s in batches of 128; the small GoogLeNet
    2.0 and 2.6 s. The paper's networks take 9 to 80 images a second.
    """
    epochs, small = cell.epochs or usual_epochs(plan), cell.batch < 1024
    if plan.toy:
        return 0.3
    if plan.size == "full":
        images_per_second = {PLAIN: 55.0, NORMED: 80.0, RESIDUAL: 9.0, INCEPTION: 10.0}[cell.network]
        return epochs * 49_152 / images_per_second
    of_an_epoch = (2.6 if small else 2.0) if cell.network == INCEPTION else (0.5 if small else 0.25)
    varied = {"none": 1.0, "minimal": 1.1, "extended": 1.25}[cell.augment]
    return epochs * of_an_epoch * varied + (16 if cell.network == INCEPTION else 3)


def cell_jobs(plan: ExperimentPlan, cells: Iterable[LarsCell]) -> list[Job]:
    """Return a job for each cell and seed; a cell that comes twice is one job."""
    return [
        Job(
            name=cell.job(seed),
            run=run_large_batch,
            settings=cell_settings(plan, cell, seed),
            seconds=cell_seconds(plan, cell),
        )
        for cell in dict.fromkeys(cells)
        for seed in plan.seeds
    ]


def accuracy_of(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], cell: LarsCell, key: str = "accuracy") -> float:
    """Return a cell's mean accuracy in per cent; a run that diverged has classified nothing.

    >>> cell = LarsCell(network="plain", optimizer="SGD", batch=1, rate=9.0)
    >>> accuracy_of(ExperimentPlan(), {cell.job(200): {"accuracy": None}}, cell)
    0.0
    """
    return mean([outcomes[cell.job(seed)][key] or 0.0 for seed in plan.seeds]) or 0.0


def best_of(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], cells: Sequence[LarsCell]) -> tuple[LarsCell, float]:
    """Return the cell that is best on the images held out, and its accuracy on the test images."""
    best = max(cells, key=lambda cell: accuracy_of(plan, outcomes, cell, "held_out"))
    return best, accuracy_of(plan, outcomes, best)


def remarks_for(plan: ExperimentPlan, *more: str, smaller: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return what is not as in the paper, at this size; `smaller` says how the laboratory differs elsewhere."""
    if plan.size == "full":
        return (FULL_SIZE,)
    return (*((SMALLER, SAME_WARMUP) if smaller is None else smaller), *more)


# -- the cells of tables 1 and 3 ---------------------------------------------------------------------------------------


def batches(plan: ExperimentPlan, optimizer: str) -> tuple[int, ...]:
    """Return the batches of table 1 (SGD) or table 3 (LARS), the smallest first.

    >>> batches(ExperimentPlan(), "LARS"), batches(ExperimentPlan(size="full"), "SGD")
    ((128, 2048, 8192, 16384), (512, 4096, 8192))
    """
    tables = {WITH_SGD: LARS_TABLE_1, WITH_LARS: LARS_TABLE_3}
    paper = tuple(dict.fromkeys(batch for batch, _, _ in tables[optimizer]["alexnet"]))
    every = plan.choose(toy=(32, 64, 128, 256), laboratory=(128, 2048, 8192, 16_384), full=paper)
    return tuple(every if plan.size == "full" or optimizer == WITH_LARS else every[:3])


def large_batch(plan: ExperimentPlan) -> int:
    """Return the batch at which SGD and LARS are compared: the paper's 8K.

    >>> large_batch(ExperimentPlan())
    8192
    """
    return batches(plan, WITH_SGD)[-1]


def rates(plan: ExperimentPlan, network: str, optimizer: str, batch: int) -> tuple[float, ...]:
    """Return the rates that a cell of table 1 or 3 tries: in the laboratory the same for both optimisers.

    >>> rates(ExperimentPlan(), "plain", "SGD", 8192), rates(ExperimentPlan(size="full"), "plain", "SGD", 8192)
    ((0.1, 0.2, 0.4, 0.8), (0.02, 0.03, 0.04, 0.05))
    """
    if plan.size == "full":
        table = (LARS_TABLE_1 if optimizer == WITH_SGD else LARS_TABLE_3)[PAPER_NETWORK[network]]
        return tuple(rate for own, rate, _ in table if own == batch)
    if batch == batches(plan, optimizer)[0]:
        return tuple(plan.choose(toy=(0.05,), laboratory=(0.0125, 0.025), full=()))
    return tuple(plan.choose(toy=(0.1, 0.4), laboratory=(0.1, 0.2, 0.4, 0.8), full=()))


def cells_at(plan: ExperimentPlan, network: str, optimizer: str, batch: int) -> list[LarsCell]:
    """Return a cell for each rate."""
    return [
        LarsCell(network=network, optimizer=optimizer, batch=batch, rate=rate)
        for rate in rates(plan, network, optimizer, batch)
    ]


def paper_rows(network: str, optimizer: str, place: int, plan: ExperimentPlan) -> tuple[str, str]:
    """Return the paper's batch, and its accuracies with their rates, that stand for our batch number `place`."""
    table = (LARS_TABLE_1 if optimizer == WITH_SGD else LARS_TABLE_3)[PAPER_NETWORK[network]]
    every = list(dict.fromkeys(batch for batch, _, _ in table))
    wanted = [every[place]] if plan.size == "full" or place < 3 else every[3:]
    shown = [f"{accuracy:g} ({rate:g})" for batch, rate, accuracy in table if batch in wanted]
    return ", ".join(map(batch_text, wanted)), two_a_line(shown)


def batch_table(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], optimizer: str, title: str) -> PlainTable:
    """Return table 1 or 3: accuracies with their rates, the paper's beside ours; the chosen rates are marked."""
    rows = []
    for network in (PLAIN, NORMED):
        for place, batch in enumerate(batches(plan, optimizer)):
            cells = cells_at(plan, network, optimizer, batch)
            chosen, _ = best_of(plan, outcomes, cells)
            ours = two_a_line(
                f"{accuracy_of(plan, outcomes, cell):.1f}{'*' if cell == chosen and len(cells) > 1 else ''} "
                f"({cell.rate:g})"
                for cell in cells
            )
            rows.append((SHOWN[network], *paper_rows(network, optimizer, place, plan), batch_text(batch), ours))
    return PlainTable(
        title=title,
        headings=("network", "batch,\npaper", "paper: accuracy %\n(rate)", "batch,\nours", "ours: accuracy %\n(rate)"),
        rows=rows,
        caption="* the rate that is best on images held out, where there are several.",
        left=True,
    )


def two_a_line(figures: Iterable[str]) -> str:
    """Return figures with commas between, two in a line, so that a table of them fits a terminal.

    >>> two_a_line(["1", "2", "3"])
    '1, 2,\\n3'
    """
    found = list(figures)
    return ",\n".join(", ".join(found[place : place + 2]) for place in range(0, len(found), 2))


def chosen_accuracies(
    plan: ExperimentPlan, outcomes: Mapping[str, Outcome], optimizer: str, at: Iterable[int] | None = None
) -> dict[str, dict[int, float]]:
    """Return each network's accuracy by batch, at the rate that was chosen."""
    wanted = batches(plan, optimizer) if at is None else at
    return {
        network: {
            batch: best_of(plan, outcomes, cells_at(plan, network, optimizer, batch))[1]
            for batch in batches(plan, optimizer)
            if batch in wanted
        }
        for network in (PLAIN, NORMED)
    }


def batch_chart(name: str, title: str, caption: str, found: Mapping[str, Mapping[int, float]]) -> Chart:
    """Return accuracies over the batch, a line for each name."""
    lines = [
        Series(name=key, points=[(float(batch), value / 100) for batch, value in each.items()])
        for key, each in found.items()
    ]
    return line_chart(name, title, caption, lines, x="batch", y="test accuracy", log_x=True, percent=True)


# -- table 1 -----------------------------------------------------------------------------------------------------------


def jobs_of_table_1(plan: ExperimentPlan) -> list[Job]:
    cells = [
        cell
        for network in (PLAIN, NORMED)
        for batch in batches(plan, WITH_SGD)
        for cell in cells_at(plan, network, WITH_SGD, batch)
    ]
    return cell_jobs(plan, cells)


def conclude_table_1(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    found = chosen_accuracies(plan, outcomes, WITH_SGD)
    small, large = batches(plan, WITH_SGD)[0], large_batch(plan)
    highest = {network: cells_at(plan, network, WITH_SGD, large)[-1] for network in found}
    at_highest = {network: accuracy_of(plan, outcomes, cell) for network, cell in highest.items()}
    lost = {network: each[small] - each[large] for network, each in found.items()}
    over_rates = {
        network: mean([accuracy_of(plan, outcomes, cell) for cell in cells_at(plan, network, WITH_SGD, large)])
        for network in found
    }
    claims: list[Claim] = [
        falling(
            f"{SHOWN[network]}: the best accuracy falls as the batch grows",
            list(found[network].values()),
            slack=0.5,
            write=points,
        )
        for network in found
    ]
    claims += [
        within(
            f"without normalisation SGD diverges at the highest rate, {highest[PLAIN].rate:g}, at a batch of "
            f"{batch_text(large)}",
            at_highest[PLAIN],
            most=CHANCE,
            kind="shape",
            write=points,
        ),
        ahead(
            f"batch normalisation bears the highest rate, {highest[NORMED].rate:g}, at a batch of {batch_text(large)}",
            {"normalised": at_highest[NORMED], "without": at_highest[PLAIN]},
            best="high",
            by=5.0,
            write=points,
        ),
        ahead(
            f"batch normalisation widens the range of good rates: mean over rates, batch {batch_text(large)}",
            {"normalised": over_rates[NORMED], "without": over_rates[PLAIN]},
            best="high",
            write=points,
        ),
        ahead(
            f"with batch normalisation less is lost from {batch_text(small)} to {batch_text(large)}",
            {"normalised": lost[NORMED], "without": lost[PLAIN]},
            best="low",
            write=points,
        ),
    ]
    lines = {SHOWN[network]: each for network, each in found.items()}
    return Findings(
        tables=(batch_table(plan, outcomes, WITH_SGD, "SGD: test accuracy by batch and rate"),),
        claims=tuple(claims),
        charts=(batch_chart("batch", "SGD at its best rate, over the batch", "The epochs stay the same.", lines),),
        series=tuple(lines),
        remarks=remarks_for(
            plan,
            CHOSEN,
            "Batch normalisation follows the two convolutions; the three linear layers after them have none.",
            "The claim on the mean over rates was added after a pilot on seed 200 had shown that normalisation does "
            "not bear the highest rate here.",
        ),
        numbers={
            SHOWN[network]: {str(batch): value for batch, value in each.items()} for network, each in found.items()
        },
    )


# -- table 2 -----------------------------------------------------------------------------------------------------------

TABLE_2_LAYERS = ("conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7", "fc8")
CAFFE_DEVIATIONS = (0.01, 0.01, 0.01, 0.01, 0.01, 0.005, 0.005, 0.01)
CAFFE_BIASES = (0.01, 0.01, 0.01, 0.01, 0.01, 0.1, 0.1, 0.01)
PIXEL_DEVIATION = 64.0  # of a photograph's bytes, about: Caffe subtracts the mean, and divides by nothing


class Scaled(nn.Module):
    """Multiplies its input by a number, so that a normalised image has the size of one in bytes.

    >>> import torch
    >>> Scaled(2.0)(torch.ones(1)).item()
    2.0
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


def caffe_alexnet(*, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build AlexNet with the initial weights that the norms in the paper's table 2 come from.

    Its norms are those of normal weights with deviation 0.01 (0.005 for fc6 and fc7) and of biases of 0.01 (0.1 for fc6
    and fc7): 0.01 * sqrt(96 * 3 * 11 * 11) = 1.87 and 0.01 * sqrt(96) = 0.098 for conv1, and so on for all sixteen.

    >>> model = caffe_alexnet(input_shape=(3, 32, 32), classes=10)
    >>> float(model[1][0].bias[0].detach())
    0.00999...
    """
    model = alexnet(input_shape=input_shape, classes=classes)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer, deviation, bias in zip(layers, CAFFE_DEVIATIONS, CAFFE_BIASES, strict=True):
        nn.init.normal_(layer.weight, std=deviation)
        assert layer.bias is not None
        nn.init.constant_(layer.bias, bias)
    return nn.Sequential(Scaled(PIXEL_DEVIATION), *model)


TABLE_2_MODELS = {"ours": "alexnet", "Caffe's weights": f"{__name__}:caffe_alexnet"}


def run_ratios(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return |w|, |gradient| and their ratio of AlexNet's weights and biases before the first step."""
    recipe = Recipe(seed=settings["seed"]).with_settings(
        data={"name": settings["data"]}, model={"name": settings["model"]}
    )
    rows = list(inspect_recipe(recipe, batch=settings["batch"]).first.ratios)
    named = dict[str, Any]()
    for layer, weight, bias in zip(TABLE_2_LAYERS, rows[::2], rows[1::2], strict=True):
        for suffix, row in (("weight", weight), ("bias", bias)):
            ratio = row.ratio if row.ratio is not None and math.isfinite(row.ratio) else None
            named[f"{layer} {suffix}"] = {"weight": row.weight_norm, "gradient": row.gradient_norm, "ratio": ratio}
    return {"layers": named}


def jobs_of_table_2(plan: ExperimentPlan) -> list[Job]:
    return [
        Job(
            name=f"{name} seed {seed}",
            run=run_ratios,
            settings={
                "model": model,
                "data": plan.choose(toy="digits", laboratory="cifar10", full="cifar10"),
                "batch": plan.choose(toy=16, laboratory=256, full=512),
                "seed": seed,
            },
            seconds=plan.choose(toy=1.0, laboratory=25.0, full=40.0),
        )
        for name, model in TABLE_2_MODELS.items()
        for seed in plan.seeds
    ]


def paper_ratios() -> dict[str, float]:
    """Return the ratios of table 2, by what their norms say that they are: its ".b" are the weights.

    >>> paper_ratios()["conv1 weight"], paper_ratios()["fc8 bias"]
    (8.48, 19)
    """
    kinds = {"b": "weight", "w": "bias"}
    return {f"{label[:-2]} {kinds[label[-1]]}": ratio for label, _, _, ratio in LARS_TABLE_2}


def conclude_table_2(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    paper = paper_ratios()

    def ratio(name: str, layer: str) -> float | None:
        return mean([outcomes[f"{name} seed {seed}"]["layers"][layer]["ratio"] for seed in plan.seeds])

    def norm(name: str, layer: str) -> float:
        return float(outcomes[f"{name} seed {plan.seeds[0]}"]["layers"][layer]["weight"])

    weights = [f"{layer} weight" for layer in TABLE_2_LAYERS]
    found = {name: {layer: ratio(name, layer) for layer in weights} for name in TABLE_2_MODELS}
    spreads = {name: spread(each.values()) for name, each in found.items()}
    limiting = {name: _smallest(each) for name, each in found.items()}
    paper_spread, paper_limiting = (
        spread([paper[layer] for layer in weights]),
        _smallest({w: paper[w] for w in weights}),
    )
    caffe = "Caffe's weights"
    rows = [
        (layer, f"{paper[layer]:g}", figure(ratio("ours", layer)), figure(ratio(caffe, layer)))
        for layer in (f"{layer} {kind}" for layer in TABLE_2_LAYERS for kind in ("weight", "bias"))
    ]
    rows.append(("spread of the weights'", figure(paper_spread), figure(spreads["ours"]), figure(spreads[caffe])))
    return Findings(
        tables=(
            PlainTable(
                title="|w| / |gradient| before the first step",
                headings=("layer", "paper", "ours:\nHe's weights", "ours:\nCaffe's weights"),
                rows=rows,
                caption="0: the weights are 0 at the start.",
            ),
        ),
        claims=(
            *(
                within(
                    f"ratios of the weights differ by more than ten times ({name})",
                    spreads[name],
                    least=10.0,
                    kind="shape",
                )
                for name in TABLE_2_MODELS
            ),
            *(
                Claim(
                    kind="winner",
                    text=f"the first layer limits the rate, of the weights ({name})",
                    holds=limiting[name] == paper_limiting,
                    because=f"{limiting[name]}, {figure(found[name][limiting[name]])}" if limiting[name] else "none",
                )
                for name in TABLE_2_MODELS
            ),
        ),
        charts=(
            bar_chart(
                "ratios",
                "Ratio of weights to gradient, before the first step",
                "LARS gives each layer a rate in proportion to it.",
                list(TABLE_2_LAYERS),
                {
                    "paper": [paper[layer] for layer in weights],
                    "ours": [found["ours"][layer] for layer in weights],
                    caffe: [found[caffe][layer] for layer in weights],
                },
                y="ratio",
                log_y=True,
            ),
        ),
        series=("paper", "ours", caffe),
        remarks=(
            "The paper's .w and .b are swapped: by their norms its .b are the weights. Its conv5.w, 69, is not the "
            "quotient of the norms beside it, which is 800.",
            "AlexNet at CIFAR size on CIFAR-10 in place of ImageNet; He's weights for a network whose images are "
            f"normalised, and Caffe's with images {PIXEL_DEVIATION:g} times as large, which is about their bytes.",
        ),
        numbers={
            "spread": spreads,
            "limiting": limiting,
            "norm of conv1": norm(caffe, "conv1 weight"),
            "ratios": found,
        },
    )


def spread(ratios: Iterable[float | None]) -> float | None:
    """Return the largest ratio over the smallest; None where one is missing.

    >>> spread([2.0, 6.0]), spread([2.0, None])
    (3.0, None)
    """
    known = list(ratios)
    whole = [each for each in known if each is not None and each > 0]
    return max(whole) / min(whole) if whole and len(whole) == len(known) else None


def _smallest(ratios: Mapping[str, float | None]) -> str:
    known = {name: each for name, each in ratios.items() if each is not None}
    return min(known, key=lambda name: known[name]) if known else ""


# -- table 3 -----------------------------------------------------------------------------------------------------------


def jobs_of_table_3(plan: ExperimentPlan) -> list[Job]:
    small, large = batches(plan, WITH_SGD)[0], large_batch(plan)
    cells = [
        cell
        for network in (PLAIN, NORMED)
        for optimizer, wanted in ((WITH_LARS, batches(plan, WITH_LARS)), (WITH_SGD, (small, large)))
        for batch in wanted
        for cell in cells_at(plan, network, optimizer, batch)
    ]
    return cell_jobs(plan, cells)


def conclude_table_3(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    small, large = batches(plan, WITH_SGD)[0], large_batch(plan)
    lars = chosen_accuracies(plan, outcomes, WITH_LARS)
    sgd = chosen_accuracies(plan, outcomes, WITH_SGD, at=(small, large))
    claims: list[Claim] = []
    for network in (PLAIN, NORMED):
        base, ours = sgd[network][small], lars[network][large]
        claims += [
            within(
                f"{SHOWN[network]}: LARS at {batch_text(large)} at most {BEHIND_BASELINE} points behind SGD at "
                f"{batch_text(small)}",
                base - ours,
                most=BEHIND_BASELINE,
                kind="shape",
                write=points,
            ),
            ahead(
                f"{SHOWN[network]}: LARS ahead of SGD at {batch_text(large)}",
                {"LARS": ours, "SGD": sgd[network][large]},
                best="high",
                write=points,
            ),
            falling(
                f"{SHOWN[network]}: beyond {batch_text(large)} LARS loses too",
                [value for batch, value in lars[network].items() if batch >= large],
                write=points,
            ),
        ]
    lines = {f"{SHOWN[network]}, LARS": each for network, each in lars.items()}
    lines |= {f"{SHOWN[network]}, SGD": each for network, each in sgd.items()}
    return Findings(
        tables=(
            batch_table(plan, outcomes, WITH_LARS, "LARS: test accuracy by batch and rate"),
            PlainTable(
                title="SGD beside it, each at its best rate",
                headings=(
                    "network",
                    "batch,\nours",
                    "ours:\nSGD %",
                    "ours:\nLARS %",
                    "paper:\nSGD %",
                    "paper:\nLARS %",
                ),
                rows=[
                    (
                        SHOWN[network],
                        batch_text(batch),
                        f"{sgd[network][batch]:.1f}",
                        f"{lars[network][batch]:.1f}",
                        *(f"{paper_best(network, name, place):g}" for name in (WITH_SGD, WITH_LARS)),
                    )
                    for network in (PLAIN, NORMED)
                    for place, batch in ((0, small), (2, large))
                ],
            ),
        ),
        claims=tuple(claims),
        charts=(
            batch_chart(
                "batch", "LARS and SGD at their best rates, over the batch", "The epochs stay the same.", lines
            ),
        ),
        series=tuple(lines),
        remarks=remarks_for(plan, TRUST, CHOSEN),
        numbers={name: {str(batch): value for batch, value in each.items()} for name, each in lines.items()},
    )


def paper_best(network: str, optimizer: str, place: int) -> float:
    """Return the paper's best accuracy at its batch number `place`.

    >>> paper_best("plain", "SGD", 2)
    44.8
    """
    table = (LARS_TABLE_1 if optimizer == WITH_SGD else LARS_TABLE_3)[PAPER_NETWORK[network]]
    every = list(dict.fromkeys(batch for batch, _, _ in table))
    return max(accuracy for batch, _, accuracy in table if batch == every[place])


# -- figures 1 and 2: curves -------------------------------------------------------------------------------------------


LOSSES = ("train_loss", "test_loss")


def figure_1_cells(plan: ExperimentPlan) -> tuple[list[LarsCell], list[LarsCell]]:
    """Return the normalised network with SGD at the small and the large batch, at all rates of table 1."""
    small, large = batches(plan, WITH_SGD)[0], large_batch(plan)
    return cells_at(plan, NORMED, WITH_SGD, small), cells_at(plan, NORMED, WITH_SGD, large)


def jobs_of_figure_1(plan: ExperimentPlan) -> list[Job]:
    return cell_jobs(plan, itertools.chain(*figure_1_cells(plan)))


def curve_of(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], cell: LarsCell) -> list[dict[str, float]]:
    """Return a cell's curve, the mean over seeds, as far as all of them came."""
    curves = [outcomes[cell.job(seed)]["curve"] for seed in plan.seeds]
    keys = ("epoch", "train_loss", "test_loss", "accuracy")
    return [
        {key: sum(float(point[key]) for point in together) / len(together) for key in keys}
        for together in zip(*curves, strict=False)
    ]


def gap_at_loss(curve: Sequence[Mapping[str, float]], loss: float) -> float | None:
    """Return the gap of a curve where its training loss first was down to `loss`, between its points.

    >>> curve = [{"train_loss": 1.0, "test_loss": 1.0}, {"train_loss": 0.5, "test_loss": 0.7}]
    >>> round(gap_at_loss(curve, 0.75), 6), gap_at_loss(curve, 0.1)
    (0.1, None)
    """
    gaps = [(point["train_loss"], point["test_loss"] - point["train_loss"]) for point in curve]
    if gaps and gaps[0][0] <= loss:
        return gaps[0][1]
    for (above, before), (below, after) in itertools.pairwise(gaps):
        if below <= loss <= above:
            share = (above - loss) / (above - below) if above > below else 1.0
            return before + share * (after - before)
    return None


def conclude_figure_1(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    cells = [best_of(plan, outcomes, each)[0] for each in figure_1_cells(plan)]
    curves = [curve_of(plan, outcomes, cell) for cell in cells]
    names = [f"batch {batch_text(cell.batch)}" for cell in cells]
    ends = [curve[-1] if curve else None for curve in curves]
    gaps = [None if end is None else end["test_loss"] - end["train_loss"] for end in ends]
    at_equal = None if ends[1] is None else gap_at_loss(curves[0], ends[1]["train_loss"])
    more = None if gaps[0] is None or gaps[1] is None else gaps[1] - 1.1 * gaps[0]
    apart = None if gaps[1] is None or at_equal is None else abs(gaps[1] - at_equal)
    rows = [
        (f"{name}, rate {cell.rate:g}", *(figure(None if end is None else end[key]) for key in LOSSES), figure(gap))
        for name, cell, end, gap in zip(names, cells, ends, gaps, strict=True)
    ]
    lines = [
        Series(
            name=f"{name}, {word}", points=[(point["epoch"], point[key]) for point in curve], dashed=key == "train_loss"
        )
        for name, curve in zip(names, curves, strict=True)
        for word, key in zip(("training", "test"), LOSSES, strict=True)
    ]
    return Findings(
        tables=(
            PlainTable(
                title="Losses at the end, SGD, batch normalisation",
                headings=("run", "ours:\ntraining loss", "ours:\ntest loss", "ours:\ngap", "paper"),
                rows=[
                    (*row, word) for row, word in zip(rows, ("not readable", "gap practically the same"), strict=True)
                ],
                caption="The paper's curves are not readable.",
            ),
        ),
        claims=(
            within(
                "the gap is not larger at the large batch, within a tenth of it",
                more,
                most=0.0,
                kind="shape",
            ),
            within(
                "the gap is practically the same where the training loss is the same: 0.03 apart at the most",
                apart,
                most=0.03,
                kind="shape",
            ),
            within(
                "the gap is practically the same at the end: that of the large batch over that of the small one",
                None if gaps[0] is None or gaps[1] is None or not gaps[0] else gaps[1] / gaps[0],
                least=0.8,
                most=1.2,
                kind="shape",
            ),
        ),
        charts=(line_chart("gap", "Test and training loss", "SGD, batch normalisation.", lines, x="epoch", y="loss"),),
        series=tuple(line.name for line in lines),
        remarks=remarks_for(
            plan,
            "Losses are of the model as it is evaluated, on the first 5,000 training images and all test images. In as "
            "many epochs the small batch comes to a lower training loss here, and so to a larger gap; hence the "
            "comparison where the training losses are the same.",
            "The caption of the paper has a small batch of 256, its text one of 512.",
        ),
        numbers={"gaps": gaps, "gap of the small batch at equal training loss": at_equal},
    )


def figure_2_cells(plan: ExperimentPlan) -> tuple[list[LarsCell], list[LarsCell]]:
    """Return the normalised network with SGD at the small batch, and with LARS at the large one, at all rates."""
    return figure_1_cells(plan)[0], cells_at(plan, NORMED, WITH_LARS, large_batch(plan))


def jobs_of_figure_2(plan: ExperimentPlan) -> list[Job]:
    return cell_jobs(plan, itertools.chain(*figure_2_cells(plan)))


def conclude_figure_2(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    base, lars = (best_of(plan, outcomes, each)[0] for each in figure_2_cells(plan))
    names = [f"{cell.optimizer}, batch {batch_text(cell.batch)}" for cell in (base, lars)]
    values = [accuracy_of(plan, outcomes, cell) for cell in (base, lars)]
    curves = [curve_of(plan, outcomes, cell) for cell in (base, lars)]
    first, points_of_run = outcomes[lars.job(plan.seeds[0])]["first_ratios"], outcomes[lars.job(plan.seeds[0])]["curve"]
    epochs = usual_epochs(plan)
    later = next((point for point in points_of_run if point["epoch"] >= epochs / 10), None)
    fell = [later["ratios"].get(name, math.inf) < ratio for name, ratio in first.items()] if first and later else []
    accuracy_lines = [
        Series(name=name, points=[(point["epoch"], point["accuracy"] / 100) for point in curve])
        for name, curve in zip(names, curves, strict=True)
    ]
    ratio_lines = [
        Series(
            name=f"layer {layer}",
            points=[(0.0, ratio), *((float(point["epoch"]), point["ratios"].get(layer)) for point in points_of_run)],
        )
        for layer, ratio in (first or {}).items()
    ]
    layer_rows = [
        (layer, figure(ratio), figure(later["ratios"].get(layer)) if later else "none", "falls after few epochs")
        for layer, ratio in (first or {}).items()
    ]
    return Findings(
        tables=(
            PlainTable(
                title="Accuracy at the end, batch normalisation",
                headings=("run", "paper %", "ours %"),
                rows=[
                    (names[0], f"{paper_best(NORMED, WITH_SGD, 0):g}", f"{values[0]:.1f}"),
                    (names[1], f"{paper_best(NORMED, WITH_LARS, 2):g}", f"{values[1]:.1f}"),
                ],
            ),
            PlainTable(
                title=f"|w| / |gradient| of the weights, {names[1]}",
                headings=("layer", "ours:\nfirst step", "ours: after a\ntenth of the run", "paper"),
                rows=layer_rows,
                caption="The paper's curves are not readable.",
            ),
        ),
        claims=(
            within(
                f"LARS at the large batch matches the small one: at most {BEHIND_BASELINE} points behind",
                values[0] - values[1],
                most=BEHIND_BASELINE,
                kind="shape",
                write=points,
            ),
            within(
                "the ratios of most layers are lower after a tenth of the run",
                sum(fell) / len(fell) if fell else None,
                least=0.51,
                kind="shape",
                write=lambda share: "none" if share is None else f"{share:.0%} of the layers",
            ),
        ),
        charts=(
            line_chart(
                "accuracy",
                "Test accuracy",
                "LARS beside the baseline.",
                accuracy_lines,
                x="epoch",
                y="accuracy",
                percent=True,
            ),
            line_chart(
                "ratios",
                "Ratio of weights to gradient",
                "By the last gradient of an epoch.",
                ratio_lines,
                x="epoch",
                y="ratio",
                log_y=True,
            ),
        ),
        series=(*names, *(line.name for line in ratio_lines))[: max(len(names), len(ratio_lines))],
        remarks=remarks_for(plan, TRUST),
        numbers={
            "accuracy": dict(zip(names, values, strict=True)),
            "share of layers": sum(fell) / len(fell) if fell else None,
        },
    )


# -- figure 3 ----------------------------------------------------------------------------------------------------------


def figure_3_rates(plan: ExperimentPlan) -> tuple[float, ...]:
    """Return the rates, the root of two apart; every other one is a rate of table 3.

    >>> figure_3_rates(ExperimentPlan())
    (0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1)
    """
    return tuple(
        plan.choose(
            toy=(0.1, 0.2, 0.4),
            laboratory=(0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1),
            full=(6.5, 9, 13, 16, 19, 22, 31, 44),
        )
    )


def figure_3_cells(plan: ExperimentPlan) -> dict[int, list[LarsCell]]:
    """Return the normalised network with LARS at the two largest batches, by batch."""
    wanted = batches(plan, WITH_LARS)[-2:]
    return {
        batch: [LarsCell(network=NORMED, optimizer=WITH_LARS, batch=batch, rate=rate) for rate in figure_3_rates(plan)]
        for batch in wanted
    }


def jobs_of_figure_3(plan: ExperimentPlan) -> list[Job]:
    return cell_jobs(plan, [cell for cells in figure_3_cells(plan).values() for cell in cells])


def plateau(by_rate: Mapping[float, float], within_points: float) -> float:
    """Return how many times its lowest rate the highest of the rates about the best is, that lose so little.

    >>> plateau({0.1: 80.0, 0.2: 85.2, 0.4: 85.5, 0.8: 84.9, 1.6: 10.0}, 1.0)
    4.0
    """
    rates_in_order = sorted(by_rate)
    best = max(rates_in_order, key=lambda rate: by_rate[rate])
    if by_rate[best] <= CHANCE:  # nothing was learned at any rate: that is no plateau
        return 1.0
    good = [rate for rate in rates_in_order if by_rate[best] - by_rate[rate] <= within_points]
    low = high = rates_in_order.index(best)
    while low > 0 and rates_in_order[low - 1] in good:
        low -= 1
    while high + 1 < len(rates_in_order) and rates_in_order[high + 1] in good:
        high += 1
    return rates_in_order[high] / rates_in_order[low]


def conclude_figure_3(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    found = {
        batch: {cell.rate: accuracy_of(plan, outcomes, cell) for cell in cells}
        for batch, cells in figure_3_cells(plan).items()
    }
    low, high = LARS_FIGURE_3_RATES
    wide = high / low
    first = next(iter(found))
    lines = [
        Series(name=f"batch {batch_text(batch)}", points=[(rate, value / 100) for rate, value in each.items()])
        for batch, each in found.items()
    ]
    said = f"{LARS_FIGURE_3_ACCURACY} for all of {low} to {high}"
    return Findings(
        tables=(
            PlainTable(
                title="Test accuracy by rate, LARS, batch normalisation",
                headings=(
                    f"rate,\nours (LARS, {batch_text(first)} and more)",
                    *(f"ours %:\nbatch {batch_text(batch)}" for batch in found),
                    f"paper %: batch\n{batch_text(LARS_FIGURE_3_BATCH)}",
                ),
                rows=[
                    (f"{rate:g}", *(f"{each[rate]:.1f}" for each in found.values()), said if index == 0 else "")
                    for index, rate in enumerate(figure_3_rates(plan))
                ],
                caption="Of the paper's curves only what its text says is readable.",
            ),
        ),
        claims=(
            within(
                f"rates {figure(wide)} times apart are about as good: within a point, batch {batch_text(first)}",
                plateau(found[first], 1.0),
                least=wide,
                kind="shape",
            ),
            ahead(
                "the larger batch is behind at its best rate",
                {line.name: max(each.values()) for line, each in zip(lines, found.values(), strict=True)},
                best="high",
                write=points,
            ),
        ),
        charts=(
            line_chart(
                "rate",
                "Accuracy over the rate",
                "LARS, batch normalisation.",
                lines,
                x="rate",
                y="test accuracy",
                log_x=True,
                percent=True,
            ),
        ),
        series=tuple(line.name for line in lines),
        remarks=remarks_for(plan, TRUST, "Rates are the root of two apart, one run each."),
        numbers={str(batch): {f"{rate:g}": value for rate, value in each.items()} for batch, each in found.items()},
    )


# -- table 4 and figure 4 ----------------------------------------------------------------------------------------------

AUGMENTATIONS: tuple[Literal["minimal", "extended"], ...] = ("minimal", "extended")


def table_4_cells(plan: ExperimentPlan) -> dict[tuple[int, str], LarsCell]:
    """Return LARS by batch and augmentation."""
    rows = plan.choose(
        toy=((32, 0.05, None), (128, 0.4, None)),
        laboratory=((128, 0.0125, None), (2048, 0.1, None), (8192, 0.4, None)),
        full=tuple((batch, rate, (warmup or 0) / 100) for batch, rate, warmup, _, _ in LARS_TABLE_4),
    )
    return {
        (batch, augment): LarsCell(
            network=RESIDUAL, optimizer=WITH_LARS, batch=batch, rate=rate, warmup_share=share, augment=augment
        )
        for batch, rate, share in rows
        for augment in AUGMENTATIONS
    }


def jobs_of_table_4(plan: ExperimentPlan) -> list[Job]:
    return cell_jobs(plan, table_4_cells(plan).values())


def table_4_paper(plan: ExperimentPlan, place: int, count: int) -> tuple[float, float, float]:
    """Return the paper's batch and its two accuracies that stand for our batch number `place` of `count`."""
    row = LARS_TABLE_4[place if plan.size == "full" else (0, 2, 4)[place + (3 - count if place else 0)]]
    return row[0], row[3], row[4]


def conclude_table_4(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    cells = table_4_cells(plan)
    found = {key: accuracy_of(plan, outcomes, cell) for key, cell in cells.items()}
    every = list(dict.fromkeys(batch for batch, _ in cells))
    small, large = every[0], every[-1]
    rows = []
    for place, batch in enumerate(every):
        paper_batch, minimal, extended = table_4_paper(plan, place, len(every))
        rows.append(
            (batch_text(paper_batch), f"{minimal:g}", f"{extended:g}", batch_text(batch),
             *(f"{found[batch, augment]:.1f}" for augment in AUGMENTATIONS))
        )  # fmt: skip
    gain = {batch: found[batch, "extended"] - found[batch, "minimal"] for batch in (small, large)}
    return Findings(
        tables=(
            PlainTable(
                title="LARS by batch and augmentation: test accuracy",
                headings=(
                    "batch,\npaper",
                    "paper %:\nminimal",
                    "paper %:\nextended",
                    "batch,\nours",
                    "ours %:\nminimal",
                    "ours %:\nextended",
                ),
                rows=rows,
            ),
        ),
        claims=(
            *(
                within(
                    f"from the smallest to the largest batch at most {MOST_LOST[augment]} points are lost, "
                    f"{augment} augmentation",
                    found[small, augment] - found[large, augment],
                    most=MOST_LOST[augment],
                    kind="shape",
                    write=points,
                )
                for augment in AUGMENTATIONS
            ),
            ahead(
                f"extended augmentation ahead of minimal at the smallest batch, {batch_text(small)}",
                {"extended": found[small, "extended"], "minimal": found[small, "minimal"]},
                best="high",
                write=points,
            ),
            ahead(
                "extended augmentation brings the smallest batch more than the largest",
                {f"batch {batch_text(batch)}": gain[batch] for batch in (small, large)},
                best="high",
                write=points,
            ),
        ),
        charts=(
            batch_chart(
                "batch",
                "LARS over the batch, by augmentation",
                "The epochs stay the same.",
                {augment: {batch: found[batch, augment] for batch in every} for augment in AUGMENTATIONS},
            ),
        ),
        series=AUGMENTATIONS,
        remarks=remarks_for(
            plan,
            TRUST,
            "The network is small, and may not fit images that vary much.",
            "Rates are those that the small CNN did best with, without augmentation, on another seed. Minimal: crops "
            "and flips; extended: scale, aspect ratio and colours as well.",
            smaller=IN_PLACE_OF_RESNET,
        ),
        numbers={f"{batch} {augment}": value for (batch, augment), value in found.items()},
    )


def figure_4_cells(plan: ExperimentPlan) -> list[LarsCell]:
    """Return the cells of table 4 with minimal augmentation, which the paper calls none."""
    return [cell for (_, augment), cell in table_4_cells(plan).items() if augment == "minimal"]


def jobs_of_figure_4(plan: ExperimentPlan) -> list[Job]:
    return cell_jobs(plan, figure_4_cells(plan))


def conclude_figure_4(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    cells = figure_4_cells(plan)
    values = [accuracy_of(plan, outcomes, cell) for cell in cells]
    curves = [curve_of(plan, outcomes, cell) for cell in cells]
    names = [f"batch {batch_text(cell.batch)}" for cell in cells]
    lines = [
        Series(name=name, points=[(point["epoch"], point["accuracy"] / 100) for point in curve])
        for name, curve in zip(names, curves, strict=True)
    ]
    papers = [table_4_paper(plan, place, len(cells)) for place in range(len(cells))]
    quarter = [next((p["accuracy"] for p in curve if p["epoch"] >= usual_epochs(plan) / 4), None) for curve in curves]
    return Findings(
        tables=(
            PlainTable(
                title="LARS, minimal augmentation: accuracy over the epochs",
                headings=(
                    "batch,\npaper",
                    "paper %:\nend",
                    "batch,\nours",
                    "ours %:\na quarter through",
                    "ours %:\nend",
                ),
                rows=[
                    (batch_text(paper[0]), f"{paper[1]:g}", batch_text(cell.batch), points(early), f"{value:.1f}")
                    for paper, cell, early, value in zip(papers, cells, quarter, values, strict=True)
                ],
                caption="Ends are those of table 4; the paper's curves are not readable.",
            ),
        ),
        claims=(
            within(
                f"the largest batch ends at most {BEHIND_BASELINE} points behind the smallest",
                values[0] - values[-1],
                most=BEHIND_BASELINE,
                kind="shape",
                write=points,
            ),
            falling("the larger the batch, the lower it ends", values, slack=0.3, write=points),
        ),
        charts=(
            line_chart(
                "accuracy", "Test accuracy", "LARS, minimal augmentation.", lines, x="epoch", y="accuracy", percent=True
            ),
        ),
        series=tuple(names),
        remarks=remarks_for(plan, TRUST, smaller=IN_PLACE_OF_RESNET),
        numbers=dict(zip(names, values, strict=True)),
    )


# -- table 5 -----------------------------------------------------------------------------------------------------------

TABLE_5_PAPER = {PLAIN: "alexnet, 16K", NORMED: "alexnet-bn, 32K", RESIDUAL: "resnet50, 16K"}
TABLE_5_BASELINE = {  # LARS at the smallest batch in 100 epochs
    PLAIN: LARS_TABLE_3["alexnet"][0][2],
    NORMED: LARS_TABLE_3["alexnet-bn"][0][2],
    RESIDUAL: LARS_TABLE_4[0][4],
}


def table_5_networks(plan: ExperimentPlan) -> tuple[str, ...]:
    """Return the networks; the laboratory has no ResNet-50."""
    return tuple(TABLE_5_PAPER) if plan.size == "full" else (PLAIN, NORMED)


def table_5_cells(plan: ExperimentPlan) -> dict[str, list[LarsCell]]:
    """Return for each network the small batch first, then the large one with 1 to 2 times the epochs."""
    epochs = plan.choose(toy=(1, 2), laboratory=(32, 40, 48, 56, 64), full=tuple(LARS_TABLE_5["epochs"]))
    full = {PLAIN: (512, 2, 16_384, 14), NORMED: (512, 2, 32_768, 22), RESIDUAL: (256, 4, 16_384, 33)}
    cells = {}
    for network in table_5_networks(plan):
        small, low, large, high = plan.choose(
            toy=(32, 0.05, 128, 0.4), laboratory=(128, 0.0125, 8192, 0.4), full=full[network]
        )
        made = [(small, low, epochs[0]), *((large, high, count) for count in epochs)]
        cells[network] = [
            LarsCell(network=network, optimizer=WITH_LARS, batch=batch, rate=rate, epochs=count)
            if count != usual_epochs(plan)
            else LarsCell(network=network, optimizer=WITH_LARS, batch=batch, rate=rate)  # a cell of table 3
            for batch, rate, count in made
        ]
    return cells


def jobs_of_table_5(plan: ExperimentPlan) -> list[Job]:
    return cell_jobs(plan, [cell for cells in table_5_cells(plan).values() for cell in cells])


def conclude_table_5(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, claims, lines, numbers = [], list[Claim](), [], dict[str, Any]()
    for network, (small, *cells) in table_5_cells(plan).items():
        base = accuracy_of(plan, outcomes, small)
        values = [accuracy_of(plan, outcomes, cell) for cell in cells]
        epochs = [cell.epochs or usual_epochs(plan) for cell in cells]
        paper = LARS_TABLE_5[TABLE_5_PAPER[network]]
        paper_values = paper if len(paper) == len(values) else (paper[0], paper[-1])
        paper_epochs = LARS_TABLE_5["epochs"]
        shown = paper_epochs if len(paper) == len(values) else (paper_epochs[0], paper_epochs[-1])
        rows.append(
            (
                SHOWN[network],
                "-",
                f"{TABLE_5_BASELINE[network]:g}",
                f"{epochs[0]}, {batch_text(small.batch)}",
                f"{base:.1f}",
            )
        )
        for count, paper_count, value, theirs in zip(epochs, shown, values, paper_values, strict=True):
            rows.append(
                (
                    SHOWN[network],
                    f"{paper_count:g}, {TABLE_5_PAPER[network].split()[-1]}",
                    f"{theirs:g}",
                    f"{count}, {batch_text(cells[0].batch)}",
                    f"{value:.1f}",
                )
            )
        lost, back = base - values[0], values[-1] - values[0]
        claims += [
            falling(
                f"{SHOWN[network]}: the accuracy of the large batch rises with the epochs",
                values,
                rising=True,
                slack=0.5,
                write=points,
            ),
            within(
                f"{SHOWN[network]}: twice the epochs bring back at least half of the {lost:.1f} points that were lost",
                back / lost if lost > 0 else None,
                least=0.5,
                kind="shape",
                write=lambda share: "nothing was lost" if share is None else f"{share:.0%}",
            ),
        ]
        lines.append(
            Series(
                name=SHOWN[network], points=[(count, value / 100) for count, value in zip(epochs, values, strict=True)]
            )
        )
        numbers[SHOWN[network]] = {"small batch": base, **{str(n): v for n, v in zip(epochs, values, strict=True)}}
    return Findings(
        tables=(
            PlainTable(
                title="LARS: accuracy by epochs; first the small batch",
                headings=("network", "epochs, batch:\npaper", "paper %", "epochs, batch:\nours", "ours %"),
                rows=rows,
                left=True,
            ),
        ),
        claims=tuple(claims),
        charts=(
            line_chart(
                "epochs",
                "Accuracy at a large batch",
                "Each point is a run of so many epochs.",
                lines,
                x="epochs",
                y="test accuracy",
                percent=True,
            ),
        ),
        series=tuple(line.name for line in lines),
        remarks=remarks_for(
            plan,
            TRUST,
            "One rate for all of a network's runs. 32 epochs stand for the paper's 100, so that there is something to "
            "bring back; ResNet-50 is left out.",
            smaller=(
                "A small CNN on 16,384 images of Fashion-MNIST at 14x14 in place of AlexNet on ImageNet; a batch of "
                "8192 stands for 16K and 32K.",
                "The warm-up is a tenth of the steps for all.",
            ),
        ),
        numbers=numbers,
    )


# -- table 6 -----------------------------------------------------------------------------------------------------------

SHORT_WARMUP, LONG_WARMUP = 0.05, 0.3  # the paper's: 5 of 100 epochs at a batch of 256, 110 of 350 at 16K


def table_6_cells(plan: ExperimentPlan) -> dict[str, LarsCell]:
    """Return SGD and LARS at the small batch, and LARS at the large one by epochs and warm-up."""
    few, many = plan.choose(toy=(1, 2), laboratory=(24, 64), full=(100, 350))
    small, large = plan.choose(toy=(32, 128), laboratory=(128, 8192), full=(256, 16_384))
    sgd, low, high = plan.choose(toy=(0.05, 0.05, 0.2), laboratory=(0.025, 0.05, 0.2), full=(0.02, 4, 10))

    def cell(optimizer: str, batch: int, rate: float, epochs: int, warmup: float) -> LarsCell:
        return LarsCell(
            network=INCEPTION, optimizer=optimizer, batch=batch, rate=rate, epochs=epochs, warmup_share=warmup
        )

    return {
        "small SGD": cell(WITH_SGD, small, sgd, few, 0.0 if plan.size == "full" else SHORT_WARMUP),
        "small LARS": cell(WITH_LARS, small, low, few, SHORT_WARMUP),
        "few, short": cell(WITH_LARS, large, high, few, SHORT_WARMUP),
        "few, long": cell(WITH_LARS, large, high, few, LONG_WARMUP),
        "many, short": cell(WITH_LARS, large, high, many, SHORT_WARMUP),
        "many, long": cell(WITH_LARS, large, high, many, LONG_WARMUP),
    }


def jobs_of_table_6(plan: ExperimentPlan) -> list[Job]:
    return cell_jobs(plan, table_6_cells(plan).values())


def conclude_table_6(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    cells = table_6_cells(plan)
    found = {name: accuracy_of(plan, outcomes, cell) for name, cell in cells.items()}
    paper_shown = {"small SGD": LARS_TABLE_6[0], "small LARS": LARS_TABLE_6[1], "many, long": LARS_TABLE_6[-1]}
    rows = []
    for name, cell in cells.items():
        row = paper_shown.get(name)
        paper = (
            ("-", "not printed")
            if row is None
            else (f"{batch_text(row[0])}, {row[2]:g}, {row[3] if row[3] is not None else '-'}", f"{row[4]:g}")
        )
        warmup = round((cell.warmup_share or 0) * (cell.epochs or 1), 1)
        ours = f"{batch_text(cell.batch)}, {cell.epochs}, {warmup:g}"
        rows.append((cell.optimizer, *paper, ours, f"{found[name]:.1f}"))
    paper_rows_6 = ", ".join(f"{batch_text(row[0])}: {row[4]:g} in {row[2]:g}" for row in LARS_TABLE_6[2:])
    return Findings(
        tables=(
            PlainTable(
                title="GoogLeNet without normalisation: test accuracy",
                headings=(
                    "optimiser",
                    "batch, epochs,\nwarm-up: paper",
                    "paper %",
                    "batch, epochs,\nwarm-up: ours",
                    "ours %",
                ),
                rows=rows,
                caption=f"The paper's other rows, batch: accuracy in epochs: {paper_rows_6}.",
                left=True,
            ),
        ),
        claims=(
            ahead(
                "the large batch is better with more epochs, with a long warm-up",
                {"more": found["many, long"], "fewer": found["few, long"]},
                best="high",
                write=points,
            ),
            ahead(
                "the large batch is better with a longer warm-up, in many epochs",
                {"longer": found["many, long"], "shorter": found["many, short"]},
                best="high",
                write=points,
            ),
            ahead(
                "both are needed: with few epochs and a short warm-up the large batch is behind the small one",
                {"small batch": found["small LARS"], "large batch": found["few, short"]},
                best="high",
                by=1.0,
                write=points,
            ),
            within(
                "with both, the large batch is at most 3.1 points behind the small one, as in the paper",
                found["small LARS"] - found["many, long"],
                most=3.1,
                kind="shape",
                write=points,
            ),
            ahead(
                "LARS ahead of SGD at the small batch",
                {"LARS": found["small LARS"], "SGD": found["small SGD"]},
                best="high",
                write=points,
            ),
        ),
        charts=(
            bar_chart(
                "epochs",
                "The large batch by epochs and warm-up",
                "LARS, without normalisation.",
                [f"{cells['few, short'].epochs} epochs", f"{cells['many, short'].epochs} epochs"],
                {
                    "short warm-up": [found["few, short"] / 100, found["many, short"] / 100],
                    "long warm-up": [found["few, long"] / 100, found["many, long"] / 100],
                },
                y="test accuracy",
                percent=True,
            ),
        ),
        series=("short warm-up", "long warm-up"),
        remarks=(FULL_SIZE,)
        if plan.size == "full"
        else (
            "Three small inception modules without normalisation in place of GoogLeNet's nine; 24 and 64 epochs of "
            "16,384 images of Fashion-MNIST at 14x14, batches of 128 and 8192, without augmentation; one rate each.",
            "The rate of the large batch, 0.2, and 64 epochs were chosen on seed 100. There, at 0.4, the longer "
            "warm-up was the worse one, so the choice of the rate favours the paper's claim.",
            TRUST,
        ),
        numbers=found,
    )


def _experiment(name: str, source: str, question: str, minutes: float, full_hours: float, **more: Any) -> Experiment:
    suffix = name.removeprefix("lars-").replace("-", "_")
    return Experiment(
        name=name,
        source=f"LARS, {source}",
        question=question,
        minutes=minutes,
        full_hours=full_hours,
        jobs=globals()[f"jobs_of_{suffix}"],
        conclude=globals()[f"conclude_{suffix}"],
        **{"data": ("fashion-mnist",), **more},
    )


EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        _experiment("lars-table-1", "table 1", "SGD as the batch grows, with and without normalisation", 3.9, 190),
        _experiment("lars-table-2", "table 2", "weights over gradients, layer by layer", 0.4, 0.01, data=("cifar10",)),
        _experiment("lars-table-3", "table 3", "LARS as the batch grows, beside SGD", 7.8, 210),
        _experiment("lars-table-4", "table 4", "minimal and extended augmentation", 1.5, 760),
        _experiment("lars-table-5", "table 5", "more epochs at a large batch", 1.6, 820),
        _experiment("lars-table-6", "table 6", "GoogLeNet without normalisation", 5, 750),
        _experiment("lars-figure-1", "figure 1", "gap between test and training loss", 1.3, 43),
        _experiment("lars-figure-2", "figure 2", "LARS at a large batch, over the epochs", 1.3, 17),
        _experiment("lars-figure-3", "figure 3", "accuracy over the rate", 2.7, 140),
        _experiment("lars-figure-4", "figure 4", "accuracy over the epochs as the batch grows", 0.7, 380),
    )
}
