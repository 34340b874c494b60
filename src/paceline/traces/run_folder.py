"""Whose folder is it: one rule for whatever writes a run or results.

    a folder that is named and holds a run or results     refused, before anything is computed
    a folder that is named and does not                   taken
    no folder is named                                    the first of runs/race, runs/race-2, ... that nobody has

Two processes that start at the same moment never take one folder: a name of our choosing is made exclusively, a named
folder is locked for as long as the process lives.

A run that is refused leaves no folder: `removing_unused` removes what was made for it and stayed empty.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import PacelineError
from paceline.traces.journal import TRACE

RESULTS = "results.json"
MOST_RESULTS_BYTES = 100_000_000
HELD = (TRACE, RESULTS, "times/*.jsonl", "checkpoint-[0-9]*", "rank-*/launch", "rank-*/checkpoint-[0-9]*")
_LOCKED: dict[tuple[int, int], int] = {}  # folders that this process has taken: their device and inode, a descriptor
_MADE: list[Path] = []  # folders that this process has made, those around others first


class FolderTakenError(PacelineError, ValueError):
    """A folder that holds a run or results, or that another process writes to.

    >>> raise FolderTakenError("runs/mine holds a run (trace.jsonl)")
    Traceback (most recent call last):
    paceline.traces.run_folder.FolderTakenError: runs/mine holds a run (trace.jsonl)
    """


def check_asked(out: object, resume: object = False) -> None:
    """Refuse an empty name for a run's folder, which would be the working directory, and a `resume` that names one.

    >>> check_asked("")
    Traceback (most recent call last):
    ValueError: out is empty: name a folder, or leave it out (is a variable not set?)
    >>> check_asked(None, "runs/mine")
    Traceback (most recent call last):
    ValueError: resume is True or False (resume='runs/mine'); the folder of the run that goes on is out=
    """
    if out == "":
        raise ValueError("out is empty: name a folder, or leave it out (is a variable not set?)")
    if not isinstance(resume, bool):
        raise ValueError(f"resume is True or False (resume={resume!r:.60}); the folder of the run that goes on is out=")


def check_free(folder: Path) -> None:
    """Raise FolderTakenError if a folder holds a run or results.

    >>> import tempfile
    >>> check_free(Path(tempfile.mkdtemp()))
    """
    found = next((path for pattern in HELD for path in sorted(folder.glob(pattern))), None)
    if found is None:
        return
    name = found.relative_to(folder)
    if found.name == RESULTS:
        raise FolderTakenError(f"{folder} holds results ({name}); give another folder, or move them away")
    raise FolderTakenError(
        f"{folder} holds a run ({name}); give another folder, or go on with it: --resume {folder} for paceline's own "
        "commands, resume=True in Python"
    )


def take_folder(folder: Path) -> Path:
    """Make a folder, or take one that is there and free, and lock it while this process lives.

    >>> import tempfile
    >>> take_folder(Path(tempfile.mkdtemp(), "mine")).name
    'mine'
    """
    make_folder(folder)
    check_free(folder)
    about = folder.stat()
    if (about.st_dev, about.st_ino) in _LOCKED:
        return folder
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FolderTakenError(f"another process writes to {folder}; give another folder") from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return folder
    _LOCKED[about.st_dev, about.st_ino] = descriptor
    return folder


def next_free_folder(wanted: Path) -> Path:
    """Make the first folder of this name that nobody has, and return it.

    >>> import tempfile
    >>> first = Path(tempfile.mkdtemp(), "race")
    >>> next_free_folder(first).name, next_free_folder(first).name
    ('race', 'race-2')
    """
    make_folder(wanted.parent)
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            _MADE.append(folder.absolute())
            return folder
    raise AssertionError("numbers do not end")


def make_folder(folder: Path) -> None:
    """Make a folder and those around it, where they are not there."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    _MADE.extend(path.absolute() for path in reversed(missing))


@contextmanager
def removing_unused() -> Iterator[None]:
    """If what happens inside ends with an error, remove the folders that were made inside and are still empty.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> with suppress(ValueError), removing_unused():
    ...     _ = next_free_folder(place / "runs" / "race")
    ...     raise ValueError("refused")
    >>> list(place.iterdir())
    []
    """
    before = len(_MADE)
    try:
        yield
    except BaseException:
        for path in reversed(_MADE[before:]):
            with suppress(OSError):
                about = path.stat()
                path.rmdir()
                os.close(_LOCKED.pop((about.st_dev, about.st_ino), -1))
        raise
    finally:
        del _MADE[before:]
