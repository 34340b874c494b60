"""The sum of as many vectors as there are ranks, added up in one process as an all-reduce of so many adds them up.

Where numbers are rounded the order of a sum shows, and the order of an all-reduce is gloo's own: with four ranks, two
thirds of the elements are what a sum in the order of the ranks gives. So gloo itself adds them up here: every vector
belongs to a group of its own, and all groups are in this process. It is the same to the last bit as between processes.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 300.0


class LocalSum:
    """Adds up one vector for each of so many ranks, in the order of gloo's all-reduce.

    It is closed before the interpreter ends: gloo's threads that outlive it end the process with SIGABRT.

    >>> with LocalSum(2) as ranks:
    ...     ranks.add_up([torch.tensor([1.0]), torch.tensor([2.0])])
    tensor([3.])
    """

    def __init__(self, ranks: int) -> None:
        self._groups: list[Any] = []
        if ranks > 1:
            store, timeout = dist.HashStore(), datetime.timedelta(seconds=TIMEOUT_SECONDS)  # type: ignore[attr-defined]
            with ThreadPoolExecutor(ranks) as threads:  # each waits for the others to come
                made = threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, ranks, timeout), range(ranks))
                self._groups = list(made)

    def add_up(self, vectors: Sequence[torch.Tensor], *, largest: bool = False) -> torch.Tensor:
        """Return the sum of the ranks' vectors, or the largest of each element; all of them are overwritten with it."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        given = zip(self._groups, vectors, strict=bool(self._groups))
        pending = [group.allreduce([vector], options) for group, vector in given]
        for work in pending:
            work.wait()
        return vectors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._groups.clear()
