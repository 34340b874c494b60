"""The ranks that average together: a group of their own, what they agree on, and the model they all begin with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from paceline.drivers.collective.common import own_group
from paceline.drivers.collective.exchange import gathered_bytes

DESCRIPTION_BYTES = 4096
REFUSAL_BYTES = 512
MOST_CHARACTERS = 160  # of one thing that is described
GRACE_SECONDS = 30.0  # a wait ends with our error, which names a rank, before it ends with the backend's
_KEPT: list[dist.ProcessGroup] = []


class Meeting:
    """A process group that nothing else uses, of ranks that want the same.

    A rank that refuses to take part says why, and all raise: the others would wait for it.
    """

    def __init__(
        self, given: dist.ProcessGroup | None, timeout_seconds: float, refusal: ValueError | None = None
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
        self.group = own_group(self.ranks, dist.get_backend_config(theirs), timeout_seconds + GRACE_SECONDS)
        self.world = len(self.ranks)
        self._hear_refusals(refusal)

    def _hear_refusals(self, refusal: ValueError | None) -> None:
        ours = str(refusal or "").encode()[:REFUSAL_BYTES].ljust(REFUSAL_BYTES)
        said = gathered_bytes(ours, self.group, _device_of(self.group))
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
        said = gathered_bytes(ours.ljust(DESCRIPTION_BYTES), self.group, device)
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
            dist.broadcast(copied.reshape(-1).view(torch.uint8), self.ranks[0], group=self.group)
            tensor.copy_(copied)

    def leave(self, *, pending: bool) -> None:
        """Take the group down; without waiting for a collective that is still under way."""
        if self.world < dist.get_world_size():
            _KEPT.append(self.group)  # torch names groups of some ranks by their ranks: the next would meet its remains
            return
        if pending and dist.get_backend(self.group) == "gloo":
            _KEPT.append(self.group)  # to let go of it would wait for its threads
        elif pending:
            self.group.abort()
        dist.destroy_process_group(self.group)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a group's messages lie, if no model says it."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _short(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[: MOST_CHARACTERS - 20]}... {hashlib.sha256(text.encode()).hexdigest()[:12]}"
