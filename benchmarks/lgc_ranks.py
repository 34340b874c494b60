"""LGC on torch.distributed, without a server: beside DDP, a plain all-reduce loop, the server, and the simulator.

The parts, each of which `--only` runs alone:

    saving       real ranks under injected delays: what lgc saves of full's time, against what the simulator says it can
    round        a round without delays against the same loop with a plain all-reduce; where the difference goes
    python-lock  a round while one rank is busy in Python
    link         rounds a second over 200 Mbit/s against the server; needs root
    slow-rank    one of four ranks 5 times slower, three classes each: accuracy and time against DDP and fastest-k
    scale        10 to 1,024 ranks on the virtual clock, at the costs that `round` and `link` measured
    one-class    10 ranks on the virtual clock, one class each

Two cores bear about four ranks; hence four real ones, and more only on the virtual clock. The raw numbers of a part
stay in <out>/lgc-ranks.json until it is run again.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lgc_ranks_link import link
from benchmarks.lgc_ranks_round import python_lock, round_cost
from benchmarks.lgc_ranks_scale import one_class, scale
from benchmarks.lgc_ranks_training import saving, slow_rank
from benchmarks.options import Options, chosen
from benchmarks.output import save, tables

REAL = {"saving": saving, "round": round_cost, "python-lock": python_lock, "link": link, "slow-rank": slow_rank}
VIRTUAL = {"scale": scale, "one-class": one_class}


def run(options: Options) -> None:
    """`python -m benchmarks lgc-ranks`."""
    numbers = _known(options)
    for part in chosen(options.only, (*REAL, *VIRTUAL), "part of lgc-ranks"):
        if part in REAL:
            with tempfile.TemporaryDirectory(prefix="paceline-lgc-ranks-") as folder:
                found, numbers[part] = REAL[part](options, Path(folder))
        else:
            found, numbers[part] = VIRTUAL[part](options, numbers)
        for table in found:
            tables().print(table)
        save(options, "lgc-ranks", {"parts": numbers})


def _known(options: Options) -> dict[str, Any]:
    """Return the raw numbers of parts that were run before; quick figures are kept apart."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        document = json.loads(Path(options.out, "lgc-ranks.json").read_text(encoding="utf-8"))
        if document["quick"] == options.quick:
            return dict(document["parts"])
    return {}
