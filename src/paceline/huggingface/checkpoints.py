"""What each rank keeps of a part in a checkpoint of Trainer's: one file for each rank, beside Trainer's own.

    checkpoint-500/paceline-averaging-0-of-4.pt     averaging's state of rank 0, and its optimiser's
    checkpoint-500/paceline-averaging-1-of-4.pt     Trainer keeps the random numbers of ranks in the same way
    checkpoint-500/rng_state_1.pth

Trainer saves model and optimiser of its main process alone. That is enough where all ranks are equal; codecs' memories,
the optimisers of ranks that average, and how far a sampler was observed are each rank's own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.files import replacing

NAME = re.compile(r"paceline-(?P<part>[a-z-]+)-(?P<rank>\d+)-of-(?P<world>\d+)\.pt")


class RankStateError(PacelineError, ValueError):
    """A checkpoint that cannot be gone on from.

    >>> raise RankStateError("checkpoint-500 has no state of rank 1")
    Traceback (most recent call last):
    paceline.huggingface.checkpoints.RankStateError: checkpoint-500 has no state of rank 1
    """


def save_rank_state(folder: str | Path, part: str, state: dict[str, Any], *, rank: int, world: int) -> Path:
    """Write this rank's state of a part into a checkpoint's folder, whole or not at all.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_rank_state(folder, "pruning", {"epoch": 3}, rank=1, world=2).name
    ...     load_rank_state(folder, "pruning", rank=1, world=2)
    'paceline-pruning-1-of-2.pt'
    {'epoch': 3}
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)  # on another machine than the main process's nobody else makes it
    path = folder / f"paceline-{part}-{rank}-of-{world}.pt"
    with replacing(path) as temporary:
        torch.save(state, temporary)
    return path


def load_rank_state(folder: str | Path, part: str, *, rank: int, world: int) -> dict[str, Any] | None:
    """Return this rank's state of a part; None where the checkpoint has none of any rank."""
    path = Path(folder, f"paceline-{part}-{rank}-of-{world}.pt")
    if path.is_file():
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return loaded
    found = [match for each in Path(folder).glob("paceline-*.pt") if (match := NAME.fullmatch(each.name))]
    worlds = sorted({int(match["world"]) for match in found if match["part"] == part})
    if not worlds:
        return None
    if world not in worlds:
        raise RankStateError(
            f"{folder} holds the {part} of {worlds[0]} ranks (here are {world}): go on with as many, or delete its "
            f"files paceline-{part}-* and go on from the model and rank 0's optimiser alone"
        )
    raise RankStateError(f"{folder} has no {part} state of rank {rank}: copy {path.name} from that rank's machine")
