"""How the ranks of a group come to the sum of their vectors, when these travel encoded.

An exchange of one vector is a protocol: a generator that yields what it asks of all ranks (`codecs.requests`), receives
the answers, and returns the sum. It knows no process group. Drivers run it over torch.distributed; `lockstep` runs the
protocols of all ranks in one process.

    plan         a rank sends                                       and then
    all-reduce   what can be added up on its way                    the sum is there
    gather       its payload to all                                 all decode all payloads, and add up
    two-step     the payload of shard p of its vector to rank p     rank p adds up, encodes the sum, sends it to all

`plans` says which plan is the quickest for how many ranks.
"""

from paceline.exchanges.exchange import (
    ExchangeProtocol,
    PayloadSizeError,
    Trouble,
    TroubleError,
    VectorExchange,
    Workspace,
    make_exchange,
)
from paceline.exchanges.plans import PLANS, choose_plan

__all__ = [
    "PLANS",
    "ExchangeProtocol",
    "PayloadSizeError",
    "Trouble",
    "TroubleError",
    "VectorExchange",
    "Workspace",
    "choose_plan",
    "make_exchange",
]
