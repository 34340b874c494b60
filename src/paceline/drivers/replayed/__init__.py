"""Recorded runs, decided and computed again in one process: the third driver, beside the virtual clock and the cluster.

Nothing here waits: the record says who came when, and everything else follows from it.
"""

from paceline.drivers.replayed.rounds_run import RoundsReplay
from paceline.drivers.replayed.served_run import Replay, ReplayError, Verdict

__all__ = ["Replay", "ReplayError", "RoundsReplay", "Verdict"]
