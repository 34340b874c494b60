"""Table 6: GoogLeNet without normalisation, which needs more epochs and a longer warm-up as the batch grows.

The paper prints one run for each batch. We also try few epochs and a short warm-up at the large batch, each alone and
both together, because the claim is that it needs both.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, within
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.large_batch_training import WITH_LARS, WITH_SGD
from paceline.reproduce.lars.cells import LarsCell, cell_jobs
from paceline.reproduce.lars.networks import INCEPTION
from paceline.reproduce.lars.outcomes import accuracy_of
from paceline.reproduce.lars.wording import FULL_SIZE, TRUST, batch_text, points
from paceline.reproduce.published import LARS_TABLE_6

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
