"""Named members of a tar archive, read into memory.

Nothing is written to disk, so no member's path can lead anywhere; links and devices are passed over;
and the archive is not unpacked further than a bound.
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import IO, cast

from paceline.data.errors import DatasetError
from paceline.data.reading import BoundedReader, naming, read_up_to

LARGEST_MEMBERS = 100


def read_members(
    path: Path, names: Collection[str], *, largest_member_bytes: int, largest_bytes: int
) -> dict[str, bytes]:
    """The contents of those files of a .tar.gz whose last path component is among `names`; all must be there.

    >>> read_members(Path("/nowhere.tar.gz"), ["a"], largest_member_bytes=10, largest_bytes=100)
    Traceback (most recent call last):
    paceline.data.errors.DatasetError: cannot read /nowhere.tar.gz: No such file or directory
    """
    found: dict[str, bytes] = {}
    with naming(path), gzip.open(path, "rb") as unpacked:
        bounded = cast(IO[bytes], BoundedReader(unpacked, largest_bytes=largest_bytes))
        with tarfile.open(fileobj=bounded, mode="r|") as archive:
            for count, member in enumerate(archive, start=1):
                if count > LARGEST_MEMBERS:
                    raise DatasetError(f"it has more than the {LARGEST_MEMBERS} members expected at most")
                name = PurePosixPath(member.name).name
                if member.isreg() and name in names:
                    _add(found, name, archive, member, largest_member_bytes)
        missing = sorted(set(names) - set(found))
        if missing:
            raise DatasetError(f"it lacks {', '.join(missing)}")
    return found


def _add(
    found: dict[str, bytes], name: str, archive: tarfile.TarFile, member: tarfile.TarInfo, largest_bytes: int
) -> None:
    if name in found:
        raise DatasetError(f"it holds {name} twice")
    if member.size > largest_bytes:
        raise DatasetError(f"{name} in it has {member.size} bytes; at most {largest_bytes} are accepted")
    stream = archive.extractfile(member)
    found[name] = b"" if stream is None else read_up_to(stream, largest_bytes)
    if len(found[name]) != member.size:
        raise DatasetError(f"it ends inside {name}, after {len(found[name])} of {member.size} bytes")
