"""Which codec makes the shortest exchange on which link: seconds of encoding, of the payload on the link, of decoding.

    no codec   |                       vector on the link                        |
    a codec    | encode | payload on the link | decode |

One payload, one link, one after the other: latency and overlap with computation are left out, as they depend on the
cluster more than on the codec. A short exchange is not yet a short training: an error may cost steps. So two are
marked: the shortest of all, and the shortest of those with an error below 1, which is the error of sending nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.codecs import Measured

RATES: Mapping[str, float] = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
NO_CODEC = "no codec"
ERROR_OF_NOTHING = 1.0


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The seconds of one codec's exchange at each rate, and where it is the shortest.

    >>> exchange = Exchange(label="half", error=0.0, seconds=(1.0,), shortest=(True,), shortest_sound=(True,))
    >>> exchange.seconds
    (1.0,)
    """

    label: str
    error: float
    seconds: tuple[float, ...]
    shortest: tuple[bool, ...]
    shortest_sound: tuple[bool, ...]


def exchanges(measured: Sequence[Measured], rates: Sequence[float] = tuple(RATES.values())) -> list[Exchange]:
    """An exchange without a codec, then one for each codec.

    >>> from paceline.bench.bias import Bias
    >>> half = Measured(label="half", name="half", elements=10**6, payload_bytes=2 * 10**6, encode_seconds=0.01,
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
        Exchange(
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
