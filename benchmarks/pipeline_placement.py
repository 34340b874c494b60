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
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from paceline.pipeline.devices import Device, Link
from paceline.pipeline.placement import Placement, PlacementError, place, priced
from paceline.pipeline.profile import Layer, Profile, Tensor, Weight
from paceline.pipeline.schedules import in_flight
from paceline.reference_pipeline import balanced, equal_counts

NAME = "pipeline-placement"
SECONDS = Bar(sign="<=", limit=10.0, style=".2f")
MICROBATCHES = 128
REPEATS = 3
MEMORY_SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of what the fullest device needs without


@dataclass(frozen=True, kw_only=True)
class Size:
    """Layers and devices, and those of the model that the plain recursion cuts."""

    layers: int
    devices: int
    plain_layers: int
    plain_devices: int


FULL = Size(layers=1000, devices=64, plain_layers=500, plain_devices=32)
QUICK = Size(layers=40, devices=4, plain_layers=20, plain_devices=4)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a cut is looked for."""

    profile: Profile
    devices: tuple[Device, ...]
    links: Link | tuple[Link, ...] = dataclasses.field(default_factory=Link)
    chunks: int = 1

    @property
    def conditions(self) -> dict[str, Any]:
        """The arguments of `place` and `priced` besides profile and devices."""
        schedule = "1f1b" if self.chunks == 1 else "interleaved"
        return {
            "microbatches": MICROBATCHES,
            "in_flight": in_flight(schedule, len(self.devices), MICROBATCHES, self.chunks),
            "links": self.links,
            "chunks": self.chunks,
        }

    def placed(self) -> Placement:
        """The best cut."""
        return place(self.profile, self.devices, **self.conditions)

    def slowest_of(self, cuts: Sequence[int]) -> float:
        """Seconds of the slowest piece of another cut."""
        return priced(self.profile, cuts, self.devices, **self.conditions).slowest.seconds

    def limited(self, memory_bytes: float) -> Problem:
        """The same with so much memory on every device."""
        devices = [dataclasses.replace(device, memory_bytes=int(memory_bytes)) for device in self.devices]
        return dataclasses.replace(self, devices=tuple(devices))


def random_profile(layers: int, draws: random.Random) -> Profile:
    """A model that no one has: layers of very different times, and skips."""
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
    """10 Gbit/s, and every now and then a tenth of it."""
    speeds = [1.25e9 if draws.random() < 0.8 else 1.25e8 for _ in range(devices)]
    return tuple(Link(bytes_per_second=speed, latency_seconds=5e-5) for speed in speeds)


def problems(layers: int, devices: int, seed: int) -> dict[str, Problem]:
    """Every row's problem but for those that limit memory, which depends on what is needed without a limit."""
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
    """Seconds of the slowest piece of the best cut without memory limits, by the recursion that `cutting` states."""
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


# -- the run ---------------------------------------------------------------------------------------------------------


def run(options: Options) -> None:
    """`python -m benchmarks pipeline-placement`."""
    size = QUICK if options.quick else FULL
    size = dataclasses.replace(size, layers=options.layers or size.layers, devices=options.devices or size.devices)
    repeats = options.repeat or (1 if options.quick else REPEATS)
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        bar = progress.add_task("placement", total=7)
        known = problems(size.layers, size.devices, options.seed)
        for name in ("plain", "links", "devices"):
            rows.append(_row(name, known[name], repeats))
            progress.advance(bar)
        limited = _enough(known["devices"])
        rows.append(_row("memory", limited, repeats))
        progress.advance(bar)
        rows.append(_refused(limited, repeats))
        progress.advance(bar)
        rows.append(_row("chunks", _enough(known["chunks"]), repeats))
        progress.advance(bar)
        peer = _against_plain(size, options.seed, repeats)
        progress.advance(bar)
    tables().print(_table(rows, size, repeats, quick=options.quick))
    tables().print(_peer_table(peer, quick=options.quick))
    save(options, NAME, {"size": dataclasses.asdict(size), "seed": options.seed, "rows": rows, "plain": peer})


