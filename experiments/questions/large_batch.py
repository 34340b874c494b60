"""large-batch: LARS against SGD as the batch grows and the epochs stay: who keeps the accuracy of the small batch?

The claim (You, Gitman, Ginsburg 2017, tables 1 and 3): AlexNet trained with SGD, a linear warm-up and the best of many
rates loses 14 points from a batch of 512 to one of 8K, AlexNet-BN 2.2; with LARS both lose next to nothing. The bars
here: LARS at the largest batch not more than 1.5 points behind SGD at the smallest, and not behind SGD at the largest.

Laboratory size: a small CNN without normalisation, and the first 16,384 images of Fashion-MNIST, shrunk to 14x14. At 8K
a run has 128 steps, where the paper's has 15,600, and a batch is half of the images. The size was chosen so that such
few steps can be enough: with three times as many images, and 96 steps, LARS at 8K was ahead of SGD too, but five points
behind the small batch.

    both        momentum 0.9, weight decay 5e-4, linear warm-up over a tenth of the steps, then (1 - s)^2
    SGD         torch's
    LARS        ours, as it comes: biases and the scales of normalisation are not scaled; but trust is 0.1

Why that trust: a layer moves by rate * trust of its length, so the paper's rate 10 with trust 0.001 is our rate 0.1
with trust 0.1. But what is not scaled takes the rate as it is, and biases do not bear a rate of 10.

How rates are chosen: every cell of the table tries the same rates, one run each, with a seed that the table does not
have, measured on training images that no run trains on. The best rate's runs with other seeds, measured on the test
images, are the table. Where the best rate is the smallest or the largest of those tried, a remark says so: the other
side of it has not been seen. SGD by the rule alone, the rate of the smallest batch times k, is beside it, with a seed.

    tuning      cells x rates      seed 1000       held-out images  --> best rate of each cell
    final       cells x seeds      the seeds       test images      --> the table
    by rule     SGD x batches      the first seed  test images
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from experiments.core.claims import within
from experiments.core.story import NAN, Job, Numbers, Size, Telling, experiment
from experiments.papers.lars.run import WITH_LARS, WITH_SGD, LargeBatchRun, run_large_batch
from experiments.papers.lars.shown import batch_text
from experiments.papers.published import LARS_TABLE_1, LARS_TABLE_3
from paceline.optim.schedules import scale_lr
from paceline.quantities import counted
from paceline.reports.table import PlainTable

OPTIMIZERS = (WITH_SGD, WITH_LARS)
TUNING, FINAL, BY_RULE = "tuning", "final", "by rule"
TUNING_SEED = 1000
TRUST = 0.1
EPOCHS, DATA = 64, "fashion-mnist"
BATCHES, RATES = (128, 512, 2048, 8192), (0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
MOST_BEHIND = 1.5


@experiment(
    "large-batch",
    question="LARS and SGD as the batch grows, tuned alike",
    minutes=30,
    data=("fashion-mnist",),
    seeds=3,
)
def large_batch(
    size: Size,
    *,
    epochs: int = EPOCHS,
    batches: tuple[int, ...] = BATCHES,
    rates: tuple[float, ...] = RATES,
    data: str = DATA,
    model: str = "small-cnn",
) -> Telling:
    if size.toy:  # what was not set
        epochs, data = 1 if epochs == EPOCHS else epochs, "digits" if data == DATA else data
        batches = (64, 256) if batches == BATCHES else batches
        rates = (0.05, 0.1) if rates == RATES else rates
    batches, rates = tuple(sorted(set(batches))), tuple(sorted(set(rates)))
    images = size.pick(
        {"data": data, "shrink": 1, "images": 512, "held_out": 512},
        {"data": data, "shrink": 2, "images": 16_384, "held_out": 10_000},
    )
    check(epochs, batches, rates, images["images"])
    tuning_seed = next(seed for seed in itertools.count(TUNING_SEED) if seed not in size.seeds)

    def job(optimizer: str, batch: int, rate: float, seed: int | None = None) -> Job:
        settings: dict[str, Any] = {
            "choice": images,
            "model": model,
            "optimizer": optimizer,
            "batch": batch,
            "rate": rate,
            "epochs": epochs,
            "part": size.pick(128, 1024),
            "trust_coefficient": TRUST,
        }
        seconds = size.pick(0.3, epochs * (0.5 if batch < 1024 else 0.25) + 1)
        return Job(run_large_batch, lambda own: {**settings, "seed": own if seed is None else seed}, seconds)

    cells = [(batch, optimizer) for batch in batches for optimizer in OPTIMIZERS]
    tuning = yield {
        (TUNING, optimizer, batch, rate): job(optimizer, batch, rate, tuning_seed)
        for batch, optimizer in cells
        for rate in rates
    }
    held_out = tuning.mean("held_out", lost=lambda run: -math.inf)
    best = {  # of equal rates, and where all diverged, the smallest
        (batch, optimizer): max(rates, key=lambda rate: held_out[TUNING, optimizer, batch, rate])
        for batch, optimizer in cells
    }
    small, large = batches[0], batches[-1]
    base_rate = best[small, WITH_SGD]
    finals = {(FINAL, optimizer, batch): job(optimizer, batch, best[batch, optimizer]) for batch, optimizer in cells}
    by_rule = {batch: scale_lr(base_rate, base_batch=small, batch=batch) for batch in batches[1:]}
    runs = yield finals | {
        (BY_RULE, WITH_SGD, batch): job(WITH_SGD, batch, rate, size.seeds[0]) for batch, rate in by_rule.items()
    }
    mean, each, loss = runs.mean("accuracy"), runs.each("accuracy"), runs.mean("training_loss")
    base, lars, sgd = mean[FINAL, WITH_SGD, small], mean[FINAL, WITH_LARS, large], mean[FINAL, WITH_SGD, large]
    yield within(
        f"LARS at {large} behind SGD at {small}, points", base - lars, most=MOST_BEHIND, kind="bar", write=difference
    )
    ahead = lars - (0.0 if math.isnan(sgd) else sgd)  # SGD that diverged has classified nothing
    yield within(f"LARS at {large} ahead of SGD at {large}, points", ahead, least=0.0, kind="bar", write=difference)

    rows = []
    for batch, optimizer, kind in itertools.product(batches, OPTIMIZERS, (FINAL, BY_RULE)):
        run = (kind, optimizer, batch)
        if run not in runs:
            continue
        rate = by_rule[batch] if kind == BY_RULE else best[batch, optimizer]
        several = kind == FINAL and len(size.seeds) > 1
        rows.append(
            (
                str(batch),
                str(LargeBatchRun(choice=images, batch=batch, rate=rate, epochs=epochs).steps),
                optimizer + (", by rule" if kind == BY_RULE else ""),
                f"{rate:g}",
                written(mean[run]),
                f"{max(each[run]) - min(each[run]):.2f}" if several and not math.isnan(mean[run]) else "",
                difference(base - mean[run]),
                written(loss[run], 3),
            )
        )
    yield PlainTable(
        title=f"{model} on {data}, {'1 epoch' if epochs == 1 else f'{epochs} epochs'} of {images['images']:,} images",
        headings=("batch", "steps", "optimiser", "rate", "accuracy", "spread", "behind", "loss"),
        rows=rows,
        caption=f"accuracy: on the test images, mean over {counted(len(size.seeds), 'seed')}; spread: highest - "
        f"lowest. behind: SGD at {small}. loss: of training, in the last epoch. - diverged. Rates: the best of "
        f"{len(rates)}, by one run each on {images['held_out']:,} held-out images. by rule: the rate of batch {small} "
        "times k; one seed.",
    )
    shares = [f"{1000 * TRUST * rate:g}" for rate in (rates[0], rates[-1])]
    tuned = tuning.mean("held_out")
    yield PlainTable(
        title="Tuning: held-out accuracy, by rate",
        headings=("rate", *(f"{batch}\n{optimizer}" for batch, optimizer in cells)),
        rows=[
            (
                f"{rate:g}",
                *(
                    written(tuned[TUNING, optimizer, batch, rate]) + ("*" if rate == best[batch, optimizer] else " ")
                    for batch, optimizer in cells
                ),
            )
            for rate in rates
        ],
        caption=f"One run each, seed {tuning_seed}. * the best: the final runs take it. - diverged. LARS has trust "
        f"{TRUST:g}: its rates are the paper's {shares[0]} to {shares[1]} with trust 0.001.",
    )
    yield paper_table()
    for (batch, optimizer), rate in best.items():
        if rate in (rates[0], rates[-1]):
            yield (
                f"{optimizer}, batch {batch}: best at {rate:g}, an edge of the rates tried "
                "(`--set rates=...` widens them, for both)."
            )
    yield Numbers({"rates": {f"{optimizer} {batch}": rate for (batch, optimizer), rate in best.items()}})
    yield Numbers({"tuning": {f"{run[1]} {run[2]} at {run[3]:g}": value for run, value in tuned.items()}})
    yield Numbers({"accuracies": {f"{run[1]} {run[2]}": each[run] for run in finals}})
    yield Numbers({"by rule": {f"SGD {batch}": mean[BY_RULE, WITH_SGD, batch] for batch in by_rule}})
    yield Numbers({"training loss": {" ".join(map(str, run)): value for run, value in loss.items()}})


def check(epochs: int, batches: Sequence[int], rates: Sequence[float], images: int) -> None:
    """Refuse settings that no run could have.

    >>> check(1, [64], [0.1, -1.0], 512)
    Traceback (most recent call last):
    ValueError: rates must be above 0 and finite (rates=[0.1, -1.0])
    """
    if not rates or any(not 0 < rate < math.inf for rate in rates):
        raise ValueError(f"rates must be above 0 and finite (rates={rates})")
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1 (epochs={epochs})")
    for batch in batches or (0,):
        if not 1 <= batch <= images:
            raise ValueError(f"batches must be between 1 and the {images} images (batch={batch})")


def written(value: float, digits: int = 2) -> str:
    """Write a figure.

    >>> written(86.041), written(math.nan)
    ('86.04', '-')
    """
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def difference(value: float) -> str:
    """Write a difference with its sign.

    >>> difference(0.466), difference(math.nan)
    ('+0.47', '-')
    """
    return "-" if math.isnan(value) else f"{value:+.2f}"


def paper_table() -> PlainTable:
    """Return the best rates of the paper's tables 1 and 3 with their accuracies; of SGD at 4K and 8K it shows four.

    >>> paper_table().rows[0]
    ('AlexNet', 'SGD', '58.8\\n(0.02)', '53.1\\n(0.05)', '44.8\\n(0.03)', '', '')
    """
    every = (512, 4096, 8192, 16384, 32768)
    rows = []
    for network, (optimizer, table) in itertools.product(
        ("AlexNet", "AlexNet-BN"), ((WITH_SGD, LARS_TABLE_1), (WITH_LARS, LARS_TABLE_3))
    ):
        found: dict[int, tuple[float, float]] = {}
        for batch, rate, accuracy in table[network.lower()]:
            found[batch] = max(found.get(batch, (-math.inf, NAN)), (accuracy, rate), key=lambda pair: pair[0])
        shown = {batch: f"{accuracy:.1f}\n({rate:g})" for batch, (accuracy, rate) in found.items()}
        rows.append((network, optimizer, *(shown.get(batch, "") for batch in every)))
    return PlainTable(
        title="The paper's tables 1 and 3: ImageNet, 100 epochs, accuracy (rate)",
        headings=("network", "optimiser", *map(batch_text, every)),
        rows=rows,
        caption="Figures are the paper's. SGD at 4K, 8K: the best of the rates shown. LARS: trust 0.001.",
    )
