"""The states of all ranks reach rank 0 whole, and where one cannot be sent or read, all ranks raise."""

from __future__ import annotations

import os

import pytest

from tests.integrations.ranks import launch


class Odd:
    """Nothing that a checkpoint read with weights_only=True may hold."""


def job(kind):
    import torch
    import torch.distributed as dist

    from paceline.lightning import rank_states

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    rank_states.PIECE_BYTES = 1000
    state = {"rank": rank, "values": torch.full((1000 * (rank + 1),), float(rank)), "nested": [{"a": (1, 2.5, "b")}]}
    if rank == 1 and kind != "plain":
        state["odd"] = Odd() if kind == "odd" else (each for each in ())
    if rank == 2 and kind == "missing":
        return None
    try:
        found = rank_states.gather_states(state, "the states", 3.0 if kind == "missing" else 60.0)
    except Exception as error:
        return [type(error).__name__, str(error)]
    if rank:
        return found
    values = [each["values"] for each in found["states"]]
    numbers = [
        [each["rank"], len(value), value.sum().item()] for each, value in zip(found["states"], values, strict=True)
    ]
    return [found["ranks"], numbers, rank_states.state_of(found, 2, 3)["nested"] == [{"a": (1, 2.5, "b")}]]


def test_rank_0_has_the_states_of_all():
    found = launch(__name__, {"kind": "plain"}, world=3)
    assert found == [[3, [[0, 1000, 0.0], [1, 2000, 2000.0], [2, 3000, 6000.0]], True], {}, {}]


@pytest.mark.parametrize("kind", ["odd", "generator"])
def test_what_one_cannot_send_or_rank_0_not_read_all_refuse(kind):
    found = launch(__name__, {"kind": kind}, world=3)
    at_fault = 0 if kind == "odd" else 1
    assert all(f"rank {at_fault} cannot save the states" in found[rank][1] for rank in range(3) if rank != at_fault)
    assert ("Odd" if kind == "odd" else "generator") in found[at_fault][1]


def test_a_rank_that_does_not_come_is_not_waited_for_without_end():
    found = launch(__name__, {"kind": "missing"}, world=3)
    assert found[2] is None
    assert found[0][0] == found[1][0] == "RankGoneError"
    assert "every rank must call trainer.save_checkpoint" in found[0][1]
    assert all("waited 3 s for rank 2 to save the states" in found[rank][1] for rank in (0, 1))
