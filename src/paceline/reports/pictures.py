"""Images as small PNG files inside a page, written by hand: a header, zlib, and three checksums.

    array, normalised somehow  ->  made smaller  ->  rescaled to 0..255, by channel  ->  PNG  ->  data:image/png,...

An image is grey (height, width) or (1, height, width), or colour (3, height, width); channels may come last as well.
Anything else is no image, and a page shows its number instead.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_PIXELS = 40  # along a side; larger images are averaged down, so that a page of 200 stays small
GREY, COLOUR = 0, 2  # as PNG numbers them


def data_uris(images: Mapping[int, NDArray[Any]]) -> dict[int, str]:
    """Images of one data set, by number, as addresses that hold the image; empty where they are none.

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
    return {number: _uri(np.rint((image - low) / span * 255).astype(np.uint8)) for number, image in known.items()}


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file of bytes [height, width, 1 or 3].

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


def _uri(pixels: NDArray[np.uint8]) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"


def _height_width_channels(image: NDArray[Any]) -> NDArray[np.float64] | None:
    if image.ndim == 2:
        image = image[:, :, None]
    elif image.ndim == 3 and image.shape[0] in (1, 3):
        image = image.transpose(1, 2, 0)
    if image.ndim != 3 or image.shape[2] not in (1, 3) or 0 in image.shape or image.dtype.kind not in "biuf":
        return None
    return np.nan_to_num(image.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def _smaller(image: NDArray[np.float64]) -> NDArray[np.float64]:
    """Squares of pixels become their mean, until no side is longer than `MOST_PIXELS`."""
    height, width, channels = image.shape
    side = -(-max(height, width) // MOST_PIXELS)
    if side == 1:
        return image
    high, wide = max(1, height // side), max(1, width // side)
    whole = image[: high * side, : wide * side]
    tall, broad = min(side, height), min(side, width)
    means = whole.reshape(high, tall, wide, broad, channels).mean(axis=(1, 3))
    return np.asarray(means, dtype=np.float64)
