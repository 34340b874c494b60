"""The page of `paceline inspect pruning`: who is pruned again and again, with images, in one file without scripts.

    headline
    times pruned, counted     |   share of samples beside share of prunings, by class
    labels that look wrong: the surest as images, then a table
    by class: a row of its most pruned, a row of its least pruned

A page holds at most `MOST_IMAGES` images: first those of labels that look wrong, then as many of each class.

Images are small PNG files inside the page, written by hand: a header, zlib, and three checksums.

    array, normalised somehow  ->  made smaller  ->  rescaled to 0..255, by channel  ->  PNG  ->  data:image/png,...

An image is grey (height, width) or (1, height, width), or colour (3, height, width); channels may come last as well.
Anything else is no image, and the page shows its number instead.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.quantities import percent_text
from paceline.reports.chart import Key
from paceline.reports.page import page_html
from paceline.reports.pruning_facts import (
    CAUTION,
    PruningFacts,
    conditions,
    headline,
    label_error_table,
    sentences,
)
from paceline.traces.pruning_record import PruningRecord

MOST_IMAGES = 200
MOST_LABEL_ERRORS = 24
FEWEST_IN_A_ROW = 3
MOST_LISTED = 300
MOST_CLASSES = 100
MOST_PIXELS = 36  # along a side; larger images are averaged down, so that a page of 200 stays small
GREY, COLOUR = 0, 2  # as PNG numbers them
ROWS = ("most pruned", "least pruned")
TIME_KEYS = (Key(text="samples", swatch="used"), Key(text="of these, labels that look wrong", swatch="wrong-part"))
CLASS_KEYS = (Key(text="share of the samples", swatch="share"), Key(text="share of the prunings", swatch="used"))


@dataclass(frozen=True, kw_only=True)
class ShownSamples:
    """The samples that a page shows: the surest wrong labels, and of each class its most and its least pruned.

    >>> ShownSamples(label_errors=(4,), classes={0: ((4, 1), (7,))}).numbers
    [1, 4, 7]
    """

    label_errors: tuple[int, ...]
    classes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def numbers(self) -> list[int]:
        """The numbers of all shown samples, each once."""
        rows = (number for pair in self.classes.values() for row in pair for number in row)
        return sorted({*self.label_errors, *rows})


def shown_samples(record: PruningRecord, *, most: int = 12) -> ShownSamples:
    """Choose the samples that the page of a record shows, at most `most` in a row.

    >>> from paceline.traces.pruning_record import empty_record
    >>> shown_samples(empty_record()).classes
    {0: ((), (0,))}
    """
    if not 1 <= most <= MOST_IMAGES:
        raise ValueError(f"most must be between 1 and {MOST_IMAGES} images in a row (most={most})")
    facts = PruningFacts(record)
    first = facts.label_errors[: min(MOST_LABEL_ERRORS, 2 * most)].tolist()
    held = [each for each in facts.classes if each.samples]
    room = (MOST_IMAGES - len(first)) // len(ROWS)
    if len(held) * FEWEST_IN_A_ROW > room:  # too many classes: those that are pruned beyond their share
        held = sorted(held, key=lambda each: -each.beyond)[: room // FEWEST_IN_A_ROW]
    each = min(most, room // len(held))
    rows = {
        one.number: (
            tuple(facts.most_pruned(one.number, each).tolist()),
            tuple(facts.least_pruned(one.number, each).tolist()),
        )
        for one in sorted(held, key=lambda one: one.number)
    }
    return ShownSamples(label_errors=tuple(first), classes=rows)


def pruning_page(
    record: PruningRecord,
    images: Mapping[int, NDArray[Any]] | None = None,
    *,
    title: str = "paceline inspect pruning",
    most: int = 12,
    notes: Sequence[str] = (),
) -> str:
    """Return the page as text; `images` are those of `shown_samples(record, most=most).numbers`, or none.

    >>> from paceline.traces.pruning_record import empty_record
    >>> "<h1>Nothing was pruned" in pruning_page(empty_record())
    True
    """
    facts, shown = PruningFacts(record), shown_samples(record, most=most)
    given = images if images is not None else {}
    uris = data_uris({number: given[number] for number in shown.numbers if number in given})
    classes = facts.most_pruned_classes(MOST_CLASSES)
    return page_html(
        "pruning.html",
        title=title,
        headline=headline(facts),
        sentences=(*sentences(facts), *notes),
        conditions=conditions(facts),
        bins=facts.bins,
        most_samples=max(each.samples for each in facts.bins),
        time_keys=TIME_KEYS if len(facts.label_errors) else TIME_KEYS[:1],
        classes=classes,
        classes_cut=_classes_cut(len(facts.classes)),
        most_share=max(max(each.share, each.pruned_share) for each in classes),
        class_keys=CLASS_KEYS,
        labels=_label_errors(facts, shown, uris),
        rows=[_class_rows(facts, label, pair, uris) for label, pair in shown.classes.items()],
        rows_caption=_rows_caption(facts, shown),
        percent=percent_text,
    )


def _pictures(facts: PruningFacts, numbers: Sequence[int], uris: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return what is shown of each sample: its image, if there is one, its number, label, and the model's guess."""
    record = facts.record
    return [
        {
            "number": number,
            "uri": uris.get(number, ""),
            "times": int(record.times_pruned[number]),
            "label": record.classes[record.label[number]],
            "guess": record.classes[record.guess[number]],
            "sure": percent_text(float(record.guess_probability[number])),
            "other": bool(record.guess[number] != record.label[number]),
            "wrong": bool(facts.wrong[number]),
        }
        for number in numbers
    ]


