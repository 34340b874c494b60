"""Every block of the sections on codecs and pruning runs, on two ranks."""

from __future__ import annotations

from tests.integrations.huggingface.parts_page_job import code_of_sections
from tests.integrations.ranks import launch


def test_the_sections_run(tmp_path):
    expected = len(code_of_sections())
    assert expected == 5
    for answers in launch("tests.integrations.huggingface.parts_page_job", {"folder": str(tmp_path)}):
        compressed, loop, info, fine, own_losses = answers
        assert compressed["steps"] == 24
        assert compressed["figures"]["sent_bytes"] > 0
        assert loop["figures"]["steps"] == 3
        assert fine["steps"] == 22
        for pruned in (info, own_losses):
            assert 12 < pruned["steps"] < 24
            assert pruned["figures"]["pruned_share_of_all"] > 0
