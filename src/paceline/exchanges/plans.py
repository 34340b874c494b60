"""The plans of an exchange, what each one moves, and which one is the quickest.

With N ranks, and B bytes of a payload, a rank gives to the network

    all-reduce   2 (N - 1) / N  B        a ring: each part goes around twice
    gather          (N - 1)     B
    two-step     2 (N - 1) / N  B        of which half before the sum, and half after it

so from three ranks on gathering moves the most. But it takes one collective, where two-step takes two, each with its
latency, and a payload of a few bytes is all latency.

The choice follows from the codec, the number of elements and of ranks alone, by a link that is assumed: so all ranks,
and two runs of the same script, choose alike. `make bench ARGS="plans"` holds it against every plan, measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline.codecs import Codec
from paceline.codecs.floats import Identity
from paceline.codecs.naming import inner_of
from paceline.lookup import unknown
from paceline.traffic import Traffic, all_reduce_traffic, gather_traffic

ALL_REDUCE, GATHER, TWO_STEP = PLANS = ("all-reduce", "gather", "two-step")
AUTO = "auto"
SHARD_UNIT = 512  # elements


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCosts:
    """What moving and decoding cost: the link that the choice assumes, unless it is told another.

    >>> ExchangeCosts().seconds(Traffic(hops=4, given_bytes=1_000_000), collectives=2, decoded=0).total > 0.008
    True
    """

    bytes_per_second: float = 125e6  # 1 Gbit/s
    collective_seconds: float = 0.4e-3  # to start one, on all ranks, and to hear of its end
    hop_seconds: float = 0.1e-3  # from one rank to its neighbour
    decode_seconds: float = 0.5e-9  # of an element

    def seconds(self, traffic: Traffic, *, collectives: int, decoded: int) -> ExchangeSeconds:
        """Return how long an exchange takes."""
        return ExchangeSeconds(
            waiting=collectives * self.collective_seconds + traffic.hops * self.hop_seconds,
            working=traffic.given_bytes / self.bytes_per_second + decoded * self.decode_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSeconds:
    """How long an exchange takes: it waits for others, however short the vector, and it moves and decodes bytes.

    >>> ExchangeSeconds(waiting=0.5, working=0.25).total
    0.75
    """

    waiting: float
    working: float

    @property
    def total(self) -> float:
        """How long it waits and works."""
        return self.waiting + self.working


def takes_another(joined: Sequence[ExchangeSeconds]) -> bool:
    """Whether another exchange may join these: together they still wait for longer than they work.

    >>> one = ExchangeSeconds(waiting=2.0, working=0.75)
    >>> takes_another([one, one]), takes_another([one, one, one])
    (True, False)
    """
    return sum(each.working for each in joined) < max(each.waiting for each in joined)


ASSUMED = ExchangeCosts()


def plans_of(codec: Codec) -> tuple[str, ...]:
    """Return the plans that a codec can do; one from outside that does not say can be gathered.

    >>> from paceline.codecs import make_codec
    >>> plans_of(make_codec("qsgd"))
    ('gather', 'two-step')
    """
    return tuple(getattr(codec, "plans", (GATHER,)))


def steps_of(plan: str, codec: Codec) -> int:
    """Return how many requests an exchange makes: sizes go before payloads whose size is not fixed.

    >>> from paceline.codecs import make_codec
    >>> steps_of("two-step", make_codec("qsgd")), steps_of("two-step", make_codec("qsgd", lossless="elias"))
    (2, 4)
    """
    sized = bool(getattr(codec, "fixed_size", False))
    sums: int = getattr(inner_of(codec), "sum_steps", 1)
    return {ALL_REDUCE: sums, GATHER: 1 if sized else 2, TWO_STEP: 2 if sized else 4}[plan]


def longest_shard(elements: int, ranks: int) -> int:
    """Return the elements of the longest shard.

    >>> longest_shard(100_000, 8)
    12800
    """
    edges = shard_edges(elements, ranks)
    return max(after - before for before, after in itertools.pairwise(edges))


def shard_edges(elements: int, ranks: int) -> list[int]:
    """Return where the shards of a vector begin, and where the last one ends: multiples of 512, as buckets of qsgd.

    >>> shard_edges(10_000, 4), shard_edges(600, 4)
    ([0, 2560, 5120, 7680, 10000], [0, 0, 512, 512, 600])
    """
    inner = (SHARD_UNIT * round(elements * place / ranks / SHARD_UNIT) for place in range(1, ranks))
    return [0, *(min(elements, edge) for edge in inner), elements]


def exchange_seconds(
    plan: str, codec: Codec, elements: int, ranks: int, costs: ExchangeCosts = ASSUMED
) -> ExchangeSeconds:
    """Return how long an exchange would take, apart from the encoding, which all plans have alike.

    >>> from paceline.codecs import make_codec
    >>> times = [exchange_seconds(plan, make_codec("qsgd"), 1_000_000, 8) for plan in ("gather", "two-step")]
    >>> times[0].total > 2 * times[1].total
    True
    """
    traffic = traffic_of(plan, codec, elements, ranks)
    decoded = {ALL_REDUCE: elements, GATHER: ranks * elements, TWO_STEP: 2 * elements}[plan]
    return costs.seconds(traffic, collectives=steps_of(plan, codec), decoded=decoded)


def traffic_of(plan: str, codec: Codec, elements: int, ranks: int) -> Traffic:
    """Return what each rank puts on the network for a vector of so many elements, at the most.

    >>> from paceline.codecs import make_codec
    >>> [traffic_of(plan, make_codec("qsgd"), 1_000_000, 8) for plan in ("gather", "two-step")]
    [Traffic(hops=7, given_bytes=3554824), Traffic(hops=8, given_bytes=892024)]
    """
    steps = steps_of(plan, codec)
    if plan == TWO_STEP:  # all to all, and a gather
        shard = codec.most_bytes(longest_shard(elements, ranks))
        return Traffic(steps // 2 * ranks, 2 * (ranks - 1) * shard)
    once = (all_reduce_traffic if plan == ALL_REDUCE else gather_traffic)(codec.most_bytes(elements), ranks)
    return Traffic(steps * once.hops, once.given_bytes)  # its bytes go in several steps


def adds_plainly(codec: Codec, plan: str) -> bool:
    """Whether vectors are added up as they are: there is nothing to encode, and no exchange is needed.

    >>> from paceline.codecs import make_codec
    >>> adds_plainly(make_codec("identity"), "auto"), adds_plainly(make_codec("qsgd"), "auto")
    (True, False)
    """
    return isinstance(codec, Identity) and plan in (AUTO, ALL_REDUCE)


def refuse_float64(
    codec: Codec, plan: str, dtypes: Iterable[torch.dtype], remedy: str = "", *, noun: str = "parameters"
) -> None:
    """Refuse parameters, or buffers, in float64 where they, or their gradients, would travel as float32.

    >>> from paceline.codecs import make_codec
    >>> refuse_float64(make_codec("qsgd"), "auto", [torch.float32, torch.float64])
    Traceback (most recent call last):
    ValueError: codecs carry float32, and this model has float64 parameters (codec=QSGD(levels=7, bucket=512, ...
    """
    if torch.float64 in dtypes and not adds_plainly(codec, plan):
        planned = "" if plan in (AUTO, ALL_REDUCE) else f", plan={plan!r}"
        raise ValueError(
            f"codecs carry float32, and this model has float64 {noun} (codec={codec!r}{planned}): take "
            f'codec="identity" with plan="auto", which adds them up as they are, or call .float() on the model{remedy}'
        )


def choose_plan(
    codec: Codec, elements: int, ranks: int, costs: ExchangeCosts = ASSUMED, *, of_elements: int | None = None
) -> str:
    """Return the plan that takes the least time, of those that the codec can do.

    A vector may be a part of so many elements, all of which are exchanged: then short ones wait together.

    >>> from paceline.codecs import make_codec
    >>> codec = make_codec("qsgd")
    >>> choose_plan(codec, 1_000_000, 8), choose_plan(codec, 1_000_000, 2), choose_plan(codec, 1_000, 8)
    ('two-step', 'gather', 'gather')
    >>> choose_plan(codec, 20_000, 8), choose_plan(codec, 20_000, 8, of_elements=1_000_000)
    ('gather', 'two-step')
    """
    plans = [plan for plan in plans_of(codec) if plan != TWO_STEP or ranks > 2]  # two ranks gather as few bytes
    share = elements / max(1, elements, of_elements or 0)
    return min(plans, key=lambda plan: _seconds_of_part(exchange_seconds(plan, codec, elements, ranks, costs), share))


def _seconds_of_part(taken: ExchangeSeconds, share: float) -> float:
    """Return how long a part of what is exchanged takes: exchanges are joined until they work for as long as they wait.

    Then each waits, in the mean, for as long as it works; but together they wait once at the least.
    """
    return taken.working + min(taken.waiting, max(taken.working, share * taken.waiting))


def check_plan(plan: str, codec: Codec) -> None:
    """Refuse a plan that there is not, or that the codec cannot do.

    >>> from paceline.codecs import make_codec
    >>> check_plan("all-reduce", make_codec("qsgd"))
    Traceback (most recent call last):
    ValueError: QSGD(levels=7, bucket=512, norm='max', lossless='packed') cannot be exchanged by 'all-reduce'; ...
    """
    if plan not in (AUTO, *PLANS):
        raise unknown("plan", plan, (AUTO, *PLANS))
    possible = plans_of(codec)
    if plan not in (AUTO, *possible):
        raise ValueError(f"{codec!r} cannot be exchanged by {plan!r}; choose from {', '.join((AUTO, *possible))}")
