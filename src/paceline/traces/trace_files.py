"""Traces as a file: what the report of a simulated run, or of ranks that average, is made from.

    folder/traces.json.gz    JSON: format, and the traces with all their rounds, works and evaluations

A run that has a journal needs no such file: its trace is made from that (`paceline.traces.history`). Numbers survive to
the last bit, so the page that is made from the file is the page of the run. JSON has no NaN and no infinity: a loss
that is not finite is null, as is an accuracy where nothing is guessed, and a recipe is stored as its document is.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.decoding import DecodingError, decode, parse_object
from paceline.errors import PacelineError
from paceline.files import read_plain, write_file
from paceline.traces.records import Evaluation, Trace

TRACES = "traces.json.gz"
FORMAT = 1
MOST_BYTES = 200_000_000  # of the text; a work takes some 200
MOST_FILE_BYTES = 100_000_000
OlderStored = tuple[int, float, float | None, float | None]
Stored = tuple[int, float, float | None, float | None, float | None]
"""An evaluation as it is stored: round, seconds, loss, accuracy, test loss, which older files lack."""


class TraceFileError(PacelineError, ValueError):
    """A file of traces that cannot be read.

    >>> raise TraceFileError("runs/race/traces.json.gz: not a file of traces")
    Traceback (most recent call last):
    paceline.traces.trace_files.TraceFileError: runs/race/traces.json.gz: not a file of traces
    """


def write_traces(folder: Path, traces: Sequence[Trace]) -> Path:
    """Write the traces of the runs in a folder, and return the file.

    What would be larger than `read_traces` reads is cut to the first rounds, and says so.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe={"rounds": 5}, rounds_done=5, seconds=1.0)
    >>> write_traces(folder, [trace]).name, read_traces(folder) == [trace]
    ('traces.json.gz', True)
    """
    kept = list(traces)
    while True:
        document = {"format": FORMAT, "traces": [_values(trace) for trace in kept]}
        text = json.dumps(document, default=_fields, allow_nan=False, separators=(",", ":")).encode()
        fits = MOST_BYTES / len(text)
        if fits >= 1:
            packed = gzip.compress(text, compresslevel=6, mtime=0)
            if len(packed) <= MOST_FILE_BYTES:
                return write_file(folder / TRACES, packed)
            fits = MOST_FILE_BYTES / len(packed)
        if not any(trace.works or trace.rounds for trace in kept):
            size = f"{len(text):,} bytes without a single round"
            raise TraceFileError(f"{folder / TRACES}: {size}, more than the {MOST_BYTES:,} that can be read")
        kept = [_shortened(trace, whole, 0.9 * fits) for trace, whole in zip(kept, traces, strict=True)]


def _shortened(trace: Trace, whole: Trace, share: float) -> Trace:
    """Return a trace with a share of its rounds, and the works of those, which says so; its counts stay whole."""
    rounds = trace.rounds[: int(len(trace.rounds) * share)]
    last = rounds[-1].version if rounds else -1
    works = tuple(work for work in trace.works[: int(len(trace.works) * share)] if work.version <= last)
    words = f"the first {len(rounds):,} of {len(whole.rounds):,} rounds are kept with their times, for the file's size"
    return dataclasses.replace(trace, rounds=rounds, works=works, missing=(*whole.missing, words))


def read_traces(folder: Path) -> list[Trace]:
    """Read the traces of the runs in a folder; TraceFileError if the file is damaged, OSError if there is none."""
    path = folder / TRACES
    packed = read_plain(path, most_bytes=MOST_FILE_BYTES)
    try:
        found = parse_object(_unpacked(packed))
        form = found.get("format")
        if form != FORMAT:
            raise DecodingError(f"format {form!r:.20} is not known here, which reads {FORMAT}")
        if found.keys() != {"format", "traces"} or not isinstance(found["traces"], list):
            raise DecodingError("not a file of traces")
        return [_trace(values, f"traces[{place}]") for place, values in enumerate(found["traces"])]
    except DecodingError as error:
        raise TraceFileError(f"{path}: {error}") from None


def _unpacked(packed: bytes) -> bytes:
    unpack = zlib.decompressobj(wbits=31)  # gzip
    try:
        text = unpack.decompress(packed, MOST_BYTES)
    except zlib.error:
        raise DecodingError("not a gzip file") from None
    if not unpack.eof:
        raise DecodingError(f"cut off, or of more than {MOST_BYTES:,} bytes when unpacked")
    return text


def _values(trace: Trace) -> dict[str, Any]:
    evaluations = [
        (each.round, each.seconds, _finite(each.loss), _finite(each.accuracy), _finite(each.test_loss))
        for each in trace.evaluations
    ]
    return _fields(trace) | {"evaluations": evaluations, "recipe": _finite(trace.recipe)}


def _trace(values: Any, where: str) -> Trace:
    if not isinstance(values, dict):
        raise DecodingError(f"{where} must be an object")
    stored = decode(tuple[Stored | OlderStored, ...], values.get("evaluations", []), f"{where}: evaluations")
    evaluations = [
        Evaluation(
            round=at,
            seconds=seconds,
            loss=_or_nan(loss),
            accuracy=accuracy,
            test_loss=test_loss[0] if test_loss else None,
        )
        for at, seconds, loss, accuracy, *test_loss in stored
    ]
    trace: Trace = decode(Trace, values | {"evaluations": []}, where)
    return dataclasses.replace(trace, evaluations=tuple(evaluations))


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _finite(value: Any) -> Any:
    """Return plain values with null for every number that is not finite."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
