"""Every block of this page's sections runs, on two ranks."""

from __future__ import annotations

from tests.docs.pages import blocks
from tests.integrations.huggingface.page_job import ours
from tests.integrations.ranks import launch


def test_the_page_runs(tmp_path):
    expected = [code for code in blocks("huggingface.md") if ours(code)]
    assert len(expected) == 6
    for answer in launch("tests.integrations.huggingface.page_job", {"folder": str(tmp_path)}):
        assert len(answer["ran"]) == len(expected)
        assert answer["averages"] >= 1
        assert answer["rounds"] == 4
        assert answer["steps"] == 2
    assert (tmp_path / "runs/mine/checkpoint-4/paceline-averaging-1-of-2.pt").is_file()
    assert (tmp_path / "runs/own/paceline-averaging-1-of-2.pt").is_file()
