"""Checkpoints: read back bit for bit or refused, and the one before stays until the new one is whole.

    folder/checkpoint-00000120/
      tensors.safetensors   the tensors; no pickle, so reading one runs nothing
      state.json            plain values
      manifest.json         version, order of the tensors, size and sha256 of both files

`paceline.files` writes a folder whole or not at all. Reading trusts nothing: sizes and checksums are looked at
before anything is parsed, links are not followed, and a manifest can name no file but the two above.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from paceline.decoding import parse_object
from paceline.errors import PacelineError
from paceline.files import discard, read_folder, stored_folders, write_folder

TENSORS, STATE = "tensors.safetensors", "state.json"
MOST_STATE_BYTES = 64 * 2**20
PIECE_BYTES = 2**19


class CheckpointError(PacelineError, ValueError):
    """A checkpoint that cannot be trusted, or values that no checkpoint can hold.

    >>> issubclass(CheckpointError, ValueError)
    True
    """


class CheckpointWriteError(PacelineError, OSError):
    """A checkpoint that the disk did not take; its cause is the OSError that stopped it.

    >>> issubclass(CheckpointWriteError, OSError)
    True
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A model after `version` steps: its tensors, and the rest of its state as plain JSON values.

    >>> Checkpoint(version=120, tensors={"weight": torch.zeros(2)}, state={"lr": 0.1}).state["lr"]
    0.1
    """

    version: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


class Snapshot:
    """Tensors that a thread writes to a file while they are in use: nobody changes them before they are read.

    Whoever is about to change them calls `settle`, which waits for the thread, and copies what is left if that takes
    too long. So no copy of a model is needed while the disk is quick, and none is waited for long if it is not.

    >>> snapshot = Snapshot({"weight": torch.ones(2)})
    >>> snapshot.settle(0.0)
    >>> len(b"".join(snapshot.pieces())) > 8
    True
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._left = dict(tensors)
        self._current = torch.zeros(0, dtype=torch.uint8)
        self._lock = threading.Lock()
        self.read = threading.Event()  # all of it, or copied
        self._header, self._order = _safetensors_header(tensors)

    def pieces(self) -> Iterator[bytes]:
        """Yield the tensors as the bytes of a safetensors file."""
        yield self._header
        for name in self._order:
            with self._lock:
                self._current = _flat_bytes(self._left.pop(name))
            for start in range(0, self._current.numel(), PIECE_BYTES):
                with self._lock:
                    piece = self._current[start : start + PIECE_BYTES].numpy().tobytes()
                yield piece
        self._current = self._current[:0].clone()  # it may be a copy
        self.read.set()

    def settle(self, seconds: float) -> None:
        """Return when the tensors may be changed."""
        if self.read.wait(seconds):
            return
        with self._lock:
            self._left = {name: tensor.clone() for name, tensor in self._left.items()}
            self._current = self._current.clone()
        self.read.set()  # what is left is read from the copies


