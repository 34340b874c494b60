"""The ranks that average together: a group of their own, what they agree on, and the model they all begin with."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line
from paceline.distributed.collectives import PendingCollective, gather_bytes, start_gather
from paceline.distributed.groups import make_group

DESCRIPTION_BYTES = 4096
REFUSAL_BYTES = 512
MOST_CHARACTERS = 160  # of one thing that is described; there are fewer than ten, and JSON may double them
GRACE_SECONDS = 30.0  # a wait ends with our error, which names a rank, before it ends with the backend's


class Meeting:
    """A process group that nothing else uses, of ranks that want the same.

    A rank that refuses to take part says why, and all raise: the others would wait for it.
    """

    def __init__(
        self, given: dist.ProcessGroup | None, timeout_seconds: float, refusal: Exception | None = None
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise refusal or RuntimeError(
                "averaging needs a process group, and none is initialised: start the script with "
                "`torchrun --nproc-per-node 2 script.py`, and call torch.distributed.init_process_group() in it"
            )
        theirs = given or dist.group.WORLD
        self.ranks = dist.get_process_group_ranks(theirs)
        self.rank = dist.get_rank()
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not in process_group (it has {self.ranks})")
        self.world = len(self.ranks)
        self._apart = self.world < dist.get_world_size()
        self._group: dist.ProcessGroup | None = None
        with self._beginning():
            config = dist.get_backend_config(theirs)
            self._group = make_group(self.ranks, config, timeout_seconds + GRACE_SECONDS)
            self._backend = dist.get_backend(self._group)
        self._hear_refusals(refusal)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, until this rank leaves."""
        if self._group is None:
            raise RuntimeError("this rank has left the meeting")
        return self._group

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[None]:
        """Say who waited, for how long and for what, where the ranks do not come to the beginning."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self.leave(pending=False)
            waited_seconds = time.monotonic() - began
            raise RankGoneError(
                f"rank {self.rank} waited {waited_seconds:.0f} s for all ranks to begin averaging: {first_line(error)}"
            ) from error

    def _hear_refusals(self, refusal: Exception | None) -> None:
        ours = "" if refusal is None else str(refusal).strip() or type(refusal).__name__
        with self._beginning():
            told = ours.encode()[:REFUSAL_BYTES].ljust(REFUSAL_BYTES)
            said = gather_bytes(told, self.group, _device_of(self._backend))
        refused = {rank: text.decode(errors="replace").strip() for rank, text in zip(self.ranks, said, strict=True)}
        if not any(refused.values()):
            return
        self.leave(pending=False)
        if refusal is not None:
            raise refusal
        rank, text = next((rank, text) for rank, text in refused.items() if text)
        raise ValueError(f"rank {rank} cannot average: {text}")

    def agree(self, description: Mapping[str, str], device: torch.device) -> str:
        """Refuse ranks that describe themselves differently; a name for this meeting that no other has."""
        told = {key: _short(text) for key, text in description.items()}
        ours = json.dumps({**told, "meeting": os.urandom(8).hex()}).encode()
        with self._beginning():
            said = gather_bytes(ours.ljust(DESCRIPTION_BYTES), self.group, device)
        every = [json.loads(each) for each in said]
        for rank, theirs in zip(self.ranks, every, strict=True):
            for key, text in told.items():
                if theirs.get(key) != text:
                    raise ValueError(
                        f"all ranks must average alike: the {key} of rank {rank} is {theirs.get(key)}, "
                        f"and that of rank {self.rank} is {text}"
                    )
        return str(every[0]["meeting"])

    @torch.no_grad()
    def begin_equal(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give everybody the first rank's values, byte for byte."""
        for tensor in tensors:
            if self.world == 1 or not tensor.numel():
                continue
            copied = tensor.detach().clone(memory_format=torch.contiguous_format)
            with self._beginning():
                dist.broadcast(copied.reshape(-1).view(torch.uint8), self.ranks[0], group=self.group)
            tensor.copy_(copied)

    # -- between averages ------------------------------------------------------------------------------------------

    def start_broadcast(self, vector: torch.Tensor, place: int) -> PendingCollective:
        """Start to give everybody what the rank at this place has in `vector`."""
        work = dist.broadcast(vector, self.ranks[place], group=self.group, async_op=True)
        return PendingCollective(work, vector.device)

    def start_numbers(self, numbers: Sequence[int], device: torch.device) -> tuple[torch.Tensor, Any]:
        """Start to gather every rank's numbers."""
        ours = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        return start_gather(ours, ours.numel(), self.group)

    # -- the end ---------------------------------------------------------------------------------------------------

    def leave(self, *, pending: bool) -> None:
        """Take the group down; without waiting for a collective that is still under way."""
        group, self._group = self._group, None
        if group is None:
            return
        if pending and self._backend == "gloo":
            _keep_for_ever(group)
        elif pending:
            group.abort()
        if self._apart:
            return  # torch names groups of some ranks by their ranks: the next one would meet the remains of this one
        with contextlib.suppress(ValueError):  # the script has destroyed it already
            dist.destroy_process_group(group)


def _keep_for_ever(group: dist.ProcessGroup) -> None:
    """Let the group's destructor never run, not even as the interpreter ends.

    gloo's waits for the operation under way, for as long as the group's timeout, and then ends the process by SIGABRT.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _device_of(backend: str) -> torch.device:
    """Where a group's messages lie, if no model says it."""
    return torch.device("cuda" if backend == "nccl" else "cpu")


def _short(text: str) -> str:
    """In ASCII, which JSON does not make six times as long; what is cut off is in a digest."""
    plain = text.encode("ascii", "backslashreplace").decode()
    if len(plain) <= MOST_CHARACTERS:
        return plain
    return f"{plain[: MOST_CHARACTERS - 20]}... {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:12]}"
