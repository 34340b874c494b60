"""Files and folders: reads that cannot be made to wait or to fill the memory, and writes that are atomic.

Whoever opens a file that somebody else named or wrote does it by `open_plain` or `read_plain`: only a plain file is
opened, so a pipe is not waited for and a device is not read without end, and its size is held against a limit first.

A reader of what was written here finds the old content or the new one, never half of either.

A file (`write_file`, `replacing`) is written under a temporary name beside it and renamed; this holds against a process
that is killed, not against a machine that loses power.

A folder (`write_folder`) is whole or absent, whatever stops the process or the machine:

    mkdir  .writing-NAME-PID               nobody reads this: a crash here leaves what was before
    write and fsync each file; last, manifest.json
    fsync  .writing-NAME-PID
    rename NAME -> .replaced-NAME          only where NAME exists already; until the next line, readers take this
    rename .writing-NAME-PID -> NAME       now it is there
    fsync  the parent folder               now it stays
    remove .replaced-NAME

manifest.json holds a format number, the writer's description of the files, each file's size and sha256, and a sha256
of all that. Leftovers of a crash are removed before the next write rather than after it: on a full disk, they are the
room that it needs. A folder has one writer at a time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

FORMAT = 1
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 4 * 2**20
WRITING, REPLACED = ".writing-", ".replaced-"
OPEN_FILE = re.compile(r"/dev/stdin|/(dev|proc/self)/fd/[0-9]+")  # one that this process was given, as by <(command)
_BYTES_AT_ONCE = 1 << 20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_plain(path: str | Path, *, most_bytes: int) -> BinaryIO:
    """Open a file for reading; an OSError says that it is no plain file, or has more than `most_bytes`.

    Links are followed. What is larger than it said is the reader's to see: a file may grow.

    >>> open_plain("/dev/zero", most_bytes=10)
    Traceback (most recent call last):
    OSError: [Errno 22] it is a device, not a plain file: '/dev/zero'
    >>> open_plain(__file__, most_bytes=10)
    Traceback (most recent call last):
    OSError: [Errno 27] it has ... bytes; at most 10 are allowed: ...
    """
    _check_plain(os.stat(path), path)  # before it is opened: opening alone makes some devices do something
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115 - may be a pipe by now
    try:
        found = os.fstat(file.fileno())
        _check_plain(found, path)
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, _too_large(found.st_size, most_bytes), str(path))
    except BaseException:
        file.close()
        raise
    return file


def is_open_file(path: str | Path) -> bool:
    """Return whether a path names what the shell has opened for this process, which lies in no folder.

    >>> is_open_file("/dev/stdin"), is_open_file("/dev/fd/63"), is_open_file("my.toml")
    (True, True, False)
    """
    return OPEN_FILE.fullmatch(str(path)) is not None


def read_plain(path: str | Path, *, most_bytes: int, open_files: bool = False) -> bytes:
    """Return the content of a file; an OSError says that it is no plain file, or has more than `most_bytes`.

    Args:
        open_files: also read what the shell has opened for this process, to its end (`/dev/stdin`, `<(command)`). Only
            for a path from the command line: a file could name them, and would be waited for.

    >>> read_plain(__file__, most_bytes=1_000_000)[:13]
    b'\"\"\"Files and '
    """
    ours = open_files and is_open_file(path)
    data = bytearray()
    with open(path, "rb") if ours else open_plain(path, most_bytes=most_bytes) as file:
        while len(data) <= most_bytes and (part := file.read(min(_BYTES_AT_ONCE, most_bytes + 1 - len(data)))):
            data += part
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than the {most_bytes:,} bytes that are allowed", str(path))
    return bytes(data)


def _check_plain(found: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a plain file", str(path))


def _too_large(size: int, most_bytes: int) -> str:
    return f"it has {size:,} bytes; at most {most_bytes:,} are allowed"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` at the end of the `with`; after an error it is removed instead.

    A link is followed, and what is no plain file (/dev/stdout) is written to as it is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "a.txt")) as temporary:
    ...         _ = temporary.write_text("hello")
    ...         os.listdir(folder) == ["a.txt"]
    ...     os.listdir(folder)
    False
    ['a.txt']
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    # Several processes and threads may write the same file at the same time.
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, text: str | bytes) -> Path:
    """Write a file atomically (text as UTF-8), and return its path. Its folder must exist.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_file(Path(folder, "a.txt"), "hello").read_text()
    'hello'
    """
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def write_folder(
    folder: Path, name: str, files: Mapping[str, bytes | Iterable[bytes]], *, about: Mapping[str, Any]
) -> Path:
    """Write the folder `folder/name` with these files, replacing the folder of that name if there is one.

    A large file may come piece by piece. After an OSError the previous folder is still in place.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = write_folder(Path(folder), "greeting", {"a.txt": b"hello"}, about={})
    ...     written = write_folder(Path(folder), "greeting", {"a.txt": b"good day"}, about={})
    ...     written.name, sorted(os.listdir(written)), os.listdir(folder)
    ('greeting', ['a.txt', 'manifest.json'], ['greeting'])
    """
    _make_folder(folder)
    clear_leftovers(folder)
    temporary = folder / f"{WRITING}{name}-{os.getpid()}"
    try:
        temporary.mkdir()
        sums = {
            file: _write_file(temporary / file, [data] if isinstance(data, bytes) else data)
            for file, data in files.items()
        }
        manifest = _sealed({"format": FORMAT, "about": dict(about), "files": sums})
        if len(manifest) > MOST_MANIFEST_BYTES:
            raise ValueError(f"{MANIFEST} would have {len(manifest)} bytes; at most {MOST_MANIFEST_BYTES} are allowed")
        _write_file(temporary / MANIFEST, manifest)
        _sync_folder(temporary)
        _put_in_place(temporary, folder / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder / name


def read_folder(path: Path, most_bytes: Mapping[str, int | None]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the description (`about`) that was written with a folder, and the content of its files.

    Args:
        most_bytes: the names of the files that the folder must have, each with its largest allowed size or None.

    Raises:
        ValueError: a file is missing, too large or altered. Nothing but the manifest has been parsed by then.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_folder(Path(folder), "greeting", {"a.txt": b"hello"}, about={"language": "en"})
    ...     read_folder(path, {"a.txt": 100})
    ...     _ = (path / "a.txt").write_text("hell0")
    ...     read_folder(path, {"a.txt": 100})
    Traceback (most recent call last):
    ValueError: a.txt was altered (sha256 differs)
    """
    with _opened_folder(path) as folder:
        manifest = _unsealed(_read_file(folder, MANIFEST, most_bytes=MOST_MANIFEST_BYTES))
        if manifest["files"].keys() != most_bytes.keys():
            raise ValueError(f"{MANIFEST} names {sorted(manifest['files'])}, not {sorted(most_bytes)}")
        files = {}
        for name, expected in manifest["files"].items():
            files[name] = _read_file(folder, name, most_bytes=most_bytes[name], exact_bytes=expected["size"])
            if hashlib.sha256(files[name]).hexdigest() != expected["sha256"]:
                raise ValueError(f"{name} was altered (sha256 differs)")
        return manifest["about"], files


