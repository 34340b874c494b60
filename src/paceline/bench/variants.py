"""Which codecs are measured: all in the table, with their defaults, and a few more settings of qsgd.

A codec that is new in `CODECS` is measured without a word here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline.codecs import CODECS, Codec
from paceline.codecs.naming import FEEDBACK, inner_of, parse_codec, settings_of

MORE: dict[str, tuple[str, ...]] = {
    "qsgd": (
        "qsgd levels=1",
        "qsgd levels=127",
        "qsgd norm=l2",
        "qsgd norm=l2 lossless=elias",
        "qsgd lossless=entropy",
    )
}


@dataclass(frozen=True)
class Variant:
    """A codec with its settings, named as in `paceline.codecs.naming`.

    >>> Variant("qsgd norm=l2 error-feedback").label
    'qsgd levels=7 l2 +feedback'
    >>> Variant("one-bit").label
    'one-bit'
    """

    text: str

    def make(self, shapes: Sequence[torch.Size] | None = None) -> Codec:
        """The codec with an empty memory, measured by itself: error feedback only if it is asked for."""
        codec = parse_codec(self.text)
        return (codec if FEEDBACK in self.text.split() else inner_of(codec)).fresh(shapes)

    @property
    def name(self) -> str:
        """The codec's name, without settings."""
        return self.text.split()[0]

    @property
    def label(self) -> str:
        """The name, its first setting, and those that are not as they are by default."""
        inner = inner_of(parse_codec(self.text))
        said = [self.name]
        for index, (key, default) in enumerate(settings_of(self.name).items()):
            value = getattr(inner, key)
            if index == 0 or value != default:
                said.append(value if isinstance(value, str) else f"{key}={value}")
        return " ".join([*said, *(["+feedback"] if FEEDBACK in self.text.split() else [])])


def variants(texts: Iterable[str] = ()) -> list[Variant]:
    """All variants, or those that are named: a name alone stands for all variants of that codec.

    >>> [variant.label for variant in variants(["identity", "qsgd levels=3"])]
    ['identity', 'qsgd levels=3']
    >>> variants(["one-bit", "two-bit"])
    Traceback (most recent call last):
    ValueError: unknown codec 'two-bit'; did you mean 'one-bit'? choose from identity, bfloat16, one-bit, ...
    """
    named = list(dict.fromkeys(texts)) or list(CODECS)
    for text in named:
        parse_codec(text)  # refuses what there is not
    found = [Variant(each) for text in named for each in (text, *MORE.get(text, ()))]
    return list({variant.label: variant for variant in found}.values())  # "qsgd" and "qsgd levels=7" are one
