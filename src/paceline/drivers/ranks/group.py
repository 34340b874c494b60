"""The ranks that train one model together: a group of their own, what they agree on, and the model they all begin with.

Averaging (HPSGD and its family) and rounds (LGC and its family) share it. Errors say what the ranks were about to do
(`Purpose`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line
from paceline.distributed.agreement import gather_rows, raise_difference, raise_refusals, refusal_text, short_text
from paceline.distributed.collectives import PendingCollective, start_gather
from paceline.distributed.groups import close_group, make_group
from paceline.errors import PacelineError

DESCRIPTION_BYTES = 4096
GRACE_SECONDS = 30.0  # a wait ends with our error, which names a rank, before it ends with the backend's


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

    A rank that refuses to take part says why, and all raise: the others would wait for it.
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
        with self._beginning():
            config = dist.get_backend_config(theirs)
            self._group = make_group(self.ranks, config, timeout_seconds + GRACE_SECONDS)
            words = {"refusal": "" if refusal is None else refusal_text(refusal)}
            on_gpu = dist.get_backend(self.group) == "nccl"  # where a row must lie, as no model says it
            gathered = gather_rows(words, self.group, torch.device("cuda" if on_gpu else "cpu"))
        refusals = [each["refusal"] for each in gathered]
        if any(refusals):
            self.close(pending=False)
        raise_refusals(
            refusals, ours=refusal, names=self._names, sentence=f"{{who}} cannot {purpose.verb}: {{refusal}}"
        )

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, until this rank closes it."""
        if self._group is None:
            raise RankGroupError(f"this rank has left its {self._purpose.noun} group")
        return self._group

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[None]:
        """Say who waited, and for how long, where the ranks do not all come to the beginning."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self.close(pending=False)
            waited_seconds, noun = time.monotonic() - began, self._purpose.noun
            waited = f"waited {waited_seconds:.0f} s for all ranks to begin {noun}"
            if waited_seconds < 1:
                waited = f"cannot begin {noun} with the others"
            raise RankGoneError(f"rank {self.rank} {waited}: {first_line(error)}") from error

    def agree(self, description: Mapping[str, str], device: torch.device) -> str:
        """Refuse ranks that describe themselves differently; return a name for these ranks' work that no other has."""
        ours = {key: short_text(text) for key, text in description.items()}
        with self._beginning():
            words = {"same": ours, "name": os.urandom(8).hex()}
            gathered = gather_rows(words, self.group, device, DESCRIPTION_BYTES)
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
                dist.broadcast(copied.reshape(-1).view(torch.uint8), self.ranks[0], group=self.group)
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
