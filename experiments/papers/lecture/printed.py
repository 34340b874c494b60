"""The lecture prints the figures of two things: the example of 1-bit SGD, and the table of ImageNet runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.core.claims import ahead, falling, within
from experiments.core.story import NAN, Job, Numbers, Size, Telling, experiment
from experiments.papers.lecture.quantising import FLOAT_BITS
from experiments.papers.published import LECTURE_ONE_BIT, LECTURE_TRENDS
from paceline.quantities import percent_text
from paceline.reports.figures import Series, bar_chart, point_chart
from paceline.reports.table import PlainTable

EXAMPLE: Mapping[str, Any] = LECTURE_ONE_BIT


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


@experiment(
    "lecture-one-bit",
    source="lecture, 1-bit SGD",
    question="the example vector: its two means, its bits",
    minutes=0.1,
    full_hours=0.01,
)
def one_bit(size: Size) -> Telling:
    vector: tuple[float, ...] = EXAMPLE["vector"]
    runs = yield {"example": Job(run_one_bit, {"vector": list(vector)}, 0.1)}
    bits = runs.mean("bits")["example"]
    decoded = [NAN if value is None else value for value in runs["example"][0]["decoded"]]
    paper = [EXAMPLE["upper" if value >= 0 else "lower"] for value in vector]
    formula, plain_bits = len(vector) + 2 * FLOAT_BITS, FLOAT_BITS * len(vector)
    yield PlainTable(
        title="The lecture's example of 1-bit SGD",
        headings=("element", "paper", "ours"),
        rows=[
            *((f"{g:g}", f"{q:g}", f"{d:g}") for g, q, d in zip(vector, paper, decoded, strict=True)),
            ("bits, n + 2F", str(formula), f"{bits:.0f}"),
            ("bits without a code, Fn", str(plain_bits), str(plain_bits)),
        ],
    )
    off = float(np.max(np.abs(np.subtract(decoded, paper))))  # NaN where an element is missing
    yield within("the means 8.8875 and -0.711: the largest difference", off, most=1e-5)
    yield within("n + 2F bits, and up to 7 that fill a byte", bits, least=formula, most=formula + 7)
    yield ahead("fewer bits than without a code", {"one-bit": bits, "none": plain_bits}, best="low")
    yield bar_chart(
        "elements",
        "A vector, and what is decoded",
        "",
        [f"element {place}" for place in range(1, len(vector) + 1)],
        {"element": list(vector), "paper": paper, "ours": decoded},
        y="value",
    )
    yield "The lecture prints five of the six decoded elements."
    yield "The payload's header is not counted."
    yield Numbers(runs["example"][0])


@experiment(
    "lecture-trends",
    source="lecture, ImageNet competition trends",
    question="the printed speed-ups, and those of the minutes",
    minutes=0.1,
    full_hours=0.01,
)
def trends(size: Size) -> Telling:
    """Compare the printed speed-ups with those of the minutes; there are no jobs, for the runs are other people's."""
    _, workers, _, minutes, _, _ = LECTURE_TRENDS[0]
    ours = [minutes / row[3] for row in LECTURE_TRENDS]
    rows = []
    for (who, count, batch, taken, printed, accuracy), speedup in zip(LECTURE_TRENDS, ours, strict=True):
        efficiency = percent_text(speedup / (count / workers))
        row = (who, f"{count:,}", f"{batch:,}", f"{taken:,}", f"{printed:g}", f"{speedup:.1f}", efficiency)
        rows.append((*row, f"{accuracy}"))
    yield PlainTable(
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
    )
    off = max(abs(speedup - row[4]) for speedup, row in zip(ours, LECTURE_TRENDS, strict=True))
    yield within("the printed speed-ups are those of the minutes: the largest difference", off, most=0.5)
    yield falling("ever more speed-up, by the minutes", ours, rising=True)
    points = [(float(row[1]), float(row[4])) for row in LECTURE_TRENDS]
    yield point_chart(
        "trends",
        "Speed-up against workers",
        "As printed in the lecture.",
        [Series(name="speed-up", points=points, labels=[row[0] for row in LECTURE_TRENDS])],
        x="workers",
        y="speed-up",
        log_x=True,
        log_y=True,
    )
    yield "Nothing is run: these are other people's runs, on other people's machines."
    yield Numbers({"speedup": ours})
