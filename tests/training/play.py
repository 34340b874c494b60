"""A random play of rounds among ranks: who reports when, at which model; the strategy closes rounds with it."""

from __future__ import annotations

from paceline.events import GradientArrived, Joined, Step

BLOCKS = 4


def play(strategy, drawn, ranks, message_of):
    """Yield the steps that bytes make a strategy take; `ranks` keep their messages as they arrive."""
    state, versions, waiting = strategy.start(), [0] * len(ranks), [False] * len(ranks)
    for rank in range(len(ranks)):
        state.handle(Joined(worker=rank))
    for number, byte in enumerate(drawn):
        able = [rank for rank in range(len(ranks)) if not waiting[rank] or versions[rank] < state.version]
        rank = able[byte % len(able)]
        if waiting[rank]:  # it takes the newest model, or it has begun on an older one
            versions[rank] = max(versions[rank] + 1, state.version - byte // 16 % 3)
        version, waiting[rank] = versions[rank], True
        ranks[rank].keep(version, message_of(rank, version))
        blocks_done = BLOCKS if version == state.version else 1 + byte % BLOCKS
        arrived = GradientArrived(
            worker=rank, version=version, blocks_done=blocks_done, blocks=BLOCKS, at_seconds=float(number)
        )
        yield from (action for action in state.handle(arrived) if isinstance(action, Step))
