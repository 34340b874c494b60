"""Which rank of a launch this process is, by what its launcher has put into the environment. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STORE = "PACELINE_STORE"  # a file in which the ranks of one machine meet; set by `LocalRanks`, never by users


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank of how many this process is.

    >>> place_in({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    Place(rank=1, world=4)
    >>> place_in({}) is None
    True
    """

    rank: int
    world: int


def place_in(environment: Mapping[str, str]) -> Place | None:
    """The place that a launcher's variables give; None if no launcher started this process."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    if STORE not in environment and "MASTER_ADDR" not in environment:
        return None
    try:
        place = Place(rank=int(environment["RANK"]), world=int(environment["WORLD_SIZE"]))
    except ValueError:
        raise ValueError("RANK and WORLD_SIZE must be whole numbers, as torchrun sets them") from None
    if not 0 <= place.rank < place.world:
        raise ValueError(f"RANK must be between 0 and WORLD_SIZE - 1 (RANK={place.rank}, WORLD_SIZE={place.world})")
    return place
