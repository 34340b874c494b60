"""Remedies: what could be changed about a recorded run, and the run with the change.

    strategy, k, period, on       another rule for who waits for whom
    without, replace, add         other machines: one gone, one like the median of the others, more of them
    link, codec                   other messages: faster links, fewer bytes
    nobody straggles              no batch takes longer than the median: what any cure of stragglers can come to

A figure is *modelled* where it follows from times that were measured, and *guessed* where it needs some that nobody
has: machines that were not there, a ring where there was a server, many more draws than were recorded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, TypeAlias

from paceline.analysis.what_if.measured_run import Draw, MeasuredRun, WhatIfError
from paceline.drivers.simulated.network import OneWayLink, WorkerLink
from paceline.lookup import unknown
from paceline.quantities import counted
from paceline.strategies import LGC, STRATEGIES, Async, FastestK, Full, Strategy, bare_name
from paceline.strategies.averaging import AVERAGING, make_averaging
from paceline.strategies.averaging.members import SETTINGS

Mark: TypeAlias = Literal["measured", "modelled", "guessed"]
MOST_ADDED = 10_000
MOST_UNSEEN = 0.25  # of a figure that is not called guessed
TIMED_SECONDS = 0.05  # for the measuring of a codec
K = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Remedy:
    """A change of a recorded run: its name in tables, the changed run, and how to do it.

    `settings` are those of a recipe that make the change, for a command and for a real check; None where a recipe
    cannot make it. `bound` marks what nobody can do.
    """

    name: str
    run: MeasuredRun
    mark: Mark = "modelled"
    settings: dict[str, dict[str, Any]] | None = None
    advice: str = ""
    workers_kept: tuple[int, ...] | None = None  # the columns of the recorded run that a check needs
    replaced: int | None = None
    bound: bool = False
    notes: tuple[str, ...] = ()


# -- who waits for whom ------------------------------------------------------------------------------------------------


def with_strategy(run: MeasuredRun, name: str, *, k: K | None = None, period: int | None = None) -> Remedy:
    """Return the run under another strategy, or the same with another K or period.

    >>> from paceline.analysis.what_if.measured_run import Draw
    >>> run = MeasuredRun(label="full", workers=2, rounds=3, steps=3, blocks=1, on="server", strategy=Full(),
    ...                   draws=((Draw(seconds=1.0),), (Draw(seconds=2.0),)), seconds=6.0)
    >>> with_strategy(run, "lgc", k=1).name
    'lgc, K=1'
    """
    plain, _, place = name.partition("@")
    if plain not in STRATEGIES and plain not in AVERAGING:
        raise unknown("strategy", plain, (*STRATEGIES, *AVERAGING))
    if place not in ("", "ranks"):
        raise unknown("place", place, ("ranks",))
    if plain in AVERAGING:
        return _averaging(run, plain, period)
    if run.on == "ranks" and plain == "async":
        raise WhatIfError("async needs a parameter server, and the run had none: its messages were never timed")
    chosen = _default_k(run.workers) if k is None else k
    if chosen != "auto" and not 1 <= chosen <= run.workers:
        raise WhatIfError(f"K must be between 1 and {run.workers}, the number of {run.names}s, or auto (k={chosen})")
    waits = plain in ("lgc", "fastest-k")
    strategies: dict[str, Strategy] = {
        "full": Full(),
        "async": Async(),
        "lgc": LGC(k=chosen),
        "fastest-k": FastestK(k=chosen),
    }
    strategy = strategies[plain]
    on_ranks = place == "ranks" or run.on == "ranks"
    settings: dict[str, Any] = {"name": plain, **({"k": chosen} if waits else {})}
    changed = replace(
        _with_server(run) if not on_ranks else _on_ranks(run),
        label=plain + ("@ranks" if on_ranks else ""),
        strategy=strategy,
        member=None,
        steps=run.rounds * strategy.updates_per_round(run.workers),
        late_work="partial",
    )
    ring_guessed = on_ranks and run.on == "server"
    return Remedy(
        name=changed.label + (f", K={chosen}" if waits else ""),
        run=changed,
        mark="guessed" if ring_guessed or run.member is not None else "modelled",
        settings={"strategy": settings | ({"on": "ranks"} if on_ranks else {})},
        advice=_strategy_advice(run, plain, chosen if waits else None, on_ranks=on_ranks),
    )


def _default_k(workers: int) -> int:
    return -(-7 * workers // 10)


def _strategy_advice(run: MeasuredRun, name: str, k: K | None, *, on_ranks: bool) -> str:
    options = f"--strategy {name}" + (f" --k {k}" if k is not None else "") + (" --on ranks" if on_ranks else "")
    if run.recipe is None and on_ranks:
        sync = {"full": "FullSync", "lgc": "LGCSync", "fastest-k": "FastestKSync"}[name]
        return f"paceline.{sync}(model, optimizer{'' if k is None else f', k={k!r}'})"
    if run.recipe is None:
        kind = {"full": "Full", "lgc": "LGC", "fastest-k": "FastestK", "async": "Async"}[name]
        return f"paceline.serve(..., strategy=paceline.{kind}({'' if k is None else f'k={k!r}'}))"
    return f"paceline train RECIPE {options}"


def _with_server(run: MeasuredRun) -> MeasuredRun:
    return replace(run, on="server", links=run.links)


def _on_ranks(run: MeasuredRun) -> MeasuredRun:
    """Return the run without a server; what a ring takes is guessed from what the server's messages took."""
    if run.on == "ranks":
        return run
    return replace(run, on="ranks", links=(), server_seconds=(_ring_seconds(run),))


