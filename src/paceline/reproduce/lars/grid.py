"""Tables 1 and 3 have these batches and rates, the paper's and ours; figures 1, 2 and 3 show parts of them."""

from __future__ import annotations

from paceline.reproduce.experiment import ExperimentPlan
from paceline.reproduce.large_batch_training import WITH_LARS, WITH_SGD
from paceline.reproduce.lars.cells import LarsCell
from paceline.reproduce.lars.networks import PAPER_NETWORK, PLAIN
from paceline.reproduce.published import LARS_TABLE_1, LARS_TABLE_3


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


def batches(plan: ExperimentPlan, optimizer: str) -> tuple[int, ...]:
    """Return our batches of table 1 (SGD) or table 3 (LARS), the smallest first.

    >>> batches(ExperimentPlan(), "LARS"), batches(ExperimentPlan(size="full"), "SGD")
    ((128, 2048, 8192, 16384), (512, 4096, 8192))
    """
    if plan.size == "full":
        return paper_batches(PLAIN, optimizer)
    every = plan.choose(toy=(32, 64, 128, 256), laboratory=(128, 2048, 8192, 16_384), full=())
    return tuple(every if optimizer == WITH_LARS else every[:3])


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
        return tuple(rate for its_batch, rate, _ in paper_rows(network, optimizer) if its_batch == batch)
    if batch == batches(plan, optimizer)[0]:
        return tuple(plan.choose(toy=(0.05,), laboratory=(0.0125, 0.025), full=()))
    return tuple(plan.choose(toy=(0.1, 0.4), laboratory=(0.1, 0.2, 0.4, 0.8), full=()))


def cells_at(plan: ExperimentPlan, network: str, optimizer: str, batch: int) -> list[LarsCell]:
    """Return a cell for each rate."""
    return [
        LarsCell(network=network, optimizer=optimizer, batch=batch, rate=rate)
        for rate in rates(plan, network, optimizer, batch)
    ]
