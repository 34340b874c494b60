"""A record is one line of JSON, and the line says all of the record: what is written is read back the same.

    {"kind":"worker_left","at_seconds":9.5,"worker":2,"reason":"no sign of life for 5 s"}

`journal_fields` says what each field may hold, and how arrivals are packed.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

from paceline.lookup import unknown
from paceline.traces import journal
from paceline.traces.journal import FORMAT, JournalRecord
from paceline.traces.journal_fields import shape_of

KINDS: dict[str, type[JournalRecord]] = {
    "run_began": journal.RunBegan,
    "worker_joined": journal.WorkerJoined,
    "worker_left": journal.WorkerLeft,
    "stepped": journal.Stepped,
    "arrived": journal.Arrived,
    "refused": journal.Refused,
    "evaluated": journal.Evaluated,
    "checkpointed": journal.Checkpointed,
    "resumed": journal.Resumed,
    "run_ended": journal.RunEnded,
}
_KIND_OF = {record: kind for kind, record in KINDS.items()}
_SHAPES_OF = {
    kind: [(field.name, shape_of(kind, field.name)) for field in fields(record)] for kind, record in KINDS.items()
}


def line_of(record: JournalRecord) -> bytes:
    """The line of a record, with its line end. A record that could not be read back is refused here.

    >>> line_of(journal.Checkpointed(at_seconds=1.23456789, version=7))
    b'{"kind":"checkpointed","at_seconds":1.234568,"version":7}\\n'
    >>> line_of(journal.Checkpointed(at_seconds=1.5, version=-7))
    Traceback (most recent call last):
    ValueError: checkpointed: version must be a whole number of 0 or more, not -7
    """
    kind = _KIND_OF[type(record)]
    written: dict[str, Any] = {"kind": kind}
    for name, shape in _SHAPES_OF[kind]:
        held = getattr(record, name)
        try:
            written[name] = shape.write(held)
            shape.read(written[name])
        except ValueError as error:
            raise ValueError(f"{kind}: {name}{error}") from None
        except (TypeError, OverflowError, AttributeError) as error:
            raise ValueError(f"{kind}: {name} cannot be written: {error} ({name}={held!r:.60})") from None
    if written.get("format", FORMAT) != FORMAT:
        raise ValueError(f"run_began: format must be {FORMAT}, not {written['format']}")
    return json.dumps(written, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def record_from(line: bytes) -> JournalRecord:
    """The record of a line; a ValueError says in one sentence what is wrong with it.

    >>> record_from(b'{"kind":"checkpointed","at_seconds":1.5,"version":7}')
    Checkpointed(at_seconds=1.5, version=7)
    >>> record_from(b'{"kind":"checkpointed","at_seconds":1.5}')
    Traceback (most recent call last):
    ValueError: checkpointed: field 'version' is missing
    """
    found = _object_from(line)
    if "kind" not in found:
        raise ValueError("field 'kind' is missing")
    kind = found.pop("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise unknown("kind of record", kind if isinstance(kind, str) else type(kind).__name__, KINDS)
    # Asked first: of another format nobody knows which fields it has.
    if kind == "run_began" and found.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"format {found['format']!r:.40} is not known (known: {FORMAT}); read it with the paceline that wrote it"
        )
    values: dict[str, Any] = {}
    for name, shape in _SHAPES_OF[kind]:
        if name not in found:
            raise ValueError(f"{kind}: field {name!r} is missing")
        try:
            values[name] = shape.read(found.pop(name))
        except ValueError as error:
            raise ValueError(f"{kind}: {name}{error}") from None
    if found:
        raise ValueError(f"{kind}: unknown field {next(iter(found))!r:.40}")
    record: JournalRecord = KINDS[kind](**values)
    return record


def _object_from(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(
            line.decode("utf-8"),
            object_pairs_hook=_without_twins,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise ValueError("not JSON that a journal would hold (nested too deeply)") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(name for name in names if names.count(name) > 1)!r:.40} is there twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if math.isfinite(number):
        return number
    raise ValueError(f"the number {text:.40} is too large")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"not JSON ({name} is no number)")