def _ring_seconds(run: MeasuredRun) -> float:
    """Guess what an all-reduce takes: at the pace of the slowest link, but no less than the server's messages."""
    if run.on == "ranks" or not run.links:
        return median(run.server_seconds) if run.server_seconds else 0.0
    workers = run.workers
    slowest = max(run.links, key=lambda link: link.up.seconds(run.up_bytes)).up
    ring = 2 * (workers - 1) * (slowest.latency_seconds / 2 + slowest.seconds(run.up_bytes / workers)
                                - slowest.latency_seconds)  # fmt: skip
    return max(ring, median(run.server_seconds) + run.transfer_seconds)


def _averaging(run: MeasuredRun, name: str, period: int | None) -> Remedy:
    settings: dict[str, Any] = {}
    if period is not None:
        if "period" not in SETTINGS[name]:
            raise WhatIfError(f"{name} has no period (period={period})")
        settings["period"] = period
    member = make_averaging(name, **settings)
    changed = replace(_on_ranks(run), label=name, strategy=None, member=member, server_seconds=(_ring_seconds(run),))
    options = f"--strategy {name}" + (f" --period {period}" if period else "")
    script = {"hpsgd": "HPSGD", "local-sgd": "LocalSGD", "diloco": "DiLoCo", "bmuf": "BMUF"}.get(name, name.upper())
    advice = f"paceline train RECIPE {options}" if run.recipe else f"paceline.{script}(model, optimizer)"
    return Remedy(
        name=name + (f", period {member.period}" if member.period and member.period > 1 else ""),
        run=changed,
        mark="modelled" if run.on == "ranks" else "guessed",
        settings={"strategy": {"name": name, **settings, "on": "server"}},
        advice=advice,
    )


def with_k(run: MeasuredRun, k: K) -> Remedy:
    """Return the run with another K; one that waits for everybody becomes lgc."""
    name = bare_name(run.label) if isinstance(run.strategy, LGC | FastestK) else "lgc"
    return with_strategy(run, name, k=k)


# -- other machines ----------------------------------------------------------------------------------------------------


def _check_worker(run: MeasuredRun, worker: int, option: str) -> None:
    if not 0 <= worker < run.workers:
        raise WhatIfError(
            f"{option} must be between 0 and {run.workers - 1}, the {run.names}s' numbers (it is {worker})"
        )
    if run.workers < 2:
        raise WhatIfError(f"{option} needs two {run.names}s or more: the run had one")


def without(run: MeasuredRun, worker: int) -> Remedy:
    """Return the run without one of its workers; K stays, unless it would be more than there are."""
    _check_worker(run, worker, "--without")
    kept = tuple(other for other in range(run.workers) if other != worker)
    strategy = _fitting(run, run.workers - 1)
    return Remedy(
        name=f"without {run.names} {worker}" + (f", K={strategy.k}" if isinstance(strategy, LGC | FastestK) else ""),
        run=replace(
            run,
            workers=run.workers - 1,
            strategy=strategy,
            draws=tuple(run.draws[other] for other in kept),
            links=tuple(run.links[other] for other in kept) if run.links else (),
            steps=run.rounds * strategy.updates_per_round(run.workers - 1) if strategy else run.steps,
        ),
        settings={"cluster": {"workers": run.workers - 1}, "strategy": _k_settings(strategy)},
        workers_kept=kept,
        advice=f"leave {run.names} {worker} out",
        notes=(f"without {run.names} {worker} a round has {counted(run.workers - 1, 'gradient')}, not {run.workers}",),
    )


