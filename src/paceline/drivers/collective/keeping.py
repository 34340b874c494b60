"""A rank's checkpoints: each rank keeps its own, and all go on from the newest that every one of them has.

    folder/rank-0/checkpoint-00000050/    model, optimiser, schedule, its side of the averaging, how far it has drawn
    folder/rank-1/checkpoint-00000050/

Ranks on several machines may have a folder each. A checkpoint is written where all ranks are at the same average; one
that dies while it writes leaves the one before, which all have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.traces.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from paceline.training.plain import with_tensors, without_tensors

KEPT = 2


class Keeper:
    """Writes and finds a rank's checkpoints; the number of one is the rounds that were done.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     keeper = Keeper(Path(folder), rank=1)
    ...     keeper.keep(50, {"model": {"weight": torch.ones(1)}, "draws": 7})
    ...     keeper.held(), keeper.read(50)
    ([50], {'model': {'weight': tensor([1.])}, 'draws': 7})
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder / f"rank-{rank}"

    def keep(self, rounds: int, state: dict[str, Any]) -> None:
        """Write a state of nested plain values and tensors."""
        tensors: dict[str, torch.Tensor] = {}
        plain = without_tensors(state, "state", tensors)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(self.folder, Checkpoint(version=rounds, tensors=tensors, state=plain), keep=KEPT)

    def read(self, rounds: int) -> dict[str, Any]:
        """A state that was kept; CheckpointError if it is not whole."""
        checkpoint = read_checkpoint(self.folder / f"checkpoint-{rounds:08d}")
        state: dict[str, Any] = with_tensors(checkpoint.state, checkpoint.tensors)
        return state

    def held(self) -> list[int]:
        """The rounds of the checkpoints that can be read, newest first."""
        found = []
        for path in sorted(self.folder.glob("checkpoint-*"), reverse=True):
            try:
                found.append(read_checkpoint(path).version)
            except ValueError:
                continue
        return found


def newest_common(keeper: Keeper) -> int | None:
    """The newest checkpoint that all ranks have; None if nobody has any. All ranks must come here."""
    held = keeper.held()[:KEPT]
    ours = torch.tensor([*held, *[-1] * (KEPT - len(held))], dtype=torch.int64)
    every = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(every, ours)
    rows: list[set[int]] = [set(row.tolist()) - {-1} for row in every]
    common = set.intersection(*rows)
    if common:
        return max(common)
    if not any(rows):
        return None
    without = next((rank for rank, row in enumerate(rows) if not row), 0)
    newest = max(set.union(*rows))
    raise ValueError(
        f"there is no checkpoint that all ranks have: rank {without} lacks that of round {newest}; "
        "copy its folder to where it runs, or begin anew in another folder"
    )
