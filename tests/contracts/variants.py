"""The settings under which every strategy of the table must keep the laws. A new strategy adds its line here."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from paceline.strategies import LGC, STRATEGIES, Async, FastestK, Full
from paceline.strategies.shares import SharesBySpeed

BY_SPEED = SharesBySpeed(batch_size=8, least=4, multiple=4, period=1)

WITH_SHARES: dict[str, list[Any]] = {
    "full": [Full(shares=BY_SPEED)],
    "fastest-k": [FastestK(k=3, shares=BY_SPEED)],
    "lgc": [LGC(k=2, shares=BY_SPEED), LGC(k="auto", shares=BY_SPEED)],
}
VARIANTS: dict[str, list[Any]] = {
    "full": [Full(), *WITH_SHARES["full"]],
    "fastest-k": [
        FastestK(k=1),
        FastestK(k=3),
        FastestK(k=2, warmup_rounds=2),
        FastestK(k=99),
        FastestK(k="auto"),
        *WITH_SHARES["fastest-k"],
    ],
    "lgc": [
        LGC(k=1),
        LGC(k=3),
        LGC(k=2, warmup_rounds=2),
        LGC(k=2, scale_partial=False),
        LGC(k=2, scale_partial="samples"),
        LGC(k=99),
        LGC(k="auto"),
        *WITH_SHARES["lgc"],
    ],
    "async": [Async(), Async(staleness_scaling=False)],
}


def is_synchronous(settings: Any) -> bool:
    return settings.updates_per_round(4) == 1


def _name(settings: Any) -> str:
    return f"{settings}+speed" if getattr(settings, "shares", None) else str(settings)


_LISTED = [settings for name in STRATEGIES for settings in VARIANTS.get(name, [])]
every_strategy = pytest.mark.parametrize("settings", _LISTED, ids=_name)
every_synchronous_strategy = pytest.mark.parametrize("settings", [*filter(is_synchronous, _LISTED)], ids=_name)
every_strategy_with_shares = pytest.mark.parametrize(
    "settings", [*itertools.chain.from_iterable(WITH_SHARES.values())], ids=_name
)
