"""What each field of a journal may hold: its name says it, in whichever record it stands.

A shape writes what a record holds as a plain JSON value, and reads such a value back or refuses it. Arrivals are by far
the most numerous, so each is an array instead of an object, with times in whole microseconds:

    [worker, version, draw, blocks_done, blocks, at, work or null, transfer, loss_mean, loss_variance, samples]

A dropped gradient is [worker, version, reason], any other [worker, version]. Times are rounded to microseconds; all
other numbers survive to the last bit. JSON has no NaN: a loss that is not finite is null. A duration below zero or not
finite is a clock's slip and no event; it is written as 0, an unknown `work_seconds` as null.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.traces.journal import Arrival, Dropped

LARGEST_WHOLE = 2**64
LATEST_MICROSECONDS = 2**53  # up to here a float tells microseconds apart
MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """How a field is written and read; `read` says what is wrong as the end of a sentence that begins with its name.

    >>> COUNT.write(7), COUNT.read(7)
    (7, 7)
    >>> COUNT.read(-1)
    Traceback (most recent call last):
    ValueError:  must be a whole number of 0 or more, not -1
    """

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def shape_of(kind: str, name: str) -> Shape:
    """The shape of a record's field.

    >>> shape_of("refused", "worker").read(None) is None
    True
    """
    return _SHAPES.get(f"{kind}.{name}") or _SHAPES[name]


def not_a(words: str, value: Any) -> ValueError:
    """The error for a value that is not what it must be.

    >>> not_a("a list", 7)
    ValueError(' must be a list, not 7')
    """
    text = repr(value[:60] if isinstance(value, str | list) else value)
    return ValueError(f" must be {words}, not {text if len(text) <= 60 else text[:57] + '...'}")


# -- plain values -------------------------------------------------------------------------------------------------


def _whole(least: int) -> Shape:
    def read(value: Any) -> int:
        if type(value) is int and least <= value < LARGEST_WHOLE:
            return value
        size = "of at most 64 bits" if least < 0 else f"of {least} or more"
        raise not_a(f"a whole number {size}", value)

    return Shape(write=operator.index, read=read)  # `index` also takes numpy's, and no float


def _read_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise not_a("text", value)


def _read_flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise not_a("true or false", value)


def _write_number(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _read_number(value: Any) -> float | None:
    if value is None or type(value) is float:
        return value
    if type(value) is int and abs(value) < LARGEST_WHOLE:
        return float(value)
    raise not_a("a number or null", value)


def _write_seconds(value: Any) -> float:
    return round(float(value), 6) + 0.0  # adding 0.0 turns -0.0 into 0.0


def _read_seconds(value: Any) -> float:
    if type(value) in (int, float) and 0 <= value <= LATEST_MICROSECONDS / MICRO:
        return float(value)
    raise not_a("seconds of 0 or more", value)


def _write_recipe(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_read_text(name): _write_recipe(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_write_recipe(inner) for inner in value]
    if isinstance(value, float):
        return _write_number(value)
    if value is None or isinstance(value, str | int):
        return value
    raise not_a("of plain values", value)


def _read_recipe(value: Any) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise not_a("an object", value)


def _list_of(item: Shape) -> Shape:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise not_a("a list", value)
        found = []
        for place, inner in enumerate(value):
            try:
                found.append(item.read(inner))
            except ValueError as error:
                raise ValueError(f"[{place}]{error}") from None
        return tuple(found)

    return Shape(write=lambda value: [item.write(inner) for inner in value], read=read)


# -- gradients ----------------------------------------------------------------------------------------------------


def _read_gradient(value: Any) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2:
        return COUNT.read(value[0]), COUNT.read(value[1])
    raise not_a("[worker, version]", value)


def _read_dropped(value: Any) -> Dropped:
    if isinstance(value, list) and len(value) == 3:
        return Dropped(worker=COUNT.read(value[0]), version=COUNT.read(value[1]), reason=_read_text(value[2]))
    raise not_a("[worker, version, reason]", value)


def _write_dropped(drop: Dropped) -> list[Any]:
    return [COUNT.write(drop.worker), COUNT.write(drop.version), drop.reason]


def _write_moment(seconds: float) -> int:
    if math.isfinite(seconds):
        return round(_write_seconds(seconds) * MICRO)  # rounded as other times are: no arrival after its own step
    raise not_a("arrivals at seconds of 0 or more", seconds)


def _write_duration(seconds: float | None) -> int | None:
    if seconds is None or not math.isfinite(seconds):
        return None
    return min(max(0, round(seconds * MICRO)), LATEST_MICROSECONDS)


def _write_arrival(arrival: Arrival) -> list[Any]:
    whole = (arrival.worker, arrival.version, arrival.draw, arrival.blocks_done, arrival.blocks)
    return [
        *map(operator.index, whole),
        _write_moment(arrival.at_seconds),
        _write_duration(arrival.work_seconds),
        _write_duration(arrival.transfer_seconds) or 0,
        _write_number(arrival.loss_mean),
        _write_number(arrival.loss_variance),
        operator.index(arrival.samples),
    ]


def _read_arrival(value: Any) -> Arrival:
    if not isinstance(value, list) or len(value) != 11:
        raise not_a("an arrival of 11 values", value)
    worker, version, draw, done, blocks, at, work, transfer, mean, variance, samples = value
    for number in (worker, version, draw, done, blocks, samples):
        COUNT.read(number)
    for microseconds in (at, 0 if work is None else work, transfer):
        if type(microseconds) is not int or not 0 <= microseconds <= LATEST_MICROSECONDS:
            raise not_a("microseconds of 0 or more where it holds times", microseconds)
    if not 1 <= done <= blocks:
        raise ValueError(f" must have between 1 and all blocks done, not {done} of {blocks}")
    return Arrival(
        worker=worker,
        version=version,
        draw=draw,
        blocks_done=done,
        blocks=blocks,
        at_seconds=at / MICRO,
        work_seconds=None if work is None else work / MICRO,
        transfer_seconds=transfer / MICRO,
        loss_mean=_read_number(mean),
        loss_variance=_read_number(variance),
        samples=samples,
    )


COUNT = _whole(0)
_AT_LEAST_ONE = _whole(1)
_ANY_WHOLE = _whole(1 - LARGEST_WHOLE)
_TEXT = Shape(write=_read_text, read=_read_text)
_NUMBER = Shape(write=_write_number, read=_read_number)
_SECONDS = Shape(write=_write_seconds, read=_read_seconds)
_GRADIENTS = _list_of(Shape(write=lambda pair: [operator.index(number) for number in pair], read=_read_gradient))

_SHAPES: dict[str, Shape] = {
    **dict.fromkeys(("format", "workers", "blocks"), _AT_LEAST_ONE),
    **dict.fromkeys(("seed", "fingerprint"), _ANY_WHOLE),
    **dict.fromkeys(("worker", "shard", "first_draw", "threads", "version", "round", "rounds_done"), COUNT),
    **dict.fromkeys(("sent_bytes", "received_bytes"), COUNT),
    **dict.fromkeys(("paceline", "strategy", "signature", "codec", "host", "reason", "peer"), _TEXT),
    **dict.fromkeys(("at_seconds", "opened_seconds"), _SECONDS),
    **dict.fromkeys(("loss", "accuracy"), _NUMBER),
    **dict.fromkeys(("fresh", "late"), _GRADIENTS),
    "refused.worker": Shape(
        write=lambda value: None if value is None else COUNT.write(value),
        read=lambda value: None if value is None else COUNT.read(value),
    ),
    "diverged": Shape(write=bool, read=_read_flag),
    "recipe": Shape(write=_write_recipe, read=_read_recipe),
    "dropped": _list_of(Shape(write=_write_dropped, read=_read_dropped)),
    "arrivals": _list_of(Shape(write=_write_arrival, read=_read_arrival)),
}
