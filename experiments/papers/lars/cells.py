"""A cell of a table is a training but for its seed; equal cells of two experiments are one job.

    network      paper        laboratory         warm-up, epochs                augmentation
    plain        AlexNet      small-cnn          2.5 with SGD, 2 with LARS      minimal
    normed       AlexNet-BN   small-cnn-bn       none with SGD, 5 with LARS     minimal
    residual     ResNet-50    small-cnn-bn       table 4, by batch: 0 to 12     minimal or extended
    inception    GoogLeNet    small-googlenet    table 6, by batch: 0 to 110    minimal with SGD, extended with LARS

The last two columns hold at full size. The paper prints no augmentation of AlexNet, of AlexNet-BN and of GoogLeNet with
SGD. They are trained with minimal augmentation here, because the files of Caffe that the paper names for them
(bvlc_alexnet, AlexNet_bn and bvlc_googlenet) crop and mirror the images.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from experiments.core.story import Job, Runs, Size
from experiments.papers.lars.run import WITH_LARS, WITH_SGD, run_large_batch
from experiments.papers.published import (
    LARS_TABLE_1,
    LARS_TABLE_1_WARMUP,
    LARS_TABLE_3,
    LARS_TABLE_3_WARMUP,
    LARS_TABLE_4,
    LARS_TABLE_6,
)

PLAIN, NORMED, RESIDUAL, INCEPTION = "plain", "normed", "residual", "inception"
PAPER_NETWORK = {PLAIN: "alexnet", NORMED: "alexnet-bn"}  # in tables 1 and 3
SHOWN = {PLAIN: "AlexNet", NORMED: "AlexNet-BN", RESIDUAL: "ResNet-50", INCEPTION: "GoogLeNet"}
LABORATORY_MODEL = {
    PLAIN: "small-cnn",
    NORMED: "small-cnn-bn",
    RESIDUAL: "small-cnn-bn",
    INCEPTION: "small-googlenet",
}
FULL_MODEL = {PLAIN: "alexnet", NORMED: "alexnet-bn", RESIDUAL: "resnet50", INCEPTION: "plain-googlenet"}
CHANCE = 15.0  # per cent; ten classes, where guessing has 10
BEHIND_BASELINE = 1.5  # points that "matched the baseline" may be behind here, where two seeds are 0.6 apart


class Cell(NamedTuple):
    """A training but for its seed; `warmup` is the share of its steps in which the rate rises."""

    network: str
    optimizer: str
    batch: int
    rate: float
    epochs: int
    warmup: float
    augment: str


def make_cell(
    size: Size,
    network: str,
    optimizer: str,
    batch: int,
    rate: float,
    *,
    epochs: int | None = None,
    warmup: float | None = None,
    augment: str | None = None,
) -> Cell:
    """Return a cell; what is not given is the paper's at full size, and else the same for all cells.

    >>> make_cell(Size(), "plain", "LARS", 16_384, 14)
    Cell(network='plain', optimizer='LARS', batch=16384, rate=14, epochs=64, warmup=0.1, augment='none')
    >>> make_cell(Size("full"), "inception", "LARS", 256, 4)[4:]
    (100, 0.05, 'extended')
    """
    full, epochs = size.name == "full", epochs or usual_epochs(size)
    if warmup is None:
        warmup = paper_warmup_epochs(network, optimizer, batch) / epochs if full else 0.1
    if augment is None:
        augment = paper_augmentation(network, optimizer) if full else "none"
    return Cell(network, optimizer, batch, rate, epochs, warmup, augment)


def usual_epochs(size: Size) -> int:
    """Return the epochs of a cell that does not say how many."""
    return int(size.pick(2, 64, 100))


def paper_warmup_epochs(network: str, optimizer: str, batch: int) -> float:
    """Return the epochs of warm-up that the paper gives a run.

    >>> paper_warmup_epochs("plain", "SGD", 4096), paper_warmup_epochs("residual", "LARS", 32768)
    (2.5, 12)
    """
    if network in PAPER_NETWORK:
        return (LARS_TABLE_1_WARMUP if optimizer == WITH_SGD else LARS_TABLE_3_WARMUP)[PAPER_NETWORK[network]]
    if network == RESIDUAL:
        by_batch = {row[0]: row[2] for row in LARS_TABLE_4}
    else:
        first, *others = LARS_TABLE_6  # the first row is the only one with SGD
        by_batch = {row[0]: row[3] for row in ([first] if optimizer == WITH_SGD else others)}
    return by_batch[batch] or 0


def paper_augmentation(network: str, optimizer: str) -> str:
    """Return the augmentation of the paper's runs, where a table has one.

    Table 4 has both for ResNet-50. Table 5 has the extended one: its 74.4 % in 100 epochs is that of table 4.

    >>> paper_augmentation("inception", "LARS"), paper_augmentation("inception", "SGD")
    ('extended', 'minimal')
    """
    return "extended" if network == RESIDUAL or (network == INCEPTION and optimizer != WITH_SGD) else "minimal"


# -- jobs --------------------------------------------------------------------------------------------------------------


def cell_jobs(size: Size, cells: Iterable[Cell]) -> dict[Cell, Job]:
    """Return the job of each cell.

    >>> cell = make_cell(Size("full"), "normed", "LARS", 8192, 14)
    >>> cell_jobs(Size("full"), [cell])[cell].of(200)["model"]
    'alexnet-bn'
    """
    return {cell: _job(size, cell) for cell in cells}


def _job(size: Size, cell: Cell) -> Job:
    full = size.name == "full"
    settings = {
        "choice": size.pick(
            {"data": "digits", "shrink": 1, "images": 512, "held_out": 256},
            {"data": "fashion-mnist", "shrink": 2, "images": 16_384, "held_out": 10_000},
            {"data": "fashion-mnist", "shrink": 1, "images": 49_152, "held_out": 10_000},
        ),
        "model": (FULL_MODEL if full else LABORATORY_MODEL)[cell.network],
        "optimizer": cell.optimizer,
        "batch": cell.batch,
        "rate": cell.rate,
        "epochs": cell.epochs,
        "part": size.pick(128, 1024, 256),
        "trust_coefficient": 0.001 if full else 0.1,
        "scale_all": full,
        "warmup": cell.warmup,
        "decay_from": "start" if full else "warmup",
        "augment": cell.augment,
        "points": size.pick(2, 16, 25),
    }
    return Job(run_large_batch, lambda seed: {**settings, "seed": seed}, cell_seconds(size, cell))


def cell_seconds(size: Size, cell: Cell) -> float:
    """Return about how long a run takes on one core, points of its curve included.

    With other work beside, the small CNN took 0.25 s for an epoch, and 0.5 s in batches of 128; the small GoogLeNet
    took 2.0 and 2.6 s. The paper's networks took 9 to 80 images a second.
    """
    if size.toy:
        return 0.3
    if size.name == "full":
        images_per_second = {PLAIN: 55.0, NORMED: 80.0, RESIDUAL: 9.0, INCEPTION: 10.0}[cell.network]
        return cell.epochs * 49_152 / images_per_second
    small, inception = cell.batch < 1024, cell.network == INCEPTION
    of_an_epoch = (2.6 if small else 2.0) if inception else (0.5 if small else 0.25)
    varied = {"none": 1.0, "minimal": 1.1, "extended": 1.25}[cell.augment]
    return cell.epochs * of_an_epoch * varied + (16 if inception else 3)


# -- the cells of tables 1 and 3, of which figures 1, 2 and 3 show parts -----------------------------------------------


def paper_rows(network: str, optimizer: str) -> tuple[tuple[int, float, float], ...]:
    """Return the rows of table 1 (SGD) or 3 (LARS) of a network: batch, rate, accuracy in per cent.

    >>> paper_rows("plain", "LARS")[0]
    (512, 2, 58.7)
    """
    return {WITH_SGD: LARS_TABLE_1, WITH_LARS: LARS_TABLE_3}[optimizer][PAPER_NETWORK[network]]


def paper_batches(network: str, optimizer: str) -> tuple[int, ...]:
    """Return the batches of table 1 or 3, each once, the smallest first.

    >>> paper_batches("plain", "SGD")
    (512, 4096, 8192)
    """
    return tuple(dict.fromkeys(batch for batch, _, _ in paper_rows(network, optimizer)))


def paper_best(network: str, optimizer: str, place: int) -> float:
    """Return the paper's best accuracy at its batch number `place`.

    >>> paper_best("plain", "SGD", 2)
    44.8
    """
    wanted = paper_batches(network, optimizer)[place]
    return max(accuracy for batch, _, accuracy in paper_rows(network, optimizer) if batch == wanted)


def batches(size: Size, optimizer: str) -> tuple[int, ...]:
    """Return our batches of table 1 (SGD) or table 3 (LARS), the smallest first; the last of SGD is the paper's 8K.

    >>> batches(Size(), "LARS"), batches(Size("full"), "SGD")
    ((128, 2048, 8192, 16384), (512, 4096, 8192))
    """
    if size.name == "full":
        return paper_batches(PLAIN, optimizer)
    every = size.pick((32, 64, 128, 256), (128, 2048, 8192, 16_384))
    return tuple(every if optimizer == WITH_LARS else every[:3])


def cells_at(size: Size, network: str, optimizer: str, batch: int) -> list[Cell]:
    """Return a cell for each rate; in the laboratory both optimisers try the same.

    >>> [[cell.rate for cell in cells_at(Size(name), "plain", "SGD", 8192)] for name in ("laboratory", "full")]
    [[0.1, 0.2, 0.4, 0.8], [0.02, 0.03, 0.04, 0.05]]
    """
    if size.name == "full":
        rates = [rate for its_batch, rate, _ in paper_rows(network, optimizer) if its_batch == batch]
    elif batch == batches(size, optimizer)[0]:
        rates = size.pick([0.05], [0.0125, 0.025])
    else:
        rates = size.pick([0.1, 0.4], [0.1, 0.2, 0.4, 0.8])
    return [make_cell(size, network, optimizer, batch, rate) for rate in rates]


# -- outcomes ----------------------------------------------------------------------------------------------------------


def accuracies(runs: Runs, of: str = "accuracy") -> dict[Cell, float]:
    """Return the cells' mean accuracies over the seeds in per cent; a run that diverged counts as 0.

    >>> accuracies(Runs(a=[{"accuracy": None}, {"accuracy": 80.0}]))
    {'a': 40.0}
    """
    return runs.mean(of, lost=lambda cell: 0.0)


def best_of(runs: Runs, cells: Iterable[Cell]) -> tuple[Cell, float]:
    """Return the cell that is best on the images held out, and its accuracy on the test images."""
    best = max(cells, key=accuracies(runs, "held_out").__getitem__)
    return best, accuracies(runs)[best]


def curve_of(runs: Runs, cell: Cell) -> list[dict[str, float]]:
    """Return a cell's curve, averaged over the seeds, up to the last point that all of them have."""
    keys = ("epoch", "train_loss", "test_loss", "accuracy")
    return [
        {key: sum(float(point[key]) for point in together) / len(together) for key in keys}
        for together in zip(*(outcome["curve"] for outcome in runs[cell]), strict=False)
    ]
