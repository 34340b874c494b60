"""Lines of JSON that carry a checksum, as files have them that a killed process leaves readable.

    {"kind":"worker_left","at_seconds":9.5,"worker":2,"reason":"no sign of life for 5 s","crc":"31f7e729"}

The checksum is the CRC-32 of all bytes before `,"crc"`. It finds what a disk or a copy has altered: every flipped bit,
every run of up to 32. In a journal it goes on from the checksum of the line before, which it then depends on too: so a
line that is missing, that stands twice, or that has moved is found at the line behind it.

    line 1: CRC-32 of its bytes      line 2: CRC-32 of its bytes, begun with the checksum of line 1      ...

It is no signature: whoever may write the file can also write the checksum, of any kind.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

ALTERED = (
    "the line is not as it was written, or a line before it is missing, stands twice or has moved (its checksum does "
    "not fit, or is missing): take the file from a copy"
)


def checked_line(values: dict[str, Any], before: int = 0) -> bytes:
    """Return the line of some plain values, with its checksum and its line end.

    `before` is the checksum of the line before, in a file whose lines are chained.

    >>> checked_line({"kind": "checkpointed", "version": 7})
    b'{"kind":"checkpointed","version":7,"crc":"9b9abb8d"}\\n'
    """
    return with_checksum(json.dumps(values, separators=(",", ":"), allow_nan=False).encode("ascii")[:-1], before)


def with_checksum(body: bytes, before: int = 0) -> bytes:
    """Return the line of an object that is JSON already, but for its closing brace.

    >>> with_checksum(b'{"kind":"checkpointed","version":7') == checked_line({"kind": "checkpointed", "version": 7})
    True
    """
    return body + _checksum(body, before) + b"\n"


def has_checksum(line: bytes, before: int = 0) -> bool:
    """Return whether a line ends with the checksum of itself; its line end may be left out.

    >>> line = checked_line({"kind": "checkpointed", "version": 7})
    >>> has_checksum(line), has_checksum(line.replace(b"7", b"6")), has_checksum(line, before=0x31F7E729)
    (True, False, False)
    """
    whole = line.removesuffix(b"\n")
    return whole[-_CHECKSUM_BYTES:] == _checksum(whole[:-_CHECKSUM_BYTES], before)


def checksum_of(line: bytes) -> int:
    """Return the checksum that a whole line ends with, whether it fits or not; ValueError if there is none.

    >>> f"{checksum_of(checked_line({'kind': 'checkpointed', 'version': 7})):08x}"
    '9b9abb8d'
    """
    end = line.removesuffix(b"\n")[-_CHECKSUM_BYTES:]
    try:
        found = int(end[8:16], 16)
    except ValueError:
        found = 0
    if end != _last_field(found):
        raise ValueError(ALTERED)
    return found


def _checksum(body: bytes, before: int) -> bytes:
    """Return the end of the line that begins with `body`: its last field, and the closing brace."""
    return _last_field(zlib.crc32(body, before))


def _last_field(checksum: int) -> bytes:
    return b',"crc":"%08x"}' % checksum


_CHECKSUM_BYTES = len(_last_field(0))