def stored_folders(folder: Path) -> dict[str, Path]:
    """Return what `folder` holds, by name; a folder that a crash left half replaced is found under `.replaced-NAME`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("first", ".replaced-first", ".replaced-second", ".writing-third-4711"):
    ...         (Path(folder) / name).mkdir()
    ...     sorted((name, path.name) for name, path in stored_folders(Path(folder)).items())
    [('first', 'first'), ('second', '.replaced-second')]
    """
    entries = list(folder.iterdir())
    aside = {path.name.removeprefix(REPLACED): path for path in entries if path.name.startswith(REPLACED)}
    return aside | {path.name: path for path in entries if not path.name.startswith(".")}


def discard(path: Path) -> None:
    """Remove a file, link or folder, renamed first so that no reader meets half of it.

    An OSError is ignored: what stays is a leftover, which the next write removes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     discard(write_folder(Path(folder), "greeting", {"a.txt": b"hello"}, about={}))
    ...     os.listdir(folder)
    []
    """
    with suppress(OSError):
        _remove(path.rename(path.with_name(f"{WRITING}{path.name}")))


# -- the manifest ------------------------------------------------------------------------------------------------------


def _sealed(manifest: dict[str, Any]) -> bytes:
    seal = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": seal}, indent=1).encode()


def _unsealed(data: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(data)
        body = {key: manifest[key] for key in manifest if key != "sha256"} if isinstance(manifest, dict) else {}
        altered = _sealed(body) != data
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is no JSON that can be read") from error
    if body.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}, the only one read here")
    if altered:
        raise ValueError(f"{MANIFEST} was altered (sha256 differs)")
    # A seal can be forged, so the form is looked at as well.
    about, files = body.get("about"), body.get("files")
    if not isinstance(about, dict) or not isinstance(files, dict):
        raise ValueError(f"{MANIFEST} lacks its parts")
    for name, expected in files.items():
        if not isinstance(expected, dict) or [*map(type, map(expected.get, ("size", "sha256")))] != [int, str]:
            raise ValueError(f"{MANIFEST} gives {name!r} no size and sha256")
    return body


