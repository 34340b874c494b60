"""A codec in words, as scripts, traces and messages name it: `qsgd levels=7 norm=l2`.

A codec that is biased has error feedback unless the words say `error-feedback=false`; any other may be given it with
`error-feedback`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.codecs import CODECS, Codec, codec_class, make_codec
from paceline.lookup import unknown

if TYPE_CHECKING:
    import torch

FEEDBACK = "error-feedback"


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings that a codec has, with their defaults.

    >>> settings_of("top-k")
    {'fraction': 0.01}
    """
    parameters = inspect.signature(codec_class(name)).parameters.values()
    return {each.name: each.default for each in parameters if type(each.default) in (int, float, str)}


def parse_codec(text: str) -> Codec:
    """Return the codec that a text names.

    >>> parse_codec("qsgd levels=3"), parse_codec("one-bit")
    (QSGD(levels=3, bucket=512, norm='max', lossless='packed'), ErrorFeedback(OneBit()))
    >>> parse_codec("qsgd levels=many")
    Traceback (most recent call last):
    ValueError: levels of codec 'qsgd' must be a number (levels=many)
    >>> parse_codec("qsgd, levels=3")
    Traceback (most recent call last):
    ValueError: spaces separate a codec's name and its settings, not commas: 'qsgd levels=3' (codec='qsgd, levels=3')
    """
    if "," in text:
        spaced = " ".join(text.replace(",", " ").split())
        raise ValueError(f"spaces separate a codec's name and its settings, not commas: {spaced!r} (codec={text!r})")
    name, *words = text.split() or [""]
    given = dict(_setting(name, word) for word in words)
    wanted = given.pop(FEEDBACK, None)
    codec = make_codec(name, **given)
    if wanted is False or (wanted is None and not codec.biased):
        return codec
    from paceline.codecs.error_feedback import ErrorFeedback

    return ErrorFeedback(codec)


def resolve_codec(codec: Codec | str) -> Codec:
    """Return a codec as it is, or the one that a text names.

    >>> resolve_codec("one-bit")
    ErrorFeedback(OneBit())
    """
    found = parse_codec(codec) if isinstance(codec, str) else codec
    if not all(hasattr(found, part) for part in ("encode", "decode", "fresh", "most_bytes")) or isinstance(found, type):
        raise ValueError(f"codec must be a codec or the name of one (codec={codec!r})")
    return found


def _setting(name: str, word: str) -> tuple[str, Any]:
    key, _, value = word.partition("=")
    known = settings_of(name)
    if key == FEEDBACK:
        if value not in ("", "true", "false"):
            raise ValueError(f"{FEEDBACK} must be true or false ({word})")
        return key, value != "false"
    if key not in known:
        raise unknown(f"setting of codec {name!r}:", key, [*known, FEEDBACK])
    kind = type(known[key])
    try:
        return key, kind(value)
    except ValueError:
        raise ValueError(f"{key} of codec {name!r} must be a number ({key}={value})") from None


def codec_text(name: str, settings: Mapping[str, Any], *, feedback: bool) -> str:
    """Return a text for `parse_codec`: the name, and those settings of this codec that are not its defaults.

    >>> codec_text("qsgd", {"levels": 3, "bucket": 512, "rank": 4}, feedback=False)
    'qsgd levels=3'
    """
    known = settings_of(name)
    chosen = [f"{key}={settings[key]}" for key, default in known.items() if settings.get(key, default) != default]
    if feedback:
        chosen.append(FEEDBACK)
    elif make_codec(name).biased:
        chosen.append(f"{FEEDBACK}=false")
    return " ".join([name, *chosen])


def decoder_of(payload: torch.Tensor) -> Codec:
    """Return a codec that decodes a payload, by the number in its header.

    >>> import torch
    >>> decoder_of(make_codec("one-bit").encode(torch.ones(3)))
    OneBit()
    """
    from paceline.codecs.payload import PayloadError, read_header

    number = read_header(payload).codec
    for name in CODECS:
        codec = make_codec(name)
        if getattr(codec, "NUMBER", None) == number:
            return codec
    raise PayloadError(f"no codec has number {number}")


def inner_of(codec: Codec) -> Codec:
    """Return the codec inside an error feedback; any other codec is returned as it is.

    >>> inner_of(parse_codec("one-bit error-feedback"))
    OneBit()
    """
    inner: Codec = getattr(codec, "codec", codec)
    return inner


def unsendable(codec: Codec) -> str:
    """Return what a vector is that cannot be sent: for others not to be told that a finite number is none.

    >>> unsendable(parse_codec("qsgd")), unsendable(parse_codec("float16"))
    ('not finite', 'not finite, or beyond the 65,504 that float16 carries (bfloat16 has the range of float32),')
    """
    if type(inner_of(codec)).__name__ != "Float16":
        return "not finite"
    return "not finite, or beyond the 65,504 that float16 carries (bfloat16 has the range of float32),"


def text_of(codec: Codec) -> str:
    """Return the text that names a codec.

    >>> text_of(parse_codec("one-bit error-feedback"))
    'one-bit error-feedback'
    """
    inner = inner_of(codec)
    name = next((name for name, kind in CODECS.items() if kind == type(inner).__name__), None)
    if name is None:
        raise ValueError(f"{type(inner).__name__} is in no table; choose from {', '.join(CODECS)}")
    settings = {key: getattr(inner, key) for key in settings_of(name)}
    return codec_text(name, settings, feedback=inner is not codec)
