"""Parameters that were renamed: the old name is accepted for one release, with a line of warning."""

from __future__ import annotations

import warnings
from typing import Any


def renamed(old_name: str, old: Any, new_name: str, new: Any, *, stacklevel: int = 3) -> Any:
    """Return the value of a parameter that may have been given by its old name; None if it was given by neither.

    `stacklevel` is that of `warnings.warn`: 3 points at the caller of the function that has the parameter.

    >>> renamed("folder", None, "out", "runs/mine")
    'runs/mine'
    >>> renamed("folder", "runs/old", "out", "runs/mine")
    Traceback (most recent call last):
    TypeError: folder is the old name of out: give out alone
    """
    if old is None:
        return new
    if new is not None:
        raise TypeError(f"{old_name} is the old name of {new_name}: give {new_name} alone")
    warnings.warn(
        f"{old_name} is called {new_name} now; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return old
