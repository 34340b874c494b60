"""How long the exact cut takes: 1,000 layers on 64 devices, under conditions from none to all at once.

Layers are random, and so are the tensors between them: the times of layers differ by a factor of a hundred, activations
shrink and weights grow from front to end, and every eighth layer is read again some layers later. Each row adds what it
names:

    plain       64 devices alike, links that cost nothing, memory without end
    links       10 Gbit/s between neighbours; some are ten times slower
    devices     speeds of 1, 1.5 and 2, links as before
    memory      the same, with less memory than that row's cut needs: the least of some shares that is enough
    refused     so little memory that there is no cut; an error that tells why
    chunks      32 devices with two pieces each, which share their device's memory

The peer is the same recursion in plain Python, a loop over pieces, fronts and ends, on a smaller model: it must come to
the same slowest piece. Beside it what simpler cuts cost under the same conditions: equal counts of layers, and
torchgpipe's block partition, which know of neither links nor devices nor memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from experiments.core.claims import within
from experiments.core.cuts import balanced, equal_counts
from experiments.core.story import FIRST_SEED, Claim, Numbers, Size, Step, Telling, experiment
from paceline.pipeline.devices import Device, Link
from paceline.pipeline.placement import Placement, PlacementError, place, priced
from paceline.pipeline.profile import Layer, Profile, Tensor, Weight
from paceline.pipeline.schedules import in_flight
from paceline.quantities import duration_text
from paceline.reports.table import PlainTable

MOST_SECONDS = 10.0
MICROBATCHES = 128
MEMORY_SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of what the fullest device needs without
ROWS = ("plain", "links", "devices", "memory", "refused", "chunks")

Found = TypeVar("Found")


@experiment(
    "pipeline-placement",
    question="seconds for the exact cut of 1,000 layers over 64 devices",
    minutes=1,
    timed=True,
)
def pipeline_placement(size: Size, *, layers: int = 0, devices: int = 0, repeat: int = 0) -> Telling:
    """Tell it for so many layers and devices, each cut so often; 0 is what the size has."""
    layers, devices = layers or size.pick(40, 1000), devices or size.pick(4, 64)
    repeats, seed = repeat or size.pick(1, 3), size.seeds[0] - FIRST_SEED
    known, rows, total = problems(layers, devices, seed), list[dict[str, Any]](), len(ROWS) + 1
    for name in ROWS:
        yield Step(name, total)
        if name == "memory":
            known[name] = with_least_memory(known["devices"])
        elif name == "chunks":
            known[name] = with_least_memory(known[name])
        rows.append(refused_row(known["memory"], repeats) if name == "refused" else row_of(name, known[name], repeats))
    yield Step("the plain recursion", total)
    smaller = size.pick(20, 500), size.pick(4, 32)
    peer = against_plain(*smaller, seed, repeats)

    yield PlainTable(
        title=f"Placement of {layers:,} layers on {devices} devices",
        headings=("conditions", "seconds", "slowest\npiece", "equal/\nours", "torchgpipe/\nours", "cut"),
        rows=[cells_of(row) for row in rows],
        caption=f"seconds: the slowest of {repeats} call(s). Ratios: the slowest piece of another cut against ours, "
        "under the same conditions but for memory, which those cuts may exceed.",
    )
    for row in rows:
        text = f"the slowest call: {row['row']}"
        yield within(text, max(row["seconds"]), most=MOST_SECONDS, kind="bar", write=duration_text)
    plain_seconds, seconds = min(peer["plain_seconds"]), min(peer["ours_seconds"])
    yield PlainTable(
        title="The same recursion in plain Python",
        headings=("layers", "devices", "plain", "ours", "plain/ours"),
        rows=[
            (
                f"{smaller[0]:,}",
                str(smaller[1]),
                duration_text(plain_seconds),
                duration_text(seconds),
                f"{plain_seconds / seconds:.0f}",
            )
        ],
        caption="Devices that differ, with links; one call of it, the best of ours.",
    )
    slowest = (f"{1000 * peer[name]:.3f} ms" for name in ("slowest_seconds", "plain_slowest_seconds"))
    because = f"{' and '.join(slowest)} are{'' if peer['same'] else ' not'} the same"
    yield Claim(kind="bar", text="the plain recursion's slowest piece is ours", holds=peer["same"], because=because)
    sizes = {"layers": layers, "devices": devices, "plain_layers": smaller[0], "plain_devices": smaller[1]}
    yield Numbers({"size": sizes, "seed": seed, "rows": rows, "plain": peer})


# -- problems ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem is what a cut is looked for: a model, devices and what joins them."""

    profile: Profile
    devices: tuple[Device, ...]
    links: Link | tuple[Link, ...] = dataclasses.field(default_factory=Link)
    chunks: int = 1

    @property
    def conditions(self) -> dict[str, Any]:
        """Return the arguments of `place` and `priced` besides profile and devices."""
        schedule = "1f1b" if self.chunks == 1 else "interleaved"
        return {
            "microbatches": MICROBATCHES,
            "in_flight": in_flight(schedule, len(self.devices), MICROBATCHES, self.chunks),
            "links": self.links,
            "chunks": self.chunks,
        }

    def placed(self) -> Placement:
        """Return the best cut."""
        return place(self.profile, self.devices, **self.conditions)

    def slowest_of(self, cuts: Sequence[int]) -> float:
        """Return the seconds of the slowest piece of another cut."""
        return priced(self.profile, cuts, self.devices, **self.conditions).slowest.seconds

    def limited(self, memory_bytes: float) -> Problem:
        """Return the same with so much memory on every device."""
        devices = [dataclasses.replace(device, memory_bytes=int(memory_bytes)) for device in self.devices]
        return dataclasses.replace(self, devices=tuple(devices))