# -- reading -----------------------------------------------------------------------------------------------------------


@contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor through which only files of this very folder are read, whatever becomes of its name."""
    if path.is_symlink():
        raise ValueError(f"{path.name} is a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_file(folder: int, name: str, *, most_bytes: int | None, exact_bytes: int | None = None) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise ValueError(f"{name} is not a plain file")
        # It may be another file by now: O_NOFOLLOW follows no link, and O_NONBLOCK waits for no pipe.
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if exact_bytes is not None and size != exact_bytes:
                raise ValueError(f"{name} has {size} bytes, not the {exact_bytes} that were written")
            if most_bytes is not None and size > most_bytes:
                raise ValueError(f"{name} has {size} bytes; at most {most_bytes} are allowed")
            return file.read(size)
    except FileNotFoundError as error:
        raise ValueError(f"{name} is missing") from error
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error


# -- writing -----------------------------------------------------------------------------------------------------------


def _make_folder(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    if not missing and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        _sync_folder(path.parent)


def clear_leftovers(folder: Path) -> None:
    """Remove what a crash left half-written in a folder that nobody else writes to, and put back what it had set aside.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("first", ".replaced-first", ".replaced-second", ".writing-third-4711"):
    ...         (Path(folder) / name).mkdir()
    ...     clear_leftovers(Path(folder))
    ...     sorted(os.listdir(folder))
    ['first', 'second']
    """
    for path in list(folder.iterdir()):
        if path.name.startswith(WRITING):
            _remove(path)
        elif path.name.startswith(REPLACED):
            final = path.with_name(path.name.removeprefix(REPLACED))
            if os.path.lexists(final):
                _sync_folder(folder)  # the crash may have come before this, and `final` must outlive `path`
                discard(path)
            else:
                path.rename(final)


def _write_file(path: Path, content: bytes | Iterable[bytes]) -> dict[str, Any]:
    """Write a file to the disk, and return its size and sha256."""
    size, digest = 0, hashlib.sha256()
    with open(path, "xb") as file:
        for piece in (content,) if isinstance(content, bytes) else content:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(temporary: Path, final: Path) -> None:
    aside = final.with_name(f"{REPLACED}{final.name}")
    if os.path.lexists(final):
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        with suppress(OSError):
            aside.rename(final)
        raise
    _sync_folder(final.parent)
    discard(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
