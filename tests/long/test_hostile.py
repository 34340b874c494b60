"""100,000 altered and made-up payloads for every codec: each is refused, or borne in the memory it may take."""

from __future__ import annotations

import pytest
import torch

from tests.long.hostile import besiege, targets

PAYLOADS = 100_000


@pytest.mark.timeout(900)
@pytest.mark.parametrize("codec", targets(), ids=str)
def test_every_codec_bears_what_an_enemy_sends(codec):
    torch.set_num_threads(1)  # a thread's stack would count as memory that a payload took
    siege = besiege(codec, PAYLOADS)
    assert siege.breaches[:3] == []
    assert siege.refused + siege.decoded == PAYLOADS
    assert siege.refused
