"""Lines of JSON that carry the checksum of themselves, as files have them that a killed process leaves readable.

    {"kind":"worker_left","at_seconds":9.5,"worker":2,"reason":"no sign of life for 5 s","crc":"31f7e729"}

The checksum is the CRC-32 of all bytes before `,"crc"`. It finds what a disk or a copy has altered: every flipped bit,
every run of up to 32. It is no signature: whoever may write the file can also write the checksum, of any kind.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

ALTERED = "the line is not as it was written (its checksum does not fit, or is missing): take the file from a copy"


def checked_line(values: dict[str, Any]) -> bytes:
    """Return the line of some plain values, with its checksum and its line end.

    >>> checked_line({"kind": "checkpointed", "version": 7})
    b'{"kind":"checkpointed","version":7,"crc":"9b9abb8d"}\\n'
    """
    return with_checksum(json.dumps(values, separators=(",", ":"), allow_nan=False).encode("ascii")[:-1])


def with_checksum(body: bytes) -> bytes:
    """Return the line of an object that is JSON already, but for its closing brace.

    >>> with_checksum(b'{"kind":"checkpointed","version":7') == checked_line({"kind": "checkpointed", "version": 7})
    True
    """
    return body + _checksum(body) + b"\n"


def has_checksum(line: bytes) -> bool:
    """Return whether a line ends with the checksum of itself; its line end may be left out.

    >>> line = checked_line({"kind": "checkpointed", "version": 7})
    >>> has_checksum(line), has_checksum(line.replace(b"7", b"6"))
    (True, False)
    """
    whole = line.removesuffix(b"\n")
    return whole[-_CHECKSUM_BYTES:] == _checksum(whole[:-_CHECKSUM_BYTES])


def claims_checksum(line: bytes) -> bool:
    """Return whether a line ends with what looks like a checksum, also one that does not fit.

    >>> claims_checksum(b'{"kind":"checkpointed","crc":"00000000"}')
    True
    """
    return b',"crc":"' in line[-_CHECKSUM_BYTES - 1 :]


def _checksum(body: bytes) -> bytes:
    """Return the end of the line that begins with `body`: its last field, and the closing brace."""
    return b',"crc":"%08x"}' % zlib.crc32(body)


_CHECKSUM_BYTES = len(_checksum(b""))
