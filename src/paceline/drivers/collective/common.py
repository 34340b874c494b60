"""What the hook and the averages have in common: codecs by name, groups of their own, and words for errors."""

from __future__ import annotations

import datetime
import re

import torch.distributed as dist

from paceline.codecs import Codec
from paceline.codecs.naming import parse_codec


def codec_of(codec: Codec | str) -> Codec:
    """A codec, or the one that words name.

    >>> codec_of("one-bit")
    ErrorFeedback(OneBit())
    """
    found = parse_codec(codec) if isinstance(codec, str) else codec
    if not all(hasattr(found, part) for part in ("encode", "decode", "fresh", "most_bytes")) or isinstance(found, type):
        raise ValueError(f"codec must be a codec or the name of one (codec={codec!r})")
    return found


class RankGoneError(ConnectionError, RuntimeError):
    """A rank that the others need is gone, has left, or does not come.

    >>> raise RankGoneError("rank 2 is gone: not heard of for 15 s")
    Traceback (most recent call last):
    paceline.drivers.collective.common.RankGoneError: rank 2 is gone: not heard of for 15 s
    """


def described(thing: object) -> str:
    """What its repr says, without where it lies in memory: that says nothing about it.

    >>> described(codec_of("top-k fraction=0.5"))
    'ErrorFeedback(TopK(fraction=0.5))'
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(thing))


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type if it says nothing.

    >>> first_line(ValueError("no such rank\\nand a trace back"))
    'no such rank'
    """
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def own_group(ranks: list[int], backend: str, timeout_seconds: float) -> dist.ProcessGroup:
    """A process group of these ranks that nothing else uses; all of them must come here.

    `backend` is a name, or what torch calls a backend's config: "cpu:gloo,cuda:nccl".
    """
    kinds = {part.split(":")[-1] for part in backend.split(",")}
    backend = kinds.pop() if len(kinds) == 1 else backend  # torch warns of every group that is named by a config
    among_others = len(ranks) < dist.get_world_size()  # those do not come here, and are not waited for
    timeout = datetime.timedelta(seconds=timeout_seconds)
    group = dist.new_group(ranks, timeout, backend, use_local_synchronization=among_others)
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError(f"rank {dist.get_rank()} is not among the ranks of this group ({ranks})")
    return group
