"""The base of every error that paceline raises on purpose.

A class says besides what kind of error it is where users expect a built-in one, so both of these catch it:

    except paceline.PacelineError       anything that paceline refuses or gives up
    except ValueError                   as for a bad value of any other library

Any other error that reaches a command may be of the model, data or loss that paceline was given; `raised_in` tells.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).parent) + os.sep
_OF_A_MODEL = ("torch.nn.modules.", "torch.nn.functional", "torch.autograd")


class PacelineError(Exception):
    """What paceline refuses or gives up, in words for the person who asked.

    >>> import paceline
    >>> issubclass(paceline.RecipeError, PacelineError), issubclass(paceline.RecipeError, ValueError)
    (True, True)
    """


class PacelineWarning(UserWarning):
    """What somebody should know of a run that paceline does not refuse; commands print it as a line of their own.

    >>> issubclass(PacelineWarning, UserWarning)
    True
    """


def warn(text: str) -> None:
    """Print a line of warning; of the ranks of a launch the first does."""
    if os.environ.get("RANK", "0") == "0":
        print(f"paceline: warning: {text}", file=sys.stderr)


def show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Print what changes for a user as a line of ours, without the place in our code; other warnings as Python does.

    Commands, and the workers that they start, put it in the place of `warnings.showwarning`.
    """
    if issubclass(category, FutureWarning | PacelineWarning):
        warn(str(message))
    else:
        print(warnings.formatwarning(message, category, *place[:2]), end="", file=sys.stderr)


def raised_in(error: BaseException) -> str:
    """Return where in a given model, data set or loss an error was raised, or "" if it was not raised in one.

    Given is what lies neither in paceline nor among installed packages, and what a model of torch's layers computes.
    An error of another process brings the answer along as its attribute of this name.

    >>> try:
    ...     int("seven")
    ... except ValueError as error:
    ...     raised_in(error)
    ''
    """
    given, in_model = str(vars(error).get("raised_in", "")), ""
    library = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if path.startswith((_OURS, "<")):  # "<frozen importlib...>", "<string>" of a dataclass
            continue
        if not path.startswith(library) and "-packages" + os.sep not in path:
            given = f"{os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path}, line {line}"
        elif str(frame.f_globals.get("__name__")).startswith(_OF_A_MODEL):
            in_model = "the model"
    return given or in_model


def is_plain(error: BaseException) -> bool:
    """Return whether an error's own words say everything: paceline's errors do, and those of the operating system.

    A ValueError counts among paceline's, unless a given model, data set or loss has raised it.
    """
    plain = isinstance(error, OSError | MemoryError | ValueError) and not raised_in(error)
    return plain or isinstance(error, PacelineError)


def in_a_line(error: BaseException) -> str:
    """Return what a command prints of an error: its words, and whose they are if they are not paceline's.

    >>> in_a_line(ValueError("k must be at least 1 (k=0)")), in_a_line(KeyError("k"))
    ('k must be at least 1 (k=0)', "KeyError: 'k'")
    """
    text, place = " ".join(str(error).split()), raised_in(error)
    if is_plain(error):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}" + (f" (raised in {place})" if place else "")
