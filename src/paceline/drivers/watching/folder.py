"""The folder of a watched run: rank 0 takes it, and tells the others.

    1  all ranks say which folder was asked for, and which options: the same, or all raise
    2  rank 0 takes it, or says why not: then all raise; a launch that was restarted goes on with its own
    3  each rank looks whether it sees rank 0's folder; where it does not (another machine, no shared disk), it writes
       beside its own script, and its lines also go through the launch's store into rank 0's folder (`relay`)

A launch is known by torchrun's id and the process that started rank 0, which lives on when it restarts its ranks. (An
id that the user gave names a launch by itself, also when rank 0 moved to another machine.)
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from paceline.distributed.agreement import raise_difference, raise_refusals, refusal_text
from paceline.errors import PacelineError
from paceline.traces.run_folder import FolderTakenError, next_free_folder, removing_unused, take_folder
from paceline.traces.step_times import (
    LONGEST_LINE_BYTES,
    TIMES,
    StepTimes,
    TimesBegan,
    TimesFileError,
    times_path,
    times_record,
)

DEFAULT = Path("runs/watch")
LOOK_BYTES = 64 * 1024
LOOKS, LOOK_SECONDS = 5, 0.2  # a shared disk may show a new file a little later
Gather: TypeAlias = Callable[[str, Any], list[Any]]  # what all ranks say, by rank


class WatchError(PacelineError, ValueError):
    """What cannot be watched, or not there.

    >>> raise WatchError("this model is watched already")
    Traceback (most recent call last):
    paceline.drivers.watching.folder.WatchError: this model is watched already
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedFolder:
    """Where a rank writes: in rank 0's folder, or in one of its own (`folder`), where it does not see that.

    `remote` are the ranks that do not see rank 0's folder. `first_step` goes on from a launch's earlier life.
    `restarted` says whether torchrun has restarted a rank; its own count is one for each machine.
    """

    folder: Path
    shared: Path
    launch: str
    nonce: str
    remote: tuple[int, ...] = ()
    first_step: int = 0
    restarted: bool = False
    gloo: bool = True


def agree_on_folder(
    wanted: str | os.PathLike[str] | None,
    rank: int,
    gather: Gather,
    *,
    options: dict[str, Any] | None = None,
    gloo: bool = True,
) -> WatchedFolder:
    """Take the folder with all ranks, or raise on all of them. `gloo` says whether this rank has it, and then, if all.

    `options` are those of which a difference would have ranks wait for each other in vain.
    """
    asked = "" if wanted is None else os.fspath(wanted)
    said = gather("say where it writes", {"out": asked, "options": options or {}, "gloo": gloo})
    raise_difference(
        [{"out": each["out"]} for each in said],
        "all ranks must watch into the same folder: {who} with out={theirs!r}, {other} with out={ours!r}",
        error=WatchError,
    )
    raise_difference(
        [each["options"] for each in said],
        "all ranks must call watch() with the same {key}: {who} has {theirs}, and {other} has {ours}",
        error=WatchError,
    )
    words, ours = {}, None
    if rank == 0:
        try:
            words = _take(asked)
        except (OSError, ValueError) as error:
            ours = error if isinstance(error, PacelineError) else WatchError(_said(error, asked))
            words = {"refusal": refusal_text(ours)}
    told = gather("take a folder", words)[0]
    raise_refusals([told.get("refusal", "")], ours=ours, error=FolderTakenError)
    shared, nonce = Path(told["folder"]), told["nonce"]
    answers = gather("look for rank 0's folder", [not sees(shared, nonce, told["host"]), is_restarted()])
    remote = [blind for blind, _ in answers]
    if rank == 0:
        with suppress(OSError):
            _sign(shared, nonce).unlink()
    return WatchedFolder(
        folder=_beside(asked, nonce) if remote[rank] else shared,
        shared=shared,
        launch=told["launch"],
        nonce=nonce,
        remote=tuple(number for number, blind in enumerate(remote) if blind),
        first_step=told["first_step"],
        restarted=any(restarted for _, restarted in answers),
        gloo=all(each["gloo"] for each in said),
    )


