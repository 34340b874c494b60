"""Table 4 and figure 4 show LARS with a residual network as the batch grows.

Table 4 compares minimal with extended augmentation. Figure 4 has the curves of the cells with minimal augmentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, falling, within
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.large_batch_training import WITH_LARS
from paceline.reproduce.lars.accuracy_by_batch import batch_chart
from paceline.reproduce.lars.cells import LarsCell, cell_jobs, usual_epochs
from paceline.reproduce.lars.networks import RESIDUAL
from paceline.reproduce.lars.outcomes import BEHIND_BASELINE, accuracy_of, curve_of
from paceline.reproduce.lars.wording import IN_PLACE_OF_RESNET, TRUST, batch_text, points, remarks_for
from paceline.reproduce.published import LARS_TABLE_4

AUGMENTATIONS: tuple[Literal["minimal", "extended"], ...] = ("minimal", "extended")
AUGMENTED = "Minimal augmentation crops and flips images; extended augmentation also varies scale, shape and colours."
MOST_LOST = {"minimal": 1.5, "extended": 3.5}  # table 4 loses 1.3 and 3.3 points


def table_4_cells(plan: ExperimentPlan) -> dict[tuple[int, str], LarsCell]:
    """Return the cells by batch and augmentation."""
    rows = plan.choose(
        toy=((32, 0.05), (128, 0.4)),
        laboratory=((128, 0.0125), (2048, 0.1), (8192, 0.4)),
        full=tuple((batch, rate) for batch, rate, _, _, _ in LARS_TABLE_4),
    )
    return {
        (batch, augment): LarsCell(network=RESIDUAL, optimizer=WITH_LARS, batch=batch, rate=rate, augment=augment)
        for batch, rate in rows
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
            "Rates are those that the small CNN did best with, without augmentation, on another seed.",
            AUGMENTED,
            smaller=IN_PLACE_OF_RESNET,
            full=(AUGMENTED,),
        ),
        numbers={f"{batch} {augment}": value for (batch, augment), value in found.items()},
    )


def figure_4_cells(plan: ExperimentPlan) -> list[LarsCell]:
    """Return the cells of table 4 with minimal augmentation; the paper's caption calls it none."""
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
        remarks=remarks_for(plan, TRUST, smaller=IN_PLACE_OF_RESNET, full=()),
        numbers=dict(zip(names, values, strict=True)),
    )