def _fitting(run: MeasuredRun, workers: int) -> Any:
    strategy = run.strategy
    if isinstance(strategy, LGC | FastestK) and strategy.k != "auto":
        return replace(strategy, k=min(strategy.k, workers))
    return strategy


def _k_settings(strategy: Any) -> dict[str, Any]:
    return {"k": strategy.k} if isinstance(strategy, LGC | FastestK) else {}


def _median_column(run: MeasuredRun, others: Sequence[int]) -> tuple[Draw, ...]:
    """Return the draws of a worker like the median of the others: draw by draw, in their middle."""
    length = max(len(run.draws[other]) for other in others)
    columns = [run.draws[other] for other in others]
    return tuple(
        Draw(
            seconds=median(column[draw % len(column)].seconds for column in columns),
            beside_seconds=median(column[draw % len(column)].beside_seconds for column in columns),
            mark="guessed",
        )
        for draw in range(length)
    )


def _median_link(run: MeasuredRun, others: Sequence[int]) -> WorkerLink:
    by_time = sorted((run.links[other] for other in others), key=lambda link: link.up.seconds(run.up_bytes))
    return by_time[len(by_time) // 2]


def replaced(run: MeasuredRun, worker: int) -> Remedy:
    """Return the run with one worker like the median of the others, its link too."""
    _check_worker(run, worker, "--replace")
    others = [other for other in range(run.workers) if other != worker]
    draws, links = list(run.draws), list(run.links)
    draws[worker] = _median_column(run, others)
    if links:
        links[worker] = _median_link(run, others)
    return Remedy(
        name=f"{run.names} {worker} like the median",
        run=replace(run, draws=tuple(draws), links=tuple(links)),
        mark="guessed",
        settings={},
        replaced=worker,
        advice=f"give {run.names} {worker} a machine like the others'",
    )


def added(run: MeasuredRun, count: int) -> Remedy:
    """Return the run with more workers, each like the median of those there are; K stays."""
    if not 1 <= count <= MOST_ADDED:
        raise WhatIfError(f"--add must be between 1 and {MOST_ADDED:,} (it is {count})")
    everybody = list(range(run.workers))
    workers = run.workers + count
    strategy = run.strategy
    return Remedy(
        name=f"{count} more {run.names}{'s' if count > 1 else ''}",
        run=replace(
            run,
            workers=workers,
            draws=(*run.draws, *(_shifted(_median_column(run, everybody), by) for by in range(count))),
            links=(*run.links, *((_median_link(run, everybody),) * count)) if run.links else (),
            steps=run.rounds * strategy.updates_per_round(workers) if strategy else run.steps,
        ),
        mark="guessed",
        settings=None,
        advice=f"start {counted(count, f'more {run.names}')}",
        notes=(f"with {counted(count, f'more {run.names}')} a round has {workers} gradients, not {run.workers}",),
    )


def _shifted(column: tuple[Draw, ...], by: int) -> tuple[Draw, ...]:
    """Return the same draws from another one on: several that are added should not all be slow at once."""
    at = by * len(column) // 7 % len(column)
    return (*column[at:], *column[:at])


def nobody_straggles(run: MeasuredRun) -> Remedy:
    """Return the run with no batch longer than the median of all."""
    middle = median(draw.seconds for column in run.draws for draw in column)
    draws = tuple(tuple(replace(draw, seconds=min(draw.seconds, middle)) for draw in column) for column in run.draws)
    return Remedy(name="nobody straggles", run=replace(run, draws=draws), bound=True)


# -- other messages ----------------------------------------------------------------------------------------------------


def with_links(run: MeasuredRun, factor: float, worker: int | None = None) -> Remedy:
    """Return the run with links that are so many times as fast, all of them or one worker's."""
    if not (math.isfinite(factor) and 0 < factor <= 1e6):
        raise WhatIfError(f"--link must be more than 0 and at most 1e6 (it is {factor:g})")
    if worker is not None:
        _check_worker(run, worker, "--link")
    if not run.links:
        if worker is not None:
            raise WhatIfError(f"--link {worker}:{factor:g} needs a server: in a ring all wait for the slowest link")
        changed = replace(run, server_seconds=tuple(each / factor for each in run.server_seconds))
        return Remedy(name=f"links {factor:g} times as fast", run=changed, advice="a faster network")
    links = tuple(_faster(link, factor) if worker in (None, number) else link for number, link in enumerate(run.links))
    whose = "links" if worker is None else f"{run.names} {worker}'s link"
    return Remedy(name=f"{whose} {factor:g} times as fast", run=replace(run, links=links), advice="a faster network")


def _faster(link: WorkerLink, factor: float) -> WorkerLink:
    def way(each: OneWayLink) -> OneWayLink:
        return replace(each, bits_per_second=each.bits_per_second * factor)

    return WorkerLink(down=way(link.down), up=way(link.up))


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """What a codec costs for a vector of a model's size: bytes, and seconds here for each way."""

    payload_bytes: int
    encode_seconds: float
    decode_seconds: float


def with_codec(run: MeasuredRun, text: str, *, cost_of: Callable[[str, int], CodecCost] | None = None) -> Remedy:
    """Return the run with gradients and models in another code; its bytes and seconds are measured here."""
    cost = cost_of or codec_cost
    if not run.up_bytes:
        raise WhatIfError(f"--codec {text!r} needs the bytes of a gradient, which the run does not tell")
    before = run.codec or "identity"
    if text == before or _same_codec(text, before):
        raise WhatIfError(f"the run has codec {before} already: leave --codec {text!r} out, or give another")
    elements = max(1, round(run.up_bytes / _bytes_per_element(before, cost)))
    new, old = cost(text, elements), cost(before, elements)
    ratio = new.payload_bytes / old.payload_bytes
    coding = (new.encode_seconds + new.decode_seconds) - (old.encode_seconds + old.decode_seconds)
    crowd = _crowd(run)
    server = coding if run.on == "server" else 0.0
    draws = tuple(
        tuple(replace(draw, beside_seconds=max(0.0, draw.beside_seconds + crowd * coding)) for draw in column)
        for column in run.draws
    )
    wire = 1.0 if run.links else ratio  # without links of its own, all that passes after a step is the ring
    words = text.split()
    settings = {"name": words[0], **dict(word.partition("=")[::2] for word in words[1:])}
    script = f'paceline.compress(ddp, "{text}")'
    return Remedy(
        name=f"codec {text}",
        run=replace(
            run,
            draws=draws,
            up_bytes=max(1, round(run.up_bytes * ratio)),
            down_bytes=max(1, round(run.down_bytes * ratio)),
            server_seconds=tuple(max(0.0, each * wire + server) for each in run.server_seconds),
        ),
        settings={"codec": settings},
        advice=f"paceline train RECIPE --codec {words[0]}" if run.recipe else script,
    )


def _same_codec(one: str, other: str) -> bool:
    """Return whether two texts are of one codec, whatever it keeps of what was lost."""
    from paceline.codecs.naming import inner_of, parse_codec, text_of

    try:
        return text_of(inner_of(parse_codec(one))) == text_of(inner_of(parse_codec(other)))
    except ValueError:  # what is no codec is refused where it is measured
        return False


def _bytes_per_element(text: str, cost: Callable[[str, int], CodecCost]) -> float:
    return cost(text, 2**16).payload_bytes / 2**16


def _crowd(run: MeasuredRun) -> float:
    """Return how many workers share a core of this machine; 1 where they were elsewhere."""
    return max(1.0, run.workers / (os.cpu_count() or 1)) if run.was_here else 1.0


def codec_cost(text: str, elements: int) -> CodecCost:
    """Measure a codec on noise of so many elements: the least of several turns, for other work only adds time."""
    import torch

    from paceline.codecs.naming import parse_codec

    codec = parse_codec(text).fresh([torch.Size([elements])])
    vector = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    payload = codec.encode(vector, generator)
    codec.decode(payload, expected_length=elements)
    return CodecCost(
        payload_bytes=payload.numel(),
        encode_seconds=_least_seconds(lambda: codec.encode(vector, generator)),
        decode_seconds=_least_seconds(lambda: codec.decode(payload, expected_length=elements)),
    )


def _least_seconds(work: Callable[[], object]) -> float:
    import time

    least, end = math.inf, time.monotonic() + TIMED_SECONDS
    for _ in range(1000):
        before = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - before)
        if time.monotonic() > end:
            break
    return least
