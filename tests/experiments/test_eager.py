"""The eager codecs that ours are timed against do the same work: a race against less would be no race."""

from __future__ import annotations

import torch

from experiments.timings.codecs import EagerOneBit, EagerQSGD
from paceline.codecs import QSGD, OneBit


def test_eager_one_bit_is_one_bit() -> None:
    vector = torch.randn(5003, generator=torch.Generator().manual_seed(1))
    ours = OneBit().decode(OneBit().encode(vector))
    elements, means, packed = EagerOneBit().encode(vector)
    assert packed.numel() == -(-5003 // 8)
    torch.testing.assert_close(EagerOneBit().decode((elements, means, packed)), ours)


def test_eager_qsgd_is_qsgd_up_to_chance() -> None:
    vector = torch.randn(5003, generator=torch.Generator().manual_seed(1))
    elements, norms, packed = EagerQSGD().encode(vector)
    assert packed.numel() + 4 * norms.numel() <= QSGD().most_bytes(5003) + 512
    sent = EagerQSGD().decode((elements, norms, packed))
    ours = QSGD().decode(QSGD().encode(vector))
    step = norms.repeat_interleave(512)[:5003] / 7
    assert torch.all((sent - vector).abs() <= step * 1.0001)  # one of the two neighbours on the grid, as ours is
    assert torch.all((ours - vector).abs() <= step * 1.0001)
    levels = sent / step
    torch.testing.assert_close(levels, levels.round())
