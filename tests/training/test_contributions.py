"""What ranks contribute adds up to the update that a server would have made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.events import Share, Step
from paceline.strategies import LGC, FastestK, Full
from paceline.strategies.combine import Combiner
from paceline.training.contributions import MessageLayout, RankGradients, VectorPool
from paceline.training.saved_state import SavedStateError
from tests.training.play import play

RANKS = 4
LAYOUT = MessageLayout(gradient=5, buffers=2, flags=3)
SIZES = [2, 2, 1]  # of the parameters, one flag each
ROUND_STRATEGIES = [
    Full(),
    FastestK(k=2),
    LGC(k=1),
    LGC(k=2),
    LGC(k=3, warmup_rounds=2),
    LGC(k=2, scale_partial=False),
    LGC(k=2, scale_partial="samples"),
    LGC(k="auto"),
]


def message_of(rank, version):
    """A gradient in which a parameter may be missing, and what the batch changed in the buffers."""
    generator = torch.Generator().manual_seed(97 * version + rank)
    flags = (torch.rand(3, generator=generator) < 0.6).to(torch.float64)
    gradient = torch.randn(5, generator=generator, dtype=torch.float64)
    gradient *= flags.repeat_interleave(torch.tensor(SIZES))
    return torch.cat([gradient, torch.randn(2, generator=generator, dtype=torch.float64), flags])


def ranks_of(count=RANKS, *, compensates=True):
    """Ranks whose vectors have been used before, for something that must not show."""
    pools = [VectorPool(LAYOUT.size, torch.float64, torch.device("cpu")) for _ in range(count)]
    for pool in pools:
        pool.give(torch.full((LAYOUT.size,), float("nan"), dtype=torch.float64))
    return [RankGradients(rank, LAYOUT, pool, compensates=compensates) for rank, pool in enumerate(pools)]


@pytest.mark.parametrize("strategy", ROUND_STRATEGIES, ids=str)
@settings(max_examples=40)
@given(st.binary(min_size=10, max_size=60))
def test_the_sum_of_all_contributions_is_the_update_of_a_server(strategy, drawn):
    ranks, combiner = ranks_of(compensates=isinstance(strategy, LGC)), Combiner()
    for step in play(strategy, drawn, ranks, message_of):
        shares = (*step.fresh, *step.late)
        expected = combiner.update(step, lambda share: LAYOUT.gradient_of(message_of(share.worker, share.version)))
        total = sum(rank.contribute(step) for rank in ranks)
        torch.testing.assert_close(LAYOUT.gradient_of(total), expected, rtol=1e-12, atol=1e-12)
        changes = [LAYOUT.buffers_of(message_of(share.worker, share.version)) for share in shares]
        torch.testing.assert_close(LAYOUT.buffers_of(total), torch.stack(changes).mean(0), rtol=1e-12, atol=1e-12)
        has = LAYOUT.flags_of(total).repeat_interleave(torch.tensor(SIZES)) != 0
        assert not expected[~has].any(), "a parameter without a flag gets no update, and needs none"
        needed = sum(LAYOUT.flags_of(message_of(share.worker, share.version)) for share in shares)
        assert torch.equal(LAYOUT.flags_of(total) != 0, needed != 0) or step.previous_mean_weight
        assert all(len(rank._kept) <= 3 for rank in ranks)


@pytest.mark.parametrize(
    "strategy", [LGC(k=2), LGC(k=2, scale_partial=False), LGC(k=2, scale_partial="samples")], ids=str
)
@settings(max_examples=20)
@given(st.binary(min_size=20, max_size=60), st.integers(0, 8))
def test_ranks_go_on_from_a_state_with_the_same_bits(strategy, drawn, after):
    ranks = ranks_of()
    for number, step in enumerate(play(strategy, drawn, ranks, message_of)):
        others = ranks_of()
        for rank, other in zip(ranks, others, strict=True):
            other.load_state_dict(rank.state_dict())
        for rank, other in zip(ranks, others, strict=True):
            assert torch.equal(rank.contribute(step), other.contribute(step))
        if number == after:
            ranks[:] = others


def test_vectors_are_used_again_and_a_state_shares_no_memory_with_them():
    (mine,) = ranks_of(1)
    mine.keep(0, message_of(0, 0))
    state = mine.state_dict()
    (other,) = ranks_of(1)
    other.load_state_dict(state)
    for ours in (mine, other):
        ours._kept[0].fill_(7.0)
    assert torch.equal(state["kept"]["0"], message_of(0, 0))


def test_a_gradient_that_was_not_kept_is_named():
    (mine,) = ranks_of(1)
    with pytest.raises(KeyError, match="the gradient of round 3, which rank 0 has not kept"):
        mine.contribute(Step(version=3, fresh=(Share(worker=0, version=3, weight=1.0),)))


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"kept": {"0": torch.zeros(3)}, "before": []}, SavedStateError),
        ({"kept": {"0": torch.full((10,), float("nan"), dtype=torch.float64)}, "before": []}, SavedStateError),
        ({"kept": {}, "before": [4, 0.5]}, ValueError),
        ({"kept": {}, "before": [4, 7.5]}, ValueError),
        ({"kept": {"-1": torch.zeros(10, dtype=torch.float64)}, "before": []}, ValueError),
    ],
)
def test_a_senseless_state_is_refused_and_changes_nothing(state, error):
    (mine,) = ranks_of(1)
    mine.keep(2, message_of(0, 2))
    before = mine.state_dict()
    with pytest.raises(error):
        mine.load_state_dict(state)
    assert mine.state_dict()["before"] == before["before"]
    assert list(mine.state_dict()["kept"]) == ["2"]
