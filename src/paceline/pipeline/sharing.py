"""The fastest cut within given memory: exact where pieces do not share a device, step by step where they do.

Pieces p, p + k, p + 2k, ... share the memory of one device, which couples pieces that are far apart in the row. Dynamic
programming cannot see that; but it solves exactly the question in which every piece has a part of its own:

    device 0  │███ piece 0 ███│█ piece 2 █│      parts that are given,
    device 1  │█ piece 1 █│███ piece 3 ███│      and add up to the device

So parts are chosen, the best cut within them is found, and the parts become what the pieces of that cut take, with what
is left over divided in proportion. That cut is still within its parts then, so the next is as fast or faster. If there
is none within the parts, the one that comes nearest gives the next. Three beginnings are tried: the parts that pieces
have in the cut that would be best if nobody shared, equal parts, and those of a cut that takes little memory in all.

This is a search, not a proof: a better cut may be missed, and now and then the only one that fits. How often, against
all cuts of small models, is counted in tests/parity/test_placement_equals_brute_force.py.
"""

from __future__ import annotations

import itertools
import math

from paceline.pipeline.costs import Costs, Limits
from paceline.pipeline.cutting import Cost, fewest_bytes, least_sum, least_worst

STEPS = 4  # from each beginning; more take longer and find little


def fastest(costs: Costs, limits: Limits) -> tuple[int, ...] | None:
    """Positions of the best cut in which each piece is within its limit, if there is one."""
    return _best(costs, costs.seconds_within(limits))


def fastest_together(costs: Costs, alone: tuple[int, ...]) -> tuple[int, ...] | None:
    """Positions of a good cut in which the pieces of each device fit on it together, if one is found.

    `alone` is the best cut in which each piece fits by itself.
    """
    found: dict[tuple[int, ...], tuple[float, int]] = {}
    seen = set()
    for parts in (
        _parts(costs, _memory(costs, alone)),
        _parts(costs, [1] * costs.pieces),
        _parts(costs, _lightest(costs)),
    ):
        for _ in range(STEPS):
            cuts = fastest(costs, parts) or _best(costs, costs.fullness(parts))
            if cuts is None or cuts in seen:
                break
            seen.add(cuts)
            memory = _memory(costs, cuts)
            if _fits(costs, memory):
                found[cuts] = _worth(costs, cuts)
            parts = _parts(costs, memory)
    return min(found, key=lambda cuts: (*found[cuts], cuts), default=None)


def _lightest(costs: Costs) -> list[int]:
    """What each piece takes in a cut that asks little of all devices, and the less of one the fuller it was before."""
    devices = len(costs.devices)
    weights = [1.0] * devices
    for _ in range(STEPS):
        limits = [None if limit is None else limit / weights[p % devices] for p, limit in enumerate(costs.limits)]
        memory = _memory(costs, least_sum(costs.fullness(limits), costs.blocks.count, costs.pieces))
        if _fits(costs, memory):
            break
        weights = [
            weight * (sum(memory[device::devices]) / limit if limit else 1.0)
            for device, (weight, limit) in enumerate(zip(weights, costs.limits[:devices], strict=True))
        ]
    return memory


def _best(costs: Costs, cost: Cost) -> tuple[int, ...] | None:
    most = least_worst(cost, costs.blocks.count, costs.pieces)
    return None if math.isinf(most) else fewest_bytes(cost, most, costs.crossing, costs.pieces)


def _runs(costs: Costs, cuts: tuple[int, ...]) -> list[tuple[int, slice, slice]]:
    ends = itertools.pairwise((0, *cuts, costs.blocks.count))
    return [(piece, slice(i, i + 1), slice(j, j + 1)) for piece, (i, j) in enumerate(ends)]


def _memory(costs: Costs, cuts: tuple[int, ...]) -> list[int]:
    return [int(costs.memory(*run)[0, 0]) for run in _runs(costs, cuts)]


def _worth(costs: Costs, cuts: tuple[int, ...]) -> tuple[float, int]:
    slowest = max(float(costs.seconds(*run)[0, 0]) for run in _runs(costs, cuts))
    return slowest, int(costs.crossing[list(cuts)].sum())


def _parts(costs: Costs, needed: list[int]) -> Limits:
    """Each device's memory, divided among its pieces in proportion to what they need."""
    together = [max(1, sum(needed[device :: len(costs.devices)])) for device in range(len(costs.devices))]
    return [
        None if limit is None else limit * max(1, share) / together[piece % len(together)]
        for piece, (limit, share) in enumerate(zip(costs.limits, needed, strict=True))
    ]


def _fits(costs: Costs, needed: list[int]) -> bool:
    devices = len(costs.devices)
    sums = [sum(needed[device::devices]) for device in range(devices)]
    return all(limit is None or total <= limit for limit, total in zip(costs.limits[:devices], sums, strict=True))