def write_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int = 2, snapshot: Snapshot | None = None) -> Path:
    """Write a checkpoint, then remove the older ones beyond the `keep` newest (this one counts; newer ones stay).

    `snapshot`: the checkpoint's tensors, where they are in use meanwhile.
    CheckpointError says which value cannot be stored; CheckpointWriteError why the disk did not take it, and which
    checkpoint stays.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for version in (100, 120, 140):
    ...         path = write_checkpoint(Path(folder), Checkpoint(version=version, tensors={}, state={}))
    ...     path.name, sorted(path.name for path in Path(folder).iterdir())
    ('checkpoint-00000140', ['checkpoint-00000120', 'checkpoint-00000140'])
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint is kept, the one just written")
    version = checkpoint.version
    if type(version) is not int or version < 0:
        raise CheckpointError(f"a checkpoint's version is a number of steps, at least 0, not {version!r}")
    snapshot = snapshot if snapshot is not None else Snapshot(checkpoint.tensors)
    files: dict[str, bytes | Iterable[bytes]] = {TENSORS: snapshot.pieces(), STATE: _state_bytes(checkpoint.state)}
    about = {"version": version, "tensors": list(checkpoint.tensors)}
    what_stays = _what_stays(folder)
    try:
        path = write_folder(folder, checkpoint_name(version), files, about=about)
        older = sorted((held for held in _held(folder) if held < version), reverse=True)
    except OSError as error:
        why = f"cannot write checkpoint {version} to {folder}: {error.strerror or error}"
        raise CheckpointWriteError(f"{why}; {what_stays}") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    for held in older[keep - 1 :]:
        discard(folder / checkpoint_name(held))
    return path


def checkpoint_name(version: int) -> str:
    """Return the name of a checkpoint's folder.

    >>> checkpoint_name(140)
    'checkpoint-00000140'
    """
    return f"checkpoint-{version:08d}"


def read_newest(folder: Path, *, most_bytes: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that is whole, if any, and a line for each newer one that is refused.

    `most_bytes` is how large its tensors may be (see `most_tensor_bytes`); None: as this machine's memory.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for version in (100, 120):
    ...         path = write_checkpoint(Path(folder), Checkpoint(version=version, tensors={}, state={"a": 1}))
    ...     _ = (path / "state.json").write_text('{"a":2}')
    ...     newest, refused = read_newest(Path(folder))
    >>> newest.version, refused
    (100, ['checkpoint 00000120 is refused: state.json was altered (sha256 differs)'])
    """
    try:
        held = _held(folder)
    except FileNotFoundError:
        return None, []
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {folder}: {error.strerror or error}") from error
    refused: list[str] = []
    for version, path in sorted(held.items(), reverse=True):
        try:
            return _read(path, version, most_bytes), refused
        except CheckpointError as error:
            refused.append(f"checkpoint {version:08d} is refused: {error}")
    return None, refused


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint in the folder `.../checkpoint-00000120`; CheckpointError names the file at fault.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = Checkpoint(version=7, tensors={"weight": torch.tensor([1.0, 2.0])}, state={})
    ...     read_checkpoint(write_checkpoint(Path(folder), written)).tensors
    {'weight': tensor([1., 2.])}
    """
    version = _version_of(path.name)
    if version is None:
        raise CheckpointError(f"{path} is no checkpoint: those are named like checkpoint-00000120")
    try:
        return _read(path, version)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from error


def _version_of(name: str) -> int | None:
    digits = re.fullmatch(r"checkpoint-([0-9]{8,18})", name)
    return int(digits[1]) if digits and f"{int(digits[1]):08d}" == digits[1] else None


def _held(folder: Path) -> dict[int, Path]:
    versions = {_version_of(name): path for name, path in stored_folders(folder).items()}
    return {version: path for version, path in versions.items() if version is not None}


def _what_stays(folder: Path) -> str:
    try:
        return f"the one before ({max(_held(folder))}) stays"
    except (OSError, ValueError):
        return "there is none before it"


def _safetensors_header(tensors: dict[str, torch.Tensor]) -> tuple[bytes, list[str]]:
    """Return the beginning of a safetensors file, and the order of its tensors: large elements first."""
    kinds = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__" or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"tensors[{name!r}] is a {type(tensor).__name__}; tensors by plain names are stored")
        try:
            if tensor.layout is not torch.strided:
                raise ValueError("it is not dense")
            empty = save({name: torch.empty(0, dtype=tensor.dtype)})  # what the library calls this type
        except (RuntimeError, ValueError, KeyError, SafetensorError) as error:
            why = f"tensors[{name!r}] ({tensor.layout}, {tensor.dtype}) cannot be stored as safetensors"
            raise CheckpointError(why) from error
        kinds[name] = json.loads(empty[8 : 8 + int.from_bytes(empty[:8], "little")])[name]["dtype"]
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, start = {}, 0
    for name in order:
        end = start + tensors[name].numel() * tensors[name].element_size()
        header[name] = {"dtype": kinds[name], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in one vector, in its own memory where that has no gaps."""
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if whole.numel() < 2:  # it may have gaps all the same, which torch does not count
        whole = whole.clone(memory_format=torch.contiguous_format)
    return whole.reshape(-1).view(torch.uint8)


def _state_bytes(state: dict[str, Any]) -> bytes:
    try:
        _refuse_what_json_changes(state, "state")
        data = json.dumps(state, allow_nan=False, separators=(",", ":")).encode()
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"state cannot be stored as JSON: {error}") from error
    if len(data) > MOST_STATE_BYTES:
        raise CheckpointError(f"{STATE} would have {len(data)} bytes; at most {MOST_STATE_BYTES} are allowed")
    return data


def _refuse_what_json_changes(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{place} has the key {key!r}; JSON would make it a text")
            _refuse_what_json_changes(inner, f"{place}[{key!r}]")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _refuse_what_json_changes(inner, f"{place}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{place} is {value}; JSON has finite numbers only")
    elif not isinstance(value, str | int | float | None):
        raise CheckpointError(f"{place} is a {type(value).__name__}; use dict, list, str, int, float, bool or None")


def machine_bytes() -> int:
    """Return the memory of this machine: a checkpoint that is larger cannot be loaded.

    >>> machine_bytes() > 2**20
    True
    """
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def most_tensor_bytes(parameters: int) -> int:
    """Return how large the tensors of a checkpoint may be, for a model with so many parameters.

    The model, what optimiser, codec and compensation remember of it, each at most a few times as large.

    >>> most_tensor_bytes(1_000_000) // 1_000_000
    323
    """
    return 64 * 4 * parameters + 64 * 2**20


def _read(path: Path, version: int, most_bytes: int | None = None) -> Checkpoint:
    try:
        about, files = read_folder(path, {TENSORS: most_bytes or machine_bytes(), STATE: MOST_STATE_BYTES})
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if about.get("version") != version:
        raise CheckpointError(f"manifest.json says version {about.get('version')}, not {version}")
    try:
        state = parse_object(files[STATE])
    except ValueError as error:
        raise CheckpointError(f"{STATE}: {error}") from error
    try:
        found = load(files[TENSORS])
        # safetensors sorts by type and name; whoever lays the tensors end to end needs the order they had.
        tensors = {name: found.pop(name) for name in about["tensors"]}
    except Exception as error:  # whatever its parser makes of bytes that it did not write
        raise CheckpointError(f"{TENSORS} is not what manifest.json says: {error!r:.200}") from error
    if found:
        raise CheckpointError(f"{TENSORS} holds {sorted(found)}, which manifest.json does not name")
    return Checkpoint(version=version, tensors=tensors, state=state)
