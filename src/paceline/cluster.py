"""Real clusters: servers and workers, rounds of ranks, whole recipes, and gradients of DDP that travel encoded.

serve, Worker                      a parameter server and its workers, each in a script (docs/cluster.md)
LGCSync, FastestKSync, FullSync    the same strategies on the ranks of a launch, without a server (docs/rounds.md)
train, replay                      a recipe carried out in real processes, and computed again from its trace
LGC, FastestK, Full, Async         the strategies of a server
Balance, ShareTable                batches by speed under DistributedDataParallel (docs/balance.md)
SharesBySpeed                      the same for workers and ranks in rounds
compress                           a codec for DistributedDataParallel (docs/codecs.md)
watch, Watch                       where the time of a script's steps goes, on every rank (docs/watching.md)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import lazy_names

if TYPE_CHECKING:
    from paceline.distributed import RankGoneError
    from paceline.drivers.balancing.balance import Balance
    from paceline.drivers.balancing.report import ShareTable
    from paceline.drivers.balancing.schedule import BalanceError
    from paceline.drivers.ddp import compress
    from paceline.drivers.rounds.loop import RoundsError
    from paceline.drivers.rounds.synchronizer import FastestKSync, FullSync, LGCSync
    from paceline.drivers.served.run import RunOutcome
    from paceline.drivers.served.settings import Limits, ServeError
    from paceline.drivers.served.worker import Worker
    from paceline.drivers.watching.folder import WatchError
    from paceline.drivers.watching.watch import Watch, watch
    from paceline.runs.cluster import Trained
    from paceline.runs.replaying import replay
    from paceline.runs.serving import serve
    from paceline.runs.training import train
    from paceline.strategies import LGC, STRATEGIES, Async, FastestK, Full
    from paceline.strategies.shares import SharesBySpeed

_HOMES = {
    "serve": "paceline.runs.serving",
    "RunOutcome": "paceline.drivers.served.run",
    "Worker": "paceline.drivers.served.worker",
    "Limits": "paceline.drivers.served.settings",
    "ServeError": "paceline.drivers.served.settings",
    "LGCSync": "paceline.drivers.rounds.synchronizer",
    "FastestKSync": "paceline.drivers.rounds.synchronizer",
    "FullSync": "paceline.drivers.rounds.synchronizer",
    "train": "paceline.runs.training",
    "Trained": "paceline.runs.cluster",
    "replay": "paceline.runs.replaying",
    "Balance": "paceline.drivers.balancing.balance",
    "BalanceError": "paceline.drivers.balancing.schedule",
    "ShareTable": "paceline.drivers.balancing.report",
    "SharesBySpeed": "paceline.strategies.shares",
    "compress": "paceline.drivers.ddp",
    "LGC": "paceline.strategies",
    "FastestK": "paceline.strategies",
    "Full": "paceline.strategies",
    "Async": "paceline.strategies",
    "STRATEGIES": "paceline.strategies",
    "RankGoneError": "paceline.distributed",
    "RoundsError": "paceline.drivers.rounds.loop",
    "Watch": "paceline.drivers.watching.watch",
    "WatchError": "paceline.drivers.watching.folder",
    "watch": "paceline.drivers.watching.watch",
}

__all__ = [
    "LGC",
    "STRATEGIES",
    "Async",
    "Balance",
    "BalanceError",
    "FastestK",
    "FastestKSync",
    "Full",
    "FullSync",
    "LGCSync",
    "Limits",
    "RankGoneError",
    "RoundsError",
    "RunOutcome",
    "ServeError",
    "ShareTable",
    "SharesBySpeed",
    "Trained",
    "Watch",
    "WatchError",
    "Worker",
    "compress",
    "replay",
    "serve",
    "train",
    "watch",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
