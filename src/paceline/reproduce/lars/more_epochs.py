"""Table 5 shows that more epochs bring back the accuracy that a large batch has cost.

The runs of 100 epochs are runs of tables 3 and 4, and so are their rates, warm-up and augmentation. The paper does not
print the warm-up of its longer runs; at full size it has as many epochs in them as in the runs of 100.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import falling, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.large_batch_training import WITH_LARS
from paceline.reproduce.lars.cells import LarsCell, cell_jobs, usual_epochs
from paceline.reproduce.lars.grid import paper_rows
from paceline.reproduce.lars.networks import NORMED, PLAIN, RESIDUAL, SHOWN
from paceline.reproduce.lars.outcomes import accuracy_of
from paceline.reproduce.lars.wording import FULL_AUGMENTATION, TRUST, batch_text, points, remarks_for
from paceline.reproduce.published import LARS_TABLE_4, LARS_TABLE_5

TABLE_5_PAPER = {PLAIN: "alexnet, 16K", NORMED: "alexnet-bn, 32K", RESIDUAL: "resnet50, 16K"}
PAPER_LARGE_BATCH = {PLAIN: 16_384, NORMED: 32_768, RESIDUAL: 16_384}


def paper_runs_of_100_epochs(network: str) -> dict[int, tuple[float, float]]:
    """Return the paper's rate and accuracy by batch, the smallest first: LARS in tables 3 and 4.

    Those of ResNet-50 are with extended augmentation, which table 5 has too.

    >>> paper_runs_of_100_epochs("residual")[16_384]
    (33, 74.4)
    """
    if network == RESIDUAL:
        return {batch: (rate, extended) for batch, rate, _, _, extended in LARS_TABLE_4}
    return {batch: (rate, accuracy) for batch, rate, accuracy in paper_rows(network, WITH_LARS)}


def table_5_networks(plan: ExperimentPlan) -> tuple[str, ...]:
    """Return the networks; the laboratory has no ResNet-50."""
    return tuple(TABLE_5_PAPER) if plan.size == "full" else (PLAIN, NORMED)


def batches_and_rates(plan: ExperimentPlan, network: str) -> tuple[tuple[int, float], tuple[int, float]]:
    """Return the small and the large batch, each with its rate.

    >>> batches_and_rates(ExperimentPlan(size="full"), "plain")
    ((512, 2), (16384, 14))
    """
    if plan.size == "full":
        paper, large = paper_runs_of_100_epochs(network), PAPER_LARGE_BATCH[network]
        small = next(iter(paper))
        return (small, paper[small][0]), (large, paper[large][0])
    return ((32, 0.05), (128, 0.4)) if plan.toy else ((128, 0.0125), (8192, 0.4))


def table_5_cells(plan: ExperimentPlan) -> dict[str, list[LarsCell]]:
    """Return for each network the small batch first, then the large one with 1 to 2 times the epochs."""
    epochs = plan.choose(toy=(1, 2), laboratory=(32, 40, 48, 56, 64), full=LARS_TABLE_5["epochs"])
    cells = {}
    for network in table_5_networks(plan):
        (small, low), (large, high) = batches_and_rates(plan, network)
        cells[network] = [
            LarsCell(
                network=network,
                optimizer=WITH_LARS,
                batch=batch,
                rate=rate,
                epochs=None if count == usual_epochs(plan) else count,  # None: a cell of table 3 or 4
            )
            for batch, rate, count in ((small, low, epochs[0]), *((large, high, count) for count in epochs))
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
        _, paper_base = next(iter(paper_runs_of_100_epochs(network).values()))
        paper = list(zip(LARS_TABLE_5["epochs"], LARS_TABLE_5[TABLE_5_PAPER[network]], strict=True))
        beside = paper if len(paper) == len(values) else [paper[0], paper[-1]]  # a toy has two runs
        rows.append(
            (
                SHOWN[network],
                "-",
                f"{paper_base:g}",
                f"{epochs[0]}, {batch_text(small.batch)}",
                f"{base:.1f}",
            )
        )
        for count, value, (paper_count, theirs) in zip(epochs, values, beside, strict=True):
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
            "All runs of a network at the large batch have one rate. 32 epochs stand for the paper's 100, so that "
            "there is something to bring back. ResNet-50 is left out.",
            full=(
                FULL_AUGMENTATION,
                "The paper does not print the warm-up of its longer runs; it has as many epochs here as in those of "
                "100. ResNet-50 has the extended augmentation: its accuracy in 100 epochs is the one of table 4.",
            ),
            smaller=(
                "A small CNN stands for AlexNet, 16,384 images of Fashion-MNIST at 14x14 stand for ImageNet, and a "
                "batch of 8192 stands for 16K and 32K.",
                "The warm-up is a tenth of the steps for all.",
            ),
        ),
        numbers=numbers,
    )
