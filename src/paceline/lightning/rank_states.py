"""The states of all ranks, on their way into the one checkpoint file that rank 0 writes.

    rank 0   state ───────────────┐
    rank 1   state ── bytes ──────┤ one rank after the other, in pieces
    rank 2   state ── bytes ──────┘
                                  └──> checkpoint[...] = {"ranks": 3, "states": [state, state, state]}

Lightning asks every rank for a checkpoint and writes rank 0's. That is enough where all ranks are equal; what a codec
has held back, the momenta of ranks that train alone, and how far a sampler was observed are each rank's own.

States are tensors and plain values, and read as such (`weights_only=True`): no rank makes another import code. They
travel on gloo, in a group of their own; rank 0 holds them all, since they become one file, and beside them the bytes
of one. A rank that does not come is named when `timeout_seconds` are over, and one that cannot send makes all raise.
"""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line
from paceline.distributed.agreement import gather_rows, raise_refusals, refusal_text
from paceline.distributed.groups import shared_group
from paceline.distributed.stores import meet_ranks

PIECE_BYTES = 2**26
TIMEOUT_SECONDS = 600.0
PURPOSE = "lightning's checkpoints"
CPU = torch.device("cpu")


def gather_states(state: dict[str, Any], content: str, timeout_seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    """Return every rank's state, on rank 0; {} on the others. All ranks must call it, in the same order.

    >>> gather_states({"steps": 3}, "the codecs' memories")
    {'ranks': 1, 'states': [{'steps': 3}]}
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world == 1:
        return {"ranks": 1, "states": [state]}
    rank, everyone = dist.get_rank(), list(range(world))
    try:
        meet_ranks(everyone, f"save {content}", purpose=PURPOSE, timeout_seconds=timeout_seconds)
        group = shared_group([everyone], everyone, "gloo", timeout_seconds, purpose=PURPOSE)
        if group is None:
            raise RankGoneError(f"rank {rank} is in no group")  # it is in that of all ranks
        return _gather(state, content, group, rank, world)
    except RuntimeError as error:
        raise RankGoneError(
            f"rank {rank} waited to save {content} of all {world} ranks, and not all came (it waits for "
            f"{timeout_seconds:g} s at most; every rank must call trainer.save_checkpoint): {first_line(error)}"
        ) from error


def state_of(saved: dict[str, Any], rank: int, world: int) -> dict[str, Any] | None:
    """Return this rank's state among those that `gather_states` has put together; None if they are of other ranks.

    >>> state_of({"ranks": 2, "states": [{"steps": 3}, {"steps": 4}]}, rank=1, world=2)
    {'steps': 4}
    >>> state_of({"ranks": 2, "states": [{"steps": 3}, {"steps": 4}]}, rank=1, world=3)
    """
    if saved["ranks"] != world or len(saved["states"]) != world:
        return None
    state: dict[str, Any] = saved["states"][rank]
    return state


def _gather(state: dict[str, Any], content: str, group: dist.ProcessGroup, rank: int, world: int) -> dict[str, Any]:
    payload, refusal = torch.empty(0, dtype=torch.uint8), None
    if rank:
        try:
            payload = _encoded(state)
        except Exception as error:  # the others must hear of it, whatever it is: they would wait
            refusal = error
    rows = _compare(refusal, group, content, {"bytes": payload.numel()})
    states = [state]
    if rank:
        _send(payload, group)
    for other in range(1, world if not rank else 1):
        payload = _receive(other, rows[other]["bytes"], group)
        try:
            states.append(_decoded(payload))
        except Exception as error:  # the next rank waits to send all the same
            refusal = refusal or error
    _compare(refusal, group, content, {})
    return {"ranks": world, "states": states} if not rank else {}


def _compare(
    refusal: Exception | None, group: dist.ProcessGroup, content: str, words: dict[str, Any]
) -> list[dict[str, Any]]:
    rows = gather_rows(words | {"refusal": "" if refusal is None else refusal_text(refusal)}, group, CPU)
    sentence = f"{{who}} cannot save {content}: {{refusal}}"
    raise_refusals([row["refusal"] for row in rows], ours=refusal, sentence=sentence)
    return rows


def _encoded(state: dict[str, Any]) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _send(payload: torch.Tensor, group: dist.ProcessGroup) -> None:
    for piece in torch.split(payload, PIECE_BYTES):
        dist.send(piece, 0, group=group)


def _receive(rank: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    payload = torch.empty(size, dtype=torch.uint8)
    for piece in torch.split(payload, PIECE_BYTES):
        dist.recv(piece, rank, group=group)
    return payload


def _decoded(payload: torch.Tensor) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(io.BytesIO(payload.numpy().data), map_location="cpu", weights_only=True)
    return loaded
