"""The error for an unknown name: it lists the choices, and the nearest one first."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NAMES_ELSEWHERE = {("strategy", "ddp"): "for synchronous training as DDP does it, give 'ssgd'; "}
"""What other tools call one of our choices: (what is chosen, their name) -> the hint."""


def unknown(kind: str, name: object, choices: Iterable[str]) -> ValueError:
    """Return the error for a name that is in no table.

    >>> raise unknown("strategy", "fastestk", ["full", "fastest-k", "lgc"])
    Traceback (most recent call last):
    ValueError: unknown strategy 'fastestk'; did you mean 'fastest-k'? choose from full, fastest-k, lgc
    """
    names = list(choices)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else NAMES_ELSEWHERE.get((kind, str(name).lower()), "")
    return ValueError(f"unknown {kind} {name!r}; {hint}choose from {', '.join(names)}")
