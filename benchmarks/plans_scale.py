"""The step of `plans` at more ranks than there are here, on a virtual clock, with the costs that were fitted.

    backward         bucket 0     bucket 1     bucket 2
    ready                   |            |            |
    encoded                 |--e--|      |--e--|      |--e--|
    link                          |-- exchange 0 --|            |-- exchange 1 and 2 --|     end of the step

A bucket is encoded when its layers are through, which holds up backward; exchanges travel one after the other. Plans,
and which buckets travel together, are what `compress` chooses, and exchanges take what the cost model of
`paceline.exchanges.plans` says, with the fitted costs in place of those that the choice assumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.links_lanes import OURS, short
from benchmarks.plans_rank import Job
from paceline.codecs.naming import resolve_codec
from paceline.exchanges import make_exchange
from paceline.exchanges.plans import (
    ASSUMED,
    ExchangeCosts,
    ExchangeSeconds,
    choose_plan,
    exchange_seconds,
    takes_another,
)

RANKS = (16, 64, 256, 1024)
Row = dict[str, Any]


def predicted_seconds(
    words: str,
    buckets: Sequence[Sequence[Sequence[int]]],
    ranks: int,
    costs: ExchangeCosts,
    *,
    encode_seconds: float,
    forward_seconds: float,
    backward_seconds: float,
) -> tuple[float, list[str]]:
    """Return a step's seconds and the plans of its buckets, which hold tensors of these shapes.

    >>> costs = ExchangeCosts(bytes_per_second=25e6, decode_seconds=0.0)
    >>> at = {"encode_seconds": 0.0, "forward_seconds": 0.01, "backward_seconds": 0.02}
    >>> seconds, plans = predicted_seconds("identity", [[(1000, 1000)]], 1024, costs, **at)
    >>> len(plans), 0.03 + 8e6 / 25e6 < seconds < 1.0
    (1, True)
    """
    whole = sum(torch.Size(shape).numel() for shapes in buckets for shape in shapes)
    ready = forward_seconds
    link = 0.0
    plans: list[str] = []
    joined: list[tuple[ExchangeSeconds, ExchangeSeconds]] = []  # as the choice assumes, and as they take
    for number, shapes in enumerate(buckets):
        sizes = [torch.Size(shape) for shape in shapes]
        elements = sum(size.numel() for size in sizes)
        codec = resolve_codec(words).fresh(sizes)
        make_exchange(codec, sizes, 0, ranks)  # refuses what so many ranks cannot do
        plan = choose_plan(codec, elements, ranks, of_elements=whole)
        if joined and plan != plans[-1]:
            link, joined = _sent(link, ready, joined), []
        plans.append(plan)
        ready += backward_seconds / len(buckets) + elements * encode_seconds
        assumed, taken = (exchange_seconds(plan, codec, elements, ranks, each) for each in (ASSUMED, costs))
        joined.append((assumed, taken))
        if number == len(buckets) - 1 or not takes_another([each for each, _ in joined]):
            link, joined = _sent(link, ready, joined), []
    return link, plans


def _sent(link: float, ready: float, joined: Sequence[tuple[ExchangeSeconds, ExchangeSeconds]]) -> float:
    """Return when exchanges that travel together have come through: they wait once."""
    working = sum(taken.working for _, taken in joined)
    return max(link, ready) + max(taken.waiting for _, taken in joined) + working


def scale_rows(
    lines: Mapping[int, Sequence[Row]], cells: Sequence[Row], costs: Row, job: Job, rate: float
) -> list[Row]:
    """Return a row for each codec: steps predicted for every number of ranks, and those measured beside the first."""
    some = next(iter(lines.values()))
    layers = len(job.widths) - 1
    rows: list[Row] = []
    for line in (line for line in some if line["kind"] == "choice"):
        codec = line["codec"]
        coding = next(each for each in costs["coding"] if each["codec"] == codec)
        fitted = ExchangeCosts(
            bytes_per_second=costs["bytes_per_second"][f"{rate / 1e6:,.0f} Mbit/s"],
            collective_seconds=costs["collective_seconds"],
            hop_seconds=costs["hop_seconds"],
            decode_seconds=coding["decode_seconds"],
        )
        measured = {
            cell["ranks"]: cell["chosen_seconds"] for cell in cells if (cell["codec"], cell["rate"]) == (codec, rate)
        }
        row: Row = {"codec": codec, "measured": measured, "predicted": {}, "plans": {}}
        for ranks in (*lines, *RANKS):
            try:
                row["predicted"][ranks], row["plans"][ranks] = predicted_seconds(
                    OURS[codec],
                    line["shapes"],
                    ranks,
                    fitted,
                    encode_seconds=coding["encode_seconds"],
                    forward_seconds=layers * job.sleep_seconds,
                    backward_seconds=2 * layers * job.sleep_seconds,
                )
            except ValueError:  # a codec that so many ranks cannot use
                row["predicted"][ranks], row["plans"][ranks] = None, []
        rows.append(row)
    return rows


def scale_table(rows: Sequence[Row], rate: float) -> Table:
    """Return the table: predicted, and measured in brackets."""
    title = f"ms a step at {rate / 1e6:,.0f} Mbit/s by the chosen plan: predicted (measured)"
    table = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("codec", no_wrap=True)
    for ranks in rows[0]["predicted"]:
        table.add_column(f"{ranks:,}", justify="right", no_wrap=True)
    for row in rows:
        shown = []
        for ranks, seconds in row["predicted"].items():
            text = "-" if seconds is None else f"{1000 * seconds:.0f}"
            measured = row["measured"].get(ranks)
            shown.append(text if measured is None else f"{text}({1000 * measured:.0f})")
        table.add_row(short(row["codec"]).replace("power-sgd, rank 4", "power-sgd 4"), *shown)
    return table
