"""Where a run goes: the folder that was named, or the next that is free."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path

from paceline.cli.options import UsageError
from paceline.traces.journal import TRACE

RUNS = "runs"


def new_folder(named: str, command: str) -> Path:
    """A folder for a new run; one that holds a run is refused.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     new_folder(f"{folder}/mine", "train").name
    'mine'
    """
    folder = Path(named or Path(RUNS, command))
    try:
        if not named:
            return _claim(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror or error}; give another --out") from None
    if (folder / TRACE).exists() or any(folder.glob("rank-*/checkpoint-*")):
        raise UsageError(f"{folder} holds a run; give another --out, or go on with it: --resume {folder}")
    return folder


def _claim(wanted: Path) -> Path:
    """The first folder of this name that nobody has: made at once, so that two runs never get the same."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("numbers do not end")
