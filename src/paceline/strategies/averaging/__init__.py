"""Averaging without a server: workers train each on its own model, and average what they changed now and then.

    members   the strategies (Local SGD, HPSGD, ...) as data: when workers average, and whether training waits
    state     one worker's state machine, which all of them share

Nothing here reads a clock or a socket, draws a random number, logs, or touches a tensor: a worker's `AveragingState`
is told what happened and answers with what is to be done (`paceline.events`), under the simulator and on
`torch.distributed`.

A new member is one line in `AVERAGING`; the command line, the contract tests and the docs read the table.
"""

from paceline.strategies.averaging.members import AVERAGING, Averaging, Outer, make_averaging
from paceline.strategies.averaging.state import AveragingState

__all__ = ["AVERAGING", "Averaging", "AveragingState", "Outer", "make_averaging"]
