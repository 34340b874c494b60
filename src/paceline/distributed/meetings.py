"""Meetings: all ranks of a group come together, compare numbers or add them up, and go on.

Ranks meet in a group on gloo that is made for one purpose, so nothing else that the script sends comes in between.
Every meeting has a deadline, and an error names the ranks that did not come.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.distributed.agreement import gather_rows, raise_difference
from paceline.distributed.groups import shared_group
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as ProcessGroup  # for those who may not import torch.distributed


class MeetingTimeoutError(PacelineError, TimeoutError):
    """Not all ranks have come to a meeting in time."""


def current_group(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """Return `group`, or else the group of all ranks; None as long as torch.distributed has no process group.

    >>> current_group() is None
    True
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    return group if group is not None else dist.group.WORLD


class Meetings:
    """The meetings of the ranks of `group` for one purpose; all of them must come to each meeting."""

    def __init__(self, group: ProcessGroup, timeout_seconds: float, *, purpose: str) -> None:
        self.of, self._timeout_seconds, self._purpose = group, timeout_seconds, purpose
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group: ProcessGroup | None = None

    def compare(self, moment: str, numbers: Mapping[str, int], *, remedy: str, error: type[Exception]) -> None:
        """Raise `error` on all ranks unless all come with the same numbers."""
        rows = gather_rows(numbers, self._meet(moment), torch.device("cpu"))
        sentence = f"ranks do not agree when they {moment}: {{key}} is {{theirs}} on {{who}}, {{ours}} on {{other}}; "
        raise_difference(rows, sentence + remedy, reference=0, error=error)

    def add_up(self, values: NDArray[np.float32]) -> None:
        """Replace the values by their sum over all ranks, which have just compared numbers."""
        dist.all_reduce(torch.from_numpy(values), group=self._group)

    def _meet(self, moment: str) -> ProcessGroup:
        """Wait for all ranks."""
        try:
            if self._group is None:
                members = dist.get_process_group_ranks(self.of)
                self._group = shared_group([members], members, "gloo", self._timeout_seconds, purpose=self._purpose)
            timeout = timedelta(seconds=self._timeout_seconds)
            dist.monitored_barrier(self._group, timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise MeetingTimeoutError(
                f"rank {self.rank} waited to {moment} in {self._purpose}, and not all ranks came (it waits for "
                f"{self._timeout_seconds:g} s at most): {error}"
            ) from error
        return cast("ProcessGroup", self._group)  # this rank is one of the members
