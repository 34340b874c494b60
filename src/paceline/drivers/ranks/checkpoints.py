"""The checkpoints of a rank: each rank keeps its own, and all go on from the newest that every one of them has.

    folder/rank-0/checkpoint-00000050/    model, optimiser, schedule, its side of the averaging, how far it has drawn
    folder/rank-0/launch                  the launch that began to keep them
    folder/rank-1/checkpoint-00000050/

Ranks on several machines may each have a folder of their own. All ranks write a checkpoint after the same round. A rank
that dies while it writes still has its checkpoint before that one, and so do the others.

    rank 0    40   50   60         rank 1 died before it had written 60: all go on from 50, and rank 0's 60 is removed.
    rank 1    40   50              (The next attempt writes a 60 that differs; the two must not be mixed.)

After a death, torchrun starts the ranks again with the same command, without --resume. So a rank goes on by itself from
checkpoints that its own launch has written (the file `launch` says which launch that was). Checkpoints of another
launch are used only with --resume; without it the run is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from paceline.distributed.agreement import raise_refusals
from paceline.distributed.stores import StoreGather
from paceline.files import discard, read_plain, write_file
from paceline.traces.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from paceline.traces.run_settings import difference, remedy, with_defaults
from paceline.training.plain import with_tensors, without_tensors
from paceline.training.saved_state import refusing

KEPT = 2
OFFERED = 8
LAUNCH = "launch"
ROUNDS = "=rounds"  # in a state that was read: the number of its checkpoint
MOST_LAUNCH_BYTES = 100


class RankCheckpoints:
    """Writes and finds the checkpoints of one rank; the number of one is the rounds that were done.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints = RankCheckpoints(Path(folder), rank=1)
    ...     checkpoints.keep(50, {"model": {"weight": torch.ones(1)}, "draws": 7})
    ...     checkpoints.held(), checkpoints.read(50)
    ([50], {'model': {'weight': tensor([1.])}, 'draws': 7})
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.run_folder, self.folder = folder, folder / f"rank-{rank}"

    def keep(self, rounds: int, state: dict[str, Any]) -> None:
        """Write a state of nested plain values and tensors."""
        tensors: dict[str, torch.Tensor] = {}
        plain = without_tensors(state, "state", tensors)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(self.folder, Checkpoint(version=rounds, tensors=tensors, state=plain), keep=KEPT)

    def read(self, rounds: int) -> dict[str, Any]:
        """Return a state that was kept; CheckpointError if it is not whole."""
        checkpoint = read_checkpoint(self.folder / f"checkpoint-{rounds:08d}")
        state: dict[str, Any] = with_tensors(checkpoint.state, checkpoint.tensors)
        return state

    def held(self) -> list[int]:
        """Return the rounds of the checkpoints that can be read, newest first."""
        found = []
        for path in self._paths():
            with suppress(ValueError):
                found.append(read_checkpoint(path).version)
        return found

    @property
    def empty(self) -> bool:
        """Whether there is no checkpoint, not even one that cannot be read."""
        return not self._paths()

    def forget_after(self, rounds: int) -> None:
        """Remove newer checkpoints: they are of an attempt that has ended, and this one gets to those rounds anew."""
        for path in self._paths("*checkpoint-[0-9]*"):  # what a crash left half replaced as well: it would come back
            if int(path.name.rpartition("-")[2]) > rounds:
                discard(path)

    def _paths(self, pattern: str = "checkpoint-[0-9]*") -> list[Path]:
        found = (path for path in self.folder.glob(pattern) if path.name.rpartition("-")[2].isdecimal())
        return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)

    @property
    def launch(self) -> str:
        """The launch that began to keep here; "" if none has."""
        try:
            return read_plain(self.folder / LAUNCH, most_bytes=MOST_LAUNCH_BYTES).decode(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def claim(self, launch: str) -> None:
        """Record that what is kept here from now on is of this launch."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_file(self.folder / LAUNCH, f"{launch}\n")

    def claim_again(self, launch: str) -> bool:
        """Claim the folder again if it was deleted or moved, and return whether it was; ValueError if others have it.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     RankCheckpoints(Path(folder), rank=0).claim_again("ours"), RankCheckpoints(Path(folder), 0).launch
        (True, 'ours')
        """
        found = self.launch
        if found and found != launch:
            raise ValueError(f"{self.run_folder} is another run's now: nothing more of this run is written there")
        if not found:
            self.claim(launch)
        return not found


def agreed_start(
    checkpoints: RankCheckpoints,
    ranks: StoreGather,
    *,
    resume: bool,
    recipe: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return this rank's checkpoint of the newest round of which every rank has one; None if the run starts from zero.

    Newer checkpoints are removed. If one rank refuses (the folder holds another run, or the recipe differs), all ranks
    raise the same ValueError, and nothing is changed. `defaults` are the values of settings that a stored recipe lacks
    because they did not exist when its run began. All ranks must call it.
    """
    ours, held = checkpoints.launch == ranks.launch, checkpoints.held()[:OFFERED]
    refused, folder = "", checkpoints.run_folder
    if not (resume or ours or checkpoints.empty):
        refused = f"{folder} holds a run; give another --out, or go on with it: --resume {folder}"
    elif not held and not checkpoints.empty:
        refused = f"no checkpoint in {checkpoints.folder} can be read"  # and starting from zero would remove them
    offers = ranks.gather("say which checkpoints it has", {"held": held, "refused": refused, "ours": ours})
    raise_refusals([offer["refused"] for offer in offers])
    # Some ranks may have no checkpoint though all have been in this launch: it died while they wrote their first one.
    in_first = not resume and all(offer["ours"] for offer in offers)
    rounds = newest_common([offer["held"] for offer in offers], begin_anew=in_first)
    state = None
    if rounds is not None:
        state, refused = _read(checkpoints, rounds, recipe, defaults or {})
        raise_refusals(ranks.gather("read its checkpoint", refused))
    checkpoints.forget_after(-1 if rounds is None else rounds)
    if not ours:
        checkpoints.claim(ranks.launch)
    return state


def _read(
    checkpoints: RankCheckpoints, rounds: int, recipe: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """Return a state, or why it is refused."""
    try:
        with refusing(f"the checkpoint of round {rounds} in {checkpoints.folder}"):
            state = {**checkpoints.read(rounds), ROUNDS: rounds}
            different = difference(with_defaults(state["recipe"], defaults), recipe)
    except (ValueError, OSError) as error:
        return None, str(error)
    if different:
        helps = f"; {remedy(different)}" if different.startswith("rounds ") else ""
        name = f"the checkpoint of round {rounds} in {checkpoints.run_folder}"
        return None, f"{name} is of another recipe: {different}{helps}"
    return state, ""


def newest_common(held: Sequence[Sequence[int]], *, begin_anew: bool = False) -> int | None:
    """Return the newest round of which all ranks have a checkpoint; None if no rank has any checkpoint.

    With `begin_anew` also None if some rank has none at all; otherwise no common round is a ValueError.

    >>> newest_common([[60, 50], [50, 40]])
    50
    >>> newest_common([[10], []])
    Traceback (most recent call last):
    ValueError: there is no checkpoint that all ranks have: rank 1 lacks that of round 10; copy its folder ...
    """
    rows = [set(row) for row in held]
    common = set.intersection(*rows)
    if common:
        return max(common)
    without = next((rank for rank, row in enumerate(rows) if not row), None)
    if not any(rows) or (begin_anew and without is not None):
        return None
    newest = max(set.union(*rows))
    lacks = without if without is not None else next(rank for rank, row in enumerate(rows) if newest not in row)
    raise ValueError(
        f"there is no checkpoint that all ranks have: rank {lacks} lacks that of round {newest}; "
        "copy its folder to where it runs, or begin anew in another folder"
    )