def random_profile(layers: int, draws: random.Random) -> Profile:
    """Return a model that is made up: layers of very different times, and skips."""
    times = [10 ** draws.uniform(-4, -2) for _ in range(layers)]
    depth = [number / layers for number in range(layers)]
    return Profile(
        layers=tuple(
            Layer(
                name=f"layer{number}",
                forward_seconds=seconds / 3,
                input_seconds=seconds / 3,
                weight_seconds=seconds / 3,
                activation_bytes=int(draws.uniform(0.5, 2.0) * 2**20 * (1.2 - depth[number])),
            )
            for number, seconds in enumerate(times)
        ),
        tensors=tuple(
            Tensor(
                name=f"t{number}",
                bytes=int(draws.uniform(0.2, 1.0) * 2**20 * (1.2 - depth[number])),
                producer=number,
                last_use=min(layers - 1, number + (draws.randint(2, 8) if number % 8 == 0 else 1)),
            )
            for number in range(layers - 1)
        ),
        weights=tuple(
            Weight(
                name=f"w{number}", bytes=int(draws.uniform(0.1, 4.0) * 2**20 * (0.1 + depth[number])), layers=(number,)
            )
            for number in range(layers)
        ),
    )


def random_links(devices: int, draws: random.Random) -> tuple[Link, ...]:
    """Return links of 10 Gbit/s, and every now and then of a tenth of it."""
    speeds = [1.25e9 if draws.random() < 0.8 else 1.25e8 for _ in range(devices)]
    return tuple(Link(bytes_per_second=speed, latency_seconds=5e-5) for speed in speeds)


