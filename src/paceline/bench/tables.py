"""What was measured of codecs, for people and for programs: tables, a chart's points, a headline and one JSON document.

A codec is worth its time where it makes an exchange shorter:

    no codec   |                       vector on the link                        |
    a codec    | encode | payload on the link | decode |

One payload, one link, one after the other: latency and overlap with computation are left out, as they depend on the
cluster more than on the codec. A short exchange is not yet a short training: an error may cost steps. So two are
marked: the shortest of all, and the shortest of those with an error below 1, which is the error of sending nothing.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Annotated, Any

from paceline.bench.codecs import BIAS_SEEDS, Bias, CodecMeasurement
from paceline.decoding import MOST_FLOAT, Between, DecodingError, decode
from paceline.quantities import percent_text
from paceline.reports.codec_page import CodecPoint, codec_page
from paceline.reports.table import PlainTable
from paceline.terminal import scatter

RATES: Mapping[str, float] = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
NO_CODEC = "no codec"
ERROR_OF_NOTHING = 1.0
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
Seconds = Annotated[float, Between(1e-12, 1e9)]


@dataclass(frozen=True, kw_only=True)
class CodecResults:
    """What was measured, and on what: tables, page and results.json are all made from it."""

    measured: tuple[CodecMeasurement, ...]
    gradient: str
    threads: int
    repeats: int

    def document(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        rows = exchanges(self.measured)
        return {
            "elements": self.measured[0].elements,
            "gradient": self.gradient,
            "threads": self.threads,
            "repeats": self.repeats,
            "copy_seconds": self.measured[0].copy_seconds,
            "codecs": [one.as_document() for one in self.measured],
            "exchange_seconds": {one.label: dict(zip(RATES, one.seconds, strict=True)) for one in rows},
            "shortest": _winners(rows, sound=False),
            "shortest_with_error_below_1": _winners(rows, sound=True),
        }

    @classmethod
    def from_document(cls, values: Mapping[str, Any]) -> CodecResults:
        """Return the results that `document` has written; DecodingError if that is not what it is.

        >>> CodecResults.from_document({"codecs": []})
        Traceback (most recent call last):
        paceline.decoding.DecodingError: field 'elements' is missing
        """
        stored = decode(_StoredResults, _known(_StoredResults, values))
        codecs = values.get("codecs")
        if not isinstance(codecs, list) or not codecs:
            raise DecodingError("codecs must be a list of one or more")
        rows = [decode(_StoredCodec, _known(_StoredCodec, one), f"codecs[{place}]") for place, one in enumerate(codecs)]
        return cls(
            measured=tuple(_measurement(row, stored) for row in rows),
            gradient=stored.gradient,
            threads=stored.threads,
            repeats=stored.repeats,
        )


@dataclass(frozen=True, kw_only=True)
class _StoredResults:
    """What results.json says of all codecs, as far as it is not computed from the rest."""

    elements: Annotated[int, Between(1)]
    gradient: str
    threads: int
    repeats: int
    copy_seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class _StoredCodec:
    """What results.json says of one codec, as far as it is not computed from the rest."""

    codec: str
    payload_bytes: Annotated[int, Between(1)]
    encode_seconds: Seconds
    decode_seconds: Seconds
    relative_error: Annotated[float, Between(0, MOST_FLOAT)]
    bias: float | None
    bias_below: float | None
    spread: Annotated[float, Between(0, MOST_FLOAT)] = 0.0


def _known(kind: Any, values: Any) -> Any:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names} if isinstance(values, Mapping) else values


def _measurement(row: _StoredCodec, stored: _StoredResults) -> CodecMeasurement:
    return CodecMeasurement(
        label=row.codec,
        name=row.codec.split(" ", 1)[0],
        elements=stored.elements,
        payload_bytes=row.payload_bytes,
        encode_seconds=row.encode_seconds,
        decode_seconds=row.decode_seconds,
        copy_seconds=stored.copy_seconds,
        error=row.relative_error,
        bias=Bias(seen=row.bias, below=row.bias_below or 0.0),
        spread=row.spread,
    )


# -- exchanges ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CodecExchange:
    """The seconds of one codec's exchange at each rate, and at which rates it is the shortest.

    >>> exchange = CodecExchange(label="half", error=0.0, seconds=(1.0,), shortest=(True,), shortest_sound=(True,))
    >>> exchange.seconds
    (1.0,)
    """

    label: str
    error: float
    seconds: tuple[float, ...]
    shortest: tuple[bool, ...]
    shortest_sound: tuple[bool, ...]


def exchanges(
    measured: Sequence[CodecMeasurement], rates: Sequence[float] = tuple(RATES.values())
) -> list[CodecExchange]:
    """Return the exchange without a codec, then one for each codec.

    >>> from paceline.bench.codecs import Bias
    >>> half = CodecMeasurement(label="half", name="half", elements=10**6, payload_bytes=2 * 10**6, encode_seconds=0.01,
    ...                 decode_seconds=0.01, copy_seconds=0.001, error=0.002, bias=Bias())
    >>> [(row.label, [round(seconds, 5) for seconds in row.seconds]) for row in exchanges([half], [1e8, 1e11])]
    [('no codec', [0.32, 0.00032]), ('half', [0.18, 0.02016])]
    """
    plain = [32 * measured[0].elements / rate for rate in rates]
    rows = [(NO_CODEC, 0.0, plain)]
    for one in measured:
        work = one.encode_seconds + one.decode_seconds
        rows.append((one.label, one.error, [work + 8 * one.payload_bytes / rate for rate in rates]))
    sound = [seconds for _, error, seconds in rows if error < ERROR_OF_NOTHING]
    least = [min(seconds[index] for _, _, seconds in rows) for index in range(len(rates))]
    least_sound = [min(seconds[index] for seconds in sound) for index in range(len(rates))]
    return [
        CodecExchange(
            label=label,
            error=error,
            seconds=tuple(seconds),
            shortest=tuple(map(float.__eq__, seconds, least)),
            shortest_sound=tuple(
                error < ERROR_OF_NOTHING and second == best for second, best in zip(seconds, least_sound, strict=True)
            ),
        )
        for label, error, seconds in rows
    ]


# -- tables, points and sentences --------------------------------------------------------------------------------------


def letter(index: int) -> str:
    """Return the letter that stands for a codec in the scatter plot.

    >>> letter(0), letter(27)
    ('a', 'B')
    """
    return string.ascii_letters[index % len(string.ascii_letters)]


def codecs_table(results: CodecResults, *, letters: bool = False) -> PlainTable:
    """Return size, speed and error of each codec; `letters` adds those of the scatter plot."""
    measured = results.measured
    return PlainTable(
        title=f"Codecs on {measured[0].elements:,} float32",
        headings=HEADINGS,
        rows=[
            [f"{letter(index)} {one.label}" if letters else one.label, *cells(one)]
            for index, one in enumerate(measured)
        ],
        caption=f"Vector: {results.gradient}. GB/s: of the float32 vector, {results.threads} threads. "
        f"Copies: tensor.clone(), {1e3 * measured[0].copy_seconds:.1f} ms here. Error: length of (decoded - vector) / "
        f"length of vector, for one decoding. Bias: the same for the mean of all decodings; where there is chance in "
        f"them, estimated over {BIAS_SEEDS} seeds on a smaller gradient ('<': none is seen, and one from there on "
        f"would be).{_spread_sentence(results)}",
    )


def _spread_sentence(results: CodecResults) -> str:
    """Return how far the usual times are above the least; empty where one turn was timed, or nobody knows."""
    usual, most = (figure([one.spread for one in results.measured]) for figure in (median, max))
    if not most > 0:
        return ""
    return (
        f" Times are the least of {results.repeats} turns; their median is {percent_text(usual)} above for the usual "
        f"codec, {percent_text(most)} at most."
    )


def cells(one: CodecMeasurement) -> list[str]:
    """Return a codec's cells after its name.

    >>> from paceline.bench.codecs import Bias
    >>> cells(CodecMeasurement(label="half", name="half", elements=1000, payload_bytes=2000, encode_seconds=1e-6,
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


def links_table(rows: Sequence[CodecExchange]) -> PlainTable:
    """Return the time of one exchange on each link, the shortest marked."""
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
        "over one link: no ring of ranks, no latency, no overlap. A short exchange is not yet a short training: error "
        "can cost steps.",
        marked=frozenset(marked),
    )


def _marked(one: CodecExchange, column: int) -> str:
    mark = "*" if one.shortest[column] else "+" if one.shortest_sound[column] else " "
    milliseconds = 1e3 * one.seconds[column]
    return f"{milliseconds:,.1f}{mark}" if milliseconds >= 0.1 else f"{milliseconds:.2g}{mark}"


def points(measured: Sequence[CodecMeasurement]) -> list[CodecPoint]:
    """Return the points of the page's chart."""
    return [CodecPoint(label=one.label, family=one.name, bits=one.bits, error=one.error) for one in measured]


def scatter_lines(measured: Sequence[CodecMeasurement]) -> list[str]:
    """Return the points as a plot in letters, for the terminal: both axes logarithmic, as on the page."""
    letters = [(letter(index), one.bits, one.error) for index, one in enumerate(measured)]
    return scatter(letters, x_name="bits per element (letters: see the first table)", y_name="error", zero="exact")


def headline(rows: Sequence[CodecExchange]) -> str:
    """Return the page's first sentence.

    >>> no, yes = (False,) * 4, (True,) * 4
    >>> none = CodecExchange(label="no codec", error=0.0, seconds=(8.0, 4.0, 2.0, 1.0), shortest=no, shortest_sound=no)
    >>> half = CodecExchange(label="half", error=0.002, seconds=(4.0, 2.0, 1.0, 0.5), shortest=yes, shortest_sound=yes)
    >>> headline([none, half])
    'At 1 Gbit/s half makes an exchange 2.0 times shorter than no codec, with an error of 0.002'
    """
    column = list(RATES).index(AT)
    best = next(one for one in rows if one.shortest_sound[column])
    if best.label == NO_CODEC:
        return f"At {AT} an exchange is shortest without a codec"
    gain = rows[0].seconds[column] / best.seconds[column]
    faster = f"{best.label} makes an exchange {gain:.1f} times shorter than no codec"
    return f"At {AT} {faster}, with an error of {best.error:.2g}"


def page(results: CodecResults) -> str:
    """Return the page of `paceline bench codecs` as text."""
    rows = exchanges(results.measured)
    return codec_page(
        points(results.measured),
        [codecs_table(results), links_table(rows)],
        headline=headline(rows),
        conditions=[
            f"{results.measured[0].elements:,} float32",
            results.gradient,
            f"best of {results.repeats}",
        ],
    )


def _winners(rows: Sequence[CodecExchange], *, sound: bool) -> dict[str, str]:
    return {
        rate: next(one.label for one in rows if (one.shortest_sound if sound else one.shortest)[column])
        for column, rate in enumerate(RATES)
    }
