"""Table 5: LARS at a large batch with 1 to 2 times the epochs, which bring back accuracy that the batch has cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import falling, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.large_batch_training import WITH_LARS
from paceline.reproduce.lars.cells import LarsCell, cell_jobs, usual_epochs
from paceline.reproduce.lars.networks import NORMED, PLAIN, RESIDUAL, SHOWN
from paceline.reproduce.lars.outcomes import accuracy_of
from paceline.reproduce.lars.wording import TRUST, batch_text, points, remarks_for
from paceline.reproduce.published import LARS_TABLE_3, LARS_TABLE_4, LARS_TABLE_5

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
