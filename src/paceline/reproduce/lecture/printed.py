"""The lecture prints the figures of two things: the example of 1-bit SGD, and the table of ImageNet runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.quantities import percent_text
from paceline.reports.figures import Series, bar_chart, point_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, falling, within
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.lecture.quantising import FLOAT_BITS
from paceline.reproduce.published import LECTURE_ONE_BIT, LECTURE_TRENDS

EXAMPLE: Mapping[str, Any] = LECTURE_ONE_BIT

# -- 1-bit SGD ---------------------------------------------------------------------------------------------------------


def run_one_bit(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Encode a vector with one-bit; return what is decoded, and the bits sent.

    >>> run_one_bit({"vector": [1.0, 3.0, -1.0]})["decoded"]
    [2.0, 2.0, -1.0]
    """
    import torch

    from paceline.codecs import OneBit
    from paceline.codecs.payload import HEADER_BYTES

    codec = OneBit()
    payload = codec.encode(torch.tensor(settings["vector"]))
    return {"decoded": codec.decode(payload).tolist(), "bits": 8 * (payload.numel() - HEADER_BYTES)}


def jobs_of_one_bit(plan: ExperimentPlan) -> list[Job]:
    return [Job(name="example", run=run_one_bit, settings={"vector": list(EXAMPLE["vector"])}, seconds=0.1)]


def conclude_one_bit(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    vector: tuple[float, ...] = EXAMPLE["vector"]
    decoded, bits = outcomes["example"]["decoded"], outcomes["example"]["bits"]
    paper = [EXAMPLE["upper" if value >= 0 else "lower"] for value in vector]
    formula = len(vector) + 2 * FLOAT_BITS
    off = max(abs(one - other) for one, other in zip(decoded, paper, strict=True))
    return Findings(
        tables=(
            PlainTable(
                title="The lecture's example of 1-bit SGD",
                headings=("element", "paper", "ours"),
                rows=[
                    *((f"{g:g}", f"{q:g}", f"{d:g}") for g, q, d in zip(vector, paper, decoded, strict=True)),
                    ("bits, n + 2F", str(formula), str(bits)),
                    ("bits without a code, Fn", str(FLOAT_BITS * len(vector)), str(FLOAT_BITS * len(vector))),
                ],
            ),
        ),
        claims=(
            within("the means 8.8875 and -0.711: the largest difference", off, most=1e-5),
            within("n + 2F bits, and up to 7 that fill a byte", bits, least=formula, most=formula + 7),
            ahead(
                "fewer bits than without a code",
                {"one-bit": bits, "none": FLOAT_BITS * len(vector)},
                best="low",
            ),
        ),
        charts=(
            bar_chart(
                "elements",
                "A vector, and what is decoded",
                "",
                [f"element {place}" for place in range(1, len(vector) + 1)],
                {"element": list(vector), "paper": paper, "ours": decoded},
                y="value",
            ),
        ),
        series=("element", "paper", "ours"),
        remarks=("The lecture prints five of the six decoded elements.", "The payload's header is not counted."),
        numbers={"decoded": decoded, "bits": bits},
    )


# -- trends ------------------------------------------------------------------------------------------------------------


def jobs_of_trends(plan: ExperimentPlan) -> list[Job]:
    """Return no jobs: the runs are other people's."""
    return []


def conclude_trends(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    _, workers, _, minutes, _, _ = LECTURE_TRENDS[0]
    rows, ours = [], list[float]()
    for who, count, batch, taken, speedup, accuracy in LECTURE_TRENDS:
        ours.append(minutes / taken)
        efficiency = minutes / taken / (count / workers)
        rows.append(
            (who, f"{count:,}", f"{batch:,}", f"{taken:,}", f"{speedup:g}", f"{ours[-1]:.1f}", percent_text(efficiency),
             f"{accuracy}")
        )  # fmt: skip
    printed = [row[4] for row in LECTURE_TRENDS]
    return Findings(
        tables=(
            PlainTable(
                title="ImageNet in ever fewer minutes",
                headings=(
                    "who",
                    "\nworkers",
                    "\nbatch",
                    "\nminutes",
                    "speed-up:\npaper",
                    "speed-up:\nours",
                    "effi-\nciency",
                    "top-1\n(%)",
                ),
                rows=rows,
                caption="ours: by the minutes. efficiency: the speed-up over that of the workers, 8 being 1.",
            ),
        ),
        claims=(
            within(
                "the printed speed-ups are those of the minutes: the largest difference",
                max(abs(one - other) for one, other in zip(ours, printed, strict=True)),
                most=0.5,
            ),
            falling("ever more speed-up, by the minutes", ours, rising=True),
        ),
        charts=(
            point_chart(
                "trends",
                "Speed-up against workers",
                "As printed in the lecture.",
                [
                    Series(
                        name="speed-up",
                        points=[(float(row[1]), float(row[4])) for row in LECTURE_TRENDS],
                        labels=[row[0] for row in LECTURE_TRENDS],
                    )
                ],
                x="workers",
                y="speed-up",
                log_x=True,
                log_y=True,
            ),
        ),
        series=("speed-up",),
        remarks=("Nothing is run: these are other people's runs, on other people's machines.",),
        numbers={"speedup": ours},
    )
