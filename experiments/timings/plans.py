"""Every plan of every codec, measured, against the one that `compress` chooses: ranks x links x codecs.

The step is that of `links`: 2.9 million parameters, 30 ms of computation, mostly asleep, a link for each rank. All
lanes of a number of ranks are in the same processes and take turns, and the links are set to 1,000, 200 and 50 Mbit/s
in place. A cell is a codec at a number of ranks and a rate, and a plan's time there the median step of its best pass.
What is judged: the choice is within 10 % of the best plan in nine cells of ten, and all takes at most 40 minutes.

A plan that took twice as long as another of its codec in the first pass is not measured again at that rate, and a
choice that is the same plan for all buckets is not measured beside that plan. A rank tells four kinds of figures:

    {"kind": "coding", ...}       seconds to encode and to decode an element, one rank alone at work
    {"kind": "collectives", ...}  seconds of collectives with next to nothing in them, and with a megabyte
    {"kind": "choice", ...}       by which plans `compress` exchanges the buckets when it chooses, and what is in them
    {"kind": "turn", ...}         the seconds of some steps by one plan; none where it is not measured

What the cost model of `paceline.exchanges` needs is fitted to them, and says what a step would take at up to 1,024
ranks, on a virtual clock:

    backward         bucket 0     bucket 1     bucket 2
    ready                   |            |            |
    encoded                 |--e--|      |--e--|      |--e--|
    link                          |-- exchange 0 --|            |-- exchange 1 and 2 --|     end of the step

A bucket is encoded when its layers are through, which holds up backward; exchanges travel one after the other. Plans,
and which buckets travel together, are what `compress` chooses; exchanges take what the cost model says with the fitted
costs in place of those that the choice assumes.

Needs root and iproute2.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from experiments.core.claims import percent
from experiments.core.hosts import Switch, why_not
from experiments.core.ranks import ended_by_signals, told_by_ranks, write_lines
from experiments.core.story import Numbers, Size, Skipped, Telling, experiment
from experiments.core.turns import bar, seconds_of
from experiments.timings.links import OURS, QSGD, WARM_UP_STEPS, Lane, Row, Training, short
from paceline.codecs.naming import resolve_codec
from paceline.exchanges import make_exchange
from paceline.exchanges.plans import (
    ASSUMED,
    AUTO,
    ExchangeCosts,
    ExchangeSeconds,
    choose_plan,
    exchange_seconds,
    takes_another,
)
from paceline.reports.table import PlainTable

RANKS = (2, 4, 8)
MORE_RANKS = (16, 64, 256, 1024)  # of which there is only a prediction
PLANS = ("all-reduce", "gather", "two-step")
NEAR = 1.10
HOPELESS = 2.0  # times the best plan
CODED_ELEMENTS = 1_000_000
LARGE_BYTES = 1_048_576
REPEATED = 10
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class Job(Training):
    """What the ranks do."""

    switch: int = 0
    rates: Sequence[float] = (1000e6, 200e6, 50e6)  # the quickest first: it is there that lanes warm up
    codecs: Sequence[str] = tuple(lane for lane in OURS if "rank 1" not in lane)
    passes: int = 3
    steps: int = 3

    @property
    def lanes(self) -> list[tuple[str, str]]:
        """Every codec by every plan that it can do, and by the choice."""
        return [(codec, plan) for codec in self.codecs for plan in (*resolve_codec(OURS[codec]).plans, AUTO)]

    @property
    def labels(self) -> list[str]:
        """What each line is about."""
        labels = [f"coding, {codec}" for codec in self.codecs]
        for number, rate in enumerate(self.rates):
            labels += [f"{written(rate)}, collectives", *(f"choice, {codec}" for codec in self.codecs if not number)]
            labels += [f"{written(rate)}, {codec}, {plan}" for _ in range(self.passes) for codec, plan in self.lanes]
        return labels


@experiment("plans", question="every plan of every codec against the one that compress chooses", minutes=30)
def plans(size: Size, *, repeat: int = 0) -> Telling:
    """Tell it for so many passes; 0 is what the size has."""
    reason = why_not()
    if reason:
        yield Skipped(reason)
        return
    tiny = Job(rates=[1000e6], codecs=["bfloat16", QSGD], widths=[64, 128, 10], bucket_mb=0.02, passes=1)
    job: Job = size.pick(tiny, Job())
    job = replace(job, passes=repeat or job.passes)
    counts = size.pick((2,), RANKS)
    began, lines, cells = time.monotonic(), dict[int, list[Row]](), list[Row]()
    for ranks in counts:
        with ended_by_signals(), Switch(ranks) as switch:
            here = replace(job, ranks=ranks, switch=switch.number)
            hosts = list(zip(switch.hosts, switch.interfaces, strict=True))
            total = len(counts) * len(job.labels)
            told = yield from told_by_ranks(__name__, ranks, asdict(here), here.labels, hosts=hosts, total=total)
        lines[ranks] = told
        found = cells_of(told, ranks)
        cells += found
        yield cells_table(found, here)
    costs = fitted(lines, os.cpu_count() or 1)
    yield costs_table(costs)
    scales = {rate: scale_rows(lines, cells, costs, job, rate) for rate in job.rates}
    for rate, rows in scales.items():
        yield scale_table(rows, rate)
    near = sum(cell["of_best"] <= NEAR for cell in cells) / len(cells)
    yield bar(f"the choice within 10 % of the best plan, of {len(cells)} cells", near, least=0.9, write=percent)
    minutes = (time.monotonic() - began) / 60
    yield bar("minutes of all of it", minutes, most=40.0)
    figures = {"cells": cells, "costs": costs, "scales": list(scales.values()), "minutes": minutes, "lines": lines}
    yield Numbers({"job": asdict(job), **figures})


def written(rate: float) -> str:
    return f"{rate / 1e6:,.0f} Mbit/s"


# -- cells -------------------------------------------------------------------------------------------------------------


def cells_of(lines: Sequence[Row], ranks: int) -> list[Row]:
    """Return a cell for each codec and rate: the median step of each plan's best pass, the choice, and its ratio.

    >>> lines = [{"kind": "choice", "codec": "qsgd", "plans": ["two-step", "two-step"]}]
    >>> turn = {"kind": "turn", "rate": 50e6, "codec": "qsgd"}
    >>> lines += [turn | {"plan": "gather", "seconds": [3.0]}, turn | {"plan": "two-step", "seconds": [2.0]}]
    >>> lines += [turn | {"plan": "gather", "seconds": [1.0]}, turn | {"plan": "auto", "seconds": None}]
    >>> cell, = cells_of(lines, 2)
    >>> cell["seconds"], cell["choice"], cell["of_best"]
    ({'gather': 1.0, 'two-step': 2.0}, 'two-step', 2.0)
    """
    chosen = {line["codec"]: sorted(set(line["plans"])) for line in of_kind("choice", lines)}
    cells: dict[tuple[str, float], dict[str, float]] = {}
    for line in of_kind("turn", lines):
        if line["seconds"] is not None:
            seconds = cells.setdefault((line["codec"], line["rate"]), {})
            seconds[line["plan"]] = min(median(line["seconds"]), seconds.get(line["plan"], math.inf))
    rows = []
    for (codec, rate), seconds in cells.items():
        taken = seconds[chosen[codec][0] if len(chosen[codec]) == 1 else AUTO]
        row = {"ranks": ranks, "codec": codec, "rate": rate, "seconds": seconds, "choice": " + ".join(chosen[codec])}
        rows.append(row | {"chosen_seconds": taken, "of_best": taken / min(seconds.values())})
    return rows


def of_kind(kind: str, lines: Sequence[Row]) -> list[Row]:
    return [line for line in lines if line["kind"] == kind]


def cells_table(cells: Sequence[Row], job: Job) -> PlainTable:
    return PlainTable(
        title=f"ms a step of {job.parameters:,} parameters by plan, {job.ranks} ranks",
        headings=("codec", "Mbit/s", "reduce", "gather", "2-step", "choice", "/ best"),
        rows=[
            (
                short(cell["codec"]),
                f"{cell['rate'] / 1e6:,.0f}",
                *(f"{1000 * cell['seconds'][plan]:,.0f}" if plan in cell["seconds"] else "-" for plan in PLANS),
                cell["choice"],
                f"{cell['of_best']:.2f}",
            )
            for cell in cells
        ],
        caption="The median step of the best pass; / best: of the choice.",
        warned=frozenset(row for row, cell in enumerate(cells) if cell["of_best"] > NEAR),
    )


# -- costs -------------------------------------------------------------------------------------------------------------


def fitted(lines: Mapping[int, Sequence[Row]], cores: int) -> Row:
    """Return what a cost model needs.

    Latency: all_reduce goes 2 (N - 1) hops around a ring, all_gather N - 1, and all_to_all is one hop for all. A hop is
    fitted where every rank has a core of its own, or to the fewest ranks: else it is a wait for the processor.
    """
    found = [(ranks, line) for ranks, some in lines.items() for line in of_kind("collectives", some)]
    hops = {"all_reduce": 2, "all_gather": 1}  # times N - 1
    alone = [(ranks, line) for ranks, line in found if ranks <= max(cores, min(lines))]
    equations = torch.tensor([[1.0, times * (ranks - 1)] for ranks, _ in alone for times in hops.values()])
    taken = torch.tensor([[line[f"tiny_{name}_seconds"]] for _, line in alone for name in hops])
    collective, hop = torch.linalg.lstsq(equations.double(), taken.double()).solution.flatten().tolist()
    rates: dict[str, list[float]] = {}
    for ranks, line in found:
        share = (ranks - 1) / ranks * LARGE_BYTES
        for name in COLLECTIVES:
            net = line[f"large_{name}_seconds"] - line[f"tiny_{name}_seconds"]
            rates.setdefault(written(line["rate"]), []).append((2 if name == "all_reduce" else 1) * share / net)
    return {
        "collective_seconds": max(0.0, collective),
        "hop_seconds": max(0.0, hop),
        "latency_seconds": {
            ranks: {
                name: median(line[f"tiny_{name}_seconds"] for line in of_kind("collectives", some))
                for name in COLLECTIVES
            }
            for ranks, some in lines.items()
        },
        "bytes_per_second": {rate: median(each) for rate, each in rates.items()},
        "coding": of_kind("coding", next(iter(lines.values()))),
    }


def costs_table(costs: Row) -> PlainTable:
    both = (costs["collective_seconds"], costs["hop_seconds"])
    rows = [("a collective and a hop, ms", ", ".join(f"{1e3 * seconds:.2f}" for seconds in both))]
    for ranks, latencies in costs["latency_seconds"].items():
        shown = ", ".join(f"{1e3 * seconds:.2f}" for seconds in latencies.values())
        rows.append((f"{ranks} ranks, a tiny all_reduce, all_gather, all_to_all, ms", shown))
    for rate, bytes_per_second in costs["bytes_per_second"].items():
        rows.append((f"a link of {rate}, MB/s", f"{bytes_per_second / 1e6:.1f}"))
    for line in costs["coding"]:
        shown = f"{1e9 * line['encode_seconds']:.2f}, {1e9 * line['decode_seconds']:.2f}"
        rows.append((f"{short(line['codec'])}: encode, decode, ns an element", shown))
    return PlainTable(title="Costs, for the model that chooses", headings=("cost", "measured"), rows=rows)


# -- steps of more ranks than there are here ---------------------------------------------------------------------------


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
    ready, link, plans = forward_seconds, 0.0, list[str]()
    joined: list[tuple[ExchangeSeconds, ExchangeSeconds]] = []  # as the choice assumes, and as they take
    for number, shapes in enumerate(buckets):
        sizes = [torch.Size(shape) for shape in shapes]
        elements = sum(size.numel() for size in sizes)
        codec = resolve_codec(words).fresh(sizes)
        make_exchange(codec, sizes, 0, ranks)  # refuses what so many ranks cannot do
        plan = choose_plan(codec, elements, ranks, of_elements=whole)
        if joined and plan != plans[-1]:
            link, joined = sent(link, ready, joined), []
        plans.append(plan)
        ready += backward_seconds / len(buckets) + elements * encode_seconds
        assumed, taken = (exchange_seconds(plan, codec, elements, ranks, each) for each in (ASSUMED, costs))
        joined.append((assumed, taken))
        if number == len(buckets) - 1 or not takes_another([each for each, _ in joined]):
            link, joined = sent(link, ready, joined), []
    return link, plans


def sent(link: float, ready: float, joined: Sequence[tuple[ExchangeSeconds, ExchangeSeconds]]) -> float:
    """Return when exchanges that travel together have come through: they wait once."""
    working = sum(taken.working for _, taken in joined)
    return max(link, ready) + max(taken.waiting for _, taken in joined) + working


def scale_rows(
    lines: Mapping[int, Sequence[Row]], cells: Sequence[Row], costs: Row, job: Job, rate: float
) -> list[Row]:
    """Return a row for each codec: steps predicted for every number of ranks, and those measured beside the first."""
    passes_seconds = (len(job.widths) - 1) * job.sleep_seconds
    rows: list[Row] = []
    for line in of_kind("choice", next(iter(lines.values()))):
        codec = line["codec"]
        coding = next(each for each in costs["coding"] if each["codec"] == codec)
        own = ExchangeCosts(
            bytes_per_second=costs["bytes_per_second"][written(rate)],
            collective_seconds=costs["collective_seconds"],
            hop_seconds=costs["hop_seconds"],
            decode_seconds=coding["decode_seconds"],
        )
        of_cell = {
            cell["ranks"]: cell["chosen_seconds"] for cell in cells if (cell["codec"], cell["rate"]) == (codec, rate)
        }
        row: Row = {"codec": codec, "measured": of_cell, "predicted": {}, "plans": {}}
        for ranks in (*lines, *MORE_RANKS):
            try:
                row["predicted"][ranks], row["plans"][ranks] = predicted_seconds(
                    OURS[codec], line["shapes"], ranks, own, encode_seconds=coding["encode_seconds"],
                    forward_seconds=passes_seconds, backward_seconds=2 * passes_seconds,
                )  # fmt: skip
            except ValueError:  # a codec that so many ranks cannot use
                row["predicted"][ranks], row["plans"][ranks] = None, []
        rows.append(row)
    return rows


def scale_table(rows: Sequence[Row], rate: float) -> PlainTable:
    def cell(row: Row, ranks: int) -> str:
        predicted, measured = row["predicted"][ranks], row["measured"].get(ranks)
        text = "-" if predicted is None else f"{1000 * predicted:.0f}"
        return text if measured is None else f"{text}({1000 * measured:.0f})"

    counts = list(rows[0]["predicted"])
    return PlainTable(
        title=f"ms a step at {written(rate)} by the chosen plan: predicted (measured)",
        headings=("codec", *(f"{ranks:,}" for ranks in counts)),
        rows=[(short(row["codec"]), *(cell(row, ranks) for ranks in counts)) for row in rows],
    )


# -- a rank ------------------------------------------------------------------------------------------------------------


def figures_of(job: Job) -> Iterator[Row]:
    """Measure all that is asked for, as one rank: a line for each of `Job.labels`."""
    yield from map(coding, job.codecs)
    lanes: dict[tuple[str, str], Lane] = {}
    for rate in job.rates:
        dist.barrier()
        if dist.get_rank() == 0:
            Switch(job.ranks, number=job.switch).shape(rate)
        dist.barrier()
        yield collectives(rate)
        for codec, plan in [] if lanes else job.lanes:
            lanes[codec, plan] = lane = Lane(codec, job, plan=plan)
            for _ in range(WARM_UP_STEPS):
                lane.step()
            if plan == AUTO:
                chosen = choice(lane, codec)
                if len(set(chosen["plans"])) == 1:  # then it is one of the other lanes
                    del lanes[codec, plan]
                yield chosen
        best: dict[tuple[str, str], float] = {}
        for codec, plan in job.lanes * job.passes:
            line: Row = {"kind": "turn", "rate": rate, "codec": codec, "plan": plan, "seconds": None}
            of_codec = min((seconds for (other, _), seconds in best.items() if other == codec), default=math.inf)
            if (codec, plan) in lanes and best.get((codec, plan), 0.0) <= HOPELESS * of_codec:
                line |= lanes[codec, plan].turn(job.steps, warm_up=1)
                best[codec, plan] = min(best.get((codec, plan), math.inf), of_rank_0(median(line["seconds"])))
            yield line


def of_rank_0(seconds: float) -> float:
    """Return its figure on every rank, so that all come to the same decision."""
    shared = torch.tensor([seconds], dtype=torch.float64)
    dist.broadcast(shared, 0)
    return float(shared)


def choice(lane: Lane, codec: str) -> Row:
    """Return what `compress` has chosen for every bucket."""
    buckets = lane.compression.state_dict()["buckets"]
    shapes = {name: list(parameter.shape) for name, parameter in lane.module.named_parameters()}
    return {
        "kind": "choice",
        "codec": codec,
        "plans": [bucket.get("plan", "gather") for bucket in buckets],
        "shapes": [[shapes[name] for name in bucket["parameters"]] for bucket in buckets],
    }


def coding(lane: str) -> Row:
    """Return the seconds that encoding and decoding take for each element, on rank 0 while the others wait."""
    line: Row = {"kind": "coding", "codec": lane}
    if dist.get_rank() == 0:
        side = round(CODED_ELEMENTS**0.5)
        codec = resolve_codec(OURS[lane]).fresh([torch.Size([side, side])])
        vector = torch.randn(side * side, generator=torch.Generator().manual_seed(0))
        out = torch.empty_like(vector)
        payload = codec.encode(vector)
        line["encode_seconds"] = best_of(lambda: codec.encode(vector)) / len(vector)
        line["decode_seconds"] = best_of(lambda: codec.decode(payload, out=out)) / len(vector)
        line["payload_bytes"] = len(payload) / len(vector)
    dist.barrier()
    return line


def collectives(rate: float) -> Row:
    """Return what collectives take: with a few bytes, the latency, and with a megabyte, the rate."""
    world = dist.get_world_size()
    line: Row = {"kind": "collectives", "rate": rate}
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    for size, count in (("tiny", 4), ("large", LARGE_BYTES // 4 // world)):
        part, whole, other = torch.zeros(count), torch.zeros(count * world), torch.zeros(count * world)
        calls = (
            partial(dist.all_reduce, whole),
            partial(gather, whole, part),
            partial(dist.all_to_all_single, other, whole),
        )
        for name, call in zip(COLLECTIVES, calls, strict=True):
            line[f"{size}_{name}_seconds"] = best_of(call, dist.barrier)
    return line


def best_of(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    taken = []
    for _ in range(REPEATED):
        before()
        taken.append(seconds_of(work))
    return min(taken)


def main(folder: Path, rank: int, job: Job) -> None:
    """Be a rank."""
    write_lines(folder, rank, job.ranks, lambda: figures_of(job))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
