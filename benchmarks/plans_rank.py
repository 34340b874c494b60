"""One rank of the benchmark `plans`: `python -m benchmarks.plans_rank FOLDER RANK JOB`; JOB is a `Job` as JSON.

The same processes take all turns, and rank 0 sets the rate of the switch between them. A line for each figure:

    {"kind": "coding", ...}       seconds to encode and to decode an element, one rank alone at work
    {"kind": "collectives", ...}  seconds of collectives with next to nothing in them, and with a megabyte
    {"kind": "choice", ...}       by which plans `compress` exchanges the buckets when it chooses, and what is in them
    {"kind": "turn", ...}         the seconds of some steps by one plan; none where it is not measured

A plan that took twice as long as another of its codec in the first pass is not measured again at that rate, and a
choice that is the same plan for all buckets is not measured beside that plan.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cable import Switch
from benchmarks.links_lanes import OURS, Lane, takes_plan, turn, write_figures
from paceline.codecs.naming import resolve_codec

WARM_UP_STEPS = 6
CODED_ELEMENTS = 1_000_000
LARGE_BYTES = 1_048_576
REPEATED = 10
HOPELESS = 2.0  # times the best plan
AUTO = "auto"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks do."""

    ranks: int
    switch: int
    rates: list[float]
    codecs: list[str]
    widths: list[int]
    sleep_seconds: float
    bucket_mb: float
    passes: int
    steps: int

    @property
    def lanes(self) -> list[tuple[str, str]]:
        """Every codec by every plan that it can do, and by the choice."""
        return [(codec, plan) for codec in self.codecs for plan in (*plans_of(codec), AUTO)]

    @property
    def labels(self) -> list[str]:
        """What every line is about."""
        labels = [f"coding, {codec}" for codec in self.codecs]
        for number, rate in enumerate(self.rates):
            at = f"{rate / 1e6:,.0f} Mbit/s"
            labels += [f"{at}, collectives", *(f"choice, {codec}" for codec in self.codecs if not number)]
            labels += [f"{at}, {codec}, {plan}" for _ in range(self.passes) for codec, plan in self.lanes]
        return labels


def plans_of(lane: str) -> tuple[str, ...]:
    """Return the plans that a lane's codec can do."""
    return tuple(resolve_codec(OURS[lane]).plans) if takes_plan() else ("gather",)


def figures(job: Job) -> Iterator[Row]:
    """Measure all that is asked for, as one rank: a line for each of `Job.labels`."""
    yield from (coding(codec) for codec in job.codecs)
    lanes: dict[tuple[str, str], Lane] = {}
    for rate in job.rates:
        dist.barrier()
        if dist.get_rank() == 0:
            Switch(job.ranks, number=job.switch).shape(rate)
        dist.barrier()
        yield collectives(rate)
        if not lanes:
            for codec, plan in job.lanes:
                lanes[codec, plan] = warmed_up(codec, plan, job)
                if plan == AUTO:
                    chosen = choice(lanes[codec, plan], codec)
                    if len(set(chosen["plans"])) == 1:  # then it is one of the other lanes
                        del lanes[codec, plan]
                    yield chosen
        seconds: dict[tuple[str, str], float] = {}
        for _ in range(job.passes):
            for key in job.lanes:
                line: Row = {"kind": "turn", "rate": rate, "codec": key[0], "plan": key[1], "seconds": None}
                if key in lanes and not _hopeless(key, seconds):
                    line |= turn(lanes[key], job.steps, 1)
                    seconds[key] = min(seconds.get(key, math.inf), _of_rank_0(median(line["seconds"])))
                yield line


def warmed_up(codec: str, plan: str, job: Job) -> Lane:
    """Return a lane after its first steps."""
    lane = Lane(codec, widths=job.widths, sleep_seconds=job.sleep_seconds, bucket_mb=job.bucket_mb, plan=plan)
    for _ in range(WARM_UP_STEPS):
        lane.step()
    return lane


def _of_rank_0(seconds: float) -> float:
    shared = torch.tensor([seconds], dtype=torch.float64)
    dist.broadcast(shared, 0)
    return float(shared)


def _hopeless(key: tuple[str, str], seconds: dict[tuple[str, str], float]) -> bool:
    best = min((taken for (codec, _), taken in seconds.items() if codec == key[0]), default=math.inf)
    return seconds.get(key, 0.0) > HOPELESS * best


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
        line["encode_seconds"] = _best(lambda: codec.encode(vector)) / len(vector)
        line["decode_seconds"] = _best(lambda: codec.decode(payload, out=out)) / len(vector)
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
        for name, collective in {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "all_gather": lambda part=part, whole=whole: gather(whole, part),
            "all_to_all": lambda whole=whole, other=other: dist.all_to_all_single(other, whole),
        }.items():
            line[f"{size}_{name}_seconds"] = _best(collective, dist.barrier)
    return line


def _best(work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    taken = []
    for _ in range(REPEATED):
        before()
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


if __name__ == "__main__":
    job = Job(**json.loads(sys.argv[3]))
    write_figures(Path(sys.argv[1]), int(sys.argv[2]), job.ranks, functools.partial(figures, job))
