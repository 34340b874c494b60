"""The record of pruning: how often each sample sat out, and what the trained model says of it, in one file.

    folder/pruning.safetensors
      metadata "paceline"   JSON: format, policy, settings, epochs, classes, source, sha256 of all that and the arrays
      label, guess                                    int32     a number of a class
      times_pruned                                    uint16    in how many epochs the sample sat out
      difficulty                                      float32   as the policy sees it; only the order means something
      label_probability, guess_probability, loss      float32   by the model at the end, without augmentation

The number of a sample is its place in the training data. No pickle, so reading a record runs nothing. Reading trusts
nothing: the safetensors library holds its header against the size of the file, names, types and lengths are looked at
before an array is made, and values that no run could have left are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from paceline.decoding import DecodingError, parse_object
from paceline.files import write_file

PRUNING = "pruning.safetensors"
FORMAT = 2  # of new records; 1 is read, and has no checksum
MOST_SAMPLES = 100_000_000
MOST_CLASSES = 100_000
MOST_EPOCHS = 10**9
MOST_METADATA_BYTES = 16 * 2**20
KINDS = {
    "label": "int32",
    "guess": "int32",
    "times_pruned": "uint16",
    "difficulty": "float32",
    "label_probability": "float32",
    "guess_probability": "float32",
    "loss": "float32",
}
STORED_AS = {"int32": "I32", "uint16": "U16", "float32": "F32"}
BYTES_PER_SAMPLE = sum(np.dtype(kind).itemsize for kind in KINDS.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class PruningRecord:
    """Pruning, sample by sample, after `epochs` passes over the data under a policy.

    `source` is the recipe's document, if the run had one: it says where the images are.

    >>> record = PruningRecord(
    ...     policy="fine-pruning", epochs=9, classes=("cat", "dog"), label=[0, 1], guess=[0, 0], times_pruned=[0, 3],
    ...     difficulty=[0, 3], label_probability=[0.9, 0.2], guess_probability=[0.9, 0.8], loss=[0.1, 1.6])
    >>> record.samples, record.prunings
    (2, 3)
    """

    policy: str
    epochs: int
    classes: tuple[str, ...]
    label: NDArray[np.int32]
    guess: NDArray[np.int32]
    times_pruned: NDArray[np.uint16]
    difficulty: NDArray[np.float32]
    label_probability: NDArray[np.float32]
    guess_probability: NDArray[np.float32]
    loss: NDArray[np.float32]
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            object.__setattr__(self, name, _array(name, getattr(self, name), kind))
        object.__setattr__(self, "classes", tuple(self.classes))
        _check_metadata(self)
        _check_arrays(self)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.label)

    @property
    def prunings(self) -> int:
        """The number of times that samples sat out, all together."""
        return int(self.times_pruned.sum(dtype=np.int64))

    def write(self, folder: Path) -> Path:
        """Write it into a folder. A reader sees the record that was there or this one, never half of one.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     empty_record().write(Path(folder)).name, read_pruning(Path(folder)).policy
        ('pruning.safetensors', 'none')
        """
        metadata = {
            "format": FORMAT,
            "policy": self.policy,
            "settings": dict(self.settings),
            "epochs": self.epochs,
            "classes": list(self.classes),
            "source": dict(self.source),
        }
        arrays = {name: getattr(self, name) for name in KINDS}
        text = json.dumps({**metadata, "sha256": _checksum(metadata, arrays)}, allow_nan=False)
        if len(text) > MOST_METADATA_BYTES:
            raise ValueError(
                f"settings, classes and source must be at most {MOST_METADATA_BYTES:,} bytes ({len(text):,})"
            )
        data = save(arrays, metadata={"paceline": text})
        return write_file(folder / PRUNING, data)


def empty_record() -> PruningRecord:
    """Return a record of one sample that was never pruned.

    >>> empty_record().prunings
    0
    """
    return PruningRecord(
        policy="none", epochs=0, classes=("0",), label=np.zeros(1, np.int32), guess=np.zeros(1, np.int32),
        times_pruned=np.zeros(1, np.uint16), difficulty=np.zeros(1, np.float32), loss=np.zeros(1, np.float32),
        label_probability=np.ones(1, np.float32), guess_probability=np.ones(1, np.float32),
    )  # fmt: skip


def read_pruning(folder: Path) -> PruningRecord:
    """Return the record in a folder; ValueError says in one line why it is refused.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "pruning.safetensors").write_bytes(b"what is this")
    ...     read_pruning(Path(folder))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: ...pruning.safetensors is refused: it is no safetensors file ...
    """
    path = folder / PRUNING
    try:
        return _read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is refused: {error}") from error


def _read(path: Path) -> PruningRecord:
    if not path.is_file():  # a pipe would be waited for
        raise ValueError("it is missing" if not path.exists() else "it is not a plain file")
    size, most = path.stat().st_size, MOST_SAMPLES * BYTES_PER_SAMPLE + 2 * MOST_METADATA_BYTES
    if size > most:
        raise ValueError(f"it has {size:,} bytes; at most {most:,} are allowed")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = _metadata((file.metadata() or {}).get("paceline", ""))
            _check_form(file)
            arrays = {name: file.get_tensor(name) for name in KINDS}
            checksum = metadata.pop("sha256", None)
            if metadata["format"] > 1 and checksum != _checksum(metadata, arrays):
                raise ValueError("it is not as it was written (sha256 differs)")
            del metadata["format"]
    except SafetensorError as error:
        raise ValueError(f"it is no safetensors file that can be read ({' '.join(str(error).split())})") from error
    return PruningRecord(**metadata, **arrays)


def _metadata(text: str) -> dict[str, Any]:
    """Return the values in the metadata, if it has the form that is written here."""
    if not text:
        raise ValueError("its metadata says nothing of paceline")
    if len(text) > MOST_METADATA_BYTES:
        raise ValueError(f"its metadata has {len(text):,} characters; at most {MOST_METADATA_BYTES:,} are allowed")
    try:
        found = parse_object(text.encode())
    except DecodingError as error:
        raise ValueError("its metadata is no JSON that can be read") from error
    forms = {"policy": str, "settings": dict, "epochs": int, "classes": list, "source": dict}
    if type(found.get("format")) is not int or not 1 <= found["format"] <= FORMAT:
        raise ValueError(f"its metadata is not of format 1 to {FORMAT}, the only ones read here")
    for name, form in forms.items():
        if type(found.get(name)) is not form:
            raise ValueError(f"its metadata gives no {name}")
    known = {"format", *forms} | ({"sha256"} if found["format"] > 1 else set())
    if found.keys() != known:
        raise ValueError(f"its metadata must give {', '.join(sorted(known))} (found {', '.join(sorted(found))[:200]})")
    return found


def _checksum(metadata: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the sha256 of a record's metadata and arrays."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in KINDS:
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _check_form(file: Any) -> None:
    """Check names, types and lengths of the arrays, before one is made."""
    if set(file.keys()) != set(KINDS):
        raise ValueError(f"it must hold {', '.join(KINDS)} (it holds {', '.join(sorted(file.keys()))[:200]})")
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in KINDS}
    for name, kind in KINDS.items():
        found, shape = file.get_slice(name).get_dtype(), shapes[name]
        if found != STORED_AS[kind]:
            raise ValueError(f"{name} must be of type {kind} (it is {found})")
        if len(shape) != 1 or not 1 <= shape[0] <= MOST_SAMPLES or shape != shapes["label"]:
            raise ValueError(f"{name} must have one value for each sample (shape {shape}, labels {shapes['label']})")


def _array(name: str, value: Any, kind: str) -> NDArray[Any]:
    """Return the values as an array of this kind, if that changes none of them but in its last digits."""
    found = np.asarray(value)
    if found.ndim != 1 or not len(found):
        raise ValueError(f"{name} must be a row of values, one for each sample (shape {found.shape})")
    if found.dtype == kind:
        return found
    if kind == "float32":
        return found.astype(kind)
    limits = np.iinfo(kind)
    if not np.issubdtype(found.dtype, np.integer) or found.min() < limits.min or found.max() > limits.max:
        raise ValueError(f"{name} must be whole numbers between {limits.min} and {limits.max} (type {found.dtype})")
    return found.astype(kind)


def _check_metadata(record: PruningRecord) -> None:
    if not 0 <= record.epochs <= MOST_EPOCHS:
        raise ValueError(f"epochs must be between 0 and {MOST_EPOCHS:,} (epochs={str(record.epochs)[:20]})")
    if not 1 <= len(record.classes) <= MOST_CLASSES or not all(isinstance(name, str) for name in record.classes):
        raise ValueError(f"classes must be between 1 and {MOST_CLASSES:,} names (there are {len(record.classes):,})")
    if not all(name.isprintable() for name in record.classes):
        raise ValueError("classes must be names that can be printed")


def _check_arrays(record: PruningRecord) -> None:
    for name in KINDS:
        values = getattr(record, name)
        if len(values) != record.samples:
            raise ValueError(
                f"{name} must have a value for each of {record.samples:,} samples (it has {len(values):,})"
            )
        if not np.isfinite(values).all():
            raise ValueError(f"{name} must be finite (sample {int(np.argmin(np.isfinite(values)))} is not)")
    for name in ("label", "guess"):
        low, high = int(getattr(record, name).min()), int(getattr(record, name).max())
        if low < 0 or high >= len(record.classes):
            last = len(record.classes) - 1
            raise ValueError(f"{name} must be between 0 and {last}, the classes (found {low if low < 0 else high})")
    for name in ("label_probability", "guess_probability"):
        values = getattr(record, name)
        if values.min() < 0 or values.max() > 1:
            raise ValueError(f"{name} must be between 0 and 1 (found {values.min():g} to {values.max():g})")
    if (most := int(record.times_pruned.max())) > record.epochs:
        raise ValueError(f"times_pruned must be at most epochs ({most} times in {record.epochs} epochs)")