def _enough(problem: Problem) -> Problem:
    """With the least of some shares of memory that is enough: a limit that bears on the cut."""
    most = max(problem.placed().device_bytes)
    for share in MEMORY_SHARES:
        limited = problem.limited(share * most)
        try:
            limited.placed()
        except PlacementError:
            continue
        return limited
    raise ValueError("no share of the memory that a cut needs is enough for it")


def _timed(call: Callable[[], Any], repeats: int) -> tuple[list[float], Any]:
    seconds, found = [], None
    for _ in range(repeats):
        began = time.perf_counter()
        found = call()
        seconds.append(time.perf_counter() - began)
    return seconds, found


def _row(name: str, problem: Problem, repeats: int) -> dict[str, Any]:
    seconds, found = _timed(problem.placed, repeats)
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


def _refused(problem: Problem, repeats: int) -> dict[str, Any]:
    """A tenth less memory at a time, until there is no cut; what it takes to say so."""
    memory = float(problem.devices[0].memory_bytes or 0)
    while True:
        memory *= 0.9
        try:
            problem.limited(memory).placed()
        except PlacementError:
            break
    seconds, told = _timed(lambda: _refusal(problem.limited(memory)), repeats)
    return {"row": "refused", "seconds": seconds, "limit_bytes": int(memory), "told": told}


def _refusal(problem: Problem) -> str:
    try:
        problem.placed()
    except PlacementError as error:
        return str(error)
    raise ValueError("a placement was refused, and then was not")


def _against_plain(size: Size, seed: int, repeats: int) -> dict[str, Any]:
    problem = problems(size.plain_layers, size.plain_devices, seed)["devices"]
    ours, found = _timed(problem.placed, repeats)
    theirs, least = _timed(lambda: plain_least(problem), 1)
    return {
        "layers": size.plain_layers,
        "devices": size.plain_devices,
        "ours_seconds": ours,
        "plain_seconds": theirs,
        "same": math.isclose(found.slowest.seconds, least, rel_tol=1e-9),
    }


# -- tables ----------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[dict[str, Any]], size: Size, repeats: int, *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled(f"Placement of {size.layers:,} layers on {size.devices} devices", quick=quick),
        caption=f"seconds: the slowest of {repeats} call(s). Ratios: the slowest piece of another cut against ours, "
        "under the same conditions but for memory, which those cuts may exceed.",
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    table.add_column("conditions")
    for name in ("seconds", "bar", "verdict", "slowest piece", "equal/ours", "torchgpipe/ours", "cut"):
        table.add_column(name, justify="right")
    for row in rows:
        worst = max(row["seconds"])
        told = [row["row"], SECONDS.show(worst), str(SECONDS), coloured(SECONDS.verdict(worst))]
        if "slowest_seconds" in row:
            told += [f"{1000 * row['slowest_seconds']:.1f} ms", f"{row['equal_ratio']:.2f}"]
            told += [f"{row['balanced_ratio']:.2f}", "optimal" if row["proven"] else "good"]
        else:
            told += ["-", "-", "-", "none"]
        table.add_row(*told)
    return table


def _peer_table(peer: dict[str, Any], *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("The same recursion in plain Python", quick=quick),
        caption="Devices that differ, with links; one call of it, the best of ours. No bar.",
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for name in ("layers", "devices", "plain", "ours", "plain/ours", "same slowest piece"):
        table.add_column(name, justify="right")
    plain, ours = min(peer["plain_seconds"]), min(peer["ours_seconds"])
    table.add_row(
        str(peer["layers"]),
        str(peer["devices"]),
        f"{plain:.2f} s",
        f"{ours:.3f} s",
        f"{plain / ours:.0f}",
        "yes" if peer["same"] else "[red]NO[/]",
    )
    return table