def sees(folder: Path, nonce: str, host: str) -> bool:
    """Return whether this rank sees the file that rank 0 has left in its folder."""
    for look in range(LOOKS):
        if _sign(folder, nonce).exists():
            return True
        if host == platform.node():
            return False
        if look + 1 < LOOKS:
            time.sleep(LOOK_SECONDS)
    return False


def _take(asked: str) -> dict[str, Any]:
    """Take the folder, on rank 0; return what the others must know of it."""
    launch, first_step = launch_name(), 0
    folder = _own_earlier_folder(Path(asked) if asked else None, launch)
    if folder is None:
        with removing_unused():
            folder = take_folder(Path(asked)) if asked else next_free_folder(DEFAULT)
            (folder / TIMES).mkdir(exist_ok=True)
    else:
        first_step = 1 + max((last_step(path) for path in (folder / TIMES).glob("rank-*.jsonl")), default=-1)
    nonce = uuid.uuid4().hex[:12]
    _sign(folder, nonce).touch()
    return {
        "folder": str(folder.absolute()),
        "nonce": nonce,
        "launch": launch,
        "host": platform.node(),
        "first_step": first_step,
    }


def launch_name() -> str:
    """Return a name that this launch has, also after torchrun has restarted its ranks, and no other launch."""
    number = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"{number}/{platform.node()}/{os.getppid() if 'TORCHELASTIC_RUN_ID' in os.environ else os.getpid()}"


def is_restarted() -> bool:
    """Return whether torchrun has restarted this process."""
    return bool(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0").strip("0"))


def _own_earlier_folder(asked: Path | None, launch: str) -> Path | None:
    """Return the folder that this launch wrote to before it was restarted, if it was."""
    if not is_restarted():
        return None
    candidates = [asked] if asked is not None else _by_number(DEFAULT)
    return next((folder for folder in candidates if _is_of(folder, launch)), None)


def _by_number(first: Path) -> list[Path]:
    """Return the folders that `next_free_folder` has made, the last one first."""
    found, number = [], 1
    while (folder := first if number == 1 else first.with_name(f"{first.name}-{number}")).exists():
        found.append(folder)
        number += 1
    return found[::-1]


def _is_of(folder: Path, launch: str) -> bool:
    began = None
    with suppress(OSError, TimesFileError), times_path(folder, "rank").open("rb") as lines:
        began = times_record(lines.readline(LONGEST_LINE_BYTES))
    if not isinstance(began, TimesBegan):
        return False
    theirs, ours = began.launch.split("/"), launch.split("/")
    return theirs == ours or (len(theirs) == 3 and theirs[0] == ours[0] != "none" and theirs[1] != ours[1])


def last_step(path: Path) -> int:
    """Return the last step that a file of step times holds; -1 if there is none near its end.

    >>> last_step(Path("/nowhere/rank-0.jsonl"))
    -1
    """
    torn = b""
    with suppress(OSError), path.open("rb") as file:
        start = size = file.seek(0, os.SEEK_END)
        while start > max(0, size - LONGEST_LINE_BYTES):
            end, start = start, max(0, start - LOOK_BYTES)
            file.seek(start)
            first, *lines = (file.read(end - start) + torn).splitlines(keepends=True)
            for line in reversed(lines if start else [first, *lines]):
                with suppress(ValueError):
                    record = times_record(line)
                    if isinstance(record, StepTimes):
                        return record.step + record.steps - 1
            torn = first
    return -1


def _sign(folder: Path, nonce: str) -> Path:
    return folder / TIMES / f"seen-{nonce}"


def _beside(asked: str, nonce: str) -> Path:
    """Return the folder of the ranks of a machine that does not see rank 0's."""
    folder = Path(asked) if asked else DEFAULT
    return folder.with_name(f"{folder.name}.{nonce}").absolute()


def _said(error: Exception, asked: str) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    return f"cannot write to {asked or DEFAULT}: {reason}; give another folder, out=..."