def problems(layers: int, devices: int, seed: int) -> dict[str, Problem]:
    """Return every row's problem but for those that limit memory, which depends on what is needed without a limit."""
    draws = random.Random(seed)
    plain = Problem(profile=random_profile(layers, draws), devices=(Device(),) * devices)
    linked = dataclasses.replace(plain, links=random_links(devices, draws))
    speeds = [draws.choice((1.0, 1.5, 2.0)) for _ in range(devices)]
    unlike = dataclasses.replace(linked, devices=tuple(Device(speed=speed) for speed in speeds))
    halved = tuple(Device(speed=speed) for speed in speeds[: devices // 2])
    chunked = dataclasses.replace(unlike, devices=halved, links=tuple(random_links(devices // 2, draws)), chunks=2)
    return {"plain": plain, "links": linked, "devices": unlike, "chunks": chunked}


# -- the plain recursion ---------------------------------------------------------------------------------------------


def plain_least(problem: Problem) -> float:
    """Return the seconds of the slowest piece of the best cut without memory limits, by the plain recursion."""
    profile, layers, count = problem.profile, len(problem.profile.layers), len(problem.devices)
    running = [0.0, *itertools.accumulate(layer.seconds for layer in profile.layers)]
    links = (problem.links,) * count if isinstance(problem.links, Link) else problem.links
    sent = [profile.crossing_bytes(cut) if cut < layers else 0 for cut in range(layers + 1)]
    returned = [profile.gradient_bytes(cut) if cut else 0 for cut in range(layers + 1)]
    best = [math.inf] * layers + [-math.inf]
    for piece in reversed(range(count)):
        nearer = [math.inf] * (layers + 1)
        sending = [links[piece].seconds(size) for size in sent]
        speed = problem.devices[piece].speed
        for front in range(layers):
            back = links[piece - 1].seconds(returned[front])
            for end in range(front + 1, layers + 1):
                worst = max((running[end] - running[front]) / speed + sending[end] + back, best[end])
                if worst < nearer[front]:
                    nearer[front] = worst
        best = nearer
    return best[0]


# -- rows --------------------------------------------------------------------------------------------------------------


def with_least_memory(problem: Problem) -> Problem:
    """Return a problem with the least of some shares of memory that is enough: a limit that bears on the cut."""
    most = max(problem.placed().device_bytes)
    for share in MEMORY_SHARES:
        limited = problem.limited(share * most)
        try:
            limited.placed()
        except PlacementError:
            continue
        return limited
    raise RuntimeError("no share of the memory that a cut needs is enough for it")


def timed(call: Callable[[], Found], repeats: int) -> tuple[list[float], Found]:
    """Return the seconds of each call, and what the last one returned."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        found = call()
        seconds.append(time.perf_counter() - began)
    return seconds, found


def row_of(name: str, problem: Problem, repeats: int) -> dict[str, Any]:
    seconds, found = timed(problem.placed, repeats)
    layers, pieces = len(problem.profile.layers), len(problem.devices) * problem.chunks
    ours = found.slowest.seconds
    times = [layer.seconds for layer in problem.profile.layers]
    return {
        "row": name,
        "seconds": seconds,
        "slowest_seconds": ours,
        "equal_ratio": problem.slowest_of(equal_counts(layers, pieces)) / ours,
        "balanced_ratio": problem.slowest_of(balanced(times, pieces)) / ours,
        "limit_bytes": problem.devices[0].memory_bytes,
        "proven": found.proven,
    }


def refused_row(problem: Problem, repeats: int) -> dict[str, Any]:
    """Take a tenth less memory at a time, until there is no cut; return what it takes to say so."""
    memory = float(problem.devices[0].memory_bytes or 0)
    while True:
        memory *= 0.9
        try:
            problem.limited(memory).placed()
        except PlacementError:
            break
    seconds, told = timed(lambda: refusal(problem.limited(memory)), repeats)
    return {"row": "refused", "seconds": seconds, "limit_bytes": int(memory), "told": told}


def refusal(problem: Problem) -> str:
    try:
        problem.placed()
    except PlacementError as error:
        return str(error)
    raise RuntimeError("a placement was refused, and then was not")


def against_plain(layers: int, devices: int, seed: int, repeats: int) -> dict[str, Any]:
    """Return what ours and the plain recursion take, and which slowest piece each comes to."""
    problem = problems(layers, devices, seed)["devices"]
    ours, found = timed(problem.placed, repeats)
    theirs, least = timed(lambda: plain_least(problem), 1)
    return {
        "layers": layers,
        "devices": devices,
        "ours_seconds": ours,
        "plain_seconds": theirs,
        "slowest_seconds": found.slowest.seconds,
        "plain_slowest_seconds": least,
        "same": math.isclose(found.slowest.seconds, least, rel_tol=1e-9),
    }


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    seconds = f"{max(row['seconds']):.2f}"
    if "slowest_seconds" not in row:
        return (row["row"], seconds, "-", "-", "-", "none")
    ratios = (f"{row[name]:.2f}" for name in ("equal_ratio", "balanced_ratio"))
    proof = "optimal" if row["proven"] else "good"
    return (row["row"], seconds, f"{1000 * row['slowest_seconds']:.1f} ms", *ratios, proof)
