"""The settings under which every strategy of the table must keep the laws. A new strategy adds its line here."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.strategies import LGC, STRATEGIES, Async, FastestK, Full

VARIANTS: dict[str, list[Any]] = {
    "full": [Full()],
    "fastest-k": [FastestK(k=1), FastestK(k=3), FastestK(k=2, warmup_rounds=2), FastestK(k=99), FastestK(k="auto")],
    "lgc": [LGC(k=1), LGC(k=3), LGC(k=2, warmup_rounds=2), LGC(k=2, scale_partial=False), LGC(k=99), LGC(k="auto")],
    "async": [Async(), Async(staleness_scaling=False)],
}


def is_synchronous(settings: Any) -> bool:
    return settings.updates_per_round(4) == 1


_LISTED = [settings for name in STRATEGIES for settings in VARIANTS.get(name, [])]
every_strategy = pytest.mark.parametrize("settings", _LISTED, ids=str)
every_synchronous_strategy = pytest.mark.parametrize("settings", [*filter(is_synchronous, _LISTED)], ids=str)
