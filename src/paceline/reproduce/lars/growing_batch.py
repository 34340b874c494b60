"""Tables 1 and 3: the accuracy as the batch grows, with SGD and with LARS.

Both tables have the same form. Every batch has several rates, one run each; the rate that is best on images held out is
marked, and claims are about the accuracies at these rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.reports.chart import Chart
from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, falling, mean, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.large_batch_training import WITH_LARS, WITH_SGD
from paceline.reproduce.lars.cells import cell_jobs
from paceline.reproduce.lars.grid import batches, cells_at, large_batch
from paceline.reproduce.lars.networks import NORMED, PAPER_NETWORK, PLAIN, SHOWN
from paceline.reproduce.lars.outcomes import BEHIND_BASELINE, CHANCE, accuracy_of, best_of
from paceline.reproduce.lars.wording import CHOSEN, TRUST, batch_text, points, remarks_for
from paceline.reproduce.published import LARS_TABLE_1, LARS_TABLE_3


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


def paper_rows(network: str, optimizer: str, place: int, plan: ExperimentPlan) -> tuple[str, str]:
    """Return the paper's batch, and its accuracies with their rates, that stand for our batch number `place`."""
    table = (LARS_TABLE_1 if optimizer == WITH_SGD else LARS_TABLE_3)[PAPER_NETWORK[network]]
    every = list(dict.fromkeys(batch for batch, _, _ in table))
    wanted = [every[place]] if plan.size == "full" or place < 3 else every[3:]
    shown = [f"{accuracy:g} ({rate:g})" for batch, rate, accuracy in table if batch in wanted]
    return ", ".join(map(batch_text, wanted)), two_a_line(shown)


def paper_best(network: str, optimizer: str, place: int) -> float:
    """Return the paper's best accuracy at its batch number `place`.

    >>> paper_best("plain", "SGD", 2)
    44.8
    """
    table = (LARS_TABLE_1 if optimizer == WITH_SGD else LARS_TABLE_3)[PAPER_NETWORK[network]]
    every = list(dict.fromkeys(batch for batch, _, _ in table))
    return max(accuracy for batch, _, accuracy in table if batch == every[place])


def two_a_line(figures: Iterable[str]) -> str:
    """Return figures with commas between, two in a line, so that a table of them fits a terminal.

    >>> two_a_line(["1", "2", "3"])
    '1, 2,\\n3'
    """
    found = list(figures)
    return ",\n".join(", ".join(found[place : place + 2]) for place in range(0, len(found), 2))


def batch_chart(name: str, title: str, caption: str, found: Mapping[str, Mapping[int, float]]) -> Chart:
    """Return accuracies over the batch, a line for each name."""
    lines = [
        Series(name=key, points=[(float(batch), value / 100) for batch, value in each.items()])
        for key, each in found.items()
    ]
    return line_chart(name, title, caption, lines, x="batch", y="test accuracy", log_x=True, percent=True)
