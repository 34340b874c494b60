"""What was measured, as tables of text, points of a chart, a sentence, and one JSON document."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch

from paceline.bench.bias import SEEDS
from paceline.bench.codecs import Measured
from paceline.bench.gradients import Gradient
from paceline.bench.links import NO_CODEC, RATES, Exchange, exchanges
from paceline.reports.codec_page import CodecPoint
from paceline.reports.table import PlainTable

HEADINGS = (
    "\ncodec",
    "bits per\nelement",
    "\nratio",
    "encode\nGB/s",
    "decode\nGB/s",
    "both, in\ncopies",
    "\nerror",
    "\nbias",
)
MOST_SPEED = 999.0  # GB/s; above it nothing was moved
AT = "1 Gbit/s"  # the link of the headline


def letter(index: int) -> str:
    """What stands for a codec in the picture.

    >>> letter(0), letter(27)
    ('a', 'B')
    """
    return string.ascii_letters[index % len(string.ascii_letters)]


def codecs_table(measured: Sequence[Measured], gradient: Gradient, *, letters: bool = False) -> PlainTable:
    """Size, speed and error of each codec; with the letters of the picture, if wanted."""
    return PlainTable(
        title=f"Codecs on {measured[0].elements:,} float32",
        headings=HEADINGS,
        rows=[
            [f"{letter(index)} {one.label}" if letters else one.label, *cells(one)]
            for index, one in enumerate(measured)
        ],
        caption=f"Vector: {gradient.words}. GB/s: of the float32 vector, {torch.get_num_threads()} threads. Copies: "
        f"tensor.clone(), {1e3 * measured[0].copy_seconds:.1f} ms here. Error: length of (decoded - vector) / length "
        f"of vector, for one decoding. Bias: the same for the mean of all decodings; where there is chance in them, "
        f"estimated over {SEEDS} seeds on a smaller gradient ('<': none is seen, and one from there on would be).",
    )


def cells(one: Measured) -> list[str]:
    """The cells after the name.

    >>> from paceline.bench.bias import Bias
    >>> cells(Measured(label="half", name="half", elements=1000, payload_bytes=2000, encode_seconds=1e-6,
    ...                decode_seconds=1e-12, copy_seconds=1e-6, error=0.002, bias=Bias(below=0.0004)))
    ['16', '2.0', '4.0', '>999', '1.00', '0.002', '<0.0004']
    """
    return [
        f"{one.bits:.3g}",
        f"{one.ratio:.1f}" if one.ratio < 100 else f"{one.ratio:,.0f}",
        _speed(one.encode_speed),
        _speed(one.decode_speed),
        f"{one.copies:.2f}" if one.copies < 100 else f"{one.copies:.0f}",
        f"{one.error:.2g}",
        str(one.bias),
    ]


def _speed(speed: float) -> str:
    if speed > MOST_SPEED:
        return f">{MOST_SPEED:.0f}"
    return f"{speed:.1f}" if speed >= 0.1 else f"{speed:.2g}"


def links_table(rows: Sequence[Exchange]) -> PlainTable:
    """The time of one exchange on each link, the shortest marked."""
    marked = {
        (row, column + 1)
        for row, one in enumerate(rows)
        for column in range(len(RATES))
        if one.shortest[column] or one.shortest_sound[column]
    }
    return PlainTable(
        title="One exchange: encode, send, decode (ms)",
        headings=("codec", *RATES),
        rows=[[one.label, *(_marked(one, column) for column in range(len(RATES)))] for one in rows],
        caption="* the shortest; + the shortest of those with an error below 1, where that is another. One payload "
        "over one link, without latency or overlap. A short exchange is not yet a short training: error can cost "
        "steps.",
        marked=frozenset(marked),
    )


def _marked(one: Exchange, column: int) -> str:
    mark = "*" if one.shortest[column] else "+" if one.shortest_sound[column] else " "
    milliseconds = 1e3 * one.seconds[column]
    return f"{milliseconds:,.1f}{mark}" if milliseconds >= 0.1 else f"{milliseconds:.2g}{mark}"


def points(measured: Sequence[Measured]) -> list[CodecPoint]:
    """The chart's points."""
    return [CodecPoint(label=one.label, family=one.name, bits=one.bits, error=one.error) for one in measured]


def headline(rows: Sequence[Exchange]) -> str:
    """The page's first sentence.

    >>> no, yes = (False,) * 4, (True,) * 4
    >>> none = Exchange(label="no codec", error=0.0, seconds=(8.0, 4.0, 2.0, 1.0), shortest=no, shortest_sound=no)
    >>> half = Exchange(label="half", error=0.002, seconds=(4.0, 2.0, 1.0, 0.5), shortest=yes, shortest_sound=yes)
    >>> headline([none, half])
    'At 1 Gbit/s half makes an exchange 2.0 times shorter than no codec, with an error of 0.002'
    """
    column = list(RATES).index(AT)
    best = next(one for one in rows if one.shortest_sound[column])
    if best.label == NO_CODEC:
        return f"At {AT} an exchange is shortest without a codec"
    gain = rows[0].seconds[column] / best.seconds[column]
    said = f"At {AT} {best.label} makes an exchange {gain:.1f} times shorter than no codec"
    return f"{said}, with an error of {best.error:.2g}"


def document(measured: Sequence[Measured], gradient: Gradient, repeats: int) -> dict[str, Any]:
    """All of it as plain values."""
    rows = exchanges(measured)
    return {
        "elements": measured[0].elements,
        "gradient": gradient.words,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        "copy_seconds": measured[0].copy_seconds,
        "codecs": [one.as_document() for one in measured],
        "exchange_seconds": {one.label: dict(zip(RATES, one.seconds, strict=True)) for one in rows},
        "shortest": _winners(rows, sound=False),
        "shortest_with_error_below_1": _winners(rows, sound=True),
    }


def _winners(rows: Sequence[Exchange], *, sound: bool) -> dict[str, str]:
    return {
        rate: next(one.label for one in rows if (one.shortest_sound if sound else one.shortest)[column])
        for column, rate in enumerate(RATES)
    }
