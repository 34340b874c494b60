"""The ranks that train one model together: a group of their own, what they agree on, and the model they all begin with.

Averaging (HPSGD and its family) and rounds (LGC and its family) share it. Errors say what the ranks were about to do
(`Purpose`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line
from paceline.distributed.agreement import gather_rows, raise_difference, raise_refusals, refusal_text, short_text
from paceline.distributed.collectives import PendingCollective, start_gather
from paceline.distributed.groups import close_group, make_group
from paceline.distributed.stores import meet_ranks
from paceline.errors import PacelineError

DESCRIPTION_BYTES = 4096
GRACE_SECONDS = 30.0  # of collectives alone: a wait ends with our error, which names a rank, before the backend's
DEFAULT_SECONDS = 600.0  # for a rank whose own limit is none
ANSWER_SECONDS = 2.0  # within which a rank that lives says so, where not all have come to the end of a beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """What ranks do together, in the words of errors.

    >>> f"rank 1 cannot {AVERAGING.verb}; it did not come to {AVERAGING.unit} 7"
    'rank 1 cannot average; it did not come to average 7'
    """

    verb: str
    noun: str
    unit: str


AVERAGING = Purpose(verb="average", noun="averaging", unit="average")
ROUNDS = Purpose(verb="take rounds", noun="rounds", unit="round")


class RankGroupError(PacelineError, RuntimeError):
    """The ranks have no process group to train in.

    >>> raise RankGroupError("averaging needs a process group, and none is initialised")
    Traceback (most recent call last):
    paceline.drivers.ranks.group.RankGroupError: averaging needs a process group, and none is initialised
    """


class RankGroup:
    """A process group that nothing else uses, of ranks that want the same.

    A rank that refuses to take part says why, and all raise: the others would wait for it. The ranks meet in the store
    before they make the group, and a rank that does not come in `timeout_seconds` is named.
    """

    def __init__(
        self,
        given: dist.ProcessGroup | None,
        timeout_seconds: float,
        refusal: Exception | None = None,
        *,
        purpose: Purpose = AVERAGING,
    ) -> None:
        self._purpose = purpose
        if not (dist.is_available() and dist.is_initialized()):
            raise refusal or RankGroupError(
                f"{purpose.noun} needs a process group, and none is initialised: start the script with "
                "`torchrun --nproc-per-node 2 script.py`, and call torch.distributed.init_process_group() in it"
            )
        theirs = given or dist.group.WORLD
        self.ranks = dist.get_process_group_ranks(theirs)
        self.rank, self.world = dist.get_rank(), len(self.ranks)
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not in process_group (it has {self.ranks})")
        self._names = [f"rank {rank}" for rank in self.ranks]
        self._group: dist.ProcessGroup | None = None
        limited = isinstance(timeout_seconds, int | float) and 0 < timeout_seconds < float("inf")
        self._timeout_seconds = timeout_seconds if limited else DEFAULT_SECONDS  # which this rank refuses
        refusals = self._meet("" if refusal is None else refusal_text(refusal), self._timeout_seconds)
        raise_refusals(
            refusals, ours=refusal, names=self._names, sentence=f"{{who}} cannot {purpose.verb}: {{refusal}}"
        )
        with self._beginning():
            config = dist.get_backend_config(theirs)
            self._group = make_group(self.ranks, config, self._timeout_seconds, grace_seconds=GRACE_SECONDS)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, until this rank closes it."""
        if self._group is None:
            raise RankGroupError(f"this rank has left its {self._purpose.noun} group")
        return self._group

    def _meet(self, words: str, timeout_seconds: float) -> list[str]:
        """Wait for all ranks, and return the words of each."""
        return meet_ranks(
            self.ranks, f"begin {self._purpose.noun}", words, purpose="train", timeout_seconds=timeout_seconds
        )

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[None]:
        """Name the rank that was there when the ranks met, and is gone, or stopped, before they have begun."""
        try:
            yield
        except RuntimeError as error:
            self.close(pending=True)
            if isinstance(error, PacelineError):
                raise
            why = f"rank {self.rank} cannot begin {self._purpose.noun} with the others: {first_line(error)}"
            try:
                self._meet(why, ANSWER_SECONDS)
            except RankGoneError as gone:
                why = f"{gone} ({why})"
            raise RankGoneError(why) from error

    def _finish(self, work: Any, device: torch.device) -> None:
        """Wait for a collective of the beginning no longer than was asked for: the group itself waits longer."""
        pending = PendingCollective(work, device)
        pending.wait(self._timeout_seconds)
        if not pending.done():
            raise RuntimeError(f"not all ranks have answered in {self._timeout_seconds:g} s")
        pending.check()

    def agree(self, description: Mapping[str, str], device: torch.device) -> str:
        """Refuse ranks that describe themselves differently; return a name for these ranks' work that no other has."""
        ours = {key: short_text(text) for key, text in description.items()}
        with self._beginning():
            words = {"same": ours, "name": os.urandom(8).hex()}
            gathered = gather_rows(words, self.group, device, DESCRIPTION_BYTES, finish=self._finish)
        raise_difference(
            [each["same"] for each in gathered],
            f"all ranks must {self._purpose.verb} alike: "
            + "the {key} of {who} is {theirs}, and that of {other} is {ours}",
            names=self._names,
            reference=self.ranks.index(self.rank),
        )
        return str(gathered[0]["name"])

    @torch.no_grad()
    def begin_equal(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every rank the first rank's values, byte for byte."""
        for tensor in tensors:
            if self.world == 1 or not tensor.numel():
                continue
            copied = tensor.detach().clone(memory_format=torch.contiguous_format)
            with self._beginning():
                flat = copied.reshape(-1).view(torch.uint8)
                work = dist.broadcast(flat, self.ranks[0], group=self.group, async_op=True)
                self._finish(work, tensor.device)
            tensor.copy_(copied)

    # -- collectives between averages ----------------------------------------------------------------------------------

    def start_broadcast(self, vector: torch.Tensor, place: int) -> PendingCollective:
        """Start to give every rank what the rank at this place has in `vector`."""
        work = dist.broadcast(vector, self.ranks[place], group=self.group, async_op=True)
        return PendingCollective(work, vector.device)

    def start_numbers(self, numbers: Sequence[int], device: torch.device) -> tuple[torch.Tensor, Any]:
        """Start to gather every rank's numbers; return where they will be, and the work."""
        return start_gather(torch.tensor(list(numbers), dtype=torch.int64, device=device), self.group)

    def close(self, *, pending: bool) -> None:
        """Take the group down, without waiting for a collective that is still `pending`."""
        group, self._group = self._group, None
        if group is not None:
            close_group(group, pending=pending)
