"""What each rank keeps of a part in a checkpoint of Trainer's: one file for each rank, beside Trainer's own.

    checkpoint-500/paceline-averaging-0-of-4.pt     averaging's state of rank 0, and its optimiser's
    checkpoint-500/paceline-averaging-1-of-4.pt     Trainer keeps the random numbers of ranks in the same way
    checkpoint-500/rng_state_1.pth

Trainer saves model and optimiser of its main process alone. That is enough where all ranks are equal; codecs' memories,
the optimisers of ranks that average, and how far a sampler was observed are each rank's own.

A rank that could not write or read its file would raise alone, and the others would wait for it in their next step. So
ranks tell each other (paceline.distributed.agreement), and all raise. Trainer's main process deletes old checkpoints
as soon as it has saved itself; it waits for the others first:

    rank 0    rng_state_0.pth  compression  pruning ┐ one meeting:     │ trainer_state.json, old checkpoints deleted
    rank 1    rng_state_1.pth  compression  pruning ┘ all have written │
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.distributed.agreement import (
    current_group,
    gather_rows,
    raise_difference,
    raise_refusals,
    refusal_text,
)
from paceline.errors import PacelineError
from paceline.files import replacing
from paceline.huggingface.hooks import around

if TYPE_CHECKING:
    from transformers import Trainer

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


# -- all ranks, or none ------------------------------------------------------------------------------------------------


def load_rank_state_together(
    folder: str | Path, part: str, load: Callable[[dict[str, Any]], None] | None, *, rank: int, world: int
) -> dict[str, Any] | None:
    """Return this rank's state of a part, as `load_rank_state` does, loaded by `load`; one rank raises, so all raise.

    All ranks must call it; `load` must not wait for others. None is returned on all ranks, or on none.
    """
    state, refusal = None, None
    try:
        state = load_rank_state(folder, part, rank=rank, world=world)
        if state is not None and load is not None:
            load(state)
    except Exception as error:  # the others must hear of it: they would wait
        refusal = error
    found = agreed_words(refusal, {f"{part} state": "none" if state is None else "saved"})
    raise_difference(
        found,
        f"all ranks must go on from the same checkpoint, and in {folder} the {{key}} of {{who}} is {{theirs}}, that of "
        f"{{other}} {{ours}}: copy the files paceline-{part}-* from each rank's machine",
        reference=0,
        error=RankStateError,
    )
    return state


def save_with_checkpoints(trainer: Trainer, part: str, take_state: Callable[[], dict[str, Any] | None]) -> None:
    """Let each checkpoint of a trainer's have what `take_state()` returns on each rank; None is not saved.

    Ranks meet once in a checkpoint, when all parts are written; all raise where one could not write.

    >>> import tempfile, transformers
    >>> class Trainer:
    ...     args = transformers.TrainingArguments(tempfile.mkdtemp(), use_cpu=True)
    ...
    ...     def _save_rng_state(self, output_dir):
    ...         pass
    >>> trainer = Trainer()
    >>> save_with_checkpoints(trainer, "pruning", lambda: {"epoch": 3})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trainer._save_rng_state(folder)
    ...     load_rank_state(folder, "pruning", rank=0, world=1)
    {'epoch': 3}
    """
    if not hasattr(trainer, "_paceline_states"):
        trainer._paceline_states = {}
        around(trainer, "_save_rng_state", functools.partial(_save_all, trainer))
    trainer._paceline_states[part] = take_state


def _save_all(trainer: Trainer, plain: Callable[[str], None], output_dir: str) -> None:
    refusal = None
    try:
        plain(output_dir)
        for part, take_state in trainer._paceline_states.items():
            if (state := take_state()) is not None:
                rank, world = trainer.args.process_index, trainer.args.world_size
                save_rank_state(output_dir, part, state, rank=rank, world=world)
    except Exception as error:  # the others must hear of it: they would wait
        refusal = error
    agreed_words(refusal, {})


def agreed_words(
    refusal: Exception | None, words: dict[str, Any], *, error: type[Exception] = RankStateError
) -> list[dict[str, Any]]:
    """Return the words of all ranks, or raise on all of them; ranks wait as long as Trainer's `ddp_timeout` says."""
    group = current_group()
    if group is None:
        raise_refusals([], ours=refusal)
        return [words]
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    rows = gather_rows({"refusal": "" if refusal is None else refusal_text(refusal), "words": words}, group, device)
    raise_refusals([row["refusal"] for row in rows], ours=refusal, error=error)
    return [row["words"] for row in rows]
