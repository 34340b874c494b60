"""A recorded run, decided and computed again: the third driver of the core, beside the virtual clock and the cluster.

Nothing here waits for anybody: the journal says who came when, and everything else follows from it.
"""

from paceline.drivers.replayed.replay import Replay, ReplayError, Verdict

__all__ = ["Replay", "ReplayError", "Verdict"]
