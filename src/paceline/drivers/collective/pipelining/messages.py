"""What ranks tell each other in words: JSON in a row of fixed length, so that nobody has to ask how long it is.

    row of rank r    {"what": "take a step", "inputs": 12, "refusal": ""}  and spaces up to WORDS_BYTES

What comes from outside (an error's text, a class's name) is made plain first: printable ASCII that JSON writes as it
is, so that its length is known before it is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed import first_line
from paceline.pipeline import PipelineError

WORDS_BYTES = 1024
MOST_CHARACTERS = 600  # of a refusal
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """A text of at most so many characters, each of which is one byte in JSON.

    >>> plain("\\x1b[31mno\\x1b[0m   such \\"layer\\"\\0", 12)
    "no such 'lay"
    """
    words = " ".join(_COLOURS.sub("", text).split()).replace("\\", "/").replace('"', "'")
    return "".join(each if each.isascii() else "?" for each in words if each.isprintable())[:most]


def refusal_of(error: BaseException | str) -> str:
    """An error as words for the others.

    >>> refusal_of(ValueError("no such layer"))
    'no such layer'
    """
    return plain(error if isinstance(error, str) else str(error).strip() or type(error).__name__)


def written(words: Mapping[str, Any]) -> torch.Tensor:
    """Words as a row.

    >>> read(written({"what": "take a step"}))
    {'what': 'take a step'}
    """
    text = json.dumps(words).encode()
    if len(text) > WORDS_BYTES:
        raise PipelineError(f"words must have at most {WORDS_BYTES} bytes ({len(text)})")
    return torch.frombuffer(bytearray(text.ljust(WORDS_BYTES)), dtype=torch.uint8)


def read(row: torch.Tensor) -> dict[str, Any]:
    """What a row says.

    >>> read(torch.tensor(list(b'{"inputs": 3}  '), dtype=torch.uint8))
    {'inputs': 3}
    """
    words: dict[str, Any] = json.loads(bytes(row.tolist()))
    return words


class Message:
    """A tensor on its way to or from a rank. A wait that ends without it closes the group's connections."""

    def __init__(self, start: Any, tensor: torch.Tensor, rank: int, group: dist.ProcessGroup, tag: int = 0) -> None:
        self._tensor = tensor  # it must live as long
        self._work, self._why = None, ""
        try:
            self._work = start(tensor, rank, group=group, tag=tag)
        except RuntimeError as error:
            self._why = first_line(error)

    @property
    def refused(self) -> bool:
        """Whether there is no connection any more."""
        return self._work is None

    def wait(self, seconds: float) -> str:
        """Why it did not come; nothing if it did."""
        if self._work is not None:
            try:
                self._work.wait(timedelta(seconds=max(0.001, seconds)))
            except RuntimeError as error:
                self._why = first_line(error)
        return self._why