def _label_errors(facts: PruningFacts, shown: ShownSamples, uris: Mapping[int, str]) -> dict[str, Any]:
    if facts.why_not_judged:
        return {"title": "Labels are not judged", "caption": facts.why_not_judged, "pictures": []}
    if not shown.label_errors:
        return {"title": "No label looks wrong", "caption": CAUTION, "pictures": []}
    table, number = label_error_table(facts, most=MOST_LISTED), len(facts.label_errors)
    cut = f" The {len(shown.label_errors)} surest of {number:,}:" if len(shown.label_errors) < number else ""
    pictures = _pictures(facts, shown.label_errors, uris)
    return {"title": table.title, "caption": CAUTION + cut, "pictures": pictures, "table": table}


def _rows_caption(facts: PruningFacts, shown: ShownSamples) -> str:
    kinds = ("hard", "easy") if facts.prunes_the_hard else ("easy", "hard")
    caption = f"Of each class the most pruned, which are {kinds[0]} here, and the least pruned, the {kinds[1]}."
    if not facts.prunings:
        caption = "Nothing was pruned; of each class, some samples."
    caption += " 12\u00d7: pruned 12 times. #7: number 7 of the training data."
    if len(facts.label_errors):
        caption += " Framed, with a ?: the label looks wrong."
    left_out = np.count_nonzero([each.samples for each in facts.classes]) - len(shown.classes)
    return f"{caption} {left_out} classes that are pruned less for their size are not shown." if left_out else caption


def _class_rows(
    facts: PruningFacts, label: int, pair: tuple[tuple[int, ...], tuple[int, ...]], uris: Mapping[int, str]
) -> dict[str, Any]:
    each = facts.classes[label]
    rows = [(name, _pictures(facts, numbers, uris)) for name, numbers in zip(ROWS, pair, strict=True)]
    return {"name": each.name, "samples": each.samples, "prunings": each.prunings, "rows": rows}


def _classes_cut(number: int) -> str:
    return f" The {MOST_CLASSES} of {number:,} that are pruned most for their size." if number > MOST_CLASSES else ""


# -- images ------------------------------------------------------------------------------------------------------------


def data_uris(images: Mapping[int, NDArray[Any]]) -> dict[int, str]:
    """Return images of one data set, by number, as addresses that hold the image; empty if they are no images.

    They are rescaled together: what is white in one is white in all.

    >>> found = data_uris({7: np.array([[0.0, 1.0]]), 9: np.array([[0.5, -1.0]])})
    >>> found[7][:22], sorted(found)
    ('data:image/png;base64,', [7, 9])
    >>> data_uris({0: np.zeros(5)})
    {}
    """
    shaped = {number: _height_width_channels(np.asarray(image)) for number, image in images.items()}
    known = {number: _smaller(image) for number, image in shaped.items() if image is not None}
    if not known or len(known) < len(images) or len({image.shape[2] for image in known.values()}) > 1:
        return {}
    low = np.min([image.min(axis=(0, 1)) for image in known.values()], axis=0)
    span = np.max([image.max(axis=(0, 1)) for image in known.values()], axis=0) - low
    span[span == 0] = 1.0
    files = {number: png(np.rint((image - low) / span * 255).astype(np.uint8)) for number, image in known.items()}
    return {number: f"data:image/png;base64,{base64.b64encode(file).decode()}" for number, file in files.items()}


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Return the PNG file of bytes [height, width, 1 or 3].

    >>> png(np.zeros((2, 3, 1), np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR if channels == 3 else GREY, 0, 0, 0)
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each line begins with its filter: 0, none
    lines[:, 1:] = pixels.reshape(height, -1)
    body = zlib.compress(lines.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _height_width_channels(image: NDArray[Any]) -> NDArray[np.float64] | None:
    if image.ndim == 2:
        image = image[:, :, None]
    elif image.ndim == 3 and image.shape[0] in (1, 3):
        image = image.transpose(1, 2, 0)
    if image.ndim != 3 or image.shape[2] not in (1, 3) or 0 in image.shape or image.dtype.kind not in "biuf":
        return None
    return np.nan_to_num(image.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def _smaller(image: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average squares of pixels so that no side is longer than `MOST_PIXELS`."""
    height, width, channels = image.shape
    side = -(-max(height, width) // MOST_PIXELS)
    if side == 1:
        return image
    high, wide = max(1, height // side), max(1, width // side)
    whole = image[: high * side, : wide * side]
    tall, broad = min(side, height), min(side, width)
    means = whole.reshape(high, tall, wide, broad, channels).mean(axis=(1, 3))
    return np.asarray(means, dtype=np.float64)
