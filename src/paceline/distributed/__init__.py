"""What all code on torch.distributed shares: averaging, pipelines, DDP's codec hook and pruning.

    groups        the one place that makes process groups, each with a timeout
    collectives   asynchronous all-gathers; all-gathers of encoded gradients (payloads), bucket by bucket
    stores        all-gathers of small JSON values through the store, which name missing ranks
    agreement     all ranks agree, or all ranks raise
    local_sum     a sum of as many vectors as there are ranks, to the bit as their all-reduce gives it, in one process

Errors here name a rank: a collective of the backend that waits for a dead rank does not say for whom it waits.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import PacelineError


class RankGoneError(PacelineError, ConnectionError, RuntimeError):
    """A rank that the others need is gone, has left, or does not come.

    >>> raise RankGoneError("rank 2 is gone: not heard of for 15 s")
    Traceback (most recent call last):
    paceline.distributed.RankGoneError: rank 2 is gone: not heard of for 15 s
    """


def name_ranks(ranks: Iterable[int]) -> str:
    """Return some ranks as words for an error.

    >>> name_ranks([1, 3])
    'rank 1 and rank 3'
    """
    return " and ".join(f"rank {rank}" for rank in ranks)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has no text.

    >>> first_line(ValueError("no such rank\\nand a trace back"))
    'no such rank'
    """
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def check_limits(**limits: float) -> None:
    """Refuse time limits that are not positive and finite.

    >>> check_limits(timeout_seconds=0.0)
    Traceback (most recent call last):
    ValueError: timeout_seconds must be above 0 and finite (timeout_seconds=0.0)
    """
    for name, value in limits.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be above 0 and finite ({name}={value})")
